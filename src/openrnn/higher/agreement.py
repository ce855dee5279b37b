"""Whether derivatives by the tangent cell are those of the reference.

The tangent cell is the derivative of a cell's backward. It has second derivatives where backward
is recorded and linear in what reaches it, and forward mode where backward is the derivative of
forward, which `no_grad`, hooks and an `autograd.Function` may change. A cell of one's own runs on
small tensors, in float64, to see both.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from openrnn import fresh
from openrnn.cells import Cell, lookup
from openrnn.codegen.check import Clip, names_of, step_of
from openrnn.higher.tangent import derivative
from openrnn.memo import memo
from openrnn.spec import Spec

SHAPE = (8, 16)
# of gradients that reach a backward, which clips some or flushes them where it is not linear
SCALES = (1e-6, 1.0, 1e6)
# of the sizes of what is summed; cells may compute in float32 inside
NEAR = 1e-4


def refusal(spec: Spec, forward: bool) -> str | None:
    """Why the tangent cell of a cell that can be traced is not the reference's derivative, or None.

    Args:
        forward: of forward mode, beside second derivatives.
    """
    cell = lookup(spec.cell)
    # cells that ship have no gradients of their own; of a tangent cell, its cell was asked about
    if str(cell.function.__module__).startswith("openrnn."):
        return None
    second, first = _refusals(cell, spec.cell_clip)
    return second or (first if forward else None)


@memo(256)
def _refusals(cell: Cell, clip: Clip) -> tuple[str | None, str | None]:
    """Why second derivatives are not those of the tangent cell, and why forward mode is not."""
    try:
        return fresh.run(_compared, cell, clip)
    except Exception as error:  # of the cell or torch: the reference may run it
        line = str(error).strip().partition("\n")[0]
        return (f"cell '{cell.name}' cannot be differentiated twice: {line}",) * 2


def _compared(cell: Cell, clip: Clip) -> tuple[str | None, str | None]:
    from torch.fx.experimental.proxy_tensor import make_fx

    step, dice = step_of(cell, clip), torch.Generator("cpu").manual_seed(0)

    def drawn(count: int, scale: float) -> list[Tensor]:
        shape = count, *SHAPE
        return [*scale * torch.randn(shape, dtype=torch.float64, device="cpu", generator=dice)]

    count = len(names_of(cell))
    at, along = drawn(count, 2.0), drawn(count, 1.0)
    leaves = [value.clone().requires_grad_() for value in at]
    new = step(*leaves)
    values = [value for value in new if value.requires_grad]
    moved = derivative(step, at, along)
    known = [one for one, value in zip(moved, new) if value.requires_grad]
    for scale in SCALES if values else ():
        reached = drawn(len(values), scale)
        back = torch.autograd.grad(values, leaves, reached, retain_graph=True, allow_unused=True)
        # <J^T v, t> = <v, J t>
        one = [grad * t for grad, t in zip(back, along) if grad is not None]
        other = [v * each for v, each in zip(reached, known)]
        if not _close(one, other):
            why = (
                f"the backward of cell '{cell.name}' is not recorded, as by once_differentiable or "
                "where a hook detaches, or not linear in what reaches it, as where a hook clips"
            )
            return why, why
    function = next(_functions(values), None)
    if function is not None:
        return None, f"cell '{cell.name}' has a jvp of its own: it calls {function}"
    # of operators alone, as recorded where nothing requires gradients
    plain: Callable[..., tuple[Tensor, ...]] = make_fx(step)(*at)
    if all(_close([one], [two]) for one, two in zip(moved, derivative(plain, at, along))):
        return None, None
    return None, (
        f"the gradients of cell '{cell.name}' are not those of its forward, which forward mode "
        "gives, as where no_grad or a hook changes them"
    )


def _close(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two sums are equal wherever both are finite."""
    zero = torch.zeros(SHAPE, dtype=torch.float64, device="cpu")
    size = sum((each.abs() for each in (*one, *other)), zero)
    off = (sum(one, zero) - sum(other, zero)).abs()
    return bool(((off <= NEAR * size) | ~size.isfinite()).all())


def _functions(values: Iterable[Tensor]) -> Iterator[str]:
    """The names of the autograd.Functions that made tensors."""
    waiting, seen = [value.grad_fn for value in values], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            yield node._forward_cls.__name__
        waiting.extend(before for before, _ in node.next_functions)
