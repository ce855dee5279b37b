"""Products of one part of a call beside the loop of another.

A loop of few rows leaves multiprocessors idle, and the products over all its steps, which need its
results or give its inputs, take up to a quarter of a call. So a call may run in a few parts: while
the loop of one runs, forward multiplies the inputs of the next, backward the gradients of the one
before. The shortest is mostly forward's first and backward's last, whose products nothing hides.
The mailbox of a grid's next loop is emptied beside a loop, too. Such work begins when all blocks of
the loop have: it would take its places else.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise
from math import ceil
from types import TracebackType

import torch

from openrnn.native.lane import Lane, lane

COST = 40.0  # us of each part after the first, see `parts`
MOST = 4  # parts
LEAST = 40.0  # us that they must save beyond that
LONG = 800.0  # us of loops: shorter calls wait for their host, which more parts keep longer
SLOWER = 0.05  # of the time of backward's loop in a grid, which shares L2 with what is beside it
RATE = {2: 5e8, 4: 2e8}  # flop a us of products over all steps on an H200, by bytes of a value


def edges(steps: int, products: float, loop: float, idle: float, slower: float = 0.0) -> list[int]:
    """Where parts begin and end, as forward runs them; [] where one part is as good.

    Each is as many times as long as the one before as makes its products end with that one's loop.

    Args:
        products: us of those of all steps; loop: of the loop over all steps.
        idle: the share of multiprocessors that the loop leaves.
        slower: the share of its time that a loop takes longer with products beside it.
    """
    if not idle or loop < LONG or products < COST + LEAST:
        return []
    ratio = idle * loop / products
    most, found = LEAST, []
    for number in range(2, MOST + 1):
        ends = [*accumulate(ratio**place for place in range(number))]
        first, others = 1 / ends[-1], ends[-2] / ends[-1]
        saved = (1 - first) * products - slower * others * loop - (number - 1) * COST
        inner = (ceil(steps * end / ends[-1]) for end in ends[:-1])
        tried = [0, *inner, steps]
        if saved >= most and all(begin < end for begin, end in pairwise(tried)):
            most, found = saved, tried
    return found


class Beside:
    """Work that waits for a loop, to run beside it on a stream of its own.

    `with` puts what the current stream does afterwards behind all of it, and does what no loop
    came for. Where it is not `on`, work is done at once.
    """

    def __init__(self, device: int, on: bool) -> None:
        self._lane: Lane | None = lane(device) if on else None
        self._waiting: list[Callable[[], None]] = []
        self._away: list[Callable[[], None]] = []  # what they hold lives until the join

    def later(self, work: Callable[[], None]) -> None:
        """Hands over work for the next loop."""
        if self._lane is None:
            work()
        else:
            self._waiting.append(work)

    @property
    def begun(self) -> int:
        """What the next loop's launch takes, see `Kernel.launch`."""
        return self._lane.begun if self._lane is not None and self._waiting else 0

    def start(self) -> None:
        """The loop is launched: what waits runs beside it."""
        if self._lane is None or not self._waiting:
            return
        started, self._waiting = self._waiting, []
        self._away += started
        self._lane.follow()
        with torch.cuda.stream(self._lane.stream):
            for work in started:
                work()

    def join(self) -> None:
        """What the current stream does next comes after all that runs beside it."""
        if self._lane is not None and self._away:
            torch.cuda.current_stream(self._lane.stream.device).wait_stream(self._lane.stream)
            self._away.clear()

    def __enter__(self) -> "Beside":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.join()
        if error is None:
            for work in self._waiting:
                work()
