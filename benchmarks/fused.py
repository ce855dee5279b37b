"""The fused kernels against torch.nn and cuDNN: `python benchmarks/fused.py --set NAME`.

All sides run in turn within one process; ours is first compared with the reference in float64.
torch.nn is timed as users call it (eager) and replayed from a CUDA graph (the device alone), ours
the same two ways; in float16 and tf32 cuDNN's algorithms are called directly, too, from graphs, and
the fastest correct one is kept. Training means forward and backward of a given gradient of y. Times
are medians in microseconds a step; ratios above 1 mean that we are faster.

Rows that `--json FILE` holds already are not measured again, so a run that was cut short goes on.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cudnn import SHAPES, machine

import openrnn
from openrnn.errors import LibraryError, NoBackendError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}
THEIRS = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN}
WORST = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 3e-3}
ALGORITHMS = ("standard", "persist_static", "persist_static_small_h")
BATCHES = (1, 16, 64, 128, 256)


class Row(NamedTuple):
    """One network and call."""

    cell: str
    dtype: str
    T: int
    B: int
    I: int  # noqa: E741  # the input size's letter everywhere
    H: int
    name: str = ""


def _grid(cell: str, dtype: str, sizes: Iterable[int], batches: Iterable[int]) -> list[Row]:
    return [Row(cell, dtype, 256, batch, hidden, hidden) for hidden in sizes for batch in batches]


def _users() -> list[Row]:
    """The rows of benchmarks/cudnn.py that have one layer and direction, but haste's."""
    kept = [s for s in SHAPES if s.L == 1 and not s.both and not s.name.startswith("haste")]
    return [
        Row(s.kind.lower(), dtype, min(s.T, 8192), s.B, s.I, s.H, s.name)
        for s in kept for dtype in ("bf16", "tf32")
    ]  # fmt: skip


WIDE = (64, 128, 256, 512, 640, 1024)
SETS = {
    **{f"{dtype}-{cell}": _grid(cell, dtype, WIDE, BATCHES)
       for dtype in ("bf16", "fp16") for cell in ("lstm", "gru")},
    **{f"tf32-{cell}": _grid(cell, "tf32", WIDE[:4], BATCHES) for cell in ("lstm", "gru")},
    "rnn": _grid("rnn_tanh", "bf16", (256, 1024, 1760), BATCHES[:4]),
    "users": _users(),
    "flash": [Row("lstm", "fp16", 1024, 16, 768, 768, "flashrnn")],
    "choice": [
        *_grid("lstm", "tf32", WIDE[:4], (1, 16, 64, 256)),
        *_grid("gru", "tf32", WIDE[:4], (1, 16, 64, 256)),
        *_grid("lstm", "fp16", WIDE[:5], (1, 64, 256)),
        *_grid("gru", "fp16", WIDE[:5], (1, 64, 256)),
        *_grid("rnn_tanh", "fp16", WIDE[:3:2], (1, 64)),
        *_grid("rnn_tanh", "tf32", WIDE[:3:2], (1, 64)),
    ],
    "few": _grid("lstm", "bf16", (64, 256, 512), (1, 64)),
}  # fmt: skip


def step(
    layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor | None, **given: Any
) -> list[torch.Tensor]:
    """One inference call, or one training step where dy is given: y, then gradients."""
    if dy is None:
        with torch.no_grad():
            return [layer(x, **given)[0]]
    y = layer(x, **given)[0]
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], dy)]


def worst_error(ours: openrnn.Recurrent, x: torch.Tensor, dy: torch.Tensor) -> float:
    """The largest relative error of y and of any gradient against float64, of a few steps."""
    exact = openrnn.Recurrent(ours.cell, ours.input_size, ours.hidden_size, backend="reference")
    exact.load_state_dict(ours.state_dict())
    exact = exact.to("cuda", torch.float64)
    part, given = x.detach()[:24], dy[:24]
    found = step(ours, part.clone().requires_grad_(), given)
    wanted = step(exact, part.double().requires_grad_(), given.double())
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True))


def timed(calls: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Median microseconds of each call, by events around some of them, all sides in turn."""
    inner, kept = [], [[] for _ in calls]
    for call in calls:
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        inner.append(max(1, min(10, int(0.005 / (time.perf_counter() - start)))))
    end = time.perf_counter() + seconds * len(calls)
    while len(kept[0]) < 5 or time.perf_counter() < end:
        for call, count, times in zip(calls, inner, kept, strict=True):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(count):
                call()
            last.record()
            torch.cuda.synchronize()
            times.append(first.elapsed_time(last) * 1e3 / count)
    return [statistics.median(times) for times in kept]


def replayed(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph, which keeps alive what the call holds."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(call: Callable[[], object] = call) -> None:
        graph.replay()

    return replay


def direct(row: Row, state: dict[str, Any], x: torch.Tensor, dy: torch.Tensor) -> dict[str, Any]:
    """cuDNN's algorithms that run and are right: a captured call of inference and of training."""
    found: dict[str, Any] = {}
    for algorithm in ALGORITHMS:
        layer = openrnn.Recurrent(
            getattr(openrnn.cells, row.cell), row.I, row.H, backend="cudnn", algorithm=algorithm,
            device="cuda", dtype=x.dtype,
        )  # fmt: skip
        layer.load_state_dict(state)
        try:
            if worst_error(layer, x, dy) <= 3 * WORST[x.dtype]:
                found[algorithm] = [
                    replayed(lambda g=g, a=layer: step(a, x, g)) for g in (None, dy)
                ]
        except (LibraryError, NoBackendError):
            continue
    return found


def measured(row: Row, seconds: float) -> dict[str, Any]:
    """All times of one row."""
    torch.manual_seed(0)
    dtype = DTYPES[row.dtype]
    where = {"device": "cuda", "dtype": dtype}
    theirs = THEIRS[row.cell](row.I, row.H, **where)
    cell = getattr(openrnn.cells, row.cell)
    ours = openrnn.Recurrent(cell, row.I, row.H, backend="fused", **where)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(row.T, row.B, row.I, **where).requires_grad_()
    dy = torch.randn(row.T, row.B, row.H, **where)
    found: dict[str, Any] = row._asdict()
    try:
        found["error"] = worst_error(ours, x, dy)
    except NoBackendError as error:
        return {**found, "refused": str(error).splitlines()[-1].strip()}
    if not found["error"] <= WORST[dtype]:
        return {**found, "wrong": True}
    others = direct(row, theirs.state_dict(), x, dy) if row.dtype != "bf16" else {}
    for place, (kind, grad) in enumerate((("infer", None), ("train", dy))):
        calls = {}
        for who, layer in (("ours", ours), ("nn", theirs)):
            call = lambda layer=layer, grad=grad: step(layer, x, grad)  # noqa: E731
            calls[f"{kind} {who} eager"] = call
            calls[f"{kind} {who} graph"] = replayed(call)
        calls |= {f"{kind} {name}": both[place] for name, both in others.items()}
        times = timed([*calls.values()], seconds)
        found |= {name: time / row.T for name, time in zip(calls, times, strict=True)}
    return found


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """The other side's time over ours: torch.nn both as called and from graphs, cuDNN's best."""
    made = {}
    for kind in ("infer", "train"):
        for way in ("eager", "graph"):
            made[f"{kind} {way}"] = found[f"{kind} nn {way}"] / found[f"{kind} ours {way}"]
        best = [found[f"{kind} {name}"] for name in ALGORITHMS if f"{kind} {name}" in found]
        if best:
            made[f"{kind} cudnn"] = min(best) / found[f"{kind} ours graph"]
    return made


def _compiled(row: Row) -> None:
    layer = openrnn.Recurrent(getattr(openrnn.cells, row.cell), row.I, row.H, device="meta")
    for grad in (False, True):
        openrnn.compile_kernels(
            layer, DTYPES[row.dtype], batches=(row.B,), grad=grad, capability=(9, 0)
        )


def key(found: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(found.get(name) for name in ("set", *Row._fields))


def write(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """The rows with what a reader must know of the machine."""
    if path:
        path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def summary(rows: list[dict[str, Any]]) -> None:
    """Geometric means, and every row that is below 1 somewhere."""
    for name in dict.fromkeys(kind for row in rows for kind in row.get("ratios", {})):
        values = [row["ratios"][name] for row in rows if name in row.get("ratios", {})]
        mean = math.exp(statistics.fmean(map(math.log, values)))
        low = []
        for row in rows:
            if row.get("ratios", {}).get(name, 1) < 1:
                what = f"{row['name'] or row['cell']} {row['dtype']} {row['H']}x{row['B']}"
                low.append(f"{what} {row['ratios'][name]:.2f}")
        print(f"{name}: {mean:.2f} over {len(values)}, least {min(values):.2f}", *low, sep="; ")


def main() -> None:
    """Prints a line a row and geometric means."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file to go on with")
    parser.add_argument("--set", default="few", help=f"some of {', '.join(SETS)}")
    parser.add_argument("--seconds", type=float, default=0.03, help="for each time of a row")
    parser.add_argument(
        "--limit", type=float, default=95, help="seconds, after which no row begins"
    )
    parser.add_argument("--workers", type=int, default=12, help="processes that compile kernels")
    options = parser.parse_args()
    end = time.monotonic() + options.limit
    rows = (
        json.loads(options.json.read_text())["rows"]
        if options.json and options.json.exists()
        else []
    )
    done = {key(row) for row in rows}
    wanted = [
        (name, row) for name in options.set.split(",") for row in SETS[name]
        if (name, *row) not in done
    ]  # fmt: skip
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        list(pool.map(_compiled, {row for _, row in wanted}))
    print("cell dtype T B I H | ours eager graph, nn eager graph; infer then train | ratios")
    for name, row in wanted:
        if time.monotonic() > end:
            print("out of time: run again to go on")
            break
        found = {"set": name, **measured(row, options.seconds)}
        shown = " ".join(map(str, row))
        if "refused" in found or "wrong" in found:
            print(shown, found.get("refused") or f"WRONG {found['error']:.0e}", flush=True)
        else:
            found["ratios"] = ratios(found)
            times = [
                f"{value:6.2f}"
                for kind, value in found.items()
                if kind.endswith(("eager", "graph"))
            ]
            print(
                shown,
                "|",
                *times,
                "|",
                *(f"{r:5.2f}" for r in found["ratios"].values()),
                flush=True,
            )
        rows.append(found)
        write(options.json, rows)
    for name in options.set.split(","):
        print("--", name)
        summary([row for row in rows if row["set"] == name])


if __name__ == "__main__":
    main()
