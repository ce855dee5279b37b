"""Options that a module takes only when it is made: they can be read, setting one later raises."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn

from openrnn.spec import clip_bounds

# options that are read of the spec: a user's class may have attributes and methods of these names
OF_SPEC = frozenset((
    "algorithm", "cell_clip", "input_mode", "precision", "recompute", "reset_dropout_state",
    "reverse", "wavefront",
))  # fmt: skip


class _SpecOption(property):
    """An option that a module's spec has, as an attribute of the module."""


def of_spec(name: str) -> Any:
    """An option that a module's spec has, as an attribute of the module.

    What a user's class has put in its place, a submodule or a parameter too, comes first. A class
    that derives from one of torch's, and was converted, has none: it may ask for what torch lacks.
    """

    def read(module: nn.Module) -> Any:
        for own in _attributes(module):
            if name in own:
                return own[name]
        kind = type(module)
        if getattr(kind, "_origin", None) is not None:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        return getattr(module._spec, name)

    def put(module: nn.Module, value: Any) -> None:
        vars(module)[name] = value

    def remove(module: nn.Module) -> None:
        if name not in vars(module):
            raise AttributeError(name)
        del vars(module)[name]

    return _SpecOption(read, put, remove, f"The option {name}, as the module was made with it.")


def _attributes(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Where a module keeps the attributes of its own."""
    return vars(module), module._parameters, module._buffers, module._modules


def _as_in_spec(name: str, value: Any) -> Any:
    """A value that a constructor takes for an option, as the spec has it."""
    if name == "cell_clip":
        return clip_bounds(value)
    return "default" if name == "precision" and value is None else value


class FixedOptions(nn.Module):
    """A module that refuses another value for an option that its calls would not follow.

    Attributes:
        _fixed: names of such options; torch's modules have them, too.
        _fixed_extras: names that torch's modules lack. A subclass outside this package may use
            them for attributes of its own.

    Raises:
        AttributeError: an option is set to another value than the module was made with.
    """

    _fixed: ClassVar[frozenset[str]] = frozenset()
    _fixed_extras: ClassVar[frozenset[str]] = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        spec = self.__dict__.get("_spec")
        if spec is not None and (name in self._fixed or self._is_extra(name)):
            own = self.__dict__
            # one that is not known yet is set by the constructor
            known = own[name] if name in own else getattr(spec, name, value)
            if value is not known and _as_in_spec(name, value) != known:
                kind = type(self).__name__
                raise AttributeError(
                    f"{kind} takes {name} only when it is made: for {name}={value!r} make another "
                    f"{kind} and give it this one's state_dict"
                )
            if name in OF_SPEC and name not in own:
                return  # the spec has it, in its own form
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        with self._room_for(name, "_parameters"):
            super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        with self._room_for(name, "_buffers"):
            super().register_buffer(name, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        with self._room_for(name, "_modules"):
            super().add_module(name, module)

    @contextmanager
    def _room_for(self, name: str, which: str) -> Iterator[None]:
        """Within it torch does not take an option that is read of the spec for an attribute.

        Args:
            which: of the module's dictionaries is to have the name.
        """
        among: dict[str, Any] = vars(self).get(which, {})  # none before `Module.__init__`
        is_option = isinstance(getattr(type(self), name, None), _SpecOption)
        is_new = is_option and not any(name in own for own in _attributes(self))
        if is_new:
            among[name] = None
        try:
            yield
        except BaseException:
            if is_new:
                among.pop(name, None)
            raise

    def _is_extra(self, name: str) -> bool:
        package = type(self).__module__.partition(".")[0]
        return name in self._fixed_extras and package == __name__.partition(".")[0]
