"""A mapped dimension (V, ...) as part of B, and calls of its members one after another."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, stack

Group = Sequence[Tensor | None]
Dims = Sequence[int | None]  # where the mapped dimension of each tensor is; None: it has none


class Counts(NamedTuple):
    """How many tensors of each kind a call has."""

    states: int
    params: int
    resets: int

    @property
    def total(self) -> int:
        """x, states, parameters, lengths, reset, reset states, seed."""
        return 4 + self.states + self.params + self.resets

    @property
    def rows(self) -> list[int | None]:
        """Which dimension of each of them is B; None: they have none."""
        return [1, *[1] * self.states, *[None] * self.params, 0, 1, *[1] * self.resets, None]

    @property
    def gradients(self) -> list[int | None]:
        """Which dimension of the gradients of x, states, parameters and reset states is B."""
        return [1, *[1] * self.states, *[None] * self.params, *[1] * self.resets]

    def maps_params(self, dims: Dims) -> bool:
        """Whether a parameter is mapped, so that the members of a call cannot be one call."""
        return any(dim is not None for dim in dims[1 + self.states : 1 + self.states + self.params])


def result_rows(states: int, visible: int) -> list[int]:
    """Which dimension is B: of y, the final states and the states of all steps."""
    return [1] * (1 + states) + [2] * (visible - 1 - states)


def fold(tensor: Tensor | None, dim: int | None, row: int | None, size: int) -> Tensor | None:
    """A tensor whose B is V*B; one that is not mapped is repeated V times, and what has no B kept.

    Raises:
        ValueError: what has no B is mapped.
    """
    if tensor is None:
        return None
    if row is None:
        if dim is not None:
            raise ValueError("a tensor without a batch dimension is mapped")
        return tensor
    if dim is None:
        rows = tensor.unsqueeze(row)
        tensor = rows.expand(*rows.shape[:row], size, *rows.shape[row + 1 :])
    else:
        tensor = tensor.movedim(dim, row)
    return tensor.flatten(row, row + 1)


def unfold(tensor: Tensor, row: int, size: int) -> Tensor:
    """The inverse: dimension `row` is V, and B comes behind it."""
    found: Tensor = tensor.unflatten(row, (size, tensor.shape[row] // size))
    return found


def in_turn(
    run: Callable[[Group], Sequence[Tensor]], tensors: Group, dims: Dims, size: int
) -> tuple[Tensor, ...]:
    """The results of each member's call, stacked (V, ...)."""
    made = []
    for index in range(size):
        made.append(
            run(
                [
                    tensor if tensor is None or dim is None else tensor.select(dim, index)
                    for tensor, dim in zip(tensors, dims)
                ]
            )
        )
    return tuple(stack(parts) for parts in zip(*made))


def flat_dims(dims: Sequence[Any]) -> list[int | None]:
    """The dimensions that torch says, of tensors that are arguments of their own."""
    return [dim if isinstance(dim, int) else None for dim in dims]
