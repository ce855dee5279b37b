"""How weights are read and threads share the loops of a call, for a person."""

from openrnn.backends.cpu.layer import compute_dtype, layout_of
from openrnn.backends.cpu.rounding import described
from openrnn.kernels.cpu import launch
from openrnn.spec import Problem


def describe(problem: Problem) -> list[str]:
    """A line for weights; where T and B are known, lines for the loops, forward and backward."""
    from openrnn.kernels.cpu.plan import sharing_of
    from openrnn.kernels.cpu.sharing import Sharing, run_time

    if problem.steps is None or problem.batch is None:
        return described(problem)
    spec, threads, dtype = problem.spec, launch.threads(), compute_dtype(problem.dtype)
    sizes = problem.steps, problem.batch, threads

    def line(name: str, way: Sharing, time: float) -> str:
        team = f"in teams of {way.size} that share" if way.size > 1 else "each with"
        count = way.teams * way.size
        return (
            f"{name}: {count} of {threads} threads, {team} tiles of {way.rows} rows; "
            f"products and waits take {time:,.0f} us by the model, which is for choosing"
        )

    lines: dict[str, None] = {}
    for layer in range(spec.num_layers):
        layout = layout_of(spec, layer, dtype)
        reads = f" of {layout.inputs} inputs" if spec.num_layers > 1 and layout.inputs else ""
        for backward in (False, True)[: 1 + problem.grad]:
            way = sharing_of(layout, backward, *sizes)
            time = run_time(layout, backward, *sizes, way)
            lines[line(("backward" if backward else "forward") + reads, way, time)] = None
    return [*described(problem), *lines]
