"""Steps with states kept inside equal steps whose states are carried by hand."""

import copy
import pickle

import pytest
import torch
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

import openrnn

INPUTS, UNITS = 5, 16
KINDS = {
    "lstm": lambda **options: openrnn.LSTM(INPUTS, UNITS, 3, **options),
    "gru": lambda **options: openrnn.GRU(INPUTS, UNITS, **options),
    "projected": lambda **options: openrnn.LSTM(INPUTS, UNITS, 2, proj_size=3, **options),
    "peephole_lstm": lambda **options: openrnn.Recurrent(
        openrnn.cells.peephole_lstm, INPUTS, UNITS, 2, **options
    ),
}
BACKENDS = ["auto", "reference"]


def by_hand(layer, x, state=None):
    """The outputs and states of steps along the first dimension of x."""
    outputs = []
    with torch.no_grad():
        for x_t in x:
            y, state = layer.step(x_t, state)
            outputs.append(y)
    return torch.stack(outputs), state


def flat(state):
    return state if isinstance(state, tuple) else (state,)


def close(a, b):
    return all(torch.allclose(left, right, atol=1e-6) for left, right in zip(flat(a), flat(b)))


def is_bound(stepper):
    return stepper._guard is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", [None, 1, 3, 60])
def test_steps_are_those_of_step(kind, backend, batch):
    layer = KINDS[kind](backend=backend)
    x = torch.randn(7, *(() if batch is None else (batch,)), INPUTS)
    stepper = layer.stepper(batch)
    found = torch.stack([stepper(x_t).clone() for x_t in x])
    wanted, state = by_hand(layer, x)
    assert is_bound(stepper) == (backend == "auto")
    assert close(found, wanted)
    assert close(stepper.state, state)
    assert not found.requires_grad


def test_a_step_writes_the_same_tensor():
    layer = openrnn.GRU(INPUTS, UNITS)
    stepper = layer.stepper(2)
    results = [stepper(torch.randn(2, INPUTS)) for _ in range(4)]
    assert len({result.data_ptr() for result in results}) == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_states_are_set_and_cleared(kind, backend):
    layer, x = KINDS[kind](backend=backend), torch.randn(3, 4, INPUTS)
    stepper = layer.stepper(4)
    _, state = by_hand(layer, x)
    for x_t in x:
        stepper(x_t)
    stepper.state = state
    assert close(stepper(x[0]), by_hand(layer, x[:1], state)[0][0])
    kept = stepper.state
    mask = torch.tensor([True, False, False, True])
    stepper.reset(mask)
    cut = tuple(each * ~mask[:, None] for each in flat(kept))
    assert close(stepper.state, cut)
    cut = cut if isinstance(kept, tuple) else cut[0]
    assert close(stepper(x[1]), by_hand(layer, x[1:2], cut)[0][0])
    for clear in (stepper.reset, lambda: setattr(stepper, "state", None)):
        clear()
        assert close(stepper(x[2]), by_hand(layer, x[2:])[0][0])


def test_parameters_are_read_as_they_are_now():
    layer, x = openrnn.LSTM(INPUTS, UNITS), torch.randn(2, 1, INPUTS)
    stepper = layer.stepper(1)

    def same():
        stepper.reset()
        return close(stepper(x[0]), by_hand(layer, x[:1])[0][0])

    assert same()
    assert same()
    with torch.no_grad():
        layer.weight_hh_l0.mul_(2), layer.bias_ih_l0.add_(1)
    assert same()
    layer.weight_ih_l0 = torch.nn.Parameter(torch.randn(4 * UNITS, INPUTS))
    assert same()
    layer.load_state_dict({k: v + 1 for k, v in layer.state_dict().items()}, assign=True)
    assert same()
    assert is_bound(stepper)
    layer.double()
    x = x.double()
    assert same()
    assert stepper(x[0]).dtype == torch.float64
    layer.to(torch.bfloat16)
    x = x.to(torch.bfloat16)
    stepper.reset()
    assert torch.allclose(stepper(x[0]), by_hand(layer, x[:1])[0][0], atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("units", [UNITS, 128])
@pytest.mark.parametrize("batch", [None, 2])
def test_16_bits_have_the_bits_of_steps(dtype, units, batch):
    """With large parameters, which are kept in float32, and small ones; both may change."""
    layer = openrnn.LSTM(INPUTS, units, 2).to(dtype)
    stepper, state = layer.stepper(batch), None
    x = torch.randn(6, INPUTS) if batch is None else torch.randn(6, batch, INPUTS)
    with torch.no_grad():
        for number, x_t in enumerate(x.to(dtype)):
            if number == 4:
                assert is_bound(stepper)
                for param in layer.parameters():
                    param.data.copy_(param * 0.5)
            y, state = layer.step(x_t, state)
            assert torch.equal(stepper(x_t), y)
            assert all(map(torch.equal, stepper.state, state))
    assert is_bound(stepper)


def test_settings_are_read_as_they_are_now():
    layer = openrnn.LSTM(INPUTS, UNITS, 2, dropout=0.5).eval()
    stepper, x = layer.stepper(8), torch.randn(8, INPUTS)

    def result():
        stepper.reset()
        return stepper(x).clone()

    plain = result()
    assert torch.equal(result(), plain)
    layer.train()
    assert not torch.equal(result(), plain)
    layer.dropout = 0.0
    assert torch.equal(result(), plain)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.allclose(result(), plain, atol=1e-6)
    finally:
        torch.set_num_threads(before)
    result()
    assert is_bound(stepper)
    layer.backend = "reference"
    assert torch.allclose(result(), plain, atol=1e-6)
    assert not is_bound(stepper)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_a_step(threads):
    layer, before = openrnn.LSTM(64, 512), torch.get_num_threads()
    x = torch.randn(20, 1, 64)
    try:
        torch.set_num_threads(threads)
        stepper = layer.stepper(1)
        found = torch.stack([stepper(x_t).clone() for x_t in x])
        assert torch.allclose(found, by_hand(layer, x)[0], atol=1e-6)
    finally:
        torch.set_num_threads(before)


def test_modes_around_a_step():
    layer, x = openrnn.LSTM(INPUTS, UNITS), torch.randn(3, 1, INPUTS)
    stepper = layer.stepper(1)
    with torch.inference_mode():
        first = stepper(x[0]).clone()
    second = stepper(x[1]).clone()
    with torch.autocast("cpu", torch.bfloat16):
        third = stepper(x[2]).clone()
    wanted = by_hand(layer, x)[0]
    assert close(torch.stack([first, second]), wanted[:2])
    assert torch.allclose(third, wanted[2], atol=1e-2)
    assert third.dtype == torch.float32


def test_bad_input_is_refused_bound_or_not():
    layer = openrnn.LSTM(INPUTS, UNITS)
    stepper = layer.stepper(2)
    for _ in range(3):
        for wrong in (torch.zeros(3, INPUTS), torch.zeros(2, 4), torch.zeros(2, 2, INPUTS)):
            with pytest.raises((ValueError, RuntimeError), match=r"[Ee]xpect|must|needs"):
                stepper(wrong)
        with pytest.raises(TypeError, match="x_t"):
            stepper([1.0])
        with pytest.raises(ValueError, match="dtype"):
            stepper(torch.zeros(2, INPUTS, dtype=torch.float64))
        stepper(torch.zeros(2, INPUTS))
    layer.weight_hh_l0.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="memory"):
        stepper(torch.zeros(2, INPUTS))


def test_what_no_stepper_can_be_made_of():
    with pytest.raises(ValueError, match="one direction"):
        openrnn.LSTM(3, 4, bidirectional=True).stepper(1)
    for batch in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="batch must be"):
            openrnn.LSTM(3, 4).stepper(batch)
    stepper = openrnn.LSTM(3, 4).stepper()
    with pytest.raises(ValueError, match="no batch"):
        stepper.reset(torch.tensor([True]))
    with pytest.raises(TypeError, match=r"mask must be a tensor \(B,\), got list"):
        stepper.reset([True])
    with pytest.raises(ValueError, match=r"\(2,\)"):
        openrnn.LSTM(3, 4).stepper(2).reset(torch.tensor([True]))


@pytest.mark.parametrize("threads", [1, 4, 8])
def test_a_result_may_be_the_next_input(threads):
    before, layer = torch.get_num_threads(), openrnn.RNN(512, 512)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(3)
    try:
        torch.set_num_threads(threads)
        stepper = layer.stepper(1)
        y = wanted = torch.randn(1, 512)
        state = None
        for _ in range(30):
            with torch.no_grad():
                wanted, state = layer.step(wanted, state)
            y = stepper(y)
            assert torch.allclose(y, wanted, atol=1e-5)
            wanted = y.clone()
            state = stepper.state
    finally:
        torch.set_num_threads(before)
    assert is_bound(stepper)


def test_weights_that_are_computed_are_asked_for():
    class Silent(openrnn.GRU):
        def weights(self):
            return [weight * 0 for weight in super().weights()]

    stepper = Silent(INPUTS, UNITS).stepper(2)
    for _ in range(4):
        assert not stepper(torch.randn(2, INPUTS)).any()
    assert not is_bound(stepper)


@pytest.mark.parametrize("bias", [True, False])
def test_computed_weights_are_computed_once_a_step(bias):
    """Also where all of them are; another dtype and device are still followed."""
    counts = Counts()
    layer = openrnn.GRU(INPUTS, UNITS, bias=bias)
    names = ("weight_ih_l0", "weight_hh_l0")
    for name in names:
        register_parametrization(layer, name, counts)
    stepper, x = layer.stepper(2), torch.randn(6, 2, INPUTS)
    counts.calls = 0
    found = torch.stack([stepper(x_t).clone() for x_t in x[:3]])
    assert counts.calls == 3 * len(names)
    assert close(found, by_hand(layer, x[:3])[0])
    layer.double()
    wanted = by_hand(layer, x[3:].double(), stepper.state.double())[0]
    counts.calls = 0
    found = torch.stack([stepper(x_t.double()).clone() for x_t in x[3:]])
    assert found.dtype == torch.float64
    assert close(found, wanted)
    assert counts.calls == (3 + 1) * len(names)  # the first asks, too


def test_weights_of_another_dtype_that_nothing_computes_any_more():
    """What was seen of computed ones says nothing of others."""
    layer = openrnn.GRU(INPUTS, UNITS)
    stepper, x = layer.stepper(2), torch.randn(2, INPUTS)
    for dtype, computed in ((torch.float32, True), (torch.float64, False), (torch.float32, True)):
        layer.to(dtype)
        if computed:
            register_parametrization(layer, "weight_hh_l0", Counts())
        assert stepper(x.to(dtype)).dtype == dtype
        if computed:
            remove_parametrizations(layer, "weight_hh_l0")


class Counts(torch.nn.Module):
    """Leaves a weight as it is, and counts how often it is asked."""

    calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight


def test_a_result_that_was_overwritten_is_no_longer_differentiated():
    stepper, head = openrnn.GRU(INPUTS, UNITS).stepper(2), torch.nn.Linear(UNITS, 1)
    for _ in range(3):
        y = stepper(torch.randn(2, INPUTS))
    assert is_bound(stepper)
    loss = head(y).sum()
    stepper(torch.randn(2, INPUTS))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_copies_have_memory_of_their_own():
    layer, x = openrnn.LSTM(INPUTS, UNITS), torch.randn(6, 2, INPUTS)
    stepper = layer.stepper(2)
    for x_t in x[:3]:
        stepper(x_t)
    copies = [
        copy.deepcopy(stepper),
        copy.deepcopy(stepper, {id(layer): layer}),
        pickle.loads(pickle.dumps(stepper)),
    ]
    wanted = by_hand(layer, x)[0][3:]
    for each in (stepper, *copies):
        for x_t, y in zip(x[3:], wanted):
            assert close(each(x_t), y)


@pytest.mark.parametrize(("batch", "shape"), [(2, (3, 3)), (2, (3,)), (None, (2, 3))])
def test_an_input_of_another_batch_is_named(batch, shape):
    stepper = openrnn.LSTM(3, 4).stepper(batch)
    lead = () if batch is None else (batch,)
    said = rf"x_t must have shape {(*lead, 3)}, .* batch={batch}, got {shape}"
    with pytest.raises(ValueError, match=said.replace("(", r"\(").replace(")", r"\)")):
        stepper(torch.zeros(shape))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("names", [("weight_ih_l0",), ("weight_ih_l0", "weight_hh_l0")], ids=str)
def test_a_change_of_dtype_under_a_hook_that_computes_weights(names):
    """`double` leaves what the hook has made; the stepper's memory follows the new weights."""
    layer, x = openrnn.GRU(3, 4), torch.randn(2, 2, 3, dtype=torch.float64)
    for name in names:
        torch.nn.utils.weight_norm(layer, name)
    stepper = layer.stepper(2)
    stepper(x[0].float())
    layer.double()
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        stepper(x[0].float())
    stepper.reset()
    found = [stepper(x_t).clone() for x_t in x]
    assert torch.allclose(torch.stack(found), layer(x)[0])
