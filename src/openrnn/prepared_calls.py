"""Calls that are prepared: their checks and choices are made once, for modules that repeat them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from openrnn import dispatch, problem_key
from openrnn.backends import captured
from openrnn.backends.base import (
    Backend,
    Call,
    ModuleCache,
    PreparedCall,
    PreparedGradCall,
    Shapes,
)
from openrnn.functional import choose
from openrnn.problem_key import ProblemKey
from openrnn.route import Route, call_of
from openrnn.spec import Spec, precision_of


class RecurrentCall(NamedTuple):
    """The arguments of a call of `functional.recurrent` that may be prepared.

    It has no states that resets put in place, and no generator.
    """

    spec: Spec
    x: Tensor
    params: Sequence[Tensor]
    states: Sequence[Tensor]
    training: bool
    backend: str
    precision: str = ""  # of its `Problem`, as "int8"; empty: `precision_of` says it
    lengths: Tensor | None = None  # (B,) int64, contiguous
    reset: Tensor | None = None  # (T, B) bool, contiguous


def prepare(
    call: RecurrentCall, output_shapes: Shapes, cache: ModuleCache | None = None
) -> PreparedCall | None:
    """What runs a call that has been run, and calls like it, with no new look at the tensors.

    None where its backend has none, where the call reverses sequences in time, and where it draws
    dropout masks on a CPU. On a GPU those that draw some take a seed, `philox.draw`, as the last
    tensor.

    Args:
        call: it records no gradient, is under no transform, and its tensors have memory of their
            own.
        output_shapes: of y and the final states as they are to be returned, contiguous.
        cache: of the module that calls, for what calls may leave for each other.
    """
    routed = _route_call(call)
    return None if routed is None else routed.backend.prepare(routed.call, output_shapes, cache)


def prepare_grad(
    call: RecurrentCall, output_shapes: Shapes, input_shapes: Shapes
) -> tuple[Route, PreparedGradCall] | None:
    """What makes a call again that records gradients, and its route.

    Args:
        input_shapes: those of x and the states as the caller has them, of the same order of
            elements.
    """
    routed = _route_call(call, grad=True)
    if routed is None:
        return None
    run = routed.backend.prepare_grad(routed.call, output_shapes, input_shapes)
    return None if run is None else (routed.route, run)


def bind(call: RecurrentCall, results: Sequence[Tensor]) -> Callable[[Tensor], None] | None:
    """What runs the call again and again with other x; None as for `prepare`.

    Args:
        call: as `prepare` takes it, with states.
        results: y and the final states, which each run writes.
    """
    # each run would need a seed of its own
    routed = None if call.spec.drops(call.training) else _route_call(call)
    if routed is not None and call.x.is_cuda:
        return captured.bound(routed.backend, routed.call, results)
    return None if routed is None else routed.backend.bind(routed.call, results)


class _RoutedCall(NamedTuple):
    """A call as its backend takes it."""

    route: Route
    backend: Backend
    call: Call


def _route_call(call: RecurrentCall, grad: bool = False) -> _RoutedCall | None:
    """The call; None where `functional.recurrent` does more.

    That is where sequences are reversed in time, and where a CPU draws dropout masks.
    """
    spec, x = call.spec, call.x
    drops, seed = spec.drops(call.training), None
    if spec.reverse or (drops and not x.is_cuda):
        return None
    if drops:  # a dry run needs an address that no other tensor has, and reads no values
        seed = torch.empty(2, dtype=torch.int64, device=x.device)
    precision = call.precision or precision_of(spec, x.dtype, x.device.type)
    key = ProblemKey(
        spec.text, x.dtype, x.device, precision, grad, drops, call.lengths is not None,
        call.reset is not None, batch=problem_key.size_class(x),
    )  # fmt: skip
    route = choose(call.backend, key)
    made = call_of(route, (x, call.states, call.params, call.lengths, call.reset, (), seed))
    return _RoutedCall(route, dispatch.BACKENDS[route.constants.backend], made)
