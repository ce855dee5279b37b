"""What a call of a small layer takes its host, beside torch.nn's: `python benchmarks/host.py`.

Medians in microseconds of calls that nobody waits for, so that on a GPU the device's time is not in
them; on a CPU it is. "own thread" is training with autograd in the caller's thread; "backward" the
gradients of one forward, again and again, by autograd's thread, which then is awake.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

import openrnn

ROWS = (("LSTM", "float32"), ("LSTM", "bfloat16"), ("GRU", "float32"), ("GRU", "bfloat16"))
STEPS, BATCH, HIDDEN, CALLS, REPEATS = 2, 16, 64, 100, 5
KINDS = ("inference", "forward", "training", "own thread", "backward")


def host(call: Callable[[], object], device: str) -> float:
    """Microseconds until a call returns, the median of some runs."""
    taken = []
    for number in range(REPEATS + 1):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        seconds = time.perf_counter() - start
        if device == "cuda":
            torch.cuda.synchronize()
        if number:  # the first one warms up
            taken.append(seconds)
    return statistics.median(taken) / CALLS * 1e6


def measured(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[float]:
    """The times of all KINDS."""
    device = x.device.type
    leaves = [x, *layer.parameters()]

    def training() -> object:
        return torch.autograd.grad(layer(x)[0], leaves, dy)

    with torch.no_grad():
        times = [host(lambda: layer(x), device)]
    times += [host(lambda: layer(x), device), host(training, device)]
    with torch.autograd.set_multithreading_enabled(False):
        times.append(host(training, device))
    y = layer(x)[0]
    again = host(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True), device)
    return [*times, again]


def main() -> None:
    """Prints a line a layer and side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    device: str = parser.parse_args().device
    table = Table("layer", "type", "whose", *KINDS)
    for cell, name in ROWS:
        if device == "cpu" and name != "float32":
            continue
        where = {"device": device, "dtype": getattr(torch, name)}
        x = torch.randn(STEPS, BATCH, HIDDEN, **where).requires_grad_()
        dy = torch.randn(STEPS, BATCH, HIDDEN, **where)
        for whose, library in (("ours", openrnn), ("torch.nn", torch.nn)):
            layer = getattr(library, cell)(HIDDEN, HIDDEN, **where)
            times = measured(layer, x, dy)
            table.add_row(cell, name, whose, *(f"{taken:.0f}" for taken in times))
    Console().print(table)


if __name__ == "__main__":
    main()
