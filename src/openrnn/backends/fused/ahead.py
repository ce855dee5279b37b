"""Kernels compiled before the first call needs them."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import torch

from openrnn.backends.fused import kernels, plan
from openrnn.native import nvrtc
from openrnn.spec import Spec


class HasSpec(Protocol):
    """A layer of `openrnn.nn`."""

    @property
    def spec(self) -> Spec:
        """What the network is."""


def compile_kernels(
    module: HasSpec,
    dtype: torch.dtype = torch.bfloat16,
    *,
    batches: Iterable[int] = (1, 16, 64, 256),
    grad: bool = True,
    lengths: bool = False,
    reset: bool = False,
    return_states: bool = False,
    capability: tuple[int, int] | None = None,
) -> int:
    """Compiles the CUDA kernels of a layer into the cache; returns how many there are.

    Args:
        module: a layer, such as `openrnn.LSTM`.
        dtype: of its tensors.
        batches: batch sizes that are expected; kernels differ by the number of tiles only.
        grad, lengths, reset, return_states: what calls will ask for.
        capability: of the device; by default that of torch's current one. No device is needed.

    Raises:
        CompileError: a kernel does not compile.

    Example:
        >>> import openrnn, torch
        >>> openrnn.compile_kernels(openrnn.LSTM(64, 64), torch.bfloat16, capability=(9, 0)) > 0
        True
    """
    found = capability or torch.cuda.get_device_capability()
    cell, name = kernels.traced(module.spec), str(dtype).removeprefix("torch.")
    arch, shared = nvrtc.arch_of(found), plan.Limits.of(found).shared
    every = {"lengths": lengths, "reset": reset, "every": return_states}
    made = set()
    for batch in batches:
        tiles = 8 * ((batch + 7) // 8)
        for flags, rank in (
            ({**every, "keep": grad}, plan.forward),
            ({**every, "fresh": False}, plan.backward if grad else None),
        ):
            if rank is None:
                continue
            for how in rank(cell, name, module.spec.hidden_size, tiles, found)[: kernels.TRIES]:
                asked = replace(how, **flags)  # type: ignore[arg-type]
                kernel = kernels.unspilled(cell, name, asked, arch, shared)  # type: ignore[type-var]
                if kernel is not None:
                    made.add(kernel[1])
                    break
    return len(made)
