"""The tables of the CPU kernels' arguments: compiled code reads what a launch sets, by name."""

import ctypes

import pytest
from numba import njit

from openrnn.kernels.cpu import args_type
from openrnn.kernels.cpu.args import (
    CollectArgs,
    LoopArgs,
    PackArgs,
    RegionArgs,
    States,
    loop_args,
)
from openrnn.kernels.cpu.memory import int64_at

READERS = {
    PackArgs: args_type.pack_args_at,
    CollectArgs: args_type.collect_args_at,
    RegionArgs: args_type.region_args_at,
}


def read(reader, names, args):
    """Fields as compiled code reads them, by name."""
    known = {"at": reader}
    values = ", ".join(f"args.{name}" for name in names)  # a field's name is no value
    exec(f"def fields(address):\n    args = at(address)\n    return ({values},)", known)
    return dict(zip(names, njit(known["fields"])(ctypes.addressof(args)), strict=True))


def numbers(table):
    return [name for name, field in table.fields.items() if field.kind is not States]


@pytest.mark.parametrize("table", READERS, ids=lambda table: table.__name__)
def test_compiled_code_reads_what_was_set(table):
    args = table(**{name: 10 + place for place, name in enumerate(table.fields)})
    assert read(READERS[table], table.fields, args) == {
        name: 10 + place for place, name in enumerate(table.fields)
    }


@pytest.mark.parametrize("states", [1, 3])
def test_the_loops_read_numbers_and_groups_of_states(states):
    args = loop_args(states)()
    for place, name in enumerate(numbers(LoopArgs)):
        setattr(args, name, 0.5 + place if name == "drop_scale" else 100 + place)
    args.states = states
    groups = [name for name in LoopArgs.fields if name not in numbers(LoopArgs)]
    for place, name in enumerate(groups):
        setattr(args, name, tuple(1000 * (place + 1) + k for k in range(states)))
    found = read(args_type.loop_args_at, LoopArgs.fields, args)
    for place, name in enumerate(numbers(LoopArgs)):
        if name != "states":
            assert found[name] == (0.5 if name == "drop_scale" else 100) + place
    entry = njit(lambda address, k: int64_at(address)[k])
    for place, name in enumerate(groups):
        assert [entry(found[name], k) for k in range(states)] == [
            1000 * (place + 1) + k for k in range(states)
        ]
    assert ctypes.sizeof(args) == 8 * (len(numbers(LoopArgs)) + len(groups) * states)


def test_what_is_not_set_is_absent():
    args = loop_args(2)(steps=3)
    assert [name for name in numbers(LoopArgs) if getattr(args, name)] == ["steps"]
    assert [*args.initial, *args.d_all_states] == [0] * 4


def test_a_wrong_name_is_refused():
    with pytest.raises(AttributeError, match="length"):
        PackArgs(length=1)
    with pytest.raises(AttributeError, match="length"):
        loop_args(2)(steps=3).length = 1
