"""The recurrent nodes of an ONNX file as one layer, for `openrnn convert`."""

from itertools import pairwise
from pathlib import Path

from openrnn.convert import from_weights, to_weights
from openrnn.convert.arrays import listed
from openrnn.convert.command import Options
from openrnn.nn import Layer
from openrnn.onnx.chained import reads
from openrnn.onnx.constants import load
from openrnn.onnx.read import from_onnx


def read_layer(path: Path, asked: Options) -> Layer:
    """A node as a layer, or several as a stack where each reads what the one before gives.

    `prefix` takes the node of that name, or else those whose names begin so.

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
    if asked.prefix in nodes:  # which may begin the names of others
        found = {asked.prefix: nodes[asked.prefix]}
    if not found:
        raise ValueError(f"no node has a name that begins with {asked.prefix!r}: {listed(nodes)}")
    layers = [node.layer for node in found.values()]
    if len(found) == 1:
        return layers[0]
    alike = len({_kind(layer) for layer in layers}) == 1
    if not alike or not all(reads(model, *pair) for pair in pairwise(found.values())):
        raise ValueError(
            "the nodes are no stack of one cell, in which each reads what the one before gives: "
            f"choose one by --prefix: {listed(found)}"
        )
    arrays = [to_weights(layer, "onnx") for layer in layers]
    return from_weights(
        arrays, "onnx", cell=layers[0].cell.key, reverse=layers[0].spec.reverse,
        batch_first=layers[0].batch_first,
    )  # fmt: skip


def _kind(layer: Layer) -> tuple[object, ...]:
    """What the layers of a stack have in common."""
    spec = layer.spec
    return (
        spec.cell, spec.hidden_size, spec.directions, spec.reverse, spec.bias_mode,
        layer.batch_first,
    )  # fmt: skip
