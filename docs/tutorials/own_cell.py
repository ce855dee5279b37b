r"""
A cell of your own, and its kernel
==================================

A recurrent cell is a few lines of equations. Written with ``torch.nn``, a new one needs a loop over
time in Python, which is slow. With OpenRNN you write the equations once, as an elementwise
function, and get a layer that is trained and run at the speed of an LSTM. This tutorial writes a
cell, checks it against a plain loop, times both, and reads the kernel that the cell became.
"""

# sphinx_gallery_thumbnail_number = 1
import time

import matplotlib.pyplot as plt
import torch

import openrnn

torch.manual_seed(0)

# %%
# The equations
# -------------
#
# Our unit is leaky: it moves towards a new value :math:`n_t` by a gate :math:`z_t`, and each unit
# has a speed of its own, a trained number between 0 and 1:
#
# .. math::
#
#    n_t &= \tanh(W_n x_t + b_n + R_n h_{t-1} + c_n) \\
#    z_t &= \sigma(W_z x_t + b_z + R_z h_{t-1} + c_z) \\
#    h_t &= h_{t-1} + \sigma(p)\, z_t\, (n_t - h_{t-1})
#
# The layer computes the products. The cell gets their results by the names of its gates: ``x.n`` is
# the input side :math:`W_n x_t + b_n`, ``r.n`` the recurrent side :math:`R_n h_{t-1} + c_n`. ``s``
# has the states before the step, and ``p`` the trained vectors of one number a unit. The function
# returns the new states, the emitted one first.


@openrnn.cell(gates="n z", states="h", params="speed")
def leaky(x, r, s, p):
    """h moves towards n by the gate z, each unit at a speed of its own."""
    n = torch.tanh(x.n + r.n)
    z = torch.sigmoid(x.z + r.z)
    return s.h + torch.sigmoid(p.speed) * z * (n - s.h)


# %%
# The layer
# ---------
#
# ``Recurrent`` takes the cell and then the arguments of ``torch.nn.LSTM``: layers, directions,
# dropout, ``batch_first``. Parameters have torch's names, with the gates one below the other in the
# order in which the cell names them.

layer = openrnn.Recurrent(leaky, 8, 64)
for name, parameter in layer.named_parameters():
    print(f"{name:15} {tuple(parameter.shape)}")

# %%
# Everything that an LSTM of ours does works with it: lengths, resets, states of all steps, steps.

x = torch.randn(100, 16, 8)  # T, B, I
y, (h,) = layer(x, lengths=torch.randint(1, 101, (16,)))
print(tuple(y.shape), tuple(h.shape))

# %%
# Right?
# ------
#
# Calling the cell runs one step of it on plain tensors. So the usual loop is short, and autograd
# differentiates it. The layer must give the same outputs and the same gradients.


class Names:
    """Anything with attributes serves as x, r, s and p."""

    def __init__(self, names, tensors):
        self.__dict__.update(zip(names, tensors, strict=True))


def loop(layer, x):
    h = x.new_zeros(x.shape[1], layer.hidden_size)
    vectors = Names(["speed"], [layer.speed_l0])
    outputs = []
    for x_t in x:
        sides = (
            torch.nn.functional.linear(x_t, layer.weight_ih_l0, layer.bias_ih_l0),
            torch.nn.functional.linear(h, layer.weight_hh_l0, layer.bias_hh_l0),
        )
        gates = [Names(["n", "z"], side.chunk(2, 1)) for side in sides]
        (h,) = leaky(*gates, Names(["h"], [h]), vectors)
        outputs.append(h)
    return torch.stack(outputs)


def gradients(y):
    return torch.autograd.grad(y.square().mean(), list(layer.parameters()))


ours, plain = layer(x)[0], loop(layer, x)
print(f"outputs differ by at most {(ours - plain).abs().max():.0e}")
apart = [(a - b).abs().max() for a, b in zip(gradients(ours), gradients(plain), strict=True)]
print(f"gradients differ by at most {max(apart):.0e}")
assert max(apart) < 1e-5

# %%
# How fast?
# ---------
#
# A forward and a backward pass of each, on the machine that built this page. The first call of the
# layer compiled the kernels; it is not counted.


def milliseconds(run, repeats=5):
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        gradients(run())
        best = min(best, time.perf_counter() - begin)
    return 1e3 * best


times = {
    "loop of PyTorch": milliseconds(lambda: loop(layer, x)),
    "openrnn.Recurrent": milliseconds(lambda: layer(x)[0]),
}
figure, axes = plt.subplots(figsize=(6, 2), layout="constrained")
axes.bar_label(axes.barh(list(times), list(times.values())), fmt="%.1f ms", padding=4)
axes.set(title="T 100, B 16, 64 units: forward and backward", xlabel="milliseconds")
axes.margins(x=0.2)
plt.show()

# %%
# The kernel
# ----------
#
# ``openrnn.codegen.show`` prints what the cell became in the kernels of a CPU: the new states of a
# row of the batch, and their derivative. What is around them, such as the products and the loop
# over time, is the same for every cell.

openrnn.codegen.show(leaky)

# %%
# Read ``step_row`` from ``for j``: one turn is one unit of one sequence. ``a_0`` and ``a_1`` are
# the gates, in the order in which the cell names them, as sums of both sides: OpenRNN saw that the
# cell reads ``x.n`` and ``r.n`` as their sum alone, so the recurrent product was added to x before.
# ``s_0`` is h, ``p_0`` the speed. The rest are the operators of the function, in their order. The
# compiler turns the loop into vector instructions; ``sigmoid`` and ``tanh`` are polynomials without
# a branch.
#
# Nobody wrote ``derivative_row``: it is traced from the same function. ``d_0`` is the gradient of
# the new h. ``dr`` receives the gradients of the gates, ``d_h_before`` that of the old h, and
# ``d_vectors`` adds up that of the speed. The forward pass saved the gates alone; ``sigmoid`` and
# ``tanh`` are computed again, which is quicker than to load them.
#
# On a GPU the same function becomes CUDA C++, inside a time loop that keeps the recurrent matrix in
# registers and shared memory. No GPU is needed to read it. Its derivative comes in two parts: the
# factors do not depend on gradients, so a step of backward computes them while it waits for those.

openrnn.codegen.show(leaky, "cuda", dtype="bfloat16")

# %%
# What a cell may not do
# ----------------------
#
# It may use any elementwise operator of torch. One that mixes units is refused by name, because
# each unit is computed apart:


@openrnn.cell(gates="n", states="h")
def mixing(x, r, s):
    return torch.tanh(x.n + r.n) - s.h.mean(-1, keepdim=True)


try:
    openrnn.Recurrent(mixing, 8, 64)(x)
except openrnn.CellError as error:
    print(error)

# %%
# Where no kernel can be made, as of operators on whole numbers, the cell runs on the reference, and
# ``openrnn.explain(layer, x)`` says why. A cell lives in the file that defines it: a pickle of a
# layer names the cell, and loading needs that definition.
