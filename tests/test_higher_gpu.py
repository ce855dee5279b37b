"""Second derivatives and forward mode by the CUDA kernels, beside the reference in float64."""

import pytest
import torch
from cases import CELLS, require
from derivatives import KEYS, tangents_run, twice
from torch.autograd import forward_ad
from torch.func import functional_call, jvp, vmap
from torch.utils._pytree import tree_leaves

import openrnn
from openrnn import dispatch, reference
from openrnn.backends.fused.stepwise import first_configs
from openrnn.higher import network
from openrnn.spec import Problem

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:`torch.jit")]
F32, F64 = torch.float32, torch.float64
DEVICE, BACKEND = torch.device("cuda"), "fused"
# of the norm: over twice what the reference is off by with operands of tf32, 3e-4 to 6.2e-4
BOUND = 1.5e-3
BOUND_OF_ONE = 1e-2  # where H is 1, and a number may be the small difference of others: 3.9e-3
BOUNDS = {F32: BOUND, torch.bfloat16: 3e-2, torch.float16: 5e-3}  # as tests/test_higher.py has them
STEPS, INPUTS = 12, 20
STATES = ("states",)
# cell, H, B, options, what a call has, and T where it is another
CASES = {
    "blocks": ("lstm", 24, 5, {}, STATES),
    "cluster": ("lstm", 256, 33, {}, ()),
    "grid": ("gru", 512, 17, {}, ("states", "all")),
    "both ways": ("gru", 40, 4, {"num_layers": 2, "bidirectional": True}, ("lengths", "states")),
    "reverse": ("lstm", 64, 9, {"num_layers": 2, "reverse": True}, ("lengths", "reset", "all")),
    "resets": ("lstm", 24, 3, {"cell_clip": (-0.5, 0.4)}, ("reset", "states")),
    "resets to given states": ("gru", 37, 4, {"bias_mode": "input"}, ("reset", "new", "lengths")),
    "skip": ("gru", 20, 4, {"input_mode": "skip"}, ("reset",)),
    "dropout": ("gru", 40, 6, {"num_layers": 2, "dropout": 0.4}, ("lengths",)),
    "recompute": ("lstm", 64, 9, {"recompute": "gates"}, STATES),
    "one step": ("lstm", 64, 9, {}, STATES, 1),
    "one step of two layers": ("gru", 256, 17, {"num_layers": 2}, ("states", "reset"), 1),
    "one row": ("lstm", 64, 1, {}, STATES),
    "one unit": ("lstm", 1, 7, {}, STATES),
    "ones": ("gru", 1, 1, {}, (), 1),
    **{key: (key, 64, 9, {}, ("states", "reset")) for key in KEYS if key not in ("lstm", "gru")},
    **{key: (key, 16, 3, {}, ("states", "reset")) for key in ("rnn_relu", "slstm")},
}


@pytest.fixture(autouse=True)
def kernels_at_any_number_of_steps(monkeypatch):
    """Kernels are right where the reference is quicker, too."""
    monkeypatch.setattr(network, "LEAST_STEPS", 1)


# where clip, relu and the largest of two have an edge: no value lies within 0.004 of it, so that
# none lies on another side of it in tf32
SEEDS = {"resets": 73, "rnn_relu": 102, "slstm": 100}
SIZES = (32, 128, 256, 896, 1024)  # of the oldest cards to Hopper's: none holds the largest


class Pair:
    """A layer by kernels in tf32, and by the reference in float64, with inputs of both.

    All is drawn on the CPU, so that every device has the same numbers.
    """

    def __init__(self, key, hidden, batch, options, asked, steps=STEPS, seed=0, dtype=F32):
        require(BACKEND)
        self.cell, self.asked = CELLS[key], asked
        self.bound = BOUNDS[dtype] if hidden > 1 else BOUND_OF_ONE
        torch.manual_seed(seed)
        self.ours, self.plain = (
            openrnn.Recurrent(self.cell, INPUTS, hidden, backend=name, dtype=own, **options)
            for name, own in ((BACKEND, dtype), ("reference", F64))
        )
        self.plain.load_state_dict(self.ours.state_dict())
        spec = self.ours.spec
        shape = spec.chains, batch, hidden
        self.tensors = [
            torch.randn(steps, batch, INPUTS),
            *(torch.randn(shape) for _ in range(2 * len(spec.states))),
        ]
        lengths = torch.tensor([steps, 0, 1, 5, *(3 + n % 9 for n in range(batch))][:batch])
        self.past = torch.arange(steps)[:, None] >= lengths  # (T, B)
        if "lengths" in asked:
            self.tensors[0][self.past] = torch.nan
        reset = torch.rand(steps, batch) < 0.2
        self.ours.to(DEVICE), self.plain.to(DEVICE)
        self.tensors = [tensor.to(DEVICE, dtype) for tensor in self.tensors]
        self.lengths, self.reset, self.past = (
            tensor.to(DEVICE) for tensor in (lengths, reset, self.past)
        )

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
        if self.ours.dropout:
            options["generator"] = torch.Generator().manual_seed(2)  # the same masks in each call
        states = (given(1),) if "states" in self.asked else ()
        return tree_leaves(layer(tensors[0], *states, return_states="all" in self.asked, **options))

    def check(self, monkeypatch, run):
        """What `run` makes of both layers and their tensors; the reference runs in one alone."""
        wanted = run(self.plain, [tensor.double() for tensor in self.tensors])
        with monkeypatch.context() as patch:
            patch.setattr(reference, "run", None)
            found = run(self.ours, [tensor.clone() for tensor in self.tensors])
        close(found, wanted, self.bound)
        if "lengths" in self.asked:  # y, the gradient of x, and what belongs to all states
            rows = [have for have in found if have.shape[:2] == self.past.shape]
            rows += [each for have in found if have.shape[1:3] == self.past.shape for each in have]
            assert rows
            assert not any(have[self.past].any() for have in rows)


def close(found, wanted, bound=BOUND):
    """Fails where a tensor is not that of float64."""
    for have, want in zip(found, wanted, strict=True):
        off, size = (have.detach().double() - want.detach()).norm(), want.detach().norm()
        error = float(off / size.clamp(min=1e-30))
        assert error <= bound, f"off by {error:.1e} of the norm of {tuple(want.shape)}"


def named(name, dtype=F32):
    """The pair of a case."""
    return Pair(*CASES[name], seed=SEEDS.get(name, 0), dtype=dtype)


def check_second(monkeypatch, pair):
    """Of x, states, reset states and parameters."""

    def run(layer, tensors):
        leaves = [tensors[place].requires_grad_() for place in pair.read()]
        leaves += layer.parameters()
        return twice(lambda: pair.call(layer, tensors), leaves, leaves)

    pair.check(monkeypatch, run)


def check_forward(monkeypatch, pair):
    """The tangents of all results, along x, states and parameters."""
    torch.manual_seed(1)
    along = {place: torch.randn(pair.tensors[place].shape) for place in pair.read()}
    weights = [torch.randn(weight.shape) for weight in pair.ours.parameters()]

    def run(layer, tensors):
        with forward_ad.dual_level():
            for place, tangent in along.items():
                tensors[place] = forward_ad.make_dual(tensors[place], tangent.to(tensors[place]))
            duals = {
                name: forward_ad.make_dual(weight.detach(), tangent.to(weight))
                for (name, weight), tangent in zip(layer.named_parameters(), weights)
            }
            out = pair.call(Parametrised(layer, duals), tensors)
            return [forward_ad.unpack_dual(value).tangent for value in out]

    pair.check(monkeypatch, run)


class Parametrised:
    """A layer called with other parameters."""

    def __init__(self, layer, params):
        self.layer, self.params = layer, params

    def __call__(self, *given, **options):
        return functional_call(self.layer, self.params, given, options)


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives(monkeypatch, name):
    check_second(monkeypatch, named(name))


# forward mode of dropout is the reference's
@pytest.mark.parametrize("name", [name for name in CASES if name != "dropout"])
def test_forward_mode(monkeypatch, name):
    check_forward(monkeypatch, named(name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["cluster", "grid", "both ways", "one step"])
def test_16_bits_are_computed_in_tf32(monkeypatch, name, dtype):
    dtypes = tangents_run(monkeypatch, BACKEND)
    check_second(monkeypatch, named(name, dtype))
    check_forward(monkeypatch, named(name, dtype))
    assert {*dtypes} == {F32}


def held(hidden):
    """Whether kernels of this device hold all of R of the derivative of an LSTM."""
    spec = openrnn.cells.lstm.spec(INPUTS, hidden)
    problem = Problem(spec, F32, DEVICE.type, grad=True, precision="tf32")
    info = dispatch.device_info(DEVICE)
    loops = first_configs(network.tangent_problem(problem, info, True))
    return not any(one.reads_r for one in loops)


@pytest.mark.parametrize("which", ["held", "beyond"])
def test_large_sizes(monkeypatch, which):
    """Tangent cells that hold as much as they can, which take long to compile; and beyond."""
    require(BACKEND)
    sizes = [size for size in SIZES if held(size) == (which == "held")]
    pair = Pair("lstm", max(sizes) if which == "held" else min(sizes), 9, {}, STATES)
    check_second(monkeypatch, pair)
    check_forward(monkeypatch, pair)


def test_one_step_modules(monkeypatch):
    """The first call, and those that repeat it, which have a way of their own."""
    require(BACKEND)
    torch.manual_seed(0)
    ours = openrnn.LSTMCell(INPUTS, 64, backend=BACKEND)
    plain = openrnn.LSTMCell(INPUTS, 64, backend="reference", dtype=F64)
    plain.load_state_dict(ours.state_dict())
    ours.to(DEVICE), plain.to(DEVICE)
    tensors = [torch.randn(9, width) for width in (INPUTS, 64, 64)]

    def run(layer):
        like = next(layer.parameters())
        x, *states = (tensor.detach().to(like).requires_grad_() for tensor in tensors)
        leaves = [x, *states, *layer.parameters()]
        return twice(lambda: tree_leaves(layer(x, tuple(states))), leaves, leaves)

    wanted = run(plain)
    monkeypatch.setattr(reference, "run", None)
    for _ in range(4):
        close(run(ours), wanted)


def test_transforms_within_each_other(monkeypatch):
    """`jvp` of what `vmap` maps, and the gradient of a `jvp`: a Hessian times a vector."""
    pair = named("blocks")

    def run(layer, tensors):
        x, *states = tensors[:3]

        def of(x):
            return layer(x, tuple(states))[0]

        many = torch.stack([x, 2 * x])
        mapped = jvp(vmap(of), (many,), (torch.ones_like(many),))[1]
        x.requires_grad_()
        along = jvp(of, (x,), (torch.ones_like(x),))[1]
        return [mapped, *torch.autograd.grad(along.sum(), x)]

    pair.check(monkeypatch, run)


def test_a_third_derivative_is_the_references():
    """Its graph begins at a second derivative, whose first is by kernels."""
    pair = Pair("gru", 24, 5, {}, ("reset",))

    def run(layer):
        x = pair.tensors[0].detach().to(next(layer.parameters())).requires_grad_()
        y, *_ = pair.call(layer, [x])
        first = torch.autograd.grad((y**3).sum(), x, create_graph=True)[0]
        second = torch.autograd.grad((first**2).sum(), x, create_graph=True)[0]
        return torch.autograd.grad(second.sin().sum(), [*layer.parameters()])

    close(run(pair.ours), run(pair.plain))
