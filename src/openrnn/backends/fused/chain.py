"""One layer and direction of a network as the kernels know it: all that no call changes."""

from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from openrnn.backends.base import traced
from openrnn.backends.fused import beside, kernels, measured, parts, plan
from openrnn.backends.fused.limits import Limits
from openrnn.codegen import cuda, tiles
from openrnn.native import nvrtc
from openrnn.native.lane import able
from openrnn.params import places
from openrnn.spec import Spec

Flags = tuple[bool, ...]
FORWARD = ("lengths", "reset", "every", "fresh", "keep")  # the flags of a kernel, in their order
BACKWARD = ("lengths", "reset", "every", "fresh")


def spans(order: tuple[int, ...]) -> list[tuple[int, int]]:
    """An order as spans of numbers that follow each other: (2, 0, 1) as (2, 3), (0, 2)."""
    found = []
    for _, group in groupby(enumerate(order), lambda pair: pair[1] - pair[0]):
        places = [place for _, place in group]
        found.append((places[0], places[-1] + 1))
    return found


def nibbles(order: tuple[int, ...]) -> int:
    """Small numbers in one 64-bit word, the first in its lowest 4 bits; as a signed number."""
    word = sum(number << 4 * place for place, number in enumerate(order))
    return word - (word >> 63 << 64)


class Chain:
    """Sizes, places and kernels of one layer and direction.

    Attributes:
        units: H as the kernels see it, a multiple of 8.
        record: the values of a kept record; again: they are computed again in backward.
        planes: the number of gate gradients of a unit, `width` all of them in a row of d_gates.
        left, right: the gates in the order of the first and of the last planes.
        left_spans, right_spans: the same as spans of gates that follow each other.
        left_word, right_word: the place of each gate on its side, 4 bits each.
    """

    def __init__(self, spec: Spec, index: int, dtype: torch.dtype, device: int) -> None:
        self.spec, self.index, self.dtype, self.device = spec, index, dtype, device
        self.direction = index % spec.directions
        self.cell = cell = traced(spec)
        self.hidden, self.units = spec.hidden_size, plan.units_of(spec.hidden_size)
        self.exact = self.hidden == self.units
        self.gates, self.vectors = len(spec.gates), len(spec.unit_params)
        self.places = places(spec)[index]
        alone = cell.apart
        shared = tuple(gate for gate in cell.gates if gate not in alone)
        self.left = tuple(cell.gates.index(gate) for gate in (*alone, *shared))
        self.right = tuple(cell.gates.index(gate) for gate in (*shared, *alone))
        self.planes = len(cuda.planes(cell))
        self.left_spans, self.right_spans = spans(self.left), spans(self.right)
        self.left_word = nibbles(tuple(self.left.index(gate) for gate in range(self.gates)))
        self.right_word = nibbles(tuple(self.right.index(gate) for gate in range(self.gates)))
        self.width = self.planes * self.units
        self.record = tiles.record(cell)
        self.again = spec.recompute == "gates"
        self.nulls = [0] * len(spec.states)
        self.name = str(dtype).removeprefix("torch.")
        columns = 2 * spec.layer_input(index // spec.directions) + self.hidden
        # rows of all steps from which products may be worth running beside loops
        self.worth = (beside.COST + beside.LEAST) / self._product(columns)
        self._loops: dict[tuple[str, kernels.Flags, int], tuple[float, float, float]] = {}
        self._kernels: dict[tuple[Any, ...], tuple[nvrtc.Kernel, tiles.Tiles]] = {}

    def parts(self, steps: int, batch: int, again: bool) -> int:
        """In how many parts a call runs; `again`: backward will compute gates once more."""
        count = parts.count_again if again else parts.count
        return count(steps, batch, self.width * self.dtype.itemsize)

    def edges(
        self, steps: int, batch: int, columns: int, kind: str, flags: kernels.Flags
    ) -> list[int]:
        """Where parts of a call begin and end whose products run beside loops; [] where none do.

        `columns`: of all matrices in products over steps, of G*H rows each; `kind` and `flags` of
        the loop.
        """
        products = steps * batch * self._product(columns)
        loop, idle, slower = self._loop(kind, flags, (batch + 7) // 8)
        return beside.edges(steps, products, steps * loop, idle, slower)

    def _product(self, columns: int) -> float:
        """Microseconds of a row in products of matrices of so many columns."""
        flop = 2.0 * self.gates * self.hidden * columns
        return flop / beside.RATE[self.dtype.itemsize]

    def _loop(self, kind: str, flags: kernels.Flags, many: int) -> tuple[float, float, float]:
        """Microseconds of a step by the model, and two shares of `beside.edges`: idle, slower.

        No multiprocessor counts as idle on devices where nothing was measured, and with drivers
        that cannot say that all blocks of a launch have begun.
        """
        found = self._loops.get((kind, flags, many))
        if found is None:
            about = torch.cuda.get_device_properties(self.device)
            where, most = (about.major, about.minor), about.multi_processor_count
            asked = self.cell, self.name, self.hidden, 8 * many, where, most
            how, limits = kernels.ranked(kind, flags, *asked)[0], Limits.of(where, most)
            time = plan.us_of(self.cell, self.name, how, 8 * many, limits)
            blocks = -(-8 * many // how.rows) * how.clusters * how.cluster
            known = where == measured.CAPABILITY and able()
            slower = beside.SLOWER if kind == "backward" and how.clusters > 1 else 0.0
            found = time, max(0.0, 1 - blocks / most) if known else 0.0, slower
            self._loops[kind, flags, many] = found
        return found

    def records(self, steps: int, batch: int) -> tuple[int, int, int, int]:
        """The shape of what backward needs of so many steps."""
        return steps, (batch + 7) // 8, self.units // 8, 64 * self.record

    @cached_property
    def arrange(self) -> nvrtc.Kernel:
        """The kernel that puts weights in another order."""
        return kernels.plain("arrange", self.name, self.device)

    @cached_property
    def finish(self) -> nvrtc.Kernel:
        """The kernel that makes gradients of biases and unit vectors from their sums."""
        return kernels.plain("finish", self.name, self.device)

    def arranged(self, matrix: Tensor, order: tuple[int, ...], turned: bool) -> Tensor:
        """A matrix (G*H, N) as (G, units, N), gates in another order, 0 where there is no unit.

        `turned`: as (units, G, units), where N are units, too.
        """
        gates, units, columns = self.gates, self.units, matrix.shape[1]
        across = units if turned else columns
        tile = cuda.ARRANGE_TILE
        out = matrix.new_empty((units, gates, units) if turned else (gates, units, columns))
        self.arrange.launch(
            gates * (-(-units // tile) * -(-across // tile)), matrix.data_ptr(), out.data_ptr(),
            units, self.hidden, across, columns, gates, nibbles(order), turned,
        )  # fmt: skip
        return out

    def forward(self, batch: int, flags: Flags) -> tuple[nvrtc.Kernel, tiles.Tiles]:
        """The forward kernel and its tiles; `flags` as FORWARD names them."""
        return self._kernel("forward", FORWARD, batch, flags)

    def backward(self, batch: int, flags: Flags) -> tuple[nvrtc.Kernel, tiles.Tiles]:
        """The backward kernel and its tiles; `flags` as BACKWARD names them."""
        return self._kernel("backward", BACKWARD, batch, flags)

    def _kernel(
        self, kind: str, names: tuple[str, ...], batch: int, flags: Flags
    ) -> tuple[nvrtc.Kernel, tiles.Tiles]:
        many = (batch + 7) // 8
        key = (kind, many, flags, kernels.PATIENCE)
        found = self._kernels.get(key)
        if found is None:
            on = tuple(name for name, flag in zip(names, flags) if flag)
            found = kernels.kernel(kind, self.cell, self.name, self.hidden, many, on, self.device)
            self._kernels[key] = found
        return found


chain = lru_cache(maxsize=4096)(Chain)
