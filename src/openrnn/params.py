"""The parameters of a network: names and shapes of the separate tensors, and the flat buffer.

The flat buffer is that of cuDNN, TensorFlow, MXNet and JAX, measured without padding or gaps: for
each chain (layer-major, forward before reverse) the input matrix (G*H, In), the recurrent matrix
(G*H, O) and the projection (P, H); after all matrices, for each chain, the input bias (G*H) and the
recurrent bias (G*H). Per-unit vectors of other cells, which those libraries lack, come last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor

from openrnn.memo import memo
from openrnn.spec import Spec

__all__ = [
    "Chain",
    "Slot",
    "chains",
    "check",
    "module_slots",
    "pack",
    "places",
    "size",
    "slots",
    "unpack",
]


@dataclass(frozen=True)
class Slot:
    """One tensor of a network: name in a state dict, shape, place in the flat buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int
    chain: int

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def is_gate_matrix(self) -> bool:
        """Whether it is a W_ih or a W_hh."""
        return self.name.startswith(("weight_ih", "weight_hh"))


@dataclass(frozen=True)
class Chain:
    """The tensors of one layer and direction; None where the spec has none."""

    w_ih: Tensor | None  # (G*H, In)
    w_hh: Tensor  # (G*H, O)
    b_ih: Tensor | None  # (G*H,)
    b_hh: Tensor | None  # (G*H,)
    w_hr: Tensor | None  # (P, H)
    unit: tuple[Tensor, ...]  # each (H,)


def _suffixes(spec: Spec) -> list[tuple[int, int, str]]:
    return [
        (layer, direction, f"_l{layer}" + ("_reverse" if direction else ""))
        for layer, direction in product(range(spec.num_layers), range(spec.directions))
    ]


def _matrices(spec: Spec, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    rows = len(spec.gates) * spec.hidden_size
    if spec.input_mode == "linear" or layer > 0:
        yield "weight_ih", (rows, spec.layer_input(layer))
    yield "weight_hh", (rows, spec.output_size)
    if spec.proj_size:
        yield "weight_hr", (spec.proj_size, spec.hidden_size)


def _biases(spec: Spec) -> Iterator[tuple[str, tuple[int, ...]]]:
    rows = len(spec.gates) * spec.hidden_size
    if spec.input_bias:
        yield "bias_ih", (rows,)
    if spec.recurrent_bias:
        yield "bias_hh", (rows,)


@memo(1024)
def slots(spec: Spec) -> tuple[Slot, ...]:
    """Every tensor in the order of the flat buffer."""
    laid: list[Slot] = []
    offset = 0
    chains = list(enumerate(_suffixes(spec)))
    for kind in range(3):
        for chain, (layer, _, suffix) in chains:
            shapes = (
                _matrices(spec, layer),
                _biases(spec),
                ((name, (spec.hidden_size,)) for name in spec.unit_params),
            )[kind]
            for name, shape in shapes:
                laid.append(Slot(name + suffix, shape, offset, chain))
                offset += prod(shape)
    return tuple(laid)


# torch lists a layer's tensors in this order, the projection last
_TORCH_ORDER = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


@memo(1024)
def module_slots(spec: Spec) -> tuple[Slot, ...]:
    """Every tensor in torch's order: chain by chain, matrices, biases, projection."""
    rank = {name: index for index, name in enumerate(_TORCH_ORDER)}

    def order(slot: Slot) -> tuple[int, int]:
        return slot.chain, rank.get(slot.name.rsplit("_l", 1)[0], len(rank))

    return tuple(sorted(slots(spec), key=order))


@memo(1024)
def places(spec: Spec) -> tuple[tuple[int | None, ...], ...]:
    """For each chain the places in `module_slots` of w_ih, w_hh, b_ih, b_hh, w_hr, unit vectors."""
    indices = {slot.name: index for index, slot in enumerate(module_slots(spec))}
    names = (*_TORCH_ORDER, *spec.unit_params)
    return tuple(
        tuple(indices.get(name + suffix) for name in names) for _, _, suffix in _suffixes(spec)
    )


def _places_in_graph(text: str) -> tuple[tuple[int | None, ...], ...]:
    """`places` while a compiler traces, which would trace its caches: a constant of the graph."""
    return places(Spec.parse(text))


# what torch.compiler.assume_constant_result does, but for its import of dynamo: half of ours
_places_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def chains(spec: Spec, tensors: Sequence[Tensor]) -> list[Chain]:
    """Sorts tensors, given in the order of `module_slots`, into chains."""
    made = []
    compiling = torch.compiler.is_compiling()
    for row in _places_in_graph(spec.text) if compiling else places(spec):
        found = [None if index is None else tensors[index] for index in row]
        w_hh = found[1]
        if w_hh is None:
            raise ValueError(f"no recurrent matrix among the {len(tensors)} parameters")
        unit = tuple(tensor for tensor in found[5:] if tensor is not None)
        made.append(Chain(found[0], w_hh, found[2], found[3], found[4], unit))
    return made


@memo(1024)
def size(spec: Spec) -> int:
    """The number of elements of the flat buffer."""
    return sum(slot.size for slot in slots(spec))


def check(spec: Spec, tensors: Sequence[Tensor]) -> None:
    """Raises ValueError, naming the first that differs, unless tensors fit `module_slots`."""
    wanted = module_slots(spec)
    if len(tensors) != len(wanted):
        names = ", ".join(slot.name for slot in wanted)
        raise ValueError(f"needs {len(wanted)} parameters ({names}), got {len(tensors)}")
    for slot, tensor in zip(wanted, tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{slot.name} must be a Tensor, got {type(tensor).__name__}")
        if tensor.shape != slot.shape:
            raise ValueError(f"{slot.name} must have shape {slot.shape}, got {tuple(tensor.shape)}")


def pack(spec: Spec, tensors: Sequence[Tensor]) -> Tensor:
    """The flat buffer of tensors given in the order of `module_slots`; differentiable."""
    check(spec, tensors)
    by_name = {slot.name: tensor for slot, tensor in zip(module_slots(spec), tensors)}
    return torch.cat([by_name[slot.name].reshape(-1) for slot in slots(spec)])


def unpack(spec: Spec, flat: Tensor) -> list[Tensor]:
    """Views of the flat buffer in the order of `module_slots`.

    Raises:
        ValueError: flat is not a vector of `size(spec)` elements.
    """
    if flat.dim() != 1 or flat.numel() != size(spec):
        raise ValueError(
            f"params must be a vector of {size(spec)} elements, got shape {tuple(flat.shape)}"
        )
    return [flat.narrow(0, slot.offset, slot.size).view(slot.shape) for slot in module_slots(spec)]
