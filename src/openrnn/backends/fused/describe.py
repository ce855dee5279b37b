"""How a problem would run, in words: configuration, registers and expected time of each kernel."""

from openrnn.backends.base import traced
from openrnn.backends.fused import kernels, schedules
from openrnn.spec import Problem
from openrnn.tuning import plan
from openrnn.tuning.limits import Limits


def describe(problem: Problem) -> list[str]:
    """A line for the forward kernel and, with gradients, one for the backward kernel.

    Compiles them, unless the cache has them; B is taken as 1 where it is not known.
    """
    spec, batch = problem.spec, problem.batch or 1
    if problem.capability is None:
        return []
    cell, dtype = traced(spec), str(problem.dtype).removeprefix("torch.")
    kinds = plan.kinds(spec, problem.grad, problem.lengths, problem.reset, problem.return_states)
    lines = []
    for kind, flags in kinds:
        batch_tiles, again = (batch + 7) // 8, "save" in flags and spec.recompute != "none"
        name = f"{kind} again" if again else kind
        found = kernels.best(
            kind, cell, dtype, spec.hidden_size, batch_tiles, flags, problem.capability,
            processors=problem.processors,
        )  # fmt: skip
        if found is None:  # a problem that is refused
            continue
        made, config = found
        groups = -(-batch // config.rows)
        blocks = f"cluster of {config.cluster} blocks" if config.cluster > 1 else "block"
        if config.clusters > 1:
            blocks = f"grid of {config.clusters} x {blocks}"
        limits = Limits.of(problem.capability, problem.processors)
        time = plan.us_of(cell, dtype, config, batch, limits)
        warps = " whose warps multiply four at a time" if config.wgmma else ""
        products = ", products of float16" if config.half_operands else ""
        spilled = f" and {made.resources.spilled} bytes spilled" if made.resources.spilled else ""
        lines.append(
            f"{name}: {groups} x {blocks} of {config.threads} threads{warps}, "
            f"{config.rows} rows each, {made.resources.registers} registers{spilled}{products}, "
            f"{time:.2f} us a step by the model"
        )
        steps = problem.steps or 0
        front = schedules.wavefront_of(problem, kind, flags, steps, batch, True) if steps else None
        if front is not None:
            lines.append(
                f"{name} as a wavefront: {spec.num_layers} layers at the same time, each "
                f"{-(-steps // front.chunks)} steps behind the one before; {front.us:,.0f} us by "
                f"the model, layer by layer {front.in_turn:,.0f}"
            )
    return lines
