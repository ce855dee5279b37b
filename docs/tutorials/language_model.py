r"""
Train a language model
======================

A model of text that reads byte after byte: an embedding, an LSTM, a readout. It learns on some of
the sources of Python's standard library, in seconds on a CPU, and then writes. On the way you meet
what training of recurrent layers is about: streams, states that go on from chunk to chunk, gradient
clipping, and sampling with a stepper.
"""

import math
import statistics
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import openrnn

torch.manual_seed(0)
torch.set_num_threads(1)  # a layer this small is no work for two
device = "cuda" if torch.cuda.is_available() else "cpu"

# %%
# The corpus
# ----------
#
# Two files that every Python has. Every byte is a symbol; those above 127 are left out.

text = "".join(Path(module.__file__).read_text() for module in (statistics, textwrap))
data = torch.tensor([byte for byte in text.encode() if byte < 128])
held_out, data = data[-4000:], data[:-4000]
print(f"{len(data):,} bytes to learn from, {len(held_out):,} to test with")

# %%
# Streams
# -------
#
# The text is cut into 16 streams of equal length, side by side: (steps, streams). Training walks
# through all of them at once, 64 bytes at a time. The layer is time-major by default, and so is
# this.

STREAMS, STEPS = 16, 64
length = len(data) // STREAMS
streams = data[: length * STREAMS].view(STREAMS, length).T.contiguous().to(device)


class Model(nn.Module):
    def __init__(self, hidden=128):
        super().__init__()
        self.embed = nn.Embedding(128, 32)
        self.lstm = openrnn.LSTM(32, hidden)
        self.readout = nn.Linear(hidden, 128)

    def forward(self, symbols, state=None):
        y, state = self.lstm(self.embed(symbols), state)
        return self.readout(y), state


model = Model().to(device)
print(model)

# %%
# Training
# --------
#
# The state at the end of a chunk is where the next one begins, so the model remembers more than 64
# bytes. ``detach`` ends the gradients there: truncated backpropagation through time. Recurrent
# gradients can be large now and then; clipping their norm keeps one bad chunk from doing harm.
#
# On a GPU, ``with torch.autocast("cuda", torch.bfloat16):`` around the forward pass is all that it
# takes to train in bfloat16.


def bits(scores, symbols):
    """Bits a byte: what the model needs on average to name the next one."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), symbols.flatten()) / math.log(2)


optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
losses = []
for _ in range(4):
    state = None
    for begin in range(0, length - STEPS - 1, STEPS):
        chunk = streams[begin : begin + STEPS + 1]
        scores, state = model(chunk[:-1], state)
        loss = bits(scores, chunk[1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state = tuple(each.detach() for each in state)
        losses.append(loss.item())

with torch.no_grad():
    test = held_out[:, None].to(device)
    scores, _ = model(test[:-1])
    print(
        f"{losses[-1]:.2f} bits a byte in training, {bits(scores, test[1:]):.2f} on the test text"
    )

figure, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
axes.plot(losses)
axes.set(xlabel="update", ylabel="bits a byte", ylim=(0, 7.2))
axes.axhline(7, color="0.7", lw=1)
axes.annotate("knows nothing", (len(losses) * 0.8, 6.6), color="0.4")
plt.show()

# %%
# Writing
# -------
#
# Text is drawn byte by byte, and each byte is the next input. A ``stepper`` keeps the state: it is
# made for this. A temperature below 1 makes likely bytes likelier.


def write(prompt, number, temperature=0.6):
    stepper = model.lstm.stepper()  # one stream, no batch
    written = list(prompt.encode())
    with torch.no_grad():
        for place in range(len(written) + number - 1):
            symbol = torch.tensor(written[place], device=device)
            y = stepper(model.embed(symbol))
            if place == len(written) - 1:
                chances = torch.softmax(model.readout(y) / temperature, 0)
                written.append(int(torch.multinomial(chances, 1)))
    return bytes(written).decode()


print(write("def ", 300))

# %%
# It has seen 60 thousand bytes for a few seconds: the shape is right, the sense is not.
#
# The same, in earnest
# --------------------
#
# ``openrnn train`` is this loop with what long runs need: checkpoints that resume bit for bit,
# several GPUs, mixed precision, TensorBoard.
#
# .. code-block:: console
#
#    $ openrnn train --corpus FOLDER --layers 2 --hidden 512 --minutes 10 --out runs/mine
#    $ openrnn sample runs/mine --prompt "def "
