"""The arithmetic of `openrnn bench`: rows, ratios, what moved, files, and what they say as text."""

import json
import math
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import pytest
from bench_cases import MACHINE, TINY, result

from openrnn.bench import compare, markdown, page, report
from openrnn.bench.cases import FEWEST, PRODUCTS, BenchRow, cut, select, sized
from openrnn.bench.engines import PEERS
from openrnn.bench.ratios import faults, judged, lines_of, refusals, step_us, summaries
from openrnn.bench.record import (
    SCHEMA,
    Measurement,
    ResultFile,
    Trained,
    Writer,
    files_of,
    line,
    read,
    values_of,
    written,
)
from openrnn.bench.suites import SUITES, rows_of
from openrnn.bench.tables import TITLES, results_sheet, summary_sheet
from openrnn.bench.task import precision_of
from openrnn.bench.training import JOBS, command, sheet
from openrnn.errors import OpenRNNError

# rows


def test_the_suites_hold_their_rows():
    names = {suite: {row.name for row in rows} for suite, rows in SUITES.items()}
    assert {
        "isaac", "sb3", "sf", "rllib", "torchrl", "dreamer", "deepar-10", "hydro-128", "rnnt",
        "crdnn", "tacotron-step", "nam", "nam-long", "sepa", "lm-1150", "fastrnns", "haste-32-64",
    } <= names["users"]  # fmt: skip
    modes = Counter(row.modes for row in SUITES["deepbench"])
    assert modes == {("training",): 53, ("forward",): 69}
    assert all(row.steps == 1 and row.batch <= 256 for row in SUITES["latency"])
    for suite, rows in SUITES.items():
        assert len(names[suite]) == len(rows), f"{suite} has a name twice"
        assert all(row.suite == suite for row in rows)
    assert {row.suite for row in rows_of("all")} == {
        "users", "deepbench", "latency", "scaling", "resets-and-lengths", "custom",
    }  # fmt: skip
    assert rows_of("host, cpu") == SUITES["host"] + SUITES["cpu"]
    assert all(row in SUITES["cpu"] for row in map(cut, SUITES["cpu"]))
    with pytest.raises(ValueError, match=r"suite must be one of users, .*got 'user'"):
        rows_of("user")


def test_a_row_counts_its_products():
    row = BenchRow("x", "gru", 7, 3, 5, 11, 2, bidirectional=True)
    first, second = 3 * 11 * (5 + 11), 3 * 11 * (22 + 11)
    assert row.products == 7 * 3 * 2 * (first + second)


def test_a_cpu_run_is_cut_by_its_rule():
    for row in rows_of("all") + SUITES["fused"] + SUITES["loops"]:
        small = cut(row)
        assert replace(small, steps=row.steps, batch=row.batch) == row
        assert small.products <= PRODUCTS or small.batch == 1
        if small != row:
            assert row.products > PRODUCTS
            assert small.steps >= min(row.steps, FEWEST)
            # one halving less would have been too much
            before = replace(small, steps=2 * small.steps) if small.batch == row.batch else None
            before = before or replace(small, batch=2 * small.batch)
            assert before.products > PRODUCTS
    twins = [replace(TINY, name="a"), replace(TINY, name="b"), replace(TINY, name="c", hidden=6)]
    assert [row.name for row in sized(twins, "cpu")] == ["a", "c"]
    assert sized(twins, "cuda") == twins


def test_rows_are_chosen_by_pattern():
    rows = SUITES["users"]
    assert [row.name for row in select(rows, ["lm-*", "sb3"])] == [
        "sb3", "lm-650", "lm-1150", "lm-1500",
    ]  # fmt: skip
    assert select(rows, []) == list(rows)
    with pytest.raises(ValueError, match="no row matches 'lmm'; there are: lm-650, "):
        select(rows, ["lm-*", "lmm"])


def test_precisions():
    plain, wants = TINY, replace(TINY, dtype="bfloat16")
    assert precision_of("auto", plain, "cuda") == "tf32"
    assert precision_of("auto", wants, "cuda") == "bfloat16"
    assert precision_of("auto", wants, "cpu") == "float32"
    assert precision_of("float16", wants, "cuda") == "float16"
    with pytest.raises(ValueError, match="tf32 needs a CUDA device"):
        precision_of("tf32", plain, "cpu")
    int8 = replace(TINY, dtype="int8")
    assert precision_of("auto", int8, "cpu") == precision_of("int8", plain, "cpu") == "int8"
    with pytest.raises(ValueError, match="int8 needs device cpu, got cuda"):
        precision_of("auto", int8, "cuda")
    with pytest.raises(ValueError, match="bf16-weights needs device cpu, got cuda"):
        precision_of("bf16-weights", plain, "cuda")


# the table


@pytest.fixture
def lines():
    return lines_of(
        [
            result("a", us=100.0), result("a", "torch", 400.0), result("a", "graph", 90.0),
            result("a", "openrnn-graph", 30.0),
            result("b", us=100.0), result("b", "torch", 50.0),
            result("c", us=100.0), result("c", "torch", 102.0),
            result("d", us=100.0), result("d", "torch", None, status="wrong", reason="y off"),
            result("e", us=100.0), result("e", "torch", None, status="refused", reason="no resets"),
            result("f", us=100.0), result("f", "torch", 98.0),
        ]
    )  # fmt: skip


def test_ratios_means_and_losses(lines):
    torch, graph = summaries(lines)
    assert [pair.ratio for pair in torch.pairs] == [4.0, 0.5, 1.02, 0.98]
    assert torch.mean == pytest.approx(math.pow(4 * 0.5 * 1.02 * 0.98, 1 / 4))
    assert [torch.count(verdict) for verdict in ("win", "loss", "tie")] == [1, 1, 2]
    assert (torch.least.ours.row.name, torch.most.ours.row.name) == ("b", "a")
    # a graph is compared with ours from a graph, not with ours as called
    assert [pair.ratio for pair in graph.pairs] == [3.0]
    assert [pair.ours.row.name for pair in judged(lines, "loss")] == ["b"]
    assert step_us(lines[0].results["torch"]) == 40.0
    assert [(bad.row.name, bad.status) for bad in faults(lines)] == [("d", "wrong")]
    assert refusals(lines) == {("torch", "no resets"): ["e"]}


@pytest.mark.parametrize(
    ("theirs", "spread", "repeats", "verdict"),
    [
        (101.9, 0.0, 1000, "tie"),  # within 2%, however well it is known
        (102.5, 0.0, 1000, "win"),
        (97.5, 0.0, 1000, "loss"),
        (150.0, 1.5, 100, "win"),  # the quartiles overlap, the medians are known to 14%
        (150.0, 1.5, 9, "tie"),  # and here to 46%
        (50.0, 1.5, 100, "loss"),
        (105.0, 0.2, 4, "tie"),
        (105.0, 0.2, 100, "win"),
    ],
)
def test_pairs_too_close_to_call(theirs, spread, repeats, verdict):
    """Two standard errors of the ratio, where ours has none; `spread` is the quartile range."""
    low, high = theirs * (1 - spread / 2), theirs * (1 + spread / 2)
    peer = result(engine="torch", us=theirs, low=low, high=high, repeats=repeats)
    (line,) = lines_of([result(low=100.0, high=100.0), peer])
    assert line.pair("torch").verdict == verdict


def test_what_was_disturbed_is_shown_and_not_counted():
    loud = {"others": 0.2}
    shaken = [
        result("a", us=100.0), result("a", "torch", 200.0),
        result("b", us=100.0), result("b", "torch", 10.0, **loud),
        result("c", us=100.0, **loud), result("c", "torch", 900.0),
        result("d", us=100.0, **loud), result("d", "loop", 900.0, **loud),
    ]  # fmt: skip
    lines = lines_of(shaken)
    torch, loop = summaries(lines)
    assert ([pair.ratio for pair in torch.pairs], torch.disturbed) == ([2.0], 2)
    assert (loop.pairs, loop.disturbed) == ((), 1)
    assert not judged(lines, "loss")
    first, second = ([cell.text for cell in row] for row in summary_sheet(lines).rows)
    assert first[3:] == ["1", "2.00", "2.00 a", "2.00 a", "1", "0", "0", "2"]
    assert second[3:] == ["0", "-", "-", "-", "0", "0", "0", "1"]
    assert [row[5].text for row in results_sheet(lines).rows] == ["2.00", "0.10 ~", "9.00 ~", "-"]
    text = markdown.document(shaken, MACHINE)
    assert "No loss; 3 disturbed, not counted." in text
    assert "**" not in text


def test_the_sheets_say_so(lines):
    shown = results_sheet(lines)
    assert shown.heads[:6] == ("row", "T x B x I x H", "precision", "mode", "us a step", "torch.nn")
    torch = [row[5].text for row in shown.rows]
    assert torch == ["4.00", "0.50", "1.02 =", "wrong", "-", "0.98 ="]
    assert [row[5].means for row in shown.rows] == ["win", "loss", "tie", "fault", "", "tie"]
    first = [cell.text for cell in summary_sheet(lines).rows[0]]
    assert first == [
        "torch.nn as called", "float32", "forward", "4", "1.19", "0.50 b", "4.00 a", "1", "2", "1",
    ]  # fmt: skip
    text = markdown.document([r for line in lines for r in line.results.values()], MACHINE)
    assert (
        "| b | 10x2x4x5 | float32 | forward | torch.nn as called | **0.50** | 100 | 50.0 |" in text
    )
    assert "- wrong: torch.nn as called, d, float32, forward: y off" in text
    assert "- refused: torch.nn as called: no resets (e)" in text
    assert all(peer in TITLES for peer in PEERS)


# what moved


def test_only_ours_beyond_noise_and_drift_has_moved(capsys):
    before = [result(us=100.0), result(engine="torch", us=200.0)]

    def now(ours, theirs):
        return [result(us=ours), result(engine="torch", us=theirs)]

    assert compare.moved(before, now(100.0, 200.0), steady=True) == ([], 1)
    assert compare.moved(before, now(104.0, 200.0), steady=True)[0] == []  # 5% are noise
    assert compare.moved(before, now(150.0, 300.0), steady=True)[0] == []  # the machine moved
    (slower,), _ = compare.moved(before, now(150.0, 200.0), steady=True)
    assert slower.ratio == pytest.approx(2 / 3)
    (faster,), _ = compare.moved(before, now(50.0, 220.0), steady=True)
    assert faster.ratio == pytest.approx(2.0)  # as it stands, whatever its peer did
    assert compare.moved(before, now(100.0, 400.0), steady=True)[0] == []  # one peer's noise
    assert compare.moved(before, now(115.0, 100.0), steady=True)[0][0].ratio < 1
    assert compare.moved(before, now(80.0, 100.0), steady=True)[0] == []
    wide = [result(us=100.0, low=60.0, high=160.0), result(engine="torch", us=200.0)]
    assert compare.moved(wide, now(150.0, 200.0), steady=True)[0] == []
    loud = [replace(one, others=0.2) for one in now(150.0, 200.0)]
    assert compare.moved(before, loud, steady=True) == ([], 0)
    # of another machine or torch, everything is told
    found, count = compare.moved(before, now(150.0, 400.0), steady=False)
    assert ([pair.now.engine for pair in found], count) == (["torch", "openrnn"], 2)
    assert compare.differences(MACHINE, {**MACHINE, "torch": "3"}) == ["torch 2, now 3"]
    other = [replace(result(), row=replace(before[0].row, steps=11))]
    assert compare.moved(before, other, steady=True) == ([], 0)


# files


FULL = result(
    chosen="cpu", first_s=0.5, memory_mib=12.5, others=0.25, sm_mhz=1980, reason="none",
    row=BenchRow("full", "lstm", 3, 2, 4, 5, resets=0.03, dtype="bfloat16", modes=("training",)),
)  # fmt: skip
TRAINED = Trained("lm", "torch", 2, 2, 8, 4, 8, "float32", "cpu", 0.1, 7, 1e5, 2.5, "torch.nn")


def test_a_file_comes_back(tmp_path):
    path = tmp_path / "deep" / "x.jsonl"
    Writer(path, {**MACHINE, "torch": "1"}).add([result(), FULL])
    Writer(path, MACHINE).add([result(us=50.0), TRAINED])
    found = read(path)
    assert found.machine == {**MACHINE, "torch": "1; 2"}
    assert values_of(found.machine, "torch") == ["1", "2"]
    assert values_of(found.machine, "cuda") == []
    assert found.results == (result(us=50.0), FULL)  # of two results the last
    assert found.trained == (TRAINED,)
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [(text["schema"], text["kind"]) for text in lines] == [
        (2, "machine"), (2, "result"), (2, "result"), (2, "machine"), (2, "result"),
        (2, "training"),
    ]  # fmt: skip
    assert list(files_of([tmp_path])) == [path]
    with pytest.raises(OpenRNNError, match="there are no results at"):
        list(files_of([tmp_path / "none"]))


def test_the_schema_is_what_it_was():
    """Who changes a field changes SCHEMA: files of the one before could not be read."""
    assert SCHEMA == 2
    assert [field.name for field in fields(Measurement)] == [
        "row", "precision", "mode", "engine", "status", "reason", "chosen", "us", "low", "high",
        "repeats", "error", "checked", "first_s", "memory_mib", "others", "sm_mhz",
    ]  # fmt: skip
    assert [field.name for field in fields(BenchRow)] == [
        "name", "cell", "steps", "batch", "inputs", "hidden", "layers", "bidirectional", "lengths",
        "resets", "dtype", "modes", "suite", "states", "full",
    ]  # fmt: skip
    assert [field.name for field in fields(Trained)] == [
        "name", "model", "gpus", "layers", "hidden", "batch", "bptt", "dtype", "device", "minutes",
        "steps", "bytes_per_s", "bits_per_byte", "backend",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 has no schema"),
        ('{"schema": 3, "kind": "result"}', "is of another schema, this openrnn reads 1 and 2"),
        (
            '{"schema": 1, "kind": "row"}',
            "is of kind 'row', needs machine, result, training, profile, kernel",
        ),
        (written(TRAINED).replace("steps", "stpes"), "other fields than a Trained: steps, stpes"),
        (written(FULL).replace('"ok"', '"fine"'), "status, needs one of ok, wrong"),
        (written(FULL).replace("1980", '"fast"'), "sm_mhz, needs int, got 'fast'"),
        (written(FULL).replace('"steps": 3', '"steps": 3.5'), "row, steps, needs int, got 3.5"),
    ],
)
def test_a_line_that_is_none(tmp_path, text, says):
    path = tmp_path / "x.jsonl"
    path.write_text(line("machine", MACHINE) + "\n" + text + "\n")
    with pytest.raises(OpenRNNError, match=r"x\.jsonl line 2") as caught:
        read(path)
    assert says in str(caught.value)


def test_a_file_of_something_else(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("")
    with pytest.raises(OpenRNNError, match="has no line on its machine"):
        read(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OpenRNNError, match="is not text"):
        read(path)


def test_the_page_goes_machine_by_machine_in_the_order_of_the_suites():
    def record(machine, suite):
        row = BenchRow("a", "lstm", 10, 2, 4, 5, suite=suite)
        found = (result(row=row), result(row=row, engine="torch", us=50.0))
        return Path(f"{machine}/{suite}.jsonl"), ResultFile({**MACHINE, "name": machine}, found)

    records = [record("one", "users"), record("two", "custom"), record("two", "users")]
    text = page.text(records, Path("page.md"))
    assert [line for line in text.splitlines() if line.startswith("#")][1:-2] == [
        "## What the names mean", "## All together", "### one, 2 threads", "### two, 2 threads",
        "## one, 2 threads: users (`users`)",
        "## two, 2 threads: users (`users`)", "## two, 2 threads: custom (`custom`)",
    ]  # fmt: skip
    assert "| custom | torch.nn as called | float32 | forward | 1 | **0.50** |" in text
    assert "(one/users-float32-ratio.png)" in text
    # of the suites' rows each of these files has one
    assert [line for line in text.splitlines() if line.endswith(" rows")] == [
        f"- users in float32, 1 of {len(sized(rows_of('users'), MACHINE['device']))} rows",
        f"- users in float32, 1 of {len(sized(rows_of('users'), MACHINE['device']))} rows",
        f"- custom in float32, 1 of {len(sized(rows_of('custom'), MACHINE['device']))} rows",
    ]


# the real job


def test_jobs_are_compared_with_torch_and_with_one_gpu():
    runs = [
        replace(TRAINED, model=model, gpus=gpus, bytes_per_s=rate)
        for model, gpus, rate in (
            ("openrnn", 1, 3e6), ("torch", 1, 2e6), ("openrnn", 2, 5.4e6), ("torch", 2, 4e6),
        )
    ]  # fmt: skip
    steps = f"{TRAINED.steps:,}"
    shown = [[cell.text for cell in row][-5:] for row in sheet(runs).rows]
    assert shown == [
        ["3", "1.50", "-", steps, "2.500"], ["2", "1.00", "-", steps, "2.500"],
        ["5.4", "1.35", "90%", steps, "2.500"], ["4", "1.00", "100%", steps, "2.500"],
    ]  # fmt: skip


def test_the_command_of_a_job(tmp_path):
    words = command(JOBS["cuda"][0], "torch", "cuda", 2, {"minutes": 0.5}, tmp_path)
    text = " ".join(map(str, words))
    assert "-m torch.distributed.run --standalone --nproc-per-node=2 -m openrnn.cli train" in text
    assert "--model torch --layers 2 --hidden 1024" in text
    assert "--batch 256" in text  # the batch of one GPU twice
    assert text.endswith("--minutes 0.5")
    assert "torch.distributed" not in " ".join(
        command(JOBS["cuda"][0], "openrnn", "cuda", 1, {"steps": 2}, tmp_path)
    )


def test_a_report_of_nothing(capsys):
    report.show([], MACHINE, report.console())
    assert capsys.readouterr().out == "nothing was measured\n"
