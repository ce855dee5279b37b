"""Building blocks of the CPU kernels, compiled by numba and called from generated time loops."""
