"""How a call runs: the constants that cross the operators, and what follows from them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from openrnn import problem_key
from openrnn.backends.base import Call
from openrnn.dispatch import BACKENDS
from openrnn.errors import NoBackendError
from openrnn.memo import memo
from openrnn.spec import Problem, Spec, precision_of

AS_SET = ""  # the precision that torch's setting asks for when an operator runs


class CallConstants(NamedTuple):
    """What of a call is no tensor, as it crosses the operator."""

    spec: str
    backend: str
    grad: bool
    training: bool
    return_states: bool
    precision: str = AS_SET  # of float32 products; of an eager backward that of its forward

    def for_graph(self) -> "CallConstants":
        """The constants for a graph: its precision is that which is set when it runs."""
        return self._replace(precision=AS_SET)


class Route(NamedTuple):
    """How a call runs, and what follows from that for all calls alike."""

    constants: CallConstants
    problem: Problem
    visible: int  # how many outputs are the user's: y, final states, all states where asked for


@memo(4096)
def route_for(
    constants: CallConstants, dtype: torch.dtype, device: str, lengths: bool, reset: bool,
    precision: str,
) -> Route:  # fmt: skip
    """The route of calls with these constants, a dtype, a type of device and masks."""
    spec = Spec.parse(constants.spec)
    problem = problem_key.for_backend(
        spec, dtype, device, grad=constants.grad, training=constants.training, lengths=lengths,
        reset=reset, return_states=constants.return_states, precision=precision,
    )  # fmt: skip
    return Route(constants, problem, 1 + len(spec.states) * (2 if constants.return_states else 1))


def check_precision(route: Route) -> None:
    """Raises for the forward of a graph whose backend has no products of today's precision.

    The graph names the backend that was chosen while it was recorded. Its backward is not asked: it
    goes on from what forward left.

    Raises:
        NoBackendError: torch's setting was tf32 then and is ieee now.
    """
    constants, problem = route.constants, route.problem
    if constants.precision == AS_SET and problem.precision == "ieee":
        reasons = BACKENDS[constants.backend].refusals(problem)
        if reasons:
            way = "the graph was recorded while torch's setting was tf32: record it anew, or set it"
            raise NoBackendError(str(problem), {constants.backend: [*reasons, way]})


def route_of(constants: CallConstants, inputs: Sequence[Any]) -> Route:
    """The route of an operator's inputs: x, states, parameters, lengths, reset, ..."""
    x, _, _, lengths, reset, *_ = inputs
    dtype, device = x.dtype, x.device.type
    precision = constants.precision or precision_of(Spec.parse(constants.spec), dtype, device)
    return route_for(constants, dtype, device, lengths is not None, reset is not None, precision)


def call_of(route: Route, inputs: Sequence[Any]) -> Call:
    """The inputs of an operator as a backend takes them."""
    x, states, params, lengths, reset, reset_states, seed = inputs
    return Call(
        route.problem, x, list(states), list(params), lengths, reset, list(reset_states), seed
    )
