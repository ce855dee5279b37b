r"""
From Keras
==========

A model that was trained in Keras can go on in PyTorch: ``openrnn.from_weights`` makes a layer of
its arrays. Keras is not needed for that, only the numbers. This tutorial makes layers of what
``layer.get_weights()`` returns, checks them against Keras's formulas in NumPy, and goes back.

The same function reads TensorFlow, JAX, flax, equinox, MXNet, Haste, ONNX and others: see
:doc:`the list </convert>`.
"""

import numpy as np
import torch

import openrnn

random = np.random.default_rng(0)
INPUTS, UNITS = 5, 8

# %%
# What Keras has
# --------------
#
# In Keras you would write ``arrays = layer.get_weights()``, and save them with ``np.savez`` if
# PyTorch lives elsewhere. For an LSTM these are three arrays. Here they are random, so that this
# page needs no Keras.


def draw(*shape):
    return random.normal(0, 0.4, shape).astype(np.float32)


arrays = [draw(INPUTS, 4 * UNITS), draw(UNITS, 4 * UNITS), draw(4 * UNITS)]
for name, array in zip(["kernel", "recurrent_kernel", "bias"], arrays, strict=True):
    print(f"{name:17} {array.shape}")

# %%
# Compare with torch: matrices are transposed there, and there are two bias vectors.
# ``from_weights`` knows that. Cell and sizes follow from the shapes.

lstm = openrnn.from_weights(arrays, "keras", batch_first=True)
print(lstm)
for name, parameter in lstm.named_parameters():
    print(f"{name:15} {tuple(parameter.shape)}")

# %%
# One bias, as in Keras: no parameter is added that Keras did not have. ``batch_first=True`` goes to
# the layer, because Keras's tensors are (batch, steps, features).
#
# Is it the same function?
# ------------------------
#
# Keras documents its LSTM with gates i, f, c, o. In NumPy:


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def keras_lstm(x, kernel, recurrent_kernel, bias):
    h = c = np.zeros((len(x), UNITS), np.float32)
    outputs = []
    for step in range(x.shape[1]):
        i, f, g, o = np.split(x[:, step] @ kernel + h @ recurrent_kernel + bias, 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        outputs.append(h)
    return np.stack(outputs, 1)


x = random.normal(size=(3, 12, INPUTS)).astype(np.float32)
with torch.no_grad():
    y, (h, c) = lstm(torch.from_numpy(x))
apart = np.abs(y.numpy() - keras_lstm(x, *arrays)).max()
print(f"differs from Keras's formula by at most {apart:.0e}")
assert apart < 1e-5

# %%
# GRUs: two functions of one name
# -------------------------------
#
# Keras's GRU has ``reset_after=True`` by default, and then a bias of two rows. Old models have
# ``reset_after=False``, which is another function: its reset gate comes before the product. The
# shape of the bias tells them apart, and ``from_weights`` gives you the right cell.

after = [draw(INPUTS, 3 * UNITS), draw(UNITS, 3 * UNITS), draw(2, 3 * UNITS)]
before = [draw(INPUTS, 3 * UNITS), draw(UNITS, 3 * UNITS), draw(3 * UNITS)]
print(openrnn.from_weights(after, "keras"))
print(openrnn.from_weights(before, "keras"))

# %%
# The second runs on the slow reference, as every step has two products in turn
# (:doc:`how to choose </choose>`).
#
# Whole models
# ------------
#
# A mapping of names works, too: ``{v.path: v.numpy() for v in model.weights}``. What is no
# recurrent layer is left alone. Bidirectional layers are found by the words "forward" and
# "backward".

weights = {"embedding/embeddings": draw(100, INPUTS)}
for place in ("forward_lstm", "backward_lstm"):
    for name, array in zip(["kernel", "recurrent_kernel", "bias"], arrays, strict=True):
        weights[f"bidirectional/{place}/{name}"] = array
both = openrnn.from_weights(weights, "keras", batch_first=True)
print(both)

# %%
# Masks
# -----
#
# ``Embedding(mask_zero=True)`` in Keras makes a mask; padding at the end of rows is ``lengths=``
# here. Behind the end Keras repeats its last output, our y is 0. Final states are the same.

words = torch.tensor([[4, 8, 15, 0, 0], [16, 23, 42, 7, 0]])
embedding = torch.nn.Embedding.from_pretrained(torch.from_numpy(weights["embedding/embeddings"]))
with torch.no_grad():
    y, _ = lstm(embedding(words), lengths=(words != 0).sum(1))
print(y[:, :, 0])

# %%
# And back
# --------
#
# ``to_weights`` gives the arrays in Keras's order, with the bits that came in:
# ``keras_layer.set_weights(list(openrnn.to_weights(layer, "keras").values()))``.

back = openrnn.to_weights(lstm, "keras")
assert all(np.array_equal(a, b) for a, b in zip(arrays, back.values(), strict=True))
print([f"{name} {tuple(array.shape)}" for name, array in back.items()])

# %%
# Files go by the command line: ``openrnn convert model.keras model.safetensors --from keras --to
# torch`` (``pip install '.[hdf5]'``). What Keras can say and our layers cannot do, such as another
# activation, is refused by name.
