"""Which calls have derivatives by kernels of the tangent cell, and networks as loops of them."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from openrnn import philox, problem_key
from openrnn.backends.base import Backend, Call, Cotangents, Needs, Outputs
from openrnn.cells import lookup
from openrnn.dispatch import BACKENDS, DeviceInfo, device_info
from openrnn.errors import CellError
from openrnn.higher import agreement, functions, wide
from openrnn.higher.functions import Pass
from openrnn.higher.tangent import spec_of
from openrnn.memo import memo
from openrnn.params import places
from openrnn.reference import differentiate
from openrnn.spec import Problem, Spec
from openrnn.time_reversed import flip_time
from openrnn.time_reversed import forward as reversed_forward

Loop = Callable[[str, Call], Outputs]
UNKNOWN_DEVICE: DeviceInfo = (None, None)
# T from which second derivatives take less time by kernels: benchmarks/log/cpu.md. On a GPU the
# times at T 32 and 256 (suite `higher`) say 3.4
LEAST_STEPS = 3


def refusal(
    backend: str, problem: Problem, device: torch.device, steps: int | None, batch: int | None
) -> str | None:
    """Why second derivatives of a call of this backend are the reference's; None if they are not.

    Args:
        device: where its tensors are; asked if the problem names no compute capability.
        steps, batch: T and B, where they are known.
    """
    why = _refusal(backend, problem, _device_info(problem, device), True)
    why = why or agreement.refusal(problem.spec, forward=False)
    if why is None and steps is not None and steps < LEAST_STEPS:
        return f"T is {steps}, and kernels are quicker from {LEAST_STEPS} on"
    if why is None and batch is not None:
        width, most = batch * problem.spec.hidden_size, BACKENDS[backend].tangents_up_to
        if width > most:
            return f"B * H is {width}, and kernels are quicker up to {most}"
    return why


def forward_refusal(backend: str, problem: Problem, device: torch.device) -> str | None:
    """Why no kernels run forward mode, or None; whatever T and B: kernels won wherever measured."""
    why = _refusal(backend, problem, _device_info(problem, device), problem.grad)
    return why or agreement.refusal(problem.spec, forward=True)


def _device_info(problem: Problem, device: torch.device) -> DeviceInfo:
    """What decides which kernels of the tangent cell there are."""
    if problem.capability is not None:
        return problem.capability, problem.processors
    return device_info(device) if device.type == "cuda" else UNKNOWN_DEVICE


@memo(1024)
def _refusal(backend: str, problem: Problem, device: DeviceInfo, grad: bool) -> str | None:
    """What no B changes; grad: the loop of the tangent cell also runs backward."""
    spec = problem.spec
    if not BACKENDS[backend].tangents_up_to:
        return f"backend {backend} runs no tangent cells"
    if spec.proj_size:
        return "the network has a projection"
    try:
        asked = tangent_problem(problem, device, grad)
    except CellError as error:
        return str(error)
    why = next(iter(BACKENDS[backend].refusals(asked)), None)
    name, gates = lookup(spec.cell).name, len(asked.spec.gates)
    return why and f"for the derivative of {name}, a cell of {gates} gates, {why}"


def tangent_problem(problem: Problem, device: DeviceInfo, grad: bool) -> Problem:
    """The loop of the tangent cell; `grad`: it also runs backward.

    Raises:
        CellError: there is no such cell.
    """
    tangent, problem = spec_of(problem.spec), wide.problem_of(problem)
    asked = problem_key.for_backend(
        tangent, problem.dtype, problem.device, grad=grad, training=False, lengths=problem.lengths,
        reset=problem.reset, return_states=True, precision=problem.precision,
    )  # fmt: skip
    capability, processors = device
    return replace(asked, capability=capability, processors=processors)


def differentiated(
    backend: str, call: Call, grads: Cotangents, needs: Needs, run: Pass
) -> list[Tensor | None]:
    """The gradients of a call, linked to its tensors and to what reaches its results.

    Args:
        call: of which `refusal` is None.
        run: its backward pass.
    """
    if is_loop(call.problem.spec):
        return [*functions.backward(backend, call, grads, needs, run)]
    return differentiate(call, grads, needs, True, lambda again: network(backend, again))


def is_loop(spec: Spec) -> bool:
    """Whether a network is one layer and direction that runs forward in time."""
    return spec.chains == 1 and not spec.reverse


def network(backend: str, call: Call, loop: Loop = functions.loop) -> Outputs:
    """A call, loop by loop: what `reference.run` does, by kernels.

    Args:
        loop: what runs one layer and direction that runs forward in time.
    """
    spec, problem, x = call.problem.spec, call.problem, call.x
    shim = _Loops(backend, loop)
    finals: list[list[Tensor]] = []
    every: list[list[Tensor]] = []
    for layer in range(spec.num_layers):
        outputs = []
        for direction in range(spec.directions):
            out = reversed_forward(shim, _loop_of(call, x, layer, direction))
            outputs.append(out.y)
            finals.append(out.finals)
            every.append(out.all_states)
        x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
        if problem.drops and layer < spec.num_layers - 1:
            if call.seed is None:
                raise ValueError("dropout needs a seed")
            mask = philox.mask(call.seed, layer, spec.dropout, (*x.shape,), x)
            x = x * (flip_time(mask, call.lengths) if spec.reverse else mask)
    ends, states = ([torch.cat(parts) for parts in zip(*group)] for group in (finals, every))
    return Outputs(x, ends, states, [])


def _loop_of(call: Call, x: Tensor, layer: int, direction: int) -> Call:
    """The call of one layer and direction, which may be reverse."""
    spec, problem = call.problem.spec, call.problem
    chain = layer * spec.directions + direction
    made = problem_key.for_backend(
        _one(spec, layer, direction), problem.dtype, problem.device, grad=True, training=False,
        lengths=problem.lengths, reset=problem.reset, return_states=problem.return_states,
        precision=problem.precision,
    )  # fmt: skip
    params = sorted(index for index in places(spec)[chain] if index is not None)
    return Call(
        made, x, [state[chain : chain + 1] for state in call.states],
        [call.params[index] for index in params], call.lengths, call.reset,
        [state[chain : chain + 1] for state in call.reset_states],
    )  # fmt: skip


@memo(1024)
def _one(spec: Spec, layer: int, direction: int) -> Spec:
    return spec.with_(
        input_size=spec.layer_input(layer), num_layers=1, bidirectional=False,
        reverse=spec.reverse or direction == 1, dropout=0.0, wavefront=None,
        input_mode=spec.input_mode if layer == 0 else "linear",
    )  # fmt: skip


class _Loops(Backend):
    """The loops of a backend as `loop` runs them, for `time_reversed`."""

    def __init__(self, name: str, loop: Loop) -> None:
        self.name, self._loop = name, loop

    def forward(self, call: Call) -> Outputs:
        return self._loop(self.name, call)
