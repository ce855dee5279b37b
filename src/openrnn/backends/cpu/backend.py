"""The CPU backend: numba kernels, generated from the cell's trace, that run batch tiles on threads.

float16 and bfloat16 are computed in float32 and rounded at the end.
"""

from importlib.util import find_spec

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
from openrnn.backends.cpu import reserve as reserves
from openrnn.backends.cpu import schedules, tensors
from openrnn.backends.cpu.backward import Backward
from openrnn.backends.cpu.forward import Forward
from openrnn.backends.cpu.layer import compute_dtype
from openrnn.errors import CellError
from openrnn.schedule import execute
from openrnn.spec import BIAS_MODES, INPUT_MODES, Problem


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

    def schedule(self, problem: Problem, device: torch.device) -> list[str]:
        """The operations that it runs, as `schedules` orders them."""
        return schedules.listed(problem)

    def reserve(self, problem: Problem, steps: int, batch: int) -> list[TensorShape]:
        """Layer by layer the saved activations of each direction, then y of all but the last."""
        return reserves.shapes(problem, steps, batch)

    def forward(self, call: Call) -> Outputs:
        problem, spec = call.problem, call.problem.spec
        steps, batch = call.x.shape[0], call.x.shape[1]
        if steps == 0 or batch == 0:
            return nothing(self, call)
        given, dtype = call.x.dtype, compute_dtype(call.x.dtype)
        call = tensors.readable(call, dtype)
        finals = [call.x.new_empty(shape) for shape in state_shapes(problem, batch)]
        all_states: list[Tensor] = []
        if problem.return_states:
            shapes = [(spec.chains, steps, batch, width) for width in spec.state_sizes]
            all_states = [call.x.new_empty(shape) for shape in shapes]
        reserve = reserves.new(problem, steps, batch) if problem.grad else []
        saved = reserves.by_layer(spec, reserve) if problem.grad else None
        run = Forward(call, tensors.rows_by_length(call), saved, finals, all_states)
        execute(schedules.forward(spec.num_layers, spec.directions, steps), run)
        y = run.y
        if given != dtype:
            y, finals = y.to(given), [state.to(given) for state in finals]
            all_states = [states.to(given) for states in all_states]
        return Outputs(y, finals, all_states, reserve)

    def backward(
        self, call: Call, y: Tensor, reserve: list[Tensor], grads: Cotangents, needs: Needs
    ) -> Gradients:
        steps, batch = call.x.shape[0], call.x.shape[1]
        if steps == 0 or batch == 0:
            return nothing_back(call, grads, needs)
        spec, given = call.problem.spec, call.x.dtype
        call = tensors.readable(call, compute_dtype(given))
        saved = reserves.by_layer(spec, reserve)
        run = Backward(call, tensors.rows_by_length(call), y, saved, grads, needs)
        execute(schedules.backward(spec.num_layers, spec.directions, steps), run)
        return tensors.returned(run.gradients, given)
