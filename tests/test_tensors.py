"""No address is taken of a tensor whose memory is not what it seems: lazy, lacking, too small."""

from functools import cache
from pathlib import Path

import forks
import hostile
import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import openrnn
from openrnn import arguments, functional, memory, ops, tensors

X = torch.ones(5, 3, 6)
BACKENDS = [
    ("cpu", "cpu"),
    ("auto", "cpu"),
    ("reference", "cpu"),
    pytest.param(("fused", "cuda"), marks=pytest.mark.gpu),
    pytest.param(("cudnn", "cuda"), marks=pytest.mark.gpu),
]


@cache
def outcomes(backend, device):
    """What came of each call, in a process that may die of one."""
    program = "import hostile, sys; hostile.main(*sys.argv[1:])"
    done = forks.python(program, backend, device, cwd=Path(hostile.__file__).parent)
    found = dict(line.split("\t") for line in done.stdout.splitlines() if "\t" in line)
    return found, f"the process ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}"


def outcome(where, name):
    found, end = outcomes(*where)
    return found.get(name, end)


@pytest.mark.parametrize("where", BACKENDS, ids=str)
@pytest.mark.parametrize("name", hostile.RIGHT)
def test_lazy_values_are_computed(name, where):
    assert outcome(where, name) == "right"


@pytest.mark.parametrize("where", BACKENDS, ids=str)
@pytest.mark.parametrize("name", hostile.OPAQUE)
def test_a_tensor_without_memory_goes_to_the_reference(name, where):
    found = outcome(where, name)
    if where[0] in ("auto", "reference"):
        assert found == "right"
    else:
        assert found.startswith("NoBackendError: ")
        assert "has no memory of its own" in found


@pytest.mark.parametrize("where", BACKENDS, ids=str)
@pytest.mark.parametrize("name", hostile.REFUSED)
def test_what_cannot_be_read_is_refused_in_one_sentence(name, where):
    if where[0] == "reference" and name.endswith(("before backward", "explicit", "the operator")):
        pytest.skip("its backward is torch's own, and it is behind no operator")
    assert outcome(where, name).startswith(hostile.REFUSED[name][1])


SPARSE = [
    (lambda t: t.to_sparse(), "sparse_coo"),
    (lambda t: t[0].to_sparse_csr(), "sparse_csr"),
    (lambda t: t.to_mkldnn(), "mkldnn"),
    (lambda t: torch.nested.nested_tensor([t[0], t[1]]), "nested"),
    (lambda t: torch.nested.nested_tensor([t[0], t[1]], layout=torch.jagged), "nested"),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("turn", "kind"), SPARSE, ids=["coo", "csr", "mkldnn", "nested", "jagged"])
def test_tensors_that_are_not_dense(turn, kind):
    layer, spec = openrnn.GRU(6, 4), openrnn.cells.gru.spec(6, 4)
    cell, weights, odd = openrnn.GRUCell(6, 4), layer.weights(), turn(X)
    nested = r"a nested input (must be jagged|has its batch first)"
    dense = rf"input must be a dense \(strided\) .* a {kind} one"
    with pytest.raises(ValueError, match=nested if kind == "nested" else dense):
        layer(odd)
    with pytest.raises(ValueError, match=rf"input must be a dense \(strided\) .* a {kind} one"):
        cell(odd)
    with pytest.raises(ValueError, match=rf"x_t must be a dense \(strided\) .* a {kind} one"):
        layer.step(odd)
    with pytest.raises(ValueError, match=rf"hx must be a dense \(strided\) .* a {kind} one"):
        layer(X, odd)
    with pytest.raises(ValueError, match=rf"lengths must be a dense \(strided\) .* a {kind} one"):
        layer(X, lengths=odd)
    with pytest.raises(ValueError, match=rf"reset must be a dense \(strided\) .* a {kind} one"):
        layer(X, reset=turn(torch.zeros(5, 3, 2)))
    for call in (
        lambda: functional.recurrent(spec, odd, weights),
        lambda: ops.forward(odd, weights, spec),
    ):
        with pytest.raises(ValueError, match=rf"x must be a dense \(strided\) .* a {kind} one"):
            call()


@pytest.mark.parametrize("odd", [None, np.ones((5, 3, 6), np.float32), [1.0]], ids=type)
def test_what_is_no_tensor(odd):
    layer, kind = openrnn.LSTM(6, 4), type(odd).__name__
    spec, weights, h = layer.spec, layer.weights(), torch.zeros(1, 3, 4)
    calls = {
        f"LSTM: input must be a Tensor, got {kind}": lambda: layer(odd),
        f"GRUCell: input must be a Tensor, got {kind}": lambda: openrnn.GRUCell(6, 4)(odd),
        f"step needs x_t as a Tensor, got {kind}": lambda: layer.step(odd),
        f"hx must be a Tensor, got {kind}": lambda: layer(X, (h, odd)),
        f"c_0 must be a Tensor, got {kind}": lambda: functional.recurrent(
            spec, X, weights, [h, odd]
        ),
        f"x must be a Tensor, got {kind}": lambda: functional.recurrent(spec, odd, weights),
        f"weight_hh_l0 must be a Tensor, got {kind}": lambda: functional.recurrent(
            spec, X, [weights[0], odd, *weights[2:]]
        ),
        f"bias_ih_l0 must be a Tensor, got {kind}": lambda: ops.forward(
            X, [*weights[:2], odd, weights[3]], spec
        ),
    }
    for words, call in calls.items():
        with pytest.raises(TypeError, match=words):
            call()
    with pytest.raises(TypeError, match=f"^x must be a Tensor, got {kind}"):
        ops.forward(odd, weights, spec)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_numbers_of_no_network(dtype):
    spec = openrnn.cells.lstm.spec(6, 4)
    name = str(dtype).removeprefix("torch.")
    odd, weights = X.to(dtype), [w.detach().to(dtype) for w in openrnn.LSTM(6, 4).weights()]
    for call in (functional.recurrent, lambda spec, x, params: ops.forward(x, params, spec)):
        with pytest.raises(ValueError, match=f"x must be .* or float64, got {name}"):
            call(spec, odd, weights)


def test_parameters_that_are_too_many_or_too_wide():
    layer = openrnn.GRU(6, 4)
    weights = layer.weights()
    with pytest.raises(ValueError, match=r"needs 4 parameters \(weight_ih_l0, .*\), got 5"):
        functional.recurrent(layer.spec, X, [*weights, X])
    with pytest.raises(ValueError, match=r"needs 4 parameters \(weight_ih_l0, .*\), got 2"):
        functional.recurrent(layer.spec, X, weights[:2])
    with pytest.raises(ValueError, match=r"weight_ih_l0 must have shape \(12, 6\), got \(12, 7\)"):
        functional.recurrent(layer.spec, X, [torch.zeros(12, 7), *weights[1:]])
    with pytest.raises(ValueError, match=r"x must have shape \(T, B, 6\), got \(5, 3, 7\)"):
        functional.recurrent(layer.spec, torch.zeros(5, 3, 7), weights)


@pytest.mark.parametrize("name", ["uint8", "uint16", "uint32", "uint64", "int8", "int16"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_lengths_of_every_whole_type(name, backend):
    layer, dtype = openrnn.LSTM(6, 4, backend=backend), getattr(torch, name)
    lengths = torch.tensor([5, 0, 2])
    assert torch.equal(layer(X, lengths=lengths.to(dtype))[0], layer(X, lengths=lengths)[0])
    with pytest.raises(ValueError, match=r"lengths must be in \[0, 5\], got values from 0 to 6"):
        layer(X, lengths=torch.tensor([5, 0, 6]).to(dtype))


@pytest.mark.parametrize("name", ["uint8", "uint16", "uint64", "int64", "float16", "float32"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_resets_of_every_real_type(name, backend):
    layer, dtype = openrnn.LSTM(6, 4, backend=backend), getattr(torch, name)
    mask = torch.rand(5, 3) < 0.4
    assert torch.equal(layer(X, reset=mask.to(dtype))[0], layer(X, reset=mask)[0])


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (torch.full((5, 3), torch.nan), "nan"),
        (torch.tensor([0.0, 1.0, 0.5]).expand(5, 3), "0.5"),
        (-torch.eye(5, 3, dtype=torch.int8), "-1"),
        (torch.eye(5, 3).to(torch.uint16) * 2, "2"),
        ([[0, 1, 2]] * 5, "2"),
        (torch.zeros(5, 3, dtype=torch.complex64), "torch.complex64"),
    ],
)
def test_a_reset_mask_has_no_other_numbers(given, got):
    layer = openrnn.LSTM(6, 4)
    spec, weights, int8 = layer.spec, layer.weights(), openrnn.LSTM(6, 4)
    openrnn.quantize(int8, quiet=True)
    calls = [
        lambda: layer(X, reset=given),
        lambda: layer.step(X[0], reset=given[0]),
        lambda: int8(X, reset=given),
        lambda: ops.forward(X, weights, spec, reset=given),
    ]
    if isinstance(given, torch.Tensor):
        calls.append(lambda: layer.stepper(3).reset(given[0]))
    for call in calls:
        with pytest.raises(ValueError, match=rf"must be bool or have [^.]*0 and 1, got {got}$"):
            call()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_resets_are_not_read_while_something_traces():
    layer = openrnn.LSTM(6, 4, backend="cpu").requires_grad_(False)
    masks = torch.eye(5, 3), torch.eye(5, 3) * 0.5
    wanted = layer(X, reset=masks[0])[0]
    traced = make_fx(lambda mask: layer(X, reset=mask)[0])(masks[0])
    compiled = torch.compile(
        lambda mask: layer(X, reset=mask)[0], fullgraph=True, backend="aot_eager"
    )
    for mask in masks:
        assert torch.equal(traced(mask), wanted)
        assert torch.equal(compiled(mask), wanted)


def test_a_reset_mask_with_a_lazy_sign():
    class Passes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **kwargs or {})

    layer, mask = openrnn.LSTM(6, 4), torch.eye(5, 3)
    wanted, lazy = layer(X, reset=mask)[0], torch._neg_view(mask.neg())
    assert torch.equal(layer(X, reset=lazy)[0], wanted)
    with torch.inference_mode(), Passes():
        assert torch.equal(layer(X, reset=lazy)[0], wanted)
    with pytest.raises(ValueError, match=r"got 0\.5"):
        layer(X, reset=torch._neg_view(mask * -0.5))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_resets_on_a_gpu_are_not_read():
    layer, x = openrnn.LSTM(6, 4, device="cuda"), X.cuda()
    layer(x, reset=torch.eye(5, 3, device="cuda"))  # compiles
    try:
        torch.cuda.set_sync_debug_mode("error")
        layer(x, reset=torch.eye(5, 3, device="cuda") * 0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(ValueError, match=r"got 0\.5"):
        layer(x, reset=torch.eye(5, 3) * 0.5)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_plain_tensors_are_known_by_their_keys(device):
    """The set of keys is made of names; these are the tensors that it is about."""
    x = X.to(device)
    with torch.inference_mode():
        of_inference = [torch.ones(3, device=device), torch.ones(3, 3, device=device)[0]]
    known = [
        x, x.bool(), x.long(), x.bfloat16(), x.double(), x[1:, 0], x.transpose(0, 1),
        x[:1].expand(5, 3, 6), x.clone().requires_grad_(), x.clone().requires_grad_() * 2,
        nn.Parameter(x), *of_inference,
    ]  # fmt: skip
    assert all(map(tensors.is_plain, known))
    odd = [
        hostile.negative(x), hostile.zero(x), hostile.Wrapper(x), x.to("meta"), x.to_sparse(),
        torch._to_functional_tensor(x), x.to(torch.complex64).conj(),
        torch.nested.nested_tensor([x[0]]), None, 1, x.cpu().numpy(),
    ]  # fmt: skip
    assert not any(map(tensors.is_plain, odd))
    torch.vmap(lambda row: odd.append(tensors.is_plain(row)) or row)(x)
    assert odd[-1] is False


def test_what_is_remembered_of_a_call_is_no_more_than_what_was_looked_at():
    """A change of any kind that no version tells is seen at the next call."""
    arguments._seen.clear()
    layer = openrnn.LSTM(6, 4, backend="reference")
    layer(X)
    layer(torch.ones(2, 7, 6).transpose(0, 1))
    (known,) = arguments._seen.values()
    assert len(known.fits) == 1  # T, B and the strides of x are free
    hidden, good = layer.weight_hh_l0, layer.weight_hh_l0.data
    lazy = openrnn.LSTM(6, 4, backend="reference")
    lazy.load_state_dict(layer.state_dict())
    lazy.weight_hh_l0.data = -good
    for odd, match in [
        (good[:, :3], r"must have shape \(16, 4\), got \(16, 3\)"),
        (good.double(), "must have one dtype"),
        (good.to("meta"), "must be on one device"),
        (torch.as_strided(good, (16, 4), (4, 1), 0), None),
        (torch._neg_view(good), None),
        (good.t().contiguous().t(), None),
    ]:
        hidden.data = odd if odd.device == good.device else hidden.data
        if odd.device != good.device:
            layer.weight_hh_l0 = nn.Parameter(odd)
        if match is None:
            wanted = (lazy if odd.is_neg() else layer)(X)[0]
            assert torch.equal(layer(X)[0], wanted)
        else:
            with pytest.raises(ValueError, match=match):
                layer(X) if "dtype" not in match else functional.recurrent(
                    layer.spec, X, layer.weights()
                )
        layer.weight_hh_l0 = hidden
        hidden.data = good
    view = torch.zeros(100)[36:].view(16, 4)
    hidden.data = view
    layer(X)
    view.untyped_storage().resize_(4 * 99)
    with pytest.raises(ValueError, match="must have memory for its shape"):
        layer(X)


@pytest.mark.parametrize("shrunk", ["x", "weight_hh_l0"])
def test_memory_that_shrank_is_seen_beside_a_wrapper(shrunk):
    """The reference would read past its end, as torch's own operators do: the process crashed."""
    layer = openrnn.LSTM(6, 4)
    params = dict(layer.named_parameters()) | {"bias_ih_l0": hostile.Wrapper(layer.bias_ih_l0)}
    tensors = {"x": torch.randn(7, 5, 6), **{name: p.detach() for name, p in params.items()}}
    tensors[shrunk].untyped_storage().resize_(8)
    x = tensors.pop("x")
    with torch.no_grad(), pytest.raises(ValueError, match=f"{shrunk} must have memory for its"):
        torch.func.functional_call(layer, tensors, (x,))


def test_many_layers_in_one_buffer_are_known(monkeypatch):
    """A dozen of one size, whose parameters lie at other places of one storage each."""
    arguments._seen.clear()
    layers = [openrnn.LSTM(6, 4, backend="reference") for _ in range(12)]
    buffer = torch.randn(sum(p.numel() for layer in layers for p in layer.parameters()))
    parts = iter(buffer.split([p.numel() for layer in layers for p in layer.parameters()]))
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data = next(parts).view(parameter.shape)
        layer(X)
    looks, look = [], arguments._check_each
    monkeypatch.setattr(arguments, "_check_each", lambda *given: looks.append(0) or look(*given))
    for layer in layers:
        layer(X)
    assert not looks
    buffer.untyped_storage().resize_(4 * (buffer.numel() - 1))  # of the last one's last bias
    for layer in layers[:-1]:
        layer(X)
    with pytest.raises(ValueError, match="must have memory for its shape"):
        layers[-1](X)


def test_x_that_is_a_state_too():
    """What is known of other calls is not pushed out by calls that cannot be known."""
    arguments._seen.clear()
    layer, c = openrnn.LSTM(4, 4, backend="reference"), torch.zeros(1, 3, 4)
    for _ in range(3):
        h = torch.randn(1, 3, 4)
        torch.testing.assert_close(layer(h, (h, c)), layer(h.clone(), (h, c)))
    (known,) = arguments._seen.values()
    assert len(known.fits) == 1


def test_templates_have_the_strides_of_new_tensors():
    sizes = [(), (1,), (0, 3), (3, 0), (1, 1, 1), (5, 1, 1), (1, 4, 1), (2, 3), (2, 0, 3, 1)]
    for shape in sizes:
        made = torch.empty_like(memory.template(shape, torch.bfloat16, torch.device("cpu")))
        assert made.shape == shape
        assert made.stride() == torch.empty(shape).stride()
        assert made.untyped_storage().nbytes() == 2 * made.numel()


DEFAULT_DEVICE = """
import torch, openrnn
from torch.nn.utils.rnn import pack_sequence

# torch's own packing asks the default device for memory
packed = pack_sequence([torch.ones(4, 6), torch.ones(2, 6)])

def run():
    for backend, cls in (("cpu", openrnn.LSTM), ("cpu", openrnn.GRU), ("reference", openrnn.LSTM)):
        torch.manual_seed(0)
        layer = cls(6, 4, 2, bidirectional=True, dropout=0.5, backend=backend, device="cpu")
        for p in layer.parameters():
            torch.nn.init.uniform_(p)
        x = torch.linspace(-1, 1, 90, device="cpu").view(5, 3, 6).requires_grad_()
        lengths = torch.tensor([5, 0, 3], device="cpu")
        reset = torch.arange(15, device="cpu").view(5, 3) % 4 == 0
        with torch.no_grad():
            yield layer(x[:1])[0]
        y, _ = layer(x, lengths=lengths, reset=reset)
        yield y
        yield from torch.autograd.grad(y.sum(), [x, *layer.parameters()])
        yield layer(packed)[0].data
    yield openrnn.explain(layer, x, measure=True, schedule=True) and x

wanted = list(run())
with torch.device("meta"):
    found = list(run())
for have, want in zip(found, wanted, strict=True):
    torch.testing.assert_close(have, want)
print("equal")
"""


def test_a_default_device_changes_nothing(tmp_path):
    """In a process of its own: kernels that were given other memory would end it."""
    ran = forks.python(DEFAULT_DEVICE)
    assert ran.stdout.endswith("equal\n"), ran.stderr


def test_the_same_tensor_in_several_places():
    """Tied weights, and one tensor of zeros for both states."""
    layer, zeros = openrnn.GRU(4, 4, 2), torch.zeros(2, 3, 4)
    layer.weight_ih_l1 = layer.weight_ih_l0
    x = torch.randn(5, 3, 4)
    plain = openrnn.GRU(4, 4, 2, backend="reference")
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), plain(x))
    lstm = openrnn.LSTM(6, 4, 2)
    torch.testing.assert_close(lstm(X, (zeros, zeros)), lstm(X))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_masks_that_cannot_be_read(backend):
    layer = openrnn.GRU(6, 4, batch_first=True, backend=backend)
    x = X.transpose(0, 1)
    for given, words in [
        ({"lengths": "five"}, "lengths must be a Tensor, got str"),
        ({"reset": "all"}, "reset must be a Tensor, got str"),
    ]:
        with pytest.raises(TypeError, match=words):
            layer(x, **given)
    for given, words in [
        ({"lengths": torch.ones(3, dtype=int, device="meta")}, "lengths must have values"),
        ({"reset": torch.ones(3, 5, device="meta")}, "reset must have values, got"),
        ({"reset": torch.ones(5)}, r"reset must have 2 dimensions \(batch, steps\), got 1"),
        ({"reset": True}, r"reset must have 2 dimensions \(batch, steps\), got 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            layer(x, **given)


@pytest.mark.parametrize("hidden", [4, 64, 256])
def test_a_storage_that_shrinks_where_it_is(hidden):
    """Emptied and grown again, a storage may lie where it lay, with less in it."""
    layer = openrnn.LSTM(hidden, hidden)
    x = torch.ones(2, 3, hidden)
    y = layer(x)[0]
    for _ in range(2):
        layer(x)
    storage = layer.weight_hh_l0.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size // 2)
    with pytest.raises(ValueError, match="must have memory for its shape"):
        layer(x)
    with pytest.raises(ValueError, match="must have memory for its shape"):
        y.sum().backward()


def test_a_reset_state_whose_memory_has_shrunk():
    """It is expanded to the batch, which torch refuses in words of its own."""
    state = torch.zeros(1, 3, 4)
    state.untyped_storage().resize_(0)
    reset = torch.zeros(5, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="reset_state must have memory"):
        openrnn.GRU(6, 4)(torch.ones(5, 3, 6), reset=reset, reset_state=state)


@pytest.mark.gpu
def test_functional_lengths_on_the_host():
    """They are no plain tensor that a copy from pinned memory takes."""
    lengths = torch.tensor([5, 0, 2])
    layer = openrnn.GRU(6, 4, device="cuda")
    x = torch.ones(5, 3, 6, device="cuda")
    wanted = layer(x, lengths=lengths)[0]
    found = layer(x, lengths=torch._to_functional_tensor(lengths))[0]
    if torch._is_functional_tensor(found):  # what the copy to the device gives, torch decides
        torch._sync(found)
        found = torch._from_functional_tensor(found)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("hx", [1, {"h": 1}, object()], ids=type)
def test_states_that_are_none(hx):
    layer, kind = openrnn.LSTM(6, 4), type(hx).__name__
    with pytest.raises(TypeError, match=f"states must be a Tensor or a tuple of them, got {kind}"):
        layer(X, hx)
    with pytest.raises(TypeError, match=f"states must be a Tensor or a tuple of them, got {kind}"):
        layer(X, reset=torch.zeros(5, 3), reset_state=hx)


def test_real_and_fake_tensors_do_not_mix():
    from torch._subclasses.fake_tensor import FakeTensorMode

    layer, fake = openrnn.LSTM(6, 4), FakeTensorMode().from_tensor(X)
    with pytest.raises(ValueError, match="x is a FakeTensor and weight_ih_l0 is not"):
        layer(fake)
    lengths = FakeTensorMode().from_tensor(torch.tensor([5, 0, 2]))
    with pytest.raises(ValueError, match="lengths is a FakeTensor and x is not"):
        layer(X, lengths=lengths)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_explicit_operators_know_no_autocast(backend):
    layer = openrnn.GRU(6, 4, backend=backend)
    weights = [weight.detach() for weight in layer.weights()]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = ops.forward(X, weights, layer.spec, backend=backend)
            results.append([out.y, *ops.backward(out.reserve, X[..., :4]).values()])
    torch.testing.assert_close(*[[t for t in found if t is not None] for found in results])


def test_subclasses_with_memory_stay_subclasses():
    class Mine(torch.Tensor):
        pass

    layer = openrnn.LSTM(6, 4, backend="cpu")
    want = layer(X)[0]
    h = torch.zeros(1, 3, 4)
    for x, hx in ((X.as_subclass(Mine), None), (X, (h.as_subclass(Mine), h))):
        y = layer(x, hx)[0]
        assert type(y) is Mine
        torch.testing.assert_close(y.as_subclass(torch.Tensor), want)


def test_fake_tensors_reach_the_operator():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        layer = openrnn.LSTM(6, 4, backend="cpu")
        y, _ = layer(torch.ones(5, 3, 6))
    assert isinstance(y, FakeTensor)
    assert y.shape == (5, 3, 4)


@pytest.mark.parametrize("like", [torch.empty_like, torch.zeros_like], ids=["empty", "zeros"])
@pytest.mark.parametrize("public", [False, True], ids=["as compiled code does", "by torch"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (1, 1, 64), (5, 2, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_fresh_memory_is_that_of_torch(monkeypatch, like, public, shape, dtype):
    """Also where torch lacks what it is made by, which is no public name."""
    if public:
        monkeypatch.setattr(memory, "_empty_on_cpu", None)
    wanted = torch.empty(shape, dtype=dtype)
    make = memory.TensorFactory(like, memory.template(shape, dtype, torch.device("cpu"))).maker
    for inference in (False, True):
        with torch.inference_mode(inference):
            made, other = make(), make()
        assert (made.shape, made.stride(), made.dtype) == (shape, wanted.stride(), dtype)
        assert made.untyped_storage().nbytes() == wanted.nbytes
        assert made.is_inference() == inference
        assert not made.requires_grad
        assert made.numel() == 0 or made.data_ptr() != other.data_ptr()
        if like is torch.zeros_like:
            assert made.count_nonzero() == 0
