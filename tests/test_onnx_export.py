"""ONNX out: opsets, dtypes, programs exported before, large weights, and what is refused."""

from collections import Counter

import pytest
import torch
from onnx_models import (
    MARKS,
    SIZES,
    Parts,
    assert_close,
    both,
    drawn,
    export,
    kinds,
    onnx,
    onnxruntime,
    run,
    session,
)

import openrnn
from openrnn import cells

pytestmark = MARKS

NEWEST = min(onnx.defs.onnx_opset_version(), 26)  # onnxruntime 1.31 runs no later one


def lengths_too(layer, x, lengths, **_):
    return layer(x, lengths=lengths)


def layers(cell=cells.lstm, bidirectional=True):
    return lambda: openrnn.Recurrent(cell, 4, 4, bidirectional=bidirectional)


SMALL = {"node": (layers(), lengths_too), "scan": (layers(cells.mgu), lengths_too)}
FORWARD = {
    "node": (layers(bidirectional=False), lengths_too),
    "scan": (layers(cells.mgu, bidirectional=False), lengths_too),
}


# parts of a dtype and how they are exported: in both directions as users do it
WAYS = pytest.mark.parametrize(
    ("parts", "options"),
    [
        pytest.param(FORWARD, {"optimize": False}, id="forward"),
        pytest.param(SMALL, {}, id="both", marks=pytest.mark.slow),
    ],
)
# those that a landing runs, and all others
OPSETS = [16, *(pytest.param(n, marks=pytest.mark.slow) for n in range(17, NEWEST + 1))]


@pytest.mark.parametrize("opset", OPSETS)
def test_opsets(opset):
    """Below 18 by onnx's converter, which torch's exporter calls."""
    model = Parts(FORWARD if opset == 16 else SMALL).eval()
    program = export(model, drawn(5, 3), opset_version=opset)
    assert program.model.opset_imports[""] == opset
    inputs = drawn(8, 4)
    with torch.no_grad():
        wanted = model(**inputs)
    assert_close(run(session(program), inputs, wanted), wanted)


class Broken(torch.nn.Module):
    """Its export fails after the layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        self.layer(x)
        raise ValueError("no export")


def test_the_operator_has_no_decomposition_but_while_it_is_exported(monkeypatch):
    """Inductor raises where one exists, if the environment has CI set."""
    monkeypatch.setenv("CI", "true")
    model = openrnn.GRU(3, 4, backend="cpu").eval()
    x = torch.randn(5, 2, 3)
    for _ in range(2):
        torch.onnx.export(model, (x,), dynamo=True, verbose=False)
        assert torch.ops.openrnn.forward.default not in torch._decomp.decomposition_table
        with pytest.raises(Exception, match="export"):
            torch.onnx.export(Broken(model), (x,), dynamo=True, verbose=False)
        # as an export leaves it that ends in between
        torch._decomp.decomposition_table[torch.ops.openrnn.forward.default] = model
        torch.compiler.reset()
        with torch.no_grad():
            assert_close(torch.compile(model)(x), model(x))
        assert torch.ops.openrnn.forward.default not in torch._decomp.decomposition_table


@pytest.mark.parametrize("opset", [pytest.param(14, marks=pytest.mark.slow), 15])
def test_old_opsets_of_fixed_sizes(opset):
    """onnx's converter has no way below 16 for Identity, and none below 15 for Shape."""
    model = Parts({"node": (layers(), lambda layer, x, **_: layer(x))}).eval()
    inputs = drawn(5, 3)
    program = export(model, inputs, sizes=None, opset_version=opset)
    assert program.model.opset_imports[""] == opset
    with torch.no_grad():
        wanted = model(**inputs)
    assert_close(run(session(program), inputs, wanted), wanted)


@WAYS
def test_float64_is_a_scan(parts, options):
    """ONNX Runtime has no LSTM of it."""
    program, found, wanted = both(parts, torch.float64, **options)
    assert_close(found, wanted, torch.float64)
    assert kinds(program)["Scan"] == (4 if parts is SMALL else 2)


@WAYS
def test_float16(parts, options):
    """A node and a Scan; ours computes in float32 and rounds at the end."""
    _, found, wanted = both(parts, torch.float16, **options)
    assert_close(found, wanted, torch.float16)


@pytest.mark.parametrize("both_ways", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_bfloat16_passes_the_checker(both_ways):
    """Its LSTM comes with opset 22 and its products with no version of ONNX Runtime on a CPU."""
    model = Parts(SMALL if both_ways else FORWARD).eval().to(torch.bfloat16)
    program = export(model, drawn(5, 3, torch.bfloat16))
    assert kinds(program)["Scan"] == (4 if both_ways else 2)
    assert program.model.graph.outputs[0].dtype.name == "BFLOAT16"


def test_a_program_exported_before():
    model, inputs = (
        Parts(FORWARD | {"before": (layers(cells.gru_reset_before, False), lengths_too)}),
        drawn(8, 4),
    )
    model.eval()
    sizes = {name: {d: torch.export.Dim(of[d]) for d in of} for name, of in SIZES.items()}
    exported = torch.export.export(model, (), drawn(5, 3), dynamic_shapes=sizes)
    for program in (exported, exported.run_decompositions()):
        names = [str(node.target) for node in program.graph.nodes]
        assert names.count("openrnn.forward.default") == 3
    exported = exported.run_decompositions(openrnn.onnx.decompositions())
    assert "openrnn.forward.default" not in [str(node.target) for node in exported.graph.nodes]
    program = torch.onnx.export(exported, dynamo=True, verbose=False)
    with torch.no_grad():
        wanted = model(**inputs)
    assert_close(run(session(program), inputs, wanted), wanted)


def test_large_weights_are_constants_when_they_run(tmp_path):
    """torch's exporter folds up to 8192 numbers, onnxscript when asked, ONNX Runtime all."""
    parts = {"node": (lambda: openrnn.LSTM(4, 100, bidirectional=True), lambda m, x, **_: m(x))}
    program = export(Parts(parts).eval(), drawn(5, 3))
    path = tmp_path / "optimized.onnx"
    basic = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session(program, optimized_model_filepath=str(path), graph_optimization_level=basic)
    wanted = Counter(LSTM=1, Gather=2, Concat=1)
    assert Counter(node.op_type for node in onnx.load(path).graph.node) == wanted

    from onnxscript import optimizer

    optimizer.optimize(program.model, input_size_limit=10**9, output_size_limit=10**9)
    assert kinds(program) == wanted


def test_dropout_is_refused():
    model = Parts({"layer": (lambda: openrnn.GRU(4, 4, 2, dropout=0.5), lambda m, x, **_: m(x))})
    with (
        pytest.warns(UserWarning, match="training mode"),
        pytest.raises(Exception, match=r"call model.eval\(\) before torch.onnx.export"),
    ):
        export(model, drawn(5, 3))


def test_a_cell_with_a_tensor_is_refused():
    half = torch.tensor(0.5)

    @openrnn.cell(gates="a")
    def tensors(x, r, s):
        return torch.tanh(x.a + r.a) * half

    model = Parts({"layer": (layers(tensors), lambda m, x, **_: m(x))}).eval()
    with pytest.raises(Exception, match="cell 'tensors' reads a tensor that is none of x, r, s"):
        export(model, drawn(5, 3))
