"""What every backend is asked and what the right answer is: cases, inputs, the float64 oracle."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from openrnn import cells, dispatch, functional, memo, params, reference
from openrnn.cells import Cell
from openrnn.nn.call_cache import CallCache
from openrnn.spec import BIAS_MODES, Problem, Spec

# the cells that the package ships, examples included; not those that tests and doctests define
CELLS: dict[str, Cell] = {
    key: cell for key, cell in cells._CELLS.items() if cell.function.__module__ == "openrnn.cells"
}


class First(torch.nn.Module):
    """A layer's output alone."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


def under(monkeypatch, module, run, *patched):
    """What a call of a module gives under a patch that changes schedules: none is remembered."""
    with monkeypatch.context() as patch:
        patch.setattr(*patched)
        memo.clear()
        module._call_cache = CallCache()
        found = run()
    memo.clear()
    module._call_cache = CallCache()
    return found


# What each backend is known not to take, in words that its refusal must have, and when. Any other
# refusal, a missing one, and a backend without a row here fail the test that meets it.
REFUSALS: dict[str, dict[str, Callable[[Problem], bool]]] = {
    "reference": {},
    "cpu": {
        "two dependent products": lambda problem: cells.lookup(problem.spec.cell).dependent_product,
        "torch.func transform": lambda problem: problem.transform,
        "needs cpu": lambda problem: problem.device != "cpu",
        "is cuDNN's": lambda problem: problem.spec.algorithm != "auto",
    },
    "cudnn": {
        "needs cuda": lambda problem: problem.device != "cuda",
        "is not one of cuDNN's": lambda problem: problem.spec.cell not in CUDNN,
        "two dependent products": lambda problem: cells.lookup(problem.spec.cell).dependent_product,
        "torch.func transform": lambda problem: problem.transform,
        "input_mode gates": lambda problem: problem.spec.input_mode == "gates",
        "resets inside": lambda problem: problem.reset,
        "states of all steps": lambda problem: problem.return_states,
        "projection of a": lambda problem: (
            problem.spec.proj_size > 0 and problem.spec.cell in CUDNN - {"lstm"}
        ),
        "bounds that float32 holds": lambda problem: (
            problem.dtype == torch.float64
            and any(torch.tensor(b).item() != b for b in problem.spec.cell_clip or ())
        ),
        "its dropout goes on by itself": lambda problem: (
            problem.generator and problem.drops and not problem.spec.reset_dropout_state
        ),
        "bfloat16 needs compute capability": lambda problem: (
            problem.dtype == torch.bfloat16 and (problem.capability or (8, 0)) < (8, 0)
        ),
    },
}
REFUSALS["fused"] = {
    "needs cuda": lambda problem: problem.device != "cuda",
    "two dependent products": lambda problem: cells.lookup(problem.spec.cell).dependent_product,
    "torch.func transform": lambda problem: problem.transform,
    "dtype float64": lambda problem: problem.dtype == torch.float64,
    "compute capability": lambda problem: (
        problem.device == "cuda" and (problem.capability or (9, 0)) < (8, 0)
    ),
    "ieee precision": lambda problem: (
        problem.dtype == torch.float32 and problem.spec.precision == "ieee"
    ),
    "does not do projection": lambda problem: problem.spec.proj_size > 0,
    "is cuDNN's": lambda problem: problem.spec.algorithm != "auto",
}
CUDNN = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
# where a backend's tensors lie; the cases are drawn and judged on the CPU
DEVICE = {"cudnn": "cuda", "fused": "cuda"}
# cuDNN's own file, test_cudnn.py, asks it for ieee products and for dropout that it can repeat
BACKENDS = [
    pytest.param(name, marks=pytest.mark.gpu) if name in DEVICE else name
    for name in dispatch.BACKENDS
    if name != "cudnn"
]
TF32 = {"fused"}  # whose float32 products are tf32 products
# NVIDIA's kernels sum in orders of their own, and on another machine than the reference
SLACK = {"cudnn": 3.0}
ON_CPU = [name for name in dispatch.BACKENDS if name not in DEVICE]


def require(name: str) -> None:
    """Skips where this machine cannot have the backend; fails where it could and has not."""
    gone = dispatch.BACKENDS[name].absent() if name in dispatch.BACKENDS else "not in BACKENDS"
    if gone is None:
        return
    if name == "cpu" and find_spec("numba") is not None:
        pytest.fail(f"numba is installed, yet backend cpu is absent: {gone}")
    pytest.skip(f"backend {name} is absent: {gone}")


def takes(name: str, problem: Problem) -> bool:
    """Whether the backend takes the problem; fails where that is not what `REFUSALS` says."""
    assert name in REFUSALS, f"backend {name} has no row in tests/cases.py REFUSALS"
    if name in DEVICE and problem.device == "cpu":
        problem = replace(problem, device=DEVICE[name])
    reasons = dispatch.BACKENDS[name].refusals(problem)
    expected = [words for words, when in REFUSALS[name].items() if when(problem)]
    for words in expected:
        assert any(words in reason for reason in reasons), f"{name} should refuse: {words}"
    for reason in reasons:
        assert any(words in reason for words in expected), f"{name} refuses: {reason}"
    return not reasons


@dataclass(frozen=True)
class Case:
    """One call, in words; `Inputs.of` draws its tensors.

    Args:
        lengths: "some" (zeros among them, unsorted), "zeros", "full".
        reset: "some", "all", "first", "last", "never".
        layout: of x and parameters: "plain", "batch_first", "strided", "expanded" over the batch.
        needs: which tensors require a gradient: "all", "some", "x", "params", "none".
        cotangents: which outputs the gradient comes from: "all", "y", "finals", "states", or the
            expanded ones of "sum".
        scale: of x; 30 saturates every gate.
    """

    spec: Spec
    dtype: torch.dtype = torch.float32
    steps: int = 5
    batch: int = 3
    lengths: str | None = None
    reset: str | None = None
    states: bool = False
    reset_states: bool = False
    return_states: bool = False
    training: bool = False
    layout: str = "plain"
    needs: str = "all"
    cotangents: str = "all"
    scale: float = 1.0
    seed: int = 0

    @property
    def problem(self) -> Problem:
        drops = self.training and self.spec.dropout > 0 and self.spec.num_layers > 1
        return Problem(
            self.spec, self.dtype, "cpu", None, self.needs != "none", drops,
            self.lengths is not None, self.reset is not None, self.return_states,
            steps=self.steps, batch=self.batch,
        )  # fmt: skip

    def __str__(self) -> str:
        words = [str(self.problem)]
        words += [
            f"{name}={getattr(self, name)}"
            for name in ("lengths", "reset", "layout", "needs", "cotangents", "scale", "seed")
            if getattr(self, name) != type(self).__dataclass_fields__[name].default
        ]
        return " ".join(words)


@dataclass
class Inputs:
    """Values in float64 that the case's dtype holds exactly: every run sees the same numbers."""

    case: Case
    leaves: dict[str, Tensor] = field(default_factory=dict)  # in the order of _names
    lengths: Tensor | None = None
    reset: Tensor | None = None
    required: frozenset[str] = frozenset()

    @classmethod
    def of(cls, case: Case) -> "Inputs":
        spec, made = case.spec, cls(case)
        dice = torch.Generator().manual_seed(case.seed)

        def uniform(*shape: int, bound: float = 1.0) -> Tensor:
            return (torch.rand(shape, generator=dice, dtype=torch.float64) * 2 - 1) * bound

        steps, batch = case.steps, case.batch
        x = torch.randn(steps, batch, spec.input_size, generator=dice, dtype=torch.float64)
        if case.layout == "expanded":
            x = x[:, :1].expand(steps, batch, -1)
        made.leaves["x"] = x * case.scale
        for slot in params.module_slots(spec):
            # wide enough that gates saturate now and then and states neither die nor explode
            bound = 1.5 / math.sqrt(slot.shape[1]) if len(slot.shape) == 2 else 1.0
            made.leaves[slot.name] = uniform(*slot.shape, bound=bound)
        for kind, given in (("", case.states), ("reset_", case.reset_states)):
            for name, width in zip(spec.states, spec.state_sizes) if given else ():
                made.leaves[f"{kind}{name}_0"] = uniform(spec.chains, batch, width, bound=2.0)
        dtype = torch.float32 if case.dtype == torch.float64 else case.dtype
        made.leaves = {name: leaf.to(dtype).double() for name, leaf in made.leaves.items()}
        made.lengths = _lengths(case, dice)
        made.reset = _reset(case, dice)
        if made.lengths is not None and case.layout != "expanded":
            padding = torch.arange(steps)[:, None] >= made.lengths
            made.leaves["x"][padding] = math.nan
        coins = torch.rand(len(made.leaves), generator=dice) < 0.5
        made.required = frozenset(
            name
            for name, coin in zip(made.leaves, coins.tolist())
            if case.needs == "all"
            or (case.needs == "some" and coin)
            or (case.needs == "x" and name == "x")
            or (case.needs == "params" and "weight" in name)
        )
        return made

    def cast(self, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
        """Fresh leaves in this dtype, in the layout of the case."""
        return {
            name: _lay_out(value.to(device, dtype), self.case.layout, name).requires_grad_(
                name in self.required
            )
            for name, value in self.leaves.items()
        }


def _lengths(case: Case, dice: torch.Generator) -> Tensor | None:
    if case.lengths is None:
        return None
    some = torch.randint(0, case.steps + 1, (case.batch,), generator=dice)
    if case.lengths == "some":
        return some.to(torch.int32) if case.seed % 2 else some
    return torch.full_like(some, case.steps if case.lengths == "full" else 0)


def _reset(case: Case, dice: torch.Generator) -> Tensor | None:
    if case.reset is None:
        return None
    chance = {"some": 0.3, "all": 1.1}.get(case.reset, 0.0)
    mask = torch.rand(case.steps, case.batch, generator=dice) < chance
    if case.steps and case.reset in ("first", "last"):
        mask[0 if case.reset == "first" else -1] = True
    return mask.float() if case.seed % 2 else mask


def _lay_out(value: Tensor, layout: str, name: str) -> Tensor:
    """A new leaf of the same value, somewhere else in memory."""
    if layout == "batch_first" and value.dim() > 1:
        return value.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "strided":
        wide = value.new_full((*value.shape, 2), math.nan)
        wide[..., 0] = value
        return wide[..., 0]
    if layout == "expanded" and name == "x" and value.numel():
        return value[:, :1].clone().expand(value.shape)
    return value.clone()


Found = dict[str, Tensor]


def ask(case: Case, inputs: Inputs, backend: str, dtype: torch.dtype | None = None) -> Found:
    """Outputs and gradients by name, from one call in the case's dtype or another."""
    # an algorithm is a way, not a meaning: only the backend that has it is asked for it
    spec = case.spec if backend in DEVICE else case.spec.with_(algorithm="auto")
    leaves = inputs.cast(dtype or case.dtype, DEVICE.get(backend, "cpu"))
    before = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    weights = [leaves[slot.name] for slot in params.module_slots(spec)]
    initial = [leaves[f"{name}_0"] for name in spec.states] if case.states else None
    fresh = [leaves[f"reset_{name}_0"] for name in spec.states] if case.reset_states else None
    with torch.set_grad_enabled(case.needs != "none"):
        y, finals, every = functional.recurrent(
            spec, leaves["x"], weights, initial, lengths=inputs.lengths, reset=inputs.reset,
            reset_states=fresh, return_states=case.return_states, training=case.training,
            generator=torch.Generator().manual_seed(case.seed), backend=backend,
        )  # fmt: skip
    found = {"y": y}
    found |= {f"{name}_n": state for name, state in zip(spec.states, finals)}
    found |= {f"all_{name}": states for name, states in zip(spec.states, every)}
    _check_outputs(case, found, leaves, dtype or case.dtype)
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    pairs = [
        (value, cotangent)
        for value, cotangent in zip(found.values(), _cotangents(case, found))
        if cotangent is not None and value.requires_grad
    ]
    # at T = 0 the reference's outputs hang on no parameter: a gradient that is None is zero
    grads = dict.fromkeys(wanted)
    if pairs and wanted:
        values, cotangents = zip(*pairs)
        flat = torch.autograd.grad(values, [*wanted.values()], cotangents, allow_unused=True)
        grads = dict(zip(wanted, flat))
    for name, leaf in wanted.items():
        found[f"d{name}"] = torch.zeros_like(leaf) if grads[name] is None else grads[name]
    for name, leaf in leaves.items():
        assert _same(leaf.detach(), before[name]), f"{backend} changed {name} in place"
    return {name: value.detach().cpu() for name, value in found.items()}


def _cotangents(case: Case, found: Found) -> Iterator[Tensor | None]:
    dice = torch.Generator().manual_seed(case.seed + 1)
    dtype = torch.float32 if case.dtype == torch.float64 else case.dtype
    for name, value in found.items():
        kind = {"y": "y"}.get(name, "states" if name.startswith("all_") else "finals")
        drawn = torch.randn(value.shape, generator=dice, dtype=torch.float64).to(dtype)
        if case.cotangents == "sum":
            yield value.new_ones(()).expand(value.shape)
        else:
            yield drawn.to(value) if case.cotangents in ("all", kind) else None


def _check_outputs(case: Case, found: Found, leaves: Found, dtype: torch.dtype) -> None:
    spec, steps, batch = case.spec, case.steps, case.batch
    shapes = {"y": (steps, batch, spec.directions * spec.output_size)}
    for name, width in zip(spec.states, spec.state_sizes):
        shapes[f"{name}_n"] = (spec.chains, batch, width)
        if case.return_states:
            shapes[f"all_{name}"] = (spec.chains, steps, batch, width)
    assert {name: tuple(value.shape) for name, value in found.items()} == shapes
    assert {value.dtype for value in found.values()} == {dtype}
    owners = [value for value in (*leaves.values(), *found.values()) if value.numel()]
    places = {value.untyped_storage().data_ptr() for value in owners}
    assert len(places) == len(owners), "an output shares memory with an input or another output"


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference; 0 for empty tensors, nan where one is nan."""
    assert a.shape == b.shape, f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0


def size(a: Tensor) -> float:
    return a.abs().max().item() if a.numel() else 0.0


def _orders() -> Iterator[Any]:
    """The reference as it is, then with its products summed in other orders, each as right."""
    yield nullcontext()
    for seed in range(4):

        def reordered(x: Tensor, w: Tensor, b: Tensor | None = None, seed: int = seed) -> Tensor:
            places = torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(seed))
            halves = places.chunk(2) if seed % 2 else (places,)
            y = sum(linear(x[..., half], w[:, half]) for half in halves)
            return y if b is None else y + b

        yield mock.patch.object(reference, "linear", reordered)


def _kinks(case: Case, eps: float) -> Iterator[tuple[Any, Case]]:
    """The reference with the clip's edges, or the corner of relu, a rounding off.

    A value so near a kink lies on one side of it in one honest answer and on the other in another,
    and the gradient that passes is then there or not. What is near 0 for relu depends on the terms
    of its sum, which are as large as the largest sums: a float16 sum of 0.01, of terms of 30, was
    seen on both sides.
    """
    if case.spec.cell_clip is not None:
        low, high = case.spec.cell_clip
        for factor in (1 - eps, 1 + eps):
            clip = (low * factor, high * factor)
            yield nullcontext(), replace(case, spec=case.spec.with_(cell_clip=clip))
    if case.spec.cell == "rnn_relu":
        for corner in (-eps / 2, eps / 2):

            def relu(x: Tensor, corner: float = corner) -> Tensor:
                return torch.where(x > corner * max(1.0, size(x.detach())), x, 0.0)

            yield mock.patch.object(torch, "relu", relu), case


class Tf32Linear(torch.autograd.Function):
    """x W^T, and its derivative, of numbers with 10 bits of mantissa."""

    @staticmethod
    def forward(ctx, x, w, half):
        ctx.save_for_backward(x, w)
        ctx.half = half
        return linear(_tf32(x, half), _tf32(w, half))

    @staticmethod
    def backward(ctx, dy):
        x, w, dy = (_tf32(one, ctx.half) for one in (*ctx.saved_tensors, dy))
        return dy @ w, dy.flatten(0, -2).T @ x.flatten(0, -2), None


def _tf32(x: Tensor, half: int) -> Tensor:
    return ((x.contiguous().view(torch.int32) + half) & ~0x1FFF).view(torch.float32)


# Half of the last bit that is kept, and 0: of cuBLASLt's kernels some round, others cut off. An
# sLSTM of large inputs takes the other of two ways, by each, in its maximum of two gates.
TF32_HALVES = 0x1000, 0


def _tf32_linear(
    x: Tensor, w: Tensor, b: Tensor | None = None, half: int = TF32_HALVES[0]
) -> Tensor:
    if x.dtype != torch.float32:
        return linear(x, w, b)
    y = Tf32Linear.apply(x, w, half)
    return y if b is None else y + b


PARAMETERS = ("dweight", "dbias", "dp_")  # how the names of their gradients begin


@dataclass
class Oracle:
    """The right answer to a case, and by how much a fair answer in its dtype may miss it."""

    exact: Found
    allowed: dict[str, float]

    @classmethod
    def of(cls, case: Case, inputs: Inputs, backend: str = "reference") -> "Oracle":
        """Twice the reference's own error, and a floor for a reference that is exact by chance.

        For the same reason its error is the largest over some orders of summation: an
        honest backend was seen to fail one comparison in 300 against one, none in 30,000 against 5.
        In float64 the oracle is the reference itself: there its error is that in float32, scaled.
        In whose order dx is the sum over all gates it cannot say, as orders are of forward's sums:
        dx of an sLSTM of H 130 and one input, added up one by one, was seen 17 ulp off.
        """
        exact = ask(case, inputs, "reference", torch.float64)
        assert all(value.isfinite().all() for value in exact.values()), "nan leaks into the oracle"
        narrow = torch.float32 if case.dtype == torch.float64 else case.dtype
        eps = torch.finfo(case.dtype).eps
        scale = eps / torch.finfo(narrow).eps
        orders = [*_orders()]
        products = orders[:1]
        if backend in TF32 and case.dtype == torch.float32:
            eps = 2.0**-10
            tf32 = [
                mock.patch.object(reference, "linear", partial(_tf32_linear, half=half))
                for half in TF32_HALVES
            ]
            orders += tf32
            products += tf32  # whose rounding may cross edges that float32's does not
        errors = dict.fromkeys(exact, 0.0)
        ways = [(order, nullcontext(), case) for order in orders]
        ways += ((product, *kink) for product in products for kink in _kinks(case, eps))
        for product, kink, near in ways:
            with product, kink:
                plain = ask(near, inputs, "reference", narrow)
            for name, want in exact.items():
                errors[name] = max(errors[name], distance(plain[name], want))
        # a parameter's gradient is a sum over all steps and rows, whose order is free
        terms = dict.fromkeys(exact, 4.0)
        for name in exact:
            if name.startswith(PARAMETERS):
                terms[name] = max(4.0, 3 * math.sqrt(case.steps * case.batch))
        if "dx" in exact and case.dtype == torch.float64:
            terms["dx"] = max(4.0, math.sqrt(len(case.spec.gates) * case.spec.hidden_size))
        allowed = {
            name: 2 * scale * errors[name] + terms[name] * eps * max(1.0, size(want))
            for name, want in exact.items()
        }
        return cls(exact, allowed)

    def judge(self, found: Found, slack: float = 1.0) -> None:
        assert found.keys() == self.exact.keys()
        wrong = []
        for name, want in self.exact.items():
            error = distance(found[name], want)
            if not error <= slack * self.allowed[name]:
                wrong.append(f"{name}: error {error:.1e}, allowed {self.allowed[name]:.1e}")
        assert not wrong, "; ".join(wrong)


def check(case: Case, backend: str) -> None:
    """No worse than the reference, no padding leaked, the same bits when asked again."""
    if not takes(backend, case.problem):
        return
    inputs = Inputs.of(case)
    found = ask(case, inputs, backend)
    oracle, slack = Oracle.of(case, inputs, backend), SLACK.get(backend, 1.0)
    oracle.judge(found, slack)
    if dispatch.BACKENDS[backend].recomputes and case.problem.grad:
        again = replace(case, spec=case.spec.with_(recompute="gates"))
        oracle.judge(ask(again, inputs, backend), slack)
    if inputs.lengths is not None:
        padding = torch.arange(case.steps)[:, None] >= inputs.lengths
        for name in {"y", "dx"} & found.keys():
            assert not found[name][padding].any(), f"{name} is not 0 past the lengths"
    for name, again in ask(case, inputs, backend).items():
        assert torch.equal(found[name], again), f"{name} differs between two equal calls"


def examples(share: float = 1.0) -> settings:
    """A share of the loaded profile's number of examples."""
    return settings(max_examples=max(1, round(share * settings().max_examples)))


ODD = (1, 2, 3, 5, 7, 8, 13, 16, 17, 18, 33, 64, 130)
CLIP = (-0.4, 0.25)  # bites on both sides, and not the same


@st.composite
def specs(draw: Any, cell: Cell, sizes: tuple[int, ...] = ODD, clip: bool = True) -> Spec:
    hidden = draw(st.sampled_from(sizes))
    mode = draw(st.sampled_from(("linear", "linear", "linear", "skip", "gates")))
    layers = draw(st.sampled_from((1, 2, 3)))
    inputs = {"skip": hidden, "gates": hidden * len(cell.gates)}
    spec = cell.spec(
        inputs.get(mode) or draw(st.sampled_from(sizes)), hidden, num_layers=layers,
        **draw(st.sampled_from(({}, {"bidirectional": True}, {"reverse": True}))),
        bias_mode=draw(st.sampled_from(BIAS_MODES)),
        input_mode=mode,
        dropout=draw(st.sampled_from((0.0, 0.3, 1.0))) if layers > 1 else 0.0,
        cell_clip=CLIP if clip and cell.takes_clip and draw(st.booleans()) else None,
    )  # fmt: skip
    narrower = [size for size in (1, 2, 7, 16, 33) if size < hidden]
    if narrower and not cells._reads_emitted(cell) and draw(st.booleans()):
        spec = spec.with_(proj_size=draw(st.sampled_from(narrower)))
    return spec


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@st.composite
def cases(
    draw: Any, cell: Cell, dtypes: tuple[torch.dtype, ...] = DTYPES, clip: bool = True
) -> Case:
    spec = draw(specs(cell, clip=clip))
    reset = draw(st.sampled_from((None, "some", "all", "first", "last", "never")))
    returned = draw(st.booleans())
    kinds = ("all", "y", "finals", "sum", "states")[: 5 if returned else 4]
    case = Case(
        spec,
        draw(st.sampled_from((torch.float32, *dtypes))),
        steps=draw(st.sampled_from((1, 2, 3, 5, 8, 13, 0))),
        batch=draw(st.sampled_from((1, 2, 3, 5, 7, 17, 0))),
        lengths=draw(st.sampled_from((None, "some", "zeros", "full"))),
        reset=reset,
        states=draw(st.booleans()),
        reset_states=reset is not None and draw(st.booleans()),
        return_states=returned,
        training=spec.dropout > 0 and draw(st.booleans()),
        layout=draw(st.sampled_from(("plain", "batch_first", "strided", "expanded"))),
        needs=draw(st.sampled_from(("all", "some", "x", "params", "none"))),
        cotangents=draw(st.sampled_from(kinds)),
        scale=draw(st.sampled_from((1.0, 30.0))),
        seed=draw(st.integers(0, 2**31)),
    )
    assume(case.steps * spec.chains <= 30)  # for the oracle's time, not for any backend
    return case


def _corners() -> dict[str, Case]:
    """Cases that must not wait for a lucky draw; run with LSTM and GRU alike."""
    ones = cells.lstm.spec(1, 1)
    deep = cells.lstm.spec(3, 4, num_layers=2, bidirectional=True, dropout=0.3)
    plain = cells.lstm.spec(5, 7)
    full = Case(deep, torch.float32, 5, 7, "some", "some", True, True, True, True, "batch_first")
    back = deep.with_(bidirectional=False, reverse=True)
    return {
        "ones": Case(ones, steps=1, batch=1),
        "ones_with_everything": replace(full, spec=ones.with_(num_layers=2), steps=1, batch=1),
        "no_steps": Case(deep, steps=0, states=True, return_states=True),
        "no_steps_no_states": Case(deep, steps=0),
        "no_batch": replace(full, batch=0),
        "no_steps_no_batch": replace(full, steps=0, batch=0),
        "everything": full,
        "everything_float64": replace(full, dtype=torch.float64),
        "everything_bfloat16": replace(full, dtype=torch.bfloat16),
        "reverse": replace(full, spec=back),
        "reverse_float64": replace(full, spec=back, dtype=torch.float64),
        "reverse_without_lengths": replace(full, spec=back, lengths=None, reset="first"),
        "reverse_no_steps": replace(full, spec=back, steps=0),
        "reverse_lengths_zero": replace(full, spec=back, lengths="zeros", reset="all"),
        "gates": replace(full, spec=deep.with_(input_size=16, input_mode="gates")),
        "gates_wide": Case(cells.lstm.spec(800, 200, input_mode="gates"), steps=3, batch=17),
        "all_lengths_zero": replace(full, lengths="zeros"),
        "lengths_without_states": Case(deep, lengths="some", return_states=True),
        "all_reset": replace(full, reset="all", lengths=None),
        "all_reset_no_states": Case(deep, reset="all"),
        "reset_at_start": Case(deep, reset="first", states=True),
        "reset_at_end": Case(deep, reset="last", states=True, reset_states=True),
        "reset_and_lengths": Case(deep, reset="some", lengths="some", states=True, seed=1),
        "all_dropped": Case(deep.with_(dropout=1.0), training=True),
        "inference": replace(full, needs="none"),
        "frozen_weights": replace(full, needs="x"),
        "only_finals": replace(full, cotangents="finals"),
        "only_states": replace(full, cotangents="states"),
        "from_sum": replace(full, cotangents="sum"),
        "saturated": replace(full, scale=100.0),
        "one_step_wide": Case(cells.lstm.spec(64, 256), steps=1, batch=1),
        "large_matrix": Case(cells.lstm.spec(130, 300), steps=3, batch=17, states=True),
        "many_rows": Case(plain, steps=3, batch=301, lengths="some"),
        "many_steps": Case(plain, steps=400, batch=2, reset="some"),
    }


CORNERS = _corners()


def with_cell(case: Case, cell: Cell) -> Case:
    """The same case for another cell."""
    old, size = case.spec, case.spec.input_size
    if old.input_mode == "gates":
        size = old.hidden_size * len(cell.gates)
    spec = cell.spec(
        size, old.hidden_size, input_mode=old.input_mode, num_layers=old.num_layers,
        dropout=old.dropout,
        bidirectional=old.bidirectional, bias_mode=old.bias_mode, reverse=old.reverse,
    )  # fmt: skip
    return replace(case, spec=spec)


def thinned(cases, every):
    """Cases of which every so manieth runs in `make test`, the others in `make test-all` alone."""
    found = []
    for place, case in enumerate(cases):
        values, name = (case,), None
        if isinstance(case, type(pytest.param())):
            values, name = case.values, case.id
        elif isinstance(case, tuple):
            values = case
        marks = [pytest.mark.slow] if place % every else []
        found.append(pytest.param(*values, id=name, marks=marks))
    return found
