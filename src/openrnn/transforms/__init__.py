"""Calls under `torch.func` and forward-mode differentiation: which of them kernels run, and how."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openrnn import op
from openrnn.higher import network
from openrnn.route import Route
from openrnn.transforms import function, levels

# members whose calls run one after another, as a multiple of T, up to which that is quicker than
# the reference's steps of all at once: measured with small networks, where it matters
MEMBERS_A_STEP = 16


class Seen(NamedTuple):
    """What the active levels make of a call.

    Args:
        grad: gradients of one of its tensors are recorded.
        forward: it is differentiated forward.
    """

    grad: bool
    forward: bool


def look(x: Tensor, params: Sequence[Tensor], others: Sequence[Tensor | None]) -> Seen | None:
    """What the levels make of a call; None where the reference has to run it, whatever it is.

    Args:
        others: states, lengths, resets and reset states.
    """
    active = levels.active()
    if active.others or active.reverse + active.forward > 1 or op.watched(x, *params, *others):
        return None
    if x.dim() != 3 or not x.numel():
        return None
    weights, rows = levels.seen(params), levels.seen((x, *others))
    if not weights.plain or not rows.plain:
        return None
    if 0 in (*weights.batched.values(), *rows.batched.values()):
        return None  # no member has a call whose results could be stacked
    # parameters of its own for each member, or gradients of them: members run one after another
    apart = dict(weights.batched)
    for level, size in rows.batched.items():
        if any(level < tracked for tracked in weights.tracked):
            apart[level] = size
    if prod(apart.values()) > MEMBERS_A_STEP * x.shape[0]:
        return None
    return Seen(weights.grad or rows.grad, active.forward > 0)


def refusal(route: Route, seen: Seen, device: torch.device) -> str | None:
    """Why the reference runs a call that kernels would run without transforms; or None."""
    name, problem = route.constants.backend, route.problem
    if name == "reference":
        return "no other backend takes it"
    return network.forward_refusal(name, problem, device) if seen.forward else None


def run(route: Route, seen: Seen, *inputs: Any) -> Sequence[Tensor]:
    """A call that is not refused; inputs as `op.recurrence` takes them."""
    return (function.by_loops if seen.forward else function.run)(route, *inputs)
