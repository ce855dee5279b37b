"""Calls on the GPU that a module remembers; the programs of launches also without a device."""

import ctypes
import gc
import itertools
import math
import threading
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
from cases import thinned
from loops import kernels_of_an_h200
from test_call_cache import flat
from test_fused_launches import (
    clear_caches,
    named,
    wavefront_if_asked,
    without_side_stream,
)
from test_fused_products import at, copy_rows, make_matrices, multiply, permute_weights
from torch.utils.checkpoint import checkpoint

import openrnn
from openrnn import cells
from openrnn.backends.base import Call, Cotangents, Needs
from openrnn.backends.fused import backend, kernels, program, program_call, schedules
from openrnn.backends.fused.layer_gradients import LayerGradients
from openrnn.codegen.config import (
    BackwardConfig,
    ForwardConfig,
    GridBackwardConfig,
    GridForwardConfig,
    saved_values,
)
from openrnn.codegen.trace import trace
from openrnn.dispatch import BACKENDS
from openrnn.kernels.cuda.args import LOOPS, PLAIN
from openrnn.memory import template
from openrnn.native import cublaslt, nvrtc
from openrnn.native.recording import CURRENT, NotRepeatableError
from openrnn.nn import autograd_call, call_cache
from openrnn.params import module_slots
from openrnn.schedule.operations import MAIN, SIDE
from openrnn.spec import Problem
from openrnn.tuning import chunks

STEPS, BATCH, WIDTH = 3, 5, 6
CLUSTERS = {
    "forward": ForwardConfig(16, 1, 2, 1, 1, 1, 4),
    "backward": BackwardConfig(16, 1, 4, 2, 1, 1, 3),
}
GRIDS = {
    "forward": GridForwardConfig(16, 2, 1, 2, 1, 1, 4, clusters=2),
    "backward": GridBackwardConfig(16, 2, 2, 2, 1, 1, 3, clusters=2),
}

OPTIONS = [
    {}, {"num_layers": 2}, {"bidirectional": True}, {"bidirectional": True, "at_once": True},
    {"num_layers": 2, "bidirectional": True, "at_once": True, "overlap": True},
    {"num_layers": 2, "bidirectional": True, "at_once": True, "cuts": (0, 1, 2, STEPS)},
    {
        "num_layers": 2, "bidirectional": True, "at_once": True, "overlap": True,
        "cuts": (0, 1, 2, STEPS), "cut": ("backward",),
    },
    {"num_layers": 3, "wavefront": 2}, {"num_layers": 3, "wavefront": 2, "overlap": True},
    {"num_layers": 3, "wavefront": 2, "by_chunk": True},
    {"num_layers": 3, "wavefront": 2, "recompute": "gates"},
    {"num_layers": 2, "made": True}, {"num_layers": 3, "wavefront": 2, "made": True},
    {
        "num_layers": 2, "bidirectional": True, "at_once": True, "cuts": (0, 1, 2, STEPS),
        "made": True,
    },
]  # fmt: skip


def steps(args, address, step):
    """Where each step of a loop lies; one back in time begins with the last."""
    return [address + (t if step > 0 else t - args.steps + 1) * step for t in range(args.steps)]


def integers(address, kind, *shape):
    """The integers that lie there."""
    count = math.prod(shape)
    raw = numpy.ctypeslib.as_array((kind * count).from_address(address))
    return torch.from_numpy(raw).view(shape)


def masks(args):
    """Of each step the rows that run, and those that are reset, as 1 and 0; all run without."""
    runs, resets = torch.ones(args.steps, BATCH, 1), torch.zeros(args.steps, BATCH, 1)
    if args.lengths:
        lengths = integers(args.lengths, ctypes.c_int64, BATCH)
        order = integers(args.order, ctypes.c_int64, BATCH)
        assert sorted(order) == [*range(BATCH)]
        assert (lengths[order].diff() <= 0).all()  # in a chunk, equal ones in the order of the call
        runs = (torch.arange(args.steps)[:, None] < lengths).float()[..., None]
    if args.reset:
        resets = integers(args.reset, ctypes.c_uint8, args.steps, BATCH).float()[..., None]
    return runs, resets


def forward(args, hidden, units):
    """A recurrence that reads and writes all that a forward loop of four gates does."""
    y = [at(place, (BATCH, hidden), args.y_row) for place in steps(args, args.y, args.y_step_bytes)]
    x_at, saved_at = (
        steps(args, args.x, args.x_step_bytes),
        steps(args, args.saved, args.saved_step_bytes),
    )
    weight = at(args.weight, (4 * units, units)).unflatten(0, (4, units))
    assert not weight[:, hidden:].any()
    assert not weight[:, :, hidden:].any()
    weight = weight[:, :hidden, :hidden].flatten(0, 1)
    initial = [args.chunk_in, args.chunk_in + 4 * BATCH * hidden] if args.chunk_in else args.initial
    h, c = (
        at(place, (BATCH, hidden)).clone() if place else torch.zeros(BATCH, hidden)
        for place in initial
    )
    bias = sum(
        at(place, (1, 4 * hidden))[0]
        for place in (args.bias_x, args.bias_r)
        if place
    )  # fmt: skip
    runs, resets = (mask.flip(0) if args.reverse else mask for mask in masks(args))
    for t in range(args.steps):
        h, c = h * (1 - resets[t]), c * (1 - resets[t])
        x = at(x_at[t], (BATCH, 4 * units), args.x_row)
        x = x.unflatten(1, (4, units))[..., :hidden].flatten(1)
        gates = (x + h @ weight.T + bias).unflatten(1, (4, hidden)).sum(1)
        after = torch.tanh(gates + c), torch.sin(gates)
        h, c = (torch.where(runs[t] > 0, *pair) for pair in zip(after, (h, c)))
        y[t].copy_(h * runs[t])
        if args.saved:
            width = units * 8 * saved_values(trace(cells.lstm))  # of a tile of rows
            saved = at(saved_at[t], (1, width))
            saved.copy_(h.flatten()[torch.arange(width) % h.numel()][None])
    final = [args.chunk_out, args.chunk_out + 4 * BATCH * hidden] if args.chunk_out else args.final
    for place, state in zip(final, (h, c)):
        at(place, (BATCH, hidden)).copy_(state)


def backward(args, hidden, units):
    """The same for a backward loop."""
    weight = at(args.weight, (units, 4 * units))[:hidden].sum(0)
    left = [args.chunk_in, args.chunk_in + 4 * BATCH * hidden] if args.chunk_in else args.d_final
    finals = [at(place, (BATCH, hidden)) for place in left if place]
    carried = sum(finals) if finals else torch.zeros(BATCH, hidden)
    saved_at, dy_at, d_gates_at = (
        steps(args, args.saved, args.saved_step_bytes),
        steps(args, args.dy, args.dy_step_bytes),
        steps(args, args.d_gates, args.d_gates_step_bytes),
    )
    runs, resets = (mask if args.reverse else mask.flip(0) for mask in masks(args))
    total = torch.zeros(4 * units)
    for t in range(args.steps):
        saved = at(saved_at[t], (1, 8))
        carried = carried * (1 - 0.5 * resets[t]) * (0.5 + runs[t])
        if args.dy:
            dy = at(dy_at[t], (BATCH, units), args.dy_row)
            assert not dy[:, hidden:].any()
            dy = dy[:, :hidden]
            carried = torch.sin(carried + dy + saved.sum())
        found = torch.zeros(BATCH, 4, units)
        found[..., :hidden] = carried[:, None]
        d_gates = at(d_gates_at[t], (BATCH, 4 * units))
        d_gates.copy_(found.flatten(1) * weight)
        total += d_gates.sum(0)
    at(args.sums, (1, 4 * units)).copy_(total[None])
    after = [args.chunk_out, args.chunk_out + 4 * BATCH * hidden]
    for place in after if args.chunk_out else args.d_initial:
        if place:
            at(place, (BATCH, hidden)).copy_(0.5 * carried if args.chunk_out else carried)


EVENTS = []  # launches that record an event, and waits for it, as they run


class Kernel:
    """A kernel whose launches are done here."""

    threads, max_clusters = 256, 64
    launch, arguments = nvrtc.CudaKernel.launch, {}

    def __init__(self, name, hidden, structs=1):
        self.made, self.hidden, self.units = SimpleNamespace(name=name), hidden, -(-hidden // 8) * 8
        self.structs = structs
        self.device, self._parameter = 0, threading.local()

    def enter(self):
        pass

    def launch_at(self, parameter, clusters, stream, launch_event=0):
        if launch_event:
            EVENTS.append(("signal", launch_event, stream))
        name = self.made.name
        table = {**LOOPS, **PLAIN}[name]
        count = sum(2 if field.array else 1 for field in table.fields)  # of two states
        start = ctypes.c_void_p.from_address(parameter).value
        assert clusters % self.structs == 0
        for struct in range(self.structs):
            words = (ctypes.c_int64 * count).from_address(start + 8 * count * struct)
            self.run(name, named(table, words))

    def run(self, name, args):
        if name in LOOPS:
            {"forward": forward, "backward": backward}[name](args, self.hidden, self.units)
        elif name == "fill_flags":
            for row in range(args.rows):
                ctypes.memset(args.buffer + row * args.row_bytes, 255, 16 * args.pieces)
        elif name == "dropout":
            count = args.steps * args.batch * args.width
            seed = integers(args.seed, ctypes.c_int64, 2)
            places = torch.arange(count) + args.first * args.batch * args.width + args.layer
            mask = ((places * 7919 + seed[0]) % 5 > 1).float()
            at(args.out, (1, count)).copy_(at(args.x, (1, count)).clone() * mask)
        elif name == "cut_lengths":
            lengths = integers(args.lengths, ctypes.c_int64, args.batch) - args.begin
            integers(args.inside, ctypes.c_int64, args.batch).copy_(lengths.clamp(0, args.steps))
        elif name == "sort_lengths":
            lengths = integers(args.lengths, ctypes.c_int64, args.batch)
            order = lengths.argsort(descending=True, stable=True)
            integers(args.order, ctypes.c_int64, args.batch).copy_(order)
        elif name == "reduce_bias_gradients":
            sums = at(args.sums, (args.parts * args.gates, args.units))[:, : args.hidden]
            sums = sums.unflatten(0, (args.parts, args.gates)).sum(0)
            for place in (args.input_bias, args.recurrent_bias):
                if place:
                    at(place, (args.gates, args.hidden)).copy_(sums)
        else:
            {"permute_weights": permute_weights, "copy_rows": copy_rows}[name](args)


class Plan:
    """A product that is done here, and wants a workspace."""

    workspace = 512

    def __init__(self, dtype, device, sizes, layouts, aligned, float32_out, count, smaller_tiles):
        a, b, d = layouts
        self.product = SimpleNamespace(sizes=sizes, a=a, b=b, d=d, count=count)
        self.space_like = template((512,), torch.uint8, torch.device("cpu"))

    def multiply(self, a, b, d, add, space, stream):
        ctypes.memset(space, 255, 512)
        multiply(self.product, a, b, d, add)


@pytest.fixture
def pretended(monkeypatch):
    """Kernels and products without a device; gives a call of some sizes and the launches' count."""
    monkeypatch.setattr(backend, "On", lambda _: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cublaslt, "MatmulPlan", Plan)
    for module in (program, cublaslt, nvrtc):
        monkeypatch.setattr(module, "current_stream", lambda device: 0)
    without_side_stream(monkeypatch, lambda: None, lambda stream: EVENTS.append(("wait", stream)))
    EVENTS.clear()

    def call(
        hidden, configs=CLUSTERS, states=True, grad=True, batch_first=False, at_once=False,
        overlap=False, cuts=(), cut=("forward",), length=STEPS, width=WIDTH, lengths=None,
        reset=None, seed=None, made=False, by_chunk=False, **options,
    ):  # fmt: skip
        if "recompute" in options:
            monkeypatch.setattr(chunks, "for_recompute", lambda *_: 3)
        if made:
            make_matrices(monkeypatch)
        monkeypatch.setattr(schedules, "idle", lambda *_: float(overlap))
        monkeypatch.setattr(schedules, "has_launch_events", lambda: overlap)
        monkeypatch.setattr(schedules, "choose_both_directions", lambda *_: int(at_once))
        monkeypatch.setattr(
            schedules, "edges_of_both",
            lambda pair, *_: [*cuts] if pair.options.kind in cut else [],
        )  # fmt: skip
        monkeypatch.setattr(
            schedules, "layers_at_once", partial(wavefront_if_asked, by_chunk=by_chunk)
        )

        def kernel(loop, *_):
            return Kernel(loop.kind, hidden), configs[loop.kind]

        kernels_of_an_h200(monkeypatch, kernel)
        monkeypatch.setattr(
            kernels, "plain", lambda name, _, __, structs=1: Kernel(name, hidden, structs)
        )
        clear_caches()
        spec = cells.lstm.spec(width, hidden, **options)
        masked = {"lengths": lengths is not None, "reset": reset is not None}
        masked["training"] = seed is not None
        problem = Problem(spec, torch.float32, "cpu", grad=grad, **masked)
        x = torch.randn(length, BATCH, width)
        if batch_first:
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        given = [torch.randn(spec.chains, BATCH, hidden) for _ in "hc"] if states else []
        params = [torch.randn(slot.shape) for slot in module_slots(spec)]
        return Call(problem, x, given, params, lengths, reset, seed=seed)

    yield call
    clear_caches()


def shapes_of(call):
    width = call.problem.spec.directions * call.problem.spec.hidden_size
    states = (call.problem.spec.chains, BATCH, call.problem.spec.hidden_size)
    return [(len(call.x), BATCH, width), states, states]


def others(tensors):
    return [
        torch.randn(tensor.shape).as_strided(tensor.shape, tensor.stride()) for tensor in tensors
    ]


@pytest.mark.parametrize("hidden", [16, 13])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("configs", [CLUSTERS, GRIDS], ids=["clusters", "grids"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_program_does_what_the_pass_does(
    pretended, hidden, batch_first, states, configs, options
):
    """Of the tensors of that call, and of others; in this thread, and in another."""
    call = pretended(hidden, configs, states, False, batch_first, **options)
    fused = BACKENDS["fused"]
    run = fused.prepare(call, shapes_of(call))
    waits = [one.stream for one in run.program.operations if isinstance(one, program.WaitOp)]
    wavefront = "wavefront" in options and hidden == 16
    cuts = options.get("cuts", (0, STEPS)) if options.get("cut") is None else (0, STEPS)
    layers, ahead = call.problem.spec.num_layers, len(cuts) - 2
    if not wavefront:  # the main stream also waits for the products of each chunk but the first
        of_layer = [1, 0, 0] * ahead + [1, 0]
        assert waits == (of_layer * layers if "at_once" in options else [])
    spaces = {
        (one.stream, one.space)
        for one in run.program.operations
        if isinstance(one, program.MatmulOp)
    }
    streams = 3 if wavefront else 1 + layers * ahead
    assert len(spaces) == streams
    if not ahead:  # else those of layers that are never at work at once are the same
        assert len({space for _, space in spaces}) == streams
    for given in ([call.x, *call.params, *call.states], None):
        every = given or others([call.x, *call.params, *call.states])
        want = fused.forward(run.called(every))
        for found in (run(every), in_a_thread(lambda every=every: run(every))):
            assert [*map(torch.equal, found, [want.y, *want.finals])] == [True] * 3
            assert found[0].abs().sum() > 0


@pytest.mark.parametrize("chunk", [4, 8])
@pytest.mark.parametrize("layers", [2, 5])
def test_memory_of_a_wavefront_in_inference(pretended, layers, chunk):
    """y of every layer but the last; x_gates of a chunk, and states of two, of each layer."""
    steps, hidden = 64, 16
    call = pretended(
        hidden, states=False, grad=False, num_layers=layers, wavefront=chunk, length=steps
    )
    run = BACKENDS["fused"].prepare(call, shapes_of(call))
    workspace = run.program.made[-1].template.nbytes
    outputs, inputs = BATCH * steps * hidden * 4, BATCH * chunk * 4 * hidden * 4
    outputs *= layers - 1
    states = 2 * BATCH * hidden * 4
    # products have a little room of their own, and each tensor begins at a multiple of 256 bytes
    assert outputs < workspace <= outputs + layers * (inputs + 2 * states + 1024)


def gradients_of(call):
    """Of a pass: of x, states and parameters, flattened, with the same cotangents each time."""
    fused, dice = BACKENDS["fused"], torch.Generator().manual_seed(3)
    out = fused.forward(call)
    y, *finals = (torch.randn(shape, generator=dice) for shape in shapes_of(call))
    count = len(call.params)
    needs = Needs(True, (True, True), (True,) * count, ())
    found = fused.backward(call, out.y, out.reserve, Cotangents(y, finals, []), needs)
    return [found.x, *found.states, *found.params]


@pytest.mark.parametrize(
    "changed",
    [{"by_chunk": True}, {"recompute": "gates"}, {"recompute": "gates", "wavefront": 0}],
    ids=str,
)
@pytest.mark.parametrize("masked", [(), ("lengths",), ("reset",)], ids=str)
def test_chunks_of_a_wavefront_compute_what_all_steps_do(pretended, masked, changed):
    """Products of each chunk, and loops that run again, as in one that holds all gate gradients."""
    found, given = [], masks_of_11_steps(masked)
    for options in ({}, changed):
        torch.manual_seed(0)
        sizes = {"num_layers": 3, "length": 11, "wavefront": 4} | options
        call = pretended(16, **sizes, **given)
        call.params[:] = [0.1 * param for param in call.params]  # else roundings grow
        found.append(gradients_of(call))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
        assert one.abs().sum() > 0


def masks_of_11_steps(names):
    """Lengths, resets and a seed of dropout masks, those that are named."""
    every = {
        "lengths": torch.tensor([0, 3, 11, 6, 1]), "reset": torch.rand(11, BATCH) < 0.3,
        "seed": torch.tensor([5, 0]),
    }  # fmt: skip
    return {name: every[name] for name in names}


@pytest.mark.parametrize("configs", [CLUSTERS, GRIDS], ids=["clusters", "grids"])
@pytest.mark.parametrize("hidden", [16, 13])
@pytest.mark.parametrize(
    "masks", [(), ("lengths",), ("reset",), ("seed",), ("lengths", "reset", "seed")], ids=str
)
def test_chunks_of_both_directions_compute_what_one_does(pretended, configs, hidden, masks):
    """Also as a program; each direction's states go from chunk to chunk."""
    length, found, given = 11, [], masks_of_11_steps(masks)
    options = {**given, **({"dropout": 0.4} if "seed" in masks else {})}
    for cuts in ((), (0, 2, 5, length)):
        torch.manual_seed(0)
        call = pretended(
            hidden, configs, grad=False, length=length, num_layers=3, bidirectional=True,
            at_once=True, overlap=True, cuts=cuts, **options,
        )  # fmt: skip
        call.params[:] = [0.1 * param for param in call.params]  # else roundings grow
        out = BACKENDS["fused"].forward(call)
        found.append([out.y, *out.finals])
        run = BACKENDS["fused"].prepare(call, shapes_of(call))
        every = [call.x, *call.params, *call.states, *given.values()]
        found.append(run(every))
    for other in found[1:]:
        for one, wanted in zip(other, found[0]):
            assert torch.allclose(one, wanted, atol=1e-5)


@pytest.mark.parametrize("configs", [CLUSTERS, GRIDS], ids=["clusters", "grids"])
@pytest.mark.parametrize("hidden", [16, 13])
@pytest.mark.parametrize("cuts", [(0, 2, 5, 11), (0, 9, 11), (0, 4, 7, 11)], ids=str)
@pytest.mark.parametrize("masks", [(), ("lengths", "reset", "seed")], ids=str)
def test_chunks_of_both_directions_have_the_gradients_of_one(
    pretended, configs, hidden, cuts, masks
):
    """Both directions write and add dx of other chunks; also as a program."""
    length, found, given = 11, [], masks_of_11_steps(masks)
    options = {**given, **({"dropout": 0.4} if "seed" in masks else {})}
    for cut in ((), cuts):
        torch.manual_seed(0)
        call = pretended(
            hidden, configs, length=length, num_layers=3, bidirectional=True, at_once=True,
            overlap=True, cuts=cut, cut=("backward",), **options,
        )  # fmt: skip
        call.params[:] = [0.1 * param for param in call.params]  # else roundings grow
        shapes, count = shapes_of(call), len(call.params)
        inner = [(1, *call.x.shape), *(state.shape for state in call.states)]
        run = BACKENDS["fused"].prepare_grad(call, shapes, inner)
        every = [call.x, *call.params, *call.states, *given.values()]
        forward = run.forward(every)
        grads = [torch.ones(shape) for shape in shapes]
        outputs = [forward[0], *forward[3:]]
        for _ in range(2):  # the second one is a program
            found.append(run.backward(every, outputs, grads, (True,) * (3 + count)))
    for other in found[1:]:
        for one, wanted in zip(other, found[0], strict=True):
            assert torch.allclose(one, wanted, atol=1e-5)


def in_a_thread(run):
    found, threads = [], torch.get_num_threads()

    def work():
        torch.set_num_threads(threads)  # torch's own products have other bits with another number
        found.append(run())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


def backwards():
    """Seven has no factor in common with the numbers of values: a seventh has each of them."""
    given = (True, True, True), (True, False, False), (False, True, False)
    asked = itertools.product(
        ("all", "params", "some"), given, OPTIONS, (CLUSTERS, GRIDS), (16, 13)
    )
    return thinned(asked, 7)


def launches_awaited(spec, options):
    """The events of a backward program: launches that signal, each before the stream that waits.

    In a wavefront those of each layer's last loop but the last layer's, in both directions at once
    all loops but the first ones of the last layer.
    """
    if not options.get("overlap") or ("wavefront" in options and spec.hidden_size % 8):
        return []
    layers = reversed(range(spec.num_layers - 1))
    if "wavefront" in options:  # a layer's stream has its number
        return [one for layer in layers for one in (("signal", 7, layer), ("wait", layer + 1))]
    chunks = len(options["cuts"]) - 1 if "backward" in options.get("cut", ()) else 1
    beside = range(2, 2 + spec.num_layers * chunks - 1)  # after two streams for what forks
    return [
        one for number in beside for stream in (MAIN, SIDE)
        for one in (("signal", 7, stream), ("wait", SIDE + 1 + 2 * number))
    ]  # fmt: skip


@pytest.mark.parametrize(("wanted", "given", "options", "configs", "hidden"), backwards(), ids=str)
def test_so_does_its_backward(monkeypatch, pretended, hidden, configs, options, given, wanted):
    call = pretended(hidden, configs, **options)
    fused, shapes = BACKENDS["fused"], shapes_of(call)
    inner = [(1, *call.x.shape), *(state.shape for state in call.states)]
    run = fused.prepare_grad(call, shapes, inner)
    count = len(call.params)
    needs = {
        "all": (True,) * (3 + count),
        "params": (False, *(True,) * count, False, False),
        "some": (True, *itertools.islice(itertools.cycle((True, False)), count), False, True),
    }[wanted]
    asked = []  # how often the backend was asked for a whole pass
    whole = fused.backward
    monkeypatch.setattr(
        type(fused), "backward", lambda self, *args: asked.append(1) or whole(*args)
    )
    for number in range(3):
        every = others([call.x, *call.params, *call.states])
        out = fused.forward(run.called(every))
        forward = run.forward(every)
        assert [*map(torch.equal, forward, [out.y, *out.finals, *out.reserve])] == [True] * len(
            forward
        )
        grads = [torch.randn(shape) if there else None for there, shape in zip(given, shapes)]
        outputs = [forward[0], *forward[3:]]
        want = run._run([*every, *outputs, *[g for g in grads if g is not None]], [*given], needs)
        asked.clear()
        EVENTS.clear()
        found = run.backward(every, outputs, grads, needs)
        assert len(asked) == (number == 0)
        assert launches_awaited(call.problem.spec, options) == EVENTS
        assert [grad is not None for grad in found] == [*needs]
        for a, b in zip(found, want):
            assert a is None or torch.equal(a.flatten(), b.flatten())
        assert found[0] is None or found[0].shape == inner[0]


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_products_after_loops_fork_in_a_graph_alone(monkeypatch, pretended, options):
    """As called they run on the main stream, one after the other, with the same results."""
    call = pretended(16, **options)
    inner = [call.x.shape, *(state.shape for state in call.states)]
    run = BACKENDS["fused"].prepare_grad(call, shapes_of(call), inner)
    every, multiply, used = [call.x, *call.params, *call.states], Plan.multiply, set()

    def noted(self, *args):
        used.add(args[-1])
        multiply(self, *args)

    monkeypatch.setattr(Plan, "multiply", noted)
    forward = run.forward(every)
    grads, outputs = [torch.randn(shape) for shape in shapes_of(call)], [forward[0], *forward[3:]]
    found = []
    for captures in (False, True):
        used.clear()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)  # noqa: B023
        found.append(run.backward(every, outputs, grads, (True,) * len(every)))
        assert (len(used) > 1) == captures
    for plain, forked in zip(*found):
        assert torch.equal(plain, forked)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("masked", ["lengths", "reset", "both"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "dropout": 0.4}, {"bidirectional": True, "at_once": True},
     {"num_layers": 3, "wavefront": 2}, {"num_layers": 3, "wavefront": 2, "dropout": 0.4}],
    ids=str,
)  # fmt: skip
def test_programs_read_lengths_and_resets(pretended, options, masked, states, grad):
    """Of this call, and of others with other masks, and the seed of dropout masks."""

    def drawn_masks():
        lengths, reset = torch.randint(0, STEPS + 1, (BATCH,)), torch.rand(STEPS, BATCH) < 0.3
        return {"lengths": (lengths, None), "reset": (None, reset), "both": (lengths, reset)}[
            masked
        ]

    lengths, reset = drawn_masks()
    drops = "dropout" in options
    seed = torch.tensor([3, 4]) if drops else None
    call = pretended(16, CLUSTERS, states, grad, lengths=lengths, reset=reset, seed=seed, **options)
    fused, shapes = BACKENDS["fused"], shapes_of(call)
    inner = [call.x.shape, *(state.shape for state in call.states)]
    run = fused.prepare_grad(call, shapes, inner) if grad else fused.prepare(call, shapes)
    found = []
    for number in range(3):
        mask = [one for one in (drawn_masks() if number else (lengths, reset)) if one is not None]
        mask += [torch.tensor([number, 4])] if drops else []
        every = [*others([call.x, *call.params, *call.states]), *mask]
        want = fused.forward(run.called(every))
        if not grad:
            found.append(run(every))
            assert [*map(torch.equal, found[-1], [want.y, *want.finals])] == [True] * 3
            continue
        made = run.forward(every)
        assert all(map(torch.equal, made, [want.y, *want.finals, *want.reserve]))
        outputs, grads = [made[0], *made[3:]], [torch.randn(shape) for shape in shapes]
        assert [(one.shape, one.dtype) for one in outputs] == run.saved
        needs = (*(True,) * (len(every) - len(mask)), *(False,) * len(mask))
        full = run._run([*every, *outputs, *grads], [True] * 3, needs)
        back = run.backward(every, outputs, grads, needs)
        assert all(map(torch.equal, map(torch.flatten, back), map(torch.flatten, full)))
        # of rows that end anywhere torch finds the last step, which read the initial states
        whole = call.problem.spec.bidirectional and masked != "reset" and states
        assert [known is None for known in run._known.values()] == [whole]
        found.append(back)
    assert not torch.equal(found[0][0], found[1][0])


def test_no_backward_pass_is_rehearsed_during_a_capture(monkeypatch, pretended):
    call = pretended(16, states=False)
    run = BACKENDS["fused"].prepare_grad(call, shapes_of(call), [call.x.shape])
    every = [call.x, *call.params]
    made, needs = run.forward(every), (True,) * len(every)
    outputs, grads = [made[0], *made[3:]], [torch.ones_like(made[0]), None, None]
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        want = run.backward(every, outputs, grads, needs)
        assert not run._known
    found = run.backward(every, outputs, grads, needs)
    assert len(run._known) == 1
    assert all(map(torch.equal, found, want))


def test_a_backward_pass_that_is_no_program_is_freed_at_once(monkeypatch, pretended):
    """A reference cycle would keep it, and the autograd graph, until Python looks for cycles.

    Nodes of a graph that lives keep the stream of their first call, which breaks a capture.
    """
    alive, ended = weakref.WeakSet(), []

    class Pass(backend.BackwardPass):
        def __init__(self, *args):
            super().__init__(*args)
            alive.add(self)

        def finish_weights(self, operation):
            if CURRENT.recording is not None:
                ended.append(1)
                raise NotRepeatableError("more than launches and products")
            super().finish_weights(operation)

    monkeypatch.setattr(backend, "BackwardPass", Pass)
    call = pretended(16, bidirectional=True)
    inner = [call.x.shape, *(state.shape for state in call.states)]
    run = BACKENDS["fused"].prepare_grad(call, shapes_of(call), inner)
    every = [call.x, *call.params, *call.states]
    forward = run.forward(every)
    grads, outputs = [torch.randn(shape) for shape in shapes_of(call)], [forward[0], *forward[3:]]
    gc.collect()
    gc.disable()
    try:
        run.backward(every, outputs, grads, (True,) * len(every))
        assert ended == [1]
        assert not alive
    finally:
        gc.enable()


@pytest.mark.parametrize("options", OPTIONS[4::2], ids=str)
def test_gradients_of_biases_are_made_on_the_main_stream(monkeypatch, pretended, options):
    """The caller has them, whose stream the allocator of a side stream does not know."""
    made, biases = [], LayerGradients.biases

    def noted(self):
        if self._biases is None and CURRENT.recording is not None:
            made.append(CURRENT.recording._stream)
        return biases(self)

    monkeypatch.setattr(LayerGradients, "biases", noted)
    call = pretended(16, **options)
    inner = [call.x.shape, *(state.shape for state in call.states)]
    run = BACKENDS["fused"].prepare_grad(call, shapes_of(call), inner)
    every = [call.x, *call.params, *call.states]
    forward = run.forward(every)
    grads, outputs = [torch.randn(shape) for shape in shapes_of(call)], [forward[0], *forward[3:]]
    run.backward(every, outputs, grads, (True,) * len(every))
    assert made == [0] * call.problem.spec.chains
    sides = {one.stream for known in run._known.values() for one in known.program.operations}
    assert sides > {0}


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("mode", ["skip", "gates"])
def test_layers_without_an_input_matrix_overlap_too(pretended, mode, layers):
    """dx needs no product there, and there is no matrix to put in order for one."""
    width = {"skip": 16, "gates": 64}[mode]
    options = {"bidirectional": True, "num_layers": layers, "input_mode": mode}
    call = pretended(16, at_once=True, overlap=True, width=width, **options)
    fused = BACKENDS["fused"]
    out = fused.forward(call)
    needs = Needs(True, (True,) * 2, (True,) * len(call.params), ())
    grads = Cotangents(out.y, [None, None], [])
    found = fused.backward(call, out.y, [*out.reserve], grads, needs)
    assert found.x.shape == call.x.shape
    assert [grad.shape for grad in found.params] == [param.shape for param in call.params]


@pytest.mark.parametrize(
    ("configs", "fills"), [(CLUSTERS, 0), (GRIDS, 1)], ids=["clusters", "grids"]
)
def test_what_a_chunk_of_a_pipeline_launches(pretended, configs, fills):
    """Of each layer: one product and one loop there; four products, the first h's, and no more."""
    layers = 3
    call = pretended(16, configs, num_layers=layers, wavefront=0)
    given = [tuple(each.shape) for each in (call.x, *call.states)]
    run = BACKENDS["fused"].prepare_grad(call, shapes_of(call), given)
    every, needs = [call.x, *call.params, *call.states], (True,) * (3 + len(call.params))
    made = run.forward(every)
    run.backward(every, [made[0], *made[3:]], [*map(torch.randn_like, made[:3])], needs)
    (back,) = run._known.values()

    def count(program, kind):
        return sum(isinstance(one, kind) for one in program.operations)

    assert count(run.program, program.MatmulOp) == layers
    assert count(run.program, program.LaunchOp) == layers * (1 + fills)
    assert count(back.program, program.MatmulOp) == 4 * layers  # dx, dW_ih, dW_hh, dW_hh of h_0
    # the loop, the biases, and R permuted; W_ih of x needs no order of its own in an LSTM
    plain = program.without_forks(back.program.operations)
    assert len(plain) <= layers * (8 + fills)
    assert {one.stream for one in plain} == {0}
    assert count(back.program, program.WaitOp) == len(back.program.operations) - len(plain)
    assert not count(run.program, program.WaitOp)


def test_a_single_step_from_zeros_has_a_program(pretended):
    """No step reads h, so the gradient of R is zero, and torch makes the zeros."""
    call = pretended(16, states=False, length=1)
    run = BACKENDS["fused"].prepare_grad(call, shapes_of(call), [call.x.shape])
    every, needs = [call.x, *call.params], (True,) * (1 + len(call.params))
    for _ in range(2):
        made = run.forward(every)
        dy = torch.randn(made[0].shape)
        found = run.backward(every, [made[0], *made[3:]], [dy, None, None], needs)
        want = run._run([*every, made[0], *made[3:], dy], [True, False, False], needs)
        assert all(map(torch.equal, found, want))
        assert not found[2].any()
        assert found[1].any()
    assert all(known is not None for known in run._known.values())


def test_tensors_that_share_memory_have_slots_of_their_own(pretended):
    """h0 is c0 where the call is recorded, and not later."""
    call = pretended(16, grad=False)
    call.states[1] = call.states[0]
    run = BACKENDS["fused"].prepare(call, shapes_of(call))
    every = others([call.x, *call.params, *call.states])
    want = BACKENDS["fused"].forward(run.called(every))
    assert [*map(torch.equal, run(every), [want.y, *want.finals])] == [True] * 3


def test_a_copy_by_torch_in_inference_mode_is_no_program(pretended):
    """It comes as `contiguous`, which is called a view; its memory would be anybody's."""
    with torch.inference_mode():
        x = torch.randn(4, 3)
        for one, fits in ((x, True), (x.t(), False)):
            with nullcontext() if fits else pytest.raises(NotRepeatableError, match="clone"):
                program_call.record(lambda every: [torch.empty_like(every[0].contiguous())], [one])
        call = pretended(16, grad=False)
        call.x = torch.randn(STEPS, WIDTH, BATCH).transpose(1, 2)
        assert BACKENDS["fused"].prepare(call, shapes_of(call)) is None


def test_misaligned_tensors_that_share_memory_are_no_program(pretended):
    """Kernels are chosen by alignment, and a stand-in would have another."""
    call = pretended(13, grad=False, bidirectional=True)
    flat = torch.randn(call.params[0].numel() + 1)
    call.params[0] = call.params[4] = flat[1:].view(call.params[0].shape)
    assert BACKENDS["fused"].prepare(call, shapes_of(call)) is None


def test_without_memory_for_a_workspace_a_call_goes_the_usual_way(monkeypatch, pretended):
    call = pretended(16)
    fused, shapes = BACKENDS["fused"], shapes_of(call)
    inner = [call.x.shape, *(state.shape for state in call.states)]
    run = fused.prepare_grad(call, shapes, inner)
    every = [call.x, *call.params, *call.states]
    needs = (True,) * len(every)
    made = run.forward(every)
    grads = [torch.randn(shape) for shape in shapes]
    wanted = run.backward(every, [made[0], *made[3:]], grads, needs)

    def full(self, values):
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as scarce:
        scarce.setattr(program.Program, "run", full)
        assert run(every) is None
        assert run.ready(every)
        found = run.backward(every, [made[0], *made[3:]], grads, needs)
    assert all(map(torch.equal, found, wanted))
    # a request that fails makes torch's allocator give back what it keeps: not at every call
    assert not run.ready(every)
    assert run(every) is None


def test_other_alignment_or_no_memory_is_another_call(pretended):
    call = pretended(16, grad=False)
    run = BACKENDS["fused"].prepare(call, shapes_of(call))
    every = [call.x, *call.params, *call.states]
    assert run(every) is not None
    apart = torch.empty(call.x.numel() + 1)[1:].view(call.x.shape)
    assert run([apart, *every[1:]]) is None
    gone = call.x.clone()
    gone.untyped_storage().resize_(0)
    assert run([gone, *every[1:]]) is None


def test_what_torch_computes_is_no_program(pretended):
    """Vectors that are stacked; more memory than a short call takes."""
    call = pretended(16, grad=False)
    assert BACKENDS["fused"].prepare(call, shapes_of(call)) is not None
    with pytest.raises(NotRepeatableError, match="computes"):
        program_call.record(lambda every: [every[0] + 1], [call.x])
    with pytest.raises(NotRepeatableError, match="more than"):
        program_call.record(
            lambda every: [torch.empty_like(every[0].expand(1 << 24, -1, -1, -1))], [call.x]
        )
    with pytest.raises(NotRepeatableError, match="not memory that the pass took"):
        program_call.record(lambda every: [every[0]], [call.x])
    assert CURRENT.recording is None


HITS = {"memory": 0, "full": 0}


@pytest.fixture
def hits(monkeypatch):
    """How many calls and backward passes were repeated, or run in full, from memory."""
    count = dict(HITS)
    run, full = call_cache.CallCache.run, autograd_call.AutogradCall._general_backward

    def counted(self, *args):
        found = run(self, *args)
        count["memory"] += found is not None
        return found

    def counted_full(self, *args):
        count["full"] += 1
        return full(self, *args)

    monkeypatch.setattr(call_cache.CallCache, "run", counted)
    monkeypatch.setattr(autograd_call.AutogradCall, "_general_backward", counted_full)
    return count


def on_gpu(hidden, dtype=torch.bfloat16, kind="LSTM", width=24, **options):
    torch.manual_seed(0)
    return getattr(openrnn, kind)(
        width, hidden, device="cuda", dtype=dtype, backend="fused", **options
    )


def drawn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", [16, 13, 1024])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 3}, {"bidirectional": True},
                                     {"batch_first": True}], ids=str)  # fmt: skip
@pytest.mark.parametrize("given", [False, True])
def test_results_and_gradients_are_the_same_bits(hits, dtype, hidden, kind, options, given):
    """Of the first call, the one that is recorded, and two that repeat it, with other weights."""
    module = on_gpu(hidden, dtype, kind, **options)
    x = drawn(4, 7, 24, dtype=dtype)
    batch = x.shape[0] if "batch_first" in options else x.shape[1]
    hx = None
    if given:
        layers = options.get("num_layers", 1) * (2 if "bidirectional" in options else 1)
        hx = tuple(drawn(layers, batch, hidden, dtype=dtype) for _ in range(2))
        hx = hx if kind == "LSTM" else hx[0]
    leaves = [x, *module.parameters(), *(flat((x, hx))[1:] if given else ())]

    def step(remembers=True):
        if not remembers:
            module._call_cache = call_cache.CallCache()
        results = flat(module(x, hx))
        torch.manual_seed(3)
        grads = [torch.randn_like(result) for result in results]
        with torch.no_grad():
            plain = flat(module(x, hx))
        return [*results, *plain, *torch.autograd.grad(results, leaves, grads)]

    for _ in range(2):
        step()
    for _ in range(2):
        with torch.no_grad():
            for leaf in leaves:
                leaf.mul_(0.7)
        hits["memory"] = 0
        found = step()
        assert hits == {"memory": 2, "full": 0}
        kept = module._call_cache
        want = step(remembers=False)
        module._call_cache = kept
        for a, b in zip(found, want, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("masked", ["lengths", "lengths on the host", "reset", "both", "packed"])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 3}, {"bidirectional": True}, {"batch_first": True}], ids=str
)
def test_calls_with_masks_repeat(hits, dtype, masked, options):
    """The same bits as of a module that remembers nothing, of other masks each time."""
    module = on_gpu(256, dtype, **options)
    x = drawn(12, 12, 24, dtype=dtype)
    leaves = [x, *module.parameters()]

    def step(number, remembers=True):
        kept = module._call_cache
        if not remembers:
            module._call_cache = call_cache.CallCache()
        torch.manual_seed(number)
        lengths, reset = torch.randint(1, 13, (12,)), torch.rand(12, 12, device="cuda") < 0.1
        given, one = {}, x
        if masked == "packed":
            lengths[0] = 12
            one = torch.nn.utils.rnn.pack_padded_sequence(
                x, lengths, module.batch_first, enforce_sorted=False
            )
        elif masked != "reset":
            given["lengths"] = lengths if masked.endswith("host") else lengths.cuda()
        if masked in ("reset", "both"):
            given["reset"] = reset
        y, (h, c) = module(one, **given)
        y = y.data if masked == "packed" else y
        grads = torch.autograd.grad([y, h, c], leaves, [torch.ones_like(one) for one in (y, h, c)])
        with torch.no_grad():
            plain, _ = module(one, **given)
        module._call_cache = kept
        return [y, h, c, plain.data if masked == "packed" else plain, *grads]

    for number in range(2):
        step(number)
    for number in range(2, 4):
        hits["memory"] = 0
        found = step(number)
        assert hits == {"memory": 2, "full": 0}
        for a, b in zip(found, step(number, remembers=False), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}], ids=str)
def test_stacks_of_more_than_64_mib_repeat(hits, options):
    """As a wavefront and layer by layer, both directions at once: gradients have the same bits."""
    for wavefront in (0, 16):
        if options and wavefront:
            continue
        module = on_gpu(256, num_layers=4, width=256, wavefront=wavefront, **options)
        x = drawn(128, 64, 256)
        leaves = [x, *module.parameters()]
        found = []
        for _ in range(4):
            y, _ = module(x)
            found.append([y.detach(), *torch.autograd.grad(y.sum(), leaves)])
            del y
        assert hits["memory"] == 2
        hits["memory"] = 0
        (known,) = next(iter(module._call_cache._calls.values()))
        assert None not in known.run.run._known.values()
        for a, b in zip(found[0], found[3], strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("wavefront", [0, 5])
def test_dropout_repeats(hits, wavefront):
    """The same masks as of a module that remembers nothing, and as much of torch's generator."""
    module = on_gpu(64, num_layers=3, dropout=0.5, wavefront=wavefront)
    x = drawn(20, 7, 24)
    leaves = [x, *module.parameters()]

    def step(remembers=True):
        kept = module._call_cache
        if not remembers:
            module._call_cache = call_cache.CallCache()
        torch.manual_seed(5)
        y, _ = module(x)
        with torch.no_grad():
            plain, _ = module(x)
        again = checkpoint(lambda x: module(x)[0], x, use_reentrant=False)
        grads = torch.autograd.grad(y.sum() + again.sum(), leaves)
        module._call_cache = kept
        return [y.detach(), plain, again.detach(), *grads, torch.cuda.get_rng_state()]

    for _ in range(2):
        step()
    hits["memory"] = 0
    found = step()
    assert hits == {"memory": 2, "full": 0}
    for a, b in zip(found, step(remembers=False), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(found[0], found[1])


@pytest.mark.gpu
def test_nothing_is_rehearsed_during_a_capture(hits):
    """Forward of the second call, then backward of the third: both are remembered after it."""
    module, x = on_gpu(256), drawn(4, 7, 24)
    leaves = [x, *module.parameters()]

    def step():
        return torch.autograd.grad(module(x)[0].sum(), leaves)

    want = step()
    for number in range(2):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            step()
        assert hits["memory"] == number
        if not number:
            module(x)
            assert any(module._call_cache._calls.values())
    (known,) = next(iter(module._call_cache._calls.values()))
    assert not known.run.run._known
    found = step()
    assert len(known.run.run._known) == 1
    assert all(map(torch.equal, found, want))


@pytest.mark.gpu
def test_calls_repeat_on_any_stream_and_in_graphs(hits):
    module, x = on_gpu(256), drawn(4, 7, 24)
    with torch.no_grad():
        want, _ = module(x)[0], module(x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            aside = module(x)[0]
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(aside, want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, _ = module(x)
        x.mul_(2)
        graph.replay()
        torch.cuda.synchronize()
        assert hits["memory"] == 2
        assert not torch.equal(y, want)
        assert torch.equal(y, module(x)[0])


@pytest.mark.gpu
def test_calls_repeat_in_threads(hits):
    module = on_gpu(64)
    inputs = [drawn(4, 7, 24) for _ in range(8)]
    with torch.no_grad():
        want = [module(x)[0] for x in inputs]
    found = [None] * 8

    def run(place):
        with torch.no_grad():
            for _ in range(50):
                found[place] = module(inputs[place])[0]
        torch.cuda.synchronize()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hits["memory"] > 300
    assert all(map(torch.equal, found, want))


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [512, 500])
def test_calls_in_chunks_repeat(monkeypatch, hits, hidden):
    """In 16 bits gradients of weights are sums of several products, rounded at the end."""
    module, x = on_gpu(hidden, torch.bfloat16), drawn(20, 32, 24)
    monkeypatch.setattr(schedules, "edges", lambda loop, steps, *_: [0, 9, steps])
    runs, run = [], program.Program.run
    monkeypatch.setattr(program.Program, "run", lambda *given: runs.append(1) or run(*given))
    clear_caches()
    found = [torch.autograd.grad(module(x)[0].float().sum(), [x, *module.parameters()])
             for _ in range(5)]  # fmt: skip
    clear_caches()
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])
    assert len(runs) == 2 * hits["memory"] > 2  # forward and backward


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [64, 650, 1025])
@pytest.mark.parametrize("cell", ["lstm", "peephole_lstm"])
def test_gradients_of_vectors_and_padded_matrices_repeat(monkeypatch, hits, cell, hidden):
    """They are copied, by our kernel."""
    torch.manual_seed(0)
    module = openrnn.Recurrent(
        getattr(cells, cell), hidden, hidden, device="cuda", dtype=torch.bfloat16, backend="fused"
    )
    x, runs, run = drawn(6, 8, hidden), [], program.Program.run
    monkeypatch.setattr(program.Program, "run", lambda *given: runs.append(1) or run(*given))
    found = [
        [y := module(x)[0], *torch.autograd.grad(y.float().sum(), [x, *module.parameters()])]
        for _ in range(5)
    ]
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])
    assert len(runs) == 2 * hits["memory"] > 2  # forward and backward


@pytest.mark.gpu
def test_another_precision_is_another_call(hits):
    module, x = on_gpu(64, torch.float32), drawn(4, 7, 24, dtype=torch.float32)
    module.backend = "auto"
    before = torch.backends.cudnn.rnn.fp32_precision
    try:
        with torch.no_grad():
            torch.backends.cudnn.rnn.fp32_precision = "tf32"
            short, _ = [module(x)[0] for _ in range(3)][1:]
            assert hits["memory"] == 1
            torch.backends.cudnn.rnn.fp32_precision = "ieee"
            exact = module(x)[0]
            assert hits["memory"] == 1
    finally:
        torch.backends.cudnn.rnn.fp32_precision = before
    assert not torch.equal(short, exact)


@pytest.mark.gpu
def test_autocast_is_another_call(hits):
    module, x = on_gpu(64, torch.float32), drawn(4, 7, 24, dtype=torch.float32)
    with torch.no_grad():
        plain = [module(x)[0] for _ in range(3)][-1]
        assert hits["memory"] == 1
        with torch.autocast("cuda", torch.bfloat16):
            short = module(x)[0]
    assert hits["memory"] == 1
    assert plain.dtype == torch.float32
    assert not torch.equal(plain, short.float())


@pytest.mark.gpu
@pytest.mark.parametrize("masks", [(), ("lengths",), ("reset",)], ids=str)
@pytest.mark.parametrize("steps", [1, 9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_calls_under_autocast_repeat_with_their_casts(hits, dtype, steps, masks):
    """Inference and training, with parameters that change between calls and masks that do, too."""
    torch.manual_seed(0)
    module, other = (on_gpu(64, torch.float32, num_layers=2) for _ in range(2))
    other.load_state_dict(module.state_dict())
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (module, other)]
    for _ in range(6):
        given = {
            "lengths": torch.randint(1, steps + 1, (7,), device="cuda"),
            "reset": torch.rand(steps, 7, device="cuda") < 0.3,
        }
        given = {name: given[name] for name in masks}
        x, results = torch.randn(steps, 7, 24, device="cuda"), []
        for one, optimizer in zip((module, other), optimizers):
            if one is other:
                one._call_cache = type(one._call_cache)()  # remembers nothing
            leaf = x.clone().requires_grad_()
            with torch.autocast("cuda", dtype):
                with torch.no_grad():
                    ahead = one(leaf, **given)[0]
                y, (h, c) = one(leaf, **given)
            assert y.dtype == dtype
            optimizer.zero_grad()
            (y.float().square().sum() + h.float().sum() + c.float().sum()).backward()
            results.append([ahead, y, h, c, leaf.grad, *(p.grad for p in one.parameters())])
            optimizer.step()
        assert all(map(torch.equal, *results))
    assert hits["memory"] > 4
    # inference and training of one key: those of cast tensors would be another
    assert [len(calls) for calls in module._call_cache._calls.values() if calls] == [2]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
def test_one_step_modules_repeat(hits, kind):
    torch.manual_seed(0)
    module = getattr(openrnn, kind)(24, 64, device="cuda", dtype=torch.bfloat16)
    x, h = drawn(7, 24), drawn(7, 64)
    hx = (h, drawn(7, 64)) if kind == "LSTMCell" else h

    def step():
        found = module(x, hx)
        found = list(found) if isinstance(found, tuple) else [found]
        return [*found, *torch.autograd.grad(sum(one.float().sum() for one in found),
                                             [x, *module.parameters()])]  # fmt: skip

    first, _, third = (step() for _ in range(3))
    assert hits == {"memory": 1, "full": 0}
    assert all(map(torch.equal, first, third))
