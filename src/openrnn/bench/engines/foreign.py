"""Packages of others, where they are installed: FlashRNN and TorchRL's Triton kernels."""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import linear

from openrnn.bench.engines.base import Engine, Ready, leaf
from openrnn.bench.task import PRECISIONS, Task

LIMIT = 1024  # beyond, FlashRNN's fused kernels do not fit, and fail while they compile


def _plain_layer(task: Task, package: str) -> str | None:
    """What both packages refuse: they run one layer, one way."""
    row = task.row
    if find_spec(package) is None:
        return f"the package {package} is not installed"
    if row.states:
        return f"{package} is called from states of 0 here"
    if row.layers > 1 or row.bidirectional:
        return f"{package} runs one layer, one way"
    return f"{package} takes no lengths" if row.lengths else None


def _leaves(task: Task, dtype: torch.dtype) -> dict[str, Tensor]:
    parts = {"x": task.x, **task.weights}
    return {name: leaf(tensor.to(dtype)) for name, tensor in parts.items()}


class _Package(Engine):
    """For rows of the two cells that both packages have, on a GPU."""

    def concerns(self, task: Task) -> bool:
        return task.device != "cpu" and task.row.cell in ("lstm", "gru")


class FlashRNN(_Package):
    """FlashRNN's fused CUDA kernels with one head; the input product is torch's."""

    name, title = "flashrnn", "FlashRNN"
    kernels = "cuda_fused"

    def refuses(self, task: Task) -> str | None:
        reason = _plain_layer(task, "flashrnn")
        if reason:
            return reason
        if task.row.cell != "lstm":
            return "FlashRNN's GRU has other biases than torch's"
        if task.row.resets:
            return "flashrnn takes no resets"
        if task.precision not in ("bfloat16", "float16"):
            return f"flashrnn computes in 16 bits, not {task.precision}"
        if task.row.hidden > LIMIT:
            return f"H {task.row.hidden}, flashrnn's fused kernels take up to {LIMIT}"
        return None

    def candidates(self, task: Task) -> Iterator[Ready]:
        run = import_module("flashrnn.flashrnn").flashrnn
        leaves, row = _leaves(task, task.x.dtype), task.row
        gates, hidden = len(row.definition.gates), row.hidden

        def call() -> Tensor:
            x = linear(leaves["x"].transpose(0, 1), leaves["weight_ih_l0"], leaves["bias_ih_l0"])
            states, _ = run(
                x.view(row.batch, row.steps, gates, 1, hidden),
                leaves["weight_hh_l0"].view(gates, 1, hidden, hidden),
                leaves["bias_hh_l0"].view(gates, 1, hidden),
                function="lstm", backend=self.kernels, dtype=task.precision,
            )  # fmt: skip
            y: Tensor = states[0].reshape(row.batch, row.steps, hidden).transpose(0, 1)
            return y

        yield Ready(task, call, leaves)


class TorchRL(_Package):
    """TorchRL's Triton kernels, called below its modules; tensors are float32, as it wants them."""

    name, title = "torchrl", "TorchRL, Triton"
    kernels = "torchrl.modules.tensordict_module._rnn_triton"

    def refuses(self, task: Task) -> str | None:
        reason = _plain_layer(task, "torchrl")
        if reason:
            return reason
        if task.precision == "float16":
            return "torchrl's kernels multiply in bfloat16 or float32"
        return None

    def candidates(self, task: Task) -> Iterator[Ready]:
        module = import_module(self.kernels)
        leaves, row = _leaves(task, torch.float32), task.row
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        weights = [leaves[name] for name in names]
        starts = task.reset
        if starts is None:
            starts = torch.zeros(row.steps, row.batch, dtype=torch.bool, device=task.device)
        starts = starts.t().contiguous()
        zeros = torch.zeros(row.batch, row.steps, row.hidden, device=task.device)
        states = [zeros, zeros.clone()] if row.cell == "lstm" else [zeros]
        run = module.lstm_triton if row.cell == "lstm" else module.gru_triton
        inner = torch.bfloat16 if task.precision == "bfloat16" else torch.float32
        products = PRECISIONS[task.precision].products

        def call() -> Tensor:
            x = leaves["x"].transpose(0, 1).contiguous()
            out = run(x, *states, *weights, starts, inner, input_precision=products)
            y: Tensor = out[0].transpose(0, 1).to(task.x.dtype)
            return y

        yield Ready(task, call, leaves)
