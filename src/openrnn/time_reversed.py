"""Reverse layers, by a backend that runs forward ones: sequences turned before and after.

A reverse layer reads a sequence from its true end to its start. So does a forward one that is given
the sequence turned within its length; its outputs are then turned back, states and parameters stay.
A reset after step t is one before the next step that runs; at t = 0, where none follows, it
replaces the final states here. The reference alone knows reverse layers by itself.
"""

from dataclasses import replace

import torch
from torch import Tensor

from openrnn.backends.base import Backend, Call, Cotangents, Gradients, Needs, Outputs


def forward(backend: Backend, call: Call) -> Outputs:
    """`backend.forward`, of any call."""
    if not _turns(backend, call):
        return backend.forward(call)
    out = backend.forward(_reversed(call))
    finals, ends = out.finals, _ends(call)
    if ends is not None:
        new = call.reset_states or [state.new_zeros(()) for state in finals]
        finals = [torch.where(ends, *pair) for pair in zip(new, finals)]
    every = [flip_time(states, call.lengths, dim=1) for states in out.all_states]
    return replace(out, y=flip_time(out.y, call.lengths), finals=finals, all_states=every)


def backward(
    backend: Backend,
    call: Call,
    y: Tensor,
    reserve: list[Tensor],
    grads: Cotangents,
    needs: Needs,
) -> Gradients:
    """`backend.backward`, of any call; y as `forward` returned it."""
    if not _turns(backend, call):
        return backend.backward(call, y, reserve, grads, needs)
    lengths, ends, finals = call.lengths, _ends(call), grads.finals
    if ends is not None:
        finals = [None if grad is None else torch.where(ends, 0, grad) for grad in finals]
    inner = Cotangents(
        None if grads.y is None else flip_time(grads.y, lengths),
        finals,
        [None if grad is None else flip_time(grad, lengths, dim=1) for grad in grads.all_states],
    )
    found = backend.backward(_reversed(call), flip_time(y, lengths), reserve, inner, needs)
    x, resets = found.x, found.reset_states
    if ends is not None:
        resets = [
            own if own is None or grad is None else own + torch.where(ends, grad, 0)
            for own, grad in zip(resets, grads.finals)
        ]
    return replace(found, x=None if x is None else flip_time(x, lengths), reset_states=resets)


def flip_time(given: Tensor, lengths: Tensor | None, dim: int = 0) -> Tensor:
    """Steps 0 to length - 1 in the opposite order, the others where they were; its own inverse.

    Args:
        given: (T, B, ...) from dimension `dim` on.
        lengths: (B,), or None for T.
    """
    if lengths is None:
        return given.flip(dim)
    sizes = given.shape[dim : dim + 2]
    steps, rows = (torch.arange(size, device=given.device) for size in sizes)
    steps, lengths = steps[:, None], lengths.to(given.device)
    reversed_steps = torch.where(steps < lengths, lengths - 1 - steps, steps)  # (T, B)
    # whole rows of (T*B, ...): `gather` reads an index for each number
    rows_read = (reversed_steps * sizes[1] + rows).flatten()
    found = given.flatten(dim, dim + 1).index_select(dim, rows_read)
    return found.view(*given.shape)


def _turns(backend: Backend, call: Call) -> bool:
    return call.problem.spec.reverse and not backend.reverses


def _reversed(call: Call) -> Call:
    """The call that a forward layer runs."""
    problem = replace(call.problem, spec=call.problem.spec.with_(reverse=False))
    reset = call.reset
    if reset is not None and reset.shape[0]:
        later = flip_time(reset, call.lengths)[:-1]
        reset = torch.cat([torch.zeros_like(reset[:1]), later])
    return replace(call, problem=problem, x=flip_time(call.x, call.lengths), reset=reset)


def _ends(call: Call) -> Tensor | None:
    """Whose final states a reset at t = 0 replaces: (B, 1), or None for nobody's."""
    if call.reset is None or not call.reset.shape[0]:
        return None
    first = call.reset[0]
    return (first if call.lengths is None else first & (call.lengths > 0))[:, None]
