"""Which CUDA kernels, chunks of time and schedules a call takes, and where cuDNN is quicker.

By values alone: nothing here compiles or runs.
"""
