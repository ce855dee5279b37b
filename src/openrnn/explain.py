"""Which backend runs a module, a spec or a problem, and why each other one does not."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from openrnn import dispatch
from openrnn.dispatch import Table
from openrnn.spec import Problem, Spec

if TYPE_CHECKING:
    from openrnn.nn import Layer


def explain(
    what: "Layer | Spec | Problem",
    x: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    capability: tuple[int, int] | None = None,
    grad: bool | None = None,
    training: bool | None = None,
    lengths: bool = False,
    reset: bool = False,
    return_states: bool = False,
    transform: bool = False,
    backend: str | None = None,
    quiet: bool = False,
) -> Table:
    """Prints and returns every backend's answer; runs nothing.

    Args:
        what: a layer, a spec, or a whole problem.
        x: an example input, from which sizes, dtype and device are taken.
        dtype, device: by default those of x, then of the layer's parameters, then float32 and cpu.
        capability: compute capability to suppose, such as (9, 0); by default the device's own.
        grad: gradients are wanted; by default as torch's grad mode has it.
        training: dropout is on; by default the layer's mode.
        lengths, reset, return_states, transform: what the call would pass.
        backend: the only one to ask; by default the layer's own choice, or all.
        quiet: do not print.

    Example:
        >>> import openrnn
        >>> table = openrnn.explain(openrnn.cells.gru_reset_before.spec(8, 16), quiet=True)
        >>> table.chosen
        'reference'
    """
    if isinstance(what, Problem):
        problem, name = what, backend or "auto"
    else:
        layer = None if isinstance(what, Spec) else what
        spec = what if isinstance(what, Spec) else what.spec
        like = x if x is not None else (next(layer.parameters(), None) if layer else None)
        where = torch.device(device or (like.device if like is not None else "cpu"))
        kind = dtype or (like.dtype if like is not None else torch.float32)
        if where.type == "cuda" and capability is None and torch.cuda.is_available():
            capability = torch.cuda.get_device_capability(where)
        wants_grad = torch.is_grad_enabled() if grad is None else grad
        trains = (layer.training if layer else False) if training is None else training
        steps, batch = _sizes(x, bool(layer and layer.batch_first))
        name = backend or (layer.backend if layer else "auto")
        problem = Problem(
            spec, kind, where.type, capability, wants_grad, trains, lengths, reset, return_states,
            transform, steps, batch,
        )  # fmt: skip
    table = dispatch.explain(problem, name)
    if not quiet:
        print(table)  # what the function is for
    return table


def _sizes(x: Tensor | None, batch_first: bool) -> tuple[int | None, int | None]:
    if x is None:
        return None, None
    if x.dim() == 2:
        return x.shape[0], 1
    steps, batch = x.shape[:2]
    return (batch, steps) if batch_first else (steps, batch)
