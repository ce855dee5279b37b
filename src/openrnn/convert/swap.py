"""Turns the recurrent modules of a model into ours, or back, where they stand."""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from openrnn import dispatch
from openrnn import nn as ours
from openrnn.convert.classes import OPENRNN_CLASSES, OURS, THEIRS, conversion, label
from openrnn.convert.hints import hint
from openrnn.convert.outcome import ConversionRow, change_each, noted, table
from openrnn.nn.fixed_options import OF_SPEC
from openrnn.nn.network import Network
from openrnn.nn.quantized import Quantized
from openrnn.printed import Printed
from openrnn.spec import Spec

TARGETS = ("openrnn", "torch")
# what torch can be told as well; dropout is the module's own attribute
SHARED = {
    "cell", "gates", "states", "input_size", "hidden_size", "num_layers", "bidirectional",
    "bias_mode", "proj_size", "dropout",
}  # fmt: skip
NAMES = {one.__name__ for one in OPENRNN_CLASSES}


@dataclass(frozen=True)
class Options:
    """What is asked of new modules of ours."""

    backend: str = "auto"
    subclass: bool = False


@dataclass(frozen=True, repr=False)
class Conversion(Printed):
    """What `convert` did; `text` is a table of it.

    Args:
        model: the model, the same object that was given.
        to: "openrnn" or "torch".
        rows: one for each path at which a recurrent module stands.
    """

    model: nn.Module
    to: str
    rows: tuple[ConversionRow, ...]
    _swapped: tuple[tuple[nn.Module, Options], ...] = field(repr=False)

    def revert(self) -> "Conversion":
        """Turns what was swapped back, with the parameters as they are now; prints nothing.

        Modules of ours get back the backend and the class that they had.
        """
        back = "torch" if self.to == "openrnn" else "openrnn"
        return _convert(
            self.model, back, Options(), {id(module): had for module, had in self._swapped}
        )

    def __repr__(self) -> str:
        return f"<openrnn.convert.Conversion: {self._title()}>"

    def _title(self) -> str:
        count = sum(row.swapped for row in self.rows)
        return f"{count} of {len(self.rows)} recurrent modules turned into those of {self.to}"

    @property
    def text(self) -> str:
        if not self.rows and self.to == "openrnn":
            return "\n".join([self._title(), *noted(hint(self.model), 2)])
        return table(self._title(), self.rows)


def convert(
    model: nn.Module,
    *,
    to: str = "openrnn",
    backend: str = "auto",
    subclass: bool = False,
    quiet: bool = False,
) -> Conversion:
    """Turns every LSTM, GRU, RNN and cell of `torch.nn` in a model into ours; prints what it did.

    In place, and that to the letter: a module changes its class and stays the same object with the
    same Parameters, buffers, hooks and parametrizations. So optimizers, shared modules, references
    from elsewhere and a model that is itself an `nn.LSTM` need no care, and the state dict stays.
    What cannot be turned exactly is left, with the reason in its row; so is an `nn.RNNCell` on a
    CPU, where torch's takes less time, unless a backend is named; for a GPU convert after
    `.to("cuda")`.

    `isinstance(module, nn.LSTM)` is no longer true of a turned module, but with subclass=True.

    Args:
        to: "torch" turns ours into those of `torch.nn`; so does `revert()` of the result.
        backend: of the new modules, as in `openrnn.LSTM`.
        subclass: the new modules are also of torch's class, for libraries that ask for it;
            `torch.compile` breaks its graph at them, as it does at torch's own.
        quiet: do not print.

    Raises:
        TypeError: model is no module.
        ValueError: to or backend is unknown.

    Example:
        >>> model = nn.Sequential(nn.Embedding(9, 4), nn.LSTM(4, 5))
        >>> done = convert(model)
        1 of 1 recurrent modules turned into those of openrnn
          1  torch.nn.LSTM  now openrnn.LSTM
        >>> type(model[1]), type(done.revert().model[1])
        (<class 'openrnn.nn.layers.LSTM'>, <class 'torch.nn.modules.rnn.LSTM'>)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {_given(model)}")
    if to not in TARGETS:
        raise ValueError(f"to must be one of {', '.join(TARGETS)}, got {to!r}")
    dispatch.check_name(backend)
    done = _convert(model, to, Options(backend, subclass))
    return done.printed(quiet)


def _convert(
    model: nn.Module,
    to: str,
    options: Options,
    only: dict[int, Options] | None = None,
) -> Conversion:
    """Turns all recurrent modules, or those whose ids are given, with options of their own."""
    swapped: list[tuple[nn.Module, Options]] = []

    def wanted(module: nn.Module) -> bool:
        return _recurrent(module) and (only is None or id(module) in only)

    def change(module: nn.Module) -> tuple[str, bool]:
        had = options
        if isinstance(module, OURS):
            had = Options(module.backend, isinstance(module, THEIRS))
        reason = _slower(module, to, options) if only is None else None
        reason = reason or _convert_one(module, to, options if only is None else only[id(module)])
        if reason:
            return f"left: {reason}", False
        swapped.append((module, had))
        return f"now {label(type(module))}", True

    rows = change_each(model, wanted, change)
    return Conversion(model, to, rows, tuple(swapped))


def _slower(module: nn.Module, to: str, options: Options) -> str | None:
    """Why a module that could be turned would be slower, where no backend is asked for."""
    if to != "openrnn" or options.backend != "auto" or not isinstance(module, nn.RNNCell):
        return None
    if isinstance(module, OURS) or any(
        tensor.device.type != "cpu" for tensor in module.parameters()
    ):
        return None
    return (
        "on a CPU torch.nn.RNNCell takes less time in training; where all inputs are known, one "
        "call of openrnn.RNN takes less than either. For a GPU convert after model.to('cuda'), "
        "or name a backend"
    )


def _recurrent(module: nn.Module) -> bool:
    return isinstance(module, OURS + THEIRS) or _foreign(module) is not None


def _foreign(module: nn.Module) -> str | None:
    """What makes a recurrent module neither torch's usual one nor ours, or None."""
    if getattr(module, "original_name", None) in NAMES:
        return "TorchScript, compiled as it is: convert the model before scripting it"
    kind = type(module)
    if isinstance(module, Quantized) or (kind.__name__ in NAMES and ".quant" in kind.__module__):
        return "quantized: its weights are no parameters"
    return None


def _given(model: object) -> str:
    """What stands in the place of a module."""
    return f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__


def _convert_one(module: nn.Module, to: str, options: Options) -> str | None:
    """Converts one module; or leaves it and says why."""
    reason = _foreign(module)
    if reason is not None:
        return reason
    kind = parametrize.type_before_parametrizations(module)
    found = conversion(kind, to, options.subclass)
    if isinstance(found, str):
        return found
    reason = _inexact(module) if to == "torch" else None
    if reason is not None:
        return reason
    try:
        twin, own = _twin(found.new, module), set(vars(_twin(found.old, module)))
    except (TypeError, ValueError, RuntimeError) as error:
        return f"its attributes are those of no such module: {error}"
    if to == "openrnn":
        twin.backend = options.backend  # type: ignore[assignment]  # no module
    reason = _misfit(module, twin) or _clash(module, twin, own)
    if reason is not None:
        return reason
    _become(module, _parametrized(_instance(found.kind, vars(twin)), module), own)
    return None


def _inexact(module: Any) -> str | None:
    """What ours has and torch has not."""
    spec = module._spec
    if spec.bias_mode not in ("double", "none"):
        return f"bias_mode {spec.bias_mode!r}, torch has two bias vectors or none"
    for option in fields(Spec):
        value = getattr(spec, option.name)
        if option.init and option.name not in SHARED and value != option.default:
            return f"{option.name} {value!r}, torch has no such option"
    return None


def _twin(kind: type[nn.Module], module: Any) -> nn.Module:
    """A module of another class with the sizes of this one, without memory."""
    options = {"bias": module.bias, "device": "meta"}
    if issubclass(kind, (nn.RNN, ours.RNN)):
        options["nonlinearity"] = module.mode.removeprefix("RNN_").lower()  # torch goes by mode
    if issubclass(kind, (nn.RNNCell, ours.RNNCell)):
        options["nonlinearity"] = module.nonlinearity
    if issubclass(kind, (nn.RNNBase, ours.Layer)):
        options |= {
            "num_layers": module.num_layers,
            "batch_first": module.batch_first,
            "bidirectional": module.bidirectional,
        }
        if module.proj_size:
            options["proj_size"] = module.proj_size
    return kind(module.input_size, module.hidden_size, **options)


def _misfit(module: nn.Module, twin: nn.Module) -> str | None:
    """Why the tensors of a module are not those that its sizes ask for, if so."""
    lists = getattr(module, "parametrizations", {})
    for name, wanted in twin.named_parameters():
        if name in lists:
            continue  # computing it may change its state, as spectral_norm does
        tensor = getattr(module, name, None)
        if not isinstance(tensor, torch.Tensor) or tensor.shape != wanted.shape:
            got = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else tensor
            return f"{name} must have shape {tuple(wanted.shape)}, got {got}"
    for name, _ in module.named_parameters(recurse=False):
        if name.startswith(("bias_ih", "bias_hh")) and twin._parameters.get(name) is None:
            return f"it has {name}, though its attribute bias is {module.bias}"
    wrong = [name for name in lists if name not in twin._parameters]
    return f"parametrization of {wrong[0]}, which is not its own" if wrong else None


def _clash(module: nn.Module, twin: nn.Module, own: set[str]) -> str | None:
    """Which attribute, set from outside, would change what the old or new class does, if any."""
    kind = parametrize.type_before_parametrizations(module)
    for name in (*vars(module), *module._parameters, *module._buffers, *module._modules):
        if name == "qconfig":
            continue  # of torch.ao.quantization: ours keep it, too
        if name == "_compiled_call_impl" and vars(module)[name] is not None:
            return "it was compiled by its method compile: convert it before"
        if callable(getattr(kind, name, None)):
            return f"its method {name} was replaced"
        taken = name in vars(twin) or (hasattr(type(twin), name) and name not in OF_SPEC)
        if name not in own and taken:
            return f"its attribute {name} has another meaning there"
    return None


def _instance(kind: type[nn.Module], state: dict[str, Any]) -> nn.Module:
    made = kind.__new__(kind)
    vars(made).update(state)
    return made


def _parametrized(twin: nn.Module, module: nn.Module) -> nn.Module:
    """The twin, its class with the properties that make a module's parametrizations work."""
    for name in getattr(module, "parametrizations", {}):
        parametrize.register_parametrization(twin, name, nn.Identity(), unsafe=True)
    return twin


def _become(module: nn.Module, twin: nn.Module, own: set[str]) -> None:
    """Makes a module one of the twin's class: `own`, what only its old class needs, is dropped."""
    new = vars(twin)
    state = {name: value for name, value in vars(module).items() if name in new or name not in own}
    # what a module has under the same name stays: parameters, buffers, hooks, mode, sizes
    state = {**new, **state}
    object.__setattr__(module, "__class__", type(twin))
    vars(module).clear()
    vars(module).update(state)
    if isinstance(module, Network):
        module.dropout = module.dropout  # so that its spec has it, too
    if isinstance(module, nn.RNNBase) and not parametrize.is_parametrized(module):
        module._init_flat_weights()
