"""Which stacks run as a wavefront, and which in one launch, by values alone.

See `tuning/wavefront.py` for the cut, `tuning/one_launch.py` for the launch. `stack_chunks.py`
makes chunks of what is chosen here, if the device loads a kernel for it.
"""

from collections.abc import Iterator

from openrnn.backends.base import traced
from openrnn.backends.fused.loop_request import units_of_problem
from openrnn.codegen.config import KernelConfig, saved_values
from openrnn.codegen.cuda import planes
from openrnn.codegen.tiles import whole_tiles
from openrnn.spec import Problem
from openrnn.tuning import chunks, one_launch, plan, wavefront
from openrnn.tuning.stack_times import Stack


def wavefront_refusal(problem: Problem, kind: str, steps: int, batch: int) -> str | None:
    """Why the layers of a stack do not run as a wavefront; None where they may.

    Args:
        kind: of the loops, "forward" or "backward".
    """
    reason = _shared_refusal(problem)
    if reason is None and problem.grad and kind == "backward":
        refusal = _recompute_refusal if _recomputes(problem) else _chunk_refusal
        reason = refusal(problem, steps, batch)
    if reason is None and problem.reset_state:
        return (
            "states for resets are given: backward adds up their gradients in one launch, and "
            "forward in chunks is not built for them"
        )
    return reason


def _shared_refusal(problem: Problem) -> str | None:
    """Why the layers of a stack run one after the other; None where they need not."""
    spec = problem.spec
    if spec.num_layers == 1:
        return "there is one layer"
    if spec.bidirectional:
        return "a layer of two directions needs all steps of the one below"
    if spec.input_mode != "linear":
        return f"input_mode {spec.input_mode!r} has no product of layer 0 to cut"
    return None


def _chunk_refusal(problem: Problem, steps: int, batch: int) -> str | None:
    """The same for backward, where even gate gradients of the shortest chunk are too large."""
    shortest = min(steps, wavefront.LEAST_STEPS)
    bytes_ = shortest * _step_bytes(problem, batch)
    if bytes_ <= chunks.LARGEST_WAVEFRONT:
        return None
    return _too_large(f"gate gradients of {shortest} steps", bytes_)


def _recompute_refusal(problem: Problem, steps: int, batch: int) -> str | None:
    """The same for backward that runs forward again, chunk by chunk."""
    if kept_chunks(problem, steps, batch) == 1:
        return "recompute='gates' has one chunk of time"
    spec, cell = problem.spec, traced(problem.spec)
    longest = min(steps, chunks.most_recomputed(*_recompute_sizes(problem, batch)))
    # gate gradients, the input side of all gates and y; saved activations are of whole tiles
    values = (len(planes(cell)) + len(cell.gates) + 1) * batch
    values += saved_values(cell) * whole_tiles(batch)
    unit_bytes = units_of_problem(problem, batch) * problem.dtype.itemsize
    bytes_ = spec.num_layers * longest * values * unit_bytes
    return None if bytes_ <= chunks.LARGEST_WAVEFRONT else _too_large("chunks", bytes_)


def _step_bytes(problem: Problem, batch: int) -> int:
    """Bytes of the gate gradients of one step of all layers."""
    return problem.spec.num_layers * batch * _row_bytes(problem, batch)


def _row_bytes(problem: Problem, batch: int) -> int:
    """Bytes of the gate gradients of one step and row of a layer."""
    values = len(planes(traced(problem.spec))) * units_of_problem(problem, batch)
    return values * problem.dtype.itemsize


def _recompute_sizes(problem: Problem, batch: int) -> tuple[int, int]:
    return chunks.recompute_sizes(problem.spec, batch, _row_bytes(problem, batch))


def _too_large(what: str, bytes_: int) -> str:
    most = chunks.LARGEST_WAVEFRONT >> 20
    return f"its {what} would take {bytes_ >> 20} MiB at once, at most {most}"


def _recomputes(problem: Problem) -> bool:
    return problem.grad and problem.spec.recompute == "gates"


def _runs_again(problem: Problem, kind: str, option_names: plan.OptionNames) -> bool:
    """Whether backward runs these loops, forward's, again: its own wavefront decides how."""
    return kind == "forward" and "save" in option_names and _recomputes(problem)


def kept_chunks(problem: Problem, steps: int, batch: int) -> int:
    """How many chunks of time forward keeps states between, for recompute; 1 without it."""
    if not _recomputes(problem) or problem.reset_state:
        return 1
    return chunks.for_recompute(steps, *_recompute_sizes(problem, batch))


def stack_refusal(problem: Problem, kind: str, steps: int, batch: int) -> str | None:
    """Why one launch does not run all layers; None where it may, if there is a kernel.

    Args: see `wavefront_refusal`.
    """
    if problem.drops:
        return "dropout between layers"
    if kept_chunks(problem, steps, batch) > 1:
        return "recompute='gates' keeps the states between chunks of time"
    reason = _shared_refusal(problem)
    if reason is None and kind == "backward":
        if _recomputes(problem):
            return "recompute='gates' runs forward again before each loop of backward"
        bytes_ = steps * _step_bytes(problem, batch)
        if bytes_ > chunks.LARGEST_WAVEFRONT:
            return _too_large("gate gradients", bytes_)
    return reason


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
    refusal = stack_refusal(problem, kind, steps, batch)
    if refusal is not None or not steps or _runs_again(problem, kind, option_names):
        return None
    stack = _stack(problem, kind, option_names, steps, batch, wanted)
    if stack is None:
        return None
    in_chunks = wavefront_refusal(problem, kind, steps, batch) is None
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
    asked = problem.spec.wavefront
    if asked == 0:
        return None
    refusal = wavefront_refusal(problem, kind, steps, batch)
    if refusal is not None or not steps or _runs_again(problem, kind, option_names):
        return None
    stack = _stack(problem, kind, option_names, steps, batch, wanted)
    if stack is None:
        return None
    # 1 asks for one launch: where there is none the model chooses
    chunk, kept = None if asked == 1 else asked, kept_chunks(problem, steps, batch)
    if _recomputes(problem) and kind == "backward":
        again = _stack(problem, "forward", (*option_names, "save"), steps, batch, wanted)
        if again is None:
            return None
        return wavefront.best_with_recompute(stack, again, steps, batch, kept, chunk is not None)
    most = steps  # of a chunk
    if stack.by_chunk:
        most = chunks.LARGEST_WAVEFRONT // _step_bytes(problem, batch)
    return wavefront.best(stack, steps, batch, chunk, kept, -(-steps // most))


def _stack(
    problem: Problem, kind: str, option_names: plan.OptionNames, steps: int, batch: int,
    wanted: bool,
) -> Stack | None:  # fmt: skip
    spec = problem.spec
    if problem.capability is None:
        return None
    large = steps * _step_bytes(problem, batch) > chunks.LARGEST_WAVEFRONT
    by_chunk = kind == "backward" and (large or _recomputes(problem))
    of_weights = 2 * spec.hidden_size if kind == "backward" and wanted else 0
    return Stack(
        kind=kind, option_names=option_names, cell=traced(spec), dtype=problem.dtype_name,
        hidden=spec.hidden_size, units=units_of_problem(problem, batch), layers=spec.num_layers,
        columns=spec.hidden_size + (of_weights if by_chunk else 0),
        after=0 if by_chunk else of_weights, by_chunk=by_chunk,
        capability=problem.capability, processors=problem.processors,
    )  # fmt: skip
