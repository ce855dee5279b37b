"""Random calls of the fused kernels on four streams: `python benchmarks/soak.py [--minutes 10]`.

Each problem runs once alone, then again among others on any of the streams: the same bits are
wanted, with no error, no hang and no growth of memory. Ends with 1 where that fails; once all
kernels are compiled, says each minute how far it is. With several processes the device changes
from one to another in the middle of kernels, whose warps then fall behind each other.
"""

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Callable

import torch

import openrnn
from openrnn import cells

CELLS = (cells.lstm, cells.gru, cells.rnn_tanh, cells.mgu, cells.peephole_lstm)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def problem(dice: random.Random) -> Callable[[], list[torch.Tensor]]:
    """A call of random cell, type, sizes and features, with the same numbers each time."""
    hidden = dice.choice((1, 7, 24, 64, 100, 128, 200, 256, 384, 512, 1024))
    steps, batch = dice.randint(1, 80), dice.choice((1, 3, 8, 17, 64, 130))
    inner, dtype = 16, dice.choice(DTYPES)
    if dice.random() < 0.1:  # as long as products beside loops need, of clusters and of grids
        hidden, steps, batch = dice.choice(((512, 1200, 40), (768, 1024, 16), (1024, 300, 64)))
        steps -= dice.randint(0, 40)
        inner, dtype = hidden, dice.choice(DTYPES[:2] if hidden > 512 else DTYPES)
    layer = openrnn.Recurrent(
        dice.choice(CELLS), inner, hidden, dice.choice((1, 1, 2)),
        bidirectional=dice.random() < 0.3, backend="fused", device="cuda", dtype=dtype,
    )  # fmt: skip
    x = torch.randn(steps, batch, inner, device="cuda", dtype=dtype, requires_grad=True)
    given: dict[str, torch.Tensor] = {}
    if dice.random() < 0.3:
        given["lengths"] = torch.randint(0, steps + 1, (batch,), device="cuda")
    if dice.random() < 0.3:
        given["reset"] = torch.rand(steps, batch, device="cuda") < 0.05

    def call() -> list[torch.Tensor]:
        y = layer(x, **given)[0]
        return [y.detach(), *torch.autograd.grad(y.sum(), [x, *layer.parameters()])]

    return call


def said(number: int, found: torch.Tensor, wanted: torch.Tensor) -> str:
    """Where y, dx or a parameter's gradient, in this order, has other bits; or nothing."""
    if torch.equal(found, wanted):
        return ""
    places = (found != wanted).nonzero()
    least, most = places.min(0).values.tolist(), places.max(0).values.tolist()
    off = (found.float() - wanted.float()).abs().max().item()
    return (
        f"  tensor {number} {tuple(found.shape)}: {len(places)} elements from {least} to {most}, "
        f"by up to {off:.2g}"
    )


def soak(asked: argparse.Namespace) -> int:
    """Runs until the time is over; says how many calls there were."""
    dice = random.Random(asked.seed)
    torch.manual_seed(asked.seed)
    # several streams differentiate the same parameters on purpose
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    calls = [problem(dice) for _ in range(asked.problems)]
    alone = [call() for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    begin, done, first, last, minute = time.monotonic(), 0, 0, 0, 1
    while (passed := time.monotonic() - begin) < 60 * asked.minutes:
        if passed > 60 * minute:
            print(f"{passed:.0f} s: {done} calls, {last >> 10} KiB", flush=True)
            minute += 1
        for _ in range(20):
            picks = [dice.randrange(len(calls)) for _ in streams]
            found = []
            for stream, pick in zip(streams, picks):
                with torch.cuda.stream(stream):
                    found.append(calls[pick]())
            torch.cuda.synchronize()
            for pick, have in zip(picks, found):
                wrong = [said(n, a, b) for n, (a, b) in enumerate(zip(have, alone[pick]))]
                if any(wrong):
                    print(f"problem {pick} gave other bits after {done} calls:")
                    print(*filter(None, wrong), sep="\n")
                    return 1
            done += len(picks)
        del found, have  # how much they hold is the dice's doing
        last = torch.cuda.memory_allocated()
        first = first or last
    print(f"{done} calls of {len(calls)} problems, memory {first >> 10} -> {last >> 10} KiB")
    return int(last > first + (1 << 20))


def main() -> int:
    """Starts as many processes as asked, each with a seed of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="that take turns on the device")
    asked = parser.parse_args()
    sizes = ["--minutes", str(asked.minutes), "--problems", str(asked.problems)]
    others = [
        subprocess.Popen([sys.executable, __file__, *sizes, "--seed", str(asked.seed + number)])
        for number in range(1, asked.processes)
    ]
    found = [soak(asked), *(other.wait() for other in others)]
    return int(any(found))


if __name__ == "__main__":
    sys.exit(main())
