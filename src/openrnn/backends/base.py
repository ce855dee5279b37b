"""What a backend promises: its capabilities, its reasons to refuse, forward and backward."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from openrnn.cells import lookup
from openrnn.memo import memo
from openrnn.spec import Problem, Spec, dtype_name

if TYPE_CHECKING:
    from openrnn.codegen.trace import Traced

TensorShape = tuple[tuple[int, ...], torch.dtype]

Shapes = Sequence[tuple[int, ...]]

# what the calls of one module keep for its later calls: packed or converted weights, and of a
# pipeline prepared calls
ModuleCache = dict[Hashable, Any]


class PreparedCall(Protocol):
    """A call whose checks and choices were made once.

    It runs again with other tensors of the same sizes, strides and dtypes: x, parameters, states,
    masks and, where the call draws dropout, a seed, in this order.
    """

    def ready(self, every: Sequence[Tensor]) -> bool:
        """Whether it can run with these tensors now.

        They have memory, and alignment, torch's precision and the number of threads are as when
        the call was prepared.
        """

    def __call__(self, every: Sequence[Tensor]) -> list[Tensor] | None:
        """Y and the final states (of a `PreparedGradCall` the reserve, too); None if not ready."""


class PreparedGradCall(PreparedCall, Protocol):
    """A call that autograd records, with its backward pass.

    Attributes:
        saved: the shapes and dtypes of y and the reserve.
    """

    saved: list[tuple[torch.Size, torch.dtype]]

    def forward(self, every: Sequence[Tensor]) -> list[Tensor]:
        """Y, the final states and the reserve, of those that are ready."""

    def backward(
        self, every: Sequence[Tensor], outputs: Sequence[Tensor], grads: Sequence[Tensor | None],
        needs: tuple[bool, ...],
    ) -> list[Tensor | None]:  # fmt: skip
        """The gradients of x, parameters and states, None where not needed.

        Args:
            outputs: y and the reserve, as forward returned them.
            grads: of y and the final states.
            needs: see `Needs.of_prepared`.
        """


@dataclass(frozen=True)
class Capabilities:
    """What a backend takes. Every default is nothing, so that a forgotten field refuses."""

    devices: frozenset[str] = frozenset()
    dtypes: frozenset[torch.dtype] = frozenset()
    capability: tuple[int, int] = (0, 0)
    bias_modes: frozenset[str] = frozenset()
    input_modes: frozenset[str] = frozenset()
    grad: bool = False
    layers: bool = False
    bidirectional: bool = False
    projection: bool = False
    clip: bool = False
    dropout: bool = False
    lengths: bool = False
    reset: bool = False
    return_states: bool = False
    dependent_product: bool = False
    transform: bool = False
    opaque: bool = False  # tensors without memory of their own
    empty: bool = False  # networks without inputs or units
    algorithms: frozenset[str] = frozenset()  # beyond "auto"
    int8: bool = False  # gate matrices of int8


@dataclass(slots=True)
class Call:
    """The tensors of one call, time-major and already checked."""

    problem: Problem
    x: Tensor  # (T, B, I); (N, I) packed with `lengths` falling, only where the backend can
    states: list[Tensor]  # each (L*D, B, O or H); empty where all are zero
    params: list[Tensor]  # in the order of params.module_slots
    lengths: Tensor | None = None  # (B,) int64
    reset: Tensor | None = None  # (T, B) bool
    reset_states: list[Tensor] = field(default_factory=list)  # like states; empty for zeros
    seed: Tensor | None = None  # (2,) int64: seed and offset of the dropout masks
    seed_given: bool = False  # by the user, not drawn for this call
    may_overwrite_reserve: bool = False  # no other backward will read the reserve
    # memory for y and the final states that forward may write, contiguous; empty: it makes its own
    results: list[Tensor] = field(default_factory=list)


def lengths_reset_seed(problem: Problem, tensors: Iterable[Tensor]) -> tuple[Tensor | None, ...]:
    """Lengths, resets and seed of a call made again: those that it has, in this order."""
    rest = iter(tensors)
    given = problem.lengths, problem.reset, problem.drops
    return tuple([next(rest) if one else None for one in given])


@dataclass(slots=True)
class Outputs:
    """What forward returns; `reserve` is what backward needs beyond the call and y."""

    y: Tensor  # (T, B, D*O)
    finals: list[Tensor]  # each (L*D, B, O or H)
    all_states: list[Tensor]  # each (L*D, T, B, O or H); empty unless asked for
    reserve: list[Tensor]


@dataclass(slots=True)
class Cotangents:
    """The gradients that reach the outputs; None means zero."""

    y: Tensor | None
    finals: list[Tensor | None]
    all_states: list[Tensor | None]


class Needs(NamedTuple):
    """Which gradients are wanted, in the operator's order; unwanted ones come back as None."""

    x: bool
    states: tuple[bool, ...]
    params: tuple[bool, ...]
    reset_states: tuple[bool, ...]

    @classmethod
    def of_prepared(cls, flags: tuple[bool, ...], params: int, states: int) -> "Needs":
        """From a flag for each tensor of a `PreparedCall`, whose parameters precede its states."""
        return cls(flags[0], flags[1 + params : 1 + params + states], flags[1 : 1 + params], ())

    @property
    def flat(self) -> tuple[bool, ...]:
        return (self.x, *self.states, *self.params, *self.reset_states)


@dataclass(slots=True)
class Gradients:
    """The gradients of the inputs, None where not needed."""

    x: Tensor | None
    states: list[Tensor | None]
    params: list[Tensor | None]
    reset_states: list[Tensor | None]

    @property
    def flat(self) -> list[Tensor | None]:
        return [self.x, *self.states, *self.params, *self.reset_states]


def _words(values: frozenset[str]) -> str:
    return " or ".join(sorted(values)) or "nothing"


class PreferredBackend(NamedTuple):
    """Another backend that runs instead, and where.

    Args:
        measured: it was found to be faster; else it ran there before, and nobody compared.
    """

    backend: str
    where: str
    measured: bool = True

    def __str__(self) -> str:
        why = "is measured faster here" if self.measured else "runs here, which was not compared"
        return f"{self.backend} {why}: {self.where}"


class Backend:
    """One way to run a network."""

    name: str
    can: Capabilities
    packed = False  # it takes packed sequences (N, I) as they are, without padding
    recomputes = False  # it saves memory where asked to; else it keeps all that backward reads
    has_wavefronts = False  # layers of a stack run at the same time where asked to
    # it runs reverse layers itself; else `time_reversed` makes forward ones of them
    reverses = False
    # B * H up to which second derivatives run by its tangent cells (`higher/tangent.py`). Forward
    # mode uses them at any size. 0: it runs no tangent cells, so the reference does both.
    tangents_up_to: float = 0
    own_masks = False  # its dropout masks are not those of philox.py, so nothing can repeat them

    def absent(self) -> str | None:
        """Why this machine cannot use it, or None. Looks at the machine only."""
        raise NotImplementedError

    def refusals(self, problem: Problem) -> list[str]:
        """Why it does not take the problem, one reason an entry. Looks at values only."""
        can, spec = self.can, problem.spec
        reasons = []
        if problem.device not in can.devices:
            reasons.append(f"device {problem.device}, needs {_words(can.devices)}")
        elif problem.capability is not None and problem.capability < can.capability:
            have, need = (".".join(map(str, pair)) for pair in (problem.capability, can.capability))
            reasons.append(f"compute capability {have}, needs {need}")
        if problem.dtype not in can.dtypes:
            needs = _words(frozenset(map(dtype_name, can.dtypes)))
            reasons.append(f"dtype {problem.dtype_name}, needs {needs}")
        if spec.bias_mode not in can.bias_modes:
            reasons.append(f"bias_mode {spec.bias_mode}, needs {_words(can.bias_modes)}")
        if spec.input_mode not in can.input_modes:
            reasons.append(f"input_mode {spec.input_mode}, needs {_words(can.input_modes)}")
        if spec.algorithm != "auto" and spec.algorithm not in can.algorithms:
            reasons.append(f"algorithm {spec.algorithm} is cuDNN's, needs auto")
        wants = (
            (problem.grad, can.grad, "gradients"),
            (spec.num_layers > 1, can.layers, f"{spec.num_layers} layers"),
            (spec.bidirectional, can.bidirectional, "two directions"),
            (spec.proj_size > 0, can.projection, "projection"),
            (spec.cell_clip is not None, can.clip, "cell clip"),
            (problem.drops, can.dropout, "dropout"),
            (problem.lengths, can.lengths, "lengths"),
            (problem.reset, can.reset, "resets inside the sequence"),
            (problem.return_states, can.return_states, "the states of all steps"),
            (spec.empty, can.empty, "networks without inputs or units"),
            (problem.transform, can.transform, "a torch.func transform or forward-mode derivative"),
            (problem.precision == "int8", can.int8, "int8 weights"),
        )
        reasons += [f"does not do {what}" for asked, able, what in wants if asked and not able]
        if problem.opaque and not can.opaque:
            reasons.append(problem.opaque)
        if lookup(spec.cell).dependent_product and not can.dependent_product:
            reasons.append(
                f"cell {spec.cell} multiplies by the recurrent matrix again after its reset gate: "
                "two dependent products a step, where the kernels have one"
            )
        return reasons

    def preferred_backend(self, problem: Problem) -> PreferredBackend | None:
        """The backend that `auto` takes instead where that one can run, too; or None."""
        return None

    def describe(self, problem: Problem) -> list[str]:
        """How it would run a problem that it takes, for a person; needs its machine."""
        return []

    def schedule(self, problem: Problem, device: torch.device) -> list[str]:
        """The operations of a call whose T and B are known, for a person; needs its machine.

        Empty where it runs none, but hands the call to a library.
        """
        return []

    def reserve(self, problem: Problem, steps: int, batch: int) -> list[TensorShape]:
        """Shape and dtype of each tensor that forward keeps for backward; sizes may be symbolic."""
        raise NotImplementedError

    def forward(self, call: Call) -> Outputs:
        """Runs the call; keeps a reserve only where `call.problem.grad`."""
        raise NotImplementedError

    def prepare(
        self, call: Call, output_shapes: Shapes, cache: ModuleCache | None = None
    ) -> PreparedCall | None:
        """What runs this call, which records no gradients, again with other tensors; or None.

        Args:
            call: without reset states; with a seed where it drops.
            output_shapes: of y and the final states as it returns them, contiguous.
            cache: of the module that calls, for what calls may leave for each other.
        """
        return None

    def prepare_grad(
        self, call: Call, output_shapes: Shapes, input_shapes: Shapes
    ) -> PreparedGradCall | None:
        """As `prepare`, for a call that records gradients.

        Args:
            input_shapes: those of x and the states as the caller has them, of the same order of
                elements as in `call`.
        """
        return None

    def bind(self, call: Call, results: Sequence[Tensor]) -> Callable[[Tensor], None] | None:
        """What runs this call again and again, each time with another x of its strides; or None.

        Args:
            call: as `prepare` takes it, with states; its other tensors are read where they lie.
            results: y and the final states, which each run writes.
        """
        return None

    def backward(
        self, call: Call, y: Tensor, reserve: list[Tensor], grads: Cotangents, needs: Needs
    ) -> Gradients:
        """The gradients of a call that returned y and reserve; see `Call.may_overwrite_reserve`."""
        raise NotImplementedError


_hosts = WeakTensorKeyDictionary()


def remember_host(lengths: Tensor, host: Tensor) -> None:
    """Notes that lengths on a device came from the host, so that nobody has to fetch them."""
    _hosts[lengths] = host.to(torch.int32).contiguous()


def host_lengths(lengths: Tensor) -> Tensor:
    """Lengths (B,) as int32 on the host; waits for the device where they came from there.

    Raises:
        ValueError: they would have to be fetched while a CUDA graph is captured.
    """
    found: Tensor | None = _hosts.get(lengths)
    if found is None:
        if lengths.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "lengths on a device cannot be read during the capture of a CUDA graph"
            )
        found = lengths.to(device="cpu", dtype=torch.int32).contiguous()
        _hosts[lengths] = found
    return found


def state_shapes(problem: Problem, batch: int) -> list[tuple[int, int, int]]:
    """The shape of each initial or final state: (L*D, B, O or H)."""
    spec = problem.spec
    return [(spec.chains, batch, width) for width in spec.state_sizes]


def result_shapes(problem: Problem, steps: int, batch: int) -> list[tuple[int, ...]]:
    """The shapes of y, each final state, and each state of all steps where they are asked for."""
    spec = problem.spec
    y = (steps, batch, spec.directions * spec.output_size)
    every = [(spec.chains, steps, batch, width) for width in spec.state_sizes]
    return [y, *state_shapes(problem, batch), *(every if problem.return_states else ())]


@memo(1024)
def traced(spec: Spec) -> "Traced":
    """The graphs of a network's cell, clip applied.

    Raises:
        CellError: it cannot be traced.
    """
    from openrnn.codegen.trace import trace

    return trace(lookup(spec.cell), spec.cell_clip)


def empty_forward(backend: Backend, call: Call) -> Outputs:
    """A call of which no row has a step: y is 0 and the states stay what they were."""
    problem, spec, x = call.problem, call.problem.spec, call.x
    steps, batch = x.shape[:2]
    y, *rest = [x.new_zeros(shape) for shape in result_shapes(problem, steps, batch)]
    finals, all_states = rest[: len(spec.states)], rest[len(spec.states) :]
    if call.states:
        finals = [state.clone(memory_format=torch.contiguous_format) for state in call.states]
    kinds = backend.reserve(problem, steps, batch) if problem.grad else []
    return Outputs(y, finals, all_states, [x.new_empty(shape, dtype=kind) for shape, kind in kinds])


def empty_backward(call: Call, grads: Cotangents, needs: Needs) -> Gradients:
    """The gradients of the same: those of the final states reach the initial ones."""
    d_states = wanted_like(call.states, needs.states)
    for index, (state, final) in enumerate(zip(d_states, grads.finals)):
        if state is not None and final is not None:
            d_states[index] = final.clone()
    (dx,) = wanted_like([call.x], (needs.x,))
    d_params = wanted_like(call.params, needs.params)
    return Gradients(dx, d_states, d_params, wanted_like(call.reset_states, needs.reset_states))


def wanted_like(
    tensors: list[Tensor], wanted: tuple[bool, ...], like: Callable[..., Tensor] = torch.zeros_like
) -> list[Tensor | None]:
    """Contiguous tensors of the shapes of those that are wanted, None for the others.

    Args:
        like: `torch.empty_like` where all is written anyway.
    """
    return [
        like(tensor, memory_format=torch.contiguous_format) if want else None
        for tensor, want in zip(tensors, wanted)
    ]
