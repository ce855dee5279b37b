"""Our CPU kernels: numba, generated from the cell's trace, one batch tile a thread.

float16 and bfloat16 are computed in float32 and rounded at the end.
"""

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from openrnn import philox
from openrnn.backends.base import (
    Backend,
    Call,
    Capabilities,
    Cotangents,
    Gradients,
    Needs,
    Outputs,
    TensorShape,
    state_shapes,
)
from openrnn.cells import lookup
from openrnn.codegen import build
from openrnn.kernels import jobs, launch
from openrnn.params import places
from openrnn.spec import BIAS_MODES, INPUT_MODES, Problem, Spec

if TYPE_CHECKING:
    from openrnn.codegen.trace import Traced
    from openrnn.kernels.layout import Layout
    from openrnn.kernels.plan import Plan

_WIDE = {torch.float64: torch.float64}


def _inside(dtype: torch.dtype) -> torch.dtype:
    """The type that the kernels compute in."""
    return _WIDE.get(dtype, torch.float32)


@lru_cache(maxsize=1024)
def _traced(spec: Spec) -> "Traced":
    from openrnn.codegen.trace import trace

    return trace(lookup(spec.cell), spec.cell_clip)


@lru_cache(maxsize=4096)
def _layout(spec: Spec, layer: int, dtype: torch.dtype) -> "Layout":
    from openrnn.codegen.numba import all_summed, kept_sides
    from openrnn.kernels.layout import Layout

    cell = _traced(spec)
    return Layout(
        str(dtype).removeprefix("torch."), len(cell.gates), len(cell.states) - 1,
        len(cell.unit_params), len(kept_sides(cell)), all_summed(cell), spec.layer_input(layer),
        spec.hidden_size, spec.output_size,
    )  # fmt: skip


@lru_cache(maxsize=2048)
def _plan(*sizes: Any) -> "Plan":
    from openrnn.kernels.plan import plan

    return plan(*sizes)


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

    def reserve(self, problem: Problem, steps: int, batch: int) -> list[TensorShape]:
        """For each chain what its layout keeps; after all but the last layer, the layer's output."""
        spec, dtype = problem.spec, _inside(problem.dtype)
        kept: list[TensorShape] = []
        for layer in range(spec.num_layers):
            widths = [width for width in _layout(spec, layer, dtype).widths if width]
            kept += [((steps, batch, width), dtype) for width in widths] * spec.directions
            if layer < spec.num_layers - 1:
                kept.append(((steps, batch, spec.directions * spec.output_size), dtype))
        return kept

    def forward(self, call: Call) -> Outputs:
        problem, spec = call.problem, call.problem.spec
        outer, dtype = call.x.dtype, _inside(call.x.dtype)
        call = _converted(call, dtype)
        x = call.x
        steps, batch = x.shape[0], x.shape[1]
        finals = [x.new_empty(shape) for shape in state_shapes(problem, batch)]
        every: list[Tensor] = []
        if problem.return_states:
            shapes = [(spec.chains, steps, batch, width) for width in spec.state_sizes]
            every = [x.new_empty(shape) for shape in shapes]
        reserve: list[Tensor] = []
        if problem.grad:
            kinds = self.reserve(problem, steps, batch)
            # where rows end early, or unpacked products skip the padding, parts stay unwritten
            partly = call.lengths is not None or not launch.packs(steps, batch)
            fresh = torch.zeros if partly else torch.empty
            reserve = [fresh(shape, dtype=kind) for shape, kind in kinds]
        order = _order(call)
        if steps == 0 or batch == 0:
            return _nothing(call, outer, finals, every, reserve)
        kept = iter(_by_layer(spec, reserve))
        for layer in range(spec.num_layers):
            held, y = next(kept, ([[]] * spec.directions, None))
            if y is None:
                y = x.new_empty(steps, batch, spec.directions * spec.output_size)
            for direction in range(spec.directions):
                _Run(call, layer, direction, order).forward(x, y, held[direction], finals, every)
            x = y
        if outer != dtype:
            x, finals = x.to(outer), [state.to(outer) for state in finals]
            every = [states.to(outer) for states in every]
        return Outputs(x, finals, every, reserve)

    def backward(
        self, call: Call, y: Tensor, reserve: list[Tensor], grads: Cotangents, needs: Needs
    ) -> Gradients:
        spec = call.problem.spec
        outer, dtype = call.x.dtype, _inside(call.x.dtype)
        call = _converted(call, dtype)
        y, dy = y.to(dtype), _to(grads.y, dtype)
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
        if call.x.shape[0] == 0 or call.x.shape[1] == 0:
            for state, final in zip(d_states, d_finals):
                if state is not None and final is not None:
                    state.copy_(final)
            d_params = [torch.zeros_like(p) if n else None for p, n in zip(call.params, needs.params)]
            dx = torch.zeros_like(call.x) if needs.x else None
            return _gradients(outer, dx, d_states, d_params, d_fresh)
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
                run = _Run(call, layer, direction, order)
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
    tensor = tensor.to(dtype)
    return tensor.contiguous() if contiguous else tensor


def _converted(call: Call, dtype: torch.dtype) -> Call:
    """The call in the type that the kernels compute in, every tensor laid out as they read it."""

    def plain(tensors: list[Tensor]) -> list[Tensor]:
        if all(tensor.dtype is dtype and tensor.is_contiguous() for tensor in tensors):
            return tensors
        return [tensor.to(dtype).contiguous() for tensor in tensors]

    x = call.x if call.x.dtype is dtype else call.x.to(dtype)
    return Call(
        call.problem, _rows(x), plain(call.states), plain(call.params),
        None if call.lengths is None else call.lengths.contiguous(),
        None if call.reset is None else call.reset.contiguous(), plain(call.reset_states),
        call.seed,
    )  # fmt: skip


def _by_layer(spec: Spec, reserve: list[Tensor]) -> list[tuple[list[list[Tensor]], Tensor | None]]:
    """A reserve, layer by layer: what each direction kept, and the output but of the last layer."""
    last = spec.num_layers - 1
    count = (len(reserve) - last) // spec.chains
    rest = iter(reserve)
    return [
        (
            [[next(rest) for _ in range(count)] for _ in range(spec.directions)],
            next(rest) if layer < last else None,
        )
        for layer in range(spec.num_layers if reserve else 0)
    ]


def _nothing(
    call: Call,
    outer: torch.dtype,
    finals: list[Tensor],
    every: list[Tensor],
    reserve: list[Tensor],
) -> Outputs:
    """A call without steps or without sequences: the states stay what they were."""
    spec, x = call.problem.spec, call.x
    for place, final in enumerate(finals):
        final.copy_(call.states[place]) if call.states else final.zero_()
    y = x.new_empty(*x.shape[:2], spec.directions * spec.output_size, dtype=outer)
    return Outputs(
        y, [state.to(outer) for state in finals], [states.to(outer) for states in every], reserve
    )


def _gradients(
    outer: torch.dtype,
    dx: Tensor | None,
    d_states: list[Tensor | None],
    d_params: list[Tensor | None],
    d_fresh: list[Tensor | None],
) -> Gradients:
    """The gradients in the type of the call."""
    return Gradients(
        _to(dx, outer), [_to(grad, outer) for grad in d_states],
        [_to(grad, outer) for grad in d_params], [_to(grad, outer) for grad in d_fresh],
    )  # fmt: skip


def _order(call: Call) -> Tensor | None:
    """The batch rows by falling length, so that those still running are the first."""
    return None if call.lengths is None else call.lengths.argsort(stable=True, descending=True)


def _rows(tensor: Tensor) -> Tensor:
    """The tensor, copied where its last dimension is not contiguous."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class _Run:
    """One layer and direction of a call: fills the kernels' job and runs it."""

    __slots__ = (
        "call",
        "cell",
        "direction",
        "layer",
        "layout",
        "order",
        "spec",
        "vectors",
        "weights",
    )

    def __init__(self, call: Call, layer: int, direction: int, order: Tensor | None) -> None:
        spec = call.problem.spec
        self.call, self.layer, self.direction, self.order = call, layer, direction, order
        self.spec, self.cell = spec, _traced(spec)
        self.layout = _layout(spec, layer, call.x.dtype)
        here = places(spec)[layer * spec.directions + direction]
        # w_ih, w_hh, b_ih, b_hh, w_hr, then per-unit vectors
        self.weights = [None if place is None else call.params[place] for place in here]
        self.vectors = _padded(self.weights[5:], self.layout.padded) if len(here) > 5 else None

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        held: list[Tensor],
        finals: list[Tensor],
        every: list[Tensor],
    ) -> None:
        layout = self.layout
        plan = self._plan(bool(held), backward=False)
        w_ih, w_hh, _, _, w_hr = self.weights[:5]
        if plan.packs or w_hr is not None:
            from openrnn.kernels.matrices import transposed

            if plan.packs:
                w_ih = w_ih if w_ih is None else transposed(w_ih, layout.gates, layout.padded)
                w_hh = transposed(w_hh, layout.gates, layout.padded)
            if w_hr is not None:
                w_hr = transposed(w_hr, 1, layout.width)
        scratch = torch.empty(plan.scratch, dtype=torch.uint8)
        job = plan.job.copy()
        self._fill(job, x, y, (w_ih, w_hh, w_hr), held, scratch)
        call = self.call
        self._fill_states(job, 0, (call.states, call.reset_states, finals, every))
        hold = (x, y, w_ih, w_hh, w_hr, scratch, self, held, finals, every)
        launch.run(build.forward(self.cell, layout.dtype), job, plan.tasks, self._scale, hold)

    def backward(
        self,
        x: Tensor,
        y: Tensor,
        held: list[Tensor],
        dy: Tensor | None,
        dx: Tensor | None,
        states: tuple[Sequence[Tensor | None], ...],
        weighs: bool,
    ) -> list[Tensor | None]:
        """Gradients of w_ih, w_hh, b_ih, b_hh, w_hr and the unit vectors, where any is wanted."""
        from openrnn.kernels.matrices import gradients, plain

        layout = self.layout
        plan = self._plan(True, backward=True)
        w_ih, w_hh, _, _, w_hr = self.weights[:5]
        if w_ih is not None and dx is not None:
            w_ih = plain(w_ih, layout.gates, layout.padded)
        w_hh = plain(w_hh, layout.gates, layout.padded)
        if w_hr is not None:
            w_hr = plain(w_hr, 1, layout.outputs)
        scratch = torch.empty(plan.scratch, dtype=torch.uint8)
        sums, ragged = None, self.call.lengths is not None
        if weighs or self.vectors is not None:
            sums = x.new_empty(plan.tasks, sum(layout.sums))
            # with lengths a task may have no step at all, and would write nothing
            (sums if ragged else sums[:, layout.sum_offsets[3] :]).zero_()
        dy = None if dy is None else _rows(dy)
        job = plan.job.copy()
        job[jobs.WRITES] = not ragged
        self._fill(job, x, y, (w_ih, w_hh, w_hr), held, scratch)
        job[jobs.DY : jobs.TAIL] = (
            *self._beside(dy), *((0, 0, 0) if dx is None else (dx.data_ptr(), *dx.stride()[:2])),
            self.direction, _address(sums),
        )  # fmt: skip
        self._fill_states(job, 0, (self.call.states, self.call.reset_states))
        self._fill_states(job, 4, states)
        hold = (x, y, w_ih, w_hh, w_hr, scratch, self, held, dy, dx, states, sums)
        launch.run(build.backward(self.cell, layout.dtype), job, plan.tasks, self._scale, hold)
        return gradients(layout, sums, self.weights) if sums is not None else []

    def _plan(self, kept: bool, backward: bool) -> "Plan":
        x = self.call.x
        return _plan(
            self.layout, x.shape[0], x.shape[1], launch.threads(), self.direction == 1,
            self.weights[0] is None, kept, backward, len(self.spec.states),
        )  # fmt: skip

    @property
    def _scale(self) -> float:
        return philox.scale(self.spec.dropout)

    def _beside(self, y: Tensor | None) -> tuple[int, int, int]:
        """Address and strides of this direction's part of (T, B, D*O)."""
        if y is None:
            return 0, 0, 0
        offset = self.direction * self.spec.output_size * y.element_size()
        return y.data_ptr() + offset, y.stride(0), y.stride(1)

    def _fill(
        self,
        job: Any,
        x: Tensor,
        y: Tensor,
        matrices: tuple[Tensor | None, ...],
        held: list[Tensor],
        scratch: Tensor,
    ) -> None:
        """Writes what forward and backward jobs share, in the order of `kernels.jobs`."""
        call, layout = self.call, self.layout
        if self.layer > 0 and call.problem.drops and call.seed is not None:
            low, high, offset = philox.split(call.seed)
            # the mask belongs to the output of the layer below
            word = (self.layer - 1 + 256 * offset) & philox.WORD
            job[jobs.DROP : jobs.X] = (1, low, high, word, philox.threshold(self.spec.dropout))
        kept = (0, 0, 0, 0)
        if held:
            rest = iter(held)
            kept = tuple(next(rest).data_ptr() if width else 0 for width in layout.widths)
        job[jobs.X : jobs.DY] = (
            x.data_ptr(), x.stride(0), x.stride(1), *self._beside(y), *map(_address, matrices),
            *map(_address, self.weights[2:4]), _address(self.vectors),
            _address(call.lengths), _address(self.order), _address(call.reset),
            *kept, scratch.data_ptr(),
        )  # fmt: skip

    def _fill_states(
        self, job: Any, first: int, groups: tuple[Sequence[Tensor | None], ...]
    ) -> None:
        """Writes the addresses of this chain's part of each group of states, from a group on."""
        chain = self.layer * self.spec.directions + self.direction
        count = len(self.spec.states)
        for number, group in enumerate(groups, first):
            for place, state in enumerate(group):
                if state is not None:
                    offset = chain * state.stride(0) * state.element_size()
                    job[jobs.TAIL + number * count + place] = state.data_ptr() + offset


def _padded(vectors: Sequence[Tensor | None], padded: int) -> Tensor:
    """Per-unit vectors as rows [VECTORS, padded], the padding zero."""
    rows = torch.stack([vector for vector in vectors if vector is not None])
    return torch.nn.functional.pad(rows, (0, padded - rows.shape[1]))
