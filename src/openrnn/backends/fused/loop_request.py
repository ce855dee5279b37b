"""The loops of a problem, as kernels are ranked and compiled for them."""

from openrnn.backends.base import traced
from openrnn.spec import Problem
from openrnn.tuning import plan


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
        processors=problem.processors,
    )  # fmt: skip
