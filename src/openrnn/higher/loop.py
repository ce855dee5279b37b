"""A loop, one layer and direction that runs forward in time, and what belongs to its tensors."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from openrnn.backends.base import Backend, Call, Outputs
from openrnn.params import places
from openrnn.spec import Spec


class Direction(NamedTuple):
    """A tensor for each input of a loop, as `Call` has them; None for zeros."""

    x: Tensor | None
    states: list[Tensor | None]
    params: list[Tensor | None]
    reset_states: list[Tensor | None]


class Weights(NamedTuple):
    """The parameters of a loop, or what belongs to each of them; None where there is none."""

    w_ih: Tensor | None  # (G*H, I)
    w_hh: Tensor | None  # (G*H, H)
    b_ih: Tensor | None  # (G*H,)
    b_hh: Tensor | None  # (G*H,)
    unit: tuple[Tensor | None, ...]  # each (H,)

    @classmethod
    def of(cls, spec: Spec, params: Sequence[Tensor | None]) -> "Weights":
        """Sorts tensors in the order of `params.module_slots`."""
        w_ih, w_hh, b_ih, b_hh, _, *unit = [
            None if index is None else params[index] for index in places(spec)[0]
        ]
        return cls(w_ih, w_hh, b_ih, b_hh, tuple(unit))


class Run:
    """A loop that has run, with what second derivatives read of it.

    Args:
        call: of one layer and direction that is not reverse, without projection.
        out: what it returned, the states of all steps among it; None: it runs once more.

    Attributes:
        call: the same, padding cleared, that returns the states of all steps.
        active: (T, B, 1), the steps within lengths; None for all.
        before: each state before each step (T, B, H).
        at_x, at_r: the pre-activations of both sides (T, B, G*H), biases included.
    """

    def __init__(self, backend: Backend, call: Call, out: Outputs | None = None) -> None:
        spec, x = call.problem.spec, call.x
        self.backend, self.spec = backend, spec
        self.active: Tensor | None = None
        if call.lengths is not None:
            steps = torch.arange(x.shape[0], device=x.device)[:, None]
            self.active = (steps < call.lengths)[..., None]
            x = self.within(x)  # what lies in the padding, nan included, is not read
        problem = replace(call.problem, grad=True, return_states=True)
        self.call = replace(call, problem=problem, x=x)
        self.out = backend.forward(self.call) if out is None else out
        self.weights = Weights.of(spec, call.params)
        self.before = [
            before(self.call, k, after[0]) for k, after in enumerate(self.out.all_states)
        ]
        self.at_x = self.side(x, self.weights.b_ih)
        self.at_r = linear(self.before[0], self.recurrent, self.weights.b_hh)

    @property
    def recurrent(self) -> Tensor:
        """W_hh."""
        if self.weights.w_hh is None:
            raise ValueError("a loop without a recurrent matrix")
        return self.weights.w_hh

    def within(self, tensor: Tensor) -> Tensor:
        """(T, B, ...) with zeros past lengths."""
        return tensor if self.active is None else torch.where(self.active, tensor, 0)

    def side(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """What x (T, B, I) is to the input side of the gates (T, B, G*H)."""
        if self.weights.w_ih is not None:
            return linear(x, self.weights.w_ih, bias)
        gates = x if self.spec.input_mode == "gates" else x.repeat(1, 1, len(self.spec.gates))
        return gates if bias is None else gates + bias

    def to_x(self, gates: Tensor) -> Tensor:
        """The transposed of `side`: what reaches x from what reaches the input side."""
        if self.weights.w_ih is not None:
            return gates @ self.weights.w_ih
        if self.spec.input_mode == "gates":
            return gates
        return torch.sum(gates.unflatten(-1, (len(self.spec.gates), self.spec.hidden_size)), -2)


def before(call: Call, k: int, after: Tensor) -> Tensor:
    """State k before each step (T, B, H), from that after each step."""
    first = call.states[k][0] if call.states else torch.zeros_like(after[0])
    found = torch.cat([first[None], after[:-1]])
    if call.reset is not None:
        new = call.reset_states[k][0] if call.reset_states else after.new_zeros(())
        found = torch.where(call.reset[..., None], new, found)
    return found
