"""How one layer and direction runs at given sizes: threads, and its job but for addresses."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from openrnn.kernels import jobs, launch
from openrnn.kernels.layout import Layout


@dataclass(frozen=True, eq=False)
class Plan:
    """What a run needs beside tensors; `job` is a template to be copied."""

    layout: Layout
    tasks: int
    scratch: int  # bytes of all tasks
    packs: bool
    job: Any


def plan(
    layout: Layout,
    steps: int,
    batch: int,
    threads: int,
    reverse: bool,
    skip: bool,
    kept: bool,
    backward: bool,
    states: int,
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
    packs = backward or launch.packs(steps, batch)
    job = np.zeros(jobs.TAIL + 8 * states, dtype=np.int64)
    job[: jobs.DROP] = (
        steps, batch, layout.inputs, layout.units, layout.outputs,
        layout.padded, layout.columns, layout.width, layout.wide,
        reverse, rows, chunk, packs, skip, 0, room, sum(layout.sums) * layout.size,
    )  # fmt: skip
    return Plan(layout, tasks, tasks * room, packs, job)
