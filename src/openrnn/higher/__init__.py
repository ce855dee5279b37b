"""Second derivatives by the kernels that run any cell: the derivative of a cell is a cell, too."""
