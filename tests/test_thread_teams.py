"""Threads of the CPU backend that share a tile: the same numbers as alone, and no deadlock."""

import itertools
import threading
from itertools import pairwise

import pytest
import torch
from cases import thinned

import openrnn
from openrnn import cells
from openrnn.kernels.cpu import launch, team
from openrnn.kernels.cpu.host import HAS_SCHED_YIELD, SIZES, WIDTH, WIDTHS, width_of
from openrnn.kernels.cpu.layout import MOST_ROWS, Layout
from openrnn.kernels.cpu.plan import plan
from openrnn.kernels.cpu.sharing import Sharing, run_time, sharing

shared = pytest.mark.skipif(
    launch.openmp() is None or not HAS_SCHED_YIELD,
    reason="torch has no OpenMP whose threads we use",
)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def layout(hidden, vector=WIDTH, outputs=None):
    return Layout("float32", 4, 1, 0, 0, True, hidden, hidden, outputs or hidden, vector)


def call(layer, x, lengths=None, **options):
    leaf = x.detach().requires_grad_()
    y, final, *_ = layer(leaf, lengths=lengths, **options)
    final = final if isinstance(final, tuple) else (final,)
    generator = torch.Generator().manual_seed(1)
    total = sum(
        (out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum()
        for out in (y, *final)
    )
    return [y.detach(), *(state.detach() for state in final),
            *torch.autograd.grad(total, [leaf, *layer.parameters()])]  # fmt: skip


def name_of(value):
    values = value if isinstance(value, tuple) else (value,)
    return "-".join(str(getattr(each, "name", each)) for each in values)


@shared
@pytest.mark.parametrize(
    ("cell", "sizes", "lengths"),
    thinned(
        itertools.product(
            ((cells.lstm, 256), (cells.lstm, 250), (cells.gru, 256), (cells.peephole_lstm, 250)),
            ((2, 1, 40), (4, 1, 3), (5, 2, 7), (6, 20, 5)),
            (False, True),
        ),
        5,  # no factor of the numbers of values: a fifth has each of them
    ),
    ids=name_of,
)
def test_alone_and_together(threads, cell, sizes, lengths):
    """Outputs are those of one thread, bit by bit; sums over rows may be split otherwise."""
    (cell, hidden), (count, batch, steps) = cell, sizes
    torch.manual_seed(0)
    layer = openrnn.Recurrent(cell, 24, hidden, 2, bidirectional=True, backend="cpu")
    way = sharing(layout(hidden), False, steps, batch, count, True)
    assert way.size > 1 or way.teams > 1
    x = torch.randn(steps, batch, 24)
    ends = torch.randint(0, steps + 1, (batch,)) if lengths else None
    threads(1)
    alone = call(layer, x, ends)
    threads(count)
    together = call(layer, x, ends)
    states = 1 + len(cell.states)
    for have, want in zip(together[:states], alone[:states]):
        assert torch.equal(have, want)
    for have, want in zip(together[states:], alone[states:]):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
    for have, again in zip(call(layer, x, ends), together):
        assert torch.equal(have, again)


@shared
@pytest.mark.parametrize(("proj_size", "count"), thinned(itertools.product([270, 0], [3, 1, 2]), 6))
def test_gradients_whose_factors_are_packed(threads, count, proj_size):
    """Of weights with many columns, none of them whole panels or strips, from several chunks."""
    torch.manual_seed(0)
    kind = {"proj_size": proj_size, "dtype": torch.float64}
    ours, plain = (openrnn.LSTM(261, 300, backend=name, **kind) for name in ("cpu", "reference"))
    plain.load_state_dict(ours.state_dict())
    sizes = Layout("float64", 4, 1, 0, 0, True, 261, 300, proj_size or 300)
    x, ends = torch.randn(60, 9, 261, dtype=torch.float64), torch.arange(52, 61)
    assert all(map(sizes.packs_gradient, (sizes.h_width, sizes.x_width, sizes.padded)))
    assert sizes.chunk(60, 9) < 60
    threads(count)
    for lengths in (None, ends):
        for have, want in zip(call(ours, x, lengths), call(plain, x, lengths)):
            torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-9 * want.abs().max().item())


@shared
@pytest.mark.parametrize("proj_size", thinned([290, 0], 2))
def test_one_team_for_all_tiles(threads, proj_size):
    """Where few rows do not pay for sums of each team: its tiles add to the same ones."""
    torch.manual_seed(0)
    ours, plain = (
        openrnn.LSTM(39, 300, 2, proj_size=proj_size, backend=name) for name in ("cpu", "reference")
    )
    plain.load_state_dict(ours.state_dict())
    sizes = layout(300, outputs=proj_size or 300)
    found = plan(sizes, "backward", 2, 83, 2, reverse=False, x_gate=None, ragged=False)
    assert (found.tasks, found.teams) == (2, 1)
    assert found.args().tile_rows < 83
    x, ends = torch.randn(2, 83, 39), torch.arange(83) % 3
    threads(2)
    for lengths in (None, ends):
        for have, want in zip(call(ours, x, lengths), call(plain, x, lengths)):
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


FEATURES = {
    "resets": {"reset": True},
    "reset states": {"reset": True, "states": True},
    "resets and lengths": {"reset": True, "states": True, "lengths": True},
    "skip": {"input_mode": "skip"},
    "skip and lengths": {"input_mode": "skip", "lengths": True},
    "gates": {"input_mode": "gates", "lengths": True},
    "projection": {"proj_size": 70},
    "wide projection": {"proj_size": 250, "lengths": True},
    "projection and resets": {"proj_size": 70, "reset": True},
    "odd": {"hidden": 650 if WIDTH == 64 else 301},
    "all": {"input_mode": "skip", "proj_size": 90, "reset": True, "states": True, "lengths": True},
}


@shared
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("count", "batch"), thinned([(4, 3), (2, 1), (8, 3)], 3))
def test_any_step_is_shared(threads, feature, count, batch):
    """What threads share, as one thread computes it; twice, as races come and go."""
    torch.manual_seed(0)
    about = dict(FEATURES[feature])
    hidden, steps = about.pop("hidden", 256), 6
    masks = [about.pop(name, False) for name in ("reset", "states", "lengths")]
    inputs = {"skip": hidden, "gates": 4 * hidden}.get(about.get("input_mode"), 24)
    layer = openrnn.LSTM(inputs, hidden, 2, bidirectional=True, backend="cpu", **about)
    outputs = layer.spec.output_size
    reset, lengths, options = torch.rand(steps, batch) < 0.4, torch.tensor([6, 0, 3])[:batch], {}
    reset[0], reset[-1] = True, True  # the last of the reverse direction
    if masks[0]:
        options["reset"] = reset
    if masks[1]:
        options["reset_state"] = (torch.randn(4, batch, outputs), torch.randn(4, batch, hidden))
    sizes = layout(hidden, outputs=outputs)
    assert sizes.shares
    assert sharing(sizes, False, steps, batch, count, True).size > 1
    x, ends = torch.randn(steps, batch, inputs), lengths if masks[2] else None
    threads(1)
    alone = call(layer, x, ends, **options)
    threads(count)
    for _ in range(2):
        together = call(layer, x, ends, **options)
        for have, want in zip(together[:3], alone[:3]):
            assert torch.equal(have, want)
        for have, want in zip(together[3:], alone[3:]):
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
    reference = openrnn.LSTM(inputs, hidden, 2, bidirectional=True, backend="reference", **about)
    reference.load_state_dict(layer.state_dict())
    for have, want in zip(together, call(reference, x, ends, **options)):
        torch.testing.assert_close(have, want, rtol=1e-3, atol=1e-4 * want.abs().max().item())


@shared
@pytest.mark.parametrize("calls", thinned([15, 40], 2))
@pytest.mark.parametrize(("count", "lengths"), [(2, [3, 3, 0, 0, 0, 0]), (3, [1, 0, 0, 0, 0])])
def test_sequences_without_steps(threads, count, lengths, calls):
    """Their gradients pass through while other threads already work on those with steps."""
    torch.manual_seed(0)
    layers = [
        openrnn.LSTM(3, 256, dtype=torch.float64, backend=name) for name in ("cpu", "reference")
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    batch, steps, ends = len(lengths), max(lengths), torch.tensor(lengths)
    leaves = [torch.randn(steps, batch, 3, dtype=torch.float64, requires_grad=True)]
    leaves += [torch.randn(1, batch, 256, dtype=torch.float64, requires_grad=True) for _ in "hc"]
    weights = [torch.randn(1, batch, 256, dtype=torch.float64) for _ in "hc"]

    def gradients(layer):
        y, (h, c) = layer(leaves[0], tuple(leaves[1:]), lengths=ends)
        total = y.sum() + (h * weights[0]).sum() + (c * weights[1]).sum()
        return torch.autograd.grad(total, [*leaves, *layer.parameters()])

    threads(count)
    wanted = gradients(layers[1])
    for _ in range(calls):
        for have, want in zip(gradients(layers[0]), wanted):
            torch.testing.assert_close(have, want, rtol=0, atol=1e-9)


@shared
def test_a_team_that_is_smaller_than_asked_for(threads, monkeypatch):
    """The first thread of each team does its work alone and waits for nobody."""
    torch.manual_seed(0)
    layer = openrnn.LSTM(24, 256, backend="cpu")
    x = torch.randn(9, 1, 24)
    threads(4)
    want = call(layer, x)
    start, number, count = launch.openmp()

    def fewer(function, region, tasks, flags):
        start(function, region, tasks - 1, flags)

    monkeypatch.setattr(launch, "openmp", lambda: (fewer, number, count))
    for have, expected in zip(call(layer, x), want):
        assert torch.equal(have, expected)


@shared
def test_several_threads_call_at_once(threads):
    """Each caller has a team of its own, more threads in all than there are cores."""
    torch.manual_seed(0)
    threads(2)
    layer = openrnn.GRU(24, 256, backend="cpu")
    x = torch.randn(30, 1, 24)
    want, faults = call(layer, x), []

    def work():
        for _ in range(5):
            for have, expected in zip(call(layer, x), want):
                if not torch.equal(have, expected):
                    faults.append((have - expected).abs().max().item())

    callers = [threading.Thread(target=work) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=900)
        assert not caller.is_alive()
    assert not faults


@pytest.mark.parametrize(
    ("vector", "whole", "split"), [(64, 650, 230), (32, 130, 116), (16, 70, 60)]
)
def test_who_may_share_a_tile(vector, whole, split):
    """Vectors of AVX-512, AVX2 and SSE, whatever this machine has."""
    assert layout(whole, vector).shares
    assert layout(split, vector, outputs=3).shares
    assert not layout(split, vector).shares  # its padded units are no whole panels


@pytest.mark.parametrize("vector", WIDTHS)
@pytest.mark.parametrize(
    ("hidden", "steps", "batch", "threads", "backward", "way"),
    [
        (64, 1, 1, 8, False, (1, 1, 1)),  # too little for a second thread
        (256, 1, 1, 2, False, (1, 1, 2)),  # each reads half of the matrix
        (512, 50, 64, 2, False, (32, 2, 1)),  # rows enough for all
        (256, 1, 64, 2, True, (64, 1, 2)),  # another team's sums cost more than barriers
        (256, 2, 64, 2, True, (32, 1, 2)),  # a tile of more rows, but of a single step
        (256, 100, 64, 2, True, (32, 2, 1)),  # and less
        (512, 50, 0, 8, False, (0, 1, 1)),
    ],
)  # fmt: skip
def test_how_threads_share(vector, hidden, steps, batch, threads, backward, way):
    assert sharing(layout(hidden, vector), backward, steps, batch, threads, True) == way


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("threads", [1, 3, 16, 64])
@pytest.mark.parametrize("batch", [1, 7, 33, 1000])
def test_no_other_way_to_share_is_quicker(batch, threads, shares, backward):
    """By the model, of all numbers of teams and of threads in a team."""
    sizes = layout(512)
    most = sizes.padded // sizes.panel if shares else 1
    way = sharing(sizes, backward, 20, batch, threads, shares)
    assert way.teams * way.size <= threads
    assert way.size <= most
    times = []
    for teams in range(1, min(threads, batch) + 1):
        rows = -(-batch // teams)
        rows = -(-rows // -(-rows // MOST_ROWS))
        for size in range(1, min(threads // teams, most) + 1):
            times.append(run_time(sizes, backward, 20, batch, threads, Sharing(rows, teams, size)))
    assert run_time(sizes, backward, 20, batch, threads, way) == min(times)


@pytest.mark.parametrize("vector", WIDTHS)
@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize(("units", "outputs"), [(1, 1), (13, 13), (64, 64), (97, 41), (650, 650)])
def test_sizes_are_whole_vectors_and_panels(vector, dtype, units, outputs):
    found = Layout(dtype, 3, 1, 0, 1, False, 7, units, outputs, vector)
    lanes, panel = vector // SIZES[dtype], 2 * vector // SIZES[dtype]
    whole = panel if outputs < units or units >= 8 * panel else lanes
    assert found.padded >= units > found.padded - whole
    assert found.padded % whole == 0
    assert found.columns >= 3 * found.padded > found.columns - panel
    assert {found.columns % panel, found.h_width % panel, found.x_width % panel} == {0}
    parts = max(1, found.padded // found.panel)
    starts = [team.share_of(found.padded, panel, part, parts) for part in range(parts + 1)]
    assert found.shares == (starts[-1] == found.padded)


def test_the_width_of_features():
    assert width_of("+sse2,+avx2,+avx512f,-avx512bw") == 64
    assert width_of("+avx,+avx2,-avx512f,+avx512fp16") == 32
    assert width_of("+avx,-avx2") == width_of("") == width_of("+neon") == 16


@pytest.mark.parametrize(("count", "unit", "parts"), [(256, 32, 3), (64, 32, 2), (512, 32, 16)])
def test_shares_cover_all_units(count, unit, parts):
    starts = [team.share_of(count, unit, part, parts) for part in range(parts + 1)]
    assert starts[0] == 0
    assert starts[-1] == count
    assert all(a < b and (b - a) % unit == 0 for a, b in pairwise(starts))


@shared
def test_explain_says_how_threads_share(threads):
    threads(2)
    layer = openrnn.LSTM(64, 256, 2, backend="cpu")
    x = torch.randn(20, 64, 64)
    (row,) = (row for row in openrnn.explain(layer, x, quiet=True).rows if row.backend == "cpu")
    lines = [line for line in row.details if "threads" in line]
    assert [line.split(":")[0] for line in lines] == [
        "forward of 64 inputs", "backward of 64 inputs", "forward of 256 inputs",
        "backward of 256 inputs",
    ]  # fmt: skip
    assert all(
        ": 2 of 2 threads, " in line and " us by the model, which is for choosing" in line
        for line in lines
    )
    threads(1)
    alone = openrnn.explain(openrnn.LSTM(8, 8), x[..., :8], quiet=True)
    assert any(
        "forward: 1 of 1 threads, each with tiles of 32 rows" in one
        for row in alone.rows
        for one in row.details
    )
