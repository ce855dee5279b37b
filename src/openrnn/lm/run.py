"""A training run: everything that a checkpoint holds, and one step of training."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from openrnn.errors import CheckpointError, CorpusError
from openrnn.lm import vocabulary
from openrnn.lm.build import build
from openrnn.lm.config import Config
from openrnn.lm.contents import Record, check
from openrnn.lm.corpus import Corpus, mix
from openrnn.lm.model import State
from openrnn.lm.schedule import CLIP, MOMENTS, Plateau, optimizer, rate
from openrnn.lm.streams import Position, Reader, StreamChunk
from openrnn.lm.tasks import TASKS
from openrnn.lm.workers import Workers

Generator = tuple[Callable[[], Tensor], Callable[[Tensor], None]]


class Learned(NamedTuple):
    """Results of one step: loss in nats a symbol, the gradient's norm before clipping, the rate."""

    loss: Tensor
    norm: Tensor
    lr: float


class TrainingRun:
    """A model in training: parameters, optimiser, state of every stream, position, generators."""

    def __init__(self, config: Config, corpus: Corpus, workers: Workers) -> None:
        self.config, self.corpus, self.workers = config, corpus, workers
        self.task, self.plateau = TASKS[config.task], Plateau()
        self.reader = Reader(
            corpus.train, bptt=config.bptt, batch=config.batch, seed=config.seed,
            rank=workers.rank, world=workers.world,
        )  # fmt: skip
        if len(corpus.held_out.data) < 2 * workers.world:
            raise CorpusError(
                f"the corpus holds out {len(corpus.held_out.data)} {corpus.held_out.units}, too few"
            )
        torch.manual_seed(config.seed)
        self.model = build(config, corpus.vocabulary).to(workers.device)
        self.net = workers.wrap(self.model)
        self.optimizer = optimizer(config, self.model.parameters())
        self.state: State | None = None
        self.step, self.elapsed = 0, 0.0
        if workers.rank:  # dropout differs from process to process
            torch.manual_seed(mix(config.seed, "rank", workers.rank))

    def release(self) -> None:
        """Frees what is shared with other processes, while their group still stands.

        Freed later, it waits with Python's lock held for a thread that waits for the lock.
        """
        self.net = self.model
        gc.collect()

    def precision(self) -> AbstractContextManager[Any]:
        """Autocast to bfloat16, or nothing."""
        if self.config.dtype == "bfloat16":
            return torch.autocast(self.workers.device.type, torch.bfloat16)
        return nullcontext()

    def loss(
        self, net: Callable[..., Any], chunk: StreamChunk, state: State | None
    ) -> tuple[Tensor, State, list[Tensor]]:
        """Nats a symbol, the state after the chunk, and what is added to the loss in training."""
        with self.precision():
            logits, state, *penalties = net(chunk.x, state, chunk.reset)
        if logits.dtype == torch.bfloat16:
            logits = logits.float()
        return cross_entropy(logits.flatten(0, 1), chunk.target.flatten()), state, penalties

    def learn(self) -> Learned:
        """One step of training on the next chunk."""
        lr = self.config.lr * self._share()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        chunk = self.reader.next().to(self.workers.device)
        loss, state, penalties = self.loss(self.net, chunk, self.state)
        self.optimizer.zero_grad()
        sum(penalties, loss).backward()
        norm = clip_grad_norm_(self.model.parameters(), CLIP[self.config.task])
        self.optimizer.step()
        self.state = tuple(part.detach() for part in state)
        self.step += 1
        return Learned(loss.detach(), norm.detach(), lr)

    @property
    def passed(self) -> bool:
        """Whether the last step ended a pass over the corpus."""
        return self.step > 0 and self.reader.position.chunk == 0

    def _share(self) -> float:
        """The share of the learning rate that the next step has."""
        if self.config.task == "words":
            return self.plateau.share
        # half a step on, so that the first rate is not 0
        return rate(self.config.progress(self.step + 0.5, max(self.elapsed, 0.01)))

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a checkpoint holds: tensors and record. All processes call it together."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            tensors[f"model/{name}"] = parameter
            for moment in MOMENTS[self.config.task]:
                tensors[f"optimizer/{name}/{moment}"] = self.optimizer.state[parameter][moment]
        for index, part in enumerate(self.state or ()):
            tensors[f"state/{index}"] = torch.cat(self.workers.gather(part), dim=1)
        for kind, generator in self._generators().items():
            for rank, bits in enumerate(self.workers.gather(generator[0]())):
                tensors[f"generator/{kind}/{rank}"] = bits
        epoch, chunk = self.reader.position
        record = {
            "config": asdict(self.config), "step": self.step, "elapsed": self.elapsed,
            "epoch": epoch, "chunk": chunk, "world": self.workers.world,
            "corpus": self.corpus.fingerprint,
        }  # fmt: skip
        if self.config.task == "words":
            record |= asdict(self.plateau)
            tensors[vocabulary.NAME] = vocabulary.as_tensor(self.corpus.vocabulary)
        return tensors, record

    def restore(self, tensors: dict[str, Tensor], record: Record) -> None:
        """Takes over the state in a snapshot.

        Raises:
            CheckpointError: the snapshot is of another corpus, number of processes, or model.
        """
        rank, world, device = self.workers.rank, self.workers.world, self.workers.device
        share = self.config.batch // world
        if record.corpus != self.corpus.fingerprint:
            raise CheckpointError("the corpus is not the one that the run to resume was trained on")
        if record.world != world:
            raise CheckpointError(f"the run to resume has {record.world} processes, got {world}")
        if record.chunk >= self.reader.chunks:
            raise CheckpointError(
                f"its chunk must be less than the {self.reader.chunks} of a pass, "
                f"got {record.chunk}"
            )
        check(self.config, tensors, world)
        self.model.load_state_dict(parameters(tensors))
        for name, parameter in self.model.named_parameters():
            self.optimizer.state[parameter] = {
                moment: tensors[f"optimizer/{name}/{moment}"].clone().to(device)
                for moment in MOMENTS[self.config.task]
            }
        count = sum(name.startswith("state/") for name in tensors)
        states = [tensors[f"state/{index}"] for index in range(count)]
        mine = (state[:, rank * share : (rank + 1) * share] for state in states)
        self.state = tuple(state.contiguous().clone().to(device) for state in mine)
        for kind, generator in self._generators().items():
            name = f"generator/{kind}/{rank}"
            if name not in tensors:  # after a change of device
                continue
            try:
                generator[1](tensors[name])
            except (RuntimeError, TypeError):
                raise CheckpointError(
                    f"its tensor {name} is no state of a generator of this torch"
                ) from None
        self.reader.position = Position(record.epoch, record.chunk)
        self.step, self.elapsed, self.plateau = record.step, record.elapsed, record.plateau

    def _generators(self) -> dict[str, Generator]:
        """How to read and set the state of each generator in use."""
        found: dict[str, Generator] = {"cpu": (torch.get_rng_state, torch.set_rng_state)}
        if self.workers.device.type == "cuda":
            found["cuda"] = (torch.cuda.get_rng_state, torch.cuda.set_rng_state)
        return found


def parameters(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's state dict among the tensors of a snapshot."""
    return {
        name.removeprefix("model/"): tensor
        for name, tensor in tensors.items()
        if name.startswith("model/")
    }
