"""Cells of nodes that are no cell of ours: other activations, a bound on what these read.

ONNX Runtime decides where ONNX's text leaves it open: `clip` bounds the pre-activations of gates,
peepholes included, and not what the output's function h reads; f = 1 - i with `input_forget`.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from openrnn.cells import Cell, cell
from openrnn.memo import resource
from openrnn.nn import Layer, Recurrent
from openrnn.onnx.activations import Activation, Function, activations

USUAL = {
    "LSTM": activations(["Sigmoid", "Tanh", "Tanh"]), "GRU": activations(["Sigmoid", "Tanh"]),
    "RNN": activations(["Tanh"]),
}  # fmt: skip


def with_cell(layer: Layer, made: Cell) -> Layer:
    """A layer of a cell with the sizes and weights of one that has the same gates."""
    spec = layer.spec
    other = Recurrent(
        made, spec.input_size, spec.hidden_size, bias=spec.bias_mode != "none",
        bidirectional=spec.bidirectional, reverse=spec.reverse, batch_first=layer.batch_first,
        dtype=layer.weight_hh_l0.dtype,
    )  # fmt: skip
    other.load_state_dict(layer.state_dict())
    return other


@resource  # for as long as the registry of cells: a second node of this kind has the same kernels
def own_cell(
    operator: str, functions: tuple[Activation, ...], clip: float, coupled: bool, peepholes: bool
) -> Cell:
    """The cell of an LSTM, of a GRU with `linear_before_reset`, or of an RNN.

    Args:
        operator: ONNX's name.
        functions: f, g and h as far as the operator has them.
        clip: the bound of pre-activations; 0 for none.
        coupled: f = 1 - i, in place of the rows of f.
        peepholes: there are vectors p_i, p_f and p_o.
    """
    calls = [_clipped(each.function, clip) for each in functions]
    if operator == "LSTM":
        f, g, _ = calls
        return _lstm(f, g, functions[2].function, coupled, peepholes)
    return _gru(*calls) if operator == "GRU" else _rnn(*calls)


def _clipped(function: Function, clip: float) -> Function:
    return partial(_bounded, function=function, clip=clip) if clip else function


def _bounded(x: Tensor, function: Function, clip: float) -> Tensor:
    return function(torch.clamp(x, -clip, clip))


def _lstm(f: Function, g: Function, h: Function, coupled: bool, peepholes: bool) -> Cell:
    def with_peepholes(x: Any, r: Any, s: Any, p: Any) -> tuple[Tensor, Tensor]:
        i = f(x.i + r.i + p.p_i * s.c)
        forget = 1 - i if coupled else f(x.f + r.f + p.p_f * s.c)
        c = forget * s.c + i * g(x.g + r.g)
        return f(x.o + r.o + p.p_o * c) * h(c), c

    def plain(x: Any, r: Any, s: Any) -> tuple[Tensor, Tensor]:
        i = f(x.i + r.i)
        forget = 1 - i if coupled else f(x.f + r.f)
        c = forget * s.c + i * g(x.g + r.g)
        return f(x.o + r.o) * h(c), c

    named = partial(cell, "i f g o", "h c", name="onnx_lstm")
    return named(params="p_i p_f p_o")(with_peepholes) if peepholes else named()(plain)


def _gru(f: Function, g: Function) -> Cell:
    @cell(gates="r z n", states="h", name="onnx_gru")
    def gru(x: Any, r: Any, s: Any) -> Tensor:
        z = f(x.z + r.z)
        new: Tensor = (1 - z) * g(x.n + f(x.r + r.r) * r.n) + z * s.h
        return new

    return gru


def _rnn(f: Function) -> Cell:
    @cell(gates="h", states="h", name="onnx_rnn")
    def rnn(x: Any, r: Any, s: Any) -> Tensor:
        return f(x.h + r.h)

    return rnn
