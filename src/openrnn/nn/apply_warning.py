"""Functions given to `Module.apply` that ask for a class of `torch.nn` and pass our modules by."""

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from torch import Tensor, nn

Self = TypeVar("Self", bound=nn.Module)


class WarnsOnApply(nn.Module):
    """A module that warns where `apply` was given an initialiser of torch's modules alone."""

    def apply(self: Self, fn: Callable[[nn.Module], None]) -> Self:
        """As `torch.nn.Module.apply`; warns of a function that means torch's module of this name.

        A loop over `model.modules()` that asks `isinstance` cannot be seen from here.
        """
        before = [_version(each) for each in self.parameters(recurse=False)]
        super().apply(fn)
        if before == [_version(each) for each in self.parameters(recurse=False)]:
            meant = _meant(self, fn)
            if meant is not None:
                warnings.warn(
                    f"apply: the function asks for torch.nn.{meant.__name__} and left a "
                    f"{type(self).__name__} of openrnn as it was: initialise a model before "
                    "openrnn.convert, or convert it with subclass=True",
                    stacklevel=2,
                )
        return self


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _meant(module: nn.Module, function: Any) -> type | None:
    """The class of torch.nn that a function refers to and this module stands for, if any.

    None where the function refers to something of ours, too: it then knows what it does.
    """
    kinds = [getattr(nn, part.__name__, None) for part in type(module).__mro__]
    twins = [kind for kind in kinds if isinstance(kind, type) and not isinstance(module, kind)]
    function = getattr(function, "func", function)  # of functools.partial
    function = getattr(function, "__func__", function)  # of a method
    code = getattr(function, "__code__", None)
    if code is None or not twins:
        return None
    names = code.co_names
    found = [function.__globals__.get(name) for name in names]
    for _ in range(2):  # nn.LSTM, torch.nn.LSTM
        modules = [each for each in found if isinstance(each, ModuleType)]
        found += [vars(each).get(name) for each in modules for name in names]
    own = (getattr(each, "__module__", None) or getattr(each, "__name__", "") for each in found)
    if any(str(name).partition(".")[0] == "openrnn" for name in own if name):
        return None
    return next((kind for kind in twins if any(each is kind for each in found)), None)
