"""What a layer's gates do in a call: their pre-activations, and how many are saturated."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from openrnn import functional, tensors
from openrnn.nn import Layer
from openrnn.nn.network import eval_mode
from openrnn.spec import Spec

# a sigmoid there is within 0.05 of its ends, a tanh within 0.005
SATURATED = 3.0


class Gate(NamedTuple):
    """One gate of one layer in one direction: `values` are its pre-activations (steps, H)."""

    layer: int
    reverse: bool
    name: str
    values: Tensor

    @property
    def where(self) -> str:
        """A name among those of the same module: `l0/f`, `l0_reverse/f`."""
        return f"l{self.layer}{'_reverse' if self.reverse else ''}/{self.name}"


def why_not(layer: Layer) -> str | None:
    """Why a layer's pre-activations are not to be had; None where they are."""
    with eval_mode(layer):
        return _why_not(layer, layer.weights())


def _why_not(layer: Layer, weights: list[Tensor]) -> str | None:
    spec = layer.spec
    if layer.cell.dependent_product:
        return f"cell {layer.cell.key} multiplies again after its reset gate"
    if len({weight.device for weight in weights}) > 1:
        return "its weights are on several devices"
    own = {name.partition("_l")[0]: weight for name, weight in zip(layer._names, weights)}
    rows = len(spec.gates) * spec.hidden_size
    r = own.get("weight_hh")
    if r is None or tuple(r.shape) != (rows, spec.output_size):
        return f"cell {layer.cell.key} has no recurrent matrix of all gates"
    return None


@torch.no_grad()
def preactivations(
    layer: Layer,
    x: Tensor,
    hx: Any = None,
    *,
    lengths: Tensor | None = None,
    reset: Tensor | None = None,
    reset_state: Any = None,
) -> Iterator[Gate]:
    """Yields each gate with the sums of its input side and recurrent side in a call.

    Steps past the end of a sequence are left out, and so is dropout. Of a GRU's n it is the sum as
    it were without the reset gate. The arguments are those of the layer, x in its layout.

    Raises:
        ValueError: the layer has none, as `why_not` says.
    """
    spec, given = layer.spec, {"lengths": lengths, "reset": reset, "reset_state": reset_state}
    with eval_mode(layer):  # where a spectral norm and the like stay as they are
        read = layer.weights()
        reason = _why_not(layer, read)
        if reason:
            raise ValueError(f"pre-activations cannot be had: {reason}")
        _, _, every = layer.forward(x, hx, **given, return_states=True)
    weights = dict(zip(layer._names, read))
    h = every if isinstance(every, Tensor) else every[0]  # (L*D, T, B, O)
    batched = x.dim() == 3
    if not batched:  # one sequence
        x, h = x.unsqueeze(1), h.unsqueeze(2)
        reset = None if reset is None else tensors.readable("reset", reset).unsqueeze(1)
    elif layer.batch_first:
        x, h = x.transpose(0, 1), h.transpose(1, 2)
        reset = None if reset is None else functional.transposed_mask(reset)
    if lengths is not None:
        lengths = functional.check_lengths(lengths, x)
    if reset is not None:
        reset = functional.check_reset(reset, x)
    batch = x.shape[1]
    start = layer._states(hx, batch, 3 if batched else 2)
    anew = layer._reset_states(reset_state, batch, batched)
    inside = _inside(x, lengths)
    for chain in range(spec.chains):
        layer_index, turned = divmod(chain, spec.directions)
        below = h[spec.directions * (layer_index - 1) : spec.directions * layer_index]
        source = x if layer_index == 0 else torch.cat(list(below), dim=-1)
        before = _before(
            h[chain],
            None if start is None else start[0][chain],  # of h, which is emitted
            None if anew is None else anew[0][chain],
            reset, lengths, spec.reverse or bool(turned),
        )  # fmt: skip
        suffix = f"_l{layer_index}{'_reverse' if turned else ''}"
        total = _sums(spec, weights, suffix, source, before)[inside]
        for gate, values in zip(spec.gates, total.chunk(len(spec.gates), -1)):
            yield Gate(layer_index, bool(turned), gate, values)


def _sums(
    spec: Spec, weights: dict[str, Tensor], suffix: str, source: Tensor, before: Tensor
) -> Tensor:
    """Input side plus recurrent side of all gates (T, B, G*H), of one layer and direction.

    Args:
        suffix: of the names of its parameters.
        source, before: what it reads in each step, and h before the step.
    """
    w_ih, b_ih = (weights.get(f"{kind}_ih{suffix}") for kind in ("weight", "bias"))
    w_hh, b_hh = weights[f"weight_hh{suffix}"], weights.get(f"bias_hh{suffix}")
    if w_ih is not None:
        left = linear(source, w_ih, b_ih)
    else:  # x is added as it is, to every gate or to each its own
        many = 1 if source.shape[-1] == len(spec.gates) * spec.hidden_size else len(spec.gates)
        left = source.repeat(1, 1, many)
        left = left if b_ih is None else left + b_ih
    return left + linear(before, w_hh, b_hh)


def _inside(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Which steps are part of a sequence, (T, B) bool."""
    steps, batch = x.shape[:2]
    if lengths is None:
        return torch.ones(steps, batch, dtype=torch.bool, device=x.device)
    times = torch.arange(steps, device=x.device)[:, None]
    return times < lengths


def _before(
    h: Tensor,
    start: Tensor | None,
    anew: Tensor | None,
    reset: Tensor | None,
    lengths: Tensor | None,
    backward: bool,
) -> Tensor:
    """What stood in the state h (T, B, O) before each step, in the order of its direction."""
    zero = torch.zeros_like(h[0])
    start = zero if start is None else start.to(h.dtype)
    anew = zero if anew is None else anew.to(h.dtype)
    if not backward:
        before = torch.cat([start[None], h[:-1]])
        return before if reset is None else torch.where(reset.unsqueeze(-1), anew, before)
    before = torch.cat([h[1:], start[None]])
    if reset is not None:  # a reset parts its step from the one before, in either direction
        before[:-1] = torch.where(reset[1:].unsqueeze(-1), anew, before[:-1])
    if lengths is not None:
        last = (lengths - 1).clamp_min(0)
        before[last, torch.arange(h.shape[1], device=h.device)] = start
    return before


def write(writer: Any, folder: str, gate: Gate, step: int, histograms: bool = True) -> None:
    """Writes a gate: its histogram, the share that is saturated, the mean of a forget gate."""
    where, values = f"{folder}/{gate.where}", gate.values.float()
    if not values.numel():
        return
    if histograms:
        writer.add_histogram(where, values.cpu(), step)
    saturated = (values.abs() > SATURATED).float().mean()
    writer.add_scalar(f"{where}_saturated", float(saturated), step)
    if gate.name == "f":
        writer.add_scalar(f"{where}_mean", float(values.sigmoid().mean()), step)
