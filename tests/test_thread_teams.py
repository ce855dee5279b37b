"""Threads of the CPU backend that share a tile: the same numbers as alone, and no deadlock."""

import itertools
import threading
from itertools import pairwise

import pytest
import torch
from cases import thinned

import openrnn
from openrnn import cells, memo
from openrnn.kernels.cpu import launch, team
from openrnn.kernels.cpu.host import SIZES, WIDTH, WIDTHS, width_of
from openrnn.kernels.cpu.layout import FEWEST_ROWS, Layout
from openrnn.kernels.cpu.plan import plan

shared = pytest.mark.skipif(
    launch.openmp() is None or not team.POSSIBLE, reason="torch has no OpenMP whose threads we use"
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
        3,  # no factor of the numbers of values: a third has each of them
    ),
    ids=name_of,
)
def test_alone_and_together(threads, cell, sizes, lengths):
    """Outputs are those of one thread, bit by bit; sums over rows may be split otherwise."""
    (cell, hidden), (count, batch, steps) = cell, sizes
    torch.manual_seed(0)
    layer = openrnn.Recurrent(cell, 24, hidden, 2, bidirectional=True, backend="cpu")
    size = layout(hidden).team_size(batch, layout(hidden).tile_rows(batch, count, True), count)
    assert size > 1 or batch >= count
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
@pytest.mark.parametrize("count", thinned([3, 1, 2], 3))
@pytest.mark.parametrize("proj_size", [0, 270])
def test_gradients_whose_factors_are_packed(threads, count, proj_size):
    """Of weights with many columns, none of them whole panels or strips, from several chunks."""
    torch.manual_seed(0)
    kind = {"proj_size": proj_size, "dtype": torch.float64}
    ours, plain = (openrnn.LSTM(261, 300, backend=name, **kind) for name in ("cpu", "reference"))
    plain.load_state_dict(ours.state_dict())
    sizes = Layout("float64", 4, 1, 0, 0, True, 261, 300, proj_size or 300)
    x, ends = torch.randn(60, 9, 261, dtype=torch.float64), torch.arange(52, 61)
    assert all(map(sizes.packs_gradient, (sizes.width, sizes.wide, sizes.padded)))
    assert sizes.chunk(60, 9) < 60
    threads(count)
    for lengths in (None, ends):
        for have, want in zip(call(ours, x, lengths), call(plain, x, lengths)):
            torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-9 * want.abs().max().item())


@shared
@pytest.mark.parametrize("proj_size", [0, 250])
def test_one_team_for_all_tiles(threads, proj_size, monkeypatch):
    """As for gradients of 32 MiB: tiles follow each other and add to the same sums."""
    monkeypatch.setattr("openrnn.kernels.cpu.layout.LARGE_SUMS", 0)
    torch.manual_seed(0)
    ours, plain = (
        openrnn.LSTM(39, 260, 2, proj_size=proj_size, backend=name) for name in ("cpu", "reference")
    )
    plain.load_state_dict(ours.state_dict())
    sizes = layout(260, outputs=proj_size or 260)
    found = plan(sizes, "backward", 3, 83, 2, reverse=False, x_gate=None, ragged=False)
    assert (found.tasks, found.teams) == (2, 1)
    assert found.args().tile_rows < 83
    memo.clear()  # of plans with other limits
    x, ends = torch.randn(3, 83, 39), torch.arange(83) % 4
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
@pytest.mark.parametrize(("count", "batch"), thinned([(8, 3), (2, 1)], 2))
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
    assert sizes.team_size(batch, sizes.tile_rows(batch, count, True), count) > 1
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
    ("vector", "whole", "split", "parts"),
    [(64, 650, 230, 16), (32, 130, 116, 32), (16, 70, 60, 43)],
)
def test_who_shares_a_tile(vector, whole, split, parts):
    """Vectors of AVX-512, AVX2 and SSE, whatever this machine has."""
    assert layout(whole, vector).shares
    assert layout(split, vector, outputs=3).shares
    assert not layout(split, vector).shares  # its padded units are no whole panels
    assert layout(64, vector).team_size(1, 1, 8) == 1  # a step is too short for a barrier after it
    assert layout(256, vector).team_size(1, 1, 2) == 2
    # a part has a panel at least, and work enough
    assert layout(512, vector).team_size(1, 1, 64) == parts
    large = layout(512, vector)
    assert large.tile_rows(32, 16, True) == 32  # one tile, of which each thread has some units
    assert large.tile_rows(32, 16, False) == FEWEST_ROWS
    assert large.tile_rows(32, 2, True) == 16  # rows enough for all


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
    assert {found.columns % panel, found.width % panel, found.wide % panel} == {0}
    parts = found.team_size(1, 1, 64)
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
