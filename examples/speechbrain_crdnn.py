"""SpeechBrain's CRDNN: its LSTM by `openrnn.convert`, its Li-GRU by a cell of two lines.

A CRDNN is convolutions, recurrent layers in both directions and dense layers. With `LSTM` the
recurrent part is torch's. `LiGRU`, the class that CRDNN takes by default, walks over time in
Python: below, `_ligru_cell` of each layer is one call. Batch norm and dropout stay SpeechBrain's.
Sizes are smaller than those of its recipes, so that the loop ends in time; data are random.

    make example NAME=speechbrain_crdnn
"""

import copy
import sys
from functools import cache
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.func import functional_call

import openrnn

try:
    import torchaudio  # noqa: F401
except (ImportError, OSError):  # on PyPI it needs CUDA's libraries
    sys.modules["torchaudio"] = ModuleType("torchaudio")  # reads audio, which is not done here

from converted import converted, passes
from speechbrain.lobes.models.CRDNN import CRDNN
from speechbrain.nnet.RNN import LSTM, LiGRU, LiGRU_Layer

UTTERANCES, FRAMES, FEATURES, HIDDEN, LAYERS = 8, 200, 40, 128, 2


@openrnn.cell(gates="a z", states="h m")
def ligru(x, r, s):
    """Li-GRU; m, which no step changes, is the dropout mask of a whole sequence."""
    z = torch.sigmoid(x.z + r.z)
    return z * s.h + (1 - z) * torch.relu(x.a + r.a) * s.m, s.m


@cache
def layer(hidden: int) -> openrnn.Recurrent:
    """A layer that gets its weights with each call, so that parameters and checkpoints stay."""
    sizes = 2 * hidden, hidden  # what comes in is the input side of both gates
    options = {"input_mode": "gates", "bias": False, "batch_first": True, "device": "meta"}
    return openrnn.Recurrent(ligru, *sizes, **options)


class FusedLiGRULayer(LiGRU_Layer):
    """SpeechBrain's layer without its loop."""

    def _ligru_cell(self, w: Tensor, ht: Tensor) -> Tensor:
        # w is W x behind its norm, of both gates
        mask, weights = self._sample_drop_mask(w).expand_as(ht), {"weight_hh_l0": self.u.weight}
        return functional_call(layer(ht.shape[1]), weights, (w, (ht[None], mask[None])))[0]


def without_loops(model: nn.Module) -> nn.Module:
    """A copy whose Li-GRU layers are the ones above."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, LiGRU_Layer):
            module.__class__ = FusedLiGRULayer
    return twin


def main() -> None:
    """Compares a CRDNN of each kind."""
    torch.manual_seed(0)
    x = torch.randn(UTTERANCES, FRAMES, FEATURES)
    targets = torch.randint(40, (UTTERANCES, FRAMES))
    sizes = f"T {FRAMES}, B {UTTERANCES}, H {HIDDEN}, {LAYERS} layers, both directions"

    def run(model: nn.Module) -> Tensor:
        return model(x)

    def loss(model: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(model(x).flatten(0, 1), targets.flatten())

    def crdnn(kind: type[nn.Module], dropout: float) -> CRDNN:
        return CRDNN(
            input_shape=x.shape, rnn_class=kind, cnn_channels=[8, 16], rnn_layers=LAYERS,
            rnn_neurons=HIDDEN, dnn_neurons=128, dropout=dropout,
        )  # fmt: skip

    # dropout between layers of an LSTM draws other masks than torch does
    passes(f"CRDNN with LSTM, {sizes}", converted(crdnn(LSTM, 0.0)), run, loss)
    model = crdnn(LiGRU, 0.15)
    ways = {"LiGRU": model, "openrnn": without_loops(model)}
    passes(f"CRDNN with Li-GRU, {sizes}", ways, run, loss)


if __name__ == "__main__":
    main()
