"""Two processes train one model, by DistributedDataParallel and by FSDP2, as one process does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RANKS, WAYS, Tagger, train

# slow: two processes that import all; test_module_life.py wraps layers in one process
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo here"
    ),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The model, its losses and gradients in one process; what two found, by way."""
    torch.manual_seed(0)
    alone, place = Tagger(), tmp_path_factory.mktemp("ranks")
    torch.save(alone.state_dict(), place / "start")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment["OMP_NUM_THREADS"] = "1"
    script = str(Path(__file__).with_name("ranks.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", script, str(rank), str(place)], env=environment
        )
        for rank in range(RANKS)
    ]
    try:
        losses, grads = train(alone)
        assert [rank.wait(900) for rank in ranks] == [0] * RANKS
    finally:
        for rank in ranks:
            rank.kill()
    return alone, losses, grads, {way: torch.load(place / way) for way in WAYS}


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_as_one(trained, way):
    """Losses, gradients and weights; the state dict of both is that of the model alone."""
    alone, losses, grads, every = trained
    found = every[way]
    torch.testing.assert_close(found["losses"], losses)
    assert found["grads"].keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(found["grads"][name], grad)
    back = Tagger()
    assert list(found["weights"]) == list(alone.state_dict())
    back.load_state_dict(found["weights"])
    for name, weight in alone.state_dict().items():
        torch.testing.assert_close(back.state_dict()[name], weight)
