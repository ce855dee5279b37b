"""The order of events in `kernels/cuda/multicast_backward_parts.cuh` as a model, run at random.

What it watches: gate gradients that are copied and sums that are received belong to the step at
hand, and the warps come to an end. Each word of both is written by itself, in any order. Clusters
and mbarriers are left to test_multicast_protocol.py.
"""

import random
from collections import Counter
from dataclasses import dataclass
from itertools import product

import pytest
from test_multicast_protocol import HALVES, SETS

WARPS, WORDS = 2, 2  # that compute in a block; of a warp in a message, and in its gate gradients
WAITS = "waits"  # what a task yields where it needs another to do something first


@dataclass(eq=False)
class Blocks:
    """All warps as generators: each `yield` is a place where another may run."""

    blocks: int  # that share R
    k_parts: int
    steps: int  # products of each set
    sets: int = SETS
    message_buffers: int = 2  # of a set
    tag_steps: int = 2  # in a row that have the same tag
    gate_buffers: int = 2  # of a set
    early: bool = False  # a block sets its flag before it has read its messages

    def __post_init__(self):
        self.turns = list(enumerate(product(range(self.steps), range(self.sets))))
        self.flags = dict.fromkeys(product(range(self.blocks), range(self.sets)), -1)
        self.memory = {}  # by place: what all blocks can read
        self.writes = {}  # by place: what is on its way there, the oldest first
        self.copied = Counter()  # turns of a block whose operand is there
        self.multiplied = Counter()  # warps at the barrier after the product, over all turns
        self.stored = Counter()  # warps that have stored gate gradients of a set, over all steps

    def peers(self, block):
        first = block // self.k_parts * self.k_parts
        return [peer for peer in range(first, first + self.k_parts) if peer != block]

    def sources(self, block, half):
        """The blocks whose units are in a half of a block's part of K."""
        count = self.blocks // self.k_parts // HALVES
        first = (block % self.k_parts * HALVES + half) * count
        return range(first, first + count)

    def gates(self, which, step, block, warps=range(WARPS)):
        at = "gates", which, step % self.gate_buffers, block
        return [(*at, warp, word) for warp in warps for word in range(WORDS)]

    def message(self, which, step, sender, receiver, warp):
        at = "sums", which, step % self.message_buffers, sender, receiver, warp
        return [(*at, word) for word in range(WORDS)]

    def memory_system(self):
        """Carries out writes one by one, in any order but to the same place."""
        while True:
            while not self.writes:
                yield WAITS
            place = self.dice.choice(list(self.writes))
            self.memory[place], *later = self.writes.pop(place)
            if later:
                self.writes[place] = later
            yield

    def copying(self, block):
        for turn, (step, which) in self.turns:
            for half in self.dice.sample(range(HALVES), HALVES):
                sources = self.sources(block, half)
                while self.multiplied[block] < WARPS * turn or any(
                    self.flags[source, which] < step for source in sources
                ):
                    yield WAITS
                places = [place for source in sources for place in self.gates(which, step, source)]
                for place in self.dice.sample(places, len(places)):
                    assert self.memory[place] == step, "gate gradients of another step"
                    yield
            self.copied[block] += 1
            yield

    def publishing(self, block):
        for _, (step, which) in self.turns:
            places = self.gates(which, step, block)
            while self.stored[block, which] < WARPS * (step + 1) or self.writes.keys() & places:
                yield WAITS
            self.flags[block, which] = step
            yield

    def write(self, places, value):
        for place in places:
            self.writes.setdefault(place, []).append(value)

    def store(self, block, warp, which, step):
        if step < self.steps:
            self.write(self.gates(which, step, block, [warp]), step)
            self.stored[block, which] += 1

    def computing(self, block, warp):
        for which in range(self.sets):
            self.store(block, warp, which, 0)
            yield
        for turn, (step, which) in self.turns:
            while self.copied[block] <= turn:
                yield WAITS
            self.multiplied[block] += 1
            yield
            while self.multiplied[block] < WARPS * (turn + 1):
                yield WAITS
            tag, words = step // self.tag_steps % 2, []
            for peer in self.peers(block):
                self.write(self.message(which, step, block, peer, warp), (tag, step, block))
                words += [(peer, at) for at in self.message(which, step, peer, block, warp)]
                yield
            if self.early:
                self.store(block, warp, which, step + 1)
                yield
            # the kernel polls all words at once: what counts is the last time it reads each
            for peer, place in self.dice.sample(words, len(words)):
                while self.memory.get(place, (1,))[0] != tag:
                    yield WAITS
                assert self.memory[place] == (tag, step, peer), "a message of another step"
                yield
            if not self.early:
                self.store(block, warp, which, step + 1)
            yield

    def run(self, seed, slow=None):
        """Lets tasks take turns at random until all have ended, those of block `slow` rarely."""
        self.dice = random.Random(seed)
        running = {self.memory_system(): self.dice.choice((1, 10, 1000))}  # and how often they run
        for block in range(self.blocks):
            tasks = [self.copying(block), self.publishing(block)]
            for task in tasks + [self.computing(block, warp) for warp in range(WARPS)]:
                often = self.dice.choice((1, 1, 10, 100)) if slow is None else 1000
                running[task] = 1 if block == slow else often
        awake = dict(running)
        while len(running) > 1:
            assert awake, "nobody gets on"
            (task,) = self.dice.choices(list(awake), awake.values())
            for _ in range(self.dice.choice((1, 5, 50))):
                came = next(task, "end")
                if came != WAITS:
                    awake = running.copy()
                if came:
                    del awake[task]
                if came == "end":
                    del running[task]
                if came:
                    break


def run(blocks, k_parts, steps, seeds, **fault):
    for seed in seeds:
        Blocks(blocks, k_parts, steps, **fault).run(seed, slow=seed % blocks if seed % 2 else None)


@pytest.mark.parametrize("steps", [1, 2, 6])
@pytest.mark.parametrize(("blocks", "k_parts"), [(2, 1), (4, 1), (4, 2), (8, 2), (8, 4)])
def test_every_step_reads_its_own(blocks, k_parts, steps):
    """Catches reads of another step and a standstill; every second run has one slow block."""
    run(blocks, k_parts, steps, range(6))


# One message buffer, with a tag that changes from step to step, is a fault of one set alone. Where
# two take turns, a warp reads a set's messages before it sends the other's, and whoever writes
# over the first has those.
@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ({"message_buffers": 1}, "a message of another step"),
        ({"message_buffers": 1, "tag_steps": 1, "sets": 1}, "nobody gets on"),
        ({"tag_steps": 9}, "a message of another step"),
        ({"early": True}, "gate gradients of another step"),
        ({"gate_buffers": 1}, "gate gradients of another step"),
    ],
    ids=str,
)
@pytest.mark.parametrize(("blocks", "k_parts"), [(4, 2), (8, 4)])
def test_a_fault_of_the_protocol_is_seen(blocks, k_parts, fault, seen):
    """Catches a model that would pass any protocol."""
    with pytest.raises(AssertionError, match=seen):
        run(blocks, k_parts, 8, range(20), **fault)
