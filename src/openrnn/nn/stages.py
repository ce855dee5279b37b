"""A stack in stages, each of some layers on a device: chunks of time go from one to the next.

A stage runs chunk k after its own chunk k - 1, and after the stage below has run chunk k. One
thread launches the whole forward pass in the order of `schedule/wavefront.py`, and the whole
backward pass in the opposite one. (Autograd would run backward with a thread for each device, and
these would wait for each other's Python.) Launching can take longer than the GPUs need, so chunks
of the same shape run by a `PreparedCall` of the backend, which decides nothing anew.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openrnn import arguments, op, philox, tensors, time_reversed
from openrnn.backends.base import Needs, result_shapes
from openrnn.dispatch import BACKENDS
from openrnn.memo import memo
from openrnn.nn.links import Links, current_streams
from openrnn.params import module_slots
from openrnn.route import Route, call_of
from openrnn.schedule.wavefront import diagonals
from openrnn.spec import Spec

KINDS = 64  # shapes of chunks that a stage remembers
ONCE = "seen once"

Gradients = list[Tensor | None]


class Stage(NamedTuple):
    """Layers of a stack on one device; `weights` says which of the stack's `module_slots`."""

    spec: Spec
    device: torch.device
    layers: slice
    weights: slice


@memo(1024)
def cut(spec: Spec, devices: tuple[torch.device, ...]) -> tuple[Stage, ...]:
    """The layers of a stack of one direction, dealt evenly: the first stages may have one more."""
    least, more = divmod(spec.num_layers, len(devices))
    layer_of = [slot.chain for slot in module_slots(spec)]
    begin, made = 0, []
    for index, device in enumerate(devices):
        end = begin + least + (index < more)
        own = spec.with_(
            num_layers=end - begin, input_size=spec.layer_input(begin),
            input_mode="linear" if begin else spec.input_mode,
        )  # fmt: skip
        weights = slice(*(sum(layer < bound for layer in layer_of) for bound in (begin, end)))
        made.append(Stage(own, device, slice(begin, end), weights))
        begin = end
    return tuple(made)


class Group(NamedTuple):
    """Tensors of a stage besides its input that may need gradients; or a truth value for each."""

    states: Sequence[Any]
    params: Sequence[Any]
    resets: Sequence[Any]

    @property
    def flat(self) -> tuple[Any, ...]:
        return (*self.states, *self.params, *self.resets)


@dataclass(slots=True)
class Plan:
    """All of a call but its differentiable tensors.

    Attributes:
        routes: how each stage runs.
        chunks: the steps of each.
        masks: lengths, reset and seed, by stage, then by chunk.
        drop: the probability of dropout between stages.
        generators: what draws these masks, by stage; None: torch's own generator.
        known: by stage, the `PreparedCall` of each kind of chunk; None where none may be used.
    """

    stages: Sequence[Stage]
    routes: list[Route]
    chunks: list[slice]
    masks: list[list[tuple[Tensor | None, Tensor | None, Tensor | None]]]
    drop: float
    generators: list[torch.Generator | None]
    known: list[dict[Hashable, Any] | None]

    @property
    def devices(self) -> list[torch.device]:
        """Those of the stages."""
        return [stage.device for stage in self.stages]

    def inputs(self, d: int, k: int, x: Tensor, states: Any, group: Group) -> tuple[Any, ...]:
        """What stage d reads for chunk k, as operators take it."""
        lengths, reset, seed = self.masks[d][k]
        return x, states, group.params, lengths, reset, group.resets, seed

    def prepared(self, d: int, x: Tensor, states: Sequence[Tensor], params: Any) -> Any:
        """The prepared call for chunks like this one, from the second of them on; or None."""
        known, kind = self.known[d], (x.shape, x.stride(), len(states))
        if known is None:
            return None
        if kind not in known:
            if len(known) >= KINDS:
                known.clear()
            known[kind] = ONCE
            return None
        if known[kind] is ONCE:
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                return None  # memory of a dry run would stay in the pool of the graph
            known[kind] = self._made(d, x, states, params)
        return known[kind]

    def _made(self, d: int, x: Tensor, states: Sequence[Tensor], params: Any) -> Any:
        route = self.routes[d]
        backend = BACKENDS[route.constants.backend]
        call = call_of(route, (x, states, params, None, None, (), None))
        shapes = result_shapes(route.problem, *x.shape[:2])
        if not route.constants.grad:
            return backend.prepare(call, shapes)
        given = [tuple(each.shape) for each in (x, *states)]
        return backend.prepare_grad(call, shapes, given)


class SavedChunk(NamedTuple):
    """What backward needs of a chunk in a stage.

    Attributes:
        mask: of the dropout between this stage and the next.
        prepared: the `PreparedGradCall` that ran forward; None: another call did.
    """

    x: Tensor
    states: Sequence[Tensor]
    y: Tensor
    reserve: Sequence[Tensor]
    mask: Tensor | None
    prepared: Any


Chunks = dict[tuple[int, int], SavedChunk]  # by stage and chunk


def forward(
    plan: Plan, x: Tensor, groups: Sequence[Group], links: Links
) -> tuple[list[Tensor], Chunks]:
    """y, final states, and all states if asked for, on the last device; what backward needs."""
    stages, count = plan.stages, len(plan.stages[0].spec.states)
    home, shape = stages[-1].device, x.shape[:2]
    states: list[Sequence[Tensor]] = [group.states for group in groups]
    every: list[list[list[Tensor]]] = [[] for _ in stages]
    outputs: list[Tensor] = []
    kept: Chunks = {}
    buffers = [
        links.receive_buffer((*shape, below.spec.output_size), x.dtype, below.device, above.device)
        for below, above in pairwise(stages)
    ]
    arriving = [x] * len(stages)
    for d, k in chain.from_iterable(diagonals(len(stages), len(plan.chunks))):
        links.use(stages[d].device)
        steps, route, mask = plan.chunks[k], plan.routes[d], None
        part = arriving[d] if d else x[steps]
        (y, *rest), prepared = _run(plan, d, k, part, states[d], groups[d])
        before, states[d] = states[d], rest[:count]
        every[d].append(rest[count : route.visible - 1])
        if d < len(stages) - 1:
            sent = y
            if plan.drop:
                mask = torch.empty_like(y, dtype=torch.bool)
                mask.bernoulli_(1 - plan.drop, generator=plan.generators[d])
                sent = _dropped(y, mask, plan.drop)
            arriving[d + 1] = links.send(sent, stages[d + 1].device, buffers[d], steps)
        else:
            outputs.append(y)
        if route.constants.grad:
            kept[d, k] = SavedChunk(part, before, y, rest[route.visible - 1 :], mask, prepared)
    finals = [[links.send(state, home) for state in own] for own in states]
    whole = [[links.send(_joined(found, 1), home) for found in zip(*chunks)] for chunks in every]
    links.use(home)
    layers = chain(zip(*finals), zip(*whole))
    return [_joined(outputs), *map(_joined, layers)], kept


def _run(
    plan: Plan, d: int, k: int, x: Tensor, states: Sequence[Tensor], group: Group
) -> tuple[list[Tensor], Any]:
    """Chunk k in stage d: y, states (all, if asked for), the reserve; the prepared call, if any."""
    prepared = plan.prepared(d, x, states, group.params)
    found = None if prepared is None else prepared((x, *group.params, *states))
    if found is not None:
        return found, prepared
    return op.eager(plan.routes[d], *plan.inputs(d, k, x, states, group)), None


def backward(
    plan: Plan,
    groups: Sequence[Group],
    kept: Chunks,
    grads: Sequence[Tensor | None],
    wanted: tuple[bool, Sequence[Group]],
    links: Links,
    last_time: bool,
) -> list[Tensor | None]:
    """The gradients of x and of the tensors of each stage.

    Args:
        grads: of what `forward` returned.
        wanted: whether the gradient of x is wanted; those of each stage.
        last_time: nobody reads `kept` again, so it may be overwritten.
    """
    stages, count, number = plan.stages, len(plan.stages[0].spec.states), len(plan.chunks)
    last, y = len(stages) - 1, grads[0]
    totals: list[Gradients] = [[None] * len((*group.params, *group.resets)) for group in groups]
    dx: list[Tensor] = []
    # finals, then the states of all steps, as each stage has them
    carried, along = (
        [[g if g is None else links.send(g[at.layers], at.device) for g in given] for at in stages]
        for given in (grads[1 : 1 + count], grads[1 + count :])
    )
    x = next(iter(kept.values())).x  # of any chunk
    shape = plan.chunks[-1].stop, x.shape[1]
    buffers = [
        links.receive_buffer((*shape, below.spec.output_size), x.dtype, above.device, below.device)
        for below, above in pairwise(stages)
    ]
    arriving: Gradients = [None] * len(stages)
    for stage_index, turn in chain.from_iterable(diagonals(len(stages), number)):
        d, k = last - stage_index, number - 1 - turn
        if (d, k) not in kept:
            continue
        links.use(stages[d].device)
        own, group, steps = kept[d, k], groups[d], plan.chunks[k]
        dy = arriving[d] if d < last else y if y is None else y[steps]
        if own.mask is not None and dy is not None:
            dy = _dropped(dy, own.mask, plan.drop)
        reached = [dy, *carried[d], *(g if g is None else g[:, steps] for g in along[d])]
        wants = wanted[1][d]
        needs = Needs(
            (d - 1, k) in kept if d else wanted[0],
            (True,) * count if k else tuple(wants.states),
            tuple(wants.params), tuple(wants.resets),
        )  # fmt: skip
        back, carried[d], found = _run_back(plan, d, k, own, group, reached, needs, last_time)
        totals[d] = _sums(totals[d], found)
        if back is not None and d:
            arriving[d - 1] = links.send(back, stages[d - 1].device, buffers[d - 1], steps)
        elif back is not None:
            dx.insert(0, back)
    flat: Gradients = [None]
    for d, (group, total) in enumerate(zip(groups, totals)):
        links.use(stages[d].device)
        if dx and not d:
            flat = [_joined(dx)]
        flat += carried[d] if (d, 0) in kept else [None] * len(group.states)
        whole = zip(total, (*group.params, *group.resets))
        flat += [grad if grad is None else grad.to(given.dtype) for grad, given in whole]
    return flat


def _run_back(
    plan: Plan, d: int, k: int, own: SavedChunk, group: Group, reached: Gradients, needs: Needs,
    last_time: bool,
) -> tuple[Tensor | None, Gradients, Gradients]:  # fmt: skip
    """The gradients of a chunk's x, of its states, of parameters and reset states."""
    every, params = (own.x, *group.params, *own.states), len(group.params)
    if own.prepared is not None and own.prepared.ready(every):
        flags = needs.x, *needs.params, *needs.states
        back, *found = own.prepared.backward(every, [own.y, *own.reserve], reached, flags)
        return back, found[params:], found[:params]
    call = call_of(plan.routes[d], plan.inputs(d, k, own.x, own.states, group))
    call.may_overwrite_reserve = last_time
    backend, given = BACKENDS[plan.routes[d].constants.backend], op.cotangents(call, reached)
    grads = time_reversed.backward(backend, call, own.y, [*own.reserve], given, needs)
    return grads.x, grads.states, [*grads.params, *grads.reset_states]


class _OfStage(torch.autograd.Function):
    """The identity, so that a leaf gets its gradient from a node of its own device.

    Autograd expects all gradients of a node on one stream, that of its first output, and warns
    where a leaf of another device gets one.
    """

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return given

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


class _Pipelined(torch.autograd.Function):
    """`forward` and `backward` as one autograd function."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, counts: list[tuple[int, ...]], x: Tensor, *flat: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.plan, ctx.counts, ctx.streams = plan, counts, current_streams(plan.devices)
        with Links(ctx.streams) as links:
            made, kept = forward(plan, x, _groups(counts, iter(flat)), links)
        ctx.kept = [(k, len(own.states), len(own.reserve), own.prepared) for k, own in kept.items()]
        tensors = [(own.x, own.y, own.mask, *own.states, *own.reserve) for own in kept.values()]
        ctx.save_for_backward(*flat, *chain(*tensors))
        ctx.set_materialize_grads(False)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        given, plain = tensors.gradients(grads)
        if torch.is_grad_enabled() or not plain:
            raise ValueError(
                "a Pipeline has first derivatives alone, one gradient at a time: for others call "
                "the layer that it was made of on one device"
            )
        saved, flags = iter(ctx.saved_tensors), ctx.needs_input_grad[2:]
        groups, kept = _groups(ctx.counts, saved), {}
        for index, states, reserve, prepared in ctx.kept:
            # hooks of saved tensors may have changed them
            every = [
                tensors.check_own_memory("a saved tensor", next(saved)) for _ in range(3 + states)
            ]
            x, y, mask, *before = every
            kept[index] = SavedChunk(x, before, y, [*islice(saved, reserve)], mask, prepared)
        for d, (stage, group) in enumerate(zip(ctx.plan.stages, groups)):
            if (d, 0) in kept:
                inputs = ctx.plan.inputs(d, 0, kept[d, 0].x, kept[d, 0].states, group)
                _, _, params, _, _, resets, _ = arguments.check_operator_inputs(stage.spec, inputs)
                groups[d] = Group(group.states, params, resets)
        wanted = flags[0], _groups(ctx.counts, iter(flags[1:]))
        last_time = not torch._C._autograd._get_current_graph_task_keep_graph()
        with Links(ctx.streams) as links:
            found = backward(ctx.plan, groups, kept, given, wanted, links, last_time)
        # autograd expects all gradients on the stream of y
        for home in current_streams(ctx.plan.devices[-1:]):
            for stream in ctx.streams:
                home.wait_stream(stream)
        return (None, None, *found)


def run(plan: Plan, x: Tensor, groups: Sequence[Group]) -> list[Tensor]:
    """`forward`, recorded by autograd where a gradient may be asked for."""
    if not any(route.constants.grad for route in plan.routes):
        with Links(current_streams(plan.devices)) as links:
            return forward(plan, x, groups, links)[0]
    counts = [tuple(map(len, group)) for group in groups]
    every = [group.flat for group in groups]
    if len(every) > 1:
        (x, *own), *middle = _of_stage((x, *every[0])), *map(_of_stage, every[1:-1])
        every = [tuple(own), *middle, every[-1]]
    apply: Any = _Pipelined.apply
    return list(apply(plan, counts, x, *chain(*every)))


def _of_stage(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    wanted = [tensor for tensor in given if tensor.requires_grad]
    apply: Any = _OfStage.apply
    found = iter(apply(*wanted) if wanted else ())
    return tuple(next(found) if tensor.requires_grad else tensor for tensor in given)


def _groups(counts: Sequence[tuple[int, ...]], flat: Iterator[Any]) -> list[Group]:
    return [Group(*([*islice(flat, count)] for count in own)) for own in counts]


def _sums(totals: Gradients, more: Gradients) -> Gradients:
    """The sums over chunks; of 16-bit gradients in float32, so that they are rounded once."""
    pairs = [(a, b) for a, b in zip(totals, more) if a is not None and b is not None]
    if not pairs:
        return more
    wide = [a.float() if a.itemsize == 2 else a for a, _ in pairs]
    # not in place: the gradients of both biases may be the same tensor
    found = iter(torch._foreach_add(wide, [b for _, b in pairs]))
    return [grad if grad is None else next(found) for grad in more]


def _dropped(y: Tensor, mask: Tensor, p: float) -> Tensor:
    """y, or its gradient, after dropout by this mask."""
    found: Tensor = torch.ops.aten.native_dropout_backward(y, mask, philox.scale(p))
    return found


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return torch.cat(list(parts), dim) if len(parts) > 1 else parts[0]
