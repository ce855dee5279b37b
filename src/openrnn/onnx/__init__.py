"""ONNX out and in; of out: what `torch.onnx.export(model, args, dynamo=True)` makes of our layers.

Nothing has to be imported or passed. torch's exporter replaces an operator that ONNX lacks by its
decomposition, and `openrnn::forward` has one while an export records it: for each layer an ONNX
LSTM, GRU or RNN where ONNX has the cell, else Scans over the cell's own step. docs/onnx.md says
which is which.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table, register_decomposition

from openrnn.onnx.network import decomposed
from openrnn.op import ON_TRACE, forward_fake

__all__ = [
    "decompositions",
]

_TARGET = torch.ops.openrnn.forward.default


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table that turns our operator into those of ONNX, for an exported program.

    `torch.onnx.export` of a module does not need it, but a program that `torch.export` made before:
    `torch.onnx.export(exported.run_decompositions(openrnn.onnx.decompositions()), ...)`.
    """
    return {_TARGET: decomposed}


def _register(exports: bool) -> None:
    """Gives the operator its decomposition, until the exporter uses it or something else traces.

    Not for longer: Inductor takes an operator in this table for one that it need not call, and
    raises where the environment has CI set.
    """
    if exports:
        decomposition_table.setdefault(_TARGET, _decomposed)
    else:
        decomposition_table.pop(_TARGET, None)


def _decomposed(*args: Any) -> list[Tensor]:
    decomposition_table.pop(_TARGET, None)  # the exporter has a copy of the table
    return decomposed(*args)


ON_TRACE.append(_register)
# where an operator stands in this table, fake tensors keep to its own fake and decompose nothing
register_decomposition(_TARGET, type="meta")(forward_fake)
