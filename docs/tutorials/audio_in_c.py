r"""
Audio in C
==========

A small LSTM can model a guitar amplifier: one sample in, one sample out. It is trained in Python
and runs in a plug-in, where there is no Python and no time to allocate memory. This tutorial trains
such a model for a few seconds on a made-up amplifier, exports it with ``openrnn.export_native``,
and calls the result sample by sample.
"""

import ctypes
import re
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

import openrnn

torch.manual_seed(0)
RATE, UNITS = 16_000, 12

# %%
# The amplifier
# -------------
#
# It distorts, and then a coil smooths. Both depend on what came before, so that a recurrent model
# is needed. We record what goes in and what comes out: plucked notes.


def amplifier(x):
    """Distortion, then a low-pass filter."""
    driven, level, out = torch.tanh(4 * x), 0.0, []
    for sample in driven.tolist():
        level += 0.3 * (sample - level)
        out.append(level)
    return torch.tensor(out)


def plucked(pitch, seconds=0.25):
    t = torch.arange(int(RATE * seconds)) / RATE
    return 0.8 * torch.exp(-9 * t) * torch.sin(2 * torch.pi * pitch * t)


notes = torch.stack([plucked(pitch) for pitch in (110, 147, 196, 247, 330, 392, 494, 587)])
wanted = torch.stack([amplifier(note) for note in notes])

# %%
# The model
# ---------
#
# One LSTM with one input, and one number of its units. The usual loss of this trade is the error
# over the energy of the signal. Each update takes 256 samples; the states go on to the next ones.

lstm = openrnn.LSTM(1, UNITS, batch_first=True)
readout = torch.nn.Linear(UNITS, 1)
optimizer = torch.optim.Adam([*lstm.parameters(), *readout.parameters()], lr=8e-3)

losses = []
for _ in range(12):
    state = None
    for begin in range(0, notes.shape[1] - 256, 256):
        part = slice(begin, begin + 256)
        y, state = lstm(notes[:, part, None], state)
        error = (readout(y)[..., 0] - wanted[:, part]).square().sum()
        loss = error / wanted[:, part].square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = tuple(each.detach() for each in state)
        losses.append(loss.item())
print(f"error over energy: {losses[0]:.2f} at first, {losses[-1]:.4f} at the end")

# %%
# Export
# ------
#
# One call writes a header, an object file, and, where a C compiler is found, a shared library.

folder = Path(tempfile.mkdtemp())
files = openrnn.export_native(lstm, folder / "amp")
for file in files:
    print(f"{file.name:8} {file.stat().st_size:7} bytes")

# %%
# The header is all that a C program needs to know. It has the memory that one voice takes, and two
# functions:

header = (folder / "amp.h").read_text()
print(header[header.index("enum {") : header.rindex("#ifdef")])

# %%
# A plug-in would say (:doc:`/native` has the whole program, what to link, and other processors):
#
# .. code-block:: c
#
#    static amp_t amp;                  /* one for each voice */
#    amp_reset(&amp);
#    amp_step(&amp, input, units, 64);  /* 64 samples -> 64 x 12 numbers */
#
# A call allocates nothing, locks nothing and starts no thread. The readout stays yours: twelve
# products a sample.
#
# Call it
# -------
#
# The shared library has the same two functions. Here ``ctypes`` plays the plug-in, with 64 samples
# a call. Without a compiler there is no shared library, and Python's layer takes its part.


class Amp(ctypes.Structure):
    """``amp_t`` of the header."""

    _fields_ = [
        ("h", ctypes.c_float * UNITS),
        ("c", ctypes.c_float * UNITS),
        ("work", ctypes.c_ubyte * int(re.search(r"work\[(\d+)\]", header)[1])),
    ]


def pointer(array):
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


song = torch.cat([plucked(pitch, 0.2) for pitch in (131, 165, 220, 262)])
with torch.no_grad():
    units = lstm(song[None, :, None])[0][0].numpy()

shared = [file for file in files if file.suffix in (".so", ".dylib")]
if shared:
    library = ctypes.CDLL(str(shared[0]))
    amp, x, y = Amp(), song.numpy(), np.empty_like(units)
    library.amp_reset(ctypes.byref(amp))
    for begin in range(0, len(x), 64):
        n = ctypes.c_int64(min(64, len(x) - begin))
        library.amp_step(ctypes.byref(amp), pointer(x[begin:]), pointer(y[begin:]), n)
    print(f"C and Python differ by at most {np.abs(y - units).max():.0e}")
    assert np.abs(y - units).max() < 1e-5
    units = y

# %%
# What came out, for notes that were not in the training:

with torch.no_grad():
    played = readout(torch.from_numpy(units))[:, 0]
target = amplifier(song)
error = (played - target).square().sum() / target.square().sum()

figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
first = slice(3200, 3600)
axes.plot(song[first], color="0.7", label="in")
axes.plot(target[first], label="amplifier")
axes.plot(played[first], "--", label="model, in C" if shared else "model")
axes.set(title=f"error over energy {error:.3f}", xlabel="sample")
axes.legend(loc="upper right")
plt.show()

# %%
# Real models train for minutes on minutes of sound, with 16 to 40 units. At 48,000 samples a second
# one core runs many of them at once: :doc:`/native` has measured samples a second, and ``python
# examples/native.py`` measures yours. ``cpu="x86-64-v3"`` exports for other machines than this one,
# ``cpu="aarch64"`` for 64-bit ARM.
