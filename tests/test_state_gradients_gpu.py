"""Gradients of initial and reset states on a GPU, where no row has been cleared before.

Every test runs in memory filled with nan (`poisoned_memory`): a row that no kernel writes shows.
"""

import pytest
import torch
from test_fused_gpu import layer
from test_stepwise_gpu import stepwise  # noqa: F401  (a fixture)

import openrnn
from openrnn import cells, memo
from openrnn.tuning import chunks

pytestmark = pytest.mark.gpu

STEPS = 12
# hidden_size, batch and dtype of a kernel of each kind, as an H100 runs them; options of the layer
SIZES = {
    "block": (64, 11, torch.float32, {}),
    "padded": (67, 11, torch.bfloat16, {}),
    "cluster": (512, 41, torch.bfloat16, {}),
    "grid": (1031, 9, torch.float32, {}),
    "multicast": (1024, 256, torch.bfloat16, {}),
    "both-directions": (256, 17, torch.bfloat16, {"bidirectional": True}),
    "recompute": (64, 11, torch.float32, {"recompute": "gates"}),
    "stack": (256, 17, torch.bfloat16, {"num_layers": 3}),
    "wavefront": (256, 17, torch.bfloat16, {"num_layers": 3, "wavefront": 5}),
}
LENGTHS = {
    "some": lambda batch: (
        torch.arange(batch, device="cuda") % (STEPS + 1)
    ),  # the first row has none
    "none": lambda batch: torch.zeros(batch, dtype=torch.int64, device="cuda"),
}


@pytest.fixture
def in_chunks(monkeypatch):
    """Loops of several chunks of time, which hand each other gradients of states."""
    for name in ("for_memory", "for_recompute"):
        monkeypatch.setattr(chunks, name, lambda *asked: 3)
    memo.clear()
    yield
    monkeypatch.undo()
    memo.clear()


def gradients(net, x, starts, fresh, d_outputs, masks):
    """Of the initial states `starts`, then of the reset states `fresh`, where these are given."""
    leaves = [state.detach().clone().requires_grad_() for state in (*starts, *fresh)]
    given, count = dict(masks), len(starts)

    def as_argument(states):
        return states if count > 1 else states[0]

    if fresh:
        given["reset_state"] = as_argument(leaves[count:])
    y, finals = net(x, as_argument(leaves[:count]), **given)
    finals = finals if isinstance(finals, tuple) else (finals,)
    total = sum((out * d_out).sum() for out, d_out in zip((y, *finals), d_outputs))
    return torch.autograd.grad(total, leaves, materialize_grads=True)


def check(cell, size, steps, masks, given):
    """Against the reference in float64; a row without a step hands d(final) on, bit by bit."""
    hidden, batch, dtype, options = size
    net = layer(cell, hidden, dtype, **options)
    exact = openrnn.Recurrent(cell, 24, hidden, backend="reference", **options)
    exact.load_state_dict(net.state_dict())
    exact = exact.to("cuda", torch.float64)
    shape, count = (net.spec.chains, batch, hidden), len(cell.states)
    made = [
        torch.randn(one, device="cuda").to(dtype)
        for one in (
            (steps, batch, 24),
            *[shape] * (3 * count),
            (steps, batch, net.spec.directions * hidden),
        )
    ]
    assert torch.empty_like(made[0]).isnan().all(), "memory is not poisoned"
    x, *states, dy = made
    starts, fresh, d_finals = (states[at : at + count] for at in range(0, 3 * count, count))
    asked = x, starts, fresh if given else [], [dy, *d_finals]
    found = gradients(net, *asked, masks)
    x, *lists = asked
    wide = [[tensor.double() for tensor in tensors] for tensors in lists]
    for have, want in zip(found, gradients(exact, x.double(), *wide, masks)):
        assert (have - want).norm() <= 0.05 * want.norm()
    if "lengths" in masks:
        ended = masks["lengths"] == 0
        for have, want in zip(found, d_finals):
            assert torch.equal(have[:, ended], want[:, ended])
    for _ in range(4):  # a program replaces the pass, and a graph that one's operations
        for have, again in zip(found, gradients(net, *asked, masks)):
            assert torch.equal(have, again)


def reset_mask(batch):
    return torch.rand(STEPS, batch, device="cuda") < 0.3


@pytest.mark.parametrize("given", [False, True], ids=["zeros", "given"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cell", [cells.lstm, cells.gru], ids=lambda cell: cell.name)
def test_rows_without_a_step(cell, size, lengths, given):
    """given: rows that are reset begin from states that are given, with gradients of their own."""
    batch = SIZES[size][1]
    masks = {"lengths": LENGTHS[lengths](batch)}
    if given:
        masks["reset"] = reset_mask(batch)
    check(cell, SIZES[size], STEPS, masks, given)


@pytest.mark.parametrize("size", SIZES)
def test_resets_alone(size):
    """All rows have all steps; reset states are given."""
    check(cells.lstm, SIZES[size], STEPS, {"reset": reset_mask(SIZES[size][1])}, True)


@pytest.mark.parametrize("size", ["block", "padded", "recompute"])
def test_chunks_of_time(in_chunks, size):
    check(cells.lstm, SIZES[size], STEPS, {"lengths": LENGTHS["some"](SIZES[size][1])}, False)


@pytest.mark.parametrize("given", [False, True], ids=["zeros", "given"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("size", ["block", "padded"])
def test_a_launch_for_each_step(stepwise, size, lengths, given):  # noqa: F811
    batch = SIZES[size][1]
    masks = {"lengths": LENGTHS[lengths](batch)}
    if given:
        masks["reset"] = reset_mask(batch)
    check(cells.lstm, SIZES[size], STEPS, masks, given)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("size", ["block", "padded", "stack"])
def test_a_single_step(size, reset):
    """Its own kernel where H is a multiple of 8 and nothing is reset; else the loop's."""
    batch = SIZES[size][1]
    masks = {"reset": torch.rand(1, batch, device="cuda") < 0.5} if reset else {}
    check(cells.lstm, SIZES[size], 1, masks, reset)
