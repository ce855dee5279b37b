"""Transforms of torch.func and forward mode: kernels run them, and give what the reference does."""

from copy import deepcopy

import pytest
import torch
from cases import CELLS, CLIP, require, thinned
from derivatives import tangents_run
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

import openrnn
from openrnn import reference, transforms
from openrnn.errors import NoBackendError

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own forward mode

F64 = torch.float64
MEMBERS, STEPS, BATCH, WIDTH, HIDDEN = 3, 4, 2, 3, 5


class Case:
    """A layer by kernels and by the reference, and what calls of them read."""

    def __init__(self, cell, dtype=F64, **options):
        torch.manual_seed(0)
        self.layers = [
            openrnn.Recurrent(cell, WIDTH, HIDDEN, backend=name, dtype=dtype, **options)
            for name in ("cpu", "reference")
        ]
        self.layers[1].load_state_dict(self.layers[0].state_dict())
        spec, self.states = self.layers[0].spec, cell.states
        self.x, self.dx = torch.randn(2, MEMBERS, STEPS, BATCH, WIDTH, dtype=dtype)
        self.lengths = torch.tensor([[4, 2], [0, 3], [1, 4]])
        self.reset = torch.rand(MEMBERS, STEPS, BATCH) < 0.4
        self.h, self.dh = (
            [torch.randn(spec.chains, BATCH, width, dtype=dtype) for width in spec.state_sizes]
            for _ in range(2)
        )
        self.params = {name: w.detach() for name, w in self.layers[0].named_parameters()}
        self.dparams = {name: torch.randn_like(w) for name, w in self.params.items()}

    def given(self, states):
        return tuple(states) if len(self.states) > 1 else states[0]

    def check(self, monkeypatch, run, **tolerance):
        """What `run` gives with both layers; the reference does not run in the first."""
        ours, plain = self.layers
        wanted = tree_leaves(run(self, plain))
        with monkeypatch.context() as patch:
            patch.setattr(reference, "run", None)
            found = tree_leaves(run(self, ours))
        for have, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(have, want, **tolerance)


def loss(out):
    return sum(part.sin().sum() for part in tree_leaves(out))


def every_option(case, layer):
    return vmap(lambda x, n, r: layer(x, lengths=n, reset=r, return_states=True))(
        case.x, case.lengths, case.reset
    )


def lengths_alone(case, layer):
    return vmap(lambda n: layer(case.x[0], lengths=n))(case.lengths)


def of_states(case, layer):
    many = [torch.stack([h, 2 * h, 3 * h], 1) for h in case.h]
    of = grad(lambda h: loss(layer(case.x[0], case.given(h), reset=case.reset[0])))
    return vmap(of, in_dims=([1] * len(many),))(many)


def of_reset_states(case, layer):
    def of(h, x):
        return loss(layer(x, reset=case.reset[0], reset_state=case.given(h)))

    return vmap(grad(of), (None, 0))(case.h, case.x)


def of_lengths(case, layer):
    return vmap(grad(lambda x, n: loss(layer(x, lengths=n))))(case.x, case.lengths)


def jacobian(case, layer):
    return vmap(jacrev(lambda x: layer(x)[0].sum(0)), 2)(case.x.movedim(0, 2))


def whole_jacobian(case, layer):
    """More gradients than are computed at a time."""
    return jacrev(lambda x: layer(x, lengths=case.lengths[0])[0])(case.x[0])


def jacobian_of_parameters(case, layer):
    return jacrev(lambda p: functional_call(layer, p, (case.x[0],))[0].sum((0, 1)))(case.params)


def maps_in_maps(case, layer):
    def run(x):
        return vmap(lambda y: layer(x + y))(case.x[:2])

    return vmap(run)(case.x)


def map_in_a_gradient(case, layer):
    def total(params):
        return vmap(lambda x: loss(functional_call(layer, params, (x,))))(case.x).sum()

    return grad(total)(case.params)


def map_in_training(case, layer):
    return torch.autograd.grad(loss(vmap(layer)(case.x)), [*layer.parameters()])


def each_sample(case, layer):
    def of(params, x):
        return loss(functional_call(layer, params, (x,)))

    return vmap(grad(of), (None, 0))(case.params, case.x)


def ensemble(case, layer):
    many = {name: torch.stack([p, 2 * p, -p]) for name, p in case.params.items()}

    def of(params, x):
        return loss(functional_call(layer, params, (x,)))

    return vmap(grad(of, (0, 1)), (0, None))(many, case.x[0])


def pulled_after(case, layer):
    y, pull = vjp(lambda x: layer(x)[0], case.x[0])
    return pull(y.cos()), vmap(pull)(torch.stack([y, y.sin()]))


REVERSE = [
    every_option, lengths_alone, of_states, of_reset_states, of_lengths, jacobian,
    whole_jacobian, jacobian_of_parameters, maps_in_maps, map_in_a_gradient, map_in_training,
    each_sample, ensemble, pulled_after,
]  # fmt: skip


def pushed(case, layer):
    return jvp(layer, (case.x[0],), (case.dx[0],))


def pushed_everything(case, layer):
    def run(x, params, *h):
        options = {"lengths": case.lengths[0], "reset": case.reset[0], "return_states": True}
        return functional_call(layer, params, (x, case.given(h)), options)

    given = case.x[0], case.params, *case.h
    return jvp(run, given, (case.dx[0], case.dparams, *case.dh))


def pushed_reset_states(case, layer):
    def run(*h):
        return layer(case.x[0], reset=case.reset[0], reset_state=case.given(h))

    return jvp(run, (*case.h,), (*case.dh,))


def pushed_biases(case, layer):
    names = [name for name in case.params if name.startswith("bias")]

    def run(biases):
        return functional_call(layer, {**case.params, **biases}, (case.x[0],))

    pick = [{name: of[name] for name in names} for of in (case.params, case.dparams)]
    return jvp(run, (pick[0],), (pick[1],)) if names else []


def forward_jacobian(case, layer):
    return jacfwd(lambda x: layer(x, lengths=case.lengths[0])[0].sum(0))(case.x[0])


def pushed_maps(case, layer):
    def run(x, dx, n):
        return jvp(lambda x: layer(x, lengths=n), (x,), (dx,))

    return vmap(run)(case.x, case.dx, case.lengths)


def maps_pushed(case, layer):
    return jvp(vmap(layer), (case.x,), (case.dx,))


def dual(case, layer):
    with forward_ad.dual_level():
        out = tree_leaves(layer(forward_ad.make_dual(case.x[0], case.dx[0])))
        return [forward_ad.unpack_dual(part).tangent for part in out]


FORWARD = [
    pushed, pushed_everything, pushed_reset_states, pushed_biases, forward_jacobian, pushed_maps,
    maps_pushed, dual,
]  # fmt: skip
OPTIONS = {
    "lstm": {},
    "both ways": {"num_layers": 2, "bidirectional": True},
    "reverse": {"reverse": True, "bias_mode": "recurrent"},
}
WAYS = [
    pytest.param(name, run, id=f"{run.__name__}-{name}".replace(" ", "_"))
    for run in (*REVERSE, *FORWARD)
    for name in OPTIONS
]


@pytest.mark.parametrize(("name", "run"), thinned(WAYS, 2))
def test_kernels_give_what_the_reference_does(monkeypatch, name, run):
    require("cpu")
    cell = CELLS["gru" if name == "both ways" else "lstm"]
    Case(cell, **OPTIONS[name]).check(monkeypatch, run)


# the first has all that a cell may have
@pytest.mark.parametrize("key", thinned(sorted(CELLS, key="peephole_lstm".__ne__), len(CELLS)))
def test_every_cell(monkeypatch, key):
    """Each with its vectors and all of its states; the clip where it has one."""
    cell = CELLS[key]
    if cell.dependent_product:
        return  # no backend but the reference has it
    require("cpu")
    case = Case(cell, cell_clip=CLIP if cell.takes_clip else None)
    for run in (of_states, each_sample, pushed_everything):
        case.check(monkeypatch, run)


def test_projections_are_mapped(monkeypatch):
    require("cpu")
    case = Case(CELLS["lstm"], num_layers=2, proj_size=2)
    for run in (every_option, of_states, each_sample):
        case.check(monkeypatch, run)


@pytest.mark.parametrize("run", [of_states, each_sample, pushed_everything, forward_jacobian])
def test_float32(monkeypatch, run):
    require("cpu")
    Case(CELLS["gru"], torch.float32).check(monkeypatch, run, rtol=1e-5, atol=2e-5)


def twice_reverse(case, layer):
    y, pull = vjp(lambda x: layer(x)[0], case.x[0])
    return grad(lambda g: pull(g)[0].sin().sum())(y)


def forward_of_reverse(case, layer):
    y, pull = vjp(lambda x: layer(x)[0], case.x[0])
    return jvp(pull, (y,), (y.cos(),))


def penalty(case, layer):
    lines = jacrev(lambda x: layer(x)[0].sum(0))(case.x[0])
    return torch.autograd.grad(lines.square().sum(), [*layer.parameters()], allow_unused=True)


def forward_penalty(case, layer):
    y, pushed = jvp(lambda x: layer(x)[0], (case.x[0],), (case.dx[0],))
    return torch.autograd.grad(
        (y * pushed).square().sum(), [*layer.parameters()], allow_unused=True
    )


def of_tangents(case, layer):
    """Nothing but the tangent records gradients."""
    layer.requires_grad_(False)
    dx = case.dx.detach().requires_grad_()
    alone = jvp(layer, (case.x[0],), (dx[0],))[1]
    mapped = jvp(vmap(layer), (case.x,), (dx,))[1]
    each = vmap(lambda x, dx: jvp(layer, (x,), (dx,))[1])(case.x, dx)
    with forward_ad.dual_level():
        out = tree_leaves(layer(forward_ad.make_dual(case.x[0], dx[0])))
        dual = [forward_ad.unpack_dual(part).tangent for part in out]
    return [torch.autograd.grad(loss(one), dx)[0] for one in (alone, mapped, each, dual)]


def curvature(case, layer):
    if layer.backend == "cpu":
        layer.backend = "auto"  # a backend that is named refuses
    return hessian(lambda x: loss(layer(x)))(case.x[0])


@pytest.mark.parametrize("options", [{}, {"num_layers": 2}], ids=str)
@pytest.mark.parametrize(
    "run", [twice_reverse, forward_of_reverse, penalty, forward_penalty, of_tangents, curvature]
)
def test_a_derivative_of_a_derivative(run, options):
    """By kernels or by the reference; the tensors of levels that have ended are taken as such."""
    require("cpu")
    case = Case(CELLS["lstm"], **options)
    found, wanted = (tree_leaves(run(case, layer)) for layer in case.layers)
    for have, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(have, torch.zeros_like(have) if want is None else want)


def refused(layer, x, **options):
    """Whether a layer that names the cpu refuses a call under a transform."""
    with pytest.raises(NoBackendError, match=r"torch\.func"):
        vmap(lambda x: layer(x, **options), randomness="same")(x)


def test_what_is_left_to_the_reference(monkeypatch):
    """Dropout, numbers of members that would take longer, two levels that differentiate."""
    require("cpu")
    x = torch.randn(MEMBERS, STEPS, BATCH, WIDTH)
    refused(openrnn.LSTM(WIDTH, HIDDEN, 2, dropout=0.5, backend="cpu"), x)
    layer = openrnn.LSTM(WIDTH, HIDDEN, backend="cpu")
    params = {name: w.detach() for name, w in layer.named_parameters()}

    def of(params, x):
        return functional_call(layer, params, (x,))[0].sum()

    assert len(vmap(grad(of), (None, 0))(params, x)) == 4
    with pytest.raises(NoBackendError, match=r"torch\.func"):
        jvp(grad(lambda x: of(params, x)), (x[0],), (x[0],))
    monkeypatch.setattr(transforms, "MEMBERS_A_STEP", 0.5)
    with pytest.raises(NoBackendError, match=r"torch\.func"):
        vmap(grad(of), (None, 0))(params, x)
    assert vmap(layer)(x)[0].shape == (MEMBERS, STEPS, BATCH, HIDDEN)  # these are one call
    narrow = openrnn.LSTM(WIDTH, HIDDEN, proj_size=2, backend="cpu")
    with pytest.raises(NoBackendError, match=r"torch\.func"):
        jvp(narrow, (x[0],), (x[0],))


@pytest.mark.parametrize(("dtype", "near"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
@pytest.mark.parametrize("mapped", [False, True], ids=["alone", "mapped"])
def test_forward_mode_of_16_bits_is_computed_in_float32(monkeypatch, dtype, near, mapped):
    """Beside float64 with the same weights and inputs, by kernels alone; results have the dtype."""
    require("cpu")
    torch.manual_seed(0)
    layer = openrnn.LSTM(WIDTH, HIDDEN, 2, bidirectional=True, backend="cpu").to(dtype)
    x, dx = torch.randn(2, MEMBERS, STEPS, BATCH, WIDTH).to(dtype)
    lengths = torch.tensor([STEPS, 0, 2, 4, STEPS])[:BATCH]

    def pushed(layer, x, dx):
        def each(x, dx):
            return jvp(lambda x: layer(x, lengths=lengths), (x,), (dx,))[1]

        return tree_leaves(vmap(each)(x, dx) if mapped else each(x[0], dx[0]))

    plain = deepcopy(layer).double()
    plain.backend = "reference"
    wanted = pushed(plain, x.double(), dx.double())
    monkeypatch.setattr(reference, "run", None)
    dtypes = tangents_run(monkeypatch, "cpu")
    for have, want in zip(pushed(layer, x, dx), wanted, strict=True):
        assert have.dtype == dtype
        assert (have - want).norm() <= near * want.norm()
    assert {*dtypes} == {torch.float32}


@pytest.mark.parametrize("of_rows", [True, False])
def test_maps_of_no_members(of_rows):
    """Over rows or over parameters: results (0, ...), and the gradients of such."""
    require("cpu")
    layer = openrnn.LSTM(WIDTH, HIDDEN)
    x = torch.randn(0, STEPS, BATCH, WIDTH) if of_rows else torch.randn(STEPS, BATCH, WIDTH)
    params = dict(layer.named_parameters())
    if not of_rows:
        params = {name: w.new_zeros(0, *w.shape) for name, w in params.items()}
    dims = (None, 0) if of_rows else (0, None)
    y, states = vmap(lambda p, x: functional_call(layer, p, (x,)), dims)(params, x)
    assert y.shape == (0, STEPS, BATCH, HIDDEN)
    assert [state.shape for state in states] == [(0, 1, BATCH, HIDDEN)] * 2
    of = grad(lambda p, x: functional_call(layer, p, (x,))[0].sin().sum(), (0, 1))
    of_params, of_x = vmap(of, dims)(params, x)
    assert of_x.shape == (0, STEPS, BATCH, WIDTH)
    assert {name: w.shape[1:] for name, w in of_params.items()} == {
        name: w.shape for name, w in layer.named_parameters()
    }


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fused", "cudnn"])
def test_maps_on_a_gpu(backend):
    """Values and gradients of x, as of each member's own call: other kernels, so bfloat16 apart."""
    torch.manual_seed(0)
    like = {"device": "cuda", "dtype": torch.bfloat16}
    layer = openrnn.LSTM(WIDTH, 64, 2, backend=backend, **like)
    x = torch.randn(MEMBERS, STEPS, BATCH, WIDTH, **like)

    def of(x):
        return grad(lambda x: layer(x)[0].float().sum())(x), layer(x)[0]

    for found, wanted in zip(vmap(of)(x), zip(*map(of, x)), strict=True):
        torch.testing.assert_close(found, torch.stack(wanted), rtol=0.05, atol=0.02)
