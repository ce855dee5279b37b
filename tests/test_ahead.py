"""`compile_kernels` on a CPU; on a GPU see test_fused.py."""

import pytest
import torch
from cases import require

import openrnn
from openrnn import cells
from openrnn.kernels.cpu import objects


@pytest.mark.parametrize(("grad", "count"), [(True, 6), (False, 4)])
def test_a_call_then_asks_no_compiler(monkeypatch, grad, count):
    require("cpu")
    layer = openrnn.Recurrent(cells.mgu, 3, 5, num_layers=2, dtype=torch.float64)
    assert openrnn.compile_kernels(layer, torch.float64, grad=grad, device="cpu") == count
    monkeypatch.setattr(objects, "_compile", lambda *_: pytest.fail("a kernel was missing"))
    with torch.set_grad_enabled(grad):
        y, _ = layer(torch.randn(4, 2, 3, dtype=torch.float64))
    if grad:
        y.sum().backward()


def test_what_it_cannot_compile_is_said():
    layer = openrnn.Recurrent(cells.gru_reset_before, 3, 5)
    with pytest.raises(openrnn.errors.NoBackendError, match="two dependent products"):
        openrnn.compile_kernels(layer, device="cpu")
    with pytest.raises(ValueError, match="got device='tpu', needs 'cuda' or 'cpu'"):
        openrnn.compile_kernels(layer, device="tpu")


@pytest.mark.parametrize(("module", "named"), [(3, "int"), (torch.nn.LSTM(3, 4), "torch's LSTM")])
def test_what_has_no_kernels_is_named(module, named):
    with pytest.raises(TypeError, match=f"needs a layer .* got {named}"):
        openrnn.compile_kernels(module, device="cpu")
