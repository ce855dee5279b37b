"""cuDNN called directly against torch.nn on this GPU: `python benchmarks/cudnn.py [--json FILE]`.

Each algorithm of cuDNN, forward and forward + backward, microseconds a step, in four precisions.
Numbers are checked against float64 before they are timed. torch.nn and all algorithms are timed as
users call them, in turn, in one process; the ratio is torch.nn's time over ours, so above 1 we are
faster.
"""

import argparse
import json
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import date
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import openrnn
from openrnn.errors import LibraryError, NoBackendError
from openrnn.native.cudnn.library import load
from openrnn.spec import ALGORITHMS


class Shape(NamedTuple):
    """One network and call, named after who runs it."""

    name: str
    kind: str
    T: int
    B: int
    I: int  # noqa: E741  # the input size's letter everywhere
    H: int
    L: int = 1
    both: bool = False


SHAPES = [
    Shape("isaac", "LSTM", 24, 4096, 64, 256),
    Shape("sb3", "LSTM", 128, 32, 64, 256),
    Shape("sf", "GRU", 32, 256, 512, 512),
    Shape("rllib", "LSTM", 20, 200, 256, 256),
    Shape("torchrl", "LSTM", 128, 128, 256, 256),
    Shape("dreamer", "GRU", 64, 16, 512, 512),
    Shape("deepar-10", "LSTM", 60, 64, 10, 10, 2),
    Shape("deepar-128", "LSTM", 168, 1024, 32, 128, 2),
    Shape("hydro-128", "LSTM", 365, 256, 32, 128),
    Shape("hydro-256", "LSTM", 365, 256, 32, 256),
    Shape("rnnt", "LSTM", 100, 64, 640, 640),
    Shape("rnnt-step-1", "LSTM", 1, 1, 640, 640),
    Shape("rnnt-step-32", "LSTM", 1, 32, 640, 640),
    Shape("crdnn", "LSTM", 500, 16, 1024, 1024, 4, True),
    Shape("tacotron-step", "LSTM", 1, 64, 1024, 1024),
    Shape("nam", "LSTM", 8192, 16, 1, 18, 3),
    Shape("nam-long", "LSTM", 65535, 4, 1, 24),
    Shape("sepa", "LSTM", 250, 4000, 128, 128, 1, True),
    Shape("lm-650", "LSTM", 70, 20, 650, 650),
    Shape("lm-1150", "LSTM", 70, 80, 1150, 1150),
    Shape("lm-1500", "LSTM", 70, 20, 1500, 1500),
    Shape("fastrnns", "LSTM", 100, 64, 512, 512),
    *(Shape(f"haste-{b}-{h}", "LSTM", 100, b, h, h) for b in (1, 32, 64, 128)
      for h in (64, 128, 256, 512)),
]  # fmt: skip
# name: dtype, setting of float32 products, largest relative error
PRECISIONS = {
    "fp16": (torch.float16, "tf32", 0.1),
    "bf16": (torch.bfloat16, "tf32", 0.2),
    "tf32": (torch.float32, "tf32", 3e-2),
    "ieee": (torch.float32, "ieee", 1e-3),
}
SECONDS = 0.015  # for one side of one measurement
SLOW = 0.4  # for all sides of one measurement, but two turns at least
LONG = 2000  # steps beyond which persist_dynamic and extra precisions are left out


@contextmanager
def products(setting: str) -> Iterator[None]:
    """Float32 products of recurrent networks by this arithmetic."""
    before = torch.backends.cudnn.rnn.fp32_precision
    torch.backends.cudnn.rnn.fp32_precision = setting
    try:
        yield
    finally:
        torch.backends.cudnn.rnn.fp32_precision = before


class Side:
    """One implementation with its own leaves."""

    def __init__(self, layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> None:
        self.layer, self.dy = layer, dy
        self.x = x.detach().clone().requires_grad_()
        self.leaves = [self.x, *layer.parameters()]

    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            y: torch.Tensor = self.layer(self.x)[0]
            return y

    def both(self) -> list[torch.Tensor]:
        y = self.layer(self.x)[0]
        return [y, *torch.autograd.grad(y, self.leaves, self.dy)]


def make(shape: Shape, dtype: torch.dtype, algorithm: str | None) -> torch.nn.Module:
    """torch.nn's layer, or ours by an algorithm."""
    torch.manual_seed(0)
    extra = {} if algorithm is None else {"algorithm": algorithm, "backend": "cudnn"}
    made = getattr(torch.nn if algorithm is None else openrnn, shape.kind)(
        shape.I, shape.H, shape.L, bidirectional=shape.both, device="cuda", **extra
    )
    with torch.no_grad():  # values that every precision holds
        for weight in made.parameters():
            weight.copy_(weight.bfloat16())
    made = made.to(dtype)
    if algorithm is None:
        made.flatten_parameters()
    return made


def once(call: Callable[[], object], runs: int = 1) -> float:
    """Seconds of a call, ended when the device has ended."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(runs):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / runs


def timed(calls: list[Callable[[], object]]) -> list[float]:
    """Seconds of each call, the median, run in turn; those long and far behind are run once.

    A first call that is slow counts among three at least.
    """
    kept = [[once(call)] for call in calls]
    least = min(times[0] for times in kept)
    inner = max(1, min(50, round(0.003 / least)))
    racing = [place for place, (time_,) in enumerate(kept) if time_ < max(0.02, 4 * least)]
    if inner > 1:
        kept = [[] if place in racing else times for place, times in enumerate(kept)]
    begin = time.perf_counter()
    for turn in count():
        spent = time.perf_counter() - begin
        if spent > (SECONDS * len(racing) if turn >= 5 else SLOW if turn >= 2 else math.inf):
            break
        for place in racing:
            kept[place].append(once(calls[place], inner))
    return [statistics.median(times) for times in kept]


def worst(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The largest error, relative to the largest number of its tensor; nan stays nan."""
    errors = [
        ((have.double() - want).abs().max() / (want.abs().max() + 1e-6)).item()
        for have, want in zip(found, exact, strict=True)
    ]
    return math.nan if any(math.isnan(error) for error in errors) else max(errors)


def measure(shape: Shape, precisions: Iterable[str] = PRECISIONS) -> Iterator[dict[str, object]]:
    """Rows of one shape: every precision, algorithm and mode."""
    torch.manual_seed(1)
    x = torch.randn(shape.T, shape.B, shape.I, device="cuda").bfloat16()
    width = shape.H * (2 if shape.both else 1)
    dy = torch.randn(shape.T, shape.B, width, device="cuda").bfloat16()
    exact = Side(make(shape, torch.float64, None), x.double(), dy.double()).both()
    for precision in precisions:
        dtype, setting, allowed = PRECISIONS[precision]
        if shape.T > LONG and precision in ("bf16", "ieee"):
            continue
        with products(setting):
            theirs = Side(make(shape, dtype, None), x.to(dtype), dy.to(dtype))
            sides = {
                name: Side(make(shape, dtype, name), x.to(dtype), dy.to(dtype))
                for name in ALGORITHMS
                if shape.T <= LONG or name != "persist_dynamic"
            }
            for mode in ("forward", "both"):
                row: dict[str, object] = {**shape._asdict(), "precision": precision, "mode": mode}
                errors: dict[str, float] = {}
                for name, side in sides.items():
                    try:
                        found = side.both() if mode == "both" else [side.forward()]
                    except (LibraryError, NoBackendError) as error:
                        why = str(error).splitlines()[-1].strip()
                        yield {**row, "algorithm": name, "refused": why}
                        continue
                    missed = worst(found, exact[: len(found)])
                    if missed <= allowed:
                        errors[name] = missed
                    else:
                        yield {**row, "algorithm": name, "wrong": missed}
                    del found
                them, *ours = timed(
                    [getattr(side, mode) for side in (theirs, *(sides[name] for name in errors))]
                )
                for (name, missed), us in zip(errors.items(), ours, strict=True):
                    yield {
                        **row, "algorithm": name, "error": missed, "torch_us": 1e6 * them / shape.T,
                        "openrnn_us": 1e6 * us / shape.T, "ratio": them / us,
                    }  # fmt: skip


def overhead() -> Iterator[dict[str, object]]:
    """Host time of a call where the device has next to nothing to do, at T = 1 and T = 25."""
    for steps in (1, 25):
        shape = Shape("overhead", "LSTM", steps, 8, 64, 64)
        x, dy = (torch.randn(steps, 8, 64, device="cuda") for _ in range(2))
        theirs, ours = (Side(make(shape, torch.float32, a), x, dy) for a in (None, "auto"))
        for side in (theirs, ours):
            side.forward(), side.both()
        for mode in ("forward", "both"):
            ratios, times = [], []
            for _ in range(9):
                them, us = timed([getattr(theirs, mode), getattr(ours, mode)])
                ratios.append(us / them)
                times.append((1e6 * them, 1e6 * us))
            yield {
                "T": steps, "mode": mode, "torch_us": statistics.median(t for t, _ in times),
                "openrnn_us": statistics.median(u for _, u in times),
                "overhead": statistics.median(ratios),
            }  # fmt: skip


def machine() -> dict[str, str]:
    """What a reader of the numbers must know."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return {
        "date": date.today().isoformat(), "gpu": torch.cuda.get_device_name(),
        "driver": driver[0] if driver else "unknown", "cuda": str(torch.version.cuda),
        "torch": torch.__version__, "cudnn": str(load().version), "openrnn": openrnn.__version__,
        "python": platform.python_version(),
    }  # fmt: skip


def mean(values: list[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(math.log(value) for value in values)) if values else math.nan


def table(rows: list[dict[str, object]]) -> Table:
    """Microseconds a step of each algorithm; the ratio is that of auto."""
    shown = Table(title="us a step; ratio = torch.nn / openrnn auto")
    heads = ("row", "precision", "mode", "torch", *ALGORITHMS, "ratio")
    for head in heads:
        shown.add_column(head, justify="left" if head in heads[:3] else "right")
    groups: dict[tuple[object, ...], dict[str, dict[str, object]]] = {}
    for row in rows:
        key = (row["name"], row["precision"], row["mode"])
        groups.setdefault(key, {})[str(row["algorithm"])] = row
    for key, found in groups.items():
        auto = found["auto"]
        times = [
            f"{row['openrnn_us']:.2f}" if "ratio" in row else "wrong" if "wrong" in row else "-"
            for row in (found.get(name, {}) for name in ALGORITHMS)
        ]
        known = "ratio" in auto
        style = "red" if known and float(str(auto["ratio"])) < 0.95 else None
        shown.add_row(
            *map(str, key), f"{auto['torch_us']:.2f}" if known else "-", *times,
            f"{auto['ratio']:.2f}" if known else "-", style=style,
        )  # fmt: skip
    return shown


def main() -> None:
    """Measures, prints, and writes JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--rows", help="comma-separated beginnings of names; by default all")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help="some of the default")
    asked = parser.parse_args()
    console = Console(width=150)
    precisions = asked.precisions.split(",")
    if unknown := set(precisions) - set(PRECISIONS):
        parser.error(f"--precisions takes {', '.join(PRECISIONS)}, got {', '.join(unknown)}")
    shapes = [
        shape for shape in SHAPES
        if asked.rows is None or shape.name.startswith(tuple(asked.rows.split(",")))
    ]  # fmt: skip
    rows: list[dict[str, object]] = []
    if asked.json and asked.json.exists():  # what is not measured now stays
        names = {shape.name for shape in shapes}
        rows = [
            row for row in json.loads(asked.json.read_text())["rows"]
            if row["name"] not in names or row["precision"] not in precisions
        ]  # fmt: skip
    calls = list(overhead())

    def write() -> None:  # after every shape, so that a run that is cut short leaves what it has
        if asked.json:
            found = {"machine": machine(), "overhead": calls, "rows": rows}
            asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    write()
    for shape in shapes:
        begin = time.perf_counter()
        rows += measure(shape, precisions)
        torch.cuda.empty_cache()
        console.print(f"{shape.name}: {time.perf_counter() - begin:.1f} s")
        write()
    console.print(table(rows))
    for call in calls:
        console.print(
            f"overhead T={call['T']} {call['mode']}: torch.nn {call['torch_us']:.1f} us, "
            f"openrnn {call['openrnn_us']:.1f} us, {call['overhead']:.2f}x"
        )
    for precision in PRECISIONS:
        for mode in ("forward", "both"):
            ratios = [
                float(str(row["ratio"])) for row in rows
                if (row["precision"], row["mode"], row["algorithm"]) == (precision, mode, "auto")
                and "ratio" in row
            ]  # fmt: skip
            losses = sum(ratio < 0.95 for ratio in ratios)
            console.print(
                f"{precision} {mode}: auto {mean(ratios):.2f}x torch.nn over {len(ratios)} rows, "
                f"{losses} below 0.95, least {min(ratios, default=math.nan):.2f}"
            )


if __name__ == "__main__":
    main()
