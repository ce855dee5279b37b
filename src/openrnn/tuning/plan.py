"""Which configuration a kernel has: the fastest that was measured, then by a model of a step.

Never keyed on T, on B only by the number of tiles.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

from openrnn.codegen.tiles import Backward, Forward, GridBackward, GridForward, Tiles
from openrnn.codegen.trace import Traced
from openrnn.spec import Spec
from openrnn.tuning import cluster, grid, measured
from openrnn.tuning.limits import Limits

How = TypeVar("How", bound=Tiles)
Flags = tuple[str, ...]  # the names of those that are on

GHZ = 1.98  # the clock of an H200's multiprocessors, by which cycles are told as microseconds


def units_of(hidden: int) -> int:
    """H as the kernels see it: a multiple of 8."""
    return -(-hidden // 8) * 8


def time_of(cell: Traced, dtype: str, how: Tiles, batch: int, limits: Limits) -> float:
    """The model's time of one step of the whole batch, in cycles, of any kernel."""
    if isinstance(how, GridForward | GridBackward):
        return grid.step_time(cell, dtype, how, batch, limits)
    return cluster.step_time(cell, dtype, how, batch)


def us_of(cell: Traced, dtype: str, how: Tiles, batch: int, limits: Limits) -> float:
    """The same in microseconds."""
    return time_of(cell, dtype, how, batch, limits) / (1e3 * GHZ)


@lru_cache(maxsize=256)
def _forwards(cell: Traced, dtype: str, units: int, limits: Limits) -> tuple[Forward, ...]:
    """All kinds, for any batch."""
    grids = grid.fitting(GridForward, cell, dtype, units, limits)
    return *cluster.forwards(cell, dtype, units, limits), *grids


@lru_cache(maxsize=256)
def _backwards(cell: Traced, dtype: str, units: int, limits: Limits) -> tuple[Backward, ...]:
    grids = grid.fitting(GridBackward, cell, dtype, units, limits)
    return *cluster.backwards(cell, dtype, units, limits), *grids


def _ranked(
    kind: str, mask: str, fitting: Iterable[How], cell: Traced, dtype: str, batch: int,
    capability: tuple[int, int], processors: int | None, limits: Limits,
) -> tuple[How, ...]:  # fmt: skip
    def model(how: How, batch: int) -> float:
        return time_of(cell, dtype, how, batch, limits)

    ranked = sorted(fitting, key=lambda how: model(how, batch))
    return tuple(
        measured.fastest_first(
            kind, mask, ranked, cell, dtype, batch, capability, processors, model
        )
    )


@lru_cache(maxsize=4096)
def forward(
    cell: Traced, dtype: str, hidden: int, batch: int, capability: tuple[int, int],
    processors: int | None = None, mask: str = measured.PLAIN, keep: bool = True,
) -> tuple[Forward, ...]:  # fmt: skip
    """The forward kernels that fit: the fastest if it was measured, then by the model.

    `mask`: see `measured`; `keep`: with what training keeps.
    """
    units, limits = units_of(hidden), Limits.of(capability, processors)
    kind, fitting = "forward" if keep else "inference", _forwards(cell, dtype, units, limits)
    return _ranked(kind, mask, fitting, cell, dtype, batch, capability, processors, limits)


@lru_cache(maxsize=4096)
def backward(
    cell: Traced, dtype: str, hidden: int, batch: int, capability: tuple[int, int],
    processors: int | None = None, mask: str = measured.PLAIN,
) -> tuple[Backward, ...]:  # fmt: skip
    """The backward kernels that fit: the fastest if it was measured, then by the model."""
    units, limits = units_of(hidden), Limits.of(capability, processors)
    fitting = _backwards(cell, dtype, units, limits)
    return _ranked("backward", mask, fitting, cell, dtype, batch, capability, processors, limits)


def ranked(kind: str, flags: Flags, *asked: Any) -> tuple[Forward | Backward, ...]:
    """The plan of a kind of kernels with such flags."""
    mask = "+".join(flag for flag in flags if flag != "keep") or measured.PLAIN
    if kind == "forward":
        return forward(*asked, mask=mask, keep="keep" in flags)
    return backward(*asked, mask=mask)


def holding(
    kind: str, cell: Traced, dtype: str, hidden: int, tiles: int, flags: Flags,
    capability: tuple[int, int], processors: int | None = None,
) -> Iterator[Forward | Backward]:  # fmt: skip
    """The plan's tiles with such flags as they are compiled first, where shared memory holds them.

    By values alone: nothing is compiled.
    """
    shared = Limits.of(capability, processors).shared
    for how in ranked(kind, flags, cell, dtype, hidden, 8 * tiles, capability, processors):
        asked = first_try(hidden, how, flags)
        if replace(asked, stages=2).shared(cell, dtype) <= shared:
            yield asked


def first_try(hidden: int, how: How, flags: Flags) -> How:
    """Tiles of a plan as they are compiled first, with such flags."""
    return replace(how, padded=how.units > hidden, **dict.fromkeys(flags, True))


def kinds(
    spec: Spec, grad: bool, lengths: bool, reset: bool, every: bool, fresh: bool = False
) -> list[tuple[str, Flags]]:
    """The kernels of a call that asks for such things: kind and flags of each.

    fresh: states to begin anew with are given; whether their gradients are wanted is not said, and
    backward is there with and without.
    """
    asked = {"lengths": lengths, "reset": reset, "every": every, "fresh": fresh}
    flags = tuple(flag for flag, on in asked.items() if on)
    if not grad:
        return [("forward", flags)]
    plain, again = (tuple(flag for flag in flags if flag != out) for out in ("fresh", "every"))
    back = [("backward", each) for each in dict.fromkeys((plain, flags))]
    if spec.recompute == "none":
        return [("forward", (*flags, "keep")), *back]
    return [("forward", flags), ("forward", (*again, "keep")), *back]
