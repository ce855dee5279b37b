"""What a tensor must be before anybody takes its address: dense, of its shape, in its own memory.

Torch has tensors whose memory holds something else than their values, or that have none: with a
lazy sign (`torch._neg_view`), lazily zero, nested, sparse, wrappers by `__torch_dispatch__`, those
of `torch.func`. Their dispatch keys tell them from plain ones. A plain tensor, too, may have lost
its memory or its shape: `parameter.data = other` and `storage.resize_` leave no trace.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

Group = Sequence[Tensor]

_keys: Any = torch._C._dispatch_keys
_raw: Any = torch._C.DispatchKeySet.raw_repr


def _known() -> frozenset[int]:
    """The dispatch keys of plain tensors, of inference mode too, as numbers."""
    every: Any = torch._C.DispatchKey
    known = set()
    for device in ("CPU", "CUDA"):
        found: Any = torch._C.DispatchKeySet(getattr(every, device))
        found = found.add(getattr(every, f"Autocast{device}"))
        known.add(_raw(found))
        found = found.add(every.ADInplaceOrView).add(getattr(every, f"Autograd{device}"))
        known.add(_raw(found))
    return frozenset(known)


PLAIN = _known()


def is_plain(*tensors: Tensor) -> bool:
    """Whether all are tensors of a CPU or CUDA device whose memory holds their values."""
    try:
        for tensor in tensors:
            if _raw(_keys(tensor)) not in PLAIN:
                return False
    except TypeError:  # it is no tensor
        return False
    return True


def check_dense(name: str, tensor: Any) -> None:
    """Raises unless it is a tensor, and neither nested nor sparse nor of another library."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise ValueError(f"{name} must be a dense (strided) tensor, got a {kind.strip('_')} one")


def settled(name: str, tensor: Tensor) -> tuple[Tensor, str]:
    """The tensor with its lazy values computed, and why its address must not be taken.

    The reason is empty for plain tensors and for those that reach no address anyway: of another
    device, of a `torch.func` transform that runs, and of a tracer, which sees an operator.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is not dense.
        RuntimeError: it is an expanded weight.
    """
    if type(tensor).__name__ == "ExpandedWeight":  # which refuses whatever it is asked
        raise RuntimeError(
            f"{name} is an expanded weight of call_for_per_sample_grads, which no recurrent layer "
            "takes: for gradients of each sample use torch.func.vmap of torch.func.grad"
        )
    check_dense(name, tensor)
    if isinstance(tensor, torch.nn.Parameter) and torch._is_functional_tensor(tensor):
        # `parameter.data = wrapper` makes one that no operator of torch can read
        raise ValueError(f"{name} must be a plain parameter, got one whose data is a wrapper's")
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor._is_zerotensor():
        tensor = tensor.clone()
    if is_plain(tensor) or tensor.device.type not in ("cpu", "cuda"):
        return tensor, ""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return tensor, ""
        return tensor, f"{name} belongs to a torch.func transform that has ended"
    if is_traced(tensor):
        return tensor, ""
    kind = f"a {type(tensor).__name__}" if type(tensor) is not Tensor else "a wrapper"
    return tensor, f"{name} is {kind}, which has no memory of its own"


def is_traced(tensor: Tensor) -> bool:
    """Whether it is of those by which torch's compiler and exporter trace."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(tensor, FakeTensor | FunctionalTensor)


def mixed(names: Iterable[str], tensors: Group) -> str:
    """Why no operator takes these tensors: some are fake and others are not; or empty."""
    if all(map(is_plain, tensors)):
        return ""
    from torch._subclasses.fake_tensor import FakeTensor

    named = list(zip(names, tensors))
    fakes = [(name, t) for name, t in named if isinstance(t, FakeTensor)]
    real = [name for name, tensor in named if not isinstance(tensor, FakeTensor)]
    if not fakes or not real or fakes[0][1].fake_mode.allow_non_fake_inputs:
        return ""
    return f"{fakes[0][0]} is a FakeTensor and {real[0]} is not"


def settle(names: Iterable[str], tensors: Group) -> tuple[list[Tensor], str]:
    """`settled` of each, and the first reason."""
    found = [settled(name, tensor) for name, tensor in zip(names, tensors)]
    return [tensor for tensor, _ in found], next((why for _, why in found if why), "")


def has_storage(tensor: Tensor) -> bool:
    """Whether the storage of a plain tensor has all of its elements."""
    end = extent(tensor)
    if not end:
        return True
    if not tensor.data_ptr():  # the storage is that of a tensor without memory
        return False
    begin: Any = tensor.storage_offset()
    if begin:
        end += begin * tensor.itemsize
    return tensor.untyped_storage().nbytes() >= end


def is_ordered(x: Tensor) -> bool:
    """Whether its strides order its dimensions.

    Strides that are 0 or equal do not: a conversion may lay out such an x in another order than
    that of one of its views.
    """
    strides = [stride for size, stride in zip(x.shape, x.stride()) if size > 1]
    return 0 not in strides and len({*strides}) == len(strides)


def extent(tensor: Tensor) -> int:
    """Bytes from the first element of a plain tensor to the end of the last."""
    size: int = tensor.nbytes
    if size and not tensor.is_contiguous():
        last: Any = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
        size = (1 + last) * tensor.itemsize
    return size


def held(name: str, tensor: Tensor) -> None:
    """Raises ValueError unless the storage of a plain tensor has all of its elements."""
    if not has_storage(tensor):
        have = f"{tensor.untyped_storage().nbytes()} bytes" if tensor.data_ptr() else "no bytes"
        raise ValueError(
            f"{name} must have memory for its shape {tuple(tensor.shape)}, got a storage of {have}"
        )


def viewed(name: str, tensor: Tensor, view: Callable[[Tensor], Tensor]) -> Tensor:
    """A view of the tensor; ValueError where its memory has shrunk."""
    try:
        return view(tensor)
    except RuntimeError:
        check_own_memory(name, tensor)
        raise


def unsqueezed(name: str, tensor: Tensor, *dims: int) -> Tensor:
    """The tensor with more dimensions of size 1, as `viewed`."""
    for dim in dims:
        tensor = viewed(name, tensor, partial(torch.unsqueeze, dim=dim))
    return tensor


def transposed(name: str, tensor: Tensor) -> Tensor:
    """The tensor with its first two dimensions swapped, as `viewed`."""
    return viewed(name, tensor, lambda tensor: tensor.transpose(0, 1))


def readable(name: str, given: Any) -> Tensor:
    """A mask that a user gave, as a dense tensor whose numbers can be read."""
    compiling = torch.compiler.is_compiling()
    # first: inside a torch.func transform the next line wraps it
    if not compiling and isinstance(given, Tensor) and is_plain(given):
        held(name, given)
    try:
        tensor = given if isinstance(given, Tensor) else torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be a Tensor, got {type(given).__name__}") from error
    if not compiling:
        check_dense(name, tensor)
    return tensor


def masks(
    x: Tensor, lengths: Tensor | None, reset: Tensor | None
) -> tuple[Tensor | None, Tensor | None, str]:
    """Both `settled`, and the first reason."""
    reasons = []
    if lengths is not None and not is_plain(lengths):
        lengths, why = settled("lengths", lengths)
        reasons.append(why)
    if reset is not None and not is_plain(reset):
        reset, why = settled("reset", reset)
        reasons.append(why)
    if reasons:
        given = [(n, t) for n, t in (("lengths", lengths), ("reset", reset)) if t is not None]
        reasons.append(mixed(("x", *(name for name, _ in given)), (x, *(t for _, t in given))))
    return lengths, reset, next(filter(None, reasons), "")


def check_own_memory(name: str, tensor: Tensor | None) -> Any:
    """The tensor with its lazy values computed, or None.

    Raises:
        ValueError: it has no memory of its own, or too little.
    """
    if tensor is None or (is_plain(tensor) and has_storage(tensor)):
        return tensor
    tensor, why = settled(name, tensor)
    if not is_plain(tensor):
        raise ValueError(why or f"{name} has no memory of its own: it is a {type(tensor).__name__}")
    held(name, tensor)
    return tensor


def gradients(grads: Iterable[Tensor | None]) -> tuple[list[Tensor | None], bool]:
    """Incoming gradients with their lazy values computed, and whether all are plain then.

    Raises:
        ValueError: the memory of one has shrunk.
    """
    found = [
        grad if grad is None or is_plain(grad) else settled("a gradient", grad)[0] for grad in grads
    ]
    every = True
    for grad in found:
        if grad is not None:
            if is_plain(grad):
                held("a gradient", grad)
            else:
                every = False
    return found, every
