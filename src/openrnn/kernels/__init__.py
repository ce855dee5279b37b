"""Kernels: numba's for CPUs in `cpu/`, CUDA C++ in `cuda/`; cells are compiled into both."""
