"""What differs between modelling bytes and words: names, and how the loss is told."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One kind of symbol.

    Args:
        unit: a symbol in words; letters: its unit of speed.
        key: the figure in `scores.json`; tag: in TensorBoard.
        title: the figure, to stand above a table; form: the figure in a line of text.
        exponential: the figure is a perplexity, e to the loss; else it is in bits.
    """

    unit: str
    letters: str
    key: str
    tag: str
    title: str
    form: str
    exponential: bool

    def figure(self, nats: float) -> float:
        """Bits per byte, or the perplexity, of a loss in nats a symbol."""
        if not self.exponential:
            return nats / math.log(2)
        return math.exp(nats) if nats < 700 else math.inf

    def text(self, nats: float) -> str:
        """The figure as text."""
        return self.form.format(self.figure(nats))


TASKS = {
    "bytes": Task("byte", "B", "bits_per_byte", "bpb", "bits per byte", "{:.3f} bits/byte", False),
    "words": Task("word", "words", "perplexity", "ppl", "perplexity", "perplexity {:.2f}", True),
}
