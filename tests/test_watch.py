"""`openrnn.watch`: what is written, when, and that nothing of the training changes."""

import copy
import pickle

import pytest
import torch
from test_convert_lightning import Callback, Trainer
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations
from torch.optim import optimizer

import openrnn
from openrnn.convert.lightning import PACKAGES
from openrnn.watch.gates import SATURATED, preactivations

pytestmark = pytest.mark.usefixtures("one_thread")


class Writer:
    """What TensorBoard's writer is asked."""

    def __init__(self):
        self.scalars, self.histograms = [], []

    def add_scalar(self, name, value, step):
        assert isinstance(value, float)
        self.scalars.append((step, name, value))

    def add_histogram(self, name, values, step):
        self.histograms.append((step, name, values))

    def steps_of(self, name):
        return [step for step, other, _ in self.scalars if other == name]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.below = nn.Linear(3, 4)
        self.rnn = openrnn.LSTM(4, 5, num_layers=2, dropout=0.5)
        self.out = nn.Linear(5, 2)

    def forward(self, x):
        return self.out(self.rnn(self.below(x))[0])


def steps(model, count, by=None):
    by = by or torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(count):
        by.zero_grad()
        model(torch.ones(6, 2, 3)).square().sum().backward()
        by.step()


@pytest.mark.parametrize(
    "options",
    [{}, {"bidirectional": True}, {"reverse": True}, {"batch_first": True, "bias": False},
     {"bidirectional": True, "bias_mode": "recurrent", "batch_first": True}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("call", ["bare", "states", "lengths", "reset", "both", "single"])
def test_preactivations_are_those_of_the_call(options, call):
    """Of an RNN the tanh of each is the state, in every step of every direction."""
    torch.manual_seed(0)
    rnn = openrnn.RNN(3, 4, num_layers=2, dtype=torch.float64, backend="reference", **options)
    chains, first = rnn.spec.chains, rnn.batch_first and call != "single"
    x = torch.randn((6, 3) if call == "single" else (6, 2, 3), dtype=torch.float64)
    state = torch.randn(chains, *x.shape[1:-1], 4, dtype=torch.float64)
    given = {"hx": None if call == "bare" else state}
    if call in ("lengths", "both"):
        given["lengths"] = torch.tensor([4, 0])
    if call in ("reset", "both", "single"):
        given["reset"] = torch.rand(x.shape[:-1]) < 0.4
        given["reset_state"] = torch.randn_like(state)
    if first:
        x, *more = (
            part.transpose(0, 1) for part in (x, *[given[k] for k in given if k == "reset"])
        )
        given |= {"reset": more[0]} if more else {}
    found = list(preactivations(rnn, x, **given))
    assert [gate.where for gate in found] == [
        f"l{chain // rnn.spec.directions}{'_reverse' * (chain % rnn.spec.directions)}/h"
        for chain in range(chains)
    ]
    _, _, states = rnn(x, **given, return_states=True)
    states = states.transpose(1, 2) if first else states
    inside = torch.ones(6, 2, dtype=torch.bool)
    if "lengths" in given:
        inside[4:, 0] = inside[:, 1] = False
    for chain, gate in enumerate(found):
        wanted = states[chain] if call == "single" else states[chain][inside]
        torch.testing.assert_close(gate.values.tanh(), wanted)


@pytest.mark.parametrize("mode", ["skip", "gates"])
def test_inputs_without_a_matrix(mode):
    rnn = openrnn.RNN(4, 4, input_mode=mode, dtype=torch.float64, backend="reference")
    x = torch.randn(5, 2, 4, dtype=torch.float64)
    (gate,) = preactivations(rnn, x)
    torch.testing.assert_close(gate.values.view(5, 2, 4).tanh(), rnn(x)[0])


TIMES = torch.tensor([3, 5])
MASK = torch.tensor([[0, 1], [1, 0], [0, 0], [1, 1], [0, 1]])


@pytest.mark.parametrize(
    ("options", "odd", "plain"),
    [
        ({}, {"lengths": [3, 5]}, {"lengths": TIMES}),
        ({}, {"lengths": TIMES.numpy()}, {"lengths": TIMES}),
        ({}, {"lengths": TIMES.to(torch.uint16)}, {"lengths": TIMES}),
        ({"bidirectional": True}, {"lengths": TIMES.to(torch.int8)}, {"lengths": TIMES}),
        ({}, {"reset": MASK.tolist()}, {"reset": MASK.bool()}),
        ({"batch_first": True}, {"reset": MASK.t().tolist()}, {"reset": MASK.t().bool()}),
        ({"num_layers": 2}, {"reset_state": torch.ones(1, 1, 4)},
         {"reset_state": torch.ones(2, 2, 4)}),
    ],
    ids=["list", "array", "uint16", "int8", "list of resets", "batch_first", "expanded state"],
)  # fmt: skip
def test_masks_and_states_as_a_call_takes_them(options, odd, plain):
    writer, gru = Writer(), openrnn.GRU(3, 4, **options)
    x = torch.randn((2, 5, 3) if "batch_first" in options else (5, 2, 3))
    if "reset_state" in odd:
        odd, plain = ({"reset": MASK.bool()} | given for given in (odd, plain))
    with openrnn.watch(gru, writer, every=1):
        gru(x, **odd)
    wanted = [gate.values for gate in preactivations(gru, x, **plain)]
    assert len(wanted) == len(writer.histograms)
    for (_, _, found), want in zip(writer.histograms, wanted):
        torch.testing.assert_close(found, want)


def test_single_sequences_with_lists():
    gru, x = openrnn.GRU(3, 4, 2), torch.randn(5, 3)
    given = {"reset": [0, 1, 0, 0, 1], "reset_state": torch.ones(1, 4)}
    plain = {"reset": torch.tensor(given["reset"]), "reset_state": torch.ones(2, 4)}
    for one, other in zip(preactivations(gru, x, **given), preactivations(gru, x, **plain)):
        assert one.values.equal(other.values)


def _each_gradient(gru, x):
    own = {name: value.detach() for name, value in gru.named_parameters()}
    one = grad(lambda params, x: functional_call(gru, params, (x,))[0].sum())
    return vmap(one, (None, 0))(own, torch.stack([x, 2 * x]))["weight_hh_l0"]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # sizes become constants
@pytest.mark.parametrize(
    "follow",
    [
        lambda gru, x: vmap(lambda x: gru(x)[0])(torch.stack([x, 2 * x])),
        _each_gradient,
        lambda gru, x: torch.jit.trace(gru, (x,), check_trace=False)(x)[0],
        lambda gru, x: make_fx(lambda x: gru(x)[0])(x)(x),
        lambda gru, x: make_fx(lambda x: gru(x)[0], pre_dispatch=True)(x)(x),
        lambda gru, x: torch.export.export(gru, (x,)).module()(x)[0],
        lambda gru, x: gru.to("meta")(x.to("meta"))[0].shape,
    ],
    ids=["vmap", "each gradient", "jit.trace", "make_fx", "pre_dispatch", "export", "meta"],
)
def test_what_follows_a_call_sees_no_watch(follow):
    writer, gru, x = Writer(), openrnn.GRU(3, 4), torch.randn(5, 2, 3)
    wanted = follow(copy.deepcopy(gru), x)
    with openrnn.watch(gru, writer, every=1):
        found = follow(gru, x)
    assert not writer.scalars
    assert torch.is_tensor(wanted) is torch.is_tensor(found)
    assert found.equal(wanted) if torch.is_tensor(found) else found == wanted


def test_fake_tensors_are_not_watched():
    writer = Writer()
    with FakeTensorMode():
        gru, x = openrnn.GRU(3, 4), torch.randn(5, 2, 3)
    with openrnn.watch(gru, writer, every=1):
        gru(x)
    assert not writer.scalars


def test_what_is_written_and_when():
    writer, model = Writer(), Tagger()
    other = nn.Linear(2, 2)
    with openrnn.watch(model, writer, every=2) as handle:
        steps(model, 5)
        other(torch.ones(2)).sum().backward()
        torch.optim.SGD(other.parameters(), 0.1).step()
        assert handle.steps == 5
    names = {name for _, name, _ in writer.scalars}
    layers = [f"gates/rnn/l{place}/{gate}" for place in (0, 1) for gate in "ifgo"]
    wanted = {"grad_norm", "perf/steps_per_s", "gates/rnn/l0/f_mean", "gates/rnn/l1/f_mean"}
    wanted |= {f"{gate}_saturated" for gate in layers}
    wanted |= {f"grad_norm/rnn.{name}" for name, _ in model.rnn.named_parameters()}
    assert names == wanted
    assert writer.steps_of("grad_norm") == [0, 2, 4]
    assert writer.steps_of("perf/steps_per_s") == [2, 4]
    assert writer.steps_of("gates/rnn/l0/f_mean") == [0, 2, 4]
    assert [name for step, name, _ in writer.histograms if step == 2] == layers
    assert all(len(values) == 12 for _, _, values in writer.histograms)


def test_values():
    """Gradients by hand; gates of a bias that saturates every input gate."""
    writer, model = Writer(), Tagger()
    with torch.no_grad():
        model.rnn.bias_ih_l0[:5] = 2 * SATURATED
    with openrnn.watch(model, writer, histograms=False) as handle:
        model(torch.ones(6, 2, 3)).sum().backward()
        handle.step()
    assert not writer.histograms
    found = {name: value for _, name, value in writer.scalars}
    norm = nn.utils.get_total_norm([one.grad for one in model.parameters()])
    assert found["grad_norm"] == pytest.approx(float(norm))
    one = model.rnn.weight_hh_l1.grad.norm()
    assert found["grad_norm/rnn.weight_hh_l1"] == pytest.approx(float(one))
    assert found["gates/rnn/l0/i_saturated"] == 1
    assert found["gates/rnn/l0/f_saturated"] == 0
    assert 0.3 < found["gates/rnn/l0/f_mean"] < 0.7


def test_training_is_the_same_bit_for_bit():
    """Dropout too: the second run of a layer draws nothing."""
    weights = []
    for watched in (False, True):
        torch.manual_seed(3)
        model = Tagger()
        handle = openrnn.watch(model, Writer(), every=1) if watched else None
        steps(model, 3)
        assert model.rnn.training
        if handle:
            handle.remove()
        weights.append(nn.utils.parameters_to_vector(model.parameters()))
    assert weights[0].equal(weights[1])


def test_what_a_parametrization_counts_is_the_same():
    """The vectors of a spectral norm, which each reading in training mode moves."""
    found = []
    for watched in (False, True):
        torch.manual_seed(3)
        model = Tagger()
        parametrizations.spectral_norm(model.rnn, "weight_hh_l0")
        parametrizations.spectral_norm(model.rnn, "weight_hh_l1")
        model.rnn.parametrizations["weight_hh_l1"].eval()
        handle = openrnn.watch(model, Writer(), every=1) if watched else None
        steps(model, 3)
        assert not model.rnn.parametrizations["weight_hh_l1"].training
        if handle:
            handle.remove()
        found.append(nn.utils.parameters_to_vector([*model.parameters(), *model.buffers()]))
    assert found[0].equal(found[1])


def test_removed_it_writes_nothing():
    before = len(optimizer._global_optimizer_pre_hooks)
    writer, model = Writer(), Tagger()
    handle = openrnn.watch(model, writer, every=1)
    assert len(optimizer._global_optimizer_pre_hooks) == before + 1
    handle.remove()
    handle.remove()
    steps(model, 1)
    assert not writer.scalars
    assert not model.rnn._forward_hooks
    assert len(optimizer._global_optimizer_pre_hooks) == before
    openrnn.watch(Tagger(), writer)  # a model that nobody keeps takes its hook along
    steps(model, 1)
    assert len(optimizer._global_optimizer_pre_hooks) == before
    assert not writer.scalars


def test_copies_of_a_watched_model_are_not_watched():
    writer, model = Writer(), Tagger()
    with openrnn.watch(model, writer, every=1):
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            steps(other, 1)
        assert not writer.scalars
        assert not writer.histograms


def test_only_calls_in_training_and_one_optimizer():
    writer, model = Writer(), Tagger()
    both = [torch.optim.SGD(model.parameters(), 0.1) for _ in range(2)]
    with openrnn.watch(model, writer, optimizer=both[1], every=1) as handle:
        model.eval()(torch.ones(6, 2, 3))
        assert not writer.scalars
        model.train()
        steps(model, 2, both[0])
        assert handle.steps == 0
        assert len(writer.histograms) == 8  # the first call of the step, which has not ended
        steps(model, 1, both[1])
        assert writer.steps_of("grad_norm") == [0]
        assert handle.steps == 1


def test_other_layers_and_inputs():
    """No gates of torch's layers, packed input and cells with two products; gradients of all."""
    writer = Writer()
    model = nn.ModuleDict({
        "theirs": nn.GRU(3, 4), "packed": openrnn.GRU(3, 4),
        "two": openrnn.Recurrent(openrnn.cells.gru_reset_before, 3, 4),
        "bf16": openrnn.GRU(3, 4),
    })  # fmt: skip
    x = torch.randn(5, 2, 3)
    with openrnn.watch(model, writer, every=1) as handle:
        packed = nn.utils.rnn.pack_sequence([x[:, 0], x[:3, 1]])
        loss = model["theirs"](x)[0].sum() + model["packed"](packed)[0].data.sum()
        loss = loss + model["two"](x)[0].sum()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss + model["bf16"](x)[0].float().sum()
        loss.backward()
        handle.step()
    gates = {name for _, name, _ in writer.histograms}
    assert gates == {f"gates/bf16/l0/{gate}" for gate in "rzn"}
    norms = {name.split(".")[0] for _, name, _ in writer.scalars if name.startswith("grad_norm/")}
    assert norms == {f"grad_norm/{name}" for name in model}


def test_what_cannot_be_watched():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        openrnn.watch("model", Writer())
    with pytest.raises(TypeError, match=r"writer must have add_scalar, .* got list"):
        openrnn.watch(Tagger(), [])
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        openrnn.watch(Tagger(), Writer(), every=0)


def test_the_callback_of_lightning(monkeypatch):
    monkeypatch.setattr(Callback, "on_train_start", lambda *_: None, raising=False)
    monkeypatch.setattr(Callback, "teardown", lambda *_: None, raising=False)
    for package in PACKAGES:
        monkeypatch.setitem(__import__("sys").modules, package, None)
    face = type("module", (), {"Callback": Callback})
    monkeypatch.setitem(__import__("sys").modules, PACKAGES[0], face)
    writer, model = Writer(), Tagger()
    callback = openrnn.WatchCallback(every=2)
    assert isinstance(callback, Callback)
    trainer = Trainer(callback)
    trainer.loggers = [type("Logger", (), {"experiment": one}) for one in (object(), writer)]
    trainer.call("on_train_start", model)
    steps(model, 3)
    trainer.call("teardown", model, "fit")
    steps(model, 3)
    assert writer.steps_of("grad_norm") == [0, 2]
    assert pickle.loads(pickle.dumps(callback)).every == 2
    trainer.is_global_zero = False
    trainer.call("on_train_start", model)
    assert not model.rnn._forward_hooks
    with pytest.raises(ValueError, match="every must be"):
        openrnn.WatchCallback(every=0)
