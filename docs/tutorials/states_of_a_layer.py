r"""
See what a layer remembers
==========================

With ``return_states=True`` a layer returns every state of every step, not the last ones alone. Here
an LSTM learns to count how many steps have passed since its input was last 1. Its cell states show
how it does that.
"""

import matplotlib.pyplot as plt
import torch

import openrnn

torch.manual_seed(0)
STEPS, BATCH, HIDDEN = 50, 64, 16


def draw(batch):
    """An input that is 1 at a tenth of the steps, and the number of steps since then."""
    x = (torch.rand(STEPS, batch, 1) < 0.1).float()
    count = torch.zeros(batch, 1)
    wanted = []
    for step in x:
        count = torch.where(step == 1, 0, count + 1)
        wanted.append(count)
    return x, torch.stack(wanted) / 10


# %%
# A layer and a readout, trained for 300 updates.

lstm = openrnn.LSTM(1, HIDDEN)
readout = torch.nn.Linear(HIDDEN, 1)
optimizer = torch.optim.Adam([*lstm.parameters(), *readout.parameters()], lr=0.01)

losses = []
for _ in range(300):
    x, wanted = draw(BATCH)
    y, _ = lstm(x)
    loss = torch.nn.functional.mse_loss(readout(y), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

print(f"mean squared error: {losses[0]:.3f} before training, {losses[-1]:.4f} after")

# %%
# The third result has each state of each step: ``h`` and ``c`` of shape (1, T, B, H), where 1 is
# the number of layers times directions. They are differentiable, as the others are.

x, wanted = draw(1)
with torch.no_grad():
    y, (h, c), (all_h, all_c) = lstm(x, return_states=True)
print(tuple(all_c.shape))

figure, (above, below) = plt.subplots(2, 1, sharex=True, layout="constrained")
above.step(range(STEPS), wanted[:, 0, 0], where="mid", label="wanted")
above.plot(readout(y).detach()[:, 0, 0], ".", label="predicted")
above.set_ylabel("steps since the last 1, over 10")
above.legend()
image = below.imshow(all_c[0, :, 0].T, aspect="auto", cmap="RdBu", vmin=-3, vmax=3)
below.set_xlabel("step")
below.set_ylabel("unit")
figure.colorbar(image, ax=below, label="cell state c")
plt.show()
