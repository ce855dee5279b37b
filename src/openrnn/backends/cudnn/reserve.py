"""How much cuDNN keeps for backward, as arithmetic that a compiler can do with unknown T and B."""

import torch

from openrnn.spec import Problem

# what a step of a chain keeps, in multiples of H
PER_STEP = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}
ALIGNED = 256


def reserve_bytes(problem: Problem, steps: int, batch: int) -> int:
    """At least what `cudnnGetRNNTempSpaceSizes` says, for every algorithm."""
    spec = problem.spec
    hidden = spec.hidden_size
    projected = hidden + spec.proj_size if spec.proj_size else 0
    numbers = spec.chains * (PER_STEP[spec.cell] * hidden + projected)
    between = (spec.num_layers - 1) * spec.directions
    numbers += between * hidden
    width = torch.finfo(problem.dtype).bits // 8
    total = steps * batch * numbers * width
    if problem.drops:
        # a bit for each number, and each direction has its own
        total += between * (steps * batch * hidden * spec.directions // 8 + ALIGNED)
    return total + ALIGNED * (2 + 4 * spec.chains)
