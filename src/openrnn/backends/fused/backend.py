"""Our CUDA kernels: generated for the cell, compiled at first use, one launch a direction.

float16 and bfloat16 are computed with float32 sums and float32 states; float32 with products of
tf32 or, in forward where h is bounded, of float16, which has as many bits (`codegen/bounds.py`).
"""

import torch
from torch import Tensor

from openrnn.backends.base import (
    Backend,
    Call,
    Capabilities,
    Cotangents,
    Faster,
    Gradients,
    Needs,
    Outputs,
    TensorShape,
    nothing,
    nothing_back,
    state_shapes,
    traced,
)
from openrnn.backends.fused import choice, gradients, kernels
from openrnn.backends.fused.chain import chain
from openrnn.backends.fused.describe import describe
from openrnn.backends.fused.ragged import Rows, blanked, ordered
from openrnn.backends.fused.run import Run, dropped
from openrnn.errors import CellError
from openrnn.native import cublaslt, nvrtc
from openrnn.native.device import On
from openrnn.params import places
from openrnn.spec import BIAS_MODES, INPUT_MODES, Problem, Spec

OLDEST = (8, 0)
MOST_GATES = 16  # their order crosses to kernels as 4 bits each


class Fused(Backend):
    """Generated CUDA kernels: the recurrent matrix stays in registers for all steps."""

    name = "fused"
    recomputes = True
    can = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
        capability=OLDEST,
        bias_modes=frozenset(BIAS_MODES),
        input_modes=frozenset(INPUT_MODES),
        grad=True,
        layers=True,
        bidirectional=True,
        clip=True,
        dropout=True,
        lengths=True,
        reset=True,
        return_states=True,
    )

    def absent(self) -> str | None:
        if not torch.cuda.is_available():
            return "torch finds no CUDA device"
        return nvrtc.absent() or cublaslt.absent()

    def refusals(self, problem: Problem) -> list[str]:
        reasons = super().refusals(problem)
        spec = problem.spec
        if problem.dtype == torch.float32 and problem.precision == "ieee":
            reasons.append("float32 products in ieee precision, needs tf32")
        if reasons or problem.capability is None:
            return reasons
        try:
            traced(spec)
        except CellError as error:
            return [str(error)]
        if len(spec.gates) > MOST_GATES:
            reasons.append(f"{len(spec.gates)} gates, takes at most {MOST_GATES}")
        return reasons + _unplanned(problem)

    def yields(self, problem: Problem) -> Faster | None:
        """cuDNN, where it is measured faster."""
        where = choice.slower(problem)
        return Faster("cudnn", where) if where else None

    def describe(self, problem: Problem) -> list[str]:
        """Variant, tiles, registers and the expected time of each kernel."""
        return describe(problem)

    def reserve(self, problem: Problem, steps: int, batch: int) -> list[TensorShape]:
        """For each chain its records or what its parts carry; of each lower layer its output.

        Last, with lengths, the order of the rows.
        """
        spec, dtype = problem.spec, problem.dtype
        one = chain(spec, 0, dtype, 0)  # all are alike in this
        held: TensorShape = one.records(steps, batch), dtype
        if one.again:
            number = one.parts(steps, batch, True)
            held = (number - 1, len(spec.states), batch, spec.hidden_size), torch.float32
        kept: list[TensorShape] = []
        for layer in range(spec.num_layers):
            kept += [held] * spec.directions
            if layer < spec.num_layers - 1:
                kept.append(((steps, batch, spec.directions * spec.hidden_size), dtype))
        if problem.lengths:
            kept.append(((batch,), torch.int64))
        return kept

    def forward(self, call: Call) -> Outputs:
        problem, spec, x = call.problem, call.problem.spec, call.x
        steps, batch = x.shape[0], x.shape[1]
        if steps == 0 or batch == 0:
            return nothing(self, call)
        call = _laid_out(call)
        finals = [x.new_empty(shape) for shape in state_shapes(problem, batch)]
        every: list[Tensor] = []
        if problem.return_states:
            # past a sequence's end nothing is written
            fresh = x.new_empty if call.lengths is None else x.new_zeros
            shapes = [(spec.chains, steps, batch, width) for width in spec.state_sizes]
            every = [fresh(shape) for shape in shapes]
        reserve: list[Tensor] = []
        if problem.grad:
            kinds = self.reserve(problem, steps, batch)
            reserve = [x.new_empty(shape, dtype=kind) for shape, kind in kinds]
        width = spec.directions * spec.hidden_size
        kept = iter(_by_layer(spec, reserve))
        with On(x.device.index):
            rows = ordered(call.lengths, reserve[-1] if reserve else None)
            for layer in range(spec.num_layers):
                held, _ = next(kept, ([None] * spec.directions, None))
                y = x.new_empty(steps, batch, width)
                for direction in range(spec.directions):
                    run = Run(call, layer, direction, rows)
                    run.forward(x, y, held[direction], finals, every)
                if reserve and layer < spec.num_layers - 1:
                    reserve[(layer + 1) * (spec.directions + 1) - 1] = y
                x = dropped(call, layer, y) if layer < spec.num_layers - 1 else y
        return Outputs(x, finals, every, reserve)

    def backward(
        self, call: Call, y: Tensor, reserve: list[Tensor], grads: Cotangents, needs: Needs
    ) -> Gradients:
        spec, x = call.problem.spec, call.x
        if x.shape[0] == 0 or x.shape[1] == 0:
            return nothing_back(call, grads, needs)
        call = _laid_out(call)
        d_finals = [None if grad is None else grad.contiguous() for grad in grads.finals]
        d_every = [None if grad is None else grad.contiguous() for grad in grads.all_states]
        d_states = [s.new_zeros(s.shape) if n else None for s, n in zip(call.states, needs.states)]
        d_fresh = [
            s.new_zeros(s.shape) if n else None
            for s, n in zip(call.reset_states, needs.reset_states)
        ]
        states = d_finals, d_every, d_states, d_fresh
        d_params: list[Tensor | None] = [None] * len(call.params)
        rows = None if call.lengths is None else Rows(call.lengths.contiguous(), reserve[-1])
        kept = _by_layer(spec, reserve)
        dy = grads.y
        dx = None
        with On(x.device.index):
            for layer in reversed(range(spec.num_layers)):
                held, output = kept[layer]
                output = y if output is None else output
                below = _below(call, layer, kept)
                dx = None
                for direction in range(spec.directions):
                    here = places(spec)[layer * spec.directions + direction]
                    wants = [place is not None and needs.params[place] for place in here]
                    asked = (layer > 0 or needs.x, *wants)
                    run = Run(call, layer, direction, rows, asked)
                    part, found = gradients.backward(
                        run, below, output, held[direction], dy, states, asked
                    )
                    if part is not None:
                        dx = part if dx is None else dx.add_(part)
                    for place, grad in zip(here, found):
                        if place is not None and needs.params[place]:
                            d_params[place] = grad
                if layer > 0 and dx is not None:
                    dx = dropped(call, layer - 1, dx)
                dy = dx
        return Gradients(dx if needs.x else None, list(d_states), d_params, list(d_fresh))


def _unplanned(problem: Problem) -> list[str]:
    """Why no tiles hold the recurrent matrix, by the plan alone: what compiles runs, see `fitting`.

    A problem does not say whether fresh states are given: their kernels are taken for the others.
    """
    spec, capability = problem.spec, problem.capability
    if capability is None:
        return []
    cell, dtype = traced(spec), str(problem.dtype).removeprefix("torch.")
    many = f" with {problem.processors} multiprocessors" if problem.processors else ""
    where = f"of compute capability {capability[0]}.{capability[1]}{many}"
    for kind, flags in kernels.kinds(
        spec, problem.grad, problem.lengths, problem.reset, problem.return_states
    ):
        asked = kind, cell, dtype, spec.hidden_size, 1
        if next(kernels.holding(*asked, flags, capability, problem.processors), None) is None:
            return [f"hidden_size {spec.hidden_size}: its recurrent matrix fits no kernel {where}"]
    return []


def _laid_out(call: Call) -> Call:
    """The call with states as the kernels read them."""
    if not call.states and not call.reset_states:
        return call

    def plain(tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.contiguous() for tensor in tensors]

    return Call(
        call.problem, call.x, plain(call.states), call.params, call.lengths, call.reset,
        plain(call.reset_states), call.seed,
    )  # fmt: skip


def _below(call: Call, layer: int, kept: list[tuple[list[Tensor], Tensor | None]]) -> Tensor:
    """What a layer read: x, or the masked output of the layer below."""
    if layer == 0:
        return call.x if call.lengths is None else blanked(call.x, call.lengths)
    output = kept[layer - 1][1]
    if output is None:
        raise ValueError(f"the reserve lacks the output of layer {layer - 1}")
    return dropped(call, layer - 1, output)


def _by_layer(spec: Spec, reserve: list[Tensor]) -> list[tuple[list[Tensor], Tensor | None]]:
    """A reserve, layer by layer: what each direction kept, and the output but of the last layer."""
    last = spec.num_layers - 1
    rest = iter(reserve)
    return [
        ([next(rest) for _ in range(spec.directions)], next(rest) if layer < last else None)
        for layer in range(spec.num_layers if reserve else 0)
    ]
