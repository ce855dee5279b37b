"""The charts of `openrnn bench`: that they show something, and all that is promised."""

import pytest
from bench_cases import result
from cases import thinned

from openrnn.bench import charts
from openrnn.bench.cases import BenchRow
from openrnn.bench.ratios import lines_of
from openrnn.bench.suites import SUITES


def fill(rows, precision="bfloat16"):
    """Results of every row, as a GPU could give them: wins, ties and losses."""
    found = []
    for place, row in enumerate(rows):
        for mode in row.modes:
            us = 2.0 * row.steps * row.hidden**0.3 * (3 if mode == "training" else 1)
            times = {"openrnn": us, "openrnn-graph": 0.7 * us, "torch": us * (0.6 + place % 7),
                     "graph": us * (0.65 + place % 3)}  # fmt: skip
            found += [
                result(
                    row=row, engine=engine, us=time, mode=mode, precision=precision,
                    memory_mib=row.batch * (1.0 if engine == "openrnn" else 1.7),
                )
                for engine, time in times.items()
            ]  # fmt: skip
    return found


def ink(path):
    """The share of an image that is not white."""
    import matplotlib.image  # half a second, for the worker that runs these tests alone

    pixels = matplotlib.image.imread(path)[..., :3]
    return float((pixels < 0.97).any(-1).mean())


@pytest.mark.parametrize("suite", thinned(["scaling", "users", "deepbench"], 3))
def test_charts_are_not_empty(suite, tmp_path):
    found = fill(SUITES[suite])
    written = charts.draw(found, tmp_path, "x")
    assert [path.name for path in written] == charts.names(found, "x")
    kinds = [path.stem.removeprefix(f"x-{suite}-bfloat16-") for path in written]
    wanted = {
        "users": ["ratio", "memory"],
        "scaling": ["ratio", "growth", "memory"],
        "deepbench": ["ratio-1", "ratio-2", "ratio-3", "memory"],
    }
    assert kinds == wanted[suite]
    assert all(ink(path) > 0.01 for path in written)


def test_a_chart_changes_with_its_numbers(tmp_path):
    # no training, so that there is no chart of memory
    rows = [BenchRow(n, "lstm", 10, 2, 4, 5, suite="users", modes=("forward",)) for n in "ab"]
    one, same, other = fill(rows), fill(rows), fill(rows)
    other[2] = result(row=rows[0], engine="torch", us=1e5, precision="bfloat16")
    files = []
    for place, found in enumerate((one, same, other)):
        path, *_ = charts.draw(found, tmp_path / str(place), "x")
        files.append(path.read_bytes())
    assert files[0] == files[1] != files[2]


def test_what_was_disturbed_is_grey():
    """Neither a loss nor a win is drawn of it."""
    rows = [BenchRow("a", "lstm", 10, 2, 4, 5, suite="users", modes=("forward",))]
    found = [result(row=rows[0]), result(row=rows[0], engine="torch", us=50.0, others=0.2)]
    axes = charts._ratios(lines_of(found)).axes[0]
    assert {line.get_color() for line in axes.lines[:2]} == {charts.GREY}
    labels = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert labels == ["forward", "disturbed, not counted"]


def test_nothing_is_drawn_of_nothing(tmp_path):
    alone = [result()]
    assert charts.draw(alone, tmp_path, "x") == []
