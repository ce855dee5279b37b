"""One layer and direction on the GPU: tensors to kernel arguments, and the input side's product."""

from collections.abc import Sequence
from dataclasses import dataclass
from struct import pack, unpack

import torch
from torch import Tensor
from torch.nn.functional import pad

from openrnn import philox
from openrnn.backends.base import Call
from openrnn.backends.fused import kernels
from openrnn.backends.fused.chain import Chain, chain
from openrnn.native.cublaslt import Matrix, multiply

ALIGNED = 16  # bytes, of every row that a kernel copies


def address(tensor: Tensor | None) -> int:
    """Where a tensor begins, 0 where none is."""
    return 0 if tensor is None else tensor.data_ptr()


def whole(tensor: Tensor) -> Tensor:
    """The tensor, contiguous, where a 16-byte copy may start."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNED == 0 else tensor.clone()


def emptied(mailbox: Tensor) -> Tensor:
    """A mailbox with all bits set: a nan that no kernel writes."""
    bits = torch.int16 if mailbox.element_size() == 2 else torch.int32
    mailbox.view(bits).fill_(-1)
    return mailbox


def rows_of(tensor: Tensor) -> Tensor:
    """A tensor (..., N) as a dense matrix (rows, N)."""
    flat = tensor.reshape(-1, tensor.shape[-1])
    return flat if flat.is_contiguous() else flat.contiguous()


def dropped(call: Call, layer: int, y: Tensor) -> Tensor:
    """The output of a layer (T, B, D*H), or its gradient, with the layer's mask on it."""
    if not call.problem.drops:
        return y
    if call.seed is None:
        raise ValueError("dropout needs a seed")
    p, y = call.problem.spec.dropout, y.contiguous()
    low, high, offset = philox.split(call.seed)
    word = (layer + 256 * offset) & philox.WORD
    kernel = kernels.plain("dropout", str(y.dtype).removeprefix("torch."), y.device.index or 0)
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


class Run:
    """One layer and direction of a call."""

    def __init__(self, call: Call, layer: int, direction: int, rows: Rows | None) -> None:
        problem, x = call.problem, call.x
        spec = problem.spec
        device = x.device.index or 0
        self.chain: Chain = chain(spec, layer * spec.directions + direction, x.dtype, device)
        self.call, self.rows, self.direction = call, rows, direction
        self.steps, self.batch = x.shape[0], x.shape[1]
        found = [None if place is None else call.params[place] for place in self.chain.places]
        self.w_ih, w_hh, self.b_ih, self.b_hh = (
            value if value is None or value.is_contiguous() else value.contiguous()
            for value in found[:4]
        )
        if w_hh is None:
            raise ValueError("a network without a recurrent matrix")
        self.w_hh: Tensor = w_hh
        unit = [vector for vector in found[5:] if vector is not None]
        self.vectors = torch.stack(unit) if unit else None
        self.reset = None if call.reset is None else call.reset.contiguous()

    def aligned(self, tensor: Tensor) -> bool:
        """Whether 16-byte copies of its rows may start where they do."""
        size = tensor.element_size()
        return tensor.data_ptr() % ALIGNED == 0 and all(
            stride * size % ALIGNED == 0 for stride in tensor.stride()[:-1]
        )

    def states(self, group: Sequence[Tensor | None]) -> list[int]:
        """Addresses of this chain's part of each state's tensor (L*D, ...), 0 where none is."""
        index = self.chain.index
        if not group:
            return self.chain.nulls
        return [
            0 if state is None
            else state.data_ptr() + index * state.stride(0) * state.element_size()
            for state in group
        ]  # fmt: skip

    def row_arguments(self) -> tuple[int, int, int]:
        """Addresses of lengths, of the order of rows, and of the mask of resets."""
        rows = self.rows
        if rows is None:
            return 0, 0, address(self.reset)
        return rows.lengths.data_ptr(), rows.order.data_ptr(), address(self.reset)

    def _left(self, x: Tensor) -> tuple[Tensor, int]:
        """The input side of all steps, (T, B, G*units) or x itself, and the stride of gates."""
        chain, weight = self.chain, self.w_ih
        if weight is None:
            wide = x if chain.exact else pad(x, (0, chain.units - chain.hidden))
            plain = wide.stride(-1) == 1 and self.aligned(wide)
            return wide if plain else whole(wide), 0
        if not chain.exact:
            weight = chain.arranged(weight, chain.plain, False, False)
        inputs, width, inner = rows_of(x), chain.gates * chain.units, x.shape[2]
        left = inputs.new_empty((self.steps, self.batch, width))
        multiply(
            chain.dtype, chain.device, (self.steps * self.batch, width, inner),
            Matrix(inputs.data_ptr(), inner), Matrix(weight.data_ptr(), inner, True),
            Matrix(left.data_ptr(), width),
        )  # fmt: skip
        return left, chain.units

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        kept: Tensor | None,
        finals: list[Tensor],
        every: list[Tensor],
    ) -> None:
        """Writes this direction's part of y (T, B, D*H), what backward needs, and the states."""
        call, chain, hidden = self.call, self.chain, self.chain.hidden
        flags = (self.rows is not None, self.reset is not None, bool(every), kept is not None)
        kernel, how = chain.forward(self.batch, flags)
        left, gate = self._left(x)
        start, target = self.direction * hidden, y
        if not chain.exact:
            fresh = torch.empty if self.rows is None else torch.zeros
            target = fresh(self.steps, self.batch, chain.units, dtype=y.dtype, device=y.device)
            start = 0
        if chain.exact:
            weight = whole(self.w_hh)
        else:
            weight = chain.arranged(self.w_hh, chain.plain, False, True)
        left_step, left_row, _ = left.stride()
        step, row, _ = target.stride()
        mail: tuple[int, ...] = ()
        box: Tensor | None = None
        if how.clusters > 1:
            if self.rows is None and self.reset is None:
                emptied(target[..., start : start + chain.units])
            else:
                box = emptied(y.new_empty(self.steps, self.batch, chain.units))
            mail = (address(box),)
        kernels.launch(
            kernel, how, self.batch,
            (weight.data_ptr(), left.data_ptr(), left_step, left_row, gate,
             target.data_ptr() + start * y.element_size(), step, row, *mail, address(kept),
             address(self.b_ih), address(self.b_hh), address(self.vectors),
             *self.row_arguments(), self.steps, self.batch, hidden, self.direction),
            *self.states(call.states), *self.states(call.reset_states), *self.states(finals),
            *self.states(every),
        )  # fmt: skip
        if target is not y:
            here = y[..., self.direction * hidden : (self.direction + 1) * hidden]
            here.copy_(target[..., :hidden])
