"""Converted modules inside the code of others: what libraries ask of torch's layers and classes."""

import copy
import inspect
import io
import pickle
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path

import pytest
import torch
from test_convert import LAYERS, asked, flat, quietly, run, same, x_of
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import openrnn
from openrnn.nn.subclasses import SUBCLASSES, _OnlyModule

STACKS = [name for name in LAYERS if "cell" not in name]


# the names of torch's layers


@pytest.mark.parametrize("kind", STACKS)
def test_weights_have_the_names_and_the_order_of_torch(kind):
    plain = LAYERS[kind]()
    module = LAYERS[kind]()
    want = list(module._flat_weights)
    quietly(module)
    assert all(a is b for a, b in zip(module._flat_weights, want, strict=True))
    assert module._flat_weights_names == plain._flat_weights_names
    assert module._all_weights == plain._all_weights
    assert [[id(p) for p in row] for row in module.all_weights] == [
        [id(getattr(module, name)) for name in row] for row in plain._all_weights
    ]
    assert module.mode == plain.mode
    assert module._weights_have_changed() is False
    module._init_flat_weights(), module._update_flat_weights()
    assert all(a is b for a, b in zip(module._flat_weights, want, strict=True))


def test_flat_weights_are_those_that_a_call_reads():
    module = openrnn.LSTM(3, 4)
    parametrizations.weight_norm(module, "weight_hh_l0")
    with torch.no_grad():
        module.parametrizations.weight_hh_l0.original0.mul_(2)
    same(module._flat_weights[1], module.weight_hh_l0)
    module = openrnn.LSTM(3, 4)
    module.weight_hh_l0 = nn.Parameter(torch.zeros(16, 4))
    assert module._flat_weights[1] is module.weight_hh_l0


def test_flat_weights_may_be_set_to_what_they_are():
    """Code that tells torch's layers of new weights does so; other weights would not be read."""
    module = openrnn.GRU(3, 4)
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
    before = module._flat_weights
    for wrong in (before[:-1], [torch.zeros_like(before[0]), *before[1:]]):
        with pytest.raises(AttributeError, match="set weight_ih_l0, weight_hh_l0, "):
            module._flat_weights = wrong
    assert all(a is b for a, b in zip(module._flat_weights, before, strict=True))


@pytest.mark.parametrize("kind", STACKS)
def test_expected_sizes_and_permutations_are_those_of_torch(kind):
    plain, module = LAYERS[kind](), quietly(LAYERS[kind]()).model
    names = ["get_expected_hidden_size"] + ["get_expected_cell_size"] * isinstance(plain, nn.LSTM)
    packed = torch.zeros(9, 3), torch.tensor([4, 3, 2])
    for name in names:
        for given in ((torch.zeros(6, 4, 3), None), packed):
            assert getattr(module, name)(*given) == getattr(plain, name)(*given)
    states = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    hx = states if isinstance(plain, nn.LSTM) else states[0]
    order = torch.tensor([2, 0, 1])
    found, want = module.permute_hidden(hx, order), plain.permute_hidden(hx, order)
    assert type(found) is type(want)
    same(flat(found), flat(want), rtol=0, atol=0)
    assert module.permute_hidden(hx, None) is hx


@pytest.mark.parametrize("kind", STACKS)
def test_checks_of_arguments_are_those_of_torch(kind):
    plain, module = LAYERS[kind](), quietly(LAYERS[kind]()).model
    x = torch.zeros(6, 4, 3)
    h = torch.zeros(plain.get_expected_hidden_size(x, None))
    wide = torch.zeros(*h.shape[:2], 7)
    lstm = isinstance(plain, nn.LSTM)
    hx, bad = ((h, h.new_zeros(*h.shape[:2], 5)), (h, wide)) if lstm else (h, wide)
    module.check_forward_args(x, hx, None)
    module.check_hidden_size(h, tuple(h.shape))
    for name, given in {
        "check_input": [(x[0], None), (x, torch.tensor([6])), (x[..., :2], None)],
        "check_forward_args": [(x, bad, None), (x[..., :2], hx, None)],
        "check_hidden_size": [(wide, tuple(h.shape))],
    }.items():
        for args in given:
            with pytest.raises(RuntimeError) as want:
                getattr(plain, name)(*args)
            with pytest.raises(RuntimeError) as found:
                getattr(module, name)(*args)
            assert str(found.value) == str(want.value)


# subclass=True


@pytest.mark.parametrize("kind", LAYERS)
def test_a_subclass_is_both_and_runs_ours(kind):
    module = LAYERS[kind](dtype=torch.float64).eval()
    face, text, keys = type(module), repr(module), list(module.state_dict())
    x, parameters = x_of(module), list(module.parameters())
    want = run(module, x)
    done = quietly(module, subclass=True, **asked(kind))
    twin = getattr(openrnn, face.__name__)
    assert isinstance(module, face)
    assert isinstance(module, twin)
    assert inspect.unwrap(type(module).forward) is twin.forward
    module.backend = "auto"
    assert repr(module) == text
    assert list(module.state_dict()) == keys
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    same(run(module, x), want)
    assert done.rows[0].note == f"now openrnn.nn.subclasses.{face.__name__}"
    done.revert()
    assert type(module) is face
    assert all(torch.equal(a, b) for a, b in zip(run(module, x), want))
    quietly(module, subclass=True, backend="reference")
    quietly(module, to="torch").revert()
    assert type(module) is SUBCLASSES[face]
    assert module.backend == "reference"
    assert quietly(module).rows[0].note == "left: of openrnn already"
    quietly(module, to="torch")
    assert type(module) is face


@pytest.mark.parametrize("face", SUBCLASSES, ids=lambda face: face.__name__)
def test_a_subclass_inherits_no_code_of_torchs_layers(face):
    """Of torch's class it has the name, and what every module does."""
    made, theirs = SUBCLASSES[face], face.__mro__[: face.__mro__.index(nn.Module)]
    own = {
        name
        for kind in theirs
        for name, value in vars(kind).items()
        if inspect.isfunction(value) or isinstance(value, property)
    }
    assert {"forward", "reset_parameters"} <= own
    order = made.__mro__
    behind = order[order.index(_OnlyModule) :]  # where ours ask `super()`, but for two names
    for name in own:
        passed_on = hasattr(nn.Module, name) and name not in ("forward", "__getstate__")
        searched = behind if passed_on else order
        home = next(kind for kind in searched if name in vars(kind))
        assert home not in theirs, name


@pytest.mark.parametrize("kind", ["lstm_everything", "gru_no_bias", "rnn_relu", "lstm_cell"])
def test_a_subclass_may_be_copied_saved_cast_and_loaded(kind):
    module, other = LAYERS[kind]().eval(), LAYERS[kind](dtype=torch.float64).eval()
    quietly(module, subclass=True)
    module.double()
    module.load_state_dict(other.state_dict())
    x = x_of(other)
    same(run(module, x), run(other, x))
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for twin in (
        copy.copy(module),
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(buffer, weights_only=False),
    ):
        assert type(twin) is type(module)
        same(run(twin, x), run(module, x), rtol=0, atol=0)


def test_a_subclass_trains_with_parametrized_weights():
    module = nn.LSTM(3, 4).double()
    parametrizations.weight_norm(module, "weight_hh_l0")
    x = x_of(module)
    want = run(module, x)
    done = quietly(module, subclass=True)
    assert isinstance(module, (nn.LSTM, openrnn.LSTM))
    same(run(module, x), want)
    done.revert()
    same(run(module, x), want, rtol=0, atol=0)


def test_a_subclass_can_be_made_directly():
    for face, kind in SUBCLASSES.items():
        module = kind(3, 4, bias=False)
        assert isinstance(module, face)
        assert module(torch.ones(5, 3))[0].shape[-1] == 4


@torch.no_grad()
def test_a_compiler_breaks_its_graph_at_a_subclass():
    """As at torch's own layers; the numbers are the same."""
    model = nn.Sequential(nn.Linear(3, 3), nn.GRU(3, 4))
    quietly(model, subclass=True)
    x = torch.randn(5, 2, 3)
    torch._dynamo.reset()
    same(torch.compile(model, backend="eager")(x), model(x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="RNN, GRU, or LSTM"):
        torch.compile(model, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()


class Agent(nn.Module):
    """Does with its layer what TorchRL's LSTMModule does.

    It packs where isinstance says that the layer is torch's and gives a mask where not, and walks
    over the weights of each layer by the names that torch's layers keep.
    """

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, 2, batch_first=True)

    def forward(self, x, lengths):
        if not isinstance(self.lstm, nn.LSTM):
            return self.lstm(x, mask=torch.arange(x.shape[1]) < lengths[:, None])
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, states = self.lstm(packed)
        return pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])[0], states

    def scan(self, x):
        for layer in range(self.lstm.num_layers):
            names = self.lstm._all_weights[layer]
            w_ih, w_hh, b_ih, b_hh = (getattr(self.lstm, name) for name in names)
            h = c = x.new_zeros(x.shape[0], self.lstm.hidden_size)
            steps = []
            for x_t in x.unbind(1):
                i, f, g, o = (x_t @ w_ih.T + b_ih + h @ w_hh.T + b_hh).chunk(4, -1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                steps.append(h)
            x = torch.stack(steps, 1)
        return x


def test_what_torchrl_does():
    agent, x, lengths = Agent().double(), torch.randn(3, 6, 3).double(), torch.tensor([4, 6, 1])
    want = agent(x, lengths)
    done = quietly(agent)
    with pytest.raises(TypeError, match="mask"):
        agent(x, lengths)
    done.revert()
    quietly(agent, subclass=True)
    same(flat(agent(x, lengths)), flat(want))
    same(agent.scan(x), agent.lstm(x)[0])


def test_modules_in_containers_are_found_at_each_path():
    """And one that stands twice is changed once."""
    shared = nn.GRU(3, 4)
    model = nn.ModuleDict({
        "list": nn.ModuleList([nn.LSTM(3, 4), shared]), "dict": nn.ModuleDict({"a": shared}),
    })  # fmt: skip
    twin = copy.deepcopy(model)
    done = quietly(model)
    assert [row.path for row in done.rows if row.swapped] == ["list.0", "list.1", "dict.a"]
    assert model["dict"]["a"] is model["list"][1] is shared
    assert [type(layer) for layer in model["list"]] == [openrnn.LSTM, openrnn.GRU]
    assert [type(layer) for layer in twin["list"]] == [nn.LSTM, nn.GRU]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("subclass", [False, True])
def test_quantize_dynamic_needs_torchs_layers(subclass):
    """It goes by the exact class and says nothing: the page tells users to turn back first."""
    model = nn.ModuleDict({"rnn": nn.LSTM(3, 4), "head": nn.Linear(4, 2)})
    quietly(model, subclass=subclass)
    kinds = {nn.LSTM, nn.Linear}
    made = torch.ao.quantization.quantize_dynamic(model, kinds)
    assert type(made["rnn"]) is type(model["rnn"])
    assert type(made["head"]) is torch.ao.nn.quantized.dynamic.Linear
    x = torch.randn(5, 2, 3)
    want = made["rnn"](x)[0]
    made = torch.ao.quantization.quantize_dynamic(quietly(model, to="torch").model, kinds)
    assert type(made["rnn"]) is torch.ao.nn.quantized.dynamic.LSTM
    same(made["rnn"](x)[0], want, rtol=0, atol=0.05)


def initialise(module):
    """As many models have it."""
    if isinstance(module, nn.Linear | nn.LSTM):
        for parameter in module.parameters():
            nn.init.zeros_(parameter)


class Initialising(nn.Module):
    """Asks for the class by a longer name, in a method."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 4), nn.Linear(4, 2)

    def start(self, module):
        if type(module) is torch.nn.LSTM:
            module.weight_hh_l0.data.zero_()


@pytest.mark.parametrize("function", [initialise, "start", partial(initialise)])
def test_an_initialiser_that_passes_by_is_seen(function):
    model = Initialising()
    function = model.start if function == "start" else function
    quietly(model)
    with pytest.warns(UserWarning, match=r"asks for torch\.nn\.LSTM and left a LSTM of openrnn"):
        assert model.apply(function) is model
    assert model.rnn.weight_hh_l0.any()


def ours_too(module):
    if isinstance(module, nn.LSTM | openrnn.LSTM):
        module.weight_hh_l0.data.zero_()


def test_other_functions_are_not_warned_of():
    """Those that reach our modules, know of them, or ask for another class."""
    for subclass in (True, False):
        model = Initialising()
        quietly(model, subclass=subclass)
        model.apply(ours_too)
        assert not model.rnn.weight_hh_l0.any()
    model.apply(lambda module: isinstance(module, nn.GRU))
    model.apply(lambda module: None)
    model.apply(nn.Module.train)
    quietly(model := Initialising(), subclass=True)
    model.apply(initialise)
    assert not model.rnn.weight_hh_l0.any()
    quietly(model, to="torch").model.apply(initialise)
    openrnn.LSTMCell(3, 4).apply(initialise)  # it asks for layers
    openrnn.Recurrent(openrnn.cells.mgu, 3, 4).apply(initialise)


# classes derived from torch's


class Helper(ABC):
    @abstractmethod
    def start(self, x):
        """The first states."""

    def forward(self, x, lengths=None):
        """Of padded sequences, some of them empty, as pytorch-forecasting's layers take them."""
        if lengths is None:
            return super().forward(x)
        packed = pack_padded_sequence(x, lengths.clamp(min=1), enforce_sorted=False)
        y, (h, c) = super().forward(packed, hx=self.start(x))
        h, c = (torch.where((lengths == 0)[None, :, None], 0, state) for state in (h, c))
        return pad_packed_sequence(y, total_length=len(x))[0], (h, c)


class Lengths(Helper, nn.LSTM):
    def __init__(self, *args, note, **kwargs):
        super().__init__(*args, **kwargs)
        self.note = note
        self.first = nn.Parameter(torch.ones(1))

    def start(self, x):
        h = self.first * x.new_ones(self.num_layers, x.shape[1], self.hidden_size)
        return h, h


class Quiet(nn.GRU):
    """Nothing of its own but a word, and a start."""

    word = "quiet"

    def flatten_parameters(self):
        """Left out, as many do."""

    def reset_parameters(self):
        super().reset_parameters()
        with torch.no_grad():
            self.bias_ih_l0.zero_()

    def extra_repr(self):
        return f"{super().extra_repr()}, {self.word}"


class Doubled(nn.GRUCell):
    def forward(self, input, hx=None):
        return 2 * super().forward(input, hx)


DERIVED = {
    "lengths": lambda: Lengths(3, 4, 2, note="mine"),
    "quiet": lambda: Quiet(3, 4),
    "doubled": lambda: Doubled(3, 4),
}


@pytest.mark.parametrize("kind", DERIVED)
def test_methods_of_a_derived_class_stay_and_the_rest_is_ours(kind, monkeypatch):
    module = DERIVED[kind]().double()
    face = type(module)
    base = next(base for base in SUBCLASSES if isinstance(module, base))
    text, x = repr(module), torch.randn(6, 3).double() if kind == "doubled" else x_of(module)
    unused = {"first"} & {name for name, _ in module.named_parameters()}
    for name in unused:
        getattr(module, name).requires_grad_(False)
    want, parameters = run(module, x), list(module.parameters())
    done = quietly(module)
    ours = f"openrnn.{base.__name__}"
    name = f"test_convert_users.{face.__name__}"
    assert (done.rows[0].kind, done.rows[0].note) == (name, f"now {name} over {ours}")
    assert isinstance(module, (face, getattr(openrnn, base.__name__)))
    assert repr(module) == text
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    with monkeypatch.context() as patch:  # nothing of torch's runs
        patch.setattr(base, "forward", None)
        same(run(module, x), want)
    twins = copy.copy(module), copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    for twin in twins:
        assert type(twin) is type(module)
        same(run(twin, x), run(module, x), rtol=0, atol=0)
    assert quietly(module).rows[0].note == "left: of openrnn already"
    assert type(quietly(DERIVED[kind]()).model) is type(module)
    back = done.revert()
    assert back.rows[0].note == f"now {name}"
    assert type(module) is face
    same(run(module, x), want, rtol=0, atol=0)
    quietly(quietly(module).model, to="torch")
    assert type(module) is face


def test_a_derived_class_gives_its_own_results():
    module, x, lengths = (
        Lengths(3, 4, 2, note="mine"),
        torch.randn(5, 3, 3),
        torch.tensor([3, 0, 5]),
    )
    want = module(x, lengths)
    quietly(module)
    same(flat(module(x, lengths)), flat(want))
    assert module.note == "mine"
    assert want[1][0][:, 1].eq(0).all()


def test_an_instance_of_the_new_class_can_be_made():
    module = quietly(Lengths(3, 4, note="")).model
    made = type(module)(3, 4, note="too")
    assert made.note == "too"
    made.load_state_dict(module.state_dict())
    x = torch.ones(2, 1, 3)
    same(flat(made(x)), flat(module(x)))


def derived(base, **names):
    return type("Own", (base,), names)


def loop(self, input, hx=None):
    return torch.nn.LSTM.forward(self, input, hx)


class Registered(nn.LSTM):
    def __init_subclass__(cls, **kwargs):
        raise RuntimeError("one is enough")


class Meta(type):
    pass


class Made(nn.GRU, metaclass=Meta):
    pass


HINDERED = {
    "loop": (derived(nn.LSTM, forward=loop), "Own.forward does not call super().forward: derive"),
    "checks": (
        derived(nn.LSTM, check_forward_args=lambda *args: None),
        "Own defines check_forward_args, which openrnn.LSTM does not use as torch.nn.LSTM does: "
        "derive the class from openrnn.LSTM",
    ),
    "states": (derived(nn.GRU, permute_hidden=lambda *args: 0), "Own defines permute_hidden, "),
    "weights": (derived(nn.RNN, _flat_weights=[]), "Own defines _flat_weights, which openrnn.RNN"),
    "call": (derived(nn.LSTMCell, __call__=lambda *args: 0), "Own defines __call__, which openr"),
    "setting": (derived(nn.GRU, __setattr__=nn.GRU.__setattr__), "Own defines __setattr__, which"),
    "ours": (derived(nn.GRU, step=1, spec=2), "Own defines spec, step, which openrnn.GRU does"),
    "theirs": (derived(nn.GRU, _flat_weight_refs=()), "Own defines _flat_weight_refs, which"),
    "attribute": (derived(nn.GRU, cell=1), "Own defines cell, which openrnn.GRU does"),
    "size": (derived(nn.GRU, hidden_size=property(lambda self: 4, lambda self, value: None)),
             "Own defines hidden_size, which"),
    "slots": (derived(nn.GRU, __slots__=("a",)), "Own defines __slots__, which"),
    "registered": (Registered, "Registered defines __init_subclass__, which"),
    "metaclass": (Made, "its metaclass Meta: derive the class from openrnn.GRU"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HINDERED)
def test_classes_that_change_what_torch_does_are_left(kind):
    face, reason = HINDERED[kind]
    module = face(3, 4)
    done = quietly(module)
    assert done.rows[0].note.startswith(f"left: {reason}")
    assert type(module) is face


def test_a_class_has_names_of_options_for_itself():
    """Options that torch lacks and no call reads from the layer."""
    module = derived(nn.LSTM, reverse=lambda self, x: x.flip(0))(3, 4)
    module.precision, module.wavefront = "full", nn.Linear(4, 4)
    plain = nn.LSTM(3, 4)
    plain.recompute = 1
    x = torch.randn(5, 2, 3)
    wanted = module(x)[0], plain(x)[0]
    for each in (module, plain):
        assert not quietly(each).rows[0].note.startswith("left")
    assert torch.allclose(module(x)[0], wanted[0], atol=1e-6)
    assert torch.allclose(plain(x)[0], wanted[1], atol=1e-6)
    assert module.precision == "full"
    assert isinstance(module.wavefront, nn.Linear)
    assert torch.equal(module.reverse(x), x.flip(0))
    assert plain.recompute == 1
    assert plain.cell_clip is None
    assert not hasattr(module, "cell_clip")  # a class of torch's has none: it may ask for that


def test_a_derived_class_is_of_torch_already():
    assert quietly(Quiet(3, 4), to="torch").rows[0].note == "left: of torch already"
    mine = type("Mine", (openrnn.GRU,), {})(3, 4)
    assert quietly(mine).rows[0].note == "left: of openrnn already"
    note = quietly(mine, to="torch").rows[0].note
    assert note == "left: a subclass of openrnn.GRU: its own code would be lost"


# loops written by hand


class LiGRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.u = nn.Linear(40, 128, bias=False), nn.Linear(64, 128, bias=False)

    def forward(self, x):
        h, steps = x.new_zeros(x.shape[0], 64), []
        for x_t in x.unbind(1):
            a, z = (self.w(x_t) + self.u(h)).chunk(2, 1)
            h = z.sigmoid() * h + (1 - z.sigmoid()) * a.relu()
            steps.append(h)
        return torch.stack(steps, 1)


def holding(**shapes):
    module = nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, shape and nn.Parameter(torch.zeros(shape)))
    return module


@pytest.mark.parametrize(
    ("module", "seen"),
    [
        (LiGRU(), True),
        (holding(weight_ih=(3, 12), weight_hh=(4, 12), weight_sh=(5, 4), bias=(12,)), True),
        (holding(W_ih_0=(16, 3), W_hh_0=(16, 4), b_hh_0=(16,)), True),
        (holding(W_ih=(3, 12), w_hh=(4, 12)), True),
        (holding(weight_ih=(3, 12), weight_hh=(5, 12)), False),
        (holding(weight_ih=(3, 11), weight_hh=(4, 12)), False),
        (holding(weight_ih=None, weight_hh=(4, 12)), False),
        (holding(ih=(3,), hh=(3,)), False),
        (holding(w=(0, 3), u=(0, 0)), False),
        (nn.MultiheadAttention(4, 2), False),
        (nn.TransformerEncoderLayer(4, 2, 8), False),
        (nn.Bilinear(3, 3, 3), False),
        (nn.LazyLinear(3), False),
    ],
)  # fmt: skip
def test_what_may_be_a_cell_is_named(module, seen, capsys):
    openrnn.convert(nn.ModuleDict({"mine": module, "head": nn.Linear(2, 2)}))
    text = " ".join(capsys.readouterr().out.split())  # lines are as wide as the terminal
    assert ("written by hand (perhaps mine) becomes an openrnn.cell" in text) is seen
    assert ("perhaps" in text) is seen


def test_many_cells_are_counted_and_a_model_may_be_one():
    def said(model):
        return " ".join(str(quietly(model)).split())

    assert "(perhaps 0, 1, 2, ...)" in said(nn.ModuleList(LiGRU() for _ in range(4)))
    assert "(perhaps the model itself)" in said(LiGRU())
    assert "by hand" not in str(quietly(nn.ModuleList([LiGRU(), nn.GRU(3, 4)])))


def test_the_recipe_of_the_page():
    page = Path(__file__).parents[1] / "docs" / "convert.md"
    section = page.read_text(encoding="utf-8").partition("## Loops written by hand")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    names = {"openrnn": openrnn, "torch": torch, "old": LiGRU(), "x": torch.randn(2, 7, 40)}
    exec(code, names)
    same(names["y"], names["old"](names["x"]))
