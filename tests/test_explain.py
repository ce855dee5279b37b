"""`explain`: the same table from a layer, a spec or a problem; it prints and runs nothing."""

import re
import sys
import types

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import openrnn
from openrnn import cells, dispatch
from openrnn.errors import NoBackendError
from openrnn.native import nvrtc


def chosen(table):
    return next(row.backend for row in table.rows if row.chosen)


def test_prints_and_returns_the_table(capsys):
    table = openrnn.explain(openrnn.LSTM(3, 4))
    printed = capsys.readouterr().out
    assert printed.rstrip("\n") == table.text
    first, *rows = printed.splitlines()
    rows = [row for row in rows if row[2] != " "]  # first lines
    assert "cell=lstm" in first
    assert "float32 cpu" in first
    assert [row[2:].split()[0] for row in rows] == list(dispatch.BACKENDS)
    assert sum(row.startswith("> ") for row in rows) == 1
    assert "runs" in next(row for row in rows if row.startswith("> "))


@pytest.mark.parametrize("kind", [openrnn.LSTM, openrnn.LSTMCell])
def test_under_autocast_the_dtype_is_that_of_a_call(kind):
    layer, x = kind(3, 4), torch.zeros(5, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x)[0].dtype == torch.bfloat16
        assert "bfloat16 cpu" in openrnn.explain(layer, x, quiet=True).text
        assert "float16 cpu" in openrnn.explain(layer, x, dtype="float16", quiet=True).text
        assert "float64 cpu" in openrnn.explain(layer.double(), x.double(), quiet=True).text
    assert "float32 cpu" in openrnn.explain(layer.float(), x, quiet=True).text


@pytest.mark.parametrize("grad", [False, True])
def test_measures_if_asked(grad):
    table = openrnn.explain(openrnn.LSTM(3, 4), torch.zeros(7, 5, 3), grad=grad, measure=True)
    (row,) = (row for row in table.rows if row.chosen)
    what = "forward and backward" if grad else "forward"
    assert row.details[-1].startswith(f"{what} of 7 steps of B 5: ")
    assert row.details[-1] in table.text
    assert not any(other.details for other in table.rows if other is not row)


def test_lists_the_operations_if_asked():
    layer, x = openrnn.LSTM(3, 4, 2, bidirectional=True), torch.zeros(7, 5, 3)
    table = openrnn.explain(layer, x, schedule=True, quiet=True, backend="reference")
    (row,) = table.rows
    assert row.details[-1] == "reference has no schedule: it runs the call as a whole"
    with pytest.raises(ValueError, match="a schedule needs T and B"):
        openrnn.explain(layer, schedule=True, quiet=True)


def test_asks_and_measures_the_device_that_the_module_is_on(monkeypatch):
    asked, about = [], types.SimpleNamespace(major=9, minor=0, multi_processor_count=60)
    module = sys.modules["openrnn.explain"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda where: asked.append(where) or about
    )
    monkeypatch.setattr(module, "measured", lambda *given: asked.append(given[2]) or "measured")
    table = openrnn.explain(
        cells.lstm.spec(3, 4), device="cuda:1", backend="reference", measure=True, quiet=True
    )
    assert asked == [torch.device("cuda:1")] * 2
    assert (table.problem.capability, table.problem.processors) == ((9, 0), 60)


def test_printing_it_prints_nothing_twice(capsys):
    table = openrnn.explain(cells.lstm.spec(3, 4), quiet=True)
    assert not capsys.readouterr().out
    print(table)
    assert capsys.readouterr().out == f"{table.text}\n"
    print(openrnn.explain(cells.lstm.spec(3, 4)))
    assert capsys.readouterr().out == f"{table.text}\n<openrnn.dispatch.Table: cpu runs it>\n"


def test_each_reason_has_a_line():
    table = openrnn.explain(
        openrnn.Recurrent(cells.gru_reset_before, 3, 4), device="cuda", backend="cpu", quiet=True
    )
    (row,) = table.rows
    assert len(row.reasons) > 1
    first, *more = table.text.splitlines()[1:]
    assert first == f"  cpu  {row.reasons[0]}"
    assert more == [" " * 7 + reason for reason in row.reasons[1:]]


def test_says_what_runs():
    layer, x = openrnn.Recurrent(cells.gru_reset_before, 3, 4), torch.zeros(2, 5, 3)
    table = openrnn.explain(layer, x, quiet=True)
    assert table.chosen == chosen(table) == "reference"
    assert any("two dependent products" in reason for reason in table.refused["cpu"])
    assert (table.problem.steps, table.problem.batch) == (2, 5)


def test_batch_first_and_unbatched_sizes():
    layer = openrnn.LSTM(3, 4, batch_first=True)
    problem = openrnn.explain(layer, torch.zeros(2, 5, 3), quiet=True).problem
    assert (problem.steps, problem.batch) == (5, 2)
    problem = openrnn.explain(layer, torch.zeros(7, 3), quiet=True).problem
    assert (problem.steps, problem.batch) == (7, 1)


def test_takes_dtype_and_device_from_x_then_the_layer():
    layer = openrnn.LSTM(3, 4, dtype=torch.float64)
    assert openrnn.explain(layer, quiet=True).problem.dtype == torch.float64
    x = torch.zeros(2, 5, 3, dtype=torch.bfloat16)
    assert openrnn.explain(layer, x, quiet=True).problem.dtype == torch.bfloat16
    assert openrnn.explain(layer, x, dtype=torch.half, quiet=True).problem.dtype == torch.half
    assert openrnn.explain(layer, device="meta", quiet=True).problem.device == "meta"


def test_a_dtype_may_be_a_name():
    problem = openrnn.explain(openrnn.LSTM(3, 4), dtype="bfloat16", quiet=True).problem
    assert problem.dtype == torch.bfloat16
    for wrong in "float33", "nn", 32:
        with pytest.raises(ValueError, match=rf"as 'float32', got {wrong!r}"):
            openrnn.explain(openrnn.LSTM(3, 4), dtype=wrong)


def test_a_packed_sequence():
    x = pack_sequence([torch.zeros(n, 3) for n in (2, 7, 5)], enforce_sorted=False)
    problem = openrnn.explain(openrnn.GRU(3, 4), x, quiet=True).problem
    assert (problem.steps, problem.batch, problem.lengths) == (7, 3, True)
    assert problem.dtype == torch.float32


def test_one_step_modules():
    cell = openrnn.GRUCell(3, 4, backend="reference", dtype=torch.float64)
    table = openrnn.explain(cell, quiet=True)
    assert (table.chosen, table.problem.dtype) == ("reference", torch.float64)
    assert table.problem.spec.cell == "gru"
    for shape, batch in ((3,), 1), ((5, 3), 5):
        problem = openrnn.explain(cell, torch.zeros(shape), quiet=True).problem
        assert (problem.steps, problem.batch) == (1, batch)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (openrnn.LSTM, (5, 2, 4)),
        (openrnn.LSTM, (5, 4)),
        (openrnn.LSTM, (3,)),
        (openrnn.LSTM, (1, 5, 2, 3)),
        (openrnn.LSTMCell, (5, 4)),
        (openrnn.LSTMCell, (5, 2, 3)),
        (cells.lstm.spec, (5, 2, 4)),
    ],
)
def test_an_example_that_does_not_fit(make, shape):
    with pytest.raises(ValueError, match=re.escape(f"dimensions, got {shape}")) as caught:
        openrnn.explain(make(3, 4), torch.zeros(shape))
    assert str(caught.value).startswith("x must have 3 features in its last of ")


@pytest.mark.parametrize(
    ("what", "got"),
    [
        (torch.nn.LSTM(3, 4), "torch's LSTM; openrnn.convert makes one of it"),
        (torch.nn.Linear(3, 4), "torch's Linear; give one of its layers"),
        (openrnn.LSTMCell, "the class LSTMCell"),
        (None, "NoneType"),
        (cells.lstm, "Cell"),
    ],
)
def test_what_cannot_be_explained(what, got):
    with pytest.raises(TypeError) as caught:
        openrnn.explain(what)
    assert str(caught.value) == f"what must be a layer of openrnn, a Spec or a Problem, got {got}"


def test_says_grad_only_where_the_call_keeps_one():
    layer, x = openrnn.LSTM(3, 4), torch.zeros(2, 5, 3)

    def grad(*what):
        return openrnn.explain(*what, quiet=True).problem.grad

    assert grad(layer, x)
    layer.bias_hh_l0.requires_grad_(False)
    assert grad(layer)
    layer.requires_grad_(False)
    assert not grad(layer)
    assert not grad(layer, x)
    assert grad(layer, x.clone().requires_grad_())
    assert grad(layer, pack_sequence([x[:, 0].clone().requires_grad_()]))
    assert grad(layer.spec)
    with torch.no_grad():
        assert not grad(layer, x.clone().requires_grad_())
    assert openrnn.explain(layer, x, grad=True, quiet=True).problem.grad


@pytest.mark.parametrize("target", ["numba", "cuda"])
def test_show_prints_the_part_that_is_the_cell(target, capsys):
    assert openrnn.codegen.show(cells.lstm, target) is None
    printed = capsys.readouterr().out
    part = openrnn.codegen.show(cells.lstm, target, quiet=True)
    whole = openrnn.codegen.show(cells.lstm, target, full=True, quiet=True)
    assert not capsys.readouterr().out
    assert printed == part.rstrip() + "\n"
    assert 2 * len(part.splitlines()) < len(whole.splitlines())
    lines = {line.strip() for line in whole.splitlines()}
    own = [line for line in part.splitlines() if " = " in line]
    assert len(own) > 30
    assert all(line.strip() in lines for line in own)
    names = (
        ("step_row", "derivative_row") if target == "numba" else ("step", "factors", "derivative")
    )
    assert all(f" {name}(" in part for name in names)
    assert "gates 0 i, 1 f, 2 g, 3 o; states 0 h, 1 c" in part
    assert "full=True" in part


def test_show_takes_a_layer():
    clipped = openrnn.codegen.show(openrnn.LSTM(3, 4, cell_clip=0.25), quiet=True)
    assert clipped == openrnn.codegen.show(cells.lstm, cell_clip=(-0.25, 0.25), quiet=True)
    assert clipped != openrnn.codegen.show(openrnn.LSTMCell(3, 4), quiet=True)
    with pytest.raises(TypeError, match="must be a cell or a layer of openrnn, got LSTM"):
        openrnn.codegen.show(torch.nn.LSTM(3, 4))


def test_a_gpu_may_be_supposed():
    spec = cells.lstm.spec(128, 512)
    table = openrnn.explain(
        spec, device="cuda", dtype=torch.bfloat16, capability=(9, 0), quiet=True
    )
    assert table.problem.capability == (9, 0)
    assert any("device cuda" in reason for reason in table.refused["cpu"])
    assert table.chosen is not None


@pytest.mark.parametrize(
    ("layer", "asked", "elsewhere"),
    [
        (openrnn.LSTM(4, 8, 2), {}, "fused"),
        (openrnn.LSTM(4, 8, proj_size=2), {}, "cudnn"),
        (openrnn.LSTM(4, 8), {"dtype": "float64", "reset": True}, None),
        (openrnn.LSTM(4, 8), {"backend": "cudnn"}, "cudnn"),
        (openrnn.LSTM(4, 8), {"backend": "cpu"}, None),
        (openrnn.LSTM(4, 8), {"device": "cpu", "capability": None}, None),
        # where cuDNN is measured faster
        (openrnn.LSTM(4, 2048, device="meta"), {"x": torch.empty(25, 96, 4)}, "cudnn"),
    ],
)
def test_what_a_gpu_that_is_absent_would_run(monkeypatch, layer, asked, elsewhere):
    gone = {"fused": "no GPU", "cudnn": "no GPU"}
    monkeypatch.setattr(dispatch, "_absent", gone.get)
    given = {"device": "cuda", "dtype": "bfloat16", "capability": (9, 0), "quiet": True, **asked}
    table = openrnn.explain(layer, **given)
    assert table.elsewhere == elsewhere
    says = f"on a machine that has backend {elsewhere}, it would run this"
    assert (table.text.splitlines()[-1] == says) == (elsewhere is not None)
    monkeypatch.setattr(dispatch, "_absent", {}.get)
    name = asked.get("backend", "auto")
    there = dispatch.with_elsewhere(dispatch.explain(table.problem, name), name)
    assert there.elsewhere is None
    assert there.chosen == (elsewhere or table.chosen)


@pytest.mark.skipif(nvrtc.absent() is not None, reason=f"cannot compile: {nvrtc.absent()}")
def test_kernels_of_a_gpu_that_is_absent_are_described(monkeypatch):
    gone = {"fused": "no GPU", "cudnn": "no GPU"}
    monkeypatch.setattr(dispatch, "_absent", gone.get)
    asked = {"device": "cuda", "capability": (9, 0), "grad": True, "quiet": True}
    layer = openrnn.LSTM(4, 64)
    row = next(row for row in openrnn.explain(layer, **asked).rows if row.backend == "fused")
    assert row.reasons == ("no GPU",)
    assert [line.split(":")[0] for line in row.details] == ["forward", "backward"]
    assert all("us a step by the model" in line for line in row.details)
    monkeypatch.setattr(nvrtc, "absent", lambda: "package cuda-core is not installed")
    row = next(row for row in openrnn.explain(layer, **asked).rows if row.backend == "fused")
    (line,) = row.details
    assert line.startswith("its kernels cannot be compiled here")


def test_says_which_derivatives_are_the_references():
    """Without gradients forward mode alone is asked for, and is said to be."""
    layer, x = openrnn.LSTM(3, 4, proj_size=2, backend="cpu"), torch.zeros(7, 5, 3)
    why = "the reference's: the network has a projection"
    both = f"second derivatives and forward mode are {why}"
    assert both in openrnn.explain(layer, x, quiet=True).rows[0].details
    with torch.no_grad():
        assert f"forward mode is {why}" in openrnn.explain(layer, x, quiet=True).rows[0].details
    large = openrnn.LSTM(3, 64, backend="cpu"), torch.zeros(7, 128, 3)
    assert "second derivatives are the reference's: B * H is 8192" in openrnn.explain(*large).text
    assert "the reference's" not in openrnn.explain(*large, grad=False).text


def test_follows_grad_mode_and_training():
    layer = openrnn.LSTM(3, 4, 2, dropout=0.5)
    assert openrnn.explain(layer, quiet=True).problem.drops
    assert openrnn.explain(layer, quiet=True).problem.grad
    with torch.no_grad():
        problem = openrnn.explain(layer.eval(), quiet=True).problem
    assert not problem.drops
    assert not problem.grad
    assert openrnn.explain(layer, training=True, grad=True, quiet=True).problem.drops


@pytest.mark.parametrize("flag", ["lengths", "reset", "return_states", "transform"])
def test_what_the_call_would_pass(flag):
    table = openrnn.explain(openrnn.GRU(3, 4), quiet=True, **{flag: True})
    assert getattr(table.problem, flag)
    assert flag in str(table).splitlines()[0].split()


def test_states_that_resets_begin_from():
    """They are of a report alone, and their gradients are wanted where others are."""
    layer = openrnn.GRU(3, 4, backend="cpu")
    table = openrnn.explain(
        layer, torch.zeros(3, 2, 3), reset=True, reset_state=True, measure=True, quiet=True
    )
    assert "reset_state" in str(table).splitlines()[0].split()
    assert any("us a step measured" in line for line in table.rows[0].details)
    with pytest.raises(ValueError, match="got reset_state=True without reset=True, needs both"):
        openrnn.explain(layer, reset_state=True)


def test_a_named_backend_stands_alone():
    layer = openrnn.LSTM(3, 4, backend="reference")
    assert [row.backend for row in openrnn.explain(layer, quiet=True).rows] == ["reference"]
    table = openrnn.explain(layer, backend="cpu", transform=True, quiet=True)
    assert table.chosen is None
    assert [*table.refused] == ["cpu"]
    with pytest.raises(ValueError, match="backend must be auto or one of"):
        openrnn.explain(layer, backend="gpu", quiet=True)


def test_a_problem_as_it_is():
    problem = openrnn.Problem(cells.gru.spec(3, 4), torch.float32, "cpu", steps=9)
    assert openrnn.explain(problem, quiet=True).problem is problem


def test_tells_the_same_as_the_error():
    layer = openrnn.Recurrent(cells.gru_reset_before, 3, 4, backend="cpu")
    with pytest.raises(NoBackendError) as caught:
        layer(torch.zeros(2, 5, 3))
    assert caught.value.reasons == openrnn.explain(layer, quiet=True).refused


def test_runs_nothing(monkeypatch):
    for backend in dispatch.BACKENDS.values():
        monkeypatch.setattr(backend, "forward", None)
    monkeypatch.setattr(openrnn.reference, "run", None, raising=False)
    openrnn.explain(openrnn.LSTM(3, 4), torch.zeros(2, 5, 3), quiet=True)


@pytest.mark.parametrize(
    "given",
    [{"lengths": torch.tensor([1, 2, 4])}, {"reset": torch.zeros(4, 3, dtype=torch.bool)},
     {"lengths": torch.tensor([0, 0, 0]), "reset": torch.zeros(4, 3)}],
)  # fmt: skip
def test_what_a_call_passes_may_be_given_itself(given):
    layer, x = openrnn.LSTM(4, 8), torch.randn(4, 3, 4)
    found = openrnn.explain(layer, x, quiet=True, **given)
    assert str(found) == str(openrnn.explain(layer, x, quiet=True, **dict.fromkeys(given, True)))


def test_a_nested_input_has_lengths():
    layer, rows = openrnn.LSTM(4, 8, batch_first=True), [torch.randn(2, 4), torch.randn(3, 4)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged)
    found = openrnn.explain(layer, x, quiet=True).problem
    assert (found.steps, found.batch, found.lengths) == (3, 2, True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"capability": 9}, r"capability must be two numbers, as \(9, 0\), got 9"),
        ({"device": "bad"}, "device must be one of torch's, as 'cuda', got 'bad'"),
    ],
)
def test_what_no_call_would_take(given, message):
    with pytest.raises(ValueError, match=message):
        openrnn.explain(openrnn.LSTM(4, 8), **given)


def test_an_x_of_another_dtype_than_the_layer():
    layer, x = openrnn.LSTM(4, 8), torch.zeros(2, 3, 4, dtype=torch.float64)
    says = "the layer refuses this x: it is torch.float64, parameters are torch.float32"
    assert says in str(openrnn.explain(layer, x, quiet=True))
    assert "refuses this x" not in str(openrnn.explain(layer, x, dtype="float64", quiet=True))
    assert "refuses this x" not in str(openrnn.explain(layer, x.float(), quiet=True))


@pytest.mark.parametrize("batch_first", [False, True])
def test_masks_that_a_call_would_refuse_are_refused(batch_first):
    layer = openrnn.LSTM(3, 4, batch_first=batch_first)
    x = torch.randn(2, 6, 3) if batch_first else torch.randn(6, 2, 3)
    mask = torch.zeros(x.shape[:2], dtype=torch.bool)
    assert openrnn.explain(layer, x, lengths=torch.tensor([6, 0]), reset=mask, quiet=True).chosen
    for given, words in (
        ({"lengths": torch.tensor([9, 9])}, "lengths must be in"),
        ({"lengths": torch.tensor([1.5, 2.0])}, "lengths must be integers"),
        ({"reset": mask.T}, "reset must have shape"),
        ({"reset": mask + 2}, "reset must be bool or have only 0 and 1"),
    ):
        with pytest.raises(ValueError, match=words):
            openrnn.explain(layer, x, quiet=True, **given)


def test_what_no_gpu_is_there_for_is_not_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="measure=True runs the call"):
        openrnn.explain(openrnn.LSTM(3, 4), device="cuda", capability=(9, 0), measure=True)


def test_a_derivative_without_a_kernel_is_no_fault_of_the_cell(capsys):
    """It said that leaky_relu_backward is not elementwise, and named a line of our own source."""

    @openrnn.cell(gates="a", states="h")
    def leaky(x, r, s):
        return torch.nn.functional.leaky_relu(x.a + r.a, 0.1) + s.h * 0.1

    openrnn.explain(openrnn.Recurrent(leaky, 5, 7), torch.zeros(6, 3, 5))
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if "second derivatives" in line
    ]
    assert "aten.leaky_relu_backward has no kernel" in line
    assert "elementwise" not in line
