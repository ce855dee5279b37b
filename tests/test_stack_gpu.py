"""Stacks in one launch on the GPU, in all that a call may ask.

`test_fused_lag.py` has their order of events. Layers run at once, each behind another, and
read what that publishes: a launch fills flags for all of them, and each has arguments of its own.
"""

import threading

import pytest
import torch
from sanitize import splits_of
from test_fused_gpu import FAIR, step
from test_fused_lag import no_clusters
from test_multicast_gpu import (
    WIDTH,
    agree,
    check_callers_stream,
    check_replays,
    close,
    drawn,
    exactly,
    flat,
    masks_of,
    named,
    net_of,
    packed,
    run,
    states_of,
)

import openrnn
from openrnn import cells, memo
from openrnn.backends.fused import kernels
from openrnn.nn.call_cache import CallCache
from openrnn.tuning import measured, multicast, single_step
from openrnn.tuning.limits import Limits

pytestmark = pytest.mark.gpu
BF16, FP16, TF32 = torch.bfloat16, torch.float16, torch.float32
# the tests' own doing: x is a leaf of one stream and differentiated on another
other_streams = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")


@pytest.fixture(autouse=True)
def loops(monkeypatch):
    """The kind of each loop that is launched, and how many layers it runs."""
    about = torch.cuda.get_device_properties()
    if (about.major, about.minor) != (9, 0):
        pytest.skip("wgmma needs compute capability 9.0")
    if about.multi_processor_count < measured.PROCESSORS:
        pytest.skip("a slice of a device holds fewer layers")
    found, launch = [], kernels.launch

    def noted(kernel, config, *given):
        found.append((config.kind, getattr(config, "layers", 1)))
        launch(kernel, config, *given)

    monkeypatch.setattr(kernels, "launch", noted)
    return found


@pytest.fixture(params=["clusters", "multicast"])
def one_launch(request, loops):
    """All loops of the test run several layers, forward and backward, in kernels of one kind."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "multicast":
            no_clusters(patch)
        else:
            patch.setattr(multicast, "knows_stack", lambda *_: False)
            memo.clear()
        yield
    memo.clear()
    assert {kind for kind, _ in loops} == {"forward", "backward"}
    assert all(layers > 1 for _, layers in loops)


@pytest.fixture
def loops_of_single_steps(monkeypatch):
    """T = 1 is a loop like others, else it has kernels of its own."""
    monkeypatch.setattr(single_step, "takes", lambda *_: False)
    memo.clear()
    yield
    monkeypatch.undo()
    memo.clear()


in_one_launch = pytest.mark.usefixtures("one_launch")
in_clusters = pytest.mark.parametrize("one_launch", ["clusters"], indirect=True)
any_steps = pytest.mark.usefixtures("loops_of_single_steps", "one_launch")


def stack_of(cell=cells.lstm, hidden=128, layers=3, dtype=BF16, **options):
    return net_of(cell, hidden, dtype, num_layers=layers, **{"wavefront": 1, **options})


def slack_of(layers):
    """By how much gradients may be further off: those of a layer are made of those above."""
    return max(1, layers / 2)


@any_steps
@pytest.mark.parametrize(
    ("cell", "hidden", "layers", "dtype", "batches"),
    [(cells.lstm, 128, 3, BF16, (1, 17, 130)), (cells.lstm, 128, 3, FP16, (64,)),
     (cells.lstm, 256, 2, BF16, (17, 130)), (cells.lstm, 512, 4, BF16, (64, 130)),
     (cells.lstm, 250, 3, BF16, (64,)), (cells.gru, 508, 2, BF16, (64, 130)),
     (cells.gru, 256, 3, BF16, (1, 64, 130)), (cells.peephole_lstm, 128, 3, BF16, (17,))],
    ids=named,
)  # fmt: skip
def test_sizes(cell, hidden, layers, dtype, batches):
    """Steps around the buffers of published values, of which there are 8; states are given or not.

    Of 4 x 512 the device holds one copy, so that a batch of 130 is several launches.
    """
    net = stack_of(cell, hidden, layers, dtype)
    for batch in batches:
        for steps in (1, 2, 3, 20, 37):
            x = drawn(steps, batch, WIDTH, dtype=dtype)
            states = states_of(net, batch, dtype) if steps % 2 else ()
            agree(net, x, states, slack=slack_of(layers))


def lengths_of(steps, batch):
    """In no order, the shortest and the longest among them."""
    found = masks_of(("lengths",), steps, batch)["lengths"].clamp_(min=1)
    found[2:5] = 1
    return found


@in_one_launch
@pytest.mark.parametrize("empty", [False, True], ids=["some", "empty"])
@pytest.mark.parametrize(
    ("cell", "hidden", "layers", "batch"),
    [(cells.lstm, 128, 3, 130), (cells.gru, 256, 3, 17)],
    ids=named,
)
def test_lengths(cell, hidden, layers, batch, empty):
    """Rows end after a step or, `empty`, before the first: these hand on their states."""
    net = stack_of(cell, hidden, layers)
    lengths = lengths_of(20, batch)
    if empty:
        lengths[5:9] = 0
    for states in ((), states_of(net, batch)):
        x = drawn(20, batch, WIDTH)
        agree(net, x, states, lengths=lengths, slack=slack_of(layers))
        y, final = net(x, packed(states), lengths=lengths)
        assert not y[torch.arange(20, device="cuda")[:, None] >= lengths].any()
        if states and empty:
            for left, state in zip(flat(final), states, strict=True):
                assert torch.equal(left[:, 5:9], state[:, 5:9])


@in_one_launch
def test_all_rows_end_early():
    """The launch runs as many steps as the longest row has: as if T were that."""
    net, x = stack_of(), drawn(20, 17, WIDTH)
    lengths = torch.full((17,), 3, device="cuda")
    agree(net, x, lengths=lengths, slack=slack_of(3))
    (short, *finals), _ = run(net, x[:3])
    (long, *others), (dx, *_) = run(net, x, lengths=lengths)
    close([long[:3], *others], [short, *finals], FAIR[BF16])
    assert not long[3:].any()
    assert not dx[3:].any()


@in_clusters
@in_one_launch
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [BF16, TF32], ids=str)
def test_a_padded_stack_with_lengths(dtype, reverse):
    """Where H is no multiple of 8 the layer above polls for a copy of y, with rows of its own."""
    net = stack_of(cells.lstm, 18, 3, dtype, reverse=reverse)
    for batch in (5, 33):
        lengths = lengths_of(20, batch)
        lengths[0] = 0
        x = drawn(20, batch, WIDTH, dtype=dtype)
        agree(net, x, states_of(net, batch, dtype), lengths=lengths, slack=slack_of(3))


@in_one_launch
@pytest.mark.parametrize("masks", [(), ("lengths",)], ids=str)
def test_states_of_all_steps(masks):
    net = stack_of()
    x, states = drawn(20, 17, WIDTH), states_of(net, 17)
    given = {name: lengths_of(20, 17) for name in masks}
    agree(net, x, states, return_states=True, slack=slack_of(3), **given)


@in_one_launch
@pytest.mark.parametrize(
    ("cell", "hidden", "width", "options"),
    [(cells.lstm, 128, WIDTH, {"reverse": True}), (cells.lstm, 128, WIDTH, {"bias_mode": "none"}),
     (cells.lstm, 128, WIDTH, {"bias_mode": "recurrent"}), (cells.lstm, 128, 128, {}),
     (cells.lstm, 128, 7, {"batch_first": False}), (cells.gru, 256, WIDTH, {"bias_mode": "none"}),
     (cells.gru, 256, 512, {"bias_mode": "input"})],
    ids=named,
)  # fmt: skip
def test_options(cell, hidden, width, options):
    """Kernels are those of other tests; what differs are arguments."""
    net = stack_of(cell, hidden, width=width, **options)
    agree(net, drawn(20, 17, width), states_of(net, 17), slack=slack_of(3))


@in_one_launch
def test_only_some_gradients_are_wanted():
    """With all parameters or x alone wanted gradients have the bits of all wanted.

    Where those of one layer are, its weights are multiplied alone, in another order.
    """
    net, x, dy = stack_of(), drawn(20, 17, WIDTH), drawn(20, 17, 128)
    names = [name for name, _ in net.named_parameters()]
    wide = x.clone().requires_grad_()
    all_of_them = dict(zip(["x", *names], step(net, wide, dy)[1:], strict=True))
    of_layer = [name for name in names if name.endswith("_l1")]
    assert len(of_layer) == 4
    for wanted in (names, ["x"], ["x", *of_layer]):
        for name, param in net.named_parameters():
            param.requires_grad_(name in wanted)
        leaves = {"x": wide, **dict(net.named_parameters())}
        y, _ = net(wide if "x" in wanted else x)
        found = torch.autograd.grad(y, [leaves[name] for name in wanted], dy)
        for name, grad in zip(wanted, found, strict=True):
            if name.startswith("weight") and wanted != names:
                close([grad], [all_of_them[name]], FAIR[BF16])
            else:
                assert torch.equal(grad, all_of_them[name]), name


@in_one_launch
@other_streams
@pytest.mark.parametrize(
    ("hidden", "layers", "batch"), [(128, 3, 17), (512, 4, 130)], ids=["one", "several"]
)
def test_a_graph_replays_with_other_inputs(hidden, layers, batch):
    """Were flags left from the replay before, blocks would multiply h of the inputs before."""
    net, steps = stack_of(hidden=hidden, layers=layers), 20
    inputs = [drawn(steps, batch, WIDTH) for _ in range(3)]
    dy = drawn(steps, batch, hidden)
    check_replays(net, inputs, dy)


@in_one_launch
@other_streams
def test_all_of_a_call_runs_on_the_callers_stream():
    """A launch, or the filling of flags, on the default stream would not wait for x."""
    net, steps, batch = stack_of(), 20, 130
    inputs = [drawn(steps, batch, WIDTH) for _ in range(2)]
    dy = drawn(steps, batch, 128)
    check_callers_stream(net, inputs, dy)


@in_one_launch
def test_two_streams_at_once():
    """Two launches of 128 blocks do not fit together: with half of each there, both would hang."""
    nets = [stack_of(hidden=512, layers=4), stack_of(cells.gru, 256)]
    inputs = [drawn(20, 64, WIDTH).requires_grad_() for _ in nets]
    dys = [drawn(20, 64, net.hidden_size) for net in nets]
    wanted = [step(*given) for given in zip(nets, inputs, dys)]
    streams = [torch.cuda.Stream() for _ in nets]
    torch.cuda.synchronize()
    for _ in range(5):
        found = [[], []]
        for stream in streams:  # so that launches of both wait there, and begin together
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10**7)
        for number in range(6):
            place = number % 2
            with torch.cuda.stream(streams[place]):
                found[place].append(step(nets[place], inputs[place], dys[place]))
        torch.cuda.synchronize()
        for place, many in enumerate(found):
            for results in many:
                assert all(map(torch.equal, results, wanted[place]))


@in_one_launch
def test_two_threads():
    """A thread has memory of its own for arguments; weights and programs are those of both."""
    net, dy = stack_of(), drawn(20, 17, 128)
    inputs = [drawn(20, 17, WIDTH).requires_grad_() for _ in range(2)]
    wanted = [step(net, x, dy) for x in inputs]
    found, errors = [[], []], []

    def work(place):
        try:
            for _ in range(20):
                found[place].append(step(net, inputs[place], dy))
            torch.cuda.synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for place, many in enumerate(found):
        assert len(many) == 20
        for results in many:
            assert all(map(torch.equal, results, wanted[place]))


@in_one_launch
@pytest.mark.parametrize(
    ("hidden", "layers", "batch", "masked"),
    [(128, 3, 17, False), (128, 3, 17, True), (512, 4, 130, False)],
)
def test_a_call_that_is_remembered(loops, hidden, layers, batch, masked):
    """Its launches were written down: with the addresses of all layers, and flags to be filled."""
    net, steps = stack_of(hidden=hidden, layers=layers), 20
    inputs = [drawn(steps, batch, WIDTH).requires_grad_() for _ in range(4)]
    dy = drawn(steps, batch, hidden)
    given = {"lengths": lengths_of(steps, batch)} if masked else {}

    def call(x):
        y, final = net(x, **given)
        made = [y, *flat(final)]
        weights = [dy, *(torch.ones_like(one) for one in made[1:])]
        grads = torch.autograd.grad(made, [x, *net.parameters()], weights)
        with torch.no_grad():
            return [*(one.detach() for one in made), *grads, *flat(net(x, **given))]

    wanted = []
    for x in inputs:
        net._call_cache = CallCache()
        wanted.append(call(x))
    net._call_cache = CallCache()
    for _ in range(4):  # backward is written down one call later than forward
        call(inputs[0])
    before = len(loops)
    found = [call(x) for x in inputs]
    assert len(loops) == before  # none was launched in another way
    for have, want in zip(found, wanted):
        assert all(map(torch.equal, have, want))


@in_one_launch
def test_memory_goes_round():
    """What other calls leave in fresh memory is read by none."""
    net, dy = stack_of(), drawn(20, 17, 128)
    inputs = [drawn(20, 17, WIDTH).requires_grad_() for _ in range(3)]
    wanted = [step(net, x, dy) for x in inputs]
    for number in range(30):
        noise = [torch.full_like(dy, float("nan")) for _ in range(3)]
        del noise
        found = step(net, inputs[number % 3], dy)
        assert all(map(torch.equal, found, wanted[number % 3])), number


@in_clusters
@any_steps
@pytest.mark.parametrize(
    ("cell", "hidden", "layers", "dtype", "batches"),
    [(cells.lstm, 128, 3, TF32, (1, 17, 130)), (cells.gru, 64, 4, TF32, (64,)),
     (cells.lstm, 40, 3, BF16, (1, 30)), (cells.lstm, 200, 2, FP16, (17, 64)),
     (cells.gru, 24, 6, BF16, (9,)), (cells.rnn_tanh, 128, 2, BF16, (16,)),
     (cells.lstm, 8, 3, BF16, (3,)),
     (cells.lstm, 256, 8, BF16, (16,)), (cells.peephole_lstm, 64, 3, TF32, (9,)),
     (cells.lstm, 18, 3, TF32, (16,)), (cells.gru, 100, 2, BF16, (5, 33)),
     (cells.lstm, 37, 3, FP16, (9,)), (cells.lstm, 250, 2, BF16, (20,)),
     (cells.lstm, 1, 2, BF16, (3,)), (cells.rnn_tanh, 10, 5, TF32, (40,))],
    ids=named,
)  # fmt: skip
def test_sizes_of_clusters(cell, hidden, layers, dtype, batches):
    """What multicast does not take: float32, and H that are no multiples of 64.

    A block holds a layer, or a cluster does; some groups of units are dealt out unevenly.
    """
    net, slack = stack_of(cell, hidden, layers, dtype), slack_of(layers)
    for batch in batches:
        for steps in (1, 2, 5, 37):
            x = drawn(steps, batch, WIDTH, dtype=dtype)
            agree(net, x, states_of(net, batch, dtype) if steps % 2 else (), slack=slack)


@in_clusters
@any_steps
@pytest.mark.parametrize("blocks", [3, 5, 6, 7, 10, 14])
@pytest.mark.parametrize(
    ("cell", "hidden", "dtype"), [(cells.lstm, 136, BF16), (cells.gru, 113, TF32)], ids=named
)
def test_clusters_of_other_sizes(monkeypatch, cell, hidden, dtype, blocks):
    """17 and 15 groups of units, dealt out unevenly to most; several clusters have rows."""
    monkeypatch.setattr(Limits, "splits", splits_of(blocks))
    memo.clear()
    net = stack_of(cell, hidden, 2, dtype)
    for steps in (1, 2, 5, 37):
        x = drawn(steps, 41, WIDTH, dtype=dtype)
        agree(net, x, states_of(net, 41, dtype) if steps % 2 else ())


@pytest.mark.parametrize("layers", [2, 3])
def test_memory_is_not_more_than_that_of_a_wavefront(loops, layers):
    """Both hold the gate gradients of all layers at once, and saved activations of all.

    From three layers on the launch holds gradients of most matrices twice.
    """
    steps, batch, hidden = 100, 64, 256
    x, dy, peaks = drawn(steps, batch, WIDTH).requires_grad_(), drawn(steps, batch, hidden), {}
    for wavefront in (1, 8):
        net = stack_of(hidden=hidden, layers=layers, wavefront=wavefront)
        peaks[wavefront] = []
        for _ in range(6):  # the last ones are remembered
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step(net, x, dy)
            torch.cuda.synchronize()
            peaks[wavefront].append(torch.cuda.max_memory_allocated() - before)
    assert {at_once for _, at_once in loops} == {1, layers}
    twice = 2 * (layers - 1) * 4 * hidden * hidden * 2 if layers > 2 else 0  # 2 bytes a value
    for one in (0, -1):
        assert peaks[1][one] < 1.3 * peaks[8][one] + twice
        assert peaks[1][one] > layers * 2 * steps * batch * 4 * hidden * 2


@in_clusters
@in_one_launch
def test_a_relu_is_as_near_to_float64_as_layer_by_layer(loops):
    """Where its input is nearly 0 rounding decides whether a gradient passes, in either way."""
    errors, found = [], []
    for wavefront in (0, 1):
        net = stack_of(cells.rnn_relu, 64, 3, TF32, wavefront=wavefront)
        torch.manual_seed(1)
        x, states = drawn(37, 16, WIDTH, dtype=TF32), states_of(net, 16, TF32)
        loops.clear()
        found, wanted = (flat(run(one, x, states)) for one in (net, exactly(net)))
        pairs = zip(found, wanted, strict=True)
        errors.append([float((have - want).norm() / want.norm()) for have, want in pairs])
    assert all(one <= 3 * other + FAIR[TF32] for other, one in zip(*errors)), errors


@in_clusters
@in_one_launch
@pytest.mark.parametrize("given", ["nothing", "states"])
@pytest.mark.parametrize("masks", [("reset",), ("lengths", "reset")], ids=str)
@pytest.mark.parametrize(
    ("cell", "hidden", "dtype"),
    [(cells.lstm, 128, BF16), (cells.gru, 64, TF32), (cells.lstm, 18, TF32)],
    ids=named,
)
def test_resets(cell, hidden, dtype, masks, given):
    """A layer reads y of the layer below: a reset after a step changes no y of that step."""
    net = stack_of(cell, hidden, 3, dtype)
    x, states = drawn(20, 17, WIDTH, dtype=dtype), states_of(net, 17, dtype)
    fresh = states_of(net, 17, dtype) if given == "states" else ()
    agree(net, x, states, fresh, slack=slack_of(3), **masks_of(masks, 20, 17))


def test_recompute_runs_another_way(loops):
    """Asked for by `wavefront=1` as elsewhere; inference has nothing to compute again."""
    net = stack_of(recompute="gates")
    agree(net, drawn(9, 17, WIDTH), states_of(net, 17), slack=slack_of(3))
    assert {layers for kind, layers in loops if kind == "backward"} == {1}


def test_dropout_between_layers_runs_another_way(loops):
    """The masks of layer by layer; without masks, in evaluation, one launch runs all layers."""
    x, dy, found = drawn(9, 17, WIDTH).requires_grad_(), drawn(9, 17, 128), []
    for wavefront in (0, 1):
        net = stack_of(dropout=0.5, wavefront=wavefront)
        torch.manual_seed(1)
        found.append(step(net, x, dy))
    assert {layers for _, layers in loops} == {1}
    close(found[1], found[0], FAIR[BF16])
    loops.clear()
    net.eval()
    agree(net, x.detach(), slack=slack_of(3))
    assert {layers for _, layers in loops} == {3}


@in_one_launch
def test_layers_of_torch():
    """Modules with torch's parameters against torch's own in float64."""
    torch.manual_seed(0)
    for kind in ("LSTM", "GRU"):
        hidden = 128 if kind == "LSTM" else 256
        where = {"device": "cuda", "dtype": BF16}
        net = getattr(openrnn, kind)(WIDTH, hidden, 3, backend="fused", wavefront=1, **where)
        exact = getattr(torch.nn, kind)(WIDTH, hidden, 3, device="cuda", dtype=torch.float64)
        exact.load_state_dict(net.state_dict())
        x = drawn(20, 17, WIDTH).requires_grad_()
        wide, dy = x.detach().double().requires_grad_(), drawn(20, 17, hidden)
        found, wanted = step(net, x, dy), step(exact, wide, dy.double())
        close(found, wanted, slack_of(3) * FAIR[BF16])


def test_explain_shows_it(loops):
    """Lines of `describe`, and the operations of a schedule."""
    net, x = stack_of(hidden=512, layers=4, wavefront=None), drawn(128, 64, WIDTH)
    for asked in (net, stack_of(hidden=512, layers=4)):
        lines = [
            line
            for row in openrnn.explain(asked, x, schedule=True, quiet=True).rows
            for line in row.details
        ]
        for kind in ("forward", "backward"):
            assert sum(f"{kind} of 4 layers in one launch" in line for line in lines) == 1
            assert sum(f"stack_loop  {kind}  all layers" in line for line in lines) == 1
        assert not any("  loop  " in line for line in lines)
    other = stack_of(hidden=512, layers=4, wavefront=0)
    assert "stack_loop" not in str(openrnn.explain(other, x, schedule=True, quiet=True))
    # what is explained is what runs
    step(net, x.requires_grad_(), drawn(128, 64, 512))
    assert {layers for _, layers in loops} == {4}
    assert exactly(net).backend == "reference"
