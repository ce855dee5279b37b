"""Options that a module takes only when it is made: setting one later raises."""

from typing import Any

from torch import nn

# the attributes that torch's modules have, too
SHARED = {
    "bias", "bidirectional", "hidden_size", "input_size", "nonlinearity", "num_layers", "proj_size",
}  # fmt: skip
OWN = {
    "algorithm", "bias_mode", "cell", "cell_clip", "input_mode", "precision", "recompute",
    "reset_dropout_state", "reverse", "wavefront",
}  # fmt: skip


class FixedOptions(nn.Module):
    """A module that refuses another value for an option that its calls would not follow.

    A subclass outside this package may use the names in `OWN` for attributes of its own.

    Raises:
        AttributeError: an option is set to another value than the module was made with.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        spec = self.__dict__.get("_spec")
        if spec is not None and name in (SHARED | OWN if _is_ours(type(self)) else SHARED):
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


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]
