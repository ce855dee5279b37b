"""How one layer and direction runs at given sizes: threads, scratch, the head of its job."""

from dataclasses import dataclass

from openrnn.kernels.cpu import launch
from openrnn.kernels.cpu.host import LINE, YIELDS
from openrnn.kernels.cpu.layout import Layout


@dataclass(frozen=True, eq=False)
class Plan:
    """What a run needs beside tensors.

    Args:
        tasks: threads of a run; groups: those, or crews of them, that share nothing.
        scratch: bytes of all groups.
        counters: zeros behind the job, where crews meet.
        head: the fields of `kernels.cpu.jobs` from STEPS up to COUNTERS.
    """

    tasks: int
    groups: int
    scratch: int
    counters: int
    packs: bool
    head: tuple[int, ...]


def plan(
    layout: Layout,
    steps: int,
    batch: int,
    threads: int,
    reverse: bool,
    skip: bool,
    kept: bool,
    backward: bool,
    ragged: bool,
    resets: bool,
) -> Plan:
    """The plan of a forward or backward run."""
    shares = YIELDS and launch.openmp() is not None and layout.shares(not (skip or resets))
    rows = layout.tile_rows(batch, threads, shares)
    chunk = layout.chunk(steps, rows)
    groups = layout.tasks(steps, batch, rows, threads)
    members = layout.crew(batch, rows, threads) if shares else 1
    room = (
        layout.backward_scratch(rows, chunk)
        if backward
        else layout.forward_scratch(rows, chunk, kept)
    )
    packs = launch.packs(steps, batch) or (backward and not layout.plain)
    tasks = groups * members
    head = (
        steps, batch, layout.inputs, layout.units, layout.outputs,
        layout.padded, layout.columns, layout.width, layout.wide,
        layout.gates, layout.others, layout.vectors, layout.kept, layout.summed,
        reverse, rows, chunk, packs, skip, not ragged, room, sum(layout.sums) * layout.size, tasks,
        members,
    )  # fmt: skip
    counters = groups * LINE if members > 1 else 0
    return Plan(tasks, groups, groups * room, counters, packs, head)
