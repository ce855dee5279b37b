"""Sizes in the CPU kernels: padding, tiles, chunks, scratch memory."""

from dataclasses import dataclass
from functools import cached_property

from openrnn.kernels.cpu.args import INT8_PANEL
from openrnn.kernels.cpu.host import SIZES, WIDTH, lanes_of, panel_of

# rows of a tile: enough to reuse each loaded weight often, few enough for the caches
MOST_ROWS = 32
# of one in backward of a single step: each tile after the first adds to the weight gradients
ONE_STEP_ROWS = 128
# bytes of a matrix that a core's own cache holds beside what else a step reads
CACHE_BYTES = 1 << 20
# elements of a chunk's gate rows: about half of a second-level cache; and its least rows
CHUNK_ELEMENTS = 1 << 16
LEAST_CHUNK_ROWS = 384
# elements of one factor of a weight gradient that are used at a time, and the least columns
STRIP_ELEMENTS = 1 << 16
STRIP_ROWS = 40
# panels of the other factor from which on both are packed, and columns of the first then
PANELS_TO_PACK = 8
PACKED_STRIP = 96
# rows of a weight gradient that are made in float32 before they are stored in 16 bits
STORE_16BIT_ROWS = 12
# of the panels of a weight gradient's second factor, which stay in a first-level cache
NEAR_BYTES = 16 << 10
# rows whose int8 products are made together
INT8_ROWS = 32
# words of rows that are rounded to pairs of bfloat16 together, about a quarter of a second-level
# cache, and the least such rows; a product of more rows is split
PAIR_WORDS, PAIRS_ROWS = 1 << 16, MOST_ROWS
# pairs of bfloat16 that rows and columns of them are whole blocks of, with zeros at the end
PAIR_BLOCK = 16
# panels of units from which on they are worth padding to a whole number
PANELS_TO_SHARE = 8


def whole_pairs(numbers: int) -> int:
    """Words of a row, or a column, of so many bfloat16 numbers in pairs. Kernels call it, too."""
    return (numbers + 2 * PAIR_BLOCK - 1) // (2 * PAIR_BLOCK) * PAIR_BLOCK


def rounded_rows(words: int) -> int:
    """How many rows of so many words are rounded together, at most. Kernels call it, too."""
    return max(PAIRS_ROWS, PAIR_WORDS // max(1, words))


def strip_offset(rows: int, widest: int, thread: int) -> int:
    """Elements before a thread's strip in the memory for packed factors of so many rows.

    Panels come first, then the strips of all threads; that of the thread after the last one would
    begin at the end. Kernels call it, too.
    """
    whole = (rows + 2 * PAIR_BLOCK - 1) // (2 * PAIR_BLOCK) * (2 * PAIR_BLOCK)
    return whole * (widest + thread * PACKED_STRIP)


def _up(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


@dataclass(frozen=True, eq=False)
class Layout:
    """The sizes of one layer and direction.

    Args:
        others: the number of states without the emitted one; vectors: of per-unit parameters.
        saved_sides: the number of gates whose recurrent side is saved apart.
        summed: every gate reads only the sum x + r.
        inputs: columns of the input matrix; 0 without one.
        vector: bytes of a SIMD vector.
    """

    dtype: str
    gates: int
    others: int
    vectors: int
    saved_sides: int
    summed: bool
    inputs: int
    units: int
    outputs: int
    vector: int = WIDTH

    @property
    def projecting(self) -> bool:
        return self.outputs != self.units

    @cached_property
    def size(self) -> int:
        """Bytes of an element."""
        return SIZES[self.dtype]

    @cached_property
    def panel(self) -> int:
        """Columns of a panel."""
        return panel_of(self.dtype, self.vector)

    @cached_property
    def padded(self) -> int:
        """H rounded up to whole vectors; to whole panels where threads are to share them."""
        if self.projecting or self.units >= PANELS_TO_SHARE * self.panel:
            return _up(self.units, self.panel)
        return _up(self.units, lanes_of(self.dtype, self.vector))

    @cached_property
    def columns(self) -> int:
        """Elements of a gate row: G times padded, rounded up to whole panels."""
        return _up(self.gates * self.padded, self.panel)

    @cached_property
    def h_width(self) -> int:
        """O rounded up to whole panels."""
        return _up(self.outputs, self.panel)

    @cached_property
    def x_width(self) -> int:
        """The input width rounded up to whole panels."""
        return _up(self.inputs, self.panel)

    @cached_property
    def shares(self) -> bool:
        """Whether threads may share a tile: each takes whole panels."""
        return self.padded % self.panel == 0

    def chunk(self, steps: int, rows: int) -> int:
        """Steps whose input products, or gradients, are done together."""
        most = max(CHUNK_ELEMENTS // self.columns, LEAST_CHUNK_ROWS)
        return max(1, min(steps, most // rows))

    def forward_scratch(self, rows: int, chunk: int, saves: bool) -> int:
        """Bytes of scratch memory of one team in the forward loop."""
        other = self.others * self.padded
        elements = 2 * rows * self.h_width + 3 * rows * other + 2 * self.columns
        elements += self.saved_sides * self.padded + rows * self.columns + rows * self.padded
        elements += chunk * rows * self.inputs + (0 if saves else chunk * rows * self.columns)
        return _up(elements * self.size, 64) + 64

    @cached_property
    def int8_memory(self) -> int:
        """Bytes of a thread for the rows that it rounds for int8 products, and their scales."""
        widest = _up(max(self.inputs, self.outputs), INT8_PANEL)
        return _up(INT8_ROWS * (2 * widest + 4), 64)

    def pairs_memory(self, rows: int, backward: bool) -> int:
        """Bytes of a thread for rows of bfloat16 pairs; `rows` are the most of a product."""
        words = 0
        widths = (self.gates * self.padded,) if backward else (self.inputs, self.outputs)
        for width in widths:
            row = whole_pairs(width)
            words = max(words, row * min(rows, rounded_rows(row)))
        return _up(4 * words, 64)

    @property
    def store_16bit_bytes(self) -> int:
        """Bytes of a thread for rows of weight gradients, before they are stored in 16 bits."""
        return STORE_16BIT_ROWS * self.widest * self.size

    @cached_property
    def widest(self) -> int:
        """The most columns of a weight gradient, rounded up to whole panels."""
        return max(self.h_width, self.x_width, self.padded if self.projecting else 0)

    def packs_gradient(self, columns: int) -> bool:
        """Whether the factors of a weight gradient with so many columns are packed."""
        return columns >= PANELS_TO_PACK * self.panel

    def backward_scratch(self, rows: int, chunk: int, threads: int, pairs: bool = False) -> int:
        """Bytes of scratch memory of one team of so many threads in the backward loop.

        Args:
            pairs: products are of bfloat16 pairs, whose factors are always packed.
        """
        capacity = chunk * rows
        elements = 2 * rows * self.h_width + 3 * rows * self.others * self.padded
        elements += rows * self.padded + 2 * self.columns
        elements += capacity * self.columns * (1 if self.summed else 2)
        elements += capacity * (self.h_width + self.x_width)
        if self.projecting:
            elements += capacity * (self.h_width + self.padded)
        packs = pairs or self.packs_gradient(self.widest)
        packed = self.packed(capacity, threads) if packs else 0
        return _up(elements * self.size + 16 * capacity, 64) + 64 + packed

    def packed(self, capacity: int, threads: int) -> int:
        """Bytes of a team for packed factors of weight gradients: panels, a strip a thread."""
        return _up(strip_offset(capacity, self.widest, threads) * self.size, 64)

    @cached_property
    def sums(self) -> tuple[int, ...]:
        """Elements of d_w_ih, d_w_hh, d_w_hr, d_bias_x, d_bias_r and d_vectors of one team."""
        return (
            self.columns * self.x_width, self.columns * self.h_width, self.outputs * self.padded,
            self.columns, self.columns, self.vectors * self.padded,
        )  # fmt: skip

    @cached_property
    def sum_offsets(self) -> tuple[int, ...]:
        """Where each of `sums` starts."""
        return tuple(sum(self.sums[:index]) for index in range(len(self.sums)))

    @cached_property
    def plain(self) -> bool:
        """Whether no size is padded, so that the sums of a single team are the gradients."""
        whole = self.x_width == self.inputs and self.h_width == self.outputs
        return whole and self.padded == self.units and self.columns == self.gates * self.units

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Elements of a row of each tensor that backward reads; 0 where none is saved.

        Gates, recurrent sides, states without the emitted one, outputs before the projection.
        """
        return (
            self.columns, self.saved_sides * self.padded, self.others * self.padded,
            self.padded if self.projecting else 0,
        )  # fmt: skip

    @cached_property
    def saved_indices(self) -> tuple[int, ...]:
        """The indices of `widths` that are not 0."""
        return tuple(index for index, width in enumerate(self.widths) if width)
