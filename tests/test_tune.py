"""`openrnn tune` without a GPU: candidates, the table, the regions, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_cases import MACHINE, result

from openrnn import cells, cli
from openrnn.bench.cases import BenchRow
from openrnn.bench.record import KernelTime, Writer, read
from openrnn.cells import lookup
from openrnn.codegen.config import KernelConfig
from openrnn.codegen.trace import trace
from openrnn.tune import command, kernels, regions, table
from openrnn.tune.candidates import KINDS, Candidate, Size, candidates, variants
from openrnn.tune.launches import STEPS, arguments
from openrnn.tuning import measured, plan
from openrnn.tuning.choice import CudnnRegion
from openrnn.tuning.limits import Limits

ROOT = Path(__file__).parents[1]
CAPABILITY = (9, 0)
SIZE = Size("lstm", "bfloat16", 512, 16, "forward")


# candidates


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_are_the_plans_first_each_shape_once(kind):
    found = candidates(SIZE._replace(kind=kind), CAPABILITY, 8)
    shapes = [measured.shape_of(one.config) for one in found]
    assert found
    assert len(set(shapes)) == len(shapes)
    assert {one.config.kind for one in found} == {"backward" if kind == "backward" else "forward"}
    if kind != "backward":
        assert {one.config.save for one in found} == {kind == "forward"}
    limit = candidates(SIZE._replace(kind=kind), CAPABILITY, 1)
    assert sum(one.config.clusters > 1 for one in limit) <= 1
    assert sum(one.config.clusters == 1 for one in limit) <= 1


def test_candidates_for_two_loops_are_those_of_which_the_device_holds_two():
    size = SIZE._replace(hidden=1024, batch=64)
    alone, two = (candidates(size._replace(loops=loops), CAPABILITY, 8) for loops in (1, 2))
    limits = Limits.of(CAPABILITY)
    assert not all(plan.fits_concurrently(one.config, 64, 2, limits) for one in alone)
    assert {plan.fits_concurrently(one.config, 64, 2, limits) for one in two} == {True}


def test_masks_are_of_the_kernels():
    for mask in measured.MASKS:
        first = candidates(SIZE._replace(mask=mask), CAPABILITY, 1)[0].config
        assert (first.lengths, first.reset) == (mask == "lengths", mask == "reset")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", measured.MASKS)
def test_a_kernel_gets_every_argument_that_it_has(kind, mask):
    """Random ones, here in memory of the CPU, since nothing is launched."""
    size = SIZE._replace(kind=kind, mask=mask)
    config, cell = candidates(size, CAPABILITY, 1)[0].config, trace(lookup(size.cell))
    tensors, asked = arguments(cell, config, size.batch, torch.bfloat16, "cpu")
    assert (asked.hidden, asked.batch, asked.steps) == (size.hidden, size.batch, STEPS)
    places = {one.data_ptr() for one in tensors}
    assert {asked.weight, asked.saved, asked.vectors} <= places
    assert (bool(asked.lengths), bool(asked.reset)) == (mask == "lengths", mask == "reset")


def test_variants_fit_and_differ_in_what_they_hold():
    first = candidates(SIZE, CAPABILITY, 1)[0]
    found = variants(first)
    assert len({one.config for one in found}) == len(found) > 1
    assert {measured.shape_of(one.config) for one in found} == {measured.shape_of(first.config)}
    cell = trace(cells.lstm)
    fragments = first.config.fragments(cell, "bfloat16")
    assert all(0 <= one.config.register_fragments <= fragments for one in found)


def test_sizes_are_every_combination():
    asked = kernels.TuneRequest(
        cells=("lstm", "gru"), hidden=(64,), batches=(1, 16), kinds=("backward",)
    )
    assert [(one.cell, one.hidden, one.batch, one.kind) for one in asked.sizes()] == [
        ("lstm", 64, 1, "backward"), ("lstm", 64, 16, "backward"),
        ("gru", 64, 1, "backward"), ("gru", 64, 16, "backward"),
    ]  # fmt: skip


class Now:
    """A pool that does its work at once."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def map(self, work, items, chunksize=1):
        return map(work, items)


def test_the_two_fastest_are_varied_and_what_fails_is_left_out(tmp_path, monkeypatch, capsys):
    """Compiling and timing are made up; what is written is what was timed."""
    timed = []

    def time_of(one, delays):
        timed.append((one.config, bool(delays)))
        if len(timed) == 1:
            return None  # the device does not hold it
        if len(timed) == 2:
            raise kernels.OpenRNNError("it does not load")
        return float(len(timed)), one.config

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: CAPABILITY)
    monkeypatch.setattr(kernels, "ProcessPoolExecutor", Now)
    monkeypatch.setattr(kernels, "compiled", lambda one: one.config)
    monkeypatch.setattr(kernels, "unspilled", lambda one: one.config.low_register)
    monkeypatch.setattr(kernels, "time_of", time_of)
    asked = kernels.TuneRequest(
        cells=("lstm",), hidden=(512,), batches=(16,), kinds=("forward",), most=4
    )
    path = tmp_path / "a.jsonl"
    found = kernels.measure(asked, Writer(path, MACHINE), command.Console())
    assert read(path).kernels == tuple(found)
    assert "it does not load" in capsys.readouterr().out
    first = [config for config, delays in timed if delays]
    second = [config for config, delays in timed if not delays]
    assert len(found) == len(timed) - 2
    assert second
    assert all(config.low_register for config in second)
    assert not set(first) & set(second)
    assert {measured.shape_of(one) for one in second} == {
        measured.shape_of(one) for one in first[2:4]
    }


def test_only_grids_have_delays_to_measure(monkeypatch):
    timed = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: CAPABILITY)
    monkeypatch.setattr(kernels, "ProcessPoolExecutor", Now)
    monkeypatch.setattr(kernels, "compiled", lambda one: one.config)
    monkeypatch.setattr(kernels, "time_of", lambda one, _: timed.append(one.config))
    asked = kernels.TuneRequest(cells=("lstm",), hidden=(64, 1024), batches=(16,), delays=True)
    assert kernels.measure(asked, Writer(None, MACHINE), command.Console()) == []
    assert timed
    assert all(config.clusters > 1 for config in timed)


# the table


def kernel_time(us, **changes):
    config = {
        "units": 512, "clusters": 1, "cluster": 16, "warps": 4, "groups": 1, "tiles": 1,
        "tiles_in_flight": 1, "k_warps": 1, "wgmma": 0, "register_fragments": 23, "stages": 4,
        "low_register": 1, "delay": 0,
    }  # fmt: skip
    fields = {"cell": "lstm", "dtype": "bfloat16", "hidden": 512, "batch": 16, "kernel": "forward"}
    return KernelTime(**{**fields, "us": us, "config": {**config, **changes}})


def test_the_table_is_what_it_is_without_files():
    path = ROOT / "src" / "openrnn" / "tuning" / measured.FILE
    assert table.text_of([]) == path.read_text()


def test_what_was_measured_since_is_in_the_table():
    even, slower = kernel_time(0.51, register_fragments=9), kernel_time(0.6, register_fragments=8)
    times = [kernel_time(0.515), even, slower, replace(kernel_time(0.1), mask="lengths")]
    old = kernel_time(0.4)
    del old.config["low_register"]
    before, after = (table.text_of(files).splitlines() for files in ([], [[old], times]))
    new = sorted(set(after) - set(before))
    # one that streams a part of R is not in the table, which says nothing of that
    streams = kernel_time(0.01, streamed_fragments=3)
    assert table.text_of([[old], [streams, *times]]).splitlines() == after
    # of kernels as good as even the one tried first; later files win
    assert "forward,none,4,2,2,512,1,2,1,16,4,1,1,1,1,0,0,23,4,1,0,0.52" in new
    assert "forward,lengths,4,2,2,512,1,2,1,16,4,1,1,1,1,0,0,23,4,1,0,0.10" in new
    assert len(new) == 2
    assert any(",0,0,0.40" in line for line in table.text_of([[old]]).splitlines())


def test_the_log_of_kernels_is_read_and_printed(capsys):
    log = ROOT / "benchmarks" / "log" / "tiles.jsonl"
    record = read(log)
    assert len(record.kernels) == 2718
    assert record.machine["name"] == "NVIDIA H200"
    assert cli.main(["tune", "table", str(log)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == ",".join((*measured.SIZE, *table.COLUMNS, "us"))
    assert len(shown) > 500
    picked = table.sheet(record.kernels).rows[0]
    assert [cell.text for cell in picked[:7]] == [
        "lstm", "bfloat16", "512", "1", "inference", "none", "1",
    ]  # fmt: skip
    assert picked[8].text == "16 w4 t1 f1 r23 low-register"


def test_a_configuration_is_kept_as_it_is():
    config = candidates(SIZE, CAPABILITY, 1)[0].config
    assert isinstance(config, KernelConfig)
    kept = table.config_of(config)
    assert (kept["units"], kept["register_fragments"]) == (512, config.register_fragments)
    assert set(kept) == set(table.WRITTEN)
    assert Candidate(SIZE, CAPABILITY, config).kernel.size.hidden == 0


# regions


def timed(hidden, batch, share, cell="lstm", mode="forward", precision="float16", **more):
    """Ours and cuDNN's best from graphs, which needs a share of our time."""
    row = BenchRow(
        f"{cell}-{hidden}-{batch}", cell, more.pop("steps", 256), batch, hidden, hidden, **more
    )
    kind = {"row": row, "mode": mode, "precision": precision}
    peer = "graph" if precision == "bfloat16" else "cudnn-graph"
    return [
        result(engine="openrnn-graph", us=100.0, **kind),
        result(engine=peer, us=100.0 * share, **kind),
    ]


def test_regions_lie_around_what_was_measured():
    found = []
    for cell in ("lstm", "gru"):
        for mode in ("forward", "training"):
            for hidden in (640, 1024):
                for batch in (128, 256):
                    lost = (hidden, batch) == (1024, 256) and (cell, mode) != ("gru", "training")
                    share = 0.83 if lost and mode == "forward" else 0.92 if lost else 1.5
                    found += timed(hidden, batch, share, cell, mode)
    found += timed(1024, 64, 0.96)  # too little to be worth it
    found += timed(1024, 32, 0.5, lengths=True)  # nothing but plain calls are told
    found += timed(1024, 16, 0.5, precision="float32")
    shown = list(map(str, regions.regions_of(found)))
    assert shown == [
        "CudnnRegion(('lstm',), torch.float16, (832, 1024), (129, 256), (False, True)),"
        "  # 0.83 to 0.92",
        "CudnnRegion(('gru',), torch.float16, (832, 1024), (129, 256), (False,)),  # 0.83",
    ]
    names = {"CudnnRegion": CudnnRegion, "torch": torch}
    known = eval(shown[1].partition("),  #")[0] + ")", names)
    assert (known.hidden, known.batch) == ((832, 1024), (129, 256))


def test_of_several_lengths_the_nearest_counts():
    found = timed(512, 16, 0.5, steps=50, mode="training") + timed(512, 16, 1.5, mode="training")
    assert regions.regions_of(found) == []
    (one,) = regions.regions_of(timed(512, 16, 0.5, steps=50))
    assert one.region == CudnnRegion(("lstm",), torch.float16, (512, 512), (16, 16), (False,))


def test_regions_of_written_results(tmp_path, capsys):
    path = tmp_path / "fused.jsonl"
    Writer(path, MACHINE).add(timed(1024, 256, 0.9, precision="bfloat16"))
    assert cli.main(["tune", "regions", "--show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("CudnnRegion(('lstm',), torch.bfloat16, (1024, 1024)")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("kernels", "device cuda: torch finds no CUDA device here"),
        ("kernels --kind sideways", "kind must be of inference, forward, backward, got 'sideways'"),
        ("kernels --mask both", "mask must be of none, lengths, reset, got 'both'"),
        ("kernels --dtype float64", "dtype must be of "),
        ("kernels --hidden wide", "hidden must be sizes, as 64,256, got 'wide'"),
        ("regions", "tune regions needs a file to write, --json, or results, --show"),
        ("regions --json x.jsonl", "device cuda: torch finds no CUDA device here"),
        ("table none.jsonl", "there are no results at none.jsonl"),
    ],
)
def test_mistakes_in_options(words, says, monkeypatch, capsys):
    here = "CUDA device here" in says
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if not here:
        monkeypatch.setattr(command, "device_of", lambda name: name)
    assert cli.main(["tune", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(f"openrnn: {says}")
