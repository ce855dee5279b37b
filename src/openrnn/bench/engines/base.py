"""What an engine promises: reasons to refuse a row, or a call that can be checked and timed."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from openrnn.bench.modes import MODES
from openrnn.bench.task import Task
from openrnn.errors import NoBackendError

Step = Callable[[Tensor, Any], tuple[Tensor, Any]]


class Ready:
    """An engine that holds a task.

    Args:
        call: y (T, B, D*H) of the task's input.
        leaves: what training differentiates: `x` and the parameters by torch's names.
        chosen: the backend or algorithm that runs in a mode, where there is a choice; asked only
            after a call, because asking may compile.
        step: one step, of x_t (B, I) and states, None at first: y_t (B, D*H) and the next states.
            None where the engine has none.
    """

    def __init__(
        self,
        task: Task,
        call: Callable[[], Tensor],
        leaves: Mapping[str, Tensor],
        chosen: Callable[[str], str | None] = lambda _: None,
        step: Step | None = None,
    ) -> None:
        self.task, self.call, self.leaves, self.chosen = task, call, dict(leaves), chosen
        self.step = step
        self._y: Tensor | None = None  # of the forward call whose gradients are taken again

    def run(self, mode: str) -> list[Tensor]:
        """One call: y; with gradients also that of every leaf. This is what is timed."""
        if mode in ("forward", "host-forward"):
            with torch.no_grad():
                return [self.call()]
        if MODES[mode].stepwise:
            return [self._steps()]
        if mode == "host-one-thread":
            with torch.autograd.set_multithreading_enabled(False):
                return self._both()
        if mode == "host-backward":
            if self._y is None:
                self._y = self.call()
            return [self._y, *self._gradients(self._y, again=True)]
        if MODES[mode].penalty:
            return self._penalty()
        return self._both() if MODES[mode].gradients else [self.call()]

    @torch.no_grad()
    def _steps(self) -> Tensor:
        row = self.task.row
        if self.step is None or row.lengths or row.resets or row.bidirectional:
            raise NoBackendError(
                str(row), {"single steps": ["of one direction alone, without lengths and resets"]}
            )
        states: Any = hx_of(self.task.states)
        outputs = []
        for x_t in self.leaves["x"]:
            y_t, states = self.step(x_t, states)
            outputs.append(y_t)
        return torch.stack(outputs)

    def _both(self) -> list[Tensor]:
        y = self.call()
        return [y, *self._gradients(y)]

    def _penalty(self) -> list[Tensor]:
        y = self.call()
        (dx,) = torch.autograd.grad(y, self.leaves["x"], self.task.dy, create_graph=True)
        leaves = list(self.leaves.values())
        # of a bias that no gradient depends on torch has none
        grads = torch.autograd.grad(dx.square().sum(), leaves, materialize_grads=True)
        return [y, *grads]

    def _gradients(self, y: Tensor, again: bool = False) -> tuple[Tensor, ...]:
        leaves = list(self.leaves.values())
        return torch.autograd.grad(y, leaves, self.task.dy, retain_graph=again)

    def done(self, mode: str) -> None:
        """Frees what it holds for a mode that does not run any more."""
        self._y = None

    def names(self, mode: str) -> list[str]:
        """What `run` returns, by name."""
        return ["y", *(f"d{name}" for name in self.leaves)] if MODES[mode].gradients else ["y"]


class Inference(Ready):
    """An engine that computes no gradients."""

    def __init__(
        self, task: Task, name: str, call: Callable[[], Tensor],
        chosen: Callable[[str], str | None] = lambda _: None,
    ) -> None:  # fmt: skip
        super().__init__(task, call, {}, chosen)
        self._name = name

    def run(self, mode: str) -> list[Tensor]:
        if MODES[mode].gradients:
            raise NoBackendError(str(self.task.row), {self._name: ["it computes no gradients"]})
        return super().run(mode)


class Engine:
    """One way to run a row.

    Attributes:
        name: as in `--against` and in results; title: as in tables.
        graphed: it is timed from a CUDA graph, so it is compared with those that are.
    """

    name: str
    title: str
    graphed = False

    def concerns(self, task: Task) -> bool:
        """Whether rows of this kind are what it is for; of others there is no result."""
        return True

    def refuses(self, task: Task) -> str | None:
        """Why it cannot run the task, or None; a call may still raise NoBackendError."""
        return None

    def candidates(self, task: Task) -> Iterator[Ready]:
        """The task by this engine, in each way it has; the fastest right one counts.

        A part of a task has the same ways in the same order.
        """
        raise NotImplementedError


def hx_of(states: tuple[Tensor, ...]) -> Any:
    """States as a layer takes them: a tuple of several, one as it is, None where there are none."""
    return states if len(states) > 1 else states[0] if states else None


def leaf(tensor: Tensor) -> Tensor:
    """A tensor of one's own that is differentiated."""
    return tensor.detach().clone().requires_grad_()


def leaves_of(layer: torch.nn.Module, x: Tensor) -> dict[str, Tensor]:
    """x and the parameters of a layer under torch's names."""
    return {"x": x, **dict(layer.named_parameters())}
