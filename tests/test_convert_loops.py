"""Loops over time written by hand, and the layers that replace them, as the docs say it.

Small stand-ins of what EA-LSTM of neuralhydrology and Li-GRU of SpeechBrain do.
"""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import openrnn

T, B, In, H = 7, 3, 2, 5


@openrnn.cell(gates="f o g", states="h c i")
def ea_lstm(x, r, s):
    c = torch.sigmoid(x.f + r.f) * s.c + s.i * torch.tanh(x.g + r.g)
    return torch.sigmoid(x.o + r.o) * torch.tanh(c), c, s.i


@openrnn.cell(gates="a z", states="h m")
def ligru(x, r, s):
    z = torch.sigmoid(x.z + r.z)
    return z * s.h + (1 - z) * torch.relu(x.a + r.a) * s.m, s.m


class Entity(nn.Module):
    """An input gate that is the same at all steps; matrices stand as (In, 3H)."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, H)
        self.w, self.u = nn.Parameter(torch.randn(In, 3 * H)), nn.Parameter(torch.randn(H, 3 * H))
        self.b = nn.Parameter(torch.randn(3 * H))

    def forward(self, x, fixed):
        i, h, c = torch.sigmoid(self.gate(fixed)), torch.zeros(B, H), torch.zeros(B, H)
        rows = []
        for x_t in x:
            f, o, g = (h @ self.u + x_t @ self.w + self.b).chunk(3, 1)
            c = torch.sigmoid(f) * c + i * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            rows.append((h, c))
        return tuple(torch.stack(states) for states in zip(*rows))


class FastEntity(Entity):
    layer = openrnn.Recurrent(ea_lstm, In, H, bias_mode="input", device="meta", backend="reference")

    def forward(self, x, fixed):
        i = torch.sigmoid(self.gate(fixed))[None]
        weights = {"weight_ih_l0": self.w.T, "weight_hh_l0": self.u.T, "bias_ih_l0": self.b}
        states = torch.zeros_like(i), torch.zeros_like(i), i
        h, _, (_, c, _) = functional_call(self.layer, weights, (x, states), {"return_states": True})
        return h, c[0]


class Light(nn.Module):
    """Batch norm behind the input matrix, and one dropout mask for each sequence."""

    def __init__(self):
        super().__init__()
        self.w, self.u = nn.Linear(In, 2 * H, bias=False), nn.Linear(H, 2 * H, bias=False)
        self.norm = nn.BatchNorm1d(2 * H)

    def forward(self, x, mask):
        return self.steps(self.norm(self.w(x).flatten(0, 1)).unflatten(0, x.shape[:2]), mask)

    def steps(self, w, mask):
        h, rows = torch.zeros(B, H), []
        for w_t in w:
            a, z = (w_t + self.u(h)).chunk(2, 1)
            z = torch.sigmoid(z)
            h = z * h + (1 - z) * torch.relu(a) * mask
            rows.append(h)
        return (torch.stack(rows),)


class FastLight(Light):
    layer = openrnn.Recurrent(
        ligru, 2 * H, H, input_mode="gates", bias=False, device="meta", backend="reference"
    )

    def steps(self, w, mask):
        weights = {"weight_hh_l0": self.u.weight}
        states = torch.zeros(1, B, H), mask[None]
        return functional_call(self.layer, weights, (w, states))[:1]


@pytest.mark.parametrize(
    ("loop", "fast", "size"), [(Entity, FastEntity, (B, 4)), (Light, FastLight, (B, H))]
)
def test_a_layer_with_the_weights_of_a_loop_is_the_loop(loop, fast, size):
    """With its gradients, and the same state dict."""
    torch.manual_seed(0)
    model = loop()
    twin = fast()
    twin.load_state_dict(model.state_dict())
    x, given = torch.randn(T, B, In), torch.rand(size)
    grads = []
    for each in (model, twin):
        fixed = given.clone().requires_grad_()
        found = each(x, fixed)
        sum(y.square().sum() for y in found).backward()
        grads.append([*found, fixed.grad, *(p.grad for p in each.parameters())])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)
    assert [name for name, _ in twin.named_parameters()] == [n for n, _ in model.named_parameters()]
