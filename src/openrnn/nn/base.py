"""What all layers share: the way of a call from a user to `functional`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from openrnn import functional, packed, prepared_calls, tensors
from openrnn.nn import autocast, checks, foreign, jagged
from openrnn.nn.call_cache import NO_MASKS, Masks, is_kernel_mask, kernel_masks, of_step
from openrnn.nn.stepper import Stepper
from openrnn.nn.torch_names import TorchNames

is_compiling = torch.compiler.is_compiling
PACKED_STEPS = 65_535  # longer packed sequences are padded


class Layer(TorchNames):
    """A stack of layers over one cell: what `LSTM`, `GRU`, `RNN` and `Recurrent` share."""

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
        """Runs the layer over all steps.

        Args:
            input: (T, B, I), (B, T, I) with batch_first, (T, I) without a batch, a PackedSequence,
                or a jagged nested tensor.
            hx: the first states, under torch's name, each (L*D, B, O or H), or (L*D, O or H)
                without a batch: a tensor where there is one, else a tuple; zeros by default.
            lengths, reset, reset_state, return_states: as the class says.
            generator, padding_value: as the class says.

        Returns:
            y (T, B, D*O) in the layout of input, the final states like hx and, with
            return_states, the states after each step, (L*D, T, B, O or H) in the layout of input.

        Raises:
            RuntimeError: sizes of input or hx are not the layer's, in torch's words.
            ValueError: lengths, reset or reset_state have another shape or are out of range, or do
                not go with input; the dtypes of input and parameters differ.
            TypeError: input or a state is no tensor.
            NoBackendError: the named backend does not run the call; the message says why.
        """
        # the check of a number costs more
        if type(padding_value) is not float and type(padding_value) is not int:
            padding_value = foreign.padding(padding_value)
        bare = reset_state is None and generator is None
        masks: Masks | None = NO_MASKS
        if not bare or return_states or padding_value or is_compiling():
            masks = None
        elif lengths is not None or reset is not None:
            masks = kernel_masks(input, lengths, reset, self.batch_first)
        options = lengths, reset, reset_state, generator, return_states, padding_value
        if masks is None:
            return self._forward(input, hx, *options)
        found = self._call_cache.run(self, "forward", input, hx, masks)
        if found is None:
            return self._forward(input, hx, *options, remembered=masks)
        y, finals = found[0], self._give(tuple(found[1:]))
        return (y.transpose(0, 1) if self.batch_first and y.dim() == 3 else y), finals

    def _forward(
        self,
        given: Tensor | PackedSequence,
        hx: Any,
        lengths: Tensor | None,
        reset: Tensor | None,
        reset_state: Any,
        generator: torch.Generator | None,
        return_states: bool,
        padding_value: float,
        remembered: Masks | None = None,
    ) -> Any:
        """Any call; `remembered`: its masks, if it is to be remembered."""
        functional.check_generator(generator)
        checks.reset_state_alone(reset, reset_state)
        if isinstance(given, PackedSequence) or (isinstance(given, Tensor) and given.is_nested):
            bare = lengths is None and reset is None
            return self._forward_ragged(
                given, hx, generator, bare and not return_states and not padding_value
            )
        if not isinstance(given, Tensor):
            return foreign.call(
                self, given, hx=hx, lengths=lengths, reset=reset, reset_state=reset_state,
                return_states=return_states or None, generator=generator,
                padding_value=padding_value or None,
            )  # fmt: skip
        checks.dense("input", given)
        checks.input_dims(type(self).__name__, given)
        batched, input = given.dim() == 3, given
        if not batched:
            if lengths is not None:
                raise ValueError("lengths need a batch: input is 2-D (steps, features)")
            input = tensors.unsqueezed("input", input, 1)
            if reset is not None:
                reset = checks.of_steps(tensors.readable("reset", reset)).unsqueeze(-1)
        elif self.batch_first:
            input = tensors.transposed("input", input)
            reset = functional.transposed_mask(reset) if reset is not None else None
        if remembered is not None:
            lengths, reset = remembered  # which need no other copy
        self._check_input(input)
        states = self._states(hx, input.shape[1], 3 if batched else 2)
        reset_states = self._reset_states(reset_state, input.shape[1], batched)
        y, finals, all_states = self._run(
            input, states, lengths, reset, reset_states, return_states, generator,
            remembered is not None,
        )  # fmt: skip
        if padding_value:
            y = functional.padded(y, lengths, padding_value)
        if not batched:
            y = y.squeeze(1)
            finals = tuple(state.squeeze(1) for state in finals)
            all_states = tuple(states.squeeze(2) for states in all_states)
        if remembered is not None:
            self._remember("forward", (given, hx), (input, states), remembered, (y, *finals))
        if batched and self.batch_first:
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

        The host never waits for the device, so a CUDA graph can capture it, with tensors of the
        caller's for x_t and the states; `stepper` records such a graph itself.

        Shapes:
            x_t (B, I) or (I,), state as `forward` takes it (as hx) and returns it, reset (B,),
            reset_state as `forward` takes it -> y_t (B, O) or (O,), the next state

        Raises:
            ValueError: the layer has a reverse direction, or x_t is not 1-D or 2-D.

        Example:
            >>> import torch, openrnn
            >>> lstm, x = openrnn.LSTM(3, 4), torch.randn(6, 2, 3)
            >>> y, state = lstm.step(x[0])
            >>> torch.allclose(lstm(x)[0][0], y, atol=1e-6)
            True
        """
        if self._forward_pre_hooks:
            self._run_weight_hooks()
        repeats = not is_compiling() and reset_state is None
        repeats = repeats and (reset is None or is_kernel_mask(reset, x_t))
        if repeats:
            found = self._call_cache.run(self, "step", x_t, state, of_step(reset))
            if found is not None:
                y_t, *states = found
                return y_t, self._give(tuple(states))
        checks.reset_state_alone(reset, reset_state)
        if self.bidirectional or self._spec.reverse:
            raise ValueError(
                "step needs one direction, forward: a reverse one would have to start at the end"
            )
        if not isinstance(x_t, Tensor):
            raise TypeError(f"step needs x_t as a Tensor, got {type(x_t).__name__}")
        checks.dense("x_t", x_t)
        if x_t.dim() not in (1, 2):
            raise ValueError(f"step needs x_t (batch, features) or (features,), got {x_t.dim()}-D")
        batched = x_t.dim() == 2
        input = tensors.unsqueezed("x_t", x_t, *((0,) if batched else (0, 0)))
        self._check_input(input)
        initial = self._states(state, input.shape[1], 3 if batched else 2)
        reset_states = self._reset_states(reset_state, input.shape[1], batched)
        ends = None if reset is None else _of_rows(reset, x_t)
        y, finals, _ = self._run(input, initial, None, ends, reset_states, False, None, repeats)
        y = y[0] if batched else y[0, 0]
        if not batched:
            finals = tuple(state.squeeze(1) for state in finals)
        if repeats:
            self._remember("step", (x_t, state), (input, initial), of_step(reset), (y, *finals))
        return y, self._give(finals)

    def stepper(self, batch: int | None = None) -> Stepper:
        """Steps with states kept inside, which cost the host less than `step`; see `Stepper`.

        Args:
            batch: B of the steps; None: they take (I,).
        """
        return Stepper(self, batch)

    def _remember(
        self,
        kind: str,
        given: tuple[Tensor, Any],
        taken: tuple[Tensor, list[Tensor] | None],
        masks: Masks,
        results: Sequence[Tensor],
    ) -> None:
        """Remembers a call of forward or step.

        Args:
            given: its input and states; taken: the same, time-major and 3-D.
            masks: of a step resets (B,).
            results: y, time-major, and the final states.
        """
        weights = self.own_weights()
        if weights is not None:
            x, states = taken
            reset = masks.reset
            if kind == "step" and reset is not None:
                reset = reset.reshape(1, -1)
            call = prepared_calls.RecurrentCall(
                self.spec, x, weights, states or (), self.training, self.backend, self._precision,
                masks.lengths, reset,
            )  # fmt: skip
            batch_first = kind == "forward" and self.batch_first and given[0].dim() == 3
            self._call_cache.remember(self, kind, (*given, masks), call, results, batch_first)

    def _forward_ragged(
        self, given: Tensor | PackedSequence, hx: Any, generator: torch.Generator | None, bare: bool
    ) -> Any:
        """A call whose input has its lengths; `bare`: it has no options of padded calls."""
        if not bare:
            kind = "nested tensor" if isinstance(given, Tensor) else "PackedSequence"
            raise ValueError(
                f"a {kind} takes no lengths, reset, return_states or padding_value: "
                "pass the padded tensor with lengths instead"
            )
        if not isinstance(given, Tensor):
            return self._forward_packed(given, hx, generator)
        x, lengths, offsets = jagged.padded(given, self.batch_first)
        y, states = self._forward(x, hx, lengths, None, None, generator, False, 0.0)
        return jagged.again(y, lengths, offsets), states

    def _forward_packed(
        self, given: PackedSequence, hx: Any, generator: torch.Generator | None
    ) -> tuple[PackedSequence, Any]:
        checks.packed(given)
        foreign.refuse_packed_export(self)
        self._check_input(given.data)
        states = self._states(hx, int(given.batch_sizes[0]), 3)
        if given.sorted_indices is not None and states is not None:
            states = [state.index_select(1, given.sorted_indices) for state in states]
        if self._takes_packed(given, states, generator):
            y, finals, _ = self._run(
                given.data, states, packed.lengths_of(given), None, None, False, generator
            )
            found = PackedSequence(
                y, given.batch_sizes, given.sorted_indices, given.unsorted_indices
            )
        else:
            x, lengths, rows = packed.unpack(given)
            y, finals = self._padded(x, states, lengths, generator)
            found = packed.repack(y, rows, given)
        if given.unsorted_indices is not None:
            finals = tuple(state.index_select(1, given.unsorted_indices) for state in finals)
        return found, self._give(finals)

    def _padded(
        self, x: Tensor, states: list[Tensor] | None, lengths: Tensor,
        generator: torch.Generator | None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """y and the final states of a packed sequence that was padded."""
        masks = None
        if generator is None and not is_compiling() and autocast.wanted(x.device) is None:
            masks = kernel_masks(x, lengths, None, batch_first=False)  # else `_run` remembers it
        if masks is None:
            return self._run(x, states, lengths, None, None, False, generator)[:2]
        hx = None if states is None else tuple(states)
        found = self._call_cache.run(self, "padded", x, hx, masks)
        if found is not None:
            return found[0], tuple(found[1:])
        y, finals, _ = self._run(x, states, masks.lengths, None, None, False, None)
        self._remember("padded", (x, hx), (x, states), masks, (y, *finals))
        return y, finals

    def _takes_packed(
        self,
        given: PackedSequence,
        states: list[Tensor] | None,
        generator: torch.Generator | None,
    ) -> bool:
        """Whether the backend reads packed sequences as they are."""
        data = given.data
        if not data.is_cuda or given.batch_sizes.numel() > PACKED_STEPS:
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
        repeats: bool = False,
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """y, the final states and all states; `repeats`: the caller remembers the call."""
        casts = autocast.wanted(x.device) is not None
        # what `remember` will prepare: then the call of cast tensors is not prepared as well
        repeats = repeats and casts and self.own_weights() is not None and tensors.is_ordered(x)
        x, weights, states, reset_states = autocast.applied(x, self.weights(), states, reset_states)
        checks.same_dtype(x, weights[0])
        masks = None
        if casts and reset_states is None and generator is None and not return_states:
            masks = None if is_compiling() else kernel_masks(x, lengths, reset, batch_first=False)
        if masks is None:
            return functional.recurrent(
                self.spec, x, weights, states, lengths=lengths, reset=reset,
                reset_states=reset_states, return_states=return_states, training=self.training,
                generator=generator, backend=self.backend,
            )  # fmt: skip
        call = prepared_calls.RecurrentCall(
            self.spec, x, weights, states or (), self.training, self.backend,
            lengths=masks.lengths, reset=masks.reset,
        )  # fmt: skip
        return *self._cast(call, masks, remember=not repeats), ()

    def _check_input(self, input: Tensor) -> None:
        first = self._parameters.get(self._names[0])
        # one computed by a parametrization, which may count its calls, is looked at in `_run`
        if first is not None and not torch._C._is_any_autocast_enabled():
            checks.same_dtype(input, first)
        if not checks.equality(input.shape[-1])(input.shape[-1], self.input_size):
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
        checks.number_of_states(type(self).__name__, names, len(states))
        for state in states:
            checks.dense("hx", state)
            if state.dim() != dims:
                checks.wrong_dims(states, dims)
        if dims == 2:
            states = [tensors.unsqueezed("hx", state, 1) for state in states]
        equal = checks.equality(batch)
        for index, (state, width) in enumerate(zip(states, self._spec.state_sizes)):
            if not equal(state.shape, wanted := (self._spec.chains, batch, width)):
                which = f"hidden[{index}]" if len(states) > 1 else "hidden"
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


def _of_rows(reset: Any, x_t: Tensor) -> Tensor:
    """Resets (B,) of a step, or of a single row () or (1,), as (1, B)."""
    found: Tensor = tensors.readable("reset", reset)
    wanted = (x_t.shape[0],) if x_t.dim() == 2 else (1,)
    if tuple(found.shape) != wanted and (x_t.dim() == 2 or found.dim()):
        raise ValueError(f"reset must have shape {wanted} (batch), got {tuple(found.shape)}")
    return found.reshape(1, -1)
