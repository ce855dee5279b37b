"""Which class a module turns into, and why it turns into none."""

from dataclasses import dataclass

from torch import nn

from openrnn import nn as ours
from openrnn.convert.overrides import hindrance
from openrnn.nn.cells import CellModule
from openrnn.nn.subclasses import SUBCLASSES, derive, origin

TWINS: dict[type[nn.Module], type[nn.Module]] = {
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
class Turn:
    """What a module becomes.

    Args:
        old, new: a class of torch and its twin of ours, or the other way round: what is made anew
            is made of these.
        kind: the class that the module gets: `new`, or one derived from it.
    """

    old: type[nn.Module]
    new: type[nn.Module]
    kind: type[nn.Module]


def turn(kind: type[nn.Module], to: str, subclass: bool) -> Turn | str:
    """What a module of a class becomes, or why it is left.

    Args:
        to: "openrnn" or "torch".
        subclass: derive from the class of torch as well.
    """
    return _to_openrnn(kind, subclass) if to == "openrnn" else _to_torch(kind)


def label(kind: type) -> str:
    """The name by which users know a class."""
    for package, faces in (("torch.nn", TWINS), ("openrnn", TWINS.values())):
        if kind in faces:
            return f"{package}.{kind.__name__}"
    own = origin(kind)
    if own is not None:
        face = next(face for face in TWINS.values() if issubclass(kind, face))
        return f"{label(own)} over {label(face)}"
    return f"{kind.__module__}.{kind.__qualname__}"


def _to_openrnn(kind: type[nn.Module], subclass: bool) -> Turn | str:
    if issubclass(kind, OURS):
        return "of openrnn already"
    if kind in TWINS:
        return Turn(kind, TWINS[kind], SUBCLASSES[kind] if subclass else TWINS[kind])
    base = next((base for base in TWINS if issubclass(kind, base)), None)
    if base is None:
        return "openrnn has no module of its kind"
    return hindrance(kind, base) or Turn(base, TWINS[base], derive(kind))


def _to_torch(kind: type[nn.Module]) -> Turn | str:
    if issubclass(kind, THEIRS) and not issubclass(kind, OURS):
        return "of torch already"
    for theirs, face in TWINS.items():
        if kind in (face, SUBCLASSES[theirs]):
            return Turn(face, theirs, theirs)
        if issubclass(kind, face) and (own := origin(kind)) is not None:
            return Turn(face, theirs, own)
        if issubclass(kind, face):
            return f"a subclass of {label(face)}: its own code would be lost"
    return "torch has no module of its kind"
