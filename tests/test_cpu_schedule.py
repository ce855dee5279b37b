"""The CPU backend's schedules, read from the list alone: no kernel is compiled or run."""

import itertools

import pytest
import torch

import openrnn
from openrnn.backends.cpu import schedules
from openrnn.backends.cpu.backward import BackwardBuilder
from openrnn.backends.cpu.forward import ForwardBuilder
from openrnn.schedule.operations import MAIN, BeginLayer, FinishWeights, Loop

SIZES = [(1, 1, 1), (1, 2, 9), (3, 1, 4), (3, 2, 7)]  # layers, directions, T


def loops(operations, layer):
    return [each for each in operations if isinstance(each, Loop) and each.layer == layer]


def needs(operation, operations, back):
    """What an operation reads or writes over, as the operations that must be done before it."""
    layer = operation.layer
    source = layer + 1 if back else layer - 1  # the layer whose loops write what this one reads
    begun = [each for each in operations if isinstance(each, BeginLayer) and each.layer == layer]
    if isinstance(operation, BeginLayer):
        return loops(operations, source)
    if isinstance(operation, FinishWeights):
        return [each for each in loops(operations, layer) if each.direction == operation.direction]
    needed = [*begun[: operation.direction + 1], *loops(operations, source)]
    if back and operation.direction:  # it adds its dx to that of the other direction
        needed += loops(operations, layer)[:1]
    return needed


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
def test_nothing_runs_before_what_it_needs(sizes, back):
    operations = (schedules.backward if back else schedules.forward)(*sizes)
    for place, operation in enumerate(operations):
        assert operation.stream == MAIN
        assert {*needs(operation, operations, back)} <= {*operations[:place]}, operation


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sums_are_read_before_the_next_loop_makes_its_own(sizes):
    operations = schedules.backward(*sizes)
    for place, operation in enumerate(operations):
        if isinstance(operation, Loop):
            here = operation.layer, operation.direction
            after = operations[place + 1]
            assert isinstance(after, FinishWeights)
            assert (after.layer, after.direction) == here


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_layer_and_direction_runs_all_steps_once(sizes):
    layers, directions, steps = sizes
    wanted = [*itertools.product(range(layers), range(directions))]
    for operations, kind in (
        (schedules.forward(*sizes), "forward"),
        (schedules.backward(*sizes), "backward"),
    ):
        found = [each for each in operations if isinstance(each, Loop)]
        assert sorted((each.layer, each.direction) for each in found) == wanted
        assert {(each.chunk.begin, each.chunk.end, each.kind) for each in found} == {
            (0, steps, kind)
        }


def test_the_passes_have_a_method_for_each_operation():
    for operations, kind in (
        (schedules.forward(2, 2, 3), ForwardBuilder),
        (schedules.backward(2, 2, 3), BackwardBuilder),
    ):
        assert all(callable(getattr(kind, operation.verb)) for operation in operations)


@pytest.mark.parametrize("grad", [False, True])
def test_explain_prints_it(grad):
    layer = openrnn.LSTM(3, 4, 2, bidirectional=True, dropout=0.5)
    table = openrnn.explain(
        layer, torch.zeros(7, 5, 3), schedule=True, backend="cpu", quiet=True, grad=grad
    )
    (row,) = table.rows
    forward = [
        line
        for number in range(2)
        for way in ("forward", "reverse")
        for line in (
            f"main  begin_layer  layer {number}  {way} direction",
            f"main  loop  forward  layer {number}  {way} direction  steps 0 to 7",
        )
    ]
    lines = [*row.details]
    start = lines.index("forward:")
    assert lines[start + 1 : start + 9] == forward
    rest = lines[start + 9 :]
    if not grad:
        assert not rest
        return
    assert rest[0] == "backward, where all gradients are wanted:"
    assert rest[1:4] == [
        "main  begin_layer  layer 1  forward direction",
        "main  loop  backward  layer 1  forward direction  steps 0 to 7",
        "main  finish_weights  layer 1  forward direction",
    ]
    assert len(rest) == 1 + 4 * 3
