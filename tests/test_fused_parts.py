"""Long calls in parts: the steps fall into them once, and results stay what one launch gives."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from test_fused_launches import run_beside
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import openrnn
from openrnn import cells
from openrnn.backends.base import Call
from openrnn.backends.fused import beside, chain, kernels, parts, ragged, run
from openrnn.dispatch import BACKENDS
from openrnn.params import module_slots
from openrnn.spec import Problem

FAIR = {torch.bfloat16: 1e-2, torch.float32: 1e-3}
CELLS = (cells.lstm, cells.gru, cells.peephole_lstm)


def test_parts_cover_every_step_once():
    rows = ragged.Rows(torch.tensor([100, 0, 37, 64]), torch.tensor([0, 3, 2, 1]))
    reset = torch.arange(400).view(100, 4) % 3 == 0
    for number in (1, 2, 3, 7, 100):
        found = parts.split(parts.even(number, 100), rows, reset)
        assert [part.begin for part in found] == [0, *(part.end for part in found[:-1])]
        assert found[-1].end == 100
        assert max(part.steps for part in found) - min(part.steps for part in found) <= 1
        assert torch.equal(sum(part.rows.lengths for part in found), rows.lengths)
        assert torch.equal(torch.cat([part.reset for part in found]), reset)


@pytest.mark.parametrize(
    ("counting", "least", "enough"),
    [(parts.count, parts.LEAST, parts.ENOUGH),
     (parts.count_again, parts.LEAST_AGAIN, parts.ENOUGH_AGAIN)],
)  # fmt: skip
def test_parts_are_neither_short_nor_large_for_nothing(counting, least, enough):
    row = 4 * 512 * 2
    assert counting(parts.ENOUGH_AGAIN // (64 * row) - 1, 64, row) == 1
    assert counting(7, 0, row) == counting(0, 64, row) == 1
    for steps, batch in ((1024, 128), (20_000, 4096), (129, 1000), (5000, 1)):
        number = counting(steps, batch, row)
        longest = max(part.steps for part in parts.split(parts.even(number, steps), None, None))
        assert longest >= min(steps, least / 2)
        assert longest <= least + enough / (batch * row) or number == 1


@pytest.fixture
def tiny(monkeypatch):
    """Parts of five steps."""
    for name in ("count", "count_again"):
        monkeypatch.setattr(parts, name, lambda steps, batch, row: -(-steps // 5))


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
        lengths[:4] = torch.tensor([0, steps, 4, 5])  # none, all, and the edges of a part
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
def test_parts_give_what_one_launch_gives(
    tiny, monkeypatch, training, cell, hidden, dtype, recompute
):
    """But for rounding: products of other sizes may add up in another order."""
    step, cases = training(cell, hidden, dtype, recompute)
    for given in cases:
        found = step(**given)
        with monkeypatch.context() as whole:
            for name in ("count", "count_again"):
                whole.setattr(parts, name, lambda steps, batch, row: 1)
            wanted = step(**given)
        for have, want in zip(found, wanted):
            assert (have - want).norm() <= FAIR[dtype] * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", [24, 37, 256, 1024])
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
@pytest.mark.parametrize("edges", [(0, 5), (0, 2, 9)], ids=str)
def test_products_beside_loops_give_what_those_after_them_give(
    monkeypatch, training, cell, hidden, dtype, edges
):
    """Alike twice, and but for rounding what one part gives; also from a CUDA graph."""
    step, cases = training(cell, hidden, dtype)
    for given in cases:
        wanted = step(**given)
        with monkeypatch.context() as changed:
            changed.setattr(run.Run, "_edges", lambda self, _: [*edges, self.steps])
            found, again = step(**given), step(**given)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                replayed = step(**given)
            graph.replay()
        for have, want, second, third in zip(found, wanted, again, replayed):
            assert (have - want).norm() <= FAIR[dtype] * want.norm()
            assert torch.equal(have, second)
            assert torch.equal(have, third)


@pytest.mark.gpu
def test_threads_on_one_stream_share_the_stream_beside_it(monkeypatch, training):
    """Forward's loops and products of each lie between the others', and results are the same."""
    hiddens = (24, 256, 512, 1024)
    steps = [training(cells.lstm, hidden, torch.bfloat16, steps=64)[0] for hidden in hiddens]
    monkeypatch.setattr(run.Run, "_edges", lambda self, _: [0, 7, 20, self.steps])
    alone = [step() for step in steps]
    with ThreadPoolExecutor(len(steps)) as pool:
        rounds = [pool.map(lambda step: [step() for _ in range(8)], steps) for _ in range(3)]
        for each in rounds:
            for found, wanted in zip(each, alone):
                for have in found:
                    assert all(map(torch.equal, have, wanted))


def test_products_beside_loops_are_chosen_where_a_loop_leaves_room(monkeypatch):
    """Few rows and long calls; not where products are short or the loop takes all."""
    h200 = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    monkeypatch.setattr(chain, "able", lambda: True)
    small, large = (
        chain.Chain(cells.lstm.spec(hidden, hidden), 0, torch.float16, 0) for hidden in (512, 768)
    )
    for found in (
        small.edges(1024, 16, 3 * 512, "backward", ()),
        small.edges(1024, 16, 3 * 512, "backward", ("lengths",)),
        large.edges(1024, 16, 768, "forward", ("keep",)),
        large.edges(1024, 16, 3 * 768, "backward", ()),
    ):
        assert found[0] < found[1] < 512
        assert found[-1] == 1024
    assert small.edges(16, 16, 3 * 512, "backward", ()) == []
    assert small.edges(1024, 512, 3 * 512, "backward", ()) == []
    vanilla = chain.Chain(cells.rnn_tanh.spec(1024, 1024), 0, torch.bfloat16, 0)
    assert vanilla.edges(4096, 16, 3 * 1024, "backward", ()) == []  # a grid of nearly all blocks
    monkeypatch.setattr(chain, "able", lambda: False)
    old = chain.Chain(cells.lstm.spec(512, 512), 0, torch.float16, 0)
    assert old.edges(1024, 16, 3 * 512, "backward", ()) == []


def test_calls_of_few_rows_are_not_asked_whether_products_run_beside_loops():
    lstm = chain.chain(cells.lstm.spec(768, 512, num_layers=2), 1, torch.float16, 0)
    products = lstm.worth * 2 * 4 * 512 * (2 * 512 + 512) / beside.RATE[2]
    assert products == pytest.approx(beside.COST + beside.LEAST)


def test_products_of_a_part_end_with_the_loop_beside_them():
    steps, numbers = 10_000, set()
    for products, loop, idle in (
        (400.0, 1800.0, 0.6), (120.0, 900.0, 0.3), (1e4, 1e4, 0.9), (1e4, 1e4, 1.1),
    ):  # fmt: skip
        found = beside.edges(steps, products, loop, idle)
        assert (found[0], found[-1]) == (0, steps)
        sizes = [end - begin for begin, end in itertools.pairwise(found)]
        numbers.add(len(sizes))
        for part, after in itertools.pairwise(sizes):
            assert after * products / idle == pytest.approx(part * loop, rel=0.02)
    assert numbers == {2, 3, 4}


def test_parts_beside_loops_cover_every_step_once():
    """Also where sums of their lengths are rounded, or a part would have none."""
    dice, numbers = random.Random(0), set()
    for _ in range(20_000):
        steps, products = dice.randint(1, 3000), 10 ** dice.uniform(2, 7)
        found = beside.edges(steps, products, 10 ** dice.uniform(3, 8), dice.uniform(0.01, 1))
        if found:
            assert (found[0], found[-1]) == (0, steps)
            assert all(begin < end for begin, end in itertools.pairwise(found))
            numbers.add(len(found) - 1)
    assert numbers == {2, 3, 4}


def test_a_part_more_saves_what_it_costs():
    assert beside.edges(1000, beside.COST + beside.LEAST, 1e9, 1.0) == []
    assert beside.edges(1000, 1e4, 1e4, 0.0) == []
    assert beside.edges(200, 2.1e4, 1e3, 0.1) == []  # no step would be left
    assert beside.edges(3, 1e4, 1e4, 0.9) == [0, 2, 3]  # a step each, or fewer parts
    assert beside.edges(1000, 150.0, 4500.0, 0.1) == [0, 250, 1000]
    assert beside.edges(1000, 150.0, 4500.0, 0.1, 0.05) == []  # the loop would lose more
    assert beside.edges(1000, 1e4, beside.LONG - 1, 0.5) == []
    assert beside.edges(1000, 0.0, 1e4, 0.0) == []  # gradients of biases alone


@pytest.mark.parametrize(
    ("wants", "columns"),
    [((), 48), ((True,) * 5, 48 + 48 + 64), ((False, True, False), 48), ((False, False, True), 64),
     ((False, False, False, True), 0)],
)  # fmt: skip
def test_products_are_those_of_the_gradients_that_are_wanted(monkeypatch, wants, columns):
    asked = []
    monkeypatch.setattr(chain.Chain, "edges", lambda self, *given: asked.append(given) or [])
    spec, steps, batch = cells.lstm.spec(48, 64), 4000, 64
    x = torch.zeros(()).expand(steps, batch, 48)
    weights = [torch.zeros(slot.shape) for slot in module_slots(spec)]
    masks = {"lengths": torch.full((batch,), steps), "reset": torch.zeros(steps, batch, dtype=bool)}
    for lengths, reset, every in itertools.product((False, True), repeat=3):
        on = {"lengths": lengths, "reset": reset}
        problem = Problem(spec, torch.float32, "cpu", grad=True, return_states=every, **on)
        given = {name: masks[name] for name in masks if on[name]}
        rows = ragged.Rows(masks["lengths"], torch.arange(batch)) if lengths else None
        run.Run(Call(problem, x, [], weights, **given), 0, 0, rows, wants)
        kind, more = ("backward", {}) if wants else ("forward", {"every": every, "keep": True})
        flags = tuple(name for name, here in (on | more).items() if here)
        assert asked.pop() == (steps, batch, columns, kind, flags)


def test_work_waits_for_the_next_loop(monkeypatch):
    done = []
    run_beside(monkeypatch, lambda: done.append("joined"), lambda: done.append("begun"))
    with beside.Beside(0, True) as here:
        assert here.begun == 0
        here.start()
        here.later(lambda: done.append("first"))
        here.later(lambda: done.append("second"))
        assert (here.begun, done) == (7, [])
        here.start()
        assert (here.begun, done) == (0, ["begun", "first", "second"])
        here.later(lambda: done.append("last"))
    assert done == ["begun", "first", "second", "joined", "last"]

    def fails():
        with beside.Beside(0, True) as here:
            here.later(lambda: 1 // 0)
            here.start()

    with pytest.raises(ZeroDivisionError):
        fails()
    assert done[5:] == ["begun", "joined"]
    with beside.Beside(0, False) as here:
        here.later(lambda: done.append("now"))
        assert (here.begun, done[-1]) == (0, "now")


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

    chain.chain.cache_clear()
    return ask


def test_the_reserve_shrinks_with_recompute(reserved):
    """At T 1024, B 64, H 512: the states between seven parts in place of all records."""
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


def test_backends_without_it_say_so():
    table = openrnn.explain(openrnn.LSTM(8, 8, recompute="gates"), quiet=True)
    assert "recompute without effect" in str(table)
    assert "recompute" not in str(openrnn.explain(openrnn.LSTM(8, 8), quiet=True))
    inference = openrnn.explain(openrnn.LSTM(8, 8, recompute="gates"), grad=False, quiet=True)
    assert "without effect" not in str(inference)


def test_recompute_needs_one_kernel_more():
    plain, again = (cells.lstm.spec(8, 8, recompute=word) for word in ("none", "gates"))
    assert kernels.kinds(plain, True, True, False, True) == [
        ("forward", ("lengths", "every", "keep")), ("backward", ("lengths", "every")),
    ]  # fmt: skip
    assert kernels.kinds(again, True, True, False, True) == [
        ("forward", ("lengths", "every")), ("forward", ("lengths", "keep")),
        ("backward", ("lengths", "every")),
    ]  # fmt: skip
    assert kernels.kinds(again, False, False, False, False) == [("forward", ())]
    assert kernels.kinds(plain, True, False, True, False, True) == [
        ("forward", ("reset", "fresh", "keep")), ("backward", ("reset",)),
        ("backward", ("reset", "fresh")),
    ]  # fmt: skip
