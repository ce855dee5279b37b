"""The model of words: tied weights, and the regularisers of AWD-LSTM."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import dropout, linear

from openrnn.lm.config import Config
from openrnn.lm.model import LanguageModel, Stack, State, as_tuple, given

SCALE = 0.1  # embeddings and scores begin uniform in [-0.1, 0.1]


class Tied(nn.Module):
    """Scores of symbols by the matrix that embeds them, which is not a parameter of this module."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(symbols))

    def forward(self, y: Tensor, embedding: Tensor) -> Tensor:
        """The logits of y (..., E) by an embedding (S, E)."""
        return linear(y, embedding, self.bias)


class WordModel(LanguageModel):
    """A language model with the regularisers of AWD-LSTM (Merity and others, 2017), in training.

    In words of the options of `openrnn train`, with m a mask of zeros and 1 / (1 - p):

        x_t = m_embedding[word] * embedding[word] * m_input       m_input (B, E), for all t
        R = m_weight * weight_hh                                  anew each step of training
        x_t of layer l + 1 = y_t of layer l * m_dropout           (B, H), for all t
        z_t = y_t of the last layer * m_output                    (B, E), for all t
        penalty = activation * mean(z_t ** 2) + temporal * mean((y_t - y_{t-1}) ** 2)

    Shapes:
        as of LanguageModel; in training the penalty comes third.
    """

    def __init__(
        self,
        rnns: Sequence[Stack],
        embedding: nn.Embedding,
        config: Config,
        vocabulary: tuple[str, ...],
    ) -> None:
        width = embedding.embedding_dim if config.tied else config.hidden
        symbols = embedding.num_embeddings
        output: Tied | nn.Linear = Tied(symbols) if config.tied else nn.Linear(width, symbols)
        super().__init__(nn.ModuleList(rnns), embedding, output, vocabulary)
        self.config = config
        nn.init.uniform_(embedding.weight, -SCALE, SCALE)
        if isinstance(output, nn.Linear):
            nn.init.uniform_(output.weight, -SCALE, SCALE)
        nn.init.zeros_(output.bias)

    def forward(  # type: ignore[override]  # the penalty
        self, x: Tensor, state: State | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, State] | tuple[Tensor, State, Tensor]:
        """Logits, the state after x, and in training the penalty."""
        if not self.training:
            return super().forward(x, state, reset)
        config = self.config
        after: State = ()
        y = self.embedding(x)
        if config.dropout_embedding:
            rows = y.new_ones(self.embedding.num_embeddings, 1)
            y = y * dropout(rows, config.dropout_embedding)[x]
        z = locked(y, config.dropout_input)
        last = len(self.stacks) - 1
        for index, mine in enumerate(self.split(state)):
            y, more = self.through(index, z, mine, reset)
            z = locked(y, config.dropout_output if index == last else config.dropout)
            after += more
        penalty = config.activation * z.float().square().mean()
        if len(y) > 1:
            penalty = penalty + config.temporal * (y[1:] - y[:-1]).float().square().mean()
        return self.scores(z), after, penalty

    def call(
        self, stack: Stack, x: Tensor, state: State | None, **masks: Tensor | None
    ) -> tuple[Tensor, State]:
        """A recurrent module's output and state, of dropped weights in training."""
        if not (self.training and self.config.dropout_weight):
            return super().call(stack, x, state, **masks)
        dropped = {
            name: dropout(weight, self.config.dropout_weight)
            for name, weight in stack.named_parameters()
            if name.startswith("weight_hh")
        }
        y, after = functional_call(stack, dropped, (x, given(stack, state)), masks)
        return y, as_tuple(after)

    def scores(self, y: Tensor) -> Tensor:
        """The logits of outputs of the last layer."""
        if isinstance(self.output, Tied):
            logits: Tensor = self.output(y, self.embedding.weight)
            return logits
        return super().scores(y)


def locked(y: Tensor, p: float) -> Tensor:
    """Dropout of y (T, B, H) by one mask (B, H) for all steps of time."""
    return y * dropout(torch.ones_like(y[:1]), p) if p else y
