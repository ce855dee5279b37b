r"""
Forecast series of different lengths
====================================

Sensors start at different times, so their series have different lengths. A batch of them is padded.
What then happens at the end of a short one decides whether the model is right. This tutorial trains
a forecaster with ``lengths=``, and shows what goes wrong without it and what ``PackedSequence``
costs.
"""

import time

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import openrnn

torch.manual_seed(0)
torch.set_num_threads(1)  # layers this small are no work for two
STEPS, BATCH, HIDDEN, AHEAD = 120, 64, 32, 24

# %%
# The data
# --------
#
# Waves of a daily rhythm, each with a pitch and a phase of its own, and noise. A series has between
# 5 and 120 hours of history. The model is asked for the next 24.


def draw(batch=BATCH):
    """Histories, padded at the end (B, T, 1); their lengths (B,); what follows (B, 24)."""
    lengths = torch.randint(5, STEPS + 1, (batch,))
    pitch, phase = 0.2 + 0.15 * torch.rand(batch, 1), 6.28 * torch.rand(batch, 1)
    clean = torch.sin(pitch * torch.arange(STEPS + AHEAD) + phase)
    series = clean + 0.05 * torch.randn(batch, STEPS + AHEAD)
    inside = torch.arange(STEPS) < lengths[:, None]
    history = torch.where(inside, series[:, :STEPS], 0)
    hours = lengths[:, None] + torch.arange(AHEAD)
    return history[..., None], lengths, clean.gather(1, hours)


# %%
# The model
# ---------
#
# ``lengths=`` goes into the call: integers on any device, in any order, zeros allowed. The state
# that comes back is that at the true end of each series, so the readout can use it as it is.
# Padding is not read, whatever stands there.


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = openrnn.LSTM(1, HIDDEN, num_layers=2, batch_first=True)
        self.readout = nn.Linear(HIDDEN, AHEAD)

    def forward(self, history, lengths=None):
        _, (h, _) = self.rnn(history, lengths=lengths)
        return self.readout(h[-1])


def train(lengths_given, updates=80):
    torch.manual_seed(1)
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(updates):
        history, lengths, wanted = draw()
        found = model(history, lengths if lengths_given else None)
        loss = nn.functional.mse_loss(found, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


right, losses = train(True)
_, without = train(False)
print(f"error with lengths {losses[-1]:.3f}, without {without[-1]:.3f}")

# %%
# Without lengths the state is taken at the end of the padding: the model has to carry what it knows
# through up to 115 zeros, and learns that slowly. In a bidirectional layer it would be worse: the
# reverse direction starts in the padding.

history, lengths, wanted = draw(3)
with torch.no_grad():
    found = right(history, lengths)

figure, rows = plt.subplots(4, figsize=(7, 6), layout="constrained", height_ratios=(1.4, 1, 1, 1))
rows[0].plot(losses, label="with lengths")
rows[0].plot(without, label="without")
rows[0].set(xlabel="update", ylabel="squared error", ylim=(0, 0.8))
rows[0].legend()
for axes, series, length, future, guess in zip(
    rows[1:], history, lengths.tolist(), wanted, found, strict=True
):
    hours = range(length, length + AHEAD)
    axes.plot(series[:length, 0], color="0.5")
    axes.plot(hours, future, label="what follows")
    axes.plot(hours, guess, "--", label="forecast")
    axes.set(xlim=(0, STEPS + AHEAD), yticks=[])
rows[1].legend(loc="upper right")
rows[3].set(xlabel="hour")
plt.show()

# %%
# Does it matter what stands in the padding?
# ------------------------------------------

spoiled = history.clone()
for row, length in enumerate(lengths.tolist()):
    spoiled[row, length:] = float("nan")
with torch.no_grad():
    assert torch.equal(right(spoiled, lengths), found)
print("nan in the padding changes nothing")

# %%
# What PackedSequence costs
# -------------------------
#
# torch's own way is to sort and pack. Our layers take a ``PackedSequence`` too, so a library that
# makes them works. If you write the model, pass lengths: nothing is sorted, packed or unpacked, and
# the result stays a padded tensor.

history, lengths, _ = draw()
theirs = nn.LSTM(1, HIDDEN, num_layers=2, batch_first=True)
theirs.load_state_dict(right.rnn.state_dict())


def packed(layer):
    given = pack_padded_sequence(history, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(layer(given)[0], batch_first=True, total_length=STEPS)[0]


def milliseconds(run):
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        run().sum().backward()
        best = min(best, time.perf_counter() - begin)
    return 1e3 * best


y = right.rnn(history, lengths=lengths)[0]
assert torch.allclose(y, packed(theirs), atol=1e-5)
slow = milliseconds(lambda: packed(theirs))
fast = milliseconds(lambda: right.rnn(history, lengths=lengths)[0])
print(f"torch.nn with PackedSequence {slow:.1f} ms, openrnn with lengths {fast:.1f} ms")

# %%
# The times are a forward and a backward pass on the machine that built this page. Of series that
# begin anew *inside* a row, such as several machines after each other, ``reset=`` is the word: see
# :doc:`policy_with_resets`.
