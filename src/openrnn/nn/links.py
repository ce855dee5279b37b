"""Copies between the devices of one call, on side streams, so that kernels run meanwhile.

A copy waits for the kernels that wrote its chunk, and the kernels that read it wait for the copy.
Memory is allocated on the current streams. These wait at the end for the side streams, so no tensor
needs `record_stream`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openrnn.memo import resource


@resource
def _copy_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The streams of a GPU for copies from it and to it."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


class DeviceStreams(NamedTuple):
    """The streams and events of a GPU in a call.

    Attributes:
        kernels: the stream of its kernels.
        copies_out: the stream of copies from the GPU.
        copies_in: the stream of copies to it.
        kernels_done: recorded on `kernels`, before a copy.
        copy_arrived: recorded on `copies_in`, after a copy.
    """

    kernels: torch.cuda.Stream
    copies_out: torch.cuda.Stream
    copies_in: torch.cuda.Stream
    kernels_done: torch.cuda.Event
    copy_arrived: torch.cuda.Event


def current_streams(devices: Sequence[torch.device]) -> list[torch.cuda.Stream]:
    """The current stream of each GPU among the devices."""
    gpus = dict.fromkeys(device for device in devices if device.type == "cuda")
    return [*map(torch.cuda.current_stream, gpus)]


class Links:
    """Copies between the devices of a call.

    A context: at its end the current device and streams are what they were before.

    Args:
        streams: the stream of each GPU on which its kernels run.
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        self._streams = {
            kernels.device: DeviceStreams(
                kernels, *_copy_streams(kernels.device), torch.cuda.Event(), torch.cuda.Event()
            )
            for kernels in streams
        }
        self._sent = list[Tensor]()  # what copies read is kept until the end

    def __enter__(self) -> "Links":
        if self._streams:
            self._device = torch.cuda.current_device()
            self._before = [torch.cuda.current_stream(device) for device in self._streams]
            for own in self._streams.values():
                torch.cuda.set_stream(own.kernels)
        return self

    def __exit__(self, *_: Any) -> None:
        if not self._streams:
            return
        for own, before in zip(self._streams.values(), self._before):
            if self._sent:
                own.kernels.wait_stream(own.copies_out)
                own.kernels.wait_stream(own.copies_in)
            if before != own.kernels:
                before.wait_stream(own.kernels)
            torch.cuda.set_stream(before)
        torch.cuda.set_device(self._device)
        self._sent.clear()

    def use(self, device: torch.device) -> None:
        """Makes the device current; kernels launched there from now on wait for copies to it."""
        own = self._streams.get(device)
        if own is not None:
            torch.cuda.set_stream(own.kernels)
            own.kernels.wait_event(own.copy_arrived)

    def receive_buffer(
        self, shape: Sequence[int], dtype: torch.dtype, source: torch.device, device: torch.device
    ) -> Tensor | None:
        """Memory on a GPU for what another one sends it; None if the devices are not two GPUs."""
        own = self._streams.get(device)
        if own is None or source == device or source not in self._streams:
            return None
        made = torch.empty(shape, dtype=dtype, device=device)
        own.kernels_done.record(own.kernels)  # earlier kernels may still use this memory
        own.copies_in.wait_event(own.kernels_done)
        return made

    def send(
        self, tensor: Tensor, device: torch.device, buffer: Tensor | None = None,
        steps: slice = slice(None),
    ) -> Tensor:  # fmt: skip
        """The tensor on another device, to be read there after `use`.

        Args:
            buffer: made by `receive_buffer`; this tensor fills `steps` of it.
        """
        if tensor.device == device:
            return tensor
        if buffer is None:
            buffer = self.receive_buffer(tensor.shape, tensor.dtype, tensor.device, device)
        if buffer is None:  # from a CPU or to one
            return tensor.to(device)
        here, there, part = self._streams[tensor.device], self._streams[device], buffer[steps]
        here.kernels_done.record(here.kernels)
        here.copies_out.wait_event(here.kernels_done)
        torch.cuda.set_stream(there.copies_in)  # `copy_` makes it wait for the copy
        torch.cuda.set_stream(here.copies_out)
        part.copy_(tensor, non_blocking=True)
        there.copy_arrived.record(there.copies_in)
        torch.cuda.set_stream(there.kernels)
        torch.cuda.set_stream(here.kernels)
        self._sent.append(tensor)
        return part
