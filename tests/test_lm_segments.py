"""Segments between resets as rows of their own: the same numbers as resets inside."""

import pytest
import torch

import openrnn
from openrnn.lm.segments import apart


@pytest.mark.parametrize("chance", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_same_as_resets(chance, given, seed):
    torch.manual_seed(seed)
    lstm = openrnn.LSTM(3, 5, 2, dtype=torch.float64)
    x = torch.randn(7, 4, 3, dtype=torch.float64, requires_grad=True)
    reset = torch.rand(7, 4) < chance
    state = tuple(torch.randn(2, 4, 5).double().requires_grad_() for _ in range(2))
    inputs = [x, *(state if given else ()), *lstm.parameters()]
    found = []
    for way in (
        lambda: lstm(x, state if given else None, reset=reset),
        lambda: apart(
            lambda x, state, lengths: lstm(x, state, lengths=lengths), x,
            state if given else None, reset,
        ),
    ):  # fmt: skip
        y, final = way()
        total = y.sum() + sum(part.square().sum() for part in final)
        grads = torch.autograd.grad(total, inputs, allow_unused=True)
        found.append([y, *final, *(g for g in grads if g is not None)])
    for have, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)
