"""The CUDA kernels of a network, compiled before the first call needs them."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from openrnn.backends.base import traced
from openrnn.backends.fused import kernels
from openrnn.backends.fused.copies import whole_pieces
from openrnn.backends.fused.describe import both_at_once
from openrnn.backends.fused.loop_request import loop_of, units_of_problem
from openrnn.backends.fused.stack_choice import stack_of, wavefront_of
from openrnn.native.nvrtc import Binary, arch_of
from openrnn.spec import Problem
from openrnn.tuning import measured, plan, single_step
from openrnn.tuning.units import LEAST_STEPS


def compiled(problem: Problem, batches: Iterable[int], reset_state: bool) -> set[Binary]:
    """The kernels of calls like this one, of these batch sizes and any T.

    Args:
        problem: with the capability of a device, and its multiprocessors if they are known.
        reset_state: calls give states after a reset, with and without their gradients.
    """
    spec, capability = problem.spec, problem.capability
    if capability is None:
        raise ValueError("a problem without the capability of a device")
    problem = replace(problem, reset_state=reset_state)
    name = problem.dtype_name
    arch, made = arch_of(capability), set[Binary]()
    plain = {("copy_rows", name), ("fill_flags", "float32")}
    several = set[tuple[str, int]]()  # names, and how many structs of arguments a launch has
    batches = tuple(batches)
    widths = spec.hidden_size, *map(spec.layer_input, range(spec.num_layers))
    pads = any(units_of_problem(problem, batch) > spec.hidden_size for batch in batches)
    if pads or any(whole_pieces(width, problem.dtype.itemsize) > width for width in widths):
        plain |= {("permute_weights", name)}  # pads R, and W_ih for long calls
    if problem.grad:
        plain |= {("permute_weights", name), ("reduce_bias_gradients", name)}
        if problem.dtype.itemsize == 2:  # the gradients of several chunks are summed in float32
            plain |= {("narrow_values", name), ("copy_rows", "float32")}
        plain |= {("dropout", name)} if spec.drops(True) else set()
    if problem.lengths:
        plain |= {("sort_lengths", "float32"), ("cut_lengths", "float32")}
    made |= {kernels.plain_binary(*kernel, arch) for kernel in plain}
    layers = spec.num_layers
    of_units = "permute_weights", 2 * layers - 1  # pads or transposes all matrices
    of_stack = {of_units, ("reduce_bias_gradients", layers)}
    of_stack |= {("copy_rows", 2 * layers - 2)} if layers > 2 else set()
    kinds = plan.kinds(
        spec, problem.grad, problem.lengths, problem.reset, problem.return_states, reset_state
    )
    for batch in batches:
        for kind, on in kinds:
            for loop, loops, at_once in _requests(problem, kind, on, batch):
                if at_once > 1:
                    several |= of_stack if kind == "backward" else set()
                    several |= {of_units} if loop.units > spec.hidden_size else set()
                kernel = kernels.best(loop, loops=loops, layers=at_once)
                if kernel is not None:
                    made.add(kernel[0])
        made.update(_of_steps(problem, batch))
    made |= {kernels.plain_binary(kernel, name, arch, structs) for kernel, structs in several}
    return made


def _requests(
    problem: Problem, kind: str, option_names: plan.OptionNames, batch: int
) -> Iterator[tuple[plan.LoopRequest, int, int]]:
    """The loops of calls of any T, each with how many run at once and layers of a launch."""
    loop, layers = loop_of(problem, kind, option_names, batch), problem.spec.num_layers
    yield loop, 1, 1
    if _several(problem, kind, option_names, batch):
        yield loop, 2, 1
    if _one_launch(problem, kind, option_names, batch):
        yield loop, 1, layers
    # units of short calls are padded to a multiple of 8 alone
    short = replace(problem, steps=LEAST_STEPS - 1)
    its_loop = loop_of(short, kind, option_names, batch)
    if its_loop != loop:
        yield its_loop, 1, 1
        if _one_launch(short, kind, option_names, batch):
            yield its_loop, 1, layers


LONG = 100  # steps of a call in which loops run at once
# and of others, which take another kernel as products beside both loops gain more or less
OTHERS = 200, 400, 800


def _several(problem: Problem, kind: str, option_names: plan.OptionNames, batch: int) -> bool:
    """Whether long calls run two loops at once in another kernel than one: see `schedules`."""
    spec = problem.spec
    if spec.bidirectional:
        return any(
            2 in both_at_once(problem, kind, option_names, steps, batch)
            for steps in (LONG, *OTHERS)
        )
    known = measured.knows(problem.capability or (0, 0), problem.processors)
    if spec.wavefront == 0 or not (spec.wavefront or known):
        return False
    # whether it pays by the model depends on T, so one that is asked for
    chunk = LONG if spec.wavefront in (None, 1) else spec.wavefront
    chunked = replace(problem, spec=spec.with_(wavefront=chunk))
    measured_names = plan.measured_options(kind, option_names)
    way = wavefront_of(chunked, kind, measured_names, LONG, batch, True)
    return way is not None and way.loops > 1


def _one_launch(problem: Problem, kind: str, option_names: plan.OptionNames, batch: int) -> bool:
    """Whether one launch runs all layers of calls of so many steps, or else of long ones."""
    measured_names = plan.measured_options(kind, option_names)
    every = (LONG, *OTHERS) if problem.steps is None else (problem.steps,)
    launches = (stack_of(problem, kind, measured_names, steps, batch, True) for steps in every)
    return any(launch is not None for launch in launches)


def _of_steps(problem: Problem, batch: int) -> Iterator[Binary]:
    """The kernels of single steps, if a batch of this size has some."""
    spec, capability = problem.spec, problem.capability
    reset_state = problem.reset_state
    if capability is None or not single_step.takes(problem, 1, batch, reset_state):
        return
    cell, name = traced(spec), problem.dtype_name
    every = single_step.step_sizes(problem, batch)
    if not reset_state:  # so there may be no h
        every += single_step.step_sizes(problem, batch, has_h=False)
    kinds = [(single_step.forward_kind(sizes, reset_state), sizes) for sizes in every]
    if problem.grad and single_step.differentiates(problem, 1, batch, False, reset_state):
        kinds.append(("step_backward", every[0]))
    for configs in {tuple(single_step.configs(*kind, capability)): None for kind in kinds}:
        yield kernels.best_step(configs, cell, name, arch_of(capability))[0]
