"""OpenRNN itself, as `auto` or one named backend runs it, and cuDNN's algorithms through it.

This module also runs over the sources of other commits (`--baseline`), so it calls nothing but
layers and `openrnn.explain`.
"""

from collections.abc import Iterator
from functools import partial

import torch

from openrnn.bench.cases import TORCH_CELLS
from openrnn.bench.engines.base import Engine, Inference, Ready, hx_of, leaf, leaves_of
from openrnn.bench.modes import MODES
from openrnn.bench.task import PRECISIONS, WEIGHTS, Task, layer_of
from openrnn.explain import explain
from openrnn.nn import Layer

ALGORITHMS = ("standard", "persist_static", "persist_dynamic", "persist_static_small_h")
# steps from which persist_dynamic, far slower than the others, is left out
LONG = 2000


class Ours(Engine):
    """Our layer, as a user calls it.

    Args:
        options: more of the layer's, by name.
    """

    title = "openrnn"

    def __init__(self, backend: str = "auto", name: str = "openrnn", **options: str) -> None:
        self.backend, self.name, self.options = backend, name, options

    def candidates(self, task: Task) -> Iterator[Ready]:
        yield _ready(task, self.backend, **self.options)


class Unquantized(Ours):
    """Our layer in float32, on rows of weights of fewer bits."""

    def __init__(self, backend: str = "auto") -> None:
        super().__init__(backend, "float32")

    def concerns(self, task: Task) -> bool:
        return task.precision in WEIGHTS

    def candidates(self, task: Task) -> Iterator[Ready]:
        yield _of(task, _layer(task, self.backend))


class Recomputing(Ours):
    """Our layer where backward recomputes the gates instead of reading what forward saved."""

    def __init__(self, backend: str = "auto") -> None:
        super().__init__(backend, "recompute", recompute="gates")

    def concerns(self, task: Task) -> bool:
        return any(MODES[mode].gradients for mode in task.row.modes)


class Reference(Ours):
    """Our layer in plain torch, step by step."""

    title = "plain reference"

    def __init__(self) -> None:
        super().__init__("reference", "reference")


class DirectCudnn(Engine):
    """cuDNN called by us, by one of its algorithms or by whichever of them is fastest."""

    title = "cuDNN, best algorithm"

    def __init__(self, name: str = "cudnn", algorithms: tuple[str, ...] = ALGORITHMS) -> None:
        self.name, self.algorithms = name, algorithms

    def concerns(self, task: Task) -> bool:
        return task.device != "cpu" and task.row.cell in TORCH_CELLS

    def refuses(self, task: Task) -> str | None:
        if task.whole.steps > LONG and self.algorithms == ("persist_dynamic",):
            return f"persist_dynamic takes too long at {task.whole.steps} steps"
        one = {"algorithm": self.algorithms[0]} if len(self.algorithms) == 1 else {}
        row = task.row
        layer = layer_of(row, backend="cudnn", device="meta", **one)
        table = explain(
            layer, torch.empty(row.steps, row.batch, row.inputs, device="meta"), quiet=True,
            dtype=PRECISIONS[task.precision].dtype, device=task.device, grad=True,
            lengths=row.lengths, reset=row.resets > 0,
        )  # fmt: skip
        return "; ".join(table.refused["cudnn"]) if table.chosen is None else None

    def candidates(self, task: Task) -> Iterator[Ready]:
        for algorithm in self.algorithms:
            if algorithm != "persist_dynamic" or task.whole.steps <= LONG:
                made = _ready(task, "cudnn", algorithm=algorithm)
                made.chosen = partial(_always, algorithm)
                yield made


def _always(algorithm: str, _: str) -> str:
    return algorithm


def _layer(task: Task, backend: str, **options: str) -> Layer:
    """Our layer of the task's row, with its weights."""
    layer = layer_of(task.row, backend=backend, device=task.device, dtype=task.x.dtype, **options)
    layer.load_state_dict(task.weights)
    return layer


def _ready(task: Task, backend: str, **options: str) -> Ready:
    """The task by our layer; with weights of fewer bits where it asks for these."""
    if task.precision == "bf16-weights":
        options = {"precision": "bf16", **options}
    layer = _layer(task, backend, **options)
    if task.precision != "int8":
        return _of(task, layer)
    from openrnn.convert import quantize  # sources of other commits may have none

    quantize(layer, quiet=True)
    ready = _of(task, layer)
    return Inference(task, "openrnn", ready.call, ready.chosen)


def _of(task: Task, layer: Layer) -> Ready:
    """The task by a layer of ours that has its weights."""
    x = leaf(task.x)
    asked = {"lengths": task.lengths, "reset": task.reset, "reset_state": hx_of(task.fresh)}
    extra = {name: given for name, given in asked.items() if given is not None}
    first = hx_of(task.states)

    def chosen(mode: str) -> str | None:
        recorded = MODES[mode].gradients or mode == "host-recorded"
        given = x[:1] if MODES[mode].stepwise else x
        return explain(
            layer, given, grad=recorded, lengths="lengths" in extra, reset="reset" in extra,
            quiet=True,
        ).chosen  # fmt: skip

    return Ready(task, lambda: layer(x, first, **extra)[0], leaves_of(layer, x), chosen, layer.step)


def plain(task: Task) -> Ready:
    """The task by the reference: in float64 what every engine is compared with."""
    return _ready(task, "reference")
