"""The callback for models that are made inside `fit`, with a stand-in of Lightning's protocol."""

import copy
import pickle
import sys
from types import SimpleNamespace

import forks
import pytest
import torch
from torch import nn

import openrnn
from openrnn.convert.lightning import PACKAGES


class Hooks:
    """What a trainer asks of its callbacks, as Lightning has it: all hooks, and isinstance."""

    @property
    def state_key(self):
        return type(self).__qualname__

    def setup(self, trainer, pl_module, stage): ...
    def on_fit_start(self, trainer, pl_module): ...
    def on_validation_start(self, trainer, pl_module): ...
    def on_train_end(self, trainer, pl_module): ...
    def on_test_start(self, trainer, pl_module): ...
    def on_predict_start(self, trainer, pl_module): ...


class Callback(Hooks): ...


class OtherCallback(Hooks):
    """`pytorch_lightning` has a second copy of each class."""


class Trainer:
    """Calls the hooks of one package in Lightning's order."""

    def __init__(self, *callbacks, is_global_zero=True):
        assert all(isinstance(callback, Hooks) for callback in callbacks)
        self.callbacks, self.is_global_zero = callbacks, is_global_zero

    def call(self, hook, *args):
        for callback in self.callbacks:
            getattr(callback, hook)(self, *args)

    def fit(self, model):
        self.call("setup", model, "fit")
        model.configure_model()
        self.optimizer = model.configure_optimizers()
        self.call("on_fit_start", model)
        for _ in range(3):
            self.optimizer.zero_grad()
            model(torch.ones(2, 5, 3)).square().sum().backward()
            self.optimizer.step()
        self.call("on_train_end", model)

    def run(self, model, stage):
        self.call("setup", model, stage)
        model.configure_model()
        self.call(f"on_{stage}_start", model)


class Model(nn.Module):
    def __init__(self, late=True):
        super().__init__()
        self.rnn = nn.LSTM(3, 4, batch_first=True)
        self.late = None if late else nn.Identity()

    def configure_model(self):
        if self.late is None:
            self.late = nn.GRUCell(4, 4)

    def configure_optimizers(self):
        self.seen = type(self.rnn)
        return torch.optim.Adam(self.parameters(), lr=0.1)

    def forward(self, x):
        return self.late(self.rnn(x)[0][:, -1])


@pytest.fixture(params=[(0,), (1,), (0, 1)], ids=["new", "old", "both"])
def faces(request, monkeypatch):
    """Lightning under one of its names, or both; returns its callbacks."""
    made = [Callback, OtherCallback]
    for place, package in enumerate(PACKAGES):
        module = SimpleNamespace(Callback=made[place]) if place in request.param else None
        monkeypatch.setitem(sys.modules, package, module)
    return [made[place] for place in request.param]


def trained(*callbacks):
    torch.manual_seed(0)
    model = Model()
    trainer = Trainer(*callbacks)
    trainer.fit(model)
    return model, trainer


def test_a_model_is_converted_before_it_has_an_optimizer(faces, capsys):
    want, _ = trained()
    callback = openrnn.ConvertCallback()
    assert isinstance(callback, openrnn.ConvertCallback)
    assert all(isinstance(callback, face) for face in faces)
    assert type(callback) is type(openrnn.ConvertCallback())
    model, trainer = trained(callback)
    assert model.seen is openrnn.LSTM
    assert type(model.late) is openrnn.GRUCell
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    torch.testing.assert_close(list(model.parameters()), list(want.parameters()))
    assert callback.state_key == "ConvertCallback"
    assert capsys.readouterr().out.splitlines() == [
        "1 of 1 recurrent modules turned into those of openrnn",
        "  rnn  torch.nn.LSTM  now openrnn.LSTM",
        "1 of 2 recurrent modules turned into those of openrnn",
        "  rnn   openrnn.LSTM      left: of openrnn already",
        "  late  torch.nn.GRUCell  now openrnn.GRUCell",
    ]


@pytest.mark.parametrize("stage", ["validation", "test", "predict"])
def test_other_stages_convert_too(faces, stage):
    model = Model()
    Trainer(openrnn.ConvertCallback(quiet=True)).run(model, stage)
    assert type(model.rnn) is openrnn.LSTM
    assert type(model.late) is openrnn.GRUCell


def test_options_are_those_of_convert(faces, capsys):
    model, _ = trained(openrnn.ConvertCallback(backend="reference", subclass=True, quiet=True))
    assert model.rnn.backend == "reference"
    assert isinstance(model.rnn, nn.LSTM)
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="backend must be auto or one of"):
        openrnn.ConvertCallback(backend="fastest")


def test_only_the_first_process_prints(faces, capsys):
    trainer = Trainer(openrnn.ConvertCallback(), is_global_zero=False)
    trainer.fit(Model())
    assert capsys.readouterr().out == ""


def test_it_says_so_once_if_there_is_nothing(faces, capsys):
    model = Model(late=False)
    model.rnn = None
    callback = openrnn.ConvertCallback()
    trainer = Trainer(callback)
    for hook in ("setup", "on_fit_start", "on_validation_start"):
        getattr(callback, hook)(trainer, model, *(["fit"] * (hook == "setup")))
    out = capsys.readouterr().out
    assert out.startswith("0 of 0 recurrent modules turned into those of openrnn\n")
    assert out.count("openrnn.cell") == 1


def test_it_says_nothing_twice(faces, capsys):
    Trainer(openrnn.ConvertCallback()).fit(Model(late=False))
    assert len(capsys.readouterr().out.splitlines()) == 2


class Mine(openrnn.ConvertCallback):
    note = "mine"


@pytest.mark.parametrize("kind", [openrnn.ConvertCallback, Mine])
def test_it_can_be_copied_and_pickled(faces, kind):
    callback = kind(backend="reference")
    for twin in (
        copy.copy(callback),
        copy.deepcopy(callback),
        pickle.loads(pickle.dumps(callback)),
    ):
        assert type(twin) is type(callback)
        assert vars(twin) == vars(callback)
        model, _ = trained(twin)
        assert model.rnn.backend == "reference"


def test_a_copy_holds_no_model(faces):
    """A trainer sets methods of its model as attributes of each callback."""
    callback, model = openrnn.ConvertCallback(quiet=True), Model()
    callback.log, callback.log_dict, callback.note = model.forward, model.add_module, "mine"
    for twin in (
        copy.copy(callback),
        copy.deepcopy(callback),
        pickle.loads(pickle.dumps(callback)),
    ):
        assert vars(twin).keys() == {"backend", "subclass", "quiet", "note"}
    assert callback.log == model.forward


def test_a_class_that_is_a_callback_already(faces):
    both = type("Both", (openrnn.ConvertCallback, *faces), {})
    assert type(both()) is both


def test_a_pickle_finds_the_lightning_of_its_process(monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGES[0], SimpleNamespace(Callback=Callback))
    monkeypatch.setitem(sys.modules, PACKAGES[1], None)
    data = pickle.dumps(openrnn.ConvertCallback())
    monkeypatch.setitem(sys.modules, PACKAGES[0], None)
    monkeypatch.setitem(sys.modules, PACKAGES[1], SimpleNamespace(Callback=OtherCallback))
    assert isinstance(pickle.loads(data), OtherCallback)
    monkeypatch.setitem(sys.modules, PACKAGES[1], None)
    with pytest.raises(ImportError, match="ConvertCallback needs Lightning: pip install lightning"):
        pickle.loads(data)


def test_it_imports_lightning_only_when_asked(tmp_path):
    """In a process of its own, with a package of that name on the path."""
    (tmp_path / "pytorch_lightning.py").write_text("class Callback: pass\n")
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning" / "__init__.py").write_text("raise ImportError('not here')\n")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import openrnn\n"
        f"assert not {{*{PACKAGES!r}, 'lightning'}} & {{*sys.modules}}\n"
        "found = openrnn.ConvertCallback()\n"
        "import pytorch_lightning\n"
        "assert isinstance(found, pytorch_lightning.Callback)\n"
    )
    ran = forks.python(program)
    assert ran.returncode == 0, ran.stderr
