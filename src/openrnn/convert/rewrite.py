"""The one rewriter: the arrays of a layout become blocks of gates, and blocks become arrays.

A block is what belongs to one gate of one side, under the key (side, gate): a matrix (H, In) or
(H, O), or a vector (H,); the projection is one block (P, H).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from openrnn.convert.layouts import Array, Layout

Blocks = dict[tuple[str, str], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Sizes of one layer and direction: inputs, units, outputs of a projection (or 0), heads."""

    inputs: int
    hidden: int
    proj: int = 0
    heads: int = 1

    def width(self, sides: Sequence[str]) -> int:
        """How many columns the matrices of these sides have beside each other."""
        out = self.proj or self.hidden
        return sum(self.inputs if side == "W" else out for side in sides)


def groups(axes: str) -> list[str]:
    """The letters of each axis: "d (g o)" -> ["d", "go"]."""
    words = re.findall(r"\(([^)]*)\)|(\w)", axes)
    return [(inner or single).replace(" ", "") for inner, single in words]


def extents(array: Array, sizes: Sizes) -> dict[str, int]:
    """The length of each letter."""
    heads = sizes.heads if "n" in array.axes else 1
    return {
        "s": len(array.sides), "g": len(array.gates), "n": heads, "q": sizes.proj,
        "o": sizes.hidden // heads, "d": sizes.width(array.sides) // heads,
    }  # fmt: skip


def shape_of(array: Array, sizes: Sizes) -> tuple[int, ...]:
    """The shape that an array has in a network of these sizes."""
    lengths = extents(array, sizes)
    return tuple(prod(lengths[letter] for letter in group) for group in groups(array.axes))


def read(array: Array, tensor: Tensor, sizes: Sizes) -> Blocks:
    """The blocks of an array that has its shape."""
    lengths = extents(array, sizes)
    letters = "".join(groups(array.axes))
    order = [letters.index(letter) for letter in _canonical(letters)]
    whole = tensor.reshape([lengths[letter] for letter in letters]).permute(order)
    if array.sides == ("P",):
        return {("P", ""): whole}
    if "d" not in letters:
        whole = whole.reshape(len(array.sides), len(array.gates), sizes.hidden)
        return {
            key: vector
            for keys, vectors in zip(array.keys, whole)
            for key, vector in zip(keys, vectors)
        }
    whole = whole.reshape(len(array.gates), -1, *whole.shape[-2:])  # gates, heads, units, inputs
    if "n" in letters:
        dense = [torch.block_diag(*matrices) for matrices in whole]
    else:
        dense = [matrices[0] for matrices in whole]
    found: Blocks = {}
    for gate, matrix in zip(array.gates, dense):
        parts = matrix.split([sizes.width((side,)) for side in array.sides], dim=1)
        found |= {(side, gate): part for side, part in zip(array.sides, parts)}
    return found


def write(array: Array, blocks: Mapping[tuple[str, str], Tensor], sizes: Sizes) -> Tensor:
    """The array that holds these blocks; the inverse of `read`.

    Raises:
        ValueError: a matrix of several heads is not block-diagonal.
    """
    letters = "".join(groups(array.axes))
    canonical = _canonical(letters)
    lengths = extents(array, sizes)
    if array.sides == ("P",):
        whole = blocks["P", ""]
    elif "d" not in letters:
        whole = torch.stack([torch.stack([blocks[key] for key in keys]) for keys in array.keys])
    else:
        rows = [[blocks[side, gate] for side in array.sides] for gate in array.gates]
        whole = torch.stack([torch.cat(row, dim=1) for row in rows])
        if "n" in letters:
            whole = torch.stack([_diagonal(array, matrix, sizes) for matrix in whole])
    whole = whole.reshape([lengths[letter] for letter in canonical])
    order = [canonical.index(letter) for letter in letters]
    return whole.permute(order).reshape(shape_of(array, sizes))


def _canonical(letters: str) -> str:
    """The letters of an array in the order in which blocks are cut: sides, gates, heads, units."""
    return "".join(sorted(letters, key="sgnqod".index))


def _diagonal(array: Array, matrix: Tensor, sizes: Sizes) -> Tensor:
    """The blocks (n, o, d) of a block-diagonal matrix."""
    blocks = matrix.reshape(sizes.heads, sizes.hidden // sizes.heads, sizes.heads, -1)
    kept = torch.stack([blocks[head, :, head] for head in range(sizes.heads)])
    if torch.count_nonzero(kept) != torch.count_nonzero(matrix):
        raise ValueError(
            f"{array.name} holds {sizes.heads} heads, got a matrix {tuple(matrix.shape)} with "
            f"numbers outside its {sizes.heads} blocks"
        )
    return kept


def measure(layout: Layout, arrays: Mapping[str, Tensor], label: str = "") -> Sizes:
    """The sizes of the layer and direction that has these arrays, which must fit each other.

    Raises:
        ValueError: an array is missing, or has a shape that no sizes give; the message names it.
    """
    hidden = inputs = proj = 0
    heads = 1
    present = [array for array in layout.arrays if array.name in arrays]
    for array in present:
        if array.sides[-1] == "R":
            hidden, heads = _hidden(array, arrays[array.name], label)
    for array in present:
        if array.sides == ("P",):
            _dims(array, arrays[array.name], label)
            proj = arrays[array.name].shape[0]
    for array in present:
        if array.sides[0] == "W":
            width = _inputs(array, arrays[array.name], label) * (heads if "n" in array.axes else 1)
            inputs = width - (proj or hidden) * (len(array.sides) - 1)
    sizes = Sizes(inputs, hidden, proj, heads)
    for array in present:
        check(array, arrays[array.name], sizes, label)
    return sizes


def _hidden(array: Array, tensor: Tensor, label: str) -> tuple[int, int]:
    """Units and heads by the shape of a recurrent matrix."""
    axes = groups(array.axes)
    _dims(array, tensor, label)
    heads = tensor.shape[axes.index("n")] if "n" in axes else 1
    index = next(index for index, letters in enumerate(axes) if "o" in letters)
    fixed = len(array.gates) if "g" in axes[index] else 1
    if tensor.shape[index] % fixed:
        raise ValueError(
            f"{label}{array.name} must have {fixed} * H {_axis(index)}, got {tuple(tensor.shape)}"
        )
    return tensor.shape[index] // fixed * heads, heads


def _inputs(array: Array, tensor: Tensor, label: str) -> int:
    _dims(array, tensor, label)
    return tensor.shape[groups(array.axes).index("d")]


def _axis(index: int) -> str:
    return "rows" if index == 0 else "columns" if index == 1 else f"along axis {index}"


def _dims(array: Array, tensor: Tensor, label: str) -> None:
    wanted = len(groups(array.axes))
    if tensor.dim() != wanted or not tensor.numel():
        raise ValueError(
            f"{label}{array.name} must have {wanted} axes and not be empty, got shape "
            f"{tuple(tensor.shape)}"
        )


def check(array: Array, tensor: Tensor, sizes: Sizes, label: str = "") -> None:
    """Raises ValueError unless an array has the shape that these sizes ask for."""
    wanted = shape_of(array, sizes)
    if tuple(tensor.shape) != wanted:
        raise ValueError(f"{label}{array.name} must have shape {wanted}, got {tuple(tensor.shape)}")
