"""Layers whose units are padded to a multiple of 128, on a GPU."""

import pytest
import test_fused_gpu
import torch
from test_fused_gpu import FAIR, MULTICAST, check_everything, family  # noqa: F401  # a fixture
from test_products_gpu import OPTIONS, compare

import openrnn
from openrnn import cells, memo
from openrnn.backends.fused.layer import layer_of_call
from openrnn.tuning import units

pytestmark = pytest.mark.gpu


@pytest.fixture
def padded(monkeypatch):
    """Layers of any H are padded to a multiple of 128."""
    any_size = (units.Padding(range(1, 10**9), 1, 1000.0),)
    for name in ("PADDINGS", "STACK_PADDINGS"):
        monkeypatch.setattr(units, name, {2: any_size, 4: any_size})
    monkeypatch.setattr(units, "LEAST_STEPS", 2)  # single steps have no such kernels
    monkeypatch.setattr(units, "GATES", range(1, 9))
    memo.clear()
    if layer_of_call(cells.lstm.spec(8, 40), 0, torch.bfloat16, 0, 2, 3).units != 128:
        pytest.skip("units are padded on H100 and H200 alone")
    yield
    memo.clear()


@pytest.mark.parametrize("dtype", FAIR, ids=str)
@pytest.mark.parametrize(("hidden", "batch"), [(40, 3), (72, 41), (200, 17), (41, 130)])
@pytest.mark.parametrize(
    "cell",
    [cells.lstm, cells.gru, cells.rnn_tanh, cells.peephole_lstm],
    ids=lambda cell: cell.name,
)
def test_with_masks_states_and_both_directions(padded, monkeypatch, cell, hidden, batch, dtype):
    monkeypatch.setattr(test_fused_gpu, "holding_r", lambda *_: True)
    check_everything(cell, hidden, batch, dtype)


@pytest.mark.parametrize("family", MULTICAST, indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("hidden", "batch"), [(72, 41), (200, 130), (400, 17), (500, 64)])
@pytest.mark.parametrize("cell", [cells.lstm, cells.gru], ids=lambda cell: cell.name)
def test_by_multicast(padded, family, monkeypatch, cell, hidden, batch, dtype):  # noqa: F811
    monkeypatch.setattr(test_fused_gpu, "holding_r", lambda *_: True)
    check_everything(cell, hidden, batch, dtype)


@pytest.mark.parametrize("dtype", FAIR, ids=str)
@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
@pytest.mark.parametrize(("inputs", "hidden"), [(24, 40), (39, 50), (64, 136)])
def test_layers_directions_and_recompute(padded, inputs, hidden, options, dtype):
    compare(cells.lstm, inputs, hidden, 16, 9, dtype, **options)


@pytest.mark.parametrize("dtype", FAIR, ids=str)
@pytest.mark.parametrize(
    ("hidden", "batch"), [(500, 64), (600, 8), (600, 130), (750, 33), (1000, 128), (1500, 20)]
)
@pytest.mark.parametrize("cell", [cells.lstm, cells.gru], ids=lambda cell: cell.name)
def test_sizes_that_are_padded(cell, hidden, batch, dtype):
    compare(cell, 40, hidden, 12, batch, dtype)


@pytest.mark.parametrize(
    "options", [{}, {"bidirectional": True}, {"wavefront": 4}, {"wavefront": 0}], ids=str
)
@pytest.mark.parametrize("batch", [32, 64])
def test_stacks_of_such_sizes(batch, options):
    compare(cells.lstm, 40, 1000, 12, batch, torch.bfloat16, num_layers=2, **options)


@pytest.mark.parametrize("dtype", FAIR, ids=str)
@pytest.mark.parametrize("wavefront", [None, 0, 1, 4])
@pytest.mark.parametrize(("hidden", "batch"), [(36, 17), (100, 64), (250, 64), (500, 64)])
@pytest.mark.parametrize("cell", [cells.lstm, cells.gru], ids=lambda cell: cell.name)
def test_stacks_with_padded_units(cell, hidden, batch, wavefront, dtype):
    """In one launch, as a wavefront, layer by layer, or as the models choose."""
    compare(cell, 40, hidden, 14, batch, dtype, num_layers=3, wavefront=wavefront)


def test_a_single_step_is_not_padded():
    """It has kernels of its own; the next call, of several steps, is padded."""
    net = openrnn.LSTM(1000, 1000, device="cuda", dtype=torch.bfloat16, backend="fused")
    x = torch.randn(12, 16, 1000, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        y, _ = net(x)
        state, steps = None, []
        for one in x:
            out, state = net(one[None], state)
            steps.append(out)
    assert (torch.cat(steps) - y).norm() <= FAIR[torch.bfloat16] * y.norm()
