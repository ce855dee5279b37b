"""`from_weights` and `to_weights`: a layer of ours from the arrays of a library, and back."""

from typing import Any

import torch
from torch import Tensor

from openrnn import cells, params
from openrnn import nn as ours
from openrnn.convert import flat
from openrnn.convert.advice import AdviceError, Argument
from openrnn.convert.arrays import Arrays, as_numpy, flatten, single, under
from openrnn.convert.biases import fit
from openrnn.convert.blocks import blocks_of, tensors_of
from openrnn.convert.flat import FlatSizes
from openrnn.convert.gather import named
from openrnn.convert.layouts import Layout, Library
from openrnn.convert.libraries import check_heads, layout_for, library
from openrnn.convert.recognise import recognise
from openrnn.convert.rewrite import Blocks, Sizes, write
from openrnn.errors import kind_of
from openrnn.spec import Spec

LAYERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lstm": (ours.LSTM, {}),
    "gru": (ours.GRU, {}),
    "rnn_tanh": (ours.RNN, {"nonlinearity": "tanh"}),
    "rnn_relu": (ours.RNN, {"nonlinearity": "relu"}),
}


def from_weights(
    arrays: Any,
    source: str,
    *,
    cell: str | None = None,
    prefix: str = "",
    bidirectional: bool | None = None,
    hidden_size: int | None = None,
    num_layers: int = 1,
    proj_size: int = 0,
    **options: Any,
) -> ours.Layer:
    """A layer with the weights of another library: `LSTM`, `GRU`, `RNN`, or `Recurrent` of a cell.

    Numbers are moved, none is changed: `to_weights` gives the same bits back. Sizes, layers,
    directions and biases follow from names and shapes. Where a library has one bias vector, so has
    the layer (`bias_mode`).

    Args:
        arrays: a mapping of names to arrays, nested or not; or a list of them in the library's
            order, layer after layer, forward before reverse. Whatever numpy can read; the library
            itself is not imported.
        source: the library; `docs/convert.md` lists them.
        cell: the key of our cell, where the arrays fit several.
        prefix: takes only arrays whose names begin so.
        bidirectional: where neither names nor shapes say it.
        hidden_size, num_layers, proj_size: of a flat buffer, whose length does not say them.
        options: of the layer, as `batch_first` or `backend`.

    Raises:
        ValueError: the arrays are not those of the library, or fit several cells.
        TypeError: something is no array of real numbers.

    Example:
        >>> import numpy as np
        >>> keras = [np.ones((3, 16)), np.ones((4, 16)), np.ones(16)]  # layer.get_weights()
        >>> from_weights(keras, "keras")
        LSTM(3, 4, bias_mode='input')
    """
    sizes = FlatSizes(hidden_size, num_layers, bool(bidirectional), proj_size)
    return read(flatten(arrays), source, sizes, cell, prefix, bidirectional, options)


def read(
    arrays: Arrays,
    source: str,
    sizes: FlatSizes,
    cell: str | None,
    prefix: str,
    bidirectional: bool | None,
    options: dict[str, Any],
    in_order: bool = True,
) -> ours.Layer:
    """`from_weights` of a flat mapping, which may be sorted by name instead of by layers."""
    found = library("source", source)
    if prefix:
        arrays = under(arrays, prefix)
    if found.flat:
        buffer = single(arrays)
        spec = flat.spec_of(found, buffer, cell, sizes)
        return _layer(spec, buffer.dtype, params.unpack(spec, buffer), options)
    if (sizes.hidden_size, sizes.num_layers, sizes.proj_size) != (None, 1, 0):
        raise AdviceError(
            Argument("hidden_size"), ", ", Argument("num_layers"), " and ", Argument("proj_size"),
            f" follow from the shapes of {source}'s arrays: leave them out",
        )  # fmt: skip
    network = recognise(found, arrays, cell, bidirectional, in_order)
    tensors = tensors_of(network.spec, network.chains)
    return _layer(network.spec, network.dtype, tensors, options)


def to_weights(
    layer: ours.Layer, target: str, *, sum_biases: bool = False, heads: int = 1
) -> dict[str, Any]:
    """The arrays that another library keeps for a layer, by its names, in its order.

    Args:
        layer: a layer of ours; of a quantized one its weights in floating point.
        target: the library; `docs/convert.md` lists them.
        sum_biases: where the library has one bias vector and the layer two, write their sum: the
            same function but for its rounding.
        heads: of xlstm and FlashRNN, whose matrices are block-diagonal.

    Raises:
        ValueError: the library has no such cell, option or bias.

    Example:
        >>> weights = to_weights(ours.GRU(3, 4), "keras")
        >>> {name: array.shape for name, array in weights.items()}
        {'kernel': (3, 12), 'recurrent_kernel': (4, 12), 'bias': (2, 12)}
    """
    found = tensors(layer, target, sum_biases, heads)
    return {name: as_numpy(tensor) for name, tensor in found.items()}


def tensors(
    layer: ours.Layer, target: str, sum_biases: bool = False, heads: int = 1
) -> dict[str, Tensor]:
    """`to_weights` as tensors on the CPU."""
    found = library("target", target)
    if not isinstance(layer, ours.Layer):
        raise TypeError(f"layer must be a layer of openrnn, got {kind_of(layer)}")
    spec = layer.spec
    layout = layout_for(found, spec)
    check_heads(layout, spec, heads)
    own = params.chains(spec, [weight.cpu() for weight in layer.resting_weights()])
    blocks = [
        fit(layout, blocks_of(spec, chain), target, f"layer {index // spec.directions}", sum_biases)
        for index, chain in enumerate(own)
    ]
    if found.flat:
        both = spec.with_(bias_mode="double")
        return {flat.NAME: params.pack(both, tensors_of(both, blocks))}
    return _named(found, layout, spec, blocks, heads)


def _named(
    library: Library, layout: Layout, spec: Spec, blocks: list[Blocks], heads: int
) -> dict[str, Tensor]:
    """The arrays of all layers and directions, by the library's names."""
    chains = []
    for index, held in enumerate(blocks):
        layer = index // spec.directions
        sizes = Sizes(spec.layer_input(layer), spec.hidden_size, spec.proj_size, heads)
        chains.append({
            array.name: write(array, held, sizes)
            for array in layout.arrays
            if all(key in held for keys in array.keys for key in keys)
        })  # fmt: skip
    if library.stacked:
        starts = range(0, spec.chains, spec.directions)
        pairs = [chains[start : start + spec.directions] for start in starts]
        chains = [
            {name: torch.stack([one[name] for one in pair]) for name in pair[0]} for pair in pairs
        ]
    return {
        name: tensor.contiguous().clone() for name, tensor in named(library, layout, spec, chains)
    }


def _layer(
    spec: Spec, dtype: torch.dtype, tensors: list[Tensor], options: dict[str, Any]
) -> ours.Layer:
    """A layer of ours with these parameters, in the order of `module_slots`."""
    layer_class, more = LAYERS.get(spec.cell, (ours.Recurrent, {"cell": cells.lookup(spec.cell)}))
    known = {
        "input_size": spec.input_size, "hidden_size": spec.hidden_size,
        "num_layers": spec.num_layers, "bidirectional": spec.bidirectional,
        "bias": spec.bias_mode != "none", "bias_mode": spec.bias_mode, "dtype": dtype,
        **({"proj_size": spec.proj_size} if spec.proj_size else {}), **more,
    }  # fmt: skip
    for name in options:
        if name in known:
            raise TypeError(f"{name} follows from the arrays, it must not be given")
    layer: ours.Layer = layer_class(**known, **options)
    with torch.no_grad():
        for slot, tensor in zip(params.module_slots(spec), tensors):
            getattr(layer, slot.name).copy_(tensor)
    return layer
