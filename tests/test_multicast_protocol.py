"""The order of events in `kernels/cuda/multicast_exchange.cuh` as a model, run in random order.

What it watches: an operand that is multiplied belongs to the layer, set and step at hand, shares of
sums that cells read to the turn at hand, the parity of an mbarrier's phase tells it from any other
at hand, and all tasks come to an end: in loops of one layer, and of a stack in one launch. A real
machine shows such a fault once in a million steps, a model at once.
"""

import random
from dataclasses import dataclass
from itertools import product

import pytest
from cases import thinned
from test_multicast_messages import DEPTH, HALVES, WARPS, Loop, Mbarrier, interleave, until


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


class Block:
    """A block's shared memory, each part marked with what it is of; mbarriers."""

    def __init__(self, layer, number, loop):
        self.layer, self.number = layer, number
        self.operand = {}  # by buffer, half and block that it is of
        self.shares = {}  # by area, warpgroup, warp of it and reader
        self.full = {at: Mbarrier(1) for at in product(range(loop.buffers), HALVES)}
        self.empty, self.read = Turns(loop.cluster), Turns(loop.readers)
        self.summed_up = Turns(loop.groups * WARPS)
        self.stored = [Mbarrier(WARPS) for _ in range(loop.sets)]


@dataclass(eq=False, kw_only=True)
class Blocks(Loop):
    """The roles of all blocks as tasks. Blocks that share K are in test_multicast_messages.py.

    Args:
        cluster: blocks that get a copy at once; of those of a cluster that share K, others do not.
        empty_behind: a copy awaits that so many turns before have been multiplied; None: as many
            as there are buffers.
        read_behind: a product's shares await that so many turns before have been read.
        areas: of shares.
        released_early: a block says that it has multiplied before it has.
        unreleased: blocks of its cluster that it does not tell.
        read_early: cells say that they have read their shares before they have.
        readers: warps for cells that have read a turn's shares when the next may come.
        resident: layers whose blocks run.
    """

    cluster: int = 2
    empty_behind: int | None = None
    read_behind: int = 2
    areas: int = 2
    released_early: bool = False
    unreleased: int = 0
    read_early: bool = False
    readers: int = WARPS
    resident: int | None = None

    def __post_init__(self):
        super().__post_init__()
        self.running, self.peers = [], {}
        for layer in range(self.layers if self.resident is None else self.resident):
            blocks = [Block(layer, number, self) for number in range(self.blocks)]
            self.running += blocks
            for block in blocks:
                first = block.number // self.cluster * self.cluster
                self.peers[block] = blocks[first : first + self.cluster]
        self.exchange = {}  # by layer, set, buffer, block and warp: whose values are there
        self.copies = []  # on their way

    def copying(self, block, half):
        """The thread that copies a half of the operand: this block's part, into the cluster."""
        behind = self.buffers if self.empty_behind is None else self.empty_behind
        for turn, (i, which) in self.turns:
            yield from self.await_operand(block.layer, block.number, half, i, which)
            operand, sources = self.operand(block.layer, half, i), self.sources(0, half)[1]
            if turn >= behind:
                yield from block.empty.wait(turn - behind)
            buffer = turn % self.buffers
            block.full[buffer, half].arrive(len(sources) if operand else 0)
            for source in sources if operand else ():
                if source % self.cluster == block.number % self.cluster:
                    self.copies.append((block, buffer, half, source, which, *operand))
            yield

    def engine(self):
        """Carries out copies one by one, in any order."""
        while True:
            yield from until(lambda: self.copies)
            at = self.dice.randrange(len(self.copies))
            block, buffer, half, source, which, layer, step = self.copies.pop(at)
            place = layer, which, step % self.depth, source
            there = {self.exchange.get((*place, warp)) for warp in range(WARPS)}
            for peer in self.peers[block]:
                peer.operand[buffer, half, source] = there
                peer.full[buffer, half].deliver()
            yield

    def publishing(self, block):
        for i, which in product(range(self.published), range(self.sets)):
            yield from block.stored[which].wait(i)
            self.publish(block.layer, block.number, which)
            yield

    def multiplying(self, block, group, warp):
        for turn, (i, which) in self.turns:
            buffer = turn % self.buffers
            for half in self.halves_of(group):
                yield from block.full[buffer, half].wait(turn // self.buffers)
                operand = self.operand(block.layer, half, i)
                for source in self.sources(0, half)[1] if operand else ():
                    there = block.operand[buffer, half, source]
                    assert there == {(*operand, which)}, "an operand of another turn"
                    yield
            if turn >= self.read_behind:
                yield from block.read.wait(turn - self.read_behind)
            for reader in range(WARPS):
                block.shares[turn % self.areas, group, warp, reader] = turn
                yield
            block.summed_up.arrive(turn)
            yield

    def releasing(self, block):
        """The warp that tells the cluster which turns this block has multiplied."""
        for turn, _ in self.turns:
            if not self.released_early:
                yield from block.summed_up.wait(turn)
            for peer in self.peers[block][self.unreleased :]:
                peer.empty.arrive(turn)
                yield
            if self.released_early:
                yield from block.summed_up.wait(turn)

    def computing(self, block, group, warp):
        for which in range(group, self.sets, self.cell_warpgroups) if self.first else ():
            yield from self.store(block, warp, which, 0)
        for turn, (i, which) in self.turns_of(group):
            yield from block.summed_up.wait(turn)
            if self.read_early:
                block.read.arrive(turn)
                yield
            for sender in product(range(self.groups), range(WARPS)):
                there = block.shares[(turn % self.areas, *sender, warp)]
                assert there == turn, "shares of another turn"
                yield
            if not self.read_early:
                block.read.arrive(turn)
                yield
            yield from self.store(block, warp, which, i + self.first)

    def store(self, block, warp, which, step):
        if step < self.published:
            place = block.layer, which, step % self.depth, block.number, warp
            self.exchange[place] = block.layer, step, which
            yield
            block.stored[which].arrive()
            yield

    def run(self, seed):
        """Runs all tasks, some of them rarely, or in some runs of a stack those of one layer."""
        self.dice = random.Random(seed)
        slow = seed // 2 % self.layers if self.stack and seed % 2 else None
        often = {self.engine(): self.dice.choice((1, 10, 100))}
        for block in self.running:
            tasks = [self.publishing(block), self.releasing(block)]
            tasks += [self.copying(block, half) for half in HALVES]
            for warp in range(WARPS):
                tasks += [self.multiplying(block, group, warp) for group in range(self.groups)]
                tasks += [
                    self.computing(block, group, warp) for group in range(self.cell_warpgroups)
                ]
            for task in tasks:
                rate = self.dice.choice((1, 1, 10, 100)) if slow is None else 1000
                often[task] = 1 if block.layer == slow else rate
        interleave(often, self.dice)


FORWARD = [{"sets": 2, "buffers": 1}, {"sets": 3, "buffers": 2}, {"sets": 4, "buffers": 2}]
BACKWARD = [
    {"backward": True, "sets": 2, "buffers": 1},
    {"backward": True, "groups": 1, "sets": 2, "buffers": 1},
    {"backward": True, "groups": 1, "sets": 4, "buffers": 2},
]


def run(steps, **given):
    """Runs a loop once for each number of steps, in another order of events each time."""
    for seed, number in enumerate(steps):
        Blocks(steps=number, **given).run(seed)


@pytest.mark.parametrize(("blocks", "cluster"), thinned([(4, 1), (4, 2), (6, 2), (8, 4)], 4))
@pytest.mark.parametrize("other_buffers", [False, True])
@pytest.mark.parametrize("loop", FORWARD + BACKWARD, ids=str)
def test_every_turn_reads_its_own(blocks, cluster, loop, other_buffers):
    """Catches reads of another turn and a standstill, from no step on."""
    buffers = 3 - loop["buffers"] if other_buffers else loop["buffers"]
    run(range(7), **loop | {"buffers": buffers}, blocks=blocks, cluster=cluster)


@pytest.mark.parametrize(
    ("layers", "blocks", "steps"),
    [
        (2, 2, (0, 1, 2, 4, 7, 8, 9, 13, 20, 20)), (3, 2, (1, 5, 11, 17)), (4, 2, (3, 20)),
        (2, 4, (6, 18)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("loop", FORWARD + BACKWARD, ids=str)
def test_every_layer_of_a_stack_reads_its_own(layers, blocks, steps, loop):
    """The same, with layers that run ahead of the one that reads them, or wait for it.

    What a task waits for stays true. So whether all of them end does not depend on their order.
    """
    run(steps, layers=layers, blocks=blocks, **loop)


OPERAND, ARRIVALS, PARITY = "operand of another turn", "arrival too many", "parity that stands"
SHARES, STANDSTILL = "shares of another turn", "nobody gets on"
TOO_EARLY = f"{OPERAND}|{ARRIVALS}|{PARITY}"
OPERAND_FAULTS = [
    ({"empty_behind": 99}, TOO_EARLY),
    ({"empty_behind": 3}, TOO_EARLY),
    ({"empty_behind": 0}, STANDSTILL),
    ({"released_early": True}, TOO_EARLY),
    ({"unreleased": 1}, STANDSTILL),
    ({"depth": 1}, OPERAND),
    ({"early": (1, 1)}, TOO_EARLY),
]
SHARES_FAULTS = [
    ({"read_behind": 99}, SHARES),
    ({"read_behind": 3}, f"{SHARES}|{PARITY}"),
    ({"read_behind": 0}, STANDSTILL),
    ({"read_early": True}, SHARES),
    ({"readers": 2 * WARPS}, STANDSTILL),
    ({"readers": 1}, f"{SHARES}|{PARITY}"),
    ({"areas": 1}, SHARES),
]
# with one buffer AT_EMPTY leaves little that AT_READ could be too late for
FAULTS = [(loop, *fault) for loop in FORWARD + BACKWARD for fault in OPERAND_FAULTS] + [
    (loop, *fault) for loop in FORWARD + BACKWARD if loop["buffers"] == 2 for fault in SHARES_FAULTS
]
STACK_FAULTS = [
    ({"behind": 2}, OPERAND),  # forward is wrong from 1 on
    ({"behind": DEPTH[True] // 2}, OPERAND),
    ({"behind": 99}, OPERAND),
    ({"behind": 99, "depth": 2}, OPERAND),
    ({"early": (1, 0)}, TOO_EARLY),
    ({"early": (0, 1)}, TOO_EARLY),
    ({"unpublished": 1}, STANDSTILL),
    ({"resident": 1}, STANDSTILL),
]


@pytest.mark.parametrize(("loop", "fault", "said"), FAULTS, ids=str)
def test_a_fault_of_the_protocol_is_seen(loop, fault, said):
    """Catches a model that would pass any protocol."""
    with pytest.raises(AssertionError, match=said):
        run([6] * 14, **loop, **fault)


@pytest.mark.parametrize("sets", [3, 5])
def test_an_odd_number_of_sets_with_two_groups_for_cells_is_seen(sets):
    """Catches what the kernel asserts against: a warpgroup would have odd and even turns."""
    with pytest.raises(AssertionError, match=PARITY):
        run([6] * 14, backward=True, groups=1, sets=sets)


@pytest.mark.parametrize(("fault", "said"), STACK_FAULTS, ids=str)
@pytest.mark.parametrize("loop", FORWARD + BACKWARD, ids=str)
def test_a_fault_of_a_stack_is_seen(loop, fault, said):
    """The same, of what only layers in one launch have."""
    with pytest.raises(AssertionError, match=said):
        run([20] * 20, layers=2, blocks=2, **loop, **fault)
