"""OpenRNN: recurrent layers of any cell at fused speed, a drop-in for those of `torch.nn`."""

from openrnn import cells, codegen, flops, onnx, ops, params
from openrnn.ahead import compile_kernels
from openrnn.cells import cell
from openrnn.convert import ConvertCallback, convert, from_weights, quantize, to_weights
from openrnn.embed import export_native
from openrnn.errors import CellError, ExportError, LibraryError, NoBackendError, OpenRNNError
from openrnn.explain import explain
from openrnn.nn import GRU, LSTM, RNN, GRUCell, LSTMCell, Pipeline, Recurrent, RNNCell
from openrnn.onnx.read import from_onnx
from openrnn.plain import plain_decompositions
from openrnn.spec import Problem, Spec
from openrnn.watch import Watch, WatchCallback, watch

__version__ = "0.1.0"

flops.register_formulas()

# what is public, with the modules' own lists; all else may change without notice
__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "CellError",
    "ConvertCallback",
    "ExportError",
    "GRUCell",
    "LSTMCell",
    "LibraryError",
    "NoBackendError",
    "OpenRNNError",
    "Pipeline",
    "Problem",
    "RNNCell",
    "Recurrent",
    "Spec",
    "Watch",
    "WatchCallback",
    "__version__",
    "cell",
    "cells",
    "codegen",
    "compile_kernels",
    "convert",
    "explain",
    "export_native",
    "from_onnx",
    "from_weights",
    "onnx",
    "ops",
    "params",
    "plain_decompositions",
    "quantize",
    "to_weights",
    "watch",
]
