"""A cell as its user would write it: a Python loop over its own function, eager or compiled."""

import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from openrnn.bench.cases import TORCH_CELLS
from openrnn.bench.engines.base import Engine, Ready, leaf
from openrnn.bench.task import Task
from openrnn.cells import lookup

MODE = "default"  # of torch.compile; "reduce-overhead" may not keep a step's outputs for later ones
STEPS = 2048  # more take a compiled loop minutes to differentiate
Step = Callable[..., tuple[Tensor, ...]]


class Eager(Engine):
    """A loop of steps in plain PyTorch; the input product of all steps at once."""

    name, title = "eager", "Python, eager"

    def concerns(self, task: Task) -> bool:
        return task.row.cell not in TORCH_CELLS

    def refuses(self, task: Task) -> str | None:
        row = task.row
        if lookup(row.cell).dependent_product:
            return f"{row.cell} multiplies twice a step; this loop has one product"
        if row.states:
            return "this loop begins with states of 0"
        if row.bidirectional or row.lengths or row.resets:
            return "this loop goes one way, without lengths or resets"
        if row.steps > STEPS:
            return f"{row.steps} steps, more than {STEPS} take minutes"
        return None

    def candidates(self, task: Task) -> Iterator[Ready]:
        yield _loop(task, _step_of(task))


class Compiled(Eager):
    """The same loop, its step by torch.compile: a compiled loop would take minutes for each T."""

    name, title = "compiled", f"Python, step compiled (mode {MODE})"

    def refuses(self, task: Task) -> str | None:
        if task.device == "cpu" and not any(map(shutil.which, ("g++", "clang++", "cl"))):
            return "torch.compile needs a C++ compiler on a CPU, and finds none"
        return super().refuses(task)

    def candidates(self, task: Task) -> Iterator[Ready]:
        # without this, a step of another row would count against the limit of recompilations
        torch.compiler.reset()
        yield _loop(task, torch.compile(_step_of(task), mode=MODE, dynamic=False, fullgraph=True))


def _step_of(task: Task) -> Step:
    """One step: input side (B, G*H), W_hh, b_hh, unit parameters, states -> new states."""
    cell = lookup(task.row.cell)
    kinds: list[Any] = [
        namedtuple(kind, names) if names else None
        for kind, names in (
            ("Gates", cell.gates), ("States", cell.states), ("Params", cell.unit_params),
        )
    ]  # fmt: skip
    gates, states, vectors = kinds

    def step(
        x: Tensor, w_hh: Tensor, b_hh: Tensor, unit: list[Tensor], before: list[Tensor]
    ) -> tuple[Tensor, ...]:
        r = linear(before[0], w_hh, b_hh)
        count = len(cell.gates)
        p = vectors(*unit) if vectors else None
        return cell(gates(*x.chunk(count, -1)), gates(*r.chunk(count, -1)), states(*before), p)

    return step


def _loop(task: Task, step: Step) -> Ready:
    row = task.row
    cell = lookup(row.cell)
    leaves = {"x": leaf(task.x), **{name: leaf(w) for name, w in task.weights.items()}}

    def call() -> Tensor:
        y = leaves["x"]
        for layer in range(row.layers):
            w_ih, w_hh, b_ih, b_hh = (
                leaves[f"{kind}_l{layer}"]
                for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
            unit = [leaves[f"{name}_l{layer}"] for name in cell.unit_params]
            zeros = y.new_zeros(row.batch, row.hidden)
            states = [zeros for _ in cell.states]
            outputs = []
            for x in linear(y, w_ih, b_ih).unbind():
                states = list(step(x, w_hh, b_hh, unit, states))
                outputs.append(states[0])
            y = torch.stack(outputs)
        return y

    return Ready(task, call, leaves)
