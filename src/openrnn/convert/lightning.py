"""A callback of Lightning that converts: for libraries that make their model inside `fit`."""

import sys
from importlib import import_module
from typing import Any

from torch import nn

from openrnn import dispatch
from openrnn.convert.classes import OURS
from openrnn.convert.swap import convert

PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # two copies of the same classes


class LightningCallback:
    """A callback of `lightning.pytorch`, of `pytorch_lightning`, or of both if both are imported.

    Of those installed if none is. It is pickled by the class that can be imported.

    Raises:
        ImportError: Lightning is not installed.
    """

    def __new__(cls, *args: object, **kwargs: object) -> "LightningCallback":
        """An instance of a class derived from this one and from those of Lightning."""
        made: LightningCallback = object.__new__(_with_callbacks(cls))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """By the one class that can be imported: Lightning's is found again where it is loaded."""
        kind = next(kind for kind in type(self).__mro__ if not vars(kind).get("_made"))
        # Lightning leaves methods of the model that it trained, `log` and `log_dict`
        state = {name: value for name, value in vars(self).items() if not _of_a_module(value)}
        return kind, (), state


class ConvertCallback(LightningCallback):
    """`openrnn.convert` of the model that a Lightning trainer is given, before it makes optimizers.

    A callback of `lightning.pytorch`, of `pytorch_lightning`, or of both if both are imported; of
    those installed if none is. It can be pickled, and has no state in checkpoints.

    A model is converted in `setup`, before training, validation, tests and predictions, and what
    it makes in its own `setup` or `configure_model` when they start. Parameters stay the same
    objects, so the optimizers hold them either way.

    Args:
        backend, subclass, quiet: as in `openrnn.convert`. Only the first process prints.

    Raises:
        ImportError: Lightning is not installed.
        ValueError: backend is unknown.
    """

    def __init__(
        self, *, backend: str = "auto", subclass: bool = False, quiet: bool = False
    ) -> None:
        super().__init__()
        dispatch.check_name(backend)
        self.backend, self.subclass, self.quiet = backend, subclass, quiet

    def setup(self, trainer: Any, pl_module: Any, stage: str | None = None) -> None:
        """Lightning's first hook of a run."""
        self._convert(trainer, pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Says so if there is nothing of ours to train."""
        ours = any(isinstance(module, OURS) for module in pl_module.modules())
        self._convert(trainer, pl_module, always=not ours)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning's hook before the first batch."""
        self._convert(trainer, pl_module)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning's hook before the first batch."""
        self._convert(trainer, pl_module)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning's hook before the first batch."""
        self._convert(trainer, pl_module)

    def _convert(self, trainer: Any, pl_module: Any, always: bool = False) -> None:
        """Prints what was done if anything was."""
        done = convert(pl_module, backend=self.backend, subclass=self.subclass, quiet=True)
        news = always or any(row.swapped for row in done.rows)
        if news and not self.quiet and trainer.is_global_zero:
            print(done)


def _of_a_module(value: object) -> bool:
    """Whether this is a bound method of a module, which holds all of it."""
    return isinstance(getattr(value, "__self__", None), nn.Module)


def _with_callbacks(kind: type[Any]) -> type[Any]:
    """A class derived from ours and from the callbacks of Lightning that it does not have yet."""
    bases = (kind, *(base for base in _callbacks(kind.__name__) if not issubclass(kind, base)))
    if len(bases) == 1:
        return kind
    for made in kind.__subclasses__():
        if made.__bases__ == bases:
            return made
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_made": True}
    return type(kind.__name__, bases, {**names, "__doc__": kind.__doc__})


def _callbacks(name: str) -> list[type]:
    """The classes `Callback` that are imported already, or else those that can be."""
    loaded = [getattr(sys.modules.get(package), "Callback", None) for package in PACKAGES]
    found = [one for one in loaded if isinstance(one, type)]
    if found:
        return found
    for package in PACKAGES:
        try:
            found.append(import_module(package).Callback)
        except ImportError:
            continue
    if not found:
        raise ImportError(f"{name} needs Lightning: pip install lightning")
    return found
