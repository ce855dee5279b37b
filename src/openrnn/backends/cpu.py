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
from openrnn.params import Chain, chains, places
from openrnn.spec import BIAS_MODES, INPUT_MODES, Problem, Spec

if TYPE_CHECKING:
    from openrnn.codegen.trace import Traced
    from openrnn.kernels.layout import Layout

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
        """For each chain gate rows, recurrent sides, states and unprojected outputs; lower outputs."""
        spec, dtype = problem.spec, _inside(problem.dtype)
        kept: list[TensorShape] = []
        for layer in range(spec.num_layers):
            sizes = _layout(spec, layer, dtype)
            widths = (
                sizes.columns, sizes.kept * sizes.padded, sizes.others * sizes.padded,
                sizes.padded if sizes.projecting else 0,
            )  # fmt: skip
            for _ in range(spec.directions):
                kept += [((steps, batch, width), dtype) for width in widths]
            if layer < spec.num_layers - 1:
                kept.append(((steps, batch, spec.directions * spec.output_size), dtype))
        return kept

    def forward(self, call: Call) -> Outputs:
        problem, spec = call.problem, call.problem.spec
        outer, dtype = call.x.dtype, _inside(call.x.dtype)
        call = _converted(call, dtype)
        steps, batch = call.x.shape[0], call.x.shape[1]
        finals = [call.x.new_empty(shape) for shape in state_shapes(problem, batch)]
        every = []
        if problem.return_states:
            shapes = [(spec.chains, steps, batch, width) for width in spec.state_sizes]
            every = [call.x.new_empty(shape) for shape in shapes]
        reserve = []
        if problem.grad:
            shapes_and_types = self.reserve(problem, steps, batch)
            reserve = [torch.empty(shape, dtype=kind) for shape, kind in shapes_and_types]
        kept = iter(reserve)
        order = None if call.lengths is None else call.lengths.argsort(stable=True, descending=True)
        x, parts = call.x, chains(spec, call.params)
        width = spec.directions * spec.output_size
        for layer in range(spec.num_layers):
            held = [[next(kept, None) for _ in range(4)] for _ in range(spec.directions)]
            last = layer == spec.num_layers - 1
            y = None if last else next(kept, None)
            y = call.x.new_empty(steps, batch, width) if y is None else y
            for direction in range(spec.directions):
                run = _Run(call, layer, direction, parts[layer * spec.directions + direction], order)
                run.forward(x, y, held[direction], finals, every)
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
        order = None if call.lengths is None else call.lengths.argsort(stable=True, descending=True)
        parts = chains(spec, call.params)
        d_params: list[Tensor | None] = [None] * len(call.params)
        per_layer = 4 * spec.directions + 1
        dx: Tensor | None = None
        for layer in reversed(range(spec.num_layers)):
            first = layer * per_layer
            last = layer == spec.num_layers - 1
            below = reserve[first - 1] if layer else call.x
            output = y if last else reserve[first + per_layer - 1]
            dx = None
            if layer or needs.x:
                blank = call.lengths is not None
                dx = (torch.zeros_like if blank else torch.empty_like)(
                    below, memory_format=torch.contiguous_format
                )
            for direction in range(spec.directions):
                chain = layer * spec.directions + direction
                run = _Run(call, layer, direction, parts[chain], order)
                held = reserve[first + 4 * direction : first + 4 * direction + 4]
                here = places(spec)[chain]
                weighs = any(place is not None and needs.params[place] for place in here)
                found = run.backward(
                    below, output, held, dy, dx, (d_states, d_fresh, d_finals, d_every), weighs
                )
                for place, grad in zip(here, found):
                    if place is not None and needs.params[place]:
                        d_params[place] = grad
            dy = dx
        return Gradients(
            _to(dx if needs.x else None, outer), [_to(grad, outer) for grad in d_states],
            [_to(grad, outer) for grad in d_params], [_to(grad, outer) for grad in d_fresh],
        )  # fmt: skip


def _to(tensor: Tensor | None, dtype: torch.dtype, contiguous: bool = False) -> Any:
    if tensor is None:
        return None
    tensor = tensor.to(dtype)
    return tensor.contiguous() if contiguous else tensor


def _converted(call: Call, dtype: torch.dtype) -> Call:
    """The call in the type that the kernels compute in, every tensor laid out as they read it."""

    def plain(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.to(dtype).contiguous() for tensor in tensors]

    return Call(
        call.problem, _rows(call.x.to(dtype)), plain(call.states), plain(call.params),
        None if call.lengths is None else call.lengths.contiguous(),
        None if call.reset is None else call.reset.contiguous(), plain(call.reset_states),
        call.seed,
    )  # fmt: skip


def _rows(tensor: Tensor) -> Tensor:
    """The tensor, copied where its last dimension is not contiguous."""
    return tensor if tensor.shape[-1] == 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class _Run:
    """One layer and direction of a call: fills the kernels' jobs and runs them."""

    def __init__(
        self, call: Call, layer: int, direction: int, weights: Chain, order: Tensor | None
    ) -> None:
        self.call, self.layer, self.direction, self.weights = call, layer, direction, weights
        self.order = order
        self.spec = call.problem.spec
        self.chain = layer * self.spec.directions + direction
        self.sizes = _layout(self.spec, layer, call.x.dtype)
        self.steps, self.batch = call.x.shape[0], call.x.shape[1]
        self.cell = _traced(self.spec)
        vectors = weights.unit
        self.vectors: Tensor | None = None
        if vectors:
            self.vectors = call.x.new_zeros(len(vectors), self.sizes.padded)
            self.vectors[:, : self.sizes.units] = torch.stack(vectors)

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        held: list[Tensor | None],
        finals: list[Tensor],
        every: list[Tensor],
    ) -> None:
        from openrnn.codegen import build
        from openrnn.kernels import launch, matrices

        sizes, weights = self.sizes, self.weights
        packs = self.steps * self.batch >= launch.PACK_FROM
        w_ih, w_hh, w_hr = weights.w_ih, weights.w_hh, weights.w_hr
        if packs:
            w_ih = w_ih if w_ih is None else matrices.transposed(w_ih, sizes.gates, sizes.padded)
            w_hh = matrices.transposed(w_hh, sizes.gates, sizes.padded)
        if w_hr is not None:
            w_hr = matrices.transposed(w_hr, 1, sizes.width)
        threads = launch.threads()
        rows = sizes.tile_rows(self.batch, threads)
        chunk = sizes.chunk(self.steps, rows)
        tasks = sizes.tasks(self.steps, self.batch, rows, threads)
        room = sizes.forward_scratch(rows, chunk, held[0] is not None)
        scratch = torch.empty(tasks * room, dtype=torch.uint8)
        job = self._job(x, y, rows, chunk, (w_ih, w_hh, w_hr), packs, held)
        job += [scratch.data_ptr(), room] + [0] * 9
        job += self._states(self.call.states, self.call.reset_states, finals, every)
        hold = (x, y, w_ih, w_hh, w_hr, scratch, self, held, finals, every)
        launch.run(build.forward(self.cell, sizes.dtype), job, tasks, self._scale, hold)

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
        from openrnn.codegen import build
        from openrnn.kernels import launch, matrices

        sizes, weights = self.sizes, self.weights
        w_ih, w_hr = weights.w_ih, weights.w_hr
        if w_ih is not None and dx is not None:
            w_ih = matrices.plain(w_ih, sizes.gates, sizes.padded)
        w_hh = matrices.plain(weights.w_hh, sizes.gates, sizes.padded)
        if w_hr is not None:
            w_hr = matrices.plain(w_hr, 1, sizes.outputs)
        threads = launch.threads()
        rows = sizes.tile_rows(self.batch, threads)
        chunk = sizes.chunk(self.steps, rows)
        tasks = sizes.tasks(self.steps, self.batch, rows, threads)
        room = sizes.backward_scratch(rows, chunk)
        scratch = torch.empty(tasks * room, dtype=torch.uint8)
        total = sum(sizes.sums)
        sums = x.new_zeros(tasks, total) if weighs or weights.unit else None
        dy = None if dy is None else _rows(dy)
        job = self._job(x, y, rows, chunk, (w_ih, w_hh, w_hr), True, held)
        job += [scratch.data_ptr(), room]
        job += self._beside(dy) + ([0] * 3 if dx is None else [dx.data_ptr(), *dx.stride()[:2]])
        job += [self.direction, _address(sums), total * sizes.size]
        job += self._states(self.call.states, self.call.reset_states, [], [])
        job += self._states(*states)
        hold = (x, y, w_ih, w_hh, w_hr, scratch, self, held, dy, dx, states, sums)
        launch.run(build.backward(self.cell, sizes.dtype), job, tasks, self._scale, hold)
        return self._sums(sums) if sums is not None else []

    @property
    def _scale(self) -> float:
        return philox.scale(self.spec.dropout)

    def _beside(self, y: Tensor | None) -> list[int]:
        """Address and strides of this direction's part of (T, B, D*O)."""
        if y is None:
            return [0, 0, 0]
        offset = self.direction * self.spec.output_size * y.element_size()
        return [y.data_ptr() + offset, *y.stride()[:2]]

    def _job(
        self,
        x: Tensor,
        y: Tensor,
        rows: int,
        chunk: int,
        matrices: tuple[Tensor | None, ...],
        packs: bool,
        held: Sequence[Tensor | None],
    ) -> list[int]:
        """The fields of `kernels.jobs` up to `scratch`, in its order."""
        call, sizes, weights = self.call, self.sizes, self.weights
        kept, kept_r, history, projected = map(_address, held)
        drops = call.problem.drops and self.layer > 0
        low = high = offset = 0
        if drops and call.seed is not None:
            low, high, offset = philox.split(call.seed)
        # the mask belongs to the output of the layer below
        word = (self.layer - 1 + 256 * offset) & philox.WORD
        return [
            self.steps, self.batch, sizes.inputs, sizes.units, sizes.outputs, sizes.padded,
            sizes.columns, sizes.width, sizes.wide,
            self.direction, rows, chunk,
            x.data_ptr(), *x.stride()[:2], *self._beside(y),
            *map(_address, matrices), packs, weights.w_ih is None,
            _address(weights.b_ih), _address(weights.b_hh), _address(self.vectors),
            _address(call.lengths), _address(self.order), _address(call.reset),
            kept, kept_r if sizes.kept else 0, history if sizes.others else 0,
            projected if sizes.projecting else 0,
            drops, low, high, word, philox.threshold(self.spec.dropout),
        ]  # fmt: skip

    def _states(self, *groups: Sequence[Tensor | None]) -> list[int]:
        """The addresses of this chain's part of each group of states, 0 for one that is absent."""
        addresses: list[int] = []
        for group in groups:
            for place in range(len(self.spec.states)):
                state = group[place] if place < len(group) else None
                if state is None:
                    addresses.append(0)
                else:
                    step = state.stride(0) * state.element_size()
                    addresses.append(state.data_ptr() + self.chain * step)
        return addresses

    def _sums(self, sums: Tensor) -> list[Tensor | None]:
        sizes, weights = self.sizes, self.weights
        gates, padded, units = sizes.gates, sizes.padded, sizes.units
        total = sums[0] if sums.shape[0] == 1 else sums.sum(0)
        w_ih, w_hh, w_hr, b_x, b_r, vectors = total.split(list(sizes.sums))

        def by_gate(flat: Tensor, width: int, kept: int) -> Tensor:
            rows = flat.view(-1, width)[: gates * padded].view(gates, padded, width)
            return rows[:, :units, :kept].reshape(gates * units, kept)

        d_x = by_gate(b_x, 1, 1).flatten()
        d_r = d_x if sizes.summed else by_gate(b_r, 1, 1).flatten()
        found: list[Tensor | None] = [
            None if weights.w_ih is None else by_gate(w_ih, sizes.wide, sizes.inputs),
            by_gate(w_hh, sizes.width, sizes.outputs),
            None if weights.b_ih is None else d_x,
            None if weights.b_hh is None else (d_r.clone() if d_r is d_x else d_r),
            None if weights.w_hr is None else w_hr.view(-1, padded)[:, :units].contiguous(),
        ]
        rows = vectors.view(-1, padded)[:, :units]
        return found + [row.clone() for row in rows]
