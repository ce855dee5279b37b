"""ONNX in: `from_onnx` makes a layer of each LSTM, GRU and RNN node of a model."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openrnn.convert import from_weights
from openrnn.convert.arrays import as_tensor
from openrnn.nn import Layer
from openrnn.onnx.activations import Activation, activations
from openrnn.onnx.constants import Constants, bodies, load
from openrnn.onnx.coupled import coupled
from openrnn.onnx.own import USUAL, own_cell, with_cell

INPUTS = {
    "LSTM": ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P"),
    "GRU": ("X", "W", "R", "B", "sequence_lens", "initial_h"),
    "RNN": ("X", "W", "R", "B", "sequence_lens", "initial_h"),
}
OUTPUTS = {"LSTM": ("Y", "Y_h", "Y_c"), "GRU": ("Y", "Y_h"), "RNN": ("Y", "Y_h")}
WEIGHTS = ("W", "R", "B", "P")
STATES = ("initial_h", "initial_c")
DIRECTIONS = ("forward", "reverse", "bidirectional")
RELU = activations(["Relu"])
# the last is of opsets 1 and 3
READ = {
    "hidden_size", "direction", "activations", "activation_alpha", "activation_beta", "clip",
    "layout", "linear_before_reset", "input_forget", "output_sequence",
}  # fmt: skip


@dataclass(frozen=True)
class Imported:
    """A recurrent node as a layer of ours.

    `layer(x, initial_state, lengths=lengths)` computes what the node does: y (T, B, D*H) is its Y
    (T, D, B, H) with directions side by side, final states are Y_h and Y_c. With layout 1 the layer
    is batch_first.

    Args:
        layer: an `LSTM`, `GRU`, `RNN` or `Recurrent` with the node's weights.
        initial_state: those that are constants of the graph, as the layer takes them; None where
            they are zeros or in `inputs`.
        lengths: `sequence_lens`, where it is a constant of the graph; or None.
        inputs: of X, sequence_lens, initial_h and initial_c those that the graph is given or
            computes as it runs, under the names of its tensors: for the caller to pass.
        outputs: the names that the graph has for Y, Y_h and Y_c, where it reads them.
    """

    layer: Layer
    initial_state: Any
    lengths: Tensor | None
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


def from_onnx(model: Any) -> dict[str, Imported]:
    """A layer for each LSTM, GRU and RNN node of an ONNX model, under the node's name.

    A node without a name, or with that of another, is found under its first output. Weights,
    initial states and lengths may be initializers, or follow from such by other nodes. The package
    onnx reads the model.

    Args:
        model: the path of a file, an `onnx.ModelProto`, or what `torch.onnx.export` returns.

    Raises:
        ImportError: the package onnx is missing.
        ValueError: the model has no such node, or one that does what no layer of ours does: the
            message names node and attribute.
        OSError: the file cannot be read.
    """
    proto = load(model)
    nodes = [node for node in proto.graph.node if _recurrent(node)]
    for outer, node in _nested(proto.graph):
        raise ValueError(
            f"{_label(node)} stands inside {_label(outer)}, needs one of the main graph"
        )
    if not nodes:
        raise ValueError(
            "the model must have an LSTM, GRU or RNN node, got none (of nn.RNN torch's exporter "
            "writes one with dynamo=False alone: export it so, or after openrnn.convert(model))"
        )
    constants, names = Constants(proto), Counter(node.name for node in nodes)
    found: dict[str, Imported] = {}
    for node in nodes:
        alone = node.name and names[node.name] == 1
        key = node.name if alone else _first_output(node)
        if key in found:
            raise ValueError(f"{_label(node)}: needs a name of its own, got that of another node")
        found[key] = _imported(node, constants)
    return found


def _recurrent(node: Any) -> bool:
    return node.op_type in INPUTS and node.domain in ("", "ai.onnx")


def _nested(graph: Any) -> Iterator[tuple[Any, Any]]:
    """Nodes with bodies, each with a recurrent node that stands in one."""
    for outer in graph.node:
        for body in bodies(outer):
            yield from ((outer, node) for node in body.node if _recurrent(node))
            yield from _nested(body)


def _first_output(node: Any) -> str:
    return next(filter(None, node.output), "")


def _label(node: Any) -> str:
    return f"{node.op_type} node '{node.name or _first_output(node)}'"


def _imported(node: Any, constants: Constants) -> Imported:
    label = _label(node)
    given = {name: inner for name, inner in zip(INPUTS[node.op_type], node.input) if inner}
    outputs = {name: inner for name, inner in zip(OUTPUTS[node.op_type], node.output) if inner}
    for name in ("X", "W", "R"):
        if name not in given:
            raise ValueError(f"{label}: needs {name}, got none")
    for name in WEIGHTS:
        if name in given and given[name] not in constants:
            raise ValueError(
                f"{label}: {name} must be a constant, got '{given[name]}', which is an input of "
                "the graph or computed from one"
            )
    held = {name: inner for name, inner in given.items() if name != "X" and inner in constants}
    try:
        values = constants.values([*held.values()])
        arrays = {name: values[inner] for name, inner in held.items()}
        known = _attributes(node)
        layer = _layer(node.op_type, known, arrays)
        states = _states(layer, arrays, given)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{label}: {error}") from error
    lengths = (
        as_tensor("sequence_lens", arrays["sequence_lens"]) if "sequence_lens" in arrays else None
    )
    runs = {name: inner for name, inner in given.items() if name not in arrays}
    return Imported(layer, states, lengths, runs, outputs)


def _attributes(node: Any) -> dict[str, Any]:
    """A node's attributes with their defaults; ValueError for what no layer of ours does."""
    from onnx import helper

    found = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    for name in found:
        if name not in READ:
            raise ValueError(f"attribute {name} is not known")
    direction = found.get("direction", b"forward").decode()
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}, got '{direction}'")
    layout = found.get("layout", 0)
    if layout not in (0, 1):
        raise ValueError(f"layout must be 0 or 1, got {layout}")
    clip = found.get("clip", 0.0)
    if "clip" in found and not clip > 0:
        raise ValueError(f"clip must be above 0, got {clip:g}")
    return {
        "hidden_size": found.get("hidden_size"), "direction": direction, "layout": layout,
        "coupled": node.op_type == "LSTM" and bool(found.get("input_forget")),
        "reset_after": found.get("linear_before_reset", 0) != 0, "clip": clip,
        "functions": _functions(node.op_type, direction, found),
    }  # fmt: skip


def _functions(operator: str, direction: str, found: Mapping[str, Any]) -> tuple[Activation, ...]:
    """The functions of a node, the same in both of its directions."""
    usual = USUAL[operator]
    if not found.get("activations"):
        return usual
    asked = activations(
        [word.decode() for word in found["activations"]],
        found.get("activation_alpha", ()), found.get("activation_beta", ()),
    )  # fmt: skip
    each, count = len(usual), 2 if direction == "bidirectional" else 1
    if len(asked) != each * count:
        raise ValueError(f"activations must be {each * count}, got {len(asked)}")
    if asked != asked[:each] * count:
        raise ValueError("activations must be the same in both directions, got others in each")
    return asked[:each]


def _layer(operator: str, known: Mapping[str, Any], arrays: Mapping[str, Any]) -> Layer:
    direction = known["direction"]
    weights = {name: arrays[name] for name in WEIGHTS if name in arrays}
    count = 2 if direction == "bidirectional" else 1
    for name, array in weights.items():
        if array.shape[:1] != (count,):
            raise ValueError(
                f"{name} of direction {direction} must have {count} along its first axis, "
                f"got shape {array.shape}"
            )
    functions, reverse = known["functions"], direction == "reverse"
    if operator == "LSTM":
        cell = "peephole_lstm" if "P" in weights else "lstm"
    elif operator == "GRU":
        cell = "gru" if known["reset_after"] else "gru_reset_before"
    else:
        cell = "rnn_relu" if functions == RELU else "rnn_tanh"
    own = bool(known["clip"]) or functions not in (USUAL[operator], RELU)
    if own and cell == "gru_reset_before":
        raise ValueError(
            "clip and other activations than Sigmoid,Tanh are taken of a GRU with "
            "linear_before_reset=1, got 0"
        )
    if known["coupled"] and not own and "P" not in weights:
        layer = coupled(weights, reverse, known["layout"] == 1)
    else:
        options = {"reverse": reverse, "batch_first": known["layout"] == 1}
        layer = from_weights(weights, "onnx", cell=cell, **options)
        if own or known["coupled"]:
            asked = functions, known["clip"], known["coupled"], "P" in weights
            layer = with_cell(layer, own_cell(operator, *asked))
    if known["hidden_size"] not in (None, layer.hidden_size):
        raise ValueError(
            f"hidden_size must be {layer.hidden_size}, as R has it, got {known['hidden_size']}"
        )
    return layer


def _states(layer: Layer, arrays: Mapping[str, Any], given: Mapping[str, str]) -> Any:
    """The initial states that are constants, as the layer takes them; None for zeros."""
    count = len(layer.cell.states)
    names = [name for name in STATES[:count] if name in arrays]
    if not names:
        return None
    others = [name for name in STATES[:count] if name in given and name not in arrays]
    if others:
        raise ValueError(f"{names[0]} is a constant, so {others[0]} must be one, got an input")
    states = {}
    for name in names:
        state = as_tensor(name, arrays[name])
        axis = 1 if layer.batch_first else 0  # of directions
        wanted = layer.spec.chains, layer.hidden_size
        if state.dim() != 3 or (state.shape[axis], state.shape[2]) != wanted:
            raise ValueError(
                f"{name} must have {wanted[0]} along axis {axis} and {wanted[1]} along the last, "
                f"got shape {tuple(state.shape)}"
            )
        states[name] = state.transpose(0, 1) if layer.batch_first else state
    if not any(bool(state.any()) for state in states.values()):
        return None  # which stands for zeros of any batch
    zeros = torch.zeros_like(states[names[0]])
    found = tuple(states.get(name, zeros) for name in STATES[:count])
    return layer._give(found)
