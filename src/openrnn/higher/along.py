"""What the loop of the tangent cell reads along a direction of a loop's inputs."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from openrnn.higher.loop import Direction, Run, Weights
from openrnn.higher.tangent import Tangent


class Inputs(NamedTuple):
    """The tensors of a call of the tangent cell's loop."""

    x: Tensor
    states: list[Tensor]
    params: list[Tensor]
    lengths: Tensor | None
    reset: Tensor | None
    reset_states: list[Tensor]


def gate_parts(run: Run, tangent: Tangent, along: Direction) -> list[list[Tensor]]:
    """For each gate of the tangent cell what it is the sum of: none, one or two tensors.

    Shapes:
        each (T, B, H), but (H,) where no more than a bias has a tangent
    """
    call, hidden = run.call, run.spec.hidden_size
    to = Weights.of(run.spec, along.params)
    u_x = None if along.x is None else run.side(run.within(along.x))
    sides = {
        "x": _added(u_x, None if to.w_ih is None else linear(call.x, to.w_ih), to.b_ih),
        "r": _added(None if to.w_hh is None else linear(run.before[0], to.w_hh), to.b_hh),
        "b": run.at_x,
        "c": run.at_r,
    }

    def parts(name: str) -> list[Tensor]:
        letter, number = name[0], int(name[1:])
        if letter == "s":
            return [run.before[number]]
        read = {"a": "bc", "r": "r" if number in tangent.apart else "xr"}.get(letter, letter)
        return [
            side[..., number * hidden : (number + 1) * hidden]
            for side in map(sides.get, read)
            if side is not None
        ]

    return [parts(name) for name in tangent.cell.gates]


def tangent_inputs(run: Run, tangent: Tangent, along: Direction, gates: Tensor) -> Inputs:
    """What the tangent cell's loop reads; gates (T, B, gates * H): the sums of `gate_parts`."""
    call, spec, weights = run.call, run.spec, run.weights
    to = Weights.of(spec, along.params)
    rows = (len(tangent.cell.gates) - len(spec.gates)) * spec.hidden_size
    w_hh = torch.cat([run.recurrent, call.x.new_zeros(rows, spec.hidden_size)])
    vectors = [
        torch.zeros_like(here) if value is None else value
        for group in (weights.unit, to.unit)
        for here, value in zip(weights.unit, group)
        if here is not None
    ]
    return Inputs(
        gates, _filled(run, along.states), [w_hh, *vectors], call.lengths, call.reset,
        _filled(run, along.reset_states) if call.reset is not None else [],
    )  # fmt: skip


def _added(*parts: Tensor | None) -> Tensor | None:
    """Their sum; None where there are none."""
    found: Tensor | None = None
    for part in parts:
        if part is not None:
            found = part if found is None else found + part
    return found


def _filled(run: Run, states: list[Tensor | None]) -> list[Tensor]:
    """States of a call, zeros for None; empty where all are."""
    if all(state is None for state in states):
        return []
    batch, hidden = run.call.x.shape[1], run.spec.hidden_size
    return [run.call.x.new_zeros(1, batch, hidden) if state is None else state for state in states]
