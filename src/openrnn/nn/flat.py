"""Parameters side by side in one buffer on a CUDA device, where cuDNN then reads them as they lie.

They stay separate `nn.Parameter`s; only their memory is shared, without overlap. Nothing depends on
it: parameters that lie elsewhere are packed at each call.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from openrnn.params import slots
from openrnn.spec import Spec


def addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    """Where the plain parameters of a CUDA device lie; empty unless all of them are that."""
    found = []
    for tensor in tensors:
        # subclasses, such as those of distributed tensors, have no memory that is theirs alone
        if type(tensor) is not nn.Parameter or not tensor.is_cuda:
            return []
        found.append(tensor.data_ptr())
    return found


def lay(spec: Spec, named: dict[str, Tensor | None]) -> None:
    """Moves parameters into one new buffer in the order of `params.slots`.

    Those are left alone that are not all plain, of one dtype, on one device and their shape, or
    that lie so already.
    """
    laid = slots(spec)
    tensors = [tensor for slot in laid if (tensor := named.get(slot.name)) is not None]
    if len(tensors) < len(laid) or any(
        tensor.shape != slot.shape for slot, tensor in zip(laid, tensors)
    ):
        return
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        return
    start, size = tensors[0].data_ptr(), tensors[0].element_size()
    if all(
        tensor.data_ptr() == start + (slot.offset - laid[0].offset) * size
        for slot, tensor in zip(laid, tensors)
    ):
        return
    with torch.inference_mode(False), torch.no_grad():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        for slot, tensor in zip(laid, tensors):
            tensor.data = flat.narrow(0, slot.offset, slot.size).view(slot.shape)
