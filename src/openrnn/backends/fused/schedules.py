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
    BackwardOptions,
    ForwardOptions,
    LayerKernels,
    LoopOptions,
    names_of,
)
from openrnn.backends.fused.schedule_key import ScheduleKey
from openrnn.backends.fused.stack_chunks import Chunkings, fills_of, layers_at_once
from openrnn.codegen.tiles import tiles_of
from openrnn.memo import memo
from openrnn.native.side_stream import has_launch_events
from openrnn.schedule import Chunking, Schedule
from openrnn.spec import Spec
from openrnn.tuning import both_directions, chunks, overlap, plan, single_step


@memo(4096)
def forward(key: ScheduleKey) -> Schedule:
    """The forward pass."""
    problem = key.problem
    if single_step.takes(problem, key.steps, key.batch, key.reset_states):
        return schedule.forward(_one_step(key.spec), problem.drops)
    save = problem.grad and not key.recompute
    options = ForwardOptions(problem.lengths, problem.reset, key.all_states, key.reset_states, save)
    option_names = plan.measured_options("forward", names_of(options))

    def chunking(layer: int, direction: int) -> Chunking:
        here, inner = key.layer(layer, direction), key.spec.layer_input(layer)
        loop = prepared.loop_for(here, key.batch, options, 1)
        return _cut(key, here, option_names, inner, [loop])

    found = layers_at_once(key, options, option_names, False)
    if found is None:
        cut = _of_all(key.spec, chunking)
        inputs = key.spec.layer_input
        found = _with_both_directions(key, cut, options, option_names, inputs, inputs, False)
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
    options = BackwardOptions(*masks, key.all_states, any(needs.reset_states))
    recompute = ForwardOptions(*masks, False, key.reset_states, True)

    def inputs(layer: int) -> int:
        return key.spec.layer_input(layer) if layer > 0 or needs.x else 0

    def columns(layer: int, direction: int = 0) -> int:
        here, inner = key.layer(layer, direction), key.spec.layer_input(layer)
        w_ih, w_hh, *_ = here.param_indices
        wanted = (
            (inputs(layer), True),
            (inner, w_ih is not None and needs.params[w_ih]),
            (here.hidden, w_hh is not None and needs.params[w_hh]),
        )
        return sum(size for size, want in wanted if want)

    def chunking(layer: int, direction: int) -> Chunking:
        here = key.layer(layer, direction)
        loops = [prepared.loop_for(here, key.batch, options, 1)]
        if key.recompute:
            loops.append(prepared.loop_for(here, key.batch, recompute, 1))
        return _cut(key, here, key.mask_names, columns(layer, direction), loops)

    wanted = any(needs.params)
    found = layers_at_once(key, options, key.mask_names, wanted)
    if found is None:
        cut = _of_all(key.spec, chunking)
        found = _with_both_directions(key, cut, options, key.mask_names, columns, inputs, wanted)
    found = _forked(key, found)
    return found, schedule.backward(found, problem.drops, key.recompute)


def _forked(key: ScheduleKey, found: Chunkings) -> Chunkings:
    """Chunkings whose small products after loops run side by side, if the key asks for that."""
    if not key.forks or found[0][0].mode == "wavefront":
        return found
    spec = key.spec
    rows = len(spec.gates) * spec.hidden_size
    if found[0][0].mode == "one_launch":  # one call multiplies all layers but one
        rows *= spec.num_layers - 1
    columns = max(spec.layer_input(0), spec.layer_input(spec.num_layers - 1), spec.hidden_size)
    if not overlap.forks(key.steps, key.batch, rows, columns):
        return found
    return tuple(tuple(replace(one, forks=True) for one in directions) for directions in found)


def _one_step(spec: Spec) -> Chunkings:
    return ((Chunking((0, 1), mode="single_step"),) * spec.directions,) * spec.num_layers


def _of_all(spec: Spec, chunking: Callable[[int, int], Chunking]) -> Chunkings:
    return tuple(
        tuple(chunking(layer, direction) for direction in range(spec.directions))
        for layer in range(spec.num_layers)
    )


def _with_both_directions(
    key: ScheduleKey, found: Chunkings, options: LoopOptions, option_names: plan.OptionNames,
    columns: Callable[[int], int], inputs: Callable[[int], int], wanted: bool,
) -> Chunkings:  # fmt: skip
    """Chunkings in which both directions of a layer run at once where that is quicker.

    Args:
        options, option_names: of the loops.
        columns: of a layer's matrices, see `edges`.
        inputs: columns of those of the products that run beside both loops: forward's and dx.
        wanted: gradients of weights are.
    """
    if not key.spec.bidirectional or key.recompute:
        return found

    def columns_above(layer: int) -> int:
        """The columns of the weights of the layer above, whose gradients are wanted."""
        above = layer + 1  # whose dx is wanted, as this layer has to have it
        last = above == key.spec.num_layers
        return 0 if last else columns(above) - key.spec.layer_input(above)

    def chunkings_of(layer: int) -> tuple[Chunking, ...]:
        inner, above = inputs(layer), columns_above(layer)
        loops = choose_both_directions(
            key, layer, found[layer], options, option_names, columns(layer), inner, above
        )
        if loops == both_directions.IN_TURN:
            return found[layer]
        loop = prepared.loop_for(key.layer(layer, 0), key.batch, options, loops)
        fills = fills_of(options.kind, loop)
        cuts = edges_of_both(key, layer, options, option_names, inner, above, loops)
        overlaps = wanted and idle(key, layer, options, option_names, loops) > 0
        one = Chunking(
            tuple(cuts or (0, key.steps)), mode="both_directions", overlap=overlaps or bool(cuts),
            loops=loops, fills=fills,
        )  # fmt: skip
        mirrored = tuple(key.steps - cut for cut in reversed(one.edges))
        return one, replace(one, edges=mirrored, reverse=True)

    return tuple(chunkings_of(layer) for layer in range(key.spec.num_layers))


def choose_both_directions(
    key: ScheduleKey, layer: int, chunkings: tuple[Chunking, ...], options: LoopOptions,
    option_names: plan.OptionNames, columns: int, inner: int, above: int = 0,
) -> int:  # fmt: skip
    """For how many loops at once the kernel of both directions is ranked; `IN_TURN`: one by one.

    They run at once where the device holds the blocks of both and no memory bounds their chunks,
    unless products that would run beside loops in turn take as long as what is gained.

    Args:
        columns: of the layer's matrices.
        inner: columns of those whose products run beside both loops.
        above: columns of the weights of the layer above.

    Returns:
        as `both_directions.loops_to_fit`.
    """
    if any(len(chunking.chunks) > 1 and not chunking.overlap for chunking in chunkings):
        return both_directions.IN_TURN
    one = key.layer(layer, 0)
    loop = _request(one, options.kind, option_names, key.batch)
    products = _products_beside_loops(key, layer, inner, above)
    try:
        twice = _driver_fits_twice(one, key.batch, options, 1)
        if one.kernel(key.batch, options)[1].is_cooperative:
            # the blocks of two grids that share multiprocessors were not measured
            twice = twice and both_directions.fits_twice(loop)
        loops = both_directions.loops_to_fit(loop, key.steps, twice, beside=products)
        if loops != both_directions.IN_TURN and chunkings[0].overlap:
            step = _loop_step(one, options.kind, option_names, tiles_of(key.batch))
            whole = _products_time(key, one, columns)
            lost = 2 * overlap.saved(
                chunkings[0].edges, whole, key.steps * step.us, step.slowdown, step.costs
            )
            back = layer > 0 and options.kind == "backward"
            if back and idle(key, layer, options, option_names, loops):
                # its own weights' products run beside the loops of the layer below
                lost -= 2 * _products_time(key, one, columns - key.spec.layer_input(layer))
            # asked again: what is lost depends on the kernel that the first answer chooses
            loops = both_directions.loops_to_fit(loop, key.steps, twice, lost, products)
        fits = loops < 2 or _driver_fits_twice(one, key.batch, options, 2)
        return loops if fits else both_directions.IN_TURN
    except kernels.NoKernelError:
        return both_directions.IN_TURN


def idle(
    key: ScheduleKey, layer: int, options: LoopOptions, option_names: plan.OptionNames, loops: int
) -> float:
    """The share of multiprocessors that two loops at once leave for products; 0 for little."""
    if not has_launch_events():
        return 0.0
    return both_directions.idle(
        _request(key.layer(layer, 0), options.kind, option_names, key.batch), loops
    )


def edges_of_both(
    key: ScheduleKey, layer: int, options: LoopOptions, option_names: plan.OptionNames, inner: int,
    above: int, loops: int,
) -> list[int]:  # fmt: skip
    """Where chunks of the forward direction begin and end, of two loops at once; [] for one."""
    products = _products_beside_loops(key, layer, inner, above)
    if not products.own_us:
        return []
    loop = _request(key.layer(layer, 0), options.kind, option_names, key.batch)
    return both_directions.edges(loop, key.steps, products, loops)


def _products_beside_loops(
    key: ScheduleKey, layer: int, inner: int, above: int
) -> overlap.SideProducts:
    """The products that run beside both loops of a layer, where that pays."""
    one = key.layer(layer, 0)
    inner = 0 if key.reset_states or one.no_input_matrix else inner
    found = overlap.side_products(partial(_products_time, key, one), inner, above)
    return found if any(found) and has_launch_events() else overlap.NO_SIDE_PRODUCTS


def _products_time(key: ScheduleKey, layer: LayerKernels, columns: int) -> float:
    rows, size = layer.gates * layer.hidden, layer.dtype.itemsize
    return overlap.products_time(key.steps, key.batch, rows, columns, size)


def _driver_fits_twice(layer: LayerKernels, batch: int, options: LoopOptions, loops: int) -> bool:
    """Whether the driver says that the device holds two loops of the kernel ranked for `loops`."""
    kernel, config = layer.kernel(batch, options, loops)
    return not config.reads_r and plan.holds(kernel.max_clusters, config, batch, 2)


def _cut(
    key: ScheduleKey, layer: LayerKernels, option_names: plan.OptionNames, columns: int,
    loops: Sequence[prepared.PreparedLoop],
) -> Chunking:  # fmt: skip
    """The chunks of one layer and direction.

    Args:
        option_names: of the loop.
        columns: of all matrices, of G*H rows each, that are multiplied with all steps.
        loops: the loop and, with recompute, forward's that runs again.
    """
    kind = loops[0].config.kind
    fills = frozenset[str]().union(*map(fills_of, (kind, "recompute"), loops))
    steps, reverse = key.steps, bool(layer.direction)
    row = layer.width * key.problem.dtype.itemsize  # bytes of the gate gradients of a step and row
    if key.reset_states:
        number = 1  # backward adds up the states' gradients in one launch; forward: not built
    elif key.recompute:
        number = chunks.for_recompute(steps, key.batch, row)
    else:
        number = chunks.for_memory(steps, key.batch, row)
    stays = key.recompute or key.reset_states or layer.no_input_matrix or loops[0].config.reads_r
    cuts: list[int] = []
    if number == 1 and not stays:
        cuts = edges(layer, kind, option_names, steps, key.batch, columns)
    if not cuts:
        return Chunking(chunks.even(number, steps), reverse, fills=fills)
    if reverse:  # the loop runs from the last step to the first
        cuts = [steps - cut for cut in reversed(cuts)]
    return Chunking(tuple(cuts), reverse, overlap=True, fills=fills)


def edges(
    layer: LayerKernels, kind: str, option_names: plan.OptionNames, steps: int, batch: int,
    columns: int,
) -> list[int]:  # fmt: skip
    """The edges of chunks whose products run beside the loop of another; [] if one is as quick.

    Args:
        kind, option_names: of the loop.
        columns: of all matrices, of G*H rows each, that are multiplied with all steps.
    """
    rows, size = layer.gates * layer.hidden, layer.dtype.itemsize
    products = overlap.products_time(steps, batch, rows, columns, size)
    if not overlap.pays(products):
        return []
    loop = _loop_step(layer, kind, option_names, tiles_of(batch))
    return overlap.best_edges(
        steps, products, steps * loop.us, loop.idle, loop.slowdown, loop.costs
    )


@memo(4096)
def _loop_step(
    layer: LayerKernels, kind: str, option_names: plan.OptionNames, tiles: int
) -> overlap.LoopStep:
    """A step of the loop on the layer's device, for so many tiles of 8 rows.

    No multiprocessor counts as idle where the driver has no launch completion events.
    """
    step = overlap.loop_step(_request(layer, kind, option_names, 8 * tiles))
    return step if has_launch_events() else step._replace(idle=0.0)


def _request(
    layer: LayerKernels, kind: str, option_names: plan.OptionNames, batch: int
) -> plan.LoopRequest:
    """A loop of the layer on its device."""
    about = torch.cuda.get_device_properties(layer.device)
    return plan.LoopRequest(
        kind=kind, option_names=option_names, cell=layer.cell, dtype=layer.dtype_name,
        hidden=layer.hidden, batch=batch, capability=(about.major, about.minor),
        processors=about.multi_processor_count,
    )  # fmt: skip
