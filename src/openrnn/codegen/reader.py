"""A traced function of torch -> a graph of primitives, or the reason why there is none.

Kernels compute everything in one floating dtype: each value of a trace must have that, or be a
truth value. What is made of numbers alone is a number, whatever its dtype.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from openrnn.codegen import aten
from openrnn.codegen.graph import Builder, Graph, Value
from openrnn.errors import CellError

if TYPE_CHECKING:
    from openrnn.cells import Cell


def read(
    cell: "Cell", traced: Any, names: tuple[str, ...], outputs: tuple[str, ...], dtype: torch.dtype
) -> Graph:
    """The graph of what `make_fx` traced with examples of `dtype`.

    Raises:
        CellError: it has an operator, an argument or a dtype that no kernel knows.
    """
    return _Reader(cell, traced, names, dtype).read(outputs)


class _Reader:
    """One traced function.

    Attributes:
        values: of each node the name of its value, or its number; of some a tuple.
        memory: of each node the one whose memory it has.
        stale: nodes whose memory was written into under another name.
    """

    def __init__(
        self, cell: "Cell", traced: Any, names: tuple[str, ...], dtype: torch.dtype
    ) -> None:
        self.cell, self.traced, self.dtype, self.names = cell, traced, dtype, names
        self.emit = Builder(names)
        self.values: dict[Any, Any] = {}
        self.memory: dict[Any, Any] = {}
        self.stale: set[Any] = set()

    def read(self, outputs: tuple[str, ...]) -> Graph:
        inputs = iter(self.names)
        results: tuple[Any, ...] = ()
        for node in self.traced.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = next(inputs)
            elif node.op == "get_attr":
                self.values[node] = self._constant(node)
            elif node.op == "output":
                results = node.args[0]
            elif node.target.__name__ == "getitem":
                self.values[node] = self.values[node.args[0]][node.args[1]]
            else:
                self.values[node] = self._called(node)
        found = (self.emit.real(self._value(node)) for node in results)
        return self.emit.graph(dict(zip(outputs, found)))

    def _error(self, text: str) -> CellError:
        return CellError(f"cell '{self.cell.name}': {text}")

    def _called(self, node: Any) -> Any:
        name, word = aten.name_of(node.target), str(node.target).rsplit(".", 1)[0]
        if name not in aten.RULES:
            raise self._error(f"no kernel knows {word}")
        self._follow(node, name, word)
        args = [self._value(arg) for arg in node.args]
        kwargs = {key: self._value(arg) for key, arg in node.kwargs.items()}
        try:
            found = aten.apply(self.emit, name, args, kwargs)
        except aten.Unknown as error:
            raise self._error(f"no kernel knows {error} of {word}") from error
        made = node.meta["val"]
        if name in aten.RESHAPES and node.args[0].meta["val"].shape != made.shape:
            raise self._error(f"no kernel knows {word} to another shape")
        if name in aten.RESHAPES and node.args[0].meta["val"].dtype != made.dtype:
            raise self._error(f"no kernel knows {word} as {made.dtype}")
        if isinstance(found, tuple):
            return tuple(self._kept(*pair, word) for pair in zip(found, made))
        return self._kept(found, made, word)

    def _follow(self, node: Any, name: str, word: str) -> None:
        """Refuses what reads memory by one name after it was written into by another."""
        for arg in node.all_input_nodes:
            if arg in self.stale:
                raise self._error(f"no kernel knows what changed in place before {word}")
        first: Any = node.args[0] if node.args else None
        writes = aten.in_place(node.target)
        self.memory[node] = node
        if writes or name in aten.VIEWS:
            self.memory[node] = owner = self.memory.get(first, first)
            if writes and owner.op == "placeholder":
                raise self._error(f"no kernel knows {word}_ of what the cell is given")
            if writes:
                same = (other for other, its_owner in self.memory.items() if its_owner is owner)
                self.stale.update(other for other in same if other is not node)

    def _value(self, arg: Any) -> Any:
        """An argument as rules take it: names and numbers, the rest as it is."""
        if isinstance(arg, torch.fx.Node):
            return self.values[arg]
        if isinstance(arg, complex):
            raise self._error("no kernel knows complex numbers")
        return float(arg) if isinstance(arg, int | float) else arg

    def _kept(self, value: Value, made: Tensor, word: str) -> Value:
        """What a rule gave, as a value of the dtype that torch gave it."""
        dtype = made.dtype
        if dtype.is_complex:
            raise self._error("no kernel knows complex numbers")
        if made.device.type != "cpu":
            raise self._error(f"no kernel knows {word} to device {made.device}")
        if not isinstance(value, str):
            exact = dtype == self.dtype
            number = torch.tensor(value, dtype=torch.float64, device="cpu")
            return value if exact else float(number.to(dtype))
        if dtype == torch.bool:
            return self.emit.truth(value)
        value = self.emit.real(value)
        exact = dtype.is_floating_point and self.emit.is_choice(value)
        if dtype != self.dtype and not exact:
            kinds = f"{self.dtype} and torch.bool"
            raise self._error(f"{word} makes values of {dtype}, kernels here know {kinds}")
        return value

    def _constant(self, node: Any) -> float:
        """The number of a tensor that the cell makes; one from outside could change."""
        tensor = getattr(self.traced, str(node.target))
        shape = tuple(tensor.shape)
        if not all("lift_fresh" in str(user.target) for user in node.users):
            raise CellError(
                f"cell '{self.cell.name}' reads a tensor of shape {shape} from outside: pass it as "
                "a per-unit parameter (params=), or as a number, which a kernel keeps as it is"
            )
        if tensor.numel() != 1:
            raise self._error(
                f"it makes a tensor of shape {shape}, and kernels know single numbers"
            )
        if tensor.is_complex():
            raise self._error("no kernel knows complex numbers")
        return float(tensor.item())
