"""What launches of loops are given, without a device: addresses, chunk states, flag buffers."""

import ctypes
import itertools
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from loops import kernels_of_an_h200, loop_of

from openrnn import cells, memo
from openrnn.backends.base import Call, Cotangents, Needs
from openrnn.backends.fused import (
    backend,
    backward,
    describe,
    forward_loop,
    kernels,
    pass_runner,
    products,
    program,
    schedules,
    stack_chunks,
)
from openrnn.backends.fused.layer import BackwardOptions, ForwardOptions
from openrnn.codegen.config import (
    BackwardConfig,
    ForwardConfig,
    GridBackwardConfig,
    GridForwardConfig,
    saved_values,
)
from openrnn.codegen.trace import trace
from openrnn.dispatch import BACKENDS
from openrnn.kernels.cuda.args import LOOPS, PLAIN
from openrnn.native import cublaslt
from openrnn.params import module_slots
from openrnn.schedule import Chunking
from openrnn.schedule.operations import MAIN, BeginLayer
from openrnn.schedule.wavefront import diagonals
from openrnn.spec import Problem
from openrnn.tuning import both_directions, chunks, overlap, plan, wavefront
from openrnn.tuning.cluster import blocks_of_multiprocessor
from openrnn.tuning.limits import Limits

GRIDS = {
    "forward": GridForwardConfig(64, 2, 4, 2, 1, 1, 8, clusters=2),
    "backward": GridBackwardConfig(64, 2, 4, 2, 1, 1, 8, clusters=2),
}
CLUSTERS = {
    "forward": ForwardConfig(64, 1, 8, 1, 1, 1, 4),
    "backward": BackwardConfig(64, 1, 4, 8, 1, 1, 3),
}
MASKS = {"lengths": torch.tensor([11, 0, 5, 6, 11]), "reset": torch.arange(55).view(11, 5) % 7 == 0}


def clear_caches():
    """Forgets kernels and schedules, which the tests replace; traces of cells are as they were."""
    for name, kept in memo.MEMOS.items():
        if not name.startswith("openrnn.codegen."):
            kept.cache_clear()


def named(table, words):
    """The arguments of a launch by name; of a cell with two states."""
    rest = iter(words)
    taken = {
        field.name: [next(rest), next(rest)] if field.array else next(rest)
        for field in table.fields
    }
    assert next(rest, None) is None
    return SimpleNamespace(**taken)


def store(config, args):
    """Writes into all of a grid's flag buffer, B 5 and H 64; how many words were not filled."""
    forward = config.kind == "forward"
    steps, address, width = args.steps, args.y if forward else args.d_gates, 64 * (4 - 3 * forward)
    width //= 2 if config.half_operands else 1  # in words
    step, row = 5 * width, width
    if forward and args.flag_buffer:
        address = args.flag_buffer
    elif forward:  # y, of which another direction may have its part
        step, row = abs(args.y_step_bytes) // 4, args.y_row
    count = (steps - 1) * step + 4 * row + width
    words = torch.frombuffer((ctypes.c_int32 * count).from_address(address), dtype=torch.int32)
    box = words.as_strided((steps, 5, width), (step, row, 1))
    before = int((box != -1).sum())
    box.zero_()
    return before


def without_side_stream(monkeypatch, joins, awaits=lambda stream: None):
    """Side streams without a device: their work is done at once; a launch event of 7.

    joins: called when the main stream waits for one; awaits: when a stream waits for a launch.
    """

    def wait(waiting, other):
        if waiting == MAIN:
            joins()

    beside = SimpleNamespace(
        launch_event=7, wait_for_launch=awaits, wait=wait,
        handle=lambda number: number, side=lambda number: None,
    )  # fmt: skip
    monkeypatch.setattr(pass_runner, "streams", lambda device: beside)
    monkeypatch.setattr(program, "streams", lambda device: beside)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


def wavefront_if_asked(key, options, wanted, again=None, by_chunk=False):
    """`schedules.layers_at_once` without a device: a wavefront, with recompute of its chunks."""
    asked = key.spec.wavefront
    if not asked or key.layer(0, 0).units != key.spec.hidden_size:
        return None
    number = -(-key.steps // asked)
    if key.recompute:
        number = key.layer(0, 0).kept_chunks(key.steps, key.batch)
    by_chunk = options.kind == "backward" and (by_chunk or again is not None)
    overlap = schedules.has_launch_events() and not by_chunk
    edges = chunks.even(number, key.steps)
    cut = Chunking(edges, mode="wavefront", overlap=overlap, by_chunk=by_chunk)
    return ((cut,),) * key.spec.num_layers


@pytest.fixture
def launched(monkeypatch):
    """A training step without a device: what each launch was given, by kind, in order."""

    def step(configs, spec, steps=3, unwanted=(), **given):
        found, step.others = [], []  # launches of loops, and of kernels that no cell changes
        # of each launch of a loop: its event, words of a grid's buffer that were not filled, flags
        step.events, step.unfilled, step.asked, step.loops = [], [], set(), []

        class Kernel:
            threads, max_clusters = 256, 64

            def __init__(self, kind, loops=1):
                self.kind, self.loops = kind, loops

            def launch(self, blocks, words, begun=0):
                if self.kind == "fill_flags":
                    args = named(PLAIN[self.kind], words)
                    for row in range(args.rows):
                        ctypes.memset(args.buffer + row * args.row_bytes, 255, 16 * args.pieces)
                elif self.kind in PLAIN:
                    step.others.append((self.kind, named(PLAIN[self.kind], words)))
                else:
                    args = named(LOOPS[self.kind], words)
                    found.append((self.kind, args))
                    step.events.append(begun)
                    step.loops.append(self.loops)
                    if configs[self.kind].clusters > 1:
                        step.unfilled.append(store(configs[self.kind], args))

        def kernel(loop, device, spin_limit, loops, layers):
            step.asked.add((loop.kind, loop.option_names))
            return Kernel(loop.kind, loops), configs[loop.kind]

        kernels_of_an_h200(monkeypatch, kernel)
        monkeypatch.setattr(kernels, "plain", lambda name, *_: Kernel(name))
        clear_caches()
        problem = Problem(
            spec,
            torch.float32,
            "cpu",
            grad=True,
            lengths="lengths" in given,
            reset="reset" in given,
        )
        weights = [torch.randn(slot.shape) for slot in module_slots(spec)]
        call = Call(problem, torch.randn(steps, 5, 64), [], weights, **given)
        fused = BACKENDS["fused"]
        out = fused.forward(call)
        shapes = fused.reserve(problem, steps, 5)
        assert [(tuple(kept.shape), kept.dtype) for kept in out.reserve] == shapes
        names = [slot.name.rpartition("_l")[0] for slot in module_slots(spec)]
        needs = Needs(True, (), tuple(name not in unwanted for name in names), ())
        grads = Cotangents(out.y, [None] * len(spec.states), [])
        step.gradients = fused.backward(call, out.y, out.reserve, grads, needs).params
        clear_caches()
        return found

    monkeypatch.setattr(backend, "On", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cublaslt.Product, "run", lambda *_: None)
    monkeypatch.setattr(schedules, "choose_both_directions", lambda *_: False)
    monkeypatch.setattr(schedules, "idle", lambda *_: 0.0)
    monkeypatch.setattr(schedules, "has_launch_events", lambda: False)
    monkeypatch.setattr(schedules, "layers_at_once", wavefront_if_asked)
    return step


@pytest.fixture(params=[(3, 8), (2, 3, 6)], ids=str)
def overlapped(request, monkeypatch, launched):
    """Chunks of so many steps, and after how many loops the side stream was waited for."""
    joined, edges = [], [0, *itertools.accumulate(request.param)]
    without_side_stream(monkeypatch, lambda: joined.append(len(launched.events)))
    monkeypatch.setattr(schedules, "edges", lambda *_: edges)
    return request.param, joined


@pytest.mark.parametrize("both", [False, True], ids=["one way", "both ways"])
def test_loops_that_products_wait_for_record_an_event(launched, overlapped, both):
    """All of forward's but the last and of backward's but the first, of each direction."""
    (sizes, joined), ways = overlapped, 1 + both
    number = len(sizes)
    found = launched(CLUSTERS, cells.lstm.spec(64, 64, bidirectional=both), steps=11)
    some = [7] * (number - 1)
    assert launched.events == [*some, 0] * ways + [0, *some] * ways
    assert [kind for kind, _ in found] == [
        *["forward"] * number * ways,
        *["backward"] * number * ways,
    ]
    assert tuple(args.steps for _, args in found) == sizes * ways + sizes[::-1] * ways
    # forward before each loop but the first, backward before the third, and at the end
    forward, backward = range(1, number), range(2, number + 1)
    begins = [number * loop for loop in range(2 * ways)]
    assert joined == [
        begin + loops
        for n, begin in enumerate(begins)
        for loops in (forward if n < ways else backward)
    ]


@pytest.mark.parametrize("given", [(), ("lengths",), ("reset",)], ids=str)
def test_both_directions_at_once(monkeypatch, launched, given):
    """Two layers: the streams wait for each other once a layer and pass; no memory is shared."""
    waits = []
    without_side_stream(monkeypatch, lambda: waits.append(len(launched.events)))
    monkeypatch.setattr(schedules, "choose_both_directions", lambda *_: True)
    spec = cells.lstm.spec(64, 64, bidirectional=True, num_layers=2)
    found = launched(CLUSTERS, spec, 11, **{name: MASKS[name] for name in given})
    assert waits == [2, 4, 6, 8]
    assert [(kind, args.reverse) for kind, args in found] == [
        (kind, direction) for kind in ("forward", "backward") for _ in "ll" for direction in (0, 1)
    ]
    for (kind, one), (_, other) in zip(found[::2], found[1::2]):
        for name in ("y", "saved", "x") if kind == "forward" else ("d_gates", "sums", "weight"):
            assert 0 != getattr(one, name) != getattr(other, name) != 0


def on_a_device(monkeypatch, kernel_of):
    """Kernels and their configurations by the number of loops, on an H200 that is not there."""
    kernels_of_an_h200(monkeypatch, lambda *asked: kernel_of(asked[-2]))
    clear_caches()


@pytest.mark.parametrize(
    ("wanted", "changed"),
    [(1, {}), (0, {"steps": 20}), (1, {"clusters": 16}), (2, {"clusters": 15}),
     (0, {"clusters": 15, "several": 0.91}), (0, {"clusters": 15, "steps": 50}),
     (0, {"clusters": 7}),
     (1, {"grid": True, "clusters": 64, "held": True}),
     (2, {"grid": True, "clusters": 64, "held": False}), (2, {"grid": True, "clusters": 63}),
     (0, {"edges": (0, 60, 100)}), (2, {"overlap": True}), (1, {"columns": 1 << 20}),
     (0, {"overlap": True, "columns": 1 << 20}), (2, {"overlap": True, "columns": 5000}),
     (0, {"overlap": True, "columns": 5000, "clusters": 15, "several": 0.89}),
     (2, {"overlap": True, "columns": 5700, "above": 5700}),
     (2, {"overlap": True, "columns": 5600}), (0, {"overlap": True, "columns": 5700}),
     (2, {"overlap": True, "columns": 5800, "slowdown": 0.05}),
     (0, {"overlap": True, "columns": 5900, "slowdown": 0.05}),
     (2, {"overlap": True, "columns": 1 << 20, "layer": 1})],
    ids=str,
)  # fmt: skip
def test_directions_run_at_once_where_both_loops_fit_and_it_pays(monkeypatch, wanted, changed):
    """128 rows by tiles of 16 are 8 clusters for each direction, of grids 16 times two.

    The kernel for two loops has 4 clusters. A loop alone takes half a microsecond a step. Products
    that run beside loops in turn are those of backward; at once those of the weights of the layer
    above do, and of its own beside the loops of the layer below. What the loop in turn loses
    by products beside it counts.
    """
    asked = {"steps": 100, "clusters": 17, "columns": 64, "several": 0.5, "held": True, **changed}
    config = replace(CLUSTERS["forward"], tiles=2)
    first = GRIDS["forward"] if asked.get("grid") else config
    configs = {1: first, 2: replace(config, tiles=4)}
    of_device = SimpleNamespace(max_clusters=asked["clusters"])
    on_a_device(monkeypatch, lambda loops: (of_device, configs[loops]))
    monkeypatch.setattr(plan, "microseconds_of", lambda *_: 0.5)
    monkeypatch.setattr(plan, "step_times", lambda *_: plan.StepTimes(0.5, asked["several"]))
    monkeypatch.setattr(both_directions, "fits_twice", lambda _: asked["held"])
    monkeypatch.setattr(schedules, "has_launch_events", lambda: True)
    if "slowdown" in asked:
        step = overlap.LoopStep(0.5, 0.5, asked["slowdown"], overlap.OF_CLUSTERS)
        monkeypatch.setattr(schedules, "_loop_step", lambda *_: step)
    spec = cells.lstm.spec(64, 64, num_layers=2, bidirectional=True)
    problem = Problem(spec, torch.bfloat16, "cuda")
    key = schedules.ScheduleKey(problem, 0, asked["steps"], 128, False, False)
    edges = asked.get("edges", (0, 50, 100) if "overlap" in changed else (0, 100))
    cut = tuple(Chunking(edges, reverse, overlap="overlap" in changed) for reverse in (False, True))
    on = BackwardOptions(*[False] * 4) if "overlap" in changed else ForwardOptions(*[False] * 5)
    layer, above = asked.get("layer", 0), asked.get("above", 0)
    inputs = 0 if on.kind == "backward" else asked["columns"]
    pair = schedules.BothLoops(key, layer, on, asked["columns"], inputs, above)
    found = schedules.choose_both_directions(pair, cut)
    assert (found, type(found)) == (wanted, int)
    clear_caches()


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("changed", ["nothing", "skip", "reset states"])
@pytest.mark.parametrize(
    ("hidden", "layers", "batch", "steps"),
    [(192, 2, 128, 200), (512, 3, 32, 300), (256, 2, 64, 300), (128, 3, 160, 400),
     (384, 3, 128, 200), (512, 3, 128, 600)],
)  # fmt: skip
def test_kernels_that_schedules_choose_are_known_by_values(
    monkeypatch, kind, hidden, layers, batch, steps, changed
):
    """To `explain`, and to what compiles them ahead: those of one loop and of two at once."""

    def kernel(loop, device, spin=0, loops=1, layers=1):
        names = plan.measured_options(loop.kind, loop.option_names)
        config = plan.ranked(replace(loop, option_names=names), loops, layers)[0]
        limits, shared = loop.limits, 1
        if not config.is_cooperative:
            shared = blocks_of_multiprocessor(loop.cell, loop.dtype, config, limits)
        places = limits.clusters(config.cluster)
        return SimpleNamespace(max_clusters=shared * places), config

    kernels_of_an_h200(monkeypatch, kernel)
    clear_caches()
    monkeypatch.setattr(schedules, "has_launch_events", lambda: True)
    cell, mode = (cells.rnn_tanh, "skip") if changed == "skip" else (cells.lstm, "linear")
    spec = cell.spec(hidden, hidden, num_layers=layers, bidirectional=True, input_mode=mode)
    resets = changed == "reset states"
    problem = Problem(
        spec, torch.bfloat16, "cuda", grad=True, capability=(9, 0), processors=132, reset=resets,
        reset_state=resets,
    )  # fmt: skip
    key = schedules.ScheduleKey(problem, 0, steps, batch, resets, False)
    if kind == "forward":
        begun = schedules.forward(key)
    else:
        none = (False,) * len(spec.states)
        every = Needs(True, none, (True,) * len(module_slots(spec)), none if resets else ())
        begun = schedules.backward(key, every)[1]
    chosen = {one.loops for one in begun if isinstance(one, BeginLayer)}
    flags = ("reset",) * resets + (("save",) if kind == "forward" else ())
    known = describe.both_at_once(problem, kind, flags, steps, batch)
    assert chosen <= known | {1}
    clear_caches()


@pytest.mark.parametrize(
    ("wanted", "changed"),
    [(True, {}), (False, {"max_clusters": 3}), (False, {"absent": True}),
     (True, {"grid": False, "loops": 1}), (False, {"loops": 1})],
    ids=str,
)  # fmt: skip
def test_a_wavefront_of_grids_has_their_loops_and_fills(monkeypatch, wanted, changed):
    """B 8 are two clusters of the grid, for each of two loops."""
    asked = {"max_clusters": 4, "grid": True, "loops": 2, "absent": False, **changed}
    loaded = []

    def kernel(loops):
        loaded.append(loops)
        if asked["absent"]:
            raise kernels.NoKernelError("no kernel")
        config = (GRIDS if asked["grid"] else CLUSTERS)["forward"]
        return SimpleNamespace(max_clusters=asked["max_clusters"]), config

    on_a_device(monkeypatch, kernel)
    model = wavefront.Wavefront(3, asked["loops"], 1.0, 2.0)
    monkeypatch.setattr(stack_chunks, "has_launch_events", lambda: True)
    problem = Problem(cells.lstm.spec(64, 64, num_layers=2), torch.bfloat16, "cuda")
    key = schedules.ScheduleKey(problem, 0, 30, 8, False, False)
    on = ForwardOptions(False, False, False, False, False)
    found = stack_chunks.in_wavefront(key, on, model, True)
    assert set(loaded) == {asked["loops"]}
    assert (found is not None) == wanted
    if found:
        ((cut,), other) = found
        fills = frozenset({"forward"} if asked["grid"] else ())
        assert other == (cut,)
        assert cut == Chunking(
            (0, 10, 20, 30), overlap=asked["loops"] == 1, mode="wavefront", loops=asked["loops"],
            fills=fills,
        )  # fmt: skip
    clear_caches()


@pytest.mark.parametrize("given", [(), ("lengths",), ("reset",)], ids=str)
@pytest.mark.parametrize("options", [{}, {"input_mode": "skip"}, {"bidirectional": True}], ids=str)
@pytest.mark.parametrize("half_operands", [False, True])
@pytest.mark.parametrize("number", [1, 3])
def test_a_grid_finds_its_flags_filled(
    monkeypatch, launched, number, half_operands, options, given
):
    """In y only where that has what blocks send each other, and nothing else."""
    monkeypatch.setattr(chunks, "for_memory", lambda *_: number)
    configs = GRIDS | {"forward": replace(GRIDS["forward"], half_operands=half_operands)}
    masks = {name: MASKS[name] for name in given}
    found = launched(configs, cells.lstm.spec(64, 64, **options), 11, **masks)
    loops = 2 * number * (2 if "bidirectional" in options else 1)
    assert launched.unfilled == [0] * loops
    own = [args.flag_buffer != 0 for kind, args in found if kind == "forward"]
    assert own == [half_operands or bool(given)] * (loops // 2)


@pytest.mark.parametrize("given", [(), ("lengths",), ("reset",)], ids=str)
@pytest.mark.parametrize("half_operands", [False, True])
@pytest.mark.parametrize("at_once", ["directions", "layers"])
def test_grids_that_run_at_once_find_their_flags_filled(
    monkeypatch, launched, at_once, half_operands, given
):
    without_side_stream(monkeypatch, lambda: None)
    monkeypatch.setattr(schedules, "choose_both_directions", lambda *_: 2)

    def layers_at_once(key, on, *_):
        if key.spec.bidirectional:
            return None
        cut = Chunking((0, 4, 8, 11), mode="wavefront", loops=2, fills=frozenset({on.kind}))
        return ((cut,),) * key.spec.num_layers

    monkeypatch.setattr(schedules, "layers_at_once", layers_at_once)
    configs = GRIDS | {"forward": replace(GRIDS["forward"], half_operands=half_operands)}
    masks = {name: MASKS[name] for name in given}
    spec = cells.lstm.spec(64, 64, num_layers=3, bidirectional=at_once == "directions")
    found = launched(configs, spec, 11, **masks)
    assert launched.unfilled == [0] * (2 * 3 * (2 if spec.bidirectional else 3))
    own = {args.flag_buffer != 0 for kind, args in found if kind == "forward"}
    assert own == {half_operands or bool(given)}
    assert set(launched.loops) == {2}  # the kernel of which the device holds two


@pytest.mark.parametrize("given", [(), ("lengths",), ("reset",)], ids=str)
def test_flags_are_filled_beside_the_loop_before(monkeypatch, launched, overlapped, given):
    """Each but the first of a grid's loops, forward and backward, waits for the side stream."""
    (sizes, joined), filled, multiplied = overlapped, [], []
    number = len(sizes)
    fill = pass_runner.fill_flags
    for module in (forward_loop, backward):
        monkeypatch.setattr(
            module, "fill_flags", lambda box: filled.append(len(launched.events)) or fill(box)
        )
    product = products.input_product
    monkeypatch.setattr(
        products,
        "input_product",
        lambda *sizes, padded: multiplied.append(len(launched.events)) or product(*sizes),
    )
    launched(GRIDS, cells.lstm.spec(64, 64), 11, **{name: MASKS[name] for name in given})
    assert launched.unfilled == [0] * 2 * number
    assert launched.events == [7] * (number - 1) + [0] + [7] * number
    assert filled == list(range(2 * number))
    assert multiplied == list(range(number))
    assert joined == [*range(1, number), *range(number + 1, 2 * number + 1)]


@pytest.mark.parametrize("recompute", ["none", "gates"])
@pytest.mark.parametrize("given", [(), ("lengths",), ("reset",), ("lengths", "reset")], ids=str)
def test_chunks_hand_on_their_states(monkeypatch, launched, recompute, given):
    """Each chunk of a direction begins with what the one that ran before it left."""
    for name in ("for_memory", "for_recompute"):
        monkeypatch.setattr(chunks, name, lambda steps, batch, row: 3)
    options = {"lengths": torch.tensor([12, 0, 5, 6, 12]), "reset": torch.rand(12, 5) < 0.2}
    spec = cells.lstm.spec(64, 64, bidirectional=True, recompute=recompute)
    found = launched(CLUSTERS, spec, 12, **{name: options[name] for name in given})
    keeps = {"save" in flags for kind, flags in launched.asked if kind == "forward"}
    assert keeps == ({True} if recompute == "none" else {False, True})
    carries = []  # of each launch: what it takes and leaves, its steps and its direction
    for kind, args in found:
        carries.append((kind, args.chunk_in, args.chunk_out, args.steps, args.reverse))
        # bytes to the loop's next step
        way = 1 if (kind == "forward") == (args.reverse == 0) else -1
        if kind == "forward":
            assert args.x_step_bytes == way * 5 * 256 * 4
            assert args.y_step_bytes == way * 5 * 128 * 4
        else:
            assert args.dy_step_bytes == way * 5 * 128 * 4
            assert args.d_gates_step_bytes == way * 5 * 256 * 4
        assert args.saved_step_bytes == way * 8 * 64 * saved_values(trace(cells.lstm)) * 4
        assert args.reset_step_bytes == way * 5

    def chained(launches):
        assert launches[0][1] == 0
        assert launches[-1][2] == 0
        assert all(left[2] == right[1] != 0 for left, right in itertools.pairwise(launches))
        assert [launch[3] for launch in launches] == [4, 4, 4]

    forward = [launch for launch in carries if launch[0] == "forward"]
    backward = [launch for launch in carries if launch[0] == "backward"]
    for direction in (0, 1):
        chained(forward[3 * direction : 3 * direction + 3])
        chained(backward[3 * direction : 3 * direction + 3])
        assert {launch[4] for launch in forward[3 * direction : 3 * direction + 3]} == {direction}
    again = forward[6:]
    assert len(again) == (6 if recompute == "gates" else 0)
    for launch, before in zip(again, [*forward[2::-1], *forward[5:2:-1]]):
        assert launch[1] == before[1]
        assert launch[4] == before[4]


@pytest.mark.parametrize("given", [(), ("lengths",), ("reset",)], ids=str)
def test_a_wavefront_leaves_the_states_from_which_recompute_begins(monkeypatch, launched, given):
    """Its chunks are halves of backward's; those between have memory of their own."""
    without_side_stream(monkeypatch, lambda: None)
    monkeypatch.setattr(chunks, "for_recompute", lambda steps, batch, row: 3)

    def layers_at_once(key, on, *_):
        cut = Chunking((0, 2, 4, 6, 8, 10, 12), mode="wavefront")
        return ((cut,),) * 2 if on.kind == "forward" else None

    monkeypatch.setattr(schedules, "layers_at_once", layers_at_once)
    options = {"lengths": torch.tensor([12, 0, 5, 6, 12]), "reset": torch.rand(12, 5) < 0.2}
    spec = cells.lstm.spec(64, 64, num_layers=2, recompute="gates")
    found = launched(CLUSTERS, spec, 12, **{name: options[name] for name in given})
    forward = [args for kind, args in found if kind == "forward"]
    first, again = forward[:12], forward[12:]
    assert [args.steps for args in first] == [2] * 12
    assert [args.steps for args in again] == [4] * 6
    # by layer, as the diagonals of the schedule give them
    order = [layer for one in diagonals(2, 6) for layer, _ in one]
    for layer in (0, 1):
        own = [args for args, of in zip(first, order, strict=True) if of == layer]
        assert own[0].chunk_in == own[-1].chunk_out == 0
        assert all(one.chunk_out == two.chunk_in != 0 for one, two in itertools.pairwise(own))
        kept = {own[1].chunk_out, own[3].chunk_out}
        assert len(kept) == 2
        assert not kept & {own[number].chunk_out for number in (0, 2, 4)}
        begins = [args.chunk_in for args in again[3 * (1 - layer) : 3 * (2 - layer)]]
        assert begins == [own[3].chunk_out, own[1].chunk_out, 0]


@pytest.mark.parametrize("given", [(), ("lengths",), ("reset",)], ids=str)
def test_a_wavefront_of_backward_runs_each_chunk_again(monkeypatch, launched, given):
    """From the states that forward kept, in memory of its layer that holds one chunk."""
    without_side_stream(monkeypatch, lambda: None)
    monkeypatch.setattr(chunks, "for_recompute", lambda steps, batch, row: 3)
    cut, others = Chunking((0, 4, 8, 12), mode="wavefront", by_chunk=True), []

    def layers_at_once(key, on, wanted, again=None):
        others.append((on.kind, again))
        return ((cut,),) * 3

    monkeypatch.setattr(schedules, "layers_at_once", layers_at_once)
    options = {"lengths": torch.tensor([12, 0, 5, 6, 12]), "reset": torch.rand(12, 5) < 0.2}
    spec = cells.lstm.spec(64, 64, num_layers=3, recompute="gates")
    took, room = [], backward.BackwardPass._room_for_recompute
    monkeypatch.setattr(
        backward.BackwardPass, "_room_for_recompute",
        lambda *of: took.append(len(launched.events)) or room(*of),
    )  # fmt: skip
    found = launched(CLUSTERS, spec, 12, **{name: options[name] for name in given})
    assert took == [9, 9, 9]  # before the first loop of backward
    (one, none), (other, again) = others
    assert (one, none, other) == ("forward", None, "backward")
    assert (again.kind, again.save, again.all_states) == ("forward", True, False)
    first, rest = [args for _, args in found[:9]], found[9:]
    assert [kind for kind, _ in rest] == ["forward", "backward"] * 9
    order = [layer for one in diagonals(3, 3) for layer, _ in one]
    for layer in range(3):
        own = [args for args, of in zip(first, order, strict=True) if of == layer]
        # the way up in forward is the way down in backward
        places = [place for place, of in enumerate(order) if of == 2 - layer]
        forwards = [rest[2 * place][1] for place in places]
        backwards = [rest[2 * place + 1][1] for place in places]
        assert [args.chunk_in for args in forwards] == [own[1].chunk_out, own[0].chunk_out, 0]
        assert {args.saved for args in own} == {0}
        room = {args.saved for args in (*forwards, *backwards)}
        assert len(room) == 1
        assert room != {0}
        assert len({args.d_gates for args in backwards}) == 1
        assert len({args.x for args in forwards}) == len({args.y for args in forwards}) == 1
        assert not {args.y for args in forwards} & {args.y for args in own}
        assert backwards[0].chunk_in == backwards[-1].chunk_out == 0
        pairs = itertools.pairwise(backwards)
        assert all(one.chunk_out == two.chunk_in != 0 for one, two in pairs)
    rooms = {(args.saved, args.d_gates) for kind, args in rest if kind == "backward"}
    assert len(rooms) == len({saved for saved, _ in rooms}) == len({box for _, box in rooms}) == 3


@pytest.mark.parametrize("unwanted", [(), ("p_i", "p_f", "p_o"), ("p_f", "bias_ih")], ids=str)
def test_gradients_of_unit_vectors_have_memory_wanted_or_not(launched, unwanted):
    """The kernel that reduces them writes every one."""
    spec = cells.lookup("peephole_lstm").spec(64, 64)
    launched(CLUSTERS, spec, unwanted=unwanted)
    names = [slot.name.rpartition("_l")[0] for slot in module_slots(spec)]
    assert {"p_i", "p_f", "p_o"} < set(names)
    assert [grad is None for grad in launched.gradients] == [name in unwanted for name in names]
    memory = [one.untyped_storage().data_ptr() for one in launched.gradients if one is not None]
    assert len({*memory}) == len(memory)
    (args,) = [args for name, args in launched.others if name == "reduce_bias_gradients"]
    assert args.vectors == 3
    assert args.unit_vectors != 0
    assert (args.input_bias == 0) == ("bias_ih" in unwanted)


def test_memory_for_what_runs_beside_a_loop_is_taken_before_it(monkeypatch, launched, overlapped):
    """Memory that is free after the launch is what the loop still reads."""
    (sizes, _), order = overlapped, []
    loops = forward_loop.ForwardLoops
    launch, new_inputs = loops.launch_forward, loops._new_inputs

    def launching(self, operation, *given):
        order.append(f"launch {operation.chunk.number}")
        launch(self, operation, *given)

    def taking(self, operation):
        order.append(f"memory {operation.chunk.number}")
        return new_inputs(self, operation)

    monkeypatch.setattr(loops, "launch_forward", launching)
    monkeypatch.setattr(loops, "_new_inputs", taking)
    launched(CLUSTERS, cells.lstm.spec(64, 64), 11)
    last = len(sizes) - 1
    pairs = [[f"memory {number + 1}", f"launch {number}"] for number in range(last)]
    assert order == ["memory 0", *itertools.chain(*pairs), f"launch {last}"]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_explain_lists_what_is_launched(monkeypatch, launched, grad):
    """Two layers, one of them in reverse too: an input product and a loop each, then backward."""
    spec = cells.lstm.spec(64, 64, num_layers=2, bidirectional=True, dropout=0.5)
    kernels_of_an_h200(monkeypatch, lambda loop, *_: (None, CLUSTERS[loop.kind]))
    problem = Problem(spec, torch.float32, "cuda", grad=grad, training=True, steps=11, batch=5)
    clear_caches()
    lines = BACKENDS["fused"].schedule(problem, torch.device("cuda"))
    clear_caches()
    loops = [line for line in lines if "  loop  " in line or " loop " in line]
    assert len(loops) == (8 if grad else 4)
    assert lines[:3] == [
        "forward:",
        "main  begin_layer  layer 0  forward direction",
        "main  input_product  layer 0  forward direction  steps 0 to 11",
    ]
    assert lines.count("main  dropout  of the output  layer 0") == (2 if grad else 1)
    assert ("backward, where all gradients are wanted:" in lines) == grad


@pytest.fixture
def holding(fake_device):
    """A function: what `kernels.kernel` takes on a device that holds so many clusters by blocks."""

    def taken(held, hidden, batch, kind="forward", loops=1):
        def places(config):
            return held.get(config.cluster, Limits.of((9, 0), 132).clusters(config.cluster))

        taken.tried = fake_device("a device", places)
        flags = ("save",) if kind == "forward" else ()
        loop = loop_of(kind, trace(cells.lstm), "bfloat16", hidden, batch, (9, 0), 132, flags)
        return *kernels.kernel(loop, 0, loops=loops), taken.tried

    return taken


FEW = dict.fromkeys(range(1, 17), 7)


@pytest.mark.parametrize(
    ("held", "hidden", "kind", "wanted"),
    [({}, 256, "forward", 6), ({6: 15}, 256, "forward", 5), ({6: 15}, 384, "backward", 5),
     ({}, 384, "backward", 6), (FEW, 256, "forward", 6)],
    ids=["as planned", "fewer of 6", "fewer of 6, backward", "as planned, backward", "few of all"],
)  # fmt: skip
def test_a_device_that_holds_fewer_clusters_than_planned(holding, held, hidden, kind, wanted):
    """16 clusters of 6 blocks are the quickest for 128 rows, unless they take two rounds.

    All kernels with the same blocks of a cluster and rows need two. Where three such shapes need
    more rounds than planned, the first one is taken.
    """
    _, config, tried = holding(held, hidden, 128, kind)
    assert config.cluster == wanted
    assert config is tried[0 if held in ({}, FEW) else -1]
    assert len({(one.cluster, one.rows) for one in tried}) <= kernels.MOST_SKIPPED


@pytest.mark.parametrize(
    ("held", "shapes"),
    [({}, [(4, 16)]), ({4: 15}, [(4, 16), (3, 8)]), ({4: 15, 3: 20}, [(4, 16), (3, 8), (6, 16)])],
    ids=str,
)
def test_two_loops_have_places_for_all_of_their_clusters(holding, held, shapes):
    kernel, config, tried = holding(held, 256, 128, loops=2)
    assert 2 * plan.clusters_of(config, 128) <= kernel.max_clusters
    assert [*dict.fromkeys((one.cluster, one.rows) for one in tried)] == shapes


def test_a_device_without_places_for_two_loops(holding):
    """It is refused after few kernels: each takes a second or two to compile."""
    with pytest.raises(kernels.NoKernelError, match="for 2 loops of 1 layers at once"):
        holding(dict.fromkeys(range(1, 17), 1), 256, 128, loops=2)
    assert len({(one.cluster, one.rows) for one in holding.tried}) == kernels.MOST_SKIPPED
    assert len(holding.tried) < kernels.MAX_COMPILED


@pytest.mark.parametrize(
    ("rows", "batch", "clusters", "places", "wanted"),
    [(8, 128, 1, 17, False), (8, 128, 1, 15, True), (8, 128, 1, 5, True), (8, 8, 1, 1, False),
     (8, 272, 1, 17, False), (8, 272, 1, 16, True), (8, 680, 1, 16, False), (8, 128, 1, 40, False),
     (16, 128, 4, 17, False), (16, 128, 4, 8, True), (8, 128, 20, 20, False)],
)  # fmt: skip
def test_a_batch_that_needs_more_rounds_than_planned(rows, batch, clusters, places, wanted):
    """An H200 holds 17 clusters of 6 blocks: with 4 clusters per copy of R, 4 copies.

    A sixth round after five is no reason to take another shape.
    """
    config = SimpleNamespace(cluster=6, clusters=clusters, rows=rows)
    assert plan.needs_more_rounds(places, config, batch, Limits.of((9, 0), 132)) == wanted
    assert not plan.needs_more_rounds(places, config, batch, Limits.of((9, 0), 114))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("processors", [None, 66, 132])
def test_sizes_of_clusters_that_are_planned(capability, processors):
    """Others than powers of two only where they were measured."""
    found = [size for size, _ in Limits.of(capability, processors).splits(256)]
    assert found == sorted(found)
    if capability == (9, 0) and processors != 66:
        assert found == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]
    else:
        most = {8: 1, 9: 16, 10: 16, 12: 8}[capability[0]]
        assert found == [size for size in (1, 2, 4, 8, 16) if size <= most]
