"""Which configurations a kernel may have, best first: the one measured fastest, then by a model.

They never depend on T, and on B only by its number of tiles.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from openrnn.codegen.config import (
    BackwardConfig,
    ForwardConfig,
    GridBackwardConfig,
    GridForwardConfig,
    KernelConfig,
)
from openrnn.codegen.multicast_config import MulticastConfig
from openrnn.codegen.trace import Traced
from openrnn.memo import memo
from openrnn.spec import Spec
from openrnn.tuning import cluster, grid, measured, multicast
from openrnn.tuning.limits import Limits

Config = TypeVar("Config", bound=KernelConfig)
Flags = tuple[str, ...]  # the names of those that are on

GHZ = 1.98  # the clock of an H200's multiprocessors


def units_of(hidden: int) -> int:
    """H as the kernels see it: a multiple of 8."""
    return -(-hidden // 8) * 8


def time_of(cell: Traced, dtype: str, config: KernelConfig, batch: int, limits: Limits) -> float:
    """The model's time of one step of the whole batch, in cycles."""
    if isinstance(config, GridForwardConfig | GridBackwardConfig):
        return grid.step_time(cell, dtype, config, batch, limits)
    if isinstance(config, MulticastConfig):
        return multicast.step_time(cell, config, batch, limits)
    return cluster.step_time(cell, dtype, config, batch)


def us_of(cell: Traced, dtype: str, config: KernelConfig, batch: int, limits: Limits) -> float:
    """The same in microseconds."""
    return time_of(cell, dtype, config, batch, limits) / (1e3 * GHZ)


@memo(256)
def _forwards(cell: Traced, dtype: str, units: int, limits: Limits) -> tuple[ForwardConfig, ...]:
    """Every forward kernel that fits, for any batch."""
    grids = grid.fitting(GridForwardConfig, cell, dtype, units, limits)
    multicasts = multicast.forwards(cell, dtype, units, limits)
    return *cluster.forwards(cell, dtype, units, limits), *grids, *multicasts


@memo(256)
def _backwards(cell: Traced, dtype: str, units: int, limits: Limits) -> tuple[BackwardConfig, ...]:
    """Every backward kernel that fits, for any batch."""
    grids = grid.fitting(GridBackwardConfig, cell, dtype, units, limits)
    multicasts = multicast.backwards(cell, dtype, units, limits)
    return *cluster.backwards(cell, dtype, units, limits), *grids, *multicasts


def _ranked(
    kind: str, mask: str, fitting: Iterable[Config], cell: Traced, dtype: str, batch: int,
    capability: tuple[int, int], processors: int | None, limits: Limits,
) -> tuple[Config, ...]:  # fmt: skip
    def model(config: Config, batch: int) -> float:
        return time_of(cell, dtype, config, batch, limits)

    ranked = sorted(fitting, key=lambda config: model(config, batch))
    return tuple(
        measured.fastest_first(
            kind, mask, ranked, cell, dtype, batch, capability, processors, model
        )
    )


@memo(4096)
def forward(
    cell: Traced, dtype: str, hidden: int, batch: int, capability: tuple[int, int],
    processors: int | None = None, mask: str = measured.PLAIN, save: bool = True,
) -> tuple[ForwardConfig, ...]:  # fmt: skip
    """The forward kernels that fit, best first.

    mask: see `measured`; save: activations, for training.
    """
    units, limits = units_of(hidden), Limits.of(capability, processors)
    kind, fitting = "forward" if save else "inference", _forwards(cell, dtype, units, limits)
    return _ranked(kind, mask, fitting, cell, dtype, batch, capability, processors, limits)


@memo(4096)
def backward(
    cell: Traced, dtype: str, hidden: int, batch: int, capability: tuple[int, int],
    processors: int | None = None, mask: str = measured.PLAIN,
) -> tuple[BackwardConfig, ...]:  # fmt: skip
    """The backward kernels that fit, best first."""
    units, limits = units_of(hidden), Limits.of(capability, processors)
    fitting = _backwards(cell, dtype, units, limits)
    return _ranked("backward", mask, fitting, cell, dtype, batch, capability, processors, limits)


def ranked(
    kind: str, flags: Flags, cell: Traced, dtype: str, hidden: int, batch: int,
    capability: tuple[int, int], processors: int | None = None,
) -> tuple[ForwardConfig | BackwardConfig, ...]:  # fmt: skip
    """The kernels of a kind, "forward" or "backward", for calls with such flags, best first."""
    mask = "+".join(flag for flag in flags if flag != "save") or measured.PLAIN
    asked = cell, dtype, hidden, batch, capability, processors, mask
    return forward(*asked, save="save" in flags) if kind == "forward" else backward(*asked)


def holding(
    kind: str, cell: Traced, dtype: str, hidden: int, batch_tiles: int, flags: Flags,
    capability: tuple[int, int], processors: int | None = None, loops: int = 1,
) -> Iterator[ForwardConfig | BackwardConfig]:  # fmt: skip
    """The ranked kernels as they are compiled first, where shared memory holds them.

    By values alone: nothing is compiled.

    Args:
        loops: how many such loops the device is to hold at once.
    """
    limits = Limits.of(capability, processors)
    shared, batch = limits.shared, 8 * batch_tiles
    for config in ranked(kind, flags, cell, dtype, hidden, batch, capability, processors):
        if not holds(config, batch, loops, limits):
            continue
        tried = first_try(hidden, config, flags)
        if replace(tried, stages=2).shared(cell, dtype) <= shared:
            yield tried


def holds(config: KernelConfig, batch: int, loops: int, limits: Limits) -> bool:
    """Whether a device holds so many loops of a kernel at once; of several none may be a grid."""
    if loops == 1:
        return True
    places = dict(limits.places).get(config.cluster, 0)
    return config.clusters == 1 and loops * -(-batch // config.rows) <= places


def first_try(hidden: int, config: Config, flags: Flags) -> Config:
    """A ranked configuration as it is compiled first, with such flags."""
    return replace(config, padded=config.units > hidden, **dict.fromkeys(flags, True))


def kinds(
    spec: Spec, grad: bool, lengths: bool, reset: bool, all_states: bool, reset_state: bool = False
) -> list[tuple[str, Flags]]:
    """The kernels of a call: kind and flags of each.

    reset_state: states for resets are given. It does not say whether their gradients are wanted, so
    backward is there with and without them.
    """
    given = {
        "lengths": lengths, "reset": reset, "all_states": all_states, "reset_state": reset_state,
    }  # fmt: skip
    flags = tuple(flag for flag, on in given.items() if on)
    if not grad:
        return [("forward", flags)]
    plain = tuple(flag for flag in flags if flag != "reset_state")
    back = [("backward", each) for each in dict.fromkeys((plain, flags))]
    if spec.recompute == "none":
        return [("forward", (*flags, "save")), *back]
    recompute = tuple(flag for flag in flags if flag != "all_states")
    return [("forward", flags), ("forward", (*recompute, "save")), *back]
