"""The examples do what they say."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import openrnn

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
LISTS = sorted((EXAMPLES / "requirements").glob("*"))


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    """Examples import `compare` from their own folder."""
    monkeypatch.syspath_prepend(EXAMPLES)


def example(name):
    place = EXAMPLES / f"{name}.py"
    spec = importlib.util.spec_from_file_location(place.stem, place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return module


@pytest.fixture
def ppo():
    return example("recurrent_ppo_reset")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is here")
def test_a_c_program_runs_an_exported_layer(capfd, monkeypatch):
    """And ends with 1 where it computes anything else than plain loops."""
    monkeypatch.setattr(sys, "argv", ["native.py", "--units", "18"])
    example("native").main()
    out = capfd.readouterr().out
    assert out.count("million samples a second") == 3
    assert "largest difference" in out


def test_the_policy_learns_and_a_loop_gives_the_same(ppo, capsys, monkeypatch):
    policy, rows, state, right = ppo.train(45)
    assert right > 0.9  # 0.33 by chance
    assert rows["starts"][1:].any()
    assert state[0].any()
    weights = list(policy.parameters())
    each = [
        torch.autograd.grad(ppo.loss(policy, rows, state, run), weights)
        for run in (ppo.walk, ppo.at_once)
    ]
    torch.testing.assert_close(*each, rtol=1e-4, atol=1e-6)
    monkeypatch.setattr(ppo, "compare", partial(ppo.compare, seconds=0, repeats=(1, 1)))
    assert ppo.compare_ways(policy, rows, state).difference < 1e-5
    assert "times as fast" in capsys.readouterr().out


def test_episodes_end_with_their_question(ppo):
    world = ppo.Recall()
    for _ in range(30):
        seen, start = world.look()
        assert torch.equal(seen[:, :-1].any(1), start)
        asked = seen[:, -1].bool()
        reward, over = world.act(world.cue.clone())
        assert torch.equal(asked, over)
        assert torch.equal(reward.bool(), over)
        assert torch.equal(world.look()[1], over)


def test_returns_stop_at_the_end_of_an_episode(ppo):
    rows = {
        "reward": torch.tensor([0.0, 1.0, 0.0, 0.0])[:, None],
        "over": torch.tensor([False, True, False, False])[:, None],
        "value": torch.tensor([9.0, 9.0, 9.0, 2.0])[:, None],
    }
    assert ppo.returns(rows, discount=0.5).flatten().tolist() == [0.5, 1.0, 0.5, 1.0]


def ways(*results):
    return {f"way {k}": partial(lambda found: found, found) for k, found in enumerate(results)}


def test_ways_are_compared_and_timed(capsys):
    compare = example("compare").compare
    x = torch.tensor([1.0, 200.0])
    found = compare("sum", ways([x, {"a": x}], (x, {"a": x + 1e-3})), seconds=0, repeats=(2, 3))
    assert found.difference == pytest.approx(5e-6, rel=0.05)  # of 200
    assert set(found.speed) == {"way 0", "way 1"}
    assert found.speed["way 0"] == 1
    out = capsys.readouterr().out
    assert "medians of 2 runs" in out
    assert "differ by" in out


@pytest.mark.parametrize(
    "other", [torch.tensor([1.0, 3.0]), torch.tensor([1.0, float("nan")]), torch.ones(3), None]
)
def test_other_results_end_an_example(other):
    compare = example("compare").compare
    with pytest.raises(SystemExit, match="results differ"):
        compare("sum", ways(torch.tensor([1.0, 2.0]), other), seconds=0, repeats=(1, 1))


def test_results_are_compared_as_they_were():
    """Steppers and graphs give the same tensor each time."""
    y = torch.zeros(1)
    with pytest.raises(SystemExit):
        example("compare").compare("again", {"a": lambda: y.add_(1), "b": lambda: y.add_(1)})


@pytest.mark.parametrize(
    "file", sorted((EXAMPLES / "requirements").glob("*")), ids=lambda f: f.stem
)
def test_packages_of_examples_are_pinned(file):
    assert file.stem in NAMES
    assert file.suffix == ".txt"
    for line in file.read_text().splitlines():
        assert re.fullmatch(r"[\w.-]+==[\w.]+( *; .+)?|#.*", line), line
        assert not line.startswith("torch=="), "examples use the torch of .venv"


@pytest.mark.parametrize("name", NAMES)
def test_an_example_says_what_it_is(name):
    doc = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))
    assert doc.splitlines()[0].endswith(".")


def test_an_example_is_skipped_where_its_packages_are_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    run = example("run")
    (tmp_path / "lonely.txt").write_text("no-such-package==1.0\n")
    python_for = partial(run.python_for, requirements=tmp_path, place=tmp_path)
    with pytest.raises(RuntimeError, match=r"No matching distribution .* no-such-package==1\.0"):
        python_for("lonely")
    assert python_for("other") == sys.executable
    monkeypatch.setattr(run, "names", lambda: ["lonely"])
    monkeypatch.setattr(run, "python_for", python_for)
    assert run.main([]) == 0
    assert "skipped: its packages cannot be installed: No matching" in capsys.readouterr().out
    assert run.main(["lonely"]) == 1
    assert run.main(["unknown"]) == 2


def test_an_example_sees_torch_and_packages_of_its_own(tmp_path):
    """And installs them once."""
    run = example("run")
    (tmp_path / "some.txt").write_text("# nothing\n")
    python = run.python_for("some", tmp_path, tmp_path)
    program = (
        "import sys; from importlib.util import find_spec as find; "
        "print(sys.prefix, find('torch').origin, find('openrnn').origin)"
    )
    found = subprocess.run([python, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert found.stdout.split() == [str(tmp_path / "some"), torch.__file__, openrnn.__file__]
    (tmp_path / "some" / "mark").touch()
    run.python_for("some", tmp_path, tmp_path)
    assert (tmp_path / "some" / "mark").exists()
    (tmp_path / "some.txt").write_text("# other\n")
    run.python_for("some", tmp_path, tmp_path)
    assert not (tmp_path / "some" / "mark").exists()


def test_a_failed_example_fails_the_run(tmp_path, monkeypatch, capfd):
    run = example("run")
    (tmp_path / "bad.py").write_text("raise SystemExit('it is wrong')")
    monkeypatch.setattr(run, "HERE", tmp_path)
    assert run.main([]) == 1
    assert "bad  failed with status 1" in capfd.readouterr().out
