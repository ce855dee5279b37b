"""What tells one function from another in another process: its code and the values it captured.

Globals that it reads are not looked at: they are found by name, as in every pickle.
"""

import hashlib
import sys
from collections.abc import Callable
from functools import partial
from numbers import Number
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

import torch

# the Python that compiled it, its code, its values: another Python compiles the same otherwise
Digest = tuple[str, str, str]


def of(function: Callable[..., object], more: object = ()) -> Digest:
    """The digest of a function and of `more`, any plain values.

    Raises:
        TypeError: it captures something that has no plain value.
    """
    codes: list[str] = []
    if not isinstance(function, FunctionType):
        raise TypeError(f"it is a {type(function).__name__}, needs a function")
    values = _function(function, codes, {id(function)}) + _text(more, codes, set())
    version = f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]}"
    return version, _hash("\n".join(codes)), _hash(values)


def fits(wanted: Digest, function: Callable[..., object], more: object = ()) -> bool:
    """Whether a function is that of a digest, as far as the Pythons of both can tell."""
    try:
        found = of(function, more)
    except TypeError:  # it had none
        return False
    return found == wanted if found[0] == wanted[0] else found[2] == wanted[2]


def module_of(value: Any) -> str:
    """The name of a function's or class's module, the same in every process.

    A process that multiprocessing spawns knows the main script as `__mp_main__`, too.
    """
    name: str = value.__module__
    return "__main__" if name == "__mp_main__" else name


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _text(value: Any, codes: list[str], seen: set[int]) -> str:
    """A value as text, the same in every process; codes of functions go into `codes`."""
    plain = value is None or value is Ellipsis
    if plain or isinstance(value, str | bytes | Number | torch.dtype | torch.device):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, tuple | list | set | frozenset | dict):
        items = value.items() if isinstance(value, dict) else value
        texts = [_text(item, codes, seen) for item in items]
        if isinstance(value, set | frozenset):
            texts.sort()
        return f"{type(value).__name__} ({', '.join(texts)})"
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    named = type | BuiltinFunctionType | MethodDescriptorType | FunctionType
    if isinstance(value, named) and _is_at_its_name(value):
        return f"named {module_of(value)}.{value.__qualname__}"
    if isinstance(value, BuiltinFunctionType | MethodDescriptorType):
        return f"named {value.__qualname__}"
    if id(value) in seen:
        return "again"
    if isinstance(value, FunctionType):
        return _function(value, codes, seen | {id(value)})
    if isinstance(value, partial):
        parts = (value.func, value.args, value.keywords)
        return f"partial {_text(parts, codes, seen | {id(value)})}"
    if hasattr(value, "fingerprint"):  # another cell
        _, code, values = value.fingerprint()
        codes.append(code)
        return f"cell {values}"
    raise TypeError(f"it captures a {type(value).__name__}, needs numbers, text or functions")


def _is_at_its_name(value: Any) -> bool:
    """Whether other processes find the same by its name, where this one does."""
    found: object = sys.modules.get(getattr(value, "__module__", None) or "")
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def _function(function: FunctionType, codes: list[str], seen: set[int]) -> str:
    codes.append(_code(function.__code__))
    captured = []
    for name, held in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            content = held.cell_contents
        except ValueError:  # a name that the factory has not yet bound
            continue
        captured.append((name, content))
    values = (captured, function.__defaults__, function.__kwdefaults__)
    return f"function {_text(values, codes, seen)}"


def _code(code: CodeType) -> str:
    """The instructions and constants, without lines, file and docstring."""
    constants = list(code.co_consts)
    if constants and isinstance(constants[0], str):
        constants[0] = None
    texts = [
        _code(one) if isinstance(one, CodeType) else _text(one, [], set()) for one in constants
    ]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return repr((code.co_code.hex(), names, texts))
