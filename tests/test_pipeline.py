"""A stack in stages over devices gives what the layer gives, on one device, in any cut of time."""

import copy
import pickle
from functools import partial
from itertools import chain

import pytest
import torch
from cases import CLIP
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pack_sequence
from torch.utils.flop_counter import FlopCounterMode

import openrnn
from openrnn.nn import links, stages
from openrnn.nn import pipeline as pipelines
from openrnn.schedule.wavefront import diagonals

pytestmark = pytest.mark.usefixtures("one_thread")
T, B, I, H, L = 7, 3, 4, 5, 4  # noqa: E741  # the letters of shapes

FACES = {
    "lstm": lambda **k: openrnn.LSTM(I, H, L, **k),
    "lstm, clip, projection": lambda **k: openrnn.LSTM(I, H, L, proj_size=2, cell_clip=CLIP, **k),
    "gru": lambda **k: openrnn.GRU(I, H, L, bias=False, **k),
    "rnn, three layers": lambda **k: openrnn.RNN(I, H, 3, nonlinearity="relu", **k),
    "one state in a tuple": lambda **k: openrnn.Recurrent(openrnn.cells.mgu, I, H, L, **k),
    "unit vectors": lambda **k: openrnn.Recurrent(openrnn.cells.peephole_lstm, I, H, L, **k),
    "the reference alone": lambda **k: openrnn.Recurrent(
        openrnn.cells.gru_reset_before, I, H, 2, **k
    ),
    "no input matrix": lambda **k: openrnn.LSTM(4 * H, H, L, input_mode="gates", **k),
    "batch first": lambda **k: openrnn.LSTM(I, H, L, batch_first=True, **k),
}  # fmt: skip
CALLS = {"plain": (), "lengths": ("lengths",), "reset": ("hx", "reset"),
         "all": ("hx", "lengths", "reset", "reset_state", "return_states")}  # fmt: skip


def made(face="lstm", devices=2, chunks=3, dtype=torch.float64, device="cpu", **options):
    """A layer, and a pipeline with the same weights."""
    torch.manual_seed(0)
    layer = FACES[face](dtype=dtype, **options)
    places = [device] * devices if isinstance(device, str) else device
    pipeline = openrnn.Pipeline(copy.deepcopy(layer), places, chunks)
    return layer.to(places[0]), pipeline


def inputs(layer, words=(), dtype=torch.float64, device="cpu"):
    """x, hx or None, and the options that the words name."""
    dice = torch.Generator().manual_seed(1)

    def drawn(*shape):
        return torch.randn(*shape, generator=dice, dtype=torch.float64).to(device, dtype)

    def states():
        return [drawn(layer.num_layers, B, width) for width in layer.spec.state_sizes]

    x, hx, fresh = drawn(T, B, layer.input_size), states(), states()
    reset = torch.rand(T, B, generator=dice) < 0.3
    if layer.batch_first:
        x, reset = x.transpose(0, 1), reset.T
    options = {"lengths": torch.tensor([4, 0, T]), "reset": reset, "return_states": True,
               "reset_state": fresh}  # fmt: skip
    given = {name: option for name, option in options.items() if name in words}
    return x, hx if "hx" in words else None, given


def tensors_of(found):
    return (
        [found]
        if isinstance(found, torch.Tensor)
        else [t for part in found for t in tensors_of(part)]
    )


def asked(layer, x, hx, options, **more):
    """Outputs; gradients of x, states, reset states and parameters, of all outputs."""

    def leaf(tensor):
        return tensor.detach().clone().requires_grad_()

    x, hx = leaf(x), None if hx is None else [*map(leaf, hx)]
    fresh = [*map(leaf, options.get("reset_state", ()))]
    options = {**options, **({"reset_state": pack(layer, fresh)} if fresh else {}), **more}
    outputs = tensors_of(layer(x, None if hx is None else pack(layer, hx), **options))
    leaves = [x, *(hx or ()), *fresh, *layer.parameters()]
    dice = torch.Generator().manual_seed(2)
    grads = [torch.randn(y.shape, generator=dice, dtype=torch.float64).to(y) for y in outputs]
    found = torch.autograd.grad(outputs, leaves, grads)
    return [t.detach().cpu() for t in (*outputs, *found)]


def pack(layer, states):
    one = isinstance(layer, openrnn.GRU | openrnn.RNN) or getattr(layer, "_one_state", False)
    return states[0] if one else tuple(states)


@pytest.mark.parametrize("words", CALLS)
@pytest.mark.parametrize("face", FACES)
def test_a_pipeline_is_the_layer(face, words):
    layer, pipeline = made(face)
    given = inputs(layer, CALLS[words])
    torch.testing.assert_close(asked(pipeline, *given), asked(layer, *given))


@pytest.mark.parametrize(
    ("devices", "chunks"), [(1, 1), (1, 3), (2, 7), (3, 2), (4, 100), (4, None)]
)
def test_any_cut(devices, chunks):
    layer, pipeline = made(devices=devices, chunks=chunks)
    given = inputs(layer, CALLS["all"])
    torch.testing.assert_close(asked(pipeline, *given), asked(layer, *given))


def test_no_steps_and_no_sequences():
    layer, pipeline = made()
    x, hx, _ = inputs(layer, ["hx"])
    for few, states in ((x[:0], hx), (x[:, :0], [s[:, :0] for s in hx])):
        torch.testing.assert_close(asked(pipeline, few, states, {}), asked(layer, few, states, {}))


def test_other_inputs():
    layer, pipeline = made()
    x, hx, _ = inputs(layer, ["hx"])
    rows = pack_sequence([x[:2, 0], x[:5, 1], x[:3, 2]], enforce_sorted=False)
    ragged = {"lengths": [1, 2, 3], "padding_value": 9.0}
    for got, want in (
        (pipeline(x[:, 0]), layer(x[:, 0])),
        (pipeline.step(x[0], hx), layer.step(x[0], hx)),
        (pipeline(rows, hx), layer(rows, hx)),
        (pipeline(x, **ragged), layer(x, **ragged)),
    ):  # fmt: skip
        torch.testing.assert_close(got, want)


def test_nothing_is_read_before_it_has_been_waited_for(monkeypatch):
    """Copies that arrive when somebody waits for them, full of nan until then."""
    on_the_way = []

    def send(links, tensor, *_):
        there = torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 0)
        on_the_way.append((there, tensor.clone()))
        return there

    def use(links, device):
        while on_the_way:
            there, value = on_the_way.pop()
            there.copy_(value)

    layer, pipeline = made(devices=4)
    given = inputs(layer, CALLS["all"])
    want = asked(layer, *given)
    monkeypatch.setattr(links.Links, "send", send)
    monkeypatch.setattr(links.Links, "use", use)
    torch.testing.assert_close(asked(pipeline, *given), want)
    monkeypatch.setattr(links.Links, "use", lambda links, device: on_the_way.clear())
    assert any(found.isnan().any() for found in asked(pipeline, *inputs(layer)))


def test_a_copy_waits_for_its_own_chunk_alone(monkeypatch):
    """Streams that note what is done before what they do next; a chunk costs two events."""
    current, recorded = {}, []

    class Stream:
        def __init__(self, device):
            self.device, self.done = device, set()

        def wait_event(self, event):
            self.done |= event.done

        wait_stream = wait_event

    class Event:
        done = frozenset()

        def record(self, stream):
            self.done = frozenset(stream.done)
            recorded.append(stream)

    def copy_(there, tensor, non_blocking):
        """As torch orders copies between the current streams of two GPUs."""
        source, target = current[tensor.device], current[there.device]
        source.done |= target.done | {f"copy {len(tensor)}"}
        target.done |= source.done

    here, there = torch.device("cpu"), torch.device("meta")
    ways = links.Links([])
    ways._streams = {
        each: links.DeviceStreams(*(Stream(each) for _ in range(3)), Event(), Event())
        for each in (here, there)
    }
    monkeypatch.setattr(torch.cuda, "set_stream", lambda one: current.update({one.device: one}))
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    loops, reads = (ways._streams[each].kernels.done for each in (here, there))
    reads.add("before")
    buffer = ways.receive_buffer((7,), torch.float32, here, there)
    assert "before" in ways._streams[there].copies_in.done
    recorded.clear()
    loops.add("loop 1")
    for chunk in (1, 2, 3):  # of so many steps; launched before the chunk below is sent
        part = ways.send(torch.ones(chunk), there, buffer, slice(chunk, 2 * chunk))
        assert part.device == there
        assert part.data_ptr() == buffer[chunk:].data_ptr()
        loops.add(f"loop {chunk + 1}")
        ways.use(there)
        done = {f"{what} {k}" for what in ("loop", "copy") for k in range(1, chunk + 1)}
        assert ways._streams[there].kernels.done == done | {"before"}
        assert current == {each: ways._streams[each].kernels for each in (here, there)}
    assert len(recorded) == 6
    assert not any(word.startswith("copy") for word in ways._streams[here].kernels.done)
    assert ways.send(torch.ones(3), here).device == here
    assert ways.receive_buffer((7,), torch.float32, there, torch.device("cuda:7")) is None


def test_stages_run_beside_each_other(monkeypatch):
    """Launches are made diagonal by diagonal, in backward the other way."""
    launched = []

    def noted(run):
        def run_noted(plan, d, k, *rest):
            launched.append((d, k))
            return run(plan, d, k, *rest)

        return run_noted

    layer, pipeline = made(devices=2, chunks=3)
    for name in ("_run", "_run_back"):
        monkeypatch.setattr(stages, name, noted(getattr(stages, name)))
    asked(pipeline, *inputs(layer))
    there = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert launched == there + [(1 - d, 2 - k) for d, k in there] == [
        *chain(*diagonals(2, 3)), *((1 - d, 2 - k) for d, k in chain(*diagonals(2, 3)))
    ]  # fmt: skip


def test_gradients_of_16_bits_are_summed_in_float32():
    """Against float64, at most twice the error of the layer, which multiplies all steps at once."""
    exact, _ = made()
    layer, pipeline = (each.to(torch.bfloat16) for each in made(chunks=200))
    exact.load_state_dict(layer.state_dict())
    x = torch.ones(200, B, I, dtype=torch.bfloat16)
    for each in (exact, layer, pipeline):
        each(x.to(each.weight_hh_l0.dtype))[0].sum().backward()
    for a, b, c in zip(*(each.parameters() for each in (exact, layer, pipeline))):
        floor = torch.finfo(torch.bfloat16).eps * float(a.grad.abs().max())
        error = [float((each.grad - a.grad).abs().max()) for each in (b, c)]
        assert c.grad.dtype == torch.bfloat16
        assert error[1] <= 2 * error[0] + floor


def test_only_gradients_that_are_wanted(monkeypatch):
    """Stages below all that requires a gradient keep nothing and run no backward pass."""
    last, backward = [], stages.backward
    monkeypatch.setattr(
        stages, "backward", lambda *a: last.append((len(a[2]), a[-1])) or backward(*a)
    )
    layer, pipeline = made()
    for each in (layer, pipeline):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_(name.endswith("_l3") and "weight" in name)
        y, (h, _) = each(inputs(layer)[0])
        (y.square().sum() + h.sum()).backward(retain_graph=True)
        h.sum().backward()
    assert last == [(3, False), (3, True)]  # chunks that were kept; whether nobody reads them again
    for (name, a), b in zip(pipeline.named_parameters(), layer.parameters()):
        assert (a.grad is None) == (b.grad is None) == (not b.requires_grad), name
        if b.requires_grad:
            torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("devices", [1, 3])
def test_dropout(devices):
    """Masks of their own in each chunk, boundary and call; gradients through the same masks."""
    _, pipeline = made(devices=devices, chunks=2, dropout=0.5)
    x = inputs(pipeline)[0][:6]
    x = torch.cat([x[:3], x[:3]])
    reset = torch.zeros(6, B, dtype=torch.bool)
    reset[3] = True

    def run(x, seed=0):
        return pipeline(x, reset=reset, generator=torch.Generator().manual_seed(seed))[0]

    y = run(x)
    assert torch.equal(y, run(x))
    assert not torch.equal(y, run(x, 1))
    assert not torch.equal(y[:3], y[3:])
    assert torch.autograd.gradcheck(run, x[:, :1].expand(6, B, I).clone().requires_grad_())
    assert not torch.equal(pipeline(x)[0], pipeline(x)[0])
    pipeline.eval()
    assert torch.equal(run(x)[:3], run(x)[3:])
    pipeline.train().dropout = 0.0
    torch.testing.assert_close(run(x), pipeline.eval()(x, reset=reset)[0])


def test_dropout_between_stages_alone():
    """With one layer a stage, no mask is a kernel's: all outputs dropped leave biases alone."""
    layer, pipeline = made("gru", devices=4, dropout=1.0)
    x = inputs(layer)[0]
    torch.testing.assert_close(pipeline(x), layer(x))
    _, pipeline = made("gru", devices=4, chunks=2, dropout=0.25)
    run = partial(pipeline, generator=torch.Generator().manual_seed(3))
    y = stages._dropped(torch.ones(100, 100, 4), torch.rand(100, 100, 4) < 0.75, 0.25)
    assert {*y.unique().tolist()} == {0.0, torch.tensor(1 / 0.75).item()}
    assert not torch.equal(run(x)[0], run(x)[0])  # the generator goes on
    drawn = pipelines._generators(pipeline.stages, torch.Generator().manual_seed(3))
    assert len({own.initial_seed() for own in drawn}) == 4


def test_a_module_as_the_layer_was():
    layer, pipeline = made()
    x = inputs(layer)[0]
    assert [*pipeline.state_dict()] == [*layer.state_dict()]
    before = [*layer.parameters()]
    taken = openrnn.Pipeline(layer, ["cpu"] * 4)
    assert all(a is b for a, b in zip(before, taken.parameters()))
    pipeline.load_state_dict(layer.state_dict())
    for other in (copy.deepcopy(pipeline), pickle.loads(pickle.dumps(pipeline))):
        torch.testing.assert_close(other(x), layer(x))
        assert other.weight_hh_l0.data_ptr() != pipeline.weight_hh_l0.data_ptr()
    assert pipeline.float()(x.float())[0].dtype == torch.float32
    assert "devices=['cpu', 'cpu'], chunks=3" in repr(pipeline)
    with torch.autocast("cpu", torch.bfloat16):
        assert pipeline(x.float())[0].dtype == torch.bfloat16


def test_layers_are_dealt_evenly():
    spec = openrnn.LSTM(I, H, 5, proj_size=2, input_mode="linear").spec
    cut = stages.cut(spec, tuple(map(torch.device, ("cuda:0", "cuda:1", "cpu"))))
    assert [stage.spec.num_layers for stage in cut] == [2, 2, 1]
    assert [stage.spec.input_size for stage in cut] == [I, 2, 2]
    assert [stage.weights for stage in cut] == [slice(0, 10), slice(10, 20), slice(20, 25)]


def test_how_many_chunks():
    """Two for each stage, of 64 steps at least; one on one device."""
    spec = openrnn.LSTM(I, H, L).spec

    def chunks(steps, *numbers):
        return pipelines.chunks_for(
            stages.cut(spec, tuple(torch.device("cuda", k) for k in numbers)), steps
        )

    assert [chunks(steps, 0, 1) for steps in (0, 1, 127, 128, 255, 256, 100_000)] == [
        1, 1, 1, 2, 3, 4, 4
    ]  # fmt: skip
    assert chunks(512, 0, 1, 2, 3) == 8
    assert chunks(512, 0) == chunks(512, 0, 0) == 1


@pytest.mark.parametrize("wavefront", [None, 0, 1, 8])
def test_layers_of_a_stage_run_as_those_of_the_stack(monkeypatch, wavefront):
    """Also where the model chooses: in stages that was faster than layer by layer."""
    asked, routes = [], pipelines._routes

    def recorded(pipeline, cut, *rest):
        asked.append([stage.spec.wavefront for stage in cut])
        return routes(pipeline, cut, *rest)

    monkeypatch.setattr(pipelines, "_routes", recorded)
    layer, pipeline = made(wavefront=wavefront, chunks=2)
    x, *_ = inputs(layer)
    pipeline(x)
    assert asked == [[wavefront] * 2]


@pytest.mark.parametrize("grad", [False, True])
def test_chunks_repeat(monkeypatch, grad):
    """Chunks of a kind are one `PreparedCall` from the second on; odd ones are calls.

    A stage has three kinds: without states, with them, and the last one, of 1 step and not 2.
    """
    layer, pipeline = made(chunks=4)
    x = inputs(layer)[0].requires_grad_(grad)
    want = layer(x)
    eager, asked_for = [], []
    run, cpu = stages.op.eager, type(stages.BACKENDS["cpu"])
    monkeypatch.setattr(stages.op, "eager", lambda *a: eager.append(1) or run(*a))
    name = "prepare_grad" if grad else "prepare"
    repeat = getattr(cpu, name)
    monkeypatch.setattr(cpu, name, lambda *a, **k: asked_for.append(1) or repeat(*a, **k))
    back, backward = [], stages.time_reversed.backward
    monkeypatch.setattr(stages.time_reversed, "backward", lambda *a: back.append(1) or backward(*a))
    for kinds, alone in ((1, 3), (2, 0), (0, 0)):  # that come to repeat in this call, or do not
        with torch.set_grad_enabled(grad):
            found = pipeline(x)
            torch.testing.assert_close(found, want)
        if grad:
            found[0].sum().backward()
        assert [*map(len, (asked_for, eager))] == [2 * kinds, 2 * alone]
        assert len(back) == (2 * alone if grad else 0)
        for noted in (asked_for, eager, back):
            noted.clear()
    with (
        torch.set_grad_enabled(grad),
        torch.autograd.graph.save_on_cpu(),
    ):  # hooks see what the whole call saves
        torch.testing.assert_close(pipeline(x), want)
    assert len(eager) == 8
    torch.testing.assert_close(pipeline(x, reset=torch.zeros(T, B, dtype=torch.bool)), want)
    assert len(eager) == 16


def test_chunks_repeat_for_other_strides():
    """x of any strides has a program of its own; states and weights that do not lie dense none."""
    layer, pipeline = made(chunks=2)
    x, hx, _ = inputs(layer, ["hx"])

    def turned(tensor):
        return tensor.detach().mT.contiguous().mT

    across = x.transpose(0, 1).contiguous().transpose(0, 1)
    for given, states in 2 * ((x, hx), (across, hx), (turned(x), hx), (x, [*map(turned, hx)])):
        got, want = (asked(each, given, states, {}) for each in (pipeline, layer))
        torch.testing.assert_close(got, want)
    for each in (layer, pipeline):
        weight = each.weight_hh_l1
        weight.data = turned(weight)
    torch.testing.assert_close(asked(pipeline, x, hx, {}), asked(layer, x, hx, {}))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo
def test_torch_compile_runs_it_outside_its_graph():
    layer, pipeline = made()
    x = inputs(layer)[0]
    got = torch.compile(lambda x: pipeline(2 * x)[0].tanh(), backend="eager")(x)
    torch.testing.assert_close(got, layer(2 * x)[0].tanh())


class TestRefusals:
    def test_second_derivatives(self):
        x = inputs(made()[0])[0].requires_grad_()
        y = made()[1](x)[0].sum()
        with pytest.raises(ValueError, match="has first derivatives alone"):
            torch.autograd.grad(y, x, create_graph=True)

    def test_transforms(self):
        layer, pipeline = made()
        x = inputs(layer)[0]
        with pytest.raises(ValueError, match=r"outside of torch\.func"):
            torch.func.vmap(pipeline)(x[None])
        with FlopCounterMode(display=False), pytest.raises(ValueError, match="dispatch modes"):
            pipeline(x)

    def test_stepper(self):
        with pytest.raises(ValueError, match="has no stepper"):
            made()[1].stepper()

    @pytest.mark.parametrize(
        ("options", "devices", "chunks", "words"),
        [
            ({"bidirectional": True}, 2, None, "runs forward, got a bidirectional one"),
            ({"reverse": True}, 2, None, "runs forward, got a reverse one"),
            ({}, 5, None, "devices must be a list of 1 to 4, as each gets a layer"),
            ({}, 0, None, "devices must be a list of 1 to 4, as each gets a layer"),
            ({}, 2, 0, "chunks must be a number from 1, or None, got 0"),
        ],
    )
    def test_what_does_not_fit(self, options, devices, chunks, words):
        with pytest.raises(ValueError, match=words):
            made(devices=devices, chunks=chunks, **options)

    def test_other_layers(self):
        with pytest.raises(TypeError, match="must be one of openrnn"):
            openrnn.Pipeline(torch.nn.LSTM(I, H, 2), ["cpu"] * 2)
        layer = openrnn.LSTM(I, H, 2)
        parametrize.register_parametrization(layer, "weight_hh_l1", torch.nn.Identity())
        with pytest.raises(ValueError, match="weights are Parameters"):
            openrnn.Pipeline(layer, ["cpu"] * 2)
        model = torch.nn.Sequential(openrnn.LSTM(I, H, 2))
        openrnn.quantize(model, quiet=True)
        with pytest.raises(ValueError, match="weights are Parameters"):
            openrnn.Pipeline(model[0], ["cpu"] * 2)


def two_gpus(second):
    if second == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return ["cuda:0", second]


def no_worse(exact, plain, found, eps):
    for a, b, c in zip(exact, plain, found):
        floor = eps * max(1.0, float(a.abs().max()))
        assert float((c - a).abs().max()) <= 2 * float((b - a).abs().max()) + floor


@pytest.mark.gpu
@pytest.mark.parametrize("second", ["cuda:0", "cuda:1", "cpu"])
@pytest.mark.parametrize("words", CALLS)
def test_on_gpus(words, second):
    places = two_gpus(second)
    exact, _ = made()
    layer, pipeline = made(dtype=torch.float32, device=places, precision="tf32")
    given = inputs(layer, CALLS[words], torch.float32, "cuda:0")
    want, plain = asked(exact, *inputs(exact, CALLS[words])), asked(layer, *given)
    for _ in range(2):
        no_worse(want, plain, asked(pipeline, *given), 2**-9)
    assert {p.device for p in pipeline.cuda().parameters()} == {*map(torch.device, places)}


@pytest.mark.gpu
@pytest.mark.parametrize("second", ["cuda:0", "cuda:1"])
def test_chunks_on_gpus_are_programs(second):
    """Both passes, of sizes that need no copy."""
    places = two_gpus(second)
    torch.manual_seed(0)
    exact = openrnn.LSTM(64, 64, 4, dtype=torch.bfloat16).double()
    layer = openrnn.LSTM(64, 64, 4, dtype=torch.bfloat16, device="cuda:0")
    layer.load_state_dict(exact.state_dict())
    pipeline = openrnn.Pipeline(copy.deepcopy(layer), places, chunks=5)
    for number in range(3):
        x = torch.randn(23, 16, 64).bfloat16().to("cuda:0")
        want = asked(exact, x.cpu().double(), None, {})
        no_worse(want, asked(layer, x, None, {}), asked(pipeline, x, None, {}), 2**-7)
        stage = [*pipeline._call_cache.module_cache.values()]
        assert [len(known) for known in stage] == [3, 3]
        runs = [run for known in stage for run in known.values()]
        assert runs.count(stages.ONCE) == (4 if number == 0 else 0)
        for run in (run for run in runs if run is not stages.ONCE):
            assert run is not None
            assert all(back is not None for back in run._known.values())
    with torch.no_grad():
        torch.testing.assert_close(pipeline(x), pipeline(x))
