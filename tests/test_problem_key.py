"""A layer and `ops.forward` ask the same of the backends."""

import itertools
from dataclasses import replace

import pytest
import torch

import openrnn
from openrnn import dispatch, functional, ops, problem_key

CUDA = (9, 0), 132


class Asked(Exception):
    """The problem of a call."""


@pytest.fixture
def asked(monkeypatch):
    """The problem that a call puts to the backends of an H200, on which nothing is run."""

    def select(problem, name):
        raise Asked(replace(problem, device="cuda"), name)

    def clear():
        for kept in (functional.choose, problem_key.problem_of, dispatch._absent, dispatch.select):
            if hasattr(kept, "cache_clear"):
                kept.cache_clear()

    class Seen:
        """A tensor of the CPU as one of CUDA looks to `size_class`."""

        def __init__(self, x):
            self.shape, self.dim, self.is_cuda = x.shape, x.dim, True

    real, real_select = problem_key.size_class, dispatch.select
    clear()
    monkeypatch.setattr(dispatch, "select", select)
    monkeypatch.setattr(dispatch, "device_info", lambda device: CUDA)
    monkeypatch.setattr(problem_key, "size_class", lambda x: real(Seen(x)))
    for backend in dispatch.BACKENDS.values():
        monkeypatch.setattr(backend, "absent", lambda: None)

    def problem(call):
        with pytest.raises(Asked) as caught:
            call()
        return caught.value.args

    yield problem, real_select
    monkeypatch.undo()
    clear()


GRID = list(
    itertools.product(
        ("LSTM", "GRU"),
        (64, 1024),
        (1, 200, 256, 300),
        (torch.bfloat16, torch.float16, torch.float32),
        (False, True),
    )
)
GRID.append(("RNN", 2560, 100, torch.float16, True))  # of a region in which cuDNN is faster


def test_a_layer_and_the_operators_choose_alike(asked):
    problem, select = asked
    chosen = set()
    made = {}
    for kind, hidden, batch, dtype, grad in GRID:
        key = kind, hidden, dtype
        if key not in made:
            with torch.device("meta"):
                options = {"nonlinearity": "relu"} if kind == "RNN" else {}
                layer = getattr(openrnn, kind)(8, hidden, dtype=dtype, **options)
            made[key] = layer.to_empty(device="cpu")
        layer = made[key]
        x = torch.zeros(2, batch, 8, dtype=dtype)
        weights = [weight.detach() for weight in layer.weights()]
        with torch.set_grad_enabled(grad):
            ours = problem(lambda: layer(x))  # noqa: B023  # called at once
        theirs = problem(
            lambda: ops.forward(x, weights, layer.spec, is_training=grad)  # noqa: B023
        )
        assert ours == theirs
        assert ours[0].batch == 1 << (batch - 1).bit_length()
        chosen.add(select(*ours))
    assert chosen == {"fused", "cudnn"}


@pytest.mark.parametrize("more", [{}, {"lengths": True}, {"reset": True}, {"return_states": True}])
def test_so_they_do_with_masks_and_dropout(asked, more):
    problem, _ = asked
    layer = openrnn.GRU(8, 8, 2, dropout=0.5)
    x, given = torch.zeros(4, 3, 8), dict(more)
    if "lengths" in more:
        given["lengths"] = torch.tensor([4, 0, 2])
    if "reset" in more:
        given["reset"] = torch.zeros(4, 3)
    weights = [weight.detach() for weight in layer.weights()]
    assert problem(lambda: layer(x, **given)) == problem(
        lambda: ops.forward(x, weights, layer.spec, **given)
    )
