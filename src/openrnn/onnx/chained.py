"""Whether a recurrent node of an ONNX graph reads what another gives, as layers of a stack do."""

from typing import Any

import numpy as np

from openrnn.nn import Layer
from openrnn.onnx.read import Imported

T, B = 5, 3  # where the graph does not say them


def reads(model: Any, before: Imported, after: Imported) -> bool:
    """Whether X of a node is Y of the one before with its directions side by side.

    Y, (T, D, B, H) or (B, T, D, H), becomes (T, B, D*H) or (B, T, D*H) by moves which each exporter
    writes in its own way. So the nodes between are run on numbers, and the result is compared.
    """
    y, x = before.outputs.get("Y"), after.inputs.get("X")
    if y is None or x is None:  # X of constants
        return False
    graph = _between(model.graph, y, x)
    if graph is None:
        return False
    numbers = _numbers(model.graph, y, before.layer)
    found = _computed(model, graph, numbers)
    return found is not None and np.array_equal(found, _side_by_side(numbers, before.layer))


def _between(graph: Any, y: str, x: str) -> Any | None:
    """The part of a graph that makes x of y and constants; None where x depends on more."""
    from onnx import ValueInfoProto, helper

    makers = {name: node for node in graph.node for name in node.output}
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    wanted, todo = set[str](), [x]
    while todo:
        name = todo.pop()
        if name in wanted or name == y:
            continue
        if name not in makers and name not in initializers:
            return None  # an input of the model
        wanted.add(name)
        todo += filter(None, makers[name].input if name in makers else ())
    nodes = [_without_dropout(node) for node in graph.node if wanted.intersection(node.output)]
    constants = [initializers[name] for name in initializers if name in wanted]
    given, made = ([ValueInfoProto(name=name)] for name in (y, x))
    return helper.make_graph(nodes, "between", given, made, constants)


def _without_dropout(node: Any) -> Any:
    """A node of inference, also where the model was exported for training."""
    from onnx import helper

    if node.op_type != "Dropout":
        return node
    return helper.make_node("Identity", node.input[:1], node.output[:1])


def _numbers(graph: Any, y: str, layer: Layer) -> Any:
    """A Y whose numbers show what becomes of each.

    Of both signs, with fractions and beyond 1: what is no move, as Relu or Clip, changes some.
    """
    declared = next((value for value in graph.value_info if value.name == y), None)
    known = [dim.dim_value for dim in declared.type.tensor_type.shape.dim] if declared else []
    directions, units = layer.spec.directions, layer.hidden_size
    usual = (B, T, directions, units) if layer.batch_first else (T, directions, B, units)
    shape = [size or other for size, other in zip(known, usual)] if len(known) == 4 else usual
    return 100 * np.random.default_rng(0).standard_normal(shape, np.float32)


def _side_by_side(y: Any, layer: Layer) -> Any:
    """Y as a layer's outputs: the directions of each step next to each other."""
    moved = y if layer.batch_first else y.swapaxes(1, 2)
    return moved.reshape(*moved.shape[:2], -1)


def _computed(model: Any, graph: Any, y: Any) -> Any | None:
    """What a part of a model makes of Y; None where it takes no Y of this shape."""
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    opsets, version = model.opset_import, model.ir_version
    part = helper.make_model(graph, opset_imports=opsets, ir_version=version)
    try:
        made: Any = ReferenceEvaluator(part).run(None, {graph.input[0].name: y})
    except Exception:  # of whatever operator, of many kinds
        return None
    return made[0]
