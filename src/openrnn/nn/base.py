"""What all layers share: parameters under torch's names, and the way to `functional`."""

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from openrnn import cells, dispatch, functional, params, tensors
from openrnn.cells import Cell
from openrnn.nn import autocast, checks, flat, foreign
from openrnn.spec import Spec, clip_bounds

PACKED_STEPS = 65_535  # longer packed sequences are padded


class Layer(nn.Module):
    """A stack of layers over one cell; `LSTM`, `GRU`, `RNN` and `Recurrent` are its faces.

    `forward(input, hx=None, *, lengths=None, reset=None, reset_state=None, return_states=False,
    generator=None, padding_value=0.0)`; the faces say what each returns.
    """

    cell: Cell
    bias: bool
    batch_first: bool
    dropout: float
    backend: str

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
            reset_dropout_state=reset_dropout_state, recompute=recompute,
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
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's
        # in another process the same cell may have another key
        self._spec = self._spec.with_(cell=self.cell.key)

    @property
    def spec(self) -> Spec:
        """What this network is; follows `dropout`, the one attribute that may be changed later."""
        if self._spec.dropout != self.dropout:
            self._spec = self._spec.with_(dropout=float(self.dropout))
        return self._spec

    def __prepare_scriptable__(self) -> NoReturn:
        foreign.refuse_script(self)

    def reset_parameters(self) -> None:
        """Draws every parameter from U(-1/sqrt(H), 1/sqrt(H)), as `torch.nn` does."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The parameters of each layer and direction, in torch's order."""
        rows: list[list[Tensor]] = [[] for _ in range(self._spec.chains)]
        for slot in params.module_slots(self._spec):
            rows[slot.chain].append(getattr(self, slot.name))
        return rows

    def flatten_parameters(self) -> None:
        """Lays parameters on a CUDA device side by side, where cuDNN reads them without a copy.

        Never needed: it is done when a layer is made, moved, converted or deep-copied, and layers
        whose parameters lie elsewhere work as well.
        """
        own: dict[str, Any] = self._parameters
        if flat.addresses([own.get(name) for name in self._names]):
            flat.lay(self._spec, own)

    def _apply(self, fn: Any, recurse: bool = True) -> "Layer":
        own: dict[str, Any] = self._parameters
        before = {name: flat.addresses([own.get(name)]) for name in self._names}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's
        # what stays where it was may be shared, as by processes that train together
        if all(flat.addresses([own.get(name)]) != there for name, there in before.items()):
            self.flatten_parameters()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Layer":
        made = self.__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__dict__, memo))
        made.flatten_parameters()
        return made

    def weights(self) -> list[Tensor]:
        """The parameters in the order of `openrnn.params.module_slots`, as they are now."""
        if torch.compiler.is_compiling():
            return [getattr(self, name) for name in self._names]
        own: dict[str, Any] = self._parameters
        try:
            return [own[name] for name in self._names]
        except KeyError:  # parametrized or weight-normed ones are attributes, not parameters
            return [getattr(self, name) for name in self._names]

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Any = None,
        *,
        lengths: Tensor | None = None,
        reset: Tensor | None = None,
        reset_state: Any = None,
        return_states: bool = False,
        generator: torch.Generator | None = None,
        padding_value: float = 0.0,
    ) -> Any:
        """Runs the layer; see the class for shapes."""
        checks.reset_state_alone(reset, reset_state)
        if isinstance(input, PackedSequence):
            if lengths is not None or reset is not None or return_states or padding_value:
                raise ValueError(
                    "a PackedSequence takes no lengths, reset, return_states or padding_value: "
                    "pass the padded tensor with lengths instead"
                )
            return self._forward_packed(input, hx, generator)
        if not isinstance(input, Tensor):
            return foreign.call(
                self, input, hx=hx, lengths=lengths, reset=reset, reset_state=reset_state,
                return_states=return_states or None, generator=generator,
                padding_value=padding_value or None,
            )  # fmt: skip
        checks.dense("input", input)
        name, dims = type(self).__name__, input.dim()
        if dims not in (2, 3):
            got = f"{dims}D tensor" if name == "RNN" else f"{dims}D"  # torch's two spellings
            raise ValueError(f"{name}: Expected input to be 2D or 3D, got {got} instead")
        batched = dims == 3
        if not batched:
            if lengths is not None:
                raise ValueError("lengths need a batch: input is 2-D (steps, features)")
            input = tensors.unsqueezed("input", input, 1)
            if reset is not None:
                reset = tensors.readable("reset", reset).unsqueeze(-1)
        elif self.batch_first:
            input = tensors.transposed("input", input)
            reset = functional.turned_mask(reset) if reset is not None else None
        self._check_input(input)
        states = self._states(hx, input.shape[1], 3 if batched else 2)
        reset_states = self._reset_states(reset_state, input.shape[1], batched)
        y, finals, all_states = self._run(
            input, states, lengths, reset, reset_states, return_states, generator
        )
        if padding_value:
            y = functional.padded(y, lengths, padding_value)
        if not batched:
            y = y.squeeze(1)
            finals = tuple(state.squeeze(1) for state in finals)
            all_states = tuple(states.squeeze(2) for states in all_states)
        elif self.batch_first:
            y = y.transpose(0, 1)
            all_states = tuple(states.transpose(1, 2) for states in all_states)
        if return_states:
            return y, self._give(finals), self._give(all_states)
        return y, self._give(finals)

    def step(
        self,
        x_t: Tensor,
        state: Any = None,
        *,
        reset: Tensor | None = None,
        reset_state: Any = None,
    ) -> tuple[Tensor, Any]:
        """One step in time, as a policy acting or a model sampling takes it.

        Shapes:
            x_t (B, I) or (I,), state as `forward` takes and returns it, reset (B,),
            reset_state as `forward` takes it -> y_t (B, O) or (O,), the next state

        Raises:
            ValueError: the layer is bidirectional, or x_t is not 1-D or 2-D.

        Example:
            >>> import torch, openrnn
            >>> lstm, x = openrnn.LSTM(3, 4), torch.randn(6, 2, 3)
            >>> y, state = lstm.step(x[0])
            >>> torch.allclose(lstm(x)[0][0], y, atol=1e-6)
            True
        """
        checks.reset_state_alone(reset, reset_state)
        if self.bidirectional:
            raise ValueError(
                "step needs one direction: a reverse one would have to start at the end"
            )
        if not isinstance(x_t, Tensor):
            raise TypeError(f"step needs x_t as a Tensor, got {type(x_t).__name__}")
        checks.dense("x_t", x_t)
        if x_t.dim() not in (1, 2):
            raise ValueError(f"step needs x_t (batch, features) or (features,), got {x_t.dim()}-D")
        batched = x_t.dim() == 2
        input = tensors.unsqueezed("x_t", x_t, *((0,) if batched else (0, 0)))
        self._check_input(input)
        states = self._states(state, input.shape[1], 3 if batched else 2)
        reset_states = self._reset_states(reset_state, input.shape[1], batched)
        mask = tensors.readable("reset", reset).reshape(1, -1) if reset is not None else None
        y, finals, _ = self._run(input, states, None, mask, reset_states, False, None)
        if not batched:
            return y[0, 0], self._give(tuple(state.squeeze(1) for state in finals))
        return y[0], self._give(finals)

    def _forward_packed(
        self, packed: PackedSequence, hx: Any, generator: torch.Generator | None
    ) -> tuple[PackedSequence, Any]:
        checks.packed(packed)
        self._check_input(packed.data)
        states = self._states(hx, int(packed.batch_sizes[0]), 3)
        if packed.sorted_indices is not None and states is not None:
            states = [state.index_select(1, packed.sorted_indices) for state in states]
        if self._takes_packed(packed, states, generator):
            y, finals, _ = self._run(
                packed.data, states, functional.packed_lengths(packed), None, None, False, generator
            )
            found = PackedSequence(
                y, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices
            )
        else:
            x, lengths, rows = functional.unpack(packed)
            y, finals, _ = self._run(x, states, lengths, None, None, False, generator)
            found = functional.repack(y, rows, packed)
        if packed.unsorted_indices is not None:
            finals = tuple(state.index_select(1, packed.unsorted_indices) for state in finals)
        return found, self._give(finals)

    def _takes_packed(
        self,
        packed: PackedSequence,
        states: list[Tensor] | None,
        generator: torch.Generator | None,
    ) -> bool:
        """Whether the backend reads packed sequences as they are."""
        data = packed.data
        if not data.is_cuda or packed.batch_sizes.numel() > PACKED_STEPS:
            return False
        dtype = autocast.wanted(data.device)
        data = data if dtype is None else autocast.cast((data,), dtype)[0]
        return functional.takes_packed(
            self.spec, data, self.weights(), states, self.training, generator, self.backend
        )

    def _run(
        self,
        x: Tensor,
        states: list[Tensor] | None,
        lengths: Tensor | None,
        reset: Tensor | None,
        reset_states: list[Tensor] | None,
        return_states: bool,
        generator: torch.Generator | None,
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        weights = self.weights()
        dtype = autocast.wanted(x.device)
        if dtype is not None:
            x, *weights = autocast.cast((x, *weights), dtype)
            states = states and autocast.cast(states, dtype)
            reset_states = reset_states and autocast.cast(reset_states, dtype)
        checks.same_dtype(x, weights[0])
        return functional.recurrent(
            self.spec, x, weights, states, lengths=lengths, reset=reset, reset_states=reset_states,
            return_states=return_states, training=self.training, generator=generator,
            backend=self.backend,
        )  # fmt: skip

    def _check_input(self, input: Tensor) -> None:
        first = self._parameters.get(self._names[0])
        # one computed by a parametrization, which may count its calls, is looked at in `_run`
        if first is not None and not torch._C._is_any_autocast_enabled():
            checks.same_dtype(input, first)
        if input.shape[-1] != self.input_size:
            raise RuntimeError(
                f"input.size(-1) must be equal to input_size. "
                f"Expected {self.input_size}, got {input.shape[-1]}"
            )

    def _take(self, hx: Any) -> Sequence[Tensor]:
        """The states that a user gave, as a sequence."""
        if isinstance(hx, Tensor):
            return (hx,)
        if not isinstance(hx, Sequence):
            raise TypeError(f"states must be a Tensor or a tuple of them, got {type(hx).__name__}")
        return tuple(hx)

    def _give(self, states: tuple[Tensor, ...]) -> Any:
        """The states as a user gets them."""
        return states

    def _states(self, hx: Any, batch: int, dims: int) -> list[Tensor] | None:
        """Initial states, each (L*D, B, O or H), or None for zeros."""
        if hx is None:
            return None
        states = self._take(hx)
        names = self.cell.states
        if len(states) != len(names):
            raise RuntimeError(
                f"{type(self).__name__} expects {len(names)} states ({', '.join(names)}), "
                f"got {len(states)}"
            )
        for state in states:
            checks.dense("hx", state)
            if state.dim() != dims:
                checks.wrong_dims(states, dims)
        if dims == 2:
            states = [tensors.unsqueezed("hx", state, 1) for state in states]
        for place, (state, width) in enumerate(zip(states, self._spec.state_sizes)):
            wanted = (self._spec.chains, batch, width)
            if state.shape != wanted:
                which = f"hidden[{place}]" if len(states) > 1 else "hidden"
                raise RuntimeError(f"Expected {which} size {wanted}, got {list(state.shape)}")
        return list(states)

    def _reset_states(self, reset_state: Any, batch: int, batched: bool) -> list[Tensor] | None:
        """What resets put in place, expanded to (L*D, B, O or H), or None for zeros."""
        if reset_state is None:
            return None
        wanted = [(self._spec.chains, batch, width) for width in self._spec.state_sizes]
        states = checks.reset_states(self._take(reset_state), wanted, batched)
        return [
            tensors.viewed("reset_state", state, partial(torch.broadcast_to, size=shape))
            for state, shape in zip(states, wanted)
        ]

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
        ):
            if getattr(self._spec, name) != plain:
                words.append(f"{name}={getattr(self._spec, name)!r}")
        return ", ".join(words)
