"""How the trial of cuDNN's algorithms chooses, on times made up; none of this needs a GPU."""

from contextlib import nullcontext
from itertools import cycle

import pytest
import torch

from openrnn import cells
from openrnn.backends.cudnn import algorithms, trial
from openrnn.spec import Problem

LSTM = cells.lstm.spec(64, 64)


class Clock:
    """A runner whose times are given; counts how often it ran."""

    def __init__(self, *times):
        self.times, self.runs = cycle(times), 0

    def __call__(self):
        self.runs += 1
        return next(self.times)


def test_the_least_time_counts():
    """One disturbed run does not decide: it was slow once, and its others are faster."""
    runners = {"standard": Clock(2.0), "persist_static": Clock(2.9, 1.5)}
    times = trial.race(runners)
    assert times == {"standard": 2.0, "persist_static": 1.5}
    assert trial.choose(times) == "persist_static"


def test_who_is_far_behind_runs_once():
    runners = {"standard": Clock(10.0), "persist_static": Clock(1.0), "persist_dynamic": Clock(1.3)}
    trial.race(runners)
    assert [runner.runs for runner in runners.values()] == [1, trial.ROUNDS, trial.ROUNDS]


def test_who_is_close_runs_more_often():
    runners = {"standard": Clock(1.4), "persist_static": Clock(1.0), "persist_dynamic": Clock(1.05)}
    trial.race(runners)
    runs = [runner.runs for runner in runners.values()]
    assert runs == [trial.ROUNDS, trial.MOST_ROUNDS, trial.MOST_ROUNDS]


def test_long_runs_are_not_repeated_for_long():
    runners = {
        "standard": Clock(trial.MAX_MILLISECONDS),
        "persist_static": Clock(trial.MAX_MILLISECONDS * 1.01),
    }
    trial.race(runners)
    assert [runner.runs for runner in runners.values()] == [1, 1]
    assert trial.race({}) == {}


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({"standard": 1.0, "persist_static": 0.98}, "standard"),
        ({"standard": 1.0, "persist_static": 0.96}, "persist_static"),
        ({"standard": 1.0, "persist_dynamic": 0.81}, "standard"),
        ({"standard": 1.0, "persist_dynamic": 0.79}, "persist_dynamic"),
        ({"standard": 1.0, "persist_static": 0.5, "persist_dynamic": 0.42}, "persist_static"),
        ({"standard": 1.0, "persist_static": 0.5, "persist_dynamic": 0.40}, "persist_dynamic"),
        ({"persist_static": 1.0}, "persist_static"),
        ({}, "standard"),
    ],
)
def test_another_than_the_standard_one_must_gain_something(times, chosen):
    assert trial.choose(times) == chosen


@pytest.mark.parametrize(
    ("steps", "batch", "timed"),
    [(10, 1, 10), (300, 8, 300), (65_535, 8, 512), (500, 4000, 65), (500, 8000, 64)],
)
def test_as_many_steps_are_timed_as_memory_and_patience_bear(steps, batch, timed):
    assert trial.timed_steps(LSTM, steps, batch) == timed


def fake(monkeypatch, per_call, per_step, wrong=()):
    """Algorithms that cost so many milliseconds a call and a step."""
    timed = []
    monkeypatch.setattr(trial, "_draw", lambda spec, like, steps: trial.Given(*[like[:steps]] * 3))

    def answer(spec, given, name, grad):
        return [torch.full((2,), 9.0 if name in wrong else 1.0)]

    def runner(name, given):
        steps = given.x.shape[0]
        timed.append((steps, name))
        return lambda: max(per_call[name], per_step[name] * steps)

    monkeypatch.setattr(trial, "answer", answer)
    monkeypatch.setattr(trial, "_plan", lambda spec, x, name, grad: nullcontext(name))
    monkeypatch.setattr(trial, "_Runner", runner)
    return timed


NAMES = ["standard", "persist_static", "persist_static_small_h"]
CALL = {"standard": 0.10, "persist_static": 0.08, "persist_static_small_h": 0.09}
STEP = {"standard": 0.010, "persist_static": 0.0012, "persist_static_small_h": 0.0005}


@pytest.mark.parametrize(
    ("steps", "chosen"), [(1, "persist_static"), (64, "persist_static"), (500, NAMES[2])]
)
def test_a_long_call_is_judged_by_its_steps(monkeypatch, steps, chosen):
    """The row `nam-long` of the benchmark: at 64 steps the launch hides which one is fast."""
    timed = fake(monkeypatch, CALL, STEP)
    x = torch.zeros(steps, 4, 64)
    assert trial.fastest(LSTM, Problem(LSTM, torch.float16, "cuda"), x, NAMES) == chosen
    short = [(min(steps, trial.CHECKED), name) for name in NAMES]
    long = [(500, name) for name in NAMES[1:]]  # the slow one not at all
    assert timed == (short + long if steps > trial.CHECKED else short)


def test_times_of_short_and_long_calls_compare(monkeypatch):
    """A call of 500 steps takes longer than one of 64; a step of it does not."""
    fake(monkeypatch, CALL, STEP)
    problem, x = Problem(LSTM, torch.float16, "cuda"), torch.zeros(500, 4, 64)
    found = trial.survey(LSTM, problem, x, NAMES)
    assert found == {name: pytest.approx(STEP[name]) for name in NAMES}


def test_wrong_numbers_are_not_timed(monkeypatch):
    timed = fake(monkeypatch, CALL, STEP, wrong={"persist_static_small_h"})
    problem, x = Problem(LSTM, torch.float16, "cuda"), torch.zeros(500, 4, 64)
    found = trial.survey(LSTM, problem, x, NAMES)
    assert found["persist_static_small_h"] == "wrong numbers"
    assert "persist_static_small_h" not in {name for _, name in timed}
    assert trial.fastest(LSTM, problem, x, NAMES) == "persist_static"


def test_size_classes():
    def classes(steps, batch):
        return algorithms._classes(torch.empty(1).expand(steps, batch, 1))

    assert classes(17, 5) == classes(32, 8) != classes(33, 8)
    assert classes(17, 9) != classes(17, 8)
    assert classes(513, 1) == classes(65_535, 1) == classes(512, 1) != classes(256, 1)
