"""How good a model is on held-out symbols, beside baselines that need no training."""

import gzip
import math
from dataclasses import dataclass, replace

import torch

from openrnn.lm.corpus import Corpus, Part
from openrnn.lm.run import TrainingRun
from openrnn.lm.streams import Streams
from openrnn.lm.tasks import Task

GLANCE = 2**16  # symbols of a short evaluation, during training
FULL = 2**19  # symbols of the evaluation at the end


@dataclass(frozen=True)
class Scores:
    """The figure of a task for the same `size` held-out symbols: the model's, and baselines'.

    Of words, `test` is the model's on the part of the corpus that is for that alone.
    """

    task: Task
    size: int
    model: float
    baselines: dict[str, float]
    test: float | None = None


def sample_of(part: Part, size: int) -> Part:
    """At most `size` symbols of a part: of files in an order that is always the same."""
    return part.shuffled(0).head(size)


@torch.no_grad()
def nats(run: TrainingRun, part: Part) -> float:
    """The mean loss over a part read in the streams of training. All processes call it together."""
    workers = run.workers
    most = len(part.data) // 2 // workers.world * workers.world
    streams = Streams(part, min(run.config.batch, most), workers.rank, workers.world)
    was_training = run.model.training
    run.model.eval()
    state, total, count = None, 0.0, 0
    for begin in range(0, streams.length - 1, run.config.bptt):
        chunk = streams.chunk(begin, run.config.bptt).to(workers.device)
        loss, state, _ = run.loss(run.model, chunk, state)
        total += loss.item() * chunk.x.numel()
        count += chunk.x.numel()
    run.model.train(was_training)
    total, every = workers.total(total, count)
    return total / every


def score(run: TrainingRun) -> Scores:
    """The model and its baselines on the held-out part, up to `FULL` symbols of it."""
    corpus, task = run.corpus, run.task
    part = sample_of(corpus.held_out, FULL)
    found = Scores(task, len(part.data), task.figure(nats(run, part)), _baselines(corpus, part))
    if corpus.test is None:
        return found
    return replace(found, test=task.figure(nats(run, sample_of(corpus.test, FULL))))


def _baselines(corpus: Corpus, part: Part) -> dict[str, float]:
    if corpus.vocabulary:
        return {"unigram": _unigram(corpus, part)}
    packed = gzip.compress(part.data.numpy().tobytes(), 9)
    return {"gzip -9": 8 * len(packed) / len(part.data), "unigram entropy": _entropy(part)}


def _entropy(part: Part) -> float:
    """Bits per byte of the best code that knows how often each byte occurs, and no order."""
    counts = part.data.bincount().double()
    shares = counts[counts > 0] / len(part.data)
    return -float((shares * shares.log2()).sum())


def _unigram(corpus: Corpus, part: Part) -> float:
    """The perplexity of how often each word occurs in the part to train on, one added to each."""
    counts = corpus.train.data.bincount(minlength=len(corpus.vocabulary)).double() + 1
    return math.exp(-float((counts / counts.sum()).log()[part.data.long()].mean()))
