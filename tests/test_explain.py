"""`explain`: the same table from a layer, a spec or a problem; it prints and runs nothing."""

import pytest
import torch

import openrnn
from openrnn import cells, dispatch
from openrnn.errors import NoBackendError


def chosen(table):
    return next(row.backend for row in table.rows if row.chosen)


def test_prints_and_returns_the_table(capsys):
    table = openrnn.explain(openrnn.LSTM(3, 4))
    printed = capsys.readouterr().out
    assert printed.rstrip("\n") == str(table)
    first, *rows = printed.splitlines()
    assert "cell=lstm" in first
    assert "float32 cpu" in first
    assert [row[2:].split()[0] for row in rows] == list(dispatch.BACKENDS)
    assert sum(row.startswith("> ") for row in rows) == 1
    assert "runs" in next(row for row in rows if row.startswith("> "))


def test_quiet(capsys):
    openrnn.explain(cells.lstm.spec(3, 4), quiet=True)
    assert not capsys.readouterr().out


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


def test_a_gpu_may_be_supposed():
    spec = cells.lstm.spec(128, 512)
    table = openrnn.explain(
        spec, device="cuda", dtype=torch.bfloat16, capability=(9, 0), quiet=True
    )
    assert table.problem.capability == (9, 0)
    assert any("device cuda" in reason for reason in table.refused["cpu"])
    assert table.chosen is not None


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
