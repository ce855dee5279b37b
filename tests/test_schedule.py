"""Schedules are data: what runs, in which order and on which stream, read from the list alone."""

import itertools
from contextlib import contextmanager

import pytest

from openrnn import schedule
from openrnn.schedule import Chunking
from openrnn.schedule.operations import (
    MAIN,
    SIDE,
    AllocateInputs,
    BeginLayer,
    CutMasks,
    Dropout,
    FillFlags,
    FinishWeights,
    GradientProducts,
    InputProduct,
    Loop,
    OfChunk,
    Wait,
    WaitForLaunch,
)

EDGES = [(0, 11), (0, 3, 11), (0, 2, 5, 11), (0, 1, 2, 3, 11)]
OPTIONS = {
    "plain": {},
    "overlap": {"overlap": True},
    "flags": {"fills": frozenset({"forward", "backward", "recompute"})},
    "overlap and flags": {"overlap": True, "fills": frozenset({"forward", "backward"})},
    "forks": {"forks": True},
}


def one(edges, reverse=False, **options):
    return (Chunking(edges, reverse, **options),)


def ran(operations, kind):
    """The chunks of the loops of a kind, in order."""
    return [
        operation.chunk
        for operation in operations
        if isinstance(operation, Loop) and operation.kind == kind
    ]


def finished_before(operations, stream, place):
    """What is certain to be done when the operation at `place` begins on a stream."""
    done, running = set(), {one.stream: [] for one in operations} | {MAIN: [], SIDE: []}
    launches = []  # what stood before the loop launched last that signals, on its stream
    for operation in operations[:place]:
        if isinstance(operation, Wait):
            here = running[operation.stream]
            here += [other for other in running[operation.other] if other not in here]
        elif isinstance(operation, WaitForLaunch):
            here = running[operation.stream]
            here += [other for other in launches if other not in here]
        else:
            if isinstance(operation, Loop) and operation.signals:
                launches = list(running[operation.stream])
            running[operation.stream].append(operation)
    done.update(running[stream])
    return done


def needs(operation, operations, chunking):
    """What an operation reads or writes over, as the operations that must be done before it."""
    chunks = chunking.chunks

    def of(type_, chunk, **more):
        return [
            other
            for other in operations
            if isinstance(other, type_)
            and other.chunk == chunk
            and all(getattr(other, name) == value for name, value in more.items())
        ]

    if isinstance(operation, InputProduct | FillFlags) and operation.stream == SIDE:
        return [] if getattr(operation, "backward", False) else of(AllocateInputs, operation.chunk)
    if isinstance(operation, Loop) and operation.kind == "forward":
        before = chunks[operation.chunk.number - 1] if operation.chunk.number else None
        return [
            *of(InputProduct, operation.chunk),
            *of(FillFlags, operation.chunk, backward=False),
            *(of(Loop, before, kind="forward") if before else []),
        ]
    if isinstance(operation, Loop) and operation.kind == "backward":
        after = chunks[operation.chunk.number + 1 : operation.chunk.number + 2]
        needed = of(FillFlags, operation.chunk, backward=True)
        needed += of(Loop, operation.chunk, kind="recompute")
        for other in after:
            needed += of(Loop, other, kind="backward")
            if not chunking.overlap:  # its gate gradients are written over
                needed += of(GradientProducts, other)
        return needed
    if isinstance(operation, GradientProducts):
        return of(Loop, operation.chunk, kind="backward")
    if isinstance(operation, FinishWeights):
        return [other for other in operations if isinstance(other, GradientProducts)]
    return []


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("edges", EDGES, ids=str)
def test_nothing_runs_before_what_it_needs(edges, options, reverse):
    """By streams and waits alone: an operation's inputs are done whenever it may begin."""
    chunking = Chunking(edges, reverse, **options)
    for operations in (
        schedule.forward(((chunking,),)),
        schedule.backward(((chunking,),)),
    ):
        assert operations[-1].stream == MAIN
        for place, operation in enumerate(operations):
            done = finished_before(operations, operation.stream, place)
            assert set(needs(operation, operations, chunking)) <= done, operation
        # what is still running on the side stream would outlive the call
        ended = finished_before(operations, MAIN, len(operations))
        waits = (WaitForLaunch, Wait)
        assert {other for other in operations if not isinstance(other, waits)} == ended


@pytest.mark.parametrize("step", [False, True])
def test_products_after_a_loop_that_fork_do_not_wait_for_each_other(step):
    chunking = Chunking(
        (0, 1 if step else 11), mode="single_step" if step else "in_turn", forks=True
    )
    operations = schedule.backward(((chunking,),))
    products = [one for one in operations if isinstance(one, GradientProducts)]
    assert [one.of for one in products] == ["x", "w_ih", "w_hh"]
    assert len({one.stream for one in products}) == 3
    for one in products:
        done = finished_before(operations, one.stream, operations.index(one))
        assert not done & {*products}
    finish = next(place for place, one in enumerate(operations) if isinstance(one, FinishWeights))
    assert {*products} <= finished_before(operations, MAIN, finish)


def to_dx(products):
    return [product for product in products if product.of != "weights"]


def needs_at_once(operation, operations):
    """The same for layers whose directions run at once."""

    def of(types, layer, directions=(0, 1), number=None):
        return [
            other for other in operations
            if isinstance(other, types) and other.layer == layer and other.direction in directions
            and number in (None, other.chunk.number if isinstance(other, OfChunk) else None)
        ]  # fmt: skip

    back = any(isinstance(other, GradientProducts) for other in operations)
    if isinstance(operation, Wait | WaitForLaunch | CutMasks):
        return []
    layer, own = operation.layer, (operation.direction,)
    number = operation.chunk.number if isinstance(operation, OfChunk) else None
    cut = [one for one in operations if isinstance(one, CutMasks)]
    masks = [one for one in cut if one.chunk == getattr(operation, "chunk", None)]
    if isinstance(operation, InputProduct):  # of both directions of the layer below
        room = of(AllocateInputs, layer, own, number)
        return [*of(BeginLayer, layer, own), *of(Loop, layer - 1), *room]
    if isinstance(operation, FillFlags):
        return [*of(BeginLayer, layer, own), *of(AllocateInputs, layer, own, number)]
    if isinstance(operation, Loop) and not back:
        read = of(InputProduct | FillFlags, layer, own, number)
        return [*read, *masks, *(of(Loop, layer, own, number - 1) if number else [])]
    if isinstance(operation, Loop):  # dy is the dx of the layer above, to which both add
        filled, later = of(FillFlags, layer, own, number), of(Loop, layer, own, number + 1)
        dy = to_dx(of(GradientProducts, layer + 1))
        return [*of(BeginLayer, layer, own), *dy, *filled, *later, *masks]
    if isinstance(operation, GradientProducts) and operation.of == "weights":  # of all steps
        return of(Loop, layer, own)
    if isinstance(operation, GradientProducts):  # each adds to what was given before
        before = operations[: operations.index(operation)]
        added = [one for one in to_dx(of(GradientProducts, layer)) if one in before]
        return [*of(Loop, layer, own, number), *added]
    if isinstance(operation, FinishWeights):
        return of(GradientProducts, layer, own)
    return []


@pytest.mark.parametrize("fills", [(), ("forward", "backward")], ids=str)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_both_directions_run_at_once_and_after_what_they_need(overlap, forks, layers, fills):
    more = {"overlap": overlap, "forks": forks, "fills": frozenset(fills)}
    whole = tuple(Chunking((0, 11), back, mode="both_directions", **more) for back in (False, True))
    for operations in (schedule.forward((whole,) * layers), schedule.backward((whole,) * layers)):
        for place, operation in enumerate(operations):
            done = finished_before(operations, operation.stream, place)
            assert {*needs_at_once(operation, operations)} <= done, operation
            if isinstance(operation, Loop):  # neither waits for the other
                other = [
                    one for one in operations
                    if isinstance(one, Loop) and one.layer == operation.layer
                    and one.direction != operation.direction
                ]  # fmt: skip
                assert len(other) == 1
                assert other[0] not in done
        filled = [one for one in operations if isinstance(one, FillFlags)]
        assert len(filled) == (2 * layers if fills else 0)
        ended = finished_before(operations, MAIN, len(operations))
        assert {one for one in operations if not isinstance(one, Wait | WaitForLaunch)} == ended


def both(edges, fills):
    """The chunkings of both directions of a layer that run at once, of 11 steps."""
    mirrored = tuple(11 - edge for edge in reversed(edges))
    return tuple(
        Chunking(cuts, reverse, overlap=True, mode="both_directions", fills=frozenset(fills))
        for cuts, reverse in ((edges, False), (mirrored, True))
    )


@pytest.mark.parametrize("fills", [(), ("forward",)], ids=str)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("edges", EDGES[1:], ids=str)
def test_inputs_of_the_next_chunk_are_multiplied_beside_both_loops(edges, layers, fills):
    """Once both run, and before the loops that follow, each on a stream that nothing else has."""
    pair = both(edges, fills)
    operations = schedule.forward((pair,) * layers)
    for place, operation in enumerate(operations):
        done = finished_before(operations, operation.stream, place)
        assert {*needs_at_once(operation, operations)} <= done, operation
        if isinstance(operation, InputProduct) and operation.chunk.number:
            loops = [
                one for one in operations
                if isinstance(one, Loop) and one.layer == operation.layer
                and one.chunk.number == operation.chunk.number - 1
            ]  # fmt: skip
            assert len(loops) == 2
            assert not {*loops} & done
            assert all(one.signals for one in loops)  # either may begin last
    beside = [one.stream for one in operations if isinstance(one, WaitForLaunch)]
    assert 2 * len({*beside} - {MAIN, SIDE}) == len(beside) == 2 * layers * (len(edges) - 2)
    whole = tuple(
        Chunking((0, 11), back, overlap=True, mode="both_directions") for back in (False, True)
    )
    backward = {one.stream for one in schedule.backward((whole,) * layers)}
    assert not ({*beside} & backward)
    for chunking, direction in zip(pair, (0, 1)):
        ran_chunks = [
            one.chunk for one in operations
            if isinstance(one, Loop) and (one.layer, one.direction) == (0, direction)
        ]  # fmt: skip
        assert tuple(ran_chunks) == chunking.chunks
    ended = finished_before(operations, MAIN, len(operations))
    assert {one for one in operations if not isinstance(one, Wait | WaitForLaunch)} == ended


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_products_of_weights_wait_for_the_launches_of_the_layer_below(layers):
    """Of both loops. Not those of layer 0; each layer has its own stream."""
    whole = tuple(
        Chunking((0, 11), back, overlap=True, mode="both_directions") for back in (False, True)
    )
    operations = schedule.backward((whole,) * layers)
    begun, beside = [], []
    for operation in operations:
        if isinstance(operation, Loop):
            begun.append((operation.layer, operation.direction, operation.signals))
        elif isinstance(operation, WaitForLaunch):
            beside.append((operation.stream, begun[-1]))
        elif isinstance(operation, GradientProducts) and operation.of == "weights":
            assert operation.stream == beside[-1][0] == beside[-2][0]
            assert operation.layer == begun[-1][0] + 1
    assert [loop for _, loop in beside] == [
        (layer, way, True) for layer in reversed(range(layers - 1)) for way in (0, 1)
    ]
    assert len({stream for stream, _ in beside} - {MAIN, SIDE}) == layers - 1
    products = [one for one in operations if isinstance(one, GradientProducts)]
    for layer in range(layers):
        for direction in (0, 1):
            here = {one.of for one in products if (one.layer, one.direction) == (layer, direction)}
            assert here == ({"x", "weights"} if layer else {"all"})


@pytest.mark.parametrize("fills", [(), ("backward",)], ids=str)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("edges", EDGES[1:], ids=str)
def test_dx_of_a_chunk_is_computed_beside_both_loops_of_the_next(edges, layers, fills):
    """Once both run, and before the loops that follow, each on a stream that nothing else has."""
    pair = both(edges, fills)
    operations = schedule.backward((pair,) * layers)
    beside, chunks = set(), len(edges) - 1
    for place, operation in enumerate(operations):
        done = finished_before(operations, operation.stream, place)
        assert {*needs_at_once(operation, operations)} <= done, operation
        if isinstance(operation, Loop):  # else they would share multiprocessors
            given = operations[:place]
            ahead = [one for one in given if isinstance(one, GradientProducts)]
            assert {one for one in ahead if one.stream not in (MAIN, SIDE)} <= done
            number = operation.chunk.number + 1  # of those before, which both have ended
            assert {
                one for one in given
                if isinstance(one, Loop) and (one.layer, one.chunk.number)
                == (operation.layer, number)
            } <= done  # fmt: skip
        if isinstance(operation, GradientProducts) and operation.stream not in (MAIN, SIDE):
            beside.add(operation.stream)
            last = [one for one in operations[:place] if isinstance(one, Loop)][-2:]
            assert all(one.signals and one not in done for one in last)
            assert {one.direction for one in last} == {0, 1}
            waits = [one.stream for one in operations[:place] if isinstance(one, WaitForLaunch)]
            assert waits[-2:] == [operation.stream] * 2
    assert len(beside) == layers * (chunks - 1) + layers - 1
    forward = {one.stream for one in schedule.forward((pair,) * layers)}
    assert not beside & forward
    for chunking, direction in zip(pair, (0, 1)):
        ran_chunks = [
            one.chunk for one in operations
            if isinstance(one, Loop) and (one.layer, one.direction) == (0, direction)
        ]  # fmt: skip
        assert tuple(ran_chunks) == chunking.chunks[::-1]
    ended = finished_before(operations, MAIN, len(operations))
    assert {one for one in operations if not isinstance(one, Wait | WaitForLaunch)} == ended


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
def test_what_the_side_stream_uses_is_taken_before_it_begins(back):
    """And the main stream takes no memory before it has waited, which might be that."""
    whole = (
        Chunking((0, 11), mode="both_directions"),
        Chunking((0, 11), True, mode="both_directions"),
    )
    operations = (schedule.backward if back else schedule.forward)((whole,))
    verbs = [(operation.verb, operation.stream) for operation in operations]
    fork, join = verbs.index(("wait", SIDE)), verbs.index(("wait", MAIN))
    room = [
        place for place, (verb, _) in enumerate(verbs) if verb in ("begin_layer", "allocate_inputs")
    ]
    assert max(room) < fork
    sides = [place for place, (_, stream) in enumerate(verbs) if stream == SIDE]
    assert min(sides) == fork
    assert {stream for _, stream in verbs[sides[1] : join]} == {SIDE}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("edges", EDGES, ids=str)
def test_chunks_cover_every_step_once_and_backward_undoes_forward(edges, reverse):
    chunkings = (one(edges, reverse),)
    forward = ran(schedule.forward(chunkings), "forward")
    backward = ran(schedule.backward(chunkings), "backward")
    assert forward == backward[::-1]
    spans = [(chunk.begin, chunk.end) for chunk in forward]
    assert spans == [*itertools.pairwise(edges)][:: -1 if reverse else 1]
    assert [chunk.number for chunk in forward] == [*range(len(forward))]


def test_products_run_beside_the_loop_of_the_chunk_before():
    operations = schedule.forward((one((0, 2, 5, 11), overlap=True),))
    lines = [(type(operation), operation.stream) for operation in operations]
    room, loop, wait, product, join = (
        (AllocateInputs, MAIN), (Loop, MAIN), (WaitForLaunch, SIDE), (InputProduct, SIDE),
        (Wait, MAIN),
    )  # fmt: skip
    assert lines == [
        (BeginLayer, MAIN), (InputProduct, MAIN),
        room, loop, wait, product, join, room, loop, wait, product, join, loop,
    ]  # fmt: skip
    signals = [operation.signals for operation in operations if isinstance(operation, Loop)]
    assert signals == [True, True, False]


def test_gradient_products_run_beside_the_loop_that_follows():
    fills = frozenset({"backward"})
    operations = schedule.backward((one((0, 2, 5, 11), overlap=True, fills=fills),))
    beside = [
        (type(operation), operation.chunk.number)
        for operation in operations
        if operation.stream == SIDE and isinstance(operation, OfChunk)
    ]
    assert beside == [(FillFlags, 1), (GradientProducts, 2), (FillFlags, 0), (GradientProducts, 1)]
    signals = [operation.signals for operation in operations if isinstance(operation, Loop)]
    assert signals == [True, True, True]


def test_layers_and_directions_one_after_the_other():
    chunkings = (one((0, 4)) + one((0, 4), True),) * 2
    loops = [
        (operation.layer, operation.direction)
        for operation in schedule.forward(chunkings)
        if isinstance(operation, Loop)
    ]
    assert loops == [(0, 0), (0, 1), (1, 0), (1, 1)]
    backward = schedule.backward(chunkings)
    begun = [
        (operation.layer, operation.direction)
        for operation in backward
        if isinstance(operation, BeginLayer)
    ]
    finished = [
        (operation.layer, operation.direction)
        for operation in backward
        if isinstance(operation, FinishWeights)
    ]
    assert begun == finished == [(1, 0), (1, 1), (0, 0), (0, 1)]


def test_masks_lie_between_layers():
    chunkings = (one((0, 4)),) * 3
    forward = schedule.forward(chunkings, dropout=True)
    assert [type(operation) for operation in forward] == (
        [BeginLayer, InputProduct, Loop, Dropout] * 3
    )[:-1]
    backward = [
        (operation.layer, operation.gradient)
        for operation in schedule.backward(chunkings, dropout=True)
        if isinstance(operation, Dropout)
    ]
    assert backward == [(1, False), (1, True), (0, False), (0, True)]


def test_recompute_runs_forward_again_before_each_backward_loop():
    fills = frozenset({"recompute"})
    operations = schedule.backward((one((0, 2, 5), fills=fills),), recompute=True)
    assert [type(operation) for operation in operations] == [
        BeginLayer,
        *[InputProduct, FillFlags, Loop, Loop, GradientProducts] * 2,
        FinishWeights,
    ]
    assert ran(operations, "recompute") == ran(operations, "backward")


def test_a_person_can_read_it():
    lines = schedule.show(schedule.forward((one((0, 2, 5), overlap=True),) * 2, dropout=True))
    assert lines[:6] == [
        "main  begin_layer  layer 0  forward direction",
        "main  input_product  layer 0  forward direction  steps 0 to 2",
        "main  allocate_inputs  layer 0  forward direction  steps 2 to 5",
        "main  loop  forward  layer 0  forward direction  steps 0 to 2",
        "side  wait_for_launch",
        "side  input_product  layer 0  forward direction  steps 2 to 5",
    ]
    assert "main  dropout  of the output  layer 0" in lines


class Recorder:
    """Launches that only note what they are asked for, and on which stream."""

    def __init__(self, fails_at=None):
        self.ran, self.stream, self.fails_at, self.failed = [], MAIN, fails_at, False

    def __getattr__(self, verb):
        def launch(operation):
            if operation is self.fails_at:
                raise RuntimeError("out of memory")
            self.ran.append((verb, self.stream))

        return launch

    @contextmanager
    def on_stream(self, number):
        self.stream = number
        yield
        self.stream = MAIN

    def on_failure(self):
        self.failed = True


def test_the_executor_runs_all_on_their_streams():
    operations = schedule.backward((one((0, 2, 5, 11), overlap=True),))
    recorder = Recorder()
    schedule.execute(operations, recorder)
    assert recorder.ran == [(operation.verb, operation.stream) for operation in operations]
    assert not recorder.failed


def test_a_failure_waits_for_the_side_stream():
    operations = schedule.backward((one((0, 2, 5, 11), overlap=True),))
    recorder = Recorder(fails_at=operations[6])
    with pytest.raises(RuntimeError, match="out of memory"):
        schedule.execute(operations, recorder)
    assert recorder.failed
    assert len(recorder.ran) == 6


def needs_of_wavefront(operation, operations):
    """What must be done before an operation of a wavefront begins, by layers and chunks."""

    def of(types, layer, chunk=None, **more):
        return [
            other for other in operations
            if isinstance(other, types) and other.layer == layer
            and (chunk is None or other.chunk == chunk)
            and all(getattr(other, name) == value for name, value in more.items())
        ]  # fmt: skip

    if isinstance(operation, Wait | WaitForLaunch | CutMasks):
        return []
    layer, back = operation.layer, any(isinstance(other, FinishWeights) for other in operations)
    again = "recompute" in {other.kind for other in operations if isinstance(other, Loop)}
    by_chunk = "all" in {other.of for other in operations if isinstance(other, GradientProducts)}
    of_dx = "all" if by_chunk else "x"
    chunk = getattr(operation, "chunk", None)
    chunks = list(dict.fromkeys(one.chunk for one in operations if isinstance(one, Loop)))
    own = chunks.index(chunk) if chunk in chunks else 0
    begun = of(BeginLayer, layer) if not isinstance(operation, BeginLayer | Dropout) else []
    if isinstance(operation, FillFlags):  # all chunks of a layer may have one buffer
        before = of(Loop, layer, chunks[own - 1]) if own else of(AllocateInputs, layer)
        if by_chunk and own:  # which may be its gate gradients
            before += of(GradientProducts, layer, chunks[own - 1])
        return [*begun, *before]
    if isinstance(operation, Loop):
        before = of(Loop, layer, chunks[own - 1]) if own else []  # its states
        before += of(FillFlags, layer, chunk)
        masks = [one for one in operations if isinstance(one, CutMasks) and one.chunk == chunk]
        if operation.kind == "backward":
            given = [*of(GradientProducts, layer + 1, chunk, of=of_dx), *of(Dropout, layer, chunk)]
        else:
            given = of(InputProduct, layer, chunk)
        if again and operation.kind == "backward":
            given += of(Loop, layer, chunk, kind="recompute")
        if by_chunk and operation.kind == "backward" and own:
            # all chunks of a layer have the same memory for gate gradients
            given += of(GradientProducts, layer, chunks[own - 1])
        return [*begun, *before, *masks, *given]
    if isinstance(operation, InputProduct):  # all chunks of a layer write the same room
        before = of(Loop, layer, chunks[own - 1]) if own else of(AllocateInputs, layer)
        below = [] if back else [*of(Loop, layer - 1, chunk), *of(Dropout, layer - 1, chunk)]
        return [*begun, *before, *below]
    if isinstance(operation, Dropout) and chunk is not None:
        products = of(GradientProducts, layer + 1, chunk, of=of_dx)
        return products if back else [*of(Loop, layer, chunk), *of(BeginLayer, layer + 1)]
    if isinstance(operation, GradientProducts):
        return [*begun, *of(Loop, layer, None if operation.of == "weights" else chunk)]
    if isinstance(operation, FinishWeights):
        return of(GradientProducts, layer)
    return []


GRIDS = {"mode": "wavefront", "loops": 2, "fills": frozenset({"forward", "backward"})}
WAVEFRONTS = {
    "clusters": {"mode": "wavefront", "overlap": True},
    "without launch events": {"mode": "wavefront"},
    "grids": GRIDS,
    "grids with overlap": {**GRIDS, "overlap": True},
    "clusters by chunk": {"mode": "wavefront", "by_chunk": True},
    "grids by chunk": {**GRIDS, "by_chunk": True},
}


@pytest.mark.parametrize("kind", WAVEFRONTS.values(), ids=WAVEFRONTS)
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("edges", EDGES[1:], ids=str)
@pytest.mark.parametrize("layers", [2, 3, 8, pytest.param(11, marks=pytest.mark.slow)])
def test_a_wavefront_runs_nothing_before_what_it_needs(layers, edges, dropout, kind):
    chunkings = ((Chunking(edges, **kind),),) * layers
    grids = "loops" in kind
    passes = [schedule.forward(chunkings, dropout), schedule.backward(chunkings, dropout)]
    if kind.get("by_chunk") and not grids:
        passes.append(schedule.backward(chunkings, dropout, recompute=True))
    for operations in passes:
        loops = [one for one in operations if isinstance(one, Loop)]
        kinds = {one.kind for one in loops}
        assert len({(one.layer, one.chunk) for one in loops}) == layers * (len(edges) - 1)
        assert len(loops) == layers * (len(edges) - 1) * len(kinds)
        products = [one for one in operations if isinstance(one, GradientProducts)]
        if products and kind.get("by_chunk"):
            assert {one.of for one in products} == {"all"}
            assert len(products) == layers * (len(edges) - 1)
        filled = [one for one in operations if isinstance(one, FillFlags)]
        assert len(filled) == (len(loops) if grids else 0)
        if grids:  # of which the device holds two
            assert {one.stream for one in loops} == {MAIN, SIDE}
        for place, operation in enumerate(operations):
            done = finished_before(operations, operation.stream, place)
            assert {*needs_of_wavefront(operation, operations)} <= done, operation
        ended = finished_before(operations, MAIN, len(operations))
        assert {one for one in operations if not isinstance(one, Wait | WaitForLaunch)} == ended


@pytest.mark.parametrize("layers", [2, 3, 9])
def test_products_of_weights_in_a_wavefront_run_beside_the_last_loop_of_the_layer_below(layers):
    """They wait until it is launched, on the stream of their own layer."""
    chunkings = ((Chunking((0, 2, 5, 11), mode="wavefront", overlap=True),),) * layers
    operations = schedule.backward(chunkings)
    for place, operation in enumerate(operations):
        if not (isinstance(operation, GradientProducts) and operation.of == "weights"):
            continue
        loop, wait = operations[place - 2 : place]
        if operation.layer == 0:
            assert not isinstance(wait, WaitForLaunch)
            continue
        assert isinstance(wait, WaitForLaunch)
        assert wait.stream == operation.stream
        assert isinstance(loop, Loop)
        assert (loop.layer, loop.chunk.number, loop.signals) == (operation.layer - 1, 0, True)
    assert sum(one.signals for one in operations if isinstance(one, Loop)) == layers - 1


@pytest.mark.parametrize("kind", WAVEFRONTS.values(), ids=WAVEFRONTS)
@pytest.mark.parametrize("layers", [2, 5, 9])
def test_layers_of_a_wavefront_run_at_the_same_time(layers, kind):
    """A layer's chunk may run beside the next chunk of the layer before."""
    chunkings = ((Chunking((0, 2, 5, 11), **kind),),) * layers
    passes = [
        (schedule.forward(chunkings), "forward"), (schedule.backward(chunkings), "backward"),
    ]  # fmt: skip
    if kind.get("by_chunk"):
        passes.append((schedule.backward(chunkings, recompute=True), "backward"))
    for operations, way in passes:
        place = {
            (one.layer, one.chunk.number): number
            for number, one in enumerate(operations) if isinstance(one, Loop) and one.kind == way
        }  # fmt: skip
        order = range(layers) if way == "forward" else range(layers - 1, -1, -1)
        numbers = range(3) if way == "forward" else range(2, -1, -1)
        for (layer, above), (chunk, later) in itertools.product(
            itertools.pairwise(order), itertools.pairwise(numbers)
        ):
            one, other = place[above, chunk], place[layer, later]
            first, last = sorted((one, other))
            done = finished_before(operations, operations[last].stream, last)
            assert operations[first] not in done


@pytest.mark.parametrize("layers", [2, 5, 8])
def test_in_a_wavefront_forward_runs_again_before_the_layer_above_is_done(layers):
    """It reads no gradients. Where layers share streams it waits for them all the same."""
    chunkings = ((Chunking((0, 2, 5, 11), mode="wavefront", by_chunk=True),),) * layers
    operations = schedule.backward(chunkings, recompute=True)
    for place, loop in enumerate(operations):
        if isinstance(loop, Loop) and loop.kind == "recompute" and loop.layer + 1 < layers:
            done = finished_before(operations, loop.stream, place)
            above = Loop(loop.layer + 1, 0, loop.chunk, "backward", stream=loop.layer + 1)
            assert above in operations
            assert above not in done


def test_a_wavefronts_memory_is_taken_on_the_main_stream_first():
    chunkings = ((Chunking((0, 2, 5, 11), mode="wavefront"),),) * 3
    by_chunk = ((Chunking((0, 2, 5, 11), mode="wavefront", by_chunk=True),),) * 3
    for operations in (
        schedule.forward(chunkings, True), schedule.backward(chunkings, True),
        schedule.backward(by_chunk, True), schedule.backward(by_chunk, True, True),
    ):  # fmt: skip
        fork = next(place for place, one in enumerate(operations) if isinstance(one, Wait))
        room = [
            place for place, one in enumerate(operations)
            if isinstance(one, BeginLayer | AllocateInputs | CutMasks)
        ]  # fmt: skip
        assert max(room) < fork
