"""What users asked for elsewhere for years, each test naming the thread; those that need no GPU.

Compilers (pytorch#141184, #158007, #115092) are in test_compile.py, ensembles (#105982) and ONNX's
GRU (#189225) in test_reference.py, parametrized weights (#86457, #39311) in test_nn.py.
"""

import copy
import sys
import warnings

import forks
import pytest
import torch
from cases import ON_CPU, distance, require, size
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import openrnn

F64 = torch.float64
KINDS = ["LSTM", "GRU", "RNN"]


@pytest.fixture(params=ON_CPU)
def backend(request):
    require(request.param)
    return request.param


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def assert_equal(found, wanted):
    """Equal but for the rounding of their dtype."""
    eps = torch.finfo(found.dtype).eps
    assert distance(found, wanted) <= 5000 * eps * max(1.0, size(wanted))


def grads(output, layer, *inputs):
    """Gradients of all parameters and inputs, one after another."""
    return torch.autograd.grad(output, [*layer.parameters(), *inputs])


def both(kind, *args, backend, **options):
    """Torch's layer and ours with the same parameters."""
    theirs = getattr(nn, kind)(*args, **options)
    ours = getattr(openrnn, kind)(*args, **options, backend=backend)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def test_backward_in_eval_mode(backend):
    """pytorch#15788, captum#564: attribution needs gradients, not `train()`."""
    layer = openrnn.LSTM(3, 4, 2, dropout=0.5, bidirectional=True, backend=backend).eval()
    x = torch.randn(5, 2, 3, requires_grad=True)
    found = grads(layer(x)[0].sin().sum(), layer, x)
    layer.dropout = 0.0
    wanted = grads(layer.train()(x)[0].sin().sum(), layer, x)
    assert all(map(torch.equal, found, wanted))


def test_frozen_parameters_still_give_the_gradient_of_x(backend):
    """pytorch#776."""
    theirs, ours = both("LSTM", 3, 4, 2, backend=backend, dtype=F64)
    x = torch.randn(5, 2, 3, dtype=F64, requires_grad=True)
    found = []
    for layer in ours, theirs:
        layer.requires_grad_(False)
        found += torch.autograd.grad(layer(x)[0].sin().sum(), x)
    assert_equal(*found)


def test_gradients_accumulate(backend):
    """pytorch#777: a second backward adds to .grad, one layer used twice adds too."""
    layer = openrnn.GRU(4, 4, backend=backend, dtype=F64)
    x = torch.randn(5, 2, 4, dtype=F64)
    layer(x)[0].sin().sum().backward()
    once = [parameter.grad.clone() for parameter in layer.parameters()]
    layer(x)[0].sin().sum().backward()
    for parameter, first in zip(layer.parameters(), once):
        assert_equal(parameter.grad, 2 * first)
    theirs = nn.GRU(4, 4, dtype=F64)
    theirs.load_state_dict(layer.state_dict())
    found, wanted = (grads(one(one(x)[0])[0].sin().sum(), one) for one in (layer, theirs))
    for a, b in zip(found, wanted, strict=True):
        assert_equal(a, b)


def test_gradient_penalty(backend):
    """pytorch#5261: WGAN-GP differentiates the norm of a gradient, through every feature."""
    x = torch.randn(6, 3, 3, dtype=F64, requires_grad=True)
    start = [torch.randn(4, 3, 4, dtype=F64, requires_grad=True) for _ in range(2)]
    options = {"lengths": torch.tensor([6, 0, 4]), "reset": torch.rand(6, 3) < 0.3}

    def penalty(name):
        torch.manual_seed(1)
        layer = openrnn.LSTM(3, 4, 2, dropout=0.3, bidirectional=True, dtype=F64, backend=name)
        y, (_, c_n), every = layer(x, start, return_states=True, **options)
        loss = y.sin().sum() + c_n.square().sum() + every[1].sin().sum()
        first = torch.autograd.grad(loss, [x, *start, layer.weight_hh_l0], create_graph=True)
        norm = sum(part.square().sum() for part in first)
        return [*first, *torch.autograd.grad(norm, [*layer.parameters(), x, *start])]

    for found, wanted in zip(penalty(backend), penalty("reference"), strict=True):
        assert_equal(found, wanted)
        assert wanted.any()


def test_dropout_repeats_in_one_process(backend):
    """pytorch#90168, #35661: the same seed, the same outputs and gradients."""
    layer = openrnn.LSTM(8, 9, 2, dropout=0.5, bidirectional=True, backend=backend)
    x = torch.randn(7, 3, 8)

    def once(seed):
        torch.manual_seed(seed)
        y, _ = layer(x)
        return [y, *grads(y.sin().sum(), layer)]

    first, again, other = once(1), once(1), once(2)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], other[0])
    y, _ = layer(x)
    assert not torch.equal(y, layer(x)[0]), "a new mask each call"


def test_dropout_under_checkpointing(backend):
    """The mask is drawn again from the seed that the checkpoint restored."""
    layer = openrnn.LSTM(3, 4, 2, dropout=0.5, backend=backend)
    x = torch.randn(5, 2, 3, requires_grad=True)
    torch.manual_seed(1)
    plain = grads(layer(x)[0].sin().sum(), layer, x)
    torch.manual_seed(1)
    y = checkpoint(lambda x: layer(x)[0], x, use_reentrant=False)
    again = grads(y.sin().sum(), layer, x)
    assert all(map(torch.equal, plain, again))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("lengths", [[2, 6, 0, 3, 6], [0, 0, 0, 0, 0], [6, 6, 6, 6, 6]], ids=str)
def test_lengths(backend, lengths, dtype):
    """pytorch#517, #4582, #47637: any order, zeros, any integers, both directions; no packing."""
    theirs, ours = both("LSTM", 3, 4, 2, bidirectional=True, backend=backend, dtype=F64)
    x = torch.randn(6, 5, 3, dtype=F64, requires_grad=True)
    y, (h_n, c_n) = ours(x, lengths=torch.tensor(lengths, dtype=dtype))
    loss = wanted = torch.zeros((), dtype=F64)
    for b, length in enumerate(lengths):
        assert not y[length:, b].any()
        if length:
            alone, (h, c) = theirs(x[:length, b])
            assert_equal(y[:length, b], alone)
            assert_equal(h_n[:, b], h)
            assert_equal(c_n[:, b], c)
            wanted = wanted + alone.sin().sum() + h.sin().sum()
        else:
            assert not h_n[:, b].any()
    loss = y.sin().sum() + h_n.sin().sum()
    found = grads(loss, ours, x)
    if any(lengths):
        for a, b in zip(found, grads(wanted, theirs, x), strict=True):
            assert_equal(a, b)
    else:
        assert not any(grad.any() for grad in found)


def test_padding_may_hold_anything(backend):
    """speechbrain#501: nan and inf past the end reach neither output nor gradient."""
    layer = openrnn.LSTM(3, 4, 2, bidirectional=True, backend=backend)
    x, lengths = torch.randn(6, 3, 3), torch.tensor([6, 0, 2])
    padding = torch.arange(6)[:, None] >= lengths
    results = []
    for filling in 0.0, float("nan"), float("inf"):
        leaf = x.masked_fill(padding[..., None], filling).requires_grad_()
        y, (h_n, _) = layer(leaf, lengths=lengths)
        results.append([y, h_n, *grads(y.sum() + h_n.sum(), layer, leaf)])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_packed_is_padded_with_lengths(backend):
    """pytorch#149194: what packing gives, without it."""
    _, layer = both("GRU", 3, 4, 2, bidirectional=True, backend=backend)
    x, lengths = torch.randn(6, 3, 3), torch.tensor([2, 6, 5])
    packed, h_packed = layer(pack_padded_sequence(x, lengths, enforce_sorted=False))
    y, h_n = layer(x, lengths=lengths)
    assert_equal(pad_packed_sequence(packed)[0], y)
    assert_equal(h_packed, h_n)


def rl_loop(layer, x, starts, state):
    """stable-baselines3 `_process_sequence`: zero the state at episode starts, then step."""
    outputs = []
    for x_t, start in zip(x, starts):
        keep = (1.0 - start.double())[None, :, None]
        y_t, state = layer(x_t[None], tuple(keep * part for part in state))
        outputs.append(y_t)
    return torch.cat(outputs), state


@pytest.mark.parametrize("kind", [bool, float])
@pytest.mark.parametrize("starts", ["some", "none", "all", "first", "last"])
def test_resets_of_reinforcement_learning(backend, starts, kind):
    """sb3-contrib#113, pytorch/rl#4474: one call for the loop, gradients too."""
    theirs, ours = both("LSTM", 3, 4, 2, backend=backend, dtype=F64)
    x = torch.randn(6, 5, 3, dtype=F64, requires_grad=True)
    state = [torch.randn(2, 5, 4, dtype=F64, requires_grad=True) for _ in range(2)]
    mask = torch.rand(6, 5) < {"some": 0.3, "all": 2}.get(starts, -1)
    if starts in ("first", "last"):
        mask[0 if starts == "first" else -1] = True
    wanted, (h, c) = rl_loop(theirs, x, mask, state)
    y, (h_n, c_n) = ours(x, tuple(state), reset=mask if kind is bool else mask.float())
    for a, b in (y, wanted), (h_n, h), (c_n, c):
        assert_equal(a, b)
    found, expected = (
        grads(y.sin().sum() + c.sum(), layer, x, *state)
        for y, c, layer in ((y, c_n, ours), (wanted, c, theirs))
    )
    for a, b in zip(found, expected, strict=True):
        assert_equal(a, b)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_nothing_crosses_a_reset(backend, bidirectional):
    """pytorch/rl#4474: episodes of a row never see each other, either way, in value or gradient."""
    layer = openrnn.GRU(3, 4, bidirectional=bidirectional, backend=backend)
    x = torch.randn(6, 1, 3, requires_grad=True)
    reset = torch.tensor([0, 0, 0, 1, 0, 0])[:, None]
    y, _ = layer(x, reset=reset)
    (early,) = torch.autograd.grad(y[:3].sum(), x, retain_graph=True)
    (late,) = torch.autograd.grad(y[3:].sum(), x)
    assert early[:3].any()
    assert not early[3:].any()
    assert late[3:].any()
    assert not late[:3].any()
    other = torch.cat([x[:3], torch.randn(3, 1, 3)])
    assert torch.equal(layer(other, reset=reset)[0][:3], y[:3])


@pytest.mark.parametrize("steps", [65_535, 65_536, 100_000])
def test_long_sequences(backend, steps):
    """pytorch#133751: no limit on T; neural-amp-modeler runs in chunks of 65,535."""
    if backend == "reference":
        steps //= 100  # its loop is in Python and knows no limit
    theirs, ours = both("LSTM", 1, 2, backend=backend)
    x = torch.randn(steps, 1, 1)
    gradient = steps == 65_536
    results = []
    for layer in ours, theirs:
        with torch.set_grad_enabled(gradient):
            y, (_, c_n) = layer(x)
        results.append([y, c_n, *(grads(y.square().mean(), layer) if gradient else [])])
    for a, b in zip(*results, strict=True):
        assert_equal(a.detach(), b.detach())


@pytest.mark.parametrize("batch", [1, 65_535, 65_536])
def test_large_batches(backend, batch):
    """pytorch/rl#3818, TF#39453."""
    theirs, ours = both("GRU", 1, 2, backend=backend)
    x = torch.randn(2, batch, 1)
    results = []
    for layer in ours, theirs:
        y, _ = layer(x)
        results.append([y, *grads(y.square().mean(), layer)])
    for a, b in zip(*results, strict=True):
        assert_equal(a.detach(), b.detach())


@pytest.mark.parametrize("shape", [(0, 3), (5, 0), (0, 0), (1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_empty_and_tiny(backend, kind, shape):
    """T = 0 gives the initial states back; B = 0 gives zero gradients."""
    layer = getattr(openrnn, kind)(3, 4, 2, backend=backend)
    start = torch.randn(2, shape[1], 4)
    x = torch.randn(*shape, 3)
    y, finals = layer(x, (start, start) if kind == "LSTM" else start)
    assert y.shape == (*shape, 4)
    if shape[0] == 0:
        assert torch.equal(finals[0] if kind == "LSTM" else finals, start)
    elif shape[1] == 0:
        y.sum().backward()
        assert not any(parameter.grad.any() for parameter in layer.parameters())


@pytest.mark.parametrize("hidden", [1, 8, 12, 17, 18, 24, 64, 100, 200, 256, 512, 640, 1024])
def test_every_hidden_size(backend, hidden):
    """Odd ones are neither refused nor padded by the caller."""
    theirs, ours = both("LSTM", 5, hidden, backend=backend)
    x = torch.randn(3, 2, 5)
    results = []
    for layer in ours, theirs:
        y, (_, c_n) = layer(x)
        results.append([y, c_n, *grads(y.square().sum(), layer)])
    for a, b in zip(*results, strict=True):
        assert_equal(a.detach(), b.detach())


def test_all_states_are_differentiable(backend):
    """pytorch#8938, #31423, R2D2: c of every step, without a loop over cells."""
    layer = openrnn.LSTM(3, 4, dtype=F64, backend=backend)
    cell = nn.LSTMCell(3, 4, dtype=F64)
    cell.load_state_dict({n.removesuffix("_l0"): v for n, v in layer.state_dict().items()})
    x, states, state = torch.randn(5, 2, 3, dtype=F64), [], None
    for x_t in x:
        state = cell(x_t, state)
        states.append(state[1])
    _, _, (_, c) = layer(x, return_states=True)
    assert_equal(c[0], torch.stack(states))
    weights = torch.randn(5, 2, 4, dtype=F64)
    found = grads((c[0] * weights).sum(), layer)
    wanted = grads((torch.stack(states) * weights).sum(), cell)
    for a, b in zip(found, wanted, strict=True):
        assert_equal(a, b)


class WeightDrop(nn.Module):
    """fastai's: the recurrent matrix becomes a plain tensor, drawn anew before each call."""

    def __init__(self, layer, name="weight_hh_l0"):
        super().__init__()
        self.layer, self.name = layer, name
        self.raw = nn.Parameter(getattr(layer, name).detach().clone())
        del layer._parameters[name]

    def forward(self, x):
        setattr(self.layer, self.name, F.dropout(self.raw, 0.5, self.training))
        return self.layer(x)


def test_weight_drop(backend):
    """pytorch#32346, awd-lstm-lm#86: no demagnetizer, and the gradient passes the mask."""
    theirs, ours = map(WeightDrop, both("LSTM", 3, 4, backend=backend, dtype=F64))
    x = torch.randn(5, 2, 3, dtype=F64)
    found = []
    for model in ours, theirs:
        torch.manual_seed(3)
        found.append(grads(model(x)[0].sin().sum(), model))
    for a, b in zip(*found, strict=True):
        assert_equal(a, b)
    assert (ours.layer.weight_hh_l0 == 0).any()


def test_spectral_norm(backend):
    """pytorch#39311: in training, one power iteration a call, as with every other module."""
    theirs, ours = both("GRU", 3, 4, backend=backend, dtype=F64)
    x = torch.randn(5, 2, 3, dtype=F64)
    for layer in (ours, theirs):
        nn.utils.parametrizations.spectral_norm(layer, "weight_hh_l0")
    found = []
    for _ in range(3):
        found.append(ours(x)[0].detach())
        # torch.nn.GRU reads its weights several times a call; it takes ours as they were left
        theirs.load_state_dict(ours.state_dict())
        assert_equal(found[-1], theirs.eval()(x)[0])
    assert distance(found[0], found[2]) > 0


def test_autocast_after_a_float32_build(backend):
    """pytorch#36428: the parameters stay float32 and are cast in each call."""
    layer = openrnn.LSTM(3, 4, 2, backend=backend)
    x = torch.randn(5, 2, 3)
    plain = layer(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)[0]
    assert y.dtype == torch.bfloat16
    assert distance(y.detach(), plain.detach()) < 0.05
    y.float().sum().backward()
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}
    assert torch.equal(layer(x)[0], plain)


def test_safetensors(backend, tmp_path):
    layer = openrnn.LSTM(3, 4, 2, bidirectional=True, backend=backend)
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other = nn.LSTM(3, 4, 2, bidirectional=True)
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    assert all(map(torch.equal, other.parameters(), layer.parameters()))


def test_an_optimizer_step_is_seen(backend):
    """No packed copy outlives a change: in place, by assignment, by load_state_dict, by swap."""
    layer = openrnn.LSTM(20, 24, backend=backend)
    x = torch.randn(5, 2, 20)
    other = copy.deepcopy(layer)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    wanted = other(x)[0]
    layer(x)
    with torch.no_grad():
        for ours, theirs in zip(layer.parameters(), other.parameters()):
            ours.copy_(theirs)
    assert torch.equal(layer(x)[0], wanted)
    for parameter in layer.parameters():
        parameter.data = torch.zeros_like(parameter)
    assert not layer(x)[0].any()
    layer.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(layer(x)[0], wanted)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    layer(x)[0].sum().backward()
    optimizer.step()
    assert distance(layer(x)[0].detach(), wanted.detach()) > 1e-3


def test_outputs_may_be_changed_in_place_where_no_gradient_is_kept(backend):
    """y is the caller's: it is no buffer of ours that the next call reads or writes."""
    layer = openrnn.LSTM(3, 4, backend=backend).requires_grad_(False)
    x = torch.randn(5, 2, 3)
    y, (h_n, c_n) = layer(x)
    kept = y.clone()
    for tensor in y, h_n, c_n:
        tensor.fill_(7)
    again, _ = layer(x)
    assert torch.equal(again, kept)
    assert (y == 7).all()


DDP = """
import os, sys, torch, openrnn, warnings
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

warnings.simplefilter("ignore")
place, backends = sys.argv[1], sys.argv[2:]
other = os.fork()
rank = int(other == 0)
dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=2)
x = torch.load(f"{place}/x")[:, rank * 2 : rank * 2 + 2]
found = []
each = torch.load(f"{place}/lengths")[:, rank * 2 : rank * 2 + 2]
for backend, lengths in ((backend, lengths) for backend in backends for lengths in each):
    torch.manual_seed(rank)
    model = openrnn.LSTM(3, 4, 2, bidirectional=True, dtype=torch.float64, backend=backend)
    parallel = DistributedDataParallel(model)
    for _ in range(2):
        parallel.zero_grad()
        parallel(x, lengths=lengths)[0].square().mean().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    found.append({"grads": grads, "weights": model.state_dict()})
torch.save(found, f"{place}/rank{rank}")
dist.barrier()
# gloo's own end aborts at times, with torch.nn's layers too
os._exit(other and os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="torch does not survive a fork there")
def test_data_parallel(tmp_path):
    """pytorch#37079, #36268: two processes average to the gradient of the whole batch.

    A rank whose rows are all empty still has a gradient, zero, for every parameter: nothing hangs.
    """
    x, cases = torch.randn(5, 4, 3, dtype=F64), torch.tensor([[5, 2, 3, 4], [5, 2, 0, 0]])
    torch.save(x, tmp_path / "x")
    torch.save(cases, tmp_path / "lengths")
    ran = forks.python(DDP, tmp_path, *ON_CPU)
    assert ran.returncode == 0, ran.stderr
    found = [torch.load(tmp_path / f"rank{rank}") for rank in range(2)]
    calls = [(backend, lengths) for backend in ON_CPU for lengths in cases]
    for (backend, lengths), first, second in zip(calls, *found, strict=True):
        alone = openrnn.LSTM(3, 4, 2, bidirectional=True, dtype=F64, backend=backend)
        alone.load_state_dict(first["weights"])
        alone(x, lengths=lengths)[0].square().mean().backward()
        for name, parameter in alone.named_parameters():
            assert torch.equal(first["grads"][name], second["grads"][name])
            assert_equal(first["grads"][name], parameter.grad)


def test_no_warning_on_the_normal_path(backend):
    """pytorch#2460, #24828: weights are read where they lie; nobody is told to flatten them."""
    layer = openrnn.LSTM(3, 4, 2, bidirectional=True, dropout=0.5, backend=backend)
    for parameter in layer.parameters():  # as far apart as can be
        parameter.data = parameter.data.t().contiguous().t() if parameter.dim() == 2 else parameter
    x = torch.randn(5, 2, 3, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for mode in layer.train(), layer.eval():
            mode(x)[0].sum().backward()
            mode(x, lengths=torch.tensor([5, 2]), reset=torch.zeros(5, 2))
            mode(pack_padded_sequence(x, [5, 2]))
        with torch.no_grad():
            layer(x)
        copy.deepcopy(layer)(x)
        layer.flatten_parameters()
    assert [str(one.message) for one in caught] == []
