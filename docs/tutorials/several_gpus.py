r"""
Several GPUs
============

Data-parallel training gives each process a part of the batch and averages the gradients. Our layers
have ordinary parameters, so ``DistributedDataParallel`` takes them as they are. This tutorial is
its own worker: ``torchrun`` starts it twice, here on a CPU with gloo; on a machine with GPUs the
same file uses NCCL and one GPU a process. For the layers of one stack on several GPUs see
``openrnn.Pipeline`` in :doc:`/choose`.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import openrnn

STEPS, BATCH, UPDATES = 40, 32, 30

# %%
# A model and its data
# --------------------
#
# The sum of numbers that are marked, over sequences of different lengths. Every process makes the
# same data from one seed and takes rows of its own.


class Adder(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = openrnn.GRU(2, 32)
        self.readout = nn.Linear(32, 1)

    def forward(self, x, lengths):
        _, h = self.rnn(x, lengths=lengths)
        return self.readout(h[-1])[:, 0]


def draw(generator):
    x = torch.rand(STEPS, BATCH, 2, generator=generator)
    x[:, :, 1] = (x[:, :, 1] < 0.1).float()
    lengths = torch.randint(1, STEPS + 1, (BATCH,), generator=generator)
    inside = torch.arange(STEPS)[:, None] < lengths
    return x, lengths, (x[:, :, 0] * x[:, :, 1] * inside).sum(0)


# %%
# Training
# --------
#
# ``rows`` are those of this process. The loss is a mean over them; DDP averages the gradients of
# all processes, which is the gradient of the mean over the whole batch.


def train(model, rows, device):
    torch.manual_seed(0)  # the same draws everywhere
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(UPDATES):
        x, lengths, wanted = (each.to(device) for each in draw(generator))
        loss = (model(x[:, rows], lengths[rows]) - wanted[rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


# %%
# A process
# ---------
#
# ``torchrun`` tells each process its rank. Swap layers (``openrnn.convert``) and move the model to
# its device *before* DDP wraps it, because DDP keeps the parameters that it finds.


def work(results):
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = DistributedDataParallel(Adder().to(device))
    losses = train(model, slice(rank, None, world), device)
    dist.all_reduce(losses)  # the sum over processes
    if rank == 0:
        weights = [parameter.tolist() for parameter in model.module.rnn.parameters()]
        found = {"losses": (losses / world).tolist(), "weights": weights, "device": device.type}
        Path(results).write_text(json.dumps(found))
    # A cycle of references keeps the model, which keeps the process group and its threads. Where
    # these live until Python ends, gloo at times aborts the process.
    del model
    gc.collect()
    dist.destroy_process_group()


# %%
# Two processes
# -------------
#
# Where torchrun started this file, it works. Where you, or the site, started it, it calls torchrun:
# on a shell ``torchrun --nproc-per-node 2 several_gpus.py``.

if "LOCAL_RANK" in os.environ:
    work(sys.argv[1])
    sys.exit()

this_file = draw.__code__.co_filename  # not __file__, which the builder of the site does not set
results = Path(tempfile.mkdtemp()) / "results.json"
torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
environment = {**os.environ, "OMP_NUM_THREADS": "1"}
subprocess.run([*torchrun, this_file, str(results)], check=True, env=environment)
two = json.loads(results.read_text())
print(f"two processes on {two['device']}: loss {two['losses'][0]:.3f} -> {two['losses'][-1]:.3f}")

# %%
# The same alone
# --------------
#
# One process with the whole batch must come to the same weights, but for the order of sums.

torch.manual_seed(0)
model = Adder()
losses = train(model, slice(None), "cpu")
print(f"one process:             loss {losses[0]:.3f} -> {losses[-1]:.3f}")

apart = max(
    (ours - torch.tensor(theirs)).abs().max().item()
    for ours, theirs in zip(model.rnn.parameters(), two["weights"], strict=True)
)
print(f"weights differ by at most {apart:.0e}")
assert apart < (1e-4 if two["device"] == "cpu" else 1e-2)

# %%
# What to know
# ------------
#
# * Gradients of parameters that a call did not use are zeros, not missing. So DDP needs no
#   ``find_unused_parameters=True``, even where a process has only sequences of length 0.
# * Dropout draws from torch's generator: seed each process by its rank, or all draw the same masks.
# * Kernels are compiled once for a machine, not once for a process: the others wait for the first.
# * ``openrnn train`` runs in the same way:
#   ``torchrun --nproc-per-node 2 -m openrnn train --out runs/two``.
# * A model too large for one GPU is seldom a recurrent one. ``wavefront`` runs the layers of a
#   stack side by side on one GPU: :doc:`/choose`.
