"""One of two processes that train models together: `python ranks.py RANK FOLDER`.

Functions import the rarer parts of torch, which takes more than a second: every run of pytest
imports this file, though the tests that need it are slow ones.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import openrnn

RANKS, STEPS = 2, 3


class Tagger(nn.Module):
    """A model as users have it: two recurrent parts of several layers between others."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.reads = openrnn.LSTM(6, 5, 2, bidirectional=True, batch_first=True)
        self.sums = openrnn.GRU(10, 7, batch_first=True, bias_mode="input")
        self.tags = nn.Linear(7, 3)
        self.double()

    def forward(self, words, lengths):
        x, _ = self.reads(self.words(words), lengths=lengths)
        return self.tags(self.sums(x, lengths=lengths)[0])


def batches():
    """Words (B, T), lengths (B,) and tags (B, T) of each step; B is for all ranks."""
    dice = torch.Generator().manual_seed(0)

    def drawn(high, *shape):
        return torch.randint(0, high, shape, generator=dice)

    return [(drawn(11, 4, 5), drawn(6, 4), drawn(3, 4, 5)) for _ in range(STEPS)]


def train(model, rank=0, ranks=1):
    """The losses and, after the last step, each parameter's gradient by name."""
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    losses = []
    for whole_batch in batches():
        words, lengths, tags = (part.tensor_split(ranks)[rank] for part in whole_batch)
        optimizer.zero_grad()
        scores = model(words, lengths)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), tags.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return torch.stack(losses), grads


def whole(tensor):
    """All of a tensor that may be sharded."""
    return getattr(tensor, "full_tensor", lambda: tensor)().clone()


def replicated(start, rank):
    """A model that each rank has, and what DistributedDataParallel makes of it."""
    model = Tagger()
    model.load_state_dict(start)
    return model, nn.parallel.DistributedDataParallel(model)


def sharded(start, rank):
    """A model of which each rank has a part, and the same; rank 0 alone brings the weights."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = Tagger(), init_device_mesh("cpu", (RANKS,))
    for part in (model.reads, model.sums):
        fully_shard(part, mesh=mesh)
    parallel = fully_shard(model, mesh=mesh)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, start if rank == 0 else {}, options=options)
    matrix = model.reads.weight_hh_l0
    assert matrix.to_local().shape[0] == matrix.shape[0] // RANKS
    return model, parallel


WAYS = {"ddp": replicated, "fsdp": sharded}


def main(rank, place):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=RANKS)
    start = torch.load(place / "start")
    for way, make in WAYS.items():
        model, parallel = make(start, rank)
        losses, grads = train(parallel, rank, RANKS)
        dist.all_reduce(losses)
        found = {
            "losses": losses / RANKS,
            "grads": {name.removeprefix("module."): whole(grad) for name, grad in grads.items()},
            "weights": get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)),
        }
        if rank == 0:
            torch.save(found, place / way)
    dist.barrier()
    os._exit(0)  # gloo's own end aborts at times, with torch.nn's layers too


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
