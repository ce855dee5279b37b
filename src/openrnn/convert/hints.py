"""Modules that may be recurrent cells written by hand, by names and shapes of their matrices."""

from itertools import chain
from typing import Any

from torch import Tensor, nn

SHOWN = 3
# what the matrices of x and of h are called, where their names tell them apart
PAIRS = (("ih", "hh"), ("xh", "hh"), ("i2h", "h2h"), ("x2h", "h2h"), ("w", "u"))


def hint(model: nn.Module) -> str:
    """What to do where a model has no module that is known, in one sentence."""
    found = [f"{path or 'the model itself'}" for path, module in model.named_modules()
             if looks_recurrent(module)]  # fmt: skip
    names = ", ".join(found[:SHOWN]) + (", ..." if len(found) > SHOWN else "")
    may = f" (perhaps {names})" if found else ""
    return (
        f"only modules of torch.nn are known: a loop over time written by hand{may} becomes an "
        "openrnn.cell in openrnn.Recurrent, see docs/convert.md"
    )


def looks_recurrent(module: nn.Module) -> bool:
    """Whether a module holds matrices named as a pair, (k H, H) and (k H, anything) or transposed.

    They are its own parameters, or weights of linear layers that it holds.
    """
    own = module._parameters.items()
    inner = ((name, child.weight) for name, child in module.named_children() if _linear(child))
    shapes = {name.lower(): _shape(tensor) for name, tensor in chain(own, inner)}
    for of_x, of_h in PAIRS:
        for name, (rows, columns) in shapes.items():
            other = "_".join(of_x if word == of_h else word for word in name.split("_"))
            if other != name and other in shapes:
                gates, hidden = max(rows, columns), min(rows, columns)
                if hidden and gates % hidden == 0 and gates in shapes[other]:
                    return True
    return False


def _linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and isinstance(getattr(module, "weight", None), Tensor)


def _shape(tensor: Any) -> tuple[int, int]:
    """The sizes of a matrix; (0, 0) of anything else."""
    if isinstance(tensor, Tensor) and not nn.parameter.is_lazy(tensor) and tensor.dim() == 2:
        return tensor.shape[0], tensor.shape[1]
    return 0, 0
