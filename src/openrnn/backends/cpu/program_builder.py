"""What the two passes share: writing the operations of a schedule down as a program."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from openrnn import philox
from openrnn.backends.base import Call, state_shapes
from openrnn.backends.cpu import heap
from openrnn.backends.cpu.layer import LayerKernels, compute_dtype, layer_kernels, loop_plan
from openrnn.backends.cpu.program import (
    WORKSPACE,
    Clear,
    Copy,
    Launch,
    Program,
    Slot,
    SlotRef,
    Workspace,
)
from openrnn.backends.cpu.rounding import multiplies_bf16
from openrnn.backends.cpu.weight_cache import OUT, CachedPanels
from openrnn.kernels.cpu import launch
from openrnn.kernels.cpu.args import DIGEST_WORDS
from openrnn.memory import TensorFactory, template
from openrnn.params import module_slots
from openrnn.schedule.operations import FinishWeights, Loop
from openrnn.spec import Problem

if TYPE_CHECKING:
    from openrnn.kernels.cpu.args import LoopArgs
    from openrnn.kernels.cpu.objects import CompiledFunction
    from openrnn.kernels.cpu.plan import LoopPlan

CPU = torch.device("cpu")

address = Tensor.data_ptr

# fields of `LoopArgs`: the weights in order, then what the layout's `widths` are of
WEIGHTS = "w_ih", "w_hh", "bias_x", "bias_r", "w_hr", "unit_vectors"
SAVED = "saved_gates", "saved_recurrent", "saved_states", "saved_unprojected"


class ProgramKey(NamedTuple):
    """What a program follows from.

    Args:
        threads: how many the call may use.
        states, resets: initial states, and states that resets put in place, are given.
        pairs: products are of bfloat16 pairs.
    """

    problem: Problem
    steps: int
    batch: int
    threads: int
    states: bool
    resets: bool
    pairs: bool = False


def program_key(call: Call) -> ProgramKey:
    """The key of a call that `tensors.readable` made, with the threads of torch's operators."""
    problem, (steps, batch) = call.problem, call.x.shape[:2]
    return ProgramKey(
        problem, steps, batch, launch.threads(), bool(call.states), bool(call.reset_states),
        multiplies_bf16(problem, steps, batch),
    )  # fmt: skip


class Rows(NamedTuple):
    """A tensor (T, B, width): its address, and elements from a step, and a row, to the next."""

    at: SlotRef
    step: int | SlotRef
    row: int | SlotRef

    def part(self, offset: int) -> "Rows":
        """The columns from so many bytes on."""
        return self._replace(at=self.at._replace(offset=self.at.offset + offset))


def slots(key: ProgramKey) -> list[Slot]:
    """What both passes read of a call, in the order of `values`."""
    problem, spec = key.problem, key.problem.spec
    params, states = module_slots(spec), range(len(spec.states))
    found: list[Slot] = ["x_step", "x_row", "x", *(("param", k) for k in range(len(params)))]
    if problem.precision == "int8":
        found += [("scales", k) for k, param in enumerate(params) if param.is_gate_matrix]
    found += [("state", k) for k in states] if key.states else []
    found += [("reset_state", k) for k in states] if key.resets else []
    found += ["lengths", "order"] if problem.lengths else []
    found += ["reset"] if problem.reset else []
    return [*found, "drop_low", "drop_high", "drop_word"] if problem.drops else found


class ProgramBuilder:
    """Has a method for each verb of the CPU's schedules, which writes launches down.

    Args:
        given: what runs give values for, in their order; those of tensors that they make follow,
            and the workspace is the last.
    """

    def __init__(self, key: ProgramKey, given: Sequence[Slot]) -> None:
        problem = key.problem
        self.key, self.problem, self.spec = key, problem, problem.spec
        self.steps, self.batch = key.steps, key.batch
        self.dtype = compute_dtype(problem.dtype)
        self.size = self.dtype.itemsize
        self.slot_indices: dict[Slot, int] = {slot: index for index, slot in enumerate(given)}
        self._given = len(given)
        self.slot_indices[WORKSPACE] = -1
        self.workspace = Workspace()
        self.made: list[TensorFactory] = []
        self.operations: list[Launch | Clear | Copy] = []
        self.kept: list[CachedPanels] = []

    def on_stream(self, number: int) -> AbstractContextManager[object]:
        """Nothing: operations run one after the other, on all threads."""
        return nullcontext()

    def on_failure(self) -> None:
        """Nothing runs while operations are written down."""

    def make(
        self, slot: Slot, shape: tuple[int, ...], zeros: bool = False,
        dtype: torch.dtype | None = None,
    ) -> SlotRef:  # fmt: skip
        """A tensor that each run makes, of any values or of zeros.

        dtype: None for the one that the kernels compute in.
        """
        self.slot_indices[slot] = self._given + len(self.made)
        self.made.append(self._made(shape, zeros, dtype))
        return SlotRef(slot)

    def _made(
        self, shape: tuple[int, ...], zeros: bool = False, dtype: torch.dtype | None = None
    ) -> TensorFactory:
        like = torch.zeros_like if zeros else torch.empty_like
        return TensorFactory(like, template(shape, dtype or self.dtype, CPU))

    def index_of(self, made: SlotRef) -> int:
        """The index of a tensor among those that a run makes."""
        return self.slot_indices[made.slot] - self._given

    def program(self) -> Program:
        """What was written down."""
        if sum(one.template.nbytes for one in self.made) >= heap.MIN_RESULT_BYTES:
            heap.keep_freed_memory()
        workspace = self._made((-(-self.workspace.size // self.size),))
        return Program(self.operations, [*self.made, workspace], self.kept)

    def kernels(self, operation: Loop | FinishWeights) -> LayerKernels:
        """The layer and direction of an operation."""
        return layer_kernels(self.spec, operation.layer, operation.direction, self.dtype)

    def weights(self, layer: LayerKernels) -> list[SlotRef | None]:
        """w_ih, w_hh, b_ih, b_hh, w_hr and the unit vectors; None where one is absent."""
        return [
            None if index is None else SlotRef(("param", index)) for index in layer.param_indices
        ]

    def plan(self, layer: LayerKernels, operation: Loop, purpose: str) -> "LoopPlan":
        """How a loop runs; for `purpose` see `kernels.cpu.plan`."""
        problem, x_gate = self.problem, None
        if layer.param_indices[0] is None:
            x_gate = self.spec.hidden_size if self.spec.input_mode == "gates" else 0
        return loop_plan(
            layer.layout, purpose, self.steps, self.batch, self.key.threads,
            operation.direction == 1, x_gate, problem.lengths, self.key.pairs,
        )  # fmt: skip

    def rows(self, at: SlotRef, width: int) -> Rows:
        """A contiguous tensor (T, B, width)."""
        return Rows(at, self.batch * width, width)

    def of_direction(self, operation: Loop, rows: Rows) -> Rows:
        """A direction's part of (T, B, D*O)."""
        return rows.part(operation.direction * self.spec.output_size * self.size)

    def states_of(
        self, layer: LayerKernels, name: str, present: Sequence[bool] = ()
    ) -> list[SlotRef | None]:
        """Where this layer and direction lies in each of the states (L*D, ...); None if absent.

        Args:
            name: of their slots; "all" and "d_all" are of all steps, (L*D, T, ...).
        """
        wide = self.steps if name in ("all", "d_all") else 1
        shapes = state_shapes(self.problem, self.batch * wide)
        return [
            SlotRef((name, k), layer.chain * rows * width * self.size) if there else None
            for k, ((_, rows, width), there) in enumerate(
                zip(shapes, present or (True,) * len(shapes))
            )
        ]

    def pack_matrix(
        self, kernel: str, layer: LayerKernels, weight: SlotRef | None, shape: tuple[int, int, int],
        columns: int,
    ) -> SlotRef | None:  # fmt: skip
        """A weight matrix in panels, written by a kernel of `kernels.cpu.matrices`.

        Without gradients it may be kept for the next call.

        Args:
            shape: gates, rows of a gate, rows of a gate in the panels.
        """
        if weight is None:
            return None
        from openrnn.kernels.cpu import matrices

        gates, rows, padded = shape
        dtype, threads = layer.layout.dtype, self.key.threads
        size = matrices.panel_elements(kernel, dtype, gates, padded, columns)
        args = matrices.pack_args(gates, rows, padded, columns, threads)
        run, indices = matrices.kernel(kernel, dtype), self.slot_indices
        if self.problem.grad:
            out = self.workspace.take(size * self.size)
            given = {"matrix": weight, "out": out}
            self.operations.append(Launch(run, args, args.tasks, given, indices))
            return out
        indices, given = {**indices, OUT: -1}, {"matrix": weight, "out": SlotRef(OUT)}
        pack = Launch(run, args, args.tasks, given, indices)
        of = matrices.digest_args(gates * rows * columns, dtype, threads)
        digest = Launch(matrices.digest(), of, of.tasks, given, indices)
        key, words = (weight, kernel, dtype, *shape, columns), of.parts * DIGEST_WORDS
        self.kept.append(CachedPanels(key, digest, words, pack, self._made((size,))))
        slot = "panels", len(self.kept)
        self.slot_indices[slot] = -1 - len(self.kept)
        return SlotRef(slot)

    def unit_vectors(
        self, layer: LayerKernels, vectors: Sequence[SlotRef | None]
    ) -> SlotRef | None:
        """Per-unit vectors as rows (vectors, padded), the padding zero; None where none are."""
        units, padded = layer.layout.units * self.size, layer.layout.padded * self.size
        if not vectors:
            return None
        out = self.workspace.take(len(vectors) * padded)
        self.operations.append(Clear(out, len(vectors) * padded, self.slot_indices))
        for k, vector in enumerate(vectors):
            if vector is not None:
                target = out._replace(offset=out.offset + k * padded)
                self.operations.append(Copy(target, vector, units, self.slot_indices))
        return out

    def shared(
        self, args: "LoopArgs", layer: LayerKernels, operation: Loop, x: Rows, y: Rows,
        weights: Sequence[SlotRef | None], saved: Sequence[SlotRef],
    ) -> dict[str, SlotRef | Sequence[SlotRef | None]]:  # fmt: skip
        """The arguments that both loops take: sets those that are known, returns the others.

        Args:
            x: what the layer reads (T, B, I); y: its output (T, B, D*O).
            weights: in the order of `WEIGHTS`, as the kernel reads them.
            saved: memory for saved activations, or these; empty in inference.
        """
        problem = self.problem
        given: dict[str, SlotRef | Sequence[SlotRef | None]] = {}
        self.set_rows(args, given, "x", x)
        self.set_rows(args, given, "y", self.of_direction(operation, y))
        given |= {name: weight for name, weight in zip(WEIGHTS, weights) if weight is not None}
        given |= {SAVED[index]: at for index, at in zip(layer.layout.saved_indices, saved)}
        if problem.lengths:
            given |= {"lengths": SlotRef("lengths"), "order": SlotRef("order")}
        if problem.reset:
            given["reset"] = SlotRef("reset")
        if self.key.states:
            given["initial"] = self.states_of(layer, "state")
        if self.key.resets:
            given["reset_state"] = self.states_of(layer, "reset_state")
        if operation.layer and problem.drops:
            p = self.spec.dropout
            args.drop, args.drop_threshold = 1, philox.threshold(p)
            args.drop_scale = philox.scale(p)
            # of the output of the layer below
            given["drop_word"] = SlotRef("drop_word", operation.layer - 1)
            given |= {name: SlotRef(name) for name in ("drop_low", "drop_high")}
        return given

    def set_rows(
        self,
        args: "LoopArgs",
        given: dict[str, SlotRef | Sequence[SlotRef | None]],
        name: str,
        rows: Rows,
    ) -> None:
        """The address and strides of a tensor (T, B, width)."""
        given[name] = rows.at
        for field, stride in ((f"{name}_step", rows.step), (f"{name}_row", rows.row)):
            if isinstance(stride, SlotRef):
                given[field] = stride
            else:
                setattr(args, field, stride)

    def take_rounded(self, args: "LoopArgs", given: dict[str, Any], tasks: int) -> None:
        """Memory in which threads round rows, `args.rounded_bytes` each."""
        given["rounded"] = self.workspace.take(tasks * args.rounded_bytes)

    def launch(
        self,
        loop: "CompiledFunction",
        args: "LoopArgs",
        plan: "LoopPlan",
        given: dict[str, SlotRef | Sequence[SlotRef | None]],
    ) -> None:
        """A loop, with scratch memory of its own."""
        given["scratch"] = self.workspace.take(plan.scratch)
        self.operations.append(
            Launch(loop, args, plan.tasks, given, self.slot_indices, plan.barriers)
        )


def values(call: Call, order: Tensor | None) -> list[int]:
    """Values of the slots that `slots` names.

    Args:
        call: as `tensors.readable` makes it.
        order: the batch rows by falling length, where there are lengths.
    """
    x = call.x
    found = [*x.stride()[:2]]
    found += map(address, (x, *call.params, *call.states, *call.reset_states))
    found += [each.data_ptr() for each in (call.lengths, order, call.reset) if each is not None]
    if call.problem.drops and call.seed is not None:
        low, high, offset = philox.split(call.seed)
        found += [low, high, (256 * offset) & philox.WORD]  # a layer adds its number
    return found
