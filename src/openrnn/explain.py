"""Which backend runs a module, a spec or a problem, and why each other one does not."""

from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from openrnn import dispatch, functional, problem_key
from openrnn.dispatch import Table
from openrnn.errors import kind_of
from openrnn.higher import network
from openrnn.nn import Layer, autocast, jagged
from openrnn.nn.cells import CellModule
from openrnn.nn.quantized import Quantized
from openrnn.params import module_slots
from openrnn.problem_key import ProblemKey
from openrnn.spec import Problem, Spec, precision_of

STEPS, REPEATS = 256, 7  # of what is measured


def explain(
    what: Layer | CellModule | Spec | Problem,
    x: Tensor | PackedSequence | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    device: Any = None,
    capability: tuple[int, int] | None = None,
    grad: bool | None = None,
    training: bool | None = None,
    lengths: object = False,
    reset: object = False,
    return_states: bool = False,
    reset_state: object = False,
    transform: bool = False,
    backend: str | None = None,
    measure: bool = False,
    schedule: bool = False,
    quiet: bool = False,
) -> Table:
    """Prints and returns every backend's answer, and how the chosen one would run.

    Args:
        what: a layer, a one-step module, a spec, or a whole problem.
        x: an example input, from which sizes, dtype and device are taken; a PackedSequence and a
            jagged nested tensor have lengths.
        dtype, device: by default those of x, then of the layer's parameters, then float32 and cpu;
            under autocast its dtype, which a layer's call has. A dtype may be its name. "cuda" need
            not be in this machine: the table then says how our kernels would run it, and the last
            line which backend would on a machine that has it, as `elsewhere` of the result does.
        capability: compute capability to suppose, such as (9, 0); by default the device's own.
        grad: gradients are wanted; by default where torch's grad mode is on and x or a parameter of
            the layer requires one. A spec's parameters are taken to.
        training: dropout is on; by default the layer's mode.
        lengths, reset, return_states, reset_state: whether the call would pass them, or what it
            would pass; reset_state with reset alone.
        transform: it is under transforms of torch.func that kernels do not run, such as two that
            differentiate.
        backend: the only one to ask; by default the layer's own choice, or all.
        measure: run the chosen backend on random numbers and say what a step takes; T is 256 and
            B 1 where they are not known.
        schedule: list the operations that the chosen backend would run, in order, each with its
            stream; T and B must be known, from x or the problem.
        quiet: do not print. `print` of the result shows the table then.

    Raises:
        TypeError: what is none of these.
        ValueError: x does not fit the layer, lengths or reset are none of x, dtype, device or
            capability is none, reset_state comes without reset, a schedule lacks T and B, or there
            is no GPU to measure on.

    Example:
        >>> import openrnn
        >>> table = openrnn.explain(openrnn.cells.gru_reset_before.spec(8, 16), quiet=True)
        >>> table.chosen
        'reference'
        >>> lstm = openrnn.LSTM(64, 128)
        >>> table = openrnn.explain(lstm, device="cuda", capability=(9, 0), quiet=True)
        >>> table.elsewhere or table.chosen
        'fused'
    """
    notes: list[str] = []
    _check_masks(isinstance(what, Layer) and what.batch_first, x, lengths, reset)
    lengths, reset, reset_state = map(_passed, (lengths, reset, reset_state))
    if reset_state and not reset:
        raise ValueError("explain got reset_state=True without reset=True, needs both")
    if isinstance(what, Problem):
        problem, name, where = what, backend or "auto", torch.device(what.device)
    else:
        layer = what if isinstance(what, Layer | CellModule) else None
        spec = _spec(what)
        if isinstance(x, Tensor) and x.is_nested and not isinstance(layer, CellModule):
            x, lengths = jagged.padded(x, layer is None or layer.batch_first)[0], True
        steps, batch = _sizes(spec, layer, x)
        lengths = lengths or isinstance(x, PackedSequence)
        data = x.data if isinstance(x, PackedSequence) else x
        weights = _weights(layer)
        like = data if data is not None else next(iter(weights), None)
        where = _device(device or (like.device if like is not None else "cpu"))
        kind = _dtype(dtype) or (like.dtype if like is not None else torch.float32)
        if dtype is None and layer is not None:
            cast = autocast.wanted(where) if kind in autocast.CHANGED else None
            own = weights[0].dtype if weights and not isinstance(layer, Quantized) else kind
            if cast is None and own != kind:
                notes = [f"the layer refuses this x: it is {kind}, parameters are {own}"]
            kind = cast or kind
        if grad is None:
            leaves = weights if data is None else [data, *weights]
            keeps = layer is None or any(tensor.requires_grad for tensor in leaves)
            grad = torch.is_grad_enabled() and keeps
        trains = (layer.training if layer else False) if training is None else training
        name = backend or (layer.backend if layer else "auto")
        precision = precision_of(spec, kind, where.type)
        if isinstance(layer, Quantized):
            why = layer.why_not_int8(kind, where, grad, trains, transform, name)
            notes = [f"int8 weights become floating point for each call: {why}"] if why else []
            precision = precision if why else "int8"
        problem = problem_key.problem_of(
            ProblemKey(
                spec.text, kind, where, precision, grad, trains,
                lengths, reset, return_states, transform, batch=batch, steps=steps,
                capability=_capability(capability), reset_state=reset_state,
            )
        )  # fmt: skip
    if measure and where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"measure=True runs the call, which needs {where}: torch finds no GPU")
    table = dispatch.with_elsewhere(dispatch.explain(problem, name), name)
    if table.chosen:
        notes += _derivatives(problem, table.chosen, where)
        more = notes + ([measured(problem, table.chosen, where)] if measure else [])
        more += scheduled(problem, table.chosen, where) if schedule else []
        table = dispatch.described(table, *more)
    return table.printed(quiet)


def _derivatives(problem: Problem, backend: str, device: torch.device) -> list[str]:
    """Which of those that kernels have elsewhere are the reference's here, and why."""
    if not dispatch.BACKENDS[backend].tangents_up_to:
        return []
    second = network.refusal(backend, problem, device, problem.steps, problem.batch)
    forward = network.forward_refusal(backend, problem, device)
    found = {"second derivatives are": second if problem.grad else None, "forward mode is": forward}
    if forward and second == forward and problem.grad:
        found = {"second derivatives and forward mode are": forward}
    return [f"{what} the reference's: {why}" for what, why in found.items() if why]


def scheduled(problem: Problem, backend: str, device: torch.device) -> list[str]:
    """The operations that a backend would run, a line each.

    Raises:
        ValueError: T or B is not known.
    """
    if problem.steps is None or problem.batch is None:
        raise ValueError("a schedule needs T and B: pass x, or a problem with steps and batch")
    lines = dispatch.BACKENDS[backend].schedule(problem, device)
    return lines or [f"{backend} has no schedule: it runs the call as a whole"]


def measured(problem: Problem, backend: str, device: torch.device) -> str:
    """What a step of a problem takes on a backend: the median of calls, in words."""
    spec = problem.spec
    kind: Any = {"device": device, "dtype": problem.dtype}
    steps, batch = problem.steps or STEPS, problem.batch or 1
    scale = spec.hidden_size**-0.5
    weights = [scale * (2 * torch.rand(slot.shape, **kind) - 1) for slot in module_slots(spec)]
    x = torch.randn(steps, batch, spec.input_size, **kind).requires_grad_(problem.grad)
    lengths = torch.full((batch,), steps, device="cpu") if problem.lengths else None
    reset = torch.rand(steps, batch, device=device) < 0.03 if problem.reset else None
    widths = spec.state_sizes if problem.reset_state else ()
    resets = [torch.rand(spec.chains, batch, width, **kind) for width in widths]
    leaves = [tensor.requires_grad_(problem.grad) for tensor in (x, *weights, *resets)]

    def call() -> None:
        y, _, _ = functional.recurrent(
            spec, x, weights, lengths=lengths, reset=reset, reset_states=resets,
            training=problem.training, return_states=problem.return_states, backend=backend,
        )  # fmt: skip
        if problem.grad:
            torch.autograd.grad(y, leaves, y.detach())
        if problem.device == "cuda":
            torch.cuda.synchronize(device)

    times = []
    with torch.set_grad_enabled(problem.grad):
        for _ in range(2 + REPEATS):
            start = perf_counter()
            call()
            times.append(perf_counter() - start)
    what = "forward and backward" if problem.grad else "forward"
    took = 1e6 * median(times[2:]) / steps
    return f"{what} of {steps} steps of B {batch}: {took:.2f} us a step measured, the call included"


def _weights(layer: Layer | CellModule | None) -> list[Tensor]:
    """What a module's dtype and device are those of."""
    if layer is None:
        return []
    every = layer.buffers() if isinstance(layer, Quantized) else layer.parameters()
    return [tensor for tensor in every if tensor.is_floating_point()]


def _spec(what: object) -> Spec:
    if isinstance(what, Spec):
        return what
    if isinstance(what, Layer):
        return what.spec
    if isinstance(what, CellModule):
        return what._spec
    got = f"the class {what.__name__}" if isinstance(what, type) else kind_of(what)
    hint = ""
    if isinstance(what, torch.nn.RNNBase):
        hint = "; openrnn.convert makes one of it"
    elif isinstance(what, torch.nn.Module):
        hint = "; give one of its layers"
    raise TypeError(f"what must be a layer of openrnn, a Spec or a Problem, got {got}{hint}")


def _check_masks(batch_first: bool, x: Any, lengths: object, reset: object) -> None:
    """Raises ValueError where a call of a dense x would refuse these masks."""
    if not isinstance(x, Tensor) or x.is_nested or x.dim() != 3:
        return
    major = x.transpose(0, 1) if batch_first else x
    if isinstance(lengths, Tensor):
        functional.check_lengths(lengths, major)
    if isinstance(reset, Tensor):
        mask = functional.transposed_mask(reset) if batch_first else reset
        functional.check_reset(mask, major)


def _passed(given: object) -> bool:
    """Whether a call gets what `explain` is told of, as True or as the thing itself."""
    return isinstance(given, Tensor) or hasattr(given, "__len__") or bool(given)


def _device(given: Any) -> torch.device:
    try:
        return torch.device(given)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be one of torch's, as 'cuda', got {given!r}") from None


def _capability(given: Any) -> tuple[int, int] | None:
    if given is None:
        return None
    if isinstance(given, tuple) and len(given) == 2 and all(type(n) is int for n in given):
        return given
    raise ValueError(f"capability must be two numbers, as (9, 0), got {given!r}")


def _dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    if given is None or isinstance(given, torch.dtype):
        return given
    found = getattr(torch, given, None) if isinstance(given, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype must be one of torch's or its name, as 'float32', got {given!r}")
    return found


def _sizes(
    spec: Spec, layer: Layer | CellModule | None, x: Tensor | PackedSequence | None
) -> tuple[int | None, int | None]:
    """T and B of an example input."""
    if x is None:
        return None, None
    packed, data = (True, x.data) if isinstance(x, PackedSequence) else (False, x)
    steps = 0 if isinstance(layer, CellModule) else 1  # dimensions of an unbatched x, less features
    dims = data.dim() - 1
    if dims not in ((1,) if packed else (steps, steps + 1)) or data.shape[-1] != spec.input_size:
        raise ValueError(
            f"x must have {spec.input_size} features in its last of "
            f"{steps + 1} or {steps + 2} dimensions, got {tuple(data.shape)}"
        )
    if isinstance(x, PackedSequence):
        return x.batch_sizes.numel(), int(x.batch_sizes[0])
    before = [*x.shape[:-1], 1] if dims == steps else [*x.shape[:-1]]
    if steps == 0:
        return 1, before[0]
    if isinstance(layer, Layer) and layer.batch_first and dims == 2:
        before.reverse()
    return before[0], before[1]
