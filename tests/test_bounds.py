"""Which cells' h stays within [-1, 1], so that products of float32 may read it as float16."""

from itertools import product
from math import inf, nan

import pytest
import torch
from cases import CLIP
from loops import holding_r
from torch import sigmoid, tanh

import openrnn
from openrnn import cells
from openrnn.codegen import cuda
from openrnn.codegen.bounds import bounded
from openrnn.codegen.trace import trace

WITHIN = {
    "coupled_lstm": cells.coupled_lstm, "gru": cells.gru, "lstm": cells.lstm, "mgu": cells.mgu,
    "peephole_lstm": cells.peephole_lstm, "rnn_tanh": cells.rnn_tanh,
}  # fmt: skip
BEYOND = {"rnn_relu": cells.rnn_relu, "slstm": cells.slstm}


def made(step, gates="z n"):
    return openrnn.cell(gates=gates, states="h")(step)


def towards(x, r, s):
    return s.h + sigmoid(x.z + r.z) * (tanh(x.n + r.n) - s.h)


def swapped(x, r, s):
    z = sigmoid(x.z + r.z)
    return tanh(x.n + r.n) * (1 - z) + s.h * z


def clipped(x, r, s):
    return torch.clamp(s.h + x.z + r.n + r.z + x.n, -1.0, 0.5)


def halves(x, r, s):
    return 0.5 * torch.sin(x.z + r.z) - 0.25 * torch.minimum(tanh(x.n + r.n), torch.abs(s.h))


def sum_of_shares(x, r, s):
    """Two shares that are not each other's rest: up to 2."""
    return sigmoid(x.z + r.z) * tanh(x.n) + sigmoid(r.n) * s.h


def no_share(x, r, s):
    """What mixes is no share: tanh may be negative."""
    z = tanh(x.z + r.z)
    return z * tanh(x.n + r.n) + (1 - z) * s.h


def other_rest(x, r, s):
    return s.h + sigmoid(x.z + r.z) * (tanh(x.n + r.n) - 2.0 * s.h)


def maybe_nan(x, r, s):
    """A share that may be nan is none, and what is added to it neither."""
    u = torch.where(x.z + r.z > 0, nan, x.n + r.n)
    return u * tanh(x.n + r.n) + (1 - u) * s.h


def maybe_endless(x, r, s):
    y = x.n + r.n
    return torch.clamp(torch.where(x.z + r.z > 0, inf - y, y), max=1.0)


def bound_of_its_own(x, r, s):
    """Which is nan where n is endless, and then y is taken whatever it is."""
    y, bound = x.z + r.z, torch.sin(x.n + r.n)
    return torch.where(y < bound, bound, torch.clamp(y, max=1.0))


def half_clipped(x, r, s):
    return torch.clamp(x.z + r.z + x.n + r.n + s.h, max=1.0)


@pytest.mark.parametrize("cell", WITHIN.values(), ids=WITHIN)
@pytest.mark.parametrize("clip", [None, CLIP], ids=["plain", "clip"])
def test_shipped_cells_within(cell, clip):
    assert bounded(trace(cell, clip))


@pytest.mark.parametrize("cell", BEYOND.values(), ids=BEYOND)
def test_shipped_cells_beyond(cell):
    assert not bounded(trace(cell))


@pytest.mark.parametrize("step", [towards, swapped, clipped, halves])
def test_ways_to_write_what_is_within(step):
    assert bounded(trace(made(step)))


@pytest.mark.parametrize("step", [sum_of_shares, no_share, other_rest, half_clipped])
def test_what_may_leave_is_not_called_bounded(step):
    cell = made(step)
    assert not bounded(trace(cell))
    # and each does leave it somewhere
    ends, zero = (-20.0, 0.0, 20.0), torch.zeros(1)
    found = []
    for x_z, x_n, r_n, h in product(ends, ends, ends, (-1.0, 1.0)):
        here = [torch.tensor([number]) for number in (x_z, x_n, r_n, h)]
        new = cell.step(here[:2], (zero, here[2]), here[3:], (), lambda c: c)
        found.append(new[0].abs().item())
    assert max(found) > 1.0


def unknown(x, r, s):
    """Within, but torch writes it as a choice of two that no rule knows."""
    return torch.lerp(tanh(x.n + r.n), s.h, sigmoid(x.z + r.z))


@pytest.mark.parametrize("step", [maybe_nan, maybe_endless, bound_of_its_own])
def test_what_may_be_nan_is_not_called_bounded(step):
    assert not bounded(trace(made(step)))


def test_what_no_rule_knows_is_not_called_bounded():
    assert not bounded(trace(made(unknown)))


@pytest.mark.parametrize(
    ("cell", "dtype", "half"),
    [(cells.lstm, "float32", True), (cells.rnn_relu, "float32", False),
     (cells.lstm, "bfloat16", False), (cells.lstm, "float16", False)],
)  # fmt: skip
@pytest.mark.parametrize("hidden", [64, 1024])
def test_products_of_forward_read_float16_where_h_is_bounded(cell, dtype, half, hidden):
    traced = trace(cell)
    for config in holding_r("forward", traced, dtype, hidden, 16, (9, 0), 132)[:4]:
        assert config.half_operands == half
        assert f"#define HALF_OPERANDS {int(config.half_operands)}\n" in cuda.source(
            traced, dtype, config
        )
    for config in holding_r("backward", traced, dtype, hidden, 16, (9, 0), 132)[:4]:
        assert "#define HALF_OPERANDS 0\n" in cuda.source(
            traced, dtype, config
        )  # gradients have no bounds
