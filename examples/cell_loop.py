"""Cells in a loop over time: after `openrnn.convert`, and as one call of a layer.

A decoder that feeds its output back needs the loop; where all inputs are known the layer does
without. `LSTM.step` and `LSTMCell` have the same weights under other names.

    make example NAME=cell_loop
"""

import copy

import torch
from compare import compare
from torch import Tensor, nn

import openrnn

SIZES = [(64, 64, 1), (256, 256, 32), (1536, 1024, 16)]  # I, H, B
STEPS = 20


def loop(cell: nn.Module, x: Tensor) -> Tensor:
    """As decoders have it."""
    state = tuple(x.new_zeros(x.shape[1], cell.hidden_size) for _ in range(2))
    outputs = []
    for x_t in x:
        state = cell(x_t, state)
        outputs.append(state[0])
    return torch.stack(outputs)


def call(layer: openrnn.LSTM, x: Tensor) -> Tensor:
    """The same in one call."""
    return layer(x)[0]


def layer_of(cell: nn.LSTMCell) -> openrnn.LSTM:
    """A layer with a cell's weights."""
    layer = openrnn.LSTM(cell.input_size, cell.hidden_size)
    layer.load_state_dict({f"{name}_l0": each for name, each in cell.state_dict().items()})
    return layer


def main() -> None:
    """All sizes, without gradients and in training."""
    torch.manual_seed(0)
    for inputs, hidden, batch in SIZES:
        cell, x = nn.LSTMCell(inputs, hidden), torch.randn(STEPS, batch, inputs)
        converted = copy.deepcopy(cell)
        openrnn.convert(converted, quiet=True)
        ways = {"loop, torch.nn": (loop, cell), "loop, converted": (loop, converted),
                "one call": (call, layer_of(cell))}  # fmt: skip

        @torch.no_grad()
        def forward(run, module, x=x) -> Tensor:
            return run(module, x)

        def training(run, module, x=x) -> tuple[Tensor, ...]:
            return torch.autograd.grad(run(module, x).square().sum(), list(module.parameters()))

        for title, what in (("forward", forward), ("training", training)):
            compare(
                f"{title}, {STEPS} steps, I {inputs}, H {hidden}, B {batch}",
                {name: lambda what=what, way=way: what(*way) for name, way in ways.items()},
                within=1e-4,
            )


if __name__ == "__main__":
    main()
