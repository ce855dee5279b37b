"""CUDA kernels: their arguments, and the text of the time loops that generated cells stand in."""
