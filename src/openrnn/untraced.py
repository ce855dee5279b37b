"""Functions that `torch.compile` runs as they are, with all that they call.

`torch.compiler.disable` would import the compiler, in more than a second, and costs each call. Here
the function's code has the mark that Dynamo looks for before it traces a frame, so that a call
outside of compiled code costs nothing. Inside of a function that is traced it is traced, too.
"""

from collections.abc import Callable
from functools import update_wrapper
from types import FunctionType
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

# compiled: part of torch._C, not of torch._dynamo
_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)


def untraced(function: Function) -> Function:
    """A function of Python that does the same, with code of its own, which Dynamo passes by.

    Where a torch has no such mark it is the function itself, which Dynamo traces.
    """
    if not hasattr(_eval_frame, "set_code_exec_strategy"):
        return function
    given: Any = function
    made: Any = FunctionType(
        given.__code__.replace(), given.__globals__, given.__name__, given.__defaults__,
        given.__closure__,
    )  # fmt: skip
    made.__kwdefaults__ = given.__kwdefaults__
    skip = _eval_frame._FrameAction.SKIP
    # the second: what its code calls is passed by as well
    _eval_frame.set_code_exec_strategy(made.__code__, _eval_frame._FrameExecStrategy(skip, skip))
    update_wrapper(made, given)
    found: Function = made
    return found
