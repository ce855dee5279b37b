"""Our CUDA kernels, generated from the cell's trace: the whole time loop in one launch."""

from openrnn.backends.fused.backend import Fused as Fused
