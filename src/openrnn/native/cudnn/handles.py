"""One cuDNN handle for each device and thread, on torch's current stream."""

import atexit
import ctypes
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol

from torch import Tensor

from openrnn.native.cudnn.library import CudnnLibrary, load
from openrnn.native.device import On, current_stream


class Closable(Protocol):
    """What holds something of cuDNN."""

    def close(self) -> None: ...


class Handle:
    """A handle of the thread that made it; closed when that thread or the process ends.

    Attributes:
        pointer: cuDNN's handle.
        stream: the raw stream on which its calls run now.
        plans: descriptors of shapes that were used, the oldest first.
        dropout: random states, by stream and seed, which go on from call to call.
    """

    def __init__(self, library: CudnnLibrary, device: int) -> None:
        made = ctypes.c_void_p()
        with On(device):
            library.cudnnCreate(ctypes.byref(made))
        self.library, self.device = library, device
        self.pointer = made.value
        self.stream = 0
        self.dropout: dict[tuple[int, int | None], Tensor] = {}
        self.plans: OrderedDict[Hashable, Closable] = OrderedDict()  # what calls have set up
        self.closing: list[Callable[[], None]] = []  # what else ends with the handle
        self._process = os.getpid()
        _open.add(self)

    def follow(self) -> int:
        """Moves the handle to torch's current stream, and returns that."""
        stream: int = current_stream(self.device)
        self.move(stream)
        return stream

    def move(self, stream: int) -> None:
        """Moves the handle to a stream, until it follows torch again."""
        if stream != self.stream:
            self.library.cudnnSetStream(self.pointer, stream)
            self.stream = stream

    def close(self) -> None:
        """Gives the handle back, once; one that a fork copied is left alone."""
        pointer, self.pointer = self.pointer, None
        for end in self.closing:
            end()
        for plan in self.plans.values():
            plan.close()
        self.plans.clear()
        self.dropout.clear()
        if pointer is not None and self._process == os.getpid():
            with On(self.device):
                self.library.cudnnDestroy(pointer)

    def __del__(self) -> None:
        # at the end of the interpreter modules may be gone, and with them what close needs
        if getattr(self, "pointer", None) is not None and not _over:
            self.close()


class _Last:
    """Goes with a thread, and closes its handles."""

    def __init__(self, handles: dict[int, Handle]) -> None:
        self._handles = handles

    def __del__(self) -> None:
        if not _over:
            for handle in self._handles.values():
                handle.close()


class _Own(threading.local):
    """The handles of one thread, by device."""

    def __init__(self) -> None:
        self.handles: dict[int, Handle] = {}
        self.last = _Last(self.handles)


_open: "weakref.WeakSet[Handle]" = weakref.WeakSet()
_own = _Own()
_over = False


def current(device: int) -> Handle:
    """The calling thread's handle of a device, on torch's current stream there."""
    handle = _own.handles.get(device)
    if handle is None:
        handle = _own.handles[device] = Handle(load(), device)
    handle.follow()
    return handle


def count() -> int:
    """How many handles are open in this process."""
    return len(_open)


def _close_all() -> None:
    global _over  # noqa: PLW0603  # the interpreter ends once
    for handle in list(_open):
        handle.close()
    _over = True


def _forget() -> None:
    """In a forked child: the parent's handles are not ours, neither to use nor to destroy."""
    global _own, _open
    for handle in list(_open):
        handle.pointer = None
    _own, _open = _Own(), weakref.WeakSet()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
