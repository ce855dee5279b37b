"""Second derivatives by kernels: which calls have them, and that they are the reference's."""

import re
from pathlib import Path

import pytest
import torch
from cases import CELLS, require, thinned
from derivatives import KEYS, tangents_run, twice
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map

import openrnn
from openrnn import cells, memo, reference
from openrnn.backends.fused.stepwise import first_configs
from openrnn.codegen.trace import trace
from openrnn.dispatch import BACKENDS
from openrnn.higher import functions, network, tangent
from openrnn.spec import Problem

F64 = torch.float64
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HOPPER, AMPERE = ((9, 0), 132), ((8, 0), 108)  # compute capability, multiprocessors
STEPS, BATCH, HIDDEN = 6, 4, 5


# each cell, and those that take a clip with one; a landing has some of these
ALIKE = ("rnn_relu", "coupled_lstm", "mgu")  # have no operation that others have not
TANGENTS = [
    *(pytest.param(key, None, marks=[pytest.mark.slow] if key in ALIKE else []) for key in KEYS),
    *thinned([(key, (-0.4, 0.25)) for key in KEYS if CELLS[key].takes_clip], len(KEYS)),
]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("key", "clip"), TANGENTS, ids=str)
def test_the_tangent_cell_is_the_derivative_along_a_direction(key, clip):
    """Beside forward-mode differentiation of the cell, in float64; its trace is elementwise."""
    cell = CELLS[key]
    torch.manual_seed(0)
    made = tangent.tangent_of(cell.spec(3, HIDDEN, cell_clip=clip))

    def bound(c):
        return c if clip is None else torch.clamp(c, *clip)

    def drawn(names):
        return [torch.randn(3, HIDDEN, dtype=F64) for _ in names]

    def step(*flat):
        gates, states = len(cell.gates), len(cell.states)
        return cell.step(
            flat[:gates], flat[gates : 2 * gates], flat[2 * gates : 2 * gates + states],
            flat[2 * gates + states :], bound,
        )  # fmt: skip

    groups = cell.gates, cell.gates, cell.states, cell.unit_params
    at_x, at_r, at_s, at_p = at = [drawn(group) for group in groups]
    to_x, to_r, to_s, to_p = along = [drawn(group) for group in groups]
    _, wanted = torch.func.jvp(step, sum(map(tuple, at), ()), sum(map(tuple, along), ()))
    values = {
        "a": [x + r for x, r in zip(at_x, at_r)], "b": at_x, "c": at_r, "s": at_s, "x": to_x,
        "r": [r if g in made.apart else x + r for g, (x, r) in enumerate(zip(to_x, to_r))],
    }  # fmt: skip
    x = [values[name[0]][int(name[1:])] for name in made.cell.gates]
    zeros = [torch.zeros_like(value) for value in x]
    found = made.cell.step(tuple(x), tuple(zeros), tuple(to_s), (*at_p, *to_p), bound)
    torch.testing.assert_close(found, wanted)
    traced = trace(made.cell, clip)
    assert traced.no_float64_reason is None
    assert traced.summed == {*made.cell.gates}  # as kernels like it


def test_a_tangent_cell_is_registered_once():
    """Memos are forgotten, and the registry of cells is not."""
    spec = cells.gru.spec(3, HIDDEN)
    made, count = tangent.tangent_of(spec).cell, len(cells._CELLS)
    memo.clear()
    assert tangent.tangent_of(spec).cell is made
    assert len(cells._CELLS) == count


CASES = {
    "plain": ("lstm", {}, ()),
    "states": ("lstm", {}, ("states",)),
    "gru": ("gru", {"bias_mode": "recurrent"}, ("states", "all")),
    "both ways": ("gru", {"num_layers": 2, "bidirectional": True}, ("lengths", "all", "states")),
    "reverse": ("lstm", {"num_layers": 2, "reverse": True}, ("lengths", "reset", "states")),
    "resets": ("lstm", {}, ("reset", "new", "states")),
    "resets to given states": ("gru", {"bias_mode": "input"}, ("reset", "new", "lengths")),
    "skip": ("gru", {"input_mode": "skip"}, ("reset",)),
    "gates": ("gru", {"input_mode": "gates", "bias_mode": "none"}, ()),
    "dropout": ("gru", {"num_layers": 2, "dropout": 0.4}, ("lengths",)),
}


def called(layer, given, options):
    """A call whose results are flat and whose dropout is always the same."""

    def call():
        drops = {"generator": torch.Generator().manual_seed(2)} if layer.dropout else {}
        return tree_leaves(layer(*given, **options, **drops))

    return call


def draw(name):
    """Layers of both backends with the same weights; x, states and options of a call; leaves."""
    key, options, asked = CASES[name]
    cell = CELLS[key]
    inputs = {"skip": HIDDEN, "gates": HIDDEN * len(cell.gates)}.get(options.get("input_mode"), 3)
    torch.manual_seed(0)
    ours, plain = (
        openrnn.Recurrent(cell, inputs, HIDDEN, backend=backend, dtype=F64, **options)
        for backend in ("cpu", "reference")
    )
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(STEPS, BATCH, inputs, dtype=F64)
    shape = ours.spec.chains, BATCH, HIDDEN

    def states():
        made = tuple(torch.randn(shape, dtype=F64, requires_grad=True) for _ in cell.states)
        return made if len(made) > 1 else made[0]

    call = {}
    if "lengths" in asked:
        call["lengths"] = lengths = torch.tensor([STEPS, 0, 3, 5])
        x[torch.arange(STEPS)[:, None] >= lengths] = torch.nan
    x.requires_grad_()
    given = (x, states()) if "states" in asked else (x,)
    if "reset" in asked:
        call["reset"] = torch.rand(STEPS, BATCH) < 0.4
        call["reset"][0, 0] = True
    if "new" in asked:
        call["reset_state"] = states()
    call["return_states"] = "all" in asked
    others = [*given[1:], *([call["reset_state"]] if "new" in asked else [])]
    flat = [one for other in others for one in (other if isinstance(other, tuple) else (other,))]
    return ours.train(), plain.train(), given, call, [x, *flat]


@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_the_reference(monkeypatch, name):
    """Of x, states and parameters, in float64, and by kernels alone."""
    require("cpu")
    ours, plain, given, call, leaves = draw(name)
    wanted = twice(called(plain, given, call), *[[*leaves, *plain.parameters()]] * 2)
    monkeypatch.setattr(reference, "run", None)
    found = twice(called(ours, given, call), *[[*leaves, *ours.parameters()]] * 2)
    for have, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-10)


NEAR = {torch.bfloat16: 3e-2, torch.float16: 5e-3}  # eight and ten roundings, of the norm


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("name", ["gru", "both ways", "resets", "skip"])
def test_those_of_16_bits_are_computed_in_float32(monkeypatch, name, dtype):
    """Beside float64 with the same weights and inputs, by kernels alone."""
    require("cpu")
    ours, plain, given, call, _ = draw(name)
    ours.to(dtype)
    plain.load_state_dict(ours.state_dict())

    def of(kind):
        """x, the states and the options of a call, rounded; its leaves."""
        leaves = []

        def leaf(value):
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return value
            leaves.append(value.detach().to(dtype).to(kind).requires_grad_())
            return leaves[-1]

        return *tree_map(leaf, (given, call)), leaves

    inputs, options, leaves = of(F64)
    leaves += plain.parameters()
    wanted = twice(called(plain, inputs, options), leaves, leaves)
    monkeypatch.setattr(reference, "run", None)
    inputs, options, leaves = of(dtype)
    leaves += ours.parameters()
    dtypes = tangents_run(monkeypatch, "cpu")
    found = twice(called(ours, inputs, options), leaves, leaves)
    assert {*dtypes} == {torch.float32}
    for have, want in zip(found, wanted, strict=True):
        assert have.dtype == dtype
        off = (have.double() - want).nan_to_num(0).norm()
        assert torch.equal(have.isnan(), want.isnan())
        assert off <= NEAR[dtype] * want.nan_to_num(0).norm()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_inputs_that_are_made_of_each_other(backend, layers):
    """States made of x, and one layer run twice, as gradgradcheck has them."""
    require(backend)
    torch.manual_seed(0)
    layer = openrnn.GRU(2, 2, layers, backend=backend, dtype=F64)
    x = torch.randn(2, 1, 2, dtype=F64, requires_grad=True)

    def run(x):
        y, h = layer(x, x.mean(0).expand(layers, 1, 2))
        return layer(y, h * y[0])[0]

    assert torch.autograd.gradgradcheck(run, x)


def test_a_gradient_penalty_needs_no_more_than_x(monkeypatch):
    """The first gradient of x alone, the second of parameters alone."""
    require("cpu")
    ours, plain, given, call, (x, *_) = draw("plain")
    wanted = twice(called(plain, given, call), [*plain.parameters()], [x])
    monkeypatch.setattr(reference, "run", None)
    found = twice(called(ours, given, call), [*ours.parameters()], [x])
    for have, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", [openrnn.LSTM, openrnn.GRU, openrnn.RNN])
def test_some_parameters_alone(kind):
    """Each and each pair: a direction along both biases is the same for all steps and rows."""
    torch.manual_seed(0)
    ours = kind(3, HIDDEN, dtype=F64, backend="cpu")
    other = kind(3, HIDDEN, dtype=F64, backend="reference")
    other.load_state_dict(ours.state_dict())
    x, names = (
        torch.randn(STEPS, BATCH, 3, dtype=F64),
        [name for name, _ in ours.named_parameters()],
    )
    for pair in ((one, two) for place, one in enumerate(names) for two in names[place:]):
        found = []
        for module in (ours, other):
            leaves = [module.get_parameter(name) for name in sorted({*pair})]
            for name, param in module.named_parameters():
                param.requires_grad_(name in pair)
            loss = module(x)[0].square().sum()
            grads = torch.autograd.grad(loss, leaves, create_graph=True)
            found.append(torch.autograd.grad(sum(one.square().sum() for one in grads), leaves))
        for one, two in zip(*found, strict=True):
            torch.testing.assert_close(one, two)


@pytest.mark.parametrize("name", ["resets to given states", "both ways"])
def test_a_third_derivative_is_the_references(name):
    require("cpu")
    ours, plain, given, call, leaves = draw(name)

    def third(layer):
        found = twice_again(layer, given, call, leaves[0])
        return torch.autograd.grad(found.nan_to_num(0).sin().sum(), [*layer.parameters()])

    def twice_again(layer, given, call, x):
        y = layer(*given, **call)[0]
        first = torch.autograd.grad((y**3).sum(), x, create_graph=True)[0]
        first = first.nan_to_num(0)
        return torch.autograd.grad((first**2).sum(), x, create_graph=True)[0]

    for have, want in zip(third(ours), third(plain), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-10)


def test_gradients_that_are_changed_in_place():
    require("cpu")
    layer = openrnn.GRU(3, 4, backend="cpu")
    y, _ = layer(torch.randn(5, 2, 3))
    grads = torch.autograd.grad(y.sum(), [*layer.parameters()], create_graph=True)
    for grad in grads:
        grad.mul_(2)
    assert all(grad.requires_grad for grad in grads)


def test_many_second_gradients_at_a_time():
    require("cpu")
    ours, plain, _, _, (x, *_) = draw("gates")

    def found(layer):
        first = torch.autograd.grad((layer(x)[0] ** 2).sum(), x, create_graph=True)[0]
        many = torch.eye(3, x.numel(), dtype=F64).view(3, *x.shape)
        return torch.autograd.grad(first, x, many, is_grads_batched=True)[0]

    torch.testing.assert_close(found(ours), found(plain))


@pytest.mark.parametrize(
    ("spec", "dtype", "words"),
    [
        (cells.lstm.spec(3, 4, proj_size=2), torch.float32, "a projection"),
        (cells.lstm.spec(3, 4), torch.bfloat16, None),
        (cells.lstm.spec(3, 4), torch.float32, None),
        (cells.slstm.spec(3, 4, num_layers=2), F64, None),
    ],
    ids=str,
)
def test_what_is_left_to_the_reference(spec, dtype, words):
    problem = Problem(spec, dtype, "cpu", grad=True)
    found = network.refusal("cpu", problem, CPU, 3, 1024)
    assert found is None if words is None else words in found
    assert network.forward_refusal("cpu", problem, CPU) == found  # whatever T and B
    if words is None:
        assert "B * H is 4100" in network.refusal("cpu", problem, CPU, 3, 1025)
        assert "T is 2, and kernels" in network.refusal("cpu", problem, CPU, 2, 1)
    assert "no tangent cells" in network.refusal(
        "cudnn", Problem(spec, dtype, "cuda"), CUDA, None, None
    )


@pytest.mark.parametrize(
    ("place", "hidden", "more", "words"),
    [
        (HOPPER, 512, {}, None),
        (HOPPER, 1024, {}, None),  # by GEMMs and launches, as what follows
        (AMPERE, 200, {}, None),
        (((12, 0), 170), 136, {"lengths": True, "reset": True}, None),
        (HOPPER, 1024, {"dtype": torch.float16}, None),
        (HOPPER, 64, {"precision": "ieee"}, "float32 products in ieee precision"),
    ],
    ids=str,
)
def test_which_calls_kernels_take_on_a_gpu(place, hidden, more, words):
    """By values alone; the layers themselves have kernels everywhere but in ieee precision."""
    capability, processors = place
    given = {"dtype": torch.float32, "precision": "tf32", **more}
    problem = Problem(
        cells.lstm.spec(3, hidden), device="cuda", capability=capability, processors=processors,
        grad=True, **given,
    )  # fmt: skip
    assert bool(BACKENDS["fused"].refusals(problem)) == (given["precision"] == "ieee")
    for found in (
        network.refusal("fused", problem, CUDA, 3, 4096),
        network.forward_refusal("fused", problem, CUDA),
    ):
        assert found is None if words is None else words in found


SIZES = re.findall(
    r"^\| (\d+)\.(\d+) \(.*?\) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$",
    (Path(__file__).parents[1] / "docs" / "transforms.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


@pytest.mark.parametrize("row", SIZES, ids=" ".join)
@pytest.mark.parametrize("cell", [cells.lstm, cells.gru], ids=["lstm", "gru"])
def test_the_sizes_in_the_documentation(cell, row):
    """docs/transforms.md names the largest H that kernels hold: 8 more they do not."""
    major, minor, processors, *sizes = (int(word.replace(",", "")) for word in row)

    def held(hidden, grad):
        problem = Problem(
            cell.spec(64, hidden), torch.float32, "cuda", (major, minor), grad, precision="tf32",
            processors=processors,
        )  # fmt: skip
        assert network.forward_refusal("fused", problem, CUDA) is None
        place = (major, minor), processors
        loops = first_configs(network.tangent_problem(problem, place, grad))
        return not any(one.reads_r for one in loops)

    for size, grad in zip(sizes, (True, False), strict=True):
        assert (held(size, grad), held(size + 8, grad)) == (True, False)


def test_the_documentation_has_a_table_of_sizes():
    assert len(SIZES) == 7


def test_it_is_the_device_of_the_tensors_that_is_asked(monkeypatch):
    """Not the current one; and on a CPU none."""
    places = {0: HOPPER, 1: ((7, 5), 40)}
    monkeypatch.setattr(network, "device_info", lambda device: places[device.index])
    problem = Problem(cells.lstm.spec(3, 64), torch.float32, "cuda", grad=True, precision="tf32")
    for of in (network.forward_refusal, lambda *given: network.refusal(*given, 3, 4)):
        first, second = (of("fused", problem, torch.device("cuda", index)) for index in (0, 1))
        assert first is None
        assert "compute capability 7.5, needs 8.0" in second
        on_cpu = Problem(problem.spec, torch.float32, "cpu", grad=True)
        assert of("cpu", on_cpu, CPU) is None


def test_large_products_are_left_to_the_reference(monkeypatch):
    """There its loop takes less; `test_they_are_those_of_the_reference` sees that kernels run."""
    monkeypatch.setattr(BACKENDS["cpu"], "tangents_up_to", 15)
    monkeypatch.setattr(functions, "backward", lambda *_: pytest.fail("kernels ran"))
    layer, x = openrnn.LSTM(3, 4, backend="cpu", dtype=F64), torch.randn(3, 4, 3, dtype=F64)
    (grad,) = torch.autograd.grad(layer(x.requires_grad_())[0].sum(), x, create_graph=True)
    grad.square().sum().backward()


def test_a_projection_still_has_second_derivatives():
    require("cpu")
    layer = openrnn.LSTM(3, 4, proj_size=2, backend="cpu", dtype=F64)
    x = torch.randn(3, 2, 3, dtype=F64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x)[0], x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's forward mode
def test_a_derivative_that_is_zero_everywhere():
    """Forward mode, second derivatives and `explain` of a cell of steps."""
    cell = openrnn.cell(gates="a")(lambda x, r, s: torch.sign(x.a + r.a))
    layer, x = openrnn.Recurrent(cell, 4, 8), torch.randn(6, 3, 4, requires_grad=True)
    assert openrnn.explain(layer, x, quiet=True).chosen == "cpu"
    y, along = torch.func.jvp(lambda x: layer(x)[0], (x.detach(),), (x.detach(),))
    assert set(y.unique().tolist()) <= {-1.0, 0.0, 1.0}
    assert not along.any()
    (grad,) = torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)
    assert not grad.any()
    grad.sum().backward()
    assert x.grad is None or not x.grad.any()


class Step(torch.autograd.Function):
    """A step, whose gradient is that of the identity."""

    @staticmethod
    def forward(value):
        return value.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad


class Once(torch.autograd.Function):
    """tanh, whose backward autograd does not record."""

    @staticmethod
    def forward(value):
        return value.tanh()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad * (1 - ctx.saved_tensors[0] ** 2)


class Detached(Once):
    """The same, of which a part is recorded."""

    @staticmethod
    def backward(ctx, grad):
        return grad.detach() - grad * ctx.saved_tensors[0] ** 2


def hooked(hook):
    def cell(x, r, s):
        value = torch.tanh(x.a + r.a)
        if value.requires_grad:
            value.register_hook(hook)
        return 0.9 * value

    return cell


def without_gradients(x, r, s):
    with torch.no_grad():
        gate = torch.sigmoid(x.a + r.a)
    return gate * s.h + (1 - gate) * torch.tanh(x.a + r.a)


NOT_RECORDED, OWN = "not recorded, as by once_differentiable", "has a jvp of its own: it calls "
# the cell; why second derivatives and why forward mode are the reference's
LEFT = {
    "once": (lambda x, r, s: Once.apply(x.a + r.a), NOT_RECORDED, NOT_RECORDED),
    "partly": (lambda x, r, s: Detached.apply(x.a + r.a), NOT_RECORDED, NOT_RECORDED),
    "detaching hook": (hooked(torch.Tensor.detach), NOT_RECORDED, NOT_RECORDED),
    "clipping hook": (hooked(lambda grad: grad.clamp(-0.1, 0.1)), "not linear", "not linear"),
    "scaling hook": (hooked(lambda grad: 0.5 * grad), None, "not those of its forward"),
    "no_grad": (without_gradients, None, "not those of its forward"),
    "function": (lambda x, r, s: 0.3 * Step.apply(3 * torch.tanh(x.a + r.a)), None, f"{OWN}Step"),
    "detach": (lambda x, r, s: torch.tanh(x.a + r.a) * (x.a - r.a).detach(), None, None),
    "clamp": (lambda x, r, s: torch.clamp(x.a + r.a, -0.3, 0.4) * s.h, None, None),
    "float32": (lambda x, r, s: torch.tanh(x.a.float() + r.a).to(s.h.dtype), None, None),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's forward mode
@pytest.mark.parametrize("name", LEFT)
def test_a_cell_with_gradients_of_its_own(name):
    """Where the derivative of its backward is another, as `explain` says, the reference's."""
    function, second, forward = LEFT[name]
    cell = openrnn.cell(gates="a", name=f"own_{name.replace(' ', '_')}")(function)
    x, along = torch.randn(2, STEPS, BATCH, 3, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    ours, plain = (openrnn.Recurrent(cell, 3, 5, backend=name) for name in ("auto", "reference"))
    plain.load_state_dict(ours.state_dict())
    table = openrnn.explain(ours, x, quiet=True)
    assert table.chosen == "cpu"
    assert (second is None) == ("second derivatives" not in str(table))
    assert (forward is None) == ("forward mode" not in str(table))
    assert (second or "") in str(table)
    assert (forward or "") in str(table)

    def of(layer):
        """First and second derivatives, and those of forward mode, or torch's errors."""
        leaves = [x.clone().requires_grad_(), *layer.parameters()]
        try:
            first = torch.autograd.grad(layer(leaves[0])[0].sum(), leaves, create_graph=True)
            yield torch.autograd.grad(sum(grad.square().sum() for grad in first), leaves)
        except RuntimeError as error:
            yield str(error)
        try:
            yield torch.func.jvp(lambda x: layer(x)[0], (x,), (along,))[1]
        except RuntimeError as error:
            yield str(error)

    for have, want in zip(of(ours), of(plain), strict=True):
        if isinstance(want, str):
            assert have == want
        else:
            torch.testing.assert_close(have, want, rtol=1e-3, atol=1e-5)
