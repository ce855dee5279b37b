"""cuDNN's random states for dropout: kept from call to call, or begun anew by each.

cuDNN draws masks by its own generator, so they are not those of `philox.py`. The states of a thread
and stream begin with the seed of its first call that drops and go on from there, as TensorFlow kept
them; a seed that the user gave has states of its own. With `reset_dropout_state` every call begins
anew from its seed, which torch's generator draws: then the same generator gives the same masks.
"""

from functools import partial

import torch
from torch import Tensor

from openrnn.backends.base import Call
from openrnn.native.cudnn.descriptors import begin_dropout, dropout_bytes, forget
from openrnn.native.cudnn.handles import Handle
from openrnn.native.device import On

_BACKWARD = -1  # in place of a stream: backward reads the masks from the reserve and draws nothing


def _space(handle: Handle, key: tuple[int, int | None]) -> Tensor:
    states = torch.empty(
        dropout_bytes(handle), dtype=torch.uint8, device=torch.device("cuda", handle.device)
    )
    handle.dropout[key] = states
    handle.closing.append(partial(forget, states.data_ptr()))
    return states


def states_of(handle: Handle, call: Call) -> Tensor:
    """The random states for the forward of a call that drops."""
    if call.seed is None:
        raise ValueError("dropout needs a seed")
    seed = int(call.seed[0])
    spec = call.problem.spec
    key = (handle.stream, seed if call.seed_given and not spec.reset_dropout_state else None)
    states = handle.dropout.get(key)
    begin = states is None or spec.reset_dropout_state
    if begin and torch.cuda.is_current_stream_capturing():
        needs = (
            "reset_dropout_state=False" if spec.reset_dropout_state
            else "a call on the stream that captures, before the capture"
        )  # fmt: skip
        raise ValueError(
            "dropout of backend cudnn begins from a seed on the host, with which every replay of "
            f'a CUDA graph would draw the same masks: needs {needs}, or backend="fused"'
        )
    if begin:
        with On(handle.device), torch.inference_mode(False):
            states = _space(handle, key) if states is None else states
            begin_dropout(handle, spec.dropout, states, seed)
    if states is None:
        raise ValueError("dropout found no random states")
    return states


def idle(handle: Handle) -> Tensor:
    """States for a descriptor that will draw nothing."""
    key = (_BACKWARD, None)
    found = handle.dropout.get(key)
    return _space(handle, key) if found is None else found
