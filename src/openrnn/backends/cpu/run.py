"""One layer and direction on the CPU: from tensors to the kernels' job, and back."""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from openrnn import philox
from openrnn.backends.base import Call
from openrnn.cells import lookup
from openrnn.codegen import build
from openrnn.kernels import jobs, launch
from openrnn.params import places
from openrnn.spec import Spec

if TYPE_CHECKING:
    from openrnn.codegen.trace import Traced
    from openrnn.kernels.layout import Layout
    from openrnn.kernels.plan import Plan

_WIDE = {torch.float64: torch.float64}


def inside(dtype: torch.dtype) -> torch.dtype:
    """The type that the kernels compute in."""
    return _WIDE.get(dtype, torch.float32)


@lru_cache(maxsize=1024)
def _traced(spec: Spec) -> "Traced":
    from openrnn.codegen.trace import trace

    return trace(lookup(spec.cell), spec.cell_clip)


@lru_cache(maxsize=4096)
def layout_of(spec: Spec, layer: int, dtype: torch.dtype) -> "Layout":
    """The sizes of a layer, the same in both directions."""
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


def rows_of(tensor: Tensor) -> Tensor:
    """The tensor, copied where its last dimension is not contiguous."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class Run:
    """One layer and direction of a call: fills the kernels' job and runs it."""

    __slots__ = (
        "call", "cell", "direction", "layer", "layout", "order", "spec", "vectors", "w_hh",
        "weights",
    )  # fmt: skip

    def __init__(self, call: Call, layer: int, direction: int, order: Tensor | None) -> None:
        spec = call.problem.spec
        self.call, self.layer, self.direction, self.order = call, layer, direction, order
        self.spec, self.cell = spec, _traced(spec)
        self.layout = layout_of(spec, layer, call.x.dtype)
        here = places(spec)[layer * spec.directions + direction]
        # w_ih, w_hh, b_ih, b_hh, w_hr, then per-unit vectors
        self.weights = [None if place is None else call.params[place] for place in here]
        self.w_hh = call.params[here[1] or 0]
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
        w_ih, w_hr = self.weights[0], self.weights[4]
        w_hh = self.w_hh
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
        w_ih, w_hr = self.weights[0], self.weights[4]
        w_hh = self.w_hh
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
        dy = None if dy is None else rows_of(dy)
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
        kept: tuple[int, ...] = (0, 0, 0, 0)
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
