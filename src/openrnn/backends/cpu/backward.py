"""The backward pass on the CPU, as a program."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from openrnn.backends.base import Cotangents, Needs, state_shapes
from openrnn.backends.cpu import reserve, schedules
from openrnn.backends.cpu.layer import LayerKernels
from openrnn.backends.cpu.program import PROGRAMS, Clear, Launch, Program, Slot, SlotRef
from openrnn.backends.cpu.program_builder import ProgramBuilder, ProgramKey, Rows, address, slots
from openrnn.backends.cpu.rounding import backward_reads_in_place
from openrnn.codegen import build
from openrnn.memo import memo
from openrnn.schedule import execute
from openrnn.schedule.operations import BeginLayer, FinishWeights, Loop

if TYPE_CHECKING:
    from openrnn.kernels.cpu.matrices import BackwardKernels16Bit, Gradient


class IncomingGradients(NamedTuple):
    """Which gradients reach a call: that of y, of each final state, of each state of all steps."""

    y: bool
    finals: tuple[bool, ...]
    all_states: tuple[bool, ...]


class View(NamedTuple):
    """A gradient that is part of a tensor: the arguments of `as_strided`."""

    tensor: int  # its index among those that a run makes
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


# of a gradient among the tensors that a run makes; None: not wanted
GradientLocation = int | View | None


class BackwardProgram(NamedTuple):
    """A backward pass, and where the gradients that are wanted lie."""

    program: Program
    x: GradientLocation
    states: list[GradientLocation]
    params: list[GradientLocation]
    reset_states: list[GradientLocation]


class BackwardBuilder(ProgramBuilder):
    """The operations of a backward pass.

    Args:
        incoming: which gradients reach the call; needs: which are wanted.
    """

    def __init__(self, key: ProgramKey, incoming: IncomingGradients, needs: Needs) -> None:
        kept = len(reserve.shapes(key.problem, key.steps, key.batch))
        super().__init__(key, [*slots(key), *_slots(kept, incoming)])
        spec, problem = self.spec, self.problem
        self.incoming, self.needs = incoming, needs
        self.saved = reserve.by_layer(spec, kept)
        width = spec.directions * spec.output_size
        between = [self.rows(at, width) for at in self.saved.outputs]
        # of each layer: what it reads and writes
        self.inputs = [Rows(SlotRef("x"), SlotRef("x_step"), SlotRef("x_row")), *between]
        self.outputs = [*between, self.rows(SlotRef("y"), width)]
        # gradients of what layers write: one is read while another is written
        size = self.steps * self.batch * width * self.size
        self._between = [self.workspace.take(size) for _ in range(min(2, spec.num_layers - 1))]
        dy = Rows(SlotRef("dy"), SlotRef("dy_step"), SlotRef("dy_row"))
        self._dy = dy if incoming.y else None
        self._dx: Rows | None = None
        # of the current layer and direction: sums of gradients, a row for each team of threads;
        # how those of weights, biases and unit vectors lie in a row; the workspace before it
        self._sums: SlotRef | None = None
        self._gradients: list[Gradient | None] = []
        # d_w_ih and d_w_hh, where they are tensors of their own
        self._separate_gradients: list[SlotRef] = []
        self._mark = 0
        # for matrices that are read, and gradients that are stored, in 16 bits
        self._kernels_16bit: BackwardKernels16Bit | None = None
        if backward_reads_in_place(problem, key.steps, key.batch):
            from openrnn.kernels.cpu import matrices

            self._kernels_16bit = matrices.backward_kernels_16bit(problem.dtype_name)
        self.d_x: GradientLocation = None
        if needs.x:
            # the loops write nothing past the end of a sequence
            shape = self.steps, self.batch, spec.input_size
            dx = self.make("dx", shape, zeros=problem.lengths)
            self.d_x = self.index_of(dx)
        self.d_states = self._zeros("d_state", needs.states)
        self.d_reset_states = self._zeros("d_reset_state", needs.reset_states)
        self.d_params: list[GradientLocation] = [None] * len(needs.params)

    def _zeros(self, name: str, wanted: tuple[bool, ...]) -> list[GradientLocation]:
        """Gradients of states, which the loops add to."""
        found: list[GradientLocation] = []
        for k, (shape, want) in enumerate(zip(state_shapes(self.problem, self.batch), wanted)):
            index = self.index_of(self.make((name, k), shape, zeros=True)) if want else None
            found.append(index)
        return found

    def begin_layer(self, operation: BeginLayer) -> None:
        """The gradient of what the layer above read becomes that of what this one wrote."""
        if operation.direction:
            return
        spec, layer = self.spec, operation.layer
        if layer < spec.num_layers - 1:
            self._dy = self._dx
        self._dx = None
        if layer:
            width = spec.directions * spec.output_size
            self._dx = self.rows(self._between[(layer - 1) % 2], width)
            if self.problem.lengths:
                size = self.steps * self.batch * width * self.size
                self.operations.append(Clear(self._dx.at, size, self.slot_indices))
        elif self.needs.x:
            self._dx = self.rows(SlotRef("dx"), spec.input_size)

    def loop(self, operation: Loop) -> None:
        """The loop of a layer and direction, after its weights are packed."""
        from openrnn.kernels.cpu import matrices

        layer, self._mark = self.kernels(operation), self.workspace.mark()
        layout = layer.layout
        plan = self.plan(layer, operation, "backward")
        loop, derivative = build.backward(layer.cell, layout.dtype)
        args = plan.args()
        args.row_function = derivative
        saved = self.saved.activations[layer.chain]
        x, y = self.inputs[operation.layer], self.outputs[operation.layer]
        read = self._packed(layer, plan.packs)
        given = self.shared(args, layer, operation, x, y, read, saved)
        if self.key.pairs:
            pairs = matrices.pairs()
            args.product, args.pairs_outer = pairs.product.address, pairs.outer.address
            args.pairs_panels = pairs.panels.address
            self.take_rounded(args, given, plan.tasks)
        elif self._kernels_16bit is not None:
            args.product = self._kernels_16bit.product.address
        if self._dy is not None:
            self.set_rows(args, given, "dy", self.of_direction(operation, self._dy))
        if self._dx is not None:
            self.set_rows(args, given, "dx", self._dx)
            args.dx_add = operation.direction
        # with one chunk for all rows nothing is added to what products write
        one_chunk = self.batch <= args.tile_rows and args.chunk == self.steps
        kernels = self._kernels_16bit if one_chunk else None
        dtype = self.dtype if kernels is None else self.problem.dtype
        self._gradients = self._gradients_of(layer, plan.teams, args.overwrite == 1, dtype)
        if self._separate_gradients and kernels is not None:
            args.store_16bit, args.rounded_bytes = kernels.store.address, layout.store_16bit_bytes
            self.take_rounded(args, given, plan.tasks)
        if self._sums is not None:
            given["sums"] = self._sums
        given |= dict(zip(("d_w_ih", "d_w_hh"), self._separate_gradients))
        needs = self.needs
        for field, name, present in (
            ("d_initial", "d_state", needs.states),
            ("d_reset_state", "d_reset_state", needs.reset_states),
            ("d_final", "d_final", self.incoming.finals),
            ("d_all_states", "d_all", self.incoming.all_states),
        ):
            if any(present):
                given[field] = self.states_of(layer, name, present)
        self.launch(loop, args, plan, given)

    def _packed(self, layer: LayerKernels, packs: bool) -> list[SlotRef | None]:
        """The weights as the loop reads them, None where it needs none; in the order of WEIGHTS."""
        layout, needs = layer.layout, self.needs
        w_ih, w_hh, b_ih, b_hh, w_hr, *vectors = self.weights(layer)
        if self._dx is None:
            w_ih = None
        if self.steps == 1 and not any(needs.states) and not any(needs.reset_states):
            w_hh = None  # nothing goes back beyond the first step
        if packs:
            kernel = "pack_pairs" if self.key.pairs else "pack"
            shape = layout.gates, layout.units, layout.padded
            w_ih = self.pack_matrix(kernel, layer, w_ih, shape, layout.inputs)
            w_hh = self.pack_matrix(kernel, layer, w_hh, shape, layout.outputs)
        shape = 1, layout.outputs, layout.outputs
        w_hr = self.pack_matrix("pack", layer, w_hr, shape, layout.units)
        return [w_ih, w_hh, b_ih, b_hh, w_hr, self.unit_vectors(layer, vectors)]

    def _gradients_of(
        self, layer: LayerKernels, teams: int, overwrite: bool, dtype: torch.dtype
    ) -> "list[Gradient | None]":
        """Where gradients of weights will lie; takes memory for the sums if any is needed.

        Args:
            overwrite: as in `LoopArgs`.
            dtype: of d_w_ih and d_w_hh, if they are tensors of their own.
        """
        from openrnn.kernels.cpu import matrices

        layout, params = layer.layout, self.needs.params
        wanted = [index is not None and params[index] for index in layer.param_indices]
        found = matrices.gradients(layout, teams, wanted, self.key.threads)
        size = sum(layout.sums)
        self._sums, self._separate_gradients = None, []
        if any(gradient is not None and gradient.bare for gradient in found):
            before = 0  # elements of the sums that are elsewhere
            if overwrite:
                # tensors of their own are smaller: 32 MiB in one piece have new pages in each call.
                # And autograd adds in place what the steps of a loop give, if nothing shares memory
                columns, before = layout.columns, sum(layout.sums[:2])
                shapes = (columns, layout.x_width), (columns, layout.h_width)
                self._separate_gradients = [self.make(("d_w", layer.chain, k), shape, dtype=dtype)
                               for k, shape in enumerate(shapes)]  # fmt: skip
            sums = self.make(("sums", layer.chain), (size - before,))
            self._sums = sums._replace(offset=-before * self.size)
        elif layout.vectors or any(wanted):
            self._sums = self.workspace.take(teams * size * self.size)
        return found

    def finish_weights(self, operation: FinishWeights) -> None:
        """The gradients of weights from the sums: parts of them, or added up by `collect`."""
        from openrnn.kernels.cpu import matrices

        layer, sums = self.kernels(operation), self._sums
        collect = matrices.kernel("collect", layer.layout.dtype)
        for k, (index, gradient) in enumerate(zip(layer.param_indices, self._gradients)):
            if index is None or gradient is None or sums is None:
                continue
            if k < len(self._separate_gradients):
                self.d_params[index] = self.index_of(self._separate_gradients[k])
                continue
            if gradient.bare:
                made, offset = self.index_of(sums), gradient.offset + sums.offset // self.size
                strides = (*gradient.shape[1:], 1)
                self.d_params[index] = View(made, gradient.shape, strides, offset)
                continue
            out = self.make(("d_param", index), gradient.shape)
            self.d_params[index] = self.index_of(out)
            at = sums._replace(offset=sums.offset + gradient.offset * self.size)
            given = {"sums": at, "out": out}
            run = Launch(collect, gradient.args, gradient.args.tasks, given, self.slot_indices)
            self.operations.append(run)
        self.workspace.free(self._mark)


def _slots(kept: int, incoming: IncomingGradients) -> list[Slot]:
    """What a backward pass reads beyond the call, in the order of `values`."""
    found: list[Slot] = ["y", *(("saved", k) for k in range(kept))]
    found += ["dy_step", "dy_row", "dy"] if incoming.y else []
    for name, present in (("d_final", incoming.finals), ("d_all", incoming.all_states)):
        found += [(name, k) for k, there in enumerate(present) if there]
    return found


def values(y: Tensor, reserve: list[Tensor], grads: Cotangents) -> list[int]:
    """Values of these slots; `grads` are contiguous, of y the rows."""
    found = [y.data_ptr(), *map(address, reserve)]
    if grads.y is not None:
        found += [*grads.y.stride()[:2], grads.y.data_ptr()]
    every = (*grads.finals, *grads.all_states)
    return [*found, *(grad.data_ptr() for grad in every if grad is not None)]


def gradient(location: GradientLocation, made: list[Tensor]) -> Tensor | None:
    """A gradient among the tensors that a run made; None where it is not wanted."""
    if isinstance(location, View):
        whole = made[location.tensor]
        return whole.as_strided(
            location.shape, location.strides, whole.storage_offset() + location.offset
        )
    return None if location is None else made[location]


@memo(PROGRAMS)
def program(key: ProgramKey, incoming: IncomingGradients, needs: Needs) -> BackwardProgram:
    """The backward pass of calls with this key; compiles kernels that there are not yet."""
    builder = BackwardBuilder(key, incoming, needs)
    spec = key.problem.spec
    execute(schedules.backward(spec.num_layers, spec.directions, key.steps), builder)
    return BackwardProgram(
        builder.program(), builder.d_x, builder.d_states, builder.d_params,
        builder.d_reset_states,
    )  # fmt: skip
