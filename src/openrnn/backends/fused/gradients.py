"""The gradients of one layer and direction: the reverse time loop, then products over all steps."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from openrnn.backends.fused import kernels
from openrnn.backends.fused.beside import Beside
from openrnn.backends.fused.kernels import address
from openrnn.backends.fused.parts import Part
from openrnn.backends.fused.ragged import blanked
from openrnn.backends.fused.run import ALIGNED, Run, empty, whole
from openrnn.kernels.cuda.args import BackwardArgs, ReduceBiasGradientsArgs
from openrnn.native.cublaslt import Matrix, multiply

Found = list[Tensor | None]  # of w_ih, w_hh, b_ih, b_hh, w_hr and the unit vectors


def backward(
    run: Run,
    x: Tensor,
    y: Tensor,
    held: Tensor,
    dy: Tensor | None,
    states: tuple[Sequence[Tensor | None], ...],
    wants: tuple[bool, ...],
) -> tuple[Tensor | None, Found]:
    """dx, and the gradients of w_ih, w_hh, b_ih, b_hh, w_hr and the unit vectors.

    `held` is what forward left; `states` are the gradients of finals and all states, and where to
    put those of initial and fresh ones; `wants` says what is needed of dx and each parameter.
    """
    chain, parts = run.chain, run.parts
    _, d_every, _, d_fresh = states
    kernel, how = chain.backward(run.batch, (
        run.rows is not None, run.reset is not None,
        any(state is not None for state in d_every),
        any(state is not None for state in d_fresh),
    ))  # fmt: skip
    # what a unit's h was multiplied by, (units, G, units), gates in the order of planes
    weight = chain.arranged(run.w_hh, chain.right, True)
    dy = _laid(run, dy)
    # what products read beside a loop, that loop does not write over
    most = run.steps if run.uneven else max(part.steps for part in parts)
    room = x.new_empty((most, run.batch, chain.width))
    pieces = -(-run.batch // how.rows) * how.tiles
    sums = x.new_empty(
        (len(parts) * pieces, chain.planes + chain.vectors, chain.units), dtype=torch.float32
    )  # fmt: skip
    piece = pieces * sums.stride(0) * sums.element_size()
    dx = x.new_empty(x.shape) if wants[0] else None
    left = right = None
    if run.w_ih is not None and wants[1]:
        left = _Weight(run, chain.left_spans, x.shape[2])
    if wants[2]:
        right = _Weight(run, chain.right_spans, chain.hidden)

    def products(part: Part, d_gates: Tensor) -> None:
        if dx is not None:
            _inputs(run, part.of(dx), d_gates)
        if left is not None:
            _input(run, part.of(x), d_gates, left)
        if right is not None:
            _recurrent(run, part, y, d_gates, right)

    carried: Tensor | None = None
    grid = how.clusters > 1
    if run.uneven and dx is not None:
        _ = run.input_by_planes  # both streams read it, so that torch's current one makes it
    with Beside(chain.device, run.uneven) as beside:
        for number in reversed(range(len(parts))):  # as forward ran them
            part = run.order[number]
            kept = run.records(number, x, held) if chain.again else part.of(held)
            d_gates = part.of(room) if most == run.steps else room[: part.steps]
            if grid and (number == len(parts) - 1 or not run.uneven):
                empty(d_gates)
            if grid and number and run.uneven:
                beside.later(partial(empty, run.order[number - 1].of(room)))
            beside.join()  # a grid's next loop reads the mailbox that was emptied there
            carry = run.carry() if number else None
            args = _arguments(run, part, kept, dy, d_gates, states, (carried, carry))
            args.weight, args.sums = weight.data_ptr(), sums.data_ptr() + number * piece
            kernels.launch(kernel, how, args, beside.begun)
            beside.start()
            carried = carry
            beside.later(partial(products, part, d_gates))
            del kept  # before the next part's are made
    found: Found = [None] * (5 + chain.vectors)
    found[0] = None if left is None else left.finished()
    found[1] = None if right is None else right.finished()
    _sums(run, sums, found, wants)
    return dx, found


def _arguments(
    run: Run, part: Part, kept: Tensor, dy: Tensor | None, d_gates: Tensor,
    states: tuple[Sequence[Tensor | None], ...], carries: tuple[Tensor | None, Tensor | None],
) -> BackwardArgs:  # fmt: skip
    """What backward's kernel takes of a part, but for `weight` and `sums`; dy is that of all."""
    d_final, d_every, d_initial, d_fresh = states
    way, size = 1 if run.direction else -1, kept.element_size()
    args = BackwardArgs()
    run.fill(args, part, carries, way)
    args.saved = kept.data_ptr()
    step, row, _ = (0, 0, 0) if dy is None else dy.stride()
    args.dy = 0 if dy is None else part.of(dy).data_ptr()
    args.dy_step_bytes, args.dy_row = way * step * size, row
    args.d_gates = d_gates.data_ptr()
    args.d_gates_step_bytes = way * d_gates.stride(0) * size
    args.d_final, args.d_all_states = run.states(d_final), run.states(d_every, part.begin)
    args.d_initial, args.d_reset_state = run.states(d_initial), run.states(d_fresh)
    return args


def _laid(run: Run, dy: Tensor | None) -> Tensor | None:
    """This direction's part of dy as the kernel reads it."""
    chain = run.chain
    if dy is None:
        return None
    if chain.spec.directions > 1:
        dy = dy[..., run.direction * chain.hidden : (run.direction + 1) * chain.hidden]
    if not chain.exact:
        dy = pad(dy, (0, chain.units - chain.hidden))
    elif dy.stride(-1) != 1 or not run.aligned(dy):
        dy = whole(dy)
    return dy


def _inputs(run: Run, dx: Tensor, d_gates: Tensor) -> None:
    """Writes dx (T, B, I): the gradients of the left side times the input matrix."""
    chain = run.chain
    if run.w_ih is None:
        parts = d_gates[..., : chain.gates * chain.units].unflatten(-1, (chain.gates, chain.units))
        torch.sum(parts[..., : chain.hidden], -2, out=dx)
        return
    inner = dx.shape[2]
    multiply(
        chain.dtype, chain.device, (dx.shape[0] * run.batch, inner, chain.gates * chain.units),
        Matrix(d_gates.data_ptr(), chain.width), Matrix(run.input_by_planes.data_ptr(), inner),
        Matrix(dx.data_ptr(), inner),
    )  # fmt: skip


def _padding(columns: int, size: int) -> int:
    """How many columns, of so many bytes a value, are missing up to the next 16 bytes."""
    return -columns % (ALIGNED // size)


def _padded(values: Tensor) -> Tensor:
    """(..., N), with columns of no meaning added where rows would not begin at 16 bytes.

    cuBLASLt's products of such rows over all steps run in one block: 180 us where 20 do.
    """
    columns = values.shape[-1]
    more = _padding(columns, values.element_size())
    if not more:
        return values
    wide = values.new_empty((*values.shape[:-1], columns + more))
    wide[..., :columns].copy_(values)
    return wide


class _Weight:
    """A gradient (G*H, N) to be: products write it gate by gate, from the order of planes.

    Until it is finished it has all units and as many columns as `_padded` gives; what several parts
    add up to is float32.
    """

    def __init__(self, run: Run, spans: list[tuple[int, int]], columns: int) -> None:
        self.chain, self.columns, self.spans = run.chain, columns, spans
        self.full = len(run.parts) > 1
        dtype = torch.float32 if self.full else self.chain.dtype
        wide = columns + _padding(columns, self.chain.dtype.itemsize)
        self.padded = wide > columns
        self.made = run.w_hh.new_empty((self.chain.gates * self.chain.units, wide), dtype=dtype)
        self.written = False

    def add(self, gradients: Matrix, other: Matrix, rows: int) -> None:
        """Adds gradients^T (G*units, rows) times other (rows, N), which is `_padded`."""
        chain, size, wide = self.chain, self.chain.dtype.itemsize, self.made.shape[1]
        done, start, gate = 0, self.made.data_ptr(), chain.units * wide * self.made.element_size()
        for a, b in self.spans:
            at = gradients.address + done * chain.units * size
            multiply(
                chain.dtype, chain.device, ((b - a) * chain.units, wide, rows),
                Matrix(at, gradients.stride, True), other,
                Matrix(start + a * gate, wide), self.written, self.full,
            )  # fmt: skip
            done += b - a
        self.written = True

    def finished(self) -> Tensor:
        if not self.written:
            self.made.zero_()
        made, chain = self.made, self.chain
        if self.padded or not chain.exact:
            made = made.unflatten(0, (chain.gates, chain.units))
            made = made[:, : chain.hidden, : self.columns].flatten(0, 1).contiguous()
        return made.to(chain.dtype)


def _matrix(tensor: Tensor) -> Matrix:
    # the stride of a single row says nothing: contiguous() leaves it as it was
    rows, columns = tensor.shape
    return Matrix(tensor.data_ptr(), tensor.stride(0) if rows > 1 else columns)


def _input(run: Run, x: Tensor, d_gates: Tensor, found: _Weight) -> None:
    """Adds to the gradient of the input matrix: the left side's gradients of a part times x."""
    inputs = _padded(x).contiguous()
    steps, batch, inner = inputs.shape
    other = Matrix(inputs.data_ptr(), inner)
    found.add(Matrix(d_gates.data_ptr(), run.chain.width), other, steps * batch)


def _recurrent(run: Run, part: Part, y: Tensor, d_gates: Tensor, found: _Weight) -> None:
    """Adds to the gradient of R: the right side's gradients of a part times h before."""
    chain, call, batch, steps = run.chain, run.call, run.batch, run.steps
    reverse, width = run.direction == 1, chain.width
    offset = width - chain.gates * chain.units
    reset = run.reset
    # step t reads h of t - 1, in reverse of t + 1; the first reads the initial state
    begin, end = (
        (part.begin, min(part.end, steps - 1)) if reverse else (max(part.begin, 1), part.end)
    )
    if end > begin:
        size, start = y.element_size(), run.direction * chain.hidden
        other = begin + (1 if reverse else -1)
        before = Matrix(y.data_ptr() + (start + other * y.stride(0)) * size, y.stride(1))
        if reset is not None or found.padded:
            h = y[other : other + end - begin, :, start : start + chain.hidden]
            if reset is not None:  # those past the lengths meet gradients, in reverse an h, of 0
                later = max(begin, other)
                h = blanked(h, None, reset[later : later + end - begin])
            h = _padded(h).contiguous()
            before = Matrix(h.data_ptr(), h.shape[2])
        at = d_gates.data_ptr() + (offset + (begin - part.begin) * batch * width) * size
        found.add(Matrix(at, width), before, (end - begin) * batch)
    if call.states:
        first = _first(run, part, d_gates[..., offset:])
        if first is not None:
            if reset is not None and not reverse:
                first = first.masked_fill(reset[0][:, None], 0)
            initial = _padded(call.states[0][chain.index])
            found.add(_matrix(first), _matrix(initial), batch)
    if call.reset_states and run.replaced is not None:
        # the rows of all steps that read a fresh state, added up for each sequence
        taken, where = d_gates[..., offset:], run.replaced[..., None]
        if reverse:
            taken, where = taken[:-1], where[1:]
        gathered = taken.masked_fill(~where, 0).sum(0, dtype=torch.float32).to(y.dtype)
        fresh = _padded(call.reset_states[0][chain.index])
        found.add(_matrix(gathered), _matrix(fresh), batch)


def _first(run: Run, part: Part, right: Tensor) -> Tensor | None:
    """Of a part's gradients (T, B, G*units) those of each row's first step; None if it has none."""
    if run.direction == 0:
        return right[0] if part.begin == 0 else None
    if run.rows is None:
        return right[-1] if part.end == run.steps else None
    last = run.rows.lengths - 1 - part.begin
    beyond = (last < 0) | (last >= part.steps)
    picked = right[last.clamp(0, part.steps - 1), torch.arange(run.batch, device=right.device)]
    return picked.masked_fill(beyond[:, None], 0)


def _sums(run: Run, sums: Tensor, found: Found, wants: tuple[bool, ...]) -> None:
    """The gradients of biases and unit vectors, from the sums (parts, planes + vectors, units)."""
    chain = run.chain
    if run.b_ih is not None and wants[3]:
        found[2] = torch.empty_like(run.b_ih)
    if run.b_hh is not None and wants[4]:
        found[3] = torch.empty_like(run.b_hh)
    vectors: Tensor | None = None
    if run.vectors is not None:
        vectors = torch.empty_like(run.vectors)
        found[5:] = vectors.unbind(0)
    elif found[2] is None and found[3] is None:
        return
    chain.reduce_bias_gradients.launch(
        -(-(2 * chain.gates + chain.vectors) * chain.hidden // 256),
        ReduceBiasGradientsArgs(
            sums=sums.data_ptr(), input_bias=address(found[2]), recurrent_bias=address(found[3]),
            unit_vectors=address(vectors), parts=sums.shape[0], planes=chain.planes,
            gates=chain.gates, vectors=chain.vectors, units=chain.units, hidden=chain.hidden,
            left=chain.left_word, right=chain.right_word,
        ),
    )  # fmt: skip
