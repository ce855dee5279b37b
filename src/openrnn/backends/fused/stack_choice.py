"""Which stacks run as a wavefront, and which in one launch, by values alone.

See `tuning/wavefront.py` for the cut, `tuning/one_launch.py` for the launch. `stack_chunks.py`
makes chunks of what is chosen here, if the device loads a kernel for it.
"""

from collections.abc import Iterator

from openrnn.backends.base import traced
from openrnn.backends.fused.loop_request import units_of_problem
from openrnn.codegen.config import KernelConfig
from openrnn.codegen.cuda import planes
from openrnn.spec import Problem
from openrnn.tuning import chunks, one_launch, plan, wavefront
from openrnn.tuning.stack_times import Stack


def wavefront_refusal(problem: Problem, steps: int, batch: int) -> str | None:
    """Why the layers of a stack do not run as a wavefront; None where they may."""
    reason = _shared_refusal(problem, steps, batch)
    if reason is None and problem.reset_state:
        return (
            "states for resets are given: backward adds up their gradients in one launch, and "
            "forward in chunks is not built for them"
        )
    return reason


def _shared_refusal(problem: Problem, steps: int, batch: int) -> str | None:
    """Why the layers of a stack run one after the other; None where they need not."""
    spec = problem.spec
    if spec.num_layers == 1:
        return "there is one layer"
    if spec.bidirectional:
        return "a layer of two directions needs all steps of the one below"
    if spec.input_mode != "linear":
        return f"input_mode {spec.input_mode!r} has no product of layer 0 to cut"
    if problem.grad and spec.recompute == "gates":
        return "recompute='gates' has time chunks of its own"
    values = len(planes(traced(spec))) * units_of_problem(problem, batch)
    bytes_ = spec.num_layers * steps * batch * values * problem.dtype.itemsize
    if problem.grad and bytes_ > chunks.LARGEST_WAVEFRONT:
        most = chunks.LARGEST_WAVEFRONT >> 20
        return f"its gate gradients would take {bytes_ >> 20} MiB at once, at most {most}"
    return None


def stack_refusal(problem: Problem, steps: int, batch: int) -> str | None:
    """Why one launch does not run all layers; None where it may, if there is a kernel."""
    if problem.drops:
        return "dropout between layers"
    return _shared_refusal(problem, steps, batch)


def ways(
    problem: Problem, kind: str, option_names: plan.OptionNames, steps: int, batch: int,
    wanted: bool,
) -> Iterator[one_launch.StackPlan | wavefront.Wavefront]:  # fmt: skip
    """How layers of a stack may run at the same time, in the order in which this is tried.

    Where the device has no kernel for one way, the next one follows; after the last one layers run
    one after the other.

    Args: see `wavefront_of`.
    """
    launch = stack_of(problem, kind, option_names, steps, batch, wanted)
    if launch is not None:
        yield launch
    chunked = wavefront_of(problem, kind, option_names, steps, batch, wanted)
    if chunked is not None:
        yield chunked


def stack_of(
    problem: Problem, kind: str, option_names: plan.OptionNames, steps: int, batch: int,
    wanted: bool, loaded: KernelConfig | None = None,
) -> one_launch.StackPlan | None:  # fmt: skip
    """The launch that runs all layers of a problem whose device is known; None: no such launch.

    Args: see `wavefront_of`, and `one_launch.best` for `loaded`.
    """
    if stack_refusal(problem, steps, batch) is not None or not steps:
        return None
    stack = _stack(problem, kind, option_names, batch, wanted)
    if stack is None:
        return None
    in_chunks = wavefront_refusal(problem, steps, batch) is None
    return one_launch.best(stack, steps, batch, problem.spec.wavefront, in_chunks, loaded)


def wavefront_of(
    problem: Problem, kind: str, option_names: plan.OptionNames, steps: int, batch: int,
    wanted: bool,
) -> wavefront.Wavefront | None:  # fmt: skip
    """The wavefront of a problem whose device is known; None: layer by layer.

    Args:
        kind, option_names: of the loops.
        wanted: gradients of weights are.
    """
    if (
        problem.spec.wavefront == 0
        or not steps
        or wavefront_refusal(problem, steps, batch) is not None
    ):
        return None
    stack = _stack(problem, kind, option_names, batch, wanted)
    # 1 asks for one launch: where there is none the model chooses
    chunk = None if problem.spec.wavefront == 1 else problem.spec.wavefront
    return None if stack is None else wavefront.best(stack, steps, batch, chunk)


def _stack(
    problem: Problem, kind: str, option_names: plan.OptionNames, batch: int, wanted: bool
) -> Stack | None:
    spec = problem.spec
    if problem.capability is None:
        return None
    return Stack(
        kind=kind, option_names=option_names, cell=traced(spec), dtype=problem.dtype_name,
        hidden=spec.hidden_size, units=units_of_problem(problem, batch), layers=spec.num_layers,
        columns=spec.hidden_size,
        after=2 * spec.hidden_size if kind == "backward" and wanted else 0,
        capability=problem.capability, processors=problem.processors,
    )  # fmt: skip
