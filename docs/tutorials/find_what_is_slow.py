r"""
Find what is slow
=================

A recurrent model is slow for one of four reasons: no fast backend takes the call, the model calls
the layer too often, the call waits for Python, or the work itself is that large. This tutorial
finds out which, with ``openrnn.explain``, ``torch.profiler`` and ``openrnn bench --profile``.
"""

import subprocess
import sys
import warnings

import torch
from torch.profiler import ProfilerActivity, profile

import openrnn

torch.manual_seed(0)
x = torch.randn(200, 16, 32)  # T, B, I

# %%
# Ask which backend runs
# ----------------------
#
# ``explain`` takes the layer and an example input, and runs nothing.

lstm = openrnn.LSTM(32, 64)
table = openrnn.explain(lstm, x)

# %%
# The first line is the problem: cell, sizes, dtype, device, and what is wanted of it ("grad":
# backward will come; "training": dropout is on). Then each backend answers, in the order of
# preference. ``>`` marks the one that runs. The others give all their reasons, or say that they
# come later.
#
# The same for a GPU that this machine does not have. Read the reasons that are not about the
# machine:

for row in openrnn.explain(
    openrnn.LSTM(32, 64, proj_size=16), device="cuda", capability=(9, 0), reset=True, quiet=True
).rows:
    print(f"{row.backend:10} {row.reasons[-1] if row.reasons else 'no reason against it'}")

# %%
# So an LSTM with a projection and resets would run on the reference there: plain PyTorch operators,
# step by step. Without the projection our kernels would take it, without resets cuDNN.
#
# First reason: nobody fast takes the call
# ----------------------------------------
#
# You need not ask: where a large call runs on the reference, a warning says so, once.

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    slow = openrnn.Recurrent(openrnn.cells.gru_reset_before, 32, 64)
    slow(x)
print(caught[0].message)

# %%
# The remedy is in the reason. This cell multiplies twice a step, one product after the other. A
# ``GRU`` has its reset gate after the product, and a fast path. ``measure=True`` runs both on
# random numbers of these sizes:

for layer in (slow, openrnn.GRU(32, 64)):
    found = openrnn.explain(layer, x[:30], measure=True, quiet=True)
    [chosen] = [row for row in found.rows if row.chosen]
    print(f"{chosen.backend:10} {chosen.details[-1]}")

# %%
# To make a program stop rather than run slowly, name the backend.

try:
    openrnn.Recurrent(openrnn.cells.gru_reset_before, 32, 64, backend="cpu")(x)
except openrnn.NoBackendError as error:
    print(error)

# %%
# Second reason: too many calls
# -----------------------------
#
# A loop over time calls the layer T times, however fast each call is. Such loops are usually there
# because of something between the steps, here a state that is replaced where an episode starts.

starts = torch.rand(200, 16) < 0.03


def walk(x, starts):
    state = (torch.zeros(1, 16, 64), torch.zeros(1, 16, 64))
    outputs = []
    for x_t, start in zip(x, starts, strict=True):
        keep = (~start)[None, :, None]
        y_t, state = lstm(x_t[None], (keep * state[0], keep * state[1]))
        outputs.append(y_t)
    return torch.cat(outputs)


def profiled(run):
    """Prints how many operators of torch a forward and backward pass is, and how long it takes."""
    run().sum().backward()  # what is compiled at a first call is not counted
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run().sum().backward()
    # the events of every operator inside another one too
    operators = [event for event in found.events() if event.name.startswith("aten::")]
    begin = min(event.time_range.start for event in found.events())
    end = max(event.time_range.end for event in found.events())
    print(f"{len(operators):6} operators of torch, {(end - begin) / 1000:6.1f} ms")


profiled(lambda: walk(x, starts))

# %%
# Thousands of operators for one sequence: that is the sign. ``reset=`` takes the mask into the
# call.

profiled(lambda: lstm(x, reset=starts)[0])
y = lstm(x, reset=starts)[0]
print(f"results differ by at most {(walk(x, starts) - y).abs().max():.0e}")

# %%
# ``lengths=`` removes loops over sequences in the same way, ``return_states=True`` those that
# collect states, and a cell of your own those that compute something else at each step.
#
# Third reason: the call waits for Python
# ---------------------------------------
#
# A short call of a small layer takes as long as its way through Python, and a GPU then waits for
# its host. ``openrnn bench --profile`` shows it: it traces five calls of a row of the benchmark.

command = [sys.executable, "-m", "openrnn", "bench", "--suite", "host", "--device", "cpu"]
done = subprocess.run(
    [*command, "--dtype", "float32", "--profile", "lstm-t2"],
    capture_output=True,
    text=True,
    check=True,
)
[forward, *_] = done.stdout.split("trace:")
print(forward)

# %%
# The first table has the operators of torch by the time they take, on a GPU the kernels. The second
# has the widest gaps between them, and between what they lie. The last line sums up: on a GPU it
# says how long the GPU was idle, on a CPU how long a call spent outside of torch's operators, which
# is Python and our kernels. The trace opens in https://ui.perfetto.dev.
#
# What helps: longer or larger calls; ``torch.no_grad()`` or ``torch.inference_mode()`` where
# nothing is trained; ``layer.stepper`` for single steps; on a GPU a CUDA graph, which
# ``torch.compile(mode="reduce-overhead")`` records for you.
#
# Fourth reason: it is that much work
# -----------------------------------
#
# Then the question is whether it could be less. ``schedule=True`` lists what a call does, in order.

stack = openrnn.LSTM(32, 64, num_layers=2, bidirectional=True)
table = openrnn.explain(stack, x, schedule=True)

# %%
# "loop" is the time loop of one layer and direction. On a GPU the list also has the streams on
# which operations run side by side, and the line of the backend names kernel, blocks and expected
# time.
#
# To see whether another library would be faster on your machine, measure the rows of the benchmark
# that are nearest to your sizes: ``openrnn bench --rows 'lm-*'`` compares with what their users run
# today. If you find a size at which we lose, the page of :doc:`benchmarks </benchmarks>` may
# already name it.
