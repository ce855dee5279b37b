"""The real job: `openrnn train` with our layers and with torch.nn's, on one GPU and on several."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from openrnn.bench import report
from openrnn.bench.interrupt import INTERRUPTED
from openrnn.bench.record import Machine, Trained, Writer, read
from openrnn.bench.tables import Sheet, TableCell
from openrnn.errors import OpenRNNError

MODELS = ("openrnn", "torch")
WARM = 2  # steps
NOTE = (
    "the same corpus (the sources of Python's standard library), seed, optimiser and learning rate "
    "for both; torch.nn's state runs on across files, ours is set back at each"
)


@dataclass(frozen=True)
class TrainingJob:
    """A language model to train; on a CPU a small one."""

    name: str
    layers: int
    hidden: int
    batch: int
    bptt: int
    dtype: str


JOBS = {
    "cuda": (
        TrainingJob("lm-2x1024", 2, 1024, 128, 256, "bfloat16"),
        TrainingJob("lm-4x512", 4, 512, 128, 256, "bfloat16"),
    ),
    "cpu": (TrainingJob("lm-2x256", 2, 256, 32, 64, "float32"),),
}


def execute(
    path: Path | None, about: Machine, device: str, minutes: float, gpus: Sequence[int]
) -> int:
    """Trains every job that has no result in the file yet, and prints the table.

    Raises:
        OpenRNNError: a run failed; its own words are in the message.
    """
    found = list(read(path).trained) if path and path.exists() else []
    done = {(run.name, run.model, run.gpus) for run in found}
    screen = Console(stderr=True, highlight=False)
    writer = Writer(path, about)
    counts = gpus if device == "cuda" else (0,)
    code = 0
    try:
        for job in JOBS[device]:
            for count in counts:
                for model in MODELS:
                    if (job.name, model, count) in done:
                        continue
                    where = f"{count} GPU{'s' * (count > 1)}" if count else "the CPU"
                    screen.print(f"{job.name}, {model}, {where}: {minutes:g} minutes")
                    run = train(job, model, device, count, minutes)
                    writer.add([run])
                    found.append(run)
    except KeyboardInterrupt:
        code = INTERRUPTED
        screen.print(f"interrupted, {len(found)} runs are kept")
    out = report.console()
    out.print(report.rendered(sheet(found)))
    out.print(NOTE)
    return code


def train(job: TrainingJob, model: str, device: str, gpus: int, minutes: float) -> Trained:
    """One run as a process of its own, or as several under torchrun.

    A run of a few steps goes before it, so that no kernel is compiled in the time that counts.

    Raises:
        OpenRNNError: it failed.
    """
    with TemporaryDirectory() as parent:
        folder = Path(parent, "run")
        for budget, out in (
            ({"steps": WARM}, Path(parent, "warm")),
            ({"minutes": minutes}, folder),
        ):
            done = subprocess.run(
                command(job, model, device, gpus, budget, out), capture_output=True, text=True,
                check=False,
            )  # fmt: skip
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no words"])[-1]
                raise OpenRNNError(
                    f"openrnn train of {job.name} with {model}'s layers failed: {last}"
                )
        scores: dict[str, Any] = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    return Trained(
        job.name, model, gpus, job.layers, job.hidden, job.batch * max(gpus, 1), job.bptt,
        job.dtype, device, minutes, scores["steps"], scores["bytes_per_s"],
        scores["bits_per_byte"], scores["backend"],
    )  # fmt: skip


def command(
    job: TrainingJob, model: str, device: str, gpus: int, budget: Mapping[str, float], folder: Path
) -> list[str]:
    """The command line; each GPU has the batch of the job, so the whole batch grows with them."""
    program = [sys.executable, "-m"]
    if gpus > 1:
        program += ["torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}", "-m"]
    options = {
        "model": model, "layers": job.layers, "hidden": job.hidden, "embed": job.hidden // 2,
        "batch": job.batch * max(gpus, 1), "bptt": job.bptt, "dtype": job.dtype,
        "device": device, "out": folder, "lr": 2e-3, **budget,
    }  # fmt: skip
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    return [*program, "openrnn.cli", "train", "--quiet", *words]


def sheet(runs: Sequence[Trained]) -> Sheet:
    """Every run beside torch.nn's, and what several GPUs bring."""
    heads = ("job", "layers", "GPUs", "dtype", "minutes", "backend", "MB a second", "x torch.nn",
             "efficiency", "steps", "bits a byte")  # fmt: skip
    numbers = (False, False, True, False, True, False, True, True, True, True, True)
    return Sheet("openrnn train", heads, numbers, tuple(tuple(_cells(run, runs)) for run in runs))


def _cells(run: Trained, runs: Sequence[Trained]) -> Iterator[TableCell]:
    yield from map(TableCell, (f"{run.name} by {run.model}", f"{run.layers} x {run.hidden}"))
    yield from map(TableCell, (str(run.gpus), run.dtype, f"{run.minutes:g}", run.backend))
    yield TableCell(f"{run.bytes_per_s / 1e6:.3g}")
    ratio = _over(run, runs, model="torch", gpus=run.gpus)
    means = "" if ratio is None or run.model == "torch" else "win" if ratio > 1 else "loss"
    yield TableCell("-" if ratio is None else f"{ratio:.2f}", means)
    one = _over(run, runs, model=run.model, gpus=1)
    yield TableCell("-" if one is None or run.gpus < 2 else f"{100 * one / run.gpus:.0f}%")
    yield TableCell(f"{run.steps:,}")
    yield TableCell(f"{run.bits_per_byte:.3f}")


def _over(run: Trained, runs: Sequence[Trained], model: str, gpus: int) -> float | None:
    """This run's bytes a second over those of another one of the same job."""
    others = (
        other.bytes_per_s
        for other in runs
        if (other.name, other.model, other.gpus) == (run.name, model, gpus)
    )
    found = next(others, None)
    return run.bytes_per_s / found if found else None
