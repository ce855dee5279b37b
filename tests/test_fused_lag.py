"""The kernels with warps that fall behind at random: letters and barriers alone may order them.

Alone on a device warps of a block are never far apart, and a fault of the protocol stays unseen for
millions of steps; where processes take turns it was seen. Here each warp turns in place now and
then before it multiplies and after letters came, for much longer than a letter travels.
"""

import pytest
import torch

import openrnn
from openrnn import cells
from openrnn.backends.fused import kernels
from openrnn.backends.fused.chain import chain
from openrnn.codegen import cuda
from openrnn.codegen.trace import trace

# Seldom, so that most warps go on while one is late. No read of memory may move before it.
LAG = """
#define LAG { \\
    const unsigned begin = unsigned(clock()); \\
    if ((__shfl_sync(~0u, begin, 0) >> 5) % 64 == 0) \\
        while (unsigned(clock()) - begin < 40000) continue; \\
    asm volatile("" ::: "memory"); \\
}
"""
PLACES = {  # where, and what comes there
    "const unsigned char* operand) {\n": "const unsigned char* operand) {\n    LAG\n",
    "        if (here) return;\n": "        if (here) { LAG return; }\n",
}
BARRIER = "if (FLIGHT == 1) __syncthreads();"


@pytest.fixture
def lagging(monkeypatch):
    """y and gradients of a layer whose warps fall behind."""
    original, numbers = cuda.source, iter(range(1 << 22, 1 << 23))

    def make(net, x, dy, without="\0"):
        def source(*asked):
            text = LAG + original(*asked).replace(without, "")
            for place, lag in PLACES.items():
                text = text.replace(place, lag)
            return text

        chain.cache_clear()  # it remembers its kernels
        with monkeypatch.context() as patch:
            patch.setattr(cuda, "source", source)
            # bounded waits; and by this number kernels are remembered
            patch.setattr(kernels, "PATIENCE", next(numbers))
            found = step(net, x, dy)
        chain.cache_clear()
        return found

    return make


def step(net, x, dy):
    y = net(x)[0]
    return [y.detach(), *torch.autograd.grad(y, [x, *net.parameters()], dy)]


def given(cell, hidden, batch, dtype):
    torch.manual_seed(hidden)
    where = {"device": "cuda", "dtype": dtype}
    net = openrnn.Recurrent(cell, 16, hidden, backend="fused", **where)
    x = torch.randn(40, batch, 16, requires_grad=True, **where)
    return net, x, torch.randn(40, batch, hidden, **where)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("cell", "dtype", "hidden", "batch"),
    [(cells.lstm, torch.bfloat16, 64, 9), (cells.lstm, torch.bfloat16, 256, 40),
     (cells.lstm, torch.bfloat16, 512, 16), (cells.lstm, torch.bfloat16, 512, 128),
     (cells.lstm, torch.bfloat16, 512, 256), (cells.lstm, torch.bfloat16, 1024, 16),
     (cells.gru, torch.float32, 256, 40), (cells.gru, torch.float32, 1024, 16)],
    ids=lambda value: getattr(value, "name", str(value)),
)  # fmt: skip
def test_warps_that_fall_behind_change_nothing(lagging, cell, dtype, hidden, batch):
    """Blocks, clusters, two tiles in turn, warps that multiply by fours, and grids."""
    case = given(cell, hidden, batch, dtype)
    for found, want in zip(lagging(*case), step(*case)):
        assert torch.equal(found, want)


@pytest.mark.gpu
def test_a_missing_barrier_is_seen(lagging):
    """Gates are written over while a warp still reads them."""
    case = given(cells.lstm, 512, 16, torch.bfloat16)
    assert not all(map(torch.equal, lagging(*case, without=BARRIER), step(*case)))


def test_the_places_are_there():
    """In both kinds of kernels, clusters and grids."""
    cell = trace(cells.lstm)
    for batch, hidden in ((16, 512), (16, 1024)):
        for kind in ("forward", "backward"):
            how = kernels.ranked(kind, (), cell, "bfloat16", hidden, batch, (9, 0), 132)[0]
            text = cuda.source(cell, "bfloat16", how)
            assert all(text.count(place) for place in PLACES)
            assert (BARRIER in text) == (kind == "backward" and hidden == 512)
