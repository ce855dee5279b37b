"""`openrnn bench`: every engine on the rows of its users, checked first, losses included."""
