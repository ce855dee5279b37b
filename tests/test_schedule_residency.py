"""Schedules on a device with little room that takes launches in any order: nothing waits for ever.

A model of what CUDA promises and no more. The launches of a stream run one after the other, those
of different streams in any order. A launch has groups of blocks: the blocks of a group wait for
each other, so none of them ends before all are resident. A group starts as a whole, as clusters and
cooperative grids do; a careless device starts blocks one by one, as of a grid whose launch is not
cooperative.
"""

import itertools
import random
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


class Device:
    """Runs calls, each with streams of its own, one random event after the other."""

    def __init__(self, dice, careless=False):
        self.dice, self.careless, self.free = dice, careless, ROOM
        self.streams = {}  # lists of launches, and of functions that say whether a wait is over
        self.launches = []

    def give(self, operations, groups_of, call=0):
        """Puts a schedule on streams, as `execute` does; groups_of: the groups of a launch."""
        signalled = None
        for operation in operations:
            stream = self.streams.setdefault((call, operation.stream), [])
            if isinstance(operation, Wait):
                stream.append(self._all_ended(self.streams.get((call, operation.other), ())))
            elif isinstance(operation, WaitForLaunch):
                stream.append(lambda launch=signalled: launch.started)
            else:
                launch = Launch(operation, [*groups_of(operation)])
                stream.append(launch)
                self.launches.append(launch)
                if isinstance(operation, Loop) and operation.signals:
                    signalled = launch

    @staticmethod
    def _all_ended(launches):
        before = [one for one in launches if isinstance(one, Launch)]
        return lambda: all(one.ended for one in before)

    def run(self, needed=lambda launch: ()):
        """Until all is done; needed: the operations that must have ended when a launch begins."""
        while heads := [*self._heads()]:
            events = [(event, head) for head in heads for event in self._events_of(head)]
            if not events:
                raise DeadlockError
            event, launch = self.dice.choice(events)
            if not launch.begun:
                launch.begun = True
                done = {id(one.operation) for one in self.launches if one.ended}
                missing = [one for one in needed(launch) if id(one) not in done]
                assert not missing, f"{launch.operation} began before {missing}"
            event(launch)

    def _heads(self):
        """The launch to which each stream has come, unless it waits or is at its end."""
        for stream in self.streams.values():
            while stream and (stream[0].ended if isinstance(stream[0], Launch) else stream[0]()):
                stream.pop(0)
        return (stream[0] for stream in self.streams.values() if stream)

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


def grids(share):
    """Loops of one group that fill a share of the device, and products of single blocks."""

    def groups_of(operation):
        if isinstance(operation, Loop):
            return [ROOM // share]
        return [1] * (
            5 if isinstance(operation, InputProduct | GradientProducts | FillFlags) else 0
        )

    return groups_of


def clusters(operation):
    """Loops of seven clusters, which need not fit at once; else as `grids`."""
    return [4] * 7 if isinstance(operation, Loop) else grids(1)(operation)


def edges_of(dice):
    """Of one to five chunks of 11 steps."""
    return (0, *sorted(dice.sample(range(1, 11), dice.randrange(5))), 11)


def calls_of(dice, mode, **options):
    """Both passes of a random net: operations, and what each of them needs."""
    overlap, fills = dice.random() < 0.5, frozenset(dice.choice([(), ("forward", "backward")]))
    options |= {"overlap": overlap, "fills": fills}
    layers = dice.randint(2, 10) if mode == "wavefront" else 1 if mode == "in_turn" else 3
    dropout = dice.random() < 0.5 and layers > 1
    if mode == "both_directions":
        pair = tuple(Chunking((0, 11), way, mode=mode, **options) for way in (False, True))
        chunkings, dropout = (pair,) * layers, False
    else:
        chunkings = ((Chunking(edges_of(dice), mode=mode, **options),),) * layers
    for operations in (
        schedule.forward(chunkings, dropout), schedule.backward(chunkings, dropout),
    ):  # fmt: skip
        whole = {
            "wavefront": lambda one, all_of=operations: needs_of_wavefront(one, all_of),
            "both_directions": lambda one, all_of=operations: needs_at_once(one, all_of),
            "in_turn": lambda one, all_of=operations: needs(one, all_of, chunkings[0][0]),
        }
        yield operations, whole[mode]


NETS = {
    "in turn": ("in_turn", grids(1), {}),
    "in turn, clusters": ("in_turn", clusters, {}),
    "both directions": ("both_directions", grids(2), {"loops": 2}),
    "both directions, clusters": ("both_directions", clusters, {"loops": 2}),
    "wavefront": ("wavefront", grids(2), {"loops": 2}),
    "wavefront, clusters": ("wavefront", clusters, {}),
}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("careless", [False, True])
@pytest.mark.parametrize("net", NETS)
def test_a_call_ends_and_nothing_begins_before_what_it_needs(net, careless, seed):
    """Grids even where blocks start one by one: the device holds all of those that may run."""
    mode, groups_of, options = NETS[net]
    dice = random.Random(seed)
    for operations, needed in calls_of(dice, mode, **options):
        device = Device(dice, careless and groups_of is not clusters)
        device.give(operations, groups_of)
        device.run(lambda launch, needed=needed: needed(launch.operation))
        assert device.free == ROOM
        assert all(launch.ended for launch in device.launches)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("one", "two"), [*itertools.combinations_with_replacement(NETS, 2)])
def test_calls_of_several_threads_and_processes_end(one, two, seed):
    """Each with streams of its own: groups start as a whole, so each goes on once it has room."""
    dice = random.Random(seed)
    passes = [[*calls_of(dice, NETS[net][0], **NETS[net][2])] for net in (one, two)]
    for pair in zip(*passes):
        device = Device(dice)
        for call, (net, (operations, _)) in enumerate(zip((one, two), pair)):
            device.give(operations, NETS[net][1], call)
        device.run()


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
    """Of any, one at a time: the main stream's last wait is for what follows the call."""
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
    assert len(seen) >= len(waits) - 4  # two that fork and two that join: nothing here needs them
