"""cuDNN called directly: against float64, against torch.nn on the same GPU, and its refusals."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from cases import (
    CELLS,
    CLIP,
    CORNERS,
    CUDNN,
    Case,
    Inputs,
    ask,
    cases,
    check,
    distance,
    examples,
    require,
    size,
    takes,
    with_cell,
)
from hypothesis import HealthCheck, given, settings
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

import openrnn
from openrnn import cells, dispatch, ops
from openrnn.backends.cudnn import algorithms, long, run
from openrnn.errors import LibraryError, NoBackendError
from openrnn.spec import ALGORITHMS, BIAS_MODES, Problem

FOUR = sorted(CUDNN)
PERSISTENT = [name for name in ALGORITHMS if name.startswith("persist")]
ROUND_CLIP = (-0.375, 0.25)  # CLIP, but for what float32 does not hold
PLAIN = Problem(cells.lstm.spec(64, 64), torch.float32, "cuda", capability=(9, 0))
on_gpu = pytest.mark.gpu


@pytest.fixture
def gpu():
    """Float32 products in float32, because the oracle's allowance knows no tf32."""
    require("cudnn")
    before = torch.backends.cudnn.rnn.fp32_precision
    torch.backends.cudnn.rnn.fp32_precision = "ieee"
    yield torch.device("cuda")
    torch.backends.cudnn.rnn.fp32_precision = before


def tame(case: Case, algorithm: str = "standard") -> Case:
    """The case without what cuDNN refuses; its dropout can be judged where all or nothing falls."""
    spec = case.spec.with_(algorithm=algorithm, precision="ieee", reset_dropout_state=True)
    if spec.cell_clip == CLIP:
        spec = spec.with_(cell_clip=ROUND_CLIP)
    if spec.cell != "lstm":
        spec = spec.with_(proj_size=0)
    return replace(
        case, reset=None, reset_states=False, return_states=False, spec=spec,
        training=case.training and case.spec.dropout == 1,
        cotangents="all" if case.cotangents == "states" else case.cotangents,
    )  # fmt: skip


# against float64


@on_gpu
@pytest.mark.parametrize("cell", FOUR)
@pytest.mark.parametrize("corner", CORNERS)
def test_corners(gpu, corner, cell):
    check(tame(with_cell(CORNERS[corner], CELLS[cell])), "cudnn")


@on_gpu
@pytest.mark.parametrize("cell", FOUR)
def test_no_worse_than_the_reference(gpu, cell):
    """Shapes, layouts, lengths, bias modes, projections, dtypes: asked as any other backend."""

    @settings(examples(4.0), suppress_health_check=list(HealthCheck))
    @given(cases(CELLS[cell]))
    def holds(case):
        check(tame(case), "cudnn")

    holds()


def combinations():
    for cell, bias, layers, both, lengths, skip in product(
        FOUR, BIAS_MODES, (1, 2), (False, True), (None, "some"), (False, True)
    ):
        more = [{}]
        if cell == "lstm":
            more += [
                {"proj_size": 3},
                {"cell_clip": ROUND_CLIP},
                {"proj_size": 2, "cell_clip": ROUND_CLIP},
            ]
        for extra in more:
            spec = CELLS[cell].spec(
                5, 5, num_layers=layers, bidirectional=both, bias_mode=bias,
                input_mode="skip" if skip else "linear", algorithm="standard", **extra,
            )  # fmt: skip
            yield Case(spec, torch.float64, 6, 4, lengths, states=True)


@on_gpu
def test_every_combination_in_float64(gpu):
    """float64 against float64 at 1e-10: cells, biases, layers, directions, lengths, inputs."""
    for case in combinations():
        inputs = Inputs.of(case)
        want, have = ask(case, inputs, "reference"), ask(case, inputs, "cudnn")
        for name, value in want.items():
            assert distance(have[name], value) <= 1e-10 * max(1.0, size(value)), f"{name}: {case}"


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("algorithm", PERSISTENT)
@pytest.mark.parametrize("cell", FOUR)
def test_persistent_algorithms(gpu, cell, algorithm, dtype):
    """Right numbers by every algorithm that cuDNN runs, or its own words where it does not."""
    ran = 0
    for sizes, both, needs in product(((64, 1, 6), (64, 5, 9)), (False, True), ("all", "none")):
        hidden, batch, steps = sizes
        spec = CELLS[cell].spec(hidden, hidden, bidirectional=both)
        case = tame(Case(spec, dtype, steps, batch, states=True, needs=needs), algorithm)
        why = algorithms.unfit(algorithm, case.problem)
        if why is not None:
            with pytest.raises(NoBackendError, match=f"algorithm {algorithm} {why}"):
                ask(case, Inputs.of(case), "cudnn")
            continue
        try:
            ask(case, Inputs.of(case), "cudnn")
        except LibraryError as error:
            said = error
        else:
            close(case)
            ran += 1
            continue
        assert said.call.startswith("cudnn")
        assert "NOT_SUPPORTED" in said.status
    assert ran or dtype == torch.float64


def close(case: Case) -> None:
    """The persistent kernels approximate tanh: in float32 they miss more than rounding explains."""
    if case.dtype != torch.float32:
        return check(case, "cudnn")
    inputs = Inputs.of(case)
    want, have = ask(case, inputs, "reference", torch.float64), ask(case, inputs, "cudnn")
    for name, value in want.items():
        assert distance(have[name], value) <= 5e-5 * max(1.0, size(value)), name
    return None


@on_gpu
@pytest.mark.parametrize("cell", FOUR)
def test_more_steps_than_cudnn_takes(gpu, cell, monkeypatch):
    """Chunks of three steps give what one call gives, in every feature."""
    for room in (run, long):
        monkeypatch.setattr(room, "LONGEST", 3)

    @settings(examples(2.0), suppress_health_check=list(HealthCheck))
    @given(cases(CELLS[cell]))
    def holds(case):
        case = replace(case, steps=max(4, case.steps))
        # here dropout falls outside cuDNN, by the masks that all other backends use
        drops = case.training
        check(replace(tame(case), training=drops), "cudnn")

    holds()


@on_gpu
def test_backward_keeps_the_precision_of_its_forward(gpu):
    """Whatever torch's setting has become in between: the reserve is of that arithmetic."""
    torch.manual_seed(0)
    lstm = openrnn.LSTM(96, 96, device=gpu, backend="cudnn", algorithm="standard")
    x = torch.randn(9, 5, 96, device=gpu, requires_grad=True)
    setting = torch.backends.cudnn.rnn

    def grads(before, after):
        setting.fp32_precision = before
        y = lstm(x)[0]
        setting.fp32_precision = after
        return torch.cat([g.flatten() for g in torch.autograd.grad(y.sum(), [x, *lstm.weights()])])

    exact = grads("ieee", "ieee")
    assert torch.equal(grads("ieee", "tf32"), exact)
    assert not torch.equal(grads("tf32", "tf32"), exact)


@on_gpu
def test_70000_steps(gpu):
    spec = cells.gru.spec(2, 3, bidirectional=True, precision="ieee")
    x = torch.randn(70_000, 2, 2, dtype=torch.float64)
    lengths = torch.tensor([70_000, 66_000])
    flat = torch.randn(ops.params_size(spec), dtype=torch.float64)
    out = ops.forward(x.cuda(), flat.cuda(), spec, lengths=lengths, backend="cudnn")
    grads = ops.backward(out.reserve, torch.ones_like(out.y))
    want = ops.forward(x, flat, spec, lengths=lengths, backend="cpu")
    exact = ops.backward(want.reserve, torch.ones_like(want.y))
    assert distance(out.y.cpu(), want.y) < 1e-10
    for name in ("x", "params"):
        assert distance(grads[name].cpu(), exact[name]) < 1e-9 * max(1.0, size(exact[name]))


# the wishes of a caller: gradients asked for one by one, layouts, packed sequences


@on_gpu
def test_each_gradient_alone(gpu):
    """Asking for one gradient gives that of asking for all, bit for bit."""
    case = tame(replace(CORNERS["everything"], batch=3, steps=3))
    inputs = Inputs.of(case)
    everything = ask(case, inputs, "cudnn")
    for name in inputs.leaves:
        inputs.required = frozenset({name})
        assert torch.equal(ask(case, inputs, "cudnn")[f"d{name}"], everything[f"d{name}"]), name


@on_gpu
def test_every_combination_of_grad_req(gpu):
    torch.manual_seed(0)
    spec = ops.spec("lstm", 3, 4, 2, direction="bidirectional", num_proj=2)
    x, dy = (torch.randn(5, 3, width, device=gpu, dtype=torch.float64) for width in (3, 4))
    states = [torch.randn(4, 3, w, device=gpu, dtype=torch.float64) for w in (2, 4)]
    flat = torch.randn(ops.params_size(spec), device=gpu, dtype=torch.float64)
    out = ops.forward(x, flat, spec, *states, lengths=torch.tensor([5, 0, 3]), backend="cudnn")
    want = ops.backward(out.reserve, dy, *states)
    for words in product(("write", "add", "null"), repeat=4):
        requests = dict(zip(want, words))
        old = {name: torch.randn_like(grad) for name, grad in want.items()}
        into = {name: grad.clone() for name, grad in old.items()}
        found = ops.backward(out.reserve, dy, *states, grad_req=requests, into=into)
        for name, word in requests.items():
            expected = {"write": want[name], "add": old[name] + want[name], "null": old[name]}[word]
            torch.testing.assert_close(into[name], expected, rtol=1e-14, atol=1e-14)
            assert (found[name] is None) == (word == "null")


@on_gpu
def test_backward_may_run_again(gpu):
    """cuDNN overwrites its reserve; ours stays whole as long as it may be read again."""
    lstm = openrnn.LSTM(3, 4, device=gpu, backend="cudnn")
    x = torch.randn(5, 2, 3, device=gpu, requires_grad=True)
    y, _ = lstm(x)
    first = torch.autograd.grad(y.sum(), [x, *lstm.parameters()], retain_graph=True)
    second = torch.autograd.grad(y.sum(), [x, *lstm.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@on_gpu
def test_batch_major_is_not_copied(gpu):
    lstm = openrnn.LSTM(3, 4, batch_first=True, device=gpu, algorithm="standard", backend="cudnn")
    x = torch.randn(2, 5, 3, device=gpu)
    y, _ = lstm(x)
    assert y.is_contiguous()
    lstm.batch_first = False
    assert distance(lstm(x.transpose(0, 1).contiguous())[0].transpose(0, 1), y) < 1e-6


@on_gpu
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_packed_sequences_as_they_are(gpu, kind, monkeypatch):
    """No padding is made: the data goes to cuDNN as it lies; every gradient is torch.nn's."""
    monkeypatch.setattr("openrnn.packed.unpack", None)
    torch.manual_seed(0)
    theirs = getattr(torch.nn, kind)(3, 4, 2, bidirectional=True, device=gpu, dtype=torch.float64)
    ours = getattr(openrnn, kind)(
        3, 4, 2, bidirectional=True, device=gpu, dtype=torch.float64, backend="cudnn"
    )
    ours.load_state_dict(theirs.state_dict())
    rows = [torch.randn(n, 3, device=gpu, dtype=torch.float64) for n in (2, 5, 1, 4)]
    state = torch.randn(4, 4, 4, device=gpu, dtype=torch.float64)
    hx = (state, state + 1) if kind == "LSTM" else state
    found = []
    for layer in (theirs, ours):
        packed = pack_sequence(rows, enforce_sorted=False)
        data = packed.data.detach().requires_grad_()
        y, final = layer(PackedSequence(data, *packed[1:]), hx)
        last = final if isinstance(final, torch.Tensor) else sum(final)
        grads = torch.autograd.grad(y.data.sum() + last.square().sum(), [data, *layer.parameters()])
        found.append([y.data, last, pad_packed_sequence(y)[0], *grads])
    for have, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)


@on_gpu
def test_second_derivatives(gpu):
    """By the reference; with packed sequences too; with cuDNN's own masks they are refused."""
    gru = openrnn.GRU(3, 4, 2, device=gpu, dtype=torch.float64, backend="cudnn", dropout=0.5)
    gru.eval()
    x = torch.randn(4, 2, 3, device=gpu, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: gru(x)[0].square(), x)
    rows = PackedSequence(x.flatten(0, 1)[:5], torch.tensor([2, 2, 1]))
    assert torch.autograd.gradgradcheck(
        lambda x: gru(PackedSequence(x.flatten(0, 1)[:5], rows.batch_sizes))[0].data.square(), x
    )
    gru.train()
    with pytest.raises(NoBackendError, match="its dropout masks are its own"):
        torch.autograd.grad(gru(x)[0].sum(), x, create_graph=True)


# torch.nn on the same GPU


@on_gpu
@pytest.mark.filterwarnings("ignore:RNN module weights are not part")  # torch's own, in bfloat16
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_bits_of_torch(kind, dtype):
    """By the algorithm that torch chooses, outputs and gradients are torch's bit for bit."""
    require("cudnn")
    for hidden, layers, both in ((64, 1, False), (128, 1, False), (40, 2, True)):
        torch.manual_seed(0)
        options = {"bidirectional": both, "device": "cuda", "dtype": dtype}
        theirs = getattr(torch.nn, kind)(hidden, hidden, layers, **options)
        theirs.flatten_parameters()
        x = torch.randn(12, 8, hidden, device="cuda", dtype=dtype, requires_grad=True)

        def results(layer, x=x):
            y, _ = layer(x)
            return [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]

        want, same = results(theirs), []
        for algorithm in ALGORITHMS[1:]:
            ours = getattr(openrnn, kind)(
                hidden, hidden, layers, algorithm=algorithm, backend="cudnn", **options
            )
            ours.load_state_dict(theirs.state_dict())
            try:
                found = results(ours)
            except (LibraryError, NoBackendError):
                continue
            same.append(all(torch.equal(a, b) for a, b in zip(found, want)))
        assert any(same), (hidden, layers, both)


# refusals and errors


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("cell slstm is not one of cuDNN's", replace(PLAIN, spec=cells.slstm.spec(4, 4))),
        ("resets inside the sequence", replace(PLAIN, reset=True)),
        ("the states of all steps", replace(PLAIN, return_states=True)),
        ("a torch.func transform", replace(PLAIN, transform=True)),
        ("bfloat16 needs compute capability 8.0",
         replace(PLAIN, dtype=torch.bfloat16, capability=(7, 5))),
        ("rounds cell_clip (-0.4, 0.25) to float32",
         replace(PLAIN, dtype=torch.float64, spec=cells.lstm.spec(4, 4, cell_clip=CLIP))),
        ("its dropout goes on by itself, needs reset_dropout_state or no generator",
         replace(PLAIN, training=True, generator=True,
                 spec=cells.lstm.spec(4, 4, num_layers=2, dropout=0.5))),
        ("projection of a rnn_tanh, needs lstm",
         replace(PLAIN, spec=cells.rnn_tanh.spec(4, 4, proj_size=2))),
    ],
)  # fmt: skip
def test_refusals(words, problem):
    reasons = dispatch.BACKENDS["cudnn"].refusals(problem)
    assert len(reasons) == 1
    assert words in reasons[0]


@pytest.mark.parametrize("algorithm", PERSISTENT)
@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("does not do lengths, needs standard", {"lengths": True}),
        ("does not do projection, needs standard", {"proj_size": 3}),
        ("needs bias_mode double, got input", {"bias_mode": "input"}),
    ],
)
def test_what_persistent_algorithms_do_not_do(algorithm, words, changes):
    spec = PLAIN.spec.with_(algorithm=algorithm)
    assert dispatch.BACKENDS["cudnn"].refusals(replace(PLAIN, spec=spec)) == []
    flags = {name: changes[name] for name in changes if name == "lengths"}
    spec = spec.with_(**{name: changes[name] for name in changes if name != "lengths"})
    found = dispatch.BACKENDS["cudnn"].refusals(replace(PLAIN, spec=spec, **flags))
    assert found == [f"algorithm {algorithm} {words}"]


@pytest.mark.parametrize("cell", FOUR)
def test_how_wide_the_small_kernels_are(cell):
    inference, training = algorithms.SMALL[cell]
    for grad, limit in ((False, inference), (True, training)):
        spec = CELLS[cell].spec(8, limit, algorithm="persist_static_small_h")
        problem = replace(PLAIN, spec=spec, grad=grad)
        assert dispatch.BACKENDS["cudnn"].refusals(problem) == []
        problem = replace(problem, spec=spec.with_(hidden_size=limit + 1))
        assert (
            f"needs hidden_size of at most {limit}"
            in (dispatch.BACKENDS["cudnn"].refusals(problem)[0])
        )


def test_takes_its_row():
    for cell in CELLS.values():
        for changes in ({}, {"reset": True}, {"return_states": True}, {"device": "cpu"}):
            takes("cudnn", replace(PLAIN, spec=cell.spec(3, 4), **changes))


def test_absent_without_cuda():
    if torch.cuda.is_available():
        assert dispatch.BACKENDS["cudnn"].absent() is None
    else:
        assert "CUDA" in dispatch.BACKENDS["cudnn"].absent()
        with pytest.raises(NoBackendError, match="CUDA"):
            openrnn.LSTM(3, 4, backend="cudnn")(torch.zeros(2, 1, 3))


@on_gpu
def test_bad_input_gets_one_sentence(gpu):
    lstm = openrnn.LSTM(3, 4, backend="cudnn", device=gpu)
    x = torch.randn(5, 2, 3, device=gpu)
    for words, call in (
        (r"lengths must be in \[0, 5\]", lambda: lstm(x, lengths=torch.tensor([6, 1]))),
        ("lengths must be integers of shape", lambda: lstm(x, lengths=torch.tensor([1]))),
        ("does not match weight dtype", lambda: lstm(x.half())),
        ("Expected 3, got 4", lambda: lstm(torch.randn(5, 2, 4, device=gpu))),
        ("one device", lambda: lstm(x, (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)))),
        ("one device", lambda: lstm(x.cpu())),
    ):
        with pytest.raises((ValueError, RuntimeError), match=words):
            call()
    spec = ops.spec("lstm", 3, 4)
    out = ops.forward(x, torch.randn(ops.params_size(spec), device=gpu), spec, backend="cudnn")
    out.reserve.free()
    with pytest.raises(ValueError, match="got a freed one"):
        ops.backward(out.reserve, out.y)
