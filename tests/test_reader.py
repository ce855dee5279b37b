"""What a trace must understand of a cell: dtypes, arguments, shapes, memory; else it is refused."""

import itertools
import random
import re

import pytest
import torch
from cases import ON_CPU, distance
from test_trace import agree
from torch import tanh

import openrnn
from openrnn.codegen import cuda, numba
from openrnn.codegen.check import check_elementwise
from openrnn.codegen.config import ForwardConfig
from openrnn.codegen.trace import trace
from openrnn.errors import CellError


def of(function, name):
    """A cell with a function of two values, neither of which is a plain sum of a gate."""

    @openrnn.cell(gates="a b", states="h", name=name)
    def cell(x, r, s):
        return function(2.0 * x.a + r.a, x.b - r.b) + 0.5 * s.h

    return cell


TURNS = itertools.cycle((0.1, 0.9))
# each runs on the reference only, with a reason
REFUSED = {
    "int": (lambda v, w: v.int().float(), "aten._to_copy makes values of torch.int32"),
    "long": (lambda v, w: v.long() * w, "makes values of torch.int64"),
    "half": (lambda v, w: v.half().float(), "makes values of torch.float16"),
    "bfloat16": (lambda v, w: v.to(torch.bfloat16).to(v.dtype), "torch.bfloat16"),
    "double": (lambda v, w: v.double().float(), "makes values of torch.float64"),
    "float_power": (lambda v, w: torch.float_power(v, 2).to(v.dtype), "torch.float64"),
    "ldexp": (lambda v, w: torch.ldexp(v, w.int()), "makes values of torch.int32"),
    "bits": (lambda v, w: (v.int() & 1) * w, "makes values of torch.int32"),
    "bits_of_mask": (lambda v, w: ((v > 0).int() & 2) * w, "makes values of torch.int32"),
    "viewed_bits": (lambda v, w: (v.view(torch.int32) > 0) * w, "knows aten.view as torch.int32"),
    "bits_of_ones": (
        lambda v, w: torch.ones_like(v).view(torch.int32) * w, "knows aten.view as torch.int32"
    ),
    "count": (lambda v, w: ((v > 0) + 1) * w, "aten.add makes values of torch.int64"),
    "whole": (lambda v, w: v * (torch.tensor(7) // 2), "makes values of torch.int64"),
    "decimals": (lambda v, w: torch.round(v, decimals=1), "knows decimals of aten.round"),
    "out": (lambda v, w: torch.add(v, w, out=torch.empty_like(v)), "argument 'out'"),
    "width": (lambda v, w: v * w.shape[-1], "other things for inputs of shape"),
    "size": (lambda v, w: v / w.size(0), "other things for inputs of shape"),
    "numel": (lambda v, w: v / w.numel(), "other things for inputs of shape"),
    "example": (lambda v, w: v + torch.zeros(2, 3), "must match the size"),
    "random": (lambda v, w: v * random.random(), "as one that draws at random"),
    "turns": (lambda v, w: v * next(TURNS), "gradients would be those of another function"),
    "recorded": (lambda v, w: v if w.requires_grad else 2.0 * v, "where gradients are recorded"),
    "graph": (lambda v, w: v if w.grad_fn is None else 2.0 * v, "where gradients are recorded"),
    "mode": (lambda v, w: v if torch.is_grad_enabled() else w, "where gradients are recorded"),
    "values": (lambda v, w: v * w.tolist()[0][0], "reads of shapes or values"),
    "renamed": (lambda v, w: in_place_by_two_names(v), "changed in place before aten.mul"),
}  # fmt: skip


def in_place_by_two_names(v):
    first = 2.0 * v
    second = first.detach()
    return first.add_(1.0) * second


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_has_no_kernel(name):
    function, why = REFUSED[name]
    cell = of(function, name)
    check_elementwise(cell)
    with pytest.raises(CellError, match=f"^cell '{name}'.*{re.escape(why)}"):
        trace(cell)


@pytest.mark.parametrize("name", ["int", "viewed_bits", "count", "random", "recorded"])
def test_a_refused_cell_runs_on_the_reference(name):
    """With the reason in the report, and no other backend."""
    layer = openrnn.Recurrent(of(REFUSED[name][0], f"{name}_runs"), 2, 3)
    table = openrnn.explain(layer, torch.zeros(1, 1, 2), quiet=True)
    assert table.chosen == "reference"
    assert REFUSED[name][1] in table.refused["cpu"][0]
    layer(torch.ones(2, 1, 2))[0].sum().backward()


TAKEN = {
    "bool": lambda v, w: v.bool() * w,
    "sum_of_masks": lambda v, w: ((v > 0) + (w > 0)) * w,
    "mask_as_float": lambda v, w: (v > 0).float() * w + (w > 0).to(v.dtype),
    "xor": lambda v, w: torch.where((v > 0) ^ (w > 0), v, w),
    "logic_of_numbers": lambda v, w: torch.where(torch.logical_xor(v, w > 0), v, w),
    "constant_mask": lambda v, w: torch.where((v > 0) & torch.ones_like(v).bool(), v, w),
    "same_dtype": lambda v, w: v.to(w.dtype) * w,
    "same_shape": lambda v, w: v.view_as(w) * w.new_full(w.shape, 0.5),
    "whole_number_tensor": lambda v, w: v * torch.tensor(3) + torch.full_like(w, 2.7).int(),
    "rounded": lambda v, w: torch.div(v, w, rounding_mode="floor") + w.detach() // 0.3,
    "rest": lambda v, w: torch.remainder(v, w) + torch.fmod(v, 0.3),
    "in_place": lambda v, w: v.clone().add_(1.0).mul_(w),
    "tensor_bounds": lambda v, w: torch.clamp(v, w - 0.5, w + 0.5),
    "close": lambda v, w: torch.where(torch.isclose(v, w, rtol=0.5), v, w),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_understood_is_right(name):
    assert agree(of(TAKEN[name], name)).no_float64_reason is None


NARROW = {
    "float": lambda v, w: v.float() * w,
    "branch": lambda v, w: v if v.dtype == torch.float32 else w,
    "largest": lambda v, w: torch.nan_to_num(v),
}


@pytest.mark.parametrize("name", NARROW)
def test_what_names_a_dtype_has_no_kernel_of_another(name):
    layer = openrnn.Recurrent(of(NARROW[name], name), 2, 3)
    assert openrnn.explain(layer, torch.zeros(1, 1, 2), quiet=True).chosen == "cpu"
    table = openrnn.explain(layer.double(), torch.zeros(1, 1, 2).double(), quiet=True)
    assert table.chosen == "reference"
    assert "does other things in float64 than in float32" in table.refused["cpu"][0]


BAD_STATES = {
    "double": (
        lambda x, r, s: x.a.double(),
        "h must keep the dtype torch.float32 of .* got torch.float64",
    ),
    "number": (lambda x, r, s: (0.0,), "h must be a tensor, got float"),
    "changed": (lambda x, r, s: x.a.add_(1.0), r"changes x\.a in place, a cell must make new"),
    "item": (
        lambda x, r, s: x.a * float(torch.tensor(0.5).add(x.a.sum() * 0)),
        r"aten.sum \(line \d+\) is not",
    ),
    "moved": (lambda x, r, s: x.a.view(-1, 1).view_as(x.a), r"aten.view \(line \d+\) is not elem"),
    "split_bits": (
        lambda x, r, s: (x.a.view(torch.int16) > 0) * 0.1,
        r"aten.view \(line \d+\) is not elem",
    ),
    "called": (lambda x, r, s: x("a"), r"cell 'called' calls x\(\.\.\.\), which only .*: a"),
    "indexed": (lambda x, r, s: x[0], r"cell 'indexed' indexes x\[\.\.\.\], which only .*: a"),
    "unpacked": (lambda x, r, s: (*s,), r"cell 'unpacked' iterates over s, which only .*: h"),
}


@pytest.mark.parametrize("name", BAD_STATES)
def test_what_is_no_elementwise_cell_runs_nowhere(name):
    function, why = BAD_STATES[name]
    cell = openrnn.cell(gates="a", name=name)(function)
    for backend in ON_CPU:
        with pytest.raises(CellError, match=why):
            openrnn.Recurrent(cell, 2, 3, backend=backend)(torch.zeros(1, 1, 2))


def test_a_vector_alone_is_no_state():
    """It has one number a unit, where a state has one for each row of the batch, too."""
    cell = openrnn.cell(gates="a", params="q", name="vector")(lambda x, r, s, p: p.q)
    with pytest.raises(CellError, match=r"must keep the shape \(2, 3\) of its inputs, got \(3,\)"):
        openrnn.Recurrent(cell, 2, 3)(torch.zeros(1, 1, 2))


class Sum(torch.autograd.Function):
    """x + r, whose gradient reads x alone; its context in forward, as functions once were."""

    @staticmethod
    def forward(ctx, x, r):
        ctx.save_for_backward(x)
        return x + r

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x, grad


def test_a_side_that_the_derivative_reads_alone():
    @openrnn.cell(gates="a b", states="h")
    def alone(x, r, s):
        return Sum.apply(x.a, r.a) * s.h + tanh(x.b + r.b)

    assert agree(alone).summed == {"b"}


def test_sides_with_gradients_of_their_own():
    @openrnn.cell(gates="a b", states="h")
    def detached(x, r, s):
        return tanh(x.a.detach() + r.a) + tanh(x.b + r.b)

    traced = agree(detached)
    assert (traced.summed, traced.split_gates) == ({"a", "b"}, ("a",))
    assert not numba.all_summed(traced)
    assert cuda.planes(traced) == ("dx_a", "da_b", "dr_a")


def test_a_derivative_that_cannot_be_traced_is_a_reason():
    class Stubborn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * float(grad.sum())

    cell = of(lambda v, w: Stubborn.apply(v), "stubborn")
    check_elementwise(cell)
    with pytest.raises(CellError, match=r"cell 'stubborn'.*(cannot be traced|no kernel knows)"):
        trace(cell)


NAUGHTY = "after before vectors d_after float"


def test_source_has_no_name_of_a_user():
    """Nor anything that would end a comment, a string or a line."""

    @openrnn.cell(
        gates="int x kept ünit", states=NAUGHTY, params="rows GATES",
        name='e"""+__import__("os").system("false")+"""*/\\',
    )  # fmt: skip
    def cell(x, r, s, p):
        h = tanh(x.int + r.int + x.x - r.x + x.kept * r.kept + x.ünit) * p.rows * p.GATES
        return h, h, s.before, s.vectors + s.d_after, s.float

    traced = agree(cell)
    sources = [numba.source(traced, "float32"), *cuda.examples(traced, "float32")]
    compile(sources[0], "generated", "exec")
    for source in sources:
        for word in ("system(", "ünit", "s_after", "p_GATES", "a_int"):
            assert word not in source
    assert "// gates 0 int, 1 x, 2 kept, 3 _nit; states 0 after" in sources[1]
    assert traced.numbered.name.isascii()
    forward = ForwardConfig(64, 2, 4, 1, 1, 1, 0)
    assert "d_final_float" not in cuda.source(traced, "float32", forward)


MODES = {
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "device": lambda: torch.device("meta"),
    "function": torch.overrides.BaseTorchFunctionMode,
    "deterministic": lambda: Setting(
        torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled, True
    ),
    "dtype": lambda: Setting(torch.set_default_dtype, torch.get_default_dtype, torch.float64),
}


class Setting:
    """One of the process, set to a value inside."""

    def __init__(self, put, get, value):
        self.put, self.old, self.value = put, get(), value

    def __enter__(self):
        self.put(self.value)

    def __exit__(self, *_):
        self.put(self.old)


def with_tensors(x, r, s):
    c = torch.where(x.a > r.a, s.c * torch.ones_like(s.c), torch.sigmoid(x.a + r.a))
    return c * tanh(x.b + r.b) * torch.tensor(0.7).to(c), c


@pytest.fixture(scope="module")
def outside():
    """What a trace finds outside of any mode."""
    return trace(openrnn.cell(gates="a b", states="h c", name="outside")(with_tensors))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", MODES)
def test_the_first_call_under_a_mode(outside, name):
    """Of check, trace and what a projection asks: a mode of the caller is none of the cell's."""
    inside = openrnn.cell(gates="a b", states="h c", name="inside")(with_tensors)
    anomaly = torch.is_anomaly_enabled()
    with MODES[name]():
        layer = openrnn.Recurrent(inside, 3, 4, proj_size=2, device="cpu", dtype=torch.float32)
        found = trace(inside)
    assert torch.is_anomaly_enabled() == anomaly
    if name == "dtype":  # which the cell's own tensor has: 0.7 in float64
        assert len(found.derivative.nodes) == len(outside.derivative.nodes)
    else:
        assert str(found.step) == str(outside.step)
        assert str(found.derivative) == str(outside.derivative)
    assert layer.proj_size == 2


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_call_in_anomaly_mode():
    x = torch.randn(2, 1, 3, requires_grad=True)
    layer = openrnn.Recurrent(of(lambda v, w: v * w, "anomalous"), 3, 4)
    with torch.autograd.set_detect_anomaly(True):
        assert openrnn.explain(layer, x, quiet=True).chosen == "cpu"
    by_hand = openrnn.Recurrent(of(REFUSED["width"][0], "anomalous_too"), 3, 4)
    (wanted,) = torch.autograd.grad(by_hand(x)[0].sum(), x)
    with torch.autograd.set_detect_anomaly(True):
        (found,) = torch.autograd.grad(by_hand(x)[0].sum(), x)
    assert distance(found, wanted) == 0.0
