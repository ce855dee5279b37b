"""A function with the numbers and functions that it captures as they are now.

Kernels are made of a cell's first trace, in which captured numbers are constants. The reference
calls the function itself, later: it must find the same ones.
"""

import dis
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any

import torch

_PLAIN = int, float, complex, str, bytes, type(None), torch.dtype, torch.device
_WRITES = {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"}
_GROWS = {"STORE_SUBSCR", "DELETE_SUBSCR"}
_MODULE = "__builtins__", "__name__", "__package__", "__spec__", "__path__"  # imports read them


def frozen(function: Callable[..., object]) -> Callable[..., object]:
    """The function, whose globals and closure no longer follow what others assign to them.

    Functions in Python that it captures are frozen, too; those of torch and openrnn are taken as
    they are, as are modules and objects, whose attributes are read anew. A function that assigns to
    what it captures, that captures a tensor or a name without a value yet, and what is no function
    come back unchanged. Its globals() has nothing but what it reads.
    """
    found = _value(function, {})
    return found if callable(found) else function


def _copy(function: FunctionType, made: dict[FunctionType, FunctionType]) -> FunctionType:
    known = made.get(function)
    if known is not None:
        return known
    builtins: Any = getattr(function, "__builtins__")  # noqa: B009  # which mypy does not know
    outer, every = function.__globals__, [*_instructions(function.__code__)]
    names = {one.argval for one in every if one.opname == "LOAD_GLOBAL"}
    captured = {name: outer[name] for name in names if name in outer}
    try:
        contents = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a name that the factory has not yet bound
        return function
    late = any(name not in outer and name not in builtins for name in names)
    reads = any(isinstance(value, torch.Tensor) for value in (*captured.values(), *contents))
    if late or reads or _writes(function.__code__, every):
        return function
    keeps = not any(one.opname in _GROWS for one in every)  # else lists may be counters
    own: dict[str, Any] = {name: outer[name] for name in _MODULE if name in outer}
    closure = tuple(CellType() for _ in contents)
    copy = FunctionType(
        function.__code__, own, function.__name__, function.__defaults__, closure or None
    )
    made[function] = copy
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    copy.__module__ = function.__module__
    copy.__dict__.update(function.__dict__)
    own |= {name: _value(value, made, keeps) for name, value in captured.items()}
    for mine, value in zip(closure, contents):
        mine.cell_contents = _value(value, made, keeps)
    return copy


def _value(value: Any, made: dict[FunctionType, FunctionType], keeps: bool = True) -> Any:
    if isinstance(value, FunctionType):
        package = value.__globals__.get("__name__", "").partition(".")[0]
        return value if package in ("torch", "openrnn") else _copy(value, made)
    if keeps and isinstance(value, list | dict) and _numbers(value):
        return value.copy()
    return value


def _numbers(value: list[Any] | dict[Any, Any]) -> bool:
    """Whether it holds numbers and words alone, at least one: an empty one may be there to grow."""
    items = value.values() if isinstance(value, dict) else value
    return bool(value) and all(isinstance(item, _PLAIN) for item in items)


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """Those of the code and of functions within it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)


def _writes(code: CodeType, every: list[dis.Instruction]) -> bool:
    """Whether it assigns to what it captures; what functions within it share is its own."""
    return any(
        one.opname in _WRITES and ("GLOBAL" in one.opname or one.argval in code.co_freevars)
        for one in every
    )
