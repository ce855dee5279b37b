"""How good a model is: bits per held-out byte, beside baselines that need no training."""

import gzip
import math
from dataclasses import dataclass

import torch

from openrnn.lm.corpus import Part
from openrnn.lm.run import TrainingRun
from openrnn.lm.streams import Streams

GLANCE = 2**16  # bytes of a short evaluation, during training
FULL = 2**19  # bytes of the evaluation at the end


@dataclass(frozen=True)
class Scores:
    """Bits per byte of the same held-out bytes."""

    size: int
    model: float
    gzip: float
    unigram: float


def sample_of(part: Part, size: int) -> Part:
    """At most `size` bytes of a part: of files in an order that is always the same."""
    return part.shuffled(0).head(size)


@torch.no_grad()
def bits_per_byte(run: TrainingRun, part: Part) -> float:
    """The mean over a part read in the streams of training. All processes call it together."""
    workers = run.workers
    most = len(part.data) // 2 // workers.world * workers.world
    streams = Streams(part, min(run.config.batch, most), workers.rank, workers.world)
    was_training = run.model.training
    run.model.eval()
    state, nats, count = None, 0.0, 0
    for begin in range(0, streams.length - 1, run.config.bptt):
        chunk = streams.chunk(begin, run.config.bptt).to(workers.device)
        loss, state = run.loss(run.model, chunk, state)
        nats += loss.item() * chunk.x.numel()
        count += chunk.x.numel()
    run.model.train(was_training)
    nats, every = workers.total(nats, count)
    return nats / every / math.log(2)


def score(run: TrainingRun) -> Scores:
    """The model and its baselines on the held-out part, up to `FULL` bytes of it."""
    part = sample_of(run.corpus.held_out, FULL)
    data, size = part.data.numpy().tobytes(), len(part.data)
    return Scores(
        size,
        bits_per_byte(run, part),
        8 * len(gzip.compress(data, 9)) / size,
        _entropy(part),
    )


def _entropy(part: Part) -> float:
    """Bits per byte of the best code that knows how often each byte occurs, and no order."""
    counts = part.data.bincount().double()
    shares = counts[counts > 0] / len(part.data)
    return -float((shares * shares.log2()).sum())
