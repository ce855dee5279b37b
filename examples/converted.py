"""A model of a library beside a copy that runs our layers: outputs, gradients and times."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from compare import compare
from torch import Tensor, nn

import openrnn


def converted(model: nn.Module, **options: Any) -> dict[str, nn.Module]:
    """The model, and a copy whose recurrent layers are ours; prints what was converted."""
    twin = copy.deepcopy(model)
    openrnn.convert(twin, **options)
    return {"torch.nn": model, "openrnn": twin}


def passes(
    title: str,
    ways: dict[str, nn.Module],
    run: Callable[[nn.Module], Any],
    loss: Callable[[nn.Module], Tensor],
    within: float = 1e-5,
    **options: Any,
) -> None:
    """Compares models that mean the same, without gradients and in a training step.

    Args:
        ways: by name, the usual one first. Gradients of parameters that all have are compared.
        run: what a model gives; called in eval mode, without gradients.
        loss: what it is trained by; called in train mode, each time from the same seed.
        within, options: as in `compare`; gradients may differ by ten times as much.
    """
    shared = set.intersection(*({name for name, _ in m.named_parameters()} for m in ways.values()))

    def forward(model: nn.Module) -> Any:
        model.eval()
        with torch.no_grad():
            return run(model)

    def step(model: nn.Module) -> dict[str, Tensor]:
        model.train()
        model.zero_grad()
        torch.manual_seed(0)
        found = loss(model)
        found.backward()
        every = sorted(model.named_parameters())
        grads = {name: p.grad for name, p in every if name in shared and p.grad is not None}
        return {"loss": found.detach(), **grads}

    # a step of every model, as it moves averages of batch norms; each gradient in parts of its
    # largest number, or of a tenth of the largest of all: some are 0 but for rounding
    first, *_ = [step(model) for model in ways.values()]
    sizes = {name: grad.abs().max() for name, grad in first.items()}
    least = max(size for name, size in sizes.items() if name != "loss") / 10

    def scaled(model: nn.Module) -> dict[str, Tensor]:
        return {name: grad / sizes[name].clamp(min=least) for name, grad in step(model).items()}

    rows = ("forward", forward, within), ("loss and gradients", scaled, 10 * within)
    for what, call, bound in rows:
        calls = {name: _bound(call, model) for name, model in ways.items()}
        compare(f"{title}, {what}", calls, within=bound, **options)


def _bound(call: Callable[[nn.Module], Any], model: nn.Module) -> Callable[[], Any]:
    return lambda: call(model)
