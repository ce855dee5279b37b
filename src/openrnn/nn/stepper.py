"""A layer that steps through time with states of its own, for loops of policies and samplers."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from openrnn import functional, prepared_calls, tensors
from openrnn.nn.call_guard import CallGuard, can_guard, has_unguarded_mode, is_unobserved

_address, _storage = Tensor.data_ptr, Tensor.untyped_storage
_increment_version = torch.autograd.graph.increment_version

if TYPE_CHECKING:
    from openrnn.nn.base import Layer


class Stepper:
    """What `Layer.stepper` returns: `stepper(x_t)` is one step from the states that it keeps.

        y_t, s_t = layer.step(x_t, s_{t-1})

    It records no gradient. It reads the layer's parameters as they are at each step. The result is
    always the same tensor, which the next step overwrites. One thread at a time may call it.

    Where the cpu backend runs the layer in float32 or float64, a step allocates nothing: its
    kernels are bound to the memory of the parameters, the states and the result. In 16 bits it
    converts its tensors, and copies the results to that memory. Results have the dtype of the
    parameters, under autocast, too. On a GPU the third step with the same parameters records a CUDA
    graph of it, which later steps replay; a change of parameters discards it. Elsewhere each step
    is a call of `Layer.step` whose results are copied into that memory. A stepper cannot be
    captured in a CUDA graph of the caller's: capture `Layer.step` with state tensors of your own.

    Args:
        layer: with the forward direction alone.
        batch: B; None: x_t is (I,), and y_t (O,).

    Raises:
        ValueError: the layer has a reverse direction, or batch is no number from 1.
        RuntimeError: a step is called while a CUDA graph is captured.

    Example:
        >>> import torch, openrnn
        >>> lstm, x = openrnn.LSTM(3, 4), torch.randn(6, 2, 3)
        >>> stepper = lstm.stepper(2)
        >>> y = [stepper(x_t).clone() for x_t in x]
        >>> torch.allclose(lstm(x)[0], torch.stack(y), atol=1e-6)
        True
    """

    def __init__(self, layer: "Layer", batch: int | None = None) -> None:
        if layer.bidirectional or layer.spec.reverse:
            raise ValueError(
                "stepper needs one direction, forward: a reverse one would have to start at the end"
            )
        if batch is not None and (type(batch) is not int or batch < 1):
            raise ValueError(f"batch must be a number from 1, or None for no batch, got {batch!r}")
        self._layer, self._batch = layer, batch
        self._turn = 0  # the half of the states that the next step reads; it writes the other
        self._make_room(layer._any_weight())
        self._made_of = _computed_of(layer)
        # steps bound to memory: for tensors like those of the guard, with these settings, and
        # parameters at these addresses
        self._guard: CallGuard | None = None
        self._bound: tuple[Any, ...] = ()
        self._runs: list[Callable[[Tensor], None]] = []  # by turn
        self._seen: tuple[Any, ...] = ()  # what the step before was bound to, if it was not kept

    def __call__(self, x_t: Tensor) -> Tensor:
        """The output of the next step.

        Shapes:
            x_t (B, I), or (I,) without a batch -> y_t (B, O) or (O,), overwritten by the next step

        Raises:
            TypeError, ValueError, RuntimeError: as `Layer.step`.
        """
        every = x_t, *self._parameters()
        if (
            self._guard is None
            or torch.compiler.is_compiling()
            or has_unguarded_mode()
            or not can_guard(every)
            or not self._guard(every)
            or self._bound != self._bound_to(every)
        ):
            return self._step(x_t)
        if _storage(x_t).data_ptr() == self._memory:
            x_t = x_t.clone()  # threads write the result while others still read x_t
        self._runs[self._turn](x_t)
        self._turn ^= 1
        _increment_version(self._y)
        return self._y

    def __getstate__(self) -> dict[str, Any]:
        # a copy has memory of its own, to which its first step binds it
        return {**self.__dict__, "_guard": None, "_bound": (), "_runs": [], "_seen": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._memory = _storage(self._y).data_ptr()

    @property
    def state(self) -> Any:
        """A copy of the states, as `Layer.step` returns them; set them as it takes them."""
        return self._layer._give(tuple(state.clone() for state in self._halves[self._turn]))

    @state.setter
    def state(self, hx: Any) -> None:
        batched = self._batch is not None
        found = self._layer._states(hx, self._batch or 1, 3 if batched else 2)
        with torch.no_grad():
            for index, state in enumerate(self._halves[self._turn]):
                if found is None:
                    state.zero_()
                else:
                    state.copy_(found[index] if batched else found[index].squeeze(1))

    def reset(self, mask: Tensor | None = None) -> None:
        """Puts zeros in place of the states, of all sequences or of those in a mask (B,).

        Raises:
            TypeError: the mask is no tensor.
            ValueError: the mask has another shape, or numbers other than 0 and 1.
        """
        if mask is not None and not isinstance(mask, Tensor):
            raise TypeError(f"mask must be a tensor (B,), got {type(mask).__name__}")
        if mask is not None and (self._batch is None or mask.shape != (self._batch,)):
            wanted = "None, as there is no batch" if self._batch is None else f"({self._batch},)"
            raise ValueError(f"mask must have shape {wanted}, got {tuple(mask.shape)}")
        if mask is not None:
            mask = functional.truth_values("mask", mask)
        with torch.no_grad():
            for state in self._halves[self._turn]:
                if mask is None:
                    state.zero_()
                else:
                    state.masked_fill_(mask.to(state.device)[:, None], 0)

    def _parameters(self) -> list[Any]:
        own, names = self._layer._reads()
        return [own.get(name) for name in names]

    def _bound_to(self, every: Sequence[Tensor]) -> tuple[Any, ...]:
        """What steps are bound to beside x: where parameters lie, settings, threads.

        On a GPU also the values of parameters, of which a graph may have read a copy.
        """
        layer, params = self._layer, every[1:]
        settings = layer.training, layer.dropout, layer.backend, torch.get_num_threads()
        bound = (*settings, *map(_address, params))
        if not every[0].is_cuda:
            return bound
        return (*bound, *(0 if param.is_inference() else param._version for param in params))

    def _weight_to_follow(self, made_of: set[tuple[torch.dtype, torch.device]]) -> Tensor | None:
        """A tensor of the layer's dtype and device; None where it has those of the last step.

        Weights that something computes are left to the step, which would compute them again: they
        are as before while all that the layer holds has the dtypes and devices that it had.

        Args:
            made_of: see `_computed_of`.
        """
        if made_of and made_of == self._made_of:
            return None
        self._layer._run_weight_hooks()
        return self._layer._any_weight()

    def _make_room(self, like: Tensor) -> None:
        """Memory for states and result, of the dtype and device of the parameters."""
        spec, lead = self._layer.spec, () if self._batch is None else (self._batch,)
        with torch.inference_mode(False):
            self._halves = [
                [like.new_zeros((spec.num_layers, *lead, width)) for width in spec.state_sizes]
                for _ in range(2)
            ]
            self._y = like.new_empty((*lead, spec.output_size))
        self._memory = _storage(self._y).data_ptr()

    def _step(self, x_t: Tensor) -> Tensor:
        """A step as `Layer.step` does it; then the next ones are bound, if they can be."""
        if self._y.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a stepper cannot be captured in a CUDA graph, as its states alternate between two "
                "buffers; capture layer.step(x_t, state) with tensors of your own for the states"
            )
        layer, before = self._layer, self._halves[self._turn]
        lead = () if self._batch is None else (self._batch,)
        if isinstance(x_t, Tensor) and x_t.dim() in (1, 2) and tuple(x_t.shape[:-1]) != lead:
            raise ValueError(
                f"x_t must have shape {(*lead, layer.input_size)}, as this stepper was made with "
                f"batch={self._batch}, got {tuple(x_t.shape)}"
            )
        made_of = _computed_of(layer)
        with torch.no_grad():
            first = self._weight_to_follow(made_of)
            if first is not None and (first.dtype, first.device) != (self._y.dtype, self._y.device):
                self._make_room(first)
                for state, old in zip(self._halves[self._turn], before):
                    state.copy_(old)
                before = self._halves[self._turn]
            y, after = layer.step(x_t, tuple(before) if len(before) > 1 else before[0])
            self._made_of = made_of
            finals = (after,) if isinstance(after, Tensor) else after
            for state, new in zip((*self._halves[1 - self._turn], self._y), (*finals, y)):
                state.copy_(new)
        self._turn ^= 1
        if not torch.compiler.is_compiling():
            self._bind(x_t)
        return self._y

    def _bind(self, x_t: Tensor) -> None:
        """Binds steps like the one that was made, if its backend can."""
        layer, every = self._layer, (x_t, *self._parameters())
        self._guard = None
        if layer.own_weights() is None or not can_guard(every) or not is_unobserved(x_t):
            return
        if not tensors.is_plain(*every):
            return
        if x_t.is_cuda:  # a capture costs milliseconds, too much for parameters that change
            seen, self._seen = self._seen, (*self._bound_to(every), *x_t.stride())
            if seen != self._seen:
                return
        batched = self._batch is not None
        x = x_t[None] if batched else x_t[None, None]
        runs = []
        for turn in (0, 1):
            states = [state if batched else state[:, None] for state in self._halves[turn]]
            call = prepared_calls.RecurrentCall(
                layer.spec, x, every[1:], states, layer.training, layer.backend, layer._precision
            )
            run = prepared_calls.bind(call, (self._y, *self._halves[1 - turn]))
            if run is None:
                return
            runs.append(run)
        self._guard, self._runs = CallGuard(every), runs
        self._bound = self._bound_to(every)


def _computed_of(layer: "Layer") -> set[tuple[torch.dtype, torch.device]]:
    """What computed weights are made of, of those of a layer; empty where nothing computes them."""
    if layer.own_weights() is not None:
        return set()
    return {(held.dtype, held.device) for held in (*layer.parameters(), *layer.buffers())}
