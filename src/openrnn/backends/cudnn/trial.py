"""One trial of cuDNN's algorithms on random numbers: whose are right, and which is fastest."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

from openrnn.backends.cudnn import run, weights
from openrnn.errors import LibraryError
from openrnn.native.cudnn.descriptors import TIME_MAJOR, Kind
from openrnn.native.cudnn.handles import current
from openrnn.params import size
from openrnn.spec import Problem, Spec, precision_of

# cuDNN's persistent kernels approximate tanh and the sigmoid, whatever the products' precision:
# in float32 by up to 1.3e-5 of the largest value in the ieee rows of
# benchmarks/log/cudnn.json; twice that is still less than tf32 products miss by
ACTIVATIONS = 2.0**-15
CHECKED = 64  # steps at most whose numbers are compared
TIMED = 512  # steps at most that are timed: beyond them a call costs what its steps cost
NUMBERS = 2**24  # states that a timed call computes at most, where it has more than CHECKED steps
SPAN = 1.0  # milliseconds that one timing lasts at least
ROUNDS = 5  # each algorithm in turn, so that what disturbs the machine disturbs all of them
MOST_ROUNDS = 15  # where the fastest are close
# after which no further round begins: what runs long is disturbed less
MAX_MILLISECONDS = 200.0
CLOSE, HOPELESS = 1.1, 1.5  # times the least: run more often, run no more
NEAR = 3.0  # times the least of a short call: worth a long one
# what an algorithm's time may be, as a share of the standard one's, to be preferred to it; the
# dynamic one compiles for every new B, so it must be worth that
GAIN = {"persist_dynamic": 0.8}
PLAIN_GAIN = 0.97


class Given(NamedTuple):
    """The numbers of a trial, in one dtype."""

    x: Tensor  # (T, B, I)
    dy: Tensor  # (T, B, D*O)
    flat: Tensor  # the weight space

    def to(self, dtype: torch.dtype) -> "Given":
        return Given(*(tensor.to(dtype) for tensor in self))


def _draw(spec: Spec, like: Tensor, steps: int) -> Given:
    dice = torch.Generator(like.device).manual_seed(0)
    batch = like.shape[1]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=dice, device=like.device, dtype=like.dtype)

    flat = normal(size(spec)) / math.sqrt(spec.hidden_size)
    x = normal(steps, batch, spec.input_size)
    return Given(x, normal(steps, batch, spec.directions * spec.output_size), flat)


def answer(
    spec: Spec, given: Given, algorithm: str, grad: bool, build: bool = True
) -> list[Tensor]:
    """Outputs, and with `grad` all gradients, by one algorithm; from zero states.

    Without `build` the dynamic one is not compiled, which shows what cuDNN does then.
    """
    with _plan(spec, given.x, algorithm, grad, build) as plan:
        return _run(plan, given)


def _plan(spec: Spec, x: Tensor, algorithm: str, grad: bool, build: bool = True) -> run.CallPlan:
    handle = current(x.device.index)
    build_for = (x.device.index, x.shape[1]) if algorithm == "persist_dynamic" and build else None
    math = run.math_of(x.dtype, precision_of(spec, x.dtype, "cuda"))
    kind = Kind(spec, x.dtype, math, algorithm, False, build=build_for)
    return run.CallPlan(handle, kind, TIME_MAJOR, x.shape[0], x.shape[1], training=grad)


def _run(plan: run.CallPlan, given: Given) -> list[Tensor]:
    x = given.x
    space = (plan.weights, given.flat.data_ptr())
    y, finals, reserve = run.forward(plan, space, x, [])
    if reserve is None:
        return [y, *finals]
    total = weights.gradients(plan.kind.spec, x)
    ends: list[Tensor | None] = [None] * len(finals)
    passed = run.Passed(x, y, [], reserve)
    dx, _ = run.backward(plan, space, passed, None, given.dy, ends, [], total)
    return [y, *finals, dx, total]


def wrong(found: list[Tensor], exact: list[Tensor], fair: list[Tensor]) -> bool:
    """Whether any tensor misses the exact one by more than thrice the standard algorithm.

    In float32 it may miss by what torch.nn's own choice of algorithm misses: ACTIVATIONS.
    """
    for have, want, usual in zip(found, exact, fair):
        scale = want.abs().max().item()
        allowed = 3 * (usual.double() - want).abs().max().item()
        # in float64 the standard algorithm is the exact one: what sums of many terms may differ by
        terms = 64.0 if have.dtype == torch.float64 else 4.0
        allowed += terms * torch.finfo(have.dtype).eps * scale
        if have.dtype == torch.float32:
            allowed += ACTIVATIONS * scale
        # nan compares false
        if not (have.double() - want).abs().max().item() <= allowed:
            return True
    return False


def race(runners: dict[str, Callable[[], float]]) -> dict[str, float]:
    """The least time of each runner, which only what is slow about it keeps from being less.

    Those far behind are run once; while the fastest are close, they are run on.
    """
    least = {name: runner() for name, runner in runners.items()}
    spent = sum(least.values())
    for turn in range(1, MOST_ROUNDS):
        reach = min(least.values(), default=0.0) * (HOPELESS if turn < ROUNDS else CLOSE)
        racing = [name for name, time in least.items() if time <= reach]
        if len(racing) < 2 or spent > MAX_MILLISECONDS:
            break
        for name in racing:
            time = runners[name]()
            least[name] = min(least[name], time)
            spent += max(time, SPAN)
    return least


def choose(times: dict[str, float]) -> str:
    """The fastest by its times; the standard one unless another gains something."""
    fair = {name: time / GAIN.get(name, PLAIN_GAIN) for name, time in times.items()}
    if "standard" in times:
        fair["standard"] = times["standard"]
    return min(fair, key=lambda name: fair[name], default="standard")


def timed_steps(spec: Spec, steps: int, batch: int) -> int:
    """How many steps of such a call are timed."""
    room = NUMBERS // (batch * spec.chains * spec.hidden_size)
    return min(steps, TIMED, max(CHECKED, room))


class _Runner:
    """Times one algorithm: each call gives milliseconds of a run, of some in a row."""

    def __init__(self, plan: run.CallPlan, given: Given) -> None:
        self._plan, self._given, self._count = plan, given, 1
        self._elapsed()  # the first is slower
        self._count = max(1, min(50, math.ceil(SPAN / self._elapsed())))

    def _elapsed(self) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(self._count):
            _run(self._plan, self._given)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def __call__(self) -> float:
        return self._elapsed() / self._count


def _times(spec: Spec, given: Given, names: list[str], grad: bool) -> dict[str, float]:
    """Milliseconds a step."""
    with ExitStack() as open_plans:
        runners: dict[str, Callable[[], float]] = {
            name: _Runner(open_plans.enter_context(_plan(spec, given.x, name, grad)), given)
            for name in names
        }
        return {name: ms / given.x.shape[0] for name, ms in race(runners).items()}


def survey(spec: Spec, problem: Problem, x: Tensor, names: list[str]) -> dict[str, float | str]:
    """For each algorithm its milliseconds a step, or why it is out of the question."""
    steps, batch = x.shape[0], x.shape[1]
    found: dict[str, float | str] = {}
    with torch.inference_mode(False), torch.no_grad():
        given = _draw(spec, x, min(steps, CHECKED))
        exact = answer(spec, given.to(torch.float64), "standard", problem.grad)
        fair = answer(spec, given, "standard", problem.grad)
        for name in names:
            try:
                if wrong(answer(spec, given, name, problem.grad), exact, fair):
                    found[name] = "wrong numbers"
            except LibraryError as error:
                found[name] = str(error)
        right = [name for name in names if name not in found]
        times = _times(spec, given, right, problem.grad)
        found |= times
        # a short call may be bound by its launches, which tells nothing of a long one
        longer = timed_steps(spec, steps, batch)
        near = [name for name in right if times[name] <= NEAR * min(times.values())]
        if longer > CHECKED and len(near) > 1:
            found |= _times(spec, _draw(spec, x, longer), near, problem.grad)
    return found


def fastest(spec: Spec, problem: Problem, x: Tensor, names: list[str]) -> str:
    """The algorithm for calls like this one, whose numbers are right."""
    try:
        found = survey(spec, problem, x, names)
    except torch.cuda.OutOfMemoryError:
        return "standard"
    return choose({name: ms for name, ms in found.items() if isinstance(ms, float)})
