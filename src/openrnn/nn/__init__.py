"""Modules: parameters under torch's names, docstrings with equations."""

from openrnn.nn.base import Layer
from openrnn.nn.cells import GRUCell, LSTMCell, RNNCell
from openrnn.nn.layers import GRU, LSTM, RNN, Recurrent
from openrnn.nn.pipeline import Pipeline
from openrnn.nn.stepper import Stepper

__all__ = [
    "GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "Layer", "Pipeline", "RNNCell", "Recurrent",
    "Stepper",
]  # fmt: skip
