"""What only we run fast, on this GPU: `python benchmarks/cells.py [--json FILE]`.

Three cells of a user's own against the same function stepped in eager PyTorch and in torch.compile;
an LSTM with resets and with lengths against the same call without; peak memory of a training step.
Times are medians in microseconds a step, forward and forward with backward.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cudnn import machine
from fused import step, timed

import openrnn

STEPS, BATCH, HIDDEN = 256, 64, 256


@openrnn.cell(gates="i f g o", states="h c", params="p_i p_f p_o")
def peephole(x, r, s, p):
    """An LSTM whose gates see the cell state."""
    i = torch.sigmoid(x.i + r.i + p.p_i * s.c)
    f = torch.sigmoid(x.f + r.f + p.p_f * s.c)
    c = f * s.c + i * torch.tanh(x.g + r.g)
    return torch.sigmoid(x.o + r.o + p.p_o * c) * torch.tanh(c), c


@openrnn.cell(gates="z n", states="h")
def light(x, r, s):
    """A light GRU: no reset gate, a rectified candidate."""
    z = torch.sigmoid(x.z + r.z)
    return z * s.h + (1 - z) * torch.relu(x.n + r.n)


@openrnn.cell(gates="f g o", states="h c")
def coupled(x, r, s):
    """An LSTM whose input gate is what the forget gate leaves."""
    f = torch.sigmoid(x.f + r.f)
    c = f * s.c + (1 - f) * torch.tanh(x.g + r.g)
    return torch.sigmoid(x.o + r.o) * torch.tanh(c), c


def looped(layer: openrnn.Recurrent, compiled: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """The layer as a loop over steps in Python: one product for all inputs, then step by step."""
    gates, unit = layer.cell.gates, layer.cell.unit_params
    named = dict(layer.named_parameters())
    names = type("Names", (), {})

    def given(kind: tuple[str, ...], values: Any) -> Any:
        found = names()
        for name, value in zip(kind, values, strict=True):
            setattr(found, name, value)
        return found

    def once(x: torch.Tensor, states: list[torch.Tensor], w: torch.Tensor, b: torch.Tensor) -> Any:
        r = torch.nn.functional.linear(states[0], w, b)
        inputs = [given(gates, x.chunk(len(gates), -1)), given(gates, r.chunk(len(gates), -1))]
        inputs.append(given(layer.cell.states, states))
        if unit:
            inputs.append(given(unit, [named[f"{name}_l0"] for name in unit]))
        new = layer.cell.function(*inputs)
        return list(new) if isinstance(new, tuple) else [new]

    run = torch.compile(once) if compiled else once

    def call(x: torch.Tensor) -> tuple[torch.Tensor]:
        left = torch.nn.functional.linear(x, named["weight_ih_l0"], named["bias_ih_l0"])
        states = [x.new_zeros(x.shape[1], layer.hidden_size) for _ in layer.cell.states]
        emitted = []
        for one in left.unbind(0):
            states = run(one, states, named["weight_hh_l0"], named["bias_hh_l0"])
            emitted.append(states[0])
        return (torch.stack(emitted),)

    return call


class Loop(torch.nn.Module):
    """A layer's loop with the layer's parameters."""

    def __init__(self, layer: openrnn.Recurrent, compiled: bool) -> None:
        super().__init__()
        self.layer, self._call = layer, looped(layer, compiled)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return self._call(x)


def custom(seconds: float) -> list[dict[str, Any]]:
    """Three cells, ours and stepped."""
    rows = []
    for cell in (peephole, light, coupled):
        where = {"device": "cuda", "dtype": torch.bfloat16}
        ours = openrnn.Recurrent(cell, HIDDEN, HIDDEN, backend="fused", **where)
        torch._dynamo.reset()  # else the last cell's graphs count against this one's limit
        sides = {"ours": ours, "eager": Loop(ours, False), "compile": Loop(ours, True)}
        x = torch.randn(STEPS, BATCH, HIDDEN, **where).requires_grad_()
        dy = torch.randn(STEPS, BATCH, HIDDEN, **where)
        row: dict[str, Any] = {"set": "custom", "cell": cell.name, "dtype": "bf16"}
        row |= {"T": STEPS, "B": BATCH, "I": HIDDEN, "H": HIDDEN}
        for kind, grad in (("infer", None), ("train", dy)):
            calls = [partial(step, layer, x, grad) for layer in sides.values()]
            for name, time in zip(sides, timed(calls, seconds), strict=True):
                row[f"{kind} {name}"] = time / STEPS
        rows.append(row)
    return rows


def masks(seconds: float) -> list[dict[str, Any]]:
    """Resets of 3% of all steps, and lengths drawn evenly from 1 to T, against neither."""
    rows = []
    for hidden, batch in ((256, 32), (512, 64)):
        where = {"device": "cuda", "dtype": torch.bfloat16}
        layer = openrnn.LSTM(hidden, hidden, backend="fused", **where)
        x = torch.randn(STEPS, batch, hidden, **where).requires_grad_()
        dy = torch.randn(STEPS, batch, hidden, **where)
        options: dict[str, dict[str, Any]] = {
            "plain": {},
            "reset": {"reset": torch.rand(STEPS, batch, device="cuda") < 0.03},
            "lengths": {"lengths": torch.randint(1, STEPS + 1, (batch,), device="cuda")},
        }
        row: dict[str, Any] = {"set": "masks", "cell": "lstm", "dtype": "bf16"}
        row |= {"T": STEPS, "B": batch, "I": hidden, "H": hidden}
        for kind, grad in (("infer", None), ("train", dy)):
            calls = [partial(step, layer, x, grad, **given) for given in options.values()]
            for name, time in zip(options, timed(calls, seconds), strict=True):
                row[f"{kind} {name}"] = time / STEPS
        rows.append(row)
    return rows


def memory() -> list[dict[str, Any]]:
    """Peak memory of a training step beyond x and dy, ours and torch.nn's, in MiB; and its time."""
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        row: dict[str, Any] = {"set": "memory", "cell": "lstm", "dtype": str(dtype)[6:]}
        row |= {"T": 1024, "B": 64, "I": 512, "H": 512}
        where = {"device": "cuda", "dtype": dtype}
        sides = {
            "nn": torch.nn.LSTM,
            "ours": partial(openrnn.LSTM, backend="fused"),
            "ours recomputing": partial(openrnn.LSTM, backend="fused", recompute="gates"),
        }
        for name, make in sides.items():
            layer = make(512, 512, **where)
            x = torch.randn(1024, 64, 512, **where).requires_grad_()
            dy = torch.randn(1024, 64, 512, **where)
            step(layer, x, dy)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step(layer, x, dy)
            row[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
            row[f"{name} with x and dy"] = torch.cuda.max_memory_allocated() / 2**20
            row[f"{name} us a step"] = timed([partial(step, layer, x, dy)], 0.2)[0] / 1024
            del layer, x, dy
        rows.append(row)
    return rows


def main() -> None:
    """Prints a line a row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each time")
    options = parser.parse_args()
    rows = []
    for measure in (memory, lambda: masks(options.seconds), lambda: custom(options.seconds)):
        for row in measure():
            rows.append(row)
            print(
                *(f"{k} {v:.2f}" if isinstance(v, float) else v for k, v in row.items()), flush=True
            )
        if options.json:
            found = {"machine": machine(), "rows": rows}
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
