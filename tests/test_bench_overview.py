"""The chart of all results: every row of users is in it, and its numbers are those of the rows."""

import json
import math
from pathlib import Path

import pytest
from bench_cases import MACHINE, result

from openrnn.bench import overview
from openrnn.bench.cases import BenchRow
from openrnn.bench.record import ResultFile, read
from openrnn.bench.suites import SUITES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
AS_CALLED = ("torch", "packed", "loop", "compiled", "eager", "cudnn", "baseline")


def row(name, suite="users"):
    return BenchRow(name, "lstm", 10, 2, 4, 5, suite=suite)


def record(*found, **machine):
    return Path("results/x.jsonl"), ResultFile(machine={**MACHINE, **machine}, results=list(found))


def test_every_row_of_a_shown_suite_has_one_family():
    for suite in {suite for suite, _ in overview.FAMILIES.values()}:
        for one in SUITES[suite]:
            assert overview.family_of(suite, one.name), (suite, one.name)
    assert overview.family_of("users", "no such row") is None
    assert overview.family_of("scaling", "base") is None


def test_a_point_is_the_geometric_mean_of_its_rows():
    times = {"isaac": 200.0, "sb3": 800.0}
    found = [result(row=row(name)) for name in times]
    found += [result(row=row(name), engine="torch", us=us) for name, us in times.items()]
    found += [result(row=row("nam")), result(row=row("nam"), engine="torch", us=50.0)]
    learning, audio = overview.points([record(*found)])
    assert (learning.family, audio.family) == ("reinforcement learning", "audio")
    assert learning.panel == ("a machine, 2 cores", "float32")
    assert learning.summary.mean == pytest.approx(4.0)
    assert audio.summary.mean == pytest.approx(0.5)


def test_what_was_disturbed_does_not_count():
    found = [result(row=row("isaac"), others=0.5), result(row=row("isaac"), engine="torch")]
    assert overview.points([record(*found)]) == []


def test_a_loss_is_red_and_a_tie_is_not():
    for us, red in ((50.0, 1), (100.0, 0)):
        found = [result(row=row("isaac")), result(row=row("isaac"), engine="torch", us=us)]
        axes = overview._figure(overview.points([record(*found)])).axes[0]
        dots = [line for line in axes.lines if line.get_color() == overview.charts.RED]
        assert [len(line.get_xdata()) for line in dots] == [red]


def test_the_committed_chart_has_the_numbers_of_the_committed_files():
    """Counted here from the JSON alone, for one family, precision and mode."""
    times = {}
    for line in (RESULTS / "h200" / "users.jsonl").read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        name = one.get("row", {}).get("name", "")
        kind = (one.get("precision"), one.get("mode"))
        if kind == ("bfloat16", "training") and name.startswith("lm-") and one.get("us"):
            times.setdefault(name, {})[one["engine"]] = one["us"]
    ratios = [
        next(us[peer] for peer in AS_CALLED if peer in us) / us["openrnn"] for us in times.values()
    ]
    wanted = math.prod(ratios) ** (1 / len(ratios))
    records = [(path, read(path)) for path in sorted(RESULTS.rglob("*.jsonl"))]
    (point,) = (
        point for point in overview.points(records)
        if (point.family, point.mode, point.panel)
        == ("language models", "training", ("NVIDIA H200", "16 bits"))
    )  # fmt: skip
    assert point.summary.mean == pytest.approx(wanted, rel=1e-9)
    assert overview.chart_path(records) == RESULTS / "overview.png"
    assert overview.chart_path(records).is_file()
