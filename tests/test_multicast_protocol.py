"""The order of events in `kernels/cuda/multicast_exchange.cuh` as a model, run in random order.

What it watches: an operand that is multiplied belongs to the set and step at hand, shares of sums
that cells read to the turn at hand, and all tasks come to an end. A real machine shows such a fault
once in a million steps, a model at once.
"""

import random
from dataclasses import dataclass, field
from itertools import product

import pytest
from cases import thinned

HALVES, WARPS = 2, 2  # of K; that compute cells, or multiply one half of K
WAITS = "waits"  # what a task yields where it needs another to do something first


def interleave(often, dice):
    """Lets tasks take turns at random until all but the first, which has no end, have ended.

    Args:
        often: the tasks, each a generator, and how often it runs. Where it yields another may run.
    """
    running, awake = dict(often), dict(often)
    while len(running) > 1:
        assert awake, "nobody gets on"
        (task,) = dice.choices(list(awake), awake.values())
        for _ in range(dice.choice((1, 5, 50))):
            came = next(task, "end")
            if came != WAITS:
                awake = running.copy()
            if came:
                del awake[task]
            if came == "end":
                del running[task]
            if came:
                break


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

    def wait(self, number):
        """Waits for a phase. Like the machine it knows only whether the number is even or odd."""
        while self.phase % 2 == number % 2:
            yield WAITS


@dataclass
class Turns:
    """Two mbarriers, for even and for odd turns."""

    count: int

    def __post_init__(self):
        self.mbarriers = Mbarrier(self.count), Mbarrier(self.count)

    def arrive(self, turn):
        self.mbarriers[turn % 2].arrive()

    def wait(self, turn):
        return self.mbarriers[turn % 2].wait(turn // 2)


@dataclass
class Block:
    """A block's shared memory, each part marked with its set and step or its turn; mbarriers."""

    cluster: int
    sets: int
    operand: dict = field(default_factory=dict)  # (buffer, half, block and warp that it is of)
    shares: dict = field(default_factory=dict)  # (area, half, warp that multiplies, for which warp)

    def __post_init__(self):
        self.full = {}  # by buffer and half
        self.empty, self.summed_up = Turns(self.cluster), Turns(HALVES * WARPS)
        self.read = Turns(WARPS)
        self.stored = [Mbarrier(WARPS) for _ in range(self.sets)]


@dataclass(eq=False)
class Blocks:
    """The roles of all blocks as tasks.

    Args:
        empty_behind: a copy awaits that so many turns before have been multiplied; None: as many
            as there are buffers.
        read_behind: a product's shares await that so many turns before have been read.
        exchanged: buffers of a set's operand in global memory.
        areas: of shares.
        published: how often a block has published a step's operand once it is there.
        empty_early: a block says that it has multiplied before it has.
        read_early: cells say that they have read their shares before they have.
    """

    clusters: int
    cluster: int
    sets: int
    buffers: int
    steps: int
    empty_behind: int | None = None
    read_behind: int = 2
    exchanged: int = 2
    areas: int = 2
    published: int = 1
    empty_early: bool = False
    read_early: bool = False

    def __post_init__(self):
        self.blocks = [Block(self.cluster, self.sets) for _ in range(self.clusters * self.cluster)]
        self.turns = list(enumerate(product(range(self.steps), range(self.sets))))
        for block, place in product(self.blocks, product(range(self.buffers), range(HALVES))):
            block.full[place] = Mbarrier(1)
        self.counters = dict.fromkeys(product(range(self.sets), range(HALVES)), -1)
        self.exchange = {}  # (set, buffer, block, warp): the step of the operand that is there
        self.copies = []  # on their way

    def peers(self, number):
        first = number // self.cluster * self.cluster
        return [self.blocks[peer] for peer in range(first, first + self.cluster)]

    def sources(self, half):
        """The blocks and warps whose units are in a half of K."""
        count = len(self.blocks) // HALVES
        return list(product(range(half * count, (half + 1) * count), range(WARPS)))

    def copying(self, number, half):
        """The thread that copies a half of the operand: this block's part, into the cluster."""
        block, sources = self.blocks[number], self.sources(half)
        behind = self.buffers if self.empty_behind is None else self.empty_behind
        for turn, (step, which) in self.turns:
            while (self.counters[which, half] + 1) * WARPS < (step + self.published) * len(sources):
                yield WAITS
            if turn >= behind:
                yield from block.empty.wait(turn - behind)
            buffer = turn % self.buffers
            block.full[buffer, half].arrive(len(sources))
            for source in sources:
                if source[0] % self.cluster == number % self.cluster:
                    self.copies.append((number, buffer, half, which, step, source))
            yield

    def engine(self):
        """Carries out copies one by one, in any order."""
        while True:
            while not self.copies:
                yield WAITS
            at = self.dice.randrange(len(self.copies))
            number, buffer, half, which, step, source = self.copies.pop(at)
            there = self.exchange.get((which, step % self.exchanged, *source))
            for peer in self.peers(number):
                peer.operand[buffer, half, source] = which, there
                peer.full[buffer, half].deliver()
            yield

    def publishing(self, number):
        half = number * HALVES // len(self.blocks)
        for _, (step, which) in self.turns:
            yield from self.blocks[number].stored[which].wait(step)
            self.counters[which, half] += 1
            yield

    def multiplying(self, number, half, warp):
        block, sources = self.blocks[number], self.sources(half)
        for turn, (step, which) in self.turns:
            buffer = turn % self.buffers
            yield from block.full[buffer, half].wait(turn // self.buffers)
            for source in sources:
                there = block.operand[buffer, half, source]
                assert there == (which, step), "an operand of another turn"
                yield
            if turn >= self.read_behind:
                yield from block.read.wait(turn - self.read_behind)
            for reader in range(WARPS):
                block.shares[turn % self.areas, half, warp, reader] = turn
                yield
            block.summed_up.arrive(turn)
            yield

    def computing(self, number, warp):
        block = self.blocks[number]
        for which in range(self.sets):
            self.store(number, warp, which, 0)
            yield
            if self.steps > 0:
                block.stored[which].arrive()
        for turn, (step, which) in self.turns:
            if self.empty_early:
                yield from self.signal_empty(number, warp, turn)
            yield from block.summed_up.wait(turn)
            if not self.empty_early:
                yield from self.signal_empty(number, warp, turn)
            if self.read_early:
                block.read.arrive(turn)
                yield
            for half, sender in product(range(HALVES), range(WARPS)):
                there = block.shares[turn % self.areas, half, sender, warp]
                assert there == turn, "shares of another turn"
                yield
            self.store(number, warp, which, step + 1)
            yield
            if not self.read_early:
                block.read.arrive(turn)
                yield
            if step + 1 < self.steps:
                block.stored[which].arrive()
            yield

    def signal_empty(self, number, warp, turn):
        for peer in self.peers(number) if warp == 0 else ():
            peer.empty.arrive(turn)
            yield

    def store(self, number, warp, which, step):
        if step < self.steps:
            self.exchange[which, step % self.exchanged, number, warp] = step

    def run(self, seed):
        """Runs all tasks, some of them rarely."""
        self.dice = random.Random(seed)
        tasks = [self.engine()]
        for number in range(len(self.blocks)):
            tasks += [self.publishing(number)]
            tasks += [self.copying(number, half) for half in range(HALVES)]
            tasks += [self.computing(number, warp) for warp in range(WARPS)]
            tasks += [
                self.multiplying(number, *which) for which in product(range(HALVES), range(WARPS))
            ]
        interleave({task: self.dice.choice((1, 1, 10, 100)) for task in tasks}, self.dice)


def run(clusters, cluster, sets, buffers, **fault):
    for seed in range(14):
        steps = seed % 7 if not fault else 6
        Blocks(clusters, cluster, sets, buffers, steps, **fault).run(seed)


@pytest.mark.parametrize(("clusters", "cluster"), thinned([(2, 2), (3, 2), (2, 4)], 3))
@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("sets", [2, 3, 4])
def test_every_turn_reads_its_own(clusters, cluster, sets, buffers):
    """Catches reads of another turn and a standstill, from no step on."""
    run(clusters, cluster, sets, buffers)


TOO_EARLY = "operand of another turn|arrival too many"
OPERAND_FAULTS = [
    ({"empty_behind": 99}, TOO_EARLY),
    ({"empty_behind": 3}, TOO_EARLY),
    ({"empty_behind": 0}, "nobody gets on"),
    ({"empty_early": True}, TOO_EARLY),
    ({"exchanged": 1}, "operand of another turn"),
    ({"published": 0}, "operand of another turn"),
]
SHARES_FAULTS = [
    ({"read_behind": 99}, "shares of another turn"),
    ({"read_behind": 3}, "shares of another turn|nobody gets on"),
    ({"read_behind": 0}, "nobody gets on"),
    ({"read_early": True}, "shares of another turn"),
    ({"areas": 1}, "shares of another turn"),
]


# with one buffer EMPTY leaves little that READ could be too late for
@pytest.mark.parametrize(
    ("sets", "buffers", "fault", "seen"),
    [(*how, *fault) for how in ((2, 1), (3, 1), (4, 2)) for fault in OPERAND_FAULTS]
    + [(sets, 2, *fault) for sets in (2, 3, 4) for fault in SHARES_FAULTS],
    ids=str,
)
def test_a_fault_of_the_protocol_is_seen(sets, buffers, fault, seen):
    """Catches a model that would pass any protocol."""
    with pytest.raises(AssertionError, match=seen):
        run(2, 2, sets, buffers, **fault)
