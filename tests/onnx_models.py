"""Models for ONNX, what ONNX Runtime makes of them, and what ours do."""

import logging
from collections import Counter
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

onnx = pytest.importorskip("onnx", reason="needs onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
if not find_spec("onnxscript"):  # a second, for the worker that exports alone
    pytest.skip("torch.onnx.export needs onnxscript", allow_module_level=True)

MARKS = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning"),  # torch's own
    pytest.mark.filterwarnings("ignore:# The axis name:UserWarning"),  # T of x and of reset
    pytest.mark.usefixtures("one_thread", "onnx_functions"),
]

F32 = torch.float32
SIZES = {
    "x": {0: "T", 1: "B"},
    "lengths": {0: "B"},
    "reset": {0: "T", 1: "B"},
    "h": {1: "B"},
    "c": {1: "B"},
}


class Parts(nn.Module):
    """Several modules in one graph, because an export takes a second: name -> outputs."""

    def __init__(self, parts):
        super().__init__()
        torch.manual_seed(0)
        self.calls = {name: call for name, (_, call) in parts.items()}
        self.parts = nn.ModuleDict({name: make() for name, (make, _) in parts.items()})

    def forward(self, x, lengths, reset, h, c):
        given = {"x": x, "lengths": lengths, "reset": reset, "h": h, "c": c}
        return {name: call(self.parts[name], **given) for name, call in self.calls.items()}


def drawn(steps, batch, dtype=F32):
    """Inputs of `Parts`: lengths have a 0, the padding of x is nan."""
    generator = torch.Generator().manual_seed(steps)
    x = torch.randn(steps, batch, 4, generator=generator).to(dtype)
    lengths = torch.arange(batch) * steps // (batch - 1)
    past = torch.arange(steps)[:, None] >= lengths
    return {
        "x": x,
        "lengths": lengths,
        "reset": (torch.rand(steps, batch, generator=generator) > 0.6) | past,
        "h": torch.randn(2, batch, 4, generator=generator).to(dtype),
        "c": torch.randn(2, batch, 4, generator=generator).to(dtype),
    }


def padded(x, lengths):
    """x with nan past the lengths."""
    steps = torch.arange(x.shape[0])[:, None]
    return torch.where((steps < lengths)[..., None], x, torch.nan)


def export(model, inputs, sizes=SIZES, **options):
    """The program of `torch.onnx.export`, checked by onnx."""
    logging.disable(logging.WARNING)  # of torchvision, which is not installed
    try:
        program = torch.onnx.export(
            model, kwargs=inputs, dynamo=True, verbose=False, dynamic_shapes=sizes, **options
        )
    finally:
        logging.disable(logging.NOTSET)
    onnx.checker.check_model(program.model_proto, full_check=True)
    return program


def session(program, **options):
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    settings.log_severity_level = 4
    for name, value in options.items():
        setattr(settings, name, value)
    model = program.model_proto.SerializeToString()
    return onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])


def run(opened, inputs, like):
    """ONNX Runtime's outputs, in the structure of ours."""
    feed = {given.name: inputs[given.name].numpy() for given in opened.get_inputs()}
    return tree_unflatten(
        [torch.from_numpy(value) for value in opened.run(None, feed)], tree_flatten(like)[1]
    )


def both(parts, dtype=F32, fill=True, **options):
    """The program, and for each part the outputs of ONNX Runtime and ours, at other T and B."""
    model = Parts(parts).eval().to(dtype)
    # drawn with T 5 and B 3, run with T 8 and B 4
    program = export(model, drawn(5, 3, dtype), **options)
    inputs = drawn(8, 4, dtype)
    if fill:
        inputs["x"] = padded(inputs["x"], inputs["lengths"])
    with torch.no_grad():
        wanted = model(**inputs)
    return program, run(session(program), inputs, wanted), wanted


def kinds(program):
    """How many operators of each kind there are, those of weights left out."""
    return Counter(node.op_type for node in program.model.graph)


def assert_close(found, wanted, dtype=F32):
    """As near as sums in another order are; ONNX Runtime has a tanh and a sigmoid of its own."""
    flat, wanted = tree_flatten(found)[0], tree_flatten(wanted)[0]
    assert len(flat) == len(wanted)
    for place, (one, other) in enumerate(zip(flat, wanted, strict=True)):
        assert one.shape == other.shape, place
        assert other.isfinite().all(), place
        torch.testing.assert_close(one, other, rtol=0, atol=16 * torch.finfo(dtype).eps)
