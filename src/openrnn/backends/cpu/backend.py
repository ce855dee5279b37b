"""The CPU backend: numba kernels, generated from the cell's trace, that run batch tiles on threads.

float16 and bfloat16 are computed in float32 and rounded at the end; `rounding` has the exception.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from openrnn.backends.base import (
    Backend,
    Call,
    Capabilities,
    Cotangents,
    Gradients,
    ModuleCache,
    Needs,
    Outputs,
    PreparedCall,
    PreparedGradCall,
    Shapes,
    TensorShape,
    empty_backward,
    empty_forward,
    traced,
)
from openrnn.backends.cpu import (
    backward,
    call_16bit,
    describe,
    forward,
    rounding,
    schedules,
    tensors,
)
from openrnn.backends.cpu import reserve as reserves
from openrnn.backends.cpu.layer import compute_dtype
from openrnn.backends.cpu.program_builder import program_key, values
from openrnn.backends.cpu.program_call import ProgramCall, ProgramGradCall
from openrnn.errors import CellError
from openrnn.spec import BIAS_MODES, INPUT_MODES, Problem


class Cpu(Backend):
    """Generated numba kernels: the whole time loop of a layer and direction in one call."""

    name = "cpu"
    # beyond, products over all steps take most of the time: the reference was as quick at 4,096 or
    # so, and takes three quarters of the time at 8,192 (benchmarks/log/cpu.md)
    tangents_up_to = 4096
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
        int8=True,
    )

    def absent(self) -> str | None:
        return None if find_spec("numba") else "package numba is not installed"

    def refusals(self, problem: Problem) -> list[str]:
        """Also refuses cells with an operator that has no CPU kernel."""
        reasons = super().refusals(problem)
        if not reasons:
            try:
                why = traced(problem.spec).no_float64_reason
            except CellError as error:
                reasons.append(str(error))
            else:
                reasons += [why] if why and problem.dtype == torch.float64 else []
        return reasons

    def describe(self, problem: Problem) -> list[str]:
        """How it reads weights, and how threads share its loops."""
        return describe.describe(problem)

    def schedule(self, problem: Problem, device: torch.device) -> list[str]:
        """The operations that it runs, as `schedules` orders them."""
        return schedules.listed(problem)

    def reserve(self, problem: Problem, steps: int, batch: int) -> list[TensorShape]:
        """Layer by layer the saved activations of each direction, then y of all but the last."""
        return reserves.shapes(problem, steps, batch)

    def forward(self, call: Call) -> Outputs:
        problem, steps, batch = call.problem, call.x.shape[0], call.x.shape[1]
        if steps == 0 or batch == 0:
            return empty_forward(self, call)
        given, dtype = call.x.dtype, compute_dtype(call.x.dtype)
        call = tensors.readable(call, dtype, rounding.reads_in_place(problem, steps, batch))
        order = tensors.rows_by_length(call)
        made = forward.program(program_key(call)).run(values(call, order))
        states = 1 + len(problem.spec.states)
        y, finals, rest = made[0], made[1:states], made[states:]
        all_states: list[Tensor] = []
        if problem.return_states:
            all_states, rest = rest[: states - 1], rest[states - 1 :]
        if given != dtype:
            y, finals = y.to(given), [state.to(given) for state in finals]
            all_states = [states.to(given) for states in all_states]
        return Outputs(y, finals, all_states, rest)

    def prepare(
        self, call: Call, output_shapes: Shapes, cache: ModuleCache | None = None
    ) -> PreparedCall | None:
        if tensors.is_readable(call):
            return ProgramCall(call, output_shapes, cache)
        if tensors.is_convertible(call):
            return call_16bit.Call16Bit(call, output_shapes, cache)
        return None

    def prepare_grad(
        self, call: Call, output_shapes: Shapes, input_shapes: Shapes
    ) -> PreparedGradCall | None:
        if tensors.is_readable(call):
            return ProgramGradCall(call, output_shapes, input_shapes)
        if tensors.is_convertible(call):
            return call_16bit.GradCall16Bit(call, output_shapes, input_shapes)
        return None

    def bind(self, call: Call, results: Sequence[Tensor]) -> Callable[[Tensor], None] | None:
        if tensors.is_readable(call):
            return forward.bound(call, results)
        return call_16bit.bound(call, results) if tensors.is_convertible(call) else None

    def backward(
        self, call: Call, y: Tensor, reserve: list[Tensor], grads: Cotangents, needs: Needs
    ) -> Gradients:
        steps, batch = call.x.shape[0], call.x.shape[1]
        if steps == 0 or batch == 0:
            return empty_backward(call, grads, needs)
        given, dtype = call.x.dtype, compute_dtype(call.x.dtype)
        in_place = rounding.backward_reads_in_place(call.problem, steps, batch)
        call = tensors.readable(call, dtype, in_place)
        grads = tensors.readable_gradients(grads, dtype)
        order, y = tensors.rows_by_length(call), tensors.converted(y, dtype).contiguous()
        reserve = [each.contiguous() for each in reserve]  # a hook of saved tensors may turn them
        incoming = backward.IncomingGradients(
            grads.y is not None,
            tuple([grad is not None for grad in grads.finals]),
            tuple([grad is not None for grad in grads.all_states]),
        )
        found = backward.program(program_key(call), incoming, needs)
        made = found.program.run(values(call, order) + backward.values(y, reserve, grads))
        groups = found.states, found.params, found.reset_states
        gradients = Gradients(
            backward.gradient(found.x, made),
            *([backward.gradient(one, made) for one in group] for group in groups),
        )
        return tensors.returned(gradients, given)
