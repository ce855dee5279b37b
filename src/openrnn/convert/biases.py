"""One bias vector or two: what a network has, and what a library can hold."""

from collections.abc import Sequence

import torch
from torch import Tensor

from openrnn.convert.advice import AdviceError, Argument
from openrnn.convert.layouts import Layout
from openrnn.convert.rewrite import Blocks

INPUT, RECURRENT = "bW", "bR"
# gates whose recurrent bias is multiplied by the reset gate, and so is no summand of the other
APART = {"gru": ("n",), "mgu": ("n",)}


def mode_of(chains: Sequence[Blocks]) -> str:
    """The `bias_mode` that holds the biases of every layer and direction.

    Raises:
        ValueError: one has biases and another has none.
    """
    sides = [
        frozenset(side for side, _ in blocks if side in (INPUT, RECURRENT)) for blocks in chains
    ]
    if len(set(sides)) > 1:
        raise ValueError("some layers and directions have biases, others have none: needs one kind")
    both = {(False, False): "none", (True, False): "input", (False, True): "recurrent"}
    return both.get((INPUT in sides[0], RECURRENT in sides[0]), "double")


def fit(layout: Layout, blocks: Blocks, library: str, where: str, sum_biases: bool) -> Blocks:
    """The blocks that a layout holds, biases where it has a place for them.

    A bias moves to the other side where only that side has a place, and nothing depends on it.

    Raises:
        ValueError: a bias has no place, or two biases have one place and may not be summed.
    """
    held = {key for array in layout.arrays if array.bias for keys in array.keys for key in keys}
    kept = {key: block for key, block in blocks.items() if key[0] not in (INPUT, RECURRENT)}
    given = {key: block for key, block in blocks.items() if key[0] in (INPUT, RECURRENT)}
    if layout.biases == "each" or (layout.biases == "optional" and not given):
        return kept | given
    like = next(block for key, block in blocks.items() if key[0] == "R")
    made = {key: given.pop(key, None) for key in held}
    for (side, gate), bias in given.items():  # those without a place
        if not torch.count_nonzero(bias):
            continue
        other = (RECURRENT if side == INPUT else INPUT, gate)
        if other not in held or gate in APART.get(layout.cell, ()):
            kind = "input" if side == INPUT else "recurrent"
            raise ValueError(f"{library} has no {kind} bias of gate {gate}, {where} has one")
        made[other] = _joined(made[other], bias, f"{library} has one bias of gate {gate}, {where}",
                              sum_biases)  # fmt: skip
    return kept | {
        key: like.new_zeros(like.shape[0]) if bias is None else bias for key, bias in made.items()
    }


def _joined(there: Tensor | None, bias: Tensor, words: str, sum_biases: bool) -> Tensor:
    if there is None or not torch.count_nonzero(there):
        return bias
    if sum_biases:
        return there + bias
    raise AdviceError(
        f"{words} has two: ", Argument("sum_biases=True"),
        " writes their sum, the same function but for its rounding",
    )  # fmt: skip
