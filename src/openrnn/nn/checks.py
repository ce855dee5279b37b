"""What a layer refuses, in the words of `torch.nn` where people match on them."""

import numbers
from collections.abc import Callable, Mapping, Sequence
from operator import eq
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from openrnn import tensors
from openrnn.errors import counted, warn_user
from openrnn.spec import whole

_jit: Any = torch._C


def construction(kind: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raises TypeError unless the signature of this class has such arguments.

    Python's own message would name a class that the user does not know.
    """
    known = kind.__signature__
    for name in options:  # `bind` would first tell of those that are missing
        if name not in known.parameters:
            raise TypeError(f"{kind.__name__}: got an unexpected keyword argument {name!r}")
    try:
        known.bind(*args, **options)
    except TypeError as error:
        raise TypeError(f"{kind.__name__}: {error}") from None


def equality(size: Any) -> Callable[[Any, Any], bool]:
    """What compares a size, or several of its kind, with others."""
    return eq if type(size) is int else _equal


def _equal(found: Any, wanted: Any) -> bool:
    """Whether sizes are equal where they may be tensors, as those are that `torch.jit` traces.

    Its tracer warns of a test of them. Of torch's own layers it does not: it goes by the module.
    """
    state = _jit._get_tracing_state()
    _jit._set_tracing_state(None)
    try:
        return bool(found == wanted)
    finally:
        _jit._set_tracing_state(state)


def same_dtype(x: Tensor, weight: Tensor) -> None:
    """Raises unless input and weights have one dtype."""
    if isinstance(weight, Tensor) and x.dtype != weight.dtype:
        raise ValueError(
            f"RNN input dtype ({x.dtype}) does not match weight dtype ({weight.dtype}). Convert "
            f"input: input.to({weight.dtype}), or convert model: model.to({x.dtype})"
        )


def number_of_states(title: str, names: Sequence[str], count: int) -> None:
    """Raises unless a call has as many states as its cell."""
    if count != len(names):
        states = counted(len(names), "state")
        raise RuntimeError(f"{title} expects {states} ({', '.join(names)}), got {count}")


def wrong_dims(states: Sequence[Tensor], dims: int) -> None:
    """Raises for states that have not as many dimensions as they need beside the input."""
    kind = "batched 3-D" if dims == 3 else "unbatched 2-D"
    found = ", ".join(f"{state.dim()}-D" for state in states)
    if len(states) == 1:
        got = f"hx should also be {dims}-D but got {found} tensor"
    else:
        got = f"hx and cx should also be {dims}-D but got ({found}) tensors"
    raise RuntimeError(f"For {kind} input, {got}")


def bias_mode(bias: bool, mode: str | None) -> str:
    """The bias mode that `bias` and `bias_mode` say together."""
    if mode is None:
        return "double" if bias else "none"
    if not bias and mode != "none":
        raise ValueError(f"bias=False needs bias_mode 'none' or None, got {mode!r}")
    return mode


def dense(name: str, tensor: Any) -> None:
    """Raises unless it is a tensor with sizes and strides; a mere subclass is one."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_nested:
        tensors.check_dense(name, tensor)


def packed(given: PackedSequence) -> None:
    """Raises unless data and batch sizes of packed sequences belong together."""
    data, sizes = given.data, given.batch_sizes
    tensors.check_dense("the data of a PackedSequence", data)
    if data.dim() != 2:
        raise RuntimeError(f"input must have 2 dimensions, got {data.dim()}")
    # what a tracer records has no numbers yet
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return
    if sizes.dim() != 1 or sizes.dtype != torch.int64 or sizes.is_cuda:
        raise ValueError(
            "batch_sizes of a PackedSequence must be an int64 vector on the CPU, "
            f"got {sizes.dtype} of shape {tuple(sizes.shape)} on {sizes.device}"
        )
    if not sizes.numel():
        raise ValueError("batch_sizes of a PackedSequence must have at least one step, got none")
    # falling, so that the last is the least
    if int(sizes[-1]) < 1 or (sizes.numel() > 1 and bool((sizes[1:] > sizes[:-1]).any())):
        raise ValueError(
            "batch_sizes of a PackedSequence must be from 1 and never rise, "
            f"got {sizes[:8].tolist()}{' ...' if sizes.numel() > 8 else ''}"
        )
    for name, order in (("sorted", given.sorted_indices), ("unsorted", given.unsorted_indices)):
        if order is not None:
            _order(name, order, int(sizes[0]))
    if int(sizes.sum()) != data.shape[0]:
        raise ValueError(
            f"batch_sizes of a PackedSequence must have the sum {data.shape[0]}, its rows, "
            f"got {int(sizes.sum())}"
        )


def _order(name: str, order: Tensor, batch: int) -> None:
    """Raises unless these indices may reorder so many sequences; values on a CPU alone are seen."""
    if order.dtype != torch.int64 or order.shape != (batch,):
        raise ValueError(
            f"{name}_indices of a PackedSequence must be int64 of shape ({batch},), "
            f"got {order.dtype} of shape {tuple(order.shape)}"
        )
    if not order.is_cuda and sorted(order.tolist()) != list(range(batch)):
        raise ValueError(f"{name}_indices of a PackedSequence must name each sequence once")


def size(name: str, value: object) -> int:
    """A whole number as an int, or a TypeError in the words of `torch.nn.RNNBase`."""
    try:
        return whole(name, value)
    except TypeError:
        got = type(value).__name__
        raise TypeError(f"{name} should be of type int, got: {got}") from None


def sizes(input_size: object, hidden_size: object) -> None:
    """Raises unless both are whole numbers from 1, in the words of `torch.nn.RNNBase`."""
    for name, value in (("input_size", input_size), ("hidden_size", hidden_size)):
        if size(name, value) <= 0:
            raise ValueError(f"{name} must be greater than zero")


def input_dims(name: str, given: Tensor) -> None:
    """Raises unless a layer's input is 2-D or 3-D, in torch's two spellings."""
    dims = given.dim()
    if dims not in (2, 3):
        got = f"{dims}D tensor" if name == "RNN" else f"{dims}D"
        raise ValueError(f"{name}: Expected input to be 2D or 3D, got {got} instead")


def cell_states(name: str, names: Sequence[str], hx: object) -> None:
    """Raises unless a one-step module gets as many states as its cell has, all of them tensors."""
    if len(names) == 1:
        if not isinstance(hx, Tensor):
            raise TypeError(f"{name}: hx must be a Tensor, got {type(hx).__name__}")
        return
    if isinstance(hx, Tensor):
        raise TypeError(
            "lstm_cell(): argument 'hx' (position 2) must be tuple of Tensors, not Tensor"
        )
    if not isinstance(hx, Sequence):
        raise TypeError(f"{name}: hx must be a tuple ({', '.join(names)}), got {type(hx).__name__}")
    if len(hx) != len(names):
        raise RuntimeError("lstm_cell expects two hidden states")
    for state, word in zip(hx, names):
        if not isinstance(state, Tensor):
            raise TypeError(f"{name}: {word} of hx must be a Tensor, got {type(state).__name__}")


def reset_state_alone(reset: object, reset_state: object) -> None:
    """Raises for a `reset_state` that nothing would ever put in place."""
    if reset_state is not None and reset is None:
        raise ValueError("reset_state is what reset puts in place: needs reset, got None")


def reset_states(
    states: Sequence[Tensor], wanted: Sequence[tuple[int, ...]], batched: bool
) -> list[Tensor]:
    """What resets put in place, 3-D; raises unless it may be expanded to the shapes `wanted`."""
    found = []
    for given, shape in zip(states, wanted):
        dense("reset_state", given)
        flat = not batched and given.dim() == 2  # (L*D, O or H), as of hx
        state = tensors.unsqueezed("reset_state", given, 1) if flat else given
        if state.dim() != 3 or any(a not in (1, b) for a, b in zip(state.shape, shape)):
            raise ValueError(
                f"reset_state must have shape {shape}, or 1 in place of a size, "
                f"got {tuple(state.shape)}"
            )
        found.append(state)
    if len(states) != len(wanted):
        needed = counted(len(wanted), "state")
        raise ValueError(f"reset_state needs {needed}, got {len(states)}")
    return found


def torch_arguments(
    input_size: object,
    hidden_size: object,
    num_layers: Any,
    bias: object,
    batch_first: object,
    dropout: Any,
    proj_size: Any,
) -> None:
    """The checks of `torch.nn.RNNBase`, with its texts, on which people match."""
    number = isinstance(dropout, numbers.Real) and not isinstance(dropout, bool)
    if not number or not 0 <= float(dropout) <= 1:
        raise ValueError(
            "dropout should be a number in range [0, 1] representing the probability of an "
            "element being zeroed"
        )
    num_layers, proj_size = size("num_layers", num_layers), size("proj_size", proj_size)
    if dropout > 0 and num_layers == 1:
        warn_user(
            "dropout option adds dropout after all but last recurrent layer, so non-zero dropout "
            f"expects num_layers greater than 1, but got dropout={dropout} and "
            f"num_layers={num_layers}"
        )
    for name, value in (("bias", bias), ("batch_first", batch_first)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} should be of type bool, got: {type(value).__name__}")
    sizes(input_size, hidden_size)
    if num_layers <= 0:
        raise ValueError("num_layers must be greater than zero")
    if proj_size < 0:
        raise ValueError("proj_size should be a positive integer or zero to disable projections")
    if proj_size >= size("hidden_size", hidden_size):
        raise ValueError("proj_size has to be smaller than hidden_size")


def of_steps(reset: Tensor) -> Tensor:
    """Resets of an unbatched call, (T,); ValueError for others."""
    if reset.dim() != 1:
        raise ValueError(
            f"reset must have shape (T,) where the input has no batch, got {tuple(reset.shape)}"
        )
    return reset
