"""What the package remembers from call to call: every memo is made here, and cleared here.

A memo is a function whose results are kept by its arguments. Nothing in it depends on values of
tensors, so clearing costs time and nothing else. Loaded code and handles of libraries are no memos:
they live as long as the process.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MEMOS: dict[str, Any] = {}  # by module and name, each with cache_info() and cache_clear()


def memo(size: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Remembers the results of a function for the arguments of the last `size` calls."""

    def remembering(function: Callable[P, T]) -> Callable[P, T]:
        kept: Any = lru_cache(maxsize=size)(function)
        MEMOS[f"{function.__module__}.{function.__qualname__}"] = kept
        return kept  # type: ignore[no-any-return]  # lru_cache's own type forgets the parameters

    return remembering


def clear() -> None:
    """Forgets everything."""
    for kept in MEMOS.values():
        kept.cache_clear()
