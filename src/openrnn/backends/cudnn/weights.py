"""cuDNN's weight space: our separate tensors in one flat buffer, in the order of `params.slots`."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from openrnn.memo import memo
from openrnn.params import module_slots, size, slots
from openrnn.spec import Spec

ALIGNED = 16  # bytes: the widest a kernel reads at once


@memo(1024)
def _order(spec: Spec) -> tuple[int, ...]:
    """For each slot of the flat buffer its place among the tensors of a call."""
    indices = {slot.name: index for index, slot in enumerate(module_slots(spec))}
    return tuple(indices[slot.name] for slot in slots(spec))


class _Packed:
    """A packed copy, and by what it is known that it still holds."""

    __slots__ = ("flat", "tensors", "versions")

    def __init__(self, tensors: Sequence[Tensor], flat: Tensor) -> None:
        self.flat = flat
        self.tensors = [weakref.ref(tensor) for tensor in tensors]
        self.versions = [(tensor._version, tensor.data_ptr()) for tensor in tensors]

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        return len(self.tensors) == len(tensors) and all(
            reference() is tensor and version == (tensor._version, tensor.data_ptr())
            for reference, tensor, version in zip(self.tensors, tensors, self.versions)
        )


_kept: dict[tuple[int, int, torch.dtype], _Packed] = {}


def flat(
    spec: Spec, tensors: Sequence[Tensor], stream: int, anew: bool = False
) -> tuple[int, object]:
    """The address of the weight space, and what keeps it alive.

    Nothing is copied where the tensors lie side by side already, as views of one flat buffer do.
    A copy is kept until a tensor is replaced or changed in place. A change through `.data` leaves
    no trace: call `forget()` after one. A forward with gradients packs `anew`, for its backward.
    """
    address = _adjacent(_offsets(spec, tensors[0].element_size()), tensors)
    if address is not None:
        return address, tensors
    key = (id(tensors[0]), stream, tensors[0].dtype)
    # what a graph replays must read the weights of that time
    capturing = torch.cuda.is_current_stream_capturing()
    if not capturing and not anew:
        found = _kept.get(key)
        if found is not None and found.holds(tensors):
            return found.flat.data_ptr(), found.flat
    with torch.no_grad():
        packed = torch.cat([tensors[index].reshape(-1) for index in _order(spec)])
    # tensors of inference mode count no versions
    if not capturing and not any(tensor.is_inference() for tensor in tensors):
        if key not in _kept:
            weakref.finalize(tensors[0], _kept.pop, key, None).atexit = False
        _kept[key] = _Packed(tensors, packed)
    return packed.data_ptr(), packed


def forget() -> None:
    """Drops all packed copies."""
    _kept.clear()


@memo(1024)
def _offsets(spec: Spec, width: int) -> tuple[int, ...]:
    """Where each tensor of a call lies in the flat buffer, in bytes, of numbers this wide."""
    return tuple(slot.offset * width for slot in module_slots(spec))


def _adjacent(offsets: Sequence[int], tensors: Sequence[Tensor]) -> int | None:
    """Where the flat buffer begins, if the tensors lie as in one, or None.

    Whether their storages are one does not matter: the call holds all of them.
    """
    begin: int = tensors[0].data_ptr() - offsets[0]
    if begin % ALIGNED:
        return None
    for offset, tensor in zip(offsets, tensors):
        if tensor.data_ptr() != begin + offset or not tensor.is_contiguous():
            return None
    return begin


def gradients(spec: Spec, like: Tensor) -> Tensor:
    """A zeroed weight space, into which cuDNN adds."""
    return torch.zeros(size(spec), dtype=like.dtype, device=like.device)


@memo(1024)
def _cuts(spec: Spec) -> tuple[list[int], tuple[tuple[int, tuple[int, ...]], ...]]:
    """The sizes of all slots, and for each tensor of a call which slot it is, and its shape."""
    laid = slots(spec)
    indices = {slot.name: index for index, slot in enumerate(laid)}
    rows = tuple((indices[slot.name], slot.shape) for slot in module_slots(spec))
    return [slot.size for slot in laid], rows


def split(spec: Spec, space: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of the tensors of a call, as views of the weight space."""
    sizes, rows = _cuts(spec)
    parts = space.split_with_sizes(sizes)
    return [
        None if not want else parts[index] if len(shape) == 1 else parts[index].view(shape)
        for want, (index, shape) in zip(wanted, rows)
    ]
