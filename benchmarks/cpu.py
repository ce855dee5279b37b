"""openrnn against torch.nn on this CPU: `python benchmarks/cpu.py [--json FILE] [--rows N,N]`.

`--show FILE` prints the tables of a written FILE as Markdown, for docs/cpu.md.

Both sides use the same number of threads, run in turn within one process, and are checked against
each other before they are timed. Training means forward, backward of a given gradient of y, nothing
else. Times are medians; the ratio is torch.nn's over ours, so above 1 we are faster.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numba
import torch
from rich.console import Console
from rich.table import Table

import openrnn

SHAPES = [  # T, B, I, H
    (8192, 1, 1, 18),
    (2048, 16, 1, 18),
    (60, 64, 10, 10),
    (1, 1, 64, 64),
    (1, 16, 256, 256),
    (60, 64, 128, 128),
    (128, 32, 256, 256),
    (35, 20, 650, 650),
    (32, 32, 512, 512),
]
SECONDS = 1.5  # for one side of one row
MEMORY_SHAPE = (1024, 16, 128, 128)
DISTURBED, ATTEMPTS = 0.05, 20


def step(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor | None) -> torch.Tensor:
    """One inference call, or one training step where dy is given."""
    if dy is None:
        with torch.no_grad():
            return layer(x)[0]
    for parameter in layer.parameters():
        parameter.grad = None
    x.grad = None
    y = layer(x)[0]
    y.backward(dy)
    return y


def check(
    theirs: torch.nn.Module, ours: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor
) -> None:
    """Raises where outputs or gradients differ by more than float32 rounding explains."""
    found = []
    for layer in (theirs, ours):
        y = step(layer, x, dy)
        found.append([y, x.grad, *(p.grad for p in layer.parameters())])
    for want, have in zip(*found, strict=True):
        scale = want.abs().max().item() + 1e-3
        worst = (want - have).abs().max().item() / scale
        if not worst < 1e-3:
            raise RuntimeError(f"{type(ours).__name__} {tuple(x.shape)}: wrong by {worst:.1e}")


def pair(one: Callable[[], object], two: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Times in seconds of two functions run in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for run in (one, two, one, two):
        run()
    end = time.perf_counter() + 2 * SECONDS
    while time.perf_counter() < end or len(times[0]) < 5:
        for run, kept in zip((one, two), times, strict=True):
            start = time.perf_counter()
            run()
            kept.append(time.perf_counter() - start)
    return times


def foreign() -> float:
    """Core-seconds that other processes have taken since the machine started (Linux; else 0)."""
    try:
        user, nice, system, *_ = map(int, Path("/proc/stat").read_text().split()[1:5])
    except OSError:
        return 0.0
    return (user + nice + system) / os.sysconf("SC_CLK_TCK") - time.process_time()


def undisturbed(kind: str, shape: tuple[int, int, int, int], training: bool) -> dict[str, object]:
    """One row, measured again while other processes took more than DISTURBED of a core."""
    for _ in range(ATTEMPTS):
        before, start = foreign(), time.perf_counter()
        row = measure(kind, shape, training)
        row["others"] = (foreign() - before) / (time.perf_counter() - start)
        if float(str(row["others"])) < DISTURBED:
            break
        time.sleep(5)
    return row


def measure(kind: str, shape: tuple[int, int, int, int], training: bool) -> dict[str, object]:
    """One row: medians in microseconds, quartile spreads, the ratio, the backend that ran."""
    steps, batch, inputs, hidden = shape
    torch.manual_seed(0)
    theirs = getattr(torch.nn, kind)(inputs, hidden)
    ours = getattr(openrnn, kind)(inputs, hidden)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(steps, batch, inputs, requires_grad=True)
    dy = torch.randn(steps, batch, hidden)
    check(theirs, ours, x, dy)
    grad = dy if training else None
    them, us = pair(lambda: step(theirs, x, grad), lambda: step(ours, x, grad))
    row: dict[str, object] = {"cell": kind, "T": steps, "B": batch, "I": inputs, "H": hidden}
    row["mode"] = "training" if training else "inference"
    row["backend"] = openrnn.explain(ours, x, grad=training, quiet=True).chosen
    for name, values in (("torch_us", them), ("openrnn_us", us)):
        quarter, half, most = (1e6 * value for value in statistics.quantiles(values, n=4))
        row[name], row[f"{name[:-3]}_spread"] = half, (most - quarter) / half
    row["ratio"] = statistics.median(them) / statistics.median(us)
    return row


def table(rows: list[dict[str, object]]) -> Table:
    """The rows, losses in red."""
    shown = Table(
        title=f"CPU, {torch.get_num_threads()} threads, medians; ratio = torch.nn / openrnn"
    )
    for head in ("cell", "T", "B", "I", "H", "mode", "torch us", "openrnn us", "ratio", "backend"):
        shown.add_column(head, justify="left" if head in ("cell", "mode", "backend") else "right")
    for row in rows:
        ratio = float(str(row["ratio"]))
        style = "red" if ratio < 0.95 else None  # the noise that the target allows
        cells = [str(row[name]) for name in ("cell", "T", "B", "I", "H", "mode")]
        cells += [f"{row['torch_us']:.0f}", f"{row['openrnn_us']:.0f}", f"{ratio:.2f}"]
        shown.add_row(*cells, str(row["backend"]), style=style)
    return shown


def peak(kind: str, side: str) -> float:
    """What a training step at MEMORY_SHAPE adds to this fresh process's peak, in MiB (Linux)."""
    steps, batch, inputs, hidden = MEMORY_SHAPE
    module = {"torch": torch.nn, "openrnn": openrnn}[side]

    def high() -> float:
        # ru_maxrss would begin at the peak of the process that started this one
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    def train(length: int) -> None:
        layer = getattr(module, kind)(inputs, hidden)
        x = torch.randn(length, batch, inputs, requires_grad=True)
        step(layer, x, torch.ones(length, batch, hidden))

    train(64)  # what is loaded and compiled once
    before = high()
    train(steps)
    return high() - before


def memory() -> list[dict[str, object]]:
    """Peaks of both sides, each in a process of its own."""
    rows = []
    for kind in ("LSTM", "GRU"):
        row: dict[str, object] = {"cell": kind}
        for side in ("torch", "openrnn"):
            program = f"import cpu; print(cpu.peak({kind!r}, {side!r}))"
            found = subprocess.run(
                [sys.executable, "-c", program], check=True, capture_output=True, text=True,
                cwd=Path(__file__).parent,
            )  # fmt: skip
            row[f"{side}_MiB"] = float(found.stdout)
        rows.append(row)
    return rows


def markdown(record: dict[str, list[dict[str, object]]]) -> str:
    """The tables of a written record."""
    lines = [
        "| T | B | I | H | cell | mode | torch.nn us | openrnn us | ratio |",
        "|---:" * 4 + "|---|---" + "|---:" * 3 + "|",
    ]
    for row in record["rows"]:
        ratio = float(str(row["ratio"]))
        shown = f"**{ratio:.2f}**" if ratio < 1 else f"{ratio:.2f}"
        values = [row[name] for name in ("T", "B", "I", "H", "cell", "mode")]
        values += [f"{row['torch_us']:,.0f}", f"{row['openrnn_us']:,.0f}", shown]
        lines.append("| " + " | ".join(map(str, values)) + " |")
    lines += ["", "| cell | torch.nn MiB | openrnn MiB |", "|---|---:|---:|"]
    for row in record["memory"]:
        lines.append(f"| {row['cell']} | {row['torch_MiB']:.0f} | {row['openrnn_MiB']:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Measures, prints, and writes JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows and the machine here")
    parser.add_argument("--rows", help="only these shapes, by number from 0: 0,4")
    parser.add_argument("--show", type=Path, help="print the tables of a written file, no more")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    if options.show:
        print(markdown(json.loads(options.show.read_text())))
        return
    torch.set_num_threads(options.threads)
    numbers = (
        [int(word) for word in options.rows.split(",")] if options.rows else range(len(SHAPES))
    )
    rows = []
    console = Console(width=110)
    for number in numbers:
        for kind in ("LSTM", "GRU"):
            for training in (False, True):
                rows.append(undisturbed(kind, SHAPES[number], training))
                console.print(
                    kind, SHAPES[number], rows[-1]["mode"], f"{rows[-1]['ratio']:.2f}", style="dim"
                )
    console.print(table(rows))
    mean = math.exp(statistics.fmean(math.log(float(str(row["ratio"]))) for row in rows))
    losses = [row for row in rows if float(str(row["ratio"])) < 1]
    console.print(f"geometric mean {mean:.2f}x; {len(losses)} of {len(rows)} rows below 1")
    if options.json:
        about = {
            "date": date.today().isoformat(), "machine": platform.processor() or platform.machine(),
            "threads": options.threads, "torch": torch.__version__, "numba": numba.__version__,
            "openrnn": openrnn.__version__, "python": platform.python_version(),
        }  # fmt: skip
        options.json.write_text(
            json.dumps({"about": about, "rows": rows, "memory": memory()}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
