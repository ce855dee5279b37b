"""A layer as ONNX Scans, one for each direction: the body is the step of `reference.py`, traced."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from openrnn import fresh, reference
from openrnn.backends.base import Call
from openrnn.cells import Cell, lookup
from openrnn.codegen.check import SHAPE, examples, names_of, step_of
from openrnn.errors import CellError
from openrnn.params import Chain


def scan(
    call: Call, chains: Sequence[Chain], first: int, x: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """One layer: y (T, B, D*O), final states, each (D, B, O or H), and states of all steps.

    Of those, each (D, T, B, O or H), there is only the emitted one without `return_states`.

    Args:
        chains: the layer's tensors, forward before reverse.
        first: the index of the first of them among all chains of the network.

    Raises:
        CellError: the cell holds a tensor.
    """
    _check(lookup(call.problem.spec.cell))
    found = [
        _chain(call, weights, first + direction, x, direction == 1 or call.problem.spec.reverse)
        for direction, weights in enumerate(chains)
    ]
    finals = [torch.stack(parts) for parts in zip(*(ends for ends, _ in found))]
    every = [torch.stack(parts) for parts in zip(*(steps for _, steps in found))]
    emitted = [steps[0] for _, steps in found]
    return torch.cat(emitted, dim=-1) if len(emitted) > 1 else emitted[0], finals, every


def _check(cell: Cell) -> None:
    """Raises CellError for a cell with a tensor of its own: torch's exporter loses its values."""
    if not cell.dependent_product and fresh.run(_holds_tensor, cell):
        raise CellError(
            f"cell '{cell.name}' reads a tensor that is none of x, r, s and p: ONNX takes numbers, "
            "and vectors named in params="
        )


def _holds_tensor(cell: Cell) -> bool:
    from torch.fx.experimental.proxy_tensor import make_fx

    given = examples(len(names_of(cell)), SHAPE, torch.float32)
    traced = make_fx(step_of(cell, None))(*given)
    return any(node.op == "get_attr" for node in traced.graph.nodes)


def _chain(
    call: Call, weights: Chain, chain: int, x: Tensor, reverse: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """One direction: final states, each (B, O or H), and states of all steps (T, B, O or H)."""
    from torch._higher_order_ops.scan import scan_op

    spec = call.problem.spec
    count, emits = len(spec.states), len(spec.states) if call.problem.return_states else 1
    states = [
        call.states[k][chain] if call.states else x.new_zeros(x.shape[1], width)
        for k, width in enumerate(spec.state_sizes)
    ]
    matrices = {name: getattr(weights, name) for name in ("w_hh", "b_hh", "w_hr")}
    matrices = {name: tensor for name, tensor in matrices.items() if tensor is not None}
    resets = [state[chain] for state in call.reset_states]
    masks = _masks(call)

    def body(*flat: Tensor) -> list[Tensor]:
        parts = iter(flat)
        old = tuple(next(parts) for _ in states)
        gates = next(parts)
        inside = {name: next(parts) for name in masks}
        known = replace(
            weights, **{name: next(parts) for name in matrices},
            unit=tuple(next(parts) for _ in weights.unit),
        )  # fmt: skip
        step = reference.stepper(spec, lookup(spec.cell), known)
        new, every = _step(step, gates, old, inside, tuple(parts), reverse)
        # torch wants no output that is an input or another output
        return [state.clone() for state in (*new, *every[:emits])]

    rows = [reference.input_side(spec, weights, x), *masks.values()]
    if reverse:
        rows = [row.flip(0) for row in rows]
    inputs = [states, rows, (*matrices.values(), *weights.unit, *resets)]
    # torch's exporter runs the graph with gradients on, and would differentiate the body
    out = scan_op(body, *([tensor.detach() for tensor in group] for group in inputs))
    steps = [each.flip(0) for each in out[count:]] if reverse else list(out[count:])
    return list(out[:count]), steps


def _masks(call: Call) -> dict[str, Tensor]:
    """Each (T, B, 1): `active` within a sequence's length, `boundary` where states are replaced."""
    found: dict[str, Tensor] = {}
    if call.lengths is not None:
        steps = torch.arange(call.x.shape[0], device=call.x.device)[:, None]
        found["active"] = (steps < call.lengths)[..., None]
    if call.reset is not None:
        reset = call.reset[..., None]
        found["boundary"] = reset & found["active"] if found else reset
    return found


def _step(
    step: reference.Step,
    gates: Tensor,
    states: tuple[Tensor, ...],
    masks: dict[str, Tensor],
    resets: tuple[Tensor, ...],
    reverse: bool,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The states that the next step finds, and those that this one emits."""
    active, boundary = masks.get("active"), masks.get("boundary")
    resets = resets or tuple(state.new_zeros(()) for state in states)
    if boundary is not None and not reverse:
        states = reference.choose(boundary, resets, states)
    new = every = step(gates, states)
    if active is not None:
        every = tuple(torch.where(active, state, 0) for state in new)
        new = reference.choose(active, new, states)
    if boundary is not None and reverse:
        new = reference.choose(boundary, resets, new)
    return new, every
