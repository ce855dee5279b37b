"""The CUDA kernels as they can be judged without a GPU: sources, binaries, tiles, the cache."""

import dataclasses
import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import CELLS, thinned
from loops import holding_r, loop_of
from torch import sigmoid, tanh

import openrnn
from openrnn import cells, codegen, store
from openrnn.backends.fused import Fused, ahead, kernels
from openrnn.codegen import cuda
from openrnn.codegen.config import (
    SIZES,
    BackwardConfig,
    ForwardConfig,
    GridBackwardConfig,
    GridForwardConfig,
    saved_names,
    saved_values,
)
from openrnn.codegen.multicast_config import (
    MulticastBackwardConfig,
    MulticastConfig,
    MulticastForwardConfig,
)
from openrnn.codegen.trace import trace
from openrnn.native import nvrtc
from openrnn.spec import Problem
from openrnn.tuning import cluster, measured, multicast, plan
from openrnn.tuning.limits import Limits

ABSENT = nvrtc.absent()
compiles = pytest.mark.skipif(ABSENT is not None, reason=f"cannot compile: {ABSENT}")

TRACED = {name: cell for name, cell in CELLS.items() if not cell.dependent_product}
ARCHES = {(8, 0): 128, (9, 0): 256, (10, 0): 256, (12, 0): 128}  # and a size that fits there
DTYPES = tuple(SIZES)
EVERYTHING = {"lengths": True, "reset": True, "all_states": True, "reset_state": True}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache of binaries of one's own."""
    monkeypatch.setattr(store, "folder", lambda: tmp_path / "cubins")
    for cached in (kernels.binary, kernels.plain_binary, kernels.kernel):
        cached.cache_clear()
    yield tmp_path / "cubins"
    kernels.binary.cache_clear()


def chosen(cell, dtype, hidden, batch, capability, flags=(), kind="forward"):
    """The kernel that the backend would run, compiled, and its tiles."""
    found = kernels.best(loop_of(kind, cell, dtype, hidden, batch, capability, options=flags))
    if found is None:
        pytest.fail(f"{cell.name} {dtype} {hidden} {batch} {capability}: every kernel spills")
    return found


def combinations():
    """Each cell on sm_90, some with few and many registers elsewhere, the dtypes taking turns."""
    for i, name in enumerate(TRACED):
        for j, capability in enumerate(ARCHES):
            if capability == (9, 0) or name in ("lstm", "gru", "slstm"):
                yield name, capability, DTYPES[(i + j) % len(DTYPES)]


@compiles
@pytest.mark.parametrize(("name", "capability", "dtype"), thinned(combinations(), 6))
def test_no_kernel_spills(name, capability, dtype):
    """Registers, shared memory and spills of what would run, with every feature and with none."""
    cell = trace(TRACED[name])
    hidden = ARCHES[capability] // (2 if dtype == "float32" else 1) // (len(cell.gates) > 3 or 1)
    everything = {**EVERYTHING, "save": True}, EVERYTHING
    for kind, flags in zip(("forward", "backward"), everything):
        made, config = chosen(cell, dtype, hidden, 16, capability, flags, kind)
        assert made.resources.spilled == 0
        assert made.resources.registers * config.threads <= 65536
        assert config.shared(cell, dtype) <= Limits.of(capability).shared


@compiles
@pytest.mark.parametrize("hidden", thinned([256, 64, 512, 640, 1024], 5))
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_the_rows_that_are_published_spill_nothing(kind, hidden):
    for dtype in ("bfloat16", "float32")[: 2 if hidden <= 512 else 1]:
        made, _ = chosen(trace(cells.lstm), dtype, hidden, 64, (9, 0), (), kind)
        assert made.resources.spilled == 0


@compiles
@pytest.mark.parametrize(
    ("name", "capability", "dtype"),
    thinned(
        [("lstm", (9, 0), "bfloat16"), ("gru", (8, 0), "float32"), ("lstm", (10, 0), "bfloat16"),
         ("lstm", (8, 0), "bfloat16"), ("gru", (9, 0), "float32"), ("gru", (10, 0), "float32")],
        6,
    ),
    ids=str,
)  # fmt: skip
def test_kernels_that_share_r_through_l2(name, capability, dtype):
    """The first choice of a size that no cluster holds, with every feature and with none.

    Each architecture and cell with one dtype: a kernel of this size compiles for seconds.
    """
    cell = trace(TRACED[name])
    most = 1800 if capability == (8, 0) else 3600  # rows of R; clusters hold more than one block
    hidden = most // len(cell.gates)
    for kind, last in (("forward", {"save": True}), ("backward", {})):
        for flags in ({}, {**EVERYTHING, **last}):
            made, config = chosen(cell, dtype, hidden, 16, capability, flags, kind)
            assert made.resources.spilled == 0
            assert config.clusters > 1


@pytest.mark.parametrize("hidden", [1, 7, 64, 100, 256, 500, 640, 1100])
@pytest.mark.parametrize("capability", ARCHES, ids=str)
def test_tiles_fit_and_own_every_unit(hidden, capability):
    cell, limits = trace(cells.gru), Limits.of(capability)
    every = [
        *holding_r("forward", cell, "bfloat16", hidden, 8, capability),
        *holding_r("backward", cell, "bfloat16", hidden, 8, capability),
    ]
    for config in every:
        groups = config.units // 8
        assert config.units >= hidden
        assert config.cluster <= limits.cluster
        assert 0 <= config.register_fragments <= config.fragments(cell, "bfloat16")
        assert config.shared(cell, "bfloat16") <= limits.shared
        if config.wgmma:
            assert capability == (9, 0)
            assert config.warps // getattr(config, "k_warps", 1) % 4 == 0
            if config.kind == "forward" and config.clusters == 1:  # no warpgroup is idle
                assert groups // config.cluster > (config.warps - 4) * config.groups
        if config.clusters > 1:
            shared = [
                -(-number * groups // config.clusters) for number in range(config.clusters + 1)
            ]
            assert max(b - a for a, b in itertools.pairwise(shared)) <= config.groups
            assert config.clusters <= dict(limits.resident)[config.cluster]
            if isinstance(config, MulticastConfig):
                blocks = config.cluster * config.clusters
                assert config.groups * config.clusters == groups
                # as many units each, halves of K, and blocks of a cluster with one part of K
                assert groups % blocks == blocks % (2 * config.k_parts) == 0
                continue
            assert config.warps % config.k_warps == 0
            assert config.feeds_all(cell, "bfloat16")
        elif config.kind == "forward":
            assert config.cluster * config.warps * config.groups * 8 >= config.units
        else:
            # an empty block would wait for nobody, and overwrite what others still read
            starts = [-(-block * groups // config.cluster) for block in range(config.cluster + 1)]
            counts = [b - a for a, b in itertools.pairwise(starts)]
            assert min(counts) > 0
            assert max(counts) <= config.groups


def lstm_without_bounds(x, r, s):
    c = sigmoid(x.f + r.f) * s.c + sigmoid(x.i + r.i) * tanh(x.g + r.g)
    return sigmoid(x.o + r.o) * c, c


def gru_without_bounds(x, r, s):
    z = sigmoid(x.z + r.z)
    return tanh(x.n + sigmoid(x.r + r.r) * r.n) + z * s.h


MEASURED = {4: cells.lstm, 3: cells.gru, 1: cells.rnn_tanh}  # by gates
UNBOUNDED = {  # whose float32 products are tf32
    4: openrnn.cell(gates="i f g o", states="h c")(lstm_without_bounds),
    3: openrnn.cell(gates="r z n", states="h")(gru_without_bounds),
}
WHOLE = (9, 0), 132  # the device that was measured


def as_measured(kind, *asked, mask=measured.PLAIN, loops=1):
    """The kernels of a kind and mask of the measured table."""
    options = ("save",) if kind == "forward" else ()
    options = options if mask == measured.PLAIN else (mask, *options)
    loop = "backward" if kind == "backward" else "forward"
    return holding_r(loop, *asked, options=options, loops=loops)


@pytest.mark.parametrize(
    ("loops", "size"),
    thinned(
        ((loops, size) for loops in measured.LOOPS for size in sorted(measured.table(loops))), 11
    ),
    ids=str,
)
def test_what_was_measured_fastest_is_a_kernel_of_the_plan_and_its_first(loops, size):
    kind, mask, gates, width, operand_bytes, units = size
    dtype = {2: "float16", 4: "float32"}[width]
    rank = partial(as_measured, kind, mask=mask, loops=loops)
    named = UNBOUNDED if kind != "backward" and operand_bytes == 4 else MEASURED
    cell, rows = trace(named[gates]), measured.table(loops)[size]
    for row in rows:
        batch = 8 * row.batch_tiles
        found = rank(cell, dtype, units, batch, *WHOLE)
        assert plan.fits_concurrently(found[0], batch, loops, Limits.of(*WHOLE))
        assert found[0].shared(cell, dtype) <= Limits.of(*WHOLE).shared
        # the same with the blocks that share K in one cluster, which were not measured, come first
        first = next(one for one in found if measured.shape_of(one) == row.shape)
        inside = multicast.inside_cluster(first, found, batch, Limits.of(*WHOLE))
        assert found[:2] == (inside, first) if inside else found[0] == first
        assert (first.register_fragments, first.stages, first.low_register) == row.fill
        assert first.operand_bytes(dtype) == operand_bytes
        assert first.delay == row.delay
        assert len(found) == len(set(found))
    # what was measured with other masks, or with training, is asked where this was not
    kinds = {kind, "forward"} if kind == "inference" else {kind}
    others = itertools.product(kinds, {mask, measured.PLAIN})
    elsewhere = {
        row.batch_tiles
        for other in others
        if other != (kind, mask)
        for row in measured.table(loops).get((*other, *size[2:]), [])
    }
    for before, after in itertools.pairwise(rows):
        nearest = (
            before.batch_tiles + 1,
            (before.batch_tiles + after.batch_tiles) // 2,
            after.batch_tiles - 1,
        )
        between = {near for near in nearest if before.batch_tiles < near < after.batch_tiles}
        for batch_tiles in between - elsewhere:
            found = rank(cell, dtype, units, 8 * batch_tiles, *WHOLE)
            limits = Limits.of((9, 0), 132)
            model = min(
                found,
                key=lambda config: (
                    plan.cycles_of(cell, dtype, config, 8 * batch_tiles, limits)
                    + multicast.saved_inside(config, 8 * batch_tiles, limits),
                    config.parts_in_cluster,
                ),
            )
            delays = {measured.shape_of(model): {model.delay}}
            near = sorted((before, after), key=lambda row: abs(row.batch_tiles - batch_tiles))
            for row in reversed(near):
                delays[row.shape] = {row.delay}
            if abs(before.batch_tiles - batch_tiles) == abs(after.batch_tiles - batch_tiles):
                for row in near:
                    delays[row.shape] |= {row.delay}
            second = found[min(1, len(found) - 1)]
            inside = multicast.inside_cluster(second, found, 8 * batch_tiles, limits)
            first = second if inside == found[0] else found[0]
            assert first.delay in delays[measured.shape_of(first)]


def test_masks_without_rows_have_tiles_that_were_measured_and_the_plan_fills_them():
    cell = trace(cells.lstm)
    for kind in ("forward", "backward"):
        asked = kind, cell, "float16", 512, 64, *WHOLE
        first, second = holding_r(*asked)[:2]
        masked = plan.ranked(loop_of(*asked, options=("lengths", "reset", "save")))
        assert masked[0] == second
        assert measured.shape_of(first) == measured.shape_of(second)
        assert first.register_fragments > second.register_fragments
        assert masked[1:-1] == holding_r(*asked)[2:]
        assert masked[-1].stepwise


@pytest.mark.parametrize("mask", measured.MASKS[1:])
@pytest.mark.parametrize(("cell", "hidden"), [("gru", 640), ("lstm", 512), ("lstm", 64)], ids=str)
def test_a_mask_has_the_tiles_of_a_batch_that_was_measured_without(cell, hidden, mask):
    """Where it was not itself: rows of other batches do not hide that."""
    traced = trace(getattr(cells, cell))
    size = len(traced.gates), 2, 2, hidden
    for kind in ("forward", "inference", "backward"):
        masked = {row.batch_tiles for row in measured.table().get((kind, mask, *size), [])}
        for row in measured.table()[(kind, measured.PLAIN, *size)]:
            if row.batch_tiles not in masked:
                asked = traced, "float16", hidden, 8 * row.batch_tiles, *WHOLE
                assert measured.shape_of(as_measured(kind, *asked, mask=mask)[0]) == row.shape


def test_what_was_measured_is_tried_as_it_is_and_then_as_the_plan_fills_it(monkeypatch):
    """Another cell of as many gates, or another compiler, may spill there."""
    cell, asked = trace(cells.lstm), []
    loop = loop_of("forward", cell, "float16", 512, 64, *WHOLE, options=())
    first, second = plan.holding_r(loop)[:2]

    def binary(cell, dtype, config, arch, spin_limit):
        asked.append(config)
        return SimpleNamespace(
            resources=SimpleNamespace(spilled=config.register_fragments == first.register_fragments)
        )

    monkeypatch.setattr(kernels, "binary", binary)
    monkeypatch.setattr(kernels, "_source_of", lambda *_: SimpleNamespace(path=Path(__file__)))
    _, config = kernels.best(loop)
    assert asked == [first, second]
    assert config == second


def test_between_batches_runs_what_needs_no_second_wave():
    """3 tiles as 2 were measured, one a cluster, not as 8, in a grid: seven clusters are there."""
    cell = trace(cells.lstm)
    small, between, large = (
        holding_r("forward", cell, "float16", 640, batch, *WHOLE)[0] for batch in (16, 24, 64)
    )
    assert between == small != large


def test_below_the_least_measured_batch_runs_its_kernel_unless_it_is_a_grid(monkeypatch):
    """How a grid divides R, and its delay, are for more rows: the model chooses."""
    cell, whole = trace(cells.rnn_tanh), measured.table()
    known = {key: [row for row in rows if row.batch_tiles > 1] for key, rows in whole.items()}
    for kind, hidden in itertools.product(("forward", "backward"), (256, 1024)):
        least = known[(kind, measured.PLAIN, 1, 2, 2, hidden)][0]
        grid = hidden == 1024
        assert (least.shape[0] > 1) == grid
        found = []
        for rows in (known, {}):
            monkeypatch.setattr(measured, "table", lambda *_, rows=rows: rows)
            plan._ranking.cache_clear()
            found.append(holding_r(kind, cell, "bfloat16", hidden, 1, *WHOLE)[0])
        chosen, modelled = found
        assert chosen == modelled if grid else measured.shape_of(chosen) == least.shape
        plan._ranking.cache_clear()


def test_beyond_what_was_measured_the_model_chooses(monkeypatch):
    cell = trace(cells.lstm)
    loop = loop_of("backward", cell, "float16", 512, 1024, *WHOLE)
    found = plan.holding_r(loop)
    monkeypatch.setattr(measured, "table", lambda *_: {})
    plan._ranking.cache_clear()
    assert plan.holding_r(loop) == found
    plan._ranking.cache_clear()


def test_other_devices_and_sizes_have_the_model(monkeypatch):
    cell = trace(cells.lstm)
    asked = [((9, 0), 132, 512), ((9, 0), 114, 512), ((10, 0), None, 512), ((9, 0), 132, 520)]

    def found():
        plan._ranking.cache_clear()
        return [holding_r("forward", cell, "float16", h, 64, *device)[0] for *device, h in asked]

    here = found()
    monkeypatch.setattr(measured, "table", lambda *_: {})
    assert [a == b for a, b in zip(here, found())] == [False, True, True, True]
    plan._ranking.cache_clear()


def test_a_slice_of_a_device_gets_smaller_grids():
    cell = trace(cells.lstm)
    for processors in (132, 114, 66):
        found = holding_r("forward", cell, "bfloat16", 1024, 16, (9, 0), processors)
        assert found
        for config in found:
            assert config.cluster * config.clusters <= processors


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_configurations_that_rows_of_users_showed_to_be_faster(dtype):
    """Of nam-long's backward and sepa's forward, which are not in the measured table."""
    cell = trace(cells.lstm)
    nam = holding_r("backward", cell, dtype, 24, 8, *WHOLE)[0]
    assert (nam.cluster, nam.groups) == (1, 3)
    sepa = holding_r("forward", cell, dtype, 128, 4000, *WHOLE, options=())[0]
    assert (sepa.cluster, sepa.tiles, sepa.tiles_in_flight) == (1, 1, 2)


@pytest.mark.parametrize("option", ["lengths", "reset"])
@pytest.mark.parametrize("loops", [1, 2])
def test_steps_are_compared_without_masks(option, loops):
    """Rows with lengths are of shorter sequences, and two loops were measured only without."""
    asked = "forward", trace(cells.lstm), "bfloat16", 256, 128, *WHOLE
    plain = plan.step_times(loop_of(*asked, options=()), loops)
    assert (plain is not None and plain.several > 1.5 * plain.alone) or loops == 1
    assert plan.step_times(loop_of(*asked, options=(option,)), loops) == plain


def test_a_slice_of_a_device_takes_more_rounds_of_clusters():
    """32 clusters of 8 blocks: a device of 132 multiprocessors holds 15, one of 16 holds one."""
    cell = trace(cells.lstm)
    config = ForwardConfig(256, 8, 4, 1, 1, 1, 16)

    def cycles(processors):
        limits = Limits.of((9, 0), processors)
        return cluster.step_cycles(cell, "bfloat16", config, 256, limits)

    rounds = cycles(16) / cycles(132)
    assert 5 < rounds < 12
    assert cycles(132) == cycles(None)


@compiles
def test_explain_says_what_products_of_float32_read(folder):
    for cell, half in ((cells.lstm, True), (cells.rnn_relu, False)):
        spec = cell.spec(64, 64)
        problem = Problem(spec, torch.float32, "cuda", (9, 0), grad=True, processors=132)
        forward, backward = Fused().describe(problem)
        assert ("products of float16" in forward) == half
        assert "products" not in backward


def test_where_every_try_spills_the_least_of_them_runs(monkeypatch):
    """Near the largest H only the compiler knows; what spills runs right, too."""
    cell, asked = trace(cells.rnn_tanh), []

    def binary(cell, dtype, config, arch, spin_limit):
        asked.append(config)
        spilled = 8 * config.register_fragments + (0 if config.low_register else 64) + config.stages
        return SimpleNamespace(resources=SimpleNamespace(spilled=spilled))

    monkeypatch.setattr(kernels, "binary", binary)
    monkeypatch.setattr(kernels, "_source_of", lambda *_: SimpleNamespace(path=Path(__file__)))
    every = list(kernels.fitting(loop_of("forward", cell, "bfloat16", 4320, 8, options=())))
    spilled = [made.resources.spilled for made, _ in every[:-1]]
    assert spilled == sorted(spilled)
    assert every[-1][1].stepwise
    assert {config for _, config in every} == set(asked)
    assert len(every) > 1


def test_one_that_spills_nothing_comes_before_all_that_spill(monkeypatch):
    loop = loop_of("forward", trace(cells.rnn_tanh), "bfloat16", 1024, 8, options=())
    (*_, last) = itertools.islice(plan.compilable_configs(loop), kernels.MAX_COMPILED)

    def binary(cell, dtype, config, arch, spin_limit):
        return SimpleNamespace(resources=SimpleNamespace(spilled=int(config != last)))

    monkeypatch.setattr(kernels, "binary", binary)
    monkeypatch.setattr(kernels, "_source_of", lambda *_: SimpleNamespace(path=Path(__file__)))
    assert kernels.best(loop)[1] == last


def test_a_low_register_kernel_comes_before_one_with_less_of_r_in_registers(monkeypatch):
    cell, shared, asked = trace(cells.lstm), Limits.of((9, 0)).shared, []

    def binary(cell, dtype, config, arch, spin_limit):
        asked.append(config)
        return SimpleNamespace(resources=SimpleNamespace(spilled=0 if config.low_register else 8))

    made_before = SimpleNamespace(path=Path(__file__))
    monkeypatch.setattr(kernels, "binary", binary)
    monkeypatch.setattr(kernels, "_source_of", lambda *asked: made_before)
    config = holding_r("forward", cell, "float32", 512, 8, *WHOLE)[0]
    _, found = kernels.unspilled(cell, "float32", config, "sm_90a", shared)
    assert asked == [config, found] == [config, replace(config, low_register=True)]


def test_what_is_refused():
    """No size is: where no kernel holds R, steps are launches."""

    def refused(hidden, capability=(9, 0), dtype=torch.bfloat16):
        spec = cells.lstm.spec(8, hidden)
        return Fused().refusals(Problem(spec, dtype, "cuda", capability, grad=True))

    assert not refused(640)
    assert not refused(1024)
    assert not refused(4096)
    assert not refused(512, (8, 6))
    assert "compute capability 7.5, needs 8.0" in refused(64, (7, 5))[0]
    assert "dtype float64" in refused(64, dtype=torch.float64)[0]
    ieee = Problem(cells.lstm.spec(8, 8, precision="ieee"), torch.float32, "cuda", (9, 0))
    assert "ieee precision" in Fused().refusals(ieee)[0]


WGMMA = {
    "forward": lambda n: ForwardConfig(128, 2, 8, 1, n, 1, 2, 2, True),
    "uneven": lambda n: ForwardConfig(88, 2, 8, 1, n, 1, 2, 2, True),
    "backward": lambda n: BackwardConfig(128, 2, 4, 8, n, 1, 2, 2, True),
    "grid-forward": lambda n: GridForwardConfig(128, 2, 4, 4, n, 1, 2, 2, True, clusters=4),
    "grid-backward": lambda n: GridBackwardConfig(
        128, 2, 8, 8, n, 1, 2, 2, True, clusters=2, k_warps=2
    ),
    "multicast-forward": lambda n: MulticastForwardConfig(
        128, 2, 16, 4, n, 2, 1, 2, True, clusters=4
    ),
    "multicast-backward": lambda n: MulticastBackwardConfig(
        256, 2, 16, 4, n, 4, 2, 2, True, clusters=8, buffers=2, k_parts=4
    ),
    "multicast-in-cluster": lambda n: MulticastBackwardConfig(
        128, 2, 16, 8, n, 4, 2, 2, True, clusters=2, buffers=2, k_parts=2, parts_in_cluster=True
    ),
}


def wgmma_combinations():
    """Each number of operands of several kinds, each kind with two or more, dtypes in turn."""
    counts = (2, 3, 4, 8), (3, 8), (2, 4), (3, 8), (2, 4), (3, 4), (2, 4), (3,)
    for i, (kind, some) in enumerate(zip(WGMMA, counts, strict=True)):
        for j, count in enumerate(some):
            dtypes = (
                DTYPES[:2] if kind in ("multicast-backward", "multicast-in-cluster") else DTYPES
            )
            yield dtypes[(i + j) % len(dtypes)], kind, count


@compiles
@pytest.mark.parametrize(("dtype", "kind", "count"), thinned(wgmma_combinations(), 3))
def test_four_warps_multiply_together(folder, dtype, kind, count):
    """Whatever the number of operands, H a multiple of 8 or not; the skeletons assert the rest.

    Every feature with the most operands of a kind, none with others: each compiles for seconds.
    """
    cell, config = trace(cells.gru), WGMMA[kind](count)
    last = {"padded": True} | ({"save": True} if config.kind == "forward" else {})
    most = max(other for _, of, other in wgmma_combinations() if of == kind)
    configs = [replace(config, **EVERYTHING, **last) if count == most else config]
    if config.kind == "forward" and dtype == "float32":
        halves = [replace(asked, half_operands=True) for asked in configs]
        configs = halves if isinstance(config, MulticastConfig) else configs + halves
    for asked in configs:
        registers = kernels.binary(cell, dtype, asked, "sm_90a").resources.registers
        # setmaxnreg shares out 512 * 128; with fewer at the start a launch would hang
        assert registers == 128 if isinstance(asked, MulticastConfig) else registers


@pytest.mark.parametrize("batch", [1, 128, 129, 300])
def test_the_flag_buffer_of_multicast_is_what_its_kernel_counts(batch):
    """`Exchange` of multicast_forward.cuh: 128 bytes for each counter, then h."""
    config = MulticastForwardConfig(1024, 2, 16, 4, 4, 4, 14, 2, True, clusters=32, buffers=2)
    (steps, rows, values), filled = config.flag_buffer(trace(cells.lstm), 40, batch)
    set_rows, halves = 32, 2
    sets = -(-batch // (4 * set_rows)) * 4
    assert (steps, values) == (1, 64)
    assert filled == sets * halves
    assert 128 * (rows - filled) == sets * 2 * 1024 * set_rows * 2


@pytest.mark.parametrize("batch", [1, 128, 129, 300])
def test_the_flag_buffer_of_backward_with_multicast_has_messages(batch):
    """`Exchange` of multicast_backward.cuh: counters, messages, then gate gradients."""
    config = MulticastBackwardConfig(1024, 2, 16, 4, 4, 2, 12, 2, True, clusters=32, k_parts=4)
    (_, rows, _), filled = config.flag_buffer(trace(cells.lstm), 40, batch)
    set_rows, blocks, own_units, senders, halves = 32, 64, 16, 3, 8  # of all parts of K
    sets = -(-batch // (2 * set_rows)) * 2
    messages = sets * 2 * blocks * senders * own_units * set_rows * 4
    assert 128 * filled == messages + 128 * sets * halves
    assert 128 * (rows - filled) == sets * 2 * 4 * 1024 * set_rows * 2
    # blocks of one cluster send messages through shared memory
    inside = replace(config, cluster=8, groups=16, clusters=8, parts_in_cluster=True)
    without = inside.flag_buffer(trace(cells.lstm), 40, batch)
    assert (without.shape[1], without.filled) == (rows - messages // 128, sets * halves)


@compiles
def test_tries_side_by_side_end_as_one_by_one(folder, monkeypatch):
    """On idle cores more is compiled than is wanted; from the cache nothing is."""
    cell, limits = trace(cells.lstm), Limits.of((9, 0))
    # more of R in registers than there are
    config = GridForwardConfig(1024, 2, 8, 8, 2, 1, 25, 2, clusters=16, save=True)
    asked = cell, "bfloat16", config, "sm_90a", limits.shared
    found, pools = [], []

    class Pool(ThreadPoolExecutor):
        def __init__(self, threads):
            pools.append(threads)
            super().__init__(threads)

    monkeypatch.setattr(kernels, "ThreadPoolExecutor", Pool)
    for cores in (1, 16):
        monkeypatch.setattr(kernels, "usable_cores", lambda cores=cores: cores)
        for file in folder.glob("*"):
            file.unlink()
        kernels.binary.cache_clear()
        made, tried = kernels.unspilled(*asked)
        found.append((made.resources, tried))
        assert len(list(folder.glob("*"))) >= 2  # what spilled, and what did not
    assert found[0] == found[1]
    assert pools == [kernels.AT_ONCE]
    kernels.binary.cache_clear()
    again, same = kernels.unspilled(*asked)
    assert (again.code, same) == (made.code, tried)
    assert pools == [kernels.AT_ONCE]


@pytest.mark.slow
@compiles
def test_threads_do_not_race_for_the_compiler_s_import():
    """In a process whose first kernel is compiled among others."""
    words = """
import pathlib, tempfile
from openrnn import cells, store
from openrnn.backends.fused import kernels
from openrnn.codegen.config import GridForwardConfig
from openrnn.codegen.trace import trace
with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
    store.folder = lambda: pathlib.Path(place)
    kernels.usable_cores = lambda: 32
    # the first try spills
    config = GridForwardConfig(1024, 2, 8, 8, 2, 1, 25, 2, clusters=16, save=True)
    asked = trace(cells.lstm), "bfloat16", config, "sm_90a", 232448
    assert kernels.unspilled(*asked, at_once=6)
"""
    done = subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@compiles
def test_binaries_are_kept_and_damaged_ones_made_anew(folder):
    cell, config = trace(cells.rnn_tanh), ForwardConfig(8, 1, 1, 1, 1, 1, 1)
    made = kernels.binary(cell, "bfloat16", config, "sm_90")
    path = kernels._source_of(cell, "bfloat16", config, "sm_90", 0).path
    assert path.parent == folder
    content, written = path.read_bytes(), path.stat().st_ino
    kernels.binary.cache_clear()
    assert kernels.binary(cell, "bfloat16", config, "sm_90").code == made.code
    assert path.stat().st_ino == written
    path.write_bytes(content[:90] + b"x" + content[91:])  # test_cache.py has other damages
    kernels.binary.cache_clear()
    again = kernels.binary(cell, "bfloat16", config, "sm_90")
    assert again.code == made.code
    assert again.resources == made.resources
    assert path.read_bytes() == content
    kinds = ("bfloat16", "sm_90"), ("float16", "sm_90"), ("bfloat16", "sm_80")
    for dtype, arch in kinds:
        kernels.binary(cell, dtype, config, arch)
    # a compilation that an earlier test began may end here and leave its file, too
    kept = {kernels._source_of(cell, dtype, config, arch, 0).path for dtype, arch in kinds}
    assert len(kept) == 3
    assert all(path.is_file() for path in kept)


@compiles
def test_a_folder_that_cannot_be_written_costs_only_time(folder):
    source = 'extern "C" __global__ void k() {}'
    folder.write_bytes(b"a file where the folder should be")
    assert nvrtc.binary(nvrtc.KernelSource(source, "k", "sm_90", "title")).code


@compiles
def test_an_error_shows_cell_options_and_log():
    with pytest.raises(nvrtc.CompileError, match=r"(?s)my kernel .*sm_90.*c\+\+17.*nonsense"):
        nvrtc.binary(nvrtc.KernelSource("nonsense", "k", "sm_90", "my kernel"))


def test_what_only_a_sigmoid_reads_is_halved_in_16_bits():
    """Not where an output, another operation or a sum with something else reads it, too."""
    lstm = trace(cells.lstm)
    assert (
        cuda.halved_gates(lstm, "bfloat16") == cuda.halved_gates(lstm, "float16") == {"i", "f", "o"}
    )
    assert not cuda.halved_gates(lstm, "float32")
    assert not cuda.halved_gates(trace(cells.peephole_lstm), "float16")
    assert cuda.halved_gates(trace(cells.gru), "bfloat16") == {"r", "z"}

    @cells.cell(states=("h", "m"), gates=("a", "b", "n", "o"))
    def mixed(x, r, s):
        a, b, o = sigmoid(x.a + r.a), x.b + r.b, x.o + r.o
        return a * sigmoid(b) * tanh(b) * sigmoid(x.n + r.n) * sigmoid(o), o

    assert cuda.halved_gates(trace(mixed), "bfloat16") == {"a", "n"}
    source = cuda.source(trace(mixed), "bfloat16", ForwardConfig(16, 1, 2, 1, 1, 1, 0, save=True))
    assert "#define SCALED 5\n" in source
    assert "const float half_2 = r[2];" in source
    assert "saved[2] = half_2;" in source
    assert "logistic(a_1)" in source
    # a grid and wgmma halve in the step; every backward has halves
    grid = GridForwardConfig(1024, 2, 8, 8, 2, 1, 20, clusters=16, save=True)
    for config in (grid, WGMMA["forward"](2)):
        source = cuda.source(lstm, "float16", config)
        assert "#define SCALED 0\n" in source
        assert "const float half_0 = 0.5f * r[0];" in source
    for config in (WGMMA["backward"](2), WGMMA["grid-backward"](2)):
        assert "const float half_0 = saved[0];" in cuda.source(lstm, "float16", config)


@compiles
def test_what_is_compiled_first(folder):
    """With all flags; padded where H is no multiple of 8."""
    gru = trace(cells.gru)
    for kind in ("forward", "backward"):
        _, config = kernels.best(loop_of(kind, gru, "bfloat16", 63, 8, options=("reset",)))
        assert (config.units, config.padded, config.reset) == (64, True, True)


def test_forward_whose_r_overflows_is_low_register_in_16_bits():
    """Where nothing was measured; not with wgmma, and not in grids; multicast always is."""
    cell = trace(cells.lstm)

    def low_register(dtype, hidden):
        found = holding_r("forward", cell, dtype, hidden, 64, (9, 0), 114)
        return {
            (one.register_fragments < one.fragments(cell, dtype), one.wgmma, one.clusters > 1)
            for one in found if one.low_register and not isinstance(one, MulticastConfig)
        }  # fmt: skip

    assert low_register("bfloat16", 512) == {(True, False, False)}
    assert low_register("float32", 512) == set()
    backward = holding_r("backward", cell, "bfloat16", 512, 64, (9, 0), 114)
    assert not any(one.low_register for one in backward if not isinstance(one, MulticastConfig))


def test_the_source_has_numbers_for_names():
    source = codegen.show(cells.lstm, "cuda", dtype="float16", full=True, quiet=True)
    assert "// gates 0 i, 1 f, 2 g, 3 o; states 0 h, 1 c" in source
    assert "const float sigmoid_1 = logistic_of_half(half_1);" in source
    assert "after[1] = add_v1;" in source
    assert "#include" not in source


def test_planes_of_each_side_lie_together():
    """GRU's new gate has two gradients, the others one: left sides first, right sides last."""
    assert cuda.planes(trace(cells.gru)) == ("dx_n", "da_r", "da_z", "dr_n")
    assert cuda.planes(trace(cells.lstm)) == ("da_i", "da_f", "da_g", "da_o")
    assert saved_names(trace(cells.gru)) == ("a_r", "a_z", "x_n", "r_n", "s_h")
    assert saved_values(trace(cells.gru)) == 5


@compiles
def test_kernels_can_be_compiled_ahead(folder):
    """Nothing is left to compile for a call of those batch sizes: both ways, weights, biases."""
    layer = openrnn.RNN(3, 16)
    assert openrnn.compile_kernels(layer, batches=(1, 8), grad=False, capability=(9, 0)) == 4
    # one copies rows, one fills flags, one pads W_ih
    assert len(list(folder.glob("*.cubin"))) == 4
    assert openrnn.compile_kernels(layer, batches=(1, 8), capability=(9, 0)) == 8
    # with a forward kernel that keeps, and one that does not
    assert len(list(folder.glob("*.cubin"))) == 9
    begins = {"reset": True, "reset_state": True, "capability": (9, 0)}
    # two of them backward's
    assert openrnn.compile_kernels(layer, batches=(1,), **begins) == 9
    assert openrnn.compile_kernels(layer, batches=(1,), grad=False, **begins) == 4
    with pytest.raises(ValueError, match="reset_state=True without reset=True"):
        openrnn.compile_kernels(layer, reset_state=True, capability=(9, 0))


@compiles
def test_kernels_of_single_steps_are_compiled_ahead(folder, monkeypatch):
    """GEMMs multiply for the larger batch, whose backward is a loop; layers read as many inputs."""
    asked = []
    step = kernels.step_binary
    monkeypatch.setattr(kernels, "step_binary", lambda *of: asked.append(of[2].kind) or step(*of))
    layer = openrnn.RNN(64, 64, num_layers=2)
    count = openrnn.compile_kernels(layer, batches=(1, 16384), grad=False, capability=(9, 0))
    assert asked == ["step_forward", "step_cell"]
    assert count == len([*folder.iterdir()])
    openrnn.compile_kernels(layer, batches=(1, 16384), capability=(9, 0))
    assert asked[2:] == ["step_forward", "step_backward", "step_cell"]


@compiles
def test_steps_from_given_states_and_from_zeros_are_compiled_ahead(folder, monkeypatch):
    """Here blocks multiply x and h, and a GEMM x alone."""
    asked = []
    step = kernels.step_binary
    monkeypatch.setattr(kernels, "step_binary", lambda *of: asked.append(of[2].kind) or step(*of))
    layer = openrnn.LSTM(512, 512, dtype=torch.bfloat16)
    problem = Problem(layer.spec, torch.bfloat16, "cuda", (9, 0), False)
    ahead.compiled(problem, [256], False)
    assert asked == ["step_forward", "step_cell"]
    asked.clear()
    ahead.compiled(dataclasses.replace(problem, reset=True), [256], True)
    assert asked == ["step_forward"]
