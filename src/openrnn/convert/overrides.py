"""Whether a user's class derived from one of `torch.nn` means the same over our layers."""

from types import CodeType

from torch import nn

from openrnn.nn.fixed_options import OF_SPEC
from openrnn.nn.subclasses import SUBCLASSES

# what a class may define: ours do not depend on it, or come to it by `super()`
FREE = {
    "__init__", "forward", "reset_parameters", "extra_repr", "flatten_parameters", "__doc__",
    "__module__", "__signature__", "__annotations__", "__annotate__", "__annotate_func__",
    "__abstractmethods__", "__parameters__", "__orig_bases__", "__firstlineno__",
    "__static_attributes__", "__constants__", "__jit_unused_properties__",
}  # fmt: skip
# what comes before every method, or makes instances
BEFORE = {
    "__call__", "_call_impl", "__getattribute__", "__getattr__", "__delattr__", "__new__",
    "__init_subclass__", "__reduce__", "__reduce_ex__", "__copy__", "__slots__",
}  # fmt: skip
PLAIN = ("abc", "typing")  # modules whose classes add nothing to instances


def hindrance(kind: type[nn.Module], base: type[nn.Module]) -> str | None:
    """Why instances of a class derived from `base` of `torch.nn` cannot run our code, if so.

    Methods of the class stay in front of ours. So it may add names, and wrap `forward` around
    `super().forward`; but it may not change what torch's forward reads or calls and ours does not,
    nor define what has a meaning in ours.
    """
    theirs = f"torch.nn.{base.__name__}"
    ours = f"openrnn.{base.__name__}"
    own = [
        part for part in kind.__mro__ if part not in base.__mro__ and part.__module__ not in PLAIN
    ]
    for part in own:
        forward = vars(part).get("forward")
        if forward is not None and not _passes_on(getattr(forward, "__code__", None)):
            return (
                f"{part.__name__}.forward does not call super().forward: derive the class from "
                f"{ours} in place of {theirs}, or write its loop as an openrnn.cell"
            )
    taken = BEFORE | _names(base) - FREE - OF_SPEC
    changed = sorted({name for part in own for name in vars(part)} & taken)
    if changed:
        return (
            f"{kind.__name__} defines {', '.join(changed)}, which {ours} does not use as "
            f"{theirs} does: derive the class from {ours}"
        )
    if type(kind).__module__ not in ("builtins", "abc"):
        return f"its metaclass {type(kind).__name__}: derive the class from {ours}"
    return None


def _names(base: type[nn.Module]) -> set[str]:
    """What torch's class or ours define, and instances of them have."""
    kind = SUBCLASSES[base]
    parts = kind.__mro__[: kind.__mro__.index(nn.Module)]  # those of torch among them
    found = {name for part in parts for name in vars(part)}
    return found.union(*(vars(one(1, 1, device="meta")) for one in (kind, base)))


def _passes_on(code: CodeType | None) -> bool:
    """Whether a method calls that of the next class, as far as its code shows it."""
    return code is not None and {"super", "forward"} <= set(code.co_names)
