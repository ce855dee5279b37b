"""The decorator, names, keys and pickles of cells; the equations of those that ship, once more."""

import copy
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from cases import CELLS, distance
from torch import tanh

import openrnn
from openrnn import cells
from openrnn.errors import CellError, OpenRNNError


@openrnn.cell(gates="a", states="h")
def leaky(x, r, s):
    return 0.5 * s.h + 0.5 * tanh(x.a + r.a)


def plain(x, r, s):
    return tanh(x.a + r.a)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"gates": "i i"}, "gates must be distinct identifiers, got 'i i'"),
        ({"gates": "i 2"}, "gates must be distinct identifiers, got 'i 2'"),
        ({"gates": "a", "states": "h h"}, "states must be distinct"),
        ({"gates": "a", "params": "p-q"}, "params must be distinct"),
        ({"gates": ""}, "at least one gate and one state"),
        ({"gates": "a", "states": ""}, "at least one gate and one state"),
    ],
)
def test_bad_names(names, message):
    with pytest.raises(CellError, match=message):
        openrnn.cell(**names)


@pytest.mark.parametrize(
    ("params", "function", "wanted"),
    [
        ("", lambda x, r: x.a, "(x, r, s)"),
        ("", lambda x, s, r: x.a, "(x, r, s)"),
        ("", lambda x, r, s, p: x.a, "(x, r, s)"),
        ("q", lambda x, r, s: x.a, "(x, r, s, p)"),
        ("q", lambda x, r, s, clip, p: x.a, "(x, r, s, p)"),
        ("", lambda x, r, s, *rest: x.a, "(x, r, s)"),
    ],
)
def test_bad_arguments(params, function, wanted):
    with pytest.raises(CellError) as caught:
        openrnn.cell(gates="a", params=params, name="odd")(function)
    assert f"cell 'odd' must take {wanted}" in str(caught.value).replace(
        wanted[:-1] + "), with", wanted + ", with"
    )
    assert "odd" not in cells._CELLS


@pytest.mark.parametrize("name", ["two words", "", "tab\tbed"])
def test_a_name_is_one_word(name):
    with pytest.raises(CellError, match="one word"):
        openrnn.cell(gates="a", name=name or " ")(plain)


def test_an_error_of_a_cell_is_a_value_error():
    assert issubclass(CellError, ValueError)
    assert issubclass(CellError, OpenRNNError)


def test_a_cell_is_a_function_of_names_or_tuples():
    a, b, h = torch.randn(3, 2, 4)
    wanted = 0.5 * h + 0.5 * tanh(a + b)
    named = leaky(SimpleNamespace(a=a), SimpleNamespace(a=b), SimpleNamespace(h=h))
    assert torch.equal(named[0], wanted)
    assert torch.equal(leaky.step((a,), (b,), (h,))[0], wanted)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_number_of_states(count):
    @openrnn.cell(gates="a", states="h c", name="miscounted")
    def cell(x, r, s):
        return (x.a,) * count if count != 1 else x.a

    one = torch.ones(1)
    with pytest.raises(CellError, match=f"must return 2 states .*, got {count}"):
        cell.step((one,), (one,), (one, one))
    with pytest.raises(CellError, match="miscounted"):
        openrnn.Recurrent(cell, 2, 3)(torch.zeros(1, 1, 2))


def test_a_wrong_kind_of_states():
    @openrnn.cell(gates="a", states="h c", name="listed")
    def cell(x, r, s):
        return [x.a, s.c]

    one = torch.ones(1)
    with pytest.raises(CellError, match="got list"):
        cell.step((one,), (one,), (one, one))


def test_lookup():
    assert cells.lookup("lstm") is openrnn.cells.lstm
    with pytest.raises(CellError, match=r"no cell 'lstmm' is defined here; known: .*lstm"):
        cells.lookup("lstmm")


def test_spec_names_the_cell():
    spec = cells.peephole_lstm.spec(3, 4, num_layers=2)
    assert (spec.cell, spec.gates, spec.states) == (
        "peephole_lstm",
        ("i", "f", "g", "o"),
        ("h", "c"),
    )
    assert spec.unit_params == ("p_i", "p_f", "p_o")
    assert cells.lookup(spec.cell) is cells.peephole_lstm


@pytest.mark.parametrize("cell", [*CELLS.values(), leaky], ids=lambda cell: cell.key)
def test_pickle_and_copies_are_the_cell_itself(cell):
    assert pickle.loads(pickle.dumps(cell)) is cell
    assert copy.deepcopy(cell) is cell


def test_a_pickled_layer_runs_in_another_process(tmp_path):
    torch.manual_seed(0)
    layer, x = openrnn.Recurrent(leaky, 2, 3), torch.ones(2, 1, 2)
    (tmp_path / "layer").write_bytes(pickle.dumps((layer, x)))
    program = (
        "import pickle, sys; layer, x = pickle.load(open(sys.argv[1], 'rb')); "
        "print(layer(x)[0].sum().item())"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "layer")]
    path = [entry for entry in sys.path if entry]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, env={"PYTHONPATH": ":".join(path)}
    )
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) == pytest.approx(layer(x)[0].sum().item(), rel=1e-6)


def define_twice():
    def make(sign):
        @openrnn.cell(gates="a", name="twin")
        def twin(x, r, s):
            return sign * tanh(x.a + r.a)

        return twin

    return make(1), make(-1)


def test_twins_of_a_notebook_stay_apart():
    """A cell defined again under its name gets a key of its own; layers of both keep working."""
    first, second = define_twice()
    assert first.name == second.name == "twin"
    assert first.key != second.key
    torch.manual_seed(0)
    ours, other = openrnn.Recurrent(first, 2, 3), openrnn.Recurrent(second, 2, 3)
    other.load_state_dict(ours.state_dict())
    x = torch.randn(1, 2, 2)
    assert torch.equal(ours(x)[0], -other(x)[0])
    for layer in ours, other:
        for again in copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)):
            assert torch.equal(again(x)[0], layer(x)[0])


def test_a_redefined_cell_does_not_replace_that_of_a_copied_layer(monkeypatch):
    """The module's name now means the new cell; a copy of the old layer is still the old one."""
    module = sys.modules[__name__]
    old, new = define_twice()
    for cell in old, new:
        cell.function.__qualname__ = "renamed"
        monkeypatch.setattr(module, "renamed", cell, raising=False)
    layer = openrnn.Recurrent(old, 2, 3)
    x = torch.randn(1, 2, 2)
    for again in copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)):
        assert again.cell is old
        assert torch.equal(again(x)[0], layer(x)[0])


def test_a_layer_of_a_twin_loads_where_the_cell_has_another_key(tmp_path):
    """A script that defines its cell once reads what a notebook saved after defining it twice."""
    source = (
        "import openrnn, torch\n"
        "@openrnn.cell(gates='a')\n"
        "def mine(x, r, s):\n"
        "    return torch.tanh(x.a + r.a)\n"
    )
    (tmp_path / "mycell.py").write_text(source)
    save = (
        "import importlib, pickle, openrnn, mycell; importlib.reload(mycell);"
        "pickle.dump(openrnn.Recurrent(mycell.mine, 2, 3), open('layer', 'wb'))"
    )
    load = (
        "import pickle, torch; layer = pickle.load(open('layer', 'rb')); layer(torch.ones(1, 1, 2))"
    )
    path = ":".join(["."] + [entry for entry in sys.path if entry])
    for program in save, load:
        ran = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env={"PYTHONPATH": path},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr


def test_pickle_of_an_unknown_cell_says_so():
    with pytest.raises(CellError, match="no cell 'gone' is defined here"):
        cells._find("gone", "openrnn.cells", "gone")


@pytest.mark.parametrize("cell", [cells.gru, cells.mgu, cells.gru_reset_before, leaky])
def test_a_projection_is_refused_where_h_is_read(cell):
    """h then has another width than the gates."""
    with pytest.raises(ValueError, match="does not read its emitted state"):
        openrnn.Recurrent(cell, 3, 4, proj_size=2)


@pytest.mark.parametrize("cell", [cells.lstm, cells.peephole_lstm, cells.coupled_lstm, cells.slstm])
def test_a_projection_is_taken_where_it_is_not(cell):
    y, (h_n, c_n, *_) = openrnn.Recurrent(cell, 3, 4, proj_size=2, backend="reference")(
        torch.zeros(5, 1, 3)
    )
    assert (y.shape[-1], h_n.shape[-1], c_n.shape[-1]) == (2, 2, 4)


@pytest.mark.parametrize("cell", [cells.gru, cells.rnn_tanh, cells.slstm, leaky])
def test_clip_is_refused_where_nothing_is_clipped(cell):
    with pytest.raises(ValueError, match="cell_clip needs a cell that clips"):
        openrnn.Recurrent(cell, 3, 4, cell_clip=1.0)


def test_clip_is_the_identity_by_default():
    names = dict.fromkeys("ifgo", torch.full((2,), 3.0))
    gates, before = SimpleNamespace(**names), SimpleNamespace(h=torch.zeros(2), c=torch.ones(2) * 9)
    _, c = cells.lstm(gates, gates, before)
    assert (c > 9).all()
    _, clipped = cells.lstm(gates, gates, before, clip=lambda c: c.clamp(max=1))
    assert (clipped < 2).all()


def step(cell, seed=0, **states):
    """Random inputs of one step by name, and what the cell makes of them."""
    dice = torch.Generator().manual_seed(seed)

    def draw(names):
        return {name: torch.randn(5, generator=dice, dtype=torch.float64) for name in names}

    x, r, s = draw(cell.gates), draw(cell.gates), draw(cell.states) | states
    found = cell(SimpleNamespace(**x), SimpleNamespace(**r), SimpleNamespace(**s))
    return SimpleNamespace(**x), SimpleNamespace(**r), SimpleNamespace(**s), found


def logistic(v):
    return 1 / (1 + (-v).exp())


def test_mgu_equations():
    x, r, s, (h,) = step(cells.mgu)
    f = logistic(x.f + r.f)
    wanted = s.h + f * ((x.n + f * r.n).tanh() - s.h)
    assert distance(h, wanted) < 1e-14


def test_coupled_equations():
    x, r, s, (h, c) = step(cells.coupled_lstm)
    f = logistic(x.f + r.f)
    wanted = f * s.c + (1 - f) * (x.g + r.g).tanh()
    assert distance(c, wanted) < 1e-14
    assert distance(h, logistic(x.o + r.o) * wanted.tanh()) < 1e-14


def test_slstm_is_exponential_gating_without_a_stabiliser():
    """h = o c / n with i = exp(i~), f = sigmoid(f~), from empty states, stabiliser or not."""
    zero = torch.zeros(5, dtype=torch.float64)
    states, c, n = dict.fromkeys(cells.slstm.states, zero), zero, zero
    for seed in range(12):
        x, r, _, found = step(cells.slstm, seed, **states)
        i, f = (x.i + r.i).exp(), logistic(x.f + r.f)
        c, n = f * c + i * (x.z + r.z).tanh(), f * n + i
        assert distance(found[0], logistic(x.o + r.o) * c / n) < 1e-13
        states = dict(zip(cells.slstm.states, found))


def test_slstm_does_not_overflow():
    """Input gates of 1000 and of -1000, values and gradients."""
    torch.manual_seed(0)
    layer = openrnn.Recurrent(cells.slstm, 2, 3, backend="reference")
    x = (torch.randn(20, 4, 2) * 1000).requires_grad_()
    y, states = layer(x)
    y.sum().backward()
    assert all(value.isfinite().all() for value in (y, *states, x.grad))
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
