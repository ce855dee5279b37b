"""A step on a GPU as a CUDA graph: recorded once, then replayed for each x."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from openrnn.backends.base import Backend, Call, result_shapes
from openrnn.errors import warn_user

_capturing = threading.Lock()


class CapturedStep:
    """A call without gradients in a CUDA graph.

    A run copies x to where the graph reads it and replays the graph on the current stream. The
    graph reads parameters and states where they lay at its capture and writes the results. As
    torch's generator knows one capture at a time, captures wait for each other; another thread that
    draws from the device's generator meanwhile gets torch's error.

    Args:
        backend: what runs the call; it ran one alike before, so that nothing is left to compile.
        call: with states.
        results: memory for y and the final states, none of it that of the states.

    Raises:
        RuntimeError: something in the call cannot be captured.
    """

    def __init__(self, backend: Backend, call: Call, results: Sequence[Tensor]) -> None:
        device = call.x.device
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
            self._x = torch.empty(call.x.shape, dtype=call.x.dtype, device=device)
            self._x.copy_(call.x)
            shapes = result_shapes(call.problem, *call.x.shape[:2])
            outputs = [result.view(shape) for result, shape in zip(results, shapes)]
            call = replace(call, x=self._x, results=outputs)
            self._graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            stream = torch.cuda.Stream(device)
            stream.wait_stream(current)
            with _capturing, torch.cuda.stream(stream):
                # "thread_local": other threads may allocate and synchronise meanwhile
                self._graph.capture_begin(capture_error_mode="thread_local")
                try:
                    out = backend.forward(call)
                    for made, output in zip((out.y, *out.finals), outputs):
                        if made.data_ptr() != output.data_ptr():
                            output.copy_(made)
                finally:
                    self._graph.capture_end()
            current.wait_stream(stream)

    def __call__(self, x: Tensor) -> None:
        with torch.no_grad():
            self._x.copy_(x.reshape(self._x.shape))
        self._graph.replay()


def bound(
    backend: Backend, call: Call, results: Sequence[Tensor]
) -> Callable[[Tensor], None] | None:
    """What `Backend.bind` promises, for calls on a GPU; None with a warning where it fails."""
    try:
        return CapturedStep(backend, call, results)
    except RuntimeError as error:
        warn_user(
            f"a step of {call.problem.spec.cell} by backend {backend.name} cannot be recorded in a "
            f"CUDA graph, so each step is launched anew: {str(error).splitlines()[0]}"
        )
        return None
