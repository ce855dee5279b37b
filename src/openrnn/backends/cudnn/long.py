"""More steps than cuDNN takes: each layer and direction on its own, chunk by chunk.

The states at the end of a chunk begin the next. A reverse direction runs forward over sequences
turned round, each within its own length. Dropout between layers falls outside cuDNN here, by the
masks of `philox.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from openrnn import philox
from openrnn.backends.base import Call, Cotangents, Gradients, Needs, Outputs, TensorShape
from openrnn.backends.cudnn import algorithms, run, weights
from openrnn.backends.cudnn.reserve import reserve_bytes
from openrnn.backends.cudnn.run import LONGEST, Lengths
from openrnn.memo import memo
from openrnn.native.cudnn.descriptors import TIME_MAJOR, Kind
from openrnn.native.cudnn.handles import current
from openrnn.params import places, size
from openrnn.spec import Problem


class SingleChain(NamedTuple):
    """One layer and direction as a network of its own."""

    problem: Problem
    layer: int
    reverse: bool
    param_indices: tuple[int, ...]  # of its tensors among those of the call


@memo(256)
def _chains(problem: Problem) -> tuple[SingleChain, ...]:
    spec, made = problem.spec, []
    for number, row in enumerate(places(spec)):
        layer, direction = divmod(number, spec.directions)
        one = spec.with_(
            input_size=spec.layer_input(layer), num_layers=1, bidirectional=False, dropout=0.0,
            input_mode=spec.input_mode if layer == 0 else "linear",
        )  # fmt: skip
        kept = tuple(index for index in row if index is not None)
        alone = replace(problem, spec=one, training=False)
        made.append(SingleChain(alone, layer, direction == 1, kept))
    return tuple(made)


def _chunks(steps: int) -> Iterator[tuple[int, int]]:
    """The first step of each chunk and its number of steps."""
    for begin in range(0, steps, LONGEST):
        yield begin, min(LONGEST, steps - begin)


def reserve(problem: Problem, steps: int, batch: int) -> list[TensorShape]:
    """For each chunk of a chain its reserve and first states; after each lower layer its output."""
    spec, dtype = problem.spec, problem.dtype
    kept: list[TensorShape] = []
    for chain in _chains(problem):
        for _, count in _chunks(steps):
            kept.append(((reserve_bytes(chain.problem, count, batch),), torch.uint8))
            kept += [((1, batch, width), dtype) for width in spec.state_sizes]
        last = chain.reverse or spec.directions == 1
        if last and chain.layer < spec.num_layers - 1:
            kept.append(((steps, batch, spec.directions * spec.output_size), dtype))
    return kept


def _turned(x: Tensor, lengths: Lengths | None) -> Tensor:
    """Every row back to front within its length."""
    if lengths is None:
        return x.flip(0)
    steps = torch.arange(x.shape[0], device=x.device)[:, None]
    source = torch.where(steps < lengths.device, lengths.device - 1 - steps, steps)
    return x.gather(0, source[..., None].expand(x.shape))


def _within(lengths: Lengths | None, begin: int, count: int) -> Lengths | None:
    """The lengths left in a chunk, or None where all of its rows are full."""
    if lengths is None:
        return None
    host = (lengths.host - begin).clamp(0, count)
    low = int(host.min())
    if low == count:
        return None
    return Lengths(host, (lengths.device - begin).clamp(0, count), low == 0, count)


def _plan(
    call: Call, chain: SingleChain, x: Tensor, short: bool, ends: Lengths | None, anew: bool
) -> tuple[run.CallPlan, tuple[int, int], object]:
    """The plan of one chunk, size and address of the weight space, and what keeps that alive."""
    spec = chain.problem.spec
    handle = current(x.device.index)
    own = [call.params[index] for index in chain.param_indices]
    # chunk after chunk reads the same copy; the first chunk of a forward makes it
    address, alive = weights.flat(spec, own, handle.stream, anew)
    algorithm = algorithms.choose(chain.problem, x, short)
    layout = run.layout_of(x, algorithm)
    kind = Kind(
        spec, x.dtype, run.math_of(x.dtype, chain.problem.precision), algorithm,
        short or layout != TIME_MAJOR,
        build=(x.device.index, x.shape[1]) if algorithm == "persist_dynamic" else None,
    )  # fmt: skip
    plan = run.CallPlan(
        handle, kind, layout, x.shape[0], x.shape[1], training=chain.problem.grad,
        host=None if ends is None else ends.host,
        least=reserve_bytes(chain.problem, x.shape[0], x.shape[1]),
    )  # fmt: skip
    return plan, (size(spec) * x.element_size(), address), alive


def _forward_chain(
    call: Call, chain: SingleChain, x: Tensor, states: list[Tensor], lengths: Lengths | None
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """y, final states, reserve of one chain; x and y in the chain's own direction."""
    ys: list[Tensor] = []
    kept: list[Tensor] = []
    for begin, count in _chunks(x.shape[0]):
        part, ends = x[begin : begin + count], _within(lengths, begin, count)
        plan, space, alive = _plan(
            call, chain, part, lengths is not None, ends, call.problem.grad and begin == 0
        )
        with plan:
            y, last, reserve = run.forward(plan, space, part, states, ends)
        del alive
        ys.append(y)
        if reserve is not None:
            kept += [reserve, *states]
        states = last
    return torch.cat(ys), states, kept


def _first(call: Call, x: Tensor, number: int) -> list[Tensor]:
    """The initial states of a chain, (1, B, O or H) each."""
    spec = call.problem.spec
    if call.states:
        return [state[number : number + 1].contiguous() for state in call.states]
    return [x.new_zeros(1, x.shape[1], width) for width in spec.state_sizes]


def forward(call: Call, lengths: Lengths | None) -> Outputs:
    """As `Cudnn.forward`, for any number of steps."""
    problem, spec, x = call.problem, call.problem.spec, call.x
    finals: list[list[Tensor]] = []
    kept: list[Tensor] = []
    outputs: list[Tensor] = []
    for number, chain in enumerate(_chains(problem)):
        own = _turned(x, lengths) if chain.reverse else x
        y, ends, space = _forward_chain(call, chain, own, _first(call, x, number), lengths)
        outputs.append(_turned(y, lengths) if chain.reverse else y)
        finals.append(ends)
        kept += space
        if len(outputs) == spec.directions:
            x = torch.cat(outputs, dim=-1) if spec.bidirectional else outputs[0]
            outputs = []
            if chain.layer < spec.num_layers - 1:
                if problem.grad:
                    kept.append(x)
                x = _dropped(call, chain.layer, x)
    return Outputs(x, [torch.cat(parts) for parts in zip(*finals)], [], kept)


def _dropped(call: Call, layer: int, x: Tensor) -> Tensor:
    if not call.problem.drops or call.seed is None:
        return x
    return x * philox.mask(call.seed, layer, call.problem.spec.dropout, (*x.shape,), x)


def _backward_chain(
    call: Call,
    chain: SingleChain,
    x: Tensor,
    y: Tensor,
    kept: Sequence[Tensor],
    dy: Tensor,
    d_ends: list[Tensor | None],
    lengths: Lengths | None,
    space: Tensor | None,
) -> tuple[Tensor, list[Tensor | None]]:
    """dx and the gradients of the first states of one chain; adds to `space`."""
    width = 1 + len(d_ends)
    dxs: list[Tensor] = []
    for index, (begin, count) in reversed(list(enumerate(_chunks(x.shape[0])))):
        reserve, *states = kept[index * width : (index + 1) * width]
        here = slice(begin, begin + count)
        ends = _within(lengths, begin, count)
        plan, own, alive = _plan(call, chain, x[here], lengths is not None, ends, False)
        passed = run.Passed(x[here], y[here], states, reserve.clone())
        with plan:
            dx, d_ends = run.backward(
                plan, own, passed, ends, dy[here], d_ends, [True] * len(states), space
            )
        del alive
        dxs.insert(0, dx)
    return torch.cat(dxs), d_ends


def backward(
    call: Call,
    y: Tensor,
    kept: list[Tensor],
    grads: Cotangents,
    needs: Needs,
    lengths: Lengths | None,
) -> Gradients:
    """As `Cudnn.backward`, for any number of steps."""
    problem, spec = call.problem, call.problem.spec
    chains = _chains(problem)
    count = len(list(_chunks(call.x.shape[0]))) * (1 + len(spec.states))
    held: list[Sequence[Tensor]] = []
    outputs: list[Tensor] = []
    rest = iter(kept)
    for chain in chains:
        held.append([next(rest) for _ in range(count)])
        if (chain.reverse or spec.directions == 1) and chain.layer < spec.num_layers - 1:
            outputs.append(next(rest))
    outputs.append(y)
    d_params: list[Tensor | None] = [None] * len(call.params)
    d_states = [torch.empty_like(s) if n else None for s, n in zip(call.states, needs.states)]
    dy = torch.zeros_like(y) if grads.y is None else grads.y
    for layer in reversed(range(spec.num_layers)):
        x = _dropped(call, layer - 1, outputs[layer - 1]) if layer else call.x
        total: Tensor | None = None
        for direction in range(spec.directions):
            number = layer * spec.directions + direction
            chain = chains[number]
            part = slice(direction * spec.output_size, (direction + 1) * spec.output_size)
            own = [x, outputs[layer][..., part], dy[..., part]]
            if chain.reverse:
                own = [_turned(tensor, lengths) for tensor in own]
            wanted = [needs.params[index] for index in chain.param_indices]
            space = weights.gradients(chain.problem.spec, call.x) if any(wanted) else None
            ends = [None if end is None else end[number : number + 1] for end in grads.finals]
            dx, begins = _backward_chain(
                call, chain, own[0], own[1], held[number], own[2], ends, lengths, space
            )
            dx = _turned(dx, lengths) if chain.reverse else dx
            total = dx if total is None else total + dx
            for target, begin in zip(d_states, begins):
                if target is not None and begin is not None:
                    target[number] = begin[0]
            if space is not None:
                parts = weights.split(chain.problem.spec, space, wanted)
                for index, grad in zip(chain.param_indices, parts):
                    d_params[index] = grad
        if total is None:
            raise ValueError("a network has at least one direction")
        dy = _dropped(call, layer - 1, total) if layer else total
    return Gradients(dy if needs.x else None, d_states, d_params, [])
