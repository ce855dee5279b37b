"""Which class a module turns into, and why it turns into none."""

from dataclasses import dataclass

from torch import nn

from openrnn import nn as ours
from openrnn.convert.overrides import hindrance
from openrnn.nn.cells import CellModule
from openrnn.nn.subclasses import SUBCLASSES, derive, origin

OPENRNN_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.LSTM: ours.LSTM,
    nn.GRU: ours.GRU,
    nn.RNN: ours.RNN,
    nn.LSTMCell: ours.LSTMCell,
    nn.GRUCell: ours.GRUCell,
    nn.RNNCell: ours.RNNCell,
}
OURS = (ours.Layer, CellModule)
THEIRS = (nn.RNNBase, nn.RNNCellBase)


@dataclass(frozen=True)
class Conversion:
    """What a module becomes.

    Args:
        old, new: a class of torch and its class of ours, or the other way round: what is made anew
            is made of these.
        kind: the class that the module gets: `new`, or one derived from it.
    """

    old: type[nn.Module]
    new: type[nn.Module]
    kind: type[nn.Module]


def conversion(kind: type[nn.Module], to: str, subclass: bool) -> Conversion | str:
    """What a module of a class becomes, or why it is left.

    Args:
        to: "openrnn" or "torch".
        subclass: derive from the class of torch as well.
    """
    return _to_openrnn(kind, subclass) if to == "openrnn" else _to_torch(kind)


def label(kind: type) -> str:
    """The name by which users know a class."""
    for package, classes in (("torch.nn", OPENRNN_CLASSES), ("openrnn", OPENRNN_CLASSES.values())):
        if kind in classes:
            return f"{package}.{kind.__name__}"
    own = origin(kind)
    if own is not None:
        base = next(one for one in OPENRNN_CLASSES.values() if issubclass(kind, one))
        return f"{label(own)} over {label(base)}"
    return f"{kind.__module__}.{kind.__qualname__}"


def _to_openrnn(kind: type[nn.Module], subclass: bool) -> Conversion | str:
    if issubclass(kind, OURS):
        return "of openrnn already"
    if kind in OPENRNN_CLASSES:
        new = OPENRNN_CLASSES[kind]
        return Conversion(kind, new, SUBCLASSES[kind] if subclass else new)
    base = next((base for base in OPENRNN_CLASSES if issubclass(kind, base)), None)
    if base is None:
        return "openrnn has no module of its kind"
    return hindrance(kind, base) or Conversion(base, OPENRNN_CLASSES[base], derive(kind))


def _to_torch(kind: type[nn.Module]) -> Conversion | str:
    if issubclass(kind, THEIRS) and not issubclass(kind, OURS):
        return "of torch already"
    for theirs, ours_class in OPENRNN_CLASSES.items():
        if kind in (ours_class, SUBCLASSES[theirs]):
            return Conversion(ours_class, theirs, theirs)
        if issubclass(kind, ours_class) and (users := origin(kind)) is not None:
            return Conversion(ours_class, theirs, users)
        if issubclass(kind, ours_class):
            return f"a subclass of {label(ours_class)}: its own code would be lost"
    return "torch has no module of its kind"
