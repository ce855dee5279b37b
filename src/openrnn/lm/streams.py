"""Batches: a part of the corpus as B parallel streams, read T symbols at a time."""

from typing import NamedTuple

import torch
from torch import Tensor

from openrnn.errors import CorpusError
from openrnn.lm.corpus import Part, mix


class StreamChunk(NamedTuple):
    """One step of training: x and the symbols that follow, both (T, B) int64; reset (T, B) bool."""

    x: Tensor
    target: Tensor
    reset: Tensor

    def to(self, device: torch.device) -> "StreamChunk":
        return StreamChunk(*(tensor.to(device, non_blocking=True) for tensor in self))


class Position(NamedTuple):
    """Where a run stands in its data: passes over the corpus, and chunks within this one."""

    epoch: int = 0
    chunk: int = 0


class Streams:
    """A part cut into `batch` streams of equal length; a process holds the rows that are its share.

    The state is to be reset before the first byte of each file, and before that of each stream.
    """

    def __init__(self, part: Part, batch: int, rank: int = 0, world: int = 1) -> None:
        self.length = len(part.data) // batch
        if self.length < 2:
            raise CorpusError(
                f"{len(part.data)} {part.units} are too few for {batch} streams of at least 2"
            )
        begins = torch.zeros(len(part.data), dtype=torch.bool)
        begins[part.starts] = True
        share = slice(rank * batch // world, (rank + 1) * batch // world)
        used = self.length * batch
        self.data = part.data[:used].view(batch, -1)[share]  # (B, length)
        self.begins = begins[:used].view(batch, -1)[share].clone()
        self.begins[:, 0] = True

    def chunk(self, begin: int, steps: int) -> StreamChunk:
        """`steps` symbols of each stream from `begin` on, fewer at the end."""
        end = min(begin + steps, self.length - 1)
        x, target = self.data[:, begin:end], self.data[:, begin + 1 : end + 1]
        reset = self.begins[:, begin:end]
        return StreamChunk(x.t().long(), target.t().long(), reset.t().contiguous())


class Reader:
    """The chunks of a run, one after the other without end: each pass takes the files anew.

    A pure function of the part, the seed and the position, so a position is all that a checkpoint
    keeps. Ranks share the streams of one process among them.
    """

    def __init__(
        self, part: Part, *, bptt: int, batch: int, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        if batch % world:
            raise ValueError(f"batch must be a multiple of the {world} processes, got {batch}")
        if len(part.data) < batch * (bptt + 1):
            raise CorpusError(
                f"the corpus has {len(part.data)} {part.units} to train on, and batch {batch} "
                f"with bptt {bptt} needs at least {batch * (bptt + 1)}"
            )
        self.part, self.bptt, self.batch, self.seed = part, bptt, batch, seed
        self.rank, self.world = rank, world
        self.position = Position()
        self._streams: Streams | None = None
        self._epoch = 0  # the pass that the streams belong to

    @property
    def chunks(self) -> int:
        """The whole chunks of one pass."""
        return (len(self.part.data) // self.batch - 1) // self.bptt

    def next(self) -> StreamChunk:
        """The chunk at the position; the position moves to the next chunk."""
        epoch, chunk = self.position
        if self._streams is None or self._epoch != epoch:
            shuffled = self.part.shuffled(mix(self.seed, "epoch", epoch))
            self._streams = Streams(shuffled, self.batch, self.rank, self.world)
            self._epoch = epoch
        last = chunk + 1 == self.chunks
        self.position = Position(epoch + 1) if last else Position(epoch, chunk + 1)
        return self._streams.chunk(chunk * self.bptt, self.bptt)
