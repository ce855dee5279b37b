"""A converted model: the same objects, parameters, numbers and habits, with other code inside."""

import copy
import dataclasses
import io
import pickle
import warnings

import pytest
import torch
from cases import ON_CPU, require
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import pack_sequence

import openrnn
from openrnn.convert import Conversion, swap
from openrnn.spec import Spec

every_backend = pytest.mark.parametrize("backend", ON_CPU)

LAYERS = {
    "lstm": lambda **k: nn.LSTM(3, 5, **k),
    "lstm_everything": lambda **k: nn.LSTM(
        3, 5, 2, batch_first=True, dropout=0.5, bidirectional=True, proj_size=2, **k
    ),
    "lstm_no_bias": lambda **k: nn.LSTM(3, 5, bias=False, **k),
    "gru": lambda **k: nn.GRU(3, 5, 2, bidirectional=True, **k),
    "gru_no_bias": lambda **k: nn.GRU(3, 5, bias=False, batch_first=True, **k),
    "rnn_tanh": lambda **k: nn.RNN(3, 5, 2, **k),
    "rnn_relu": lambda **k: nn.RNN(3, 5, nonlinearity="relu", bidirectional=True, **k),
    "lstm_cell": lambda **k: nn.LSTMCell(3, 5, **k),
    "gru_cell": lambda **k: nn.GRUCell(3, 5, bias=False, **k),
    "rnn_cell": lambda **k: nn.RNNCell(3, 5, nonlinearity="relu", **k),
}
every_layer = pytest.mark.parametrize("kind", LAYERS)


def x_of(module, dtype=torch.float64):
    sizes = (4, 3) if "Cell" in type(module).__name__ else (6, 4, 3)
    return torch.randn(sizes, dtype=dtype)


def flat(value):
    """The tensors of nested tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in flat(part)]


def run(module, x):
    """Outputs, and the gradients of x and of every parameter."""
    x = x.clone().requires_grad_()
    leaves = [x, *(p for p in module.parameters() if p.requires_grad)]
    out = flat(module(x))
    dice = torch.Generator().manual_seed(0)
    drawn = [torch.randn(value.shape, generator=dice).to(value) for value in out]
    return [*(value.detach() for value in out), *torch.autograd.grad(out, leaves, drawn)]


def same(found, want, **tolerance):
    torch.testing.assert_close(found, want, **tolerance)


def quietly(model, **options):
    return openrnn.convert(model, quiet=True, **options)


def asked(kind):
    """An RNN cell on a CPU is turned where a backend is named."""
    return {"backend": "cpu"} if kind == "rnn_cell" else {}


@every_backend
@every_layer
def test_outputs_and_gradients_are_those_of_torch(backend, kind):
    require(backend)
    module = LAYERS[kind](dtype=torch.float64).eval()
    x = x_of(module)
    want = run(module, x)
    quietly(module, backend=backend)
    assert type(module).__module__.startswith("openrnn.nn.")
    assert module.backend == backend
    same(run(module, x), want)


@every_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("training", [True, False])
def test_everything_about_it_stays(kind, dtype, training):
    module = LAYERS[kind](dtype=dtype).train(training)
    next(module.parameters()).requires_grad_(False)
    module.register_buffer("mine", torch.ones(2))
    module.note = "mine too"
    text, before = repr(module), dict(module.state_dict(keep_vars=True))
    parameters = [(name, id(p), p.requires_grad) for name, p in module.named_parameters()]
    quietly(module, **asked(kind))
    assert type(module) is getattr(openrnn, type(module).__name__)
    assert [(n, id(p), p.requires_grad) for n, p in module.named_parameters()] == parameters
    after = dict(module.state_dict(keep_vars=True))
    assert list(after) == list(before)
    assert all(after[name] is value for name, value in before.items())
    assert module.training is training
    assert module.note == "mine too"
    module.backend = "auto"
    assert repr(module) == text


@every_layer
def test_there_and_back_is_the_same_module(kind):
    module = LAYERS[kind](dtype=torch.float64).eval()
    before, x = dict(vars(module)), x_of(module)
    face, want = type(module), run(module, x)
    parameters = list(module.parameters())
    done = quietly(module, **asked(kind))
    back = done.revert()
    assert type(module) is face
    assert back.model is module
    assert vars(module).keys() == before.keys()
    changed = {"_flat_weights", "_flat_weight_refs", "_flat_weights_names", "_all_weights"}
    for name in before.keys() - changed:
        assert vars(module)[name] is before[name] or vars(module)[name] == before[name]
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    for name in changed & before.keys() - {"_flat_weight_refs"}:
        assert len(vars(module)[name]) == len(before[name])
    if "_flat_weights" in before:
        assert all(a is b for a, b in zip(module._flat_weights, parameters, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(run(module, x), want))
    # and once more, by the other way
    quietly(module, **asked(kind))
    assert type(module) is not face
    quietly(module, to="torch")
    assert type(module) is face
    assert all(torch.equal(a, b) for a, b in zip(run(module, x), want))


def test_dropout_follows_what_the_module_says_now():
    module = nn.LSTM(3, 5, 2)
    module.dropout = 0.4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        single = nn.LSTM(3, 5, 1, dropout=0.3)
    quietly(nn.ModuleList([module, single]))  # warns no second time
    assert module.spec.dropout == 0.4
    assert single.spec.dropout == 0.3
    module.dropout = 0.2
    quietly(module, to="torch")
    assert module.dropout == 0.2


class Tagger(nn.Module):
    """A model with recurrent modules in several places, one of them used twice."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 3)
        self.encoder = nn.ModuleDict({"rnn": nn.LSTM(3, 4, 2, dropout=0.1, bidirectional=True)})
        self.stack = nn.Sequential(nn.Linear(8, 3), nn.Tanh())
        self.cell = nn.GRUCell(3, 3)
        self.again = self.cell
        self.head = nn.Linear(3, 2)
        self.kept = [self.encoder["rnn"]]  # a reference that no registry sees

    def forward(self, tokens):
        y, _ = self.kept[0](self.embed(tokens))
        h = None
        for step in self.stack(y):
            h = self.again(step, h)
        return self.head(h)


def test_a_model_and_its_report(capsys):
    model = Tagger()
    done = openrnn.convert(model)
    text = capsys.readouterr().out
    assert text == f"{done.text}\n"
    assert text.splitlines() == [
        "3 of 3 recurrent modules turned into those of openrnn",
        "  encoder.rnn  torch.nn.LSTM     now openrnn.LSTM",
        "  cell         torch.nn.GRUCell  now openrnn.GRUCell",
        "  again        torch.nn.GRUCell  now openrnn.GRUCell (the same module as cell)",
    ]
    assert isinstance(done, Conversion)
    assert done.model is model
    assert [row.path for row in done.rows] == ["encoder.rnn", "cell", "again"]
    assert all(row.swapped for row in done.rows)
    assert type(model.encoder["rnn"]) is openrnn.LSTM
    assert model.kept[0] is model.encoder["rnn"]
    assert type(model.cell) is openrnn.GRUCell
    assert model.again is model.cell
    assert not any(isinstance(m, (nn.RNNBase, nn.RNNCellBase)) for m in model.modules())
    back = done.revert()
    assert capsys.readouterr().out == ""
    assert [row.note for row in back.rows][:2] == ["now torch.nn.LSTM", "now torch.nn.GRUCell"]
    assert type(model.again) is nn.GRUCell


def test_a_root_changes_in_place(capsys):
    module = nn.GRU(3, 4)
    done = openrnn.convert(module)
    assert "(the model itself)  torch.nn.GRU  now openrnn.GRU" in capsys.readouterr().out
    assert done.model is module
    assert type(module) is openrnn.GRU


def test_a_model_without_any(capsys):
    done = openrnn.convert(nn.Linear(2, 2))
    assert done.rows == ()
    assert capsys.readouterr().out.splitlines() == [
        "0 of 0 recurrent modules turned into those of openrnn",
        "  only modules of torch.nn are known: a loop over time written by hand becomes",
        "  an openrnn.cell in openrnn.Recurrent, see docs/convert.md",
    ]
    assert done.revert().rows == ()
    assert str(done.revert()) == "0 of 0 recurrent modules turned into those of torch"


def test_a_shared_parent_is_seen_at_each_path():
    block = nn.Sequential(nn.LSTM(3, 3))
    done = quietly(nn.ModuleList([block, block]))
    assert [(row.path, row.swapped) for row in done.rows] == [("0.0", True), ("1.0", True)]
    assert done.rows[1].note == "now openrnn.LSTM (the same module as 0.0)"


def test_twice_is_once():
    model = Tagger()
    quietly(model)
    before = dict(vars(model.cell))
    done = quietly(model)
    assert {(row.swapped, row.kind) for row in done.rows} == {
        (False, "openrnn.LSTM"), (False, "openrnn.GRUCell"),
    }  # fmt: skip
    assert done.rows[0].note == "left: of openrnn already"
    assert vars(model.cell) == before
    done.revert()  # reverts what it did: nothing
    assert type(model.cell) is openrnn.GRUCell


@every_backend
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_goes_on(backend, optimizer):
    """Converted and reverted in the middle of training, the parameters go the same way."""
    require(backend)
    torch.manual_seed(0)
    plain = Tagger().double().eval()
    model = copy.deepcopy(plain)
    model.kept = [model.encoder["rnn"]]
    tokens = torch.randint(0, 11, (5, 4))
    with torch.no_grad():
        want = plain(tokens)
    opts = [optimizer(m.parameters(), lr=0.05) for m in (plain, model)]
    done = None
    for step in range(6):
        if step == 2:
            done = quietly(model, backend=backend)
        if step == 4:
            done.revert()
        for m, opt in zip((plain, model), opts):
            opt.zero_grad()
            m(tokens).square().sum().backward()
            opt.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        same(a, b)
    assert (plain(tokens) - want).abs().max() > 0.1  # it has learnt


def test_tied_parameters_stay_tied():
    model = nn.ModuleList([nn.LSTM(3, 4), nn.LSTM(3, 4)])
    model[1].weight_hh_l0 = model[0].weight_hh_l0
    quietly(model)
    assert model[1].weight_hh_l0 is model[0].weight_hh_l0
    assert len(list(model.parameters())) == 7


@every_backend
def test_the_model_may_move_on(backend):
    """Casting, loading, copying, pickling and packed sequences, after conversion."""
    require(backend)
    model, other = nn.LSTM(3, 4, 2), nn.LSTM(3, 4, 2).double()
    quietly(model, backend=backend)
    model.double()
    model.load_state_dict(other.state_dict())
    x = x_of(other)
    same(run(model, x), run(other, x))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same(run(twin, x), run(model, x), rtol=0, atol=0)
    packed = pack_sequence([x[:k, 0] for k in (2, 5, 3)], enforce_sorted=False)
    same(model(packed)[0].data, other(packed)[0].data)
    quietly(model, to="torch")
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    assert type(again) is nn.LSTM
    same(run(again, x), run(other, x), rtol=0, atol=0)


def test_conversion_draws_no_random_numbers():
    model = Tagger()
    before = torch.get_rng_state()
    quietly(model).revert()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_on_meta():
    model = nn.LSTM(3, 4, device="meta")
    quietly(model)
    assert all(p.is_meta for p in model.parameters())
    assert model(torch.empty(5, 2, 3, device="meta"))[0].shape == (5, 2, 4)


# hooks


def test_hooks_stay_and_can_be_removed():
    module, seen = nn.GRU(3, 4), []
    handles = [
        module.register_forward_pre_hook(lambda m, a: seen.append(("pre", m))),
        module.register_forward_hook(
            lambda m, a, k, out: seen.append(("after", m, *k)), with_kwargs=True
        ),
        module.register_full_backward_hook(lambda m, a, b: seen.append(("backward", m))),
        module.register_state_dict_pre_hook(lambda m, *_: seen.append(("save", m))),
        module.register_load_state_dict_pre_hook(lambda m, *_: seen.append(("load", m))),
    ]
    quietly(module)
    x = torch.randn(2, 3, 3, requires_grad=True)
    module(x, hx=torch.zeros(1, 3, 4))[0].sum().backward()
    module.load_state_dict(module.state_dict())
    assert [word for word, *_ in seen] == ["pre", "after", "backward", "save", "load"]
    assert all(m is module for _, m, *_ in seen)
    assert seen[1][2:] == ("hx",)
    for handle in handles:
        handle.remove()
    module(x)[0].sum().backward()
    module.load_state_dict(module.state_dict())
    assert len(seen) == 5


# parametrized, normed and pruned modules


def weight_normed(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old one is deprecated, and in use
        return nn.utils.weight_norm(module, "weight_hh_l0")


CHANGES = {
    "weight_norm": lambda m: parametrizations.weight_norm(m, "weight_hh_l0"),
    "spectral_norm": lambda m: parametrizations.spectral_norm(m, "weight_hh_l0"),
    "orthogonal": lambda m: parametrizations.orthogonal(m, "weight_hh_l1"),
    "two": lambda m: [
        parametrizations.weight_norm(m, name) for name in ("weight_ih_l0", "weight_hh_l1")
    ],
    "old_weight_norm": weight_normed,
    "pruned": lambda m: prune.random_unstructured(m, "weight_hh_l0", 0.5),
}


@every_backend
@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_train_on(backend, change):
    require(backend)
    torch.manual_seed(0)
    plain = nn.LSTM(3, 4, 2).double()
    torch.manual_seed(1)
    CHANGES[change](plain)
    model = copy.deepcopy(plain) if change not in ("old_weight_norm", "pruned") else None
    if model is None:  # these hold a computed tensor, which cannot be copied: build it twice
        torch.manual_seed(0)
        model = nn.LSTM(3, 4, 2).double()
        torch.manual_seed(1)
        CHANGES[change](model)
    keys = list(model.state_dict())
    parameters = list(model.parameters())
    start = [parameter.detach().clone() for parameter in parameters]
    values = [value.clone() for value in model.state_dict().values()]
    done = quietly(model, backend=backend)
    assert done.rows[0].swapped, done.rows[0].note
    assert isinstance(model, openrnn.LSTM)
    assert list(model.state_dict()) == keys
    same(list(model.state_dict().values()), values, rtol=0, atol=0)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    x = x_of(plain)
    # spectral_norm steps at each look at the weight in training, of which torch takes three
    plain.eval(), model.eval()
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(4):
        if step == 2:
            done.revert()
            assert isinstance(model, nn.LSTM)
        same(run(model, x), run(plain, x))
        for m, opt in zip((plain, model), opts):
            opt.zero_grad()
            m(x)[0].square().sum().backward()
            opt.step()
    assert all((a != b).any() for a, b in zip(model.parameters(), start, strict=True))


def test_a_conversion_computes_no_parametrization():
    """Each look at a spectral norm in training steps its estimate."""
    module = parametrizations.spectral_norm(nn.LSTM(3, 4), "weight_hh_l0")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    quietly(module).revert()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    module(torch.ones(2, 1, 3))
    assert any(not torch.equal(v, before[name]) for name, v in module.state_dict().items())


def test_a_parametrization_can_be_removed_afterwards():
    module = nn.LSTM(3, 4)
    parametrizations.weight_norm(module, "weight_hh_l0")
    quietly(module)
    want = module(torch.ones(2, 1, 3))[0]
    parametrize.remove_parametrizations(module, "weight_hh_l0")
    assert type(module) is openrnn.LSTM
    assert isinstance(module.weight_hh_l0, nn.Parameter)
    same(module(torch.ones(2, 1, 3))[0], want)


# what is left, and why


class Mine(nn.LSTM):
    def forward(self, x):
        return x


def replaced(module):
    module.forward = lambda x: x
    return module


def with_attribute(module, name, value):
    setattr(module, name, value)
    return module


def without_bias(module):
    module.bias_hh_l0 = None
    return module


def reshaped(module):
    module.weight_ih_l0 = nn.Parameter(torch.zeros(16, 5))
    return module


def buffered(module):
    module.register_buffer("extra", torch.ones(2))
    parametrize.register_parametrization(module, "extra", nn.Identity())
    return module


LEFT = {
    "subclass": (
        lambda: Mine(3, 4),
        "Mine.forward does not call super().forward: derive the class from openrnn.LSTM in place "
        "of torch.nn.LSTM, or write its loop as an openrnn.cell",
    ),
    "child": (
        lambda: with_attribute(nn.GRU(3, 4), "cell", nn.Linear(4, 4)),
        "its attribute cell has another meaning there",
    ),
    "replaced": (lambda: replaced(nn.LSTM(3, 4)), "its method forward was replaced"),
    "base": (lambda: nn.RNNBase("LSTM", 3, 4), "openrnn has no module of its kind"),
    "property": (
        lambda: with_attribute(nn.GRU(3, 4), "spec", 1),
        "its attribute spec has another meaning there",
    ),
    "method": (
        lambda: with_attribute(nn.GRU(3, 4), "step", 1),
        "its attribute step has another meaning there",
    ),
    "attribute": (
        lambda: with_attribute(nn.GRU(3, 4), "backend", "mine"),
        "its attribute backend has another meaning there",
    ),
    "missing": (
        lambda: without_bias(nn.LSTM(3, 4)),
        r"bias_hh_l0 must have shape (16,), got None",
    ),
    "shape": (
        lambda: reshaped(nn.LSTM(3, 4)),
        "weight_ih_l0 must have shape (16, 3), got (16, 5)",
    ),
    "parametrized_buffer": (
        lambda: buffered(nn.LSTM(3, 4)),
        "parametrization of extra, which is not its own",
    ),
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_is_left_untouched_and_why(kind):
    make, reason = LEFT[kind]
    model = nn.Sequential(make(), nn.GRU(4, 4))
    face, before = type(model[0]), dict(vars(model[0]))
    done = quietly(model)
    assert [row.swapped for row in done.rows] == [False, True]
    assert done.rows[0].note == f"left: {reason}"
    assert str(done).splitlines()[0] == "1 of 2 recurrent modules turned into those of openrnn"
    assert type(model[0]) is face
    assert vars(model[0]).keys() == before.keys()
    assert all(vars(model[0])[name] is value for name, value in before.items())
    done.revert()
    assert type(model[1]) is nn.GRU


def test_an_rnn_cell_on_a_cpu_is_left_unless_asked_for():
    """Torch's is as fast or faster in a loop; on other devices it is turned."""
    model = nn.ModuleList([nn.RNNCell(3, 4), nn.RNNCell(3, 4, device="meta"), nn.GRUCell(3, 4)])
    done = quietly(model)
    assert [row.swapped for row in done.rows] == [False, True, True]
    assert "one call of openrnn.RNN takes less than either" in done.rows[0].note
    assert "convert after model.to('cuda'), or name a backend" in done.rows[0].note
    assert type(model[0]) is nn.RNNCell
    assert quietly(model, backend="cpu").rows[0].swapped
    assert type(model[0]) is openrnn.RNNCell
    assert quietly(model).rows[0].note == "left: of openrnn already"
    ours = openrnn.RNNCell(3, 4)
    quietly(ours, to="torch").revert()
    assert type(ours) is openrnn.RNNCell


def test_an_rnn_cell_that_is_moved_after_conversion_is_left():
    """As the note says: the device counts at conversion."""
    model = nn.Sequential(nn.RNNCell(3, 4))
    quietly(model)
    model.to("meta")
    assert type(model[0]) is nn.RNNCell
    assert quietly(model).rows[0].swapped


def test_torchscript_is_left():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(torch.jit.script(nn.LSTM(3, 4)), nn.LSTM(3, 4))
        whole = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 4)))
    done = quietly(model)
    assert [row.swapped for row in done.rows] == [False, True]
    assert done.rows[0].note.startswith("left: TorchScript")
    assert [row.path for row in quietly(whole).rows] == ["1"]
    assert whole(torch.zeros(2, 1, 3))[0].shape == (2, 1, 4)


def test_quantized_is_left():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.LSTM(3, 4)), {nn.LSTM})
        done = quietly(model)
    assert [row.swapped for row in done.rows] == [False]
    assert done.rows[0].note.startswith("left: quantized")


TO_TORCH = {
    "clip": (lambda: openrnn.LSTM(3, 4, cell_clip=1.0), "cell_clip (-1.0, 1.0), torch has no such"),
    "skip": (lambda: openrnn.LSTM(4, 4, input_mode="skip"), "input_mode 'skip', torch has no such"),
    "one_bias": (
        lambda: openrnn.LSTM(3, 4, bias_mode="input"),
        "bias_mode 'input', torch has two bias vectors or none",
    ),
    "algorithm": (
        lambda: openrnn.LSTM(3, 4, algorithm="standard"),
        "algorithm 'standard', torch has no such",
    ),
    "dropout_state": (
        lambda: openrnn.LSTM(3, 4, 2, dropout=0.5, reset_dropout_state=True),
        "reset_dropout_state True, torch has no such",
    ),
    "precision": (lambda: openrnn.GRU(3, 4, precision="ieee"), "precision 'ieee', torch has no"),
    "other_cell": (
        lambda: openrnn.Recurrent(openrnn.cells.mgu, 3, 4),
        "torch has no module of its kind",
    ),
    "torch": (lambda: nn.LSTM(3, 4), "of torch already"),
}


@pytest.mark.parametrize("kind", TO_TORCH)
def test_what_torch_cannot_have(kind):
    make, reason = TO_TORCH[kind]
    model = make()
    face = type(model)
    done = quietly(model, to="torch")
    assert done.rows[0].note.startswith(f"left: {reason}")
    assert type(model) is face


def test_a_new_option_is_inexact_until_it_is_known(monkeypatch):
    """Every field of a spec that torch does not share counts, also one that comes later."""
    known = {given.name for given in dataclasses.fields(Spec) if given.init} - swap.SHARED
    assert known == {
        "unit_params", "input_mode", "cell_clip", "precision", "algorithm", "reset_dropout_state",
        "recompute", "reverse", "wavefront",
    }  # fmt: skip
    monkeypatch.setattr(swap, "SHARED", swap.SHARED - {"num_layers"})
    done = quietly(openrnn.GRU(3, 4, 2), to="torch")
    assert done.rows[0].note == "left: num_layers 2, torch has no such option"


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "LSTMCell"])
def test_a_backend_survives_there_and_back(kind):
    """Ours to torch and back, and torch to ours, back, and again, each by `revert`."""
    model = nn.ModuleList(
        getattr(openrnn, kind)(3, 4, backend=name) for name in ("reference", "auto")
    )
    before = [module.__getstate__() for module in model]
    done = quietly(model, to="torch")
    assert all(type(module) is getattr(nn, kind) for module in model)
    assert not any(hasattr(module, "backend") for module in model)
    again = done.revert()
    assert [module.backend for module in model] == ["reference", "auto"]
    for module, old in zip(model, before):
        assert module.__getstate__().keys() == old.keys()
        assert repr(module.__getstate__()) == repr(old)
    again.revert().revert()
    assert [module.backend for module in model] == ["reference", "auto"]
    model = nn.ModuleList([getattr(nn, kind)(3, 4)])
    done = quietly(model, backend="reference")
    assert model[0].backend == "reference"
    torchs = done.revert()
    assert type(model[0]) is getattr(nn, kind)
    torchs.revert()
    assert model[0].backend == "reference"


@pytest.mark.parametrize(
    ("model", "got"), [(None, "NoneType"), (nn.LSTM, "the class LSTM"), ([], "list")]
)
def test_what_is_no_module(model, got):
    with pytest.raises(TypeError, match=f"model must be a torch.nn.Module, got {got}"):
        quietly(model)


def test_wrong_calls_change_nothing():
    model = nn.Sequential(nn.LSTM(3, 4))
    with pytest.raises(ValueError, match="to must be one of openrnn, torch, got 'tf'"):
        quietly(model, to="tf")
    with pytest.raises(ValueError, match=r"backend must be auto or one of .*, got 'cudnn3'"):
        quietly(model, backend="cudnn3")
    assert type(model[0]) is nn.LSTM


def test_a_report_fits_a_terminal(capsys):
    """A note that does not fit in 80 columns stands below its row, in lines that do."""
    inner = nn.ModuleDict({"a_rather_long_name_of_a_module": openrnn.LSTM(3, 4, recompute="gates")})
    model = nn.ModuleDict({"encoder_of_the_first_language": inner, "short": nn.LSTM(3, 4)})
    openrnn.convert(model, to="torch")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "  encoder_of_the_first_language.a_rather_long_name_of_a_module  openrnn.LSTM" in lines
    text = " ".join(line.strip() for line in lines)
    assert "openrnn.LSTM left: recompute 'gates', torch has no such option" in text
    print(openrnn.convert(nn.Linear(2, 2)))
    assert capsys.readouterr().out.count("0 of 0 recurrent") == 2  # the table, and its short form
