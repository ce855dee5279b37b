"""One call, from what a user passes to what an operator takes.

Everything becomes time-major (T, B, I); lengths a (B,) int64 tensor, resets a (T, B) bool tensor.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from openrnn import arguments, dispatch, op, philox, problem_key, reference, tensors, transforms
from openrnn.backends.base import Call, Outputs, remember_host
from openrnn.memo import memo
from openrnn.problem_key import ProblemKey
from openrnn.route import CallConstants, Route, route_for
from openrnn.spec import Spec, precision_of

States = tuple[Tensor, ...]


@memo(4096)
def choose(name: str, key: ProblemKey) -> Route:
    """How a call runs on the named backend, or on the first that takes it."""
    problem = problem_key.problem_of(key)
    constants = CallConstants(
        problem.spec.text, dispatch.select(problem, name), problem.grad, problem.training,
        problem.return_states, problem.precision,
    )  # fmt: skip
    device, masks = problem.device, (problem.lengths, problem.reset)
    return route_for(constants, problem.dtype, device, *masks, problem.precision)


def _backend_in_graph(
    name: str, text: str, dtype: torch.dtype, device: torch.device, flags: tuple[bool, ...]
) -> str:
    """The backend while a compiler traces, where all that decides is constant.

    Args:
        flags: gradients, dropout, lengths, reset, all states, a generator.
    """
    precision = precision_of(Spec.parse(text), dtype, device.type)
    grad, drops, lengths, reset, return_states, generator = flags
    key = ProblemKey(
        text, dtype, device, precision, grad, drops, lengths, reset, return_states,
        problem_key.transformed(), generator,
    )  # fmt: skip
    return choose(name, key).constants.backend


# what torch.compiler.assume_constant_result does, but for its import of dynamo: half of ours
_backend_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def recurrent(
    spec: Spec,
    x: Tensor,
    params: Sequence[Tensor],
    states: Sequence[Tensor] | None = None,
    *,
    lengths: Tensor | None = None,
    reset: Tensor | None = None,
    reset_states: Sequence[Tensor] | None = None,
    return_states: bool = False,
    training: bool = False,
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> tuple[Tensor, States, States]:
    """Runs a time-major call: y (T, B, D*O), final states, and the states of all steps.

    Args:
        spec: the network.
        x: (T, B, I); (N, I) where `takes_packed` says so, with `packed.lengths_of`.
        params: in the order of `openrnn.params.module_slots(spec)`.
        states: initial states, each (L*D, B, O or H), zeros where not given.
        lengths: (B,) integers in [0, T]; y is 0 past them, final states are those at the true end.
        reset: (T, B), bool or 0 and 1; where set the states are replaced before the step, in
            reverse after it.
        reset_states: what replaces them, each (L*D, B, O or H), zeros where not given.
        return_states: also return each state of every step, (L*D, T, B, O or H).
        training: drop outputs between layers with probability `spec.dropout`.
        generator: whence the dropout seed comes; by default torch's own.
        backend: the only backend to try, or "auto".

    Raises:
        TypeError: an argument that must be a tensor is none.
        ValueError: tensors do not fit the spec or each other, or have no memory for their shapes.
        NoBackendError: no backend takes the call; the message says why, one by one.
    """
    given: Sequence[Tensor] = () if states is None else states
    resets: Sequence[Tensor] = ()
    if reset_states is not None and reset is not None:
        resets = reset_states
    drops = spec.drops(training)
    check_generator(generator)
    generated = drops and generator is not None
    masks = lengths is not None, reset is not None
    seen: transforms.Seen | None = None
    followed: Route | None = None
    if torch.compiler.is_compiling():
        arguments.check_states(spec, None, given, resets)
        wanted = arguments.check_same_dtype_and_device(x, (*params, *given, *resets))
        lengths, reset, _ = _masks(x, lengths, reset)
        grad = wanted and torch.is_grad_enabled()
        flags = (grad, drops, *masks, return_states, generated)
        name = _backend_in_graph(backend, spec.text, x.dtype, x.device, flags)
        route, constants = None, CallConstants(spec.text, name, grad, drops, return_states)
    else:
        rows = _packed_rows(x, lengths) if lengths is not None else None
        x, params, given, resets, wanted, opaque = arguments.check_inputs(
            spec, x, params, given, resets, rows
        )
        if lengths is not None or reset is not None:
            lengths, reset, why = _masks(x, lengths, reset)
            opaque = opaque or why
        # a trace serves calls with and without gradients
        grad = wanted and (torch.is_grad_enabled() or op.tracing())
        device, transform = x.device, problem_key.transformed()
        key = ProblemKey(
            spec.text, x.dtype, device, precision_of(spec, x.dtype, device.type), grad, drops,
            *masks, return_states, transform, generated, problem_key.size_class(x), opaque,
        )  # fmt: skip
        if transform:
            seen = transforms.look(x, params, (*given, lengths, reset, *resets))
            followed = None if seen is None else _followed(backend, key, seen)
        route = choose(backend, key) if followed is None else followed
        constants = route.constants
        if x.dim() == 2 and (spec.reverse or not dispatch.BACKENDS[constants.backend].packed):
            raise ValueError(f"x must have shape (T, B, {spec.input_size}), got {tuple(x.shape)}")
    seed = None
    if drops:
        seed = philox.draw(dispatch.seed_device(constants.backend, x.device), generator)
    inputs = (x, given, params, lengths, reset, resets, seed)
    if constants.backend == "reference" and not _exports():
        return _by_reference(spec, constants, inputs, "" if route is None else opaque, backend)
    if followed is not None and seen is not None:
        out: Sequence[Tensor] = transforms.run(followed, seen, *inputs)
    else:
        out = op.recorded(constants, *inputs) if route is None else op.run(route, *inputs)
    count = len(spec.states)
    all_states = tuple(out[1 + count : 1 + 2 * count]) if return_states else ()
    return out[0], tuple(out[1 : 1 + count]), all_states


def _followed(name: str, key: ProblemKey, seen: transforms.Seen) -> Route | None:
    """How kernels run a call under the transforms that are active; None where they do not."""
    if key.training or key.opaque:
        return None
    grad = seen.grad and torch.is_grad_enabled()
    # a derivative is that of a function of the weights as they are
    precision = "tf32" if key.precision == "bf16" else key.precision
    route = choose(name, key._replace(transform=False, grad=grad, precision=precision))
    return None if transforms.refusal(route, seen, key.device) else route


def _exports() -> bool:
    """Whether a graph is recorded in which a loop over steps would have a fixed T."""
    return torch.compiler.is_exporting() and not problem_key.transformed()


_exports._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as of _backend_in_graph


def _masks(
    x: Tensor, lengths: Tensor | None, reset: Tensor | None
) -> tuple[Tensor | None, Tensor | None, str]:
    """Lengths and resets as backends take them, and why no address may be taken of them."""
    if lengths is not None and x.dim() == 3:
        lengths = check_lengths(lengths, x)
    if reset is not None:
        reset = check_reset(reset, x)
    return (
        (lengths, reset, "") if torch.compiler.is_compiling() else tensors.masks(x, lengths, reset)
    )


def _by_reference(
    spec: Spec, constants: CallConstants, inputs: tuple[Any, ...], opaque: str, asked: str
) -> tuple[Tensor, States, States]:
    """Ordinary autograd code; says once where `auto` runs a large call so."""
    x, states, params, lengths, reset, resets, seed = inputs
    problem = problem_key.for_backend(
        spec, x.dtype, x.device.type, grad=constants.grad, training=constants.training,
        lengths=lengths is not None, reset=reset is not None, return_states=constants.return_states,
        opaque=opaque,
    )  # fmt: skip
    if asked == "auto" and not torch.compiler.is_compiling():
        dispatch.warn_if_large(problem, x.shape[0], x.shape[1])
    call = Call(problem, x, list(states), list(params), lengths, reset, list(resets), seed)
    found = by_operators(call)
    return found.y, tuple(found.finals), tuple(found.all_states)


def by_operators(call: Call, run: Callable[[Call], Outputs] = reference.run) -> Outputs:
    """`run`; one sentence where tensors without memory have operators that refuse the call."""
    try:
        return run(call)
    except Exception as error:
        if not call.problem.opaque:
            raise
        raise ValueError(f"{call.problem.opaque}; its operators refuse this call") from error


def _packed_rows(x: Tensor, lengths: Tensor) -> int | None:
    """B of a packed x (N, I), or None for any other; ValueError where its lengths are not N."""
    if not isinstance(x, Tensor) or x.dim() != 2 or not isinstance(lengths, Tensor):
        return None
    if lengths.dim() != 1 or int(lengths.sum()) != x.shape[0]:
        raise ValueError(
            f"lengths of a packed x must be (B,) integers with the sum {x.shape[0]}, got "
            f"{lengths.dtype} of shape {tuple(lengths.shape)}"
        )
    return lengths.numel()


def check_lengths(lengths: Tensor, x: Tensor) -> Tensor:
    """Lengths as (B,) int64 on the device of x."""
    lengths = tensors.readable("lengths", lengths)
    kind = lengths.dtype
    if (
        lengths.shape != (x.shape[1],)
        or kind == torch.bool
        or kind.is_floating_point
        or kind.is_complex
    ):
        raise ValueError(
            f"lengths must be integers of shape ({x.shape[1]},), "
            f"got {lengths.dtype} of shape {tuple(lengths.shape)}"
        )
    if lengths.is_meta and not x.is_meta:
        raise ValueError("lengths must have values, got a tensor of device meta")
    lengths = lengths.to(torch.int64)  # some others, such as uint16, have few operators
    compiling = torch.compiler.is_compiling()
    here = not compiling and lengths.device.type == "cpu" and tensors.is_plain(lengths)
    if here and lengths.numel():
        low, high = (int(value) for value in lengths.aminmax())
        if low < 0 or high > x.shape[0]:
            raise ValueError(
                f"lengths must be in [0, {x.shape[0]}], got values from {low} to {high}"
            )
    crosses = x.is_cuda and not lengths.is_cuda and not compiling and tensors.is_plain(lengths)
    if crosses and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "lengths on the host cannot be copied during the capture of a CUDA graph, "
            "pass them on the device"
        )
    if crosses:
        # from pinned memory nobody waits for the stream; of our own, as the caller may refill his
        host = torch.empty_like(lengths, device="cpu", pin_memory=True).copy_(lengths)
        there = host.to(x.device, non_blocking=True)
        remember_host(there, host)
        return there
    return lengths.to(x.device).clamp(0, x.shape[0])


def transposed_mask(reset: Tensor) -> Tensor:
    """A reset mask (B, T) as (T, B)."""
    reset = tensors.readable("reset", reset)
    if reset.dim() != 2:
        raise ValueError(f"reset must have 2 dimensions (batch, steps), got {reset.dim()}")
    return tensors.transposed("reset", reset)


def check_generator(generator: Any) -> None:
    """Raises TypeError for what is neither a generator nor None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")


def check_reset(reset: Tensor, x: Tensor) -> Tensor:
    """A reset mask as (T, B) bool on the device of x."""
    reset = tensors.readable("reset", reset)
    if reset.shape != x.shape[:2]:
        raise ValueError(
            f"reset must have shape {tuple(x.shape[:2])} (steps, batch), got {tuple(reset.shape)}"
        )
    if reset.is_meta and not x.is_meta:
        raise ValueError("reset must have values, got a tensor of device meta")
    return truth_values("reset", reset).to(x.device)


def truth_values(name: str, mask: Tensor) -> Tensor:
    """A mask as bool: of another type 1 is set and 0 is not.

    Other numbers, such as nan, are refused where they can be read without waiting for a GPU;
    elsewhere, and while something traces, all but 0 are set.
    """
    if mask.dtype == torch.bool:
        return mask
    if mask.is_complex():
        raise ValueError(f"{name} must be bool or have real numbers 0 and 1, got {mask.dtype}")
    compiling = torch.compiler.is_compiling()
    if not compiling and mask.is_neg():
        mask = mask.resolve_neg()  # a dispatch mode would negate the bool, which torch refuses
    found = mask.to(torch.bool)
    hidden = compiling or op.watched(mask) or not tensors.is_plain(mask)
    if hidden or mask.device.type != "cpu":
        return found
    values = mask.to(torch.float64)  # some types, such as uint16, have few operators
    other = values != found.to(torch.float64)
    if other.any():
        raise ValueError(f"{name} must be bool or have only 0 and 1, got {values[other][0]:g}")
    return found


def takes_packed(
    spec: Spec,
    x: Tensor,
    params: Sequence[Tensor],
    states: Sequence[Tensor] | None,
    training: bool,
    generator: torch.Generator | None,
    backend: str,
) -> bool:
    """Whether the backend that will run a packed x (N, I) takes it as it is."""
    inputs = (x, *params, *(states or ()))
    if torch.compiler.is_compiling() or not x.is_cuda or op.watched(*inputs):
        return False
    if spec.reverse or not tensors.is_plain(*inputs):
        return False
    grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    drops = spec.drops(training)
    key = ProblemKey(
        spec.text, x.dtype, x.device, precision_of(spec, x.dtype, x.device.type), grad, drops,
        lengths=True, transform=problem_key.transformed(),
        generator=drops and generator is not None,
    )  # fmt: skip
    return dispatch.BACKENDS[choose(backend, key).constants.backend].packed


def padded(y: Tensor, lengths: Tensor | None, value: float) -> Tensor:
    """y (T, B, O) with `value` for the zeros past each sequence's end; no gradient passes there."""
    if lengths is None:
        raise ValueError(f"padding_value {value} needs lengths: nothing is past the end of T steps")
    most = torch.finfo(y.dtype).max
    if most < abs(value) < math.inf:
        raise ValueError(f"padding_value must be at most {most:g}, as {y.dtype} holds, got {value}")
    steps = torch.arange(y.shape[0], device=y.device)[:, None]
    ended = steps >= torch.as_tensor(lengths).to(y.device, torch.int64)
    return y.masked_fill(ended[..., None], value)
