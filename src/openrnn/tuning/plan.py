"""Which configurations a kernel may have, best first: the one measured fastest, then by a model.

They never depend on T, and on B only by its number of tiles.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from openrnn.codegen.cluster_stack_config import ClusterStackConfig
from openrnn.codegen.config import (
    SIZES,
    BackwardConfig,
    ForwardConfig,
    GridBackwardConfig,
    GridForwardConfig,
    KernelConfig,
    ceil_div,
)
from openrnn.codegen.multicast_config import (
    MulticastBackwardConfig,
    MulticastConfig,
    MulticastForwardConfig,
)
from openrnn.codegen.tiles import whole_tiles
from openrnn.codegen.trace import Traced
from openrnn.memo import memo
from openrnn.spec import Spec
from openrnn.tuning import cluster, cluster_stack, grid, measured, multicast, stepwise
from openrnn.tuning.limits import Limits

Config = TypeVar("Config", bound=KernelConfig)
OptionNames = tuple[str, ...]  # of the options of a loop that are on

GHZ = 1.98  # the clock of an H200's multiprocessors


def cycles_of(cell: Traced, dtype: str, config: KernelConfig, batch: int, limits: Limits) -> float:
    """The model's time of one step of the whole batch, in cycles."""
    if config.stepwise:
        return 1e3 * GHZ * stepwise.step_us(config.kind, cell, dtype, config.units, batch)
    if isinstance(config, GridForwardConfig | GridBackwardConfig):
        return grid.step_cycles(cell, dtype, config, batch, limits)
    if isinstance(config, MulticastConfig):
        return multicast.step_cycles(cell, config, batch, limits)
    if isinstance(config, ClusterStackConfig):
        return cluster_stack.step_cycles(cell, dtype, config, batch, limits)
    return cluster.step_cycles(cell, dtype, config, batch, limits)


def microseconds_of(
    cell: Traced, dtype: str, config: KernelConfig, batch: int, limits: Limits
) -> float:
    """The time of a step by the model, in microseconds."""
    return cycles_of(cell, dtype, config, batch, limits) / (1e3 * GHZ)


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


@dataclass(frozen=True, kw_only=True)
class LoopRequest:
    """A loop whose kernel is asked for.

    Args:
        kind: "forward" or "backward".
        batch: rounded up to whole tiles.
        processors: multiprocessors of the device; None where they are not known.
        padded_to: see `units.units_of`; 0: H in whole tiles.
    """

    kind: str
    option_names: OptionNames
    cell: Traced
    dtype: str
    hidden: int
    batch: int
    capability: tuple[int, int]
    processors: int | None = None
    padded_to: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch", whole_tiles(self.batch))

    @property
    def units(self) -> int:
        """Those that kernels compute, at least H."""
        return self.padded_to or whole_tiles(self.hidden)

    @property
    def limits(self) -> Limits:
        """Those of its device."""
        return Limits.of(self.capability, self.processors)

    @property
    def without_masks(self) -> "LoopRequest":
        """The same loop without masks: loops at the same time were measured only like that."""
        kept = tuple(name for name in self.option_names if name == "save")
        return replace(self, option_names=kept)


@memo(4096)
def _ranking(
    loop: LoopRequest, loops: int
) -> tuple[tuple[ForwardConfig | BackwardConfig, ...], float | None]:
    """The kernels that fit and of which the device holds so many loops at once, best first.

    And the measured microseconds of a step of the first, where they are known.
    """
    limits = loop.limits

    def model(config: ForwardConfig | BackwardConfig, batch: int) -> float:
        return cycles_of(loop.cell, loop.dtype, config, batch, limits)

    every = _forwards if loop.kind == "forward" else _backwards
    fitting = every(loop.cell, loop.dtype, loop.units, limits)
    held = (config for config in fitting if fits_concurrently(config, loop.batch, loops, limits))
    # Ranked without what sums inside a cluster save: few such kernels are in the measured table,
    # and by the model alone the others would win over kernels that are. If the first one sums
    # through L2, `inside_cluster` replaces it by its counterpart.
    modelled = sorted(
        held,
        key=lambda config: (
            model(config, loop.batch) + multicast.saved_inside(config, loop.batch, limits)
        ),
    )
    inference = loop.kind == "forward" and "save" not in loop.option_names
    configs, us = measured.fastest_first(
        "inference" if inference else loop.kind, _mask(loop.option_names), modelled, loop.cell,
        loop.dtype, loop.batch, loop.capability, loop.processors, model, loops,
    )  # fmt: skip
    first = multicast.inside_cluster(configs[0], configs, loop.batch, limits) if configs else None
    if first is not None:
        us = None if us is None else us * model(first, loop.batch) / model(configs[0], loop.batch)
        configs = [first, *(config for config in configs if config != first)]
    return tuple(configs), us


def holding_r(
    loop: LoopRequest, loops: int = 1, layers: int = 1
) -> tuple[ForwardConfig | BackwardConfig, ...]:
    """The kernels that hold R or a part of it, best first; tests replace this to choose kinds.

    Args:
        loops, layers: see `ranked`.
    """
    if layers == 1:
        return _ranking(loop, loops)[0]
    # of all options resets alone make a difference
    resets = ("reset",) if "reset" in loop.option_names else ()
    return _of_stack(replace(loop, option_names=resets), layers)


def ranked(
    loop: LoopRequest, loops: int = 1, layers: int = 1
) -> tuple[ForwardConfig | BackwardConfig, ...]:
    """The kernels of a loop, best first.

    For one loop of one layer also the stepwise loop, which any device holds: last, or first where
    `_stepwise_is_quicker` says so.

    Args:
        loops: how many such loops the device is to hold at once.
        layers: that one launch runs.
    """
    held = holding_r(loop, loops, layers)
    if loops > 1 or layers > 1:
        return held
    last = stepwise.config(loop.kind, loop.units, loop.batch)
    known = bool(held) and measured.knows(loop.capability, loop.processors)
    return (last, *held) if known and _stepwise_is_quicker(loop) else (*held, last)


@memo(4096)
def _stepwise_is_quicker(loop: LoopRequest) -> bool:
    """Whether a stepwise loop takes clearly less than the first kernel of another kind.

    That is, by its model, at most `stepwise.MAX_TIME_RATIO` of the other's measured or else
    modelled time; less than all of it where the other one streams a part of R. With lengths the
    limit is half of that, as other kernels stop at their longest row and a stepwise loop runs all
    steps. Where forward's units are padded it is compared only with kernels that stream a part of
    R: more was not measured.
    """
    configs, us = _ranking(loop, 1)
    streams = configs[0].streamed_fragments > 0
    if loop.kind == "forward" and loop.units > loop.hidden and not streams:
        return False
    if us is None:
        us = microseconds_of(loop.cell, loop.dtype, configs[0], loop.batch, loop.limits)
    own = stepwise.step_us(loop.kind, loop.cell, loop.dtype, loop.units, loop.batch)
    ratio = 1.0 if streams else stepwise.MAX_TIME_RATIO
    return own < ratio * us / (2 if "lengths" in loop.option_names else 1)


def knows_stack(config: KernelConfig, dtype: str, batch: int) -> bool:
    """Whether stacks of such sizes were measured with this kind of kernel, and quicker."""
    if isinstance(config, MulticastConfig):
        return multicast.knows_stack(config.units, batch)
    return cluster_stack.knows(config.kind, dtype, config.units)


@memo(4096)
def _of_stack(loop: LoopRequest, layers: int) -> tuple[ForwardConfig | BackwardConfig, ...]:
    """The kernels that run so many layers in one launch, best first by the model.

    Those of sizes that were measured; where there are none, all in clusters, or all with multicast,
    which takes 16 bits alone, and no resets.
    """
    cell, dtype, units, batch = loop.cell, loop.dtype, loop.units, loop.batch
    limits = loop.limits
    forward = loop.kind == "forward"
    fitting = cluster_stack.forwards if forward else cluster_stack.backwards
    clusters = [*fitting(cell, dtype, units, limits, layers)]
    others: list[MulticastForwardConfig] | list[MulticastBackwardConfig] = []
    if SIZES[dtype] == 2 and "reset" not in loop.option_names:
        by_multicast = multicast.forwards if forward else multicast.backwards
        others = [*by_multicast(cell, dtype, units, limits, layers)]
    every: list[ForwardConfig | BackwardConfig] = [*clusters, *others]
    known = [config for config in every if knows_stack(config, dtype, batch)]
    configs = known or clusters or others
    return tuple(sorted(configs, key=lambda config: cycles_of(cell, dtype, config, batch, limits)))


def _mask(option_names: OptionNames) -> str:
    """Their name in the measured table."""
    return "+".join(name for name in option_names if name != "save") or measured.PLAIN


def measured_options(kind: str, option_names: OptionNames) -> OptionNames:
    """The options by which schedules rank kernels; reset states are ranked like resets."""
    ranked_by = ("lengths", "reset") + (("all_states", "save") if kind == "forward" else ())
    return tuple(name for name in option_names if name in ranked_by)


class StepTimes(NamedTuple):
    """Microseconds of a step.

    Attributes:
        alone: of the quickest kernel that holds R; several: of the quickest one of which the device
            holds as many loops as were asked for, when so many run.
    """

    alone: float
    several: float


@memo(4096)
def step_times(loop: LoopRequest, loops: int) -> StepTimes | None:
    """The times as the measured table gives them, or both by the model where it lacks one.

    Both are without lengths and resets, as several loops were measured only without them. None
    where the device does not hold so many loops at once.
    """
    loop = loop.without_masks
    modelled, known = list[float](), list[float]()
    for number in (1, loops):
        configs, us = _ranking(loop, number)
        if not configs:
            return None
        modelled.append(microseconds_of(loop.cell, loop.dtype, configs[0], loop.batch, loop.limits))
        known += [] if us is None else [us]
    return StepTimes(*(known if len(known) == len(modelled) else modelled))


def compilable_configs(
    loop: LoopRequest, loops: int = 1, layers: int = 1
) -> Iterator[ForwardConfig | BackwardConfig]:
    """The ranked kernels as they are compiled first, where shared memory holds them.

    By values alone: nothing is compiled.

    Args:
        loops, layers: see `ranked`.
    """
    shared = loop.limits.shared
    for config in ranked(loop, loops, layers):
        tried = first_try(loop.hidden, config, loop.option_names)
        if replace(tried, stages=2).shared(loop.cell, loop.dtype) <= shared:
            yield tried


def fits_concurrently(config: KernelConfig, batch: int, loops: int, limits: Limits) -> bool:
    """Whether a device holds so many loops of a kernel at once, each in one launch.

    Loops that stream a part of R would share L2: that was not measured, so none run at once.
    """
    if loops == 1:
        return True
    return not config.streamed_fragments and holds(
        limits.clusters(config.cluster), config, batch, loops
    )


def holds(resident: int, config: KernelConfig, batch: int, loops: int) -> bool:
    """Whether a device that holds so many clusters of a kernel can run so many loops at once.

    For one loop one copy of R is enough, as further rows run in later rounds. Of several loops all
    clusters must be resident at once.
    """
    return resident >= (config.clusters if loops == 1 else loops * clusters_of(config, batch))


def needs_more_rounds(resident: int, config: KernelConfig, batch: int, limits: Limits) -> bool:
    """Whether a batch needs at least 1.5 times the planned rounds.

    A round has as many rows as the device holds clusters for, with one block a multiprocessor.
    False on devices whose clusters were not counted.

    Args:
        resident: clusters that the device holds at once, by its driver; at least `config.clusters`.
        limits: what was planned with.
    """
    if not limits.has_h200_clusters or not limits.copies(config):
        return False
    rounds = ceil_div(batch, config.rows * (resident // config.clusters))
    return 2 * rounds >= 3 * limits.rounds(config, batch)


def clusters_of(config: KernelConfig, batch: int) -> int:
    """The clusters of a launch for all rows of a batch."""
    return ceil_div(batch, config.rows) * config.clusters


def first_try(hidden: int, config: Config, option_names: OptionNames) -> Config:
    """A ranked configuration as it is compiled first, with such options."""
    return replace(config, padded=config.units > hidden, **dict.fromkeys(option_names, True))


def kinds(
    spec: Spec, grad: bool, lengths: bool, reset: bool, all_states: bool, reset_state: bool = False
) -> list[tuple[str, OptionNames]]:
    """The kernels of a call: kind and options of each.

    reset_state: states for resets are given. It does not say whether their gradients are wanted, so
    backward is there with and without them.
    """
    given = {
        "lengths": lengths, "reset": reset, "all_states": all_states, "reset_state": reset_state,
    }  # fmt: skip
    option_names = tuple(flag for flag, on in given.items() if on)
    if not grad:
        return [("forward", option_names)]
    plain = tuple(flag for flag in option_names if flag != "reset_state")
    back = [("backward", each) for each in dict.fromkeys((plain, option_names))]
    if spec.recompute == "none":
        return [("forward", (*option_names, "save")), *back]
    recompute = tuple(flag for flag in option_names if flag != "all_states")
    return [("forward", option_names), ("forward", (*recompute, "save")), *back]
