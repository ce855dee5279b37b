"""Calls with tensors whose memory is not what it seems, each of which once crashed or was wrong.

`python hostile.py BACKEND DEVICE` prints a line for each: its name, and what came of it: "right",
"wrong", or the error's type and text. It runs in a process of its own, for one that may die.
"""

import sys
import warnings

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

import openrnn
from openrnn import functional, ops

STEPS, BATCH, INPUTS, HIDDEN = 5, 3, 6, 4


class Wrapper(torch.Tensor):
    """A tensor without memory that computes with the one it holds."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def bare(value):
            return value.inner if isinstance(value, Wrapper) else value

        found = function(*tree_map(bare, args), **tree_map(bare, kwargs or {}))
        return tree_map(lambda t: Wrapper(t) if isinstance(t, torch.Tensor) else t, found)


def negative(tensor):
    """The same values behind torch's lazy negative bit."""
    return torch._neg_view(-tensor)


def zero(tensor):
    """Zeros that have no memory."""
    return torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype, device=tensor.device)


class Setting:
    """One network on the backend in question and the same on the reference."""

    def __init__(self, backend, device):
        torch.manual_seed(0)
        self.layer = openrnn.LSTM(INPUTS, HIDDEN, backend=backend, device=device)
        self.plain = openrnn.LSTM(INPUTS, HIDDEN, backend="reference", device=device)
        self.plain.load_state_dict(self.layer.state_dict())
        self.backend, self.device = backend, device
        self.x = torch.randn(STEPS, BATCH, INPUTS, device=device)
        self.h, self.c = (torch.randn(1, BATCH, HIDDEN, device=device) for _ in range(2))
        self.dy = torch.randn(STEPS, BATCH, HIDDEN, device=device)
        self.lengths = torch.tensor([5, 0, 2], device=device)
        self.reset = torch.rand(STEPS, BATCH, device=device) < 0.3

    def compare(self, x=None, h=None, dy=None, **masks):
        """Results and gradients of the call so changed, beside those of the call as it was."""
        kept = {name: getattr(self, name) for name in masks}
        self.plain.zero_grad()
        want, _ = self.plain(self.x, (self.h, self.c), **kept)
        want.backward(self.dy if dy is None or not dy._is_zerotensor() else torch.zeros_like(want))
        if x is None:
            x = self.x
        found, _ = self.layer(x, (self.h if h is None else h, self.c), **masks)
        found.backward(self.dy if dy is None else dy)
        pairs = [(found, want)]
        for name, parameter in self.plain.named_parameters():
            pairs.append((getattr(self.layer, name).grad, parameter.grad))
        return all(close(*pair) for pair in pairs)

    def change(self, name, value):
        """The same parameter with other memory, without a trace."""
        getattr(self.layer, name).data = value

    def after(self, change):
        """A gradient where something was changed between forward and backward."""
        y, _ = self.layer(self.x)
        change(y)
        torch.autograd.grad(y, [*self.layer.parameters()], self.dy)

    def explicit(self, change):
        """A gradient of the explicit operators, likewise."""
        spec = self.layer.spec
        params = [parameter.detach().clone() for parameter in self.layer.weights()]
        out = ops.forward(self.x, params, spec, backend=self.backend)
        return ops.backward(out.reserve, change(out))["params"]


def close(a, b):
    a, b = (t.inner if isinstance(t, Wrapper) else t for t in (a, b))
    scale = 1e-4 if a.device.type == "cpu" else 2e-2
    return bool((a.detach() - b.detach()).abs().max() <= scale * (1 + b.detach().abs().max()))


def emptied(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


def packed(rows, sizes, order=None):
    order = None if order is None else torch.tensor(order)
    return PackedSequence(torch.randn(rows, INPUTS), torch.tensor(sizes), order, order)


def parameter(s, name, value):
    s.change(name, value)
    return s.compare()


def negative_parameter(s):
    return parameter(s, "weight_hh_l0", negative(s.layer.weight_hh_l0.detach()))


def wrapped_parameter(s):
    s.layer.weight_hh_l0 = nn.Parameter(Wrapper(s.layer.weight_hh_l0.detach()))
    return close(s.layer(s.x)[0], s.plain(s.x)[0])


def explicit_negative(s):
    found = s.explicit(lambda out: negative(s.dy))
    plain = [parameter.detach() for parameter in s.layer.weights()]
    want = ops.forward(s.x, plain, s.layer.spec, backend="reference")
    return close(found, ops.backward(want.reserve, s.dy)["params"])


def shrink_explicit(s):
    def change(out):
        emptied(out.reserve.call.params[1])
        return s.dy

    s.explicit(change)


def shrink_explicit_y(s):
    def change(out):
        out.y.data = torch.empty(0, device=s.device)
        return s.dy

    s.explicit(change)


def two_dimensions(s):
    functional.recurrent(s.layer.spec, s.x[0], s.layer.weights(), backend=s.backend)


def narrow_states(s):
    states = [s.h[:, :1], s.c[:, :1]]
    functional.recurrent(s.layer.spec, s.x, s.layer.weights(), states, backend=s.backend)


def operator(s):
    """What a graph does in which a parameter was replaced."""
    with torch.no_grad():
        weights = [torch.empty(1, device=s.device), *s.layer.weights()[1:]]
        torch.ops.openrnn.forward(
            s.x, [], weights, None, None, [], None, s.layer.spec.text, s.backend, False, False,
            False, "",
        )  # fmt: skip


def transformed(s, lengths):
    return torch.func.grad(lambda x: s.layer(x, lengths=lengths)[0].sum())(s.x)


RIGHT = {
    "negative x": lambda s: s.compare(negative(s.x)),
    "negative state": lambda s: s.compare(h=negative(s.h)),
    "negative parameter": negative_parameter,
    "negative gradient": lambda s: s.compare(dy=negative(s.dy)),
    "zero gradient": lambda s: s.compare(dy=zero(s.dy)),
    "imaginary part": lambda s: s.compare(
        torch.complex(s.dy.new_zeros(s.x.shape), -s.x).conj().imag
    ),
    "negative dy, explicit": explicit_negative,
}
OPAQUE = {
    "wrapped x": lambda s: close(s.layer(Wrapper(s.x))[0], s.plain(s.x)[0]),
    "wrapped state": lambda s: close(
        s.layer(s.x, (Wrapper(s.h), s.c))[0], s.plain(s.x, (s.h, s.c))[0]
    ),
    "wrapped parameter": wrapped_parameter,
    "wrapped lengths": lambda s: close(
        s.layer(s.x, lengths=Wrapper(s.lengths))[0], s.plain(s.x, lengths=s.lengths)[0]
    ),
    "wrapped reset": lambda s: close(
        s.layer(s.x, reset=Wrapper(s.reset))[0], s.plain(s.x, reset=s.reset)[0]
    ),
    "functional x": lambda s: close(
        torch._from_functional_tensor(s.layer(torch._to_functional_tensor(s.x))[0]),
        s.plain(s.x)[0],
    ),
}
MEMORY = "must have memory for its shape"
REFUSED = {  # and the words
    "empty parameter": (
        lambda s: parameter(s, "weight_ih_l0", torch.empty(0, device=s.device)),
        "ValueError: weight_ih_l0 must have shape (16, 6), got (0,)",
    ),
    "bias of one": (
        lambda s: parameter(s, "bias_hh_l0", torch.empty(1, device=s.device)),
        "ValueError: bias_hh_l0 must have shape (16,), got (1,)",
    ),
    "parameter without storage": (
        lambda s: (emptied(s.layer.weight_ih_l0.data), s.layer(s.x)),
        f"ValueError: weight_ih_l0 {MEMORY} (16, 6), got a storage of no bytes",
    ),
    "x without storage": (lambda s: s.layer(emptied(s.x.clone())), f"ValueError: x {MEMORY}"),
    "state without storage": (
        lambda s: s.layer(s.x, (emptied(s.h.clone()), s.c)),
        f"ValueError: h_0 {MEMORY}",
    ),
    "reset without storage": (
        lambda s: s.layer(s.x, reset=emptied(s.reset.clone())),
        f"ValueError: reset {MEMORY}",
    ),
    "lengths without storage, in a transform": (
        lambda s: transformed(s, emptied(torch.tensor([1, 2, 3]))),
        f"ValueError: lengths {MEMORY}",
    ),
    "transposed": (
        lambda s: torch.func.functional_call(
            s.layer, {"weight_ih_l0": s.layer.weight_ih_l0.detach().t()}, (s.x,)
        ),
        "ValueError: weight_ih_l0 must have shape (16, 6), got (6, 16)",
    ),
    "shrunk before backward": (
        lambda s: s.after(lambda y: s.change("weight_hh_l0", torch.empty(0, device=s.device))),
        "ValueError: weight_hh_l0 must have shape (16, 4), got (0,)",
    ),
    "y without storage before backward": (lambda s: s.after(emptied), f"ValueError: y {MEMORY}"),
    "shrunk, explicit": (shrink_explicit, f"ValueError: weight_hh_l0 {MEMORY}"),
    "y shrunk, explicit": (shrink_explicit_y, "ValueError: backward needs y as forward left it"),
    "2-D x": (two_dimensions, "ValueError: x must have shape (T, B, 6), got (3, 6)"),
    "narrow states": (
        narrow_states,
        "ValueError: a state must have shape (1, 3, 4), got (1, 1, 4)",
    ),
    "the operator": (operator, "ValueError: weight_ih_l0 must have shape (16, 6), got (1,)"),
    "too many packed rows": (
        lambda s: s.layer(packed(6, [3, 3, 3]).to(s.device)),
        "ValueError: batch_sizes of a PackedSequence must have the sum 6, its rows, got 9",
    ),
    "parameter whose data is a wrapper": (
        lambda s: parameter(s, "weight_hh_l0", Wrapper(s.layer.weight_hh_l0.detach())),
        f"ValueError: weight_hh_l0 {MEMORY} (16, 4), got a storage of no bytes",
    ),
    "parameter whose data is functional": (
        lambda s: parameter(s, "bias_hh_l0", torch._to_functional_tensor(s.layer.bias_hh_l0.data)),
        "ValueError: bias_hh_l0 must be a plain parameter, got one whose data is a wrapper's",
    ),
    "short order": (
        lambda s: s.layer(packed(6, [3, 2, 1], [0, 1])),
        "ValueError: sorted_indices of a PackedSequence must be int64 of shape (3,)",
    ),
    "order beyond the batch": (
        lambda s: s.layer(packed(6, [3, 2, 1], [0, 1, 9])),
        "ValueError: sorted_indices of a PackedSequence must name each sequence once",
    ),
    "rising batch sizes": (
        lambda s: s.layer(packed(6, [1, 2, 3]).to(s.device)),
        "ValueError: batch_sizes of a PackedSequence must be from 1 and never rise, got [1, 2, 3]",
    ),
}


def outcome(call, setting):
    try:
        found = call(setting)
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    return {True: "right", False: "wrong"}.get(found, "nothing was said")


def main(backend, device):
    warnings.simplefilter("ignore")
    refused = {name: call for name, (call, _) in REFUSED.items()}
    for name, call in (RIGHT | OPAQUE | refused).items():
        print(f"{name}\t{outcome(call, Setting(backend, device))}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
