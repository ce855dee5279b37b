"""Keras 3 on torch: a model's LSTM replaced by ours, with its weights, inside `fit` and `predict`.

On torch, Keras runs its recurrent layers as a loop of Python over steps. `TorchModuleWrapper`
takes our layer; Keras counts and trains its parameters as those of any other layer.

    make example NAME=keras_on_torch
"""

import os

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported

import keras
import numpy as np
import torch
from compare import compare
from torch import Tensor

import openrnn

STEPS, INPUTS, HIDDEN, SAMPLES, BATCH = 100, 16, 64, 256, 32


class Recurrent(keras.layers.TorchModuleWrapper):
    """A layer of ours with the weights of a Keras layer; gives the outputs of all steps."""

    def __init__(self, like: keras.layers.Layer) -> None:
        layer = openrnn.from_weights(like.get_weights(), "keras", batch_first=True)
        super().__init__(layer, output_shape=(None, STEPS, layer.hidden_size))

    def call(self, x: Tensor) -> Tensor:
        return super().call(x)[0]  # for a mask: lengths=mask.sum(1)


def model_of(recurrent: keras.layers.Layer, dense: keras.layers.Dense) -> keras.Model:
    """A tagger's usual form."""
    model = keras.Sequential([keras.Input((STEPS, INPUTS)), recurrent, dense])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def main() -> None:
    """Both models from the same weights: outputs, and the losses of two epochs."""
    keras.utils.set_random_seed(0)
    dice = np.random.default_rng(0)
    x = dice.standard_normal((SAMPLES, STEPS, INPUTS)).astype("float32")
    target = np.cumsum(x[..., :1], axis=1) / STEPS**0.5
    usual = model_of(keras.layers.LSTM(HIDDEN, return_sequences=True), keras.layers.Dense(1))
    ours = model_of(Recurrent(usual.layers[0]), keras.layers.Dense(1))
    ours.layers[1].set_weights(usual.layers[1].get_weights())
    models = {"Keras's LSTM": usual, "openrnn.LSTM": ours}
    starts = {name: model.get_weights() for name, model in models.items()}

    def fit(name: str) -> Tensor:
        models[name].set_weights(starts[name])
        seen = models[name].fit(x, target, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        return torch.tensor(seen.history["loss"])

    def predict(name: str) -> Tensor:
        models[name].set_weights(starts[name])
        return torch.tensor(models[name].predict(x, batch_size=BATCH, verbose=0))

    for what, run in (("predict", predict), ("fit, 2 epochs", fit)):
        title = f"{what}, {SAMPLES} sequences, T {STEPS}, B {BATCH}, H {HIDDEN}"
        compare(title, {name: lambda run=run, name=name: run(name) for name in models}, seconds=8)


if __name__ == "__main__":
    main()
