"""OpenRNN itself, as `auto` or one named backend runs it, and cuDNN's best algorithm through it."""

from collections.abc import Iterator

import torch

from openrnn import dispatch
from openrnn.bench.cases import TORCH_CELLS
from openrnn.bench.engines.base import Engine, Ready, leaf, leaves_of
from openrnn.bench.task import PRECISIONS, Task, layer_of
from openrnn.spec import ALGORITHMS, Problem

# steps from which persist_dynamic, far slower than the others, is left out
LONG = 2000


class Ours(Engine):
    """Our layer, as a user calls it."""

    name, title = "openrnn", "openrnn"

    def __init__(self, backend: str = "auto") -> None:
        self.backend = backend

    def refuses(self, task: Task) -> str | None:
        table = dispatch.explain(problem(task, "forward"), self.backend)
        if table.chosen is not None:
            return None
        return "; ".join(f"{name}: {'; '.join(why)}" for name, why in table.refused.items())

    def candidates(self, task: Task) -> Iterator[Ready]:
        yield _ready(task, self.backend, "auto")


class Cudnn(Engine):
    """cuDNN called by us, by each of its algorithms."""

    name, title = "cudnn", "cuDNN, best algorithm"

    def concerns(self, task: Task) -> bool:
        return task.device != "cpu" and task.row.cell in TORCH_CELLS

    def refuses(self, task: Task) -> str | None:
        reasons = dispatch.explain(problem(task, "training"), "cudnn").refused.get("cudnn")
        return "; ".join(reasons) if reasons else None

    def candidates(self, task: Task) -> Iterator[Ready]:
        for algorithm in ALGORITHMS[1:]:
            if algorithm != "persist_dynamic" or task.whole.steps <= LONG:
                made = _ready(task, "cudnn", algorithm)
                made.chosen = dict.fromkeys(task.row.modes, algorithm)
                yield made


def problem(task: Task, mode: str) -> Problem:
    """What the row asks of the dispatcher."""
    row, device = task.row, torch.device(task.device)
    capability = processors = None
    if device.type == "cuda":  # not dispatch.place_of: older sources run under this, --baseline
        about = torch.cuda.get_device_properties(device)
        capability, processors = (about.major, about.minor), about.multi_processor_count
    return Problem(
        row.spec, PRECISIONS[task.precision].dtype, device.type, capability,
        grad=mode == "training", lengths=row.lengths, reset=row.resets > 0, steps=row.steps,
        batch=row.batch, processors=processors,
    )  # fmt: skip


def _ready(task: Task, backend: str, algorithm: str) -> Ready:
    layer = layer_of(
        task.row, backend=backend, algorithm=algorithm, device=task.device, dtype=task.x.dtype
    )
    layer.load_state_dict(task.weights)
    x, extra = leaf(task.x), {}
    if task.lengths is not None:
        extra["lengths"] = task.lengths
    if task.reset is not None:
        extra["reset"] = task.reset
    chosen = {
        mode: dispatch.explain(problem(task, mode), backend).chosen or "none"
        for mode in task.row.modes
    }
    return Ready(task, lambda: layer(x, **extra)[0], leaves_of(layer, x), chosen)


def plain(task: Task) -> Ready:
    """The task by the reference: in float64 what every engine is compared with."""
    return _ready(task, "reference", "auto")
