"""The order of events in `kernels/cuda/stack_*.cuh` as a model whose warps run in random order.

What it watches: y or gate gradients that input warps multiply, and inputs that a loop warp reads,
belong to the step at hand, and all warps come to an end, however late those of a layer run. How
loop warps exchange h or shares of dh is in test_cluster_protocol.py; here they meet in each step.
"""

import random
from dataclasses import dataclass
from itertools import product

import pytest
from test_multicast_messages import interleave, until
from test_multicast_protocol import Mbarrier

WORDS = 2  # that a loop warp publishes in a step, each by itself


class Barrier:
    """A named barrier of some warps, which all of them pass each time."""

    def __init__(self, count):
        self.count, self.arrived = count, 0

    def meet(self):
        self.arrived += 1
        last = -(-self.arrived // self.count) * self.count
        return until(lambda: self.arrived >= last)


@dataclass(eq=False)
class Block:
    """A block's shared memory, each part marked with its step, and what its warps wait for."""

    layer: int
    stack: "Stack"

    def __post_init__(self):
        warps, stages = range(self.stack.warps), range(self.stack.stages)
        self.operand = {}  # by buffer, layer's block, warp and word
        self.shares = {}  # by input warp
        self.ring = {}  # by loop warp and stage
        self.filled = {place: Mbarrier(1) for place in product(warps, stages)}
        self.empty = {place: Mbarrier(1) for place in product(warps, stages)}
        self.inputs = Barrier(len(warps))


@dataclass(eq=False, kw_only=True)
class Stack:
    """All layers of a stack, each in a cluster that has the same rows.

    Args:
        blocks: of a cluster; warps: of a block that run the loop, and as many input warps.
        backward: input warps split K; then the operand has one buffer, and they meet twice a step.
        ahead: steps that a warp polls ahead.
        absent: a layer whose blocks do not run.
        behind: an input warp fills a stage once so many steps before have been read; None: stages.
        unmet: input warps do not meet before, or after, their product.
        unawaited: a loop warp does not wait for its inputs.
        unpolled: words are taken as they are, arrived or not.
    """

    layers: int
    steps: int
    blocks: int = 2
    warps: int = 2
    stages: int = 2
    backward: bool = False
    buffers: int | None = None
    ahead: int = 2
    absent: int | None = None
    behind: int | None = None
    unmet: tuple[str, ...] = ()
    unawaited: bool = False
    unpolled: bool = False

    def __post_init__(self):
        self.published = {}  # step, by layer, block, warp, word and step
        self.buffers = self.buffers or (1 if self.backward else 2)
        self.met = [Barrier(self.blocks * self.warps) for _ in range(self.layers)]
        self.clusters = {
            layer: [Block(layer, self) for _ in range(self.blocks)]
            for layer in range(self.layers)
            if layer != self.absent
        }

    def follows(self, layer):
        """Layers count in the order in which they run."""
        return layer > 0

    def loop_warp(self, block, number, warp):
        for i in range(self.steps):
            stage = warp, i % self.stages
            if self.follows(block.layer):
                if not self.unawaited:
                    yield from block.filled[stage].wait(i // self.stages)
                assert block.ring.get(stage) == i, "inputs of another step"
                yield
                block.empty[stage].arrive()
            yield from self.met[block.layer].meet()  # h, or shares of dh
            for word in range(WORDS):
                self.published[block.layer, number, warp, word, i] = i
                yield

    def input_warp(self, block, warp):
        before = block.layer - 1
        sources = [*product(range(self.blocks), range(self.warps), range(WORDS))]
        mine, asked = sources[warp :: self.warps], {}
        for i in range(self.steps):
            for step in range(i, min(i + self.ahead, self.steps)):
                for source in mine:  # polled too early: polled again
                    asked.setdefault((step, source), self.published.get((before, *source, step)))
                    yield
            for source in mine:
                found = asked.pop((i, source))
                if found is None and not self.unpolled:
                    place = (before, *source, i)
                    yield from until(lambda place=place: place in self.published)
                    found = self.published[place]
                block.operand[i % self.buffers, source] = found
                yield
            if "before" not in self.unmet:
                yield from block.inputs.meet()
            for source in sources:
                assert block.operand.get((i % self.buffers, source)) == i, "values of another step"
                yield
            if self.backward:
                block.shares[warp] = i
                yield
                if "after" not in self.unmet:
                    yield from block.inputs.meet()
                for other in range(self.warps):
                    assert block.shares.get(other) == i, "shares of another step"
                    yield
            stage, behind = (warp, i % self.stages), self.behind or self.stages
            if i >= behind:
                place = warp, (i - behind) % self.stages
                yield from block.empty[place].wait((i - behind) // self.stages)
            block.ring[stage] = i
            yield
            block.filled[stage].arrive()

    def run(self, seed):
        """Runs all warps, some of them rarely, or those of one layer."""
        dice = random.Random(seed)
        slow = seed // 2 % self.layers if seed % 2 else None
        often = {self.endless(): 1}
        for layer, blocks in self.clusters.items():
            for (number, block), warp in product(enumerate(blocks), range(self.warps)):
                tasks = [self.loop_warp(block, number, warp)]
                tasks += [self.input_warp(block, warp)] if self.follows(layer) else []
                for task in tasks:
                    rate = dice.choice((1, 1, 10, 100)) if slow is None else 1000
                    often[task] = 1 if layer == slow else rate
        interleave(often, dice)

    def endless(self):
        """What `interleave` expects to go on when all else has ended."""
        while True:
            yield from until(lambda: False)


KINDS = [{}, {"backward": True, "ahead": 1}, {"backward": True, "warps": 3, "stages": 4}]


def run(seeds, **given):
    for seed in range(seeds):
        Stack(**given).run(seed)


@pytest.mark.parametrize(("layers", "steps"), [(2, 0), (2, 1), (2, 9), (3, 12), (4, 7)])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_layer_reads_its_own(layers, steps, kind):
    """What a task waits for stays true. So whether all of them end does not depend on their order.

    Each waits for a layer before it, or for its own: no launch that is resident as a whole hangs.
    """
    run(8, layers=layers, steps=steps, **kind)


VALUES, INPUTS, SHARES = (f"{one} of another step" for one in ("values", "inputs", "shares"))
FAULTS = [
    ({}, {"behind": 3}, f"{INPUTS}|parity|arrival"),
    ({}, {"behind": 99}, f"{INPUTS}|parity|arrival"),
    ({}, {"unawaited": True}, INPUTS),
    ({}, {"unpolled": True}, VALUES),
    ({}, {"unmet": ("before",)}, VALUES),
    ({}, {"buffers": 1}, VALUES),
    (KINDS[1], {"unmet": ("after",)}, f"{VALUES}|{SHARES}"),
    (KINDS[2], {"unmet": ("before",)}, f"{VALUES}|{SHARES}"),
]


@pytest.mark.parametrize(("kind", "fault", "said"), FAULTS, ids=str)
def test_a_fault_is_seen(kind, fault, said):
    """Catches a model that would pass any protocol."""
    with pytest.raises(AssertionError, match=said):
        run(40, layers=3, steps=20, **kind | fault)


def test_a_layer_that_is_not_resident_is_waited_for():
    """As where a launch began before all of its blocks had room: it is cooperative."""
    with pytest.raises(AssertionError, match="nobody gets on"):
        run(4, layers=3, steps=5, absent=1)
