"""The gradients of one layer and direction: the reverse time loop, then products over all steps."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from openrnn.backends.fused import kernels
from openrnn.backends.fused.run import Run, address, emptied, rows_of, whole
from openrnn.native.cublaslt import Matrix, multiply

Found = list[Tensor | None]  # of w_ih, w_hh, b_ih, b_hh, w_hr and the unit vectors


def backward(
    run: Run,
    x: Tensor,
    y: Tensor,
    kept: Tensor,
    dy: Tensor | None,
    states: tuple[Sequence[Tensor | None], ...],
    wants: tuple[bool, ...],
) -> tuple[Tensor | None, Found]:
    """dx, and the gradients of w_ih, w_hh, b_ih, b_hh, w_hr and the unit vectors.

    `states` are the gradients of finals and all states, and where to put those of initial and
    fresh ones; `wants` says for dx and each parameter whether it is needed.
    """
    chain = run.chain
    hidden, units, planes = chain.hidden, chain.units, chain.planes
    d_final, d_every, d_initial, d_fresh = states
    kernel, how = chain.backward(run.batch, (
        run.rows is not None, run.reset is not None,
        any(state is not None for state in d_every), any(state is not None for state in d_fresh),
    ))  # fmt: skip
    # what a unit's h was multiplied by, (units, G, units), gates in the order of planes
    weight = chain.arranged(run.w_hh, chain.right, True, True)
    step = row = 0
    if dy is not None:
        dy = dy[..., run.direction * hidden : (run.direction + 1) * hidden]
        if not chain.exact:
            dy = pad(dy, (0, units - hidden))
        elif dy.stride(-1) != 1 or not run.aligned(dy):
            dy = whole(dy)
        step, row, _ = dy.stride()
    d_gates = x.new_empty((run.steps, run.batch, chain.width))
    if how.clusters > 1:
        emptied(d_gates)
    elif run.rows is not None:
        d_gates.zero_()
    clusters = -(-run.batch // how.rows)
    sums = x.new_empty(
        (clusters * how.tiles, planes + chain.vectors, units), dtype=torch.float32
    )  # fmt: skip
    kernels.launch(
        kernel, how, run.batch,
        (weight.data_ptr(), kept.data_ptr(), address(dy), step, row, d_gates.data_ptr(),
         sums.data_ptr(), address(run.vectors), *run.row_arguments(), run.steps, run.batch, hidden,
         run.direction),
        *run.states(d_final), *run.states(d_every), *run.states(d_initial), *run.states(d_fresh),
    )  # fmt: skip
    found: Found = [None] * (5 + chain.vectors)
    dx = _inputs(run, x, d_gates) if wants[0] else None
    if run.w_ih is not None and wants[1]:
        found[0] = _left(run, x, d_gates)
    if wants[2]:
        found[1] = _recurrent(run, y, d_gates)
    _sums(run, sums, found, wants)
    return dx, found


def _inputs(run: Run, x: Tensor, d_gates: Tensor) -> Tensor:
    """dx (T, B, I): the gradients of the left side times the input matrix."""
    chain, rows = run.chain, run.steps * run.batch
    if run.w_ih is None:
        parts = d_gates[..., : chain.gates * chain.units].unflatten(-1, (chain.gates, chain.units))
        found: Tensor = parts[..., : chain.hidden].sum(-2)
        return found
    weight = run.w_ih
    if not chain.exact or len(chain.left_spans) > 1:
        weight = chain.arranged(weight, chain.left, False, False)
    dx = d_gates.new_empty(x.shape)
    inner = x.shape[2]
    multiply(
        chain.dtype, chain.device, (rows, inner, chain.gates * chain.units),
        Matrix(d_gates.data_ptr(), chain.width), Matrix(weight.data_ptr(), inner),
        Matrix(dx.data_ptr(), inner),
    )  # fmt: skip
    return dx


class _Weight:
    """A gradient (G*H, N) to be: products write it gate by gate, from the order of planes."""

    def __init__(self, run: Run, spans: list[tuple[int, int]], columns: int) -> None:
        self.chain, self.columns, self.spans = run.chain, columns, spans
        height = self.chain.gates * self.chain.units
        self.made = run.w_hh.new_empty((height, columns))
        self.written = False

    def add(self, gradients: Matrix, other: Matrix, rows: int) -> None:
        """Adds gradients^T (G*units, rows) times other (rows, N)."""
        chain, size, start = self.chain, self.made.element_size(), self.made.data_ptr()
        done = 0
        for a, b in self.spans:
            multiply(
                chain.dtype, chain.device, ((b - a) * chain.units, self.columns, rows),
                Matrix(gradients.address + done * chain.units * size, gradients.stride, True),
                other, Matrix(start + a * chain.units * self.columns * size, self.columns),
                self.written,
            )  # fmt: skip
            done += b - a
        self.written = True

    def finished(self) -> Tensor:
        chain = self.chain
        if not self.written:
            self.made.zero_()
        if chain.exact:
            return self.made
        parts = self.made.view(chain.gates, chain.units, self.columns)[:, : chain.hidden]
        return parts.reshape(chain.gates * chain.hidden, self.columns)


def _left(run: Run, x: Tensor, d_gates: Tensor) -> Tensor:
    """The gradient of the input matrix."""
    inputs = rows_of(x)
    found = _Weight(run, run.chain.left_spans, inputs.shape[1])
    found.add(Matrix(d_gates.data_ptr(), run.chain.width), _matrix(inputs), inputs.shape[0])
    return found.finished()


def _matrix(tensor: Tensor) -> Matrix:
    # the stride of a single row says nothing: contiguous() leaves it as it was
    rows, columns = tensor.shape
    return Matrix(tensor.data_ptr(), tensor.stride(0) if rows > 1 else columns)


def _recurrent(run: Run, y: Tensor, d_gates: Tensor) -> Tensor:
    """The gradient of R: the sum over steps of the right side's gradients times h before."""
    chain, call, batch, steps = run.chain, run.call, run.batch, run.steps
    reverse, width = run.direction == 1, chain.width
    found = _Weight(run, chain.right_spans, chain.hidden)
    offset = width - chain.gates * chain.units
    replaced = _replaced(run)
    if steps > 1:
        # step t reads h of t - 1, in reverse of t + 1
        size, start = y.element_size(), run.direction * chain.hidden
        rows, step = (steps - 1) * batch, batch * y.stride(1)
        before = Matrix(y.data_ptr() + (start + reverse * step) * size, y.stride(1))
        if replaced is not None:
            h = (y[1:] if reverse else y[:-1])[..., start : start + chain.hidden]
            h = h.masked_fill(replaced[1:, :, None], 0).contiguous()
            before = Matrix(h.data_ptr(), chain.hidden)
        later = d_gates.data_ptr() + (offset + (0 if reverse else batch * width)) * size
        found.add(Matrix(later, width), before, rows)
    if call.states:
        first = d_gates[-1 if reverse else 0, :, offset:]
        if reverse and run.rows is not None:
            last = (run.rows.lengths - 1).clamp(min=0)
            first = d_gates[last, torch.arange(batch, device=y.device), offset:]
        if replaced is not None and not reverse:
            first = first.masked_fill(replaced[0][:, None], 0)
        found.add(_matrix(first), _matrix(call.states[0][chain.index]), batch)
    if replaced is not None and call.reset_states:
        # the rows of all steps that read a fresh state, added up for each sequence
        taken, where = d_gates[..., offset:], replaced[..., None]
        if reverse:
            taken, where = taken[:-1], where[1:]
        gathered = taken.masked_fill(~where, 0).sum(0, dtype=torch.float32).to(y.dtype)
        found.add(_matrix(gathered), _matrix(call.reset_states[0][chain.index]), batch)
    return found.finished()


def _replaced(run: Run) -> Tensor | None:
    """Where (T, B) the state that step t reads was replaced; in reverse, that step t - 1 reads."""
    if run.reset is None or run.rows is None:
        return run.reset
    steps = torch.arange(run.steps, device=run.reset.device)[:, None]
    return run.reset & (steps < run.rows.lengths)


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
    chain.finish.launch(
        -(-(2 * chain.gates + chain.vectors) * chain.hidden // 256), sums.data_ptr(),
        address(found[2]), address(found[3]), address(vectors), sums.shape[0], chain.planes,
        chain.gates, chain.vectors, chain.units, chain.hidden, chain.left_word, chain.right_word,
    )  # fmt: skip
