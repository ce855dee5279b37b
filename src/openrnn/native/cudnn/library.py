"""Finds libcudnn, declares what is called of it, and checks every status in one place."""

import ctypes
import importlib.util
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch

from openrnn.errors import LibraryError
from openrnn.native.library import Library

OLDEST = 90000  # cuDNN 9.0: earlier ones have another clip and other data descriptors
NAME = "cudnn64_9.dll" if sys.platform == "win32" else "libcudnn.so.9"

# One letter an argument, as in `native.library.TYPES`.
SIGNATURES = {
    "cudnnCreate": "p",
    "cudnnDestroy": "p",
    "cudnnSetStream": "pp",
    "cudnnCreateTensorDescriptor": "p",
    "cudnnSetTensorNdDescriptor": "piipp",
    "cudnnGetTensorNdDescriptor": "pipppp",
    "cudnnDestroyTensorDescriptor": "p",
    "cudnnCreateDropoutDescriptor": "p",
    "cudnnDropoutGetStatesSize": "pp",
    "cudnnSetDropoutDescriptor": "ppfpzu",
    "cudnnRestoreDropoutDescriptor": "ppfpzu",
    "cudnnDestroyDropoutDescriptor": "p",
    "cudnnCreateRNNDescriptor": "p",
    # descriptor, algorithm, cell, bias, direction, input, data type, precision, math, I, H, P, L,
    # dropout, flags
    "cudnnSetRNNDescriptor_v8": "piiiiiiiiiiiipi",
    "cudnnRNNSetClip_v9": "pidd",
    "cudnnDestroyRNNDescriptor": "p",
    "cudnnCreateRNNDataDescriptor": "p",
    # descriptor, data type, layout, T, B, width, lengths on the host, value past them
    "cudnnSetRNNDataDescriptor": "piiiiipp",
    "cudnnDestroyRNNDataDescriptor": "p",
    "cudnnBuildRNNDynamic": "ppi",
    "cudnnGetRNNWeightSpaceSize": "ppp",
    "cudnnGetRNNWeightParams": "ppizpipppp",
    "cudnnGetRNNTempSpaceSizes": "ppippp",
    # handle, rnn, mode, lengths on the device, x, y, h, c with their descriptors, then size and
    # place of weights, workspace and reserve
    "cudnnRNNForward": "ppip" + "pp" * 2 + "ppp" * 2 + "zp" * 3,
    "cudnnRNNBackwardData_v8": "ppp" + "ppp" + "pp" + "pppp" * 2 + "zp" * 3,
    "cudnnRNNBackwardWeights_v8": "ppip" + "pp" * 3 + "zp" * 3,
}


class CudnnLibrary(Library):
    """The functions of one libcudnn, as attributes; each raises LibraryError where it fails.

    Args:
        path: a file, or the name under which the loader knows it.
    """

    title = "cuDNN"

    def __init__(self, path: str = NAME) -> None:
        try:
            self._dll = ctypes.CDLL(path)
            version = self._dll.cudnnGetVersion
        except (OSError, AttributeError) as error:
            raise LibraryError("cuDNN", "cannot be loaded", str(error)) from None
        version.restype = ctypes.c_size_t
        self.version = int(version())
        if self.version < OLDEST:
            raise LibraryError("cuDNN", "is too old", f"needs 9.0 or later, got {self.version}")
        self._dll.cudnnGetErrorString.restype = ctypes.c_char_p
        self._dll.cudnnGetLastErrorString.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self.declare(self._dll, SIGNATURES)

    def error(self, call: str, status: int) -> LibraryError:
        words = ctypes.create_string_buffer(2048)
        self._dll.cudnnGetLastErrorString(words, len(words))
        name = self._dll.cudnnGetErrorString(status).decode(errors="replace")
        return LibraryError(call, name, words.value.decode(errors="replace").strip())


def _candidates() -> Iterator[str]:
    # by its bare name the loader gives the one that torch has already loaded
    yield NAME
    try:
        wheel = importlib.util.find_spec("nvidia.cudnn")
    except ModuleNotFoundError:
        return
    for folder in (wheel.submodule_search_locations or ()) if wheel else ():
        for inner in ("lib", "bin"):
            yield str(Path(folder) / inner / NAME)


@lru_cache(maxsize=1)
def load() -> CudnnLibrary:
    """The library of this process.

    Raises:
        LibraryError: it is not here, or older than 9.0.
    """
    missing: LibraryError | None = None
    for path in _candidates():
        try:
            return CudnnLibrary(path)
        except LibraryError as error:
            missing = missing or error
    raise missing or LibraryError("cuDNN", "cannot be loaded")


def absent() -> str | None:
    """Why this machine cannot run cuDNN, or None."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    try:
        load()
    except LibraryError as error:
        return str(error)
    return None
