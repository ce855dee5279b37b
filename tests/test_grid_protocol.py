"""The order of events in `kernels/cuda/grid.cuh` as a model whose warps run in random order.

What it watches: a part of the operand or of a sum that is read belongs to the step at hand, and the
warps come to an end. A real machine shows such a fault once in a million steps, a model at once.
"""

import random
from dataclasses import dataclass, field
from itertools import product

import pytest
from cases import thinned


@dataclass
class Mbarrier:
    """An mbarrier: one arrival, which says how many parts to expect, then the parts."""

    phase: int = 0
    arrivals: int = 1
    missing: int = 0

    def expect(self, parts):
        self.missing += parts
        self.arrivals -= 1
        self._turn()

    def deliver(self):
        self.missing -= 1
        self._turn()

    def _turn(self):
        assert self.arrivals >= 0, "two expectations of one phase"
        if self.arrivals == 0 and self.missing == 0:
            self.phase, self.arrivals = self.phase + 1, 1

    def came(self, parity):
        return self.phase % 2 != parity


@dataclass
class Block:
    """A block's shared memory: two operands and two sets of parts, each marked with its step."""

    mbarriers: list = field(default_factory=lambda: [Mbarrier(), Mbarrier()])
    operand: list = field(default_factory=lambda: [{}, {}])
    parts: list = field(default_factory=lambda: [{}, {}])
    arrived: int = 0  # warps at the barrier, over all steps


class Grid:
    """A loop's warps as generators: each `yield` is a place where another may run.

    `reads[p]` are the groups of units in the part of K that block p of every cluster multiplies,
    `owns[p]` the groups of a cluster whose cells it has.
    """

    def __init__(self, clusters, blocks, warps, groups, reads, steps):
        self.clusters, self.size, self.warps = clusters, blocks, warps
        self.groups, self.reads, self.steps = groups, reads, steps
        self.blocks = {(q, p): Block() for q, p in product(range(clusters), range(blocks))}
        self.published = set()  # (step, cluster, group)
        for (_, p), block in self.blocks.items():
            for mbarrier in block.mbarriers:
                mbarrier.expect(self.expected(p))

    def owned(self, p):
        return [group for group in range(self.groups) if group % self.size == p]

    def expected(self, p):
        return len(self.owned(p)) * self.size

    def warp(self, q, p, w):
        block = self.blocks[q, p]
        own = [group for at, group in enumerate(self.owned(p)) if at % self.warps == w]
        for step in range(self.steps):
            yield from self.fetch(block, p, w, step)
            block.arrived += 1
            while block.arrived < self.warps * (step + 1):
                yield
            yield from self.multiply(block, q, p, w, step)
            if own or w == 0:
                yield from self.finish(block, q, p, w, own, step)

    def fetch(self, block, p, w, step):
        """Each warp its share of what the block reads, as soon as it is published."""
        for unit in self.reads[p][w :: self.warps]:
            while step and (step - 1, *unit) not in self.published:
                yield
            block.operand[step % 2][unit] = step
            yield

    def multiply(self, block, q, p, w, step):
        """A part of each group of the cluster that this warp has rows of, to the group's owner."""
        now = step % 2
        for group in range(w, self.groups, self.warps):
            for unit in self.reads[p]:
                assert block.operand[now][unit] == step, "operand of another step"
                yield
            owner = self.blocks[q, group % self.size]
            owner.parts[now][group, p] = step
            owner.mbarriers[now].deliver()
            yield

    def finish(self, block, q, p, w, own, step):
        """The cells of this warp's groups, once all their parts are there."""
        now = step % 2
        while not block.mbarriers[now].came(step // 2 % 2):
            yield
        if w == 0:
            block.mbarriers[now].expect(self.expected(p))
        for group in own:
            for source in range(self.size):
                assert block.parts[now].get((group, source)) == step, "part of another step"
                yield
            self.published.add((step, q, group))
            yield

    def run(self, seed):
        """Lets warps take turns at random, some of them rarely, until all have ended."""
        dice = random.Random(seed)
        every = product(range(self.clusters), range(self.size), range(self.warps))
        running = [self.warp(*place) for place in every]
        weights = [dice.choice((1, 1, 10, 100)) for _ in running]
        idle = 0
        while running:
            at = dice.choices(range(len(running)), weights)[0]
            before = len(self.published)
            for _ in range(dice.choice((1, 5, 50))):
                if next(running[at], "end") == "end":
                    del running[at], weights[at]
                    break
            idle = 0 if len(self.published) > before else idle + 1
            assert idle < 100_000, "nobody gets on"


def units_of(clusters, groups, blocks, starved=False):
    """Groups of all clusters, dealt to the blocks as K is; `starved`: the last block gets none."""
    every = list(product(range(clusters), range(groups)))
    among = blocks - 1 if starved else blocks
    share = -(-len(every) // among)
    return [every[p * share : (p + 1) * share] for p in range(blocks)]


@pytest.mark.parametrize("seed", thinned(range(6), 3))
@pytest.mark.parametrize(
    ("clusters", "blocks", "warps", "groups"), [(3, 4, 2, 4), (2, 2, 3, 5), (4, 4, 1, 1)]
)
def test_no_step_reads_of_another(clusters, blocks, warps, groups, seed):
    reads = units_of(clusters, groups, blocks)
    Grid(clusters, blocks, warps, groups, reads, steps=12).run(seed)


def test_a_block_without_a_part_of_k_runs_ahead():
    """Why `feeds_all` must hold: without cells, too, it waits for nobody."""
    grid = Grid(3, 4, 2, 2, units_of(3, 2, 4, starved=True), steps=12)
    with pytest.raises(AssertionError, match="of another step"):
        grid.run(seed=0)
