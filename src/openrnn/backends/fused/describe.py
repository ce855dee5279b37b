"""How a problem would run, in words: configuration, registers and expected time of each kernel."""

from dataclasses import replace
from functools import partial
from itertools import count

from openrnn import schedule
from openrnn.backends.base import Needs, traced
from openrnn.backends.fused import kernels, schedules, stack_choice
from openrnn.backends.fused.loop_request import loop_of, units_of_problem
from openrnn.backends.fused.schedule_key import ScheduleKey
from openrnn.codegen.cluster_stack_config import ClusterStackConfig
from openrnn.codegen.config import StepwiseBackwardConfig, StepwiseForwardConfig
from openrnn.codegen.cuda import planes
from openrnn.codegen.multicast_config import MulticastConfig
from openrnn.codegen.tiles import whole_tiles
from openrnn.native import nvrtc
from openrnn.params import module_slots
from openrnn.spec import Problem
from openrnn.tuning import both_directions, chunks, overlap, plan, single_step
from openrnn.tuning.wavefront import Wavefront


def describe(problem: Problem) -> list[str]:
    """A line for the forward kernel and, with gradients, one for the backward kernel.

    Compiles them, unless the cache has them; B is taken as 1 where it is not known.
    """
    spec = problem.spec
    if problem.capability is None:
        return []
    masks = problem.lengths, problem.reset, problem.return_states, problem.reset_state
    lines: list[str] = []
    for kind, option_names in plan.kinds(spec, problem.grad, *masks):
        if kind == "backward" and problem.reset_state and "reset_state" not in option_names:
            continue  # for calls that do not want gradients of reset states
        if single := _of_step(problem, kind):
            lines += single
            continue
        again = "save" in option_names and spec.recompute != "none"
        line = _of_loops(problem, f"{kind}{' again' if again else ''}: ", kind, option_names, 1)
        if line:  # else the problem is refused
            # what runs again is part of backward, and of the times in its lines
            lines += line if again else [*line, *_of_several(problem, kind, option_names)]
    return lines


def listed(key: ScheduleKey) -> list[str]:
    """The operations of a call, then those of its backward if it has one, a line each."""
    of_backward: schedule.Schedule | None = None
    if key.problem.grad:
        states, params = (True,) * len(key.spec.states), (True,) * len(module_slots(key.spec))
        _, of_backward = schedules.backward(
            key, Needs(True, states, params, states if key.reset_states else ())
        )
    return schedule.show_call(schedules.forward(key), of_backward)


def _compiled(
    problem: Problem, kind: str, option_names: plan.OptionNames, loops: int, layers: int
) -> tuple[nvrtc.Binary, kernels.LoopConfig] | None:
    """The kernel of a loop, compiled; None where there is none."""
    if problem.capability is None:
        return None
    loop = loop_of(problem, kind, option_names, problem.batch or 1)
    return kernels.best(loop, loops=loops, layers=layers)


def _of_loops(
    problem: Problem, head: str, kind: str, option_names: plan.OptionNames, loops: int
) -> list[str]:
    """A line for a kernel of which the device holds so many loops at once, if there is one."""
    kernel = _compiled(problem, kind, option_names, loops, 1)
    return [] if kernel is None else [head + _of_kernel(problem, kind, option_names, *kernel)]


def _of_kernel(
    problem: Problem, kind: str, option_names: plan.OptionNames, made: nvrtc.Binary,
    config: kernels.LoopConfig,
) -> str:  # fmt: skip
    """A kernel of a problem whose device is known: blocks, registers and expected time."""
    batch = problem.batch or 1
    loop = loop_of(problem, kind, option_names, batch)
    cell, dtype, limits = loop.cell, loop.dtype, loop.limits
    time = plan.microseconds_of(cell, dtype, config, batch, limits)
    registers = _registers(made)
    padded = config.units > whole_tiles(problem.spec.hidden_size)
    padding = f", {config.units} units with padding" if padded else ""
    if isinstance(config, StepwiseForwardConfig | StepwiseBackwardConfig):
        held = next((tried for tried in plan.ranked(loop) if not tried.stepwise), None)
        why = "no kernel holds R"
        if held is not None:
            us = plan.microseconds_of(cell, dtype, held, batch, limits)
            part = "a part of " if held.streamed_fragments else ""
            why = f"{us:.2f} with a kernel that holds {part}R"
        return (
            f"each step a GEMM and a launch of {config.blocks(batch)} blocks of "
            f"{config.threads} threads, {registers}{padding}, {time:.2f} us a step by the model; "
            f"{why}"
        )
    groups = -(-batch // config.rows)
    blocks = f"cluster of {config.cluster} blocks" if config.cluster > 1 else "block"
    if isinstance(config, ClusterStackConfig):
        blocks = f"{config.layers} layers x {blocks}"
    elif config.is_cooperative:
        blocks = f"grid of {config.clusters} x {blocks}"
    warps = " whose warps multiply four at a time" if config.wgmma else ""
    products = ", products of float16" if config.half_operands else ""
    if config.streamed_fragments:
        share = config.streamed_fragments / config.fragments(cell, dtype)
        products += f", {share:.0%} of R read from memory in each step"
    if isinstance(config, MulticastConfig):
        products += f", {config.operand} by TMA"
        if config.k_parts > 1:
            way = "shared memory" if config.parts_in_cluster else "L2"
            products += f", sums of {config.k_parts} blocks through {way}"
    products += padding
    if isinstance(config, ClusterStackConfig):
        products += f", half of the warps multiply {config.polled}"
    return (
        f"{groups} x {blocks} of {config.threads} threads{warps}, "
        f"{config.rows} rows each, {registers}{products}, "
        f"{time:.2f} us a step by the model"
    )


def _of_several(problem: Problem, kind: str, option_names: plan.OptionNames) -> list[str]:
    """Lines where both directions or several layers run at once, or layers were to and do not."""
    spec, steps, batch = problem.spec, problem.steps or 0, problem.batch or 1
    if not steps or problem.capability is None:
        return []
    refused: list[str] = []
    if spec.wavefront == 1:
        reason = stack_choice.stack_refusal(problem, kind, steps, batch)
        reason = reason or "no kernel holds all layers"
        refused = [f"{kind} not in one launch, in spite of wavefront=1: {reason}"]
    elif spec.bidirectional and spec.wavefront:
        why = stack_choice.wavefront_refusal(problem, kind, steps, batch)
        refused = [_in_spite(problem, kind, why)]
    if spec.bidirectional:
        loop_counts = both_at_once(problem, kind, option_names, steps, batch)
        if 2 not in loop_counts:
            return refused
        where = " in some layers" if len(loop_counts) > 1 else ""
        head = (
            f"{kind} of both directions at once{where}, unless products beside one loop gain more: "
        )
        return [*_of_loops(problem, head, kind, option_names, 2), *refused]
    measured_names = plan.measured_options(kind, option_names)
    for way in stack_choice.ways(problem, kind, measured_names, steps, batch, True):
        if isinstance(way, Wavefront):
            return [*refused, *_of_wavefront(problem, kind, option_names, way)]
        # none: no kernel of it compiles, or the one that does is slower than the next way
        if lines := _of_launch(problem, kind, option_names, steps, batch):
            return lines
    if spec.wavefront in (None, 0, 1):
        return refused
    why = stack_choice.wavefront_refusal(problem, kind, steps, batch)
    if why is None:
        first, *_ = plan.ranked(loop_of(problem, kind, measured_names, batch))
        why = "its kernel takes the whole device, which holds two of no other"
        why = "each step is a GEMM and a launch" if first.stepwise else why
        if kind == "backward" and spec.recompute != "none":
            why = "recompute='gates' has a wavefront only of loops in clusters"
    return [_in_spite(problem, kind, why)]


def _of_launch(
    problem: Problem, kind: str, option_names: plan.OptionNames, steps: int, batch: int
) -> list[str]:
    """A line for the launch of all layers, if a call takes it."""
    layers = problem.spec.num_layers
    kernel = _compiled(problem, kind, option_names, 1, layers)
    if kernel is None:
        return []
    measured_names = plan.measured_options(kind, option_names)
    launch = stack_choice.stack_of(problem, kind, measured_names, steps, batch, True, kernel[1])
    if launch is None:
        return []
    return [
        f"{kind} of {layers} layers in one launch, each layer behind the one before: "
        f"{_of_kernel(problem, kind, option_names, *kernel)}; "
        f"{launch.us:,.0f} us by the model, else {launch.otherwise:,.0f}"
    ]


def _of_wavefront(
    problem: Problem, kind: str, option_names: plan.OptionNames, way: Wavefront
) -> list[str]:
    """A line for a wavefront and, where several loops run at a time, one for their kernel."""
    layers, steps = problem.spec.num_layers, problem.steps or 0
    again = kind == "backward" and problem.spec.recompute != "none"
    name = f"{kind} with forward again" if again else kind
    several = f"{way.loops} of " if 1 < way.loops < layers else ""
    held = ", which holds the gate gradients of one chunk" if way.by_chunk else ""
    line = (
        f"{name} as a wavefront: {several}{layers} layers at the same time, each "
        f"{-(-steps // way.chunks)} steps behind the one before{held}; {way.us:,.0f} us by "
        f"the model, layer by layer {way.in_turn:,.0f}"
    )
    head = f"{name} of the wavefront: "
    more = _of_loops(problem, head, kind, option_names, way.loops) if way.loops > 1 else []
    return [line, *more]


def _in_spite(problem: Problem, kind: str, reason: str | None) -> str:
    return f"{kind} layer by layer, in spite of wavefront={problem.spec.wavefront}: {reason}"


def both_at_once(
    problem: Problem, kind: str, option_names: plan.OptionNames, steps: int, batch: int
) -> set[int]:  # fmt: skip
    """`both_directions.loops_to_fit` of all layers of a problem whose device is known.

    Products that would run beside loops in turn are not counted. All gradients are wanted, or all
    but that of x.
    """
    spec = problem.spec
    if problem.capability is None or (problem.grad and spec.recompute == "gates"):
        return set()
    row = len(planes(traced(spec))) * units_of_problem(problem, batch) * problem.dtype.itemsize
    if not problem.reset_state and chunks.for_memory(steps, batch, row) > 1:
        return set()
    loop = loop_of(problem, kind, plan.measured_options(kind, option_names), batch)
    twice = both_directions.fits_twice(loop)
    products = _side_products(replace(problem, steps=steps, batch=batch), kind)
    return {both_directions.loops_to_fit(loop, steps, twice, beside=beside) for beside in products}


def _side_products(problem: Problem, kind: str) -> set[overlap.SideProducts]:
    """The products that may run beside both loops of each layer, and of the first without dx."""
    spec = problem.spec
    inputs = [spec.layer_input(layer) for layer in range(spec.num_layers)]
    above = [0] * spec.num_layers
    if kind == "backward":
        above = [*(columns + spec.output_size for columns in inputs[1:]), 0]
    each = set(map(partial(both_directions.side_products, problem), count(), inputs, above))
    if kind == "backward":
        each.add(both_directions.side_products(problem, 0, 0, above[0]))
    return each


def _of_step(problem: Problem, kind: str) -> list[str]:
    """Lines of the kernels, "forward" or "backward", of a single step; none where loops run."""
    batch, steps, reset_state = problem.batch or 1, problem.steps or 0, problem.reset_state
    capability = problem.capability
    if capability is None or not single_step.takes(problem, steps, batch, reset_state):
        return []
    if kind == "backward" and not single_step.differentiates(
        problem, steps, batch, True, reset_state
    ):
        return []

    def words(sizes: single_step.StepSizes, name: str) -> str:
        configs = single_step.configs(name, sizes, capability)
        arch = nvrtc.arch_of(capability)
        made, config = kernels.best_step(configs, traced(problem.spec), problem.dtype_name, arch)
        count = single_step.blocks(config, sizes.hidden, sizes.batch)
        kernel = f"{count} blocks of {config.threads} threads, {_registers(made)}"
        return _gemms(sizes) + kernel if name == "step_cell" else kernel

    every = single_step.step_sizes(problem, batch)
    if kind == "backward":  # reads no x
        return [f"backward of a single step: {words(every[0], 'step_backward')}"]
    lines: list[str] = []
    for sizes in every:
        several = len(every) > 1 and sizes.inputs
        which = f"forward of a single step{f' that reads {sizes.inputs} inputs' if several else ''}"
        usual = words(sizes, single_step.forward_kind(sizes, reset_state))
        lines.append(f"{which}: {usual}")
        if reset_state:  # so there is an h
            continue
        zeros = sizes._replace(has_h=False)
        from_zeros = words(zeros, single_step.forward_kind(zeros))
        if from_zeros != usual:
            lines.append(f"{which} without initial states: {from_zeros}")
    return lines


def _registers(made: nvrtc.Binary) -> str:
    spilled = f" and {made.resources.spilled} bytes spilled" if made.resources.spilled else ""
    return f"{made.resources.registers} registers{spilled}"


def _gemms(sizes: single_step.StepSizes) -> str:
    """The GEMMs before `step_cell`."""
    multiplied = [side for side, exists in (("x", sizes.inputs), ("h", sizes.has_h)) if exists]
    if not multiplied:
        return ""
    gemms = "GEMMs" if len(multiplied) > 1 else "a GEMM"
    return f"{gemms} of {' and '.join(multiplied)}, then "
