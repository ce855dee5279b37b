"""A stack in one launch, without a device: when it is taken, what runs then, and its arguments."""

import ctypes
import re
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from unittest import mock

import pytest
import sanitize
import torch
from loops import kernels_of_an_h200, loop_of
from test_fused_launches import clear_caches, on_a_device
from test_fused_products import at, permute_weights
from test_fused_program_call import (
    BATCH,
    Kernel,
    backward,
    forward,
    named,
    others,
    pretended,  # noqa: F401
    shapes_of,
)

from openrnn import cells, schedule, store
from openrnn.backends.fused import (
    ahead,
    describe,
    kernels,
    program,
    schedules,
    stack_choice,
    stack_chunks,
)
from openrnn.backends.fused.layer import BackwardOptions, ForwardOptions, LayerKernels
from openrnn.backends.fused.pass_runner import Weights, transpose_all
from openrnn.codegen import cuda
from openrnn.codegen.cluster_stack_config import (
    ClusterStackBackwardConfig,
    ClusterStackConfig,
    ClusterStackForwardConfig,
)
from openrnn.codegen.config import saved_values
from openrnn.codegen.cuda import planes
from openrnn.codegen.multicast_config import (
    MulticastBackwardConfig,
    MulticastConfig,
    MulticastForwardConfig,
)
from openrnn.codegen.trace import trace
from openrnn.dispatch import BACKENDS
from openrnn.kernels.cuda.args import LOOPS, PLAIN
from openrnn.native import nvrtc
from openrnn.params import module_slots
from openrnn.schedule import Chunking
from openrnn.schedule.operations import BeginLayer, Loop, StackLoop
from openrnn.spec import Problem
from openrnn.tuning import chunks, multicast, one_launch, plan
from openrnn.tuning.limits import Limits
from openrnn.tuning.wavefront import MAX_TIME_RATIO, MOST_CHUNKS, Wavefront

ABSENT = nvrtc.absent()
HOPPER, PROCESSORS = (9, 0), 132
LIMITS = Limits.of(HOPPER, PROCESSORS)
UNITS = 16
KINDS = {"forward": ("save",), "backward": ()}
PLAIN_LOOPS = {
    "forward": ForwardOptions(False, False, False, False, True),
    "backward": BackwardOptions(False, False, False, False),
}
layers_at_once = schedules.layers_at_once  # which `pretended` replaces


def told(value):
    """An id that is the same in every process: sets in order, cells by their names."""
    if isinstance(value, set):
        return "+".join(sorted(value)) or "none"
    if isinstance(value, dict):
        return str({name: getattr(one, "name", one) for name, one in value.items()})
    return getattr(value, "name", str(value))


def problem(hidden=512, layers=4, dtype=torch.bfloat16, cell=cells.lstm, place=None, **more):
    """Training of a stack, on a Hopper; `place`: another capability and number of processors."""
    names = (
        "wavefront", "bidirectional", "input_mode", "recompute", "dropout", "input_size",
    )  # fmt: skip
    options = {name: more.pop(name) for name in names if name in more}
    spec = cell.spec(options.pop("input_size", hidden), hidden, num_layers=layers, **options)
    capability, processors = place or (HOPPER, PROCESSORS)
    known = {"capability": capability, "processors": processors}
    return Problem(spec, dtype, "cuda", **({"grad": True, **known} | more))


def cut_of(*fills, steps=11):
    return Chunking((0, steps), mode="one_launch", fills=frozenset(fills))


# what runs, in which order


def test_forward_has_one_product_and_one_loop():
    chunkings = ((cut_of("forward"),),) * 3
    found = schedule.forward(chunkings)
    assert schedule.show(found) == [
        "main  begin_layer  layer 0  forward direction",
        "main  begin_layer  layer 1  forward direction",
        "main  begin_layer  layer 2  forward direction",
        "main  input_product  layer 0  forward direction  steps 0 to 11",
        "main  fill_flags  layer 0  forward direction  steps 0 to 11",
        "main  stack_loop  forward  all layers  steps 0 to 11",
    ]
    assert {one.layers for one in found if isinstance(one, BeginLayer)} == {3}


def test_backward_has_products_of_all_layers_after_its_loop():
    """None of them is of dx but layer 0's."""
    found = schedule.backward(((cut_of("backward"),),) * 3)
    assert schedule.show(found) == [
        "main  begin_layer  layer 2  forward direction",
        "main  begin_layer  layer 1  forward direction",
        "main  begin_layer  layer 0  forward direction",
        "main  fill_flags  layer 0  forward direction  steps 0 to 11",
        "main  stack_loop  backward  all layers  steps 0 to 11",
        "main  gradient_products  of x  layer 0  forward direction  steps 0 to 11",
        "main  stack_gradients  all layers  steps 0 to 11",
        "main  finish_weights  layer 2  forward direction",
        "main  finish_weights  layer 1  forward direction",
        "main  finish_weights  layer 0  forward direction",
    ]
    assert {one.layers for one in found if isinstance(one, BeginLayer)} == {3}
    assert not any(isinstance(one, Loop) for one in found)


def test_dx_of_a_stack_is_computed_beside_the_gradients_of_weights():
    found = schedule.backward(((replace(cut_of(), forks=True),),) * 2)
    assert schedule.show(found)[4:9] == [
        "side 2  wait  for main",
        "main    gradient_products  of x  layer 0  forward direction  steps 0 to 11",
        "side 2  stack_gradients  all layers  steps 0 to 11",
        "main    wait  for side 2",
        "main    finish_weights  layer 1  forward direction",
    ]


# when it is taken

MASKED = {"lengths": True, "return_states": True}
REFUSED = [
    ("dropout between layers", {"dropout": 0.1, "training": True}),
    ("there is one layer", {"layers": 1}),
    ("a layer of two directions needs all steps of the one below", {"bidirectional": True}),
    ("input_mode 'skip' has no product of layer 0 to cut", {"input_mode": "skip"}),
    (
        "input_mode 'gates' has no product of layer 0 to cut",
        {"input_mode": "gates", "input_size": 2048},
    ),
]
TAKEN = [
    {}, MASKED, {"dtype": torch.float16}, {"cell": cells.gru, "hidden": 256}, {"dropout": 0.1},
    {"input_size": 24}, {"recompute": "gates", "grad": False}, {"grad": False},
    {"dtype": torch.float32, "hidden": 256}, {"hidden": 40}, {"hidden": 30}, {"reset": True},
    {"reset": True, "reset_state": True, "lengths": True},
]  # fmt: skip


@pytest.mark.parametrize(("reason", "changed"), REFUSED)
def test_refusals(reason, changed):
    """None of them has such a launch, though it is asked for."""
    asked = problem(wavefront=1, **changed)
    for kind, flags in KINDS.items():
        assert stack_choice.stack_refusal(asked, kind, 128, 64) == reason
        assert stack_choice.stack_of(asked, kind, flags, 128, 64, True) is None


@pytest.mark.parametrize("changed", TAKEN, ids=told)
def test_no_refusals(changed):
    asked = problem(wavefront=1, **changed)
    for kind, flags in KINDS.items():
        assert stack_choice.stack_refusal(asked, kind, 128, 64) is None
        assert stack_choice.stack_of(asked, kind, flags, 128, 64, True) is not None


def test_gate_gradients_of_all_layers_are_kept_at_once():
    """4 layers of 64 rows with 4 gates of 512 units in 2 bytes: a MiB each step."""
    reason = "its gate gradients would take 5000 MiB at once, at most 512"
    asked = problem(wavefront=1)
    assert stack_choice.stack_refusal(asked, "backward", 5000, 64) == reason
    assert stack_choice.stack_refusal(asked, "backward", 512, 64) is None
    assert stack_choice.stack_refusal(asked, "forward", 5000, 64) is None


@pytest.mark.parametrize(
    ("steps", "chunk", "count"),
    [(512, 100, 6), (513, 100, 6), (5000, 1000, 10), (5000, 100, 50), (1025, 1000, 3)],
)
def test_a_large_wavefront_holds_gate_gradients_of_a_chunk(steps, chunk, count):
    """All layers' chunks together take no more than what a smaller call's layers hold."""
    asked = problem(wavefront=chunk)
    assert stack_choice.wavefront_refusal(asked, "backward", steps, 64) is None
    found = stack_choice.wavefront_of(asked, "backward", (), steps, 64, True)
    assert (found.chunks, found.by_chunk) == (count, steps > 512)
    assert -(-steps // count) <= 512  # each step takes a MiB
    forward = stack_choice.wavefront_of(asked, "forward", ("save",), steps, 64, True)
    assert (forward.chunks, forward.by_chunk) == (-(-steps // chunk), False)


def test_gate_gradients_of_a_few_steps_may_be_too_large():
    asked = problem(wavefront=100)
    assert stack_choice.wavefront_refusal(asked, "backward", 100, 64 * 64) is None
    reason = "its gate gradients of 8 steps would take 520 MiB at once, at most 512"
    assert stack_choice.wavefront_refusal(asked, "backward", 100, 65 * 64) == reason
    assert stack_choice.wavefront_of(asked, "backward", (), 100, 65 * 64, True) is None
    assert stack_choice.wavefront_refusal(asked, "forward", 100, 65 * 64) is None
    assert stack_choice.wavefront_refusal(asked, "backward", 7, 65 * 64) is None


def test_the_model_takes_a_large_wavefront():
    """Two layers of 1,024 units at a time, each in a grid of half of the device."""
    found = stack_choice.wavefront_of(problem(hidden=1024), "backward", (), 512, 64, True)
    assert (found.loops, found.by_chunk) == (2, True)
    assert found.chunks >= 2
    assert found.us <= MAX_TIME_RATIO * found.in_turn


def test_with_recompute_chunks_of_backward_bound_those_of_forward():
    """Forward's are parts of them; one launch has no parts."""
    asked = problem(recompute="gates", wavefront=1)
    plain, again = (), ("save",)
    assert stack_choice.kept_chunks(asked, 90, 64) == 1
    assert stack_choice.stack_of(asked, "forward", plain, 90, 64, True) is not None
    for kind, flags in (("forward", again), ("backward", plain)):
        assert stack_choice.stack_of(asked, kind, flags, 90, 64, True) is None
        assert stack_choice.wavefront_of(asked, kind, flags, 90, 64, True) is None
    reason = "recompute='gates' has one chunk of time"
    assert stack_choice.wavefront_refusal(asked, "backward", 90, 64) == reason
    assert stack_choice.wavefront_refusal(asked, "forward", 90, 64) is None
    reason = "recompute='gates' runs forward again before each loop of backward"
    assert stack_choice.stack_refusal(asked, "backward", 90, 64) == reason
    assert stack_choice.kept_chunks(asked, 1000, 64) == 11
    reason = "recompute='gates' keeps the states between chunks of time"
    assert stack_choice.stack_refusal(asked, "forward", 1000, 64) == reason
    assert stack_choice.stack_of(asked, "forward", plain, 1000, 64, True) is None
    for chunk, count in ((None, None), (50, 22), (200, 11), (1000, 11)):
        cut = problem(recompute="gates", wavefront=chunk)
        found = stack_choice.wavefront_of(cut, "forward", plain, 1000, 64, True)
        assert found.chunks % 11 == 0
        assert count in (None, found.chunks)
    # more than the model tries by itself
    chosen = problem(recompute="gates")
    long = stack_choice.wavefront_of(chosen, "forward", plain, 9000, 64, True)
    assert long.chunks == stack_choice.kept_chunks(chosen, 9000, 64) > MOST_CHUNKS
    # states for resets make one chunk of a call
    reset = replace(asked, reset=True, reset_state=True)
    assert stack_choice.kept_chunks(reset, 1000, 64) == 1
    assert stack_choice.stack_of(reset, "forward", ("reset",), 1000, 64, True) is not None
    inference = replace(asked, grad=False)
    assert stack_choice.kept_chunks(inference, 1000, 64) == 1
    assert stack_choice.stack_of(inference, "forward", plain, 1000, 64, True) is not None


def test_with_recompute_backward_has_the_chunks_that_forward_kept_states_for():
    asked = problem(recompute="gates", wavefront=100)
    found = stack_choice.wavefront_of(asked, "backward", (), 1000, 16, True)
    assert found.chunks == stack_choice.kept_chunks(asked, 1000, 16) == 4
    none = problem(recompute="gates", wavefront=0)
    assert stack_choice.wavefront_of(none, "backward", (), 1000, 16, True) is None
    # forward's loops that run again are no wavefront of their own
    assert stack_choice.wavefront_of(asked, "forward", ("save",), 1000, 16, True) is None
    chosen = problem(recompute="gates")
    few = stack_choice.wavefront_of(chosen, "backward", (), 4000, 8, True)
    assert few.us <= MAX_TIME_RATIO * few.in_turn
    # two chunks of two layers: three tasks one after the other instead of four, and slower ones
    two = problem(recompute="gates", layers=2)
    assert stack_choice.kept_chunks(two, 500, 32) == 2
    assert stack_choice.wavefront_refusal(two, "backward", 500, 32) is None
    assert stack_choice.wavefront_of(two, "backward", (), 500, 32, True) is None
    elsewhere = problem(recompute="gates", place=(HOPPER, 114))
    assert stack_choice.wavefront_of(elsewhere, "backward", (), 4000, 8, True) is None
    # a grid takes the whole device
    large = problem(hidden=1024, layers=2, recompute="gates", wavefront=100)
    assert plan.ranked(loop_of("backward", trace(cells.lstm), "bfloat16", 1024, 64, HOPPER,
                               PROCESSORS))[0].is_cooperative  # fmt: skip
    assert stack_choice.wavefront_refusal(large, "backward", 1000, 64) is None
    assert stack_choice.wavefront_of(large, "backward", (), 1000, 64, True) is None
    lines = describe.describe(replace(large, steps=1000, batch=64))
    reason = "recompute='gates' has a wavefront only of loops in clusters"
    assert lines[-1] == f"backward layer by layer, in spite of wavefront=100: {reason}"


@pytest.mark.parametrize(
    ("layers", "hidden", "batch", "least"),
    [(2, 512, 64, 650), (4, 512, 64, 300), (4, 512, 128, 200), (8, 256, 64, 300),
     (6, 512, 32, 400), (5, 512, 16, 900), (4, 512, 1, 1650)],
)  # fmt: skip
def test_with_recompute_long_calls_of_any_length_run_layers_at_the_same_time(
    layers, hidden, batch, least
):
    asked = problem(recompute="gates", layers=layers, hidden=hidden)
    for steps in (*range(50, 3000, 50), 4001, 5999, 8193):
        found = stack_choice.wavefront_of(asked, "backward", (), steps, batch, True)
        assert (found is not None) == (steps >= least), steps


def test_chunks_of_all_layers_are_held_at_once():
    """Gate gradients, the input side of gates, saved activations of whole tiles, y."""
    few = {"recompute": "gates", "layers": 4}
    assert stack_choice.wavefront_refusal(problem(**few), "backward", 1000, 128) is None
    many = {"recompute": "gates", "layers": 16}
    steps, values = 33 + 15, 4 + 4 + saved_values(trace(cells.lstm)) + 1
    taken = 16 * steps * 64 * values * 512 * 2 >> 20
    reason = f"its chunks would take {taken} MiB at once, at most 512"
    for length in (200, 1000, 1001, 5000):  # whatever is left for the last chunk
        assert stack_choice.wavefront_refusal(problem(**many), "backward", length, 64) == reason
    assert stack_choice.wavefront_refusal(problem(**many), "forward", 1000, 64) is None
    # a row has the saved activations of eight
    whole = {stack_choice.kept_chunks(problem(**few), 9000, batch) for batch in (1, 3, 8)}
    assert len(whole) == 1
    assert stack_choice.kept_chunks(problem(**few), 9000, 9) > whole.pop()
    # where layers run one by one or in both directions chunks are longer
    in_turn = problem(wavefront=0, **few), problem(bidirectional=True, **few)
    assert [stack_choice.kept_chunks(one, 1000, 64) for one in in_turn] == [7, 7]


def best(steps=128, batch=64, kind="forward", **changed):
    return stack_choice.stack_of(problem(**changed), kind, KINDS[kind], steps, batch, True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_takes_a_stack(kind):
    found = best(kind=kind)
    assert (found.config.kind, found.config.layers, found.config.units) == (kind, 4, 512)
    assert 0 < found.us <= found.otherwise
    assert best(kind=kind, wavefront=1) == found
    # T + L - 1 steps, and what does not depend on T
    apart = best(steps=256, kind=kind).us - found.us
    step = plan.microseconds_of(trace(cells.lstm), "bfloat16", found.config, 64, LIMITS)
    assert 128 * step < apart < 1.6 * 128 * step
    least = one_launch.MULTICAST_FACTOR * (4 * step + one_launch.LAUNCH)
    assert best(steps=1, kind=kind, wavefront=1).us > least


@pytest.mark.parametrize("kind", KINDS)
def test_it_chooses_by_the_two_times_that_a_plan_has(kind):
    """And by nothing else, where stacks of such sizes were measured.

    In backward a wavefront counts a tenth more than by its model below H 512, a twentieth more
    beyond, there for three layers or more.
    """
    chosen, flags = [], KINDS[kind]
    for hidden, layers, batch in product((384, 512, 640), (2, 3), (32, 64, 128, 256)):
        size = {"hidden": hidden, "layers": layers}
        asked = best(batch=batch, kind=kind, wavefront=1, **size)
        by_itself = best(batch=batch, kind=kind, **size)
        assert by_itself == (asked if asked.us <= asked.otherwise else None)
        chosen.append(by_itself is not None)
        other = stack_choice.wavefront_of(problem(**size), kind, flags, 128, batch, True)
        factor = 1.1 if hidden < 512 else 1.05 if layers > 2 else 1.0
        factor = factor if kind == "backward" else 1.0
        assert other is None or asked.otherwise == pytest.approx(factor * other.us)
    assert {*chosen} == {True, False}


BOTH, NEITHER, FORWARD, BACKWARD = {"forward", "backward"}, set(), {"forward"}, {"backward"}


@pytest.mark.parametrize(
    ("by_itself", "asked", "changed"),
    [(BOTH, BOTH, {}), (BOTH, BOTH, {"batch": 32, "steps": 32}),
     (NEITHER, BOTH, {"batch": 24, "steps": 32}), (BOTH, BOTH, {"hidden": 640, "layers": 2}),
     (NEITHER, BOTH, {"hidden": 768, "layers": 2}), (FORWARD, BOTH, {"hidden": 192}),
     (NEITHER, FORWARD, {"hidden": 704, "layers": 3}),
     (BOTH, BOTH, {"hidden": 256, "layers": 8, "steps": 64}), (NEITHER, NEITHER, {"steps": 0}),
     (BOTH, BOTH, {"hidden": 384}), (FORWARD, BOTH, {"hidden": 256}),
     (NEITHER, NEITHER, {"place": ((8, 0), 108)}), (NEITHER, NEITHER, {"place": ((10, 0), 132)}),
     (NEITHER, BOTH, {"place": (HOPPER, 130)}), (NEITHER, BOTH, {"place": (HOPPER, 144)}),
     (NEITHER, BACKWARD, {"place": (HOPPER, 66)}), (NEITHER, BOTH, {"layers": 5}),
     (NEITHER, NEITHER, {"hidden": 520}), (BOTH, BOTH, {"hidden": 128}),
     (BOTH, BOTH, {"batch": 1}), (NEITHER, BACKWARD, {"batch": 1, "layers": 8}),
     (FORWARD, BOTH, {"hidden": 40, "batch": 300}),
     (FORWARD, BOTH, {"hidden": 128, "dtype": torch.float32})],
    ids=told,
)  # fmt: skip
def test_what_it_takes_by_itself_and_what_where_it_is_asked_for(by_itself, asked, changed):
    """The model knows devices of 132 multiprocessors alone; by itself none is taken elsewhere.

    Kernels decide what can be asked for: all clusters are resident. With multicast backward needs
    an H of 128s, and fewer clusters may hold a layer.
    """
    for wavefront, kinds in ((None, by_itself), (1, asked)):
        assert {kind for kind in KINDS if best(kind=kind, wavefront=wavefront, **changed)} == kinds


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wavefront", [0, 2, 5, 128])
def test_another_wavefront_is_no_such_launch(kind, wavefront):
    assert best(kind=kind, wavefront=wavefront) is None


@pytest.mark.parametrize(
    ("wanted", "changed"),
    [(True, {}), (False, {"absent": True}), (True, {"reset_states": True}),
     (False, {"layers": 1}), (False, {"hidden": 1024})],
    ids=told,
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_all_layers_have_one_chunk(monkeypatch, kind, wanted, changed):
    """Where the device loads a kernel; else None, and a wavefront or layers in turn follow."""
    changed, loaded = dict(changed), []
    absent, reset_states = changed.pop("absent", False), changed.pop("reset_states", False)
    asked = problem(wavefront=1, **changed)

    def kernel(loop, device, spin, loops, layers):
        loaded.append((loop.kind, loops, layers))
        if absent:
            raise kernels.NoKernelError("no kernel")
        config = plan.ranked(loop, 1, layers)[0]
        return SimpleNamespace(max_clusters=66), config

    kernels_of_an_h200(monkeypatch, kernel)
    clear_caches()
    monkeypatch.setattr(stack_chunks, "in_wavefront", lambda *_: None)
    key = schedules.ScheduleKey(asked, 0, 128, 64, reset_states, False)
    found = layers_at_once(key, PLAIN_LOOPS[kind], True)
    clear_caches()
    assert found == (((cut_of(steps=128),),) * 4 if wanted else None)
    assert loaded == ([(kind, 1, 4)] if wanted or absent else [])


@pytest.mark.parametrize("reset_states", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_reset_states_refuse_a_wavefront_to_calls_and_to_explain(monkeypatch, kind, reset_states):
    """By one test, of the problem: that of a call says whether it gives them."""
    asked = problem(wavefront=32, reset=True)
    on_a_device(monkeypatch, lambda loops: None)
    monkeypatch.setattr(stack_chunks, "in_wavefront", lambda *_: "a wavefront")
    key = schedules.ScheduleKey(asked, 0, 128, 64, reset_states, False)
    found = layers_at_once(key, PLAIN_LOOPS[kind], True)
    clear_caches()
    assert found == (None if reset_states else "a wavefront")
    told_as = replace(asked, reset_state=reset_states)
    refusal = stack_choice.wavefront_refusal(told_as, kind, 128, 64)
    assert (refusal is not None) == reset_states


@pytest.mark.parametrize(
    ("kept", "cut", "taken"), [(1, 4, True), (2, 4, True), (3, 4, False), (4, 4, True)]
)
def test_chunks_of_a_wavefront_end_where_backward_begins_again(monkeypatch, kept, cut, taken):
    asked = problem(wavefront=32, recompute="gates")
    monkeypatch.setattr(chunks, "for_recompute", lambda *_: kept)
    on_a_device(monkeypatch, lambda loops: None)
    key = schedules.ScheduleKey(asked, 0, 128, 64, False, False)
    loop = SimpleNamespace(
        kernel=SimpleNamespace(max_clusters=100), polls=False,
        config=SimpleNamespace(reads_r=False),
    )  # fmt: skip
    monkeypatch.setattr(stack_chunks.prepared, "loop_for", lambda *_: loop)
    way = Wavefront(cut, 1, 1.0, 2.0)
    found = stack_chunks.in_wavefront(key, PLAIN_LOOPS["forward"], way, False)
    assert (found is not None) == taken
    again = PLAIN_LOOPS["forward"]
    way = way._replace(by_chunk=True)
    back = stack_chunks.in_wavefront(key, PLAIN_LOOPS["backward"], way, True, again)
    clear_caches()
    assert (back is not None) == (kept == cut)
    assert back is None or (back[0][0].by_chunk and not back[0][0].overlap)


@pytest.mark.parametrize("changed", [{"polls": True}, {"reads_r": True}, {}], ids=str)
@pytest.mark.parametrize("which", ["backward", "forward"])
def test_clusters_alone_run_forward_again_in_a_wavefront(monkeypatch, which, changed):
    asked = problem(wavefront=32, recompute="gates")
    monkeypatch.setattr(chunks, "for_recompute", lambda *_: 4)
    on_a_device(monkeypatch, lambda loops: None)
    key = schedules.ScheduleKey(asked, 0, 128, 64, False, False)

    def loop_for(layer, batch, options, loops):
        own = changed if options.kind == which else {}
        return SimpleNamespace(
            kernel=SimpleNamespace(max_clusters=100), polls=own.get("polls", False),
            config=SimpleNamespace(reads_r=own.get("reads_r", False)),
        )  # fmt: skip

    monkeypatch.setattr(stack_chunks.prepared, "loop_for", loop_for)
    way, again = Wavefront(4, 1, 1.0, 2.0, True), PLAIN_LOOPS["forward"]
    found = stack_chunks.in_wavefront(key, PLAIN_LOOPS["backward"], way, True, again)
    clear_caches()
    assert (found is None) == bool(changed)


@pytest.mark.parametrize("wavefront", [None, 1])
@pytest.mark.parametrize("slower", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_that_is_loaded_decides(monkeypatch, kind, slower, wavefront):
    """The first of the ranking may spill; where the one that runs is too slow a wavefront follows.

    A kernel of the first one's shape counts like it: only where R lies differs.
    """
    asked = problem(wavefront=wavefront)
    flags = KINDS[kind]
    loop = loop_of(kind, trace(cells.lstm), "bfloat16", 512, 64, HOPPER, PROCESSORS)
    first, *others = plan.ranked(loop, layers=4)
    alike = replace(first, register_fragments=first.register_fragments - 2)
    other = max(others, key=lambda one: plan.microseconds_of(
        trace(cells.lstm), "bfloat16", one, 64, LIMITS))  # fmt: skip
    config = other if slower else alike

    def kernel(*_):
        return SimpleNamespace(max_clusters=66), config

    kernels_of_an_h200(monkeypatch, kernel)
    clear_caches()
    monkeypatch.setattr(stack_chunks, "in_wavefront", lambda *_: "a wavefront")
    key = schedules.ScheduleKey(asked, 0, 128, 64, False, False)
    found = layers_at_once(key, PLAIN_LOOPS[kind], True)
    clear_caches()
    taken = wavefront == 1 or not slower
    assert found == (((cut_of(steps=128),),) * 4 if taken else "a wavefront")
    seen = stack_choice.stack_of(asked, kind, flags, 128, 64, True, config)
    assert (seen is not None) == taken
    if seen:
        assert seen.config == (other if slower else first)
        assert (seen.us > seen.otherwise) == slower


# kernels

SIZES = [
    (cells.lstm, 512, 4), (cells.lstm, 128, 3), (cells.lstm, 640, 2), (cells.gru, 256, 3),
    (cells.gru, 512, 2), (cells.peephole_lstm, 256, 2), (cells.rnn_tanh, 512, 3),
]  # fmt: skip


def configs_of(kind, cell, hidden, layers, limits=LIMITS):
    fitting = {"forward": multicast.forwards, "backward": multicast.backwards}[kind]
    return [*fitting(trace(cell), "bfloat16", hidden, limits, layers)]


@pytest.mark.parametrize("hidden", [128, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_the_sanitizer_finds_what_it_replaces(kind, hidden):
    """For racecheck each lane arrives at mbarriers: `tests/sanitize.py` edits the source."""
    of_clusters = {"forward": ClusterStackForwardConfig, "backward": ClusterStackBackwardConfig}
    cell = trace(cells.lstm)
    ranked = plan.ranked(loop_of(kind, cell, "bfloat16", 128, 8, HOPPER, PROCESSORS), layers=3)
    (clusters, *_) = [one for one in ranked if isinstance(one, of_clusters[kind])]
    sanitize.every_lane_arrives()
    try:
        for config in (configs_of(kind, cells.lstm, hidden, 3)[0], clusters):
            text = cuda.source(cell, "bfloat16", config)
            assert "if (lane == 0) arrive(mbarrier);" not in text
    finally:
        mock.patch.stopall()


def each_size(kind):
    return [
        (cell, layers, config)
        for cell, hidden, layers in SIZES
        for config in configs_of(kind, cell, hidden, layers)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_clusters_are_those_of_all_layers(kind):
    """They are all resident, and those of a layer own its units, each once."""
    assert {layers for _, layers, _ in each_size(kind)} == {2, 3, 4}
    for cell, layers, config in each_size(kind):
        assert config.layers == layers
        assert config.clusters <= 66
        assert config.clusters // layers * layers == config.clusters
        assert config.clusters // layers * config.groups * 8 == config.units
        assert config.shared(trace(cell), "bfloat16") <= 227 << 10
        # half of what a block multiplies is the other layer's
        gates = len(cell.gates) if kind == "backward" else 1
        assert config.k_of_block(trace(cell)) * config.k_parts == 2 * config.units * gates


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("kinds", "hidden", "layers"),
    [(BOTH, 1024, 2), (FORWARD, 704, 3), (NEITHER, 704, 4), (BOTH, 256, 8), (BACKWARD, 256, 9),
     (BACKWARD, 512, 8), (NEITHER, 512, 9), (NEITHER, 96, 2), (NEITHER, 500, 2)],
    ids=told,
)  # fmt: skip
def test_how_many_layers_a_device_holds(kind, kinds, hidden, layers):
    """66 clusters of 32 units of an LSTM in forward: L * H is 2,112 at most."""
    assert (configs_of(kind, cells.lstm, hidden, layers) != []) == (kind in kinds)
    assert ("forward" in kinds) == (layers * hidden <= 2112 and hidden % 64 == 0)


@pytest.mark.parametrize("batch", [1, 64, 130])
@pytest.mark.parametrize("kind", KINDS)
def test_the_flag_buffer_is_what_the_kernel_counts(kind, batch):
    """`Exchange` of multicast_exchange.cuh: counters, messages, what is published; 8 steps of it.

    A counter is 128 bytes, of each layer, set of rows and part of K; messages, of even and of odd
    steps, are float32 sums of a block's cells from each other block with the same units; blocks of
    one cluster send them through shared memory.
    """
    for cell, layers, config in each_size(kind):
        (one, rows, values), filled = config.flag_buffer(trace(cell), 40, batch)
        k_parts, set_rows = config.k_parts, 8 * config.tiles
        sets = -(-batch // (set_rows * config.tiles_in_flight)) * config.tiles_in_flight
        blocks = config.cluster * config.clusters // layers
        own_groups = config.groups // config.cluster
        warps_of_group = max(1, 4 // own_groups)  # which share the tiles of a set evenly
        tiles = -(-config.tiles // warps_of_group) * warps_of_group
        cells_of_block = own_groups * tiles * 64
        gradients = {"lstm": 4, "peephole_lstm": 4, "gru": 4, "rnn_tanh": 1}[cell.name]
        counters = layers * sets * k_parts * 128
        senders = 0 if config.parts_in_cluster else k_parts - 1
        messages = layers * sets * 2 * blocks * senders * cells_of_block * 4
        published = 1 if kind == "forward" else gradients
        steps = layers * sets * 8 * config.units * published * set_rows * 2
        assert (one, values) == (1, 64)  # of 2 bytes
        assert 128 * filled == counters + messages
        assert 128 * (rows - filled) == steps


@pytest.mark.skipif(ABSENT is not None, reason=f"cannot compile: {ABSENT}")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("cell", "hidden", "layers"), [(cells.lstm, 512, 4), (cells.gru, 256, 3)])
def test_kernels_compile_without_spills(monkeypatch, tmp_path, cell, hidden, layers, kind):
    """The first with multicast; the skeletons assert their own sizes, shared memory for one."""
    monkeypatch.setattr(store, "folder", lambda: tmp_path)
    asked = trace(cell), "bfloat16"
    loop = loop_of(kind, *asked, hidden, 64, HOPPER, PROCESSORS)
    held = plan.compilable_configs(loop, layers=layers)
    config = next(one for one in held if isinstance(one, MulticastConfig))
    kernels.binary.cache_clear()
    made = kernels.binary(*asked, config, "sm_90a")
    kernels.binary.cache_clear()
    # setmaxnreg shares out 512 * 128
    assert (made.resources.registers, made.resources.spilled) == (128, 0)


@pytest.mark.skipif(ABSENT is not None, reason=f"cannot compile: {ABSENT}")
@pytest.mark.parametrize(
    ("cell", "dtype", "hidden", "flags"),
    [(cells.lstm, "bfloat16", 256, ()), (cells.gru, "float32", 37, ("lengths", "reset")),
     (cells.rnn_relu, "float32", 24, ("all_states",)),
     (cells.lstm, "float16", 100, ("lengths", "reset", "all_states", "reset_state"))],
    ids=told,
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_stacks_in_clusters_compile_without_spills(
    monkeypatch, tmp_path, cell, dtype, hidden, flags, kind
):
    """The skeletons assert their shared memory; a ReLU multiplies tf32, an LSTM float16."""
    monkeypatch.setattr(store, "folder", lambda: tmp_path)
    options = (*flags, *KINDS[kind])
    loop = loop_of(kind, trace(cell), dtype, hidden, 16, HOPPER, PROCESSORS, options)
    made, config = kernels.best(loop, layers=3)
    assert isinstance(config, ClusterStackConfig)
    assert made.resources.spilled == 0


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_of_all_layers_are_as_many_as_a_kernel_takes(kind):
    """32,764 bytes; a stack of more layers goes another way."""
    for layers in (2, 64, 99, 130, 200):
        size = {"hidden": 16, "layers": layers, "input_size": 16}
        found = best(batch=8, kind=kind, wavefront=1, **size)
        held = found is not None
        assert held == (layers < 100)
        assert not held or found.config.argument_bytes(trace(cells.lstm)) <= 32764


def test_the_other_way_is_a_wavefront_only_where_one_may_run():
    """Layer by layer takes longer. Where units are padded one may, and it copies what it reads."""
    plain = best(batch=16, steps=256, hidden=256, wavefront=1)
    padded = best(batch=16, steps=256, hidden=250, wavefront=1)
    reset = best(batch=16, steps=256, hidden=256, wavefront=1, reset=True, reset_state=True)
    assert plain.otherwise < padded.otherwise < 1.3 * plain.otherwise
    assert reset.otherwise > 1.3 * plain.otherwise


# arguments


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("states", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_pointers_of_all_structs(kind, states, layers):
    """Found by their values: odd numbers are pointers, and `layers` says how many structs."""
    words, wanted = [], []
    for _ in range(layers):
        for field in LOOPS[kind].fields:
            for _ in range(states if field.array else 1):
                pointer = field.cuda.endswith("*")
                if pointer:
                    wanted.append(len(words))
                words.append(layers if field.name == "layers" else 1000)
    assert LOOPS[kind].pointers(words) == wanted
    assert len(wanted) % layers == 0
    assert len(wanted) > 10 * layers


@pytest.mark.parametrize("cell", [cells.lstm, cells.gru], ids=lambda cell: cell.name)
def test_backward_multiplies_by_the_matrix_above_in_the_order_of_planes(monkeypatch, cell):
    """What a layer publishes begins with the input side of each gate: of a GRU n, r, z."""
    spec, gates = cell.spec(UNITS, UNITS, num_layers=2), len(cell.gates)

    class Permute:
        def launch(self, blocks, words):
            table = PLAIN["permute_weights"]
            count = len(table.fields)
            assert (blocks % 3, len(words)) == (0, 3 * count)
            for begin in range(0, 3 * count, count):
                permute_weights(named(table, words[begin : begin + count]))

    monkeypatch.setattr(kernels, "plain", lambda *_: Permute())
    params = [torch.randn(slot.shape) for slot in module_slots(spec)]
    layers = [LayerKernels(spec, layer, torch.float32, 0) for layer in range(2)]
    below, weights = (Weights(SimpleNamespace(params=params), layer) for layer in layers)
    transpose_all([below, weights])
    assert below._input_transposed is None
    d_gates = {gate: torch.randn(5, UNITS) for gate in cell.gates}
    above = dict(zip(cell.gates, weights.w_ih.unflatten(0, (gates, UNITS))))
    # of planes named dx_GATE or, where both sides have the same, da_GATE
    published = torch.stack([d_gates[plane[3:]] for plane in planes(trace(cell))[:gates]], 1)
    found = published.flatten(1) @ weights.input_transposed.flatten(1).T
    wanted = sum(d_gates[gate] @ above[gate] for gate in cell.gates)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)


# launches


STACKS = {
    "multicast": {
        "forward": MulticastForwardConfig(UNITS, 2, 16, 2, 2, 2, 0, 2, True, low_register=True),
        "backward": MulticastBackwardConfig(
            UNITS, 2, 16, 2, 2, 2, 0, 2, True, low_register=True, k_parts=1, k_warpgroups=1
        ),
    },
    "clusters": {
        "forward": ClusterStackForwardConfig(UNITS, 1, 2, 1, 1, 1, 0),
        "backward": ClusterStackBackwardConfig(UNITS, 2, 1, 1, 1, 1, 0),
    },
}


class StackKernel(Kernel):
    """A kernel of all layers whose launches are done here."""

    def __init__(self, kind, config, hidden):
        super().__init__(kind, hidden)
        self.config = config

    def launch_at(self, parameter, clusters, stream, launch_event=0):
        kind, layers = self.made.name, self.config.layers
        # one copy of R holds 5 rows
        assert clusters == self.config.clusters
        count = sum(2 if field.array else 1 for field in LOOPS[kind].fields)
        start = ctypes.c_void_p.from_address(parameter).value
        words = [*(ctypes.c_int64 * (layers * count)).from_address(start)]
        each = [
            named(LOOPS[kind], words[layer * count : (layer + 1) * count])
            for layer in range(layers)
        ]
        assert {args.layers for args in each} == {layers}
        self.read(each)
        if kind == "forward":
            self.forward(each)
        else:
            self.backward(each)

    def read(self, each):
        """Flags are filled when the launch begins, and others when it ends.

        In clusters these are what another layer reads.
        """
        if isinstance(self.config, ClusterStackConfig):
            forward, padded = self.config.kind == "forward", self.hidden < UNITS
            for number, args in enumerate(each):
                read = number < len(each) - 1 if forward else number > 0  # by another layer
                assert (args.flag_buffer != 0) == (forward and padded and read)
                place = args.flag_buffer or (args.y if forward else args.d_gates)
                count = args.steps * BATCH * UNITS * (1 if forward else 4)
                if read:
                    assert set((ctypes.c_int32 * count).from_address(place)) == {-1}
            return
        (buffer,) = {args.flag_buffer for args in each}
        (_, rows, values), filled = self.config.flag_buffer(trace(cells.lstm), 1, BATCH)
        size = 4 * values  # of float32 here
        flags = (ctypes.c_int32 * (rows * values)).from_address(buffer)
        assert set(flags[: filled * values]) == {-1}
        ctypes.memset(buffer, 0, rows * size)

    def forward(self, each):
        hidden, below, padded = self.hidden, None, self.hidden < UNITS
        for layer, args in enumerate(each):
            assert (args.w_ih != 0) == (layer > 0)
            count = args.steps * BATCH
            if layer:
                weight = at(args.w_ih, (4 * UNITS, UNITS)).unflatten(0, (4, UNITS))
                assert not weight[:, hidden:].any()
                assert not weight[:, :, hidden:].any()
                weight = weight[:, :, :hidden]
                place, row = (below.flag_buffer, UNITS) if padded else (below.y, hidden)
                x = at(place, (count, hidden), row) @ weight.flatten(0, 1).T
                args.x, args.x_row = x.data_ptr(), 4 * UNITS
                args.x_step_bytes = BATCH * 4 * UNITS * 4
            forward(args, hidden, UNITS)
            if padded and args.flag_buffer:
                copy = at(args.flag_buffer, (count, UNITS)).zero_()
                copy[:, :hidden] = at(args.y, (count, hidden), args.y_row)
            below = args

    def backward(self, each):
        above = None
        for layer, args in reversed([*enumerate(each)]):
            last = layer == len(each) - 1
            assert (args.w_above != 0) == (not last)
            if not last:
                assert args.dy == 0
                weight = at(args.w_above, (UNITS, 4 * UNITS))
                dy = at(above.d_gates, (args.steps * BATCH, 4 * UNITS)) @ weight.T
                args.dy, args.dy_row = dy.data_ptr(), UNITS
                args.dy_step_bytes = -BATCH * UNITS * 4
            parts = self.config.sum_parts(BATCH)
            at(args.sums, (parts, 4 * UNITS)).zero_()
            backward(args, self.hidden, UNITS)
            above = args


@pytest.fixture(params=[("multicast", UNITS), ("clusters", UNITS), ("clusters", 13)], ids=str)
def stack(request, monkeypatch, pretended):  # noqa: F811
    """A call of a stack; in one launch, or in turn: how results are compared."""
    name, hidden = request.param

    def call(layers, in_turn, **options):
        torch.manual_seed(0)
        made = pretended(hidden, num_layers=layers, **options)
        made.params[:] = [0.3 * param for param in made.params]
        clusters = kernels.kernel
        configs = {
            kind: replace(config, layers=layers, **more)
            for kind, config in STACKS[name].items()
            for more in [{"clusters": layers} if name == "multicast" else {}]
        }

        def kernel(loop, device, spin, loops, at_once):
            if at_once == 1:
                return clusters(loop, device, spin, loops, at_once)
            assert at_once == layers
            return StackKernel(loop.kind, configs[loop.kind], hidden), configs[loop.kind]

        kernels_of_an_h200(monkeypatch, kernel)
        monkeypatch.setattr(one_launch, "MOST_BYTES", 4)  # float32 stands for all dtypes
        if not in_turn:
            taken = one_launch.StackPlan(configs["forward"], 1.0, 2.0)
            monkeypatch.setattr(schedules, "layers_at_once", layers_at_once)
            monkeypatch.setattr(stack_chunks, "_with_device", lambda key: key.problem)
            monkeypatch.setattr(stack_choice, "stack_of", lambda *_: taken)
        clear_caches()
        return made

    return call


def loops_of(operations):
    return [one for one in operations if isinstance(one, StackLoop | Loop)]


def launches_of(run, kind):
    """Launches of loops in a program."""
    return [
        one
        for one in run.operations
        if isinstance(one, program.LaunchOp) and one.kernel.made.name == kind
    ]


LENGTHS = {"lengths": torch.tensor([0, 3, 1, 2, 3])}
RESETS = {"reset": torch.tensor([[1, 0, 0, 0, 1], [0, 1, 0, 0, 0], [0, 0, 1, 0, 1]]).bool()}
MASKS = {"plain": {}, "lengths": LENGTHS, "resets": RESETS, "both": LENGTHS | RESETS}


def close(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other.view_as(one), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_one_launch_computes_what_layers_in_turn_do(stack, layers, states, masks):
    """Then as a program of other tensors: it has the addresses of all layers' arguments."""
    fused, found = BACKENDS["fused"], []
    for in_turn in (True, False):
        call = stack(layers, in_turn, states=states, grad=False, **masks)
        out = fused.forward(call)
        found.append([out.y, *out.finals])
        run = fused.prepare(call, shapes_of(call))
        number = len(launches_of(run.program, "forward"))
        assert number == (layers if in_turn else 1)
        torch.manual_seed(1)
        again = [0.3 * one for one in others([call.x, *call.params, *call.states])]
        found.append(run([*again, *masks.values()]))
    close(found[2], found[0])
    close(found[3], found[1])
    assert not torch.allclose(found[0][0], found[1][0])


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("needs", ["all", "params", "x"])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_so_does_its_backward(stack, layers, states, needs, masks):
    """The second time as a program, of other tensors, with the addresses of all layers."""
    fused, found = BACKENDS["fused"], []
    for in_turn in (True, False):
        call = stack(layers, in_turn, states=states, **masks)
        shapes, count = shapes_of(call), len(call.params)
        inner = [call.x.shape, *(state.shape for state in call.states)]
        run = fused.prepare_grad(call, shapes, inner)
        left = len(call.states)
        wanted = {
            "all": (True,) * (1 + count + left),
            "params": (False, *(True,) * count, *(False,) * left),
            "x": (True, *(False,) * (count + left)),
        }[needs]
        for number in range(2):
            torch.manual_seed(number)
            every = [0.3 * one for one in others([call.x, *call.params, *call.states])]
            every += masks.values()
            made = run.forward(every)
            grads = [torch.randn(shape) for shape in shapes]
            asked = (*wanted, *(False,) * len(masks))
            back = run.backward(every, [made[0], *made[3:]], grads, asked)[: len(wanted)]
            assert [grad is not None for grad in back] == [*wanted]
            found.append([*made[:3], *back])
        programs = [one for one in run._known.values() if one is not None]
        launched = [len(launches_of(one.program, "backward")) for one in programs]
        assert launched == [layers if in_turn else 1]
    for one, other in zip(found[2:], found[:2]):
        close(one, other)


# what is said


@pytest.fixture
def no_compiler(monkeypatch):
    """The first kernel of each ranking, as if it were compiled."""
    made = nvrtc.Binary("", "", b"", nvrtc.Resources(128, 0))

    def best(loop, loops=1, layers=1):
        return made, plan.ranked(loop, loops, layers)[0]

    monkeypatch.setattr(kernels, "best", best)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    ("hidden", "layers", "wanted"),
    [(512, 4, {("permute_weights", 7), ("reduce_bias_gradients", 4), ("copy_rows", 6)}),
     (500, 4, {("permute_weights", 7), ("reduce_bias_gradients", 4), ("copy_rows", 6)}),
     (640, 2, {("permute_weights", 3), ("reduce_bias_gradients", 2)}), (512, 1, set())],
)  # fmt: skip
def test_plain_kernels_of_stacks_are_compiled_ahead(monkeypatch, hidden, layers, wanted):
    """Those that take the arguments of several layers."""
    asked = set()

    def plain_binary(name, dtype, arch, structs=1):
        asked.add((name, structs))
        return name

    monkeypatch.setattr(kernels, "plain_binary", plain_binary)
    ahead.compiled(problem(hidden, layers), [64], False)
    assert {one for one in asked if one[1] > 1} == wanted


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(("hidden", "wanted"), [(500, {("permute_weights", 7)}), (512, set())])
def test_matrices_are_padded_by_one_kernel_in_inference(monkeypatch, hidden, wanted):
    asked = set()
    monkeypatch.setattr(kernels, "plain_binary", lambda name, *given: asked.add((name, *given[2:])))
    ahead.compiled(problem(hidden, 4, grad=False), [64], False)
    assert {one for one in asked if len(one) > 1} == wanted


@pytest.mark.usefixtures("no_compiler")
def test_short_calls_of_padded_stacks_are_compiled_ahead(monkeypatch):
    """They have other units, and run in one launch too."""
    asked, best = set(), kernels.best

    def noted(loop, loops=1, layers=1):
        asked.add((loop.kind, loop.units, layers))
        return best(loop, loops, layers)

    monkeypatch.setattr(kernels, "best", noted)
    ahead.compiled(problem(500, 4), [16], False)
    assert {(kind, 504, 4) for kind in KINDS} | {("forward", 512, 4)} <= asked


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("hidden", "layers", "steps", "units", "wanted"),
    [(500, 4, 128, 512, MulticastConfig), (250, 8, 256, 256, None), (750, 2, 300, 768, Wavefront)],
)
def test_padded_stacks_have_the_ways_of_others(kind, hidden, layers, steps, units, wanted):
    names = plan.measured_options(kind, ("save",) if kind == "forward" else ())
    found = []
    for size in (hidden, units):
        asked = problem(size, layers, steps=steps, batch=64)
        found.append(next(stack_choice.ways(asked, kind, names, steps, 64, True)))
    padded, plain = found
    assert type(padded) is type(plain)
    if isinstance(padded, Wavefront):
        assert wanted is Wavefront
    else:
        assert padded.config == plain.config
        assert padded.config.units == units
        assert wanted is None or isinstance(padded.config, wanted)


@pytest.mark.usefixtures("no_compiler")
def test_explain_has_a_line_for_the_launch():
    asked = problem(steps=128, batch=64)
    lines = describe.describe(asked)
    for kind, flags in KINDS.items():
        plans = stack_choice.stack_of(asked, kind, flags, 128, 64, True)
        head = f"{kind} of 4 layers in one launch, each layer behind the one before: "
        (line,) = [line for line in lines if line.startswith(head)]
        operand = "h" if kind == "forward" else "gate gradients"
        assert "1 x grid of 64 x cluster of 2 blocks of 512 threads" in line
        assert f"{operand} by TMA" in line
        assert (" blocks through " in line) == (kind == "backward")
        times = f"; {plans.us:,.0f} us by the model, else {plans.otherwise:,.0f}"
        assert line.endswith(f"us a step by the model{times}")
    assert not any("wavefront" in line for line in lines)
    layer_by_layer = describe.describe(replace(asked, spec=asked.spec.with_(wavefront=0)))
    assert not any("layers" in line for line in layer_by_layer)


@pytest.mark.usefixtures("no_compiler")
def test_explain_says_which_warps_multiply_inputs():
    """Of a stack in clusters: three layers in 16 blocks each, for each eight rows."""
    lines = describe.describe(problem(256, 3, steps=128, batch=16))
    (line,) = [line for line in lines if line.startswith("forward of 3 layers in one launch")]
    assert "2 x 3 layers x cluster of 16 blocks of 128 threads, 8 rows each, " in line
    assert ", half of the warps multiply y of the layer below, " in line
    assert any("multiply gate gradients of the layer above" in line for line in lines)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"cell": cells.gru, "hidden": 192, "layers": 3},
        {"hidden": 640, "layers": 2},
        {"cell": cells.gru},
    ],
    ids=told,
)
def test_explain_shows_no_launch_as_slower_than_what_it_replaces(changed):
    """Backward of GRU 3 x 192 takes more than a wavefront by its model, but not than shown."""
    lines = describe.describe(problem(steps=128, batch=64, **changed))
    shown = [re.search(r"; ([\d,]+) us by the model, else ([\d,]+)$", line) for line in lines]
    times = [[int(time.replace(",", "")) for time in found.groups()] for found in shown if found]
    assert times
    assert all(us <= otherwise for us, otherwise in times)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("wavefront", [None, 1])
@pytest.mark.parametrize(("hidden", "layers"), [(512, 4), (640, 3)])
def test_explain_goes_on_where_no_kernel_of_all_layers_compiles(
    monkeypatch, hidden, layers, wavefront
):
    """As a call does, to a wavefront (4 x 512) or layer by layer (3 x 640).

    It says so where the launch is asked for.
    """
    asked = problem(hidden, layers, wavefront=wavefront, steps=128, batch=64)
    compiled = kernels.best

    def best(loop, loops=1, layers=1):
        return None if layers > 1 else compiled(loop, loops, layers)

    assert any("in one launch, each" in line for line in describe.describe(asked))
    monkeypatch.setattr(kernels, "best", best)
    lines = describe.describe(asked)
    refused = [line for line in lines if "in one launch" in line]
    said = "not in one launch, in spite of wavefront=1: no kernel holds all layers"
    assert refused == ([f"{kind} {said}" for kind in KINDS] if wavefront else [])
    monkeypatch.setattr(stack_choice, "stack_of", lambda *_: None)
    assert lines == describe.describe(asked)
    for kind in KINDS:
        assert any(line.startswith(f"{kind}: ") for line in lines)
        cut = any(line.startswith(f"{kind} as a wavefront: 4 layers") for line in lines)
        assert cut == (hidden == 512)


@pytest.mark.usefixtures("no_compiler")
def test_explain_goes_on_where_the_kernel_that_compiles_is_slower(monkeypatch):
    asked, compiled = problem(steps=128, batch=64), kernels.best

    def best(loop, loops=1, layers=1):
        made, config = compiled(loop, loops, layers)
        if layers > 1:
            config = max(
                plan.ranked(loop, layers=layers),
                key=lambda one: plan.microseconds_of(loop.cell, loop.dtype, one, 64, LIMITS),
            )
        return made, config

    monkeypatch.setattr(kernels, "best", best)
    lines = describe.describe(asked)
    assert not any("in one launch" in line for line in lines)
    assert sum("as a wavefront: 4 layers" in line for line in lines) == 2


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    ("reason", "changed"),
    [one for one in REFUSED if "bidirectional" not in one[1]]
    + [("no kernel holds all layers", {"layers": 9})],
)
def test_explain_says_why_it_is_refused(reason, changed):
    lines = describe.describe(problem(wavefront=1, steps=128, batch=64, **changed))
    said = f"not in one launch, in spite of wavefront=1: {reason}"
    again = ["forward again"] if "recompute" in changed else []
    for kind in ("forward", *again, "backward"):
        assert f"{kind} {said}" in lines
    assert not any("in one launch, each" in line for line in lines)
    unasked = describe.describe(problem(steps=128, batch=64, **changed))
    assert not any("in spite of" in line for line in unasked)


@pytest.mark.usefixtures("no_compiler")
def test_explain_says_why_two_directions_are_no_wavefront():
    lines = describe.describe(problem(wavefront=16, steps=128, batch=64, bidirectional=True))
    for kind in KINDS:
        said = "layer by layer, in spite of wavefront=16: a layer of two directions needs all steps"
        assert sum(line.startswith(f"{kind} {said}") for line in lines) == 1


@pytest.mark.parametrize(
    ("hidden", "warps", "polls", "rounds", "in_flight", "held"),
    [
        (256, 4, 8, 1, 8, 16),
        (320, 4, 10, 1, 10, 14),
        (384, 4, 12, 1, 12, 13),
        (448, 4, 14, 2, 7, 16),
        (512, 4, 16, 2, 8, 16),
        (512, 8, 8, 1, 8, 16),
        (512, 2, 32, 3, 11, 14),
    ],
)
def test_polls_of_a_thread_come_in_equal_rounds(hidden, warps, polls, rounds, in_flight, held):
    """In backward: up to 12 in flight where a thread may have 255 registers, else 8."""
    cell, dtype = trace(cells.lstm), "bfloat16"
    config = ClusterStackBackwardConfig(hidden, 8, warps, 8, 1, 1, 16)
    assert config.polls(cell, dtype) == polls
    assert config.poll_rounds(cell, dtype) == rounds
    assert config.polls_in_flight(cell, dtype) == in_flight
    assert config.input_register_fragments(cell, dtype) == held
    assert config.input_fragments(cell, dtype) >= 16
