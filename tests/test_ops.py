"""The explicit operators: the same numbers as everywhere, gradients written, added or left out."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from cases import (
    CELLS,
    CLIP,
    ON_CPU,
    Inputs,
    Oracle,
    _cotangents,
    cases,
    examples,
    require,
    takes,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import openrnn
from openrnn import cells, dispatch, ops, params, philox, reference
from openrnn.backends.base import Call
from openrnn.spec import BIAS_MODES, Problem, Spec

every_backend = pytest.mark.parametrize("backend", ON_CPU)


def turned(tensor, time_major, dim=0):
    return tensor if time_major else tensor.transpose(dim, dim + 1)


def ask(case, inputs, backend, time_major):
    """Outputs and gradients under the names of `cases.ask`, by way of the operators."""
    spec = case.spec if case.training else case.spec.with_(dropout=0.0)
    leaves = {name: leaf.detach() for name, leaf in inputs.cast(case.dtype).items()}
    slots = params.module_slots(spec)
    initial = [leaves[f"{name}_0"] for name in spec.states] if case.states else None
    fresh = [leaves[f"reset_{name}_0"] for name in spec.states] if case.reset_states else None
    out = ops.forward(
        turned(leaves["x"], time_major), params.pack(spec, [leaves[s.name] for s in slots]), spec,
        states=initial, lengths=inputs.lengths,
        reset=None if inputs.reset is None else turned(inputs.reset, time_major),
        reset_states=fresh, is_training=case.needs != "none", time_major=time_major,
        generator=torch.Generator().manual_seed(case.seed), return_states=case.return_states,
        backend=backend,
    )  # fmt: skip
    found = {"y": turned(out.y, time_major)}
    found |= {f"{name}_n": state for name, state in zip(spec.states, out.states)}
    found |= {f"all_{n}": turned(s, time_major, 1) for n, s in zip(spec.states, out.all_states)}
    if case.needs == "none":
        assert out.reserve is None
        return found
    drawn = list(_cotangents(case, found))
    count = 1 + len(spec.states)
    dall = [grad if grad is None else turned(grad, time_major, 1) for grad in drawn[count:]]
    grads = ops.backward(
        out.reserve, drawn[0] if drawn[0] is None else turned(drawn[0], time_major),
        dstates=drawn[1:count], dall_states=dall if case.return_states else None,
    )  # fmt: skip
    found["dx"] = turned(grads.pop("x"), time_major)
    for slot, grad in zip(slots, params.unpack(spec, grads.pop("params"))):
        found[f"d{slot.name}"] = grad
    for kind, wanted in (("", case.states), ("reset_", case.reset_states)):
        for name in spec.states:
            grad = grads.pop(f"{kind}{name}" if kind else f"{name}0", None)
            assert (grad is not None) == wanted
            if wanted:
                found[f"d{kind}{name}_0"] = grad
    assert not grads
    return found


@pytest.mark.parametrize("cell", ["lstm", "gru", "slstm"])
@every_backend
def test_no_worse_than_the_reference(backend, cell):
    """Every feature at once, against float64, in both layouts, in training and inference."""
    require(backend)

    @settings(examples(0.3), suppress_health_check=[HealthCheck.too_slow])
    @given(cases(CELLS[cell]), st.booleans())
    def holds(case, time_major):
        case = replace(case, needs="none" if case.needs == "none" else "all")
        if case.needs == "none":
            case = replace(case, training=False)
        if takes(backend, case.problem):
            inputs = Inputs.of(case)
            Oracle.of(case, inputs).judge(ask(case, inputs, backend, time_major))

    holds()


# a small network with everything, and its tensors


class Run:
    """One network, its tensors, and one forward on a backend."""

    def __init__(self, backend, rnn_mode="lstm", dtype=torch.float64, **options):
        require(backend)
        torch.manual_seed(0)
        self.spec = ops.spec(rnn_mode, 3, 5, 2, direction="bidirectional", **options)
        self.backend = backend
        count, batch = self.spec.chains, 3
        self.x = torch.randn(4, batch, 3, dtype=dtype)
        self.params = torch.rand(ops.params_size(self.spec), dtype=dtype) - 0.5
        self.states = [torch.randn(count, batch, width, dtype=dtype) for width in self.sizes]
        self.lengths = torch.tensor([4, 0, 2])
        self.reset = torch.rand(4, batch) < 0.3
        self.dy = torch.randn(4, batch, 2 * self.spec.output_size, dtype=dtype)
        self.dstates = [torch.randn_like(state) for state in self.states]

    @property
    def sizes(self):
        return self.spec.state_sizes

    def forward(self, **options):
        given = {
            "states": self.states, "lengths": self.lengths, "reset": self.reset, "seed": 7,
            "backend": self.backend,
        } | options  # fmt: skip
        return ops.forward(self.x, self.params, self.spec, **given)

    def backward(self, out, **options):
        return ops.backward(out.reserve, self.dy, dstates=self.dstates, **options)


NETWORKS = [
    ("lstm", {"dropout": 0.4, "num_proj": 2, "cell_clip": CLIP}),
    ("gru", {"dropout": 0.4, "bias_mode": "input"}),
]
every_network = pytest.mark.parametrize(
    ("rnn_mode", "options"), NETWORKS, ids=[name for name, _ in NETWORKS]
)


@every_backend
@every_network
def test_every_combination_of_grad_req(backend, rnn_mode, options):
    run = Run(backend, rnn_mode, **options)
    out = run.forward()
    want = run.backward(out)
    names = list(want)
    assert names == ["x", "h0", "c0", "params"] if rnn_mode == "lstm" else ["x", "h0", "params"]
    for turn, requests in enumerate(product(("write", "add", "null"), repeat=len(names))):
        old = {name: torch.randn_like(want[name]) for name in names}
        into = {name: old[name].clone() for name in names}
        for place, name in enumerate(names):
            if requests[place] == "write" and (turn + place) % 2:
                into[name] = None  # a fresh one
        found = run.backward(out, grad_req=dict(zip(names, requests)), into=into)
        assert list(found) == names
        for name, how in zip(names, requests):
            if how == "null":
                assert found[name] is None
                assert torch.equal(into[name], old[name])
                continue
            sum_of = old[name] + want[name] if how == "add" else want[name]
            torch.testing.assert_close(found[name], sum_of, rtol=1e-12, atol=1e-12)
            assert into[name] is None or found[name] is into[name]


@every_backend
def test_one_word_stands_for_all(backend):
    run = Run(backend)
    out = run.forward()
    want = run.backward(out)
    assert run.backward(out, grad_req="null") == dict.fromkeys(want)
    # one call's gradients are the next one's sums
    total = run.backward(out)
    places = {name: grad.data_ptr() for name, grad in total.items()}
    total = run.backward(out, grad_req="add", into=total)
    for name, grad in want.items():
        torch.testing.assert_close(total[name], 2 * grad, rtol=1e-14, atol=0)
    total = run.backward(out, grad_req="write", into=total)
    for name, grad in want.items():
        assert torch.equal(total[name], grad)
        assert total[name].data_ptr() == places[name]
    # what a mapping does not name is null
    assert [n for n, g in run.backward(out, grad_req={"h0": "write"}).items() if g is not None] == [
        "h0"
    ]


@every_backend
def test_backward_may_run_again(backend):
    """A reserve outlives backward: the same call after other ones gives the same bits."""
    run = Run(backend, dropout=0.5)
    out = run.forward()
    first = run.backward(out)
    ops.backward(out.reserve, 3 * run.dy, grad_req={"params": "write"})
    ops.backward(out.reserve, None, run.dstates[0], grad_req={"x": "write"})
    for name, grad in run.backward(out).items():
        assert torch.equal(grad, first[name])


@every_backend
def test_gradients_are_linear_in_their_cotangents(backend):
    """So a missing one is a zero one, and each of them arrives."""
    run = Run(backend)
    out = run.forward()
    want = run.backward(out)
    parts = [
        ops.backward(out.reserve, run.dy),
        ops.backward(out.reserve, None, run.dstates[0]),
        ops.backward(out.reserve, dc_n=run.dstates[1]),
    ]
    for name, grad in want.items():
        assert all(part[name].abs().max() > 0 for part in parts)
        torch.testing.assert_close(sum(part[name] for part in parts), grad)
    for grad in ops.backward(out.reserve).values():
        assert not grad.any()


@every_backend
def test_states_given_and_not_given(backend):
    run = Run(backend)
    zero = [torch.zeros_like(state) for state in run.states]
    for has_h0, has_c0 in product((False, True), repeat=2):
        h0, c0 = run.states[0] if has_h0 else None, run.states[1] if has_c0 else None
        out = run.forward(states=None, h0=h0, c0=c0)
        full = run.forward(states=[z if s is None else s for s, z in zip((h0, c0), zero)])
        assert torch.equal(out.y, full.y)
        found, want = run.backward(out), run.backward(full)
        assert (found["h0"] is not None, found["c0"] is not None) == (has_h0, has_c0)
        for name, grad in found.items():
            assert grad is None or torch.equal(grad, want[name])
        if not has_h0:
            with pytest.raises(ValueError, match="gradient of h0 needs a h0 given to forward"):
                run.backward(out, grad_req={"h0": "write"})
            assert run.backward(out, grad_req={"h0": "null"})["h0"] is None


@every_backend
def test_other_cells_and_reset_states(backend):
    """Gradients of sLSTM's four states and of what resets put in place, against autograd."""
    require(backend)
    torch.manual_seed(1)
    spec = cells.slstm.spec(3, 5, num_layers=2, dropout=0.3)
    x, dy = torch.randn(6, 4, 3, dtype=torch.float64), torch.randn(6, 4, 5, dtype=torch.float64)
    flat = torch.randn(ops.params_size(spec), dtype=torch.float64)
    initial, fresh = (
        [torch.rand(2, 4, 5, dtype=torch.float64) for _ in range(4)] for _ in range(2)
    )
    reset = torch.rand(6, 4) < 0.3
    out = ops.forward(
        x, flat, spec, states=initial, reset=reset, reset_states=fresh, seed=3, backend=backend
    )
    grads = ops.backward(out.reserve, dy)
    names = "x h0 c0 n0 m0 params reset_h reset_c reset_n reset_m"
    assert list(grads) == names.split()
    leaves = [t.clone().requires_grad_() for t in (x, *initial, flat, *fresh)]
    problem = Problem(spec, torch.float64, "cpu", None, True, True, False, True)
    found = reference.run(
        Call(
            problem, leaves[0], leaves[1:5], params.unpack(spec, leaves[5]), None, reset,
            leaves[6:], torch.tensor([3, 0]),
        )
    )  # fmt: skip
    torch.testing.assert_close(out.y, found.y.detach())
    found.y.backward(dy)
    for grad, leaf in zip(grads.values(), leaves):
        torch.testing.assert_close(grad, leaf.grad)
    assert out.c_n is out.states[1]


TORCH = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN}
TORCH["rnn_relu"] = torch.nn.RNN


@every_backend
@pytest.mark.parametrize("rnn_mode", TORCH)
@pytest.mark.parametrize("direction", ["unidirectional", "bidirectional"])
@pytest.mark.parametrize("proj", [0, 2])
def test_torch_agrees(backend, rnn_mode, direction, proj):
    """An oracle that is not ours: outputs and every gradient of `torch.nn`."""
    require(backend)
    if proj and rnn_mode != "lstm":
        with pytest.raises(ValueError, match="num_proj needs rnn_mode 'lstm'"):
            ops.spec(rnn_mode, 3, 5, num_proj=proj)
        return
    torch.manual_seed(0)
    words = {"nonlinearity": rnn_mode[4:]} if rnn_mode.startswith("rnn") else {}
    words |= {"proj_size": proj} if proj else {}
    both = direction == "bidirectional"
    module = TORCH[rnn_mode](3, 5, 2, bidirectional=both, **words).double()
    spec = ops.spec(rnn_mode, 3, 5, 2, direction=direction, num_proj=proj)
    flat = params.pack(spec, list(module.parameters())).detach()
    x = torch.randn(7, 4, 3, dtype=torch.float64, requires_grad=True)
    initial = [torch.randn(spec.chains, 4, w, dtype=torch.float64) for w in spec.state_sizes]
    leaves = [state.clone().requires_grad_() for state in initial]
    y, last = module(x, tuple(leaves) if rnn_mode == "lstm" else leaves[0])
    last = last if rnn_mode == "lstm" else (last,)
    dy, dlast = torch.randn_like(y), [torch.randn_like(state) for state in last]
    torch.autograd.backward([y, *last], [dy, *dlast])

    out = ops.forward(x, flat, spec, *initial, backend=backend)
    for found, want in zip((out.y, *out.states), (y, *last)):
        torch.testing.assert_close(found, want.detach())
    grads = ops.backward(out.reserve, dy, *dlast)
    torch.testing.assert_close(grads["x"], x.grad)
    for name, leaf in zip(("h0", "c0"), leaves):
        torch.testing.assert_close(grads[name], leaf.grad)
    want = params.pack(spec, [parameter.grad for parameter in module.parameters()])
    torch.testing.assert_close(grads["params"], want)


@every_backend
def test_batch_major_is_transposed_time_major(backend):
    run = Run(backend, dropout=0.4)
    want = run.forward(return_states=True)
    grads = run.backward(want)
    batch_major = replace_layout(run)
    out = batch_major.forward(return_states=True, time_major=False)
    assert torch.equal(out.y, want.y.transpose(0, 1))
    assert all(torch.equal(a, b) for a, b in zip(out.states, want.states))
    assert all(torch.equal(a, b.transpose(1, 2)) for a, b in zip(out.all_states, want.all_states))
    into = {"x": torch.ones_like(batch_major.x)}
    found = batch_major.backward(out, grad_req={"x": "add", "h0": "write"}, into=into)
    torch.testing.assert_close(into["x"], 1 + grads["x"].transpose(0, 1))
    assert found["x"] is into["x"]
    assert torch.equal(found["h0"], grads["h0"])
    with pytest.raises(ValueError, match=r"x must have shape \(B, T, 3\), got \(3, 4, 2\)"):
        ops.forward(torch.zeros(3, 4, 2), run.params, run.spec, time_major=False)
    with pytest.raises(ValueError, match=r"dy must have shape \(3, 4, 10\), got \(4, 3, 10\)"):
        ops.backward(out.reserve, run.dy)


def replace_layout(run):
    """The same run, batch first in memory."""
    other = object.__new__(Run)
    vars(other).update(vars(run))
    other.x, other.dy = (t.transpose(0, 1).contiguous() for t in (run.x, run.dy))
    other.reset = run.reset.t().contiguous()
    return other


@every_backend
def test_parameters_as_a_list(backend):
    run = Run(backend, num_proj=2)
    want = run.forward()
    flat, run.params = run.params, params.unpack(run.spec, run.params)
    out = run.forward()
    assert torch.equal(out.y, want.y)
    grads = run.backward(out)
    assert grads["params"].shape == flat.shape
    assert torch.equal(grads["params"], run.backward(want)["params"])


@every_backend
def test_nothing_of_autograd(backend):
    run = Run(backend)
    run.x.requires_grad_()
    run.params.requires_grad_()
    out = run.forward()
    grads = run.backward(out)
    for tensor in (out.y, *out.states, *grads.values()):
        assert tensor.grad_fn is None
        assert not tensor.requires_grad
    assert run.x.grad is None
    with torch.no_grad():
        again = run.backward(run.forward())
    assert all(torch.equal(grad, again[name]) for name, grad in grads.items())


@every_backend
def test_under_inference_mode(backend):
    run = Run(backend)
    want = run.backward(run.forward())
    with torch.inference_mode():
        run.x = run.x * 1  # a tensor of inference mode
        found = run.backward(run.forward())
        assert all(torch.equal(grad, found[name]) for name, grad in want.items())


@every_backend
def test_gradients_may_be_collected_in_a_wider_type(backend):
    run = Run(backend, dtype=torch.float32)
    out = run.forward()
    want = run.backward(out)["params"]
    into = torch.zeros_like(want, dtype=torch.float64)
    for _ in range(2):
        run.backward(out, grad_req={"params": "add"}, into={"params": into})
    assert torch.equal(into, 2 * want.double())


# dropout


def masks_of(out, spec, x, flat, seed):
    """y by hand: layer after layer, with the masks of philox between them."""
    weights = params.unpack(spec, flat)
    one = len(weights) // spec.num_layers
    for layer in range(spec.num_layers):
        lower = ops.spec("gru", x.shape[-1], spec.hidden_size, direction="bidirectional")
        part = weights[layer * one : (layer + 1) * one]
        x = ops.forward(x, part, lower, is_training=False, backend="reference").y
        if layer < spec.num_layers - 1:
            x = x * philox.mask(torch.tensor(seed), layer, spec.dropout, (*x.shape,), x)
    return x


@every_backend
@pytest.mark.parametrize("seed", [(0, 0), (12345, 3), (-1, 0), (2**64 - 2, 1), (2**63 - 1, 9)])
def test_dropout_is_the_mask_of_seed_and_offset(backend, seed):
    require(backend)
    torch.manual_seed(0)
    spec = ops.spec("gru", 3, 4, 3, direction="bidirectional", dropout=0.5)
    x, flat = torch.randn(5, 2, 3).double(), torch.randn(ops.params_size(spec)).double()
    out = ops.forward(x, flat, spec, seed=seed[0], offset=seed[1], backend=backend)
    signed = (seed[0] if seed[0] < 2**63 else seed[0] - 2**64, seed[1])
    assert out.reserve.seed == signed
    torch.testing.assert_close(out.y, masks_of(out, spec, x, flat, signed))


@every_backend
def test_where_seeds_come_from(backend):
    run = Run(backend, dropout=0.5)

    def y(**options):
        return run.forward(**({"seed": None} | options)).y

    assert torch.equal(y(seed=1), y(seed=1))
    assert not torch.equal(y(seed=1), y(seed=2))
    assert not torch.equal(y(seed=1), y(seed=1, offset=1))
    torch.manual_seed(5)
    first, second = y(), y()
    torch.manual_seed(5)
    assert torch.equal(y(), first)
    assert not torch.equal(first, second)
    mine = torch.Generator().manual_seed(5)
    before = torch.get_rng_state()
    assert torch.equal(y(generator=mine), first)
    assert torch.equal(torch.get_rng_state(), before)
    # nothing is drawn where nothing is dropped
    assert run.forward(seed=None, is_training=False).reserve is None
    run.spec = run.spec.with_(dropout=0.0)
    out = run.forward(seed=None)
    assert out.reserve.seed is None
    assert torch.equal(torch.get_rng_state(), before)


@every_backend
def test_inference_keeps_nothing_and_drops_nothing(backend):
    run = Run(backend, dropout=0.5)
    out = run.forward(is_training=False)
    assert out.reserve is None
    run.spec = run.spec.with_(dropout=0.0)
    assert torch.equal(out.y, run.forward().y)


# refusals, each one clear sentence


def refused(message, function, *args, **options):
    with pytest.raises(ValueError, match=message) as caught:
        function(*args, **options)
    assert "\n" not in str(caught.value)


@every_backend
def test_no_backward_without_a_live_reserve(backend):
    run = Run(backend)
    message = r"needs the reserve of a forward in training, got None, as in inference"
    refused(message, run.backward, run.forward(is_training=False))
    out = run.forward()
    refused(r"needs the reserve of a forward in training, got Result", ops.backward, out, run.dy)
    assert out.reserve.nbytes == sum(tensor.nbytes for tensor in out.reserve.kept)
    out.reserve.free()
    assert out.reserve.nbytes == 0
    assert out.reserve.seed is None
    refused("needs a reserve that holds its tensors, got a freed one", run.backward, out)


@every_backend
def test_what_forward_read_must_not_change(backend):
    for name in ("x", "params", "h0", "c0", "y", "reset"):
        run = Run(backend)
        out = run.forward()
        tensors = {"x": run.x, "params": run.params, "y": out.y, "reset": run.reset}
        tensor = (tensors | dict(zip(("h0", "c0"), run.states)))[name]
        run.backward(out)
        tensor[0] = 0
        refused(f"needs the tensors of forward as they were, got {name} changed", run.backward, out)
    run = Run(backend)
    out = run.forward()
    for state in out.states:
        state.zero_()  # not among them
    run.backward(out)


FORWARD = [
    ({"x": torch.zeros(4, 3, 2)}, r"x must have shape \(T, B, 3\), got \(4, 3, 2\)"),
    ({"x": torch.zeros(4, 3)}, r"x must have shape \(T, B, 3\), got \(4, 3\)"),
    ({"x": torch.zeros(4, 3, 3)}, "params must be torch.float32 on cpu like x, got torch.float64"),
    ({"params": torch.zeros(7)}, r"params must have shape \(1080,\), got \(7,\)"),
    ({"params": [torch.zeros(7)]}, r"needs 16 parameters \(weight_ih_l0, .*\), got 1"),
    ({"states": [None]}, r"states must have 2 entries \(h, c\), got 1"),
    ({"states": [torch.zeros(4, 3, 4).double(), None]}, r"h0 must have shape \(4, 3, 5\), got"),
    ({"states": [None, torch.zeros(4, 3, 5)]}, "c0 must be torch.float64 on cpu like x, got"),
    ({"h0": torch.zeros(4, 3, 5)}, "needs either states or h0 and c0, got both"),
    ({"lengths": torch.tensor([1, 2])}, r"lengths must be integers of shape \(3,\), got"),
    ({"lengths": torch.tensor([1, 2, 5])}, r"lengths must be in \[0, 4\], got values from 1"),
    ({"reset": torch.zeros(3, 4)}, r"reset must have shape \(4, 3\) .*, got \(3, 4\)"),
    ({"reset_states": [None]}, r"reset_states must have 2 entries \(h, c\), got 1"),
    ({"reset": None, "reset_states": [None, None]}, "needs reset, got None"),
    ({"seed": 2**64}, "seed must fit 64 bits, got 18446744073709551616"),
    ({"offset": 2**24}, r"offset must be in \[0, 2\*\*24\), got 16777216"),
    ({"backend": "cudnn3"}, "backend must be auto or one of .*, got 'cudnn3'"),
]


@pytest.mark.parametrize(("wrong", "message"), FORWARD, ids=[m[:30] for _, m in FORWARD])
def test_wrong_calls_of_forward(wrong, message):
    run = Run("reference", dropout=0.5)
    wrong = dict(wrong)
    run.x, run.params = wrong.pop("x", run.x), wrong.pop("params", run.params)
    refused(message, run.forward, **wrong)


ZEROS = torch.zeros(4, 3, 10).double()
BACKWARD = [
    ({"dy": ZEROS[:2]}, r"dy must have shape \(4, 3, 10\), got \(2, 3, 10\)"),
    ({"dy": ZEROS.float()}, "dy must be torch.float64 on cpu like x, got torch.float32"),
    ({"dh_n": ZEROS}, r"dh_n must have shape \(4, 3, 5\), got \(4, 3, 10\)"),
    ({"dc_n": ZEROS}, r"dc_n must have shape \(4, 3, 5\), got \(4, 3, 10\)"),
    ({"dstates": [None]}, r"dstates must have 2 entries \(h, c\), got 1"),
    ({"dstates": [None, None], "dh_n": ZEROS}, "needs either dstates or dh_n and dc_n, got both"),
    ({"dall_states": [None, None]}, "needs a forward with return_states=True, got one without"),
    ({"grad_req": "sum"}, "grad_req must be one of write, add, null, got 'sum'"),
    ({"grad_req": {"x": "sum"}}, "grad_req must be one of write, add, null, got 'sum'"),
    ({"grad_req": {"w": "add"}}, "grad_req must name some of x, h0, c0, params, got 'w'"),
    ({"grad_req": "add"}, "'add' of x needs a tensor in into, got None"),
    ({"into": {"w": ZEROS}}, "into must name some of x, h0, c0, params, got 'w'"),
    ({"into": {"x": ZEROS}}, r"into\['x'\] must have shape \(4, 3, 3\), got \(4, 3, 10\)"),
    (
        {"into": {"params": torch.zeros(1080)}},
        r"into\['params'\] must be torch.float64 or wider on cpu, got torch.float32",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), BACKWARD, ids=[m[:30] for _, m in BACKWARD])
def test_wrong_calls_of_backward(wrong, message):
    out = Run("reference").forward()
    refused(message, ops.backward, out.reserve, **wrong)


def test_a_wrong_call_changes_nothing():
    run = Run("reference")
    out = run.forward()
    into = {"x": torch.ones_like(run.x), "params": torch.zeros(3).double()}
    refused("into", run.backward, out, into=into)
    assert torch.equal(into["x"], torch.ones_like(run.x))


def test_one_state_takes_no_c0():
    gru = ops.spec("gru", 3, 5)
    x, flat, state = torch.zeros(2, 1, 3), torch.zeros(ops.params_size(gru)), torch.zeros(1, 1, 5)
    refused("cell gru has one state: needs no c0, got one", ops.forward, x, flat, gru, None, state)
    out = ops.forward(x, flat, gru, state, backend="reference")
    assert out.c_n is None
    refused("needs no dc_n, got one", ops.backward, out.reserve, dc_n=state)


def test_a_named_backend_runs_or_says_why_not():
    spec = cells.gru_reset_before.spec(3, 4)
    flat = torch.zeros(ops.params_size(spec))
    for name in set(dispatch.BACKENDS) - {"reference"}:
        with pytest.raises(openrnn.NoBackendError, match=name):
            ops.forward(torch.zeros(2, 1, 3), flat, spec, backend=name)
    assert ops.forward(torch.zeros(2, 1, 3), flat, spec).reserve.backend == "reference"


@every_backend
def test_the_named_backend_is_the_one_that_runs(backend, monkeypatch):
    run, asked = Run(backend), []
    chosen = dispatch.BACKENDS[backend]
    for name in ("forward", "backward"):
        real = getattr(chosen, name)
        monkeypatch.setattr(chosen, name, lambda *a, n=name, f=real: asked.append(n) or f(*a))
    run.backward(run.forward())
    assert asked == ["forward", "backward"]


@every_backend
@pytest.mark.parametrize(("steps", "batch"), [(0, 3), (3, 0), (0, 0)])
def test_empty_calls(backend, steps, batch):
    """The gradient of a state that passes through unchanged is a tensor of its own."""
    require(backend)
    spec = ops.spec("lstm", 3, 5, 2, num_proj=2, dropout=0.5)
    flat = torch.randn(ops.params_size(spec))
    h0, c0 = torch.randn(2, batch, 2), torch.randn(2, batch, 5)
    out = ops.forward(torch.randn(steps, batch, 3), flat, spec, h0, c0, seed=1, backend=backend)
    assert out.y.shape == (steps, batch, 2)
    dh, dc = torch.randn_like(h0), torch.randn_like(c0)
    kept = dh.clone(), dc.clone()
    grads = ops.backward(out.reserve, torch.randn_like(out.y), dh, dc)
    assert not grads["params"].any()
    assert grads["x"].shape == (steps, batch, 3)
    if steps == 0:
        assert torch.equal(out.h_n, h0)
        assert torch.equal(grads["h0"], dh)
        assert torch.equal(grads["c0"], dc)
    ops.backward(out.reserve, None, dh, dc, grad_req="add", into=grads)
    assert torch.equal(dh, kept[0])
    assert torch.equal(dc, kept[1])


# networks and canonical lists


def test_spec_takes_the_words_of_tensorflow():
    linear = ops.spec("lstm", 4, 4)
    assert linear == cells.lstm.spec(4, 4)
    assert linear == ops.spec("lstm", 4, 4, input_mode="linear_input")
    skip = linear.with_(input_mode="skip")
    for word in ("skip", "skip_input", "auto", "auto_select"):
        assert ops.spec("lstm", 4, 4, input_mode=word) == skip
    for word in ("auto", "auto_select"):
        assert ops.spec("lstm", 3, 4, input_mode=word) == cells.lstm.spec(3, 4)
    assert ops.spec("lstm", 4, 4, direction="bidirectional").bidirectional
    assert ops.spec("lstm", 4, 4, num_proj=4) == linear  # as in cuDNN
    assert ops.spec("lstm", 4, 4, num_proj=3).proj_size == 3
    assert ops.spec("lstm", 4, 4, cell_clip=2).cell_clip == (-2.0, 2.0)
    assert ops.spec("lstm", 4, 4, cell_clip=np.float32(2)).cell_clip == (-2.0, 2.0)
    assert ops.spec("lstm", 4, 4, cell_clip=(-1, 2)).cell_clip == (-1.0, 2.0)
    assert ops.spec("rnn_relu", 4, 4, 3).num_layers == 3
    assert ops.spec("gru", 4, 4, precision="ieee", bias_mode="none") == cells.gru.spec(
        4, 4, precision="ieee", bias_mode="none"
    )
    assert [ops.spec(mode, 1, 1).cell for mode in TORCH] == list(TORCH)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rnn_mode": "LSTM"}, "rnn_mode must be one of lstm, gru, rnn_tanh, rnn_relu, got 'LSTM'"),
        ({"input_mode": "none"}, "input_mode must be one of linear, .*, auto, .*, got 'none'"),
        ({"direction": "both"}, "direction must be one of unidirectional, .*, got 'both'"),
        ({"input_mode": "skip"}, "needs input_size == hidden_size, got 3 and 4"),
        ({"input_mode": "gates"}, r"gates \* hidden_size, 16 here, got 3"),
        ({"num_proj": 5}, "smaller than hidden_size 4, got 5"),
        ({"rnn_mode": "rnn_tanh", "num_proj": 2}, "num_proj needs rnn_mode 'lstm', got 'rnn_tanh'"),
        ({"rnn_mode": "gru", "cell_clip": 1.0}, "cell_clip needs a cell that clips a state"),
        ({"cell_clip": (1, 2, 3)}, r"a number or a pair \(low, high\), got \(1, 2, 3\)"),
        ({"dropout": 2}, r"a probability in \[0, 1\], got 2"),
    ],
)
def test_impossible_networks(options, message):
    refused(message, ops.spec, **({"rnn_mode": "lstm", "input_size": 3, "num_units": 4} | options))


def networks():
    for mode, layers, both, bias, skip, proj in product(
        TORCH, (1, 3), (False, True), BIAS_MODES, (False, True), (0, 3)
    ):
        if not proj or mode == "lstm":
            yield ops.spec(
                mode, 5 if skip else 4, 5, layers, input_mode="skip" if skip else "linear",
                direction="bidirectional" if both else "unidirectional", bias_mode=bias,
                num_proj=proj,
            )  # fmt: skip
    yield cells.peephole_lstm.spec(3, 5, num_layers=2, bidirectional=True)
    yield cells.slstm.spec(3, 5)
    yield cells.slstm.spec(20, 5, input_mode="gates")


def test_canonical_lists_go_there_and_back():
    for spec in networks():
        flat = torch.randn(ops.params_size(spec))
        weights, biases = ops.params_to_canonical(flat, spec)
        gates, chains = len(spec.gates), spec.chains
        assert len(weights) == chains * (2 * gates + (spec.proj_size > 0))
        assert len(biases) == chains * (2 * gates + len(spec.unit_params))
        assert torch.equal(ops.canonical_to_params(weights, biases, spec), flat)
        for tensor in (*weights, *biases):
            assert tensor.numel() == 0 or tensor.data_ptr() >= flat.data_ptr()
        before = flat.sum()
        for tensor in (*weights, *biases):
            tensor.add_(1)  # views of the buffer, together all of it
        torch.testing.assert_close(flat.sum(), before + flat.numel())


def test_canonical_lists_are_those_of_tensorflow():
    """Per layer and direction: input gates, recurrent gates, projection; then the biases alike."""
    module = torch.nn.LSTM(4, 5, 2, bidirectional=True, proj_size=3)
    spec = ops.spec("lstm", 4, 5, 2, direction="bidirectional", num_proj=3)
    flat = params.pack(spec, list(module.parameters()))
    weights, biases = (iter(tensors) for tensors in ops.params_to_canonical(flat, spec))
    for end in ("_l0", "_l0_reverse", "_l1", "_l1_reverse"):
        for kind in ("ih", "hh"):
            matrix = getattr(module, f"weight_{kind}{end}")
            for gate in range(4):  # i f g o
                assert torch.equal(next(weights), matrix[5 * gate : 5 * gate + 5])
        assert torch.equal(next(weights), getattr(module, f"weight_hr{end}"))
        for kind in ("ih", "hh"):
            for gate in range(4):
                bias = getattr(module, f"bias_{kind}{end}")
                assert torch.equal(next(biases), bias[5 * gate : 5 * gate + 5])
    assert next(weights, None) is next(biases, None) is None


def test_what_a_network_lacks_is_empty_in_its_place():
    spec = ops.spec("gru", 5, 5, 2, input_mode="skip", bias_mode="recurrent")
    weights, biases = ops.params_to_canonical(torch.zeros(ops.params_size(spec)), spec)
    assert [tuple(w.shape) for w in weights] == [(5, 0)] * 3 + [(5, 5)] * 9
    assert [tuple(b.shape) for b in biases] == ([(0,)] * 3 + [(5,)] * 3) * 2


def test_canonical_lists_are_differentiable():
    spec = ops.spec("gru", 3, 4)
    flat = torch.randn(ops.params_size(spec), requires_grad=True)
    weights, biases = ops.params_to_canonical(flat, spec)
    ops.canonical_to_params([3 * w for w in weights], biases, spec).sum().backward()
    assert torch.equal(flat.grad, torch.tensor([3.0] * 84 + [1.0] * 24))


def test_wrong_canonical_lists():
    spec = ops.spec("gru", 3, 4)
    weights, biases = ops.params_to_canonical(torch.zeros(ops.params_size(spec)), spec)
    to_params = ops.canonical_to_params
    refused("needs 6 weights, got 5", to_params, weights[:5], biases, spec)
    refused("needs 6 biases, got 12", to_params, weights, biases * 2, spec)
    wrong = [*weights[:3], weights[0], *weights[4:]]
    message = r"weights\[3\] must have shape \(4, 4\), got \(4, 3\)"
    refused(message, to_params, wrong, biases, spec)
    wide = [bias.double() for bias in biases]
    refused("must be of one dtype and device, got torch.float32", to_params, weights, wide, spec)
    refused("a vector of 108 elements", ops.params_to_canonical, torch.zeros(107), spec)


def test_params_size_is_the_closed_formula():
    """(G*H*(In + O) + P*H) and two biases for each layer and direction, as TensorFlow counts."""
    assert ops.params_size(ops.spec("lstm", 3, 4)) == 4 * 4 * (3 + 4) + 2 * 16
    assert ops.params_size(ops.spec("gru", 3, 4, 2)) == 3 * 4 * (3 + 4 + 4 + 4) + 4 * 12
    deep = ops.spec("lstm", 3, 4, 2, direction="bidirectional", num_proj=2)
    assert ops.params_size(deep) == 2 * (16 * (3 + 2) + 8 + 16 * (4 + 2) + 8 + 2 * 32)
    assert isinstance(deep, Spec)
