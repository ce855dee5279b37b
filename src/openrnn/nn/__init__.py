"""Modules: parameters under torch's names, docstrings with equations."""

from openrnn.nn.base import Layer as Layer
from openrnn.nn.cells import GRUCell as GRUCell
from openrnn.nn.cells import LSTMCell as LSTMCell
from openrnn.nn.cells import RNNCell as RNNCell
from openrnn.nn.layers import GRU as GRU
from openrnn.nn.layers import LSTM as LSTM
from openrnn.nn.layers import RNN as RNN
from openrnn.nn.layers import Recurrent as Recurrent
from openrnn.nn.stepper import Stepper as Stepper
