"""`openrnn train` from its options to its last line: loading, training, saving, reporting."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor, nn

from openrnn.errors import CheckpointError
from openrnn.explain import explain
from openrnn.lm import checkpoint, evaluate, gates, report, words
from openrnn.lm.claim import claimed
from openrnn.lm.config import DTYPES, Config, refusing
from openrnn.lm.contents import Record, check_model
from openrnn.lm.corpus import Corpus, read
from openrnn.lm.model import Stack
from openrnn.lm.run import TrainingRun
from openrnn.lm.sample import sample
from openrnn.lm.train import Reporter, train
from openrnn.lm.workers import Workers, join

OUT = Path("runs/lm")
SAMPLE = {"bytes": 300, "words": 60}
SCORES = "scores.json"


@dataclass(frozen=True)
class Job:
    """What `openrnn train` was asked for: `given` holds the fields of a config that were named."""

    given: Mapping[str, Any]
    out: Path | None = None
    resume: Path | None = None
    tensorboard: Path | None = None
    quiet: bool = False

    @property
    def folder(self) -> Path:
        """Where the checkpoint is written."""
        return self.out or self.resume or OUT


def execute(job: Job) -> int:
    """Trains, scores and samples; returns the signal that ended the training early, or 0.

    Raises:
        OpenRNNError: in one sentence, what was asked for and cannot be.
    """
    with ExitStack() as stack:
        with refusing():
            resumed = None if job.resume is None else Snapshot.of(job.resume, job.given)
            config = Config.make(job.given) if resumed is None else resumed.config
            workers = stack.enter_context(join(config.device))
            run = TrainingRun(config, corpus_of(config), workers)
            stack.callback(run.release)
            # last, so that other errors are reported before a folder that is in use
            path = _claim(job, workers, resumed, stack)
        if resumed is not None:
            resumed.into(run)
        number, scores = _train(job, run, path)
        if scores is not None and workers.first and not job.quiet:
            _close(run, path, scores)
    return number


def corpus_of(config: Config) -> Corpus:
    """What a config trains on.

    Raises:
        CorpusError: there is none.
    """
    if config.task == "words":
        return words.read(config.corpus, config.vocabulary)
    return read(config.corpus)


@dataclass(frozen=True)
class Snapshot:
    """The checkpoint to go on from, as it was when it was read, and the config to go on with."""

    path: Path
    version: tuple[int, ...] | None
    tensors: dict[str, Tensor]
    record: Record
    config: Config

    @classmethod
    def of(cls, folder: Path, given: Mapping[str, Any]) -> "Snapshot":
        """That of a run's folder: its model is that of the config, whose sizes can be trusted.

        Raises:
            CheckpointError: there is none, or it is not what a run leaves.
        """
        path = checkpoint.path_in(folder)
        version = checkpoint.version_of(path)
        tensors, fields = checkpoint.read(path)
        with checkpoint.naming(path):
            record = Record.parse(fields)
        config = record.config.resumed(given)
        with checkpoint.naming(path):
            check_model(config, tensors)
        return cls(path, version, tensors, record, config)

    def still_there(self) -> None:
        """Raises where the run went on, in another process, since this was read.

        Raises:
            CheckpointError: the file is another one now.
        """
        if checkpoint.version_of(self.path) != self.version:
            raise CheckpointError(f"{self.path} was written while it was read: resume once more")

    def into(self, run: TrainingRun) -> None:
        """Puts the snapshot's state into a run."""
        with checkpoint.naming(self.path):
            run.restore(self.tensors, self.record)


def _claim(job: Job, workers: Workers, resumed: Snapshot | None, stack: ExitStack) -> Path:
    """The checkpoint to write, in a folder that holds no other run: the first process claims it.

    All processes call it together and fail together.
    """
    path = checkpoint.path_in(job.folder)

    def claim() -> None:
        if workers.first:
            _refuse_another(job, path)
            stack.enter_context(claimed(job.folder))
            _refuse_another(job, path)  # which may have come before the claim

    def look() -> None:
        if resumed is not None and _same(path, resumed.path):
            resumed.still_there()

    workers.together(claim, f"the first process cannot have {job.folder}")
    workers.together(look, f"another process finds {path} changed")
    return path


def _same(path: Path, other: Path) -> bool:
    return path.exists() and other.exists() and path.samefile(other)


def _refuse_another(job: Job, path: Path) -> None:
    mine = job.resume is not None and _same(path, checkpoint.path_in(job.resume))
    if path.exists() and not mine:
        raise CheckpointError(
            f"{job.folder} has a checkpoint already: go on with it by --resume {job.folder}, "
            "or choose another --out"
        )


def _train(job: Job, run: TrainingRun, path: Path) -> tuple[int, evaluate.Scores | None]:
    """The signal that ended the training, or 0 and the scores."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    writers: list[report.ScalarWriter] = []
    others: list[Reporter] = []
    rates = report.Rates()
    with ExitStack() as stack:
        if run.workers.first:
            folder = job.tensorboard or job.folder / "tensorboard"
            writers = stack.enter_context(report.tensorboard(folder, run.step, console, run.task))
            others += [gates.Gates(run, writer.writer) for writer in writers]
            if not job.quiet:
                console.print(_head(run), markup=False)
                others.append(stack.enter_context(report.screen(console, run.task)))
        number = train(run, path, report.Several([rates, *writers, *others]))
        if number:
            return number, None
        scores = evaluate.score(run)
        for writer in writers:
            writer.scores(run.step, scores)
        if run.workers.first:
            rates.write(job.folder / SCORES, run.step, chosen(run), scores)
        return 0, scores


def _head(run: TrainingRun) -> str:
    config, corpus = run.config, run.corpus
    size = sum(parameter.numel() for parameter in run.model.parameters())
    return (
        f"{config.cell}, {config.layers} x {config.hidden}, {size:,} parameters, "
        f"{chosen(run)} backend on {run.workers.device.type}; "
        f"{len(corpus.train.data):,} {corpus.train.units} to train on, "
        f"{len(corpus.held_out.data):,} held out, "
        f"{corpus.files:,} file{'s' * (corpus.files != 1)}"
        + (f", {len(corpus.vocabulary):,} different words" if corpus.vocabulary else "")
    )


def chosen(run: TrainingRun) -> str:
    """The backend that trains this run."""
    found = [_chosen(run, index, stack) for index, stack in enumerate(run.model.stacks)]
    return " and ".join(dict.fromkeys(found))


def _chosen(run: TrainingRun, index: int, stack: Stack) -> str:
    if isinstance(stack, nn.RNNBase):
        return "torch.nn"
    kind = DTYPES[run.config.dtype]
    cuts = run.model.cuts(run.workers.device, index)
    table = explain(
        stack,
        dtype=kind,
        grad=True,
        training=True,
        reset=not cuts,
        lengths=cuts,
        quiet=True,
    )
    return table.chosen or "no"


def _close(run: TrainingRun, path: Path, scores: evaluate.Scores) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(report.table(scores))
    console.print(f"step {run.step}, {chosen(run)} backend, {path}", markup=False)
    task = run.config.task
    prompt = b"def " if run.config.corpus is None and task == "bytes" else b""
    run.model.eval()
    text = "".join(sample(run.model, prompt, SAMPLE[task], 0.8, run.config.seed))
    console.rule("a sample")
    console.print(text, markup=False, emoji=False)
