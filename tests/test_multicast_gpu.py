"""The kernels with multicast in all that a call may ask: graphs, streams, chunks, masks.

`test_fused_gpu.py` has its sizes, `test_fused_lag.py` its order of events. A launch fills the
device, and its blocks wait for flags in memory that each launch needs filled anew.
"""

import copy
import itertools

import pytest
import torch
from test_fused_gpu import FAIR, MULTICAST, captured, family, step  # noqa: F401

import openrnn
from openrnn import cells, memo
from openrnn.backends.fused import kernels, schedules
from openrnn.codegen.multicast_config import MulticastConfig
from openrnn.nn.call_cache import CallCache
from openrnn.tuning import chunks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("family"),
]
both = pytest.mark.parametrize("family", MULTICAST, indirect=True)
forward_only = pytest.mark.parametrize("family", ["multicast"], indirect=True)
BACKWARD = ["multicast-backward", "multicast-in-cluster"]
backward_only = pytest.mark.parametrize("family", BACKWARD, indirect=True)
# the tests' own doing: x is a leaf of one stream and differentiated on another
other_streams = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
BF16, FP16, TF32 = torch.bfloat16, torch.float16, torch.float32
WIDTH = 24


def named(value):
    return getattr(value, "name", str(value))


@pytest.fixture
def backward(request):
    """Whether the kernels with multicast are backward's."""
    return request.getfixturevalue("family") in BACKWARD


@pytest.fixture(autouse=True)
def loops(request, backward, monkeypatch):
    """The configurations of all loops of the family's kind; there are some, each with multicast."""
    if backward and TF32 in request.node.callspec.params.values():
        pytest.skip("backward with multicast has operands of 16 bits, as stored")
    kind = "backward" if backward else "forward"
    found, launch = [], kernels.launch

    def noted(kernel, config, *given):
        if config.kind == kind:
            found.append(config)
        launch(kernel, config, *given)

    monkeypatch.setattr(kernels, "launch", noted)
    yield found
    assert found
    assert all(isinstance(config, MulticastConfig) for config in found)


def net_of(cell, hidden, dtype=BF16, width=WIDTH, **options):
    torch.manual_seed(hidden)
    return openrnn.Recurrent(
        cell, width, hidden, backend="fused", device="cuda", dtype=dtype, **options
    )


def drawn(*shape, dtype=BF16):
    return torch.randn(shape, device="cuda", dtype=dtype)


def states_of(net, batch, dtype=BF16):
    shape = net.spec.chains, batch, net.hidden_size
    return [drawn(*shape, dtype=dtype) for _ in net.spec.states]


def exactly(net):
    """The reference in float64 with the same weights."""
    exact = copy.deepcopy(net).double()
    exact.backend = "reference"
    return exact


def flat(found):
    return [found] if isinstance(found, torch.Tensor) else [t for part in found for t in flat(part)]


def packed(states):
    """As a layer takes them."""
    return None if not states else states[0] if len(states) == 1 else tuple(states)


def run(module, x, states=(), fresh=(), **given):
    """All results, and gradients of x, states, the states of resets and parameters."""
    kind = next(module.parameters()).dtype
    x, *leaves = [one.detach().to(kind).requires_grad_() for one in (x, *states, *fresh)]
    before, after = leaves[: len(states)], leaves[len(states) :]
    given |= {"reset_state": packed(after)} if after else {}
    made = flat(module(x, packed(before), **given))
    dice = torch.Generator("cuda").manual_seed(0)
    weights = [
        torch.randn(one.shape, device="cuda", generator=dice).bfloat16().to(kind) for one in made
    ]
    grads = torch.autograd.grad(made, [x, *leaves, *module.parameters()], weights)
    return [one.detach() for one in made], grads


def close(found, wanted, fair):
    for place, (have, want) in enumerate(zip(found, wanted, strict=True)):
        assert (have - want).norm() <= fair * want.norm(), place


def agree(net, x, states=(), fresh=(), slack=1, **given):
    """Results and gradients against float64, the same bits again, and results of inference.

    slack: by how much gradients may be further off.
    """
    fair = FAIR[x.dtype]
    found, wanted = (
        run(net, x, states, fresh, **given),
        run(exactly(net), x, states, fresh, **given),
    )
    close(found[0], wanted[0], fair)
    close(found[1], wanted[1], slack * fair)
    again = run(net, x, states, fresh, **given)
    for have, same in zip(flat(found), flat(again), strict=True):
        assert torch.equal(have, same)
    if fresh:
        given["reset_state"] = packed(fresh)
    with torch.no_grad():
        close(flat(net(x, packed(states), **given)), wanted[0], fair)


def masks_of(names, steps, batch):
    """Lengths with the shortest and the longest among them, in no order; resets."""
    lengths = torch.randint(0, steps + 1, (batch,), device="cuda")
    lengths[:2] = torch.tensor([0, steps])
    every = {"lengths": lengths, "reset": torch.rand(steps, batch, device="cuda") < 0.15}
    return {name: every[name] for name in names}


def check_replays(net, inputs, dy):
    """A graph of a training step gives each input what a call gives it."""
    x = inputs[0].clone().requires_grad_()
    step(net, x, dy)
    graph, made = captured(net, x, dy)
    for other in (*inputs, inputs[0]):
        with torch.no_grad():
            x.copy_(other)
        for value in made:
            value.zero_()
        graph.replay()
        found = [value.clone() for value in made]
        assert all(map(torch.equal, found, step(net, x, dy)))


def check_callers_stream(net, inputs, dy):
    """Calls on another stream read what that stream wrote before them."""
    wanted = [step(net, x.clone().requires_grad_(), dy) for x in inputs]
    x = torch.zeros_like(inputs[0]).requires_grad_()
    net._call_cache = CallCache()
    torch.cuda.synchronize()
    found = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for number in range(6):  # from the third on the call is remembered
            torch.cuda._sleep(10**7)
            with torch.no_grad():
                x.copy_(inputs[number % 2])
            found.append(step(net, x, dy))
        torch.cuda.current_stream().synchronize()
    for number, results in enumerate(found):
        assert all(map(torch.equal, results, wanted[number % 2])), number


@both
@other_streams
@pytest.mark.parametrize(
    ("cell", "hidden", "batch"),
    [(cells.lstm, 1024, 256), (cells.gru, 768, 300), (cells.rnn_tanh, 512, 64),
     (cells.lstm, 1536, 70)],
    ids=named,
)  # fmt: skip
def test_a_graph_replays_with_other_inputs(cell, hidden, batch):
    """Were flags left from the replay before, blocks would multiply h of the inputs before.

    Also what a launch takes from its host: a batch in several launches, each with rows of its own.
    """
    net, steps = net_of(cell, hidden), 6
    inputs = [drawn(steps, batch, WIDTH) for _ in range(3)]
    dy = drawn(steps, batch, hidden)
    check_replays(net, inputs, dy)


@both
@other_streams
@pytest.mark.parametrize("batch", [64, 300])
def test_all_of_a_call_runs_on_the_callers_stream(batch):
    """A launch, or the filling of flags, on the default stream would not wait for x."""
    net, steps = net_of(cells.lstm, 1024), 6
    inputs = [drawn(steps, batch, WIDTH) for _ in range(2)]
    dy = drawn(steps, batch, 1024)
    check_callers_stream(net, inputs, dy)


@both
@pytest.mark.parametrize("same", [False, True], ids=["two-layers", "one-layer"])
def test_two_streams_at_once(backward, same):
    """Two launches do not fit together: were half the blocks of each there, both would hang.

    One layer on two streams shows memory of flags or of h that two calls share.
    """
    net = net_of(cells.lstm, 1024)
    nets = [net, net if same else net_of(cells.gru, 768)]
    inputs = [[drawn(20, 256, WIDTH).requires_grad_() for _ in range(4)] for _ in nets]
    dys = [drawn(20, 256, one.hidden_size) for one in nets]

    def call(place, x):
        return step(nets[place], x, dys[place]) if backward else [nets[place](x)[0]]

    with torch.set_grad_enabled(backward):
        alone = [[call(place, x) for x in given] for place, given in enumerate(inputs)]
        streams = [torch.cuda.Stream() for _ in nets]
        torch.cuda.synchronize()
        for _ in range(10):
            for stream in streams:  # so that launches of both wait there, and begin together
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(10**7)
            found = [[], []]
            for number, place in itertools.product(range(4), range(2)):
                with torch.cuda.stream(streams[place]):
                    found[place].append(call(place, inputs[place][number]))
            torch.cuda.synchronize()
            for have, want in zip(flat(found), flat(alone)):
                assert torch.equal(have, want)


LOOPS = {"memory": 10, "recompute": 20, "beside": 6, "wavefront": 10}  # forward, of two layers


@both
@pytest.mark.parametrize("masks", [(), ("lengths", "reset")], ids=["plain", "masks"])
@pytest.mark.parametrize("how", LOOPS)
def test_a_call_in_chunks_of_time(monkeypatch, loops, how, masks):
    """Chunks hand states on in a stack: wrong at an edge is the state, the mask or where y lies.

    With `recompute` backward runs the loops again; `beside` runs the next chunk's product and fills
    its flags on a side stream meanwhile. As a wavefront loops of two layers run at once, each in a
    kernel of half the device.
    """
    steps, batch, hidden = 23, 130, 512
    options = {"recompute": {"recompute": "gates"}, "wavefront": {"wavefront": 5}}
    options = options.get(how, {"wavefront": 0})  # not in one launch
    net = net_of(cells.lstm, hidden, num_layers=2, **options)
    if how == "beside":
        monkeypatch.setattr(schedules, "edges", lambda *asked: [0, 5, 14, steps])
    elif how != "wavefront":
        for name in ("for_memory", "for_recompute"):
            monkeypatch.setattr(chunks, name, lambda steps, batch, row: -(-steps // 5))
    memo.clear()
    x, states = drawn(steps, batch, WIDTH), states_of(net, batch)
    given = masks_of(masks, steps, batch)
    if masks:  # at edges of chunks
        given["lengths"][2:7] = torch.tensor([4, 5, 9, 13, 14])
        given["reset"][3:6, ::3] = given["reset"][12:15, 1::3] = True
    run(net, x, states, **given)
    again = how == "recompute" and loops[0].kind == "backward"  # whose loops run once
    assert len(loops) == (LOOPS["memory"] if again else LOOPS[how])
    agree(net, x, states, **given)
    agree(net, x, states, **given, return_states=True)


@both
@pytest.mark.parametrize("masks", [(), ("lengths", "reset")], ids=["plain", "masks"])
def test_two_stages_of_a_pipeline_on_one_device(loops, masks):
    """Loops of both stages are on streams of their own, and chunks are programs from the second on.

    They would hang if one's blocks came between the other's, and read states too early without
    events.
    """
    steps, batch = 12, 256
    net = net_of(cells.gru, 768, num_layers=2)
    pipeline = openrnn.Pipeline(copy.deepcopy(net), ["cuda:0", "cuda:0"], chunks=3)
    given = masks_of(masks, steps, batch)
    for _ in range(3):
        x, states = drawn(steps, batch, WIDTH), states_of(net, batch)
        found, wanted = (run(module, x, states, **given) for module in (pipeline, exactly(net)))
        close(flat(found), flat(wanted), FAIR[BF16])
    assert len(loops) >= 4  # of the first chunk, and of the second, which is written down


@both
@pytest.mark.parametrize("masks", [(), ("lengths", "reset", "fresh")], ids=["plain", "masks"])
@pytest.mark.parametrize(
    ("cell", "hidden", "batch", "dtype"),
    [(cells.lstm, 1024, 256, BF16), (cells.lstm, 1024, 300, FP16), (cells.lstm, 768, 130, TF32),
     (cells.gru, 640, 256, BF16), (cells.rnn_tanh, 512, 70, BF16),
     (cells.lstm, 1280, 48, BF16), (cells.gru, 1536, 130, FP16)],
    ids=named,
)  # fmt: skip
def test_states_of_all_steps(cell, hidden, batch, dtype, masks):
    """Where each row's states are stored, rows sorted by length; resets begin with given states."""
    steps = 9
    net = net_of(cell, hidden, dtype)
    x, states = drawn(steps, batch, WIDTH, dtype=dtype), states_of(net, batch, dtype)
    fresh = states_of(net, batch, dtype) if masks else ()
    agree(net, x, states, fresh, return_states=True, **masks_of(masks[:2], steps, batch))


@both
@pytest.mark.parametrize(
    ("cell", "hidden", "batch", "options"),
    [(cells.lstm, 1024, 256, {"input_mode": "gates"}),
     (cells.gru, 768, 256, {"input_mode": "gates"}),
     (cells.gru, 509, 130, {"input_mode": "gates", "bidirectional": True}),
     (cells.lstm, 640, 256, {"input_mode": "skip"}),
     (cells.rnn_tanh, 512, 70, {"input_mode": "skip"}),
     (cells.lstm, 1024, 256, {"cell_clip": (-0.05, 0.03)}),
     (cells.lstm, 768, 256, {"reverse": True, "bias_mode": "input"}),
     (cells.lstm, 1024, 256, {"bidirectional": True}),
     (cells.gru, 768, 256, {"bidirectional": True, "bias_mode": "none"}),
     (cells.rnn_tanh, 640, 256, {"bidirectional": True, "bias_mode": "recurrent"})],
    ids=named,
)  # fmt: skip
def test_options(cell, hidden, batch, options):
    """x as it is instead of a product, in its own strides; a bound; back in time; y side by side.

    Near a bound one rounding decides whether a gradient passes: these are further off.
    """
    widths = {"gates": hidden * len(cell.gates), "skip": hidden}
    width = widths.get(options.get("input_mode"), WIDTH)
    net = net_of(cell, hidden, width=width, **options)
    x, states = drawn(10, batch, width), states_of(net, batch)
    slack = 5 if "cell_clip" in options else 1
    agree(net, x, states, slack=slack)
    if "input_mode" not in options:
        return
    wide = drawn(10, batch, width + 16)[..., 8 : 8 + width]
    turned = drawn(batch, 10, width).transpose(0, 1)
    for other in (wide, turned):
        with torch.no_grad():
            found, wanted = (flat(net(one, packed(states))) for one in (other, other.contiguous()))
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(
    ("family", "grad"),
    [("multicast", False), ("multicast", True), *((name, True) for name in BACKWARD)],
    indirect=["family"],
)
def test_a_call_that_is_remembered(loops, grad):
    """Its launches were written down: with other addresses, and with flags that are filled."""
    net, steps, batch = net_of(cells.lstm, 1024), 5, 256
    inputs = [drawn(steps, batch, WIDTH).requires_grad_() for _ in range(4)]
    dy = drawn(steps, batch, 1024)

    def call(x):
        if grad:
            return step(net, x, dy)
        with torch.no_grad():
            return flat(net(x))

    wanted = []
    for x in inputs:
        net._call_cache = CallCache()
        wanted.append(call(x))
    net._call_cache = CallCache()
    for _ in range(3):  # backward is written down one call later than forward
        call(inputs[0])
    before = len(loops)
    found = [call(x) for x in inputs]
    assert len(loops) == before  # none was launched in another way
    for have, want in zip(found, wanted):
        assert all(map(torch.equal, have, want))
