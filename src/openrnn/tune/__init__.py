"""`openrnn tune`: the table of fastest kernels, and the regions in which cuDNN is faster."""
