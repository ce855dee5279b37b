"""How a task is optimised: the optimiser, its rate over time, the bound of gradients."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from openrnn.lm.config import Config

CLIP = {"bytes": 1.0, "words": 0.25}
DECAY = {"bytes": 0.01, "words": 1.2e-6}
MOMENTS = {"bytes": ("step", "exp_avg", "exp_avg_sq"), "words": ()}
WARM_UP = 0.03  # of the budget
CUT = 4.0  # by which a pass over the words that does not improve divides the rate


def optimizer(config: Config, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """AdamW for bytes; for words plain SGD, whose rate is the loss's own scale."""
    decay = DECAY[config.task]
    if config.task == "words":
        return SGD(parameters, config.lr, weight_decay=decay)
    return AdamW(parameters, config.lr, betas=(0.9, 0.99), weight_decay=decay, fused=True)


def rate(progress: float) -> float:
    """The share of the learning rate after this share of the budget: a ramp, then half a cosine."""
    return min(progress / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * min(progress, 1)))


@dataclass
class Plateau:
    """The rate of a run on words: cut after each pass whose held-out loss is not the best so far.

    Args:
        best: the least held-out loss after a pass, in nats; None before the first.
        cuts: how often the rate was cut.
    """

    best: float | None = None
    cuts: int = 0

    @property
    def share(self) -> float:
        """The share of the learning rate that is left."""
        return CUT**-self.cuts

    def judge(self, nats: float) -> None:
        """Takes in the held-out loss after a pass."""
        if self.best is None or nats < self.best:
            self.best = nats
        else:
            self.cuts += 1
