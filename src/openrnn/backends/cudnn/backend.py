"""The backend: which calls cuDNN takes, and the way of a call through it."""

import ctypes

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
    empty_backward,
    empty_forward,
    host_lengths,
)
from openrnn.backends.cudnn import algorithms, dropout, long, run, weights
from openrnn.backends.cudnn.reserve import reserve_bytes
from openrnn.native.cudnn import library
from openrnn.native.cudnn.descriptors import (
    ALGORITHMS,
    BATCH_MAJOR,
    CELLS,
    INPUTS,
    TIME_MAJOR,
    Kind,
)
from openrnn.native.cudnn.handles import current
from openrnn.spec import BIAS_MODES, Problem


class Cudnn(Backend):
    """NVIDIA's kernels: four cells, every algorithm, fixed equations."""

    name = "cudnn"
    packed = True
    own_masks = True
    can = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
        capability=(6, 0),
        bias_modes=frozenset(BIAS_MODES),
        input_modes=frozenset(INPUTS),
        grad=True,
        layers=True,
        bidirectional=True,
        projection=True,
        clip=True,
        dropout=True,
        lengths=True,
        algorithms=frozenset(ALGORITHMS),
    )

    def absent(self) -> str | None:
        return library.absent()

    def refusals(self, problem: Problem) -> list[str]:
        """Also refuses cells that cuDNN lacks, bounds and algorithms that do not fit the spec."""
        spec = problem.spec
        reasons = super().refusals(problem)
        if spec.cell not in CELLS:
            reasons.append(f"cell {spec.cell} is not one of cuDNN's: {', '.join(sorted(CELLS))}")
        if spec.proj_size and spec.cell in CELLS and spec.cell != "lstm":
            reasons.append(f"projection of a {spec.cell}, needs lstm")
        if problem.generator and problem.drops and not spec.reset_dropout_state:
            reasons.append(
                "its dropout goes on by itself, needs reset_dropout_state or no generator"
            )
        bounds = spec.cell_clip or ()
        if problem.dtype == torch.float64 and any(_rounded(bound) != bound for bound in bounds):
            reasons.append(f"rounds cell_clip {bounds} to float32, needs bounds that float32 holds")
        if problem.dtype == torch.bfloat16 and (problem.capability or (8, 0)) < (8, 0):
            reasons.append("dtype bfloat16 needs compute capability 8.0")
        if spec.algorithm != "auto":
            why = algorithms.unfit(spec.algorithm, problem)
            if why is not None:
                reasons.append(f"algorithm {spec.algorithm} {why}")
        return reasons

    def reserve(self, problem: Problem, steps: int, batch: int) -> list[TensorShape]:
        """One opaque buffer; beyond 65,535 steps those of each chain and chunk."""
        if steps > run.LONGEST:
            return long.reserve(problem, steps, batch)
        return [((reserve_bytes(problem, steps, batch),), torch.uint8)]

    def forward(self, call: Call) -> Outputs:
        problem, x = call.problem, call.x
        lengths, empty = lengths_of(call)
        if empty:
            return empty_forward(self, call)
        if x.dim() == 3 and x.shape[0] > run.LONGEST:
            return long.forward(call, lengths)
        with _plan(call, lengths, forward=True) as plan:
            space, alive = _weights(call, plan, anew=problem.grad)
            y, finals, reserve = run.forward(plan, space, x, call.states, lengths)
            del alive
        return Outputs(y, finals, [], [reserve] if reserve is not None and problem.grad else [])

    def backward(
        self, call: Call, y: Tensor, reserve: list[Tensor], grads: Cotangents, needs: Needs
    ) -> Gradients:
        spec = call.problem.spec
        lengths, empty = lengths_of(call)
        if empty:
            return empty_backward(call, grads, needs)
        if call.x.dim() == 3 and call.x.shape[0] > run.LONGEST:
            return long.backward(call, y, reserve, grads, needs, lengths)
        space = weights.gradients(spec, call.x) if any(needs.params) else None
        # cuDNN writes over the reserve, so another backward would need a whole one
        kept = reserve[0] if call.may_overwrite_reserve else reserve[0].clone()
        with _plan(call, lengths, forward=False) as plan:
            own, alive = _weights(call, plan, anew=False)
            dx, d_states = run.backward(
                plan, own, run.Passed(call.x, y, call.states, kept), lengths, grads.y,
                grads.finals, needs.states, space,
            )  # fmt: skip
            del alive
        d_params: list[Tensor | None] = [None] * len(call.params)
        if space is not None:
            d_params = weights.split(spec, space, needs.params)
        return Gradients(dx if needs.x else None, d_states, d_params, [])


def _rounded(bound: float) -> float:
    """The nearest number of float32."""
    return ctypes.c_float(bound).value


def lengths_of(call: Call) -> tuple[run.Lengths | None, bool]:
    """The lengths where any ends early, and whether no row has a step."""
    x = call.x
    if call.lengths is None:
        return None, x.shape[0] == 0 or x.shape[1] == 0
    host = host_lengths(call.lengths)
    if host.numel() == 0:
        return None, True
    low, high = (int(value) for value in host.aminmax())
    if x.dim() == 2:
        return run.Lengths(host, call.lengths, False, high), False
    if low == x.shape[0]:
        return None, high == 0
    return run.Lengths(host, call.lengths, low == 0, x.shape[0]), high == 0


def _plan(call: Call, lengths: run.Lengths | None, forward: bool) -> run.CallPlan:
    """The plan of a call on the device and stream of x; those without lengths are kept."""
    problem, spec, x = call.problem, call.problem.spec, call.x
    handle = current(x.device.index)
    steps, batch = x.shape[0], x.shape[1]
    if lengths is not None:
        steps, batch = lengths.steps, lengths.host.numel()
    drop = None
    if problem.drops:
        drop = dropout.states_of(handle, call) if forward else dropout.idle(handle)
    address = 0 if drop is None else drop.data_ptr()
    math = run.math_of(x.dtype, problem.precision)
    turned = not x.is_contiguous() and x.transpose(0, 1).is_contiguous()
    key = (problem, steps, batch, math, turned, address)
    if lengths is None:
        found = handle.plans.get(key)
        if isinstance(found, run.CallPlan):
            return found
    algorithm = algorithms.choose(problem, x, lengths is not None)
    layout = run.layout_of(x, algorithm)
    kind = Kind(
        spec, x.dtype, math, algorithm,
        layout == BATCH_MAJOR or (layout == TIME_MAJOR and lengths is not None), address,
        (x.device.index, batch) if algorithm == "persist_dynamic" else None,
    )  # fmt: skip
    plan = run.CallPlan(
        handle, kind, layout, steps, batch, training=problem.grad or problem.drops,
        host=None if lengths is None else lengths.host, states=drop,
        least=reserve_bytes(problem, steps, batch) if problem.grad and x.dim() == 3 else 0,
    )  # fmt: skip
    if lengths is None:
        run.keep(handle, key, plan)
    return plan


def _weights(call: Call, plan: run.CallPlan, anew: bool) -> tuple[tuple[int, int], object]:
    """Size and address of the weight space, and what keeps it alive."""
    address, alive = weights.flat(call.problem.spec, call.params, plan.handle.stream, anew)
    return (plan.weights, address), alive
