"""What a schedule depends on: a key of the caches of `schedules`."""

from dataclasses import replace
from typing import NamedTuple

from openrnn.backends.base import Call
from openrnn.backends.fused.layer import LayerKernels, layer_of_call
from openrnn.spec import Problem, Spec


class ScheduleKey(NamedTuple):
    """What a schedule depends on."""

    problem: Problem
    device: int
    steps: int
    batch: int
    reset_states: bool
    all_states: bool  # of a backward: gradients of them are given
    spin_limit: int = 0  # see `kernels.kernel`
    forks: bool = False  # of a backward: the products after loops run side by side

    @classmethod
    def of(
        cls, call: Call, all_states: bool, spin_limit: int, forks: bool = False
    ) -> "ScheduleKey":
        """The key of a call, forward or backward."""
        x = call.x
        steps, batch, _ = x.shape
        return cls(
            call.problem, x.device.index or 0, steps, batch, bool(call.reset_states), all_states,
            spin_limit, forks,
        )  # fmt: skip

    @property
    def spec(self) -> Spec:
        return self.problem.spec

    @property
    def mask_names(self) -> tuple[str, ...]:
        """The names of the masks that the loops read."""
        return ("lengths",) * self.problem.lengths + ("reset",) * self.problem.reset

    @property
    def call_problem(self) -> Problem:
        """The problem as `explain` is given it, with what the call passes."""
        return replace(
            self.problem, steps=self.steps, batch=self.batch, reset_state=self.reset_states
        )

    @property
    def recompute(self) -> bool:
        """Whether backward runs forward's loops again."""
        return self.problem.grad and self.spec.recompute == "gates"

    def layer(self, layer: int, direction: int) -> LayerKernels:
        """One layer and direction."""
        index = layer * self.spec.directions + direction
        return layer_of_call(
            self.spec, index, self.problem.dtype, self.device, self.steps, self.batch,
            self.spin_limit,
        )  # fmt: skip
