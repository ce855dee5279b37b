"""The tables of kernel arguments: names, and that a kernel's struct lies as a launch passes it."""

import re

import pytest

from openrnn.codegen import cuda
from openrnn.kernels.cuda.args import (
    LOOPS,
    PLAIN,
    STEPS,
    CopyRowsArgs,
    ForwardArgs,
    SortLengthsArgs,
)
from openrnn.kernels.cuda.table import PreparedArgs
from openrnn.native import nvrtc

ABSENT = nvrtc.absent()
TABLES = {**LOOPS, **STEPS, **PLAIN}


def filled(table, states):
    """Arguments of which each has another value, and its pointers to states as many."""
    return table(**{
        field.name: [1000 * place + k for k in range(states)] if field.array else place
        for place, field in enumerate(table.fields)
    })  # fmt: skip


@pytest.mark.skipif(ABSENT is not None, reason=f"cannot compile: {ABSENT}")
@pytest.mark.parametrize("states", [1, 4])
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_the_struct_lies_as_a_launch_passes_it(table, states):
    """The compiler's offset of every field is where the launch puts its value."""
    args = filled(table, states)
    words = args.words()
    checks = [f"static_assert(sizeof({table.__name__}) == {8 * len(words)});"]
    for field in table.fields:
        given = getattr(args, field.name)
        for k, value in enumerate(given if field.array else [given]):
            name = f"{field.name}[{k}]" if field.array else field.name
            place = 8 * words.index(value)
            # NVRTC knows no offsetof; this is what its front end makes of it
            offset = f"__INTADDR__(&((({table.__name__}*)0)->{name}))"
            checks.append(f"static_assert({offset} == {place});")
    types = "typedef long long int64; typedef float storage_t; typedef short operand_t;"
    kernel = f'extern "C" __global__ void empty(const __grid_constant__ {table.__name__} args) {{}}'
    source = "\n".join([types, f"#define STATES {states}", table.struct(), *checks, kernel])
    nvrtc.binary(nvrtc.KernelSource(source, "empty", "sm_80", table.__name__))


def test_every_kernel_takes_the_struct_of_its_table():
    for name, table in PLAIN.items():
        text = cuda.plain_source(name, "float32", structs=3)
        assert table.struct() in text
        head = rf"void {name}\(\s*const __grid_constant__ (\w+) \w+\s*\)"
        (taken,) = re.findall(head, text)
        if taken != table.__name__:  # several of these structs
            (each,) = re.findall(rf"struct {taken} {{\s*(\w+) each\[STRUCTS\];\s*}};", text)
            assert each == table.__name__
            assert "#define STRUCTS 3" in text


def test_a_wrong_name_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'length'"):
        SortLengthsArgs(length=1, order=2, batch=3)
    with pytest.raises(AttributeError, match="length"):
        SortLengthsArgs(lengths=1, order=2, batch=3).length = 1
    with pytest.raises(TypeError, match="positional"):
        SortLengthsArgs(1, 2, 3)


def test_a_missing_value_is_refused_unless_the_table_has_one():
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'order'"):
        SortLengthsArgs(lengths=1, batch=3)
    assert SortLengthsArgs(lengths=1, order=2, batch=3).words() == [1, 2, 3]
    given = {one.name: [7] if one.array else 7 for one in ForwardArgs.fields}
    for name in ("flag_buffer", "bias_x", "first_row"):
        del given[name]
    args = ForwardArgs(**given)
    assert args.words().count(0) == 3
    assert (args.flag_buffer, args.bias_x, args.first_row) == (0, 0, 0)


@pytest.mark.parametrize("states", [1, 4])
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_prepared_arguments_lie_as_the_table_says(table, states):
    """Whichever fields launches share, and in whichever order the others are given."""
    whole = filled(table, states)
    values = {field.name: getattr(whole, field.name) for field in table.fields}
    numbers = [field.name for field in table.fields if not field.array]
    for shared in ([], numbers[::2], numbers[1:][::-1]):
        prepared = PreparedArgs(table, **{name: values[name] for name in shared})
        for _ in range(2):
            given = {name: values[name] for name in values if name not in shared}
            assert prepared.words(**given) == whole.words()
        arrays = {field.name: values[field.name] for field in table.fields if field.array}
        turned = dict(reversed([pair for pair in given.items() if pair[0] not in arrays]))
        assert prepared.words(**turned, **arrays) == whole.words()
    for name in numbers:
        assert whole.words()[table.word_index(name)] == values[name]


def test_prepared_arguments_refuse_what_does_not_fit():
    prepared = PreparedArgs(SortLengthsArgs, batch=3)
    assert prepared.words(order=2, lengths=1) == [1, 2, 3]
    for wrong in ({"order": 2}, {"order": 2, "length": 1}, {"lengths": 1, "order": 2, "batch": 3}):
        with pytest.raises(TypeError, match=r"a launch of SortLengthsArgs gives .* besides batch"):
            prepared.words(**wrong)
    with pytest.raises(TypeError, match="besides rows"):
        PreparedArgs(CopyRowsArgs, rows=3).words(x=1)
