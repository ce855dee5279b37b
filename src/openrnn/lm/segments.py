"""Resets for backends that have none: every segment between two resets becomes a row of its own."""

from collections.abc import Callable

import torch
from torch import Tensor

State = tuple[Tensor, ...]
RunLayer = Callable[[Tensor, State | None, Tensor | None], tuple[Tensor, State]]


def apart(run: RunLayer, x: Tensor, state: State | None, reset: Tensor) -> tuple[Tensor, State]:
    """What `run(x, state, reset)` gives, by a call without resets: exactly the same function.

    Shapes:
        run (x (T, S, E), state each (L, S, H) or None, lengths (S,) or None) -> y (T, S, O), state
        x (T, B, E), state each (L, B, H) or None for zeros, reset (T, B) bool
        -> y (T, B, O), state each (L, B, H)
    """
    steps, batch = reset.shape
    first = reset.cpu()  # the shapes below depend on it
    marks = first.clone()
    marks[0] = True
    b, begin = marks.t().nonzero(as_tuple=True)  # of each segment, row by row, in order of time
    row_ends = torch.cat([b[1:] != b[:-1], torch.ones(1, dtype=torch.bool)])
    end = torch.where(row_ends, steps, torch.cat([begin[1:], begin[:1]]))
    lengths = end - begin
    goes_on = (begin == 0) & ~first[0, b]
    whole = len(b) == batch
    device = x.device
    rows, starts = b.to(device), begin.to(device)
    if state is not None:
        kept = goes_on.to(device)[:, None]
        state = tuple(torch.where(kept, part[:, rows], 0) for part in state)
    if whole:
        return run(x, state, None)
    time = (starts + torch.arange(int(lengths.max()), device=device)[:, None]).clamp_max(steps - 1)
    y, state = run(x[time, rows], state, lengths)
    segment = (marks.t().flatten().cumsum(0) - 1).view(batch, steps).t().to(device)  # of each t, b
    step = torch.arange(steps, device=device)[:, None] - starts[segment]
    last = row_ends.nonzero().squeeze(1).to(device)
    return y[step, segment], tuple(part[:, last] for part in state)
