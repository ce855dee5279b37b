"""The oracle judged by others: torch.nn, onnxruntime, plain loops, and finite differences."""

import warnings
from dataclasses import replace

import onnx
import onnxruntime
import pytest
import torch
from cases import CELLS, CLIP, Case, Inputs, distance, examples, size, thinned
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, sigmoid, tanh
from torch.autograd import forward_ad
from torch.func import functional_call, jvp, stack_module_state, vmap
from torch.nn.utils.rnn import pack_padded_sequence

import openrnn
from openrnn import cells, dispatch, functional, params, philox, reference
from openrnn.backends.base import Call, Cotangents, Needs

F64 = torch.float64
# torch's own forward-mode rules are scripted
SCRIPTED = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
LAYERS = {
    "LSTM": (nn.LSTM, openrnn.LSTM, {}),
    "GRU": (nn.GRU, openrnn.GRU, {}),
    "RNN_TANH": (nn.RNN, openrnn.RNN, {}),
    "RNN_RELU": (nn.RNN, openrnn.RNN, {"nonlinearity": "relu"}),
}
SIZES = st.sampled_from((1, 2, 3, 5, 8, 17))


def assert_equal(found, wanted, what=""):
    """Equal but for the rounding of float64."""
    error = distance(found, wanted)
    assert error <= 1e-12 * max(1.0, size(wanted)), f"{what}: {error}"


def run(spec, x, weights, states=None, **options):
    return functional.recurrent(spec, x, weights, states, backend="reference", **options)


def draw(spec, steps=6, batch=3, seed=0, **options):
    """A case with all its tensors as float64 leaves: (x, weights, states, inputs)."""
    case = Case(spec, F64, steps, batch, states=True, reset_states=True, seed=seed, **options)
    inputs = Inputs.of(case)
    leaves = inputs.cast(F64)
    weights = [leaves[slot.name] for slot in params.module_slots(spec)]
    return leaves["x"], weights, [leaves[f"{name}_0"] for name in spec.states], inputs


@st.composite
def torch_calls(draw):
    kind = draw(st.sampled_from(sorted(LAYERS)))
    hidden = draw(SIZES)
    layout = draw(st.sampled_from(("time_first", "batch_first", "unbatched", "packed")))
    options = {
        "num_layers": draw(st.integers(1, 3)),
        "bias": draw(st.booleans()),
        "bidirectional": draw(st.booleans()),
        "batch_first": layout == "batch_first" or (layout == "packed" and draw(st.booleans())),
    }
    if kind == "LSTM" and hidden > 1 and draw(st.booleans()):
        options["proj_size"] = draw(st.integers(1, hidden - 1))
    sizes = draw(st.tuples(SIZES, st.just(hidden), st.integers(1, 9), st.integers(1, 5)))
    return kind, layout, options, sizes, draw(st.booleans()), draw(st.integers(0, 999))


@examples()
@given(torch_calls())
def test_torch_nn(call):
    """Outputs and all gradients of torch.nn in float64, over every feature that both have."""
    kind, layout, options, (inputs, hidden, steps, batch), given_states, seed = call
    theirs_class, ours_class, extra = LAYERS[kind]
    dice = torch.Generator().manual_seed(seed)
    theirs = theirs_class(inputs, hidden, **options, **extra, dtype=F64)
    ours = ours_class(inputs, hidden, **options, **extra, dtype=F64, backend="reference")
    ours.load_state_dict(theirs.state_dict())

    def normal(*shape):
        return torch.randn(shape, generator=dice, dtype=F64)

    rows = () if layout == "unbatched" else (batch,)
    shape = (*rows, steps) if options["batch_first"] else (steps, *rows)
    x = normal(*shape, inputs)
    lengths = torch.randint(1, steps + 1, (batch,), generator=dice)
    chains = options["num_layers"] * (1 + options["bidirectional"])
    widths = [options.get("proj_size") or hidden] + [hidden] * (kind == "LSTM")
    states = [normal(chains, *rows, width) for width in widths]

    def ask(layer):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, *states)]
        input = leaves[0]
        if layout == "packed":
            first = options["batch_first"]
            input = pack_padded_sequence(input, lengths, first, enforce_sorted=False)
        hx = tuple(leaves[1:]) if kind == "LSTM" else leaves[1]
        y, finals = layer(input, hx) if given_states else layer(input)
        finals = finals if kind == "LSTM" else (finals,)
        if layout == "packed":
            assert y.batch_sizes.sum() == lengths.sum()
            y = y.data
        outputs = [y, *finals]
        cotangents = torch.Generator().manual_seed(1)
        wanted = [*(leaves if given_states else leaves[:1]), *layer.parameters()]
        weighed = [torch.randn(o.shape, generator=cotangents, dtype=F64) for o in outputs]
        return *outputs, *torch.autograd.grad(outputs, wanted, weighed)

    for place, (found, wanted) in enumerate(zip(ask(ours), ask(theirs), strict=True)):
        assert_equal(found, wanted, place)


ONNX = {  # cell -> (operator, our gate for each of ONNX's, attributes)
    "lstm": ("LSTM", "i o f g", {}),
    "peephole_lstm": ("LSTM", "i o f g", {}),
    "gru": ("GRU", "z r n", {"linear_before_reset": 1}),
    "gru_reset_before": ("GRU", "z r n", {"linear_before_reset": 0}),
    "rnn_tanh": ("RNN", "h", {"activations": ["Tanh"]}),
    "rnn_relu": ("RNN", "h", {"activations": ["Relu"]}),
}


def onnx_session(operator, attributes, weights):
    """One recurrent node; weights become initialisers by name, the rest are inputs."""
    given = ["X", "sequence_lens", "initial_h", *(["initial_c"] if operator == "LSTM" else [])]
    names = ["X", "W", "R", "B", "sequence_lens", *given[2:]]
    names += ["P"] if "P" in weights else []
    outputs = ["Y", "Y_h", *(["Y_c"] if operator == "LSTM" else [])]
    helper, kinds = onnx.helper, onnx.TensorProto
    graph = helper.make_graph(
        [helper.make_node(operator, names, outputs, **attributes)],
        "one_node",
        [
            helper.make_tensor_value_info(
                name, kinds.INT32 if name == "sequence_lens" else kinds.FLOAT, None
            )
            for name in given
        ],
        [helper.make_tensor_value_info(name, kinds.FLOAT, None) for name in outputs],
        [onnx.numpy_helper.from_array(value.numpy(), name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", ONNX)
def test_onnxruntime(cell, bidirectional):
    """Outputs of onnxruntime, lengths and states included; its gates stand in another order."""
    operator, order, attributes = ONNX[cell]
    spec = CELLS[cell].spec(5, 7, bidirectional=bidirectional)
    x, weights, states, _ = draw(spec, 9, 4, seed=len(cell), needs="none")
    chains, hidden = params.chains(spec, weights), spec.hidden_size
    places = [spec.gates.index(gate) for gate in order.split()]

    def reordered(tensor):
        return torch.cat([tensor.chunk(len(places))[place] for place in places]).float()

    packed = {
        "W": torch.stack([reordered(chain.w_ih) for chain in chains]),
        "R": torch.stack([reordered(chain.w_hh) for chain in chains]),
        "B": torch.stack(
            [torch.cat([reordered(chain.b_ih), reordered(chain.b_hh)]) for chain in chains]
        ),
    }
    if spec.unit_params:
        rows = [torch.cat([p_i, p_o, p_f]) for p_i, p_f, p_o in (chain.unit for chain in chains)]
        packed["P"] = torch.stack(rows).float()
    attributes = dict(attributes, hidden_size=hidden)
    if bidirectional:
        attributes["direction"] = "bidirectional"
        if "activations" in attributes:
            attributes["activations"] = attributes["activations"] * 2
    lengths = torch.tensor([9, 1, 4, 8], dtype=torch.int32)
    feed = {"X": x, "initial_h": states[0]} | ({"initial_c": states[1]} if len(states) > 1 else {})
    feed = {name: value.float().numpy() for name, value in feed.items()}
    session = onnx_session(operator, attributes, packed)
    theirs = session.run(None, feed | {"sequence_lens": lengths.numpy()})
    y, finals, _ = run(spec, x, weights, states, lengths=lengths)
    ours = [y.view(9, 4, spec.directions, hidden).transpose(1, 2), *finals]
    for found, wanted in zip(ours, theirs, strict=True):
        # onnxruntime computes in float32, with approximations of its own
        assert distance(found, torch.from_numpy(wanted)) < 20 * torch.finfo(torch.float32).eps


def slices(tensors, b):
    """Row b of states (L*D, B, *) or of steps (T, B, *)."""
    return [tensor[:, b : b + 1] for tensor in tensors]


@pytest.mark.parametrize("cell", CELLS)
def test_lengths_are_a_loop_over_samples(cell):
    """Each row as if it came alone and cut: outputs, states at the true end, gradients."""
    spec = CELLS[cell].spec(3, 4, num_layers=2, bidirectional=True)
    x, weights, states, _ = draw(spec, batch=5)
    lengths = torch.tensor([4, 0, 6, 1, 3])
    y, finals, every = run(spec, x, weights, states, lengths=lengths, return_states=True)
    wanted = 0
    for b, length in enumerate(lengths.tolist()):
        (row,) = slices([x[:length]], b)
        alone_y, alone, alone_every = run(spec, row, weights, slices(states, b), return_states=True)
        assert_equal(y[:length, b : b + 1], alone_y)
        assert not y[length:, b].any()
        for found, want in zip(finals, alone, strict=True):
            assert_equal(found[:, b : b + 1], want)
        for found, want in zip(every, alone_every, strict=True):
            assert_equal(found[:, :length, b : b + 1], want)
            assert not found[:, length:, b].any()
        wanted += alone_y.sin().sum() + sum(part.sin().sum() for part in (*alone, *alone_every))
    loss = y.sin().sum() + sum(part.sin().sum() for part in (*finals, *every))
    leaves = [x, *states, *weights]
    found, want = (torch.autograd.grad(value, leaves) for value in (loss, wanted))
    for got, wanted in zip(found, want, strict=True):
        assert_equal(got, wanted)
    assert not any(grad[:, 1].any() for grad in found[:1]), "length 0: no gradient of x"


@pytest.mark.parametrize("given", [False, True], ids=["zeros", "reset_state"])
@pytest.mark.parametrize("cell", CELLS)
def test_resets_are_the_loop_of_rl(cell, given):
    """stable-baselines3's loop: states times (1 - episode_start) before each step."""
    spec = CELLS[cell].spec(3, 4)
    x, weights, states, inputs = draw(spec, reset="some", seed=2)
    fresh = [inputs.cast(F64)[f"reset_{name}_0"] for name in spec.states] if given else None
    starts = inputs.reset.double()
    outputs, now = [], states
    for x_t, start in zip(x, starts):
        keep = (1 - start)[:, None]
        blank = fresh or [torch.zeros_like(state) for state in now]
        now = [keep * state + (1 - keep) * new for state, new in zip(now, blank)]
        y_t, now, _ = run(spec, x_t[None], weights, now)
        outputs.append(y_t[0])
    y, finals, _ = run(spec, x, weights, states, reset=inputs.reset, reset_states=fresh)
    leaves = [x, *states, *weights, *(fresh or [])]
    want = [torch.stack(outputs), *now]
    found = [y, *finals]
    for got, wanted in zip(found, want, strict=True):
        assert_equal(got, wanted)
    grads = [
        torch.autograd.grad(sum(part.sin().sum() for part in parts), leaves)
        for parts in (found, want)
    ]
    for got, wanted in zip(*grads, strict=True):
        assert_equal(got, wanted)


def one_direction(spec, weights, states, direction):
    """The chain of one direction of a one-layer network, as a network of its own."""
    names = [slot.name for slot in params.module_slots(spec)]
    picked = [w for n, w in zip(names, weights) if n.endswith("_reverse") == bool(direction)]
    return spec.with_(bidirectional=False), picked, [state[direction, None] for state in states]


@pytest.mark.parametrize("cell", ["lstm", "gru", "slstm"])
def test_a_reset_cuts_both_directions_at_the_same_place(cell):
    """In reverse it comes after the step in time order: episodes run apart give the same."""
    spec = CELLS[cell].spec(3, 4, bidirectional=True)
    x, weights, states, inputs = draw(spec, steps=7, batch=1)
    fresh = [inputs.cast(F64)[f"reset_{name}_0"] for name in spec.states]
    reset = torch.tensor([0, 0, 1, 0, 1, 1, 0], dtype=torch.bool)[:, None]
    y, finals, _ = run(spec, x, weights, states, reset=reset, reset_states=fresh)
    episodes = [slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 7)]

    forward = one_direction(spec, weights, states, 0)
    outputs = []
    for place, episode in enumerate(episodes):
        start = forward[2] if place == 0 else [state[:1] for state in fresh]
        part, end, _ = run(forward[0], x[episode], forward[1], start)
        outputs.append(part)
    wanted = [torch.cat(outputs), end]

    back = one_direction(spec, weights, states, 1)
    outputs = []
    for place, episode in enumerate(reversed(episodes)):
        start = back[2] if place == 0 else [state[1:] for state in fresh]
        part, end, _ = run(back[0], x[episode].flip(0), back[1], start)
        outputs.append(part)
    assert_equal(y, torch.cat([wanted[0], torch.cat(outputs).flip(0)], -1))
    for found, ahead, behind in zip(finals, wanted[1], end):
        assert_equal(found, torch.cat([ahead, behind]))


def test_a_reset_at_the_start_ends_the_reverse_direction():
    spec = cells.lstm.spec(3, 4, bidirectional=True)
    x, weights, states, inputs = draw(spec, reset="first")
    fresh = [inputs.cast(F64)[f"reset_{name}_0"] for name in spec.states]
    _, finals, _ = run(spec, x, weights, states, reset=inputs.reset, reset_states=fresh)
    for found, want in zip(finals, fresh):
        assert torch.equal(found[1], want[1])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_reset_states_that_no_output_reads_have_gradients_of_zeros(reverse, steps):
    """In reverse a reset follows its step: of a single one y reads no reset state."""
    spec = cells.gru.spec(3, 4, reverse=reverse)
    x, weights, states, inputs = draw(spec, steps=steps, reset="first")
    fresh = [inputs.cast(F64)[f"reset_{name}_0"] for name in spec.states]
    frozen = [weight.detach() for weight in weights]
    reset = torch.zeros_like(inputs.reset)
    reset[0] = True
    y, _, _ = run(spec, x.detach(), frozen, [one.detach() for one in states], reset=reset,
                  reset_states=fresh)  # fmt: skip
    (found,) = torch.autograd.grad(y.sum(), fresh)
    assert found.any() == (not reverse)


def test_a_reset_in_the_padding_does_nothing():
    spec = cells.lstm.spec(3, 4, bidirectional=True)
    x, weights, states, _ = draw(spec)
    lengths = torch.tensor([2, 0, 6])
    padding = torch.arange(6)[:, None] >= lengths
    plain = run(spec, x, weights, states, lengths=lengths)
    same = run(spec, x, weights, states, lengths=lengths, reset=padding)
    assert torch.equal(plain[0], same[0])
    assert all(map(torch.equal, plain[1], same[1]))


def test_length_zero():
    """y = 0, h_n = h_0, no gradient of weights, dh_0 = dh_n."""
    spec = cells.lstm.spec(3, 4, num_layers=2, bidirectional=True)
    x, weights, states, _ = draw(spec)
    y, finals, _ = run(spec, x, weights, states, lengths=torch.zeros(3, dtype=torch.int64))
    assert not y.any()
    assert all(map(torch.equal, finals, states))
    cotangents = [torch.randn_like(state) for state in finals]
    grads = torch.autograd.grad(finals, [*states, x, *weights], cotangents, allow_unused=True)
    assert all(map(torch.equal, grads[:2], cotangents))
    assert not any(grad is not None and grad.any() for grad in grads[2:])


def test_dropout_is_a_mask_between_layers():
    """Of layer 0's output, both directions wide; scaled; not of the last; not in inference."""
    spec = cells.gru.spec(3, 4, num_layers=2, bidirectional=True, dropout=0.4)
    x, weights, states, _ = draw(spec)
    lower, upper = (
        spec.with_(num_layers=1, dropout=0.0),
        spec.with_(num_layers=1, dropout=0.0, input_size=8),
    )
    half = len(weights) // 2
    below, _, _ = run(lower, x, weights[:half], [states[0][:2]])
    seed = philox.draw(torch.device("cpu"), torch.Generator().manual_seed(5))
    mask = philox.mask(seed, 0, 0.4, (6, 3, 8), below)
    above, _, _ = run(upper, below * mask, weights[half:], [states[0][2:]])
    y, _, _ = run(
        spec, x, weights, states, training=True, generator=torch.Generator().manual_seed(5)
    )
    assert_equal(y, above)
    assert {*mask.unique().tolist()} == {0.0, 1 / 0.6}
    plain, _, _ = run(upper, below, weights[half:], [states[0][2:]])
    assert_equal(run(spec, x, weights, states)[0], plain)


def test_clip_bounds_c_where_it_is_read():
    """A loop with torch.clamp; c is stored unclipped and its gradient passes within the bounds."""
    spec = cells.lstm.spec(3, 4, cell_clip=CLIP)
    x, weights, states, _ = draw(spec, seed=4)
    w_ih, w_hh, b_ih, b_hh = weights
    h, c, outputs = states[0][0], states[1][0], []
    for x_t in x:
        i, f, g, o = (x_t @ w_ih.T + b_ih + h @ w_hh.T + b_hh).chunk(4, -1)
        c = sigmoid(f) * c.clamp(*CLIP) + sigmoid(i) * tanh(g)
        h = sigmoid(o) * tanh(c.clamp(*CLIP))
        outputs.append(h)
    y, (h_n, c_n), _ = run(spec, x, weights, states)
    found, want = [y, h_n, c_n], [torch.stack(outputs), h[None], c[None]]
    assert size(c) > CLIP[1], "the bounds bite"
    leaves = [x, *states, *weights]
    grads = [
        torch.autograd.grad(sum(part.sin().sum() for part in parts), leaves)
        for parts in (found, want)
    ]
    for got, wanted in zip((*found, *grads[0]), (*want, *grads[1]), strict=True):
        assert_equal(got, wanted)


@pytest.mark.parametrize("mode", ["input", "recurrent", "none"])
@pytest.mark.parametrize("cell", CELLS)
def test_bias_modes(cell, mode):
    """A missing bias is a zero one."""
    spec = CELLS[cell].spec(3, 4, num_layers=2, bidirectional=True, bias_mode=mode)
    x, weights, states, _ = draw(spec)
    given = dict(zip((slot.name for slot in params.module_slots(spec)), weights))
    double = spec.with_(bias_mode="double")
    filled = [
        given.get(slot.name, torch.zeros(slot.shape, dtype=F64))
        for slot in params.module_slots(double)
    ]
    assert len(filled) > len(weights)
    assert_equal(run(spec, x, weights, states)[0], run(double, x, filled, states)[0])


@pytest.mark.parametrize("mode", ["double", "recurrent"])
@pytest.mark.parametrize("cell", CELLS)
def test_skip_input_is_an_identity_matrix(cell, mode):
    spec = CELLS[cell].spec(4, 4, num_layers=2, input_mode="skip", bias_mode=mode)
    x, weights, states, _ = draw(spec)
    eye = torch.eye(4, dtype=F64).repeat(len(spec.gates), 1)
    found, want = (
        run(spec, x, weights, states)[0],
        run(spec.with_(input_mode="linear"), x, [eye, *weights], states)[0],
    )
    assert_equal(found, want)


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"reverse": True}], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_gates_input_is_an_identity_matrix_for_each_gate(cell, options):
    width = 4 * len(CELLS[cell].gates)
    spec = CELLS[cell].spec(width, 4, num_layers=2, input_mode="gates", **options)
    x, weights, states, _ = draw(spec)
    # W_ih of layer 0 precedes the other tensors of its chain
    linear, given, rest = spec.with_(input_mode="linear"), [], iter(weights)
    for slot in params.module_slots(linear):
        lacks = slot.name.startswith("weight_ih_l0")
        given.append(torch.eye(width, dtype=F64) if lacks else next(rest))
    assert_equal(run(spec, x, weights, states)[0], run(linear, x, given, states)[0])


@pytest.mark.parametrize("cell", ["lstm", "peephole_lstm", "coupled_lstm"])
def test_a_projection_is_a_matrix_after_the_step(cell):
    """Folded into the matrices that read h, which needs no projection: R_big = R W_hr."""
    spec = CELLS[cell].spec(3, 5, proj_size=2)
    x, weights, states, _ = draw(spec, seed=6)
    given = dict(zip((slot.name for slot in params.module_slots(spec)), weights))
    w_hr = given.pop("weight_hr_l0")
    given["weight_hh_l0"] = given["weight_hh_l0"] @ w_hr
    plain = spec.with_(proj_size=0)
    wide = [given[slot.name] for slot in params.module_slots(plain)]
    start = [torch.zeros(1, 3, 5, dtype=F64), states[1]]
    y, (_, c_n), _ = run(spec, x, weights, [torch.zeros_like(states[0]), states[1]])
    wide_y, (_, wide_c_n), _ = run(plain, x, wide, start)
    assert_equal(y, wide_y @ w_hr.T)
    assert_equal(c_n, wide_c_n)


def smooth_case(cell):
    """A small call away from kinks, all features on: (function of flat leaves, leaves)."""
    clip = (-0.9, 0.8) if CELLS[cell].takes_clip else None
    spec = CELLS[cell].spec(2, 3, bidirectional=True, cell_clip=clip)
    if not cells._reads_emitted(CELLS[cell]):
        spec = spec.with_(proj_size=2)
    x, weights, states, inputs = draw(spec, steps=3, batch=2, seed=1)
    fresh = [inputs.cast(F64)[f"reset_{name}_0"] for name in spec.states]
    if cell == "slstm":  # n is positive and m finite in any state that a run reaches
        with torch.no_grad():
            for state in (states[2], fresh[2]):
                state.abs_().add_(1.5)
    lengths = torch.tensor([3, 2])
    reset = torch.tensor([[0, 0], [1, 0], [0, 0]])
    count = len(states)

    def call(x, *flat):
        y, finals, every = run(
            spec, x, flat[2 * count :], flat[:count], lengths=lengths, reset=reset,
            reset_states=flat[count : 2 * count], return_states=True,
        )  # fmt: skip
        return y, *finals, *every

    return call, [x, *states, *fresh, *weights]


@SCRIPTED
@pytest.mark.parametrize("cell", thinned(CELLS, 4))
def test_gradcheck(cell):
    call, leaves = smooth_case(cell)
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradcheck(
        call, leaves, check_forward_ad=True, check_backward_ad=False, fast_mode=True
    )


@pytest.mark.parametrize("cell", thinned(CELLS, 4))
def test_gradgradcheck(cell):
    call, leaves = smooth_case(cell)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("cell", CELLS)
def test_backward_of_the_backend_is_autograd(cell):
    """`Reference.backward`, which nobody calls while `auto` runs it as plain code."""
    spec = CELLS[cell].spec(3, 4, num_layers=2)
    x, weights, states, _ = draw(spec)
    call = Call(replace(Case(spec, F64).problem, grad=True), x, states, weights)
    backend = reference.Reference()
    out = backend.forward(call)
    cotangents = [torch.randn_like(value) for value in (out.y, *out.finals)]
    wanted = torch.autograd.grad([out.y, *out.finals], [x, *states, *weights], cotangents)
    needs = Needs(True, (True,) * len(states), (True, False) * (len(weights) // 2), ())
    found = backend.backward(call, out.y, [], Cotangents(cotangents[0], cotangents[1:], []), needs)
    for got, want, need in zip(found.flat, wanted, needs.flat, strict=True):
        assert (got is not None) == need
        if need:
            assert_equal(got, want)


@pytest.fixture
def ensemble():
    torch.manual_seed(0)
    return [openrnn.LSTM(3, 4, 2, bidirectional=True, dtype=F64) for _ in range(3)]


@SCRIPTED
def test_jvp(ensemble):
    """<u, J v> = <J' u, v>; `auto` finds the backend that can."""
    layer, x = ensemble[0], torch.randn(5, 2, 3, dtype=F64)
    weights = dict(layer.named_parameters())

    def outputs(weights, x):
        y, (h_n, c_n) = functional_call(layer, weights, (x,))
        return y, h_n, c_n

    v = ({name: torch.randn_like(w) for name, w in weights.items()}, torch.randn_like(x))
    y, pushed = jvp(outputs, (weights, x), v)
    u = [torch.randn_like(part) for part in y]
    pulled = torch.autograd.grad(outputs(weights, x.requires_grad_()), [*weights.values(), x], u)
    left = sum((a * b).sum() for a, b in zip(u, pushed))
    right = sum((a * b).sum() for a, b in zip(pulled, (*v[0].values(), v[1])))
    assert_equal(left, right)


@SCRIPTED
def test_forward_mode_without_func(ensemble):
    layer, x, v = ensemble[0], torch.randn(5, 2, 3, dtype=F64), torch.randn(5, 2, 3, dtype=F64)
    with forward_ad.dual_level():
        y, _ = layer(forward_ad.make_dual(x, v))
        tangent = forward_ad.unpack_dual(y).tangent
    _, wanted = jvp(lambda x: layer(x)[0], (x,), (v,))
    assert_equal(tangent, wanted)


def test_vmap_over_an_ensemble(ensemble):
    stacked, buffers = stack_module_state(ensemble)
    x = torch.randn(5, 2, 3, dtype=F64)

    def one(weights, x):
        return functional_call(ensemble[0], (weights, buffers), (x,))[0]

    y = vmap(one, in_dims=(0, None))(stacked, x)
    for found, layer in zip(y, ensemble, strict=True):
        assert_equal(found, layer(x)[0])


def test_per_sample_gradients(ensemble):
    layer, x = ensemble[0], torch.randn(4, 5, 3, dtype=F64)
    weights = {name: w.detach() for name, w in layer.named_parameters()}

    def loss(weights, x):
        return functional_call(layer, weights, (x,))[0].sin().sum()

    grads = vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    for b, row in enumerate(x):
        alone = torch.autograd.grad(layer(row)[0].sin().sum(), [*layer.parameters()])
        for name, want in zip(weights, alone):
            assert_equal(grads[name][b], want)


@openrnn.cell(gates="a", states="h c")
def heaviside(x, r, s):
    return torch.heaviside(x.a + r.a, s.h * 0), torch.tanh(x.a) + 0.5 * s.c


@openrnn.cell(gates="a", states="h")
def floor_divide(x, r, s):
    return torch.floor_divide(x.a + r.a, 0.3)


@openrnn.cell(gates="a", states="h")
def in_place(x, r, s):
    return (x.a + r.a).tanh_().mul_(0.5)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (heaviside, "derivative for aten::heaviside is not implemented"),
        (floor_divide, "derivative for aten::floor_divide is not implemented"),
        (in_place, "modified by an inplace operation"),
    ],
    ids=["heaviside", "floor_divide", "in place"],
)
def test_backward_alone_needs_a_derivative(backend, cell, text):
    """As in torch; and what reaches no such operator has gradients, zeros where it has none."""
    layer, x = openrnn.Recurrent(cell, 3, 4, backend=backend), torch.randn(5, 2, 3)
    y, states = layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x)[0], y)
    with pytest.raises(RuntimeError, match=text):
        y.sum().backward()
    if len(states) == 2:
        h, c = (torch.zeros(1, 2, 4, requires_grad=True) for _ in range(2))
        of_h, of_c = torch.autograd.grad(layer(x, (h, c))[1][1].sum(), (h, c), allow_unused=True)
        assert torch.equal(of_h, torch.zeros(1, 2, 4))
        assert torch.equal(of_c, torch.full((1, 2, 4), 0.5**5))


def test_a_large_call_on_the_reference_warns_once(monkeypatch):
    monkeypatch.setattr(dispatch, "_warned", set())  # other tests have had the warning
    layer = openrnn.Recurrent(cells.gru_reset_before, 2, 64)
    x = torch.zeros(40, 50, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer(x[:2])
        assert not caught
        layer(x)
        layer(x)
    assert len(caught) == 1
    assert "two dependent products" in str(caught[0].message)


def test_states_keep_their_dtype_whatever_a_cell_promotes():
    """In 16 bits `torch.where` of two numbers is float32, as torch's default dtype is."""

    @openrnn.cell(gates="h", states="h c")
    def promoting(x, r, s):
        return torch.tanh(x.h + r.h + s.c), torch.where(s.c > 0, 0.5, 2) * torch.tanh(x.h)

    layer = openrnn.Recurrent(promoting, 3, 4, dtype=torch.bfloat16, backend="reference")
    y, (h, c) = layer(torch.ones(5, 2, 3, dtype=torch.bfloat16))
    assert (y.dtype, h.dtype, c.dtype) == (torch.bfloat16,) * 3


def test_infinite_states_of_rows_that_have_ended_count_for_nothing():
    """Their later steps do not exist: 0 times inf is in no gradient."""
    torch.manual_seed(0)
    layer, x = openrnn.RNN(3, 4, nonlinearity="relu", backend="reference"), torch.randn(3, 2, 3)
    x[0, 0, 1] = torch.inf
    y, _ = layer(x, lengths=torch.tensor([1, 3]))
    y.backward(torch.ones_like(y))
    found = layer.weight_hh_l0.grad
    layer.zero_grad()
    y, _ = layer(x[:, 1:])  # the other row alone; the first step of a row multiplies no state
    y.backward(torch.ones_like(y))
    assert torch.allclose(found, layer.weight_hh_l0.grad)
