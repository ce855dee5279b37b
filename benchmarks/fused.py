"""The fused kernels against torch.nn on this GPU: `python benchmarks/fused.py [--json FILE]`.

Both sides run in turn within one process; ours is first compared with the reference in float64.
torch.nn is timed as users call it (eager) and replayed from a CUDA graph (the device alone), ours
the same two ways. Training means forward and backward of a given gradient of y. Times are medians
in microseconds a step; ratios above 1 mean that we are faster.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

import openrnn

STEPS = 256
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}
THEIRS = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN}
SETS = {  # cells, dtypes, hidden sizes, batches
    "bf16": (("lstm", "gru"), ("bf16",), (64, 128, 256, 512, 640), (1, 16, 64, 128, 256)),
    "fp16": (("lstm", "gru"), ("fp16",), (64, 128, 256, 512, 640), (1, 16, 64, 128, 256)),
    "tf32": (("lstm", "gru"), ("tf32",), (64, 128, 256, 512), (1, 16, 64, 128, 256)),
    "rnn": (("rnn_tanh",), ("bf16",), (256, 1024), (1, 16, 64, 128)),
    "few": (("lstm",), ("bf16",), (64, 256, 512), (1, 64)),
}
WORST = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 3e-3}


def step(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor | None) -> list[torch.Tensor]:
    """One inference call, or one training step where dy is given: y, then gradients."""
    if dy is None:
        with torch.no_grad():
            return [layer(x)[0]]
    y = layer(x)[0]
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], dy)]


def worst_error(ours: openrnn.LSTM, x: torch.Tensor, dy: torch.Tensor) -> float:
    """The largest relative error of y and of any gradient against float64."""
    exact = openrnn.Recurrent(ours.cell, ours.input_size, ours.hidden_size, backend="reference")
    exact.load_state_dict(ours.state_dict())
    exact = exact.to("cuda", torch.float64)
    few = min(32, x.shape[0]), min(16, x.shape[1])
    part = x.detach()[: few[0], : few[1]]
    given = dy[: few[0], : few[1]]
    found = step(ours, part.clone().requires_grad_(), given)
    wanted = step(exact, part.double().requires_grad_(), given.double())
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted))


def timed(call: Callable[[], object], seconds: float) -> float:
    """Median time of a call in microseconds, by events around batches of calls."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    once = time.perf_counter() - start
    inner = max(1, min(10, int(0.01 / once)))
    found = []
    end = time.perf_counter() + seconds
    while len(found) < 5 or time.perf_counter() < end:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(inner):
            call()
        last.record()
        torch.cuda.synchronize()
        found.append(first.elapsed_time(last) * 1e3 / inner)
    return statistics.median(found)


def replayed(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def row(cell: str, name: str, hidden: int, batch: int, seconds: float) -> dict[str, object]:
    """All times of one row."""
    dtype = DTYPES[name]
    where = {"device": "cuda", "dtype": dtype}
    theirs = THEIRS[cell](hidden, hidden, **where)
    ours = openrnn.Recurrent(getattr(openrnn.cells, cell), hidden, hidden, backend="fused", **where)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(STEPS, batch, hidden, **where).requires_grad_()
    dy = torch.randn(STEPS, batch, hidden, **where)
    found: dict[str, object] = {"cell": cell, "dtype": name, "H": hidden, "B": batch}
    found["error"] = worst_error(ours, x, dy)
    for kind, grad in (("infer", None), ("train", dy)):
        for who, layer in (("ours", ours), ("nn", theirs)):
            call = lambda layer=layer, grad=grad: step(layer, x, grad)  # noqa: E731
            found[f"{kind} {who} eager"] = timed(call, seconds) / STEPS
            found[f"{kind} {who} graph"] = timed(replayed(call), seconds) / STEPS
    return found


def ratios(found: dict[str, object]) -> dict[str, float]:
    """torch.nn's time over ours: both as called, and both from a graph."""
    return {
        f"{kind} {way}": found[f"{kind} nn {way}"] / found[f"{kind} ours {way}"]
        for kind in ("infer", "train")
        for way in ("eager", "graph")
    }


def main() -> None:
    """Prints a line a row and geometric means."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--set", default="bf16", choices=SETS)
    parser.add_argument(
        "--seconds", type=float, default=0.1, help="for each of a row's eight times"
    )
    options = parser.parse_args()
    cells, dtypes, sizes, batches = SETS[options.set]
    rows = []
    print("cell dtype H B | ours us/step eager, graph | nn eager, graph, infer then train | ratios")
    for cell, dtype, hidden, batch in (
        (c, d, h, b) for d in dtypes for c in cells for h in sizes for b in batches
    ):
        found = row(cell, dtype, hidden, batch, options.seconds)
        bad = found["error"] > WORST[DTYPES[dtype]] or math.isnan(found["error"])
        rows.append({**found, "ratios": ratios(found), "right": not bad})
        times = " ".join(
            f"{found[f'{kind} {who} {way}']:6.2f}"
            for kind in ("infer", "train")
            for who in ("ours", "nn")
            for way in ("eager", "graph")
        )
        against = " ".join(f"{value:5.1f}" for value in ratios(found).values())
        print(
            f"{cell:8} {dtype} {hidden:5} {batch:4} | {times} | {against}",
            "WRONG" if bad else "",
            f"{found['error']:.0e}",
            flush=True,
        )
    for name in rows[0]["ratios"]:
        for dtype in dtypes:
            logs = [math.log(r["ratios"][name]) for r in rows if r["dtype"] == dtype]
            least = min(r["ratios"][name] for r in rows if r["dtype"] == dtype)
            mean = math.exp(statistics.mean(logs))
            print(f"{dtype} {name}: geometric mean {mean:.2f}, least {least:.2f}")
    if options.json:
        about = {
            "date": date.today().isoformat(), "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__, "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(), "steps": STEPS, "rows": rows,
        }  # fmt: skip
        options.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
