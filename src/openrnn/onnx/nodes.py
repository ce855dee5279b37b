"""A layer, both directions, as one ONNX LSTM, GRU or RNN.

Equations and layouts: https://onnx.ai/onnx/operators, as they are since opset 14.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from openrnn.backends.base import Call
from openrnn.params import Chain
from openrnn.spec import Problem, Spec


@dataclass(frozen=True)
class _Form:
    """How ONNX has a cell.

    Args:
        gates: our gate for each of ONNX's, in its order; "-f" is a gate of f's weights, negated.
        vectors: our per-unit vector for each of its peepholes.
        activation: of an RNN.
    """

    operator: str
    gates: str
    vectors: str = ""
    activation: str = ""
    attributes: dict[str, int] = field(default_factory=dict)


_FORMS = {
    "rnn_tanh": _Form("RNN", "h", activation="Tanh"),
    "rnn_relu": _Form("RNN", "h", activation="Relu"),
    "lstm": _Form("LSTM", "i o f g"),
    "peephole_lstm": _Form("LSTM", "i o f g", vectors="p_i p_o p_f"),
    # 1 - sigmoid(a) = sigmoid(-a); of `input_forget` ONNX gives no formula
    "coupled_lstm": _Form("LSTM", "-f o f g"),
    "gru": _Form("GRU", "z r n", attributes={"linear_before_reset": 1}),
    "gru_reset_before": _Form("GRU", "z r n", attributes={"linear_before_reset": 0}),
}
# bfloat16 comes with opset 22; in float64 ONNX Runtime runs a Scan, and none of the three operators
_DTYPES = frozenset({torch.float16, torch.float32})


def has_node(problem: Problem) -> bool:
    """Whether ONNX has an operator for the layers of this call."""
    spec = problem.spec
    return (
        spec.cell in _FORMS
        and problem.dtype in _DTYPES
        and spec.cell_clip is None  # ONNX's clip bounds gates
        and not spec.proj_size
        and spec.input_mode != "gates"  # ONNX multiplies x with a matrix
        and not problem.reset
        and not (problem.return_states and len(spec.states) > 1)  # c of every step is no output
    )


def node(
    call: Call, chains: Sequence[Chain], first: int, x: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """One layer: y (T, B, D*H), final states, each (D, B, H), and h of all steps (D, T, B, H).

    Args:
        chains: the layer's tensors, forward before reverse.
        first: the index of the first of them among all chains of the network.
    """
    from torch.onnx.ops import symbolic_multi_out

    spec, count = call.problem.spec, len(chains)
    form = _FORMS[spec.cell]
    steps, batch, hidden = x.shape[0], x.shape[1], spec.hidden_size
    states = [state[first : first + count] for state in call.states]
    lengths = None if call.lengths is None else call.lengths.to(torch.int32)
    given = [x, *_weights(spec, form, chains), lengths]
    given += states or [None] * len(spec.states)
    if form.vectors:
        given.append(torch.stack([_peepholes(spec, form, chain) for chain in chains]))
    shapes = [[steps, count, batch, hidden], *([[count, batch, hidden]] * len(spec.states))]
    h, *finals = symbolic_multi_out(
        form.operator, given, _attributes(spec, form), dtypes=[x.dtype] * len(shapes), shapes=shapes
    )
    if call.lengths is not None and states:
        # ONNX Runtime's final state of a sequence without steps is 0
        empty = (call.lengths == 0)[:, None]
        finals = [torch.where(empty, old, new) for old, new in zip(states, finals)]
    sides = [h.select(1, direction) for direction in range(count)]
    y = torch.cat(sides, dim=-1) if count > 1 else sides[0]
    return y, finals, [h.transpose(0, 1)]


def _attributes(spec: Spec, form: _Form) -> dict[str, Any]:
    found: dict[str, Any] = {"hidden_size": spec.hidden_size, **form.attributes}
    if spec.directions == 2 or spec.reverse:
        found["direction"] = "reverse" if spec.reverse else "bidirectional"
    if form.activation:
        found["activations"] = [form.activation] * spec.directions
    return found


def _weights(spec: Spec, form: _Form, chains: Sequence[Chain]) -> list[Tensor | None]:
    """W (D, G*H, In), R (D, G*H, H) and B (D, 2*G*H), or None for it where there are no biases."""
    inputs, recurrent, biases = [], [], []
    for chain in chains:
        w_ih = chain.w_ih
        if w_ih is None:  # skip input: x is added to every gate
            unit = torch.eye(spec.hidden_size, dtype=chain.w_hh.dtype, device=chain.w_hh.device)
            w_ih = unit.repeat(len(spec.gates), 1)
        inputs.append(_ordered(spec, form, w_ih))
        recurrent.append(_ordered(spec, form, chain.w_hh))
        zeros = chain.w_hh.new_zeros(len(spec.gates) * spec.hidden_size)
        sides = [zeros if bias is None else bias for bias in (chain.b_ih, chain.b_hh)]
        biases.append(torch.cat([_ordered(spec, form, side) for side in sides]))
    has_bias = spec.input_bias or spec.recurrent_bias
    return [torch.stack(inputs), torch.stack(recurrent), torch.stack(biases) if has_bias else None]


def _ordered(spec: Spec, form: _Form, rows: Tensor) -> Tensor:
    """The rows of all gates in ONNX's order."""
    hidden, made = spec.hidden_size, []
    for word in form.gates.split():
        index = spec.gates.index(word.removeprefix("-"))
        # slices, which the exporter folds; it does not fold operators of several outputs
        part = rows[index * hidden : (index + 1) * hidden]
        made.append(-part if word.startswith("-") else part)
    return torch.cat(made) if len(made) > 1 else made[0]


def _peepholes(spec: Spec, form: _Form, chain: Chain) -> Tensor:
    vectors = dict(zip(spec.unit_params, chain.unit))
    return torch.cat([vectors[name] for name in form.vectors.split()])
