"""One call, from what a user passes to what an operator takes.

Everything becomes time-major (T, B, I); lengths a (B,) int64 tensor, resets a (T, B) bool tensor.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from openrnn import dispatch, op, philox, reference
from openrnn.backends.base import Call, remember_host
from openrnn.spec import Problem, Spec, precision_of

States = tuple[Tensor, ...]


@lru_cache(maxsize=4096)
def _choose(
    text: str,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    grad: bool,
    training: bool,
    lengths: bool,
    reset: bool,
    return_states: bool,
    transform: bool,
    generator: bool,
    batch: int | None,
    precision: str,
) -> op.How:
    capability, processors = dispatch.place_of(device)
    problem = Problem(
        Spec.parse(text), dtype, device.type, capability, grad, training, lengths, reset,
        return_states, transform, batch=batch, generator=generator, precision=precision,
        processors=processors,
    )  # fmt: skip
    return op.How(text, dispatch.select(problem, name), grad, training, return_states, precision)


def _choose_in_graph(*asked: Any, generator: bool) -> str:
    """The backend while a compiler traces, where all that decides is constant."""
    text, _, dtype, device, *_ = asked
    precision = precision_of(Spec.parse(text), dtype, device.type)
    return _choose(*asked, _transformed(), generator, None, precision).backend


# what torch.compiler.assume_constant_result does, but for its import of dynamo: half of ours
_choose_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _size_class(x: Tensor) -> int | None:
    """B up to the next power of two, where it may decide which of two backends is faster."""
    if not x.is_cuda or x.dim() != 3:
        return None
    return 1 << max(0, x.shape[1] - 1).bit_length()


def _transformed() -> bool:
    """Whether a `torch.func` transform or forward-mode differentiation is active."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


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
        x: (T, B, I); (N, I) where `takes_packed` says so, with `packed_lengths`.
        params: in the order of `openrnn.params.module_slots(spec)`.
        states: initial states, each (L*D, B, O or H), zeros where not given.
        lengths: (B,) integers in [0, T]; y is 0 past them, final states are those at the true end.
        reset: (T, B); where not 0 the states are replaced before the step.
        reset_states: what replaces them, each (L*D, B, O or H), zeros where not given.
        return_states: also return each state of every step, (L*D, T, B, O or H).
        training: drop outputs between layers with probability `spec.dropout`.
        generator: whence the dropout seed comes; by default torch's own.
        backend: the only backend to try, or "auto".

    Raises:
        ValueError: lengths, reset or a state do not fit x.
        NoBackendError: no backend takes the call; the message says why, one by one.
    """
    states = list(states) if states is not None else []
    resets = list(reset_states) if reset_states is not None and reset is not None else []
    wanted = _check_tensors(spec, x, params, states, resets)
    if lengths is not None and x.dim() == 3:
        lengths = check_lengths(lengths, x)
    if reset is not None:
        reset = check_reset(reset, x)
    drops = spec.drops(training)
    # a trace serves calls with and without gradients
    grad = wanted and (torch.is_grad_enabled() or op.tracing())
    asked = (
        spec.text, backend, x.dtype, x.device, grad, drops, lengths is not None,
        reset is not None, return_states,
    )  # fmt: skip
    generated, compiling = drops and generator is not None, torch.compiler.is_compiling()
    if compiling:
        name = _choose_in_graph(*asked, generator=generated)
        how = op.How(spec.text, name, grad, drops, return_states)
    else:
        precision = precision_of(spec, x.dtype, x.device.type)
        how = _choose(*asked, _transformed(), generated, _size_class(x), precision)
    seed = philox.draw(dispatch.seed_device(how.backend, x.device), generator) if drops else None
    if how.backend == "reference":
        problem = Problem(
            spec, x.dtype, x.device.type, None, grad, drops, lengths is not None,
            reset is not None, return_states,
        )  # fmt: skip
        if backend == "auto" and not compiling:
            dispatch.warn_if_large(problem, x.shape[0], x.shape[1])
        found = reference.run(Call(problem, x, states, list(params), lengths, reset, resets, seed))
        return found.y, tuple(found.finals), tuple(found.all_states)
    out = op.run(how, x, states, params, lengths, reset, resets, seed)
    count = len(spec.states)
    every = tuple(out[1 + count : 1 + 2 * count]) if return_states else ()
    return out[0], tuple(out[1 : 1 + count]), every


def _check_tensors(
    spec: Spec, x: Tensor, params: Sequence[Tensor], states: list[Tensor], resets: list[Tensor]
) -> bool:
    """Whether any tensor requires a gradient.

    Raises unless dtypes, devices and the states' sizes agree: kernels only get addresses.
    """
    dtype, device, grad = x.dtype, x.device, x.requires_grad
    for tensor in (*params, *states, *resets):
        if tensor.dtype is not dtype:  # there is one object of each
            raise ValueError(
                f"x, states and parameters must have one dtype, got {dtype} and {tensor.dtype}"
            )
        if tensor.device != device:
            raise ValueError(
                f"x, states and parameters must be on one device, got {device} and {tensor.device}"
            )
        grad = grad or tensor.requires_grad
    for group in (states, resets):
        if group and len(group) != len(spec.states):
            raise ValueError(
                f"needs {len(spec.states)} states ({', '.join(spec.states)}), got {len(group)}"
            )
        for state, width in zip(group, spec.state_sizes):
            if state.shape[0] != spec.chains or state.shape[2] != width:
                raise ValueError(
                    f"a state must have shape ({spec.chains}, batch, {width}), "
                    f"got {tuple(state.shape)}"
                )
    return grad


def check_lengths(lengths: Tensor, x: Tensor) -> Tensor:
    """Lengths as (B,) int64 on the device of x."""
    lengths = torch.as_tensor(lengths)
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
    if not torch.compiler.is_compiling() and lengths.device.type == "cpu" and lengths.numel():
        low, high = (int(value) for value in lengths.aminmax())
        if low < 0 or high > x.shape[0]:
            raise ValueError(
                f"lengths must be in [0, {x.shape[0]}], got values from {low} to {high}"
            )
    crosses = x.is_cuda and not lengths.is_cuda and not torch.compiler.is_compiling()
    if crosses and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "lengths on the host cannot be copied during the capture of a CUDA graph, "
            "pass them on the device"
        )
    if crosses:
        # from pinned memory nobody waits for the stream; of our own, as the caller may refill his
        host = torch.empty(lengths.shape, dtype=torch.int64, pin_memory=True).copy_(lengths)
        there = host.to(x.device, non_blocking=True)
        remember_host(there, host)
        return there
    return lengths.to(device=x.device, dtype=torch.int64).clamp(0, x.shape[0])


def check_reset(reset: Tensor, x: Tensor) -> Tensor:
    """A reset mask as (T, B) bool on the device of x."""
    reset = torch.as_tensor(reset)
    if reset.shape != x.shape[:2]:
        raise ValueError(
            f"reset must have shape {tuple(x.shape[:2])} (steps, batch), got {tuple(reset.shape)}"
        )
    return reset.to(device=x.device, dtype=torch.bool)


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
    if torch.compiler.is_compiling() or not x.is_cuda or op.watched(x):
        return False
    inputs = (x, *params, *(states or ()))
    grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    drops = spec.drops(training)
    how = _choose(
        spec.text, backend, x.dtype, x.device, grad, drops, True, False, False, _transformed(),
        drops and generator is not None, None, precision_of(spec, x.dtype, x.device.type),
    )  # fmt: skip
    return dispatch.BACKENDS[how.backend].packed


def padded(y: Tensor, lengths: Tensor | None, value: float) -> Tensor:
    """y (T, B, O) with `value` for the zeros past each sequence's end; no gradient passes there."""
    if lengths is None:
        raise ValueError(f"padding_value {value} needs lengths: nothing is past the end of T steps")
    steps = torch.arange(y.shape[0], device=y.device)[:, None]
    ended = steps >= torch.as_tensor(lengths).to(y.device)
    return y.masked_fill(ended[..., None], value)


def packed_lengths(packed: PackedSequence) -> Tensor:
    """The lengths (B,) of packed sequences, falling, as int32 on the host."""
    sizes = packed.batch_sizes
    return (torch.arange(int(sizes[0])) < sizes[:, None]).sum(0, dtype=torch.int32)


def unpack(packed: PackedSequence) -> tuple[Tensor, Tensor, Tensor]:
    """A packed sequence as padded (T, B, I), lengths (B,), and where its rows lie in (T*B, I)."""
    sizes = packed.batch_sizes
    # the tracer of torch.jit follows sizes and tensors; a number would be a constant of its graph
    steps: int = sizes.shape[0]
    batch: Any = sizes[0] if op.tracing() else int(sizes[0])
    present = torch.arange(batch) < sizes[:, None]  # (T, B)
    rows = present.flatten().nonzero().squeeze(1).to(packed.data.device)
    data = packed.data
    flat = data.new_zeros((steps * batch, data.shape[1])).index_copy(0, rows, data)
    return flat.view(steps, batch, -1), present.sum(0), rows


def repack(y: Tensor, rows: Tensor, like: PackedSequence) -> PackedSequence:
    """The inverse of `unpack` for an output of the same sequences."""
    data = y.flatten(0, 1).index_select(0, rows)
    return PackedSequence(data, like.batch_sizes, like.sorted_indices, like.unsorted_indices)
