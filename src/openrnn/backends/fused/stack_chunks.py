"""The chunks of a stack whose layers run at the same time: in one launch, or as a wavefront.

`stack_choice.py` says which of these is tried; the kernel that the device loads decides.
"""

from dataclasses import replace

import torch

from openrnn.backends.fused import kernels, prepared, stack_choice
from openrnn.backends.fused.layer import LoopOptions, measured_names
from openrnn.backends.fused.schedule_key import ScheduleKey
from openrnn.native.side_stream import has_launch_events
from openrnn.schedule import Chunking
from openrnn.spec import Problem
from openrnn.tuning import chunks, plan
from openrnn.tuning.one_launch import StackPlan
from openrnn.tuning.wavefront import Wavefront

Chunkings = tuple[tuple[Chunking, ...], ...]  # of each layer, of each direction


def fills_of(kind: str, loop: prepared.PreparedLoop) -> frozenset[str]:
    """`Chunking.fills` of one loop: its kind, if it polls."""
    return frozenset({kind} if loop.polls else ())


def _with_device(key: ScheduleKey) -> Problem:
    """The problem as `explain` is given it: with its device and what its call passes."""
    about = torch.cuda.get_device_properties(key.device)
    return replace(
        key.call_problem, capability=(about.major, about.minor),
        processors=about.multi_processor_count,
    )  # fmt: skip


def layers_at_once(
    key: ScheduleKey, options: LoopOptions, wanted: bool, again: LoopOptions | None = None
) -> Chunkings | None:
    """The chunks of a stack whose layers run at the same time; None: one after the other.

    Args:
        options: of the loops.
        wanted: gradients of weights are.
        again: of forward's loops where backward runs them once more.
    """
    if key.spec.num_layers == 1:
        return None
    problem, option_names = _with_device(key), measured_names(options)
    for way in stack_choice.ways(problem, options.kind, option_names, key.steps, key.batch, wanted):
        if isinstance(way, StackPlan):
            chunkings = in_one_launch(key, problem, options, wanted)
        else:
            chunkings = in_wavefront(key, options, way, wanted, again)
        if chunkings is not None:
            return chunkings
    return None


def in_one_launch(
    key: ScheduleKey, problem: Problem, options: LoopOptions, wanted: bool
) -> Chunkings | None:
    """All steps of each layer, in the kernel that is loaded; None where there is none to take.

    Args:
        problem: with its device; the others: see `layers_at_once`.
    """
    layers = key.spec.num_layers
    try:
        loop = prepared.loop_for(key.layer(0, 0), key.batch, options, 1, layers)
    except kernels.NoKernelError:
        return None
    launch = stack_choice.stack_of(
        problem, options.kind, measured_names(options), key.steps, key.batch, wanted, loop.config
    )
    if launch is None:
        return None
    return ((Chunking((0, key.steps), mode="one_launch"),),) * layers


def in_wavefront(
    key: ScheduleKey, options: LoopOptions, way: Wavefront, wanted: bool,
    again: LoopOptions | None = None,
) -> Chunkings | None:  # fmt: skip
    """The chunks of a wavefront; None where the device loads no kernel for it.

    Args:
        way: the wavefront by the model; the others: see `layers_at_once`.
    """
    layer = key.layer(0, 0)
    try:
        loop = prepared.loop_for(layer, key.batch, options, way.loops)
        other = loop if again is None else prepared.loop_for(layer, key.batch, again, way.loops)
    except kernels.NoKernelError:
        return None
    # the kernel that was loaded may be another than the first of the ranking
    resident = loop.kernel.max_clusters
    several = way.loops > 1 and plan.holds(resident, loop.config, key.batch, way.loops)
    if (loop.polls and not several) or loop.config.reads_r:
        return None
    if again is not None and (loop.polls or other.polls or other.config.reads_r):
        return None
    if key.recompute:
        # chunks must end where forward keeps the states for those of backward
        kept = layer.kept_chunks(key.steps, key.batch)
        if way.chunks % kept or (again is not None and way.chunks != kept):
            return None
    chunking = Chunking(
        chunks.even(way.chunks, key.steps),
        overlap=wanted and not way.by_chunk and way.loops == 1 and has_launch_events(),
        by_chunk=way.by_chunk, mode="wavefront", loops=way.loops,
        fills=fills_of(options.kind, loop),
    )  # fmt: skip
    return ((chunking,),) * key.spec.num_layers
