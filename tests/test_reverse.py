"""reverse=True: the reverse half of a bidirectional layer, on every backend and in every mode."""

import copy
import pickle
from unittest import mock

import pytest
import torch
from cases import ON_CPU
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import openrnn
from openrnn import cells, dispatch, ops, time_reversed

STEPS, BATCH, INPUTS, HIDDEN = 6, 4, 3, 5
LENGTHS = {"full": None, "lengths": torch.tensor([6, 0, 2, 5])}
RESETS = {"": None, "resets": torch.rand(6, 4, generator=torch.Generator().manual_seed(1)) < 0.4}
RESETS["resets"][0, :3] = True  # one of length 0, and two final states that are replaced


def drawn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def pair(cell, backend="auto", **options):
    """A bidirectional layer, and a reverse one with the weights of its reverse half."""
    torch.manual_seed(0)
    options = {"backend": backend, "dtype": torch.float64, **options}
    both = openrnn.Recurrent(cell, INPUTS, HIDDEN, bidirectional=True, **options)
    layer = openrnn.Recurrent(cell, INPUTS, HIDDEN, reverse=True, **options)
    half = {name: value for name, value in both.state_dict().items() if name.endswith("_reverse")}
    layer.load_state_dict({name.removesuffix("_reverse"): half[name] for name in half})
    return both, layer


def outcome(layer, given, lengths, reset):
    """Outputs and gradients of what is the last direction's."""
    x, states, resets = (copy.deepcopy(part) for part in given)
    chains = layer.spec.chains
    leaves = [x, *states, *(resets if reset is not None else [])]
    for leaf in leaves:
        leaf.requires_grad_()
    hx, fresh = ([state.expand(chains, -1, -1) for state in part] for part in (states, resets))
    y, finals, every = layer(
        x, hx, lengths=lengths, reset=reset, reset_state=fresh if reset is not None else None,
        return_states=True,
    )  # fmt: skip
    made = [y[..., -layer.spec.output_size :], *(state[-1] for state in (*finals, *every))]
    weights = [value for name, value in layer.named_parameters()
               if not layer.bidirectional or name.endswith("_reverse")]  # fmt: skip
    dice = torch.Generator().manual_seed(3)
    loss = sum((one * torch.randn(one.shape, generator=dice)).sum() for one in made)
    return [*made, *torch.autograd.grad(loss, [*leaves, *weights])]


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_relu", "slstm"])
@pytest.mark.parametrize("backend", ON_CPU)
def test_it_is_the_reverse_half_of_a_bidirectional_layer(backend, cell, lengths, reset):
    """y, final states, states of all steps, and every gradient; nan in the padding."""
    cell = cells.lookup(cell)
    both, layer = pair(cell, backend)
    lengths, reset = LENGTHS[lengths], RESETS[reset]
    given = (
        drawn(STEPS, BATCH, INPUTS),
        *([drawn(1, BATCH, HIDDEN) for _ in cell.states] for _ in range(2)),
    )
    if lengths is not None:
        given[0][torch.arange(STEPS)[:, None] >= lengths] = torch.nan
    wanted, found = (outcome(one, given, lengths, reset) for one in (both, layer))
    for place, (want, have) in enumerate(zip(wanted, found, strict=True)):
        torch.testing.assert_close(have, want, rtol=0, atol=1e-13, msg=str(place))


@pytest.mark.parametrize("backend", ON_CPU)
def test_a_stack_is_layers_after_each_other(backend):
    torch.manual_seed(0)
    deep = openrnn.GRU(INPUTS, HIDDEN, 2, reverse=True, backend=backend)
    x, lengths = torch.randn(STEPS, BATCH, INPUTS), LENGTHS["lengths"]
    y, wanted, ends = x, deep(x, lengths=lengths), []
    for k, width in enumerate((INPUTS, HIDDEN)):
        one = openrnn.GRU(width, HIDDEN, reverse=True, backend="reference")
        own = {name: value for name, value in deep.state_dict().items() if name.endswith(f"l{k}")}
        one.load_state_dict({name.replace(f"_l{k}", "_l0"): own[name] for name in own})
        y, end = one(y, lengths=lengths)
        ends.append(end)
    torch.testing.assert_close(wanted[0], y)
    torch.testing.assert_close(wanted[1], torch.cat(ends))


@pytest.mark.parametrize("backend", ON_CPU)
def test_dropout_masks_are_those_of_the_turned_sequence(backend):
    """Each counts its steps in the order in which the layer runs."""
    torch.manual_seed(0)
    options = {"num_layers": 3, "dropout": 0.5, "backend": backend}
    layer = openrnn.LSTM(INPUTS, HIDDEN, reverse=True, **options)
    ahead = openrnn.LSTM(INPUTS, HIDDEN, **options)
    ahead.load_state_dict(layer.state_dict())
    x, lengths = torch.randn(STEPS, BATCH, INPUTS), LENGTHS["lengths"]

    def run(layer, x):
        x = x.clone().requires_grad_()
        y, (h, c) = layer(x, lengths=lengths, generator=torch.Generator().manual_seed(4))
        return y, h, c, *torch.autograd.grad(h.sum() + (y * y).sum(), [x, *layer.parameters()])

    y, h, c, dx, *grads = run(layer, x)
    wanted = run(ahead, time_reversed.flip_time(x, lengths))
    torch.testing.assert_close([time_reversed.flip_time(y, lengths), h, c], [*wanted[:3]])
    torch.testing.assert_close([time_reversed.flip_time(dx, lengths), *grads], [*wanted[3:]])


def test_turning_is_its_own_inverse():
    x = torch.arange(12).view(3, 4)
    lengths = torch.tensor([3, 0, 1, 2])
    assert time_reversed.flip_time(x, lengths).tolist() == [
        [8, 1, 2, 7],
        [4, 5, 6, 3],
        [0, 9, 10, 11],
    ]
    assert torch.equal(time_reversed.flip_time(time_reversed.flip_time(x, lengths), lengths), x)


@pytest.mark.parametrize("backend", ON_CPU)
def test_layouts_of_the_input(backend):
    """batch_first, unbatched and PackedSequence, unsorted."""
    torch.manual_seed(0)
    layer = openrnn.LSTM(INPUTS, HIDDEN, 2, reverse=True, backend=backend)
    x, lengths = torch.randn(STEPS, BATCH, INPUTS), torch.tensor([2, 6, 1, 4])
    y, (h, c) = layer(x, lengths=lengths)
    packed, ends = layer(pack_padded_sequence(x, lengths, enforce_sorted=False))
    torch.testing.assert_close(pad_packed_sequence(packed)[0], y)
    torch.testing.assert_close([*ends], [h, c])
    alone, (last, _) = layer(x[:2, 0])
    torch.testing.assert_close(alone, y[:2, 0])
    torch.testing.assert_close(last, h[:, 0])
    layer.batch_first = True
    swapped, _ = layer(x.transpose(0, 1), lengths=lengths)
    torch.testing.assert_close(swapped.transpose(0, 1), y)


def test_other_backends_are_given_forward_calls():
    """So whatever a backend does for a forward layer, it does here: a GPU's need no code for it."""
    layer = openrnn.LSTM(INPUTS, HIDDEN, 2, reverse=True, backend="cpu")
    x, lengths = torch.randn(STEPS, BATCH, INPUTS), LENGTHS["lengths"]
    cpu, seen = dispatch.BACKENDS["cpu"], []

    def spy(call):
        seen.append(call)
        return type(cpu).forward(cpu, call)

    with mock.patch.object(cpu, "forward", spy):
        layer(x, lengths=lengths, reset=RESETS["resets"])
    (call,) = seen
    assert call.problem.spec == layer.spec.with_(reverse=False)
    assert torch.equal(call.x, time_reversed.flip_time(x, lengths))
    assert not call.reset[0].any()
    assert "runs forward" in str(openrnn.explain(layer, x, quiet=True))
    assert "runs forward" not in str(openrnn.explain(layer, x, quiet=True, backend="reference"))


def test_calls_that_repeat():
    layer = openrnn.GRU(INPUTS, HIDDEN, reverse=True)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(STEPS, BATCH, INPUTS)
            want, _ = copy.deepcopy(layer)(x)
            assert torch.equal(layer(x)[0], want)


def test_compiled_and_exported():
    """One operator, whose text says reverse; any T and B."""
    torch.manual_seed(0)
    torch.compiler.reset()
    layer = openrnn.LSTM(INPUTS, HIDDEN, 2, reverse=True)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    sizes = {"input": {0: torch.export.Dim("T"), 1: torch.export.Dim("B")}}
    exported = torch.export.export(layer, (torch.randn(4, 3, INPUTS),), dynamic_shapes=sizes)
    (node,) = [node for node in exported.graph.nodes if "openrnn" in str(node.target)]
    assert "reverse=True" in str(node.args)
    for steps, batch in ((4, 3), (9, 2)):
        x = torch.randn(steps, batch, INPUTS, requires_grad=True)
        want, _ = layer(x)
        for made in (compiled(x)[0], exported.module()(x)[0]):
            assert torch.equal(made, want)
        (want,), (have,) = (torch.autograd.grad((y * y).sum(), x) for y in (want, compiled(x)[0]))
        assert torch.equal(have, want)


@pytest.mark.filterwarnings("ignore:OpenRNN runs this on the slow reference")
def test_second_derivatives_and_transforms():
    layer = openrnn.GRU(2, 3, reverse=True, dtype=torch.float64, backend="cpu")
    x, lengths = drawn(3, 2, 2).requires_grad_(), torch.tensor([3, 1])
    reset = torch.tensor([[True, False], [False, True], [True, False]])

    def run(x):
        return layer(x, lengths=lengths, reset=reset)

    assert torch.autograd.gradcheck(run, x)
    assert torch.autograd.gradgradcheck(run, x)
    layer.backend = "auto"
    jacobian = torch.func.jacrev(lambda x: run(x)[1])(x.detach())
    assert torch.allclose(jacobian, torch.autograd.functional.jacobian(lambda x: run(x)[1], x))


@pytest.mark.parametrize("backend", ON_CPU)
def test_explicit_operators(backend):
    """As autograd has it, of the same call."""
    spec = ops.spec("lstm", INPUTS, HIDDEN, 2, direction="reverse")
    layer = openrnn.LSTM(INPUTS, HIDDEN, 2, reverse=True)
    assert layer.spec == spec
    flat = openrnn.params.pack(spec, layer.weights()).detach()
    x, lengths, reset = torch.randn(STEPS, BATCH, INPUTS), LENGTHS["lengths"], RESETS["resets"]
    h0, c0 = (torch.randn(2, BATCH, HIDDEN, requires_grad=True) for _ in range(2))
    out = ops.forward(
        x, flat, spec, h0.detach(), c0.detach(), lengths=lengths, reset=reset, backend=backend
    )
    x.requires_grad_()
    y, (h, c) = layer(x, (h0, c0), lengths=lengths, reset=reset)
    torch.testing.assert_close([out.y, *out.states], [y, h, c])
    dy, dh, dc = (torch.randn_like(one) for one in (y, h, c))
    found = ops.backward(out.reserve, dy, dh, dc)
    leaves = [x, h0, c0, *layer.weights()]
    wanted = torch.autograd.grad([y, h, c], leaves, [dy, dh, dc])
    torch.testing.assert_close([found["x"], found["h0"], found["c0"]], [*wanted[:3]])
    torch.testing.assert_close(found["params"], openrnn.params.pack(spec, wanted[3:]))


def test_it_is_said_where_a_layer_is_shown_or_kept():
    layer = openrnn.LSTM(INPUTS, HIDDEN, reverse=True)
    assert repr(layer) == "LSTM(3, 5, reverse=True)"
    assert "reverse" not in repr(openrnn.LSTM(INPUTS, HIDDEN))
    assert [*layer.state_dict()] == [*torch.nn.LSTM(INPUTS, HIDDEN).state_dict()]
    assert pickle.loads(pickle.dumps(layer)).spec.reverse
    assert copy.deepcopy(layer).spec.reverse


def test_what_is_refused():
    with pytest.raises(ValueError, match="reverse is one direction, needs bidirectional=False"):
        openrnn.LSTM(INPUTS, HIDDEN, bidirectional=True, reverse=True)
    with pytest.raises(ValueError, match=r"direction must be one of .*reverse, got 'backward'"):
        ops.spec("lstm", INPUTS, HIDDEN, direction="backward")
    layer = openrnn.GRU(INPUTS, HIDDEN, reverse=True)
    with pytest.raises(ValueError, match="step needs one direction, forward"):
        layer.step(torch.randn(BATCH, INPUTS))
    with pytest.raises(ValueError, match="stepper needs one direction, forward"):
        layer.stepper(BATCH)
    # not even where the backend takes packed rows of a forward layer
    packs = mock.patch.object(dispatch.BACKENDS["cpu"], "packed", True)
    with packs, pytest.raises(ValueError, match="x must have shape"):
        openrnn.functional.recurrent(
            layer.spec, torch.randn(3, INPUTS), layer.weights(), lengths=torch.tensor([2, 1])
        )
    (row,) = openrnn.convert(layer, to="torch", quiet=True).rows
    assert row.note == "left: reverse True, torch has no such option"
    for target in ("torch", "cudnn", "gluon"):
        with pytest.raises(ValueError, match=f"{target} has no reverse direction alone"):
            openrnn.to_weights(layer, target)


def test_weights_of_others():
    """Those that have the direction keep it outside their arrays."""
    layer = openrnn.GRU(INPUTS, HIDDEN, reverse=True)
    x = torch.randn(STEPS, BATCH, INPUTS)
    for name in ("onnx", "keras", "openrnn"):
        arrays = openrnn.to_weights(layer, name)
        again = openrnn.from_weights(arrays, name, cell="gru", reverse=True)
        assert torch.equal(again(x)[0], layer(x)[0])
    two = openrnn.to_weights(openrnn.GRU(INPUTS, HIDDEN, bidirectional=True), "onnx")
    with pytest.raises(ValueError, match="needs bidirectional=False"):
        openrnn.from_weights(two, "onnx", cell="gru", reverse=True)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fused", "cudnn"])
def test_packed_sequences_on_a_gpu(backend):
    """Backends that take packed rows get a reverse layer's padded, because these can be turned."""
    torch.manual_seed(0)
    layer = openrnn.LSTM(INPUTS, HIDDEN, 2, reverse=True, backend=backend).to("cuda", torch.float16)
    x, lengths = torch.randn(STEPS, BATCH, INPUTS), torch.tensor([2, 6, 1, 4])
    x = x.to("cuda", torch.float16)
    packed, _ = layer(pack_padded_sequence(x, lengths, enforce_sorted=False))
    same = copy.deepcopy(layer).cpu().float()
    same.backend = "reference"
    want, _ = same(x.cpu().float(), lengths=lengths)
    found = pad_packed_sequence(packed)[0].cpu().float()
    torch.testing.assert_close(found, want, rtol=0, atol=5e-3)
