"""A call of `openrnn::forward` as operators that torch's ONNX exporter knows, layer by layer."""

from typing import Any

import torch
from torch import Tensor

from openrnn import params
from openrnn.backends.base import Call, Outputs
from openrnn.dispatch import BACKENDS
from openrnn.onnx.nodes import has_node, node
from openrnn.onnx.scan import scan
from openrnn.route import CallConstants, call_of, route_of


def decomposed(*args: Any) -> list[Tensor]:
    """The outputs of `openrnn::forward`, from its arguments; the reserve, never read, is empty.

    Raises:
        ValueError: the call draws dropout masks.
    """
    *inputs, spec, backend, grad, training, return_states, precision = args
    constants = CallConstants(spec, backend, grad, training, return_states, precision)
    call = call_of(route_of(constants, inputs), inputs)
    if call.problem.drops:
        raise ValueError(
            "dropout between layers has no form in ONNX: call model.eval() before torch.onnx.export"
        )
    out = _run(call)
    made = [out.y, *out.finals, *out.all_states]
    if grad:
        steps, batch = call.x.shape[:2]
        reserve = BACKENDS[backend].reserve(call.problem, steps, batch)
        made += [call.x.new_empty(0, dtype=dtype) for _, dtype in reserve]
    return made


def _run(call: Call) -> Outputs:
    spec, x = call.problem.spec, call.x
    chains = params.chains(spec, call.params)
    run = node if has_node(call.problem) else scan
    finals: list[list[Tensor]] = []
    history: list[list[Tensor]] = []
    for layer in range(spec.num_layers):
        first = layer * spec.directions
        x, ends, every = run(call, chains[first : first + spec.directions], first, x)
        finals.append(ends)
        history.append(every)
    all_states = _joined(history) if call.problem.return_states else []
    return Outputs(x, _joined(finals), all_states, [])


def _joined(layers: list[list[Tensor]]) -> list[Tensor]:
    """For each state the parts of all layers, each (D, ...), as (L*D, ...)."""
    return [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*layers)]
