"""What the tests of second derivatives share: the cells that have them, and what they compute."""

import torch
from cases import CELLS

from openrnn.dispatch import BACKENDS

# those whose derivative is a cell that kernels run
KEYS = [key for key, cell in CELLS.items() if not cell.dependent_product]


def tangents_run(monkeypatch, backend):
    """The dtypes in which the backend runs tangent cells from now on, as it runs them."""
    found, forward = [], BACKENDS[backend].forward

    def noted(call):
        if ".tangent" in call.problem.spec.cell:
            found.append(call.problem.dtype)
        return forward(call)

    monkeypatch.setattr(BACKENDS[backend], "forward", noted)
    return found


def mixed(tensors, dice):
    """A number that all entries of all tensors are in, not linearly; drawn on the CPU."""
    total = 0.0
    for tensor in tensors:
        weights = torch.randn(tensor.shape, generator=dice).to(tensor)
        total = total + (tensor * weights).sum() + (tensor**2).sum()
    return total


def twice(call, leaves, wanted):
    """The gradients of a call, and the gradients of what is made of them.

    Args:
        call: returns the results of the call, flat.
        leaves: whose second gradients are returned.
        wanted: whose first gradients are.
    """
    dice = torch.Generator().manual_seed(1)
    first = torch.autograd.grad(mixed(call(), dice), wanted, create_graph=True)
    # each weighs the same, whatever its size
    scaled = [one / one.detach().norm().clamp(min=1e-30) for one in first]
    total = mixed(scaled, dice)
    second = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return [*first, *second]
