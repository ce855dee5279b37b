"""The schedules of calls: their chunks of time, and the operations in order.

Chunks bound the memory of a long call, or let products of one chunk run beside the loop of another.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from openrnn import schedule
from openrnn.backends.base import Needs
from openrnn.backends.fused import kernels, prepared
from openrnn.backends.fused.layer import (
    BackwardFlags,
    Flags,
    ForwardFlags,
    LayerKernels,
    names_of,
)
from openrnn.backends.fused.schedule_key import ScheduleKey
from openrnn.backends.fused.wavefronts import stack_of, wavefront_of
from openrnn.memo import memo
from openrnn.native.side_stream import supported
from openrnn.schedule import Chunking, Schedule
from openrnn.spec import Problem, Spec
from openrnn.tuning import both_directions, chunks, overlap, plan, single_step

Chunkings = tuple[tuple[Chunking, ...], ...]  # of each layer, of each direction


@memo(4096)
def forward(key: ScheduleKey) -> Schedule:
    """The forward pass."""
    problem = key.problem
    if single_step.takes(problem, key.steps, key.batch, key.reset_states):
        return schedule.forward(_one_step(key.spec), problem.drops)
    save = problem.grad and not key.recompute
    on = ForwardFlags(problem.lengths, problem.reset, key.all_states, key.reset_states, save)
    # the model of a step knows no reset states; with recompute it is asked as if forward saved
    flags = plan.deciding("forward", names_of(on._replace(save=problem.grad)))

    def chunking(layer: int, direction: int) -> Chunking:
        here, inner = key.layer(layer, direction), key.spec.layer_input(layer)
        return _cut(key, here, flags, inner, [prepared.loop_for(here, key.batch, on, 1)])

    found = in_one_launch(key, on, flags, False) or in_wavefront(key, on, flags, False)
    if found is None:
        cut = _of_all(key.spec, chunking)
        inputs = key.spec.layer_input
        found = _at_once(key, cut, on, flags, inputs, inputs, False)
    return schedule.forward(found, problem.drops)


@memo(4096)
def backward(key: ScheduleKey, needs: Needs) -> tuple[Chunkings, Schedule]:
    """The backward pass for the gradients that are wanted."""
    problem = key.problem
    before = any(needs.states) or any(needs.reset_states)
    if single_step.differentiates(problem, key.steps, key.batch, before, key.reset_states):
        single = _forked(key, _one_step(key.spec))
        return single, schedule.backward(single, problem.drops)
    masks = problem.lengths, problem.reset
    on = BackwardFlags(*masks, key.all_states, any(needs.reset_states))
    recompute = ForwardFlags(*masks, False, key.reset_states, True)

    def inputs(layer: int) -> int:
        return key.spec.layer_input(layer) if layer > 0 or needs.x else 0

    def columns(layer: int, direction: int = 0) -> int:
        here, inner = key.layer(layer, direction), key.spec.layer_input(layer)
        w_ih, w_hh, *_ = here.places
        wanted = (
            (inputs(layer), True),
            (inner, w_ih is not None and needs.params[w_ih]),
            (here.hidden, w_hh is not None and needs.params[w_hh]),
        )
        return sum(size for size, want in wanted if want)

    def chunking(layer: int, direction: int) -> Chunking:
        here = key.layer(layer, direction)
        loops = [prepared.loop_for(here, key.batch, on, 1)]
        if key.recompute:
            loops.append(prepared.loop_for(here, key.batch, recompute, 1))
        return _cut(key, here, key.masks, columns(layer, direction), loops)

    wanted = any(needs.params)
    found = in_one_launch(key, on, key.masks, wanted)
    found = found or in_wavefront(key, on, key.masks, wanted)
    if found is None:
        cut = _of_all(key.spec, chunking)
        found = _at_once(key, cut, on, key.masks, columns, inputs, wanted)
    found = _forked(key, found)
    return found, schedule.backward(found, problem.drops, key.recompute)


def _fills(kind: str, loop: prepared.PreparedLoop) -> frozenset[str]:
    """`Chunking.fills` of one loop: its kind, if it polls."""
    return frozenset({kind} if loop.polls else ())


def _forked(key: ScheduleKey, found: Chunkings) -> Chunkings:
    """Chunkings whose small products after loops run side by side, if the key asks for that."""
    if not key.forks or found[0][0].wavefront:
        return found
    spec = key.spec
    rows = len(spec.gates) * spec.hidden_size
    if found[0][0].stack:  # one call multiplies all layers but one
        rows *= spec.num_layers - 1
    columns = max(spec.layer_input(0), spec.layer_input(spec.num_layers - 1), spec.hidden_size)
    if not overlap.forks(key.steps, key.batch, rows, columns):
        return found
    return tuple(tuple(replace(one, forks=True) for one in directions) for directions in found)


def _one_step(spec: Spec) -> Chunkings:
    return ((Chunking((0, 1), step=True),) * spec.directions,) * spec.num_layers


def _of_all(spec: Spec, chunking: Callable[[int, int], Chunking]) -> Chunkings:
    return tuple(
        tuple(chunking(layer, direction) for direction in range(spec.directions))
        for layer in range(spec.num_layers)
    )


def _placed(key: ScheduleKey) -> Problem:
    """The problem, with its device."""
    about = torch.cuda.get_device_properties(key.device)
    return replace(
        key.problem, capability=(about.major, about.minor), processors=about.multi_processor_count
    )


def in_one_launch(key: ScheduleKey, on: Flags, flags: plan.Flags, wanted: bool) -> Chunkings | None:
    """All steps of a stack whose layers one launch runs; None where it does not.

    Args: see `in_wavefront`.
    """
    layers = key.spec.num_layers
    if key.reset_states or layers == 1:
        return None
    if stack_of(_placed(key), on.kind, flags, key.steps, key.batch, wanted) is None:
        return None
    try:
        loop = prepared.loop_for(key.layer(0, 0), key.batch, on, 1, layers)
    except kernels.NoKernelError:
        return None
    cut = Chunking((0, key.steps), stack=True, fills=_fills(on.kind, loop))
    return ((cut,),) * layers


def in_wavefront(key: ScheduleKey, on: Flags, flags: plan.Flags, wanted: bool) -> Chunkings | None:
    """The chunks of a stack that runs as a wavefront; None where it runs layer by layer.

    Args:
        on, flags: of the loops.
        wanted: gradients of weights are.
    """
    if key.reset_states or key.spec.num_layers == 1:
        return None
    found = wavefront_of(_placed(key), on.kind, flags, key.steps, key.batch, wanted)
    if found is None:
        return None
    try:
        loop = prepared.loop_for(key.layer(0, 0), key.batch, on, found.loops)
    except kernels.NoKernelError:
        return None
    # the kernel that was loaded may be another than the first of the ranking
    clusters = plan.clusters_of(loop.config, key.batch)
    held = not loop.polls or 1 < found.loops <= loop.kernel.max_clusters // clusters
    if not held or loop.config.stepwise:
        return None
    cut = Chunking(
        chunks.even(found.chunks, key.steps), overlap=wanted and found.loops == 1 and supported(),
        wavefront=True, loops=found.loops, fills=_fills(on.kind, loop),
    )  # fmt: skip
    return ((cut,),) * key.spec.num_layers


def _at_once(
    key: ScheduleKey, found: Chunkings, on: Flags, flags: plan.Flags,
    columns: Callable[[int], int], inputs: Callable[[int], int], wanted: bool,
) -> Chunkings:  # fmt: skip
    """Chunkings in which both directions of a layer run at once where that is quicker.

    Args:
        on, flags: of the loops.
        columns: of a layer's matrices, see `edges`.
        inputs: columns of those of the products that run beside both loops: forward's and dx.
        wanted: gradients of weights are.
    """
    if not key.spec.bidirectional or key.recompute:
        return found

    def above(layer: int) -> int:
        """The columns of the weights of the layer above, whose gradients are wanted."""
        last = layer == key.spec.num_layers - 1
        return 0 if last or not wanted else columns(layer + 1) - key.spec.layer_input(layer + 1)

    def of(layer: int) -> tuple[Chunking, ...]:
        inner, over = inputs(layer), above(layer)
        loops = at_once(key, layer, found[layer], on, flags, columns(layer), inner, over)
        if not loops:
            return found[layer]
        fills = _fills(on.kind, prepared.loop_for(key.layer(layer, 0), key.batch, on, loops))
        cuts = edges_at_once(key, layer, on, flags, inner, over, loops)
        beside = wanted and idle(key, layer, on, flags, loops) > 0
        one = Chunking(
            tuple(cuts or (0, key.steps)), overlap=beside or bool(cuts), at_once=True,
            loops=loops, fills=fills,
        )  # fmt: skip
        mirrored = tuple(key.steps - cut for cut in reversed(one.edges))
        return one, replace(one, edges=mirrored, reverse=True)

    return tuple(of(layer) for layer in range(key.spec.num_layers))


def at_once(
    key: ScheduleKey, layer: int, chunkings: tuple[Chunking, ...], on: Flags, flags: plan.Flags,
    columns: int, inner: int, above: int = 0,
) -> int:  # fmt: skip
    """The loops that run at the same time where both directions of a layer do; 0: in turn.

    They do where the device holds the blocks of both and no memory bounds their chunks, unless
    products that would run beside loops in turn take as long as what is gained.

    Args:
        columns: of the layer's matrices.
        inner: columns of those whose products run beside both loops.
        above: columns of the weights of the layer above.

    Returns:
        how many loops their kernel is chosen for: 1 where the device holds the quickest one twice,
        2 where it holds a slower one that takes less than the two of them in turn.
    """
    if any(len(chunking.chunks) > 1 and not chunking.overlap for chunking in chunkings):
        return 0
    one = key.layer(layer, 0)
    loop = _request(one, on.kind, flags, key.batch)
    beside = _beside_both(key, layer, inner, above)
    try:
        twice = _holds_twice(one, key.batch, on, 1)
        if one.kernel(key.batch, on)[1].clusters > 1:
            # the blocks of two grids that share multiprocessors were not measured
            twice = twice and both_directions.held_twice(loop)
        loops = both_directions.loops(loop, key.steps, twice, beside=beside)
        if loops and chunkings[0].overlap:
            step = _loop_step(one, on.kind, flags, (key.batch + 7) // 8)
            whole = _products_time(key, one, columns)
            lost = 2 * overlap.saved(
                chunkings[0].edges, whole, key.steps * step.us, step.slowdown, step.costs
            )
            if layer and on.kind == "backward" and idle(key, layer, on, flags, loops):
                # its own weights' products run beside the loops of the layer below
                lost -= 2 * _products_time(key, one, columns - key.spec.layer_input(layer))
            loops = both_directions.loops(loop, key.steps, twice, lost, beside)
        return loops if loops < 2 or _holds_twice(one, key.batch, on, 2) else 0
    except kernels.NoKernelError:
        return 0


def idle(key: ScheduleKey, layer: int, on: Flags, flags: plan.Flags, loops: int) -> float:
    """The share of multiprocessors that two loops at once leave for products; 0 for little."""
    if not supported():
        return 0.0
    return both_directions.idle(_request(key.layer(layer, 0), on.kind, flags, key.batch), loops)


def edges_at_once(
    key: ScheduleKey, layer: int, on: Flags, flags: plan.Flags, inner: int, above: int, loops: int
) -> list[int]:
    """Where chunks of the forward direction begin and end, of two loops at once; [] for one."""
    beside = _beside_both(key, layer, inner, above)
    if not beside.own:
        return []
    loop = _request(key.layer(layer, 0), on.kind, flags, key.batch)
    return both_directions.edges(loop, key.steps, beside, loops)


def _beside_both(key: ScheduleKey, layer: int, inner: int, above: int) -> overlap.Beside:
    """The products that run beside both loops of a layer where that pays; see `at_once`."""
    one = key.layer(layer, 0)
    inner = 0 if key.reset_states or one.skips else inner
    found = overlap.beside(partial(_products_time, key, one), inner, above)
    return found if any(found) and supported() else overlap.NOTHING


def _products_time(key: ScheduleKey, layer: LayerKernels, columns: int) -> float:
    rows, size = layer.gates * layer.hidden, layer.dtype.itemsize
    return overlap.products_time(key.steps, key.batch, rows, columns, size)


def _holds_twice(layer: LayerKernels, batch: int, on: Flags, loops: int) -> bool:
    """Whether the device holds two loops of a kernel, by the driver's word."""
    kernel, config = layer.kernel(batch, on, loops)
    return not config.stepwise and 2 * plan.clusters_of(config, batch) <= kernel.max_clusters


def _cut(
    key: ScheduleKey, layer: LayerKernels, flags: plan.Flags, columns: int,
    loops: Sequence[prepared.PreparedLoop],
) -> Chunking:  # fmt: skip
    """The chunks of one layer and direction.

    Args:
        flags: of the loop.
        columns: of all matrices, of G*H rows each, that are multiplied with all steps.
        loops: the loop and, with recompute, forward's that runs again.
    """
    kind = loops[0].config.kind
    fills = frozenset[str]().union(*map(_fills, (kind, "recompute"), loops))
    steps, reverse = key.steps, bool(layer.direction)
    row = layer.width * key.problem.dtype.itemsize  # bytes of the gate gradients of a step and row
    if key.reset_states:
        number = 1  # the gradients of reset states are added up inside one launch
    elif key.recompute:
        number = chunks.for_recompute(steps, key.batch, row)
    else:
        number = chunks.for_memory(steps, key.batch, row)
    stays = key.recompute or key.reset_states or layer.skips or loops[0].config.stepwise
    cuts = [] if number > 1 or stays else edges(layer, kind, flags, steps, key.batch, columns)
    if not cuts:
        return Chunking(chunks.even(number, steps), reverse, fills=fills)
    if reverse:  # the loop runs from the last step to the first
        cuts = [steps - cut for cut in reversed(cuts)]
    return Chunking(tuple(cuts), reverse, overlap=True, fills=fills)


def edges(
    layer: LayerKernels, kind: str, flags: plan.Flags, steps: int, batch: int, columns: int
) -> list[int]:
    """Where chunks whose products run beside loops begin and end; [] where one is as good.

    Args:
        kind, flags: of the loop.
        columns: of all matrices, of G*H rows each, that are multiplied with all steps.
    """
    rows, size = layer.gates * layer.hidden, layer.dtype.itemsize
    products = overlap.products_time(steps, batch, rows, columns, size)
    if not overlap.pays(products):
        return []
    loop = _loop_step(layer, kind, flags, (batch + 7) // 8)
    return overlap.best_edges(
        steps, products, steps * loop.us, loop.idle, loop.slowdown, loop.costs
    )


@memo(4096)
def _loop_step(layer: LayerKernels, kind: str, flags: plan.Flags, tiles: int) -> overlap.LoopStep:
    """A step of the loop on the layer's device, for so many tiles of 8 rows.

    No multiprocessor counts as idle where the driver has no launch completion events.
    """
    step = overlap.loop_step(_request(layer, kind, flags, 8 * tiles))
    return step if supported() else step._replace(idle=0.0)


def _request(layer: LayerKernels, kind: str, flags: plan.Flags, batch: int) -> plan.LoopRequest:
    """A loop of the layer on its device."""
    about = torch.cuda.get_device_properties(layer.device)
    return plan.LoopRequest(
        kind, flags, layer.cell, layer.dtype_name, layer.hidden, -(-batch // 8) * 8,
        (about.major, about.minor), about.multi_processor_count,
    )  # fmt: skip
