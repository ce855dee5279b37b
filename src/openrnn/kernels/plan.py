"""How one layer and direction runs at given sizes: threads, scratch, the head of its job."""

from dataclasses import dataclass

from openrnn.kernels import launch
from openrnn.kernels.layout import Layout


@dataclass(frozen=True, eq=False)
class Plan:
    """What a run needs beside tensors."""

    tasks: int
    scratch: int  # bytes of all tasks
    packs: bool
    head: tuple[int, ...]  # the fields of `kernels.jobs` up to DROP


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
) -> Plan:
    """The plan of a forward or backward run."""
    rows = layout.tile_rows(batch, threads)
    chunk = layout.chunk(steps, rows)
    tasks = layout.tasks(steps, batch, rows, threads)
    room = (
        layout.backward_scratch(rows, chunk)
        if backward
        else layout.forward_scratch(rows, chunk, kept)
    )
    packs = launch.packs(steps, batch) or (backward and not layout.plain)
    head = (
        steps, batch, layout.inputs, layout.units, layout.outputs,
        layout.padded, layout.columns, layout.width, layout.wide,
        reverse, rows, chunk, packs, skip, not ragged, room, sum(layout.sums) * layout.size, tasks,
    )  # fmt: skip
    return Plan(tasks, tasks * room, packs, head)
