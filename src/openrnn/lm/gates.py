"""What the gates of a language model do on held-out text, for TensorBoard."""

from typing import Any

import torch
from torch import Tensor, nn

from openrnn.lm.evaluate import GLANCE, sample_of
from openrnn.lm.run import TrainingRun
from openrnn.lm.streams import Streams
from openrnn.lm.train import Report
from openrnn.nn.network import eval_mode
from openrnn.watch.gates import preactivations, why_not, write

STREAMS = 8


class Gates:
    """A reporter that writes the gates' pre-activations at each evaluation on held-out bytes."""

    def __init__(self, run: TrainingRun, writer: Any) -> None:
        self.run, self.writer = run, writer

    def report(self, report: Report) -> None:
        """Does nothing: reports come too often."""

    def held_out(self, step: int, nats: float) -> None:
        model, layers_below = self.run.model, 0
        with self.run.precision():
            y = self._embedded()
            for stack in model.stacks:
                if isinstance(stack, nn.RNNBase) or why_not(stack):
                    return
                for gate in preactivations(stack, y):
                    moved = gate._replace(layer=layers_below + gate.layer)
                    write(self.writer, "gates", moved, step)
                layers_below += stack.num_layers
                with torch.no_grad(), eval_mode(stack):
                    y = stack(y)[0]

    @torch.no_grad()
    def _embedded(self) -> Tensor:
        """The beginning of some held-out files, as the layer sees it."""
        run = self.run
        part = sample_of(run.corpus.held_out, GLANCE)
        streams = Streams(part, min(STREAMS, len(part.data) // 2), 0, 1)
        chunk = streams.chunk(0, run.config.bptt).to(run.workers.device)
        embedded: Tensor = run.model.embedding(chunk.x)
        return embedded
