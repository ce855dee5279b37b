"""The registered operators: schema, fakes, autograd, and derivatives of derivatives."""

import warnings

import pytest
import torch
from cases import ON_CPU, thinned
from torch import nn

import openrnn
from openrnn import dispatch, functional, memo, route

# the reference is ordinary autograd code and not behind the operator
FAST = [name for name in ON_CPU if name != "reference"]


def inputs(backend, grad, kind="LSTM", extras=True, **options):
    """The arguments of `openrnn::forward`."""
    assert dispatch.BACKENDS[backend].absent() is None
    torch.manual_seed(0)
    layer = getattr(openrnn, kind)(5, 6, **options)
    spec = layer.spec

    def leaf(*shape):
        return torch.randn(*shape, requires_grad=grad)

    states = [leaf(spec.chains, 3, width) for width in spec.state_sizes] if extras else []
    fresh = [leaf(spec.chains, 3, width) for width in spec.state_sizes] if extras else []
    return (
        leaf(4, 3, 5),
        states,
        [weight.detach().requires_grad_(grad) for weight in layer.weights()],
        torch.tensor([4, 0, 2]) if extras else None,
        torch.rand(4, 3) > 0.5 if extras else None,
        fresh,
        torch.tensor([3, 1]) if spec.dropout else None,
        spec.text,
        backend,
        grad,
        bool(spec.dropout),
        extras,
        "tf32",
    )


CASES = [
    {},
    {"extras": False},
    {"kind": "GRU", "bidirectional": True},
    {"num_layers": 2, "dropout": 0.3, "proj_size": 2},
]


@pytest.mark.parametrize(
    ("case", "grad"),
    [*((case, True) for case in CASES), *thinned(((case, False) for case in CASES), len(CASES))],
    ids=str,
)
@pytest.mark.parametrize("backend", FAST)
def test_forward_keeps_its_word(backend, case, grad):
    torch.library.opcheck(torch.ops.openrnn.forward, inputs(backend, grad, **case))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", FAST)
def test_backward_keeps_its_word(backend, case):
    args = inputs(backend, True, **case)
    with torch.no_grad():
        out = torch.ops.openrnn.forward(*args)
    *tensors, spec, _, _, training, every, precision = args
    visible = 1 + len(openrnn.Spec.parse(spec).states) * (2 if every else 1)
    grads = [torch.randn_like(tensor) for tensor in out[:visible]]
    count = 1 + len(args[1]) + len(args[2]) + len(args[5])
    needs = [place % 3 != 1 for place in range(count)]
    torch.library.opcheck(
        torch.ops.openrnn.backward,
        (
            *[_detached(tensor) for tensor in tensors],
            out[0],
            out[visible:],
            grads,
            spec,
            backend,
            training,
            every,
            precision,
            needs,
        ),
    )


def _detached(value):
    if isinstance(value, list):
        return [tensor.detach() for tensor in value]
    return value if value is None else value.detach()


@pytest.mark.parametrize("backend", FAST)
def test_second_derivatives(backend):
    """pytorch#5261: through the fast backend, a derivative of the derivative is the reference's."""
    torch.manual_seed(0)
    layer = openrnn.GRU(3, 4, backend=backend).double()
    x = torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x)[0], x)
    assert torch.autograd.gradgradcheck(lambda x: layer(x)[0], x)


@pytest.mark.parametrize("backend", FAST)
def test_backward_twice(backend):
    """A graph that is kept gives the same gradients again: the reserve is left as it was."""
    torch.manual_seed(0)
    layer = openrnn.LSTM(3, 4, 2, backend=backend)
    x = torch.randn(5, 2, 3, requires_grad=True)
    y, _ = layer(x)
    wanted = [x, *layer.parameters()]
    first = torch.autograd.grad(y.sum(), wanted, retain_graph=True)
    second = torch.autograd.grad(y.sum(), wanted)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("backend", FAST)
def test_gradients_share_no_memory(backend):
    """The two bias gradients are equal numbers in two places: clipping one must not clip both."""
    torch.manual_seed(0)
    layer = openrnn.LSTM(32, 32, backend=backend)
    layer(torch.randn(4, 2, 32))[0].sum().backward()
    before = layer.bias_hh_l0.grad.clone()
    layer.bias_ih_l0.grad.zero_()
    assert torch.equal(layer.bias_hh_l0.grad, before)
    assert before.abs().sum() > 0


@pytest.mark.parametrize("backend", ON_CPU)
def test_many_gradients_at_a_time(backend):
    """`jacobian(vectorize=True)` and `is_grads_batched` take the derivative of the reference."""
    layer = openrnn.LSTM(3, 2, backend=backend)
    x = torch.randn(3, 2, 3)
    one, many = (
        torch.autograd.functional.jacobian(lambda x: layer(x)[0], x, vectorize=flag)
        for flag in (False, True)
    )
    torch.testing.assert_close(many, one)


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # sizes become constants
def test_jit_trace(backend):
    layer = openrnn.LSTM(3, 2, backend=backend)
    x, other = (torch.randn(3, 2, 3) for _ in range(2))
    traced = torch.jit.trace(layer, x)
    torch.testing.assert_close(traced(other)[0], layer(other)[0])
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.trace(layer, x)(other)[0], layer(other)[0])


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "LSTMCell", "GRUCell", "quantized"])
def test_a_trace_warns_of_no_check_of_sizes(kind, states):
    """As of torch's own layers, of which the tracer ignores warnings; wrong sizes are refused."""
    layer = getattr(openrnn, "LSTM" if kind == "quantized" else kind)(3, 4)
    if kind == "quantized":
        openrnn.quantize(model := nn.Sequential(layer), quiet=True)
        layer = model[0]
    x, lead = (torch.randn(2, 3), ()) if "Cell" in kind else (torch.randn(5, 2, 3), (1,))
    h = torch.zeros(*lead, 2, 4)
    state = h if "GRU" in kind else (h, h)
    given = (x, state) if states else (x,)
    traced = torch.jit.trace(layer, given, check_trace=False)
    torch.testing.assert_close(traced(*given), layer(*given))
    warnings.simplefilter("ignore", torch.jit.TracerWarning)  # of the message, which has the sizes
    with pytest.raises(RuntimeError, match="input_size"):
        torch.jit.trace(layer, (x[..., :2], *given[1:]), check_trace=False)
    if states:
        wide = h.new_zeros(*lead, 2, 5)
        with pytest.raises(RuntimeError, match=r"[Hh]idden"):
            torch.jit.trace(layer, (x, wide if "GRU" in kind else (wide, wide)), check_trace=False)


def test_states_that_do_not_fit_reach_no_kernel():
    layer = openrnn.LSTM(3, 2)
    x, h, wide = torch.randn(4, 1, 3), torch.zeros(1, 1, 2), torch.zeros(1, 1, 5)
    with pytest.raises(ValueError, match=r"needs 2 states \(h, c\), got 1"):
        functional.recurrent(layer.spec, x, layer.weights(), [h])
    with pytest.raises(ValueError, match=r"shape \(1, 1, 2\), got \(1, 1, 5\)"):
        functional.recurrent(layer.spec, x, layer.weights(), [h, wide])


@pytest.mark.parametrize("grad", [True, False])
def test_a_graph_asks_for_the_precision_when_it_runs(monkeypatch, grad):
    """An eager call knows it from its layer, and its backward from it."""
    asked = []
    monkeypatch.setattr(route, "precision_of", lambda *_: asked.append(0) or "tf32")
    layer = openrnn.LSTM(5, 6, backend="cpu").requires_grad_(grad)
    compiled, x = torch.compile(layer, fullgraph=True, backend="eager"), torch.randn(4, 3, 5)
    compiled(x)
    asked.clear()
    compiled(x)
    assert asked
    asked.clear()
    y = layer(x)[0]
    if grad:
        y.sum().backward()
    assert not asked


@pytest.fixture
def tf32_alone(monkeypatch):
    """The CPU backend takes no ieee products, as fused does not; and a way to set the precision."""
    cpu = dispatch.BACKENDS["cpu"]
    plain = type(cpu).refusals

    def refusals(self, problem):
        no = ["products in ieee precision"] if problem.precision == "ieee" else []
        return plain(self, problem) + no

    def set_precision(word):
        for module in (functional, route):
            monkeypatch.setattr(module, "precision_of", lambda *_: word)

    monkeypatch.setattr(type(cpu), "refusals", refusals)
    memo.clear()
    set_precision("tf32")
    yield set_precision
    memo.clear()


@pytest.mark.parametrize("grad", [True, False])
def test_a_graph_does_not_outlive_the_precision_it_was_recorded_for(tf32_alone, grad):
    """Its forward says so; a backward goes on from what forward left, whatever is set then."""
    layer = openrnn.LSTM(5, 6, backend="cpu").requires_grad_(grad)
    x = torch.randn(4, 3, 5, requires_grad=grad)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y, wanted = compiled(x)[0], layer(x)[0]
    tf32_alone("ieee")
    if grad:
        found = torch.autograd.grad(y.sum(), [x, *layer.parameters()])
        for have, want in zip(found, torch.autograd.grad(wanted.sum(), [x, *layer.parameters()])):
            torch.testing.assert_close(have, want)
    with pytest.raises(openrnn.NoBackendError, match="was recorded while torch's setting was tf32"):
        compiled(x)
    with pytest.raises(openrnn.NoBackendError, match="cpu: products in ieee precision"):
        layer(x)
    tf32_alone("tf32")
    torch.testing.assert_close(compiled(x)[0], wanted)
