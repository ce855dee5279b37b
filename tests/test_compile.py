"""Compilers see one node: no graph break, no specialisation to T or B, and the same numbers."""

import itertools

import pytest
import torch
from cases import thinned
from torch import nn

import openrnn
from openrnn import untraced


class Model(nn.Module):
    """Code before and after the layer, which must be compiled too (pytorch#141184)."""

    def __init__(self, kind="LSTM", **options):
        super().__init__()
        self.before = nn.Linear(6, 5)
        self.layer = getattr(openrnn, kind)(5, 8, 2, **options)
        self.after = nn.Linear(8 * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x, **options):
        y, _ = self.layer(torch.relu(self.before(x)), **options)
        return self.after(y).tanh()


def results(run, model, x):
    torch.manual_seed(7)
    y = run(x)
    grads = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
    return [y, *grads]


@pytest.mark.parametrize(
    ("options", "kind"),
    thinned(itertools.product(({}, {"dropout": 0.5}, {"bidirectional": True}), ("LSTM", "GRU")), 5),
    ids=str,
)
def test_one_graph_for_many_sizes(kind, options):
    """pytorch#141184, #158007: fullgraph, dynamic, forward and backward, one graph."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Model(kind, **options)
    graphs = []

    def backend(graph, _):
        graphs.append([node for node in graph.graph.nodes if "openrnn" in str(node.target)])
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for steps, batch in [(4, 3), (7, 5), (70, 2)]:
        x = torch.randn(steps, batch, 6, requires_grad=True)
        for want, have in zip(results(model, model, x), results(compiled, model, x), strict=True):
            assert torch.equal(want, have)
    assert [len(nodes) for nodes in graphs] == [1]


def test_backward_is_traced_too():
    """Through AOTAutograd both operators run behind their fakes."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Model(dropout=0.3)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for steps, batch in [(4, 3), (9, 2)]:
        x = torch.randn(steps, batch, 6, requires_grad=True)
        for want, have in zip(results(model, model, x), results(compiled, model, x), strict=True):
            torch.testing.assert_close(have, want)


def test_lengths_and_resets_compile():
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Model()
    x = torch.randn(5, 3, 6)
    extras = {"lengths": torch.tensor([5, 0, 2]), "reset": torch.rand(5, 3) > 0.5}
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(compiled(x, **extras), model(x, **extras))


def test_export_keeps_one_node():
    """pytorch#115092: dynamic T and B, one operator, right for sizes never seen."""
    torch.manual_seed(0)
    model = Model().eval()
    sizes = {0: torch.export.Dim("steps"), 1: torch.export.Dim("batch")}
    exported = torch.export.export(model, (torch.randn(4, 3, 6),), dynamic_shapes={"x": sizes})
    names = [str(node.target) for node in exported.graph.nodes]
    assert names.count("openrnn.forward.default") == 1
    x = torch.randn(11, 6, 6)
    torch.testing.assert_close(exported.module()(x), model(x))


def test_autocast_breaks_no_graph():
    """torch 2.11 cannot trace the question whether a device knows autocast."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Model(dropout=0.3)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 3, 6, requires_grad=True)
    for want, have in zip(results(run, model, x), results(compiled, model, x), strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # inductor warms up with one
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_compiles_dropout(mode):
    """The seed is drawn on the device: no code for the host, and CUDA graphs take it."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Model(dropout=0.5).cuda().to(torch.bfloat16)
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    x = torch.randn(4, 3, 6, device="cuda", dtype=torch.bfloat16)
    seen = []
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad(set_to_none=True)  # the last step's gradients lie in the graph's memory
        y = compiled(x)
        seen.append(y.detach().clone())
        y.sum().backward()
    assert len({tuple(y.flatten().tolist()) for y in seen}) == len(seen)


layer = openrnn.LSTM(3, 4)
weights = dict(layer.named_parameters())


def loss(weights, x):
    return torch.func.functional_call(layer, weights, (x,))[0].square().sum()


def outputs(x):
    return layer(x)[0]


def adapted(weights, x):
    """A step of MAML: the loss after a step of gradient descent."""
    grads = torch.func.grad(loss)(weights, x)
    return loss({name: value - 0.1 * grads[name] for name, value in weights.items()}, x)


TRANSFORMS = {
    "grad": lambda x: torch.func.grad(loss)(weights, x[0]),
    "maml": lambda x: adapted(weights, x[0]),
    "vmap": torch.vmap(outputs),
    "jvp": lambda x: torch.func.jvp(outputs, (x[0],), (x[1],))[1],
    "vjp": lambda x: torch.func.vjp(outputs, x[0])[1](torch.ones(4, 2, 4))[0],
    "jacrev": lambda x: torch.func.jacrev(lambda one: outputs(one).sum((0, 1)))(x[0]),
    "jacfwd": lambda x: torch.func.jacfwd(lambda one: outputs(one).sum((0, 1)))(x[0]),
    "per_example": lambda x: torch.vmap(torch.func.grad(loss), (None, 0))(weights, x),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's forward mode
@pytest.mark.parametrize(
    "name",
    thinned(["grad", "maml", "vmap", "vjp", "jvp", "jacrev", "per_example", "jacfwd"], 4),
)
def test_transforms_inside_a_graph(name):
    """`torch.func` is seen by the compiler too: the reference has its derivatives."""
    torch.compiler.reset()
    torch.manual_seed(0)
    x = torch.randn(3, 4, 2, 3)
    # in forward mode AOTAutograd fails on torch's own Linear, too
    backend = "eager" if name in ("jvp", "jacfwd") else "aot_eager"
    compiled = torch.compile(TRANSFORMS[name], fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), TRANSFORMS[name](x))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_of_dropout(randomness):
    """Each example has a mask of its own, or all the same one, as `torch.vmap` is asked."""
    torch.manual_seed(0)
    dropping = openrnn.LSTM(3, 4, 2, dropout=0.5)
    x = torch.randn(4, 2, 3).expand(3, 4, 2, 3)
    y = torch.vmap(lambda one: dropping(one)[0], randomness=randomness)(x)
    assert torch.equal(y[0], y[1]) == (randomness == "same")


class Own(nn.LSTM):
    """A user's class, which `convert` derives from ours as well."""


def stack(kind, width, **options):
    """Layers that are also of a class of torch's, where Dynamo breaks its graph."""
    made = nn.ModuleList([kind(5, width, **options), kind(width, width, **options)])
    openrnn.convert(made, subclass=True, quiet=True)
    return made


class Broken(nn.Module):
    def __init__(self, kind, width, **options):
        super().__init__()
        self.layers = stack(kind, width, **options)

    def forward(self, x):
        for layer in self.layers:
            x, _ = layer(torch.relu(x))
        return x * 2


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_calls_of_layers_that_are_also_of_torch_are_not_traced(backend, grad):
    """Calls that repeat, of layers of several sizes in one process: Dynamo knows them all."""
    torch.compiler.reset()
    torch.manual_seed(0)
    models = [Broken(kind, 16) for kind in (nn.LSTM, nn.GRU, nn.RNN, Own)]
    models += [Broken(nn.LSTM, 16, dtype=torch.float64), Broken(nn.LSTM, 300)]
    for model in models:
        compiled = torch.compile(model, backend=backend)
        for steps in (5, 5, 5, 5, 3, 3, 3):
            dtype = next(model.parameters()).dtype
            x = torch.randn(steps, 4, 5, dtype=dtype, requires_grad=grad)
            with torch.set_grad_enabled(grad):
                want = results(model, model, x) if grad else [model(x)]
                found = results(compiled, model, x) if grad else [compiled(x)]
            for one, other in zip(want, found, strict=True):
                torch.testing.assert_close(one, other)


@torch.no_grad()
def test_no_other_layer_is_passed_by_where_one_of_torchs_class_is():
    """They have code in common, and what Dynamo finds out about one holds for all of that code."""
    torch.compiler.reset()
    x, graphs = torch.randn(3, 2, 5), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    for layer in (stack(nn.LSTM, 4)[0], openrnn.LSTM(5, 4)):
        compiled = torch.compile(layer, backend=backend)
        for _ in range(4):
            assert torch.equal(compiled(x)[0], layer(x)[0])
    assert len(graphs) == 1


@torch.no_grad()
def test_steps_of_a_layer_that_is_also_of_torch_are_not_traced():
    torch.compiler.reset()
    layer, x = stack(nn.GRU, 4)[0], torch.randn(6, 2, 5)

    def run(x):
        state, outputs = None, []
        for x_t in x.unbind():
            y_t, state = layer.step(x_t, state)
            outputs.append(y_t)
        return torch.stack(outputs)

    compiled = torch.compile(run, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(x), run(x))


@pytest.mark.parametrize("derived", [False, True])
@pytest.mark.parametrize("order", [1, 2])
def test_backward_inside_of_compiled_code_is_not_traced(order, derived):
    """Autograd calls it from there, so Dynamo sees it as a function of the user's."""
    torch.compiler.reset()
    torch.manual_seed(0)
    layer = stack(nn.LSTM, 8)[0] if derived else openrnn.LSTM(5, 8)

    def step(x):
        loss = layer(x)[0].square().sum()
        for _ in range(order - 1):
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = slope.square().sum()
        loss.backward()

    compiled = torch.compile(step, backend="eager")
    x = torch.randn(7, 3, 5, requires_grad=True)
    for _ in range(4):
        found = []
        for run in (step, compiled):
            x.grad, layer.weight_hh_l0.grad = None, None
            run(x)
            found.append((x.grad, layer.weight_hh_l0.grad))
        for want, have in zip(*found, strict=True):
            assert torch.equal(want, have)


def test_a_torch_without_the_mark_of_untraced_functions_traces_them(monkeypatch):
    def function(x):
        return x

    assert untraced.untraced(function) is not function
    monkeypatch.setattr(untraced, "_eval_frame", None)
    assert untraced.untraced(function) is function
