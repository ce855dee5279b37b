"""Traces evaluated in plain float64 against autograd: shipped cells, awkward ones, and refusals."""

import operator
import os
import re
import subprocess
import sys
import threading
from dataclasses import fields

import pytest
import torch
from cases import CELLS, CLIP, distance, thinned
from torch import nn, sigmoid, tanh
from torch.nn import functional as F

import openrnn
from openrnn import cells, fresh, store
from openrnn.codegen.cuda import derivative_parts
from openrnn.codegen.graph import PRIMITIVES, Graph, Node, factored
from openrnn.codegen.kept import kept
from openrnn.codegen.trace import Traced, _identity, _trace, trace
from openrnn.errors import CellError

# what each primitive means, written down once more
MEANING = {
    "neg": operator.neg,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "not": torch.logical_not,
    "where": lambda mask, a, b: torch.where(mask, torch.as_tensor(a).double(), b),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "logsigmoid": F.logsigmoid,
    **{
        name: getattr(torch, name)
        for name in "abs sign exp expm1 log log1p log2 log10 sqrt reciprocal sin cos tan asin acos "
        "atan atan2 sinh cosh asinh acosh atanh erf erfc lgamma hypot fmod copysign sigmoid tanh "
        "floor ceil trunc round".split()
    },
}


def evaluate(graph, given):
    """The outputs of a graph for inputs by name."""
    values = dict(given)

    def value(arg):
        found = values[arg] if isinstance(arg, str) else arg
        return torch.as_tensor(found, dtype=torch.float64) if isinstance(found, float) else found

    for node in graph.nodes:
        assert node.op in PRIMITIVES
        assert node.name not in values, "one name, one value"
        values[node.name] = MEANING[node.op](*map(value, node.args))
    return {name: value(arg) for name, arg in graph.outputs.items()}


def test_every_primitive_has_a_meaning():
    assert MEANING.keys() == PRIMITIVES


def draw(cell, seed):
    """Inputs and cotangents of one step by the names of traces."""
    dice = torch.Generator().manual_seed(seed)
    names = [f"{side}_{gate}" for side in "xr" for gate in cell.gates]
    names += [f"s_{state}" for state in cell.states] + [f"p_{name}" for name in cell.unit_params]
    given = {n: torch.randn(64, generator=dice, dtype=torch.float64) for n in names}
    cotangents = {
        f"d_{s}": torch.randn(64, generator=dice, dtype=torch.float64) for s in cell.states
    }
    return given, cotangents


def agree(cell, clip=None, seed=0, loose=1e-12):
    """Step and derivative of the trace are the cell and its autograd, to `loose`."""
    traced = trace(cell, clip)
    given, cotangents = draw(cell, seed)
    if cell.key == "slstm":  # a normaliser is at least 1 once something is stored, 0 before
        given["s_n"] = torch.where(given["s_n"] > 1, 0.0, given["s_n"].abs() + 1)
    leaves = {name: value.clone().requires_grad_() for name, value in given.items()}

    def take(kind, names):
        return tuple(leaves[f"{kind}_{name}"] for name in names)

    bounded = {} if clip is None else {"clip": lambda c: c.clamp(*clip)}
    new = cell.step(
        take("x", cell.gates), take("r", cell.gates), take("s", cell.states),
        take("p", cell.unit_params), **bounded,
    )  # fmt: skip
    stepped = evaluate(traced.step, given)
    assert [*stepped] == [*cell.states]
    for name, value in zip(cell.states, new):
        assert distance(stepped[name].expand(64), value.detach()) < 1e-13, name

    # what backward has: sums of the summed gates, the kept sides, states, vectors, cotangents
    sums = {f"a_{gate}": given[f"x_{gate}"] + given[f"r_{gate}"] for gate in traced.summed}
    summed = evaluate(traced.summed_step, given | sums)
    assert all(
        distance(summed[name].expand(64), value) < 1e-13 for name, value in zip(cell.states, new)
    )
    kept = {name: (given | sums)[name] for name in traced.saved}
    others = {name: value for name, value in given.items() if name[0] in "sp"}
    found = evaluate(traced.derivative, kept | others | cotangents)
    early, late = derivative_parts(traced)
    assert not any(name in cotangents for node in early.nodes for name in node.args)
    again = evaluate(late, evaluate(early, kept | others) | cotangents)
    assert again.keys() == found.keys()
    assert all(distance(again[name].expand(64), found[name].expand(64)) < 1e-12 for name in found)
    weighed = sum((value * cotangents[f"d_{name}"]).sum() for name, value in zip(cell.states, new))
    weighed.backward()
    wanted = {f"d{name}": leaf.grad for name, leaf in leaves.items()}
    for gate in cell.gates:
        if f"da_{gate}" in found:
            found[f"dx_{gate}"] = found[f"dr_{gate}"] = found.pop(f"da_{gate}")
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        zero = torch.zeros(64, dtype=torch.float64)
        assert distance(found[name].expand(64), zero if want is None else want) < loose, name
    return traced


ELEMENTWISE = [name for name, cell in CELLS.items() if not cell.dependent_product]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_shipped_cells(name, seed):
    agree(CELLS[name], seed=seed)


@pytest.mark.parametrize("clip", [CLIP, (0.0, 0.0), (-9.0, 9.0)], ids=str)
@pytest.mark.parametrize("name", [n for n in ELEMENTWISE if CELLS[n].takes_clip])
def test_clip(name, clip):
    agree(CELLS[name], clip)


def test_the_gradient_of_clip_passes_on_the_closed_interval():
    graph = trace(CELLS["coupled_lstm"], (-1.0, 1.0)).derivative
    given = dict.fromkeys(graph.inputs, torch.full((5,), 0.3, dtype=torch.float64))
    given["s_c"] = torch.tensor([-1.5, -1.0, 0.0, 1.0, 1.5], dtype=torch.float64)
    ds_c = evaluate(graph, given)["ds_c"].expand(5)
    assert [bool(value) for value in ds_c] == [False, True, True, True, False]


@pytest.mark.parametrize("eps", [None, 0.2])
def test_the_gradient_of_logit_beyond_its_bounds(eps):
    """As torch's, nan among them, which its own decomposition makes 0."""

    @openrnn.cell(gates="a", name="logit_of_a_gate")
    def cell(x, r, s):
        return torch.logit(x.a, eps) + r.a

    graph = trace(cell).derivative
    at = [-1.0, 0.0, 0.1, 0.2, 0.3, 0.8, 0.9, 1.0, 2.0, torch.inf, torch.nan]
    x = torch.tensor(at, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(torch.logit(x, eps).sum(), x)
    given = {"x_a": x.detach(), "d_h": torch.ones_like(x)}
    torch.testing.assert_close(evaluate(graph, given)["dx_a"], wanted, equal_nan=True)


ACTIVATIONS = {
    "silu": F.silu,
    "mish": F.mish,
    "gelu": F.gelu,
    "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
    "softplus": F.softplus,
    "softplus_sharp": lambda v: F.softplus(v, beta=3.0, threshold=2.0),
    "elu": F.elu,
    "selu": F.selu,
    "celu": lambda v: F.celu(v, alpha=0.7),
    "leaky_relu": lambda v: F.leaky_relu(v, 0.2),
    "relu": torch.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "logsigmoid": F.logsigmoid,
    "clamp": lambda v: v.clamp(-0.3, 0.7),
    "clamp_min": lambda v: v.clamp(min=-0.3),
    "clip_tensor": lambda v: torch.minimum(v, v * v),
    "where": lambda v: torch.where(v > 0.1, v * v, torch.exp(v)),
    "where_number": lambda v: torch.where(v > 0.1, v, 0.5),
    "masked_fill": lambda v: v.masked_fill(v < -0.2, 0.25),
    "logic": lambda v: torch.where((v > -1) & ~(v > 1) | (v > 2), v.sin(), v.cos()),
    "equal": lambda v: torch.where(v == v.floor(), 1.0, v),
    "power_2": lambda v: v**2,
    "power_3": lambda v: v**3,
    "power_half": lambda v: (1 + v * v) ** 0.5,
    "power_minus": lambda v: (1 + v * v) ** -1.5,
    "power_tensor": lambda v: (1 + v * v) ** v,
    "number_to_power": lambda v: 2.0**v,
    "square_root": lambda v: (1 + v.square()).sqrt(),
    "rsqrt": lambda v: (1 + v.square()).rsqrt(),
    "log": lambda v: (2 + v.abs()).log() + torch.log1p(v.abs()),
    "expm1": torch.expm1,
    "erf": torch.erf,
    "abs_and_sign": lambda v: v.abs() + v.sign() * v,
    "maximum": lambda v: torch.maximum(v, v.neg() * 0.5),
    "division": lambda v: v / (1 + v * v) + 1 / (2 + v * v).reciprocal(),
    "reversed": lambda v: 3 - v - torch.sub(v, v * v, alpha=0.5),
    "in_place": lambda v: (v * 2).add_(v, alpha=0.25).mul_(0.5).sigmoid_(),
    "lerp": lambda v: torch.lerp(v, v * v, 0.3),
    "addcmul": lambda v: torch.addcmul(v, v, v, value=0.5),
    "detach": lambda v: v * v.detach(),
    "constants": lambda v: v * torch.ones_like(v) + torch.full_like(v, 0.25),
    "a_tensor_number": lambda v: v * torch.tensor(0.7),
    "logit": lambda v: torch.logit(0.1 + 0.8 * sigmoid(v)),
    "sinh": lambda v: torch.sinh(v) + torch.atan(v),
}


def activated(function, name):
    @openrnn.cell(gates="a b", states="h k", params="q", name=f"with_{name}")
    def cell(x, r, s, p):
        k = function(x.a + r.a) * p.q + s.k
        return tanh(k * function(x.b - r.b)), 0.5 * k + s.h

    return cell


@pytest.mark.parametrize("name", thinned(ACTIVATIONS, 6))
def test_activations(name):
    agree(activated(ACTIVATIONS[name], name))


def test_kept_is_what_the_derivative_reads():
    """And no more: what forward stores is memory."""
    assert trace(CELLS["lstm"]).saved == ("a_i", "a_f", "a_g", "a_o")
    assert trace(CELLS["rnn_tanh"]).saved == ("a_h",)
    assert set(trace(CELLS["gru"]).saved) == {"a_r", "a_z", "x_n", "r_n"}
    assert set(trace(CELLS["mgu"]).saved) == {"a_f", "x_n", "r_n"}
    assert set(trace(CELLS["coupled_lstm"]).saved) == {"a_f", "a_g", "a_o"}
    assert trace(CELLS["lstm"]).summed == set("ifgo")
    assert trace(CELLS["gru"]).summed == {"r", "z"}
    for name in ELEMENTWISE:
        traced = trace(CELLS[name])
        assert set(traced.saved) == {n for n in traced.derivative.reads if n[0] in "axr"}


def test_a_linear_gate_is_not_kept():
    @openrnn.cell(gates="a b", states="h")
    def linear(x, r, s):
        return x.a + r.a + 0.5 * s.h + tanh(x.b)

    traced = agree(linear)
    assert traced.saved == ("x_b",)
    assert traced.summed == {"a"}


def test_sides_that_differ_stay_apart():
    """x and r enter a sum, but are also read alone: two inputs, two gradients."""

    @openrnn.cell(gates="a b", states="h")
    def apart(x, r, s):
        return tanh(x.a + r.a) * r.a + tanh(x.b - r.b)

    traced = agree(apart)
    assert not traced.summed
    assert {"dx_a", "dr_a", "dx_b", "dr_b"} <= traced.derivative.outputs.keys()


def test_a_state_passed_on():
    @openrnn.cell(gates="a", states="h k")
    def passes(x, r, s):
        return s.k, x.a

    traced = agree(passes)
    assert traced.saved == ()
    assert traced.step.nodes == ()


def test_the_derivative_shares_work():
    """About 25 operations for an LSTM: common ones are computed once."""
    assert len(trace(CELLS["lstm"]).derivative.nodes) < 40
    assert len(trace(CELLS["lstm"]).step.nodes) <= 14


def test_what_gradients_meet_is_known_before_them():
    """What is left of an LSTM is the sum of both ways to c and six products, of a GRU five."""
    for name, sums, products in (("lstm", 1, 6), ("gru", 0, 5)):
        left = [node.op for node in derivative_parts(trace(CELLS[name]))[1].nodes]
        assert left.count("add") == sums
        assert left.count("mul") == products
        assert len(left) == sums + products


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_no_factor_is_a_constant(name):
    early, _ = derivative_parts(trace(CELLS[name]))
    assert all(any(isinstance(arg, str) for arg in node.args) for node in early.nodes)


def test_factored():
    """Products regroup and sums of one gradient merge; a choice keeps what it chooses."""
    nodes = (
        Node("one", "mul", ("d", "a")), Node("two", "mul", ("b", "one")),
        Node("three", "neg", ("d",)), Node("four", "add", ("two", "three")),
        Node("five", "div", ("four", "b")), Node("t", "gt", ("a", 0.0)),
        Node("six", "where", ("t", 0.0, "five")),
        Node("seven", "sub", ("six", "e")),
    )  # fmt: skip
    graph = Graph(("a", "b", "d", "e"), nodes, {"x": "five", "y": "six", "z": "seven"})
    early, late = factored(graph, frozenset("de")).split(frozenset("de"))
    assert [node.op for node in early.nodes] == ["mul", "add", "div", "gt"]
    assert [node.op for node in late.nodes] == ["mul", "where", "sub"]
    dice = torch.Generator().manual_seed(0)
    given = {n: torch.randn(64, generator=dice, dtype=torch.float64) for n in "abde"}
    both = evaluate(late, given | evaluate(early, given))
    for name, want in evaluate(graph, given).items():
        assert distance(both[name], want) < 1e-12


def test_names_survive():
    names = {node.name for node in trace(CELLS["lstm"]).step.nodes}
    assert {"sigmoid_i", "sigmoid_f", "sigmoid_o", "tanh_g"} <= names


def test_traces_are_kept_by_cell_and_clip():
    assert trace(CELLS["lstm"]) is trace(CELLS["lstm"])
    assert trace(CELLS["lstm"], CLIP) is not trace(CELLS["lstm"])


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_the_caller_s_modes_do_not_matter(mode):
    cell = activated(F.silu, f"under_{getattr(mode, '__name__', 'autocast').strip('<>')}")
    with mode():
        inside = trace(cell)
    outside = trace(activated(F.silu, "outside"))
    assert inside.derivative.nodes == outside.derivative.nodes
    assert inside.step.nodes == outside.step.nodes


@openrnn.cell(gates="a", states="h")
def signs_taken(x, r, s):
    return torch.copysign(x.a + r.a, -0.0) * 3 + torch.copysign(x.a + r.a, 0.0)


@openrnn.cell(gates="a", states="h")
def signs_chosen(x, r, s):
    return torch.where(x.a > 0, 0.0, -0.0).reciprocal().sign() + 0.1 * r.a


@pytest.mark.parametrize("cell", [signs_taken, signs_chosen], ids=lambda cell: cell.name)
def test_a_zero_keeps_its_sign(cell):
    """0.0 and -0.0 are equal, and no two operations on them are one."""
    agree(cell)
    layer, x = openrnn.Recurrent(cell, 3, 4), torch.randn(5, 2, 3)
    with torch.no_grad():
        layer.backend = "cpu"
        found = layer(x)[0]
        layer.backend = "reference"
        assert distance(found, layer(x)[0]) < 1e-5


def test_pruned():
    graph = Graph(
        ("a", "b"),
        (Node("one", "neg", ("a",)), Node("two", "exp", ("b",)), Node("three", "tanh", ("one",))),
        {"y": "three"},
    )
    assert [node.name for node in graph.pruned().nodes] == ["one", "three"]
    assert graph.pruned().reads == {"a"}


WEIGHT = torch.randn(3, 3)
NORM = nn.LayerNorm(3)
NOT_ELEMENTWISE = {
    "sum": lambda v: v - v.sum(),
    "mean": lambda v: v - v.mean(-1, keepdim=True),
    "amax": lambda v: v - v.amax(-1, keepdim=True),
    "_softmax": lambda v: v.softmax(-1),
    "mm": lambda v: v @ WEIGHT,
    "cumsum": lambda v: v.cumsum(-1),
    "flip": lambda v: v.flip(-1),
    "roll": lambda v: v.roll(1, -1),
    "sort": lambda v: v.sort(-1).values,
    "native_layer_norm": NORM,
    "cat": lambda v: torch.cat([v[..., :1], v[..., 1:]], -1),
    "_local_scalar_dense": lambda v: v * v.flatten()[0].item(),
    "rand_like": torch.rand_like,
    "dropout": lambda v: F.dropout(v, 0.5),
}


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_what_is_not_elementwise_is_refused_by_name_and_line(name):
    function = NOT_ELEMENTWISE[name]

    @openrnn.cell(gates="a", states="h", name="mixing")
    def cell(x, r, s):
        v = x.a + r.a
        return function(v) + s.h

    with pytest.raises(CellError) as caught:
        trace(cell)
    text = str(caught.value)
    why = r"(?:is not elementwise: .*|makes a Python number of a tensor .*)"
    found = re.fullmatch(rf"cell 'mixing': aten\.(\w+) \(line (\d+)\) {why}", text)
    assert found, text
    line = cell.function.__code__.co_firstlineno + 3
    assert int(found[2]) == line
    if name not in ("dropout", "rand_like", "_local_scalar_dense", "cat", "mm"):
        assert found[1] == name


def test_the_shape_must_stay():
    @openrnn.cell(gates="a", states="h", name="widening")
    def cell(x, r, s):
        return torch.zeros(1)

    with pytest.raises(
        CellError, match=r"'widening'.*must keep the shape \(2, 3\)|not elementwise"
    ):
        trace(cell)


def test_a_large_constant_is_refused():
    """A number may be a constant of a kernel, a tensor of many may not."""
    many = torch.randn(3)

    @openrnn.cell(gates="a", states="h", name="biased")
    def cell(x, r, s):
        return tanh(x.a + r.a + many)

    with pytest.raises(CellError, match=r"'biased' reads a tensor of shape \(3,\) from outside"):
        trace(cell)


def test_a_vector_of_one_number_of_units_is_refused():
    """And the message says how a cell gets one."""
    own = torch.randn(20)

    @openrnn.cell(gates="a", states="h", name="fitted")
    def cell(x, r, s):
        return tanh(x.a + r.a) * own

    with pytest.raises(CellError, match=r"'fitted' must work for any number of .* in params="):
        openrnn.Recurrent(cell, 2, 20)(torch.zeros(1, 1, 2))


def test_a_branch_on_values_is_refused():
    """It would be frozen at the example's branch."""

    @openrnn.cell(gates="a", states="h", name="branching")
    def cell(x, r, s):
        return tanh(x.a + r.a) if (x.a > 0).any() else s.h

    with pytest.raises(CellError, match="branching"):
        trace(cell)


def test_dependent_products_have_no_trace():
    with pytest.raises(CellError, match="two dependent products"):
        trace(CELLS["gru_reset_before"])


def test_a_refused_cell_says_so_when_it_runs():
    """Before any kernel is built, whichever backend was asked."""

    @openrnn.cell(gates="a", states="h", name="summing")
    def cell(x, r, s):
        return tanh(x.a + r.a).sum(-1, keepdim=True) + s.h

    for backend in ("auto", *openrnn.dispatch.BACKENDS):
        with pytest.raises(CellError, match=r"cell 'summing': aten.sum \(line \d+\) is not elem"):
            openrnn.Recurrent(cell, 2, 3, backend=backend)(torch.zeros(1, 1, 2))


def test_what_no_kernel_knows_runs_on_the_reference():
    @openrnn.cell(gates="a", states="h", name="bessel")
    def cell(x, r, s):
        return torch.special.i1(x.a + r.a)

    layer = openrnn.Recurrent(cell, 2, 3)
    table = openrnn.explain(layer, torch.zeros(1, 1, 2), quiet=True)
    assert table.chosen == "reference"
    assert "'bessel': no kernel knows prims.bessel_i1" in table.refused["cpu"][0]
    assert layer(torch.ones(1, 1, 2))[0].shape == (1, 1, 3)


def test_a_captured_tensor_is_refused():
    """A kernel would freeze its value and lose its gradient; the reference reads it as it is."""
    scale = torch.nn.Parameter(torch.tensor(2.0))

    @openrnn.cell(gates="a", states="h", name="capturing")
    def cell(x, r, s):
        return tanh(x.a + r.a * scale) * torch.tensor(0.5)

    with pytest.raises(CellError, match=r"reads a tensor of shape \(\) from outside.*params="):
        trace(cell)
    layer = openrnn.Recurrent(cell, 2, 3)
    layer(torch.ones(2, 1, 2))[0].sum().backward()
    assert scale.grad != 0


TRACED_TWICE = """
from openrnn import cells
from openrnn.codegen.trace import trace
trace(cells.rnn_tanh)
trace(cells.rnn_relu)  # in another thread: the first one's has ended
"""


@pytest.mark.parametrize("devices", ["", None])
def test_traces_of_several_threads_where_no_gpu_is_visible(devices):
    # CUDA builds of PyTorch before pytorch/pytorch#178950 crashed here without a visible GPU
    hidden = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    done = subprocess.run(
        [sys.executable, "-c", TRACED_TWICE], capture_output=True, text=True, check=False,
        env=os.environ | hidden,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_thread_that_never_ends_keeps_the_fake_device_guard(monkeypatch):
    """As a CUDA build of PyTorch has it where no GPU is visible."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    keep = fresh._keep_fake_device_guard.__wrapped__

    def count():
        return sum(thread.name == "openrnn-device-guard" for thread in threading.enumerate())

    before = count()
    keep()
    assert count() == before + 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    keep()
    assert count() == before + 1

    def broken():
        raise RuntimeError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(fresh, "FakeTensorMode", broken)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    keep()  # and does not wait for ever
    assert count() == before + 1


def sliced(x, r, s):
    return tanh(x.f[..., :8] + r.f[..., :8])


def zeroed(x, r, s):
    a = x.f + r.f
    a[..., :8] = 0
    return a * 1.0


def wide(x, r, s):
    return tanh(x.f + r.f) * (2 if x.f.shape[-1] >= 16 else 1)


def just_16(x, r, s):
    return tanh(x.f + r.f) if x.f.shape[-1] == 16 else x.f


def many(x, r, s):
    return tanh(x.f + r.f) * (2 if len(x.f) > 3 else 1)


def tall(x, r, s):
    return tanh(x.f + r.f) * (2 if x.f.shape[0] > x.f.shape[1] else 1)


def single(x, r, s):
    return tanh(x.f + r.f) * (2 if x.f.shape[-1] == 1 else 1)


@pytest.mark.parametrize(
    ("function", "asked"),
    [(sliced, "H < 8"), (zeroed, "H < 8"), (wide, "H < 16"), (just_16, "H != 16"), (many, "B == 3"),
     (tall, "B <= H"), (single, "for B 1 and H 1")],
)  # fmt: skip
def test_what_depends_on_sizes_has_no_kernel(function, asked):
    cell = openrnn.cell(gates="f", states="h", name=f"by_size_{function.__name__}")(function)
    with pytest.raises(CellError, match=asked):
        trace(cell)
    layer = openrnn.Recurrent(cell, 4, 16)
    assert openrnn.explain(layer, quiet=True).chosen == "reference"


def test_constants_of_any_size_have_kernels():
    @openrnn.cell(gates="f", states="h")
    def shifted(x, r, s):
        return tanh(x.f[...] + r.f) + 0.5 * torch.ones(x.f.shape) + torch.zeros_like(s.h)

    assert trace(shifted).step.nodes


def test_traces_of_shipped_cells_are_kept(tmp_path, monkeypatch):
    """Whole, under a name that tells another use of the same function apart."""
    monkeypatch.setattr(store, "folder", lambda: tmp_path)
    made = fresh.run(_trace, cells.lstm, CLIP)
    before = kept("one", lambda: made, Traced)
    again = kept("one", lambda: pytest.fail("made twice"), Traced)
    for found in (before, again):
        assert all(getattr(found, one.name) == getattr(made, one.name) for one in fields(made))
    with pytest.raises(RuntimeError, match="another"):
        kept("two", lambda: _raised("another"), Traced)
    twin = openrnn.cell(gates="o g f i", states="h c", name="lstm_again")(cells.lstm.function)
    assert _identity(twin, CLIP) != _identity(cells.lstm, CLIP) != _identity(cells.lstm, None)


def _raised(text):
    raise RuntimeError(text)
