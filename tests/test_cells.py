"""The decorator, names, keys and pickles of cells; the equations of those that ship, once more."""

import copy
import pickle
import sys
from functools import partial
from types import SimpleNamespace

import forks
import numpy as np
import pytest
import torch
from cases import CELLS, ON_CPU, distance, require
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
        ({"gates": []}, "at least one gate and one state"),
        ({"gates": "i if"}, "gates must not be words of Python itself, got 'if'"),
        ({"gates": "a", "states": "None"}, "states must not be words of Python itself, got 'None'"),
        ({"gates": "a", "params": "p in"}, "params must not be words of Python itself, got 'in'"),
        ({"gates": 3}, "gates must be names, as 'f n' or .*, got 3"),
        ({"gates": ["i", 1]}, r"gates must be names, as 'f n' or .*, got \['i', 1\]"),
        ({"gates": "a", "states": None}, "states must be names, as 'f n' or .*, got None"),
        ({"gates": plain}, r"needs the names of the gates: @openrnn.cell\(gates='f n'\)"),
        *(
            ({"gates": "a", "params": f"p {name}"}, f"of another parameter, got '{name}'")
            for name in ("weight_ih", "weight_hh", "weight_hr", "bias_ih", "bias_hh")
        ),
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


@pytest.mark.parametrize("kind", [list, tuple])
def test_names_may_be_a_list(kind):
    made = openrnn.cell(gates=kind("if"), states=kind("hc"), params=kind("p"), name="listed_names")(
        lambda x, r, s, p: (x.i, s.c)
    )
    assert (made.gates, made.states, made.unit_params) == (("i", "f"), ("h", "c"), ("p",))


def test_keys_are_never_given_twice():
    """Nor where a name looks like a key."""
    names = ["often", "often@2", "often", "often"]
    made = [openrnn.cell(gates="a", name=name)(plain) for name in names]
    assert len({one.key for one in made}) == 4
    assert all(cells.lookup(one.key) is one for one in made)


UNDECLARED = {
    "x": ("x.b", lambda x, r, s, p: x.a + x.b, "x has a"),
    "r": ("r.b", lambda x, r, s, p: r.b, "r has a"),
    "s": ("s.c", lambda x, r, s, p: s.c, "s has h"),
    "p": ("p.p", lambda x, r, s, p: p.p, "p has q"),
}


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("place", UNDECLARED)
def test_an_undeclared_name(place, backend):
    require(backend)
    name, function, has = UNDECLARED[place]
    bad = openrnn.cell(gates="a", params="q", name="undeclared")(function)
    layer = openrnn.Recurrent(bad, 2, 3, backend=backend)
    with pytest.raises(CellError, match=f"cell 'undeclared' reads {name}, {has}"):
        layer(torch.zeros(1, 1, 2))


def test_other_attribute_errors_are_the_cells_own():
    bad = openrnn.cell(gates="a", name="buggy")(lambda x, r, s: x.a.tanhh())
    with pytest.raises(AttributeError, match="tanhh"):
        openrnn.Recurrent(bad, 2, 3, backend="reference")(torch.zeros(1, 1, 2))


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
    with pytest.raises(CellError, match="got a list"):
        cell.step((one,), (one,), (one, one))


def test_lookup():
    assert cells.lookup("lstm") is openrnn.cells.lstm
    with pytest.raises(CellError, match=r"no cell 'lstmm' is defined here; there are .*lstm"):
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
    ran = forks.python(program, tmp_path / "layer")
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
    for program in save, load:
        ran = forks.python(program, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr


def test_a_cell_of_the_main_script_goes_to_a_spawned_process_and_back(tmp_path):
    """There multiprocessing runs the main script as the module `__mp_main__`, also `__main__`."""
    (tmp_path / "script.py").write_text(
        "import openrnn\n"
        "def act(x):\n"
        "    return x * x\n"
        "def make(act):\n"
        "    @openrnn.cell(gates='f', states='h')\n"
        "    def mine(x, r, s):\n"
        "        return 0.5 * s.h + act(x.f + r.f)\n"
        "    return mine\n"
        "mine = make(act)\n"
    )
    run = (
        "import pickle, runpy, sys, types, openrnn\n"
        "module = types.ModuleType({name!r})\n"
        "sys.modules['__main__'] = sys.modules[{name!r}] = module\n"
        "module.__dict__.update(runpy.run_path('script.py', run_name={name!r}))\n"
        "module.act.__module__ = {name!r}\n"
    )
    save = "pickle.dump(openrnn.Recurrent(module.mine, 2, 3), open('layer', 'wb'))\n"
    load = "layer = pickle.load(open('layer', 'rb')); assert layer.cell is module.mine\n"
    sent, spawned = (run.format(name=name) for name in ("__main__", "__mp_main__"))
    for program in (sent + save, spawned + load + save, sent + load):
        ran = forks.python(program, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr


def test_pickle_of_an_unknown_cell_says_so():
    mark = leaky.fingerprint()
    with pytest.raises(CellError, match="no cell 'gone' is defined here"):
        cells._find("gone", "openrnn.cells", "gone", mark)
    with pytest.raises(CellError, match=r"cell 'gone' is no\.where: No module named 'no'"):
        cells._find("gone", "no", "where", mark)
    with pytest.raises(CellError, match=r"no cell here has the code .* of the pickled 'leaky'"):
        cells._find("leaky", __name__, "leaky", ("another Python", "", ""))


FACTORY = """
import openrnn, torch

def make(scale, gates="a", act=torch.tanh):
    @openrnn.cell(gates=gates)
    def scaled(x, r, s, {clip}):
        return {body}
    return scaled
"""
SAVE = (
    "import pickle, openrnn, factory; made = [factory.make(k) for k in (2.0, 3.0)];"
    "pickle.dump([openrnn.Recurrent(cell, 2, 3) for cell in made], open('layers', 'wb'))"
)
LOAD = (
    "import pickle, factory; {made};"
    "layers = pickle.load(open('layers', 'rb'));"
    "print(*[layer.cell.function.__closure__[-1].cell_contents for layer in layers])"
)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Writes the factory and runs a program beside it."""
    folder = tmp_path_factory.mktemp("factory")

    def ask(program, body="torch.tanh(scale * x.a + r.a)"):
        (folder / "factory.py").write_text(FACTORY.format(body=body, clip="clip"))
        return forks.python(f"import sys; sys.dont_write_bytecode = True; {program}", cwd=folder)

    saved = ask(SAVE)
    assert saved.returncode == 0, saved.stderr
    return ask


def test_cells_of_a_factory_are_told_apart_by_what_they_captured(processes):
    """Another process calls the factory in another order, so that keys name other cells."""
    ran = processes(LOAD.format(made="[factory.make(k) for k in (3.0, 8.0, 2.0)]"))
    assert ran.stdout.split() == ["2.0", "3.0"], ran.stderr


@pytest.mark.parametrize(
    ("made", "body"),
    [
        ("[factory.make(k) for k in (2.0, 3)]", "torch.tanh(scale * x.a + r.a)"),
        ("[factory.make(k) for k in (2.0, 3.0)]", "torch.tanh(scale * x.a - r.a)"),
        ("[factory.make(k, gates='a b') for k in (2.0, 3.0)]", "torch.tanh(scale * x.a + r.a)"),
    ],
    ids=["value", "code", "gates"],
)
def test_no_other_cell_of_a_factory_is_taken(processes, made, body):
    ran = processes(LOAD.format(made=made), body)
    assert "CellError: no cell here has the code and captured values of the pickled" in ran.stderr
    assert "factory.make.<locals>.scaled" in ran.stderr


def captures(value, default=None):
    @openrnn.cell(gates="a", name="captures")
    def capturing(x, r, s):
        return value and x.a

    capturing.function.__defaults__ = default
    return capturing


def halved(v):
    return v / 2


DISTINCT = {
    "int": 1, "float": 1.0, "bool": True, "zero": 0.0, "minus_zero": -0.0, "none": None,
    "text": "1", "tuple": (1, 2), "list": [1, 2], "dict": {"a": 1}, "set": {1, 2},
    "dtype": torch.float32, "module": torch, "builtin": torch.tanh, "method": torch.Tensor.tanh,
    "function": halved, "torch_function": torch.nn.functional.silu,
    "lambda": lambda v: v * 2, "other_lambda": lambda v: v + 2, "type": torch.nn.Linear,
    "partial": partial(halved, 1), "other_partial": partial(halved, 2), "cell": cells.lstm,
    "other_cell": cells.gru, "numpy": np.float32(1),
}  # fmt: skip


def test_digests_tell_values_apart():
    made = {name: captures(value) for name, value in DISTINCT.items()}
    made["defaults"] = captures(1, (1,))
    marks = {name: one.fingerprint() for name, one in made.items()}
    assert len(set(marks.values())) == len(marks)
    assert marks == {name: one.fingerprint() for name, one in made.items()}
    again = {name: captures(value).fingerprint() for name, value in DISTINCT.items()}
    assert again == {name: marks[name] for name in DISTINCT}
    for one in made.values():
        assert pickle.loads(pickle.dumps(one)) is one


def test_a_digest_does_not_see_that_a_function_ran():
    """Nor lines and words about it."""
    before = leaky.fingerprint()
    for _ in range(200):
        leaky.step((torch.ones(1),), (torch.ones(1),), (torch.ones(1),))
    assert leaky.fingerprint() == before
    source = "def f(x, r, s):\n    {doc}\n    return x.a + 2.0 * s.h\n"
    marks = []
    for doc in "'one'", "'two'\n":
        space = {}
        exec(source.format(doc=doc), space)
        marks.append(openrnn.cell(gates="a", name="told")(space["f"]).fingerprint())
    assert marks[0] == marks[1]


@pytest.mark.parametrize(
    "value", [torch.ones(1), torch.nn.Linear(1, 1), [object()], np.ones(2)],
    ids=["tensor", "module", "object", "array"],
)  # fmt: skip
def test_what_cannot_be_compared_is_not_pickled(value):
    made = captures(value)
    with pytest.raises(CellError, match="cell 'captures' cannot be pickled: it captures a "):
        pickle.dumps(made)
    assert copy.deepcopy(made) is made


def test_another_python_compares_what_was_captured():
    one, other = captures("here alone"), captures("here alone, too")
    place = __name__, one.function.__qualname__
    for made in one, other:
        _, _, values = made.fingerprint()
        assert cells._find("captures", *place, ("another Python", "other code", values)) is made


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


def branching(x, r, s):
    return x.f if x.f > 0 else r.f


def masking(x, r, s):
    a = torch.tanh(x.f + r.f)
    a[a < 0] = 0
    return a


@pytest.mark.parametrize("function", [branching, masking])
def test_where_is_named_in_place_of_branches_and_masks(function):
    cell = openrnn.cell(gates="f", states="h")(function)
    with pytest.raises(CellError, match=r"cell '(branching|masking)'.*use torch\.where"):
        openrnn.Recurrent(cell, 3, 4)(torch.zeros(2, 3, 3))
