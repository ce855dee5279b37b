"""`openrnn.quantize`: int8 weights for inference on CPUs."""

from dataclasses import dataclass, field

import torch
from torch import nn

from openrnn.backends.base import Backend
from openrnn.convert.classes import OURS, THEIRS
from openrnn.convert.outcome import ConversionRow, change_each, table
from openrnn.convert.swap import convert
from openrnn.dispatch import BACKENDS
from openrnn.nn import Layer, quantized
from openrnn.printed import Printed
from openrnn.problem_key import for_backend
from openrnn.spec import dtype_name

MIB = 2**20
MOST_COLUMNS = 2**16


@dataclass(frozen=True, repr=False)
class Quantization(Printed):
    """What `quantize` did; `text` is a table of it.

    Args:
        model: the model, the same object that was given.
        rows: one for each path at which a recurrent module stands.
        before, after: bytes of the parameters and buffers of the modules that were quantized.
    """

    model: nn.Module
    rows: tuple[ConversionRow, ...]
    before: int = field(repr=False)
    after: int = field(repr=False)

    def __repr__(self) -> str:
        return f"<openrnn.convert.Quantization: {self._title()}>"

    def _title(self) -> str:
        count = sum(row.swapped for row in self.rows)
        found = f"{count} of {len(self.rows)} recurrent modules were given int8 weights"
        return f"{found}: {self.before / MIB:.1f} -> {self.after / MIB:.1f} MiB" if count else found

    @property
    def text(self) -> str:
        return table(self._title(), self.rows)


def quantize(model: nn.Module, *, quiet: bool = False) -> Quantization:
    """Gives every recurrent layer of a model int8 weights, for inference on CPUs; prints a table.

    In place: LSTM, GRU and RNN of `torch.nn` become ours first, as by `convert`. Each row of W_ih
    and W_hh becomes int8 with a scale of its own, a quarter of the memory. Inputs and states are
    rounded at each step, to 14 bits and a sign at 1,024 columns, relative to the largest of their
    row. So nearly all of the error is that of the weights, unless features of an input differ by
    orders of magnitude: normalise such inputs. Nothing needs to be calibrated.

    To their callers the layers stay what they were, with lengths, resets and all. They have buffers
    and no parameters, and their state dict has the int8 matrices. To load such a state dict into a
    model quantize the model first; a state dict in floating point is loaded before.

    A call that wants a gradient, is compiled or exported, or runs on a GPU makes floating-point
    weights of the int8 ones first, each time; `openrnn.explain` says so, and why.

    Args:
        quiet: do not print.

    Raises:
        TypeError: model is not a torch.nn.Module.

    Example:
        >>> import torch, openrnn
        >>> model = nn.Sequential(nn.Linear(80, 64), nn.LSTM(64, 256))
        >>> done = openrnn.quantize(model)
        1 of 1 recurrent modules were given int8 weights: 1.3 -> 0.3 MiB
          1  openrnn.LSTM  int8, largest error of a weight 0.00025
    """
    convert(model, quiet=True)
    sizes: list[tuple[int, int]] = []  # bytes before and after

    def change(module: nn.Module) -> tuple[str, bool]:
        size = _size(module)
        note, done = _turn(module)
        if done:
            sizes.append((size, _size(module)))
        return note, done

    rows = change_each(model, lambda module: isinstance(module, OURS + THEIRS), change)
    before, after = sum(size for size, _ in sizes), sum(size for _, size in sizes)
    return Quantization(model, rows, before, after).printed(quiet)


def _turn(module: nn.Module) -> tuple[str, bool]:
    """What became of a module, and whether it is quantized now by this call."""
    reason = _why_not(module)
    if reason is not None or not isinstance(module, Layer):
        return f"left: {reason}", False
    exact = [weight.detach() for weight in module.weights()]
    quantized.quantize_in_place(module)
    pairs = zip(exact, module.weights())
    worst = max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)
    return f"int8, largest error of a weight {worst:.2g}", True


def _why_not(module: nn.Module) -> str | None:
    """Why a recurrent module keeps its weights, or None."""
    if isinstance(module, quantized.Quantized):
        return "it has int8 weights already"
    weights = module.own_weights() if isinstance(module, Layer) else None
    if isinstance(module, Layer) and weights is None:
        return "its weights are computed by a parametrization: remove that first"
    if not isinstance(module, Layer) or weights is None or type(module) not in quantized.QUANTIZED:
        return "only openrnn.LSTM, GRU, RNN and Recurrent themselves can have int8 weights"
    if weights[0].dtype != torch.float32:
        kind = dtype_name(weights[0].dtype)
        return f"dtype {kind}, int8 kernels need float32: call float() on it first"
    if weights[0].is_meta:
        return "its weights have no values yet: they are on the meta device"
    if not all(bool(torch.isfinite(weight).all()) for weight in weights):
        return "a weight is infinite or not a number"
    spec, cpu = module.spec, BACKENDS["cpu"]
    if max(spec.output_size, *map(spec.layer_input, range(spec.num_layers))) > MOST_COLUMNS:
        return f"a matrix has more than {MOST_COLUMNS} columns: too many for exact int32 sums"
    asked = for_backend(
        spec, torch.float32, "cpu", grad=False, training=False, lengths=False, reset=False,
        return_states=False,
    )  # fmt: skip
    # what no CPU kernel takes would only get slower; a machine without compiler may save the model
    return next(iter(Backend.refusals(cpu, asked)), None)


def _size(module: nn.Module) -> int:
    """Bytes of its own parameters and buffers."""
    every = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return sum(tensor.nbytes for tensor in every)
