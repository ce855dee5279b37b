"""What a layer refuses, in the words of `torch.nn` where people match on them."""

import numbers
import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def same_dtype(x: Tensor, weight: Tensor) -> None:
    """Raises unless input and weights have one dtype."""
    if x.dtype != weight.dtype:
        raise ValueError(
            f"RNN input dtype ({x.dtype}) does not match weight dtype ({weight.dtype}). Convert "
            f"input: input.to({weight.dtype}), or convert model: model.to({x.dtype})"
        )


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


def sizes(input_size: object, hidden_size: object) -> None:
    """Raises unless both are whole numbers from 1, in the words of `torch.nn.RNNBase`."""
    for name, size in (("input_size", input_size), ("hidden_size", hidden_size)):
        if not isinstance(size, int):
            raise TypeError(f"{name} should be of type int, got: {type(size).__name__}")
        if size <= 0:
            raise ValueError(f"{name} must be greater than zero")


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


def torch_arguments(
    input_size: object,
    hidden_size: object,
    num_layers: int,
    bias: object,
    batch_first: object,
    dropout: Any,
    proj_size: int,
) -> None:
    """The checks of `torch.nn.RNNBase`, with its texts, on which people match."""
    number = isinstance(dropout, numbers.Real) and not isinstance(dropout, bool)
    if not number or not 0 <= float(dropout) <= 1:
        raise ValueError(
            "dropout should be a number in range [0, 1] representing the probability of an "
            "element being zeroed"
        )
    if dropout > 0 and num_layers == 1:
        warnings.warn(
            "dropout option adds dropout after all but last recurrent layer, so non-zero dropout "
            f"expects num_layers greater than 1, but got dropout={dropout} and "
            f"num_layers={num_layers}",
            stacklevel=4,
        )
    for name, value in (("bias", bias), ("batch_first", batch_first)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} should be of type bool, got: {type(value).__name__}")
    sizes(input_size, hidden_size)
    if num_layers <= 0:
        raise ValueError("num_layers must be greater than zero")
    if proj_size < 0:
        raise ValueError("proj_size should be a positive integer or zero to disable projections")
    if isinstance(hidden_size, int) and proj_size >= hidden_size:
        raise ValueError("proj_size has to be smaller than hidden_size")
