"""Graphs that are recorded once and run elsewhere: torch.export, AOTInductor, torch.jit.trace."""

import pytest
import torch
from cases import CLIP, ON_CPU
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import openrnn
from openrnn import dispatch
from openrnn.route import CallConstants

pytestmark = [
    pytest.mark.usefixtures("operators_of_torch"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning"),  # torch's own
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),  # sizes become constants
]


class Headed(nn.Module):
    """A recurrent layer and a head that is trained with it."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.layer = openrnn.LSTM(3, 4, **options)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.layer(x)[0])


def recorded(how, model, x):
    """A graph of the model, recorded where nothing asked for a gradient."""
    if how == "frozen":
        model.requires_grad_(False)
        graph = torch.jit.trace(model, x)
        model.requires_grad_(True)
        return graph
    with torch.no_grad():
        if how == "trace":
            return torch.jit.trace(model, x)
        exported = torch.export.export(model, (x,))
        return (exported.run_decompositions() if how == "decomposed" else exported).module()


@pytest.mark.parametrize("how", ["export", "decomposed", "trace", "frozen"])
def test_a_graph_of_inference_can_be_trained(how):
    """Every parameter gets the gradient that the model gets; a head alone would be silent."""
    model, x = Headed(), torch.randn(5, 2, 3)
    graph = recorded(how, model, x)
    graph(x).square().sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in graph.named_parameters()}
    model.zero_grad()
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def test_a_graph_of_inference_says_who_cannot_train_it(monkeypatch):
    """A backend that refuses the gradient is named with its reasons, before anything runs."""
    model, x = Headed(), torch.randn(5, 2, 3)
    graph = recorded("export", model, x)
    cpu = dispatch.BACKENDS["cpu"]
    refuse = type("Inference", (type(cpu),), {"can": None})()
    refuse.can = type(cpu.can)(**{**vars(cpu.can), "grad": False})
    monkeypatch.setitem(dispatch.BACKENDS, "cpu", refuse)
    dispatch.select.cache_clear()
    try:
        with pytest.raises(openrnn.NoBackendError, match="does not do gradients"):
            graph(x)
        with torch.no_grad():
            torch.testing.assert_close(graph(x), model(x))
    finally:
        dispatch.select.cache_clear()


def test_outputs_are_counted_alike():
    """With and without a gradient the operator returns what its graph expects."""
    layer = openrnn.LSTM(3, 4, backend="cpu")
    constants = CallConstants(layer.spec.text, "cpu", False, False, True)
    x = torch.randn(5, 2, 3)
    counts = []
    for wanted in (True, False):
        weights = [weight.detach().requires_grad_(wanted) for weight in layer.weights()]
        counts.append(
            len(torch.ops.openrnn.forward(x, [], weights, None, None, [], None, *constants))
        )
    assert counts == [5, 5]


@pytest.mark.parametrize("strict", [False, True])
def test_what_the_reference_runs_is_one_operator(strict):
    """Its loop over steps would have a fixed T."""
    layer = openrnn.Recurrent(openrnn.cells.gru_reset_before, 3, 4)
    sizes = {0: torch.export.Dim("T"), 1: torch.export.Dim("B")}
    x = torch.randn(5, 2, 3)
    exported = torch.export.export(layer, (x,), dynamic_shapes=(sizes,), strict=strict)
    names = [str(node.target) for node in exported.graph.nodes]
    assert names.count("openrnn.forward.default") == 1
    graph, x = exported.module(), torch.randn(7, 3, 3)
    graph(x)[0].square().sum().backward()
    found = [parameter.grad.clone() for parameter in graph.parameters()]
    layer.zero_grad()
    y, _ = layer(x)
    y.square().sum().backward()
    torch.testing.assert_close(graph(x)[0], y)
    torch.testing.assert_close(found, [parameter.grad for parameter in layer.parameters()])


class Packing(nn.Module):
    """Packs inside, as users do."""

    def __init__(self, backend):
        super().__init__()
        torch.manual_seed(0)
        self.layer = openrnn.GRU(3, 4, bidirectional=True, backend=backend)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        y, h = self.layer(packed)
        return pad_packed_sequence(y)[0], h


@pytest.mark.parametrize("backend", ["cpu"])
def test_a_traced_packed_sequence_may_have_another_batch(backend):
    model = Packing(backend)
    graph = torch.jit.trace(model, (torch.randn(5, 3, 3), torch.tensor([5, 2, 3])))
    for lengths in ([5, 4, 3], [5, 2], [1, 7, 2, 2], [4, 1, 2]):
        x = torch.randn(max(lengths), len(lengths), 3)
        want = model(x, torch.tensor(lengths))
        have = graph(x, torch.tensor(lengths))
        for a, b in zip(have, want, strict=True):
            torch.testing.assert_close(a, b)


def test_an_exported_packed_sequence_says_what_to_write():
    """By torch.export and by what builds on it; a call after it is as ever."""
    model, x, lengths = Packing("cpu").eval(), torch.randn(5, 3, 3), torch.tensor([5, 2, 3])
    with pytest.raises(
        NotImplementedError, match=r"y, state = layer\(x, lengths=lengths\) in place"
    ):
        torch.export.export(model, (x, lengths))
    model(x, lengths)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [name for name in ON_CPU if name != "reference"])
def test_aot_inductor(backend, tmp_path):
    """A package compiled ahead calls our operator, with no initial states too."""
    model = Headed(backend=backend).eval()
    x = torch.randn(5, 2, 3)
    exported = torch.export.export(model, (x,))
    package = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "model.pt2")
    )
    with torch.no_grad():
        torch.testing.assert_close(torch._inductor.aoti_load_package(package)(x), model(x))


class Reading(nn.Module):
    """A layer with lengths, initial states or resets, and a head."""

    def __init__(self, layer, how=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.how = layer, how
        self.head = nn.Linear(layer.spec.directions * layer.spec.output_size, 2)

    def forward(self, x, lengths):
        if self.how == "states":
            h = x.new_ones(1, x.shape[1], 4)
            return self.head(self.layer(x, (h, -h), lengths=lengths)[0])
        if self.how == "resets":
            return self.head(self.layer(x, reset=x[..., 0] > 0)[0])
        return self.head(self.layer(x, lengths=lengths)[0])


PLAIN = {
    "lstm": lambda: openrnn.LSTM(3, 4, 2, bidirectional=True),
    "projection": lambda: openrnn.LSTM(3, 4, proj_size=2, cell_clip=CLIP),
    "gru": lambda: openrnn.GRU(3, 4, 2, dropout=0.5),
    "reverse": lambda: openrnn.RNN(3, 4, reverse=True),
    "states": lambda: openrnn.LSTM(3, 4),
    "resets": lambda: openrnn.LSTM(3, 4),
    "mgu": lambda: openrnn.Recurrent(openrnn.cells.mgu, 3, 4),
    "slstm": lambda: openrnn.Recurrent(openrnn.cells.slstm, 3, 4, bias=False),
    "peephole_lstm": lambda: openrnn.Recurrent(openrnn.cells.peephole_lstm, 3, 4),
    "gru_reset_before": lambda: openrnn.Recurrent(openrnn.cells.gru_reset_before, 3, 4),
    "coupled_lstm": lambda: openrnn.Recurrent(openrnn.cells.coupled_lstm, 3, 4),
}


def plain(name):
    """A model of `PLAIN`, its inputs, and its program of torch's operators alone."""
    model, given = Reading(PLAIN[name](), name).eval(), (torch.randn(5, 2, 3), torch.tensor([3, 5]))
    with torch.no_grad():
        exported = torch.export.export(model, given)
    return model, given, exported.run_decompositions(openrnn.plain_decompositions())


VARIANTS = ("mgu", "slstm", "peephole_lstm", "coupled_lstm")  # cells that run as lstm and gru do


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in VARIANTS)) for name in PLAIN],
)
def test_a_program_of_plain_operators(name):
    model, given, exported = plain(name)
    assert not [node for node in exported.graph.nodes if "openrnn" in str(node.target)]
    torch.testing.assert_close(exported.module()(*given), model(*given))


def test_a_program_with_a_gradient_is_plain_too():
    """Exported while gradients are on, the operator has a reserve, which nothing reads."""
    model, x = Headed(backend="cpu").eval(), torch.randn(5, 2, 3)
    exported = torch.export.export(model, (x,))
    exported = exported.run_decompositions(openrnn.plain_decompositions())
    torch.testing.assert_close(exported.module()(x), model(x))


def test_plain_operators_draw_no_masks():
    model = Reading(openrnn.GRU(3, 4, 2, dropout=0.5)).train()
    exported = torch.export.export(model, (torch.randn(5, 2, 3), torch.tensor([3, 5])))
    with pytest.raises(ValueError, match=r"call model\.eval\(\) before"):
        exported.run_decompositions(openrnn.plain_decompositions())


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.filterwarnings("ignore")
def test_executorch(name):
    exir = pytest.importorskip("executorch.exir", reason="needs executorch")
    from executorch.runtime import Runtime

    model, given, exported = plain(name)
    program = exir.to_edge(exported).to_executorch()
    method = Runtime.get().load_program(program.buffer).load_method("forward")
    torch.testing.assert_close(method.execute(given)[0], model(*given))
