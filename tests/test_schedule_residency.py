"""Schedules on a device with little room that takes launches in any order: nothing waits for ever.

A model of what CUDA promises. The launches of a stream run one after the other, those of different
streams in any order. A launch has groups of blocks: the blocks of a group wait for each other, so
none of them ends before all are resident. A group starts as a whole, as clusters and cooperative
grids do; a careless device starts blocks one by one, as of a grid whose launch is not cooperative.
"""

import random
from collections import defaultdict
from dataclasses import dataclass

import pytest
from test_schedule import needs, needs_at_once, needs_of_wavefront

from openrnn import schedule
from openrnn.schedule import Chunking
from openrnn.schedule.operations import (
    FillFlags,
    GradientProducts,
    InputProduct,
    Loop,
    Wait,
    WaitForLaunch,
)

ROOM = 12  # blocks that the device holds
PRODUCTS = InputProduct | GradientProducts | FillFlags


class DeadlockError(Exception):
    """Launches are left, and none can go on."""


@dataclass
class Launch:
    """An operation on the device; `groups` are the sizes of those that have not started."""

    operation: object
    groups: list[int]
    begun: bool = False
    starting: int = 0  # blocks that are resident of a group that is not whole yet
    resident: int = 0  # blocks of whole groups
    ended: bool = False

    @property
    def started(self):
        """Whether all of its blocks have."""
        return not self.groups and not self.starting


class Stream:
    """Launches and waits in their order; a wait is a function that says whether it is over."""

    def __init__(self):
        self.items, self.passed = [], 0

    @property
    def head(self):
        """The launch or wait to which it has come; None at its end."""
        return self.items[self.passed] if self.passed < len(self.items) else None

    def event(self):
        """What an event recorded now says: whether all that was given so far is over."""
        given = len(self.items)
        return lambda: self.passed >= given

    def advance(self):
        """Leaves behind what is over; whether that is anything."""
        before = self.passed
        while (head := self.head) and (head.ended if isinstance(head, Launch) else head()):
            self.passed += 1
        return self.passed > before


class Device:
    """Runs calls, each with streams of its own, one random event after the other."""

    def __init__(self, dice, careless=False):
        self.dice, self.careless, self.free = dice, careless, ROOM
        self.streams = defaultdict(Stream)
        self.launches = []

    def give(self, operations, groups_of, call=0):
        """Puts a schedule on streams, as `execute` does; groups_of: the groups of a launch."""
        signalled = None
        for operation in operations:
            stream = self.streams[call, operation.stream]
            if isinstance(operation, Wait):
                stream.items.append(self.streams[call, operation.other].event())
            elif isinstance(operation, WaitForLaunch):
                stream.items.append(lambda launch=signalled: launch.started)
            else:
                launch = Launch(operation, [*groups_of(operation)])
                stream.items.append(launch)
                self.launches.append(launch)
                if isinstance(operation, Loop) and operation.signals:
                    signalled = launch

    def run(self, needed=lambda launch: ()):
        """Until all is done; needed: the operations that must have ended when a launch begins."""
        while heads := self._heads():
            events = [(event, head) for head in heads for event in self._events_of(head)]
            if not events:
                raise DeadlockError
            event, launch = self.dice.choice(events)
            if not launch.begun:
                launch.begun = True
                done = {one.operation for one in self.launches if one.ended}
                missing = [one for one in needed(launch) if one not in done]
                assert not missing, f"{launch.operation} began before {missing}"
            event(launch)

    def _heads(self):
        """What the streams have come to that are not at their ends."""
        while any(stream.advance() for stream in self.streams.values()):
            pass
        return [stream.head for stream in self.streams.values() if stream.head]

    def _events_of(self, head):
        if not isinstance(head, Launch):
            return
        if head.groups and self.free >= (1 if self.careless else head.groups[0]):
            yield self._start
        if head.resident or head.started:
            yield self._end

    def _start(self, launch):
        size = launch.groups[0]
        blocks = 1 if self.careless else size
        self.free -= blocks
        launch.starting += blocks
        if launch.starting == size:
            launch.groups.pop(0)
            launch.resident += launch.starting
            launch.starting = 0

    def _end(self, launch):
        """A block of a whole group ends; the last one ends the launch."""
        if launch.resident:
            launch.resident -= 1
            self.free += 1
        launch.ended = launch.started and not launch.resident


def grids(at_once):
    """Loops of one group, of which the device holds so many, and products of single blocks."""

    def groups_of(operation):
        if isinstance(operation, Loop):
            return [ROOM // at_once]
        return [1] * (5 if isinstance(operation, PRODUCTS) else 0)

    return groups_of


def clusters(operation):
    """Loops of seven clusters, which need not fit at once; else as `grids`."""
    return [4] * 7 if isinstance(operation, Loop) else grids(1)(operation)


def edges_of(dice):
    """Of one to five chunks of 11 steps."""
    return (0, *sorted(dice.sample(range(1, 11), dice.randrange(5))), 11)


def passes_of(dice, mode, **options):
    """Both passes of a random net: operations, and what each of them needs."""
    overlap, fills = dice.random() < 0.5, frozenset(dice.choice([(), ("forward", "backward")]))
    options |= {"overlap": overlap, "fills": fills, "forks": dice.random() < 0.5}
    edges, layers = edges_of(dice), 1 if mode == "in_turn" else dice.randint(2, 10)
    by_chunk = mode == "wavefront" and dice.random() < 0.5
    again = by_chunk and "loops" not in options and dice.random() < 0.5
    if by_chunk:
        options |= {"overlap": False, "by_chunk": True}
    if again:  # clusters alone run forward again in a wavefront
        options |= {"fills": frozenset()}
    dropout = mode == "wavefront" and dice.random() < 0.5
    if mode == "both_directions":
        edges = edges if overlap else (0, 11)
        mirrored = tuple(11 - edge for edge in reversed(edges))
        chunkings = [
            tuple(
                Chunking(cuts, way, mode=mode, **options)
                for cuts, way in ((edges, False), (mirrored, True))
            )
        ] * min(layers, 4)
    else:
        chunkings = [(Chunking(edges, mode=mode, **options),)] * layers
    for operations in (
        schedule.forward(tuple(chunkings), dropout),
        schedule.backward(tuple(chunkings), dropout, again),
    ):  # fmt: skip
        needed_by = {
            "wavefront": lambda one, every=operations: needs_of_wavefront(one, every),
            "both_directions": lambda one, every=operations: needs_at_once(one, every),
            "in_turn": lambda one, every=operations: needs(one, every, chunkings[0][0]),
        }
        yield operations, needed_by[mode]


GRIDS = {
    "in turn": ("in_turn", grids(1), {}),
    "both directions": ("both_directions", grids(2), {"loops": 2}),
    "wavefront": ("wavefront", grids(2), {"loops": 2}),
}
CLUSTERS = {
    "in turn": ("in_turn", clusters, {}),
    "both directions": ("both_directions", clusters, {"loops": 2}),
    "wavefront": ("wavefront", clusters, {}),
}


def check(net, dice, careless):
    mode, groups_of, options = net
    for operations, needed_by in passes_of(dice, mode, **options):
        device = Device(dice, careless)
        device.give(operations, groups_of)
        device.run(lambda launch, needed_by=needed_by: needed_by(launch.operation))
        assert device.free == ROOM
        assert all(launch.ended for launch in device.launches)


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("careless", [False, True])
@pytest.mark.parametrize("net", GRIDS)
def test_grids_end_and_none_begins_before_what_it_needs(net, careless, seed):
    """Even where blocks start one by one, as the device holds all that may run at once."""
    check(GRIDS[net], random.Random(seed), careless)


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("net", CLUSTERS)
def test_clusters_end_and_none_begins_before_what_it_needs(net, seed):
    check(CLUSTERS[net], random.Random(seed), careless=False)


def ends(device):
    try:
        device.run()
    except DeadlockError:
        return False
    return True


def test_the_model_sees_a_deadlock():
    """Of grids that start block by block: two calls, or a wavefront of more than fit."""
    dice, found = random.Random(0), []
    for operations in (schedule.forward(((Chunking((0, 11)),),)),) * 20:
        device = Device(dice, careless=True)
        for call in range(2):
            device.give(operations, grids(1), call)
        found.append(ends(device))
    assert False in found
    chunkings = ((Chunking((0, 3, 6, 11), mode="wavefront", loops=3),),) * 3
    found = []
    for _ in range(20):
        device = Device(dice, careless=True)
        device.give(schedule.forward(chunkings), grids(2))
        found.append(ends(device))
    assert False in found


def test_the_model_sees_a_wait_that_is_left_out():
    """Each in turn; the first two and the last two guard only what stands around the call."""
    dice, chunkings = random.Random(0), ((Chunking((0, 3, 6, 11), mode="wavefront"),),) * 3
    operations = schedule.forward(chunkings)
    waits = [place for place, one in enumerate(operations) if isinstance(one, Wait)]
    seen = []
    for place in waits:
        shorter = operations[:place] + operations[place + 1 :]
        try:
            for _ in range(20):
                device = Device(dice)
                device.give(shorter, clusters)
                device.run(lambda launch: needs_of_wavefront(launch.operation, operations))
        except AssertionError:
            seen.append(place)
    assert seen == waits[2:-2]
