"""The explicit operators that TensorFlow's CudnnRNN and MXNet's RNN were, on torch tensors.

No autograd: `forward` hands out a reserve, `backward` takes it. Parameters are one flat buffer.
"""

from openrnn.ops.calls import Reserve, Result, forward
from openrnn.ops.gradients import backward
from openrnn.ops.network import canonical_to_params, params_size, params_to_canonical, spec

__all__ = [
    "Reserve",
    "Result",
    "backward",
    "canonical_to_params",
    "forward",
    "params_size",
    "params_to_canonical",
    "spec",
]
