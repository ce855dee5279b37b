"""How one layer and direction runs at given sizes: threads, scratch, the first of its arguments."""

from dataclasses import dataclass

from openrnn.kernels.cpu import launch
from openrnn.kernels.cpu.host import COUNTER_STRIDE, HAS_SCHED_YIELD
from openrnn.kernels.cpu.layout import Layout


@dataclass(frozen=True, eq=False)
class LoopPlan:
    """What a run needs beside tensors.

    Args:
        tasks: threads of a run; teams: of these threads, which share a tile each; often one thread.
        scratch: bytes of all teams.
        counters: int64 zeros behind the kernel arguments, for the barriers of teams.
        head: the arguments of `kernels.cpu.args` from STEPS up to COUNTERS.
    """

    tasks: int
    teams: int
    scratch: int
    counters: int
    packs: bool
    head: tuple[int, ...]


def plan(
    layout: Layout,
    purpose: str,
    steps: int,
    batch: int,
    threads: int,
    reverse: bool,
    skip: bool,
    ragged: bool,
    resets: bool,
) -> LoopPlan:
    """The plan of a run of the forward loop or, for purpose "backward", of the backward loop.

    Args:
        purpose: "inference", "training" (forward, which keeps what backward reads) or "backward".
        skip: there is no input matrix; ragged: lengths are given.
    """
    backward = purpose == "backward"
    shares = HAS_SCHED_YIELD and launch.openmp() is not None and layout.shares(not (skip or resets))
    rows = layout.tile_rows(batch, threads, shares)
    chunk = layout.chunk(steps, rows)
    teams = layout.tasks(steps, batch, rows, threads)
    size = layout.team_size(batch, rows, threads) if shares else 1
    room = (
        layout.backward_scratch(rows, chunk)
        if backward
        else layout.forward_scratch(rows, chunk, purpose == "training")
    )
    packs = launch.packs(steps, batch) or (backward and not layout.plain)
    tasks = teams * size
    head = (
        steps, batch, layout.inputs, layout.units, layout.outputs,
        layout.padded, layout.columns, layout.width, layout.wide,
        layout.gates, layout.others, layout.vectors, layout.kept, layout.summed,
        reverse, rows, chunk, packs, skip, not ragged, room, sum(layout.sums) * layout.size, tasks,
        size,
    )  # fmt: skip
    counters = teams * COUNTER_STRIDE if size > 1 else 0
    return LoopPlan(tasks, teams, teams * room, counters, packs, head)
