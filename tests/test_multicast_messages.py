"""The order of events in `kernels/cuda/multicast_backward_parts.cuh` as a model, run at random.

What it watches: gate gradients that are copied, sums that are received and a block's own sums
belong to the set and step at hand, and the warps come to an end. Each word is written by itself, in
any order. How operands are copied into clusters is left to test_multicast_protocol.py, which has
the same `Loop`.
"""

import random
import re
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

import openrnn

TEXT = (Path(openrnn.__file__).parent / "kernels/cuda/multicast.cuh").read_text()
# buffers of a set's published steps: of a stack, and else
DEPTH = dict(zip((True, False), map(int, re.findall(r"DEPTH = STACK \? (\d+) : (\d+);", TEXT)[0])))
HALVES = OTHER_LAYER, OWN_LAYER = 0, 1  # of a block's K; in a stack, whose values each multiplies
WARPS = 2  # of a warpgroup
WORDS = 2  # of a warp that computes cells: in a message, and in its gate gradients
END = "end"  # of a task


def until(ready):
    """The part of a task that waits until a function of nothing says True."""
    while not ready():
        yield ready


def interleave(often, dice):
    """Lets tasks take turns at random until all but the first, which has no end, have ended.

    Args:
        often: the tasks, each a generator, and how often it runs. Where it yields another may run;
            what it yields says when it can go on, None: at any time.
    """
    awake, asleep = dict(often), {}
    while len(awake) + len(asleep) > 1:
        for task in [task for task, ready in asleep.items() if ready()]:
            awake[task] = often[task]
            del asleep[task]
        assert awake, "nobody gets on"
        (task,) = dice.choices(list(awake), awake.values())
        for _ in range(dice.choice((1, 5, 50))):
            came = next(task, END)
            if came is not None:
                del awake[task]
                if came != END:
                    asleep[task] = came
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
        """Waits for the end of a phase. The machine knows only whether it is even or odd."""

        def ended():
            assert number <= self.phase <= number + 1, "a parity that stands for another phase"
            return self.phase > number

        return until(ended)


@dataclass(eq=False, kw_only=True)
class Loop:
    """What is multiplied, published and awaited, step by step.

    Args:
        layers: of a stack in one launch, each a step behind the one whose values it multiplies.
        blocks: of a layer; k_parts: that share K.
        buffers: of the operand in shared memory.
        groups: warpgroups that multiply; of the others of three each has every other set's cells.
        depth: buffers of a set's published steps in global memory; None: those of the kernel.
        early: by half of K, a copy awaits so many published steps too few.
        behind: await_followers asks for so many published steps too few.
        unpublished: last steps that a layer keeps to itself.
    """

    backward: bool = False
    layers: int = 1
    blocks: int = 4
    k_parts: int = 1
    sets: int = 2
    buffers: int = 1
    groups: int = 2
    steps: int = 6
    depth: int | None = None
    early: tuple[int, int] = (0, 0)
    behind: int = 0
    unpublished: int = 0

    def __post_init__(self):
        self.stack, self.source = self.layers > 1, 1 if self.backward else -1
        self.depth = self.depth or DEPTH[self.stack]
        self.cell_warpgroups = 3 - self.groups
        one_more = self.stack and self.steps > 0
        self.products = self.steps + (one_more and self.backward)
        self.published = self.steps + (one_more and not self.backward) - self.unpublished
        # the step that cells publish after the first product
        self.first = 0 if self.stack and self.backward else 1
        self.turns = list(enumerate(product(range(self.products), range(self.sets))))
        self.splits = self.k_parts * (1 if self.stack else 2)
        splits = product(range(self.layers), range(self.sets), range(self.splits))
        self.counters = dict.fromkeys(splits, -1)

    def operand(self, layer, half, i):
        """The layer and step whose values product i multiplies in a half of K; None: no values."""
        if not self.stack:
            return layer, i
        if half == OWN_LAYER:
            return (layer, i - self.backward) if i >= self.backward else None
        exists = layer + self.source in range(self.layers) and (not self.backward or i < self.steps)
        return (layer + self.source, i + (not self.backward)) if exists else None

    def sources(self, number, half):
        """The split of a half of a block's K, and the blocks whose units it has."""
        part, count = number % self.k_parts, self.blocks // self.splits
        split = part if self.stack else part * 2 + half
        return split, range(split * count, (split + 1) * count)

    def publish(self, layer, number, which):
        self.counters[layer, which, number * self.splits // self.blocks] += 1

    def await_published(self, layer, which, split, times):
        count = self.blocks // self.splits
        return until(lambda: self.counters[layer, which, split] + 1 >= times * count)

    def await_operand(self, layer, number, half, i, which):
        """What a thread that copies for product i waits for, in a stack also the layer after it."""
        some, follower = self.depth // 2, layer - self.source
        if self.stack and half == OWN_LAYER and i % some == 0 and follower in range(self.layers):
            for split in range(self.splits) if i >= some else ():
                yield from self.await_published(follower, which, split, i - some + 1 - self.behind)
        if operand := self.operand(layer, half, i):
            times = operand[1] + 1 - self.early[half]
            split, _ = self.sources(number, half)
            yield from self.await_published(operand[0], which, split, times)

    def halves_of(self, group):
        """The halves of K that a warpgroup multiplies."""
        return HALVES if self.groups == 1 else [group]

    def turns_of(self, group):
        """The turns whose cells a warpgroup computes."""
        return [turn for turn in self.turns if turn[1][1] % self.cell_warpgroups == group]


@dataclass(eq=False, kw_only=True)
class Blocks(Loop):
    """The roles of all blocks of a backward loop as tasks; a block is (layer, number).

    Args:
        in_cluster: messages go through shared memory, where an mbarrier counts their words.
        message_buffers: of a set; tag_steps: in a row that have the same tag.
        stored_early: a block publishes gate gradients before it has read its messages.
    """

    in_cluster: bool = False
    message_buffers: int = 2
    tag_steps: int = 2
    stored_early: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.memory = {}  # by place: what all blocks can read
        self.writes = {}  # by place: what is on its way there, the oldest first
        self.received = {}  # by warp, set and buffer of messages: the mbarrier
        self.shares = {}  # by block, even or odd turn, and warpgroup: the turn
        # turns that a half of a block's K, or a warpgroup of a block, has behind it
        self.copied, self.multiplied = Counter(), Counter()
        self.read = Counter()  # warps that have read a block's shares of a turn
        self.stored = Counter()  # warps that have stored gate gradients of a set, over all steps

    def peers(self, number):
        first = number // self.k_parts * self.k_parts
        return [peer for peer in range(first, first + self.k_parts) if peer != number]

    def gates(self, layer, which, step, number, warps=range(WARPS)):
        at = "gates", layer, which, step % self.depth, number
        return [(*at, warp, word) for warp in warps for word in range(WORDS)]

    def message(self, layer, which, i, sender, receiver, warp):
        at = "sums", layer, which, i % self.message_buffers, sender, receiver, warp
        return [(*at, word) for word in range(WORDS)]

    def mbarrier(self, block, which, i, warp):
        place = block, which, i % self.message_buffers, warp
        return self.received.setdefault(place, Mbarrier(1))

    def tag(self, i):
        return i // self.tag_steps % 2

    def await_copied(self, block, group, turn):
        return until(lambda: all(self.copied[block, half] > turn for half in self.halves_of(group)))

    def await_multiplied(self, block, turn):
        return until(lambda: all(self.multiplied[block, g] > turn for g in range(self.groups)))

    def await_read(self, block, turn):
        return until(lambda: turn < 0 or self.read[block, turn] == WARPS)

    def await_stored(self, block, which, i):
        places, warps = self.gates(block[0], which, i, block[1]), WARPS * (i + 1)
        return until(lambda: self.stored[block, which] >= warps and not self.writes.keys() & places)

    def memory_system(self):
        """Carries out writes one by one, in any order but to the same place."""
        while True:
            yield from until(lambda: self.writes)
            place = self.dice.choice(list(self.writes))
            self.memory[place], *later = self.writes.pop(place)
            if later:
                self.writes[place] = later
            if self.in_cluster and place[0] == "sums":
                layer, which, buffer, _, receiver, warp, _ = place[1:]
                self.mbarrier((layer, receiver), which, buffer, warp).deliver()
            yield

    def write(self, places, value):
        for place in places:
            self.writes.setdefault(place, []).append(value)

    def copying(self, block, half):
        for turn, (i, which) in self.turns:
            yield from self.await_operand(*block, half, i, which)
            yield from self.await_multiplied(block, turn - self.buffers)
            if operand := self.operand(block[0], half, i):
                layer, step = operand
                sources = self.sources(block[1], half)[1]
                places = [at for source in sources for at in self.gates(layer, which, step, source)]
                for place in self.dice.sample(places, len(places)):
                    assert self.memory.get(place) == step, "gate gradients of another step"
                    yield
            self.copied[block, half] += 1
            yield

    def multiplying(self, block, group):
        for turn, _ in self.turns:
            yield from self.await_copied(block, group, turn)
            yield from self.await_read(block, turn - 2)
            self.shares[block, turn % 2, group] = turn
            self.multiplied[block, group] += 1
            yield

    def publishing(self, block):
        for i, which in product(range(self.published), range(self.sets)):
            yield from self.await_stored(block, which, i)
            self.publish(*block, which)
            yield

    def computing(self, block, group, warp):
        layer, number = block
        for which in range(group, self.sets, self.cell_warpgroups) if self.first else ():
            self.store(block, warp, which, 0)
            yield
        for turn, (i, which) in self.turns_of(group):
            yield from self.await_multiplied(block, turn)
            own = {self.shares[block, turn % 2, product] for product in range(self.groups)}
            assert own == {turn}, "own sums of another turn"
            for peer in self.peers(number):
                value = self.tag(i), i, number
                self.write(self.message(layer, which, i, number, peer, warp), value)
                yield
            self.read[block, turn] += 1
            yield
            if self.stored_early:
                self.store(block, warp, which, i + self.first)
                yield
            yield from self.receive(block, warp, i, which)
            if not self.stored_early:
                self.store(block, warp, which, i + self.first)
            yield

    def receive(self, block, warp, i, which):
        """The kernel polls all words at once: what counts is the last time it reads each."""
        layer, number = block
        if self.in_cluster and self.k_parts > 1:
            mbarrier = self.mbarrier(block, which, i, warp)
            mbarrier.arrive((self.k_parts - 1) * WORDS)
            yield
            yield from mbarrier.wait(i // self.message_buffers)
        words = [
            (peer, at)
            for peer in self.peers(number)
            for at in self.message(layer, which, i, peer, number, warp)
        ]
        for peer, place in self.dice.sample(words, len(words)):
            if not self.in_cluster:
                yield from self.await_tag(place, self.tag(i))
            assert self.memory[place] == (self.tag(i), i, peer), "a message of another step"
            yield

    def await_tag(self, place, tag):
        return until(lambda: self.memory.get(place, (1,))[0] == tag)  # ones before the first use

    def store(self, block, warp, which, step):
        if step < self.published:
            self.write(self.gates(block[0], which, step, block[1], [warp]), step)
            self.stored[block, which] += 1

    def run(self, seed):
        """Runs all tasks, some rarely: in some runs those of one block, in others of one layer."""
        self.dice = random.Random(seed)
        often = {self.memory_system(): self.dice.choice((1, 10, 1000))}
        blocks = list(product(range(self.layers), range(self.blocks)))
        slow = self.dice.choice(blocks)
        for block in blocks:
            tasks = [self.publishing(block)]
            tasks += [self.copying(block, half) for half in HALVES]
            tasks += [self.multiplying(block, group) for group in range(self.groups)]
            for group, warp in product(range(self.cell_warpgroups), range(WARPS)):
                tasks.append(self.computing(block, group, warp))
            is_slow = block == slow if seed % 4 < 3 else block[0] == slow[0]
            for task in tasks:
                rate = self.dice.choice((1, 1, 10, 100)) if seed % 2 == 0 else 1000
                often[task] = 1 if seed % 2 and is_slow else rate
        interleave(often, self.dice)


def run(steps, **given):
    """Runs a loop once for each number of steps, in another order of events each time."""
    for seed, number in enumerate(steps):
        Blocks(backward=True, steps=number, **given).run(seed)


LOOPS = [
    {"groups": 2, "sets": 2, "buffers": 1},
    {"groups": 1, "sets": 2, "buffers": 1},
    {"groups": 1, "sets": 4, "buffers": 2},
]


through = pytest.mark.parametrize("in_cluster", [False, True], ids=["memory", "shared memory"])


@through
@pytest.mark.parametrize("loop", LOOPS, ids=str)
@pytest.mark.parametrize(("blocks", "k_parts"), [(2, 1), (4, 1), (4, 2), (8, 2), (8, 4)])
def test_every_step_reads_its_own(blocks, k_parts, loop, in_cluster):
    """Catches reads of another step and a standstill; every second run has slow blocks."""
    run([0, 1, 2, 6, 1, 6, 6, 6], blocks=blocks, k_parts=k_parts, in_cluster=in_cluster, **loop)


@through
@pytest.mark.parametrize("loop", LOOPS, ids=str)
@pytest.mark.parametrize(
    ("layers", "blocks", "k_parts"), [(2, 2, 1), (2, 4, 2), (3, 2, 2), (2, 4, 4), (4, 2, 2)]
)
def test_every_layer_of_a_stack_reads_its_own(layers, blocks, k_parts, loop, in_cluster):
    """The same, with published steps that lie where older ones did."""
    given = {"layers": layers, "blocks": blocks, "k_parts": k_parts, "in_cluster": in_cluster}
    run([0, 1, 2, 19, 4, 9], **given, **loop)


GATES, MESSAGE = "gate gradients of another step", "a message of another step"
FAULTS = [
    ({"message_buffers": 1}, MESSAGE),
    ({"tag_steps": 9}, MESSAGE),
    ({"stored_early": True}, GATES),
    ({"depth": 1}, GATES),
    ({"early": (1, 1)}, GATES),
]
STACK_FAULTS = [
    ({"message_buffers": 1}, MESSAGE),
    ({"tag_steps": 9}, MESSAGE),
    ({"behind": DEPTH[True] // 2}, GATES),
    ({"behind": 99, "depth": 2}, GATES),
    ({"early": (1, 0)}, GATES),
    ({"early": (0, 1)}, GATES),
]


@pytest.mark.parametrize(("fault", "said"), FAULTS, ids=str)
@pytest.mark.parametrize("loop", LOOPS, ids=str)
@pytest.mark.parametrize(("blocks", "k_parts"), [(4, 2), (8, 4)])
def test_a_fault_of_the_protocol_is_seen(blocks, k_parts, loop, fault, said):
    """Catches a model that would pass any protocol."""
    with pytest.raises(AssertionError, match=said):
        run([8] * 20, blocks=blocks, k_parts=k_parts, **loop, **fault)


def test_a_single_buffer_of_messages_is_seen():
    """With a tag that changes from step to step: a fault where a warp has one set alone.

    Where two sets take turns, a warp reads the messages of one before it sends those of the other,
    and whoever writes over the first has those.
    """
    with pytest.raises(AssertionError, match="nobody gets on"):
        run([8] * 20, k_parts=2, message_buffers=1, tag_steps=1, **LOOPS[1])


@pytest.mark.parametrize("k_parts", [2, 4])
def test_a_single_buffer_of_messages_in_shared_memory_is_seen(k_parts):
    """Where a warp has one set alone, as above: words of the next step count for this one."""
    given = {"in_cluster": True, "message_buffers": 1, "k_parts": k_parts, "blocks": 2 * k_parts}
    with pytest.raises(AssertionError, match=f"{MESSAGE}|nobody gets on|parity"):
        run([8] * 20, **given, **LOOPS[1])


@pytest.mark.parametrize("fault", [{"stored_early": True}, {"early": (1, 1)}], ids=str)
@pytest.mark.parametrize("loop", LOOPS, ids=str)
def test_a_fault_is_seen_with_messages_in_shared_memory(loop, fault):
    """Gate gradients are published as before; stored too early, they say too much of a block."""
    with pytest.raises(AssertionError, match=f"{GATES}|{MESSAGE}|nobody gets on|parity"):
        run([8] * 20, blocks=4, k_parts=2, in_cluster=True, **loop, **fault)


@pytest.mark.parametrize(("fault", "said"), STACK_FAULTS, ids=str)
@pytest.mark.parametrize("loop", LOOPS, ids=str)
def test_a_fault_of_a_stack_is_seen(loop, fault, said):
    """The same, with two layers in one launch."""
    with pytest.raises(AssertionError, match=said):
        run([18] * 20, layers=2, blocks=2, k_parts=2, **loop, **fault)
