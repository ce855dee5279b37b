"""Options that are set after a module was made: they would change nothing, so they are refused."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import openrnn
from openrnn.nn.network import Network

LATER = {"backend", "batch_first", "dropout"}  # followed by each call
OTHER = {
    "algorithm": "standard", "bias": False, "bias_mode": "none", "bidirectional": True,
    "cell": openrnn.cells.gru, "cell_clip": 1.0, "hidden_size": 9, "input_mode": "skip",
    "input_size": 9, "num_layers": 3, "precision": "ieee", "proj_size": 2, "recompute": "gates",
    "reset_dropout_state": True, "reverse": True, "wavefront": 4,
}  # fmt: skip


def test_every_argument_is_fixed_or_followed():
    made = set(inspect.signature(Network.__init__).parameters) - {"self", "device", "dtype"}
    assert made - LATER == set(OTHER)
    assert Network._fixed | Network._fixed_extras == set(OTHER)


@pytest.mark.parametrize("name", OTHER)
def test_another_value_is_refused_and_changes_nothing(name):
    layer = openrnn.LSTM(4, 5)
    before = repr(layer)
    with pytest.raises(AttributeError, match=f"LSTM takes {name} only when it is made"):
        setattr(layer, name, OTHER[name])
    assert repr(layer) == before
    assert layer.spec == openrnn.LSTM(4, 5).spec


@pytest.mark.parametrize("name", OTHER)
def test_an_option_can_be_read(name):
    """And a layer made of what is read is the same one."""
    given = {name: OTHER[name]}
    if name in ("input_mode", "cell"):
        given = {**given, "input_size": 5}  # skip needs I = H
    elif name == "bias_mode":
        given = {**given, "bias": False}
    arguments = {"cell": openrnn.cells.lstm, "input_size": 4, "hidden_size": 5, **given}
    layer = openrnn.Recurrent(**arguments)
    read = getattr(layer, name)
    assert read == ((-1.0, 1.0) if name == "cell_clip" else given[name])
    assert openrnn.Recurrent(**{**arguments, name: read}).spec == layer.spec
    for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert getattr(made, name) == read


def test_options_that_are_not_given_are_read_as_they_are():
    layer = openrnn.LSTM(4, 5)
    found = {name: getattr(layer, name) for name in OTHER}
    assert found == {
        "algorithm": "auto", "bias": True, "bias_mode": "double", "bidirectional": False,
        "cell": openrnn.cells.lstm, "cell_clip": None, "hidden_size": 5, "input_mode": "linear",
        "input_size": 4, "num_layers": 1, "precision": "default", "proj_size": 0,
        "recompute": "none", "reset_dropout_state": False, "reverse": False, "wavefront": None,
    }  # fmt: skip
    assert openrnn.GRUCell(4, 4, input_mode="skip").input_mode == "skip"
    assert openrnn.Pipeline(openrnn.LSTM(4, 5, wavefront=2), ["cpu"]).wavefront == 2


def test_an_option_can_be_read_in_a_compiled_function():
    layer = openrnn.LSTM(4, 5, reverse=True)
    run = torch.compile(lambda x: x + layer.reverse, fullgraph=True, backend="eager")
    assert torch.equal(run(torch.zeros(3)), torch.ones(3))


def test_the_value_that_it_has_is_taken():
    layer = openrnn.LSTM(4, 5, num_layers=2, cell_clip=(-1.0, 1.0))
    layer.hidden_size, layer.num_layers, layer.bias, layer.cell_clip = 5, 2, True, (-1.0, 1.0)
    assert layer.spec == openrnn.LSTM(4, 5, num_layers=2, cell_clip=1.0).spec


@pytest.mark.parametrize("kind", [openrnn.RNN, openrnn.RNNCell])
def test_a_nonlinearity_is_fixed(kind):
    module = kind(3, 4)
    with pytest.raises(AttributeError, match="nonlinearity='relu'"):
        module.nonlinearity = "relu"
    assert module.nonlinearity == "tanh"


@pytest.mark.parametrize(
    ("name", "value"), [("hidden_size", 5), ("bias", False), ("input_mode", 1)]
)
def test_a_one_step_module_has_fixed_options(name, value):
    with pytest.raises(AttributeError, match=f"GRUCell takes {name}"):
        setattr(openrnn.GRUCell(3, 4), name, value)


@pytest.mark.parametrize("name", ["num_layers", "proj_size", "reverse", "nonlinearity"])
def test_what_a_class_does_not_take_is_free(name):
    cell = openrnn.LSTMCell(3, 4)
    setattr(cell, name, 2)
    assert getattr(cell, name) == 2


@pytest.mark.parametrize("name", ["dropout", "batch_first"])
def test_a_one_step_module_has_submodules_of_any_name(name):
    class WithDropout(openrnn.LSTMCell):
        def __init__(self):
            super().__init__(4, 6)
            setattr(self, name, torch.nn.Dropout(0.5))

        def forward(self, x, hx=None):
            return getattr(self, name)(super().forward(x, hx)[0])

    x = torch.randn(3, 4)
    cell = WithDropout().eval()
    h, _ = openrnn.LSTMCell.forward(cell, x)
    for _ in range(4):  # the last ones as prepared calls
        assert torch.equal(cell(x), h)


class Encoder(openrnn.LSTM):
    """A user's class, which has an attribute with the name of an option of ours."""

    def __init__(self, hidden_size, reverse):
        super().__init__(3, hidden_size)
        self.hidden_size = hidden_size
        self.reverse = reverse


def test_a_users_class_has_our_names_for_itself():
    encoder = Encoder(4, reverse=True)
    assert encoder.reverse
    assert not encoder.spec.reverse
    with pytest.raises(AttributeError, match="Encoder takes hidden_size"):
        encoder.hidden_size = 5


class Named(openrnn.LSTM):
    """A user's class with a method, a submodule and a parameter of such names."""

    def __init__(self):
        super().__init__(4, 5)
        self.precision = torch.nn.Parameter(torch.ones(5))
        self.recompute = torch.nn.Linear(5, 5)

    def reverse(self, x):
        return x.flip(0)


def test_a_users_class_has_our_names_for_other_things():
    layer, x = Named(), torch.randn(3, 2, 4)
    assert torch.equal(layer.reverse(x), x.flip(0))
    assert layer.recompute(torch.ones(5)).shape == layer.precision.shape == (5,)
    assert {"precision", "recompute.weight"} < layer.state_dict().keys()
    for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(made.recompute, torch.nn.Linear)
        assert torch.equal(made.precision, torch.ones(5))
    for _ in range(3):
        assert layer(x)[0].shape == (3, 2, 5)
    assert not layer.spec.reverse


def test_a_users_class_registers_what_it_likes_under_our_names():
    """As a class of torch's does; and what it may not register leaves no trace."""

    class Registers(openrnn.LSTM):
        def __init__(self):
            super().__init__(4, 5)
            self.register_buffer("precision", torch.ones(3))
            self.register_parameter("reverse", torch.nn.Parameter(torch.ones(2)))
            self.add_module("recompute", torch.nn.Linear(5, 5))
            self.register_module("wavefront", torch.nn.Linear(5, 6))
            self.algorithm = torch.nn.Buffer(torch.zeros(4))
            self.input_mode = 7

    layer = Registers()
    kept = {"precision", "reverse", "recompute.weight", "wavefront.weight", "algorithm"}
    assert kept < layer.state_dict().keys()
    assert layer.input_mode == 7
    del layer.input_mode, layer.precision, layer.recompute
    assert (layer.input_mode, layer.precision, layer.recompute) == ("linear", "default", "none")
    with pytest.raises(AttributeError):
        del layer.input_mode
    with pytest.raises(KeyError, match="already exists"):
        layer.register_buffer("reverse", torch.ones(3))
    with pytest.raises(TypeError):
        layer.register_buffer("precision", 5)
    assert layer.precision == "default"
    layer.register_buffer("precision", None)
    assert layer.precision is None
    assert layer(torch.randn(3, 2, 4))[0].shape == (3, 2, 5)


def test_a_name_of_a_users_own_class_is_not_ours_to_give():
    class Own(openrnn.LSTM):
        def precision(self):
            return 1

    layer = Own(3, 4)
    with pytest.raises(KeyError, match="already exists"):
        layer.register_buffer("precision", torch.ones(1))
    assert layer.precision() == 1

    class Early(openrnn.LSTM):
        def __init__(self):
            self.register_buffer("scale", torch.ones(1))

    with pytest.raises(AttributeError, match=r"before Module.__init__\(\) call"):
        Early()


def test_a_converted_class_of_a_user_has_no_more_attributes_than_before():
    class Flips(torch.nn.LSTM):
        def forward(self, x, hx=None):
            return super().forward(x.flip(0) if getattr(self, "reverse", True) else x, hx)

    net, x = torch.nn.Sequential(Flips(3, 4)), torch.randn(5, 2, 3)
    wanted = net(x)[0]
    openrnn.convert(net, quiet=True)
    assert isinstance(net[0], openrnn.LSTM)
    assert torch.allclose(net(x)[0], wanted, atol=1e-6)
    assert not hasattr(net[0], "precision")


def test_an_option_may_be_set_to_what_the_constructor_got():
    layer = openrnn.LSTM(3, 4, cell_clip=3.0, precision=None)
    layer.cell_clip, layer.precision = 3.0, None
    layer.cell_clip, layer.precision = (-3.0, 3.0), "default"
    with pytest.raises(AttributeError, match="cell_clip=2"):
        layer.cell_clip = 2.0


def test_copies_keep_options_fixed():
    layer = openrnn.GRU(3, 4, num_layers=2)
    for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with pytest.raises(AttributeError, match="num_layers"):
            made.num_layers = 1
        made(torch.zeros(2, 1, 3))


def test_what_calls_follow_may_be_set():
    x = torch.randn(2, 3, 4)
    layer = openrnn.LSTM(4, 5, num_layers=2)
    y, _ = layer(x)
    layer.batch_first, layer.backend = True, "reference"
    assert torch.allclose(layer(x.transpose(0, 1))[0].transpose(0, 1), y, atol=1e-6)
    layer.dropout = 0.5
    assert layer.spec.dropout == 0.5


def test_compiled_after_dropout_was_set():
    layer = openrnn.LSTM(4, 5, num_layers=2).eval()
    x = torch.randn(2, 3, 4)
    y, _ = layer(x)
    layer.dropout = 0.5
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x)[0], y)


@pytest.mark.parametrize("name", ["weights", "own_weights", "spec", "step", "stepper"])
@pytest.mark.parametrize(
    "value",
    [3, nn.Linear(2, 2), nn.Parameter(torch.zeros(2))],
    ids=lambda each: type(each).__name__,
)
def test_a_name_that_every_layer_needs_is_refused_where_it_is_set(name, value):
    class Mine(openrnn.LSTM):
        def __init__(self):
            super().__init__(3, 4)
            setattr(self, name, value)

    with pytest.raises(AttributeError, match=f"^Mine cannot have an attribute {name}: .* choose"):
        Mine()
