"""Compilers see one node: no graph break, no specialisation to T or B, and the same numbers."""

import pytest
import torch
from torch import nn

import openrnn


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


@pytest.mark.parametrize("options", [{}, {"dropout": 0.5}, {"bidirectional": True}], ids=str)
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
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
