"""The loops of a problem and of a layer, as kernels are ranked and compiled for them."""

import torch

from openrnn.backends.base import traced
from openrnn.backends.fused.layer import LayerKernels, LoopOptions, measured_names
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


def loop_of_layer(layer: LayerKernels, options: LoopOptions, batch: int) -> plan.LoopRequest:
    """A loop of a layer on its device, with those of its options by which kernels are ranked."""
    about = torch.cuda.get_device_properties(layer.device)
    return plan.LoopRequest(
        kind=options.kind, option_names=measured_names(options), cell=layer.cell,
        dtype=layer.dtype_name, hidden=layer.hidden, batch=batch,
        capability=(about.major, about.minor), processors=about.multi_processor_count,
        padded_to=layer.units,
    )  # fmt: skip
