"""A network as a module: parameters under torch's names, where they lie, what a copy takes."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from openrnn import cells, dispatch, params
from openrnn.cells import Cell
from openrnn.nn import checks, flat, foreign
from openrnn.nn.call_cache import CachingModule
from openrnn.nn.fixed_options import OF_SPEC, FixedOptions, of_spec
from openrnn.spec import Spec, clip_bounds

# what a call, or code of ours that is given a layer, asks every layer for
RESERVED = frozenset(("own_weights", "spec", "step", "stepper", "weights"))


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """A module in eval mode, and each of its parts in its own mode again afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


class Network(FixedOptions, CachingModule):
    """The module of a network: its spec, its parameters and their memory. `Layer` has the calls."""

    cell: Cell
    bias: bool
    bias_mode: str
    batch_first: bool
    dropout: float
    backend: str
    _precision = ""  # of a call's `Problem`; empty: by the spec, or torch's setting
    _settings: ClassVar[Any] = attrgetter("backend", "training", "dropout", "batch_first")
    _fixed = frozenset(
        ("bias", "bidirectional", "hidden_size", "input_size", "num_layers", "proj_size")
    )
    _fixed_extras = OF_SPEC | {"bias_mode", "cell"}
    algorithm: str = of_spec("algorithm")
    cell_clip: tuple[float, float] | None = of_spec("cell_clip")
    input_mode: str = of_spec("input_mode")
    precision: str = of_spec("precision")
    recompute: str = of_spec("recompute")
    reset_dropout_state: bool = of_spec("reset_dropout_state")
    reverse: bool = of_spec("reverse")
    wavefront: int | None = of_spec("wavefront")

    def __init__(
        self,
        cell: Cell,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str = "auto",
        bias_mode: str | None = None,
        input_mode: str = "linear",
        cell_clip: float | tuple[float, float] | None = None,
        precision: str | None = None,
        algorithm: str = "auto",
        reset_dropout_state: bool = False,
        recompute: str = "none",
        reverse: bool = False,
        wavefront: int | None = None,
    ) -> None:
        super().__init__()
        checks.torch_arguments(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, proj_size
        )
        dispatch.check_name(backend)
        self.cell = cell
        self.bias_mode = checks.bias_mode(bias, bias_mode)
        self.bias = self.bias_mode != "none"
        self.batch_first, self.bidirectional = batch_first, bool(bidirectional)
        self.dropout = float(dropout)
        self.backend = backend
        self._spec = cell.spec(
            input_size, hidden_size, num_layers=num_layers, bidirectional=bidirectional,
            bias_mode=self.bias_mode, input_mode=input_mode, proj_size=proj_size,
            dropout=self.dropout, cell_clip=clip_bounds(cell_clip),
            precision=precision or "default", algorithm=algorithm,
            reset_dropout_state=reset_dropout_state, recompute=recompute, reverse=reverse,
            wavefront=wavefront,
        )  # fmt: skip
        cells.check(self._spec)
        self.input_size, self.hidden_size = self._spec.input_size, self._spec.hidden_size
        self.num_layers, self.proj_size = self._spec.num_layers, self._spec.proj_size
        slots = params.module_slots(self._spec)
        self._names = [slot.name for slot in slots]
        for slot in slots:
            parameter = torch.empty(slot.shape, device=device, dtype=dtype)
            self.register_parameter(slot.name, nn.Parameter(parameter))
        self.flatten_parameters()
        self.reset_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # in another process the same cell may have another key
        self._spec = self._spec.with_(cell=self.cell.key)

    @property
    def spec(self) -> Spec:
        """What this network is."""
        return self._spec

    def __setattr__(self, name: str, value: Any) -> None:
        # a function in place of a method is no mistake
        if name in RESERVED and (not callable(value) or isinstance(value, nn.Module)):
            raise AttributeError(
                f"{type(self).__name__} cannot have an attribute {name}: the name has a meaning in "
                "every layer of openrnn, so choose another"
            )
        spec = self.__dict__.get("_spec")
        if name == "dropout" and spec is not None:  # the one option of a spec that may change later
            self._spec = spec.with_(dropout=value)
            value = self._spec.dropout
        super().__setattr__(name, value)

    def __prepare_scriptable__(self) -> NoReturn:
        foreign.refuse_script(self)

    def reset_parameters(self) -> None:
        """Draws every parameter from U(-1/sqrt(H), 1/sqrt(H)), as `torch.nn` does."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def flatten_parameters(self) -> None:
        """Lays parameters on a CUDA device side by side, where cuDNN reads them without a copy.

        Never needed: it is done when a layer is made, moved, converted or deep-copied, and layers
        whose parameters lie elsewhere work as well.
        """
        own: dict[str, Any] = self._parameters
        if flat.addresses([own.get(name) for name in self._names]):
            flat.lay(self._spec, own)

    def _apply(self, fn: Any, recurse: bool = True) -> "Network":
        own: dict[str, Any] = self._parameters
        before = {name: flat.addresses([own.get(name)]) for name in self._names}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's
        self._call_cache.module_cache.clear()  # of parameters that may be elsewhere now
        # what stays where it was may be shared, as by processes that train together
        if all(flat.addresses([own.get(name)]) != there for name, there in before.items()):
            self.flatten_parameters()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Network":
        made: Network = super().__deepcopy__(memo)
        made.flatten_parameters()
        return made

    def own_weights(self) -> list[Tensor] | None:
        """`weights`, where these are Parameters that nothing computes; else None."""
        own: dict[str, Any] = self._parameters
        if getattr(self.weights, "__func__", None) is not Network.weights:
            return None
        return [own[name] for name in self._names] if own.keys() >= {*self._names} else None

    def weights(self) -> list[Tensor]:
        """The parameters in the order of `openrnn.params.module_slots`, as they are now."""
        if torch.compiler.is_compiling():
            return [getattr(self, name) for name in self._names]
        own: dict[str, Any] = self._parameters
        try:
            return [own[name] for name in self._names]
        except KeyError:  # parametrized or weight-normed ones are attributes, not parameters
            return [getattr(self, name) for name in self._names]

    def _run_weight_hooks(self) -> None:
        """Computes weights anew that a hook makes before each forward, for what is no forward.

        So do the older `weight_norm`, `spectral_norm` and `prune` of `torch.nn.utils`, whose hooks
        look at no input. Hooks of a user's are of forward alone.
        """
        if not self._forward_pre_hooks:
            return
        from torch.nn.utils.prune import BasePruningMethod
        from torch.nn.utils.spectral_norm import SpectralNorm
        from torch.nn.utils.weight_norm import WeightNorm

        for hook in self._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm | SpectralNorm | BasePruningMethod):
                hook(self, ())

    def resting_weights(self) -> list[Tensor]:
        """`weights` as in eval mode, for what reads them outside a call; they need no gradient.

        Each parametrization and each hook of `_run_weight_hooks` computes its own once, and
        spectral norms stay as they are.
        """
        with eval_mode(self):
            self._run_weight_hooks()  # with gradients: what they make stays the layer's attribute
            with torch.no_grad():
                return [weight.detach() for weight in self.weights()]

    def _any_weight(self) -> Tensor:
        """A tensor of the layer's dtype and device."""
        return self.weights()[0]

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults, as torch prints them."""
        words = [f"{self.input_size}, {self.hidden_size}"]
        defaults: dict[str, object] = {
            "proj_size": 0, "num_layers": 1, "bias": True, "batch_first": False, "dropout": 0,
            "bidirectional": False, "backend": "auto",
        }  # fmt: skip
        for name, default in defaults.items():
            if getattr(self, name) != default:
                words.append(f"{name}={getattr(self, name)}")
        if self.bias_mode not in ("double", "none"):
            words.append(f"bias_mode={self.bias_mode!r}")
        for name, plain in (
            ("input_mode", "linear"),
            ("cell_clip", None),
            ("precision", "default"),
            ("algorithm", "auto"),
            ("reset_dropout_state", False),
            ("recompute", "none"),
            ("reverse", False),
            ("wavefront", None),
        ):
            if getattr(self._spec, name) != plain:
                words.append(f"{name}={getattr(self._spec, name)!r}")
        return ", ".join(words)
