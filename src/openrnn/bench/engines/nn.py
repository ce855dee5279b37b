"""torch.nn: as users call it, with PackedSequence for lengths, step by step for resets."""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from openrnn.bench.cases import TORCH_CELLS, BenchRow
from openrnn.bench.engines.base import Engine, Inference, Ready, Step, hx_of, leaf, leaves_of
from openrnn.bench.task import Task

KINDS = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}


class Torch(Engine):
    """torch.nn's layer as users call it, parameters flat."""

    name, title = "torch", "torch.nn"

    def concerns(self, task: Task) -> bool:
        return task.row.cell in TORCH_CELLS

    def refuses(self, task: Task) -> str | None:
        if task.row.resets:
            return "torch.nn has no resets; its users run a loop of steps"
        if task.row.lengths:
            return "torch.nn takes lengths in a PackedSequence only"
        if task.precision == "int8" and task.row.cell not in KINDS:
            return "torch.ao.quantization knows LSTM and GRU alone"
        return None

    def candidates(self, task: Task) -> Iterator[Ready]:
        layer, x, first = _layer(task), leaf(task.x), hx_of(task.states)
        if task.precision == "int8":
            quantized, given = _quantized(layer), x.detach()
            yield Inference(task, self.name, lambda: quantized(given, first)[0])
        else:
            step = _step_of(layer)
            yield Ready(task, lambda: layer(x, first)[0], leaves_of(layer, x), step=step)


def _step_of(layer: torch.nn.RNNBase) -> Step:
    """A step by a call of T = 1."""

    def step(x_t: Tensor, states: Any) -> tuple[Tensor, Any]:
        y, states = layer(x_t[None], states)
        return y[0], states

    return step


class Packed(Engine):
    """torch.nn on a PackedSequence; packing and padding are part of the call."""

    name, title = "packed", "torch.nn, PackedSequence"

    def concerns(self, task: Task) -> bool:
        return task.row.lengths and task.row.cell in TORCH_CELLS

    def refuses(self, task: Task) -> str | None:
        return None

    def candidates(self, task: Task) -> Iterator[Ready]:
        layer, x, lengths, steps = _layer(task), leaf(task.x), task.lengths, task.row.steps
        first = hx_of(task.states)
        if lengths is None:
            raise ValueError("a task without lengths")

        def call() -> Tensor:
            packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
            y, _ = pad_packed_sequence(layer(packed, first)[0], total_length=steps)
            return y

        yield Ready(task, call, leaves_of(layer, x))


class StepLoop(Engine):
    """torch.nn called once a step, states set to 0 where an episode starts, as RL libraries do."""

    name, title = "loop", "torch.nn, loop of steps"

    def concerns(self, task: Task) -> bool:
        return task.row.resets > 0 and task.row.cell in TORCH_CELLS

    def refuses(self, task: Task) -> str | None:
        return "a loop of steps goes one way" if task.row.bidirectional else None

    def candidates(self, task: Task) -> Iterator[Ready]:
        layer, x, row = _layer(task), leaf(task.x), task.row
        if task.reset is None:
            raise ValueError("a task without resets")
        keep = (~task.reset).to(x.dtype)[:, None, :, None]  # (T, 1, B, 1)
        count = 2 if row.cell == "lstm" else 1
        zeros = (x.new_zeros(row.layers, row.batch, row.hidden),) * count
        first = task.states or zeros

        def call() -> Tensor:
            states = first
            outputs = []
            for t in range(row.steps):
                states = tuple(keep[t] * state for state in states)
                if task.fresh:
                    states = tuple(s + (1 - keep[t]) * new for s, new in zip(states, task.fresh))
                y, after = layer(x[t : t + 1], states if count > 1 else states[0])
                states = after if count > 1 else (after,)
                outputs.append(y)
            return torch.cat(outputs)

        yield Ready(task, call, leaves_of(layer, x))


def _layer(task: Task) -> torch.nn.RNNBase:
    made = network(task.row)
    made.to(task.device, task.x.dtype)
    made.load_state_dict(task.weights)
    made.flatten_parameters()
    return made


def _quantized(layer: torch.nn.RNNBase) -> torch.nn.Module:
    """The layer by torch's own dynamic quantization."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it; torchao has nothing for these layers
        kinds = {type(layer)}
        model = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(layer), kinds)
    found: torch.nn.Module = model[0]
    return found


def network(row: BenchRow) -> torch.nn.RNNBase:
    """torch.nn's layer of a row."""
    options = {"num_layers": row.layers, "bidirectional": row.bidirectional}
    if row.cell in KINDS:
        made: torch.nn.RNNBase = KINDS[row.cell](row.inputs, row.hidden, **options)
        return made
    kind = row.cell.removeprefix("rnn_")
    return torch.nn.RNN(row.inputs, row.hidden, nonlinearity=kind, **options)
