"""OpenRNN: recurrent layers of any cell at fused speed, a drop-in for those of `torch.nn`."""

from openrnn import cells as cells
from openrnn import codegen as codegen
from openrnn import onnx as onnx
from openrnn import ops as ops
from openrnn import params as params
from openrnn.backends.fused.ahead import compile_kernels as compile_kernels
from openrnn.cells import cell as cell
from openrnn.convert import ConvertCallback as ConvertCallback
from openrnn.convert import convert as convert
from openrnn.convert import from_weights as from_weights
from openrnn.convert import quantize as quantize
from openrnn.convert import to_weights as to_weights
from openrnn.embed import export_native as export_native
from openrnn.errors import CellError as CellError
from openrnn.errors import ExportError as ExportError
from openrnn.errors import LibraryError as LibraryError
from openrnn.errors import NoBackendError as NoBackendError
from openrnn.errors import OpenRNNError as OpenRNNError
from openrnn.explain import explain as explain
from openrnn.nn import GRU as GRU
from openrnn.nn import LSTM as LSTM
from openrnn.nn import RNN as RNN
from openrnn.nn import GRUCell as GRUCell
from openrnn.nn import LSTMCell as LSTMCell
from openrnn.nn import Recurrent as Recurrent
from openrnn.nn import RNNCell as RNNCell
from openrnn.onnx.read import from_onnx as from_onnx
from openrnn.plain import plain_decompositions as plain_decompositions
from openrnn.spec import Problem as Problem
from openrnn.spec import Spec as Spec
from openrnn.watch import Watch as Watch
from openrnn.watch import WatchCallback as WatchCallback
from openrnn.watch import watch as watch

__version__ = "0.1.0"
