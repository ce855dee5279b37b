"""The time loops alone, in whole layers: `python benchmarks/alone.py [--json FILE]`.

What torch's profiler says of our kernels in calls of inference and training, microseconds a step.
"""

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cudnn import machine
from fused import DTYPES, step
from torch.profiler import ProfilerActivity, profile

import openrnn
from openrnn.backends.fused import beside

ROWS = (
    ("LSTM", "fp16", 1024, 16, 768), ("LSTM", "bf16", 256, 16, 1024),
    ("LSTM", "bf16", 256, 64, 1024), ("LSTM", "bf16", 256, 16, 512), ("LSTM", "bf16", 256, 64, 512),
    ("LSTM", "bf16", 256, 16, 64), ("LSTM", "bf16", 256, 64, 256), ("LSTM", "bf16", 256, 256, 256),
    ("LSTM", "tf32", 256, 16, 64), ("LSTM", "tf32", 256, 64, 256), ("GRU", "bf16", 256, 32, 128),
)  # fmt: skip
CALLS = 5


def alone(call: Callable[[], object]) -> dict[str, float]:
    """Microseconds of a call in the kernels forward and backward."""
    for _ in range(4):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    return {
        event.key: event.self_device_time_total / CALLS
        for event in seen.key_averages()
        if event.key in ("forward", "backward")
    }


def measured(cell: str, dtype: str, steps: int, batch: int, hidden: int, share: float) -> Any:
    """A row's figures; `share` of all steps begins anew."""
    where: dict[str, Any] = {"device": "cuda", "dtype": DTYPES[dtype]}
    layer = getattr(openrnn, cell)(hidden, hidden, backend="fused", **where)
    x = torch.randn(steps, batch, hidden, **where).requires_grad_()
    dy = torch.randn(steps, batch, hidden, **where)
    reset = torch.rand(steps, batch, device="cuda") < share if share else None
    found = {"cell": cell, "dtype": dtype, "T": steps, "B": batch, "H": hidden, "resets": share}
    for name, grad in (("inference", None), ("training", dy)):
        for kernel, time in alone(partial(step, layer, x, grad, reset=reset)).items():
            found[f"{name} {kernel}"] = round(time / steps, 3)
    return found


def main() -> None:
    """Prints a line a row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    beside.LONG = math.inf  # no products beside loops
    rows = [measured(*row, share) for row in ROWS for share in (0.0, 0.03)]
    for row in rows:
        print(*row.values())
    if asked.json:
        asked.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
