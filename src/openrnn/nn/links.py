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
def _sides(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The streams of a GPU for copies from it and to it."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


class Line(NamedTuple):
    """The streams and events of a GPU in a call.

    Attributes:
        main: of kernels.
        leaves: of copies from the GPU.
        comes: of copies to it.
        done: recorded on `main`, before a copy.
        came: recorded on `comes`, after a copy.
    """

    main: torch.cuda.Stream
    leaves: torch.cuda.Stream
    comes: torch.cuda.Stream
    done: torch.cuda.Event
    came: torch.cuda.Event


def mains(devices: Sequence[torch.device]) -> list[torch.cuda.Stream]:
    """The current stream of each GPU among the devices."""
    gpus = dict.fromkeys(device for device in devices if device.type == "cuda")
    return [*map(torch.cuda.current_stream, gpus)]


class Links:
    """The devices of a call; a context that restores the current device and streams at its end.

    Args:
        mains: the stream of each GPU on which its kernels run.
    """

    def __init__(self, mains: Sequence[torch.cuda.Stream]) -> None:
        self._lines = {
            main.device: Line(main, *_sides(main.device), torch.cuda.Event(), torch.cuda.Event())
            for main in mains
        }
        self._read = list[Tensor]()  # by copies: kept until the end

    def __enter__(self) -> "Links":
        if self._lines:
            self._device = torch.cuda.current_device()
            self._before = [torch.cuda.current_stream(device) for device in self._lines]
            for line in self._lines.values():
                torch.cuda.set_stream(line.main)
        return self

    def __exit__(self, *_: Any) -> None:
        if not self._lines:
            return
        for line, before in zip(self._lines.values(), self._before):
            if self._read:
                line.main.wait_stream(line.leaves)
                line.main.wait_stream(line.comes)
            if before != line.main:
                before.wait_stream(line.main)
            torch.cuda.set_stream(before)
        torch.cuda.set_device(self._device)
        self._read.clear()

    def at(self, device: torch.device) -> None:
        """Makes the device current; kernels launched there from now on wait for copies to it."""
        line = self._lines.get(device)
        if line is not None:
            torch.cuda.set_stream(line.main)
            line.main.wait_event(line.came)

    def room(
        self, shape: Sequence[int], dtype: torch.dtype, source: torch.device, device: torch.device
    ) -> Tensor | None:
        """Memory for what one GPU sends another; None if the devices are not two GPUs."""
        line = self._lines.get(device)
        if line is None or source == device or source not in self._lines:
            return None
        made = torch.empty(shape, dtype=dtype, device=device)
        line.done.record(line.main)  # earlier kernels may still use this memory
        line.comes.wait_event(line.done)
        return made

    def send(
        self, tensor: Tensor, device: torch.device, room: Tensor | None = None,
        steps: slice = slice(None),
    ) -> Tensor:  # fmt: skip
        """The tensor on another device, to be read there after `at`.

        Args:
            room: memory made by `room`, of which this tensor fills `steps`.
        """
        if tensor.device == device:
            return tensor
        if room is None:
            room = self.room(tensor.shape, tensor.dtype, tensor.device, device)
        if room is None:  # from a CPU or to one
            return tensor.to(device)
        here, there, part = self._lines[tensor.device], self._lines[device], room[steps]
        here.done.record(here.main)
        here.leaves.wait_event(here.done)
        torch.cuda.set_stream(there.comes)  # `copy_` makes it wait for the copy
        torch.cuda.set_stream(here.leaves)
        part.copy_(tensor, non_blocking=True)
        there.came.record(there.comes)
        torch.cuda.set_stream(there.main)
        torch.cuda.set_stream(here.main)
        self._read.append(tensor)
        return part
