"""One-step modules with the names of `torch.nn.LSTMCell`, `GRUCell` and `RNNCell`."""

import math
from collections.abc import Sequence
from inspect import Signature, signature
from operator import attrgetter
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from openrnn import cells, dispatch, functional, params, prepared_calls, tensors
from openrnn.cells import Cell
from openrnn.nn import autocast, checks, foreign
from openrnn.nn.call_cache import NO_MASKS, CachingModule
from openrnn.nn.fixed_options import FixedOptions, of_spec


class CellModule(FixedOptions, CachingModule):
    """What the one-step modules share: `weight_ih`, `weight_hh`, `bias_ih`, `bias_hh`.

    `input_mode` is that of the layers: without `weight_ih` where it is "skip" or "gates".
    """

    _settings: ClassVar[Any] = attrgetter("backend", "training")
    _fixed = frozenset(("bias", "hidden_size", "input_size"))
    _fixed_extras = frozenset(("cell", "input_mode"))
    input_mode: str = of_spec("input_mode")

    def __init__(
        self,
        cell: Cell,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str = "auto",
        input_mode: str = "linear",
    ) -> None:
        super().__init__()
        checks.size("input_size", input_size), checks.size("hidden_size", hidden_size)
        dispatch.check_name(backend)
        self.cell, self.backend = cell, backend
        self._spec = cell.spec(
            input_size, hidden_size, bias_mode="double" if bias else "none", input_mode=input_mode
        )
        self.input_size, self.hidden_size = self._spec.input_size, self._spec.hidden_size
        self.bias = bias
        slots = params.module_slots(self._spec)
        self._names = [slot.name.removesuffix("_l0") for slot in slots]
        for name, slot in zip(self._names, slots):
            parameter = torch.empty(slot.shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(parameter))
        if not bias:
            self.register_parameter("bias_ih", None)
            self.register_parameter("bias_hh", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every parameter from U(-1/sqrt(H), 1/sqrt(H)), as `torch.nn` does."""
        bound = 1.0 / math.sqrt(max(1, self.hidden_size))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def __prepare_scriptable__(self) -> NoReturn:
        foreign.refuse_script(self)

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults, as torch prints them."""
        words = [f"{self.input_size}, {self.hidden_size}"]
        if self.bias is not True:
            words.append(f"bias={self.bias}")
        if getattr(self, "nonlinearity", "tanh") != "tanh":
            words.append(f"nonlinearity={getattr(self, 'nonlinearity')}")  # noqa: B009
        if self._spec.input_mode != "linear":
            words.append(f"input_mode={self._spec.input_mode!r}")
        return ", ".join(words)

    def _repeated(self, input: Any, hx: Any) -> Sequence[Tensor] | None:
        """The next states of a step like an earlier one; None if it is not known to be one."""
        if torch.compiler.is_compiling():
            return None
        found = self._call_cache.run(self, "step", input, hx)
        return found and found[1:]

    def _step(self, input: Tensor, hx: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        name = type(self).__name__
        checks.dense("input", input)
        if input.dim() not in (1, 2):
            raise ValueError(f"{name}: Expected input to be 1D or 2D, got {input.dim()}D instead")
        batched = input.dim() == 2
        dims = (0,) if batched else (0, 0)
        equal = checks.equality(input.shape[-1])
        if not equal(input.shape[-1], self.input_size):
            raise RuntimeError(
                f"input has inconsistent input_size: got {input.shape[-1]} "
                f"expected {self.input_size}"
            )
        states = None
        if hx is not None:
            for index, state in enumerate(hx):
                checks.dense("hx", state)
                if state.dim() != input.dim():
                    raise ValueError(
                        f"{name}: Expected hx[{index}] to be {input.dim()}D like the input, "
                        f"got {state.dim()}D instead"
                    )
                if not equal(state.shape[:-1], input.shape[:-1]):
                    raise RuntimeError(
                        f"Input batch size {input.shape[0]} doesn't match hidden{index} batch size "
                        f"{state.shape[0]}"
                    )
                if not equal(state.shape[-1], self.hidden_size):
                    raise RuntimeError(
                        f"hidden{index} has inconsistent hidden_size: got {state.shape[-1]}, "
                        f"expected {self.hidden_size}"
                    )
            states = [tensors.unsqueezed("hx", state, *dims) for state in hx]
        x = tensors.unsqueezed("input", input, *dims)
        given = [getattr(self, name) for name in self._names]
        compiling, casts = torch.compiler.is_compiling(), autocast.wanted(x.device) is not None
        x, weights, states = autocast.applied(x, given, states)
        if casts and not compiling:
            cast = prepared_calls.RecurrentCall(
                self._spec, x, weights, states or (), False, self.backend
            )
            own = self._parameters.keys() >= {*self._names} and tensors.is_ordered(x)
            y, finals = self._cast(cast, NO_MASKS, remember=not own)
        else:
            y, finals, _ = functional.recurrent(
                self._spec, x, weights, states, training=self.training, backend=self.backend
            )
        after = tuple(state[0] if batched else state[0, 0] for state in finals)
        if not compiling:
            call = prepared_calls.RecurrentCall(
                self._spec, x, given, states or (), False, self.backend
            )
            asked = hx[0] if hx is not None and len(hx) == 1 else hx  # as the caller has it
            self._call_cache.remember(self, "step", (input, asked, NO_MASKS), call, (y, *after))
        return after


class LSTMCell(CellModule):
    """One LSTM step: `torch.nn.LSTMCell`. Equations: `openrnn.LSTM`.

    Shapes:
        input (B, I) or (I,), hx = (h, c) of (B, H) or (H,) -> (h', c')

    Example:
        >>> import torch, openrnn
        >>> h, c = openrnn.LSTMCell(3, 4)(torch.randn(2, 3))
        >>> tuple(h.shape)
        (2, 4)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        checks.construction(LSTMCell, args, kwargs)
        super().__init__(cells.lstm, *args, **kwargs)

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """(h', c') after one step."""
        states = self._repeated(input, hx)
        if states is not None:
            h, c = states
            return h, c
        if not isinstance(input, Tensor) or (hx is not None and foreign.answers(hx)):
            found: tuple[Tensor, Tensor] = foreign.call(self, input, hx=hx)
            return found
        if hx is not None:
            checks.cell_states("LSTMCell", self.cell.states, hx)
        h, c = self._step(input, hx)
        return h, c


class _OneStateCell(CellModule):
    _title: str  # its name in messages

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """h' after one step."""
        states = self._repeated(input, hx)
        if states is not None:
            return states[0]
        if not isinstance(input, Tensor) or (hx is not None and foreign.answers(hx)):
            found: Tensor = foreign.call(self, input, hx=hx)
            return found
        if hx is None:
            return self._step(input, None)[0]
        checks.cell_states(self._title, self.cell.states, hx)
        return self._step(input, (hx,))[0]


class GRUCell(_OneStateCell):
    """One GRU step: `torch.nn.GRUCell`. Equations: `openrnn.GRU`.

    Shapes:
        input (B, I) or (I,), hx (B, H) or (H,) -> h'
    """

    _title = "GRUCell"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        checks.construction(GRUCell, args, kwargs)
        super().__init__(cells.gru, *args, **kwargs)


class RNNCell(_OneStateCell):
    """One Elman step: `torch.nn.RNNCell`. Equations: `openrnn.RNN`.

    Shapes:
        input (B, I) or (I,), hx (B, H) or (H,) -> h'
    """

    _title = "RNNCell"
    _fixed = CellModule._fixed | {"nonlinearity"}

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str = "auto",
        input_mode: str = "linear",
    ) -> None:
        known = {"tanh": cells.rnn_tanh, "relu": cells.rnn_relu}
        if nonlinearity not in known:
            raise RuntimeError(f"Unknown nonlinearity: {nonlinearity}")
        super().__init__(
            known[nonlinearity], input_size, hidden_size, bias, device, dtype, backend=backend,
            input_mode=input_mode,
        )  # fmt: skip
        self.nonlinearity = nonlinearity


# for `help`, editors and `torch.nn.utils.skip_init`
for _face in (LSTMCell, GRUCell):
    _names = list(signature(CellModule).parameters.values())[1:]
    _face.__signature__ = Signature(_names)  # type: ignore[union-attr]  # looked up by inspect
