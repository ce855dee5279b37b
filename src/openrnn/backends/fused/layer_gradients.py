"""The gradients of one layer and direction: memory for them, and the products that give them."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from openrnn.backends.fused import products
from openrnn.backends.fused.copies import aligned, copied
from openrnn.backends.fused.layer import LayerKernels
from openrnn.backends.fused.pass_runner import PassRunner, Weights, address
from openrnn.backends.fused.weight_gradients import (
    WeightGradient,
    add_w_hh,
    add_w_ih,
    write_dx,
)
from openrnn.schedule import Chunk, Chunking

Found = list[Tensor | None]  # of w_ih, w_hh, b_ih, b_hh, w_hr and the unit vectors


class LayerTensors(NamedTuple):
    """What backward reads of a layer.

    Attributes:
        x: what it read (T, B, I); y: its output (T, B, D*H); dy: the gradient of y, None for zero.
        dx: the gradient of x, where the other direction has begun; None if this one is first.
    """

    x: Tensor
    y: Tensor
    dy: Tensor | None
    dx: "Dx | None"


class Dx:
    """The gradient of x (T, B, I): one direction writes that of a step, and the other adds to it.

    Args:
        memory: for it, (T, B, width), zero past I once it is written.
        columns: I.
    """

    def __init__(self, memory: Tensor, columns: int) -> None:
        self.memory = memory
        # a slice costs the host
        self.tensor = memory[..., :columns] if memory.shape[2] > columns else memory
        self._written: list[tuple[int, int]] = []  # ranges of steps that do not touch

    @property
    def dense(self) -> Tensor:
        """It without padding: a copy where it has some."""
        return self.tensor if self.tensor is self.memory else copied(self.tensor)

    def parts(self, chunk: Chunk) -> list[tuple[Chunk, bool]]:
        """Splits a chunk into ranges of steps that are written and that are not, and says which.

        From now on all of them count as written.
        """
        number, begin, end, _ = chunk
        edges = {edge for span in self._written for edge in span if begin < edge < end}
        found = [
            (
                Chunk(number, first, last, last - first),
                any(low <= first < high for low, high in self._written),
            )
            for first, last in pairwise(sorted({begin, end} | edges))
        ]
        spans = [*self._written, (begin, end)]
        touching = [span for span in spans if span[0] <= end and begin <= span[1]]
        whole = min(low for low, _ in touching), max(high for _, high in touching)
        self._written = [*(span for span in spans if span not in touching), whole]
        return found


class Biases(NamedTuple):
    """Gradients of both biases and of all unit vectors; None where there are none or not wanted."""

    b_ih: Tensor | None
    b_hh: Tensor | None
    unit_vectors: Tensor | None


class LayerGradients:
    """What the backward loop of a layer and direction writes, and the products over it.

    It keeps no reference to its pass, which keeps one to it: a pass that an error ends would stay
    in memory, with the autograd graph, until Python looks for cycles.

    Args:
        runner: the pass.
        parts: of the sums over rows that the launch for a chunk leaves; 0: the launch adds them up.
        wanted: which gradients are: of x, w_ih, w_hh, b_ih, b_hh, w_hr and the unit vectors.
        d_gates: memory for the gate gradients of all steps; None: it takes its own.

    Attributes:
        dx: None where not wanted.
        dy: this direction's part as the loop reads it.
        w_ih, w_hh: the gradients of these matrices, None where not wanted.
        all_d_gates: the memory for gate gradients: of all steps, or of the longest chunk.
    """

    def __init__(
        self, runner: PassRunner, weights: Weights, chunking: Chunking, parts: int,
        tensors: LayerTensors, wanted: tuple[bool, ...], d_gates: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.weights, self._parts = weights, parts
        self.layer: LayerKernels = weights.layer
        x, self.wanted = tensors.x, wanted
        self.x, self.y = x, tensors.y
        self.dy = _dy_of_direction(self.layer, tensors.dy)
        layer, chunks = self.layer, chunking.chunks
        # a loop must not overwrite what products beside it read
        at_once = chunking.mode == "wavefront" and not chunking.by_chunk
        self._whole = chunking.overlap or at_once or len(chunks) == 1
        if d_gates is None:
            steps = runner.steps if self._whole else max(chunk.steps for chunk in chunks)
            d_gates = runner.empty(steps, runner.batch, layer.width)
        self.all_d_gates = d_gates
        rows = len(chunks) * parts
        self._sums: Tensor | None = None
        if parts:
            self._sums = runner.empty_float32(rows, layer.planes + layer.vectors, layer.units)
        self._biases: Biases | None = None
        self._reduced = False
        self.dx = tensors.dx
        steps, batch, inner = x.shape
        sizes, has_matrix = (layer, inner, steps * batch), weights.w_ih is not None
        self._transposed = has_matrix and products.transposes_input(*sizes)
        if wanted[0] and self.dx is None:
            width = products.dx_width(*sizes) if has_matrix else inner
            self.dx = Dx(runner.empty(steps, batch, width), inner)
        self.w_ih = self.w_hh = None
        # products of each chunk add to the weights
        several = len(chunks) > 1 and (chunking.mode == "in_turn" or chunking.by_chunk)
        if weights.w_ih is not None and wanted[1]:
            self.w_ih = WeightGradient(weights, layer.input_spans, x.shape[2], several)
        if wanted[2]:
            self.w_hh = WeightGradient(weights, layer.recurrent_spans, layer.hidden, several)
        # made here, on the main stream: what products of both streams read, and what a side stream
        # writes for the caller
        if chunking.mode in {"wavefront", "both_directions"} or chunking.forks:
            self.biases()
        beside = chunking.overlap and chunking.mode != "wavefront" and len(chunks) > 1
        if beside and self.dx is not None and has_matrix:
            _ = weights.input_transposed if self._transposed else weights.input_by_planes

    def d_gates(self, chunk: Chunk) -> Tensor:
        """Memory for the gate gradients of a chunk (T, B, planes * units)."""
        return chunk.of(self.all_d_gates) if self._whole else self.all_d_gates[: chunk.steps]

    def sums_of(self, chunk: Chunk) -> int:
        """Where a chunk's sums over steps and rows go, which give bias gradients."""
        sums = self._sums
        if sums is None:
            return 0
        return sums.data_ptr() + chunk.number * self._parts * sums.stride(0) * sums.itemsize

    def products(self, runner: PassRunner, chunk: Chunk, of: str) -> None:
        """The products of a chunk, after its loop; `of`: see `GradientProducts`."""
        d_gates = self.d_gates(chunk)
        if self.dx is not None and of in ("all", "x"):
            for part, add in self.dx.parts(chunk):
                here = d_gates
                if part != chunk:  # a slice costs the host
                    here = d_gates[part.begin - chunk.begin : part.end - chunk.begin]
                write_dx(self.weights, part.of(self.dx.tensor), here, add, self._transposed)
        if self.w_ih is not None and of in ("all", "weights", "w_ih"):
            add_w_ih(self.weights, chunk.of(self.x), d_gates, self.w_ih)
        if self.w_hh is not None and of in ("all", "weights", "w_hh"):
            add_w_hh(runner, self.weights, chunk, self.y, d_gates, self.w_hh)
        if of in ("weights", "w_hh"):  # of all steps
            self._reduce_biases()

    def finished(self) -> Found:
        """The gradients of the parameters, after the products of all chunks."""
        found: Found = [None] * (5 + self.layer.vectors)
        found[0] = None if self.w_ih is None else self.w_ih.finished()
        found[1] = None if self.w_hh is None else self.w_hh.finished()
        if not self._reduced:
            self._reduce_biases()
        found[2], found[3], vectors = self.biases()
        if vectors is not None:
            each = zip(vectors, self.wanted[6:])  # each gradient has memory of its own
            found[5:] = [copied(one[None, None]).flatten() if want else None for one, want in each]
        return found

    def biases(self) -> Biases:
        """Memory for the gradients of biases and unit vectors."""
        if self._biases is None:
            weights = self.weights

            def room(like: Tensor | None, want: bool) -> Tensor | None:
                return None if like is None or not want else torch.empty_like(like)

            self._biases = Biases(
                room(weights.b_ih, self.wanted[3]), room(weights.b_hh, self.wanted[4]),
                # wanted or not: kernels write the gradients of all unit vectors or of none
                room(weights.unit_vectors, True),
            )  # fmt: skip
        return self._biases

    def _reduce_biases(self) -> None:
        """The gradients of biases and unit vectors, from the sums of all chunks."""
        if self.has_biases:
            layer = self.layer
            layer.reduce_bias_gradients.launch(layer.bias_blocks, self.begin_reduction())
        self._reduced = True

    @property
    def has_biases(self) -> bool:
        """Whether there are sums, and gradients that they give."""
        return self._sums is not None and self.biases() != (None, None, None)

    def begin_reduction(self) -> list[int]:
        """The arguments of the launch that gives these gradients, which count as reduced then.

        Of biases that are not wanted it writes nothing; unit vectors it always writes.
        """
        self._reduced = True
        biases, sums = self.biases(), self._sums
        return self.layer.reduce_bias_args.words(
            sums=address(sums), parts=0 if sums is None else sums.shape[0],
            input_bias=address(biases.b_ih), recurrent_bias=address(biases.b_hh),
            unit_vectors=address(biases.unit_vectors),
        )  # fmt: skip


def _dy_of_direction(layer: LayerKernels, dy: Tensor | None) -> Tensor | None:
    """This direction's part of dy (T, B, D*H) as the backward loop reads it.

    The layer above may have written it with zeros for all units already.
    """
    if dy is None:
        return None
    if layer.spec.directions > 1:
        dy = dy[..., layer.direction * layer.hidden : (layer.direction + 1) * layer.hidden]
    ready = dy.shape[2] == layer.units and dy.stride(-1) == 1 and aligned(dy)
    return dy if ready else copied(dy, layer.units)
