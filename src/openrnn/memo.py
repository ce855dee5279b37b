"""Results that functions remember from call to call: each such memo is made here, and cleared here.

A memo is a function whose results are kept by its arguments. Nothing in it depends on values of
tensors, so clearing costs time and nothing else. A resource is kept as well, but for as long as the
process lives: loaded kernels, which may be running, handles, streams and registered cells.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# by module and name, each with cache_info() and cache_clear()
MEMOS: dict[str, Any] = {}
RESOURCES: dict[str, Any] = {}


def memo(size: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Remembers the results of a function for the arguments of the last `size` calls."""
    return lambda function: _listed(MEMOS, size, function)


def resource(function: Callable[P, T]) -> Callable[P, T]:
    """Remembers what a function loaded or opened, for each of its arguments."""
    return _listed(RESOURCES, None, function)


def _listed(registry: dict[str, Any], size: int | None, function: Callable[P, T]) -> Callable[P, T]:
    kept: Any = lru_cache(maxsize=size)(function)
    registry[f"{function.__module__}.{function.__qualname__}"] = kept
    return kept  # type: ignore[no-any-return]  # lru_cache's own type forgets the parameters


def clear() -> None:
    """Forgets the results of every memo."""
    for kept in MEMOS.values():
        kept.cache_clear()
