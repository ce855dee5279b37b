"""What the configuration of a Keras model says of its recurrent layers, and what ours cannot do."""

from collections.abc import Iterator
from typing import Any, NamedTuple

KINDS = ("LSTM", "GRU", "SimpleRNN")
# what a layer may say, if it says anything: all else changes what it computes
EXACT = {"recurrent_activation": ("sigmoid",), "merge_mode": ("concat",)}
ACTIVATIONS = {"LSTM": ("tanh",), "GRU": ("tanh",), "SimpleRNN": ("tanh", "relu")}


class Said(NamedTuple):
    """What a file says of its layers beside their arrays.

    Args:
        cell: the key of our cell of every recurrent layer; None where there are none or several.
        reverse: whether the only recurrent layer has `go_backwards`.
    """

    cell: str | None = None
    reverse: bool = False


def said(config: Any) -> Said:
    """What a model's configuration says.

    Raises:
        ValueError: a layer does what ours cannot, or one of several has `go_backwards`.
    """
    layers = [*_layers(config)]
    found = {_cell(kind, own) for kind, own in layers}
    reverse = any(own.get("go_backwards", False) for _, own in layers)
    if reverse and len(layers) > 1:
        # such a layer gives its outputs from the last step to the first: a second one, which
        # reads them from their end, runs forward in the time of the input
        raise ValueError(
            "one of several recurrent layers has go_backwards=True, whose outputs Keras gives in "
            "the order in which it ran: use openrnn.from_weights for each"
        )
    return Said(found.pop() if len(found) == 1 else None, reverse)


def _layers(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Class and settings of each recurrent layer; of a Bidirectional one its forward layer."""
    if isinstance(config, list):
        for inner in config:
            yield from _layers(inner)
    if not isinstance(config, dict):
        return
    kind, own = config.get("class_name"), config.get("config")
    if kind in KINDS and isinstance(own, dict):
        yield kind, own
    elif kind == "Bidirectional" and isinstance(own, dict):
        for inner_kind, inner in _layers(own.get("layer")):
            if inner.get("go_backwards", False):
                raise ValueError(
                    f"{inner_kind} {inner.get('name', inner_kind)} has go_backwards=True inside a "
                    "Bidirectional, ours runs forward first"
                )
            yield inner_kind, {**inner, "merge_mode": own.get("merge_mode", "concat")}
    else:
        for inner in config.values():
            yield from _layers(inner)


def _cell(kind: str, own: dict[str, Any]) -> str:
    name = own.get("name", kind)
    for setting, valid in {**EXACT, "activation": ACTIVATIONS[kind]}.items():
        value = own.get(setting, valid[0])
        if value not in valid:
            raise ValueError(f"{kind} {name} has {setting}={value!r}, ours only {_words(valid)}")
    if kind == "LSTM":
        return "lstm"
    if kind == "GRU":
        return "gru" if own.get("reset_after", False) else "gru_reset_before"
    return f"rnn_{own.get('activation', 'tanh')}"


def _words(valid: tuple[object, ...]) -> str:
    return " or ".join(map(repr, valid))
