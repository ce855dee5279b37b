"""A function with the numbers and functions that it captures as they are now.

Kernels are made of a cell's first trace, in which captured numbers are constants. The reference
calls the function itself, later: it must find the same ones.
"""

import dis
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any

import torch

_PLAIN = int, float, complex, str, bytes, torch.dtype, torch.device
_WRITES = {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"}


def frozen(function: Callable[..., object]) -> Callable[..., object]:
    """The function, whose globals and closure no longer follow what others assign to them.

    Functions in Python that it captures are frozen, too; those of torch and openrnn are taken as
    they are, as are modules and objects, whose attributes are read anew. A function that assigns to
    what it captures, and what is no function, comes back unchanged.
    """
    found = _value(function, {})
    return found if callable(found) else function


def _copy(function: FunctionType, made: dict[int, FunctionType]) -> FunctionType:
    known = made.get(id(function))
    if known is not None:
        return known
    codes = [*_codes(function.__code__)]
    if any(_writes(code) for code in codes):
        return function
    read = {name for code in codes for name in code.co_names if name in function.__globals__}
    read |= {name for name in ("__builtins__", "__name__") if name in function.__globals__}
    own: dict[str, Any] = {}
    closure = tuple(CellType() for _ in function.__closure__ or ())
    copy = FunctionType(
        function.__code__, own, function.__name__, function.__defaults__, closure or None
    )
    made[id(function)] = copy
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    copy.__module__ = function.__module__
    copy.__dict__.update(function.__dict__)
    own |= {name: _value(function.__globals__[name], made) for name in read}
    for mine, cell in zip(closure, function.__closure__ or ()):
        try:
            mine.cell_contents = _value(cell.cell_contents, made)
        except ValueError:  # a name that the factory has not yet bound
            return function
    return copy


def _value(value: Any, made: dict[int, FunctionType]) -> Any:
    if isinstance(value, FunctionType):
        package = (value.__module__ or "").partition(".")[0]
        return value if package in ("torch", "openrnn") else _copy(value, made)
    if isinstance(value, list | dict) and _numbers(value):
        return value.copy()
    return value


def _numbers(value: list[Any] | dict[Any, Any]) -> bool:
    """Whether it holds numbers and words alone, at least one: an empty one may be there to grow."""
    items = value.values() if isinstance(value, dict) else value
    return bool(value) and all(isinstance(item, _PLAIN) for item in items)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code and that of functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _writes(code: CodeType) -> bool:
    """Whether it assigns to what it captures."""
    return any(
        one.opname in _WRITES and ("GLOBAL" in one.opname or one.argval in code.co_freevars)
        for one in dis.get_instructions(code)
    )
