"""Gradients of the weights of a stack in one launch, without a device: products of all layers."""

import pytest
import torch
from test_fused_launches import clear_caches
from test_fused_program_call import Kernel, Plan

from openrnn import cells
from openrnn.backends.base import Call
from openrnn.backends.fused import kernels
from openrnn.backends.fused.layer_gradients import LayerGradients, LayerTensors
from openrnn.backends.fused.pass_runner import PassRunner
from openrnn.backends.fused.stack_gradients import weights_of_stack
from openrnn.native import cublaslt, nvrtc
from openrnn.params import module_slots
from openrnn.schedule import Chunk, Chunking
from openrnn.spec import Problem
from openrnn.tuning import one_launch

HIDDEN, WIDTH = 16, 6  # of h, of x
W_IH, W_HH, B_IH, B_HH = 1, 2, 3, 4  # places among what is wanted of a layer


@pytest.fixture
def products(monkeypatch):
    """How many matrices each product has, if they are done here, with strides cuBLASLt takes."""
    counts = []

    class Checked(Plan):
        def __init__(self, dtype, device, sizes, layouts, aligned, full, count, smaller_tiles):
            rows, columns, inner = sizes
            shapes = (rows, inner), (inner, columns), (rows, columns)
            for layout, (down, across) in zip(layouts, shapes):
                assert layout.stride >= (down if layout.transposed else across)
            super().__init__(dtype, device, sizes, layouts, aligned, full, count, smaller_tiles)
            counts.append(count)

    monkeypatch.setattr(cublaslt, "MatmulPlan", Checked)
    monkeypatch.setattr(one_launch, "MOST_BYTES", 4)  # float32 here stands for all dtypes
    for module in (cublaslt, nvrtc):
        monkeypatch.setattr(module, "current_stream", lambda device: 0)
    monkeypatch.setattr(
        kernels, "plain", lambda name, _, __, structs=1: Kernel(name, HIDDEN, structs)
    )
    clear_caches()
    yield counts
    clear_caches()


def of_layer(layer, order, planes, read):
    """The gradient of a matrix from the planes of its side (T, B, G, H) and what it read."""
    places = [order.index(gate) for gate in range(layer.gates)]
    return torch.einsum("tbgu,tbi->gui", planes[:, :, places], read).flatten(0, 1)


def check(cell, layers, steps, batch, states=None, frozen=(), bias_mode="double", biases=True):
    """Against sums by torch; each gradient has memory of its own.

    Args:
        states: makes the memory of initial states another; None: there are none.
        frozen: (layer, place) of what is not wanted; biases: are wanted, else.
    """
    torch.manual_seed(0)
    spec = cell.spec(WIDTH, HIDDEN, num_layers=layers, bias_mode=bias_mode)
    given = [states(torch.randn(layers, batch, HIDDEN)) for _ in spec.states] if states else []
    params = [torch.randn(slot.shape) for slot in module_slots(spec)]
    x = torch.randn(steps, batch, WIDTH)
    call = Call(Problem(spec, torch.float32, "cpu", grad=True), x, given, params)
    runner, whole = PassRunner(call, None), Chunk(0, 0, steps, steps)
    outputs = [*torch.randn(layers - 1, steps, batch, HIDDEN), torch.randn(steps, batch, HIDDEN)]
    inputs = [x, *outputs[:-1]]
    width = runner.weights(0, 0).layer.width
    d_gates = torch.randn(layers, steps, batch, width)
    each = []
    for number in range(layers):
        wanted = [False, True, True, biases, biases, False]
        for _, place in (one for one in frozen if one[0] == number):
            wanted[place] = False
        tensors = LayerTensors(inputs[number], outputs[number], None, None)
        each.append(
            LayerGradients(
                runner, runner.weights(number, 0), Chunking((0, steps), mode="one_launch"), 2,
                tensors, tuple(wanted), d_gates[number],
            )
        )  # fmt: skip
        each[-1]._sums.normal_()
    weights_of_stack(runner, each, whole)
    memory = []
    for number, one in enumerate(each):
        w_ih, w_hh, *found = one.finished()
        layer, planes = one.layer, d_gates[number]
        count = layer.gates * HIDDEN
        sides = [
            side.unflatten(-1, (layer.gates, HIDDEN))
            for side in (planes[..., :count], planes[..., width - count :])
        ]
        first = given[0][number][None] if given else torch.zeros(1, batch, HIDDEN)
        before = torch.cat([first, outputs[number][:-1]])
        for have, place, order, side, read in (
            (w_ih, W_IH, layer.input_order, sides[0], inputs[number]),
            (w_hh, W_HH, layer.recurrent_order, sides[1], before),
        ):
            if (number, place) in frozen:
                assert have is None
                continue
            torch.testing.assert_close(have, of_layer(layer, order, side, read))
            memory.append(have)
        sums = one._sums.sum(0).flatten()
        for have, place in zip(found, (B_IH, B_HH)):
            there = biases and (number, place) not in frozen
            there = there and bias_mode in ("double", {B_IH: "input", B_HH: "recurrent"}[place])
            assert (have is not None) == there
            if there:
                torch.testing.assert_close(have, sums)
    assert len({one.untyped_storage().data_ptr() for one in memory}) == len(memory)


SOME = [
    (), ((1, W_IH),), ((0, W_HH),), ((0, W_IH),), ((1, B_IH), (1, B_HH)),
    ((1, W_IH), (1, W_HH), (1, B_IH), (1, B_HH)),
]  # fmt: skip


@pytest.mark.parametrize("layers", [2, 3, 4])
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("states", [None, torch.clone], ids=["zeros", "states"])
@pytest.mark.parametrize("frozen", SOME, ids=str)
def test_gradients_are_those_of_each_layer(products, layers, steps, batch, states, frozen):
    """Products of several layers have all but one of them, or none where one is not wanted."""
    check(cells.lstm, layers, steps, batch, states, frozen)
    together = layers > 2 and not {(1, W_IH), (0, W_HH)} & {*frozen}
    assert {*products} - {1} == ({layers - 1} if together else set())


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.usefixtures("products")
def test_sides_of_a_gate_may_differ(layers, steps):
    """A GRU's planes of the recurrent side are the last ones, and its gates in two spans."""
    check(cells.gru, layers, steps, 3, torch.clone, biases=False)


@pytest.mark.parametrize("bias_mode", ["none", "input", "recurrent"])
@pytest.mark.usefixtures("products")
def test_other_biases(bias_mode):
    check(cells.lstm, 3, 4, 3, torch.clone, bias_mode=bias_mode)


def over_units(states):
    """States (L, 1, H) whose batch has the stride 1; torch calls them contiguous."""
    turned = states.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    assert turned.is_contiguous()
    assert turned.stride(1) == 1
    return turned


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.usefixtures("products")
def test_the_stride_of_a_single_row_may_be_anything(layers):
    check(cells.lstm, layers, 4, 1, over_units)


@pytest.mark.usefixtures("products")
def test_each_launch_has_all_layers(monkeypatch):
    """Biases that are not wanted are null, so frozen layers need no kernel of their own."""
    structs = []

    def plain(name, _, __, count=1):
        structs.append((name, count))
        return Kernel(name, HIDDEN, count)

    monkeypatch.setattr(kernels, "plain", plain)
    check(cells.lstm, 4, 3, 2, frozen=((2, B_IH), (2, B_HH)))
    assert {one for one in structs if one[1] > 1} == {
        ("reduce_bias_gradients", 4),
        ("copy_rows", 6),
    }
