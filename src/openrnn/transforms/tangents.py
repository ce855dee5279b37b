"""Forward mode: the loop of the tangent cell beside the loop."""

from typing import Any

import torch

from openrnn.backends.base import Call, Outputs
from openrnn.dispatch import BACKENDS
from openrnn.higher.along import Inputs, gate_parts, tangent_inputs
from openrnn.higher.loop import Direction, Run
from openrnn.higher.tangent import tangent_of
from openrnn.route import CallConstants, Route, route_for
from openrnn.spec import Spec


def loop_route(name: str, spec: Spec, call: Call, *, grad: bool) -> Route:
    """The route of a loop that returns all states; a loop of `higher` has no other options.

    Args:
        spec: of the loop.
        call: of a loop with the same dtype, device, precision and masks.
    """
    problem = call.problem
    constants = CallConstants(spec.text, name, grad, False, True, problem.precision)
    masks = call.lengths is not None, call.reset is not None
    return route_for(constants, problem.dtype, problem.device, *masks, problem.precision)


def inputs_of(call: Call) -> tuple[Any, ...]:
    """The tensors of a call as the operator takes them."""
    return (
        call.x, call.states, call.params, call.lengths, call.reset, call.reset_states, call.seed
    )  # fmt: skip


def tangent_loop(name: str, call: Call, out: Outputs, along: Direction) -> Inputs:
    """What the loop of the tangent cell reads, whose results are the tangents of a loop's results.

    Args:
        name: of the backend.
        call: the loop, of which `network.forward_refusal` is None.
        out: what it returned, all states among it.
        along: the tangents of its inputs.
    """
    run = Run(BACKENDS[name], call, out)
    tangent = tangent_of(call.problem.spec)
    shape = *call.x.shape[:2], run.spec.hidden_size
    gates = []
    for parts in gate_parts(run, tangent, along):
        if not parts:
            gates.append(call.x.new_zeros(()).expand(shape))
        else:
            gates.append((parts[0] + parts[1] if len(parts) == 2 else parts[0]).expand(shape))
    return tangent_inputs(run, tangent, along, torch.cat(gates, -1))
