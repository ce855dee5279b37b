"""neuralhydrology: CudaLSTM by `openrnn.convert`, EA-LSTM by a cell of three lines.

A year of daily weather and the attributes of a catchment give its discharge. CudaLSTM's layer is
torch's: `convert` swaps it. EA-LSTM walks over the days in Python, since its input gate sees the
attributes alone. Below, that gate is a state which no step changes, and the year is one call.
Sizes are those of studies with CAMELS, weights and data are random.

    make example NAME=hydrology
"""

import copy
from functools import cache

import torch
from converted import converted, passes
from neuralhydrology.modelzoo.cudalstm import CudaLSTM
from neuralhydrology.modelzoo.ealstm import EALSTM
from neuralhydrology.utils.config import Config
from torch import Tensor, nn
from torch.func import functional_call

import openrnn

WEATHER = [f"weather_{k}" for k in range(5)]
ATTRIBUTES = [f"attribute_{k}" for k in range(27)]
DAYS, CATCHMENTS, HIDDEN = 365, 64, 128


@openrnn.cell(gates="f o g", states="h c i")
def ea_lstm(x, r, s):
    """An LSTM with one input gate i for the whole sequence, given like h_0 and c_0."""
    c = torch.sigmoid(x.f + r.f) * s.c + s.i * torch.tanh(x.g + r.g)
    return torch.sigmoid(x.o + r.o) * torch.tanh(c), c, s.i


@cache
def layer(inputs: int, hidden: int) -> openrnn.Recurrent:
    """A layer that gets its weights with each call, so that parameters and checkpoints stay."""
    return openrnn.Recurrent(ea_lstm, inputs, hidden, bias_mode="input", device="meta")


class FusedEALSTM(EALSTM):
    """neuralhydrology's EA-LSTM without its loop."""

    def forward(self, data: dict) -> dict[str, Tensor]:
        x, attributes = self.embedding_net(data, concatenate_output=False)
        i = torch.sigmoid(self.input_gate(attributes))[None]
        gates, zeros = self.dynamic_gates, torch.zeros_like(i)
        weights = {
            "weight_ih_l0": gates.weight_ih.T, "weight_hh_l0": gates.weight_hh.T,
            "bias_ih_l0": gates.bias,
        }  # fmt: skip
        h, _, (_, c, _) = functional_call(
            layer(x.shape[2], i.shape[2]), weights, (x, (zeros, zeros, i)), {"return_states": True}
        )
        found = {"h_n": h.transpose(0, 1), "c_n": c[0].transpose(0, 1)}
        return found | self.head(self.dropout(found["h_n"]))


def main() -> None:
    """Compares both models."""
    torch.manual_seed(0)
    config = Config({
        "model": "cudalstm", "head": "regression", "hidden_size": HIDDEN, "seq_length": DAYS,
        "dynamic_inputs": WEATHER, "static_attributes": ATTRIBUTES, "predict_last_n": 1,
        "target_variables": ["discharge"], "initial_forget_bias": 3, "output_dropout": 0.4,
        "output_activation": "linear",
    })  # fmt: skip
    data = {
        "x_d": {name: torch.randn(CATCHMENTS, DAYS, 1) for name in WEATHER},
        "x_s": torch.randn(CATCHMENTS, len(ATTRIBUTES)),
    }
    discharge = torch.rand(CATCHMENTS, 1)

    def run(model: nn.Module) -> Tensor:
        return model(data)["y_hat"]

    def loss(model: nn.Module) -> Tensor:
        return nn.functional.mse_loss(run(model)[:, -1], discharge)

    sizes = f"T {DAYS}, B {CATCHMENTS}, H {HIDDEN}"
    passes(f"CudaLSTM, {sizes}", converted(CudaLSTM(config)), run, loss)
    model = EALSTM(config)
    fused = copy.deepcopy(model)
    fused.__class__ = FusedEALSTM
    ways = {"EALSTM": model, "openrnn": fused}
    # its recurrent matrices begin as identities, over which rounding grows
    passes(f"EA-LSTM, {sizes}", ways, run, loss, within=1e-4)


if __name__ == "__main__":
    main()
