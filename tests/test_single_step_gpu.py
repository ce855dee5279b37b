"""Single steps on the GPU: against float64, beside the time loop, repeated and in graphs."""

import copy

import pytest
import torch
from cases import CELLS

import openrnn
from openrnn import memo
from openrnn.codegen.step_config import StepConfig
from openrnn.nn.call_cache import CallCache
from openrnn.tuning import single_step
from openrnn.tuning.limits import Limits

pytestmark = pytest.mark.gpu

# a relative error of the norm: several roundings of a value in the type of the products
FAIR = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 3e-3}
TRACED = [name for name, cell in CELLS.items() if not cell.dependent_product]


def given(name="lstm", inputs=24, hidden=64, batch=5, dtype=torch.bfloat16, states=True, **options):
    """A layer, x and initial states, all of which require gradients."""
    torch.manual_seed(hidden + batch)
    layer = openrnn.Recurrent(
        CELLS[name], inputs, hidden, backend="fused", device="cuda", dtype=dtype, **options
    )
    x = torch.randn(1, batch, inputs, device="cuda", dtype=dtype, requires_grad=True)
    shape = layer.spec.chains, batch, hidden
    before = tuple(
        torch.randn(shape, device="cuda", dtype=dtype).mul_(0.5).requires_grad_()
        for _ in layer.spec.states
    )
    return layer, x, before if states else None


def exactly(layer):
    """The reference in float64 with the same weights."""
    exact = openrnn.Recurrent(
        layer.cell, layer.input_size, layer.hidden_size, layer.spec.num_layers,
        bidirectional=layer.bidirectional, bias_mode=layer.spec.bias_mode,
        input_mode=layer.spec.input_mode, backend="reference",
    )  # fmt: skip
    exact.load_state_dict(layer.state_dict())
    return exact.to("cuda", torch.float64)


def run(layer, x, states, weights, **masks):
    """y, the final states, and gradients of x, states and parameters.

    weights: of the results; what is differentiated is the sum of their products.
    """
    y, after = layer(x, states if states is None or len(states) > 1 else states[0], **masks)
    results = [y, *(after if isinstance(after, tuple) else (after,))]
    found = torch.autograd.grad(
        results, [x, *(states or ()), *layer.parameters()],
        [weight.to(one.dtype) for weight, one in zip(weights, results)],
        allow_unused=True, materialize_grads=True,
    )  # fmt: skip
    return [*(one.detach() for one in results), *found]


def weights_of(layer, x):
    """Random weights of the results of a call."""
    spec, batch = layer.spec, x.shape[1]
    y = 1, batch, spec.directions * spec.hidden_size
    states = [(spec.chains, batch, spec.hidden_size)] * len(spec.states)
    return [torch.randn(shape, device=x.device).to(x.dtype) for shape in (y, *states)]


def doubled(tensors):
    """The same in float64, as leaves; None stays."""
    return tensors and tuple(one.detach().double().requires_grad_() for one in tensors)


def agree(layer, x, states, reset_state=None, **masks):
    """Compares all results and gradients with float64; runs twice, for the same bits."""
    weights = weights_of(layer, x)
    narrow = {"reset_state": reset_state, **masks} if reset_state else masks
    wide = {"reset_state": doubled(reset_state), **masks} if reset_state else masks
    found = run(layer, x, states, weights, **narrow)
    (x_wide,), before = doubled((x,)), doubled(states)
    wanted = run(exactly(layer), x_wide, before, weights, **wide)
    for place, (have, want) in enumerate(zip(found, wanted, strict=True)):
        close(have, want, f"result {place}")
    for have, again in zip(found, run(layer, x, states, weights, **narrow)):
        assert torch.equal(have, again)
    with torch.no_grad():  # where nothing is saved
        y, after = layer(x, states if states is None or len(states) > 1 else states[0], **narrow)
    for have, again in zip(found, [y, *(after if isinstance(after, tuple) else (after,))]):
        assert torch.equal(have, again)


def close(have, want, name):
    """Within a few roundings: the norm of the error, and each value beside the largest."""
    have, fair = have.double(), FAIR[have.dtype]
    error = (have - want).norm() / want.norm().clamp_min(1e-6)
    assert error <= fair, f"{name}: relative error {error:.1e}"
    worst = (have - want).abs().max() / want.abs().max().clamp_min(1e-6)
    assert worst <= 2 * fair, f"{name}: largest error {worst:.1e}"


def verbs(layer, x):
    """The operations that `explain` lists, by name."""
    table = openrnn.explain(layer, x, schedule=True, quiet=True)
    lines = [line.split() for row in table.rows for line in row.details]
    return {words[1] for words in lines if len(words) > 1 and words[0] == "main"}


@pytest.mark.parametrize("dtype", FAIR, ids=str)
@pytest.mark.parametrize("states", [True, False], ids=["states", "zeros"])
@pytest.mark.parametrize("name", TRACED)
def test_every_cell(name, states, dtype):
    agree(*given(name, dtype=dtype, states=states))


@pytest.mark.parametrize("dtype", FAIR, ids=str)
@pytest.mark.parametrize("name", ["lstm", "gru"])
@pytest.mark.parametrize(
    ("inputs", "hidden", "batch"),
    [(8, 8, 1), (8, 136, 8), (200, 64, 9), (1000, 24, 16), (256, 256, 17), (512, 512, 33),
     (24, 1024, 64), (1024, 1024, 2), (2048, 1024, 1), (64, 1096, 31), (64, 128, 250),
     (256, 256, 256), (512, 512, 300), (48, 1024, 130), (64, 256, 3000)],
)  # fmt: skip
def test_sizes(name, inputs, hidden, batch, dtype):
    agree(*given(name, inputs, hidden, batch, dtype))


@pytest.mark.parametrize("dtype", FAIR, ids=str)
@pytest.mark.parametrize("unit_groups", [1, 2])
@pytest.mark.parametrize("tiles", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh"])
def test_every_size_of_a_block(monkeypatch, name, tiles, unit_groups, dtype):
    """On rows and units that fill blocks and warps' rings, and that do not."""
    one = StepConfig("step_forward", tiles, unit_groups, stages=2)
    most = Limits.of(torch.cuda.get_device_capability()).shared
    if one.shared(len(CELLS[name].gates)) > most:
        pytest.skip("this device has too little shared memory")
    monkeypatch.setattr(single_step, "forward", lambda *_: [one])
    monkeypatch.setattr(single_step, "step_time", lambda *_: 0.0)  # not two GEMMs
    memo.clear()
    try:
        for inputs, hidden, batch in ((40, 48, 70), (512, 528, 8 * tiles), (8, 16, 1)):
            agree(*given(name, inputs, hidden, batch, dtype))
    finally:
        memo.clear()


@pytest.fixture
def gemms(monkeypatch):
    """Products of steps are GEMMs at any size."""
    monkeypatch.setattr(single_step, "forward_kind", lambda *_: "step_cell")
    memo.clear()
    yield
    memo.clear()


@pytest.mark.parametrize("dtype", FAIR, ids=str)
@pytest.mark.parametrize("states", [True, False], ids=["states", "zeros"])
@pytest.mark.parametrize("name", TRACED)
def test_every_cell_where_gemms_multiply(gemms, name, states, dtype):
    """Two tiles of rows, but for slstm.

    Its stabiliser is a maximum: where both sides are close, rounding saved activations to 16 bits
    changes which one has the gradient. Emulated without a kernel, that alone exceeds the limit in
    41 of 200 draws of 13 rows in bfloat16, and in 14 of 5 rows.
    """
    agree(*given(name, batch=5 if name == "slstm" else 13, dtype=dtype, states=states))


@pytest.mark.parametrize("dtype", FAIR, ids=str)
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_resets_where_gemms_multiply(gemms, name, dtype):
    layer, x, states = given(name, batch=300, dtype=dtype)
    mask = torch.rand(1, 300, device="cuda") < 0.5
    with torch.no_grad():
        assert "step" in verbs(layer, x)
        y, _ = layer(x, states if name == "lstm" else states[0], reset=mask)
        wide = doubled(states)
        wanted, _ = exactly(layer)(x.double(), wide if name == "lstm" else wide[0], reset=mask)
        close(y, wanted, "y")


@pytest.mark.parametrize("bias_mode", ["none", "input", "recurrent"])
@pytest.mark.parametrize("name", ["lstm", "gru", "peephole_lstm"])
def test_biases(name, bias_mode):
    agree(*given(name, bias_mode=bias_mode))


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_a_skip_input(name):
    agree(*given(name, 64, input_mode="skip"))


@pytest.mark.parametrize("name", TRACED)
def test_an_input_for_each_gate(name):
    agree(*given(name, 64 * len(CELLS[name].gates), input_mode="gates"))


@pytest.mark.parametrize("name", ["lstm", "gru"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_layers_and_directions(name, bidirectional):
    agree(*given(name, num_layers=3, bidirectional=bidirectional))


@pytest.mark.parametrize("dtype", FAIR, ids=str)
@pytest.mark.parametrize("states", [True, False], ids=["states", "zeros"])
@pytest.mark.parametrize("reset_state", [True, False], ids=["given", "to zeros"])
def test_resets(states, reset_state, dtype):
    """Forward by the step, backward by the loop where gradients of states are wanted."""
    layer, x, before = given(dtype=dtype, states=states)
    masks = {"reset": torch.tensor([[True, False, True, False, False]], device="cuda")}
    if reset_state:
        masks["reset_state"] = tuple(
            torch.randn(1, 5, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in "hc"
        )
    agree(layer, x, before, **masks)


def test_states_that_lie_between_16_bytes():
    """Loads of 16 bytes would end the process."""
    layer, x, states = given()
    odd = [torch.zeros(one.numel() + 1, device="cuda", dtype=x.dtype)[1:] for one in states * 2]
    odd = [one.view_as(states[0]).copy_(like.detach()) for one, like in zip(odd, states * 2)]
    mask = torch.tensor([[True, False, True, False, False]], device="cuda")
    with torch.no_grad():
        want = layer(x, states, reset=mask, reset_state=states)
        found = layer(x, tuple(odd[:2]), reset=mask, reset_state=tuple(odd[2:]))
        assert torch.equal(found[0], want[0])
        for _ in range(3):
            assert torch.equal(layer(x, tuple(odd[:2]))[0], layer(x, states)[0])


def test_steps_with_resets_that_repeat():
    """As programs, in inference; each beside a layer that remembers nothing."""
    layer, x, states = given(num_layers=2)
    mask, state = torch.zeros(5, dtype=torch.bool, device="cuda"), states
    with torch.no_grad():
        for place in range(8):
            mask = torch.arange(5, device="cuda") % (place + 2) == 1
            fresh = copy.deepcopy(layer)
            want = fresh(x, state, reset=mask[None])
            y, state = layer.step(x[0], state, reset=mask)
            assert torch.equal(y, want[0][0])
            assert all(map(torch.equal, state, want[1]))


def test_x_that_lies_otherwise_in_memory():
    layer, x, states = given(inputs=16)
    with torch.no_grad():
        want = layer(x, states)[0]
        odd = torch.zeros(1, 5, 17, device="cuda", dtype=x.dtype)[..., 1:].copy_(x)
        assert torch.equal(layer(odd, states)[0], want)
        turned = x.transpose(1, 2).contiguous().transpose(1, 2)
        assert torch.equal(layer(turned, states)[0], want)


def test_states_of_all_steps_and_their_gradients():
    layer, x, states = given()
    _, after, every = layer(x, states, return_states=True)
    for end, all_of_it in zip(after, every):
        assert torch.equal(end, all_of_it.reshape(end.shape))
    grads = torch.autograd.grad(every[1].sum(), [x, *layer.parameters()])
    wide = exactly(layer)
    (x_wide,), before = doubled((x,)), doubled(states)
    _, _, every = wide(x_wide, before, return_states=True)
    for have, want in zip(grads, torch.autograd.grad(every[1].sum(), [x_wide, *wide.parameters()])):
        assert (have - want).norm() <= FAIR[x.dtype] * want.norm()


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_beside_the_loop(monkeypatch, name):
    """The loop rounds the input product to 16 bits, so results differ by as much."""
    layer, x, states = given(name, num_layers=2, dropout=0.5)
    weights = weights_of(layer, x)

    def seeded():
        torch.manual_seed(5)
        return run(layer, x, states, weights)

    found = seeded()
    assert "step" in verbs(layer, x)
    monkeypatch.setattr(single_step, "takes", lambda *_: False)
    memo.clear()
    try:
        layer._call_cache = CallCache()
        assert "step" not in verbs(layer, x)
        for have, want in zip(found, seeded(), strict=True):
            assert (have - want).norm() <= FAIR[x.dtype] * want.norm()
    finally:  # schedules of loops must not meet later tests
        memo.clear()


def test_what_runs():
    layer, x, _ = given()
    assert "step" in verbs(layer, x)
    assert "loop" not in verbs(layer, x)
    assert "loop" not in verbs(layer, x.new_zeros(1, 256, 24))
    assert "loop" in verbs(layer, x.new_zeros(1, 257, 24))  # backward
    with torch.no_grad():
        assert "loop" not in verbs(layer, x.new_zeros(1, 257, 24))
    assert "step" not in verbs(layer, x.new_zeros(2, 5, 24))
    odd, x, _ = given(hidden=60)
    assert "step" not in verbs(odd, x)


@pytest.mark.parametrize("grad", [False, True])
def test_calls_that_repeat(grad):
    """As programs: with other numbers, and with states that come from the call before."""
    layer, x, states = given(num_layers=2)
    other = x.detach() * 2
    with torch.set_grad_enabled(grad):
        wanted = [layer(one, states)[0].clone() for one in (x, other)]
        for _ in range(4):
            found = [layer(one, states)[0] for one in (x, other)]
            assert all(map(torch.equal, found, wanted))
    with torch.no_grad():
        state, chained = states, []
        for _ in range(5):
            y, state = layer(x, state)
            chained.append(y)
        state, fresh = states, copy.deepcopy(layer)
        for want in chained:
            fresh._call_cache = CallCache()
            y, state = fresh(x, state)
            assert torch.equal(y, want)


def test_in_a_graph():
    """Captured once and replayed with states in place, as a policy or a decoder does."""
    layer, x, states = given(num_layers=2)
    with torch.no_grad():
        state = [one.detach().clone() for one in states]
        want = []
        for _ in range(3):
            y, after = layer(x, tuple(state))
            want.append(y.clone())
            for old, new in zip(state, after):
                old.copy_(new)
        for old, new in zip(state, states):
            old.copy_(new)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer(x, tuple(state))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, after = layer(x, tuple(state))
            for old, new in zip(state, after):
                old.copy_(new)
        for one in want:
            graph.replay()
            assert torch.equal(y, one)
