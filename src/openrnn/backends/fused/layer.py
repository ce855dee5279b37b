"""What no call changes of one layer and direction: sizes, orders of gates, kernels."""

from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from openrnn.backends.base import Needs, traced
from openrnn.backends.fused import kernels
from openrnn.codegen import cuda
from openrnn.codegen.config import KernelConfig, saved_values
from openrnn.codegen.tiles import tiles_of, whole_tiles
from openrnn.kernels.cuda.args import PermuteWeightsArgs, ReduceBiasGradientsArgs
from openrnn.kernels.cuda.table import PreparedArgs
from openrnn.memo import memo
from openrnn.memory import allocator_for
from openrnn.native import nvrtc
from openrnn.params import places
from openrnn.spec import Spec, dtype_name
from openrnn.tuning import chunks, measured, plan
from openrnn.tuning.units import is_short, units_of


class ForwardOptions(NamedTuple):
    """Options of a forward loop; each combination is a kernel of its own."""

    lengths: bool
    reset: bool
    all_states: bool  # writes the states of all steps
    reset_state: bool  # reads the states that a reset puts in place
    save: bool  # activations for backward

    @property
    def kind(self) -> str:
        """The kind of the kernel."""
        return "forward"


class BackwardOptions(NamedTuple):
    """Options of a backward loop; each combination is a kernel of its own."""

    lengths: bool
    reset: bool
    all_states: bool  # reads the gradients of the states of all steps
    reset_state: bool  # writes the gradients of the states that a reset puts in place

    @property
    def kind(self) -> str:
        """The kind of the kernel."""
        return "backward"


LoopOptions = ForwardOptions | BackwardOptions


def names_of(options: LoopOptions) -> tuple[str, ...]:
    """Those that are set, in their order."""
    return tuple(name for name, flag in zip(options._fields, options) if flag)


def measured_names(options: LoopOptions) -> plan.OptionNames:
    """Those that are set and by which schedules rank kernels."""
    return plan.measured_options(options.kind, names_of(options))


def spans(order: tuple[int, ...]) -> list[tuple[int, int]]:
    """An order as ranges [begin, end) of consecutive numbers: (2, 0, 1) as (2, 3), (0, 2)."""
    ranges = []
    for _, group in groupby(enumerate(order), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in group]
        ranges.append((numbers[0], numbers[-1] + 1))
    return ranges


def nibbles(order: tuple[int, ...]) -> int:
    """Numbers below 16 in one signed 64-bit word, the first in its lowest 4 bits."""
    word = sum(number << 4 * index for index, number in enumerate(order))
    return word - (word >> 63 << 64)


@memo(16)
def _is_measured(device: int | None) -> bool:
    """Whether a GPU, or for None any of this process, is one that padding was measured on."""
    devices = range(torch.cuda.device_count()) if device is None else [device]
    kinds = map(torch.cuda.get_device_properties, devices if torch.cuda.is_available() else ())
    return any(measured.knows((one.major, one.minor), one.multi_processor_count) for one in kinds)


def permute_blocks(gates: int, units: int, across: int) -> int:
    """The blocks of a launch of `permute_weights`: each moves a tile of a gate."""
    tile = cuda.PERMUTE_TILE
    return gates * (-(-units // tile) * -(-across // tile))


class LayerKernels:
    """Sizes, orders of gates and kernels of one layer and direction.

    Attributes:
        index: layer * directions + direction.
        units: those that kernels compute, at least H, see `layer_of_call`; unpadded: they are H.
        feeds_padded: dx has a column for each unit, as the layer below reads it as its dy: where
            units are padded, in upper layers of one direction.
        dtype_name: such as "bfloat16".
        saved: values that forward saves for a unit, row and step.
        saved_bytes: bytes that it saves for a step and 8 rows.
        param_indices: of its parameters among those of a call; matrix_indices: of w_ih, w_hh, b_ih,
            b_hh, None where there is none; vector_indices: of unit vectors.
        no_input_matrix: it reads x as it is, as layer 0 does in input modes other than "linear".
        x_gate: then the values of a row of x, padded to all units, from a gate to the next; 0 where
            x is the same for all.
        recompute: backward runs forward's loop again instead.
        spin_limit: see `kernels.kernel`.
        planes: gate gradients of a unit; width: of all units, a row of d_gates.
        own_order: the gates as the cell names them.
        input_order, recurrent_order: the gates in the order of the first planes, which are of the
            input side, and of the last ones, which are of the recurrent side.
        input_spans, recurrent_spans: the same as ranges of consecutive gates.
        input_ranks, recurrent_ranks: of each gate its rank in these orders, 4 bits each; kernels
            call them left and right.
    """

    def __init__(
        self, spec: Spec, index: int, dtype: torch.dtype, device: int, spin_limit: int = 0,
        units: int = 0,
    ) -> None:  # fmt: skip
        self.spec, self.index, self.dtype, self.device = spec, index, dtype, device
        self.spin_limit = spin_limit
        self.direction = index % spec.directions
        self.cell = cell = traced(spec)
        self.hidden, self.units = spec.hidden_size, units or whole_tiles(spec.hidden_size)
        self.unpadded = self.hidden == self.units
        self.feeds_padded = not self.unpadded and index > 0 and spec.directions == 1
        self.gates, self.vectors = len(spec.gates), len(spec.unit_params)
        self.param_indices = places(spec)[index]
        w_ih, w_hh, b_ih, b_hh, _, *vectors = self.param_indices
        if w_hh is None:
            raise ValueError("a network without a recurrent matrix")
        self.matrix_indices = w_ih, w_hh, b_ih, b_hh
        self.vector_indices = [param for param in vectors if param is not None]
        self.no_input_matrix = w_ih is None
        self.x_gate = self.units if spec.input_mode == "gates" else 0
        alone = cell.split_gates
        shared = tuple(gate for gate in cell.gates if gate not in alone)
        self.own_order = tuple(range(self.gates))
        self.input_order = tuple(cell.gates.index(gate) for gate in (*alone, *shared))
        self.recurrent_order = tuple(cell.gates.index(gate) for gate in (*shared, *alone))
        self.planes = len(cuda.planes(cell))
        self.input_spans = spans(self.input_order)
        self.recurrent_spans = spans(self.recurrent_order)
        numbers = range(self.gates)
        self.input_ranks = nibbles(tuple(map(self.input_order.index, numbers)))
        self.recurrent_ranks = nibbles(tuple(map(self.recurrent_order.index, numbers)))
        self.width = self.planes * self.units
        self.saved = saved_values(cell)
        self.saved_bytes = self.units * 8 * self.saved * dtype.itemsize
        self.recompute = spec.recompute == "gates"
        self.nulls = [0] * len(spec.states)
        self.dtype_name = dtype_name(dtype)

    def saved_shape(self, steps: int, batch: int) -> tuple[int, int, int, int]:
        """The shape of the saved activations of so many steps."""
        return steps, tiles_of(batch), self.units // 8, 64 * self.saved

    def kept_chunks(self, steps: int, batch: int) -> int:
        """With recompute the chunks of backward, before each of which it runs forward again."""
        row = self.width * self.dtype.itemsize
        return chunks.for_recompute(steps, *chunks.recompute_sizes(self.spec, batch, row))

    @cached_property
    def permute_weights(self) -> nvrtc.CudaKernel:
        """The kernel that puts a matrix's gates in another order."""
        return kernels.plain("permute_weights", self.dtype_name, self.device)

    @cached_property
    def reduce_bias_gradients(self) -> nvrtc.CudaKernel:
        """The kernel that reduces sums to gradients of biases and unit vectors."""
        return kernels.plain("reduce_bias_gradients", self.dtype_name, self.device)

    @cached_property
    def reduce_bias_args(self) -> PreparedArgs:
        """The arguments of that kernel but for sums and results."""
        return PreparedArgs(
            ReduceBiasGradientsArgs, planes=self.planes, gates=self.gates, vectors=self.vectors,
            units=self.units, hidden=self.hidden, left=self.input_ranks,
            right=self.recurrent_ranks,
        )  # fmt: skip

    @cached_property
    def bias_blocks(self) -> int:
        """The blocks of its launch."""
        rows = (2 * self.gates + self.vectors) * self.hidden
        return -(-rows // self.reduce_bias_gradients.threads)

    def permuted(
        self, matrix: Tensor, order: tuple[int, ...], transposed: bool, width: int = 0
    ) -> Tensor:
        """A matrix (G*H, N) as (G, units, width), its gates in another order, padded with zeros.

        Args:
            transposed: as (width, G, units).
            width: N where it is 0.
        """
        out, words, blocks = self.permutation(matrix, order, transposed, width)
        self.permute_weights.launch(blocks, words)
        return out

    def permutation(
        self, matrix: Tensor, order: tuple[int, ...], transposed: bool, width: int = 0
    ) -> tuple[Tensor, list[int], int]:
        """Memory for what `permuted` returns, and the arguments and blocks of its launch."""
        gates, units, columns = self.gates, self.units, matrix.shape[1]
        across = width or columns
        shape = (across, gates, units) if transposed else (gates, units, across)
        out = allocator_for(matrix.dtype, matrix.device).empty(*shape)
        args = PermuteWeightsArgs(
            matrix=matrix.data_ptr(), row=columns, out=out.data_ptr(), units=units,
            hidden=self.hidden, across=across, columns=columns, gates=gates, order=nibbles(order),
            transposed=transposed,
        )  # fmt: skip
        return out, args.words(), permute_blocks(gates, units, across)

    def wanted(self, needs: Needs) -> tuple[bool, ...]:
        """Which of its gradients are: of x, w_ih, w_hh, b_ih, b_hh, w_hr and the unit vectors."""
        below = needs.x or self.index >= self.spec.directions
        of_params = (index is not None and needs.params[index] for index in self.param_indices)
        return below, *of_params

    def kernel(
        self, batch: int, options: LoopOptions, loops: int = 1, layers: int = 1
    ) -> tuple[nvrtc.CudaKernel, KernelConfig]:
        """The kernel of a loop, and its configuration; loops, layers: see `kernels.kernel`."""
        request = self.request(options.kind, names_of(options), batch)
        return kernels.kernel(request, self.device, self.spin_limit, loops, layers)

    def request(self, kind: str, option_names: plan.OptionNames, batch: int) -> plan.LoopRequest:
        """A loop of this layer on its device."""
        about = torch.cuda.get_device_properties(self.device)
        return plan.LoopRequest(
            kind=kind, option_names=option_names, cell=self.cell, dtype=self.dtype_name,
            hidden=self.hidden, batch=batch, capability=(about.major, about.minor),
            processors=about.multi_processor_count, padded_to=self.units,
        )  # fmt: skip


layer_kernels = memo(4096)(LayerKernels)


def layer_of_call(
    spec: Spec, index: int, dtype: torch.dtype, device: int | None, steps: int, batch: int | None,
    spin_limit: int = 0,
) -> LayerKernels:  # fmt: skip
    """A layer and direction with the units that it has in a call.

    Args:
        batch, device: None: the most units that any has.
    """
    units = units_of(spec, dtype.itemsize, is_short(steps), batch, _is_measured(device))
    return layer_kernels(spec, index, dtype, device or 0, spin_limit, units)
