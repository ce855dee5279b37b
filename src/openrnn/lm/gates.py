"""What a layer's gates do, for TensorBoard: histograms, saturation, the mean of forget gates."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from openrnn.lm.evaluate import GLANCE, sample_of
from openrnn.lm.run import TrainingRun
from openrnn.lm.streams import Streams
from openrnn.lm.train import Report
from openrnn.nn import Layer

STREAMS = 8
# a sigmoid there is within 0.05 of its ends, a tanh within 0.005
SATURATED = 3.0


class Gates:
    """A reporter that writes the gates' pre-activations at each evaluation on held-out bytes."""

    def __init__(self, run: TrainingRun, writer: Any) -> None:
        self.run, self.writer = run, writer

    def report(self, report: Report) -> None:
        """Does nothing: reports come too often."""

    def held_out(self, step: int, nats: float) -> None:
        model, place = self.run.model, 0
        with self.run.precision():
            y = self._embedded()
            for stack in model.stacks:
                if isinstance(stack, nn.RNNBase) or stack.cell.dependent_product:
                    return
                self._write(stack, y, place, step)
                place += stack.num_layers
                with torch.no_grad(), resting(stack):
                    y = stack(y)[0]

    def _write(self, layer: Layer, x: Tensor, first: int, step: int) -> None:
        """Writes the gates of a module whose layers are counted from `first` on."""
        for place, gate, values in preactivations(layer, x):
            where = f"gates/l{first + place}/{gate}"
            self.writer.add_histogram(where, values.float().cpu(), step)
            saturated = (values.abs() > SATURATED).float().mean()
            self.writer.add_scalar(f"{where}_saturated", float(saturated), step)
            if gate == "f":
                self.writer.add_scalar(
                    f"{where}_mean", float(values.float().sigmoid().mean()), step
                )

    @torch.no_grad()
    def _embedded(self) -> Tensor:
        """The beginning of some held-out files, as the layer sees it."""
        run = self.run
        part = sample_of(run.corpus.held_out, GLANCE)
        streams = Streams(part, min(STREAMS, len(part.data) // 2), 0, 1)
        chunk = streams.chunk(0, run.config.bptt).to(run.workers.device)
        embedded: Tensor = run.model.embedding(chunk.x)
        return embedded


@contextmanager
def resting(layer: nn.Module) -> Iterator[None]:
    """A module in eval mode, and in its own again afterwards."""
    was = layer.training
    layer.eval()
    try:
        yield
    finally:
        layer.train(was)


@torch.no_grad()
def preactivations(layer: Layer, x: Tensor) -> Iterator[tuple[int, str, Tensor]]:
    """Yields layer, gate and the sum of its input side and recurrent side, (T, B, H).

    Dropout is left out. Of a GRU's n it is the sum as it were without the reset gate.
    """
    with resting(layer):
        _, _, every = layer(x, return_states=True)
    h = every if isinstance(every, Tensor) else every[0]  # (L, T, B, H)
    for place, weights in enumerate(layer.all_weights):
        w_ih, w_hh, b_ih, b_hh = weights[:4]
        below = x if place == 0 else h[place - 1]
        before = torch.cat([torch.zeros_like(h[place][:1]), h[place][:-1]])
        total = linear(below, w_ih, b_ih) + linear(before, w_hh, b_hh)
        for gate, values in zip(layer.cell.gates, total.chunk(len(layer.cell.gates), -1)):
            yield place, gate, values
