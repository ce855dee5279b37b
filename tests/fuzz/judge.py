"""The right answer, and how far a fair one in its dtype may be from it."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Found = dict[str, Tensor]


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference; equal infinities and two nans differ by nothing."""
    if a.shape != b.shape:
        return math.inf
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, 0.0, (a - b).abs())
    return apart.nan_to_num(nan=math.inf, posinf=math.inf).max().item() if a.numel() else 0.0


def size(a: Tensor) -> float:
    a = a.double()
    return a[a.isfinite()].abs().max().item() if a.isfinite().any() else 0.0


def wrong(
    found: Found,
    plain: Found,
    exact: Found | None,
    eps: float,
    near: Callable[[int], Found],
    terms: float = 8.0,
) -> str:
    """What is wrong with an answer, or nothing.

    Args:
        plain: the reference's answer in the same dtype.
        exact: its answer in float64, where there is one.
        eps: of the dtype, or of its products.
        near: the answer in float64 to inputs a rounding off; asked for where it matters only.
    """
    if found.keys() != plain.keys():
        return f"gives {' '.join(found)}, the reference {' '.join(plain)}"
    target = plain if exact is None else exact
    spread = dict.fromkeys(found, 0.0)
    for attempt in range(5):
        off = []
        for name, value in found.items():
            want = target[name]
            if value.shape != plain[name].shape:
                return f"{name} has shape {tuple(value.shape)}, wanted {tuple(plain[name].shape)}"
            if value.dtype != plain[name].dtype:
                return f"{name} is {value.dtype}, wanted {plain[name].dtype}"
            error = distance(value, want)
            allowed = 2 * distance(plain[name], want) + terms * eps * max(1.0, size(want))
            if not error <= allowed + 4 * spread[name]:
                off.append(f"{name} off by {error:.1e}, allowed {allowed:.1e}")
        if not off or attempt == 4:
            return "; ".join(off[:3])
        for name, value in near(attempt).items():
            spread[name] = max(spread[name], distance(value, target[name]))
    return ""
