"""How many units kernels compute for a layer."""

import itertools

import pytest

from openrnn import cells
from openrnn.codegen.trace import trace
from openrnn.tuning import plan, wavefront
from openrnn.tuning.stack_times import Stack
from openrnn.tuning.units import is_short, units_of

HALF, FULL = 2, 4  # bytes of a value


@pytest.mark.parametrize(
    ("hidden", "size", "batch", "wanted"),
    [
        (1, HALF, 256, 8), (64, HALF, 256, 64), (300, HALF, 256, 304), (480, HALF, 256, 480),
        (500, HALF, 16, 512), (500, HALF, 8, 504), (512, HALF, 64, 512), (560, HALF, 256, 560),
        (600, HALF, 64, 600), (600, HALF, 65, 640), (650, HALF, 256, 656), (900, HALF, 64, 1024),
        (900, HALF, 32, 904), (496, HALF, 256, 496), (1000, HALF, 9, 1024), (1000, HALF, 8, 1000),
        (1150, HALF, 1, 1152), (1500, HALF, 20, 1536), (2000, HALF, 16, 2048),
        (500, FULL, 64, 512), (600, FULL, 128, 640), (900, FULL, 128, 904),
        (1000, FULL, 16, 1024), (2000, FULL, 16, 2000), (2000, FULL, 64, 2048),
        (1000, 8, 64, 1000),
    ],
)  # fmt: skip
def test_units_are_padded_where_that_was_measured_faster(hidden, size, batch, wanted):
    spec = cells.lstm.spec(8, hidden)
    assert units_of(spec, size, False, batch, True) == wanted
    # memory is planned before B is known
    assert units_of(spec, size, False, None, True) >= wanted


def test_where_none_are_added():
    spec = cells.lstm.spec(8, 1000)
    assert units_of(spec, HALF, False, 64, True) == 1024
    assert units_of(spec, HALF, True, 64, True) == 1000  # a short call
    assert units_of(cells.rnn_tanh.spec(8, 1000), HALF, False, 64, True) == 1000
    assert units_of(spec, HALF, False, 64, False) == 1000  # another device
    both = cells.lstm.spec(8, 1000, num_layers=2, bidirectional=True)
    assert units_of(both, HALF, False, 64, True) == 1024


@pytest.mark.parametrize(
    ("hidden", "batch", "wavefront", "wanted"),
    [
        (500, 64, None, 504), (600, 128, None, 600), (1500, 20, None, 1536), (1500, 64, 1, 1504),
        (1000, 64, None, 1024), (1000, 64, 0, 1024), (1000, 32, None, 1000), (1000, 64, 8, 1000),
        (744, 64, None, 744),
    ],
)  # fmt: skip
def test_stacks_whose_layers_run_in_turn(hidden, batch, wavefront, wanted):
    """A launch of all layers, and a wavefront, know no padding."""
    spec = cells.lstm.spec(8, hidden, num_layers=2, wavefront=wavefront)
    assert units_of(spec, HALF, False, batch, True) == wanted


def test_short_calls_are_not_padded():
    assert [is_short(steps) for steps in (1, 11, 12, 1000)] == [True, True, False, False]


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("cell", [cells.lstm, cells.gru], ids=lambda cell: cell.name)
def test_padded_stacks_are_no_slower_than_a_wavefront(cell, kind):
    """By the models, which may be wrong by some percent."""
    for hidden in (896, 904, 1000, 1200, 1504, 2000):
        for layers, batch, steps in itertools.product((2, 4, 8), (64, 128), (50, 200, 1600)):
            spec = cell.spec(hidden, hidden, num_layers=layers)
            units = units_of(spec, HALF, False, batch, True)
            if units == hidden:
                continue
            stack = Stack(
                kind=kind, option_names=("save",) if kind == "forward" else (), cell=trace(cell),
                dtype="bfloat16", hidden=hidden, layers=layers, columns=hidden,
                after=2 * hidden if kind == "backward" else 0, capability=(9, 0), processors=132,
            )  # fmt: skip
            cut = wavefront.best(stack, steps, batch, None)
            if cut is None:
                continue
            padded = stack._replace(hidden=units)
            alone = plan.step_times(padded.loop(batch), 1).alone
            products = sum(padded.products_us(steps, batch))
            in_turn = padded.in_turn_us(steps * alone, products)
            assert in_turn <= 1.05 * cut.us, (hidden, layers, batch, steps)
