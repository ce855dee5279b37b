"""Our CUDA kernels: generated for the cell, compiled at first use; a loop is one launch mostly.

float16 and bfloat16 are computed with float32 sums and float32 states; float32 with products of
tf32 or, in forward loops where h is bounded, of float16, which has as many bits
(`codegen/bounds.py`).
"""

import math
from dataclasses import replace

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
    PreferredBackend,
    PreparedCall,
    PreparedGradCall,
    Shapes,
    TensorShape,
    empty_backward,
    empty_forward,
    traced,
)
from openrnn.backends.fused import schedules
from openrnn.backends.fused.backward import BackwardPass
from openrnn.backends.fused.copies import dense
from openrnn.backends.fused.describe import describe, listed
from openrnn.backends.fused.forward import ForwardPass
from openrnn.backends.fused.layer import layer_of_call
from openrnn.backends.fused.lengths import SortedLengths, sort_lengths
from openrnn.backends.fused.program_call import ProgramCall, ProgramGradCall
from openrnn.backends.fused.schedule_key import ScheduleKey
from openrnn.backends.fused.stepwise import stepwise_kinds
from openrnn.errors import CellError
from openrnn.memory import allocator_for
from openrnn.native import cublaslt, nvrtc
from openrnn.native.device import On
from openrnn.native.recording import CURRENT, NotRepeatableError
from openrnn.schedule import execute
from openrnn.spec import BIAS_MODES, INPUT_MODES, Problem
from openrnn.tuning import choice, measured

OLDEST = (8, 0)
MOST_GATES = 16  # kernels take their order as 4 bits each


class Fused(Backend):
    """Generated CUDA kernels: R stays in registers for all steps, where they hold it.

    Args:
        spin_limit: for debugging: polls after which a waiting kernel traps; 0 waits without end.
    """

    name = "fused"
    recomputes = has_wavefronts = True
    tangents_up_to = math.inf
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

    def __init__(self, spin_limit: int = 0) -> None:
        self.spin_limit = spin_limit

    def absent(self) -> str | None:
        if not torch.cuda.is_available():
            return "torch finds no CUDA device"
        return nvrtc.absent() or cublaslt.absent()

    def refusals(self, problem: Problem) -> list[str]:
        reasons = super().refusals(problem)
        spec = problem.spec
        if problem.dtype == torch.float32 and problem.precision == "ieee":
            reasons.append('float32 products in ieee precision, needs precision="tf32"')
        if reasons or problem.capability is None:
            return reasons
        try:
            traced(spec)
        except CellError as error:
            return [str(error)]
        if len(spec.gates) > MOST_GATES:
            reasons.append(f"{len(spec.gates)} gates, takes at most {MOST_GATES}")
        return reasons

    def preferred_backend(self, problem: Problem) -> PreferredBackend | None:
        """cuDNN, where it is measured faster or was not compared."""
        if where := choice.slower(problem):
            return PreferredBackend("cudnn", where)
        where = choice.not_compared(problem)
        if (
            where is None and problem.capability is not None
            and not measured.knows(problem.capability, problem.processors)
            and not self.refusals(problem) and (kinds := stepwise_kinds(problem))
        ):  # fmt: skip
            where = (
                f"no kernel holds hidden_size {problem.spec.hidden_size} in {' and '.join(kinds)}, "
                "so each step would be a GEMM and a launch"
            )
        return PreferredBackend("cudnn", where, measured=False) if where else None

    def describe(self, problem: Problem) -> list[str]:
        """The configuration, registers and expected time of each kernel."""
        if why := nvrtc.absent():
            return [f"its kernels cannot be compiled here, to be described: {why}"]
        return describe(problem)

    def schedule(self, problem: Problem, device: torch.device) -> list[str]:
        """The operations that it runs, as `schedules` cuts and orders them; needs its device.

        They are those of a call outside of CUDA graphs. In a graph, of the caller or of a call that
        repeats, products after backward's loops run side by side where none takes more than 2 GFLOP
        (`overlap.FORK_UP_TO`).
        """
        key = ScheduleKey(
            problem, device.index or 0, problem.steps or 0, problem.batch or 0,
            problem.reset_state, problem.return_states, self.spin_limit,
        )  # fmt: skip
        return listed(key)

    def reserve(self, problem: Problem, steps: int, batch: int) -> list[TensorShape]:
        """The saved activations of each layer and direction; with recompute states between chunks.

        Then y of all layers but the last, one after the other, and with lengths the order of rows.
        """
        spec, dtype = problem.spec, problem.dtype
        # the most units that any batch has on any GPU: B may be a symbol, and has no device
        one = layer_of_call(spec, 0, dtype, None, steps, None)  # its sizes are those of all
        saved: TensorShape = one.saved_shape(steps, batch), dtype
        if one.recompute:
            saved = (
                (one.kept_chunks(steps, batch) - 1, len(spec.states), batch, spec.hidden_size),
                torch.float32,
            )
        shapes = [saved] * spec.chains
        if spec.num_layers > 1:
            width = spec.directions * spec.hidden_size
            shapes.append(((spec.num_layers - 1, steps, batch, width), dtype))
        return [*shapes, ((batch,), torch.int64)] if problem.lengths else shapes

    def forward(self, call: Call) -> Outputs:
        problem, spec, x = call.problem, call.problem.spec, call.x
        steps, batch = x.shape[0], x.shape[1]
        if steps == 0 or batch == 0:
            return empty_forward(self, call)
        call = _with_dense_states(call)
        all_states: list[Tensor] = []
        if problem.return_states:
            # kernels write nothing past the end of a sequence
            new = x.new_empty if call.lengths is None else x.new_zeros
            all_states = [new((spec.chains, steps, batch, width)) for width in spec.state_sizes]
        made: list[Tensor] = []
        saved: list[Tensor] = []
        lower: Tensor | None = None  # y of all layers but the last
        order: Tensor | None = None
        if problem.grad:
            kinds = self.reserve(problem, steps, batch)
            made = [allocator_for(kind, x.device).empty(*shape) for shape, kind in kinds]
            saved, rest = _saved(call, made), made[spec.chains :]
            if call.lengths is not None:
                order = rest.pop()
            lower = rest[0] if rest else None
        with On(x.device.index):
            schedule = schedules.forward(ScheduleKey.of(call, bool(all_states), self.spin_limit))
            lengths = None if call.lengths is None else sort_lengths(call.lengths, order)
            run = ForwardPass(call, lengths, saved, lower, all_states, self.spin_limit)
            execute(schedule, run)
        return Outputs(run.outputs[-1], run.finals, all_states, made)

    def prepare(
        self, call: Call, output_shapes: Shapes, cache: ModuleCache | None = None
    ) -> PreparedCall | None:
        try:
            return ProgramCall(self, call, output_shapes) if call.x.numel() else None
        except (NotRepeatableError, torch.OutOfMemoryError):
            return None

    def prepare_grad(
        self, call: Call, output_shapes: Shapes, input_shapes: Shapes
    ) -> PreparedGradCall | None:
        try:
            if call.x.numel():
                return ProgramGradCall(self, call, output_shapes, input_shapes)
            return None
        except (NotRepeatableError, torch.OutOfMemoryError):
            return None

    def backward(
        self, call: Call, y: Tensor, reserve: list[Tensor], grads: Cotangents, needs: Needs
    ) -> Gradients:
        spec, x = call.problem.spec, call.x
        if x.shape[0] == 0 or x.shape[1] == 0:
            return empty_backward(call, grads, needs)
        call = _with_dense_states(call)
        saved, rest = _saved(call, reserve), reserve[spec.chains :]
        lengths: SortedLengths | None = None
        if call.lengths is not None:
            lengths = SortedLengths(call.lengths.contiguous(), rest.pop())
        outputs = [rest[0][layer] for layer in range(spec.num_layers - 1)]
        all_states = any(grad is not None for grad in grads.all_states)
        with On(x.device.index):
            # in a graph, where events between streams cost the host nothing; see `Program`
            forks = CURRENT.recording is not None or torch.cuda.is_current_stream_capturing()
            cut, schedule = schedules.backward(
                ScheduleKey.of(call, all_states, self.spin_limit, forks), needs
            )
            run = BackwardPass(
                call, lengths, saved, [*outputs, y], grads, needs, cut, self.spin_limit
            )
            execute(schedule, run)
            return run.gradients  # a copy of dx without padding may be launched here


def _saved(call: Call, reserve: list[Tensor]) -> list[Tensor]:
    """The saved activations of each layer and direction, in memory for at least as many units."""
    spec, (steps, batch, _) = call.problem.spec, call.x.shape
    saved = reserve[: spec.chains]
    one = layer_of_call(spec, 0, call.x.dtype, call.x.device.index or 0, steps, batch)
    shape = one.saved_shape(steps, batch)
    if one.recompute or not saved or saved[0].shape == shape:
        return saved
    return [tensor.flatten()[: math.prod(shape)].view(shape) for tensor in saved]


def _with_dense_states(call: Call) -> Call:
    """The call with dense states, as the kernels read them, 16 bytes at a time in a single step."""
    if not call.states and not call.reset_states:
        return call
    states, reset_states = ([*map(dense, given)] for given in (call.states, call.reset_states))
    return replace(call, states=states, reset_states=reset_states)
