"""The loops of a problem, as kernels are ranked and compiled for them."""

from openrnn.backends.base import traced
from openrnn.spec import Problem
from openrnn.tuning import measured, plan
from openrnn.tuning.units import is_short, units_of


def loop_of(
    problem: Problem, kind: str, option_names: plan.OptionNames, batch: int
) -> plan.LoopRequest:
    """A loop of any layer of a problem whose device is known."""
    if problem.capability is None:
        raise ValueError("a problem without the capability of a device")
    spec = problem.spec
    return plan.LoopRequest(
        kind=kind, option_names=option_names, cell=traced(spec), dtype=problem.dtype_name,
        hidden=spec.hidden_size, batch=batch, capability=problem.capability,
        processors=problem.processors, padded_to=units_of_problem(problem, batch),
    )  # fmt: skip


def units_of_problem(problem: Problem, batch: int) -> int:
    """The units of each layer of a problem whose device is known."""
    known = problem.capability is not None and measured.knows(
        problem.capability, problem.processors
    )
    short = is_short(problem.steps)
    return units_of(problem.spec, problem.dtype.itemsize, short, batch, known)
