"""The CUDA kernels of a network, compiled before the first call needs them."""

from collections.abc import Iterable, Iterator

from openrnn.backends.base import traced
from openrnn.backends.fused import kernels
from openrnn.native.nvrtc import Binary, arch_of
from openrnn.spec import Problem
from openrnn.tuning import plan, single_step


def compiled(problem: Problem, batches: Iterable[int], reset_state: bool) -> set[Binary]:
    """The kernels of calls like this one, of these batch sizes and any T.

    Args:
        problem: with the capability of a device, and its multiprocessors if they are known.
        reset_state: calls give states after a reset, with and without their gradients.
    """
    spec, capability = problem.spec, problem.capability
    if capability is None:
        raise ValueError("a problem without the capability of a device")
    cell, name = traced(spec), str(problem.dtype).removeprefix("torch.")
    arch, made = arch_of(capability), set[Binary]()
    plain = {"copy_rows": name, "fill_flags": "float32"}
    if problem.grad:
        plain |= {"permute_weights": name, "reduce_bias_gradients": name}
        plain |= {"dropout": name} if spec.drops(True) else {}
    if problem.lengths:
        plain["sort_lengths"] = "float32"
    made |= {kernels.plain_binary(kernel, dtype, arch) for kernel, dtype in plain.items()}
    kinds = plan.kinds(
        spec, problem.grad, problem.lengths, problem.reset, problem.return_states, reset_state
    )
    for batch in batches:
        for kind, on in kinds:
            for loops in (1, 2)[: 1 + _several(problem, kind, on, batch)]:
                kernel = kernels.best(
                    kind, cell, name, spec.hidden_size, (batch + 7) // 8, on, capability,
                    processors=problem.processors, loops=loops,
                )  # fmt: skip
                if kernel is not None:
                    made.add(kernel[0])
        made.update(_of_steps(problem, batch))
    return made


def _several(problem: Problem, kind: str, flags: plan.Flags, batch: int) -> bool:
    """Whether long calls run two loops at once in another kernel than one: see `schedules`."""
    spec, capability = problem.spec, problem.capability
    if capability is None or (spec.recompute != "none" and spec.bidirectional):
        return False
    asked = (
        kind, flags, traced(spec), str(problem.dtype).removeprefix("torch."), spec.hidden_size,
        -(-batch // 8) * 8, capability, problem.processors,
    )  # fmt: skip
    if spec.bidirectional:
        return plan.loops_of_both(*asked) == 2
    first = plan.ranked(*asked)
    return spec.num_layers > 1 and spec.wavefront != 0 and bool(first) and first[0].clusters > 1


def _of_steps(problem: Problem, batch: int) -> Iterator[Binary]:
    """The kernels of single steps, if a batch of this size has some."""
    spec, capability = problem.spec, problem.capability
    if capability is None or not single_step.takes(problem, 1, batch):
        return
    cell, name = traced(spec), str(problem.dtype).removeprefix("torch.")
    gates, hidden = len(spec.gates), spec.hidden_size
    for inputs in single_step.input_columns(spec):
        kinds = [single_step.forward_kind(problem.dtype, gates, hidden, batch, inputs)]
        if problem.grad and single_step.differentiates(problem, 1, batch, False):
            kinds.append("step_backward")
        for kind in kinds:
            configs = single_step.configs(kind, gates, inputs, hidden, batch)
            yield kernels.best_step(configs, cell, name, arch_of(capability))[0]
