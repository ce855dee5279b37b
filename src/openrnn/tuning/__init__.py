"""How a CUDA kernel's configuration is chosen, by values alone: nothing here compiles or runs."""
