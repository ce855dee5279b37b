"""Long calls in chunks of time: results stay what one launch gives, and where they pay."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from loops import kernels_of_an_h200, loop_of, on_an_h200
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import openrnn
from openrnn import cells, memo
from openrnn.backends.base import Call, Needs, traced
from openrnn.backends.fused import layer, pass_runner, prepared, schedules
from openrnn.backends.fused.lengths import SortedLengths
from openrnn.dispatch import BACKENDS
from openrnn.schedule import Chunking
from openrnn.spec import Problem
from openrnn.tuning import both_directions, chunks, overlap, plan

FAIR = {torch.bfloat16: 1e-2, torch.float32: 1e-3}
CELLS = (cells.lstm, cells.gru, cells.peephole_lstm)
BACKWARD = layer.BackwardOptions(False, False, False, False)


def cut(edges):
    """The chunks between such steps."""
    return Chunking(tuple(edges)).chunks


def test_masks_of_chunks_cover_every_step_once(monkeypatch):
    """Lengths by a launch, of which only the arguments are seen here."""
    lengths = SortedLengths(torch.tensor([100, 0, 37, 64]), torch.tensor([0, 3, 2, 1]))
    reset = torch.arange(400).view(100, 4) % 3 == 0
    problem = Problem(cells.lstm.spec(8, 8), torch.float32, "cpu")
    call = Call(problem, torch.zeros(100, 4, 8), [], [], lengths.lengths, reset)
    asked = []
    monkeypatch.setattr(pass_runner, "cut_lengths", lambda *of: asked.append(of) or lengths)
    for number in (1, 2, 3, 7, 100):
        found = cut(chunks.even(number, 100))
        assert max(chunk.steps for chunk in found) - min(chunk.steps for chunk in found) <= 1
        asked.clear()
        masks = [pass_runner.PassRunner(call, lengths).masks(chunk) for chunk in found]
        assert asked == [(lengths, chunk) for chunk in found if number > 1]
        assert all(mask.lengths is lengths for mask in masks)
        assert torch.equal(torch.cat([mask.reset for mask in masks]), reset)


@pytest.mark.parametrize(
    ("counting", "min_steps", "chunk_bytes"),
    [(chunks.for_memory, chunks.MIN_CHUNK_STEPS, chunks.CHUNK_BYTES),
     (chunks.for_recompute, chunks.MIN_RECOMPUTED_STEPS, chunks.RECOMPUTED_CHUNK_BYTES)],
)  # fmt: skip
def test_chunks_are_neither_short_nor_large_for_nothing(counting, min_steps, chunk_bytes):
    row = 4 * 512 * 2
    assert counting(chunks.RECOMPUTED_CHUNK_BYTES // (64 * row) - 1, 64, row) == 1
    assert counting(7, 0, row) == counting(0, 64, row) == 1
    for steps, batch in ((1024, 128), (20_000, 4096), (129, 1000), (5000, 1)):
        number = counting(steps, batch, row)
        longest = max(chunk.steps for chunk in cut(chunks.even(number, steps)))
        assert longest >= min(steps, min_steps / 2)
        assert longest <= min_steps + chunk_bytes / (batch * row) or number == 1


@pytest.fixture
def fresh_schedules():
    """Schedules are made anew, as the tests change what they are made by: not what was traced."""

    def forget():
        for kept in (schedules.forward, schedules.backward, prepared._prepared_loop):
            kept.cache_clear()

    forget()
    yield forget
    forget()


@pytest.fixture
def tiny(monkeypatch, fresh_schedules):
    """Chunks of five steps."""
    for name in ("for_memory", "for_recompute"):
        monkeypatch.setattr(chunks, name, lambda steps, batch, row: -(-steps // 5))


@pytest.fixture
def training():
    """A training step of a network on the GPU: what it gives, states and gradients among it."""

    def make(cell, hidden, dtype, recompute="none", steps=23, batch=19):
        torch.manual_seed(0)
        where = {"device": "cuda", "dtype": dtype, "backend": "fused"}
        net = openrnn.Recurrent(
            cell, 12, hidden, 2, bidirectional=True, recompute=recompute, **where
        )
        x = torch.randn(steps, batch, 12, device="cuda", dtype=dtype)
        starts = [torch.randn(4, batch, hidden, device="cuda", dtype=dtype) for _ in cell.states]

        def step(**given):
            leaves = [t.clone().requires_grad_() for t in (x, *starts)]
            out = net(leaves[0], tuple(leaves[1:]) if len(starts) > 1 else leaves[1], **given)
            flat = [t for group in out for t in (group if isinstance(group, tuple) else (group,))]
            total = sum((t.float() * torch.linspace(-1, 1, t.numel(), device="cuda").view(t.shape))
                        .sum() for t in flat)  # fmt: skip
            found = torch.autograd.grad(total, [*leaves, *net.parameters()])
            return [t.detach() for t in flat] + list(found)

        lengths = torch.randint(0, steps + 1, (batch,), device="cuda")
        lengths[:4] = torch.tensor([0, steps, 4, 5])  # none, all, and the edges of a chunk
        reset = torch.rand(steps, batch, device="cuda") < 0.1
        reset[4::5, ::3] = reset[5::5, 1::3] = True
        both = {"lengths": lengths, "reset": reset}
        return step, ({}, {"return_states": True}, both, {"lengths": lengths})

    return make


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", [24, 37, 256, 1024])
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
@pytest.mark.parametrize("recompute", ["none", "gates"])
def test_chunks_give_what_one_launch_gives(
    tiny, fresh_schedules, monkeypatch, training, cell, hidden, dtype, recompute
):
    """But for rounding: products of other sizes may add up in another order."""
    step, cases = training(cell, hidden, dtype, recompute)
    for given in cases:
        found = step(**given)
        with monkeypatch.context() as whole:
            for name in ("for_memory", "for_recompute"):
                whole.setattr(chunks, name, lambda steps, batch, row: 1)
            fresh_schedules()
            wanted = step(**given)
        fresh_schedules()
        for have, want in zip(found, wanted):
            assert (have - want).norm() <= FAIR[dtype] * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", [24, 37, 256, 1024])
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
@pytest.mark.parametrize("edges", [(0, 5), (0, 2, 9)], ids=str)
def test_products_beside_loops_give_what_those_after_them_give(
    monkeypatch, fresh_schedules, training, cell, hidden, dtype, edges
):
    """Alike twice, and but for rounding what one chunk gives; also from a CUDA graph."""
    step, cases = training(cell, hidden, dtype)
    for given in cases:
        wanted = step(**given)
        with monkeypatch.context() as changed:
            changed.setattr(schedules, "edges", lambda loop, steps, *_: [*edges, steps])
            fresh_schedules()
            found, again = step(**given), step(**given)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                replayed = step(**given)
            graph.replay()
        fresh_schedules()
        for have, want, second, third in zip(found, wanted, again, replayed):
            assert (have - want).norm() <= FAIR[dtype] * want.norm()
            assert torch.equal(have, second)
            assert torch.equal(have, third)


@pytest.mark.gpu
def test_threads_on_one_stream_share_the_side_stream(monkeypatch, fresh_schedules, training):
    """Forward's loops and products of each lie between the others', and results are the same."""
    hiddens = (24, 256, 512, 1024)
    steps = [training(cells.lstm, hidden, torch.bfloat16, steps=64)[0] for hidden in hiddens]
    monkeypatch.setattr(schedules, "edges", lambda loop, steps, *_: [0, 7, 20, steps])
    alone = [step() for step in steps]
    with ThreadPoolExecutor(len(steps)) as pool:
        rounds = [pool.map(lambda step: [step() for _ in range(8)], steps) for _ in range(3)]
        for each in rounds:
            for found, wanted in zip(each, alone):
                for have in found:
                    assert all(map(torch.equal, have, wanted))


def test_products_beside_loops_are_chosen_where_a_loop_leaves_room(monkeypatch):
    """Few rows and long calls; not where products are short or the loop takes all."""
    on_an_h200(monkeypatch)
    monkeypatch.setattr(schedules, "has_launch_events", lambda: True)

    def of(cell, hidden, dtype=torch.float16):
        return layer.LayerKernels(cell.spec(hidden, hidden), 0, dtype, 0)

    def edges(kernels_of, steps, columns, options=BACKWARD, batch=16):
        return schedules.edges(schedules.LayerLoop(kernels_of, options, batch), steps, columns)

    small, large = of(cells.lstm, 512), of(cells.lstm, 768)
    for found in (
        edges(small, 1024, 3 * 512),
        edges(small, 1024, 3 * 512, BACKWARD._replace(lengths=True)),
        edges(large, 1024, 768, layer.ForwardOptions(False, False, False, False, True)),
        edges(large, 1024, 3 * 768),
    ):
        assert found[0] < found[1] < 512
        assert found[-1] == 1024
    assert edges(small, 16, 3 * 512) == []
    assert edges(small, 1024, 3 * 512, batch=512) == []
    vanilla = of(cells.rnn_tanh, 1024, torch.bfloat16)  # a grid of nearly all blocks
    assert edges(vanilla, 4096, 3 * 1024) == []
    monkeypatch.setattr(schedules, "has_launch_events", lambda: False)
    old = of(cells.lstm, 512)
    assert edges(old, 1024, 3 * 512) == []


def test_two_loops_at_once_leave_room_for_long_products():
    """Four clusters of 16 each way leave none, four of 8 do, and take longer by themselves."""
    cell = traced(cells.lstm.spec(512, 512))
    loop = loop_of("forward", cell, "bfloat16", 512, 32, (9, 0), 132, options=())
    assert both_directions.idle(loop, 1) == 0.0
    assert both_directions.idle(loop, 2) == pytest.approx(1 - 64 / 132)
    assert both_directions.loops_to_fit(loop, 300, True) == 1
    beside = overlap.SideProducts(160.0)
    assert both_directions.loops_to_fit(loop, 300, True, beside=beside) == 2
    assert both_directions.edges(loop, 300, beside, 1) == []
    cut = both_directions.edges(loop, 300, beside, 2)
    assert (cut[0], cut[-1]) == (0, 300)
    assert len(cut) > 2


def test_products_of_the_layer_above_end_with_the_loop_that_backward_runs_first():
    """So that chunk is longer where they are, and there are no chunks where they are too long."""
    cell = traced(cells.lstm.spec(512, 512))
    loop = loop_of("backward", cell, "bfloat16", 512, 32, (9, 0), 132)
    cuts = [
        both_directions.edges(loop, 300, overlap.SideProducts(160.0, others), 2)
        for others in (0.0, 175.0, 400.0)
    ]
    alone, some, many = cuts
    assert len(alone) > len(some) > len(many) == 0
    idle = both_directions.idle(loop, 2)
    times = plan.step_times(loop, 2)
    longest = (some[-1] - some[-2]) * times.several
    assert longest > 0.9 * 175.0 / idle
    grid = replace(loop, hidden=768)
    assert plan.ranked(grid, loops=2)[0].clusters > 1
    assert both_directions.edges(grid, 300, overlap.SideProducts(160.0), 2) == []  # not measured


def test_no_kernel_for_two_loops_is_no_saving(monkeypatch):
    """As where only kernels of one family are let, and the table has times of another."""
    cell = traced(cells.lstm.spec(512, 512))
    loop = loop_of("backward", cell, "bfloat16", 512, 32, (9, 0), 132)
    beside = overlap.SideProducts(160.0, 73.0)
    assert both_directions.loops_to_fit(loop, 300, False, beside=beside) == 2
    ranked = plan.ranked
    monkeypatch.setattr(plan, "ranked", lambda loop, loops=1: ranked(loop) if loops == 1 else ())
    assert both_directions.edges(loop, 300, beside, 2) == []
    assert both_directions.loops_to_fit(loop, 300, False, beside=beside) == 2  # by the times alone


def test_calls_of_few_rows_ask_nothing_of_the_device(monkeypatch):
    """Their products are too short to pay for a chunk more."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: 1 // 0)
    lstm = layer.LayerKernels(cells.lstm.spec(768, 512), 0, torch.float16, 0)
    flop = 2 * 4 * 512 * (2 * 768 + 512)
    rows = int(sum(overlap.OF_CLUSTERS[:2]) * overlap.FLOP_PER_US[2] / flop)
    loop = schedules.LayerLoop(lstm, BACKWARD, 1)
    assert schedules.edges(loop, rows, 2 * 768 + 512) == []
    with pytest.raises(ZeroDivisionError):
        schedules.edges(loop, rows + 1, 2 * 768 + 512)


def test_products_of_a_chunk_end_with_the_loop_beside_them():
    steps, numbers = 10_000, set()
    for products, loop, idle in (
        (120.0, 900.0, 0.3), (60.0, 600.0, 0.2), (1e4, 1e4, 0.9), (1e4, 1e4, 1.1),
    ):  # fmt: skip
        found = overlap.best_edges(steps, products, loop, idle)
        assert (found[0], found[-1]) == (0, steps)
        sizes = [end - begin for begin, end in itertools.pairwise(found)]
        numbers.add(len(sizes))
        for chunk, after in itertools.pairwise(sizes):
            assert after * products / idle == pytest.approx(chunk * loop, rel=0.02)
    assert numbers == {2, 3, 4}


def test_chunks_beside_loops_cover_every_step_once():
    """Also where sums of their lengths are rounded, or a chunk would have none."""
    dice, numbers = random.Random(0), set()
    for _ in range(20_000):
        steps, products = dice.randint(1, 3000), 10 ** dice.uniform(2, 7)
        found = overlap.best_edges(steps, products, 10 ** dice.uniform(3, 8), dice.uniform(0.01, 1))
        if found:
            assert (found[0], found[-1]) == (0, steps)
            assert all(begin < end for begin, end in itertools.pairwise(found))
            numbers.add(len(found) - 1)
    assert numbers == {2, 3, 4}


def test_a_chunk_more_saves_what_it_costs():
    """Of clusters, whose loops may be short, and of grids."""
    grids, clusters = overlap.OF_GRIDS, overlap.OF_CLUSTERS
    for costs in (grids, clusters):
        few = costs.chunk + costs.saving
        assert overlap.best_edges(1000, few, 1e9, 1.0, costs=costs) == []
        assert overlap.best_edges(1000, 1e4, 1e4, 0.0, costs=costs) == []
        assert overlap.best_edges(200, 2.1e4, 1e3, 0.1, costs=costs) == []  # no step would be left
        assert overlap.best_edges(3, 1e4, 1e4, 0.9, costs=costs) == [0, 2, 3]  # each has a step
        assert overlap.best_edges(1000, 0.0, 1e4, 0.0, costs=costs) == []  # gradients of biases
        assert overlap.best_edges(1000, 1e4, 1e4, overlap.LEAST_IDLE - 0.01, costs=costs) == []
    assert overlap.best_edges(1000, 150.0, 4500.0, 0.1, 0.0, grids) == [0, 250, 1000]
    assert overlap.best_edges(1000, 150.0, 4500.0, 0.1, 0.05, grids) == []  # the loop loses more
    assert overlap.best_edges(1000, 1e4, grids.loop - 1, 0.5, 0.0, grids) == []
    assert overlap.best_edges(1000, 1e4, grids.loop - 1, 0.5, 0.0, clusters) != []
    cut = overlap.best_edges(1000, 100.0, 400.0, 0.5)
    saved = overlap.saved(cut, 100.0, 400.0, 0.0, clusters)
    assert saved == 100.0 * (1 - cut[1] / 1000) - (len(cut) - 2) * clusters.chunk
    assert saved >= clusters.saving
    slower = overlap.saved(cut, 100.0, 400.0, 0.05, clusters)
    assert slower == pytest.approx(saved - 0.05 * cut[-2] / 1000 * 400.0)
    assert overlap.saved([], 100.0, 400.0, 0.05, clusters) == 0.0


@pytest.mark.parametrize(
    ("wants", "columns"),
    [((), 48), ((True,) * 5, 48 + 48 + 64), ((False, True, False), 48), ((False, False, True), 64),
     ((False, False, False, True), 0)],
)  # fmt: skip
def test_products_are_those_of_the_gradients_that_are_wanted(
    monkeypatch, fresh_schedules, wants, columns
):
    asked = []
    monkeypatch.setattr(schedules, "edges", lambda *given: asked.append(given) or [])
    config = SimpleNamespace(
        clusters=1, is_cooperative=False, sum_parts=lambda batch: 1, reads_r=False,
        kind="backward" if wants else "forward",
    )  # fmt: skip
    kernels_of_an_h200(monkeypatch, lambda *_: (None, config))
    spec, steps, batch = cells.lstm.spec(48, 64), 4000, 64
    for lengths, reset, every in itertools.product((False, True), repeat=3):
        if wants and every != lengths:
            continue  # in backward it changes nothing, but is given
        problem = Problem(spec, torch.float32, "cuda", grad=True, lengths=lengths, reset=reset)
        given = schedules.ScheduleKey(problem, 0, steps, batch, False, every)
        if wants:
            dx, *params = (*wants, *(False,) * 5)[:5]
            schedules.backward(given, Needs(dx, (), tuple(params), ()))
        else:
            schedules.forward(given)
        options = (
            layer.BackwardOptions(lengths, reset, every, False)
            if wants
            else layer.ForwardOptions(lengths, reset, every, False, True)
        )
        loop = schedules.LayerLoop(given.layer(0, 0), options, batch)
        assert asked.pop() == (loop, steps, columns)


@pytest.mark.gpu
def test_recompute_keeps_little():
    """Much less memory than a training step that keeps all."""

    def peak(recompute):
        net = openrnn.LSTM(256, 256, device="cuda", backend="fused", recompute=recompute)
        x = torch.randn(4096, 32, 256, device="cuda", requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        net(x)[0].sum().backward()
        return torch.cuda.max_memory_allocated() - before

    assert peak("gates") < 0.6 * peak("none")


def test_a_spec_names_its_recompute_and_refuses_other_words():
    spec = cells.lstm.spec(8, 8, recompute="gates")
    assert openrnn.spec.Spec.parse(str(spec)) == spec
    with pytest.raises(ValueError, match="recompute must be one of"):
        openrnn.LSTM(8, 8, recompute="all")


@pytest.fixture
def reserved():
    """The reserve of an LSTM with so many units, as shapes and dtypes, for given T and B."""

    def ask(steps, batch, recompute, hidden=512):
        spec = cells.lstm.spec(hidden, hidden, recompute=recompute)
        problem = Problem(spec, torch.bfloat16, "cuda", (9, 0), grad=True)
        return BACKENDS["fused"].reserve(problem, steps, batch)

    memo.clear()
    return ask


def test_the_reserve_shrinks_with_recompute(reserved):
    """At T 1024, B 64, H 512: the states between seven chunks in place of all activations."""
    sizes = [
        sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in reserved(1024, 64, word))
        for word in ("none", "gates")
    ]
    assert sizes == [1024 * 64 * 512 * 5 * 2, 6 * 2 * 64 * 512 * 4]


@pytest.mark.parametrize("recompute", ["none", "gates"])
def test_the_reserve_of_symbolic_sizes_meets_no_branch(reserved, recompute):
    """So a graph that was made for some T and B serves all; one branch here would raise."""
    sizes = ShapeEnv()
    steps, batch = sizes.create_unbacked_symint(), sizes.create_unbacked_symint()
    assert len(reserved(steps, batch, recompute)) == 1


def test_backends_without_wavefronts_say_so():
    said = "wavefront without effect: it orders the layers itself"
    for layers, wavefront, there in ((2, 16, True), (2, 1, True), (2, 0, False), (1, 16, False)):
        layer = openrnn.LSTM(8, 8, layers, wavefront=wavefront)
        assert (said in str(openrnn.explain(layer, quiet=True))) == there


def test_backends_without_it_say_so():
    table = openrnn.explain(openrnn.LSTM(8, 8, recompute="gates"), quiet=True)
    assert "recompute without effect" in str(table)
    assert "recompute" not in str(openrnn.explain(openrnn.LSTM(8, 8), quiet=True))
    inference = openrnn.explain(openrnn.LSTM(8, 8, recompute="gates"), grad=False, quiet=True)
    assert "without effect" not in str(inference)


def test_recompute_needs_one_kernel_more():
    plain, again = (cells.lstm.spec(8, 8, recompute=word) for word in ("none", "gates"))
    assert plan.kinds(plain, True, True, False, True) == [
        ("forward", ("lengths", "all_states", "save")), ("backward", ("lengths", "all_states")),
    ]  # fmt: skip
    assert plan.kinds(again, True, True, False, True) == [
        ("forward", ("lengths", "all_states")), ("forward", ("lengths", "save")),
        ("backward", ("lengths", "all_states")),
    ]  # fmt: skip
    assert plan.kinds(again, False, False, False, False) == [("forward", ())]
    assert plan.kinds(plain, True, False, True, False, True) == [
        ("forward", ("reset", "reset_state", "save")), ("backward", ("reset",)),
        ("backward", ("reset", "reset_state")),
    ]  # fmt: skip
