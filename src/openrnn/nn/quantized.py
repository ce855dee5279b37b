"""Layers whose gate matrices are int8: `openrnn.quantize` makes them, for inference on CPUs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from openrnn import functional, op, params, problem_key, tensors, time_reversed
from openrnn.backends.base import Call
from openrnn.dispatch import BACKENDS
from openrnn.kernels.cpu.args import INT8_PANEL
from openrnn.memo import memo
from openrnn.nn import autocast
from openrnn.nn.base import Layer
from openrnn.nn.call_cache import Masks
from openrnn.nn.layers import GRU, LSTM, RNN, Recurrent
from openrnn.spec import Problem, Spec

LARGEST = 127


@memo(1024)
def _problem(spec: Spec, lengths: bool, reset: bool, return_states: bool) -> Problem:
    """The problem of a call that the kernels take."""
    return problem_key.for_backend(
        spec, torch.float32, "cpu", grad=False, training=False, lengths=lengths, reset=reset,
        return_states=return_states, precision="int8",
    )  # fmt: skip


@memo(1024)
def _why_not(
    spec: Spec,
    dtype: torch.dtype,
    device: str,
    grad: bool,
    drops: bool,
    transform: bool,
    backend: str,
) -> str | None:
    """Why the kernels do not take a call, in words; or None."""
    if backend not in ("auto", "cpu"):
        return f"backend {backend} does not read them"
    if device != "cpu":
        return f"device {device}, needs cpu"
    if dtype != torch.float32:
        return f"dtype {str(dtype).removeprefix('torch.')}, needs float32"
    for asked, what in ((grad, "a gradient is wanted"), (drops, "dropout is on"),
                        (transform, "a transform is active")):  # fmt: skip
        if asked:
            return what
    cpu = BACKENDS["cpu"]
    return cpu.absent() or next(iter(cpu.refusals(_problem(spec, False, False, False))), None)


class Quantized(Layer):
    """What the quantized layers share: buffers in place of Parameters, and their way of a call.

    Each row of W_ih and W_hh is int8 with a scale of its own. The cpu backend rounds inputs and
    states, row by row and step by step, to the most bits for which int32 sums stay exact: 15 and a
    sign up to 516 columns, 14 at 1,024. Biases, projections and unit vectors stay as they are.

    A call that the kernels do not take makes floating-point weights of the int8 ones and runs with
    these: one that wants a gradient, has dropout on, is compiled, traced, transformed or under
    autocast, names another backend, or has another dtype or device than float32 and the CPU.

    Buffers, for each parameter of the layer:
        weight_ih_l0 and the like: int8 (G, ceil(H / 16), ceil(In / 2), 16, 2), padded with zeros:
            weight[g H + 16 p + u, 2 k + i] lies at [g, p, k, u, i], as the kernels read it
        weight_ih_l0_scale and the like: (G, ceil(H / 16), 16); all others as they were
    """

    _precision = "int8"
    _columns: dict[str, int]  # In of each gate matrix
    _read: list[str]  # names of the buffers that kernels read: all parameters, then the scales
    _shapes: dict[str, tuple[int, ...]]  # of these

    def weights(self) -> list[Tensor]:
        """The parameters in floating point, made from the buffers."""
        found = []
        for name in self._names:
            weight: Tensor = getattr(self, name)
            if name in self._columns:
                scale: Tensor = getattr(self, f"{name}_scale")
                weight = _floating(weight, scale, self.hidden_size, self._columns[name])
            found.append(weight)
        return found

    def _any_weight(self) -> Tensor:
        scale: Tensor = getattr(self, self._read[-1])
        return scale

    def _reads(self) -> tuple[dict[str, Any], list[str]]:
        return self._buffers, self._read

    def own_weights(self) -> list[Tensor] | None:
        """The buffers as the kernels read them; None where no call of this layer could."""
        stored, like = self._stored(), self._any_weight()
        kind = like.dtype, like.device, False, self.training, False, self.backend
        return None if self.why_not_int8(*kind) else stored

    def reset_parameters(self) -> None:
        raise RuntimeError("quantized weights cannot be drawn anew: quantize another layer")

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        super()._load_from_state_dict(
            state_dict, prefix, metadata, strict, missing, unexpected, errors
        )
        given = [state_dict.get(prefix + name) for name in self._columns]
        if any(isinstance(weight, Tensor) and weight.is_floating_point() for weight in given):
            name = f"{prefix[:-1]}, {type(self).__name__}".removeprefix(", ")
            errors.append(
                f"{name}: its weights are int8, and those given are in floating point: "
                "load them first, and call openrnn.quantize afterwards."
            )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weights=int8"

    def why_not_int8(
        self,
        dtype: torch.dtype,
        device: torch.device,
        grad: bool,
        training: bool,
        transform: bool,
        backend: str,
    ) -> str | None:
        """Why a call of this kind runs with floating-point weights, in words; or None."""
        drops = self.spec.drops(training)
        return _why_not(self.spec, dtype, device.type, grad, drops, transform, backend)

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
        lengths = None if lengths is None else tensors.readable("lengths", lengths)
        reset = None if reset is None else tensors.readable("reset", reset)
        stored, given = self._stored(), [*(states or ()), *(reset_states or ())]
        if stored is None or not self._takes(x, stored, given, [lengths, reset]):
            return super()._run(x, states, lengths, reset, reset_states, return_states, generator)
        x, *given = [tensors.check_own_memory("x or a state", tensor) for tensor in (x, *given)]
        count = len(states or ())
        if lengths is not None:
            lengths = functional.check_lengths(lengths, x)
        if reset is not None:
            reset = functional.check_reset(reset, x)
        problem = _problem(self.spec, lengths is not None, reset is not None, return_states)
        call = Call(problem, x, given[:count], stored, lengths, reset, given[count:])
        with torch.no_grad():
            out = time_reversed.forward(BACKENDS["cpu"], call)
        return out.y, tuple(out.finals), tuple(out.all_states)

    def _remember(
        self,
        kind: str,
        given: tuple[Tensor, Any],
        taken: tuple[Tensor, list[Tensor] | None],
        masks: Masks,
        results: Sequence[Tensor],
    ) -> None:
        (x, states), stored = taken, self._stored()
        if stored is not None and self._takes(x, stored, states or [], [*masks]):
            super()._remember(kind, given, taken, masks, results)

    def _stored(self) -> list[Tensor] | None:
        """The buffers, if they are as the kernels read them.

        None where something, such as `Module.type`, gave them another dtype.

        Raises:
            ValueError: one has another shape, or no memory.
        """
        if torch.compiler.is_compiling() or op.tracing():
            return None
        found: list[Tensor] = [getattr(self, name) for name in self._read]
        for name, tensor in zip(self._read, found):
            if tensor.shape != self._shapes[name]:
                wanted, got = self._shapes[name], tuple(tensor.shape)
                raise ValueError(f"{name} must have shape {wanted}, got {got}")
            if tensor.dtype is not (torch.int8 if name in self._columns else torch.float32):
                return None
            if tensors.is_plain(tensor):
                tensors.held(name, tensor)
        return found if all(tensor.is_contiguous() for tensor in found) else None

    def _takes(
        self,
        x: Tensor,
        stored: list[Tensor],
        given: list[Tensor],
        masks: list[Tensor | None],
    ) -> bool:
        """Whether the kernels read these tensors as they are, and nothing watches the call."""
        every = [x, *given, *(mask for mask in masks if mask is not None), *stored]
        casts = autocast.wanted(x.device) is not None
        if casts or op.watched(*every) or not tensors.is_plain(*every):
            return False
        if any(each.dtype is not x.dtype for each in given):
            return False  # the usual way says what is wrong
        if any(each.device != x.device for each in (*given, *stored)):
            return False
        grad = torch.is_grad_enabled() and any(each.requires_grad for each in every)
        transform = problem_key.transformed()
        kind = x.dtype, x.device, grad, self.training, transform, self.backend
        return self.why_not_int8(*kind) is None


class QuantizedLSTM(Quantized, LSTM):
    """`openrnn.LSTM` with int8 gate matrices; see `Quantized`."""


class QuantizedGRU(Quantized, GRU):
    """`openrnn.GRU` with int8 gate matrices; see `Quantized`."""


class QuantizedRNN(Quantized, RNN):
    """`openrnn.RNN` with int8 gate matrices; see `Quantized`."""


class QuantizedRecurrent(Quantized, Recurrent):
    """`openrnn.Recurrent` with int8 gate matrices; see `Quantized`."""


QUANTIZED: dict[type[Layer], type[Quantized]] = {
    LSTM: QuantizedLSTM, GRU: QuantizedGRU, RNN: QuantizedRNN, Recurrent: QuantizedRecurrent,
}  # fmt: skip


def int8_rows(weight: Tensor, gates: int) -> tuple[Tensor, Tensor]:
    """A gate matrix as int8 and the scale of each row, whose largest element becomes 127.

    Both as `Quantized` says.
    """
    scale = weight.abs().amax(1) / LARGEST
    divisor = torch.where(scale > 0, scale, 1)[:, None]
    rounded = torch.round(weight / divisor).clamp(-LARGEST, LARGEST).to(torch.int8)
    units, columns = weight.shape[0] // gates, weight.shape[1]
    more = -units % INT8_PANEL
    rounded = nn.functional.pad(rounded.view(gates, units, columns), (0, columns % 2, 0, more))
    panels = rounded.unflatten(1, (-1, INT8_PANEL)).unflatten(3, (-1, 2)).transpose(2, 3)
    scale = nn.functional.pad(scale.view(gates, units), (0, more))
    return panels.contiguous(), scale.unflatten(1, (-1, INT8_PANEL)).contiguous()


def _floating(panels: Tensor, scale: Tensor, units: int, columns: int) -> Tensor:
    """The matrix (G*H, In) that these are of, in the dtype of the scales."""
    weight = panels.to(scale.dtype) * scale[:, :, None, :, None]
    rows = weight.transpose(2, 3).flatten(1, 2).flatten(2)
    return rows[:, :units, :columns].flatten(0, 1)


def quantize_in_place(layer: Layer) -> None:
    """Makes a layer one of `QUANTIZED`, in place: its Parameters become buffers."""
    with torch.inference_mode(False), torch.no_grad():
        weights = [weight.detach().clone() for weight in layer.weights()]
        columns: dict[str, int] = {}
        for slot, weight in zip(params.module_slots(layer.spec), weights):
            delattr(layer, slot.name)
            if not slot.is_gate_matrix:
                layer.register_buffer(slot.name, weight)
                continue
            columns[slot.name] = slot.shape[1]
            panels, scale = int8_rows(weight, len(layer.spec.gates))
            layer.register_buffer(slot.name, panels)
            layer.register_buffer(f"{slot.name}_scale", scale)
    layer.__class__ = QUANTIZED[type(layer)]
    read = [*layer._names, *(f"{name}_scale" for name in columns)]
    shapes = {name: tuple(layer.get_buffer(name).shape) for name in read}
    vars(layer).update(_columns=columns, _read=read, _shapes=shapes)
    layer.__setstate__(layer.__getstate__())  # forgets calls
