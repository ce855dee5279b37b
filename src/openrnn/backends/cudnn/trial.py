"""One trial of cuDNN's algorithms on random numbers: whose are right, and which is fastest."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from openrnn.backends.cudnn import run, weights
from openrnn.errors import LibraryError
from openrnn.native.cudnn.descriptors import TIME_MAJOR, Kind
from openrnn.native.cudnn.handles import current
from openrnn.params import size
from openrnn.spec import Problem, Spec

STEPS = 64  # at most: time grows with T alike for all
REPEATS = 15
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


def _draw(spec: Spec, like: Tensor) -> Given:
    dice = torch.Generator(like.device).manual_seed(0)
    steps, batch = min(like.shape[0], STEPS), like.shape[1]

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
    x = given.x
    handle = current(x.device.index)
    place = (x.device.index, x.shape[1]) if algorithm == "persist_dynamic" and build else None
    kind = Kind(spec, x.dtype, run.math_of(spec, x.dtype), algorithm, False, build=place)
    space = (given.flat.numel() * given.flat.element_size(), given.flat.data_ptr())
    with run.Plan(handle, kind, TIME_MAJOR, x.shape[0], x.shape[1], training=grad) as plan:
        y, finals, reserve = run.forward(plan, space, x, [])
        if reserve is None:
            return [y, *finals]
        total = weights.gradients(spec, x)
        ends: list[Tensor | None] = [None] * len(finals)
        dx, _ = run.backward(plan, space, x, y, [], None, reserve, given.dy, ends, [], total)
    return [y, *finals, dx, total]


def wrong(found: list[Tensor], exact: list[Tensor], fair: list[Tensor]) -> bool:
    """Whether any tensor misses the exact one by more than thrice the standard algorithm."""
    for have, want, usual in zip(found, exact, fair):
        scale = want.abs().max().item()
        allowed = 3 * (usual.double() - want).abs().max().item()
        # in float64 the standard algorithm is the exact one: what sums of many terms may differ by
        terms = 64.0 if have.dtype == torch.float64 else 4.0
        allowed += terms * torch.finfo(have.dtype).eps * scale
        # nan compares false
        if not (have.double() - want).abs().max().item() <= allowed:
            return True
    return False


def _time(work: Callable[[], object]) -> float:
    """Milliseconds on the device, the median of some runs."""
    times: list[float] = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[REPEATS // 2]


def survey(spec: Spec, problem: Problem, x: Tensor, names: list[str]) -> dict[str, float | str]:
    """For each algorithm its milliseconds, or why it is out of the question."""
    with torch.inference_mode(False), torch.no_grad():
        given = _draw(spec, x)
        exact = answer(spec, given.to(torch.float64), "standard", problem.grad)
        fair = answer(spec, given, "standard", problem.grad)
        found: dict[str, float | str] = {}
        for name in names:
            try:
                numbers = answer(spec, given, name, problem.grad)
                if wrong(numbers, exact, fair):
                    found[name] = "wrong numbers"
                else:
                    found[name] = _time(lambda: answer(spec, given, name, problem.grad))  # noqa: B023
            except LibraryError as error:
                found[name] = str(error)
    return found


def fastest(spec: Spec, problem: Problem, x: Tensor, names: list[str]) -> str:
    """The fastest algorithm with right numbers; the standard one unless another gains something."""
    try:
        found = survey(spec, problem, x, names)
    except torch.cuda.OutOfMemoryError:
        return "standard"
    times = {
        name: ms / GAIN.get(name, PLAIN_GAIN) for name, ms in found.items() if isinstance(ms, float)
    }
    if "standard" in times:
        times["standard"] *= PLAIN_GAIN
    return min(times, key=lambda name: times[name], default="standard")
