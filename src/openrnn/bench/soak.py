"""`openrnn soak`: random calls for minutes, which must give the same bits in the same memory.

Each problem runs once alone, then again and again among others, on a GPU on any of four streams.
With several processes the device changes from one to another in the middle of kernels, whose warps
then fall behind each other.
"""

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from openrnn import cells
from openrnn.bench import timer
from openrnn.bench.interrupt import INTERRUPTED
from openrnn.nn import Recurrent

Call = Callable[[], list[Tensor]]
STREAMS, ROUNDS = 4, 20  # calls at a time; of these between two looks at the clock
# bytes by which memory may grow: a CPU's allocator keeps some of what was freed
GROWTH = {"cuda": 2**20, "cpu": 2**26}
# bytes of a GPU's memory that torch's allocator holds; beyond that the soak empties its cache:
# other processes need memory, and new memory has new addresses, which is worth testing
RESERVED = 4 << 30
SETTLE = 5.0  # seconds in which autograd's thread frees the graph of a call that has returned


@dataclass(frozen=True)
class Sizes:
    """What random problems are made of; `long` ones, T, B and H, are a tenth of all.

    A problem of several layers has `recompute` of one of these.
    """

    cells: tuple[cells.Cell, ...]
    dtypes: tuple[torch.dtype, ...]
    hidden: tuple[int, ...]
    batch: tuple[int, ...]
    long: tuple[tuple[int, int, int], ...] = ()
    recompute: tuple[str, ...] = ("none",)


SIZES = {
    "cuda": Sizes(
        (cells.lstm, cells.gru, cells.rnn_tanh, cells.mgu, cells.peephole_lstm),
        (torch.bfloat16, torch.float16, torch.float32),
        (1, 7, 24, 64, 100, 128, 200, 250, 256, 384, 500, 512, 1000, 1024),
        (1, 3, 8, 17, 64, 130),
        # as long as products beside loops need, of clusters and of grids
        ((1200, 40, 512), (1024, 16, 768), (300, 64, 1024)),
        ("none", "gates"),
    ),
    "cpu": Sizes(
        (cells.lstm, cells.gru), (torch.float32, torch.float64), (1, 7, 24, 64, 100), (1, 3, 17)
    ),
}


@dataclass(frozen=True)
class Soak:
    """What a run is asked for.

    Args:
        processes: that run at the same time, each with a seed of its own.
    """

    minutes: float = 10.0
    problems: int = 40
    processes: int = 1
    seed: int = 0
    device: str = "cuda"
    backend: str = "fused"


def execute(asked: Soak) -> int:
    """Starts the other processes and runs; returns 0, 1 where one found a fault, 130 after Ctrl-C.

    Raises:
        ValueError: what was asked for cannot be.
    """
    for name, value in (("problems", asked.problems), ("processes", asked.processes)):
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}")
    if not asked.minutes > 0:
        raise ValueError(f"minutes must be positive, got {asked.minutes}")
    others = [
        subprocess.Popen(command(replace(asked, processes=1, seed=asked.seed + number)))
        for number in range(1, asked.processes)
    ]
    try:
        code = run(asked)
    except KeyboardInterrupt:
        code = INTERRUPTED
    codes = [code, *(other.wait() for other in others)]
    return INTERRUPTED if code == INTERRUPTED else int(any(codes))


def command(asked: Soak) -> list[str]:
    """The command line of another process."""
    options = asdict(asked).items()
    words = [word for name, value in options for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "openrnn.cli", "soak", *words]


def run(asked: Soak) -> int:
    """Runs until the time is over; says how many calls there were, and what was wrong."""
    dice = random.Random(asked.seed)
    torch.manual_seed(asked.seed)
    # several streams differentiate the same parameters on purpose
    name = "set_warn_on_accumulate_grad_stream_mismatch"  # not in every torch
    getattr(torch.autograd.graph, name, lambda _: None)(False)
    calls = [problem(dice, asked.device, asked.backend) for _ in range(asked.problems)]
    compiling_since = time.monotonic()
    alone = [call() for call in calls]
    start, minute = time.monotonic(), 1
    print(f"{start - compiling_since:.0f} s: every problem ran once, kernels compiled", flush=True)
    first = last = done = 0
    while (passed := time.monotonic() - start) < 60 * asked.minutes:
        if passed > 60 * minute:
            print(f"{passed:.0f} s: {done} calls, {last >> 10} KiB", flush=True)
            minute += 1
        for _ in range(ROUNDS):
            picks = [dice.randrange(len(calls)) for _ in range(STREAMS)]
            found = together([calls[pick] for pick in picks], asked.device)
            for pick, have in zip(picks, found):
                wrong = list(differences(have, alone[pick]))
                if wrong:
                    print(f"problem {pick} gave other bits after {done} calls:")
                    print(*wrong, sep="\n", flush=True)
                    return 1
            done += len(picks)
        del found, have  # how much they hold is the dice's doing
        if asked.device == "cuda" and torch.cuda.memory_reserved() > RESERVED:
            torch.cuda.empty_cache()
        last = memory(asked.device)
        first = first or last
    late = time.monotonic() + SETTLE
    while last > first + GROWTH[asked.device] and time.monotonic() < late:
        time.sleep(0.01)
        last = memory(asked.device)
    print(f"{done} calls of {len(calls)} problems, memory {first >> 10} -> {last >> 10} KiB")
    return int(last > first + GROWTH[asked.device])


def problem(dice: random.Random, device: str, backend: str) -> Call:
    """A call of random cell, type, sizes and features, with the same numbers each time."""
    sizes = SIZES[device]
    hidden, batch = dice.choice(sizes.hidden), dice.choice(sizes.batch)
    steps = 1 if dice.random() < 0.1 else dice.randint(2, 80)
    inputs, dtype = 16, dice.choice(sizes.dtypes)
    if sizes.long and dice.random() < 0.1:
        steps, batch, hidden = dice.choice(sizes.long)
        steps -= dice.randint(0, 40)
        inputs = hidden
        dtype = dice.choice(sizes.dtypes[:2] if hidden > 512 else sizes.dtypes)
    cell, layers = dice.choice(sizes.cells), dice.choice((1, 1, 2, 3))
    layer = Recurrent(
        cell, inputs, hidden, layers,
        bidirectional=dice.random() < 0.3, wavefront=dice.choice((None, None, 0, 1, 5, 16)),
        recompute=dice.choice(sizes.recompute) if layers > 1 else "none", backend=backend,
        device=device, dtype=dtype,
    )  # fmt: skip
    x = torch.randn(steps, batch, inputs, device=device, dtype=dtype, requires_grad=True)
    given: dict[str, Tensor] = {}
    if dice.random() < 0.3:
        given["lengths"] = torch.randint(0, steps + 1, (batch,), device=device)
    if dice.random() < 0.3:
        given["reset"] = torch.rand(steps, batch, device=device) < 0.05

    def call() -> list[Tensor]:
        y = layer(x, **given)[0]
        return [y.detach(), *torch.autograd.grad(y.sum(), [x, *layer.parameters()])]

    return call


def together(calls: list[Call], device: str) -> list[list[Tensor]]:
    """What some calls return: on a GPU each on a stream of its own, on a CPU one by one."""
    if device == "cuda" and not _streams:
        _streams.extend(torch.cuda.Stream() for _ in range(STREAMS))
    found = []
    for index, call in enumerate(calls):
        with torch.cuda.stream(_streams[index]) if device == "cuda" else nullcontext():
            found.append(call())
    if device == "cuda":
        torch.cuda.synchronize()
    return found


_streams: list[torch.cuda.Stream] = []


def memory(device: str) -> int:
    """Bytes that are allocated: on the GPU, or by this process."""
    if device == "cuda":
        return int(torch.cuda.memory_allocated())
    return timer.resident()


def differences(found: list[Tensor], wanted: list[Tensor]) -> Iterator[str]:
    """Where y, dx or a parameter's gradient, in this order, has other bits."""
    for number, (one, two) in enumerate(zip(found, wanted, strict=True)):
        if torch.equal(one, two):
            continue
        wrong = (one != two).nonzero()
        least, most = wrong.min(0).values.tolist(), wrong.max(0).values.tolist()
        off = (one.float() - two.float()).abs().max().item()
        yield (
            f"  tensor {number} {tuple(one.shape)}: {len(wrong)} elements from {least} to {most}, "
            f"by up to {off:.2g}"
        )
