"""The order of events in `kernels/cuda/multicast_exchange.cuh` as a model, run in random order.

What it watches: h that is multiplied belongs to the set and step at hand, and the warps come to an
end. A real machine shows such a fault once in a million steps, a model at once.
"""

import random
from dataclasses import dataclass, field
from itertools import product

import pytest
from cases import thinned

SETS, HALVES = 2, 2


@dataclass
class Mbarrier:
    """An mbarrier: its phase ends once all have arrived and all parts are there."""

    count: int
    phase: int = 0
    arrivals: int = 0
    missing: int = 0

    def arrive(self, parts=0):
        self.arrivals, self.missing = self.arrivals + 1, self.missing + parts
        self._turn()

    def deliver(self):
        self.missing -= 1
        self._turn()

    def _turn(self):
        assert self.arrivals <= self.count, "an arrival too many"
        if self.arrivals == self.count and self.missing == 0:
            self.phase, self.arrivals = self.phase + 1, 0

    def came(self, parity):
        return self.phase % 2 != parity


@dataclass
class Block:
    """A block's shared memory: h, each part marked with its set and step; and its mbarriers."""

    cluster: int
    warps: int
    hidden: dict = field(default_factory=dict)  # (half, block that it is of)
    multiplied: int = 0  # warps at the barrier after the product, over all turns

    def __post_init__(self):
        self.full = [Mbarrier(1) for _ in range(HALVES)]
        self.empty = Mbarrier(self.cluster)
        self.stored = [Mbarrier(self.warps) for _ in range(SETS)]


class Blocks:
    """All warps as generators: each `yield` is a place where another may run.

    Args:
        waits: the copying warp waits until all blocks of its cluster have read h.
        buffers: of h of a set in the exchange.
    """

    def __init__(self, clusters, cluster, warps, steps, waits=True, buffers=2):
        self.cluster, self.warps, self.steps, self.waits = cluster, warps, steps, waits
        self.buffers = buffers
        self.blocks = [Block(cluster, warps) for _ in range(clusters * cluster)]
        self.flags = {(block, which): -1 for block in range(len(self.blocks)) for which in (0, 1)}
        self.exchange = {}  # (set, parity of the step, block): the step of the h that is there
        self.parts = {}  # of h that are stored, of what is not whole yet
        self.copies = []  # on their way

    def peers(self, number):
        first = number // self.cluster * self.cluster
        return range(first, first + self.cluster)

    def sources(self, half):
        """The blocks whose units are in a half of K."""
        count = len(self.blocks) // HALVES
        return range(half * count, (half + 1) * count)

    def copying(self, number):
        block = self.blocks[number]
        for turn, (step, which) in enumerate(product(range(self.steps), range(SETS))):
            for which_half in range(HALVES):
                half = which_half ^ number // self.cluster % HALVES
                while any(self.flags[source, which] < step for source in self.sources(half)):
                    yield
                if which_half == 0 and self.waits:
                    while not block.empty.came((turn & 1) ^ 1):
                        yield
                block.full[half].arrive(len(self.sources(half)))
                rank = number % self.cluster
                for source in self.sources(half):
                    if source % self.cluster == rank:
                        self.copies.append((number, half, which, step, source))
                yield

    def engine(self):
        """Carries out copies one by one, in any order."""
        while True:
            if self.copies:
                at = self.dice.randrange(len(self.copies))
                number, half, which, step, source = self.copies.pop(at)
                there = self.exchange[which, step % self.buffers, source]
                for peer in self.peers(number):
                    self.blocks[peer].hidden[half, source] = which, there
                    self.blocks[peer].full[half].deliver()
            yield

    def publishing(self, number):
        for step, which in product(range(self.steps), range(SETS)):
            while not self.blocks[number].stored[which].came(step & 1):
                yield
            self.flags[number, which] = step
            yield

    def computing(self, number, warp):
        block, half = self.blocks[number], warp % HALVES
        for which in range(SETS):
            self.store(number, warp, which, 0)
            yield
        for turn, (step, which) in enumerate(product(range(self.steps), range(SETS))):
            while not block.full[half].came(turn & 1):
                yield
            for source in self.sources(half):
                assert block.hidden[half, source] == (which, step), "h of another step"
                yield
            block.multiplied += 1
            while block.multiplied < self.warps * (turn + 1):
                yield
            if warp == 0:
                for peer in self.peers(number):
                    self.blocks[peer].empty.arrive()
            if step + 1 < self.steps:
                self.store(number, warp, which, step + 1)
            yield

    def store(self, number, warp, which, step):
        """A warp's part of h; the last of them completes it."""
        place = which, step % self.buffers, number
        self.parts[place] = {*self.parts.get(place, {}), (warp, step)}
        if {(other, step) for other in range(self.warps)} <= self.parts[place]:
            self.exchange[place], self.parts[place] = step, set()
        else:
            self.exchange.setdefault(place, None)
        self.blocks[number].stored[which].arrive()

    def run(self, seed):
        """Lets warps take turns at random, some of them rarely, until all have ended."""
        self.dice = random.Random(seed)
        running = [self.engine()]
        for number in range(len(self.blocks)):
            running += [self.copying(number), self.publishing(number)]
            running += [self.computing(number, warp) for warp in range(self.warps)]
        weights = [self.dice.choice((1, 1, 10, 100)) for _ in running]
        for _ in range(2_000_000):
            at = self.dice.choices(range(len(running)), weights)[0]
            for _ in range(self.dice.choice((1, 5, 50))):
                if next(running[at], "end") == "end":
                    del running[at], weights[at]
                    break
            if len(running) == 1:
                return
        raise AssertionError("nobody gets on")


@pytest.mark.parametrize("seed", thinned(range(2), 2))
@pytest.mark.parametrize(("clusters", "cluster", "warps"), [(2, 2, 2), (3, 2, 2), (2, 4, 2)])
def test_no_turn_multiplies_h_of_another(clusters, cluster, warps, seed):
    Blocks(clusters, cluster, warps, steps=6).run(seed)


@pytest.mark.parametrize("fault", [{"waits": False}, {"buffers": 1}], ids=str)
def test_a_fault_of_the_protocol_is_seen(fault):
    with pytest.raises(AssertionError, match=r"of another step|too many"):
        Blocks(2, 2, 2, steps=8, **fault).run(seed=0)
