"""How a call runs: the constants that cross the operators, and what follows from them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from openrnn import request
from openrnn.backends.base import Call
from openrnn.dispatch import BACKENDS
from openrnn.errors import NoBackendError
from openrnn.memo import memo
from openrnn.spec import Problem, Spec, precision_of

AS_SET = ""  # the precision that torch's setting asks for when an operator runs


class How(NamedTuple):
    """The constants of one call, as they cross the operator."""

    spec: str
    backend: str
    grad: bool
    training: bool
    return_states: bool
    precision: str = AS_SET  # of float32 products; of an eager backward that of its forward

    def recorded(self) -> "How":
        """As a graph records it, which serves whatever precision is set when it runs."""
        return self._replace(precision=AS_SET)


class Route(NamedTuple):
    """How a call runs, and what follows from that for all calls alike."""

    how: How
    problem: Problem
    visible: int  # how many outputs are the user's: y, final states, all states where asked for


@memo(4096)
def route_for(
    how: How, dtype: torch.dtype, device: str, lengths: bool, reset: bool, precision: str
) -> Route:
    """The route of calls with these constants, a dtype, a type of device and masks."""
    spec = Spec.parse(how.spec)
    problem = request.for_backend(
        spec, dtype, device, grad=how.grad, training=how.training, lengths=lengths, reset=reset,
        return_states=how.return_states, precision=precision,
    )  # fmt: skip
    return Route(how, problem, 1 + len(spec.states) * (2 if how.return_states else 1))


def check_precision(route: Route) -> None:
    """Raises for the forward of a graph whose backend has no products of today's precision.

    The graph names the backend that was chosen while it was recorded. Its backward is not asked: it
    goes on from what forward left.

    Raises:
        NoBackendError: torch's setting was tf32 then and is ieee now.
    """
    how, problem = route.how, route.problem
    if how.precision == AS_SET and problem.precision == "ieee":
        reasons = BACKENDS[how.backend].refusals(problem)
        if reasons:
            way = "the graph was recorded while torch's setting was tf32: record it anew, or set it"
            raise NoBackendError(str(problem), {how.backend: [*reasons, way]})


def route_of(how: How, inputs: Sequence[Any]) -> Route:
    """The route of an operator's inputs: x, states, parameters, lengths, reset, ..."""
    x, _, _, lengths, reset, *_ = inputs
    dtype, device = x.dtype, x.device.type
    precision = how.precision or precision_of(Spec.parse(how.spec), dtype, device)
    return route_for(how, dtype, device, lengths is not None, reset is not None, precision)


def call_of(route: Route, inputs: Sequence[Any]) -> Call:
    """The inputs of an operator as a backend takes them."""
    x, states, params, lengths, reset, reset_states, seed = inputs
    return Call(
        route.problem, x, list(states), list(params), lengths, reset, list(reset_states), seed
    )
