"""Options that a module takes only when it is made: they can be read, setting one later raises."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn

# options that are read of the spec: a user's class may have attributes and methods of these names
OF_SPEC = frozenset((
    "algorithm", "cell_clip", "input_mode", "precision", "recompute", "reset_dropout_state",
    "reverse", "wavefront",
))  # fmt: skip


def of_spec(name: str) -> Any:
    """An option that a module's spec has, as an attribute of the module.

    What a user's class has put in its place, a submodule or a parameter too, comes first.
    """

    def read(module: nn.Module) -> Any:
        for own in _attributes(module):
            if name in own:
                return own[name]
        return getattr(module._spec, name)

    def put(module: nn.Module, value: Any) -> None:
        vars(module)[name] = value

    def remove(module: nn.Module) -> None:
        if name not in vars(module):
            raise AttributeError(name)
        del vars(module)[name]

    return property(read, put, remove, f"The option {name}, as the module was made with it.")


def _attributes(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Where a module keeps the attributes of its own."""
    return vars(module), module._parameters, module._buffers, module._modules


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
            if value is not known and value != known:
                kind = type(self).__name__
                raise AttributeError(
                    f"{kind} takes {name} only when it is made: for {name}={value!r} make another "
                    f"{kind} and give it this one's state_dict"
                )
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        with self._room_for(name, self._parameters):
            super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        with self._room_for(name, self._buffers):
            super().register_buffer(name, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        with self._room_for(name, self._modules):
            super().add_module(name, module)

    @contextmanager
    def _room_for(self, name: str, among: dict[str, Any]) -> Iterator[None]:
        """Within it torch does not take an option that is read of the spec for an attribute."""
        is_new = name in OF_SPEC and not any(name in own for own in _attributes(self))
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
