"""Our operator as operators of torch, for exporters that know no others."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from openrnn.dispatch import BACKENDS
from openrnn.route import CallConstants, call_of, route_of


def plain_decompositions() -> dict[Any, Callable[..., Any]]:
    """The table that makes an exported program one of torch's operators alone, as ExecuTorch needs.

    `exported.run_decompositions(openrnn.plain_decompositions())` unrolls each layer into T steps of
    the reference: for inference, and for the T and B that the program was exported with.
    """
    return {torch.ops.openrnn.forward.default: _unrolled}


def _unrolled(*args: Any) -> list[Tensor]:
    """The outputs of `openrnn::forward`, from its arguments; the reserve, never read, is empty.

    Raises:
        ValueError: the call draws dropout masks.
    """
    *inputs, spec, backend, grad, training, return_states, precision = args
    constants = CallConstants(spec, backend, grad, training, return_states, precision)
    call = call_of(route_of(constants, inputs), inputs)
    problem = call.problem
    if problem.drops:
        raise ValueError("dropout between layers stays in the graph: call model.eval() before")
    out = BACKENDS["reference"].forward(call)
    made = [out.y, *out.finals, *out.all_states]
    steps, batch = call.x.shape[:2]
    if grad:
        kept = BACKENDS[backend].reserve(problem, steps, batch)
        made += [call.x.new_empty(shape, dtype=dtype) for shape, dtype in kept]
    return made
