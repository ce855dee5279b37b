"""One layer and direction on the CPU: from tensors to the kernels' arguments, and back."""

from array import array
from collections.abc import Iterator, Sequence
from struct import pack, unpack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from openrnn import philox
from openrnn.backends.base import Call, traced
from openrnn.codegen import build
from openrnn.kernels.cpu import args as field
from openrnn.kernels.cpu import launch
from openrnn.memo import memo
from openrnn.params import places
from openrnn.spec import Spec

if TYPE_CHECKING:
    from openrnn.codegen.trace import Traced
    from openrnn.kernels.cpu.layout import Layout
    from openrnn.kernels.cpu.plan import LoopPlan

_WIDE = {torch.float64: torch.float64}


def inside(dtype: torch.dtype) -> torch.dtype:
    """The dtype that the kernels compute in."""
    return _WIDE.get(dtype, torch.float32)


@memo(4096)
def layout_of(spec: Spec, layer: int, dtype: torch.dtype) -> "Layout":
    """The sizes of a layer, the same in both directions."""
    from openrnn.codegen.numba import all_summed, kept_sides
    from openrnn.kernels.cpu.layout import Layout

    cell = traced(spec)
    return Layout(
        str(dtype).removeprefix("torch."), len(cell.gates), len(cell.states) - 1,
        len(cell.unit_params), len(kept_sides(cell)), all_summed(cell), spec.layer_input(layer),
        spec.hidden_size, spec.output_size,
    )  # fmt: skip


class _Chain(NamedTuple):
    """What all calls of a layer and direction have in common."""

    cell: "Traced"
    layout: "Layout"
    slots: tuple[int | None, ...]  # where its parameters are: w_ih, w_hh, b_ih, b_hh, w_hr, vectors


@memo(4096)
def _chain(spec: Spec, layer: int, direction: int, dtype: torch.dtype) -> _Chain:
    slots = places(spec)[layer * spec.directions + direction]
    return _Chain(traced(spec), layout_of(spec, layer, dtype), tuple(slots))


@memo(2048)
def _plan(*sizes: Any) -> "LoopPlan":
    from openrnn.kernels.cpu.plan import plan

    return plan(*sizes)


def _with_counters(given: tuple[int, ...], plan: "LoopPlan") -> "array[int]":
    """The kernel arguments, and behind them the barrier counters of the thread teams."""
    args = array("q", given + (0,) * plan.counters)
    args[field.COUNTERS] = args.buffer_info()[0] + len(given) * args.itemsize
    return args


def rows_of(tensor: Tensor) -> Tensor:
    """The tensor, copied where its last dimension is not contiguous."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class LayerRun:
    """One layer and direction of a call: fills the kernels' arguments and runs them."""

    __slots__ = (
        "call", "cell", "direction", "layer", "layout", "order", "spec", "vectors", "weights"
    )  # fmt: skip

    def __init__(self, call: Call, layer: int, direction: int, order: Tensor | None) -> None:
        spec = call.problem.spec
        self.call, self.layer, self.direction, self.order = call, layer, direction, order
        self.spec = spec
        self.cell, self.layout, slots = _chain(spec, layer, direction, call.x.dtype)
        self.weights = [None if slot is None else call.params[slot] for slot in slots]
        self.vectors = _padded(self.weights[5:], self.layout.padded) if len(slots) > 5 else None

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        held: list[Tensor],
        finals: list[Tensor],
        every: list[Tensor],
    ) -> None:
        call, layout = self.call, self.layout
        plan = self._plan("training" if held else "inference")
        w_ih, w_hh, _, _, w_hr, *_ = self.weights
        if plan.packs or w_hr is not None:
            from openrnn.kernels.cpu.matrices import transposed

            if plan.packs:
                w_ih = transposed(w_ih, layout.gates, layout.padded)
                w_hh = transposed(w_hh, layout.gates, layout.padded)
            w_hr = transposed(w_hr, 1, layout.width)
        scratch = torch.empty(plan.scratch, dtype=torch.uint8)
        loop, step = build.forward(self.cell, layout.dtype)
        args = (
            step, *plan.head, 0, *self._drop(),
            *self._tensors(x, y, (w_ih, w_hh, w_hr), held, scratch),
            *(0,) * (field.TAIL - field.DY),
            *self._of_states((call.states, call.reset_states, finals, every)),
        )  # fmt: skip
        launch.run(loop, _with_counters(args, plan), plan.tasks)

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
        """Gradients of w_ih, w_hh, b_ih, b_hh, w_hr and the unit vectors, where any is wanted.

        `states` are the gradients of initial, fresh, final and all states; `weighs` says whether
        the gradient of any parameter is wanted.
        """
        from openrnn.kernels.cpu.matrices import gradients, plain

        layout = self.layout
        plan = self._plan("backward")
        w_ih, w_hh, _, _, w_hr, *_ = self.weights
        if dx is None:
            w_ih = None
        if x.shape[0] == 1 and all(state is None for state in (*states[0], *states[1])):
            w_hh = None  # nothing goes back beyond the first step
        if plan.packs:
            w_ih = plain(w_ih, layout.gates, layout.padded)
            w_hh = plain(w_hh, layout.gates, layout.padded)
        w_hr = plain(w_hr, 1, layout.outputs)
        scratch = torch.empty(plan.scratch, dtype=torch.uint8)
        sums = None
        if weighs or self.vectors is not None:
            sums = x.new_empty(plan.teams, sum(layout.sums))
        dy = None if dy is None else rows_of(dy)
        loop, derivative = build.backward(self.cell, layout.dtype)
        args = (
            derivative, *plan.head, 0, *self._drop(),
            *self._tensors(x, y, (w_ih, w_hh, w_hr), held, scratch), *self._beside(dy),
            *((0, 0, 0) if dx is None else (dx.data_ptr(), *dx.stride()[:2])),
            self.direction, _address(sums),
            *self._of_states((self.call.states, self.call.reset_states, [], [], *states)),
        )  # fmt: skip
        launch.run(loop, _with_counters(args, plan), plan.tasks)
        return gradients(layout, sums, self.weights) if sums is not None else []

    def _plan(self, purpose: str) -> "LoopPlan":
        x = self.call.x
        return _plan(
            self.layout, purpose, x.shape[0], x.shape[1], launch.threads(), self.direction == 1,
            self.weights[0] is None, self.call.lengths is not None, self.call.reset is not None,
        )  # fmt: skip

    def _beside(self, y: Tensor | None) -> tuple[int, int, int]:
        """Address and strides of this direction's part of (T, B, D*O)."""
        if y is None:
            return 0, 0, 0
        offset = self.direction * self.spec.output_size * y.element_size()
        return y.data_ptr() + offset, y.stride(0), y.stride(1)

    def _drop(self) -> tuple[int, ...]:
        """The arguments from DROP to X."""
        call = self.call
        if self.layer == 0 or not call.problem.drops or call.seed is None:
            return (0,) * (field.X - field.DROP)
        low, high, offset = philox.split(call.seed)
        # the mask belongs to the output of the layer below
        word = (self.layer - 1 + 256 * offset) & philox.WORD
        p = self.spec.dropout
        (scale,) = unpack("q", pack("d", philox.scale(p)))
        return 1, low, high, word, philox.threshold(p), scale

    def _tensors(
        self,
        x: Tensor,
        y: Tensor,
        matrices: tuple[Tensor | None, ...],
        held: list[Tensor],
        scratch: Tensor,
    ) -> tuple[int, ...]:
        """The arguments from X to DY."""
        call = self.call
        kept = [0, 0, 0, 0]
        for place, tensor in zip(self.layout.kept_places, held):
            kept[place] = tensor.data_ptr()
        step, row, _ = x.stride()
        return (
            x.data_ptr(), step, row, *self._beside(y), *map(_address, matrices),
            *map(_address, self.weights[2:4]), _address(self.vectors),
            _address(call.lengths), _address(self.order), _address(call.reset),
            *kept, scratch.data_ptr(),
        )  # fmt: skip

    def _of_states(self, groups: tuple[Sequence[Tensor | None], ...]) -> Iterator[int]:
        """The addresses of this chain's part of each state, group by group, 0 where absent."""
        chain = self.layer * self.spec.directions + self.direction
        for group in groups:
            if not group:
                yield from (0,) * len(self.spec.states)
            for state in group:
                if state is None:
                    yield 0
                else:
                    yield state.data_ptr() + chain * state.stride(0) * state.itemsize


def _padded(vectors: Sequence[Tensor | None], padded: int) -> Tensor:
    """Per-unit vectors as rows [VECTORS, padded], the padding zero."""
    rows = torch.stack([vector for vector in vectors if vector is not None])
    return torch.nn.functional.pad(rows, (0, padded - rows.shape[1]))
