"""A cell of a user's own, as none that ships: what the rows of `cells` run beside shipped ones."""

from typing import Any

import torch
from torch import Tensor

from openrnn.cells import cell


@cell(gates="z n", states="h", name="light_gru")
def light_gru(x: Any, r: Any, s: Any) -> Tensor:
    """A light GRU: no reset gate, a rectified candidate."""
    z = torch.sigmoid(x.z + r.z)
    made: Tensor = z * s.h + (1 - z) * torch.relu(x.n + r.n)
    return made
