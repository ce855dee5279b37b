"""The schedules of calls: their chunks of time, and the operations in order.

Chunks bound the memory of a long call, or let products of one chunk run beside the loop of another.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from openrnn import schedule
from openrnn.backends.base import Needs
from openrnn.backends.fused import kernels, prepared
from openrnn.backends.fused.layer import (
    BackwardOptions,
    ForwardOptions,
    LayerKernels,
    LoopOptions,
    measured_names,
)
from openrnn.backends.fused.schedule_key import ScheduleKey
from openrnn.backends.fused.stack_chunks import Chunkings, fills_of, layers_at_once
from openrnn.memo import memo
from openrnn.native.side_stream import has_launch_events
from openrnn.schedule import Chunking, Schedule
from openrnn.spec import Spec
from openrnn.tuning import both_directions, chunks, overlap, plan, single_step


class LayerLoop(NamedTuple):
    """A loop of one layer and direction."""

    layer_kernels: LayerKernels
    options: LoopOptions
    batch: int

    @property
    def request(self) -> plan.LoopRequest:
        """The loop on its layer's device, as its kernels are ranked."""
        names = measured_names(self.options)
        return self.layer_kernels.request(self.options.kind, names, self.batch)

    def prepare(self, loops: int = 1) -> prepared.PreparedLoop:
        """The loop in the kernel that is ranked for so many at once."""
        return prepared.loop_for(self.layer_kernels, self.batch, self.options, loops)

    def products_us(self, steps: int, columns: int) -> float:
        """Microseconds of the products of all steps with matrices of so many columns in all."""
        layer = self.layer_kernels
        rows, itemsize = layer.gates * layer.hidden, layer.dtype.itemsize
        return overlap.products_time(steps, self.batch, rows, columns, itemsize)

    def driver_fits_twice(self, loops: int) -> bool:
        """Whether the driver says that the device holds two of the kernel ranked for `loops`."""
        kernel, config = self.layer_kernels.kernel(self.batch, self.options, loops)
        return not config.reads_r and plan.holds(kernel.max_clusters, config, self.batch, 2)


class BothLoops(NamedTuple):
    """The loops of both directions of a layer, and the products that may run beside them.

    Attributes:
        key: of the schedule; layer: its number.
        options: of the loops.
        columns: of all matrices, of G*H rows each, that one direction multiplies with all steps.
        input_columns: of those whose products may run beside both loops: forward's, and dx's.
        columns_above: of the weights of the layer above, whose gradients are wanted.
    """

    key: ScheduleKey
    layer: int
    options: LoopOptions
    columns: int
    input_columns: int
    columns_above: int = 0

    @property
    def loop(self) -> LayerLoop:
        """That of the forward direction: both have the same kernel."""
        return LayerLoop(self.key.layer(self.layer, 0), self.options, self.key.batch)

    @property
    def side_products(self) -> overlap.SideProducts:
        """The products that run beside both loops, where that pays."""
        products = both_directions.side_products(
            self.key.call_problem, self.layer, self.input_columns, self.columns_above
        )
        return products if any(products) and has_launch_events() else overlap.NO_SIDE_PRODUCTS


@memo(4096)
def forward(key: ScheduleKey) -> Schedule:
    """The forward pass."""
    problem = key.problem
    if single_step.takes(problem, key.steps, key.batch, key.reset_states):
        return schedule.forward(_one_step(key.spec), problem.drops)
    save = problem.grad and not key.recompute
    options = ForwardOptions(problem.lengths, problem.reset, key.all_states, key.reset_states, save)

    def in_turn(layer: int, direction: int) -> Chunking:
        loop = LayerLoop(key.layer(layer, direction), options, key.batch)
        return _cut(key, loop, key.spec.layer_input(layer))

    chunkings = layers_at_once(key, options, False)
    if chunkings is None:
        inputs = key.spec.layer_input
        pairs = _both_loops(key, options, inputs, inputs)
        chunkings = _with_both_directions(pairs, _of_all(key.spec, in_turn), False)
    return schedule.forward(chunkings, problem.drops)


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
    again = ForwardOptions(*masks, False, key.reset_states, True) if key.recompute else None

    def inputs(layer: int) -> int:
        return key.spec.layer_input(layer) if layer > 0 or needs.x else 0

    def columns(layer: int, direction: int = 0) -> int:
        layer_kernels = key.layer(layer, direction)
        w_ih, w_hh, *_ = layer_kernels.param_indices
        of_w_ih = w_ih is not None and needs.params[w_ih]
        of_w_hh = w_hh is not None and needs.params[w_hh]
        weights = of_w_ih * key.spec.layer_input(layer) + of_w_hh * layer_kernels.hidden
        return inputs(layer) + weights

    def in_turn(layer: int, direction: int) -> Chunking:
        loop = LayerLoop(key.layer(layer, direction), options, key.batch)
        return _cut(key, loop, columns(layer, direction), again)

    wanted = any(needs.params)
    chunkings = layers_at_once(key, options, wanted, again)
    if chunkings is None:
        pairs = _both_loops(key, options, columns, inputs)
        chunkings = _with_both_directions(pairs, _of_all(key.spec, in_turn), wanted)
    chunkings = _forked(key, chunkings)
    return chunkings, schedule.backward(chunkings, problem.drops, key.recompute)


def _forked(key: ScheduleKey, chunkings: Chunkings) -> Chunkings:
    """Chunkings whose small products after loops run side by side, if the key asks for that."""
    mode = chunkings[0][0].mode
    if not key.forks or mode == "wavefront":
        return chunkings
    spec = key.spec
    rows = len(spec.gates) * spec.hidden_size
    if mode == "one_launch":  # one call multiplies all layers but one
        rows *= spec.num_layers - 1
    columns = max(spec.layer_input(0), spec.layer_input(spec.num_layers - 1), spec.hidden_size)
    if not overlap.forks(key.steps, key.batch, rows, columns):
        return chunkings
    return tuple(
        tuple(replace(chunking, forks=True) for chunking in of_layer) for of_layer in chunkings
    )


def _one_step(spec: Spec) -> Chunkings:
    return ((Chunking((0, 1), mode="single_step"),) * spec.directions,) * spec.num_layers


def _of_all(spec: Spec, chunking: Callable[[int, int], Chunking]) -> Chunkings:
    return tuple(
        tuple(chunking(layer, direction) for direction in range(spec.directions))
        for layer in range(spec.num_layers)
    )


def _both_loops(
    key: ScheduleKey, options: LoopOptions, columns: Callable[[int], int],
    inputs: Callable[[int], int],
) -> list[BothLoops]:  # fmt: skip
    """Those of each layer; [] where no two loops run at once.

    Args:
        options: of the loops.
        columns, inputs: of a layer, see `BothLoops`.
    """
    if not key.spec.bidirectional or key.recompute:
        return []
    layers = range(key.spec.num_layers)
    # dx of each layer but the first is wanted: the rest of its columns are weights
    of_weights = [columns(layer) - key.spec.layer_input(layer) for layer in layers[1:]]
    return [
        BothLoops(key, layer, options, columns(layer), inputs(layer), above)
        for layer, above in zip(layers, (*of_weights, 0))
    ]


def _with_both_directions(pairs: list[BothLoops], in_turn: Chunkings, wanted: bool) -> Chunkings:
    """Chunkings in which both directions of a layer run at once where that is quicker.

    Args:
        pairs: of each layer; [] where no two loops run at once.
        in_turn: the chunks of loops one after the other.
        wanted: gradients of weights are.
    """
    if not pairs:
        return in_turn
    return tuple(
        _at_once(pair, chunkings, wanted) for pair, chunkings in zip(pairs, in_turn, strict=True)
    )


def _at_once(pair: BothLoops, in_turn: tuple[Chunking, ...], wanted: bool) -> tuple[Chunking, ...]:
    """The same for one layer."""
    loops = choose_both_directions(pair, in_turn)
    if loops == both_directions.IN_TURN:
        return in_turn
    fills = fills_of(pair.options.kind, pair.loop.prepare(loops))
    steps, inner_edges = pair.key.steps, edges_of_both(pair, loops)
    overlaps = wanted and idle(pair, loops) > 0
    first = Chunking(
        tuple(inner_edges or (0, steps)), mode="both_directions",
        overlap=overlaps or bool(inner_edges), loops=loops, fills=fills,
    )  # fmt: skip
    mirrored = tuple(steps - edge for edge in reversed(first.edges))
    return first, replace(first, edges=mirrored, reverse=True)


def choose_both_directions(pair: BothLoops, in_turn: tuple[Chunking, ...]) -> int:
    """For how many loops at once the kernel of both directions is ranked; `IN_TURN`: one by one.

    They run at once where the device holds the blocks of both and no memory bounds their chunks,
    unless products that would run beside loops in turn take as long as what is gained.

    Args:
        in_turn: the chunks of both loops one after the other.

    Returns:
        as `both_directions.loops_to_fit`.
    """
    if any(len(chunking.chunks) > 1 and not chunking.overlap for chunking in in_turn):
        return both_directions.IN_TURN
    loop, steps = pair.loop, pair.key.steps
    request, products = loop.request, pair.side_products
    try:
        twice = loop.driver_fits_twice(1)
        if loop.layer_kernels.kernel(loop.batch, loop.options)[1].is_cooperative:
            # the blocks of two grids that share multiprocessors were not measured
            twice = twice and both_directions.fits_twice(request)
        loops = both_directions.loops_to_fit(request, steps, twice, beside=products)
        if loops != both_directions.IN_TURN and in_turn[0].overlap:
            step = _loop_step(loop)
            lost = 2 * overlap.saved(
                in_turn[0].edges, loop.products_us(steps, pair.columns), steps * step.us,
                step.slowdown, step.costs,
            )  # fmt: skip
            back = pair.layer > 0 and pair.options.kind == "backward"
            if back and idle(pair, loops):
                # its own weights' products run beside the loops of the layer below
                of_weights = pair.columns - pair.key.spec.layer_input(pair.layer)
                lost -= 2 * loop.products_us(steps, of_weights)
            # asked again: what is lost depends on the kernel that the first answer chooses
            loops = both_directions.loops_to_fit(request, steps, twice, lost, products)
        fits = loops < 2 or loop.driver_fits_twice(2)
        return loops if fits else both_directions.IN_TURN
    except kernels.NoKernelError:
        return both_directions.IN_TURN


def idle(pair: BothLoops, loops: int) -> float:
    """The share of multiprocessors that two loops at once leave for products; 0 for little."""
    return both_directions.idle(pair.loop.request, loops) if has_launch_events() else 0.0


def edges_of_both(pair: BothLoops, loops: int) -> list[int]:
    """Where chunks of the forward direction begin and end, of two loops at once; [] for one."""
    products = pair.side_products
    if not products.own_us:
        return []
    return both_directions.edges(pair.loop.request, pair.key.steps, products, loops)


def _cut(
    key: ScheduleKey, loop: LayerLoop, columns: int, again: ForwardOptions | None = None
) -> Chunking:
    """The chunks of one layer and direction.

    Args:
        columns: of all matrices, of G*H rows each, that are multiplied with all steps.
        again: of forward's loop where backward runs it once more.
    """
    layer, prepared_loop = loop.layer_kernels, loop.prepare()
    fills = fills_of(loop.options.kind, prepared_loop)
    if again is not None:
        fills |= fills_of("recompute", loop._replace(options=again).prepare())
    steps, reverse = key.steps, bool(layer.direction)
    row = layer.width * key.problem.dtype.itemsize  # bytes of the gate gradients of a step and row
    if key.reset_states:
        number = 1  # backward adds up the states' gradients in one launch; forward: not built
    elif key.recompute:
        number = layer.kept_chunks(steps, key.batch)
    else:
        number = chunks.for_memory(steps, key.batch, row)
    stays = key.recompute or key.reset_states or layer.no_input_matrix
    beside: list[int] = []
    if number == 1 and not stays and not prepared_loop.config.reads_r:
        beside = edges(loop, steps, columns)
    if not beside:
        return Chunking(chunks.even(number, steps), reverse, fills=fills)
    if reverse:  # the loop runs from the last step to the first
        beside = [steps - edge for edge in reversed(beside)]
    return Chunking(tuple(beside), reverse, overlap=True, fills=fills)


def edges(loop: LayerLoop, steps: int, columns: int) -> list[int]:
    """The edges of chunks whose products run beside the loop of another; [] if one is as quick.

    Args:
        columns: of all matrices, of G*H rows each, that are multiplied with all steps.
    """
    products = loop.products_us(steps, columns)
    if not overlap.pays(products):
        return []
    step = _loop_step(loop)
    return overlap.best_edges(
        steps, products, steps * step.us, step.idle, step.slowdown, step.costs
    )


@memo(4096)
def _loop_step(loop: LayerLoop) -> overlap.LoopStep:
    """A step of the loop on the layer's device.

    No multiprocessor counts as idle where the driver has no launch completion events.
    """
    step = overlap.loop_step(loop.request)
    return step if has_launch_events() else step._replace(idle=0.0)
