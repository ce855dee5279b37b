"""One layer and direction of a network as the kernels know it: all that no call changes."""

from functools import lru_cache
from typing import Any

import torch

from openrnn.backends.base import traced
from openrnn.backends.fused import kernels, plan
from openrnn.codegen import cuda
from openrnn.native import nvrtc
from openrnn.params import places
from openrnn.spec import Spec

Flags = tuple[bool, ...]
FORWARD = ("lengths", "reset", "every", "keep")  # the flags of a kernel, in their order
BACKWARD = ("lengths", "reset", "every", "fresh")


class Chain:
    """Sizes, places and kernels of one layer and direction.

    Attributes:
        units: H as the kernels see it, a multiple of 8.
        planes: the number of gate gradients of a unit, `width` all of them in a row of d_gates.
        left, right: the gates in the order of the first and of the last planes.
        turned: where a side's planes have another order than the gates.
    """

    def __init__(self, spec: Spec, index: int, dtype: torch.dtype, device: int) -> None:
        self.spec, self.index, self.dtype, self.device = spec, index, dtype, device
        self.direction = index % spec.directions
        self.cell = cell = traced(spec)
        self.hidden, self.units = spec.hidden_size, plan.padded(spec.hidden_size)
        self.exact = self.hidden == self.units
        self.gates, self.vectors = len(spec.gates), len(spec.unit_params)
        self.places = places(spec)[index]
        alone = cuda.apart(cell)
        shared = tuple(gate for gate in cell.gates if gate not in alone)
        self.left = tuple(cell.gates.index(gate) for gate in (*alone, *shared))
        self.right = tuple(cell.gates.index(gate) for gate in (*shared, *alone))
        self.planes = len(cuda.planes(cell))
        self.width = self.planes * self.units
        self.nulls = [0] * len(spec.states)
        self._kernels: dict[tuple[Any, ...], tuple[nvrtc.Kernel, Any]] = {}

    def forward(self, batch: int, flags: Flags) -> tuple[nvrtc.Kernel, cuda.Forward]:
        """The forward kernel and its tiles; `flags` as FORWARD names them."""
        found: tuple[nvrtc.Kernel, cuda.Forward]
        found = self._kernel(kernels.forward, FORWARD, batch, flags)
        return found

    def backward(self, batch: int, flags: Flags) -> tuple[nvrtc.Kernel, cuda.Backward]:
        """The backward kernel and its tiles; `flags` as BACKWARD names them."""
        found: tuple[nvrtc.Kernel, cuda.Backward]
        found = self._kernel(kernels.backward, BACKWARD, batch, flags)
        return found

    def _kernel(self, find: Any, names: tuple[str, ...], batch: int, flags: Flags) -> Any:
        tiles = (batch + 7) // 8
        key = (find, tiles, flags, kernels.PATIENCE)
        found = self._kernels.get(key)
        if found is None:
            on = tuple(name for name, flag in zip(names, flags) if flag)
            dtype = str(self.dtype).removeprefix("torch.")
            found = find(self.cell, dtype, self.hidden, tiles, on, self.device)
            self._kernels[key] = found
        return found


chain = lru_cache(maxsize=4096)(Chain)


@lru_cache(maxsize=1024)
def record(spec: Spec, dtype: torch.dtype) -> int:
    """The values of a kept record."""
    return cuda.record(traced(spec), str(dtype).removeprefix("torch."))
