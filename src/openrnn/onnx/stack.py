"""The recurrent nodes of an ONNX file as one layer, for `openrnn convert`."""

from itertools import pairwise
from pathlib import Path
from typing import Any

from openrnn.convert import from_weights, to_weights
from openrnn.convert.arrays import listed
from openrnn.convert.command import Options
from openrnn.nn import Layer
from openrnn.onnx.constants import load
from openrnn.onnx.read import OUTPUTS, Imported, from_onnx

# what stands between the nodes of a stack: it moves numbers, those of its first input
MOVES = {"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout"}


def read_layer(path: Path, asked: Options) -> Layer:
    """A node as a layer, or several as a stack where each reads what the one before gives.

    `prefix` takes those whose names begin so.

    Raises:
        ValueError: the file is damaged, the package onnx is missing, there is no such node, or
            the nodes are no stack of one cell.
        OSError: the file cannot be read.
    """
    if asked.source != "onnx":
        raise ValueError(f"{path} has nodes of onnx: --from must be onnx, got {asked.source}")
    sizes = asked.cell, asked.bidirectional, asked.hidden_size, asked.num_layers, asked.proj_size
    if sizes != (None, None, None, 1, 0):
        raise ValueError(
            "--cell, --bidirectional, --hidden, --layers and --proj follow from nodes: leave them "
            "out"
        )
    try:
        model = load(path)
    except ImportError:
        raise ValueError(
            f"{path} is read by the package onnx, which is not here: pip install onnx"
        ) from None
    nodes = from_onnx(model)
    found = {name: node for name, node in nodes.items() if name.startswith(asked.prefix)}
    if not found:
        raise ValueError(f"no node has a name that begins with {asked.prefix!r}: {listed(nodes)}")
    layers = [node.layer for node in found.values()]
    if len(found) == 1:
        return layers[0]
    if not _chained(model.graph, [*found.values()]) or len({_kind(layer) for layer in layers}) > 1:
        raise ValueError(
            "the nodes are no stack of one cell, in which each reads what the one before gives: "
            f"choose one by --prefix: {listed(found)}"
        )
    arrays = [to_weights(layer, "onnx") for layer in layers]
    return from_weights(arrays, "onnx", cell=layers[0].cell.key, reverse=layers[0].spec.reverse)


def _kind(layer: Layer) -> tuple[object, ...]:
    """What the layers of a stack have in common."""
    spec = layer.spec
    return spec.cell, spec.hidden_size, spec.directions, spec.reverse, spec.bias_mode


def _chained(graph: Any, nodes: list[Imported]) -> bool:
    """Whether X of each node but the first is Y of the one before, moved about at most."""
    makers = {name: node for node in graph.node for name in node.output}
    return all(
        _source(makers, after.inputs["X"]) == before.outputs.get("Y")
        for before, after in pairwise(nodes)
    )


def _source(makers: dict[str, Any], name: str) -> str:
    """The tensor of which this one has the same numbers in another shape."""
    while name in makers:
        node = makers[name]
        if node.op_type == "Concat":  # of the directions of Y, each by a Gather of its own
            parts = [makers.get(part) for part in node.input]
            if not all(_direction(makers, part) for part in parts):
                return name
            (name, *others) = {part.input[0] for part in parts if part}
            return "" if others else name
        if node.op_type not in MOVES and not _direction(makers, node):
            return name
        name = node.input[0]
    return name


def _direction(makers: dict[str, Any], node: Any) -> bool:
    """Whether a node takes one direction of a recurrent node's Y (T, D, B, H)."""
    return (
        node is not None
        and node.op_type == "Gather"
        and [one.i for one in node.attribute if one.name == "axis"] == [1]
        and getattr(makers.get(node.input[0]), "op_type", "") in OUTPUTS
    )
