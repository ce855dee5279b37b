"""The kernels with warps that fall behind at random: letters and barriers alone may order them.

Alone on a device warps of a block are never far apart, and a fault of the protocol stays unseen for
millions of steps; where processes take turns it was seen. Here each warp sleeps now and then before
it multiplies and after letters came, for much longer than a letter travels.
"""

import pytest
import torch

import openrnn
from openrnn import cells
from openrnn.backends.fused import kernels
from openrnn.codegen import cuda
from openrnn.codegen.trace import trace

# seldom, so that most warps go on while one sleeps
SLEEP = "#define LAG if ((__shfl_sync(~0u, int(clock()), 0) >> 5) % 64 == 0) __nanosleep({});\n"
PLACES = {  # where, and what comes there
    "const unsigned char* operand) {\n": "const unsigned char* operand) {\n    LAG\n",
    "        if (here) return;\n": "        if (here) { LAG return; }\n",
}
BARRIER = "if (FLIGHT == 1) __syncthreads();"


@pytest.fixture
def lagging(monkeypatch):
    """y and gradients of a layer whose warps sleep for so many nanoseconds."""
    original, numbers = cuda.source, iter(range(1 << 22, 1 << 23))

    def make(net, x, dy, sleep, without=""):
        def source(*asked):
            text = SLEEP.format(sleep) + original(*asked).replace(without or "\0", "")
            for place, lag in PLACES.items():
                text = text.replace(place, lag)
            return text

        monkeypatch.setattr(cuda, "source", source)
        # bounded waits; and by this number kernels are remembered
        monkeypatch.setattr(kernels, "PATIENCE", next(numbers))
        y = net(x)[0]
        return [y.detach(), *torch.autograd.grad(y, [x, *net.parameters()], dy)]

    return make


def given(cell, hidden, batch, dtype):
    torch.manual_seed(hidden)
    where = {"device": "cuda", "dtype": dtype}
    net = openrnn.Recurrent(cell, 16, hidden, backend="fused", **where)
    x = torch.randn(40, batch, 16, requires_grad=True, **where)
    return net, x, torch.randn(40, batch, hidden, **where)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("hidden", "batch"), [(64, 9), (256, 40), (512, 16), (512, 128), (512, 256), (1024, 16)]
)
@pytest.mark.parametrize("cell", [cells.lstm, cells.gru], ids=lambda cell: cell.name)
def test_warps_that_fall_behind_change_nothing(lagging, cell, hidden, batch, dtype):
    """Clusters, two tiles in turn, warps that multiply by fours, and grids."""
    case = given(cell, hidden, batch, dtype)
    wanted = lagging(*case, sleep=0)  # the same code but for the time
    for found, want in zip(lagging(*case, sleep=20_000), wanted):
        assert torch.equal(found, want)


@pytest.mark.gpu
def test_a_missing_barrier_is_seen(lagging):
    """Gates are written over while a warp still reads them."""
    case = given(cells.lstm, 512, 16, torch.bfloat16)
    wanted = lagging(*case, sleep=0)
    found = lagging(*case, sleep=20_000, without=BARRIER)
    assert not all(map(torch.equal, found, wanted))


def test_the_places_are_there():
    """In both kinds of kernels, clusters and grids."""
    cell = trace(cells.lstm)
    for batch, hidden in ((16, 512), (16, 1024)):
        for kind in ("forward", "backward"):
            how = kernels.ranked(kind, (), cell, "bfloat16", hidden, batch, (9, 0), 132)[0]
            text = cuda.source(cell, "bfloat16", how)
            assert all(text.count(place) for place in PLACES)
            assert (BARRIER in text) == (kind == "backward" and hidden == 512)
            assert "LAG" not in text
