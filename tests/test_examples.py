"""The examples do what they say."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


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


def test_the_policy_learns_and_a_loop_gives_the_same(ppo, capsys):
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
    assert ppo.compare(policy, rows, state) < 1e-5
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
