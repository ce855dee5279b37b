"""What other libraries read of the layers of `torch.nn` beyond the call, with its meaning there."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from openrnn import params
from openrnn.nn.network import Network


class TorchNames(Network):
    """The weights and checks of `torch.nn.RNNBase` under its names; no call needs them."""

    _check_input: Callable[[Tensor], None]  # of `Layer`, as is the next
    _states: Callable[[Any, int, int], list[Tensor] | None]

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The parameters of each layer and direction, in torch's order."""
        weights = dict(zip(self._names, self.weights()))
        return [[weights[name] for name in names] for names in self._all_weights]

    @property
    def _all_weights(self) -> list[list[str]]:
        """The names of the parameters of each layer and direction."""
        rows: list[list[str]] = [[] for _ in range(self._spec.chains)]
        for slot in params.module_slots(self._spec):
            rows[slot.chain].append(slot.name)
        return rows

    @property
    def _flat_weights_names(self) -> list[str]:
        return list(self._names)

    @property
    def _flat_weights(self) -> list[Tensor]:
        """The parameters as a call reads them now."""
        return self.weights()

    @_flat_weights.setter
    def _flat_weights(self, given: Sequence[Any]) -> None:
        own = self.weights()
        if len(given) != len(own) or any(a is not b for a, b in zip(given, own)):
            raise AttributeError(
                f"{type(self).__name__} reads its weights by their names at each call: set "
                f"{', '.join(self._names[:2])}, ... in place of _flat_weights"
            )

    @property
    def qconfig(self) -> Any:
        """What `torch.ao.quantization` noted here; no call reads it."""
        try:
            return self.__dict__["qconfig"]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no attribute 'qconfig'") from None

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        self.__dict__["qconfig"] = value
        if self._precision != "int8":
            warnings.warn(
                f"torch.ao.quantization leaves {type(self).__name__} of openrnn in floating point, "
                "whichever modules it was asked for: openrnn.quantize(model) gives it int8 weights",
                stacklevel=2,
            )

    @qconfig.deleter
    def qconfig(self) -> None:
        self.__dict__.pop("qconfig", None)

    def _init_flat_weights(self) -> None:
        self.flatten_parameters()

    def _update_flat_weights(self) -> None:
        """Nothing: no list of weights is kept that could be out of date."""

    def _weights_have_changed(self) -> bool:
        return False

    def get_expected_hidden_size(
        self, input: Tensor, batch_sizes: Tensor | None
    ) -> tuple[int, int, int]:
        """(L*D, B, O), the shape of h for an input."""
        return self._spec.chains, self._batch(input, batch_sizes), self._spec.state_sizes[0]

    def check_input(self, input: Tensor, batch_sizes: Tensor | None) -> None:
        """Raises what a call raises of an input (T, B, I), or of packed data with batch sizes."""
        dims = 2 if batch_sizes is not None else 3
        if input.dim() != dims:
            raise RuntimeError(f"input must have {dims} dimensions, got {input.dim()}")
        self._check_input(input)

    def check_hidden_size(
        self,
        hx: Tensor,
        expected_hidden_size: tuple[int, int, int],
        msg: str = "Expected hidden size {}, got {}",
    ) -> None:
        """Raises RuntimeError where a state has another shape."""
        if hx.shape != expected_hidden_size:
            raise RuntimeError(msg.format(expected_hidden_size, list(hx.shape)))

    def check_forward_args(self, input: Tensor, hidden: Any, batch_sizes: Tensor | None) -> None:
        """Raises what a call raises of an input and its states."""
        self.check_input(input, batch_sizes)
        self._states(hidden, self._batch(input, batch_sizes), 3)

    def permute_hidden(self, hx: Any, permutation: Tensor | None) -> Any:
        """States with their batch in another order."""
        if permutation is None:
            return hx
        if isinstance(hx, Tensor):
            return hx.index_select(1, permutation)
        return tuple(state.index_select(1, permutation) for state in hx)

    def _batch(self, input: Tensor, batch_sizes: Tensor | None) -> int:
        if batch_sizes is not None:
            return int(batch_sizes[0])
        return input.shape[0 if self.batch_first else 1]
