"""The explicit operators that TensorFlow's CudnnRNN and MXNet's RNN were, on torch tensors.

No autograd: `forward` hands out a reserve, `backward` takes it. Parameters are one flat buffer.
"""

from openrnn.ops.calls import Reserve as Reserve
from openrnn.ops.calls import Result as Result
from openrnn.ops.calls import forward as forward
from openrnn.ops.gradients import backward as backward
from openrnn.ops.network import canonical_to_params as canonical_to_params
from openrnn.ops.network import params_size as params_size
from openrnn.ops.network import params_to_canonical as params_to_canonical
from openrnn.ops.network import spec as spec
