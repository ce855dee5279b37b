"""Mappings of arrays: flattened, ordered, and between numpy and torch without a changed bit."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Arrays = dict[str, Tensor]
FORWARD = re.compile(r"(?<![a-z])(forward|fw)(?![a-z])")
REVERSE = re.compile(r"(?<![a-z])(backward|bw|reverse)(?![a-z])")


def flatten(arrays: Any, prefix: str = "") -> Arrays:
    """Nested mappings and sequences of arrays as one mapping; steps of a path are joined by /.

    Raises:
        TypeError: there is something in it that is no array of numbers.
    """
    if isinstance(arrays, Mapping):
        pairs = [(str(name), inner) for name, inner in arrays.items()]
    elif isinstance(arrays, Sequence) and not isinstance(arrays, str | bytes):
        pairs = [(str(index), inner) for index, inner in enumerate(arrays)]
    else:
        return {prefix[:-1] or "0": as_tensor(prefix[:-1] or "arrays", arrays)}
    found: Arrays = {}
    for name, inner in pairs:
        if inner is not None:  # as equinox has for a bias that is not there
            found |= flatten(inner, f"{prefix}{name}/")
    return found


def as_tensor(name: str, array: Any) -> Tensor:
    """A tensor on the CPU with the numbers of an array; TypeError where it has none."""
    if isinstance(array, Tensor):
        return array.detach().cpu()
    found = np.asarray(array)
    if found.dtype.name == "bfloat16":  # of ml_dtypes, which torch does not know
        return torch.tensor(found.view(np.int16)).view(torch.bfloat16)
    if found.dtype.kind not in "fiub" or found.dtype.itemsize > 8:
        raise TypeError(f"{name} must be an array of real numbers, got {_kind(array, found)}")
    return torch.tensor(found.astype(found.dtype.newbyteorder("="), copy=False))


def _kind(array: object, found: Any) -> str:
    return type(array).__name__ if found.dtype.kind in "OSUV" else str(found.dtype)


def under(arrays: Arrays, prefix: str) -> Arrays:
    """The arrays whose names begin with a prefix, without it.

    Raises:
        ValueError: there is none.
    """
    kept = {
        name.removeprefix(prefix).lstrip("/."): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
    if not kept:
        raise ValueError(f"no array has a name that begins with {prefix!r}: {listed(arrays)}")
    return kept


def single(arrays: Arrays) -> Tensor:
    """The one array that there is.

    Raises:
        ValueError: there are several.
    """
    if len(arrays) != 1:
        raise ValueError(f"needs one flat buffer, got {len(arrays)} arrays: {listed(arrays)}")
    return next(iter(arrays.values()))


def by_number(name: str) -> list[Any]:
    """What names are sorted by: numbers by their size, forward before reverse."""
    plain = REVERSE.sub("b", FORWARD.sub("a", name))
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", plain)]


def ordered(arrays: Mapping[str, Tensor]) -> Arrays:
    """Arrays sorted by name, numbers by their size, forward before reverse."""
    return {name: arrays[name] for name in sorted(arrays, key=by_number)}


def listed(arrays: Mapping[str, object]) -> str:
    """The first names of a mapping, for a message."""
    shown = list(arrays)[:8]
    return (", ".join(shown) or "none at all") + (", ..." if len(arrays) > len(shown) else "")


def as_numpy(tensor: Tensor) -> Any:
    """A tensor as an array with the same bits; bfloat16 needs the package ml_dtypes."""
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    try:
        import ml_dtypes
    except ImportError:
        raise ValueError("numpy has bfloat16 only with the package ml_dtypes") from None
    return tensor.view(torch.int16).numpy().view(np.dtype(ml_dtypes.bfloat16))
