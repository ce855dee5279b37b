"""Calls that a module remembers: what they return, and all that must end the memory of them."""

import copy
import pickle

import forks
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import openrnn
from openrnn.kernels.cpu import host
from openrnn.nn import call_cache

T, B, H = 3, 2, 16
WIDTH = 5  # of x


def layer(**options):
    torch.manual_seed(0)
    return openrnn.LSTM(WIDTH, H, 2, bidirectional=True, **options).eval()


def inputs(module, batched=True):
    x = torch.randn(*((T, B, WIDTH) if batched else (T, WIDTH)))
    hx = tuple(torch.randn(*((4, B, H) if batched else (4, H))) for _ in range(2))
    return (x.transpose(0, 1) if batched and module.batch_first else x), hx


def flat(found):
    y, states = found
    return [y, *(states if isinstance(states, tuple) else (states,))]


class Watch(TorchDispatchMode):
    """Counts our forward operators."""

    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += function is torch.ops.openrnn.forward.default
        return function(*args, **kwargs or {})


@pytest.fixture
def hits(monkeypatch):
    """How many calls were repeated from memory."""
    count = [0]
    run = call_cache.CallCache.run

    def counted(self, *args):
        found = run(self, *args)
        count[0] += found is not None
        return found

    monkeypatch.setattr(call_cache.CallCache, "run", counted)
    return count


def quantized(module):
    whole = nn.Sequential(module)
    openrnn.quantize(whole)
    return whole[0]


def remembered(module, x, hx):
    """The module after it has come to remember this call."""
    with torch.no_grad():
        for _ in range(2):
            module(x, hx)
    return module


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_a_layer_returns_the_same(hits, batched, batch_first, given):
    module = layer(batch_first=batch_first)
    x, hx = inputs(module, batched)
    hx = hx if given else None
    with torch.no_grad():
        first, _, third = (flat(module(x, hx)) for _ in range(3))
    assert hits == [1]
    for a, b in zip(first, third):
        assert torch.equal(a, b)
        assert a.shape == b.shape
        assert a.stride() == b.stride()


@pytest.mark.parametrize("batched", [True, False])
def test_a_step_returns_the_same(hits, batched):
    module = openrnn.GRU(WIDTH, H, 2)
    x, hx = (
        torch.randn(*((B, WIDTH) if batched else (WIDTH,))),
        torch.randn(*((2, B, H), (2, H))[not batched]),
    )
    with torch.no_grad():
        first, _, third = (flat(module.step(x, hx)) for _ in range(3))
        assert hits == [1]
        module(
            x.reshape(-1, *((1, WIDTH) if batched else (WIDTH,))), None
        )  # of the same sizes or not
    for a, b in zip(first, third):
        assert torch.equal(a, b)
        assert a.shape == b.shape


@pytest.mark.parametrize("kind", [openrnn.LSTMCell, openrnn.GRUCell, openrnn.RNNCell])
@pytest.mark.parametrize("batched", [True, False])
def test_a_one_step_module_returns_the_same(hits, kind, batched):
    module, lead = kind(WIDTH, H), (B,) if batched else ()
    x, h = torch.randn(*lead, WIDTH), torch.randn(*lead, H)
    hx = (h, torch.randn(*lead, H)) if kind is openrnn.LSTMCell else h
    with torch.no_grad():
        first, _, third = (module(x, hx) for _ in range(3))
    assert hits == [1]
    for a, b in zip(*(each if isinstance(each, tuple) else (each,) for each in (first, third))):
        assert torch.equal(a, b)
        assert a.shape == b.shape


def test_it_reads_what_is_there_now(hits):
    module = layer()
    x, hx = inputs(module)
    remembered(module, x, hx)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)
        x, hx = x + 1, tuple(state - 1 for state in hx)
        found = flat(module(x, hx))
        wanted = flat(copy.deepcopy(module)(x, hx))
        module.weight_hh_l0 = nn.Parameter(module.weight_hh_l0 + 1)
        replaced = flat(module(x, hx))
        wanted_then = flat(copy.deepcopy(module)(x, hx))
    assert hits == [2]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))
    assert all(torch.equal(a, b) for a, b in zip(replaced, wanted_then))
    assert not torch.equal(found[0], replaced[0])


def test_a_gradient_is_recorded_where_one_is_wanted(hits):
    module = layer()
    x, hx = inputs(module)
    remembered(module, x, hx)
    y, _ = module(x, hx)
    y.sum().backward()
    assert module.weight_hh_l0.grad is not None
    module.requires_grad_(False)
    with torch.no_grad():
        module(x, hx), module(x, hx)
    assert not module(x, hx)[0].requires_grad
    before = hits[0]
    assert before
    x.requires_grad_()
    assert module(x, hx)[0].requires_grad
    assert hits == [before]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's forward mode
def test_autocast_and_modes_are_seen(hits):
    module = layer()
    x, hx = inputs(module)
    with torch.no_grad():
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                assert module(x, hx)[0].dtype == torch.bfloat16
        remembered(module, x, hx)
        assert hits == [1]  # under autocast
        with torch.autocast("cpu", torch.bfloat16):
            assert module(x, hx)[0].dtype == torch.bfloat16
        assert hits == [2]
        with Watch() as watch:
            for _ in range(3):
                module(x, hx)
        assert watch.calls == 3
        assert hits == [2]
        _, tangent = torch.func.jvp(lambda x: module(x, hx)[0], (x,), (torch.ones_like(x),))
        assert tangent.abs().sum() > 0
        many = torch.vmap(lambda x: module(x, hx)[0])(torch.stack([x, x]))
        assert torch.allclose(many[1], module(x, hx)[0], atol=1e-5)
    assert hits == [3]
    with torch.inference_mode():
        assert module(x, hx)[0].is_inference()


NARROW = [torch.bfloat16, torch.float16]


def calls_of(kind):
    """A module, a call of it as a function, and its inputs."""
    torch.manual_seed(0)
    if kind == "cell":
        module, shape = openrnn.LSTMCell(WIDTH, H), (B, H)
        return module, module, torch.randn(B, WIDTH), (torch.randn(shape), torch.randn(shape))
    if kind == "step":
        module, shape = openrnn.LSTM(WIDTH, H, 2), (2, B, H)
        return module, module.step, torch.randn(B, WIDTH), (torch.randn(shape), torch.randn(shape))
    module = layer()
    return module, module, *inputs(module)


def every_tensor(found):
    return [found[0], *(found[1] if isinstance(found[1], tuple) else (found[1],))]


@pytest.mark.parametrize("kind", ["layer", "step", "cell"])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_autocast_without_gradients_repeats(hits, kind, dtype):
    """In each dtype for itself, and after calls without it; parameters are read anew."""
    module, call, x, hx = calls_of(kind)
    (other,) = {*NARROW} - {dtype}
    with torch.no_grad():
        with torch.autocast("cpu", dtype):
            first = every_tensor(call(x, hx))
            call(x, hx)
            assert hits == [0]
            assert all(map(torch.equal, every_tensor(call(x, hx)), first))
            assert hits == [1]
        assert {one.dtype for one in first} == {dtype}
        plain = every_tensor(call(x, hx))
        assert {one.dtype for one in plain} == {torch.float32}
        with torch.autocast("cpu", other):
            assert {one.dtype for one in every_tensor(call(x, hx))} == {other}
        assert hits == [1]
        for param in module.parameters():
            param.mul_(0.5)
        with torch.autocast("cpu", dtype):
            changed = every_tensor(call(x, hx))
        assert hits == [2]
        assert not torch.equal(changed[0], first[0])
        fresh, again, *_ = calls_of(kind)
        fresh.load_state_dict(module.state_dict())
        with torch.autocast("cpu", dtype):
            assert all(map(torch.equal, changed, every_tensor(again(x, hx))))


@pytest.fixture
def prepared(monkeypatch):
    """Of each call that was prepared whether it came with its casts."""
    found = []

    def counting(name):
        prepare = getattr(call_cache.CallCache, name)

        def counted(self, *args):
            found.append(name)
            return prepare(self, *args)

        return counted

    for name in ("_prepare", "_prepare_cast"):
        monkeypatch.setattr(call_cache.CallCache, name, counting(name))
    return found


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", ["layer", "step", "cell"])
def test_a_call_under_autocast_is_prepared_once(prepared, kind, grad):
    """With its casts alone, which then run what is prepared of cast tensors."""
    module, call, x, hx = calls_of(kind)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
        for _ in range(4):
            call(x, hx)
    assert prepared == ["_prepare_cast", "_prepare"]
    assert [key[0] for key in module._call_cache._calls] == [
        "step" if kind in ("step", "cell") else "forward"
    ]


@pytest.mark.parametrize("kind", ["layer", "step", "cell"])
@pytest.mark.parametrize("why", ["computed weights", "expanded x"])
def test_a_call_under_autocast_repeats_without_its_casts(hits, kind, why):
    """Where it cannot be remembered with them."""
    module, call, x, hx = calls_of(kind)
    if why == "expanded x":
        x = x[:1].expand(x.shape)
    else:
        register_parametrization(module, module._names[0], nn.Identity())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = [every_tensor(call(x, hx)) for _ in range(4)]
    assert hits == [2]
    for one in found[1:]:
        assert all(map(torch.equal, one, found[0]))


@pytest.mark.parametrize("kind", ["layer", "step", "cell"])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_autocast_with_gradients_records_casts(hits, kind, dtype):
    """A call that was remembered without gradients is not taken for one that records some."""
    module, call, x, hx = calls_of(kind)
    leaves, made = [x.requires_grad_(), *module.parameters()], []
    with torch.autocast("cpu", dtype):
        with torch.no_grad():
            for _ in range(3):
                wanted = every_tensor(call(x, hx))
        assert hits == [1]
        for _ in range(4):
            found = every_tensor(call(x, hx))
            assert all(map(torch.equal, found, wanted))
            grads = torch.autograd.grad(sum(one.float().square().sum() for one in found), leaves)
            assert {grad.dtype for grad in grads} == {torch.float32}
            made.append(grads)
    assert hits[0] >= 1 + 2
    for grads in made[1:]:
        assert all(map(torch.equal, grads, made[0]))


@pytest.mark.parametrize("kind", ["layer", "step", "cell"])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_narrow_calls_repeat(hits, kind, dtype, grad):
    """In float16 and bfloat16 between conversions, with the bits of the first call."""
    module, call, x, hx = calls_of(kind)
    module.to(dtype)
    x, hx = x.to(dtype), tuple(state.to(dtype) for state in hx)
    results = []
    with torch.set_grad_enabled(grad):
        for _ in range(4):
            found = every_tensor(call(x, hx))
            if grad:
                loss = sum(one.float().square().sum() for one in found)
                found += torch.autograd.grad(loss, [*module.parameters()])
            results.append(found)
    assert hits == [2]
    assert {one.dtype for one in results[0]} == {dtype}
    for found in results[1:]:
        assert all(map(torch.equal, found, results[0]))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("steps", [1, 40])
@pytest.mark.parametrize(("kind", "hidden"), [(openrnn.LSTM, 128), (openrnn.RNN, 257)], ids=str)
def test_large_narrow_parameters_are_read_anew(hits, kind, hidden, steps, dtype):
    """They are kept in float32 until their elements change, whatever changes them.

    257 x 257 elements are no whole words, and kept by none.
    """
    torch.manual_seed(0)
    made, other = (kind(hidden, hidden).to(dtype) for _ in range(2))
    x = torch.randn(steps, B, hidden).to(dtype)
    with torch.no_grad():
        for number in range(6):
            if number == 4:
                for param, new in zip(made.parameters(), other.parameters()):
                    param.data.copy_(new)  # which leaves the version as it is
            if number == 5:
                made.weight_hh_l0.view(torch.int16)[-1, -1] += 1  # the least change there is
                other.weight_hh_l0.view(torch.int16)[-1, -1] += 1
            found, wanted = made(x)[0], kind(hidden, hidden).to(dtype)
            wanted.load_state_dict(made.state_dict())
            assert torch.equal(found, wanted(x)[0]), number
            assert torch.equal(found, other(x)[0]) == (number > 3)
    assert hits == [4 + 4]


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_expanded_inputs_of_16_bits(casts, grad, batch_first, axis):
    """A conversion may lay out such an x in another order than that of its dimensions."""
    module = openrnn.GRU(WIDTH, H, batch_first=batch_first)
    x = torch.randn(*((1, T) if axis == 0 else (T, 1)), WIDTH).expand(
        *((4, T) if axis == 0 else (T, 4)), WIDTH
    )
    if not casts:
        module, x = module.bfloat16(), x.bfloat16()
    results = []
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=casts):
        for _ in range(5):
            y = module(x)[0]
            grads = torch.autograd.grad(y.sum(), [*module.parameters()]) if grad else ()
            results.append([y, *grads])
    for found in results[1:]:
        assert all(map(torch.equal, found, results[0]))


@pytest.mark.parametrize("steps", [15, 40])
def test_bfloat16_matrices_are_read_as_such(steps, monkeypatch):
    """From 16 steps on panels have bfloat16 numbers: nothing is rounded, unless products are."""
    monkeypatch.setattr(host, "MULTIPLIES_BF16", False)
    torch.manual_seed(0)
    narrow = openrnn.LSTM(WIDTH, 40).bfloat16()
    wide = openrnn.LSTM(WIDTH, 40)
    wide.load_state_dict(narrow.state_dict())
    x = torch.randn(steps, B, WIDTH).bfloat16()
    with torch.no_grad():
        for _ in range(3):
            found, wanted = narrow(x)[0], wide(x.float())[0]
            assert torch.allclose(found.float(), wanted, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_calls_under_autocast_repeat(hits, masked, grad):
    """Of float64, which autocast leaves alone."""
    module = openrnn.GRU(WIDTH, H, 2, dtype=torch.float64)
    x = torch.randn(T, B, WIDTH, dtype=torch.float64)
    given = {"reset": torch.rand(T, B) < 0.5} if masked else {}
    leaves, found = [*module.parameters()], []
    with torch.set_grad_enabled(grad):
        for autocast in (False, True, True, True, True):
            if not autocast:
                module._call_cache, kept = call_cache.CallCache(), module._call_cache
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y, h = module(x, **given)
            if not autocast:
                module._call_cache = kept
            found.append([y, h, *(torch.autograd.grad(y.sum(), leaves) if grad else ())])
    assert hits == [2]
    for one in found[1:]:
        assert all(map(torch.equal, one, found[0]))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's forward mode
def test_forward_mode_is_seen():
    module = layer()
    x, hx = inputs(module)
    remembered(module, x, hx)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(module(dual, hx)[0]).tangent
    assert tangent is not None


def test_other_settings_are_other_calls(hits):
    module = layer(dropout=0.5)
    x, hx = inputs(module)
    remembered(module, x, hx)
    with torch.no_grad():
        plain = module(x, hx)[0]
        assert hits == [1]
        module.train()
        for _ in range(3):
            assert not torch.equal(module(x, hx)[0], plain)
        module.dropout = 0.0
        for _ in range(3):
            assert torch.equal(module(x, hx)[0], plain)
        assert hits == [2]
        module.dropout = 0.9
        assert not torch.equal(module(x, hx)[0], plain)
        module.eval()
        module.dropout, module.backend = 0.5, "reference"
        assert torch.allclose(module(x, hx)[0], plain, atol=1e-5)
        assert hits == [2]
        module.backend = "nothing"
        with pytest.raises(ValueError, match="nothing"):
            module(x, hx)


@pytest.mark.parametrize("grad", [True, False])
def test_batch_first_may_be_set_later(grad):
    module, x = openrnn.GRU(3, 4), torch.randn(5, 5, 3)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            before = module(x)[0]
        module.batch_first = True
        for _ in range(3):
            found = module(x)[0]
            assert torch.allclose(found, copy.deepcopy(module)(x)[0])
            assert not torch.allclose(found, before)


def test_states_in_another_form_are_refused_as_ever():
    with torch.no_grad():
        lstm, x = openrnn.LSTM(WIDTH, H), torch.randn(T, B, WIDTH)
        cell, x_t, h = openrnn.GRUCell(WIDTH, H), torch.randn(B, WIDTH), torch.zeros(B, H)
        for _ in range(3):
            lstm(x), cell(x_t, h)
            with pytest.raises(RuntimeError, match="states"):
                lstm(x, ())
            with pytest.raises(TypeError, match="hx must be a Tensor"):
                cell(x_t, (h,))


FIRST_CALLS = """
import threading, torch, openrnn
torch.set_num_threads(1)
layer = openrnn.GRU(1, 1).requires_grad_(False)
start, errors = threading.Barrier(6), []
def work():
    try:
        start.wait()
        for n in range(400):
            shape = layer(torch.zeros(1 + n % 8, 1, 1))[0].shape
            assert shape == (1 + n % 8, 1, 1), shape
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work) for _ in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
if errors:
    raise errors[0]
"""


def test_first_calls_from_several_threads():
    """Whoever loads a kernel second must not free the code that another program calls.

    Until Python has ended: what it frees then is freed once.
    """
    done = forks.python(FIRST_CALLS, ends=True)
    assert done.returncode == 0, done.stderr


def test_another_number_of_threads(hits):
    module = openrnn.LSTM(64, 512)  # threads share its steps
    x, before = torch.randn(4, 1, 64), torch.get_num_threads()
    remembered(module, x, None)
    wanted = flat(module(x))
    try:
        with torch.no_grad():
            for threads in (1, 2, 3, 1, 2, 3):
                torch.set_num_threads(threads)
                for _ in range(2):
                    assert torch.allclose(flat(module(x))[0], wanted[0], atol=1e-5)
    finally:
        torch.set_num_threads(before)
    assert hits[0] >= 6


def test_memory_that_shrank_is_seen(hits):
    module = layer()
    x, hx = inputs(module)
    remembered(module, x, hx)
    with torch.no_grad():
        module(x, hx)
        assert hits == [1]
        for shrunk, name in ((x, "x"), (module.weight_ih_l1, "weight_ih_l1"), (hx[1], "c_0")):
            storage, size = shrunk.untyped_storage(), shrunk.nbytes
            for left in (size - 4, 0):
                storage.resize_(left)
                with pytest.raises(ValueError, match=f"{name} must have memory"):
                    module(x, hx)
            storage.resize_(size)
    assert hits == [1]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_states_of_other_kinds_end_as_ever():
    module = layer()
    x, hx = inputs(module)
    remembered(module, x, hx)
    nested = torch.nested.nested_tensor([torch.zeros(B, H)] * 4)
    with torch.no_grad():
        for odd in (
            nested,
            torch.zeros(4, B, H).to_sparse(),
            torch.zeros(4, B, H, dtype=torch.float64),
        ):
            with pytest.raises(ValueError, match=r"dense|dtype"):
                module(x, (odd, hx[1]))
        with pytest.raises(ValueError, match="must be jagged"):
            module(torch.nested.nested_tensor([torch.zeros(B, WIDTH)] * T), hx)
        with pytest.raises(RuntimeError):
            module(x, (hx[0][:, :1], hx[1]))
        neg = torch._neg_view(hx[0])
        assert torch.allclose(module(x, (neg, hx[1]))[0], module(x, (-hx[0], hx[1]))[0])


def test_parameters_that_are_computed(hits):
    module = layer()
    x, hx = inputs(module)
    remembered(module, x, hx)

    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    with torch.no_grad():
        plain = module(x, hx)[0]
        register_parametrization(module, "weight_ih_l0", Double())
        for _ in range(3):
            assert not torch.equal(module(x, hx)[0], plain)
    assert hits == [1]


def test_functional_call_uses_its_own(hits):
    module = layer()
    x, hx = inputs(module)
    remembered(module, x, hx)
    others = {name: torch.zeros_like(value) for name, value in module.named_parameters()}
    with torch.no_grad():
        for _ in range(3):
            y, _ = torch.func.functional_call(module, others, (x, (hx[0] * 0, hx[1] * 0)))
            assert not y.any()
        assert module(x, hx)[0].any()
    assert hits[0] >= 1


def test_it_is_no_part_of_a_module_s_state(hits):
    module = layer()
    x, hx = inputs(module)
    remembered(module, x, hx)
    assert "_call_cache" not in module.__getstate__()
    cell = openrnn.GRUCell(WIDTH, H)
    cell_x = torch.randn(B, WIDTH)
    with torch.no_grad():
        cell(cell_x), cell(cell_x)
        for original, given in ((module, (x, hx)), (cell, (cell_x,))):
            wanted = original(*given)
            wanted = wanted[0] if isinstance(wanted, tuple) else wanted
            for made in (
                copy.deepcopy(original), copy.copy(original), pickle.loads(pickle.dumps(original)),
            ):  # fmt: skip
                for _ in range(3):
                    y = made(*given)
                    assert torch.equal(y[0] if isinstance(y, tuple) else y, wanted)
    assert hits == [2 * (1 + 3)]


def test_sizes_that_come_once_are_not_kept():
    module = openrnn.RNN(WIDTH, H)
    with torch.no_grad():
        for steps in range(1, 2 * call_cache.KEYS):
            module(torch.randn(steps % 7 + 1, steps, WIDTH))
    assert len(module._call_cache._calls) <= call_cache.KEYS
    assert not any(module._call_cache._calls.values())


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "int8"])
@pytest.mark.parametrize("batched", [True, False])
def test_a_step_with_resets_returns_the_same(hits, kind, batched):
    """As a policy acts: each mask is another one, and lies elsewhere."""
    module = getattr(openrnn, "LSTM" if kind == "int8" else kind)(WIDTH, H, 2)
    if kind == "int8":
        module = quantized(module)
    rows = (B,) if batched else ()
    x = torch.randn(*rows, WIDTH)
    state = torch.randn(2, *rows, H)
    hx = state if kind == "GRU" else (state, torch.randn(2, *rows, H))
    masks = (torch.rand(9, *rows) < 0.5).unbind(0)
    with torch.no_grad():
        wanted = [
            flat(module.step(x, hx, reset=mask.float()))
            for mask in masks  # never remembered
        ]
        assert hits == [0]
        found = [flat(module.step(x, hx, reset=mask)) for mask in masks]
        assert hits == [7]
        plain = flat(module.step(x, hx))
        assert hits == [7]
    for one, other in zip(found, wanted):
        assert all(map(torch.equal, one, other))
    never = flat(copy.deepcopy(module).step(x, hx, reset=torch.zeros(rows, dtype=torch.bool)))
    assert all(map(torch.equal, plain, never))


def test_a_step_with_resets_that_is_not_remembered(hits):
    """Masks that lie in columns, and those of another size."""
    module, x = openrnn.GRU(WIDTH, H), torch.randn(B, WIDTH)
    column = torch.zeros(B, 3, dtype=torch.bool)[:, 1]
    for _ in range(3):
        with torch.no_grad():
            module.step(x, reset=column)
    assert hits == [0]
    with torch.no_grad():
        for _ in range(3):
            module.step(x, reset=column.contiguous())
        assert hits == [1]
        with pytest.raises(ValueError, match="reset"):
            module.step(x, reset=torch.zeros(B + 1, dtype=torch.bool))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_call_with_resets_returns_the_same(hits, batch_first, grad):
    """With other masks each time; those of other dtypes are never remembered."""
    torch.manual_seed(0)
    module = openrnn.LSTM(WIDTH, H, 2, batch_first=batch_first, bidirectional=True)
    x = torch.randn(*((B, T) if batch_first else (T, B)), WIDTH)
    masks = (torch.rand(5, *x.shape[:2]) < 0.4).unbind(0)
    with torch.set_grad_enabled(grad):
        wanted = [flat(module(x, reset=mask.float())) for mask in masks]
        assert hits == [0]
        found = [flat(module(x, reset=mask)) for mask in masks]
        assert hits == [3]
        plain = flat(module(x))
        assert hits == [3]
    for one, other in zip(found, wanted):
        assert all(map(torch.equal, one, other))
    assert not all(torch.equal(one[0], plain[0]) for one in found)
    with pytest.raises(ValueError, match="reset"):
        module(x, reset=torch.zeros(T + 1, B, dtype=torch.bool))


@pytest.mark.parametrize("batch_first", [False, True])
def test_resets_that_kernels_do_not_read_are_looked_at_as_ever(hits, batch_first):
    """Without a word of torch's, and without being remembered."""
    module = openrnn.GRU(WIDTH, H, batch_first=batch_first)
    x = torch.randn(*((B, T) if batch_first else (T, B)), WIDTH)
    mask = torch.zeros(x.shape[:2], dtype=torch.bool)
    shrunk = mask.clone()
    shrunk.untyped_storage().resize_(1)
    odd = {
        "dense": mask.to_sparse(), "have memory": shrunk, "device meta": mask.to("meta"),
        "dimension|shape": mask[..., None],
    }  # fmt: skip
    with torch.no_grad():
        for words, reset in odd.items():
            for _ in range(3):
                with pytest.raises(ValueError, match=words):
                    module(x, reset=reset)
        apart = torch.zeros(*mask.shape, 2, dtype=torch.bool)[..., 0]
        for _ in range(3):
            module(x, reset=apart)
    assert hits == [batch_first]


def test_a_call_that_cannot_be_remembered_forgets_none_that_can(hits):
    """Whichever of them comes first; here x whose features lie apart."""
    for odd_first in (False, True):
        module, hits[0] = openrnn.GRU(WIDTH, H), 0
        x, odd = torch.randn(T, B, WIDTH), torch.randn(T, WIDTH, B).transpose(1, 2)
        with torch.no_grad():
            for one in (odd, x) if odd_first else (x, odd):
                for _ in range(4):
                    module(one)
            hits[0] = 0
            for _ in range(3):
                module(x)
                module(odd)
        assert hits == [3]


@pytest.mark.parametrize("grad", [False, True])
def test_one_tensor_for_both_states(hits, grad):
    """It is another call than one of two tensors, and the other way round."""
    module, x = openrnn.LSTM(WIDTH, H), torch.randn(T, B, WIDTH)
    one, other = (torch.randn(1, B, H, requires_grad=grad) for _ in range(2))

    def run(*hx):
        y, _ = module(x, hx)
        leaves = hx if hx[0] is not hx[1] else hx[:1]
        return [y, *(torch.autograd.grad(y.sum(), leaves) if grad else ())]

    with torch.set_grad_enabled(grad):
        wanted = run(one, one), run(one, other)
        assert hits == [0]
        for _ in range(3):
            for hx, want in zip(((one, one), (one, other)), wanted):
                assert all(map(torch.equal, run(*hx), want))
        assert hits == [5]  # the first call of each was made before


def test_calls_with_lengths_are_not_remembered_on_a_cpu(hits):
    """On a CPU their order is found at each call."""
    module, x = openrnn.GRU(WIDTH, H), torch.randn(T, B, WIDTH)
    lengths = torch.arange(B) % T
    with torch.no_grad():
        for _ in range(4):
            module(x, lengths=lengths)
            module(torch.nn.utils.rnn.pack_padded_sequence(x, lengths + 1, enforce_sorted=False))
    assert hits == [0]


@pytest.mark.parametrize("grad", [False, True])
def test_a_profiler_shows_every_call(grad):
    """The first one, and those that repeat it and run no operator of torch's."""
    module, x = openrnn.LSTM(3, 4), torch.randn(5, 2, 3)
    with torch.set_grad_enabled(grad), profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(4):
            module(x)
    assert {event.key: event.count for event in seen.key_averages()}["openrnn::forward"] == 4
