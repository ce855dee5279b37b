"""Kernels alone, by tiles: `python benchmarks/tiles.py --cell lstm --hidden 64 1024`.

For each row it compiles the plan's first choices of each kind (forward without what training keeps
is `inference`), times launches of T steps from a CUDA graph, grids with several delays, then the
two fastest with more and less of R in registers, frugal and not, and prints what the plan would
pick beside the fastest. `--mask` times kernels with lengths, spread evenly up to T, or with resets
at 3% of all steps.

A grid's delay is that of its first step; each warp finds its own from there. The delay it ends with
differs from launch to launch, so delays are told apart by the mean of many, those a little later
than the fastest once more; `--delays` does that alone, for the grids that the plan picks now.

Inputs are random, results are not looked at: tests/test_fused_gpu.py does that. `--table` prints
`backends/fused/measured.csv` with such times; the models beside it were fitted to them.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

import torch
from cudnn import machine
from rich.console import Console
from rich.table import Table

from openrnn import cells
from openrnn.backends.fused import kernels, measured, plan
from openrnn.backends.fused.limits import Limits
from openrnn.codegen import cuda, tiles
from openrnn.codegen.tiles import Tiles
from openrnn.codegen.trace import Traced, trace
from openrnn.cores import usable_cores
from openrnn.errors import OpenRNNError
from openrnn.kernels.cuda.args import BackwardArgs, ForwardArgs
from openrnn.native import nvrtc

STEPS, LAUNCHES, REPLAYS = 256, 4, 6
DELAYS = (0, 50, 100, 150, 200, 300, 400, 500, 600, 800, 1000, 1200, 1400, 1700, 2000)  # of grids
LATER = (0, 50, 100, 150, 200)  # than the fastest of them
KEPT = ("units", *measured.SHAPE, *measured.HELD, "delay")  # of tiles, in files
KINDS = {
    "inference": partial(plan.forward, keep=False),
    "forward": plan.forward,
    "backward": plan.backward,
}
MORE = (7, 4, 2, 1, 0, -1, -2)  # pieces of R in registers than planned
EVEN = 1.02  # of kernels so near the fastest the one tried first is taken
SHARE = 0.03  # of all steps that begin anew with resets

How = TypeVar("How")


class Job(NamedTuple):
    """A kernel to compile and time."""

    cell: str
    dtype: str
    capability: tuple[int, int]
    how: Tiles


def candidates(
    job: Job, kind: str, mask: str, hidden: int, batch: int, most: int
) -> list[Job]:  # fmt: skip
    """The plan's first kernels, grids and others, that its model takes for half as fast or more.

    Two at most are of the same exchange, and each shape stands once.
    """
    shapes = set[measured.Shape]()
    seen: Counter[tuple[int, ...]] = Counter()
    found = []
    rank: Callable[..., tuple[Tiles, ...]] = KINDS[kind]
    cell, limits = trace(getattr(cells, job.cell)), Limits.of(job.capability)
    batch = -(-batch // 8) * 8  # as the backend asks
    ranked = rank(cell, job.dtype, hidden, batch, job.capability, mask=mask)
    times = {how: plan.time_of(cell, job.dtype, how, batch, limits) for how in ranked}
    for how in ranked:
        shape = measured.shape_of(how)
        if times[how] > 2 * min(times.values()) or shape in shapes:
            continue
        key = (how.cluster, how.clusters, how.tiles, how.flight, how.wgmma)
        grid = (how.clusters > 1,)
        if seen[key] < 2 and seen[grid] < most:
            seen[key] += 1
            seen[grid] += 1
            shapes.add(shape)
            on = () if mask == measured.PLAIN else (mask,)
            on += ("keep",) if kind == "forward" else ()
            asked = kernels.first_try(hidden, how, on)
            found.append(job._replace(how=asked))
    return found


def variants(job: Job) -> list[Job]:
    """The same tiles with more and less of R in registers, frugal and not."""
    cell, shared = trace(getattr(cells, job.cell)), Limits.of(job.capability).shared
    pieces, found = job.how.pieces(cell, job.dtype), []
    some = MORE if job.how.resident < pieces else (0,)
    for more, frugal, stages in product(some, (False, True), (4, 2)):
        resident = min(pieces, max(0, job.how.resident + more))
        how = replace(job.how, resident=resident, frugal=frugal, stages=stages)
        if how.shared(cell, job.dtype) <= shared and replace(how, stages=4) not in found:
            found.append(how)
    return [job._replace(how=how) for how in dict.fromkeys(found)]


def unspilled(job: Job) -> bool:
    """Whether the tiles spill nothing as they are."""
    torch.set_num_threads(1)
    cell, arch = trace(getattr(cells, job.cell)), nvrtc.arch_of(job.capability)
    return not kernels.binary(cell, job.dtype, job.how, arch).resources.spilled


def compiled(job: Job) -> Tiles | None:
    """The tiles with as much of R in registers as needs no spill."""
    torch.set_num_threads(1)
    kernels.TOGETHER = 1  # the pool takes all cores
    arch, shared = nvrtc.arch_of(job.capability), Limits.of(job.capability).shared
    found = kernels.unspilled(trace(getattr(cells, job.cell)), job.dtype, job.how, arch, shared)
    return found[1] if found else None


def arguments(
    cell: Traced, how: Tiles, batch: int, dtype: torch.dtype
) -> tuple[list[torch.Tensor], ForwardArgs | BackwardArgs]:
    """Tensors to hold on to, the second with a grid's flags; and the kernel's arguments."""

    def some(*shape: int) -> torch.Tensor:
        return (torch.rand(shape, device="cuda") * 0.2 - 0.1).to(dtype)

    short = how.multiplied(str(dtype).removeprefix("torch.")) == 2

    def mailbox(*shape: int) -> torch.Tensor:
        bits = torch.int16 if short else torch.int32
        return torch.full(shape, -1, dtype=bits, device="cuda")

    units, gates, states = how.units, len(cell.gates), len(cell.states)
    record = some(STEPS, (batch + 7) // 8, units // 8, 64 * tiles.record(cell))
    weight, final = some(gates, units, units), [some(batch, units) for _ in range(states)]
    size, none = dtype.itemsize, [0] * states
    vectors = some(len(cell.unit_params), units)
    order = torch.arange(batch, device="cuda")
    lengths = STEPS * (batch - order) // batch
    masks = [lengths, order, torch.rand((STEPS, batch), device="cuda") < SHARE]
    on = how.lengths, how.lengths, how.reset
    masked = [mask.data_ptr() if here else 0 for mask, here in zip(masks, on)]
    shared = {
        "weight": weight.data_ptr(), "saved": record.data_ptr(), "vectors": vectors.data_ptr(),
        **dict(zip(("lengths", "order", "reset"), masked)),
        "steps": STEPS, "batch": batch, "units": units, "reverse": 0,
    }  # fmt: skip
    if how.kind == "forward":
        x, box = some(STEPS, batch, gates * units), mailbox(STEPS, batch, units)
        own = how.half or how.lengths or how.reset  # or y is the mailbox
        y = some(STEPS, batch, units) if own else box.view(dtype)
        forward = ForwardArgs(
            x=x.data_ptr(), x_step_bytes=size * x.stride(0), x_row=x.stride(1), x_gate=units,
            y=y.data_ptr(), y_step_bytes=size * y.stride(0), y_row=y.stride(1),
            flag_buffer=box.data_ptr() if own else 0, saved_step_bytes=size * record.stride(0),
            reset_step_bytes=batch, initial=none, reset_state=none, all_states=none,
            final=[state.data_ptr() for state in final], **shared,
        )  # fmt: skip
        return [x, box, y, record, weight, vectors, *final, *masks], forward
    planes = len(cuda.planes(cell))
    dy, d_gates = some(STEPS, batch, units), mailbox(STEPS, batch, planes, units)
    pieces = -(-batch // how.rows) * how.tiles
    sums = torch.empty(pieces, planes + len(vectors), units, device="cuda")
    backward = BackwardArgs(
        dy=dy.data_ptr(), dy_step_bytes=-size * dy.stride(0), dy_row=dy.stride(1),
        d_gates=d_gates.data_ptr(), d_gates_step_bytes=-size * d_gates.stride(0),
        sums=sums.data_ptr(), saved_step_bytes=-size * record.stride(0), reset_step_bytes=-batch,
        d_final=none, d_all_states=none, d_initial=none, d_reset_state=none, **shared,
    )  # fmt: skip
    return [dy, d_gates, sums, record, weight, vectors, *masks], backward


def timed(job: Job, batch: int, delays: Sequence[int]) -> tuple[float, Tiles] | None:
    """The least of some replays, microseconds a step, of a grid the mean, and the tiles with its
    best delay, where there are some to try; None where the device does not hold it.

    From a graph, because a launch from Python adds a tenth of a microsecond to each of 256 steps.
    """
    cell, how = trace(getattr(cells, job.cell)), job.how
    made = kernels.binary(cell, job.dtype, how, nvrtc.arch_of(job.capability))
    shared = how.shared(cell, job.dtype)
    kernel = nvrtc.loaded(made, how.cluster, how.threads, shared, 0, how.clusters > 1)
    if kernel.resident < how.clusters:
        return None
    grid = how.clusters > 1
    own = LAUNCHES if grid else 1  # each launch of a grid needs an empty mailbox
    calls = [arguments(cell, how, batch, getattr(torch, job.dtype)) for _ in range(own)]
    boxes = [held[1] for held, _ in calls if grid]

    def times(tried: Tiles, replays: int = REPLAYS) -> list[float]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _, args in calls * (LAUNCHES // own):
                kernels.launch(kernel, tried, args)
        found = []
        for _ in range(replays):
            for box in boxes:
                box.fill_(-1)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end) * 1e3 / (STEPS * LAUNCHES))
        return found[1:]

    if not grid:
        return min(times(how)), how
    if delays:
        coarse = min(delays, key=lambda delay: median(times(replace(how, delay=delay))))
        delayed = [replace(how, delay=coarse + later) for later in LATER]
        how = min(delayed, key=lambda tried: fmean(times(tried, 3 * REPLAYS)))
    return fmean(times(how, 2 * REPLAYS)), how


def said(how: Tiles) -> str:
    """Tiles in letters: clusters x blocks, warps, tiles, turns, pieces in registers, delay."""
    grid = f"{how.clusters}x" if how.clusters > 1 else ""
    kind = " wgmma" if how.wgmma else ""
    kind += " frugal" if how.frugal else ""
    kind += f" d{how.delay}" if grid else ""
    return f"{grid}{how.cluster} w{how.warps} t{how.tiles} f{how.flight} r{how.resident}{kind}"


def lines_of(paths: Sequence[Path]) -> str:
    """`backends/fused/measured.csv` with what `--json` wrote; later files win."""
    known = {
        (*key, row.eights): (*row.shape, *map(int, row.held), row.delay, f"{row.time:.2f}")
        for key, rows in measured.table().items()
        for row in rows
    }
    columns = *measured.SHAPE, *measured.HELD, "delay"
    for path in paths:
        here: dict[tuple[str | int, ...], list[tuple[float, dict[str, int]]]] = {}
        for row in json.loads(path.read_text())["rows"]:
            how, gates = row["how"], len(trace(getattr(cells, row["cell"])).gates)
            size = tiles.SIZES[row["dtype"]]
            read = row.get("multiplied", size)
            mask = row.get("mask", measured.PLAIN)
            key = row["kind"], mask, gates, size, read, how["units"], -(-row["B"] // 8)
            here.setdefault(key, []).append((row["us"], how))
        for key, tried in here.items():
            time, how = fastest(tried)
            known[key] = (*(how[name] for name in columns), f"{time:.2f}")
    lines = [
        (*measured.SIZE, *columns, "us"),
        *((*key, *row) for key, row in sorted(known.items())),
    ]
    return "".join(",".join(map(str, line)) + "\n" for line in lines)


def fastest(tried: Sequence[tuple[float, How]]) -> tuple[float, How]:
    """Of kernels as good as even the one tried first."""
    least = min(time for time, _ in tried)
    return next(one for one in tried if one[0] <= EVEN * least)


def write(path: Path, found: dict[tuple[Any, ...], list[tuple[float, Tiles]]]) -> None:
    """All times, those of one row in the order in which they were taken."""
    kept = [
        {
            **dict(zip(("cell", "dtype", "H", "B", "kind", "mask"), key)),
            "us": round(time, 3),
            "multiplied": how.multiplied(key[1]),
            "how": {name: int(getattr(how, name, 1)) for name in KEPT},
        }
        for key, all_ in found.items()
        for time, how in all_
    ]
    lines = ",\n".join(map(json.dumps, kept))
    path.write_text(f'{{"machine": {json.dumps(machine())}, "rows": [\n{lines}\n]}}\n')


def main() -> None:
    """Compiles in parallel, then times one by one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", nargs="+", default=["lstm", "gru"])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=tiles.SIZES)
    parser.add_argument("--kind", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--mask", nargs="+", default=[measured.PLAIN], choices=measured.MASKS)
    parser.add_argument("--hidden", nargs="+", type=int, default=[64, 128, 256, 512, 1024])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument(
        "--most", type=int, default=8, help="kernels of a row, grids and others each"
    )
    parser.add_argument("--delays", action="store_true", help="of the plan's grids, and no more")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, nargs="+", metavar="JSON",
                        help="print measured.csv with these files, and time nothing")  # fmt: skip
    asked = parser.parse_args()
    if asked.table:
        print(lines_of(asked.table), end="")
        return
    if not torch.cuda.is_available():
        raise SystemExit("kernels are timed on a CUDA device, and torch finds none")
    capability = torch.cuda.get_device_capability()
    torch.zeros(1, device="cuda")
    rows = [
        (kind, mask, batch, job)
        for cell, dtype, hidden, batch, kind, mask in product(
            asked.cell, asked.dtype, asked.hidden, asked.batch, asked.kind, asked.mask
        )
        for job in candidates(
            Job(cell, dtype, capability, tiles.Forward(8, 1, 1, 1, 1, 1, 0)), kind, mask, hidden,
            batch, asked.most,
        )[: 1 if asked.delays else None]
        if not asked.delays or job.how.clusters > 1
    ]  # fmt: skip
    found: dict[tuple[Any, ...], list[tuple[float, Tiles]]] = {}

    def time_all(rows: list[tuple[str, str, int, Job]], delays: Sequence[int]) -> None:
        for kind, mask, batch, job in rows:
            key = job.cell, job.dtype, job.how.units, batch, kind, mask
            try:
                time = timed(job, batch, delays)
            except OpenRNNError as error:  # of one kernel; the others' times count all the same
                print(error)
                continue
            if time is not None:
                found.setdefault(key, []).append(time)
        if asked.json:
            write(asked.json, found)

    with ProcessPoolExecutor(usable_cores(), get_context("spawn")) as pool:
        jobs = list(dict.fromkeys(job for *_, job in rows))
        ready = dict(zip(jobs, pool.map(compiled, jobs, chunksize=2)))
        held = [
            (kind, mask, batch, job._replace(how=ready[job]))
            for kind, mask, batch, job in rows
            if ready[job]
        ]
        time_all(held, DELAYS)
        best = {} if asked.delays else found
        rows = [
            (*key[4:], key[3], job)
            for key, tried in best.items()
            for _, how in sorted(tried, key=itemgetter(0))[:2]
            for job in variants(Job(key[0], key[1], capability, how))
            if job.how not in [how for _, how in tried]
        ]
        jobs = list(dict.fromkeys(job for *_, job in rows))
        fits = dict(zip(jobs, pool.map(unspilled, jobs, chunksize=4)))
        time_all([row for row in rows if fits[row[-1]]], ())
    sizes = "cell", "dtype", "H", "B", "kernel", "mask"
    table = Table(*sizes, "plan's us", "tiles", "best us", "tiles")
    for key, all_ in found.items():
        (first, picked), (least, best) = all_[0], fastest(all_)
        shown = (f"{first:.2f}", said(picked), f"{least:.2f}", said(best))
        table.add_row(*(str(part) for part in (*key, *shown)))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
