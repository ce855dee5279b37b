"""Which of fused and cuDNN `auto` takes on a CUDA device, by values alone."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from loops import holding_r, loop_of

from openrnn import cells, dispatch
from openrnn.backends.fused import ahead, kernels
from openrnn.backends.fused import describe as described
from openrnn.codegen.trace import trace
from openrnn.native import nvrtc
from openrnn.spec import Problem
from openrnn.tuning import choice, plan

HOPPER = (9, 0)


@pytest.fixture(autouse=True)
def present(monkeypatch):
    """All backends as on a machine that has what they need."""
    for backend in dispatch.BACKENDS.values():
        monkeypatch.setattr(backend, "absent", lambda: None)
    dispatch._absent.cache_clear()
    dispatch.select.cache_clear()
    yield
    monkeypatch.undo()
    dispatch._absent.cache_clear()
    dispatch.select.cache_clear()


def problem(cell="lstm", dtype=torch.float32, hidden=64, batch=16, grad=False, **more):
    options = {key: more.pop(key) for key in ("bias_mode", "num_layers") if key in more}
    spec = getattr(cells, cell).spec(hidden, hidden, **options)
    return Problem(spec, dtype, "cuda", HOPPER, grad=grad, batch=batch, **more)


@pytest.mark.parametrize(
    ("asked", "runs"),
    [
        (problem(), "fused"),
        (problem(batch=256), "fused"),
        (problem("gru"), "fused"),
        (problem("lstm", torch.bfloat16, 1024, 256), "fused"),
        (problem("lstm", torch.float16, 1024, 256, grad=True), "fused"),
        (problem("gru", torch.float16, 1024, 256, grad=True), "fused"),
        (problem("rnn_relu", torch.float16, 2560, 128, grad=True), "cudnn"),
        (problem("rnn_relu", torch.float16, 2560, 128), "fused"),
        (problem("lstm", torch.bfloat16, 1024, 128, grad=True), "fused"),
        (problem(hidden=128, batch=1), "fused"),
        (problem(hidden=256, batch=1), "fused"),
        (problem("gru", hidden=256, batch=1), "fused"),
        (problem("gru", hidden=512, batch=1), "fused"),
        (problem("gru", hidden=512, batch=1, grad=True), "fused"),
        (problem(hidden=256, batch=2), "fused"),
        (problem(hidden=256, batch=1, grad=True), "fused"),
        (problem(hidden=512, batch=1, grad=True), "fused"),
        (problem(hidden=512, batch=1, dtype=torch.bfloat16), "fused"),
        (problem("gru", hidden=512, batch=256), "fused"),
        (problem("gru", hidden=512, batch=256, grad=True), "fused"),
        (problem("gru", hidden=512, batch=64), "fused"),
        (problem("gru", torch.float16, 512, 1), "fused"),
        (problem("gru", torch.float16, 640, 1), "fused"),
        (problem("lstm", torch.float16, 640, 1), "fused"),
        (problem("rnn_tanh", hidden=256, batch=1), "fused"),
        (problem("rnn_tanh", hidden=512, batch=1), "fused"),
        (problem("rnn_relu", hidden=256, batch=1), "fused"),
    ],
    ids=str,
)
def test_the_faster_one_runs(asked, runs):
    assert dispatch.select(asked) == runs
    assert dispatch.select(asked, "fused") == "fused"


SLOW = problem("rnn_relu", torch.float16, 2560, 128, grad=True)


def test_the_reason_is_told():
    fused = next(row for row in dispatch.explain(SLOW).rows if row.backend == "fused")
    wanted = "cudnn is measured faster here: H 2304 to 2560, B 65 to 128, float16, with gradients"
    assert fused.verdict == wanted
    assert not fused.reasons


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_the_largest_lstm_is_the_one_in_the_documentation(grad):
    """docs/kernels.md, "Limits": by steps of 8 units, with loops with multicast for 2048 alone."""
    sizes, cell = [*range(1984, 2136, 8)], trace(cells.lstm)

    def held(kind, hidden):
        loop = loop_of(kind, cell, "bfloat16", hidden, 16, (9, 0), 132, options=())
        config = next(plan.compilable_configs(loop))
        return not config.reads_r

    kinds = ("forward", "backward") if grad else ("forward",)
    fits = [h for h in sizes if all(held(kind, h) for kind in kinds)]
    assert fits == [h for h in sizes if h <= (2016 if grad else 2112) or h == 2048]


@pytest.mark.parametrize("changes", [{}, {"lengths": True}], ids=str)
def test_what_was_not_compared_is_cudnns_and_said_to_be(changes):
    """An LSTM of 2048 units trains by our kernels up to B 128."""
    asked = problem("lstm", torch.bfloat16, 2048, 256, grad=True, processors=132)
    asked = replace(asked, spec=asked.spec.with_(num_layers=2), **changes)
    assert dispatch.select(asked) == "cudnn"
    assert "cudnn runs here, which was not compared: H 2041 to 2048" in str(dispatch.explain(asked))
    for other in ({"batch": 128}, {"grad": False}, {"reset": True}):
        assert dispatch.select(replace(asked, **other)) == "fused"


@pytest.mark.parametrize(
    "changes",
    [{"reset": True}, {"lengths": True}, {"return_states": True}, {"batch": None},
     {"spec": SLOW.spec.with_(bias_mode="input")}],
    ids=str,
)  # fmt: skip
def test_where_cudnn_cannot_or_was_not_measured_ours_runs(changes):
    assert dispatch.select(replace(SLOW, **changes)) == "fused"


def test_without_cudnn_ours_runs(monkeypatch):
    monkeypatch.setattr(dispatch.BACKENDS["cudnn"], "absent", lambda: "no libcudnn")
    dispatch._absent.cache_clear()
    assert dispatch.select(SLOW) == "fused"


def test_steps_never_decide():
    for cell, hidden, batch in itertools.product(("lstm", "gru"), (64, 256, 512), (1, 64, 256)):
        asked = problem(cell, hidden=hidden, batch=batch)
        assert len({dispatch.select(replace(asked, steps=t)) for t in (None, 1, 256, 9999)}) == 1


@pytest.mark.parametrize(
    "other",
    [{"capability": (8, 0)}, {"capability": (12, 0)}, {"lengths": True}],
    ids=str,
)
def test_nothing_is_said_of_what_was_not_measured(other):
    assert choice.slower(SLOW)
    assert choice.slower(replace(SLOW, **other)) is None
    stack = problem("rnn_relu", torch.float16, 2560, 128, grad=True, num_layers=2)
    assert choice.slower(stack) is None


def test_fewer_multiprocessors_hold_less():
    """Of what a whole device holds, a slice does not, and its steps by GEMMs were not compared."""
    whole = problem("lstm", torch.bfloat16, hidden=2048)
    assert dispatch.select(replace(whole, processors=132)) == "fused"
    slice_ = replace(whole, processors=60)
    assert dispatch.select(slice_) == "cudnn"
    assert "not compared: no kernel holds hidden_size 2048 in forward" in str(
        dispatch.explain(slice_)
    )
    assert dispatch.select(replace(slice_, reset=True)) == "fused"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sizes_that_no_kernel_holds_are_cudnns_where_they_were_not_measured(dtype):
    """Ours on an H100 and H200; elsewhere, of a cell or a call that cuDNN does not take."""
    whole = problem("lstm", dtype, 4096, grad=True, processors=132)
    assert dispatch.select(whole) == "fused"
    other = replace(whole, capability=(8, 9), processors=128)
    assert dispatch.select(other) == "cudnn"
    assert "in forward and backward" in str(dispatch.explain(other))
    assert dispatch.select(replace(other, reset=True)) == "fused"
    assert dispatch.select(replace(other, spec=cells.peephole_lstm.spec(8, 4096))) == "fused"


def test_what_is_described_is_planned_for_the_multiprocessors_there(monkeypatch):
    asked = []
    monkeypatch.setattr(kernels, "best", lambda loop, **_: asked.append(loop))
    described.describe(replace(problem("lstm", torch.bfloat16, hidden=2048), processors=60))
    assert {loop.processors for loop in asked} == {60}


def test_regions_are_whole():
    for loss in choice.CUDNN_FASTER + choice.CUDNN_NOT_COMPARED:
        assert 0 < loss.hidden[0] <= loss.hidden[1]
        assert 0 < loss.batch[0] <= loss.batch[1]
        assert loss.grads
        assert set(loss.cells) <= {"lstm", "gru", "rnn_tanh", "rnn_relu"}


def test_torch_s_precision_is_asked_at_each_call():
    """A choice that is remembered is one of the setting under which it was made."""
    rnn = torch.backends.cudnn.rnn
    before = rnn.fp32_precision
    try:
        rnn.fp32_precision = "tf32"
        assert dispatch.select(problem("gru", torch.float32)) == "fused"
        rnn.fp32_precision = "ieee"
        assert dispatch.select(problem("gru", torch.float32)) == "cudnn"
        assert dispatch.select(problem("gru", torch.float16)) == "fused"
    finally:
        rnn.fp32_precision = before


def test_states_that_resets_begin_from_are_described(monkeypatch):
    """Other kernels, whose gradients all are; GEMMs of a single step, and no wavefront."""
    config = holding_r("forward", trace(cells.lstm), "bfloat16", 64, 16, HOPPER, 132)[0]
    made, asked = SimpleNamespace(resources=SimpleNamespace(spilled=0, registers=64)), []

    def best(loop, **_):
        asked.append((loop.kind, loop.option_names))
        return made, config

    monkeypatch.setattr(kernels, "best", best)
    plain = problem("lstm", torch.bfloat16, grad=True, processors=132)
    spec = plain.spec.with_(num_layers=3, wavefront=8)
    plain = replace(plain, spec=spec, reset=True, steps=64, batch=8)
    given = replace(plain, reset_state=True)
    lines = described.describe(plain)
    assert not any("reset_state" in flags for _, flags in asked)
    assert sum("as a wavefront" in line for line in lines) == 2
    asked.clear()
    lines = described.describe(given)
    assert [kind for kind, _ in asked] == ["forward", "backward"]
    assert all("reset_state" in flags for _, flags in asked)
    said = "layer by layer, in spite of wavefront=8: states for resets"
    assert sum(said in line for line in lines) == 2


@pytest.fixture
def no_compiler(monkeypatch):
    """The first kernel of each ranking, as if it were compiled; which were asked for."""
    made, asked = nvrtc.Binary("", "", b"", nvrtc.Resources(64, 0)), []

    def best(loop, loops=1, layers=1):
        asked.append((loop.kind, loops))
        return made, plan.ranked(loop, loops, layers)[0]

    monkeypatch.setattr(kernels, "best", best)
    return asked


LARGE = {"grad": True, "processors": 132, "hidden": 1024}


def test_grids_of_half_the_device_are_described(no_compiler):
    """Of both directions, and of a stack whose wavefront pays."""
    plain = replace(problem("lstm", torch.bfloat16, **LARGE), steps=256, batch=64)
    both = replace(plain, spec=plain.spec.with_(bidirectional=True))
    lines = described.describe(both)
    assert no_compiler == [("forward", 1), ("forward", 2), ("backward", 1), ("backward", 2)]
    assert sum("of both directions at once" in line for line in lines) == 2
    no_compiler.clear()
    stack = replace(plain, spec=plain.spec.with_(num_layers=4))
    lines = described.describe(stack)
    assert no_compiler == [("forward", 1), ("forward", 2), ("backward", 1), ("backward", 2)]
    assert sum("as a wavefront: 2 of 4 layers" in line for line in lines) == 2
    assert sum("of the wavefront: 1 x grid of 32" in line for line in lines) == 2
    held = "which holds the gate gradients of one chunk"
    assert not any(held in line for line in lines)
    (line,) = [one for one in described.describe(replace(stack, steps=512)) if held in one]
    assert line.startswith("backward as a wavefront: 2 of 4 layers at the same time, each ")
    no_compiler.clear()
    # three layers, two at a time, take nearly as long as four
    few = replace(stack, spec=stack.spec.with_(num_layers=3), batch=16)
    assert not any("wavefront" in line for line in described.describe(few))
    too_large = stack.spec.with_(hidden_size=1536, input_size=1536, num_layers=2, wavefront=20)
    lines = described.describe(replace(stack, spec=too_large))
    assert sum("which holds two of no other" in line for line in lines) == 2


def test_kernels_of_half_the_device_are_compiled_ahead(no_compiler, monkeypatch):
    monkeypatch.setattr(kernels, "plain_binary", lambda *_: "")
    monkeypatch.setattr(ahead, "_of_steps", lambda *_: [])
    plain = problem("lstm", torch.bfloat16, **LARGE)
    for options, loops in (
        ({}, {1}), ({"bidirectional": True}, {1, 2}), ({"num_layers": 2}, {1, 2}),
        ({"num_layers": 2, "wavefront": 0}, {1}),
        ({"bidirectional": True, "recompute": "gates"}, {1}),
    ):  # fmt: skip
        no_compiler.clear()
        ahead.compiled(replace(plain, spec=plain.spec.with_(**options)), [16], False)
        assert {number for _, number in no_compiler} == loops, options


def test_recompute_is_described_with_one_kernel_more(monkeypatch):
    cell = trace(cells.lstm)
    config = holding_r("forward", cell, "bfloat16", 64, 16, HOPPER, 132)[0]
    made = SimpleNamespace(resources=SimpleNamespace(spilled=0, registers=64))
    monkeypatch.setattr(kernels, "best", lambda *_, **__: (made, config))
    plain = problem("lstm", torch.bfloat16, grad=True, processors=132)
    again = replace(plain, spec=plain.spec.with_(recompute="gates"))
    names = [[line.partition(":")[0] for line in described.describe(one)] for one in (plain, again)]
    assert names == [["forward", "backward"], ["forward", "forward again", "backward"]]
