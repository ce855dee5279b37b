"""ONNX Runtime on a CPU: the row's layer as a user deploys it, by `torch.onnx.export`."""

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrnn.bench.engines.base import Engine, Inference, Ready, hx_of
from openrnn.bench.modes import MODES
from openrnn.bench.task import Task, layer_of, products

PACKAGES = ("onnx", "onnxscript", "onnxruntime")


class OnnxRuntime(Engine):
    """A session with torch's number of threads; inputs and outputs are torch's memory.

    Args:
        apart: no other engine is in this process.
    """

    name, title = "onnxruntime", "ONNX Runtime"

    def __init__(self, apart: bool = False) -> None:
        self.apart = apart

    def concerns(self, task: Task) -> bool:
        return task.device == "cpu" and any(not MODES[mode].gradients for mode in task.row.modes)

    def refuses(self, task: Task) -> str | None:
        absent = [package for package in PACKAGES if find_spec(package) is None]
        if absent:
            return f"the package {absent[0]} is not installed"
        if task.row.resets or task.row.lengths:
            return "it is called without lengths and resets here"
        if task.precision != "float32":
            return f"it is called in float32 here, not {task.precision}"
        if torch.get_num_threads() > 1 and not self.apart:
            return "its threads spin and slow others of this process"
        return None

    def candidates(self, task: Task) -> Iterator[Ready]:
        session = _session(task)
        names = [each.name for each in session.get_inputs()]
        given = dict(zip(names, (tensor.numpy() for tensor in (task.x, *task.states))))
        output = session.get_outputs()[0].name

        def call() -> Tensor:
            return torch.from_numpy(session.run([output], given)[0])

        yield Inference(task, self.name, call)


def _session(task: Task) -> Any:
    runtime: Any = import_module("onnxruntime")
    layer = layer_of(task.row)
    layer.load_state_dict(task.weights)
    given = (task.x, hx_of(task.states)) if task.states else (task.x,)
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    # torch's exporter raises where cuDNN's settings of convolutions and networks differ
    with tempfile.TemporaryDirectory() as folder, products("tf32"), _silent():
        path = Path(folder) / "row.onnx"
        torch.onnx.export(layer.eval(), given, path, dynamo=True, verbose=False)
        return runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@contextmanager
def _silent() -> Iterator[None]:
    """Without what torch's exporter says of itself: absent packages, its own old habits."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
