"""ONNX out: what `torch.onnx.export(model, args, dynamo=True)` makes of our layers.

Nothing has to be imported or passed. torch's exporter replaces an operator that ONNX lacks by its
decomposition, and `openrnn::forward` has one from here on: for each layer an ONNX LSTM, GRU or RNN
where ONNX has the cell, else Scans over the cell's own step. docs/onnx.md says which is which.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import register_decomposition

from openrnn.onnx.network import decomposed
from openrnn.op import forward_fake

_TARGET = torch.ops.openrnn.forward.default


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table that turns our operator into those of ONNX, for an exported program.

    `torch.onnx.export` does not need it: it finds the same entry in torch's own table. With it
    `exported.run_decompositions(openrnn.onnx.decompositions())` gives a program of such operators.
    """
    return {_TARGET: decomposed}


register_decomposition(_TARGET)(decomposed)
# where an operator stands in this table, fake tensors keep to its own fake and decompose nothing
register_decomposition(_TARGET, type="meta")(forward_fake)
