"""How one layer and direction runs at given sizes: threads, scratch, sizes as arguments."""

from dataclasses import dataclass

from openrnn.kernels.cpu import launch
from openrnn.kernels.cpu.args import BARRIER, LoopArgs, loop_args
from openrnn.kernels.cpu.host import HAS_SCHED_YIELD
from openrnn.kernels.cpu.layout import Layout
from openrnn.kernels.cpu.sharing import Sharing, sharing
from openrnn.memo import memo

_loop_args = memo(64)(loop_args)


@dataclass(frozen=True, eq=False)
class LoopPlan:
    """What a run needs beside tensors.

    Args:
        tasks: threads of a run; teams: of these threads, which share a tile each; often one thread.
        scratch: bytes of all teams.
        barriers: bytes of zeros for the barriers of teams.
        sizes: the arguments that follow from sizes alone.
    """

    tasks: int
    teams: int
    scratch: int
    barriers: int
    packs: bool
    sizes: LoopArgs

    def args(self) -> LoopArgs:
        """The arguments of a run, with nothing but sizes."""
        return type(self.sizes).from_buffer_copy(self.sizes)


def sharing_of(layout: Layout, backward: bool, steps: int, batch: int, threads: int) -> Sharing:
    """How a run's threads share its tiles here: only those of OpenMP can wait for each other."""
    shares = HAS_SCHED_YIELD and launch.openmp() is not None and layout.shares
    return sharing(layout, backward, steps, batch, threads, shares)


def plan(
    layout: Layout,
    purpose: str,
    steps: int,
    batch: int,
    threads: int,
    reverse: bool,
    x_gate: int | None,
    ragged: bool,
    pairs: bool = False,
) -> LoopPlan:
    """The plan of a run of the forward loop or, for purpose "backward", of the backward loop.

    Args:
        purpose: "inference", "training" (forward, which saves activations) or "backward".
        x_gate: without an input matrix the elements of x from a gate to the next, 0 where gates
            have the same; None with one.
        ragged: lengths are given.
        pairs: products are of bfloat16 pairs.
    """
    backward = purpose == "backward"
    rows, teams, size = sharing_of(layout, backward, steps, batch, threads)
    chunk = layout.chunk(steps, rows)
    room = (
        layout.backward_scratch(rows, chunk, size, pairs)
        if backward
        else layout.forward_scratch(rows, chunk, purpose == "training")
    )
    packs = pairs or launch.packs(steps, batch) or (backward and not layout.plain)
    tasks = teams * size
    states = 1 + layout.others
    sizes = _loop_args(states)(
        steps=steps,
        batch=batch,
        inputs=layout.inputs,
        units=layout.units,
        outputs=layout.outputs,
        padded=layout.padded,
        columns=layout.columns,
        h_width=layout.h_width,
        x_width=layout.x_width,
        widest=layout.widest,
        gates=layout.gates,
        states=states,
        vectors=layout.vectors,
        saved_sides=layout.saved_sides,
        summed=layout.summed,
        reverse=reverse,
        tile_rows=rows,
        chunk=chunk,
        packed=packs,
        skip=x_gate is not None,
        x_gate=x_gate or 0,
        overwrite=not ragged,
        tasks=tasks,
        team_size=size,
        scratch_bytes=room,
        sums_bytes=sum(layout.sums) * layout.size,
        rounded_bytes=layout.pairs_memory(chunk * rows, backward) if pairs else 0,
    )
    barriers = teams * BARRIER if size > 1 else 0
    return LoopPlan(tasks, teams, teams * room, barriers, packs, sizes)
