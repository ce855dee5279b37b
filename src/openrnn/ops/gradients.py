"""`backward` without autograd: gradients written, added or left out, one by one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from openrnn import arguments, tensors, time_reversed
from openrnn.backends.base import Call, Cotangents, Gradients, Needs
from openrnn.dispatch import BACKENDS
from openrnn.ops.calls import Reserve, by_state, like, state_names, uncast
from openrnn.params import pack, size
from openrnn.spec import Spec

REQUESTS = ("write", "add", "null")


def backward(
    reserve: Reserve | None,
    dy: Tensor | None = None,
    dh_n: Tensor | None = None,
    dc_n: Tensor | None = None,
    *,
    dstates: Sequence[Tensor | None] | None = None,
    dall_states: Sequence[Tensor | None] | None = None,
    grad_req: str | Mapping[str, str] = "write",
    into: Mapping[str, Tensor | None] | None = None,
) -> dict[str, Tensor | None]:
    """The gradients of a training call, by name: x, h0, c0, params (one flat buffer).

    Cells with other states have names like n0; states that `reset` put in place, if forward was
    given some, reset_h and reset_c. A gradient is None where it is null and for a state that
    forward was not given. Any number of calls may follow one forward.

    Args:
        reserve: of `forward`.
        dy, dh_n, dc_n: gradients of the outputs, each like its output; None means zero.
        dstates: in place of dh_n and dc_n for a cell with other states.
        dall_states: of the states of all steps.
        grad_req: "write", "add" (to what `into` has) or "null" (not computed), for all or by name;
            a mapping leaves out what it does not name.
        into: where gradients go; without it "write" makes fresh tensors.

    Raises:
        ValueError: no reserve (inference keeps none), a freed one, a tensor of forward that was
            changed in place since, or a tensor of another shape, dtype or device.

    Example:
        >>> from openrnn import ops
        >>> rnn = ops.spec("rnn_tanh", input_size=3, num_units=4)
        >>> out = ops.forward(torch.randn(5, 2, 3), torch.randn(ops.params_size(rnn)), rnn)
        >>> total = ops.backward(out.reserve, torch.ones_like(out.y))
        >>> total = ops.backward(out.reserve, torch.ones_like(out.y), grad_req="add", into=total)
        >>> {name: tuple(grad.shape) for name, grad in total.items() if grad is not None}
        {'x': (5, 2, 3), 'params': (36,)}
    """
    if not isinstance(reserve, Reserve):
        raise ValueError(
            "backward needs the reserve of a forward in training, "
            f"got {'None, as in inference' if reserve is None else type(reserve).__name__}"
        )
    call = reserve.checked()
    spec = call.problem.spec
    shapes = _shapes(call, reserve.time_major)
    requests = _requests(grad_req, shapes, reserve)
    targets = _targets(into or {}, shapes, requests, call.x)
    finals = by_state(spec, ("dh_n", "dc_n", "dstates"), dh_n, dc_n, dstates)
    d_all_states: list[Tensor | None] = []
    if call.problem.return_states:
        d_all_states = by_state(spec, ("", "", "dall_states"), None, None, dall_states)
    elif dall_states is not None:
        raise ValueError("dall_states needs a forward with return_states=True, got one without")
    cotangents = _cotangents(reserve, call, dy, finals, d_all_states)
    wanted = [name for name, request in requests.items() if request != "null"]
    grads: dict[str, Tensor | None] = dict.fromkeys(requests)
    if not wanted:
        return grads
    names, reset_names = state_names(spec)
    needs = Needs(
        "x" in wanted,
        tuple(name in wanted for name in names[: len(call.states)]),
        ("params" in wanted,) * len(call.params),
        tuple(name in wanted for name in reset_names[: len(call.reset_states)]),
    )
    with torch.inference_mode(False), torch.no_grad():
        if reserve.backend != "reference":
            call, cotangents = _readable(reserve, call, cotangents)
        with uncast(call.x.device):
            found = time_reversed.backward(
                BACKENDS[reserve.backend], call, reserve.y, reserve.kept, cotangents, needs
            )
    with torch.no_grad(), uncast(call.x.device):
        fresh = _by_name(found, spec, reserve.time_major)
        for name in wanted:
            grads[name] = _deliver(fresh[name], requests[name], targets.get(name))
    return grads


def _shapes(call: Call, time_major: bool) -> dict[str, tuple[int, ...]]:
    """The shape of each gradient, in the layout of the caller."""
    spec, (steps, batch, features) = call.problem.spec, call.x.shape
    names, reset_names = state_names(spec)
    x = (steps, batch, features) if time_major else (batch, steps, features)
    states = [(spec.chains, batch, width) for width in spec.state_sizes]
    shapes: dict[str, tuple[int, ...]] = {"x": x, **dict(zip(names, states))}
    shapes["params"] = (size(spec),)
    if call.reset_states:
        shapes |= zip(reset_names, states)
    return shapes


def _known(what: str, names: Mapping[str, object], valid: Mapping[str, object]) -> None:
    for name in names:
        if name not in valid:
            raise ValueError(f"{what} must name some of {', '.join(valid)}, got {name!r}")


def _requests(
    grad_req: str | Mapping[str, str], shapes: Mapping[str, object], reserve: Reserve
) -> dict[str, str]:
    """One of write, add and null for each name."""
    absent = [name for name in shapes if name not in {"x", "params"} | reserve.given]
    if isinstance(grad_req, str):
        grad_req = dict.fromkeys((name for name in shapes if name not in absent), grad_req)
    _known("grad_req", grad_req, shapes)
    for name, request in grad_req.items():
        if request not in REQUESTS:
            raise ValueError(f"grad_req must be one of {', '.join(REQUESTS)}, got {request!r}")
        if name in absent and request != "null":
            raise ValueError(f"the gradient of {name} needs a {name} given to forward, got None")
    return {name: grad_req.get(name, "null") for name in shapes}


def _targets(
    into: Mapping[str, Tensor | None],
    shapes: Mapping[str, tuple[int, ...]],
    requests: Mapping[str, str],
    x: Tensor,
) -> dict[str, Tensor]:
    """The tensors that gradients go into."""
    _known("into", into, shapes)
    targets = {name: target for name, target in into.items() if target is not None}
    for name, request in requests.items():
        target = targets.get(name)
        if request == "add" and target is None:
            raise ValueError(f"grad_req 'add' of {name} needs a tensor in into, got None")
        if target is None or request == "null":
            continue
        if tuple(target.shape) != shapes[name]:
            raise ValueError(
                f"into[{name!r}] must have shape {shapes[name]}, got {tuple(target.shape)}"
            )
        # a wider type may collect the gradients of a narrow one
        widens = torch.promote_types(target.dtype, x.dtype) == target.dtype
        if not widens or target.device != x.device:
            raise ValueError(
                f"into[{name!r}] must be {x.dtype} or wider on {x.device}, "
                f"got {target.dtype} on {target.device}"
            )
    return targets


def _cotangents(
    reserve: Reserve,
    call: Call,
    dy: Tensor | None,
    finals: list[Tensor | None],
    d_all_states: list[Tensor | None],
) -> Cotangents:
    """The gradients of the outputs, time-major and checked."""
    spec, y, time_major = call.problem.spec, reserve.y, reserve.time_major
    steps, batch, width = y.shape
    span = (steps, batch) if time_major else (batch, steps)
    if dy is not None:
        dy = like("dy", dy, (*span, width), y)
        dy = dy if time_major else dy.transpose(0, 1)
    for k, (name, width) in enumerate(zip(spec.states, spec.state_sizes)):
        final = finals[k]
        if final is not None:
            finals[k] = like(f"d{name}_n", final, (spec.chains, batch, width), y)
        states = d_all_states[k] if d_all_states else None
        if states is not None:
            states = like(f"dall_states[{k}]", states, (spec.chains, *span, width), y)
            d_all_states[k] = states if time_major else states.transpose(1, 2)
    if all(grad is None for grad in (dy, *finals, *d_all_states)):
        dy = torch.zeros_like(y)
    return Cotangents(dy, finals, d_all_states)


def _readable(reserve: Reserve, call: Call, grads: Cotangents) -> tuple[Call, Cotangents]:
    """Call and gradients, of whose tensors addresses may be taken now; ValueError if of none."""

    def own(named: Iterable[tuple[str, Tensor | None]]) -> list[Tensor | None]:
        return [tensors.check_own_memory(name, tensor) for name, tensor in named]

    spec = call.problem.spec
    given = call.states, call.params, call.lengths, call.reset, call.reset_states, call.seed
    x, states, params, lengths, reset, resets, seed = arguments.check_operator_inputs(
        spec, (call.x, *given)
    )
    call = replace(
        call, x=x, states=states, params=params, lengths=lengths, reset=reset, reset_states=resets,
        seed=seed,
    )  # fmt: skip
    own(("the reserve", kept) for kept in (reserve.y, *reserve.kept))
    finals = own((f"d{name}_n", grad) for name, grad in zip(spec.states, grads.finals))
    d_all_states = own(
        (f"dall_states of {n}", grad) for n, grad in zip(spec.states, grads.all_states)
    )
    return call, Cotangents(tensors.check_own_memory("dy", grads.y), finals, d_all_states)


def _by_name(found: Gradients, spec: Spec, time_major: bool) -> dict[str, Tensor | None]:
    """The gradients in the layout of the caller."""
    names, reset_names = state_names(spec)
    x = found.x if time_major or found.x is None else found.x.transpose(0, 1)
    tensors = [tensor for tensor in found.params if tensor is not None]
    return {
        "x": x,
        **dict(zip(names, found.states)),
        "params": pack(spec, tensors) if tensors else None,
        **dict(zip(reset_names, found.reset_states)),
    }


def _deliver(grad: Tensor | None, request: str, target: Tensor | None) -> Tensor | None:
    if grad is None or target is None:
        return grad
    return target.add_(grad) if request == "add" else target.copy_(grad)
