"""What examples end with: ways to compute the same, compared, and timed in turn.

compare("one update", {"torch.nn": as_before, "openrnn": as_now})
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Comparison:
    """How far results were apart at most, and how many times as fast as the first each way is."""

    difference: float
    speed: dict[str, float]


def compare(
    title: str,
    ways: Mapping[str, Callable[[], Any]],
    *,
    within: float = 1e-5,
    seconds: float = 4.0,
    repeats: tuple[int, int] = (5, 200),
) -> Comparison:
    """Runs each way once and compares; then times them in turn, and prints the medians.

    Args:
        ways: by name, the usual one first. Each is called without arguments and returns tensors,
            in tuples, lists or dicts as it likes.
        within: the largest difference that counts as none, in parts of a tensor's largest number
            (of 1, if that is smaller).
        seconds: how long to repeat, all ways together.
        repeats: the fewest and the most repeats of each way.

    Raises:
        SystemExit: results differ by more.
    """
    results = [_tensors(run()) for run in ways.values()]
    apart = max(_difference(results[0], other) for other in results[1:])
    times: dict[str, list[float]] = {name: [] for name in ways}
    end, done = time.perf_counter() + seconds, 0
    while done < repeats[0] or (done < repeats[1] and time.perf_counter() < end):
        for name, run in ways.items():
            times[name].append(_seconds(run))
        done += 1
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    usual = next(iter(medians.values()))
    speed = {name: usual / median for name, median in medians.items()}
    print(f"{title} ({torch.get_num_threads()} threads, medians of {done} runs in turn)")
    for name, median in medians.items():
        faster = "" if median is usual else f"  {speed[name]:.2f} times as fast"
        print(f"  {name:<{max(map(len, ways))}}  {_readable(median)}{faster}")
    print(f"  results differ by {apart:.1e} at most", flush=True)
    if not apart <= within:  # nan is not, either
        raise SystemExit(f"{title}: results differ by {apart:.1e}, at most {within:.1e} is right")
    return Comparison(apart, speed)


def _tensors(found: Any) -> list[Tensor]:
    """Copies of all tensors in a result, which the next run may overwrite."""
    return [leaf.detach().clone() for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


def _difference(usual: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference, nan if there is one; infinite where other things are compared."""
    if not usual or [tensor.shape for tensor in usual] != [tensor.shape for tensor in other]:
        return float("inf")
    pairs = [(a.double(), b.double()) for a, b in zip(usual, other) if a.numel()]
    apart = [(a - b).abs().max().cpu() / max(1.0, a.abs().max().item()) for a, b in pairs]
    return torch.stack(apart).max().item() if apart else 0.0


def _seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _readable(seconds: float) -> str:
    return f"{1e3 * seconds:8.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:8.1f} us"
