"""Second derivatives and forward mode by the CUDA kernels, beside the reference in float64."""

import pytest
import torch
from cases import CELLS, require
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

import openrnn
from openrnn import reference

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:`torch.jit")]
F32, F64 = torch.float32, torch.float64
# of the norm: products of tf32 have ten bits, and a second derivative has several in a row
BOUND = 5e-3
STEPS, INPUTS = 12, 20
KEYS = [key for key, cell in CELLS.items() if not cell.dependent_product]
# cell, H, B, options, what a call has
CASES = {
    "blocks": ("lstm", 24, 5, {}, ("states",)),
    "cluster": ("lstm", 256, 33, {}, ()),
    "grid": ("gru", 512, 17, {}, ("states", "all")),
    "both ways": ("gru", 40, 4, {"num_layers": 2, "bidirectional": True}, ("lengths", "states")),
    "reverse": ("lstm", 64, 9, {"num_layers": 2, "reverse": True}, ("lengths", "reset", "all")),
    "resets": ("lstm", 64, 4, {"cell_clip": (-0.5, 0.4)}, ("reset", "states")),
    "resets to given states": ("gru", 37, 4, {"bias_mode": "input"}, ("reset", "new", "lengths")),
    "skip": ("gru", 20, 4, {"input_mode": "skip"}, ("reset",)),
    **{key: (key, 64, 9, {}, ("states", "reset")) for key in KEYS if key not in ("lstm", "gru")},
}


class Case:
    """A layer by kernels in tf32, and by the reference in float64, with inputs of both."""

    def __init__(self, name):
        require("fused")
        key, hidden, self.batch, options, self.asked = CASES[name]
        self.cell = CELLS[key]
        torch.manual_seed(0)
        self.plain, self.ours = (
            openrnn.Recurrent(
                self.cell, INPUTS, hidden, backend=backend, dtype=dtype, device="cuda", **options
            )
            for backend, dtype in (("reference", F64), ("fused", F32))
        )
        self.plain.load_state_dict(self.ours.state_dict())
        spec = self.ours.spec
        shape = spec.chains, self.batch, hidden
        self.tensors = [
            torch.randn(STEPS, self.batch, INPUTS, device="cuda"),
            *(torch.randn(shape, device="cuda") for _ in range(2 * len(spec.states))),
        ]
        lengths = [STEPS, 1, 5, *(3 + place % 9 for place in range(self.batch - 3))]
        self.lengths = torch.tensor(lengths, device="cuda")
        self.reset = torch.rand(STEPS, self.batch, device="cuda") < 0.2

    def read(self):
        """Which of `tensors` a call reads."""
        count = len(self.cell.states)
        states = range(1, 1 + count) if "states" in self.asked else ()
        new = range(1 + count, 1 + 2 * count) if "new" in self.asked else ()
        return [0, *states, *new]

    def call(self, layer, tensors):
        """The results, flat; tensors: all of them."""
        count, options = len(self.cell.states), {}

        def given(first):
            found = tuple(tensors[first : first + count])
            return found if count > 1 else found[0]

        if "lengths" in self.asked:
            options["lengths"] = self.lengths
        if "reset" in self.asked:
            options["reset"] = self.reset
        if "new" in self.asked:
            options["reset_state"] = given(1 + count)
        states = (given(1),) if "states" in self.asked else ()
        y, *others = layer(tensors[0], *states, return_states="all" in self.asked, **options)
        return [y, *torch.utils._pytree.tree_leaves(others)]

    def check(self, monkeypatch, run):
        """What `run` makes of both layers and their tensors; the reference runs in one alone."""
        wanted = run(self.plain, [tensor.double() for tensor in self.tensors])
        with monkeypatch.context() as patch:
            patch.setattr(reference, "run", None)
            found = run(self.ours, [tensor.clone() for tensor in self.tensors])
        for have, want in zip(found, wanted, strict=True):
            error = (have.double() - want).norm() / want.norm().clamp(min=1e-30)
            assert error <= BOUND, f"off by {float(error):.1e} of the norm of {tuple(want.shape)}"


def weighed(tensors):
    """A number that all entries of all tensors are in, not linearly."""
    dice = torch.Generator("cuda").manual_seed(1)
    total = 0.0
    for tensor in tensors:
        weights = torch.randn(tensor.shape, generator=dice, device="cuda", dtype=F32)
        total = total + (tensor * weights.to(tensor.dtype)).sum() + (tensor**2).sum()
    return total


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives(monkeypatch, name):
    """Of x, states, reset states and parameters."""
    case = Case(name)

    def run(layer, tensors):
        leaves = [tensors[place].requires_grad_() for place in case.read()]
        leaves += layer.parameters()
        first = torch.autograd.grad(weighed(case.call(layer, tensors)), leaves, create_graph=True)
        scaled = [one / one.detach().norm().clamp(min=1e-30) for one in first]
        return [*first, *torch.autograd.grad(weighed(scaled), leaves)]

    case.check(monkeypatch, run)


@pytest.mark.parametrize("name", CASES)
def test_forward_mode(monkeypatch, name):
    """The tangents of all results, along x, states and parameters."""
    case = Case(name)
    torch.manual_seed(1)
    along = {place: torch.randn_like(case.tensors[place]) for place in case.read()}
    weights = [torch.randn_like(weight) for weight in case.ours.parameters()]

    def run(layer, tensors):
        dtype = tensors[0].dtype
        with forward_ad.dual_level():
            for place, tangent in along.items():
                tensors[place] = forward_ad.make_dual(tensors[place], tangent.to(dtype))
            duals = {
                name: forward_ad.make_dual(weight.detach(), tangent.to(dtype))
                for (name, weight), tangent in zip(layer.named_parameters(), weights)
            }
            moved = Parametrised(layer, duals)
            out = case.call(moved, tensors)
            return [forward_ad.unpack_dual(value).tangent for value in out]

    case.check(monkeypatch, run)


class Parametrised:
    """A layer called with other parameters."""

    def __init__(self, layer, params):
        self.layer, self.params = layer, params

    def __call__(self, *given, **options):
        return torch.func.functional_call(self.layer, self.params, given, options)


def test_transforms_within_each_other(monkeypatch):
    """`jvp` of what `vmap` maps, and a gradient along a direction (a Hessian times a vector)."""
    case = Case("blocks")

    def run(layer, tensors):
        x, *states = tensors[:3]

        def of(x):
            return layer(x, tuple(states))[0]

        many = torch.stack([x, 2 * x])
        mapped = jvp(vmap(of), (many,), (torch.ones_like(many),))[1]
        back = grad(lambda x: (of(x) ** 2).sum())
        first = back(x)
        return [mapped, first]

    case.check(monkeypatch, run)


def test_sizes_that_fit_no_kernel_are_the_references(capsys):
    """The tangent cell has more gates than the cell; `explain` says so, and nothing fails."""
    require("fused")
    layer = openrnn.LSTM(8, 1024, backend="fused", device="cuda")
    x = torch.randn(2, 2, 8, device="cuda", requires_grad=True)
    openrnn.explain(layer, x)
    assert "for lstm.tangent, hidden_size 1024" in capsys.readouterr().out
    (first,) = torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)
    first.square().sum().backward()
    assert x.grad.isfinite().all()
