"""Right before fast: an engine's result against the same numbers in float64."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from openrnn.bench.engines.base import Ready
from openrnn.bench.engines.nn import Packed, Torch
from openrnn.bench.engines.ours import plain
from openrnn.bench.modes import MODES
from openrnn.bench.task import PRECISIONS, Task, products

# the comparison of a long or wide row is bounded: steps, and states of all steps (memory); before
# so few steps are left, it is steps that are cut: a kernel's tiles are chosen by the batch
STEPS, FEW, STATES = 256, 4, {"cpu": 2**22, "cuda": 2**26}
RULE = (
    f"y and, in training, the gradients of x and of every parameter are compared with float64 on "
    f"the same numbers (on a GPU by torch.nn where it has the row, else by the plain reference), "
    f"at the batch that is timed and on the first "
    f"{STEPS} steps at most (fewer where memory asks for it, and only below {FEW} of them fewer "
    f"rows of the batch; `checked` in the files); an engine is wrong where the norm of a "
    f"difference, relative to the norm, exceeds "
    + ", ".join(f"{name} {kind.allowed:.0e}" for name, kind in PRECISIONS.items())
    + " and twice the error of the plain reference in the same precision"
)


@dataclass
class Verdict:
    """How far a result is from exact, and whether that is let pass."""

    error: float
    worst: str
    allowed: float

    @property
    def right(self) -> bool:
        return math.isfinite(self.error) and self.error <= self.allowed


@dataclass
class Judge:
    """Knows the exact results of a task, and judges those of engines."""

    task: Task
    exact: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ready, modes = _exact(self.task), self.task.row.modes
        training = any(MODES[mode].gradients and not MODES[mode].penalty for mode in modes)
        all_ = outputs(ready, "training" if training else "forward")
        for mode in modes:
            if MODES[mode].penalty:
                self.exact[mode] = outputs(ready, mode)
                continue
            self.exact[mode] = all_ if MODES[mode].gradients else {"y": all_["y"]}

    def verdict(self, found: Mapping[str, Tensor], mode: str) -> Verdict:
        """The error of what a call returned.

        The plain reference in the same precision is asked only where the table's bound is exceeded.
        """
        error, worst = self.distance(found, mode)
        precision = PRECISIONS[self.task.precision]
        if error <= precision.allowed:
            return Verdict(error, worst, precision.allowed)
        if mode not in self.floors:
            # the reference computes all steps in one call
            its_mode = "forward" if MODES[mode].stepwise else mode
            with products(precision.products):
                self.floors[mode] = self.distance(outputs(plain(self.task), its_mode), mode)[0]
        return Verdict(error, worst, max(precision.allowed, 2 * self.floors[mode]))

    def distance(self, found: Mapping[str, Tensor], mode: str) -> tuple[float, str]:
        """The largest relative error and the name of what has it; a nan counts as infinite."""
        errors = {name: _relative(found[name], wanted) for name, wanted in self.exact[mode].items()}
        worst = max(errors, key=lambda name: errors[name])
        return errors[worst], worst


def _exact(task: Task) -> Ready:
    """The task in float64, on a GPU by torch.nn: the reference starts dozens of kernels a step.

    By the reference where torch.nn has no such row or no second derivatives, and for float64 rows,
    in which torch.nn is one of the engines that are compared.
    """
    higher = any(MODES[mode].penalty for mode in task.row.modes)
    if task.device != "cpu" and task.precision != "float64" and not higher:
        found = by_torch(task.exact())
        if found is not None:
            return found
    return plain(task.exact())


def by_torch(task: Task) -> Ready | None:
    """The task by torch.nn; None where it has no such row."""
    engine = Packed() if task.row.lengths else Torch()
    if not engine.concerns(task) or task.row.resets or engine.refuses(task):
        return None
    return next(engine.candidates(task))


def outputs(ready: Ready, mode: str) -> dict[str, Tensor]:
    """What one call returns, by name."""
    found = (tensor.detach() for tensor in ready.run(mode))
    return dict(zip(ready.names(mode), found))


def bounded(task: Task) -> Task:
    """The part of a task on which engines are compared."""
    row = task.row
    kind = "cpu" if task.device == "cpu" else "cuda"
    states = STATES[kind] // (row.hidden * row.layers * row.directions)
    steps = min(row.steps, STEPS, max(FEW, states // row.batch))
    batch = min(row.batch, max(1, states // steps))
    return task.part(steps, batch)


def _relative(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape:
        return math.inf
    norm = float(wanted.norm())
    # a gradient that is 0 by nature has no relative error
    error = float((found.to(torch.float64) - wanted).norm()) / (norm if norm > 0 else 1.0)
    return math.inf if math.isnan(error) else error
