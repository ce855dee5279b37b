"""Kernels compiled before the first call needs them."""

from collections.abc import Iterable
from typing import Protocol

import torch

from openrnn.backends.base import traced
from openrnn.backends.fused import kernels
from openrnn.native.nvrtc import arch_of
from openrnn.spec import Spec
from openrnn.tuning import plan


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
    reset_state: bool = False,
    return_states: bool = False,
    capability: tuple[int, int] | None = None,
) -> int:
    """Compiles the CUDA kernels of a layer into the cache; returns how many there are.

    Args:
        module: a layer, such as `openrnn.LSTM`.
        dtype: of its tensors.
        batches: batch sizes that are expected; kernels differ only by the number of 8 rows.
        grad, lengths, reset, reset_state, return_states: what calls will ask for; reset_state with
            and without its gradients.
        capability: of the device, which need not be there; by default that of torch's current one.

    Raises:
        ValueError: no capability, and no device that has one; reset_state without reset.
        CompileError: a kernel does not compile.

    Example:
        >>> import openrnn, torch
        >>> openrnn.compile_kernels(openrnn.LSTM(64, 64), torch.bfloat16, capability=(9, 0)) > 0
        True
    """
    if reset_state and not reset:
        raise ValueError("compile_kernels got reset_state=True without reset=True, needs both")
    if capability is None and not torch.cuda.is_available():
        raise ValueError(
            "compile_kernels needs capability=(9, 0) or so: torch finds no CUDA device"
        )
    found, processors = capability, None
    if found is None:
        found = torch.cuda.get_device_capability()
        processors = torch.cuda.get_device_properties().multi_processor_count
    cell, name = traced(module.spec), str(dtype).removeprefix("torch.")
    kinds = plan.kinds(module.spec, grad, lengths, reset, return_states, reset_state)
    made = set()
    if grad:
        made.add(kernels.plain_binary("permute_weights", name, arch_of(found)))
        made.add(kernels.plain_binary("reduce_bias_gradients", name, arch_of(found)))
    if lengths:
        made.add(kernels.plain_binary("sort_lengths", "float32", arch_of(found)))
    made.add(kernels.plain_binary("copy_rows", name, arch_of(found)))
    made.add(kernels.plain_binary("fill_flags", "float32", arch_of(found)))
    if grad and module.spec.drops(True):
        made.add(kernels.plain_binary("dropout", name, arch_of(found)))
    for batch in batches:
        for kind, on in kinds:
            tiles = (batch + 7) // 8
            kernel = kernels.best(
                kind, cell, name, module.spec.hidden_size, tiles, on, found, processors=processors
            )
            if kernel is not None:
                made.add(kernel[0])
    return len(made)
