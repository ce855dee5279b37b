r"""
One step at a time: streams and CUDA graphs
===========================================

A policy that acts, a decoder that samples and a filter of live audio do not have the whole
sequence: they take one step, use it, and take the next. Then the cost is not the arithmetic but the
call. This tutorial goes from ``layer.step`` to ``layer.stepper`` to a CUDA graph, and measures
each.
"""

import time

import matplotlib.pyplot as plt
import torch

import openrnn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
lstm = openrnn.LSTM(64, 64).to(device)
x = torch.randn(300, 1, 64, device=device)  # T, B, I

# %%
# A step and a state
# ------------------
#
# ``step`` takes what one step sees, (B, I), and the state; it returns the output and the next
# state. Steps one after the other give what one call over the whole sequence gives.

with torch.no_grad():
    whole, _ = lstm(x)
    state, outputs = None, []
    for x_t in x:
        y_t, state = lstm.step(x_t, state)
        outputs.append(y_t)
tolerance = 2e-3 if device == "cuda" else 1e-5  # products of float32 are tf32 on a GPU
assert torch.allclose(torch.stack(outputs), whole, atol=tolerance)

# %%
# It takes masks of resets, one entry a sequence, and records gradients where they are wanted.
# Chunks of several steps work in the same way: ``y, state = lstm(chunk, state)``.
#
# A stepper keeps the state
# -------------------------
#
# Where no gradient is needed, a stepper does the same for less. It binds the kernel to memory of
# its own once; then a step allocates nothing. The result is the same tensor each time, which the
# next step overwrites, so ``clone`` what you keep.

stepper = lstm.stepper(batch=1)
outputs = [stepper(x_t).clone() for x_t in x]
assert torch.allclose(torch.stack(outputs), whole, atol=tolerance)

h, c = stepper.state  # a copy, which can be kept and set again
stepper.reset()  # zeros; with a mask, for some sequences of the batch

# %%
# Parameters are read at each step, so a stepper of a policy in training always acts with the newest
# ones. One thread at a time may use a stepper; make one for each stream.
#
# How long a step takes
# ---------------------


def microseconds(step):
    """The least time of a step, of several rounds."""
    best = float("inf")
    with torch.no_grad():
        for _ in range(7):
            if device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for x_t in x:
                step(x_t)
            if device == "cuda":
                torch.cuda.synchronize()
            best = min(best, (time.perf_counter() - begin) / len(x))
    return 1e6 * best


torch.set_num_threads(1)  # one step of one small layer is no work for two
theirs = torch.nn.LSTM(64, 64).to(device)
theirs.load_state_dict(lstm.state_dict())
state = (torch.zeros(1, 1, 64, device=device), torch.zeros(1, 1, 64, device=device))
times = {
    "torch.nn.LSTM": microseconds(lambda x_t: theirs(x_t[None], state)),
    "layer.step": microseconds(lambda x_t: lstm.step(x_t, state)),
    "stepper": microseconds(stepper),
}

# %%
# On a GPU: a CUDA graph
# ----------------------
#
# A GPU finishes such a step in a few microseconds, long before Python has asked for the next one. A
# CUDA graph records the step with all that surrounds it, once; replaying it costs one call. A step
# fits: the host never waits for the device. For few sequences (up to 128 of an LSTM of 512 units,
# 64 of one of 1,024) and sizes in multiples of 8 it is one kernel
# (:doc:`how it works </kernels>`). ``layer.stepper`` records such a graph by itself where it runs
# on a GPU; what follows is for steps with more around them, such as a policy's heads.
#
# The tensors of a graph have fixed places: copy the input in, replay, and read the output. States
# are handed on by copying the new into the old inside the graph.

if device == "cuda":
    place = torch.zeros(1, 64, device=device)
    h, c = (torch.zeros(1, 1, 64, device=device) for _ in range(2))

    def one_step():
        y, (new_h, new_c) = lstm.step(place, (h, c))
        h.copy_(new_h)
        c.copy_(new_c)
        return y

    with torch.no_grad():
        one_step()  # compiles the kernel, before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = one_step()
        h.zero_(), c.zero_()

        def replay(x_t):
            place.copy_(x_t)
            graph.replay()
            return y

        outputs = [replay(x_t).clone() for x_t in x]
    assert torch.allclose(torch.stack(outputs), whole, atol=tolerance)
    times["CUDA graph"] = microseconds(replay)
else:
    print("no GPU here: the graph is left out")

# %%
# On the machine that built this page:

figure, axes = plt.subplots(figsize=(6, 2), layout="constrained")
axes.bar_label(axes.barh(list(times), list(times.values())), fmt="%.1f", padding=4)
axes.set(title=f"one step, 64 units, {device}", xlabel="microseconds")
axes.margins(x=0.2)
plt.show()

# %%
# On an H200 a step of an LSTM of 1,024 units takes 4.1 microseconds for one sequence and 5.2 for
# 16, of 512 units 2.7 and 3.4 (bfloat16, 64 steps in one CUDA graph, suite ``steps`` of
# :doc:`/benchmarks`). A replay of a graph with a single step takes its host 4 to 7: see suite
# ``latency``.
#
# ``torch.compile(mode="reduce-overhead")`` makes such graphs of a whole model, without code of
# yours. For audio and control without Python, a layer can become :doc:`C code <audio_in_c>`.
