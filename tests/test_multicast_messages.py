"""The order of events in `kernels/cuda/multicast_backward_parts.cuh` as a model, run at random.

What it watches: gate gradients that are copied, sums that are received and a block's own sums
belong to the set and step at hand, and the warps come to an end. Each word is written by itself, in
any order. Clusters and mbarriers are left to test_multicast_protocol.py.
"""

import random
from collections import Counter
from dataclasses import dataclass
from itertools import product

import pytest
from test_multicast_protocol import HALVES, WAITS, WARPS, interleave

WORDS = 2  # of a warp that computes cells: in a message, and in its gate gradients


@dataclass(eq=False)
class Blocks:
    """The roles of all blocks as tasks.

    Args:
        blocks: that share R.
        steps: products of each set.
        buffers: of the operand in shared memory.
        message_buffers: of a set; tag_steps: in a row that have the same tag.
        gate_buffers: of a set in global memory.
        early: a block publishes gate gradients before it has read its messages.
        published: how often a block has published a step's gate gradients once they are there.
        kept: cells that are computed a turn later have their block's own sums in registers.
    """

    blocks: int
    k_parts: int
    steps: int
    sets: int
    buffers: int = 2
    message_buffers: int = 2
    tag_steps: int = 2
    gate_buffers: int = 2
    early: bool = False
    published: int = 1
    kept: bool = True

    def __post_init__(self):
        self.delayed = self.k_parts > 1 and self.sets > 3
        self.turns = list(enumerate(product(range(self.steps), range(self.sets))))
        self.halves = self.k_parts * HALVES
        self.counters = dict.fromkeys(product(range(self.sets), range(self.halves)), -1)
        self.memory = {}  # by place: what all blocks can read
        self.writes = {}  # by place: what is on its way there, the oldest first
        self.shares = {}  # by block, even or odd turn, and half of its K: the turn
        # turns that a half of a block, or a warp that computes cells, has behind it
        self.copied, self.multiplied, self.read = Counter(), Counter(), Counter()
        self.stored = Counter()  # warps that have stored gate gradients of a set, over all steps

    def peers(self, block):
        first = block // self.k_parts * self.k_parts
        return [peer for peer in range(first, first + self.k_parts) if peer != block]

    def gates(self, which, step, block, warps=range(WARPS)):
        at = "gates", which, step % self.gate_buffers, block
        return [(*at, warp, word) for warp in warps for word in range(WORDS)]

    def message(self, which, step, sender, receiver, warp):
        at = "sums", which, step % self.message_buffers, sender, receiver, warp
        return [(*at, word) for word in range(WORDS)]

    def messages(self, which, step, block, warp):
        """What a warp receives: senders and places, in any order."""
        peers = self.peers(block)
        words = [
            (peer, at) for peer in peers for at in self.message(which, step, peer, block, warp)
        ]
        return self.dice.sample(words, len(words))

    def tag(self, step):
        return step // self.tag_steps % 2

    def all_multiplied(self, block):
        return min(self.multiplied[block, half] for half in range(HALVES))

    def all_read(self, block):
        return min(self.read[block, warp] for warp in range(WARPS))

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

    def write(self, places, value):
        for place in places:
            self.writes.setdefault(place, []).append(value)

    def copying(self, block, half):
        number = block % self.k_parts * HALVES + half
        count = self.blocks // self.halves
        sources = range(number * count, (number + 1) * count)
        for turn, (step, which) in self.turns:
            while self.counters[which, number] + 1 < (step + self.published) * count:
                yield WAITS
            while self.all_multiplied(block) < turn + 1 - self.buffers:
                yield WAITS
            places = [place for source in sources for place in self.gates(which, step, source)]
            for place in self.dice.sample(places, len(places)):
                assert self.memory.get(place) == step, "gate gradients of another step"
                yield
            self.copied[block, half] += 1
            yield

    def multiplying(self, block, half):
        for turn, _ in self.turns:
            while self.copied[block, half] <= turn or self.all_read(block) < turn - 1:
                yield WAITS
            self.shares[block, turn % 2, half] = turn
            self.multiplied[block, half] += 1
            yield

    def publishing(self, block):
        half = block * self.halves // self.blocks
        for _, (step, which) in self.turns:
            places = self.gates(which, step, block)
            while self.stored[block, which] < WARPS * (step + 1) or self.writes.keys() & places:
                yield WAITS
            self.counters[which, half] += 1
            yield

    def computing(self, block, warp):
        for which in range(self.sets):
            self.store(block, warp, which, 0)
            yield
        before = own = asked = None
        for turn, at in self.turns:
            while self.all_multiplied(block) <= turn:
                yield WAITS
            if self.delayed and before:
                asked = yield from self.ask(block, warp, *before)
            now = self.own_sums(block, turn)
            yield from self.send(block, warp, *at)
            self.read[block, warp] += 1
            yield
            if self.delayed:
                if before:
                    own = own if self.kept else self.own_sums(block, turn - 1)
                    yield from self.cells(block, warp, *before, own, asked)
                before, own = at, now
            else:
                asked = yield from self.ask(block, warp, *at)
                yield from self.cells(block, warp, *at, now, asked)
        if self.delayed and before:
            asked = yield from self.ask(block, warp, *before)
            yield from self.cells(block, warp, *before, own, asked)

    def own_sums(self, block, turn):
        """The sets and steps that the block's own sums of a turn are of."""
        shares = {self.shares[block, turn % 2, half] for half in range(HALVES)}
        return {self.turns[there][1] for there in shares}

    def send(self, block, warp, step, which):
        for peer in self.peers(block):
            value = self.tag(step), step, block
            self.write(self.message(which, step, block, peer, warp), value)
            yield

    def ask(self, block, warp, step, which):
        """Reads the messages once: those that are there, by place."""
        found = {}
        for _, place in self.messages(which, step, block, warp):
            found[place] = self.memory.get(place, (1,))  # ones before the first use
            yield
        return found if all(value[0] == self.tag(step) for value in found.values()) else {}

    def cells(self, block, warp, step, which, own, asked):
        """Step `step` + 1 of a set's cells, from the sums of step `step`."""
        if self.early:
            self.store(block, warp, which, step + 1)
            yield
        # the kernel polls all words at once: what counts is the last time it reads each
        for peer, place in self.messages(which, step, block, warp):
            while not asked and self.memory.get(place, (1,))[0] != self.tag(step):
                yield WAITS
            found = asked[place] if asked else self.memory[place]
            assert found == (self.tag(step), step, peer), "a message of another step"
            yield
        assert own == {(step, which)}, "own sums of another turn"
        if not self.early:
            self.store(block, warp, which, step + 1)
        yield

    def store(self, block, warp, which, step):
        if step < self.steps:
            self.write(self.gates(which, step, block, [warp]), step)
            self.stored[block, which] += 1

    def run(self, seed, slow=None):
        """Runs all tasks, those of block `slow` rarely."""
        self.dice = random.Random(seed)
        often = {self.memory_system(): self.dice.choice((1, 10, 1000))}
        for block in range(self.blocks):
            tasks = [self.publishing(block)]
            tasks += [self.computing(block, warp) for warp in range(WARPS)]
            for half in range(HALVES):
                tasks += [self.copying(block, half), self.multiplying(block, half)]
            for task in tasks:
                rate = self.dice.choice((1, 1, 10, 100)) if slow is None else 1000
                often[task] = 1 if block == slow else rate
        interleave(often, self.dice)


def run(blocks, k_parts, steps, sets, seeds, **fault):
    for seed in seeds:
        slow = seed % blocks if seed % 2 else None
        Blocks(blocks, k_parts, steps, sets, **fault).run(seed, slow)


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
@pytest.mark.parametrize("sets", [2, 3, 4])
@pytest.mark.parametrize(("blocks", "k_parts"), [(2, 1), (4, 1), (4, 2), (8, 2), (8, 4)])
def test_every_step_reads_its_own(blocks, k_parts, sets, steps):
    """Catches reads of another step and a standstill; every second run has one slow block."""
    run(blocks, k_parts, steps, sets, range(6))


# One message buffer, with a tag that changes from step to step, is a fault of one set alone. Where
# two take turns, a warp reads a set's messages before it sends the other's, and whoever writes
# over the first has those.
@pytest.mark.parametrize(
    ("sets", "fault", "seen"),
    [
        (2, {"message_buffers": 1}, "a message of another step"),
        (1, {"message_buffers": 1, "tag_steps": 1}, "nobody gets on"),
        (2, {"tag_steps": 9}, "a message of another step"),
        (2, {"early": True}, "gate gradients of another step"),
        (2, {"gate_buffers": 1}, "gate gradients of another step"),
        (2, {"published": 0}, "gate gradients of another step"),
        (4, {"message_buffers": 1}, "a message of another step"),
        (4, {"tag_steps": 9}, "a message of another step"),
        (4, {"gate_buffers": 1}, "gate gradients of another step"),
        (4, {"kept": False}, "own sums of another turn"),
    ],
    ids=str,
)
@pytest.mark.parametrize(("blocks", "k_parts"), [(4, 2), (8, 4)])
def test_a_fault_of_the_protocol_is_seen(blocks, k_parts, sets, fault, seen):
    """Catches a model that would pass any protocol."""
    with pytest.raises(AssertionError, match=seen):
        run(blocks, k_parts, 8, sets, range(20), **fault)
