"""`forward` without autograd: in training it hands out a reserve, from which `backward` goes on."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openrnn import (
    arguments,
    cells,
    dispatch,
    functional,
    philox,
    problem_key,
    tensors,
    time_reversed,
)
from openrnn.backends.base import Call
from openrnn.params import check, module_slots, size, unpack
from openrnn.problem_key import ProblemKey
from openrnn.spec import Problem, Spec, precision_of


def _version(tensor: Tensor) -> int:
    """The number of changes in place so far."""
    return tensor._version


def state_names(spec: Spec) -> tuple[list[str], list[str]]:
    """What initial states and those that resets put in place are called: h0 c0, reset_h reset_c."""
    return [f"{name}0" for name in spec.states], [f"reset_{name}" for name in spec.states]


def _versions(call: Call, y: Tensor, kept: list[Tensor]) -> list[tuple[str, Tensor, int]]:
    names, reset_names = state_names(call.problem.spec)
    named = [
        ("x", call.x), ("y", y), *(("params", tensor) for tensor in call.params),
        *zip(names, call.states), *zip(reset_names, call.reset_states),
        *(("reset", tensor) for tensor in (call.reset,) if tensor is not None),
        *(("the reserve", tensor) for tensor in kept),
    ]  # fmt: skip
    return [(name, tensor, _version(tensor)) for name, tensor in named]


@dataclass(eq=False, kw_only=True, repr=False)
class Reserve:
    """What `backward` needs of one training call, together with the tensors of that call; opaque.

    `backward` may be called any number of times; `free()` lets the memory go. What went into
    forward and y must not be changed in place before the last `backward`, which looks and says so.
    """

    call: Call | None
    y: Tensor  # (T, B, D*O)
    kept: list[Tensor]
    backend: str
    time_major: bool
    given: frozenset[str]  # the states that forward was given, as "h0"

    versions: list[tuple[str, Tensor, int]]  # of all these tensors, as forward left them

    def __repr__(self) -> str:
        what = "freed" if self.call is None else f"{self.nbytes} bytes: {self.call.problem}"
        return f"Reserve({self.backend}, {what})"

    @property
    def seed(self) -> tuple[int, int] | None:
        """Seed and offset of the dropout masks, or None where nothing was dropped."""
        if self.call is None or self.call.seed is None:
            return None
        seed, offset = self.call.seed.tolist()
        return seed, offset % philox.OFFSETS

    @property
    def nbytes(self) -> int:
        """The memory that it holds beside the tensors that go into forward and come out of it."""
        return sum(tensor.nbytes for tensor in self.kept)

    def free(self) -> None:
        """Lets go of all tensors; `backward` is no longer possible then."""
        self.call, self.y, self.kept, self.versions = None, torch.empty(0, device="cpu"), [], []

    def checked(self) -> Call:
        """The call, if it can still be differentiated."""
        if self.call is None:
            raise ValueError("backward needs a reserve that holds its tensors, got a freed one")
        for name, tensor, version in self.versions:
            if _version(tensor) != version:
                raise ValueError(
                    "backward needs the tensors of forward as they were, "
                    f"got {name} changed in place"
                )
        spec, (steps, batch) = self.call.problem.spec, self.call.x.shape[:2]
        shape = steps, batch, spec.directions * spec.output_size
        if self.y.shape != shape:
            raise ValueError(
                f"backward needs y as forward left it, of shape {shape}, got {tuple(self.y.shape)}"
            )
        return self.call


@dataclass(frozen=True, eq=False)
class Result:
    """What `forward` returns.

    Args:
        y: (T, B, D*O), or (B, T, D*O) with time_major=False.
        states: final states in the order of the cell, each (L*D, B, O or H).
        all_states: each state after every step, (L*D, T, B, O or H); empty unless asked for.
        reserve: for `backward`; None in inference.
    """

    y: Tensor
    states: tuple[Tensor, ...]
    all_states: tuple[Tensor, ...]
    reserve: Reserve | None

    @property
    def h_n(self) -> Tensor:
        """The final state that is emitted."""
        return self.states[0]

    @property
    def c_n(self) -> Tensor | None:
        """The second final state, or None where the cell has one only."""
        return self.states[1] if len(self.states) > 1 else None


def uncast(device: torch.device) -> Any:
    """Autocast off: the operators compute in the type of x, whoever calls them."""
    if torch._C._is_any_autocast_enabled() and torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def outside(name: str, tensor: Tensor) -> Tensor:
    """The tensor outside autograd; one of inference mode, from which nothing derives, as a copy.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is not dense.
    """
    if tensors.is_plain(tensor):
        tensors.held(name, tensor)
    else:
        tensor, _ = tensors.settled(name, tensor)
    if not tensor.is_inference():
        return tensor.detach()
    with torch.inference_mode(False):
        return tensor.clone()


def like(name: str, tensor: Tensor, shape: tuple[int, ...], x: Tensor) -> Tensor:
    """The tensor, detached; ValueError unless it has this shape and the dtype and device of x."""
    tensor = outside(name, tensor)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if (tensor.dtype, tensor.device) != (x.dtype, x.device):
        raise ValueError(
            f"{name} must be {x.dtype} on {x.device} like x, got {tensor.dtype} on {tensor.device}"
        )
    return tensor


def _weights(given: Tensor | Sequence[Tensor], spec: Spec, x: Tensor) -> list[Tensor]:
    """The parameters in the order of `module_slots`."""
    if isinstance(given, Tensor):
        return unpack(spec, like("params", given, (size(spec),), x))
    if not isinstance(given, Iterable):
        raise TypeError(
            f"params must be a Tensor or a sequence of Tensors, got {type(given).__name__}"
        )
    check(spec, weights := list(given))
    return [like(slot.name, t, slot.shape, x) for slot, t in zip(module_slots(spec), weights)]


def by_state(
    spec: Spec,
    words: tuple[str, str, str],
    first: Tensor | None,
    second: Tensor | None,
    several: Sequence[Tensor | None] | None,
) -> list[Tensor | None]:
    """One entry a state, from the two arguments of the common cells or from a sequence."""
    count = len(spec.states)
    if several is None:
        if second is not None and count == 1:
            raise ValueError(f"cell {spec.cell} has one state: needs no {words[1]}, got one")
        return [first, second, *(None for _ in spec.states)][:count]
    if first is not None or second is not None:
        raise ValueError(f"needs either {words[2]} or {words[0]} and {words[1]}, got both")
    if len(several) != count:
        raise ValueError(
            f"{words[2]} must have {count} entries ({', '.join(spec.states)}), got {len(several)}"
        )
    return list(several)


def _filled(
    spec: Spec, given: Sequence[Tensor | None], x: Tensor, names: Sequence[str]
) -> list[Tensor]:
    """All states if any was given, with zeros for the others; else none."""
    if all(state is None for state in given):
        return []
    shapes = [(spec.chains, x.shape[1], width) for width in spec.state_sizes]
    return [
        x.new_zeros(shape) if state is None else like(name, state, shape, x)
        for name, state, shape in zip(names, given, shapes)
    ]


class _Settled(NamedTuple):
    """The tensors of a call, and why no address may be taken of one of them."""

    x: Tensor
    params: list[Tensor]
    states: list[Tensor]
    resets: list[Tensor]
    lengths: Tensor | None
    reset: Tensor | None
    why: str


def _settled(
    spec: Spec,
    x: Tensor,
    params: list[Tensor],
    states: list[Tensor],
    resets: list[Tensor],
    lengths: Tensor | None,
    reset: Tensor | None,
) -> _Settled:
    """The tensors of a call, checked as those of a layer are."""
    _, weights, initial, settled, _, why = arguments.check_inputs(spec, x, params, states, resets)
    if lengths is not None:
        lengths = functional.check_lengths(lengths, x)
    if reset is not None:
        reset = outside("reset", functional.check_reset(reset, x))
    lengths, reset, other = tensors.masks(x, lengths, reset)
    found = [
        x,
        *weights,
        *initial,
        *settled,
        *(mask for mask in (lengths, reset) if mask is not None),
    ]
    if not tensors.is_plain(*found):
        why = why or other or "one of its tensors has no memory of its own"
    return _Settled(x, list(weights), list(initial), list(settled), lengths, reset, why)


def _seed(
    seed: int | None, offset: int, generator: torch.Generator | None, device: torch.device
) -> Tensor:
    """(2,) int64 on a device: the seed as given, in two's complement, or drawn."""
    if seed is None:
        return philox.draw(device, generator)
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must fit 64 bits, got {seed}")
    if not 0 <= offset < philox.OFFSETS:
        raise ValueError(f"offset must be in [0, 2**24), got {offset}")
    return torch.tensor([seed - 2**64 if seed >= 2**63 else seed, offset], device=device)


def _checked_input(spec: Spec, x: Tensor, time_major: bool) -> Tensor:
    """x as it is read; raises ValueError where its dtype or shape is another."""
    x = outside("x", x)
    problem_key.check_dtype(x.dtype)
    if x.dim() != 3 or x.shape[-1] != spec.input_size:
        layout = "T, B" if time_major else "B, T"
        raise ValueError(f"x must have shape ({layout}, {spec.input_size}), got {tuple(x.shape)}")
    return x


def _chosen(key: ProblemKey, backend: str, x: Tensor) -> tuple[Problem, str]:
    """The problem of a call of x (T, B, I), and the backend that takes it."""
    problem = problem_key.problem_of(key)
    name = dispatch.select(problem, backend)
    if backend == "auto" and name == "reference":
        dispatch.warn_if_large(problem, x.shape[0], x.shape[1])
    return problem, name


def forward(
    x: Tensor,
    params: Tensor | Sequence[Tensor],
    spec: Spec,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    *,
    states: Sequence[Tensor | None] | None = None,
    lengths: Tensor | None = None,
    reset: Tensor | None = None,
    reset_states: Sequence[Tensor | None] | None = None,
    is_training: bool = True,
    seed: int | None = None,
    offset: int = 0,
    generator: torch.Generator | None = None,
    time_major: bool = True,
    return_states: bool = False,
    backend: str = "auto",
) -> Result:
    """Runs a network over a batch of sequences, outside autograd.

    Args:
        params: the flat buffer, or the tensors in the order of `openrnn.params.module_slots`.
        states: in place of h0 and c0 for a cell with other states; None stands for zeros.
        lengths, reset, reset_states: as in `openrnn.LSTM`; reset in the layout of x.
        is_training: drop between layers, and keep a reserve for `backward`.
        seed, offset: of the dropout masks; by default drawn from generator, or torch's own.

    Shapes:
        x (T, B, I), or (B, T, I) with time_major=False; h0 (L*D, B, O) and c0 (L*D, B, H) always
        -> y (T, B, D*O) in the layout of x, h_n and c_n like h0 and c0

    Raises:
        ValueError: a tensor has another shape, dtype or device than the spec and x ask for.
        NoBackendError: no backend takes the call; the message says why, one by one.

    Example:
        >>> from openrnn import ops
        >>> gru = ops.spec("gru", input_size=3, num_units=4)
        >>> params = torch.randn(ops.params_size(gru))
        >>> out = ops.forward(torch.randn(5, 2, 3), params, gru, is_training=False)
        >>> tuple(out.y.shape), out.c_n, out.reserve
        ((5, 2, 4), None, None)
    """
    cells.check(spec)
    x = _checked_input(spec, x, time_major)
    if reset_states is not None and reset is None:
        raise ValueError("reset_states are what reset puts in place: needs reset, got None")
    if not time_major:
        x = x.transpose(0, 1)
        reset = None if reset is None else functional.transposed_mask(reset)
    names, reset_names = state_names(spec)
    states = by_state(spec, ("h0", "c0", "states"), h0, c0, states)
    resets = by_state(spec, ("", "", "reset_states"), None, None, reset_states)
    with torch.inference_mode(False), torch.no_grad():
        found = _settled(
            spec, x, _weights(params, spec, x), _filled(spec, states, x, names),
            _filled(spec, resets, x, reset_names), lengths, reset,
        )  # fmt: skip
    drops = spec.drops(is_training)
    problem, name = _chosen(
        ProblemKey(
            spec.text, x.dtype, x.device, precision_of(spec, x.dtype, x.device.type), is_training,
            drops, lengths is not None, reset is not None, return_states, problem_key.transformed(),
            drops and generator is not None, problem_key.size_class(x), found.why,
        ),
        backend, x,
    )  # fmt: skip
    with torch.inference_mode(False), torch.no_grad():
        call = Call(
            problem,
            found.x,
            found.states,
            found.params,
            found.lengths,
            found.reset,
            found.resets,
            _seed(seed, offset, generator, dispatch.seed_device(name, x.device)) if drops else None,
            seed_given=seed is not None,
        )
        with uncast(x.device):
            run = partial(time_reversed.forward, dispatch.BACKENDS[name])
            out = functional.by_operators(call, run)
    y, all_states, reserve = out.y, out.all_states, None
    if is_training:
        every = zip((*names, *reset_names), (*states, *resets))
        given = frozenset(state for state, tensor in every if tensor is not None)
        reserve = Reserve(
            call=call, y=y, kept=out.reserve, backend=name, time_major=time_major, given=given,
            versions=_versions(call, y, out.reserve),
        )  # fmt: skip
    if not time_major:
        y, all_states = y.transpose(0, 1), [states.transpose(1, 2) for states in all_states]
    return Result(y, tuple(out.finals), tuple(all_states), reserve)
