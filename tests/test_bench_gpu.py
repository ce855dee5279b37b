"""`openrnn bench`, `soak` and `tune` on a GPU: from graphs, the host's part, kernels alone."""

from dataclasses import replace

import pytest
import torch
from bench_cases import QUICK

from openrnn.bench import remote, soak
from openrnn.bench.cases import BenchRow
from openrnn.bench.engines import WAYS, engines_of
from openrnn.bench.measure import measure
from openrnn.bench.modes import HOST_MODES
from openrnn.bench.record import Writer
from openrnn.bench.session import Console
from openrnn.tune.candidates import KINDS, Size, candidates, compiled
from openrnn.tune.kernels import TuneRequest
from openrnn.tune.kernels import measure as measure_kernels
from openrnn.tune.launches import time_of

pytestmark = pytest.mark.gpu
ROW = BenchRow("small", "lstm", 24, 8, 64, 64)


def test_ours_and_others_are_timed_in_turn_as_called_and_from_graphs():
    settings = WAYS["no-overlap"]
    others = [remote.Other("baseline"), remote.Other("no-overlap", settings=settings)]
    with remote.in_turn(others, "fused", "cuda") as engines:
        found = measure(ROW, "bfloat16", "cuda", engines, QUICK)
    names = [
        f"{name}{way}" for way in ("", "-graph") for name in ("openrnn", "baseline", "no-overlap")
    ]
    for mode in ROW.modes:
        mine = [one for one in found if one.mode == mode]
        assert [one.engine for one in mine] == names
        assert [(one.status, one.reason) for one in mine] == [("ok", None)] * len(names)
        assert all(one.us and one.chosen == "fused" for one in mine)
        assert all((one.memory_mib is None) == one.engine.endswith("-graph") for one in mine)


def test_cudnn_from_a_graph_and_by_each_algorithm():
    against = ("graph", "cudnn-graph", "cudnn-standard", "cudnn-persist-static", "recompute")
    found = measure(ROW, "float16", "cuda", engines_of(against, "fused"), QUICK)
    ran = {one.engine for one in found if one.status == "ok" and one.mode == "training"}
    assert {"openrnn", "openrnn-graph", "graph", "cudnn-graph"} <= ran
    assert {"cudnn-standard", "recompute"} <= ran
    assert not [one for one in found if one.status == "wrong"]


def test_the_hosts_part_is_measured_in_every_mode():
    """Of a call whose device's part is long, beside the call as a whole."""
    modes = ("training", *HOST_MODES)
    long = BenchRow("long", "lstm", 2000, 64, 256, 256, modes=modes)
    found = measure(long, "bfloat16", "cuda", engines_of((), "fused"), QUICK)
    assert [(one.mode, one.status) for one in found] == [(mode, "ok") for mode in modes]
    assert all(one.us and one.us > 0 for one in found)


def test_calls_on_streams_give_the_same_bits():
    assert soak.run(soak.Soak(0.05, problems=3)) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", [64, 1024])  # a block, a grid
def test_a_kernel_alone_is_timed(kind, hidden):
    size = Size("lstm", "bfloat16", hidden, 16, kind)
    first = candidates(size, torch.cuda.get_device_capability(), 1)[0]
    config = compiled(first)
    us, best = time_of(first._replace(config=config), (0, 400))
    assert 0.05 < us < 500
    assert replace(best, **({"delay": config.delay} if best.clusters > 1 else {})) == config


def test_kernels_are_measured(tmp_path):
    asked = TuneRequest(cells=("gru",), hidden=(64,), batches=(16,), kinds=("inference",), most=1)
    found = measure_kernels(asked, Writer(None, {}), Console(stderr=True))
    assert len(found) > 1
    assert {(one.cell, one.hidden, one.batch, one.kernel) for one in found} == {
        ("gru", 64, 16, "inference"),
    }  # fmt: skip
