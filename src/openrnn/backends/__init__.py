"""What runs a network: one file a backend, none of which knows another."""
