"""The CPU backend: numba kernels, generated from the cell's trace, that run batch tiles on threads.

float16 and bfloat16 are computed in float32 and rounded at the end.
"""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from openrnn.backends.base import (
    Backend,
    Call,
    Capabilities,
    Cotangents,
    Gradients,
    Needs,
    Outputs,
    TensorShape,
    nothing,
    nothing_back,
    state_shapes,
    traced,
)
from openrnn.backends.cpu.run import LayerRun, inside, layout_of, rows_of
from openrnn.errors import CellError
from openrnn.kernels.cpu import launch
from openrnn.params import places
from openrnn.spec import BIAS_MODES, INPUT_MODES, Problem, Spec


class Cpu(Backend):
    """Generated numba kernels: the whole time loop of a layer and direction in one call."""

    name = "cpu"
    can = Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
        bias_modes=frozenset(BIAS_MODES),
        input_modes=frozenset(INPUT_MODES),
        grad=True,
        layers=True,
        bidirectional=True,
        projection=True,
        clip=True,
        dropout=True,
        lengths=True,
        reset=True,
        return_states=True,
    )

    def absent(self) -> str | None:
        return None if find_spec("numba") else "package numba is not installed"

    def refusals(self, problem: Problem) -> list[str]:
        """Also refuses cells with an operator that has no CPU kernel."""
        reasons = super().refusals(problem)
        if not reasons:
            try:
                narrow = traced(problem.spec).narrow
            except CellError as error:
                reasons.append(str(error))
            else:
                reasons += [narrow] if narrow and problem.dtype == torch.float64 else []
        return reasons

    def reserve(self, problem: Problem, steps: int, batch: int) -> list[TensorShape]:
        """For each layer and direction what its layout keeps; after each lower layer its output."""
        spec, dtype = problem.spec, inside(problem.dtype)
        kept: list[TensorShape] = []
        for layer in range(spec.num_layers):
            widths = [width for width in layout_of(spec, layer, dtype).widths if width]
            kept += [((steps, batch, width), dtype) for width in widths] * spec.directions
            if layer < spec.num_layers - 1:
                kept.append(((steps, batch, spec.directions * spec.output_size), dtype))
        return kept

    def forward(self, call: Call) -> Outputs:
        problem, spec = call.problem, call.problem.spec
        steps, batch = call.x.shape[0], call.x.shape[1]
        if steps == 0 or batch == 0:
            return nothing(self, call)
        outer, dtype = call.x.dtype, inside(call.x.dtype)
        call = _converted(call, dtype)
        x = call.x
        finals = [x.new_empty(shape) for shape in state_shapes(problem, batch)]
        every: list[Tensor] = []
        if problem.return_states:
            shapes = [(spec.chains, steps, batch, width) for width in spec.state_sizes]
            every = [x.new_empty(shape) for shape in shapes]
        reserve: list[Tensor] = []
        if problem.grad:
            kinds = self.reserve(problem, steps, batch)
            # parts stay unwritten where rows end early, or unpacked products skip the padding
            partly = call.lengths is not None or not launch.packs(steps, batch)
            fresh = torch.zeros if partly else torch.empty
            reserve = [fresh(shape, dtype=kind) for shape, kind in kinds]
        order = _order(call)
        kept = iter(_by_layer(spec, reserve))
        for layer in range(spec.num_layers):
            held, y = next(kept, ([[]] * spec.directions, None))
            if y is None:
                y = x.new_empty(steps, batch, spec.directions * spec.output_size)
            for direction in range(spec.directions):
                LayerRun(call, layer, direction, order).forward(
                    x, y, held[direction], finals, every
                )
            x = y
        if outer != dtype:
            x, finals = x.to(outer), [state.to(outer) for state in finals]
            every = [states.to(outer) for states in every]
        return Outputs(x, finals, every, reserve)

    def backward(
        self, call: Call, y: Tensor, reserve: list[Tensor], grads: Cotangents, needs: Needs
    ) -> Gradients:
        if call.x.shape[0] == 0 or call.x.shape[1] == 0:
            return nothing_back(call, grads, needs)
        spec = call.problem.spec
        outer, dtype = call.x.dtype, inside(call.x.dtype)
        call = _converted(call, dtype)
        y, dy = _to(y, dtype), _to(grads.y, dtype)
        d_finals = [_to(grad, dtype, contiguous=True) for grad in grads.finals]
        d_every = [_to(grad, dtype, contiguous=True) for grad in grads.all_states]
        d_states = [torch.zeros_like(s) if n else None for s, n in zip(call.states, needs.states)]
        d_fresh = [
            torch.zeros_like(s) if n else None
            for s, n in zip(call.reset_states, needs.reset_states)
        ]
        order = _order(call)
        d_params: list[Tensor | None] = [None] * len(call.params)
        dx: Tensor | None = None
        kept = _by_layer(spec, reserve)
        for layer in reversed(range(spec.num_layers)):
            held, output = kept[layer]
            below = kept[layer - 1][1] if layer else call.x
            if below is None:
                raise ValueError(f"the reserve lacks the output of layer {layer - 1}")
            output = y if output is None else output
            dx = None
            if layer or needs.x:
                blank = call.lengths is not None
                dx = (torch.zeros_like if blank else torch.empty_like)(
                    below, memory_format=torch.contiguous_format
                )
            for direction in range(spec.directions):
                chain = layer * spec.directions + direction
                run = LayerRun(call, layer, direction, order)
                here = places(spec)[chain]
                weighs = any(place is not None and needs.params[place] for place in here)
                found = run.backward(
                    below,
                    output,
                    held[direction],
                    dy,
                    dx,
                    (d_states, d_fresh, d_finals, d_every),
                    weighs,
                )
                for place, grad in zip(here, found):
                    if place is not None and needs.params[place]:
                        d_params[place] = grad
            dy = dx
        return _gradients(outer, dx if needs.x else None, d_states, d_params, d_fresh)


def _to(tensor: Tensor | None, dtype: torch.dtype, contiguous: bool = False) -> Any:
    if tensor is None:
        return None
    if tensor.dtype is not dtype:
        tensor = tensor.to(dtype)
    return tensor.contiguous() if contiguous else tensor


def _converted(call: Call, dtype: torch.dtype) -> Call:
    """The call in the type that the kernels compute in, every tensor laid out as they read it."""

    def plain(tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.to(dtype).contiguous() for tensor in tensors]

    for tensor in (*call.states, *call.params, *call.reset_states):
        if tensor.dtype is not dtype or not tensor.is_contiguous():
            break
    else:
        if call.lengths is None and call.reset is None and call.x.stride(-1) == 1:
            return call
    x = call.x if call.x.dtype is dtype else call.x.to(dtype)
    return replace(
        call, x=rows_of(x), states=plain(call.states), params=plain(call.params),
        lengths=None if call.lengths is None else call.lengths.contiguous(),
        reset=None if call.reset is None else call.reset.contiguous(),
        reset_states=plain(call.reset_states),
    )  # fmt: skip


def _by_layer(spec: Spec, reserve: list[Tensor]) -> list[tuple[list[list[Tensor]], Tensor | None]]:
    """A reserve, layer by layer: what each direction kept, and the output but of the last layer."""
    if not reserve:
        return []
    count = (len(reserve) - spec.num_layers + 1) // spec.chains
    layer = spec.directions * count  # and the output after it
    found = []
    for start in range(0, len(reserve), layer + 1):
        held = [reserve[at : at + count] for at in range(start, start + layer, count)]
        found.append((held, reserve[start + layer] if start + layer < len(reserve) else None))
    return found


def _gradients(
    outer: torch.dtype,
    dx: Tensor | None,
    d_states: list[Tensor | None],
    d_params: list[Tensor | None],
    d_fresh: list[Tensor | None],
) -> Gradients:
    """The gradients in the type of the call."""
    if outer is inside(outer):
        return Gradients(dx, d_states, d_params, d_fresh)
    return Gradients(
        _to(dx, outer), [_to(grad, outer) for grad in d_states],
        [_to(grad, outer) for grad in d_params], [_to(grad, outer) for grad in d_fresh],
    )  # fmt: skip


def _order(call: Call) -> Tensor | None:
    """The batch rows by falling length, so that those still running are the first."""
    return None if call.lengths is None else call.lengths.argsort(stable=True, descending=True)
