"""One layer and direction on the GPU: tensors to kernel arguments, and the input side's product."""

from collections.abc import Sequence
from functools import cached_property
from math import prod
from struct import pack, unpack
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from openrnn import philox
from openrnn.backends.base import Call
from openrnn.backends.fused import kernels
from openrnn.backends.fused.beside import Beside
from openrnn.backends.fused.chain import Chain, chain
from openrnn.backends.fused.kernels import address
from openrnn.backends.fused.parts import Part, even, split
from openrnn.backends.fused.ragged import Rows
from openrnn.codegen.tiles import Tiles
from openrnn.native.cublaslt import Matrix, multiply
from openrnn.native.nvrtc import Kernel

ALIGNED = 16  # bytes, of every row that a kernel copies


def whole(tensor: Tensor) -> Tensor:
    """The tensor, contiguous, where a 16-byte copy may start."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNED == 0 else tensor.clone()


def empty(mailbox: Tensor) -> None:
    """Sets all bits of a mailbox: a nan that no kernel writes."""
    bits = torch.int16 if mailbox.element_size() == 2 else torch.int32
    mailbox.view(bits).fill_(-1)


def dropped(call: Call, layer: int, y: Tensor) -> Tensor:
    """The output of a layer (T, B, D*H), or its gradient, with the layer's mask on it."""
    if not call.problem.drops:
        return y
    if call.seed is None:
        raise ValueError("dropout needs a seed")
    p, y = call.problem.spec.dropout, y.contiguous()
    kernel = kernels.plain("dropout", str(y.dtype).removeprefix("torch."), y.device.index or 0)
    out = torch.empty_like(y)
    steps, batch, width = y.shape
    (scale,) = unpack("i", pack("f", philox.scale(p)))
    threads = steps * batch * ((width + 3) // 4)
    kernel.launch(
        -(-threads // kernel.threads), y.data_ptr(), out.data_ptr(), steps, batch, width,
        call.seed.data_ptr(), layer, philox.threshold(p), scale,
    )  # fmt: skip
    return out


class Inputs(NamedTuple):
    """What forward's kernel needs of a part's steps besides their masks.

    Attributes:
        left: the input side (T, B, G*units), or x itself; gate: the stride of its gates.
        mail: a grid's mailbox; None where y is it, or where none is.
    """

    left: Tensor
    gate: int
    mail: Tensor | None


class Run:
    """One layer and direction of a call.

    Of its forward, or of a backward that `wants` some of the gradients of x and each parameter.
    """

    def __init__(
        self, call: Call, layer: int, direction: int, rows: Rows | None,
        wants: tuple[bool, ...] = (),
    ) -> None:  # fmt: skip
        problem, x = call.problem, call.x
        spec = problem.spec
        device = x.device.index or 0
        self.chain: Chain = chain(spec, layer * spec.directions + direction, x.dtype, device)
        self.call, self.rows, self.direction = call, rows, direction
        self.steps, self.batch = x.shape[0], x.shape[1]
        params = call.params
        self.w_ih, w_hh, self.b_ih, self.b_hh, _, *vectors = [
            None if place is None else params[place].contiguous() for place in self.chain.places
        ]
        if w_hh is None:
            raise ValueError("a network without a recurrent matrix")
        self.w_hh: Tensor = w_hh
        unit = [vector for vector in vectors if vector is not None]
        self.vectors = torch.stack(unit) if unit else None
        self.record_bytes = prod(self.chain.records(1, self.batch)) * x.element_size()
        self.reset = None if call.reset is None else call.reset.contiguous()
        again = self.chain.again and problem.grad
        # the gradients of fresh states are added up inside one launch
        number = 1 if call.reset_states else self.chain.parts(self.steps, self.batch, again)
        edges = [] if number > 1 or again else self._edges(wants)
        self.uneven = bool(edges)  # parts of several lengths: products run beside loops
        if not edges:
            edges = even(number, self.steps)
        elif direction:  # forward begins at the end
            edges = [self.steps - edge for edge in reversed(edges)]
        self.parts = split(edges, rows, self.reset)
        self.order = self.parts[::-1] if direction else self.parts  # that of forward

    def _edges(self, wants: tuple[bool, ...]) -> list[int]:
        """Where parts, as forward runs them, begin and end; [] without products beside loops."""
        few = self.steps * self.batch < self.chain.worth
        if few or self.w_ih is None or self.call.reset_states:
            return []
        inner, hidden = self.w_ih.shape[1], self.chain.hidden
        masks = (("lengths", self.rows), ("reset", self.reset))
        flags = tuple(name for name, mask in masks if mask is not None)
        if wants:
            sizes = zip((inner, inner, hidden), wants)  # of dx, dW and dR
            kind, columns = "backward", sum(size for size, want in sizes if want)
        else:
            kind, columns, problem = "forward", inner, self.call.problem
            flags += ("every",) if problem.return_states else ()
            flags += ("keep",) if problem.grad else ()
        return self.chain.edges(self.steps, self.batch, columns, kind, flags)

    @cached_property
    def replaced(self) -> Tensor | None:
        """Where (T, B) the state that step t reads was replaced; in reverse, that t - 1 reads."""
        if self.reset is None or self.rows is None:
            return self.reset
        steps = torch.arange(self.steps, device=self.reset.device)[:, None]
        return self.reset & (steps < self.rows.lengths)

    def aligned(self, tensor: Tensor) -> bool:
        """Whether 16-byte copies of its rows may start where they do."""
        size = tensor.element_size()
        return tensor.data_ptr() % ALIGNED == 0 and all(
            stride * size % ALIGNED == 0 for stride in tensor.stride()[:-1]
        )

    def states(self, group: Sequence[Tensor | None], begin: int = 0) -> list[int]:
        """Addresses of this chain's part of each state's tensor (L*D, ...), 0 where none is.

        Of states of all steps (L*D, T, ...), those from `begin` on.
        """
        index = self.chain.index
        if not group:
            return self.chain.nulls
        return [
            0 if state is None
            else state.data_ptr()
            + (index * state.stride(0) + begin * state.stride(1)) * state.element_size()
            for state in group
        ]  # fmt: skip

    def shared(
        self, part: Part, carried: Tensor | None, carry: Tensor | None, way: int
    ) -> tuple[int, int, int, int, int, int, int, int, int, int, int]:
        """What both kernels take last before states: lengths, order, resets, carries, sizes, moves.

        `way`: 1 where the loop's next step is the next of time, or -1.
        """
        rows = part.rows
        return (
            0 if rows is None else rows.lengths.data_ptr(),
            0 if rows is None else rows.order.data_ptr(),
            address(part.reset), address(carried), address(carry),
            part.steps, self.batch, self.chain.hidden, self.direction,
            way * self.record_bytes, way * self.batch,
        )  # fmt: skip

    def carry(self) -> Tensor:
        """Room for what one part leaves to the next: float32 (states, B, H)."""
        size = (len(self.chain.nulls), self.batch, self.chain.hidden)
        return self.w_hh.new_empty(size, dtype=torch.float32)

    @cached_property
    def _matrix(self) -> Tensor:
        """R (G*H, H) as forward reads it."""
        return whole(self.w_hh) if self.chain.exact else self.w_hh

    @cached_property
    def input_by_planes(self) -> Tensor:
        """The input matrix with gates in the order of planes."""
        chain, weight = self.chain, self.w_ih
        if weight is None:
            raise ValueError("a skip input has no matrix")
        if chain.exact and len(chain.left_spans) == 1:
            return weight
        return chain.arranged(weight, chain.left, False)

    def _prepared(
        self, part: Part, how: Tiles, x: Tensor, y: Tensor, beside: Beside | None = None
    ) -> Inputs:
        """Makes what forward's kernel needs of a part, whose x and y are given.

        With `beside` it is there after the loop that comes next.

        What stands between H and the next multiple of 8 is no number: kernels use none of it.
        """
        chain, weight = self.chain, self.w_ih
        box, own = self._mailbox(part, how, y)
        mail = box if own else None
        if weight is None:
            wide = x if chain.exact else pad(x, (0, chain.units - chain.hidden))
            plain = wide.stride(-1) == 1 and self.aligned(wide)
            if box is not None:
                empty(box)
            return Inputs(wide if plain else whole(wide), 0, mail)
        x, width = x.contiguous(), chain.gates * chain.units
        steps, batch, inner = x.shape
        left = x.new_empty(steps, batch, width)
        columns, count = (width, 1) if chain.exact else (chain.hidden, chain.gates)

        def work() -> None:
            multiply(
                chain.dtype, chain.device, (steps * batch, columns, inner),
                Matrix(x.data_ptr(), inner),
                Matrix(weight.data_ptr(), inner, True, columns * inner),
                Matrix(left.data_ptr(), width, False, chain.units), count=count,
            )  # fmt: skip
            if box is not None:  # last: L2 holds it when the loop begins
                empty(box)

        if beside is None:
            work()
        else:
            beside.later(work)
        return Inputs(left, chain.units, mail)

    def _mailbox(self, part: Part, how: Tiles, y: Tensor) -> tuple[Tensor | None, bool]:
        """A grid's mailbox, and whether it is one of its own: else it is y."""
        chain = self.chain
        if how.clusters == 1:
            return None, False
        # y can be it where it has what is posted, and nothing else
        if part.rows is None and self.reset is None and chain.exact and not how.half:
            start = self.direction * chain.hidden
            return y[..., start : start + chain.hidden], False
        sizes = (part.steps, self.batch, chain.units)
        return y.new_empty(sizes, dtype=torch.float16 if how.half else None), True

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        held: Tensor | None,
        finals: list[Tensor],
        every: list[Tensor],
    ) -> None:
        """Writes this direction's part of y (T, B, D*H), what backward needs, and the states.

        `held` are the records (T, ...), or with recompute what the parts leave to the next.
        """
        records, states = (None, held) if self.chain.again else (held, None)
        loop, how = self._kernel(bool(every), records is not None)
        carried: Tensor | None = None
        inputs: Inputs | None = None
        with Beside(self.chain.device, self.uneven) as beside:
            for number, part in enumerate(self.order):
                kept = None if records is None else part.of(records)
                more, carry, ahead = number < len(self.parts) - 1, None, None
                if more:
                    carry = self.carry() if states is None else states[number]
                if inputs is None:
                    inputs = self._prepared(part, how, part.of(x), part.of(y))
                if more and self.uneven:
                    after = self.order[number + 1]
                    ahead = self._prepared(after, how, after.of(x), after.of(y), beside)
                self._launch(
                    loop, how, part, inputs, part.of(y), kept, (carried, carry), finals, every,
                    beside.begun,
                )  # fmt: skip
                beside.start()
                beside.join()  # the next loop reads what was made there
                carried, inputs = carry, ahead

    def _kernel(self, every: bool, keep: bool) -> tuple[Kernel, Tiles]:
        """Forward's kernel and its tiles; `every`: it writes all states, `keep`: records."""
        fresh, lengths = bool(self.call.reset_states), self.rows is not None
        return self.chain.forward(self.batch, (lengths, self.reset is not None, every, fresh, keep))

    def records(self, number: int, x: Tensor, held: Tensor) -> Tensor:
        """What backward needs of the part that forward ran as this number, by running it again."""
        part, chain = self.order[number], self.chain
        x = part.of(x)
        shape = chain.records(part.steps, self.batch)
        kept = x.new_empty(shape)
        y = x.new_empty((part.steps, self.batch, chain.spec.directions * chain.hidden))
        carried = held[number - 1] if number else None
        loop, how = self._kernel(False, True)
        inputs = self._prepared(part, how, x, y)
        # the last part's carry is nobody's: final states stand already
        self._launch(loop, how, part, inputs, y, kept, (carried, self.carry()), [], [])
        return kept

    def _launch(
        self,
        loop: Kernel,
        how: Tiles,
        part: Part,
        inputs: Inputs,
        y: Tensor,
        kept: Tensor | None,
        carries: tuple[Tensor | None, Tensor | None],
        finals: list[Tensor],
        every: list[Tensor],
        begun: int = 0,
    ) -> None:
        """Runs one part: inputs, y and kept of its steps, finals and every of all.

        `begun`: see `Kernel.launch`.
        """
        call, hidden = self.call, self.chain.hidden
        left, gate, mail = inputs
        start = self.direction * hidden
        way, size = -1 if self.direction else 1, y.element_size()
        left_step, left_row, _ = left.stride()
        step, row, _ = y.stride()
        kernels.launch(
            loop, how, self.batch,
            (self._matrix.data_ptr(), left.data_ptr(), way * left_step * size, left_row, gate,
             y.data_ptr() + start * size, way * step * size, row,
             *((address(mail),) if how.clusters > 1 else ()), address(kept),
             address(self.b_ih), address(self.b_hh), address(self.vectors),
             *self.shared(part, *carries, way)),
            *self.states(call.states), *self.states(call.reset_states), *self.states(finals),
            *self.states(every, part.begin), begun=begun,
        )  # fmt: skip
