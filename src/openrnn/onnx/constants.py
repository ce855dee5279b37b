"""An ONNX model's graph, and the numbers of those of its tensors that no input changes."""

from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from typing import Any

from openrnn.convert.arrays import listed

# with other numbers in each run
RANDOM = frozenset({"Bernoulli", "Multinomial", "RandomNormalLike", "RandomUniformLike"})


def load(model: Any) -> Any:
    """A model as onnx's `ModelProto`, its functions inlined.

    Args:
        model: the path of a file, a `ModelProto`, or what `torch.onnx.export` returns.

    Raises:
        ImportError: the package onnx is missing.
        TypeError: it is none of these.
        ValueError: the file is damaged.
        OSError: it cannot be read.
    """
    try:
        import onnx
        from google.protobuf.message import DecodeError
        from onnx import inliner
    except ImportError:
        raise ImportError(
            "from_onnx reads models with the package onnx, which is not here: pip install onnx"
        ) from None
    if isinstance(model, str | PathLike):
        try:
            model = onnx.load(model)
        except DecodeError as error:
            raise ValueError(f"{model} cannot be read as an ONNX model: {error}") from None
    model = getattr(model, "model_proto", model)
    if not isinstance(model, onnx.ModelProto):
        raise TypeError(f"model must be a path or an onnx.ModelProto, got {type(model).__name__}")
    return inliner.inline_local_functions(model) if model.functions else model


def bodies(node: Any) -> Iterator[Any]:
    """The graphs inside a node, as of If, Loop and Scan."""
    for attribute in node.attribute:
        yield from (attribute.g,) if attribute.HasField("g") else attribute.graphs


class Constants:
    """The tensors of a graph that are initializers or follow from nothing else.

    An initializer that is an input as well counts with its default.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        graph = model.graph
        self._initializers = {tensor.name: tensor for tensor in graph.initializer}
        self._makers: dict[str, Any] = {}  # the node that makes a constant
        for node in graph.node:
            if self._constant(node):
                self._makers |= dict.fromkeys(filter(None, node.output), node)

    def __contains__(self, name: str) -> bool:
        return name in self._initializers or name in self._makers

    def _constant(self, node: Any) -> bool:
        if node.op_type == "Constant":
            return True
        given = [name for name in node.input if name]
        known = bool(given) and all(name in self for name in given)
        return known and node.op_type not in RANDOM and not any(bodies(node))

    def values(self, names: Sequence[str]) -> dict[str, Any]:
        """The numpy arrays of constants.

        Raises:
            ValueError: an operator on the way is not known to the package onnx, or fails.
        """
        from onnx import numpy_helper

        made = [name for name in names if name not in self._initializers]
        found = dict(zip(made, self._computed(made))) if made else {}
        for name in names:
            if name in self._initializers:
                found[name] = numpy_helper.to_array(self._initializers[name])
        return found

    def _computed(self, names: list[str]) -> list[Any]:
        """By onnx's own evaluator, from the part of the graph that they follow from."""
        from onnx import ValueInfoProto, helper
        from onnx.reference import ReferenceEvaluator

        nodes, initializers = self._part(names)
        outputs = [ValueInfoProto(name=name) for name in names]
        graph = helper.make_graph(nodes, "constants", [], outputs, initializers)
        opsets = self._model.opset_import
        part = helper.make_model(graph, opset_imports=opsets, ir_version=self._model.ir_version)
        try:
            found: Any = ReferenceEvaluator(part).run(None, {})
        except Exception as error:  # of whatever operator, of many kinds
            kinds = {node.op_type: None for node in nodes}
            reason = str(error).splitlines()[:1] or [type(error).__name__]
            raise ValueError(
                f"{', '.join(names)} cannot be computed by {listed(kinds)}: {reason[0]}"
            ) from error
        return [*found]

    def _part(self, names: Iterable[str]) -> tuple[list[Any], list[Any]]:
        """The nodes and initializers that tensors follow from, in the order of the graph."""
        wanted, todo = set[str](), list(names)
        while todo:
            name = todo.pop()
            if name not in wanted:
                wanted.add(name)
                todo += filter(None, self._makers[name].input if name in self._makers else ())
        nodes = [node for node in self._model.graph.node if wanted.intersection(node.output)]
        return nodes, [self._initializers[name] for name in self._initializers if name in wanted]
