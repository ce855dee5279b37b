"""A neural amplifier from a .nam file: its LSTM by openrnn, all at once and sample by sample.

    make example NAME=nam_amplifier
    .venv/bin/python examples/nam_amplifier.py MyAmp.nam  # of architecture LSTM

A .nam file is JSON: sizes, and one list of numbers. Of each layer it holds [W | R] row by row, its
gates in torch's order, then one bias vector, then the states h and c to start from; behind the last
layer stand weight and bias of the head. Without a file a small amplifier with random weights is
written and read.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from compare import compare
from torch import Tensor, nn

import openrnn

States = tuple[Tensor, Tensor]


class Amplifier(nn.Module):
    """x (T, B, 1) and states (L, B, H) -> samples (T, B), states."""

    def __init__(self, lstm: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.lstm, self.head = lstm, head

    def forward(self, x: Tensor, state: States) -> tuple[Tensor, States]:
        y, state = self.lstm(x, state)
        return self.head(y).squeeze(-1), state


@torch.no_grad()
def read(path: Path, layer: type = openrnn.LSTM) -> tuple[Amplifier, States]:
    """The amplifier of a file, and the states (L, H) that it starts from."""
    found: dict[str, Any] = json.loads(path.read_text())
    if found["architecture"] != "LSTM":
        raise SystemExit(f"{path}: architecture must be LSTM, got {found['architecture']}")
    sizes, numbers = found["config"], torch.tensor(found["weights"])
    units, layers, place = sizes["hidden_size"], sizes["num_layers"], 0

    def take(*shape: int) -> Tensor:
        nonlocal place
        begin, place = place, place + torch.Size(shape).numel()
        return numbers[begin:place].reshape(shape)

    lstm, states = layer(sizes["input_size"], units, layers), []
    for k in range(layers):
        inputs = sizes["input_size"] if k == 0 else units
        w_ih, w_hh = take(4 * units, inputs + units).split([inputs, units], 1)
        getattr(lstm, f"weight_ih_l{k}").copy_(w_ih)
        getattr(lstm, f"weight_hh_l{k}").copy_(w_hh)
        getattr(lstm, f"bias_ih_l{k}").copy_(take(4 * units))
        getattr(lstm, f"bias_hh_l{k}").zero_()
        states.append((take(units), take(units)))
    head = nn.Linear(units, 1)
    head.weight.copy_(take(1, units)), head.bias.copy_(take(1))
    h, c = map(torch.stack, zip(*states))
    return Amplifier(lstm, head), (h, c)


def example(units: int, layers: int) -> str:
    """A file with random weights."""
    widths = [1] + [units] * (layers - 1)
    count = sum(4 * units * (width + units + 1) + 2 * units for width in widths) + units + 1
    weights = torch.empty(count).uniform_(-0.2, 0.2).tolist()
    sizes = {"input_size": 1, "hidden_size": units, "num_layers": layers}
    return json.dumps({"version": "0.5.4", "architecture": "LSTM", "config": sizes,
                       "weights": weights, "sample_rate": 48000})  # fmt: skip


def training(amplifier: Amplifier, x: Tensor, wanted: Tensor, state: States) -> list[Tensor]:
    """The gradients of a training step."""
    y, _ = amplifier(x, state)
    loss = (y - wanted).square().mean()
    return list(torch.autograd.grad(loss, list(amplifier.parameters())))


def main() -> None:
    """Renders a signal at once and in blocks, and takes the gradients of a training step."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", nargs="?", type=Path)
    path = parser.parse_args().file
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        if path is None:
            path = Path(folder) / "example.nam"
            path.write_text(example(units=24, layers=2))
        (theirs, state), (ours, _) = read(path, nn.LSTM), read(path)
    spread = [each[:, None].contiguous() for each in state]
    one, many = tuple(spread), tuple(each.expand(-1, 16, -1).contiguous() for each in spread)
    lstm = ours.lstm
    print(f"{path.name}: LSTM, {lstm.num_layers} layers of {lstm.hidden_size} units", flush=True)
    signal = 0.5 * torch.sin(0.05 * torch.arange(24_000.0)).view(-1, 1, 1)  # half a second
    stepper = lstm.stepper(1)

    @torch.no_grad()
    def at_once(amplifier: Amplifier) -> Tensor:
        return amplifier(signal, one)[0]

    @torch.no_grad()
    def in_blocks(amplifier: Amplifier) -> Tensor:
        outputs, state = [], one
        for block in signal[:6400].split(64):
            y, state = amplifier(block, state)
            outputs.append(y)
        return torch.cat(outputs)

    @torch.no_grad()
    def by_sample() -> Tensor:
        stepper.state = one
        return torch.stack([ours.head(stepper(x)) for x in signal[:400]])

    @torch.no_grad()
    def called_by_sample() -> Tensor:
        outputs, state = [], one
        for x in signal[:400]:
            y, state = theirs(x[None], state)
            outputs.append(y)
        return torch.stack(outputs)

    both = {"torch.nn.LSTM": theirs, "openrnn.LSTM": ours}
    for title, run in (("24,000 samples at once", at_once), ("6,400, 64 at a time", in_blocks)):
        compare(title, {name: lambda run=run, a=a: run(a) for name, a in both.items()})
    compare(
        "400, one at a time", {"torch.nn.LSTM": called_by_sample, "openrnn, stepper": by_sample}
    )
    x, wanted = torch.randn(1024, 16, 1), torch.randn(1024, 16)
    compare(
        "training, 16 pieces of 1,024 samples",
        {name: lambda a=a: training(a, x, wanted, many) for name, a in both.items()},
    )


if __name__ == "__main__":
    main()
