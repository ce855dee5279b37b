"""Grids that read a part of R from memory in each step: which they are, compiled, launched."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from loops import loop_of

from openrnn import cells
from openrnn.backends.fused import kernels
from openrnn.codegen.config import GridBackwardConfig, GridForwardConfig
from openrnn.codegen.tiles import whole_tiles
from openrnn.codegen.trace import trace
from openrnn.dispatch import BACKENDS
from openrnn.kernels.cuda.args import LOOPS
from openrnn.memory import allocator_for
from openrnn.native import nvrtc
from openrnn.spec import Problem
from openrnn.tuning import grid, plan, stepwise
from openrnn.tuning.limits import Limits

ABSENT = nvrtc.absent()
KINDS = "forward", "backward"
H200 = (9, 0), 132
LIMITS = Limits.of(*H200)
GRIDS = {"forward": GridForwardConfig, "backward": GridBackwardConfig}


def ranked(kind, cell, hidden, batch, dtype="float16", device=H200, options=(), loops=1):
    loop = loop_of(kind, trace(cell), dtype, hidden, batch, *device, options=options)
    return plan.ranked(loop, loops)


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_planned_where_no_kernel_holds_r(kind):
    held, beyond = ranked(kind, cells.gru, 2304, 8), ranked(kind, cells.gru, 2816, 8)
    assert not any(one.streamed_fragments for one in held)
    assert [one.streamed_fragments > 0 for one in beyond] == [True] * (len(beyond) - 1) + [False]
    assert beyond[-1].stepwise


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", [((9, 0), 114), ((9, 0), 60), ((8, 0), 108), ((10, 0), 148)])
def test_elsewhere_and_for_several_loops_there_are_none(kind, device):
    """They were measured on whole H200s, one loop at a time."""
    found = ranked(kind, cells.gru, 4096, 8, device=device)
    assert not any(one.streamed_fragments for one in found)
    found = ranked(kind, cells.gru, 2816, 8, loops=2)
    assert not any(one.streamed_fragments for one in found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", [2816, 2817])
def test_large_batches_are_stepwise(kind, hidden):
    """Also where H is no multiple of 8; the quicker one is first, by both models."""
    cell = trace(cells.gru)
    for batch in (8, 16, 32, 64, 256):
        first, *rest = ranked(kind, cells.gru, hidden, batch)
        by_gemms = stepwise.step_us(kind, cell, "float16", whole_tiles(hidden), batch)
        other = next(one for one in (first, *rest) if not one.stepwise)
        streams = plan.microseconds_of(cell, "float16", other, batch, LIMITS)
        assert first.stepwise == (by_gemms < streams)
    assert ranked(kind, cells.gru, hidden, 8)[0].streamed_fragments
    assert ranked(kind, cells.gru, hidden, 256)[0].stepwise


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_fragment_is_somewhere(kind, dtype):
    cell = trace(cells.lstm)
    found = [*grid.fitting(GRIDS[kind], cell, dtype, 2560, LIMITS)]
    assert found
    for one in found:
        kinds = one.register_fragments, one.streamed_fragments, one.shared_fragments(cell, dtype)
        assert sum(kinds) == one.fragments(cell, dtype)
        assert min(kinds) >= 0 < one.streamed_fragments
        with_resets = replace(one, reset=True)
        assert with_resets.shared(cell, dtype) <= LIMITS.shared
        # shared memory holds no more of them
        fewer = replace(with_resets, streamed_fragments=one.streamed_fragments - 1)
        assert fewer.shared(cell, dtype) > LIMITS.shared


def test_fewer_fragments_in_registers_are_more_from_memory():
    config = GridForwardConfig(1024, 2, 8, 8, 1, 1, 20, clusters=16, streamed_fragments=7)
    assert config.with_registers(18) == replace(config, register_fragments=18, streamed_fragments=9)
    assert config.with_registers(30).streamed_fragments == 0
    assert config.streamed_bytes(32) == 32 * 8 * 7 * 1024
    held = replace(config, streamed_fragments=0)
    assert held.with_registers(18) == replace(held, register_fragments=18)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [("reset",), ("lengths", "reset", "reset_state")], ids=str)
def test_the_first_of_a_ranking_is_compiled_with_resets_too(kind, options):
    """Resets take shared memory: no fragment may have its place."""
    for cell, dtype in ((cells.lstm, "float16"), (cells.gru, "float32")):
        for hidden in (2560, 2816, 3200, 3584):
            for tiles in (1, 2, 4):
                asked = trace(cell), dtype, hidden, 8 * tiles, *H200
                loop = loop_of(kind, *asked, options=options)
                first = plan.ranked(loop)[0]
                made = next(plan.compilable_configs(loop))
                assert made == plan.first_try(hidden, first, options)


@pytest.mark.parametrize("kind", KINDS)
def test_with_lengths_a_stepwise_loop_must_take_half_of_the_time(kind):
    cell, stepwise_first = trace(cells.gru), []
    for batch in range(8, 400, 8):
        first, *rest = ranked(kind, cells.gru, 2816, batch, options=("lengths",))
        other = next(one for one in (first, *rest) if not one.stepwise)
        by_gemms = stepwise.step_us(kind, cell, "float16", 2816, batch)
        streams = plan.microseconds_of(cell, "float16", other, batch, LIMITS)
        assert first.stepwise == (by_gemms < streams / 2)
        stepwise_first.append(first.stepwise)
    assert {*stepwise_first} == {False, True}


@pytest.mark.skipif(ABSENT is not None, reason=f"cannot compile: {ABSENT}")
@pytest.mark.parametrize("options", [(), ("lengths", "reset")], ids=["plain", "masks"])
@pytest.mark.parametrize(
    ("cell", "hidden", "dtype", "batch"),
    [(cells.gru, 2816, "float16", 32), (cells.lstm, 2301, "bfloat16", 8),
     (cells.lstm, 4096, "float32", 16)],
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_they_compile_with_few_spills(kind, cell, hidden, dtype, batch, options):
    cell = trace(cell)
    option_names = options + (("save",) if kind == "forward" else ())
    made, config = kernels.best(loop_of(kind, cell, dtype, hidden, batch, options=option_names))
    by_gemms = (kind, dtype, options) == ("backward", "float32", ())  # that is quicker there
    assert (config.stepwise, config.streamed_fragments > 0) == (by_gemms, not by_gemms)
    assert made.resources.spilled <= (0 if by_gemms else 32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_launch_gives_memory_for_them(monkeypatch, kind):
    """For the blocks that run at the same time; the launches for further rows use it again."""
    on_cpu = lambda dtype, _: allocator_for(dtype, torch.device("cpu"))  # noqa: E731
    monkeypatch.setattr(kernels, "allocator_for", on_cpu)
    sizes, empty = [], torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda of: sizes.append(of.shape) or empty(of))
    config = GRIDS[kind](1024, 2, 8, 8, 1, 1, 20, clusters=4, streamed_fragments=7)
    given = []

    def launch(clusters, words, event):
        names = [field.name for field in LOOPS[kind].fields]
        given.append((clusters, *(words[names.index(name)] for name in ("first_row", "streamed"))))

    kernel = SimpleNamespace(max_clusters=9, device=0, launch=launch)
    kernels.launch(kernel, config, [0] * len(LOOPS[kind].fields), 40)
    assert sizes == [(2 * 4 * 2 * 8 * 7 * 1024,)]
    memory = {one[2] for one in given}
    assert [one[:2] for one in given] == [(8, 0), (8, 16), (4, 32)]
    assert len(memory) == 1
    assert 0 not in memory
    kernels.launch(kernel, replace(config, streamed_fragments=0), [0] * 60, 40)
    assert len(sizes) == 1
    assert given[-1][2] == 0


@pytest.mark.skipif(ABSENT is not None, reason=f"cannot compile: {ABSENT}")
def test_explain_says_how_much():
    problem = Problem(
        cells.gru.spec(8, 2816), torch.float16, "cuda", *H200[:1], grad=True, processors=132,
        steps=9, batch=8,
    )  # fmt: skip
    forward, backward = BACKENDS["fused"].describe(problem)[-2:]
    for kind, line in (("forward", forward), ("backward", backward)):
        _, config = kernels.best(loop_of(kind, trace(cells.gru), "float16", 2816, 8, *H200))
        share = config.streamed_fragments / config.fragments(trace(cells.gru), "float16")
        assert 0.2 < share < 0.4
        assert f", {share:.0%} of R read from memory in each step" in line
