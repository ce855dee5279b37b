"""Loops of which no kernel holds R: which they are, what is compiled, launches and products."""

from types import SimpleNamespace

import pytest
import torch
from loops import loop_of

from openrnn import cells, memo
from openrnn.backends.fused import kernels, stepwise
from openrnn.backends.fused.layer import LayerKernels
from openrnn.codegen.config import KernelConfig
from openrnn.codegen.trace import trace
from openrnn.dispatch import BACKENDS
from openrnn.kernels.cuda.args import LOOPS
from openrnn.memory import allocator_for
from openrnn.native import nvrtc, recording
from openrnn.native.recording import NotRepeatableError
from openrnn.spec import Problem
from openrnn.tuning import plan
from openrnn.tuning import stepwise as model

ABSENT = nvrtc.absent()
MASKS = "lengths", "reset", "all_states", "reset_state"
STEPS, BATCH, HIDDEN = 5, 3, 37


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_every_size_has_a_kernel_and_one_that_holds_r_comes_first(kind, capability):
    cell = trace(cells.lstm)
    for hidden in (64, 4096, 20000):
        loop = loop_of(kind, cell, "bfloat16", hidden, 8, capability, options=())
        held = [*plan.compilable_configs(loop)]
        assert [one.stepwise for one in held] == [False] * (len(held) - 1) + [True]
        streams = hidden == 4096 and capability == (9, 0)  # a part of R, see test_streamed.py
        assert (len(held) > 1) == (hidden == 64 or streams)
    # and none of which a device could hold two at once, or that runs several layers
    loop = loop_of(kind, cell, "bfloat16", 4096, 8, capability, options=())
    for more in ({"loops": 2}, {"layers": 3}):
        assert not [*plan.compilable_configs(loop, **more)]


@pytest.mark.skipif(ABSENT is not None, reason=f"cannot compile: {ABSENT}")
@pytest.mark.parametrize("flags", [(), MASKS], ids=["plain", "masks"])
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)], ids=str)
def test_they_compile_without_spills(capability, dtype, kind, flags):
    """The last of the ranking is taken where the others hold too much."""
    for cell, hidden in ((cells.slstm, 4096), (cells.peephole_lstm, 4001)):
        saves = ("save",) if flags and kind == "forward" else ()
        units = hidden + 12000 * (capability == (9, 0))  # else a grid streams a part of R
        loop = loop_of(kind, trace(cell), dtype, units, 72, capability, options=flags + saves)
        made, config = kernels.best(loop)
        assert config.stepwise
        assert not made.resources.spilled


def test_a_device_that_holds_no_other_kernel_takes_it(fake_device):
    """As where a slice has fewer multiprocessors than its driver says: nothing is refused."""
    tried = fake_device("a slice", lambda config: 9 if config.stepwise else 0)
    loop = loop_of("forward", trace(cells.lstm), "bfloat16", 512, 32, processors=132, options=())
    with pytest.warns(RuntimeWarning, match="a slice holds the blocks of no planned forward"):
        _, config = kernels.kernel(loop, 0)
    assert config.stepwise
    assert len(tried) == kernels.MAX_COMPILED + 1


class Watched:
    """What a loop launches and multiplies, in its order."""

    def __init__(self, kind: str) -> None:
        self.kind, self.happened = kind, []

    def launch(self, blocks, words, launch_event=0):
        names = [field.name for field in LOOPS[self.kind].fields]
        given = dict(zip(names, words))
        self.happened.append(("launch", blocks, given["step"], launch_event))
        self.words = given

    def run(self, a, b, d, add=False):
        self.happened.append(("product", a, b, d))


@pytest.fixture
def watched(monkeypatch):
    """A loop on memory of the CPU, and the words of a call."""

    def made(kind, direction, cell=cells.lstm):
        memo.clear()
        spec = cell.spec(8, HIDDEN, bidirectional=True)
        layer = LayerKernels(spec, direction, torch.bfloat16, 0)
        seen = Watched(kind)
        on_cpu = lambda dtype, _: allocator_for(dtype, torch.device("cpu"))  # noqa: E731
        monkeypatch.setattr(stepwise, "allocator_for", on_cpu)
        monkeypatch.setattr(stepwise.products, "input_product", lambda *_, **__: seen)
        monkeypatch.setattr(stepwise.products, "hidden_gradient", lambda *_: seen)
        config = model.config(kind, layer.units, BATCH)
        loop = stepwise.StepwiseLoop(layer, BATCH, seen, config)
        fields = LOOPS[kind].fields
        words = [0] * sum(1 + field.array for field in fields)

        def put(**values):
            for name, value in values.items():
                words[LOOPS[kind].word_index(name)] = value

        put(steps=STEPS, weight=1 << 40, reverse=direction)
        return loop, words, put, seen

    yield made
    memo.clear()


@pytest.mark.parametrize("direction", [0, 1])
def test_forward_begins_then_multiplies_before_each_launch(watched, direction):
    loop, words, _, seen = watched("forward", direction)
    loop.launch(words, 77)
    blocks = 5  # of 8 units, all rows in one tile
    launches = [one for one in seen.happened if one[0] == "launch"]
    assert launches == [
        ("launch", blocks, step, 77 if step < 0 else 0) for step in range(-1, STEPS)
    ]
    assert [one[0] for one in seen.happened] == ["launch", *["product", "launch"] * STEPS]
    h, weight, products = seen.happened[1][1:]
    assert weight == 1 << 40
    assert (h, products) == (seen.words["h"], seen.words["products"])
    assert seen.words["carried"] not in (0, h, products)


@pytest.mark.parametrize("direction", [0, 1])
def test_backward_multiplies_the_recurrent_side_of_each_step(watched, direction):
    """Of a GRU, whose sides differ: the gradients of the last G gates of each step's planes."""
    loop, words, put, seen = watched("backward", direction, cells.gru)
    layer = loop.layer
    step_bytes = BATCH * layer.width * 2
    way = 1 if direction else -1
    put(d_gates=1 << 30, d_gates_step_bytes=way * step_bytes)
    loop.launch(words, 77)
    launches = [one for one in seen.happened if one[0] == "launch"]
    assert [one[2] for one in launches] == [*range(STEPS + 1)]
    assert [one[3] for one in launches] == [77] + [0] * STEPS
    kinds = [one[0] for one in seen.happened]
    assert kinds == [*["launch", "product"] * STEPS, "launch"]
    order = range(STEPS) if direction else reversed(range(STEPS))
    right = (layer.width - 3 * layer.units) * 2
    assert right > 0
    addresses = [one[1] for one in seen.happened if one[0] == "product"]
    assert addresses == [(1 << 30) + time * step_bytes + right for time in order]


def test_blocks_have_as_many_warps_as_there_are_tiles_of_rows():
    small, large = (model.config("forward", 4096, batch) for batch in (8, 1000))
    assert (small.warps, small.blocks(8)) == (1, 512)
    assert (large.warps, large.blocks(1000)) == (8, 512 * 16)
    assert [model.config("forward", 64, batch).warps for batch in (9, 17, 33)] == [2, 4, 8]
    assert large.sum_parts(1000) == 16
    assert not KernelConfig.stepwise


@pytest.mark.skipif(ABSENT is not None, reason=f"cannot compile: {ABSENT}")
def test_explain_says_why():
    """One that no kernel holds; and a large batch, which a grid takes 8 rows after the others."""
    for hidden, dtype, batch, why in (
        (16384, torch.bfloat16, 1, "us a step by the model; no kernel holds R"),
        (2304, torch.bfloat16, 200, " with a kernel that holds a part of R"),
        (1024, torch.float32, 512, " with a kernel that holds R"),
    ):
        problem = Problem(
            cells.lstm.spec(8, hidden), dtype, "cuda", (9, 0), grad=True, processors=132,
            precision="tf32", steps=9, batch=batch,
        )  # fmt: skip
        line = BACKENDS["fused"].describe(problem)[-1]
        assert line.startswith("backward: each step a GEMM and a launch of ")
        assert line.endswith(why)


@pytest.mark.parametrize(("batch", "first"), [(32, False), (2048, False), (4096, True)])
def test_large_batches_take_it_on_a_device_that_the_model_knows(batch, first):
    cell = trace(cells.lstm)
    for capability, processors, here in (((9, 0), 132, first), ((8, 0), 108, False)):
        loop = loop_of("backward", cell, "float32", 512, batch, capability, processors)
        ranked = plan.ranked(loop)
        assert ranked[0].stepwise == here
        assert sum(one.stepwise for one in ranked) == 1


@pytest.mark.parametrize("spilled", [8, 0])
def test_a_kernel_that_spills_comes_before_it(monkeypatch, spilled):
    """It holds R still: near the largest H some registers of every kernel lie in memory."""

    def binary(cell, dtype, config, arch, spin_limit=0):
        bytes_ = 0 if config.stepwise else spilled
        return SimpleNamespace(resources=nvrtc.Resources(32, bytes_))

    monkeypatch.setattr(kernels, "binary", binary)
    loop = loop_of("backward", trace(cells.lstm), "bfloat16", 512, 32, options=("reset",))
    found = [config for _, config in kernels.fitting(loop)]
    assert [one.stepwise for one in found] == [False] * (len(found) - 1) + [True]
    assert len(found) > kernels.MAX_COMPILED


def test_a_wavefront_that_was_asked_for_is_refused_with_the_reason(monkeypatch):
    made = SimpleNamespace(resources=nvrtc.Resources(32, 0))
    monkeypatch.setattr(kernels, "binary", lambda *_: made)
    problem = Problem(
        cells.lstm.spec(9216, 9216, num_layers=3, wavefront=16), torch.bfloat16, "cuda", (9, 0),
        processors=132, steps=64, batch=8,
    )  # fmt: skip
    line = BACKENDS["fused"].describe(problem)[-1]
    assert line.endswith("in spite of wavefront=16: each step is a GEMM and a launch")


def test_long_calls_have_no_program():
    """That of 4,096 steps, of two operations each, is the longest."""
    with recording.recorded() as here:
        for _ in range(recording.MAX_OPERATIONS):
            here.launch(None, 1, (), 0)
        with pytest.raises(NotRepeatableError, match="more than 8192 operations"):
            here.multiply(None, 0, 0, 0, False)


def test_gates_of_which_columns_are_no_multiple_of_8_are_not_by_gemms_for_speed():
    """Forward's product is then one for each gate; and lengths end loops that hold R early."""
    asked = trace(cells.gru), "bfloat16"
    for kind, hidden, flags, first in (
        ("forward", 2560, (), True), ("forward", 2551, (), False),
        ("forward", 2560, ("lengths",), False), ("backward", 1024, (), False),
    ):  # fmt: skip
        loop = loop_of(kind, *asked, hidden, 64, (9, 0), 132, options=flags)
        assert plan.ranked(loop)[0].stepwise == first


def test_kernels_that_tests_replace_are_those_of_a_ranking(monkeypatch):
    """`holding_r`: GPU tests and the sanitizer's cases replace it."""
    for kind in ("forward", "backward"):
        loop = loop_of(kind, trace(cells.lstm), "bfloat16", 64, 16, (9, 0), 132)
        assert not plan.ranked(loop)[0].stepwise
        assert plan.ranked(loop, layers=3)
        with monkeypatch.context() as patch:
            patch.setattr(plan, "holding_r", lambda *_: ())
            assert [one.stepwise for one in plan.ranked(loop)] == [True]
            assert not plan.ranked(loop, loops=2)
            assert not plan.ranked(loop, layers=3)
