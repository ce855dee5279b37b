"""Temporaries that share memory: no two of them are in use at once, in any order of streams."""

import random
from itertools import combinations

import pytest
from test_fused_program_call import CLUSTERS, GRIDS, OPTIONS, pretended, shapes_of  # noqa: F401

from openrnn.backends.fused import record
from openrnn.backends.fused.lifetimes import Lifetime, lifetimes_of, values_of, workspace_offsets
from openrnn.backends.fused.program import LaunchOp, MatmulOp, SlotRef, WaitForLaunchOp, WaitOp
from openrnn.dispatch import BACKENDS


def launch(stream, *slots, signals=False):
    given = tuple((place, SlotRef(slot, 0)) for place, slot in enumerate(slots))
    return LaunchOp(None, 1, (), stream, given, signals)


def before(operations):
    """Of each operation those that have ended, on any stream, when it begins: by waits alone."""
    done, found = {}, []  # of each stream: the operations that have ended when its next one begins
    launched = set()  # those that had ended when the launch that signalled last began
    for place, one in enumerate(operations):
        mine = done.setdefault(one.stream, set())
        found.append(set(mine))
        if isinstance(one, WaitOp):
            mine |= done.get(one.other, set())
        elif isinstance(one, WaitForLaunchOp):  # that launch has begun; it has not ended
            mine |= launched
        else:
            if isinstance(one, LaunchOp) and one.signals:
                launched = set(mine)
            mine.add(place)
    return found


def users(operations):
    """The operations that use each slot."""
    found = {}
    for place, one in enumerate(operations):
        for value in values_of(one):
            found.setdefault(value.slot, set()).add(place)
    return found


def apart(operations, one, other):
    """Whether every operation of one set has ended before any of the other begins."""
    ended = before(operations)
    return all(a in ended[b] for a in one for b in other) or all(
        b in ended[a] for a in one for b in other
    )


def sharing(sizes, offsets):
    """Pairs of slots that have bytes in common."""
    for one, other in combinations(sizes, 2):
        begin, end = offsets[other], offsets[other] + sizes[other]
        if begin < offsets[one] + sizes[one] and offsets[one] < end:
            yield one, other


def drawn(dice):
    """A program of some streams, at whose end the main one has waited for all."""
    streams, operations = dice.randint(1, 4), []
    slots = dice.randint(2, 12)
    for _ in range(dice.randint(5, 40)):
        stream = dice.randrange(streams)
        if streams > 1 and dice.random() < 0.4:
            other = dice.choice([0, *range(streams)])
            if other != stream:
                operations.append(WaitOp(stream, other))
        elif dice.random() < 0.1:
            operations.append(WaitForLaunchOp(stream))
        else:
            given = dice.choices(range(slots), k=dice.randint(1, 3))
            operations.append(launch(stream, *given, signals=dice.random() < 0.2))
    return [*operations, *(WaitOp(0, stream) for stream in range(1, streams))]


def test_slots_that_share_memory_are_apart_in_every_order_of_streams():
    dice, shared = random.Random(0), 0
    for _ in range(1000):
        operations = drawn(dice)
        using = users(operations)
        sizes = {slot: 256 * dice.randint(1, 4) for slot in using}
        offsets, size = workspace_offsets(sizes, lifetimes_of(operations))
        assert max(sizes.values()) <= size <= sum(sizes.values())
        for one in using:
            assert 0 <= offsets[one] <= size - sizes[one]
        for one, other in sharing(sizes, offsets):
            shared += 1
            assert apart(operations, using[one], using[other])
    assert shared > 500


@pytest.mark.parametrize("configs", [CLUSTERS, GRIDS], ids=["clusters", "grids"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_so_are_those_of_the_backends_programs(monkeypatch, pretended, options, configs):  # noqa: F811
    """Forward and backward, with the slots that they had before they were packed."""
    seen, timed, offsets_of = [], [], record.workspace_offsets

    def watched(sizes, lives):
        offsets, size = offsets_of(sizes, lives)
        seen.append((dict(sizes), offsets, size))
        return offsets, size

    monkeypatch.setattr(record, "workspace_offsets", watched)
    monkeypatch.setattr(
        record, "lifetimes_of", lambda found: timed.append(found) or lifetimes_of(found)
    )
    call = pretended(16, configs, **options)
    run = BACKENDS["fused"].prepare_grad(
        call, shapes_of(call), [call.x.shape, *(state.shape for state in call.states)]
    )
    every = [call.x, *call.params, *call.states]
    made = run.forward(every)
    outputs = [made[0], *made[3:]]
    run.backward(every, outputs, [made[0], None, None], (True,) * len(every))
    assert len(seen) == len(timed) == 2
    for (sizes, offsets, size), operations in zip(seen, timed):
        using = users(operations)
        assert sizes.keys() <= using.keys()
        for one, other in sharing(sizes, offsets):
            assert apart(operations, using[one], using[other])
        alone = options == {"num_layers": 2}  # layer by layer: one layer's memory serves the other
        assert size < 0.75 * sum(sizes.values()) if alone else size <= sum(sizes.values())


def test_a_slot_on_a_side_stream_is_in_use_between_waits():
    operations = [
        launch(0, 1), WaitOp(1, 0), launch(1, 2), launch(0, 3), WaitOp(0, 1), launch(0, 4),
        WaitForLaunchOp(2), launch(2, 5),
    ]  # fmt: skip
    assert lifetimes_of(operations) == {
        1: Lifetime(0, 0, 0, 0, 0), 2: Lifetime(1, 4, 1, 2, 2), 3: Lifetime(3, 3, 0, 3, 3),
        4: Lifetime(5, 5, 0, 5, 5),
        5: Lifetime(0, 8, 2, 7, 7),  # it has waited for no end, and nobody waits for it
    }  # fmt: skip


def test_slots_that_one_side_stream_alone_uses_share_memory():
    """One after the other, though both are in use from a wait to the next by all other streams."""
    operations = [
        WaitOp(1, 0), launch(1, 1, 2), launch(1, 2, 3), launch(0, 4), launch(1, 3, 5),
        WaitOp(0, 1), launch(0, 5),
    ]  # fmt: skip
    found = lifetimes_of(operations)
    assert not found[1].overlaps(found[3])
    assert found[2].overlaps(found[3])
    assert found[1].overlaps(found[4])
    assert found[1].overlaps(found[5])  # which the main stream uses, too
    _, size = workspace_offsets({1: 100, 3: 100}, found)
    assert size == 100


def test_a_stream_that_waits_for_a_launch_uses_nothing_before_that():
    operations = [
        launch(0, 1), launch(0, 2, signals=True), WaitForLaunchOp(2), launch(2, 3), launch(0, 4),
        WaitOp(0, 2), WaitOp(1, 0), launch(1, 5, signals=True), launch(0, 6), WaitForLaunchOp(2),
        launch(2, 7), WaitOp(0, 2), WaitOp(0, 1),
    ]  # fmt: skip
    found = lifetimes_of(operations)
    assert found[3][:2] == (1, 5)  # from that launch of the main stream on
    assert found[5][:2] == (6, 12)
    assert found[7][:2] == (6, 11)  # from the wait before that launch of the side stream on


def test_many_layers_share_the_memory_of_few(monkeypatch, pretended):  # noqa: F811
    """Though each product beside loops has a stream of its own."""
    taken = []
    offsets_of = record.workspace_offsets
    monkeypatch.setattr(
        record, "workspace_offsets",
        lambda *of: taken.append(offsets_of(*of)[1]) or offsets_of(*of),
    )  # fmt: skip
    for layers in (2, 4, 8):
        call = pretended(
            16, CLUSTERS, grad=False, at_once=True, cuts=(0, 2, 5, 11), length=11,
            num_layers=layers, bidirectional=True,
        )  # fmt: skip
        BACKENDS["fused"].prepare(call, shapes_of(call))
    assert taken[2] == taken[1]


def test_values_of_a_product_move():
    at = [SlotRef(slot, 8) for slot in range(4)]
    product = MatmulOp(None, *at[:3], False, 0, at[3])
    assert values_of(product) == at
    assert values_of(product.relocated(lambda value: SlotRef(9, value.offset + value.slot))) == [
        SlotRef(9, 8), SlotRef(9, 9), SlotRef(9, 10), SlotRef(9, 11)
    ]  # fmt: skip
