"""Calls that repeat and record gradients: the same gradients as a call that is made in full."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import openrnn
from openrnn import philox, prepared_calls
from openrnn.nn import autograd_call, call_cache

T, B, H = 3, 2, 16
WIDTH = 5  # of x


def layer(**options):
    torch.manual_seed(0)
    return openrnn.LSTM(WIDTH, H, 2, bidirectional=True, dtype=torch.float64, **options).eval()


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def flat(found):
    return [each for part in found for each in (part if isinstance(part, tuple) else (part,))]


KINDS = {
    "layer": (layer, (T, B, WIDTH), (4, B, H)),
    "batch first": (lambda: layer(batch_first=True), (B, T, WIDTH), (4, B, H)),
    "batch first, T as B": (lambda: layer(batch_first=True), (B, B, WIDTH), (4, B, H)),
    "unbatched": (layer, (T, WIDTH), (4, H)),
    "one step": (layer, (1, B, WIDTH), (4, B, H)),
    "cell": (lambda: openrnn.LSTMCell(WIDTH, H, dtype=torch.float64), (B, WIDTH), (B, H)),
    "cell unbatched": (lambda: openrnn.LSTMCell(WIDTH, H, dtype=torch.float64), (WIDTH,), (H,)),
}
RESULTS = {"all": slice(None), "y": slice(0, 1), "final": slice(1, None)}


@pytest.fixture
def hits(monkeypatch):
    """How many backward passes ran from memory, and how many in full after all."""
    count = {"memory": 0, "full": 0}
    both = {
        "memory": autograd_call.AutogradCall.backward,
        "full": autograd_call.AutogradCall._general_backward,
    }

    def counting(name):
        def counted(self, *args):
            count[name] += 1
            return both[name](self, *args)

        return counted

    monkeypatch.setattr(autograd_call.AutogradCall, "backward", counting("memory"))
    monkeypatch.setattr(autograd_call.AutogradCall, "_general_backward", counting("full"))
    return count


def gradients(module, x, hx, of=slice(None), **options):
    """Results, and gradients of x, states and parameters."""
    results = flat(module(x, hx))
    leaves = [x, *(hx or ()), *module.parameters()]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    generator = torch.Generator().manual_seed(1)
    wanted = [each for each in results[of] if each.requires_grad]
    weights = [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in wanted]
    found = torch.autograd.grad(wanted, leaves, weights, allow_unused=True, **options)
    return [*results, *found]


def same(a, b, exact=True):
    for left, right in zip(a, b, strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            assert left.shape == right.shape
            close = torch.equal if exact else torch.allclose
            assert close(left, right)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of", RESULTS)
@pytest.mark.parametrize("given", [True, False])
def test_gradients_are_the_same(hits, kind, of, given):
    make, x, states = KINDS[kind]
    module, x = make(), drawn(*x)
    hx = (drawn(*states), drawn(*states)) if given else None
    of = RESULTS[of]
    first, _, third = (gradients(module, x, hx, of) for _ in range(3))
    assert hits == {"memory": 1, "full": 0}
    same(first, third)


@pytest.mark.parametrize("kind", ["layer", "batch first", "cell", "cell unbatched"])
def test_backward_of_calls_under_autocast_runs_from_memory(hits, kind):
    """Outside of autocast, as torch wants it, with the gradients of a call that is made in full."""
    make, shape, states = KINDS[kind]
    module = make().float()
    x, hx = torch.randn(shape), tuple(torch.randn(states) for _ in range(2))
    made = []
    for _ in range(5):
        with torch.autocast("cpu", torch.bfloat16):
            found = flat(module(x, hx))
        loss = sum(one.float().square().sum() for one in found)
        made.append(torch.autograd.grad(loss, [*module.parameters()]))
    assert hits == {"memory": 3, "full": 0}
    for grads in made[1:]:
        assert all(map(torch.equal, grads, made[0]))


@pytest.mark.parametrize("kind", ["layer", "batch first", "step"])
@pytest.mark.parametrize("given", [True, False])
def test_gradients_with_resets_are_the_same(hits, kind, given):
    """Each call with a mask of its own; then twice more, also through the full backward pass."""
    if kind == "step":
        module, x = openrnn.LSTM(WIDTH, H, dtype=torch.float64), drawn(B, WIDTH)
        hx = (drawn(1, B, H), drawn(1, B, H)) if given else None
        call, shape = module.step, (B,)
    else:
        make, size, states = KINDS[kind]
        module, x = make(), drawn(*size)
        hx = (drawn(*states), drawn(*states)) if given else None
        call, shape = module, x.shape[:2]
    masks = (torch.rand(4, *shape) < 0.5).unbind(0)

    def run(mask, **options):
        module.forward, forward = lambda x, hx: call(x, hx, reset=mask), module.forward
        try:
            return gradients(module, x, hx, **options)
        finally:
            module.forward = forward

    if kind != "step":
        call = module.forward
    wanted = [run(mask.double()) for mask in masks]
    assert hits == {"memory": 0, "full": 0}
    found = [run(mask) for mask in masks]
    assert hits == {"memory": 2, "full": 0}
    for one, other in zip(found, wanted):
        same(one, other)
    same(run(masks[0], create_graph=True), wanted[0], exact=False)
    assert hits == {"memory": 3, "full": 1}


def test_a_reverse_layer_is_turned_at_each_call(hits):
    module, x = openrnn.LSTM(WIDTH, H, reverse=True, dtype=torch.float64), drawn(T, B, WIDTH)
    first, _, third = (gradients(module, x, None) for _ in range(3))
    assert hits["memory"] == 0
    same(first, third)


@pytest.mark.parametrize("frozen", ["x", "parameters", "one", "states"])
def test_what_needs_none_has_none(hits, frozen):
    module, x, hx = layer(), drawn(T, B, WIDTH), (drawn(4, B, H), drawn(4, B, H))
    if frozen == "x":
        x.requires_grad_(False)
    if frozen == "parameters":
        module.requires_grad_(False)
    if frozen == "one":
        module.weight_hh_l1.requires_grad_(False)
    if frozen == "states":
        hx = tuple(state.detach() for state in hx)
    first, _, third = (gradients(module, x, hx) for _ in range(3))
    assert hits == {"memory": 1, "full": 0}
    same(first, third)


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_and_many_at_once(hits, kind):
    make, x, states = KINDS[kind]
    module, x = make(), drawn(*x)
    hx = (drawn(*states), drawn(*states))

    def second():
        leaves = [x, *hx, *module.parameters()]
        found = torch.autograd.grad(sum(each.sum() for each in flat(module(x, hx))), leaves,
                                    create_graph=True)  # fmt: skip
        return torch.autograd.grad(sum(each.square().sum() for each in found), leaves)

    def jacobian():
        y = flat(module(x, hx))[0].flatten()[:4]
        return torch.autograd.grad(y, [x, *hx], torch.eye(4, dtype=y.dtype), is_grads_batched=True,
                                   allow_unused=True)  # fmt: skip

    wanted = second(), jacobian()
    gradients(module, x, hx), gradients(module, x, hx)
    hits["memory"] = 0
    same(wanted[0], second(), exact=False)
    same(wanted[1], jacobian(), exact=False)
    assert hits["memory"] == hits["full"] >= 2


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_around_a_backward_pass(hits):
    module, x = layer(), drawn(T, B, WIDTH)
    wanted = gradients(module, x, None)
    gradients(module, x, None)

    class Watch(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls += function is torch.ops.openrnn.backward.default
            return function(*args, **kwargs or {})

    leaves = [x, *module.parameters()]
    y = module(x)[0]
    twice = [torch.autograd.grad(y.sum(), leaves, retain_graph=True) for _ in range(2)]
    same(*twice)
    same(twice[0][:1], torch.autograd.grad(y.sum(), leaves[:1], retain_graph=True))
    same(twice[0][2:], torch.autograd.grad(y.sum(), leaves[2:], retain_graph=True))
    assert hits.pop("memory") == 4
    assert not hits["full"]
    hits["memory"] = 0
    with Watch() as watch:
        same(twice[0], torch.autograd.grad(y.sum(), leaves, retain_graph=True))
    assert (watch.calls, hits["full"]) == (1, 1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        same(twice[0], torch.autograd.grad(y.sum(), leaves, retain_graph=True), exact=False)
    finally:
        torch.set_num_threads(before)
    assert hits["full"] == 2
    unpacked = lambda t: t.mT.contiguous().mT if t.dim() > 1 else t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, unpacked):
        same(wanted, gradients(module, x, None))
    with torch.autograd.detect_anomaly():
        same(wanted, gradients(module, x, None))
    for reentrant in (True, False):
        again = checkpoint(lambda x: module(x)[0], x, use_reentrant=reentrant)
        again.sum().backward()
        same([x.grad], twice[0][:1])
        x.grad = None
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), leaves)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_checkpoint_sees_the_same_in_both_passes(batch_first):
    """Two calls of a size in one step: the second comes to be known before it is made again."""
    module, data = layer(batch_first=batch_first), [drawn(T, B, WIDTH), drawn(T, B, WIDTH)]
    for _ in range(3):
        states = drawn(4, T if batch_first else B, H), drawn(4, T if batch_first else B, H)
        results = [checkpoint(lambda x, *hx: module(x, hx)[0], x, *states, use_reentrant=False)
                   for x in data]  # fmt: skip
        found = torch.autograd.grad(sum(y.sum() for y in results), [*data, *states])
        wanted = torch.autograd.grad(
            sum(module(x, states)[0].sum() for x in data), [*data, *states]
        )
        same(wanted, found)


def test_hooks_of_what_one_call_saved(hits):
    module, x = layer(), drawn(T, B, WIDTH)
    wanted = gradients(module, x, None)
    gradients(module, x, None)
    y = flat(module(x))
    node = y[0].grad_fn
    leaves = [x, *module.parameters()]
    for saved in node._raw_saved_tensors[len(leaves) :]:  # y and the reserve
        saved.register_hooks(torch.clone, lambda t: t.mT.contiguous().mT if t.dim() > 1 else t)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in y]
    same(wanted[len(y) :], torch.autograd.grad(y, leaves, weights))
    assert hits["full"] == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's forward mode
def test_the_tangent_of_a_gradient(hits):
    module, x = layer(), drawn(T, B, WIDTH)
    for _ in range(3):
        y = module(x)[0]
        with torch.autograd.forward_ad.dual_level():
            dy = torch.autograd.forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y))
            (dx,) = torch.autograd.grad(y, x, dy)
            tangent = torch.autograd.forward_ad.unpack_dual(dx).tangent
        assert torch.allclose(tangent, dx)


def test_memory_that_shrank_since_is_seen(hits):
    module, x = layer(), drawn(T, B, WIDTH)
    for _ in range(2):
        gradients(module, x, None)
    y = module(x)[0]
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="x must have memory"):
        y.sum().backward()
    assert hits["memory"] == 1


@pytest.mark.parametrize("left", [0, 8], ids=["freed", "shrunk"])
def test_outputs_that_shrank_since_are_seen(hits, left):
    module, x = layer(), drawn(T, B, WIDTH)
    for _ in range(2):
        gradients(module, x, None)
    y = module(x)[0]
    total = y.sum()
    y.untyped_storage().resize_(left)
    with pytest.raises(ValueError, match="y must have memory"):
        total.backward()
    assert hits["memory"] == 1


def test_inference_and_training_in_turn(hits):
    """A call that records is not answered by one that does not, nor the other way round."""
    module, x = layer(), drawn(T, B, WIDTH)
    runs = []
    for _ in range(4):
        with torch.no_grad():
            assert not module(x)[0].requires_grad
        assert not module.requires_grad_(False)(x.detach())[0].requires_grad
        module.requires_grad_(True)
        runs.append(gradients(module, x, None))
    assert hits["memory"] >= 2
    same(runs[0], runs[-1])


@pytest.mark.parametrize("kind", [openrnn.GRU, openrnn.RNN])
def test_a_model_is_trained_as_without_memory(monkeypatch, kind):
    torch.manual_seed(0)
    module = kind(WIDTH, H, 2)
    other = copy.deepcopy(module)
    monkeypatch.setattr(other._call_cache, "remember", lambda *_: None)
    data = torch.randn(8, T, B, WIDTH)
    for net in (module, other):
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        for x in data:
            optimizer.zero_grad()
            y, state = net(x)
            y, _ = net(x, state.detach())
            y.square().mean().backward()
            optimizer.step()
    assert any(isinstance(one.run, autograd_call.AutogradCall)
               for known in module._call_cache._calls.values() for one in known)  # fmt: skip
    assert not other._call_cache._calls
    same(module.parameters(), other.parameters())
    assert call_cache.CALLS >= 2


@pytest.mark.parametrize("frozen", ["", "weight_ih_l0", "weight_hh_l0", "bias_ih_l0"])
@pytest.mark.parametrize("lengths", [None, torch.tensor([3, 0, 1])], ids=["", "lengths"])
def test_gradients_of_matrices_share_no_memory(frozen, lengths):
    """So that autograd can add in place, and that no piece is larger than it must be."""
    ours = openrnn.LSTM(64, 64, backend="cpu")  # no size is padded
    plain = openrnn.LSTM(64, 64, backend="reference")
    plain.load_state_dict(ours.state_dict())
    x, found = torch.randn(3, 3, 64), []
    for module in (ours, plain):
        if frozen:
            module.get_parameter(frozen).requires_grad_(False)
        leaves = [each for each in module.parameters() if each.requires_grad]
        for _ in range(3):  # the last ones are remembered
            grads = torch.autograd.grad(module(x, lengths=lengths)[0].square().sum(), leaves)
        found.append(grads)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    if lengths is None:
        assert all(grad.untyped_storage().nbytes() == grad.nbytes for grad in found[0]
                   if grad.dim() == 2)  # fmt: skip


def test_a_loop_over_a_cell_of_large_matrices():
    ours, plain = openrnn.LSTMCell(64, 512), torch.nn.LSTMCell(64, 512)
    plain.load_state_dict(ours.state_dict())
    x, found = torch.randn(4, 2, 64), []
    for module in (ours, plain):
        state = (torch.zeros(2, 512), torch.zeros(2, 512))
        for x_t in x:
            state = module(x_t, state)
        found.append(torch.autograd.grad(state[0].sum(), list(module.parameters())))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


class Replay:
    """A prepared call with gradients that notes its seed and gives zeros."""

    saved = ()

    def __init__(self, shapes, dtype):
        self.shapes, self.dtype, self.seeds = shapes, dtype, []

    def ready(self, every):
        return True

    def forward(self, every):
        self.seeds.append(every[-1].tolist())
        return [torch.zeros(shape, dtype=self.dtype) for shape in self.shapes]


@pytest.mark.parametrize("casts", [False, True])
def test_a_call_with_dropout_repeats_and_draws_one_seed(monkeypatch, casts):
    """Under autocast, too; its guard knows no seed, which is new at each call."""
    runs, drawn = [], []

    def prepare_grad(call, output_shapes, input_shapes):
        runs.append(Replay(output_shapes, call.x.dtype))
        problem = openrnn.Problem(call.spec, call.x.dtype, "cpu", grad=True, training=True)
        return SimpleNamespace(problem=problem), runs[-1]

    draw = philox.draw
    monkeypatch.setattr(prepared_calls, "prepare_grad", prepare_grad)
    monkeypatch.setattr(philox, "draw", lambda *given: drawn.append(1) or draw(*given))
    net, x = openrnn.LSTM(8, 16, 2, dropout=0.5), torch.randn(5, 3, 8)
    counts = []
    for _ in range(8):
        before = len(drawn)
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            y, _ = net(x)
        assert y.dtype == (torch.bfloat16 if casts else torch.float32)
        counts.append(len(drawn) - before)
    assert counts == [1] * 8
    assert len(runs) <= 2  # of the layer's call, and of what autocast makes of it
    assert sum(len(run.seeds) for run in runs) == 6  # remembered from the second on
