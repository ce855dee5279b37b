"""What `FlopCounterMode` counts of a call: what it counts of the same steps of torch's products."""

import importlib

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import openrnn

T, B, INPUTS, H = 7, 3, 10, 16


def counted(run):
    with FlopCounterMode(display=False) as mode:
        run()
    return mode.get_total_flops()


def loop(cells, x):
    """The layers of an LSTM, step by step, by products that torch counts."""
    for cell in cells:
        h = c = x.new_zeros(x.shape[1], H, requires_grad=True)
        steps = []
        for one in x:
            gates = nn.functional.linear(one, cell.weight_ih) + nn.functional.linear(
                h, cell.weight_hh
            )
            i, f, g, o = gates.chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            steps.append(h)
        x = torch.stack(steps)
    return x


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("x_wanted", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_step_of_training(layers, x_wanted, backward):
    net = openrnn.LSTM(INPUTS, H, layers)
    cells = [nn.LSTMCell(H if layer else INPUTS, H) for layer in range(layers)]
    x = torch.randn(T, B, INPUTS, requires_grad=x_wanted)

    def run(module):
        y = module(x)
        if backward:
            y.sum().backward()

    found = counted(lambda: run(lambda x: net(x)[0]))
    assert found == counted(lambda: run(lambda x: loop(cells, x))) > 0


@pytest.mark.parametrize("remembered", [False, True])
def test_inference(remembered):
    """Also of a call that the layer remembers; both directions, a projection."""
    net = openrnn.LSTM(INPUTS, H, 2, bidirectional=True, proj_size=5).eval()
    x = torch.randn(T, B, INPUTS)
    for _ in range(4 if remembered else 0):
        with torch.no_grad():
            net(x)
    matrices = sum(param.numel() for param in net.parameters() if param.dim() == 2)
    with torch.no_grad():
        assert counted(lambda: net(x)) == 2 * T * B * matrices


def test_formulas_are_registered_once():
    """A notebook that loads the package again runs it anew."""
    importlib.reload(openrnn)


def test_some_gradients():
    """Those of matrices that are not wanted are no products; others pass through all the same."""
    net = openrnn.GRU(INPUTS, H)
    net.weight_ih_l0.requires_grad_(False)
    of_input, recurrent = (2 * T * B * 3 * H * columns for columns in (INPUTS, H))
    x = torch.randn(T, B, INPUTS)
    found = counted(lambda: net(x)[0].sum().backward())
    assert found == of_input + 3 * recurrent


def test_a_cell():
    cell = openrnn.LSTMCell(INPUTS, H)
    matrices = 4 * H * (INPUTS + H)
    with torch.no_grad():
        assert counted(lambda: cell(torch.randn(B, INPUTS))) == 2 * B * matrices


def test_nothing_is_counted_twice_where_no_gates_are_computed_again():
    """That is for our CUDA kernels alone."""
    x = torch.randn(T, B, INPUTS)
    plain, again = (openrnn.LSTM(INPUTS, H, recompute=how) for how in ("none", "gates"))
    counts = [counted(lambda net=net: net(x)[0].sum().backward()) for net in (plain, again)]
    assert counts[0] == counts[1]
