"""Whole layers with products after loops or beside them: `python benchmarks/beside.py`.

Microseconds a step of the same layer in one process, as called and from CUDA graphs: with no
products beside loops ("after"), with them in at most two parts ("two parts"), in as many as
`backends/fused/beside.py` chooses ("chosen"), and so also in short calls ("short, too"). Times of a
way whose results are not those of the first, but for rounding, are not taken.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cudnn import machine
from fused import DTYPES, WORST, replayed, step, timed
from rich.console import Console
from rich.table import Table

import openrnn
from openrnn.backends.fused import beside

ROWS = (
    ("LSTM", "fp16", 1024, 16, 768), ("LSTM", "bf16", 1024, 16, 512),
    ("LSTM", "bf16", 256, 64, 512), ("LSTM", "bf16", 1024, 48, 512),
    ("LSTM", "bf16", 1024, 64, 256), ("LSTM", "bf16", 500, 16, 1024),
    ("LSTM", "bf16", 256, 64, 640), ("LSTM", "bf16", 256, 64, 1024),
    ("GRU", "bf16", 1024, 32, 512), ("GRU", "bf16", 256, 64, 512), ("GRU", "bf16", 256, 64, 1024),
    ("LSTM", "tf32", 1024, 16, 512), ("LSTM", "tf32", 256, 64, 640),
)  # fmt: skip
# parts at most, and us of loops that a call has at least where products run beside them
WAYS = {
    "after": (1, math.inf), "two parts": (2, beside.LONG), "chosen": (beside.MOST, beside.LONG),
    "short, too": (beside.MOST, 0.0),
}  # fmt: skip
Call = Callable[[], list[torch.Tensor]]


def in_way(call: Call, most: int, least: float) -> Call:
    """The call, in so many parts at most and with so many microseconds of loops taken as long."""

    def made() -> list[torch.Tensor]:
        before = beside.MOST, beside.LONG
        beside.MOST, beside.LONG = most, least
        try:
            return call()
        finally:
            beside.MOST, beside.LONG = before

    return made


def off(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest relative distance of y and the gradients."""
    pairs = zip(found, wanted, strict=True)
    return max(((a - b).float().norm() / b.float().norm()).item() for a, b in pairs)


def measured(
    kind: str, dtype: str, steps: int, batch: int, hidden: int, seconds: float
) -> dict[str, Any]:
    """A row's times, without those of ways that are wrong."""
    torch.manual_seed(0)
    where: dict[str, Any] = {"device": "cuda", "dtype": DTYPES[dtype]}
    layer = getattr(openrnn, kind)(hidden, hidden, backend="fused", **where)
    x = torch.randn(steps, batch, hidden, **where).requires_grad_()
    dy = torch.randn(steps, batch, hidden, **where)
    found: dict[str, Any] = {"cell": kind, "dtype": dtype, "T": steps, "B": batch, "H": hidden}
    for name, grad in (("infer", None), ("train", dy)):

        def call(grad: torch.Tensor | None = grad) -> list[torch.Tensor]:
            # what outlives the call must not bind x to this stream: no other could capture it
            return [one.detach() for one in step(layer, x, grad)]

        ways = {way: in_way(call, *limits) for way, limits in WAYS.items()}
        wanted = ways["after"]()
        ways = {way: one for way, one in ways.items() if off(one(), wanted) <= WORST[x.dtype]}
        sides = {f"{name} {way} called": one for way, one in ways.items()}
        sides |= {f"{name} {way} graph": replayed(one) for way, one in ways.items()}
        times = timed([*sides.values()], seconds)
        found |= {side: round(time / steps, 3) for side, time in zip(sides, times, strict=True)}
    return found


def main() -> None:
    """Prints a table of what graphs take and one of calls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--seconds", type=float, default=0.1, help="for each time")
    asked = parser.parse_args()
    rows = [measured(*row, asked.seconds) for row in ROWS]
    for how in ("graph", "called"):
        columns = [f"{name} {way}" for name in ("infer", "train") for way in WAYS]
        table = Table("row", *columns, title=f"us a step, {how}")
        for row in rows:
            said = " ".join(str(row[key]) for key in ("cell", "dtype", "T", "B", "H"))
            times = [row.get(f"{column} {how}") for column in columns]
            table.add_row(said, *("wrong" if time is None else f"{time:.2f}" for time in times))
        Console(width=140).print(table)
    if asked.json:
        asked.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
