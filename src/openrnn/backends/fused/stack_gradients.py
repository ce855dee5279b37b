"""The gradients of the weights of a stack whose loops one launch ran: several layers at a time.

A product of one layer is small. cuBLASLt multiplies several layers in one call, mostly in less
time: benchmarks/log/cuda-experiments.md, "Products of weights for all layers of a stack at once".
"""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from openrnn.backends.fused import kernels
from openrnn.backends.fused.copies import copy_all
from openrnn.backends.fused.layer_gradients import LayerGradients
from openrnn.backends.fused.pass_runner import PassRunner
from openrnn.backends.fused.weight_gradients import (
    Rows,
    WeightGradient,
    add_w_hh,
    add_w_ih,
)
from openrnn.schedule import Chunk
from openrnn.tuning import one_launch


def weights_of_stack(runner: PassRunner, each: Sequence[LayerGradients], chunk: Chunk) -> None:
    """The gradients of weights, biases and unit vectors of all layers.

    Sums over rows may be added in another order than layer by layer.

    Args:
        each: of all layers, layer 0 first; chunk: all steps.
    """
    upper, lower = each[1:], each[:-1]
    w_ih = [one.w_ih for one in upper if one.w_ih is not None]
    w_hh = [one.w_hh for one in lower if one.w_hh is not None]
    all_wanted = len(w_ih) == len(w_hh) == len(upper)
    layer = each[0].layer
    no_copies = layer.unpadded and runner.reset is None
    if all_wanted and one_launch.multiplies_together(len(each), layer.dtype.itemsize, no_copies):
        all_w_ih, all_w_hh = (_of_all(some) for some in (w_ih, w_hh))
        _add_all_w_ih(upper, all_w_ih)
        _add_all_w_hh(runner, lower, all_w_hh)
        pairs: list[tuple[Tensor, Tensor]] = []
        for together, alone in ((all_w_ih, w_ih), (all_w_hh, w_hh)):
            if together.written:
                pairs += zip(together.of_layers(), [one.overwritten() for one in alone])
        copy_all(pairs)
    for one in each:  # what no product of several layers gave
        d_gates = one.d_gates(chunk)
        if one.w_ih is not None and not one.w_ih.written:
            add_w_ih(one.weights, one.x, d_gates, one.w_ih)
        if one.w_hh is not None and not one.w_hh.written:
            add_w_hh(runner, one.weights, chunk, one.y, d_gates, one.w_hh)
    _reduce_biases(each)


def _of_all(gradients: Sequence[WeightGradient]) -> WeightGradient:
    """Memory for the gradients of several layers, one after the other."""
    first = gradients[0]
    return WeightGradient(first.weights, first.spans, first.columns, False, len(gradients))


def _add_all_w_ih(layers: Sequence[LayerGradients], found: WeightGradient) -> None:
    """dW_ih of several layers: each read the output of the one before."""
    steps, batch, _ = layers[0].x.shape
    d_gates = _rows_of_layers([one.all_d_gates for one in layers])
    found.add(d_gates, _rows_of_layers([one.x for one in layers]), steps * batch)


def _add_all_w_hh(
    runner: PassRunner, layers: Sequence[LayerGradients], found: WeightGradient
) -> None:
    """dW_hh of several layers: each step read h of the one before, the first an initial state."""
    steps, batch, size = runner.steps, runner.batch, layers[0].y.element_size()
    offset = (layers[0].layer.width - layers[0].layer.gates * layers[0].layer.units) * size
    d_gates = _rows_of_layers([one.all_d_gates for one in layers])
    h = _rows_of_layers([one.y for one in layers])
    if steps > 1:
        later = d_gates._replace(address=d_gates.address + batch * d_gates.stride * size + offset)
        found.add(later, h, (steps - 1) * batch)
    if runner.call.states:
        first = d_gates._replace(address=d_gates.address + offset)
        initial = runner.call.states[0]  # (L, B, H), dense; of one row the strides may be any
        hidden = initial.shape[2]
        found.add(first, Rows(initial.data_ptr(), hidden, batch * hidden), batch)


def _rows_of_layers(tensors: Sequence[Tensor]) -> Rows:
    """The rows of dense tensors (T, B, columns), which are equally spaced in memory.

    Raises:
        ValueError: they are not.
    """
    addresses = [tensor.data_ptr() for tensor in tensors]
    distance = addresses[1] - addresses[0]
    if any(after - before != distance for before, after in pairwise(addresses)):
        raise ValueError(f"tensors at {addresses}, need the same distance from layer to layer")
    return Rows(addresses[0], tensors[0].shape[2], distance // tensors[0].element_size())


def _reduce_biases(each: Sequence[LayerGradients]) -> None:
    """The gradients of biases and unit vectors of all layers, by one launch."""
    if any(one.has_biases for one in each):
        words, layer = [one.begin_reduction() for one in each], each[0].layer
        name, blocks = "reduce_bias_gradients", layer.bias_blocks
        kernels.launch_several(name, layer.dtype_name, layer.device, words, blocks)
