"""One layer and direction on the GPU: tensors to kernel arguments, and the products around them."""

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from struct import pack, unpack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from openrnn import philox
from openrnn.backends.base import Call, traced
from openrnn.backends.fused import kernels, plan
from openrnn.codegen import cuda
from openrnn.params import places

if TYPE_CHECKING:
    from collections.abc import Iterator

    from openrnn.codegen.trace import Traced

ALIGNED = 16  # bytes, of every row that a kernel copies


@contextmanager
def products(dtype: torch.dtype) -> "Iterator[None]":
    """float32 products in tf32, as the recurrent ones are."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if dtype != torch.float32 or before == "tf32":
        yield
        return
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _address(tensor: Tensor | None, offset: int = 0) -> int:
    return 0 if tensor is None else tensor.data_ptr() + offset * tensor.element_size()


def whole(tensor: Tensor) -> Tensor:
    """The tensor, contiguous, where a 16-byte copy may start."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNED == 0 else tensor.clone()


def emptied(mailbox: Tensor) -> Tensor:
    """A mailbox with all bits set: a nan that no kernel writes."""
    bits = torch.int16 if mailbox.element_size() == 2 else torch.int32
    mailbox.view(bits).fill_(-1)
    return mailbox


def picked(parts: Tensor, order: tuple[int, ...]) -> Tensor:
    """The parts in another order; a list as an index would be copied from the host."""
    return torch.stack([parts[place] for place in order])


def dropped(call: Call, layer: int, y: Tensor) -> Tensor:
    """The output of a layer (T, B, D*H), or its gradient, with the layer's mask on it."""
    if not call.problem.drops:
        return y
    if call.seed is None:
        raise ValueError("dropout needs a seed")
    p, y = call.problem.spec.dropout, y.contiguous()
    low, high, offset = philox.split(call.seed)
    word = (layer + 256 * offset) & philox.WORD
    capability = torch.cuda.get_device_capability(y.device)
    dtype = str(y.dtype).removeprefix("torch.")
    kernel = kernels.dropout(dtype, y.device.index or 0, capability)
    out = torch.empty_like(y)
    steps, batch, width = y.shape
    (scale,) = unpack("i", pack("f", philox.scale(p)))
    threads = steps * batch * ((width + 3) // 4)
    kernel.launch(
        -(-threads // kernel.threads), y.data_ptr(), out.data_ptr(), steps, batch, width, low,
        high, word, philox.threshold(p), scale,
    )  # fmt: skip
    return out


@dataclass
class Rows:
    """The batch rows by falling length; None where every row has all steps."""

    lengths: Tensor
    order: Tensor

    @classmethod
    def of(cls, lengths: Tensor | None) -> "Rows | None":
        if lengths is None:
            return None
        return cls(lengths.contiguous(), lengths.argsort(descending=True, stable=True))


@lru_cache(maxsize=1024)
def _sides(cell: "Traced") -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """The number of planes of gate gradients, and the gates of each side in their order."""
    alone = cuda.apart(cell)
    shared = tuple(gate for gate in cell.gates if gate not in alone)
    left = tuple(cell.gates.index(gate) for gate in (*alone, *shared))
    right = tuple(cell.gates.index(gate) for gate in (*shared, *alone))
    return len(cuda.planes(cell)), left, right


class Run:
    """One layer and direction of a call."""

    def __init__(self, call: Call, layer: int, direction: int, rows: Rows | None) -> None:
        spec = call.problem.spec
        self.call, self.spec, self.rows, self.direction = call, spec, rows, direction
        self.chain = layer * spec.directions + direction
        self.cell = traced(spec)
        self.dtype = str(call.x.dtype).removeprefix("torch.")
        self.hidden, self.units = spec.hidden_size, plan.padded(spec.hidden_size)
        self.steps, self.batch = call.x.shape[0], call.x.shape[1]
        self.device = call.x.device
        here = places(spec)[self.chain]
        found = [None if place is None else call.params[place] for place in here]
        self.w_ih = found[0]
        self.b_ih, self.b_hh = (None if bias is None else bias.contiguous() for bias in found[2:4])
        self.w_hh = call.params[here[1] or 0]
        unit = [vector for vector in found[5:] if vector is not None]
        self.vectors = torch.stack(unit) if unit else None
        self.reset = None if call.reset is None else call.reset.contiguous()

    @property
    def _gates(self) -> int:
        return len(self.spec.gates)

    def _padded(self, matrix: Tensor, columns: bool) -> Tensor:
        """A matrix (G*H, In) as (G, units, In), its columns padded, too, where they are units."""
        missing = self.units - self.hidden
        split = matrix.reshape(self._gates, self.hidden, matrix.shape[1])
        if missing:
            split = pad(split, (0, missing if columns else 0, 0, missing))
        return whole(split)

    def _which(self, **flags: bool) -> tuple[Any, ...]:
        """What a kernel is chosen by."""
        on = tuple(name for name, value in flags.items() if value)
        index = self.device.index or 0
        return self.cell, self.dtype, self.hidden, (self.batch + 7) // 8, on, index

    def _states(self, group: Sequence[Tensor | None]) -> list[int]:
        """Addresses of this chain's part of each state's tensor (L*D, ...), 0 where none is."""
        if not group:
            return [0] * len(self.spec.states)
        return [
            0 if state is None else _address(state, self.chain * state.stride(0)) for state in group
        ]

    def _aligned(self, tensor: Tensor) -> bool:
        size = tensor.element_size()
        return tensor.data_ptr() % ALIGNED == 0 and all(
            stride * size % ALIGNED == 0 for stride in tensor.stride()[:-1]
        )

    def _row_arguments(self) -> tuple[int, int, int]:
        rows = self.rows
        return (
            _address(rows.lengths if rows else None), _address(rows.order if rows else None),
            _address(self.reset),
        )  # fmt: skip

    def _left(self, x: Tensor) -> tuple[Tensor, int]:
        """The input side of all steps, (T, B, G*units) or x itself, and the stride of gates."""
        if self.w_ih is None:
            wide = pad(x, (0, self.units - self.hidden)) if self.units != self.hidden else x
            plain = wide.stride(-1) == 1 and self._aligned(wide)
            return wide if plain else whole(wide), 0
        weight = self.w_ih
        if self.units != self.hidden:
            weight = self._padded(weight, False).flatten(0, 1)
        with products(x.dtype):
            left = torch.mm(x.reshape(-1, x.shape[-1]), weight.t())
        return left.view(self.steps, self.batch, -1), self.units

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        kept: Tensor | None,
        finals: list[Tensor],
        every: list[Tensor],
    ) -> None:
        """Writes this direction's part of y (T, B, D*H), what backward needs, and the states."""
        call, hidden = self.call, self.hidden
        kernel, how = kernels.forward(*self._which(
            lengths=self.rows is not None, reset=self.reset is not None,
            every=bool(every), keep=kept is not None,
        ))  # fmt: skip
        left, gate = self._left(x)
        here = y[..., self.direction * hidden : (self.direction + 1) * hidden]
        target = here
        if self.units != hidden:
            fresh = torch.empty if self.rows is None else torch.zeros
            target = fresh(self.steps, self.batch, self.units, dtype=y.dtype, device=y.device)
        weight = self._padded(self.w_hh, True)
        mail: Tensor | None = None
        if how.clusters > 1:
            if self.rows is None and self.reset is None:
                emptied(target)
            else:
                mail = emptied(y.new_empty(self.steps, self.batch, self.units))
        kernels.launch(
            kernel, how, self.batch,
            (weight.data_ptr(), left.data_ptr(), left.stride(0), left.stride(1), gate,
             target.data_ptr(), target.stride(0), target.stride(1),
             *((_address(mail),) if how.clusters > 1 else ()), _address(kept),
             _address(self.b_ih), _address(self.b_hh), _address(self.vectors),
             *self._row_arguments(), self.steps, self.batch, hidden, self.direction),
            *self._states(call.states), *self._states(call.reset_states), *self._states(finals),
            *self._states(every),
        )  # fmt: skip
        if target is not here:
            here.copy_(target[..., :hidden])

    def backward(
        self,
        x: Tensor,
        y: Tensor,
        kept: Tensor,
        dy: Tensor | None,
        states: tuple[Sequence[Tensor | None], ...],
        wants: tuple[bool, ...],
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """dx, and the gradients of w_ih, w_hh, b_ih, b_hh, w_hr and the unit vectors.

        `states` are the gradients of finals and all states, and where to put those of initial and
        fresh ones; `wants` says for dx and each parameter whether it is needed.
        """
        hidden, units, gates = self.hidden, self.units, self._gates
        d_final, d_every, d_initial, d_fresh = states
        kernel, how = kernels.backward(*self._which(
            lengths=self.rows is not None, reset=self.reset is not None,
            every=any(state is not None for state in d_every),
            fresh=any(state is not None for state in d_fresh),
        ))  # fmt: skip
        count, left, right = _sides(self.cell)
        weight = self._padded(self.w_hh, True)
        if right != tuple(range(gates)):
            weight = picked(weight, right)
        weight = weight.permute(2, 0, 1).contiguous()
        if dy is not None:
            dy = dy[..., self.direction * hidden : (self.direction + 1) * hidden]
            if units != hidden:
                dy = pad(dy, (0, units - hidden))
            elif dy.stride(-1) != 1 or not self._aligned(dy):
                dy = whole(dy)
        fresh = torch.empty if self.rows is None else torch.zeros
        d_gates = fresh(self.steps, self.batch, count, units, dtype=x.dtype, device=x.device)
        if how.clusters > 1:
            emptied(d_gates)
        clusters = -(-self.batch // how.rows)
        vectors = len(self.spec.unit_params)
        sums = torch.empty(
            clusters * how.tiles, count + vectors, units, device=x.device,
            dtype=torch.float32,
        )  # fmt: skip
        kernels.launch(
            kernel, how, self.batch,
            (weight.data_ptr(), kept.data_ptr(), _address(dy),
             *((0, 0) if dy is None else dy.stride()[:2]), d_gates.data_ptr(), sums.data_ptr(),
             _address(self.vectors), *self._row_arguments(), self.steps, self.batch, hidden,
             self.direction),
            *self._states(d_final), *self._states(d_every),
            *self._states(d_initial), *self._states(d_fresh),
        )  # fmt: skip
        flat = d_gates.view(-1, count * units)
        with products(x.dtype):
            return self._products(x, y, flat, sums.sum(0), left, right, wants)

    def _products(
        self,
        x: Tensor,
        y: Tensor,
        flat: Tensor,
        sums: Tensor,
        left: tuple[int, ...],
        right: tuple[int, ...],
        wants: tuple[bool, ...],
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """The gradients that are products or sums over all steps; flat: (T*B, planes*units)."""
        hidden, units, gates = self.hidden, self.units, self._gates
        side = gates * units
        d_left, d_right = flat[:, :side], flat[:, flat.shape[1] - side :]
        inputs = x.reshape(-1, x.shape[-1])
        plain = tuple(range(gates))

        def ordered(found: Tensor, order: tuple[int, ...]) -> Tensor:
            """(planes * units, ...) -> (G*H, ...)."""
            if order == plain and units == hidden:
                return found
            split = found.view(gates, units, *found.shape[1:])[:, :hidden]
            if order != plain:
                split = picked(split, tuple(order.index(gate) for gate in plain))
            return split.reshape(gates * hidden, *found.shape[1:])

        dx: Tensor | None = None
        if wants[0] and self.w_ih is None:
            dx = d_left.view(-1, gates, units)[..., :hidden].sum(1).view_as(x)
        elif wants[0] and self.w_ih is not None:
            weight = self._padded(self.w_ih, False)
            weight = weight if left == plain else picked(weight, left)
            dx = torch.mm(d_left, weight.flatten(0, 1)).view_as(x)
        found: list[Tensor | None] = [None] * (5 + len(self.spec.unit_params))
        if self.w_ih is not None and wants[1]:
            found[0] = ordered(torch.mm(d_left.t(), inputs), left)
        if wants[2]:
            found[1] = ordered(self._recurrent(y, d_right), right)
        vectors = len(self.spec.unit_params)
        planes = sums.flatten()[: (sums.shape[0] - vectors) * units]
        if self.b_ih is not None and wants[3]:
            found[2] = ordered(planes[:side], left).to(x.dtype, copy=True)
        if self.b_hh is not None and wants[4]:
            found[3] = ordered(planes[planes.shape[0] - side :], right).to(x.dtype, copy=True)
        for place in range(vectors):
            found[5 + place] = sums[sums.shape[0] - vectors + place, :hidden].to(x.dtype)
        return dx, found

    def _recurrent(self, y: Tensor, d_right: Tensor) -> Tensor:
        """The gradient of R as (planes * units, H): sum over steps of d_right times h before."""
        call, batch, hidden, steps = self.call, self.batch, self.hidden, self.steps
        reverse = self.direction == 1
        here = y[..., self.direction * hidden : (self.direction + 1) * hidden]
        rows = here.as_strided((steps * batch, hidden), (y.stride(1), 1))
        later, before = d_right[batch:], rows[: (steps - 1) * batch]
        if reverse:
            later, before = d_right[: (steps - 1) * batch], rows[batch:]
        replaced: Tensor | None = None
        if self.reset is not None:
            # what step t reads was replaced: by the mask of t, or in reverse by that of t + 1
            mask = self.reset
            if self.rows is not None:
                mask = mask & (torch.arange(steps, device=y.device)[:, None] < self.rows.lengths)
            replaced = mask
            before = before.masked_fill(mask[1:].reshape(-1, 1), 0)
        total = torch.mm(later.t(), before)
        first = d_right.view(steps, batch, -1)[-1 if reverse else 0]
        if reverse and self.rows is not None:
            last = (self.rows.lengths - 1).clamp(min=0)
            first = d_right.view(steps, batch, -1)[last, torch.arange(batch, device=y.device)]
        if call.states:
            if replaced is not None and not reverse:
                first = first.masked_fill(replaced[0][:, None], 0)
            total = total.addmm(first.t(), call.states[0][self.chain])
        if replaced is not None and call.reset_states:
            # the rows of all steps that read a fresh state, added up for each sequence
            steps_of = d_right.view(steps, batch, -1)
            taken = steps_of[:-1] if reverse else steps_of
            where = (replaced[1:] if reverse else replaced)[..., None]
            gathered = taken.masked_fill(~where, 0).sum(0, dtype=torch.float32).to(y.dtype)
            total = total.addmm(gathered.t(), call.reset_states[0][self.chain])
        return total
