"""What autograd and the compiler see of a call: two operators, their fakes and derivatives.

`openrnn::forward` and `openrnn::backward` are what graphs, traces and exports show. Eager calls go
round the dispatcher, straight to the backend: at T = 1 its cost would be felt. Both ways share one
`torch.autograd.Function`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from openrnn import arguments, problem_key, profiled, time_reversed
from openrnn import tensors as checks
from openrnn.backends.base import Call, Cotangents, Needs, Outputs, result_shapes
from openrnn.dispatch import BACKENDS, device_info, select
from openrnn.errors import NoBackendError
from openrnn.higher import network
from openrnn.reference import differentiate
from openrnn.route import CallConstants, Route, call_of, check_precision, route_of
from openrnn.spec import Spec
from openrnn.untraced import untraced

_INPUTS = (
    "Tensor x, Tensor[] states, Tensor[] params, Tensor? lengths, Tensor? reset, "
    "Tensor[] reset_states, Tensor? seed"
)
_LISTS = (1, 2, 5)  # which of the inputs are lists of tensors
_LIBRARY = torch.library.Library("openrnn", "DEF")
# called when `forward` is traced: whether `torch.onnx.export` does it
ON_TRACE: list[Callable[[bool], None]] = []
_LIBRARY.define(
    f"forward({_INPUTS}, str spec, str backend, bool grad, bool training, bool return_states, "
    "str precision) -> Tensor[]"
)
_LIBRARY.define(
    f"backward({_INPUTS}, Tensor y, Tensor[] reserve, Tensor[] grads, str spec, str backend, "
    "bool training, bool return_states, str precision, bool[] needs) -> Tensor[]"
)


def _flat(out: Outputs) -> list[Tensor]:
    return [out.y, *out.finals, *out.all_states, *out.reserve]


def eager(route: Route, *inputs: Any) -> list[Tensor]:
    """A forward where no gradient is recorded."""
    backend, call = BACKENDS[route.constants.backend], call_of(route, inputs)
    return _flat(profiled.named("openrnn::forward", time_reversed.forward, backend, call))


def _forward(*args: Any) -> list[Tensor]:
    *given, spec, backend, grad, training, return_states, precision = args
    constants = CallConstants(spec, backend, grad, training, return_states, precision)
    inputs = arguments.check_operator_inputs(Spec.parse(spec), given)
    route = route_of(constants, inputs)
    check_precision(route)
    with torch.no_grad():
        return eager(route, *inputs)


def forward_fake(*args: Any) -> list[Tensor]:
    """What forward returns, by its shapes: y, final states, all states, reserve."""
    for listener in ON_TRACE:
        listener(torch.onnx.is_in_onnx_export())
    x, states, *others, spec, backend, grad, training, return_states, precision = args
    constants = CallConstants(spec, backend, grad, training, return_states, precision)
    inputs = (x, states, *others)
    problem = route_of(constants, inputs).problem
    steps, batch = x.shape[0], x.shape[1]
    made = [x.new_empty(shape) for shape in result_shapes(problem, steps, batch)]
    if grad:
        kept = BACKENDS[backend].reserve(problem, steps, batch)
        made += [x.new_empty(shape, dtype=dtype) for shape, dtype in kept]
    return made


def _backward(*args: Any) -> list[Tensor]:
    *tensors, y, reserve, grads, spec, backend, training, return_states, precision, needs = args
    constants = CallConstants(spec, backend, True, training, return_states, precision)
    y = checks.check_own_memory("y", y)
    kept = [checks.check_own_memory("the reserve", tensor) for tensor in reserve]
    grads = [checks.check_own_memory("a gradient", grad) for grad in grads]
    wanted = _needs(needs, len(tensors[1]), len(tensors[2]))
    with torch.no_grad():
        found = eager_backward(route_of(constants, tensors), tensors, y, kept, grads, wanted)
    return [grad for grad in found if grad is not None]


def eager_backward(
    route: Route,
    inputs: Sequence[Any],
    y: Tensor,
    reserve: list[Tensor],
    grads: list[Tensor | None],
    needs: Needs,
    last: bool = False,
) -> list[Tensor | None]:
    """The gradients, where y and what reaches it are known to have memory of their own.

    Args:
        reserve: what forward left; nobody but us has seen it.
        last: nobody differentiates this call again, and its reserve may be used up.
    """
    call = call_of(route, arguments.check_operator_inputs(route.problem.spec, inputs))
    call.may_overwrite_reserve = last
    backend = BACKENDS[route.constants.backend]
    return time_reversed.backward(backend, call, y, reserve, cotangents(call, grads), needs).flat


def _backward_fake(*args: Any) -> list[Tensor]:
    x, states, params, _, _, reset_states, *_, needs = args
    inputs = [x, *states, *params, *reset_states]
    return [tensor.new_empty(tensor.shape) for tensor, need in zip(inputs, needs) if need]


def _needs(flat: Sequence[bool], states: int, params: int) -> Needs:
    middle = 1 + states + params
    return Needs(
        flat[0], tuple(flat[1 : 1 + states]), tuple(flat[1 + states : middle]), tuple(flat[middle:])
    )


class Recurrence(torch.autograd.Function):
    """forward and backward as autograd sees them; tensors come flat, because it knows no lists."""

    @staticmethod
    def forward(
        ctx: Any, route: Route, counts: tuple[int, int, int], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        inputs, visible = unflatten(counts, tensors), route.visible
        traced = watched(*tensors)
        if traced:
            route = route._replace(constants=route.constants.for_graph())
            out = torch.ops.openrnn.forward(*inputs, *route.constants)
        else:
            out = eager(route, *inputs)
        ctx.route, ctx.counts = route, counts
        ctx.save_for_backward(*tensors, out[0], *out[visible:])
        ctx.mark_non_differentiable(*out[visible:])
        # a traced backward takes no None; an eager one saves the zeros
        ctx.set_materialize_grads(traced)
        return tuple(out)

    @staticmethod
    @untraced  # autograd may call it from compiled code
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        saved, route, (states, params, resets) = ctx.saved_tensors, ctx.route, ctx.counts
        end = 1 + states + params
        total = end + 3 + resets
        inputs, y, reserve = unflatten(ctx.counts, saved[:total]), saved[total], saved[total + 1 :]
        flags = ctx.needs_input_grad[2:]
        needs = Needs(
            flags[0],
            flags[1 : 1 + states],
            flags[1 + states : end],
            flags[end + 2 : end + 2 + resets],
        )
        found = gradients(route, inputs, y, reserve, grads[: route.visible], needs)
        return (None, None, *found[:end], None, None, *found[end:], None)


def gradients(
    route: Route,
    inputs: Sequence[Any],
    y: Tensor,
    reserve: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    needs: Needs,
) -> list[Tensor | None]:
    """The gradients of a call of `recurrence` that are needed, in the order of its tensors.

    Args:
        grads: of y, the final states, and all states where they were asked for.
    """
    visible, plain = checks.gradients(grads)
    needs_reference = not plain and (
        not watched(y) or any(g is not None and _batched(g) for g in visible)
    )
    if needs_reference or torch.autograd.forward_ad._current_level >= 0:
        return _differentiated(route, inputs, visible, needs)
    if torch.is_grad_enabled():
        if not plain or not _derives(route, inputs, y, visible):
            return _differentiated(route, inputs, visible, needs)
        call = call_of(route, inputs)
        return network.differentiated(
            route.constants.backend, call, cotangents(call, visible), needs,
            lambda: _fast_backward(route, inputs, y, list(reserve), visible, needs),
        )  # fmt: skip
    return _fast_backward(route, inputs, y, list(reserve), visible, needs)


def _derives(
    route: Route, inputs: Sequence[Any], y: Tensor, grads: Sequence[Tensor | None]
) -> bool:
    """Whether kernels compute second derivatives of this call."""
    x = inputs[0]
    if x.dim() != 3 or 0 in x.shape or all(grad is None for grad in grads):
        return False
    if watched(y) or _watches(inputs) or problem_key.transformed():
        return False
    return network.refusal(route.constants.backend, route.problem, x.device, *x.shape[:2]) is None


def _differentiated(
    route: Route, inputs: Sequence[Any], grads: list[Tensor | None], needs: Needs
) -> list[Tensor | None]:
    """Backward by the reference, which alone has a derivative of its own, and many at a time."""
    call, backend = call_of(route, inputs), route.constants.backend
    if call.problem.drops and BACKENDS[backend].own_masks:
        why = "its dropout masks are its own, and a second derivative cannot repeat them"
        raise NoBackendError(f"the derivative of {call.problem}", {backend: [why]})
    return differentiate(call, cotangents(call, grads), needs, torch.is_grad_enabled())


def cotangents(call: Call, grads: Sequence[Tensor | None]) -> Cotangents:
    """What reaches y, the final states and all states, in this order."""
    count = len(call.problem.spec.states)
    return Cotangents(grads[0], [*grads[1 : 1 + count]], [*grads[1 + count :]])


def _fast_backward(
    route: Route,
    inputs: Sequence[Any],
    y: Tensor,
    reserve: list[Tensor],
    grads: list[Tensor | None],
    needs: Needs,
) -> list[Tensor | None]:
    if not watched(y):
        last = not torch._C._autograd._get_current_graph_task_keep_graph()
        return eager_backward(
            route, inputs, checks.check_own_memory("y", y), reserve, grads, needs, last
        )
    run: Any = torch.ops.openrnn.backward
    constants, wanted = route.constants, needs.flat
    x, lengths = inputs[0], inputs[3]
    batch = x.shape[1] if x.dim() == 3 else lengths.shape[0]
    shapes = [y.shape, *result_shapes(route.problem, x.shape[0], batch)[1:]]
    # the operator takes no None
    grads = [y.new_zeros(shape) if g is None else g for g, shape in zip(grads, shapes)]
    found = iter(
        run(
            *inputs, y, reserve, grads, constants.spec, constants.backend, constants.training,
            constants.return_states, constants.precision, list(wanted),
        )
    )  # fmt: skip
    return [next(found) if need else None for need in wanted]


def unflatten(counts: Sequence[int], flat: Sequence[Any]) -> tuple[Any, ...]:
    """x, states, params, lengths, reset, reset_states, seed."""
    states, params, resets = counts
    a, b = 1 + states, 1 + states + params
    return (
        flat[0], list(flat[1:a]), list(flat[a:b]), flat[b], flat[b + 1],
        list(flat[b + 2 : b + 2 + resets]), flat[b + 2 + resets],
    )  # fmt: skip


def _batched(grad: Tensor) -> bool:
    """Whether it stands for many gradients at a time, as under `is_grads_batched`."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(grad) or functorch.is_legacy_batchedtensor(grad)


def watched(*tensors: Tensor | None) -> bool:
    """Whether something watches the dispatcher: a mode, a subclass, the tracer of `torch.jit`."""
    if _modes() > 0 or _jit() is not None:
        return True
    return not _UNWATCHED.issuperset(map(type, tensors))


_modes: Any = torch._C._len_torch_dispatch_stack
_jit: Any = torch._C._get_tracing_state
_UNWATCHED = frozenset((Tensor, torch.nn.Parameter, type(None)))


def tracing() -> bool:
    """Whether `torch.jit.trace` is recording."""
    return _jit() is not None


def _autograd(*args: Any) -> list[Tensor]:
    *given, spec, backend, grad, training, return_states, precision = args
    constants = CallConstants(spec, backend, grad, training, return_states, precision)
    # AOTInductor passes None for an empty list
    inputs = [[] if index in _LISTS and part is None else part for index, part in enumerate(given)]
    if not _watches(inputs):
        inputs = list(arguments.check_operator_inputs(Spec.parse(spec), inputs))
    if torch.is_grad_enabled():
        if grad:
            return list(recurrence(route_of(constants, inputs), *inputs))
        # a graph that was recorded where nothing required a gradient, and is now trained
        if _requires_grad(inputs):
            route = _with_grad(constants, inputs)
            return list(recurrence(route, *inputs)[: route.visible])
    with torch._C._AutoDispatchBelowAutograd():
        found: list[Tensor] = torch.ops.openrnn.forward(*inputs, *constants)
    return found


def _watches(inputs: Sequence[Any]) -> bool:
    """Whether something watches the dispatcher or is one of the operator's inputs."""
    x, states, params, lengths, reset, reset_states, seed = inputs
    return watched(x, *states, *params, lengths, reset, *reset_states, seed)


def _requires_grad(inputs: Sequence[Any]) -> bool:
    """Whether any tensor of the operator's inputs requires a gradient."""
    x, states, params, _, _, reset_states, _ = inputs
    return any(tensor.requires_grad for tensor in (x, *states, *params, *reset_states))


def _with_grad(constants: CallConstants, inputs: Sequence[Any]) -> Route:
    """The route of a call that keeps what backward needs.

    Raises:
        NoBackendError: the backend that the graph names computes no gradient of this call.
    """
    route, device = route_of(constants._replace(grad=True), inputs), inputs[0].device
    capability, processors = device_info(device)
    asked = replace(route.problem, capability=capability, processors=processors)
    select(asked, constants.backend)
    return route


def _backward_autograd(*args: Any) -> list[Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        found: list[Tensor] = torch.ops.openrnn.backward(*args)
    return found


def recurrence(
    route: Route,
    x: Tensor,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    lengths: Tensor | None,
    reset: Tensor | None,
    reset_states: Sequence[Tensor],
    seed: Tensor | None,
) -> tuple[Tensor, ...]:
    """y, final states, all states where asked for, reserve; differentiable."""
    counts = (len(states), len(params), len(reset_states))
    apply = Recurrence.apply if torch._C._are_functorch_transforms_active() else _apply
    out: tuple[Tensor, ...] = apply(
        route, counts, x, *states, *params, lengths, reset, *reset_states, seed
    )
    return out


# What `Function.apply` adds to it is of use to the transforms of torch.func alone, and costs 4 us.
_apply: Any = super(torch.autograd.Function, Recurrence).apply


def run(route: Route, *inputs: Any) -> Sequence[Tensor]:
    """One eager call by the shortest way that is right; inputs as `recurrence` takes them."""
    if tracing() or (not route.constants.grad and _watches(inputs)):
        return recorded(route.constants, *inputs)
    if route.constants.grad:
        return recurrence(route, *inputs)
    # nothing here requires a gradient, so nothing needs to be switched off
    return eager(route, *inputs)


def recorded(constants: CallConstants, *inputs: Any) -> Sequence[Tensor]:
    """The call as a graph or a trace shows it: one operator."""
    found: list[Tensor] = torch.ops.openrnn.forward(*inputs, *constants.for_graph())
    return found


def _own_storage_each(run: Callable[..., list[Tensor]], *args: Any) -> list[Tensor]:
    """What `run` returns, each tensor dense and in storage of its own: so the fakes say."""
    seen: set[int] = set()
    made = []
    for tensor in run(*args):
        storage = tensor.untyped_storage()._cdata
        copied = storage in seen or not tensor.is_contiguous()
        made.append(tensor.clone(memory_format=torch.contiguous_format) if copied else tensor)
        seen.add(storage)
    return made


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("forward", partial(_own_storage_each, _forward), _device)
    _LIBRARY.impl("backward", partial(_own_storage_each, _backward), _device)
_LIBRARY.impl("forward", _autograd, "Autograd")
_LIBRARY.impl("backward", _backward_autograd, "Autograd")
torch.library.register_fake("openrnn::forward", forward_fake, lib=_LIBRARY)
torch.library.register_fake("openrnn::backward", _backward_fake, lib=_LIBRARY)
