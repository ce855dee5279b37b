"""The kernels with multicast where a row is no number: it meets no other row's sums."""

import itertools

import pytest
import torch
from test_multicast_gpu import (  # noqa: F401
    WIDTH,
    backward,
    backward_only,
    drawn,
    family,
    flat,
    forward_only,
    loops,
    masks_of,
    named,
    net_of,
    packed,
    pytestmark,
    states_of,
)

from openrnn import cells


@forward_only
@pytest.mark.parametrize("bad", ["nan", "inf", "state"])
@pytest.mark.parametrize(
    ("cell", "hidden", "batch"),
    [(cells.lstm, 1024, 250), (cells.gru, 640, 256), (cells.rnn_tanh, 512, 41)],
    ids=named,
)  # fmt: skip
def test_a_row_that_is_no_number_stays_alone(cell, hidden, batch, bad):
    """No other row changes a bit, and a reset ends it: h of a row must meet no other's sums.

    A state of all ones is what grids take for h that has not come; here it must end, too.
    """
    net, steps, rows = net_of(cell, hidden), 7, [0, batch // 2, batch - 1]
    x, states = drawn(steps, batch, WIDTH), states_of(net, batch)
    begin, end = 0 if bad == "state" else 2, 5
    masks = masks_of(("lengths", "reset"), steps, batch)
    masks["lengths"][rows] = steps
    masks["reset"][:, rows] = False
    masks["reset"][end, rows] = True
    for grad, given in itertools.product((False, True), ({}, masks)):
        last = end if given else steps
        with torch.set_grad_enabled(grad):
            wanted = flat(net(x, packed(states), return_states=True, **given))
        for row in rows:
            worse, first = x.clone(), [one.clone() for one in states]
            if bad == "state":
                first[0].view(torch.int16)[:, row] = -1
            else:
                worse[begin, row] = float(bad)
            with torch.set_grad_enabled(grad):
                found = flat(net(worse, packed(first), return_states=True, **given))
            others = torch.arange(batch, device="cuda") != row
            for have, want in zip(found, wanted):
                assert torch.equal(have[..., others, :], want[..., others, :])
            y, clean = found[0][:, row], wanted[0][:, row]
            assert torch.equal(y[:begin], clean[:begin])
            assert not y[begin:last].isfinite().any()
            assert torch.equal(y[last:], clean[last:])


@backward_only
@pytest.mark.parametrize("bad", ["nan", "inf"])
@pytest.mark.parametrize(
    ("cell", "hidden", "batch"),
    [(cells.lstm, 1024, 250), (cells.gru, 768, 256), (cells.rnn_tanh, 512, 41)],
    ids=named,
)  # fmt: skip
def test_a_gradient_that_is_no_number_stays_in_its_row(cell, hidden, batch, bad):
    """Sums of a row, and what blocks send each other of them, must meet no other row's."""
    net, steps = net_of(cell, hidden), 7
    x, states = drawn(steps, batch, WIDTH), states_of(net, batch)
    leaves = [one.requires_grad_() for one in (x, *states)]
    dy = drawn(steps, batch, hidden)
    wanted = torch.autograd.grad(net(x, packed(states))[0], leaves, dy)
    for row in (0, batch // 2, batch - 1):
        worse = dy.clone()
        worse[4, row] = float(bad)
        found = torch.autograd.grad(net(x, packed(states))[0], leaves, worse)
        others = torch.arange(batch, device="cuda") != row
        for have, want in zip(found, wanted):
            assert torch.equal(have[:, others], want[:, others])
        assert torch.equal(found[0][5:, row], wanted[0][5:, row])
        assert not found[0][:5, row].isfinite().any()
