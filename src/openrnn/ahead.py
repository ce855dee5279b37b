"""Kernels compiled before the first call needs them."""

from collections.abc import Iterable
from typing import Protocol

import torch

from openrnn.backends.cpu import ahead as on_cpu
from openrnn.backends.fused import ahead as on_cuda
from openrnn.dispatch import BACKENDS
from openrnn.errors import NoBackendError, kind_of
from openrnn.spec import Problem, Spec


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
    device: str = "cuda",
) -> int:
    """Compiles the kernels of a layer into the cache; returns how many there are.

    Args:
        module: a layer, such as `openrnn.LSTM`.
        dtype: of its tensors. On a CPU 16-bit types are computed in float32.
        batches: batch sizes that are expected on a GPU; its kernels differ by the number of 8 rows.
            Those of single steps (T = 1) are among them.
        grad, lengths, reset, reset_state, return_states: what calls will ask for; reset_state with
            and without its gradients. On a CPU only grad makes a difference.
        capability: of the GPU, which need not be there; by default that of torch's current one.
        device: "cuda", or "cpu" for this machine's processor.

    Raises:
        TypeError: module is no layer of openrnn.
        ValueError: another device; no capability, and no device that has one; reset_state without
            reset.
        NoBackendError: there are no CPU kernels for the layer.
        CompileError: a kernel does not compile.

    Example:
        >>> import openrnn, torch
        >>> openrnn.compile_kernels(openrnn.GRU(64, 64), batches=(16,), capability=(9, 0)) > 0
        True
    """
    if not isinstance(getattr(module, "spec", None), Spec):
        raise TypeError(
            f"compile_kernels needs a layer such as openrnn.LSTM, got {kind_of(module)}"
        )
    if device not in ("cuda", "cpu"):
        raise ValueError(f"compile_kernels got device={device!r}, needs 'cuda' or 'cpu'")
    if reset_state and not reset:
        raise ValueError("compile_kernels got reset_state=True without reset=True, needs both")
    if device == "cpu":
        problem = Problem(module.spec, dtype, "cpu", grad=grad)
        if refusals := BACKENDS["cpu"].refusals(problem):
            raise NoBackendError(str(problem), {"cpu": refusals})
        return on_cpu.compiled(problem)
    if capability is None and not torch.cuda.is_available():
        raise ValueError(
            "torch finds no CUDA device: compile_kernels needs device='cpu', or the capability of "
            "a GPU, such as capability=(9, 0)"
        )
    found, processors = capability, None
    if found is None:
        found = torch.cuda.get_device_capability()
        processors = torch.cuda.get_device_properties().multi_processor_count
    problem = Problem(
        module.spec, dtype, "cuda", found, grad, lengths=lengths, reset=reset,
        return_states=return_states, processors=processors,
    )  # fmt: skip
    return len(on_cuda.compiled(problem, batches, reset_state))
