"""cuDNN's descriptors: those of tensors live for one call, those of networks are kept."""

import atexit
import ctypes
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openrnn.native.cudnn.handles import Handle
from openrnn.native.cudnn.library import CudnnLibrary
from openrnn.spec import Spec

ALGORITHMS = {"standard": 0, "persist_static": 1, "persist_dynamic": 2, "persist_static_small_h": 3}
CELLS = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
BIASES = {"none": 0, "input": 1, "double": 2, "recurrent": 3}
INPUTS = {"linear": 0, "skip": 1}
DATA = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 9}
DEFAULT_MATH, TENSOR_MATH, FMA_MATH = 0, 1, 3
TIME_MAJOR, PACKED, BATCH_MAJOR = 0, 1, 2
PADDED_IO = 1
KEPT = 512  # networks of which descriptors are kept

_INTS = ctypes.c_int * 3
_ZERO = (ctypes.c_byte * 8)()  # zero in every data type: what is written past the lengths


def _make(library: CudnnLibrary, kind: str) -> int:
    made = ctypes.c_void_p()
    getattr(library, f"cudnnCreate{kind}Descriptor")(ctypes.byref(made))
    if made.value is None:
        raise MemoryError(f"cudnnCreate{kind}Descriptor gave no descriptor")
    return made.value


class Shapes:
    """The descriptors of one call's tensors, open inside `with` and closed however it ends.

    Args:
        layout: TIME_MAJOR, BATCH_MAJOR or PACKED, of x and y.
        lengths: (B,) int32 on the host.

    Attributes:
        x, y: of the sequences (T, B, I) and (T, B, D*O); h, c: of the states (L*D, B, O or H).
    """

    __slots__ = ("_library", "c", "h", "x", "y")

    def __init__(
        self,
        library: CudnnLibrary,
        kind: "Kind",
        layout: int,
        steps: int,
        batch: int,
        lengths: Tensor,
    ) -> None:
        spec, dtype = kind.spec, DATA[kind.dtype]
        self._library = library
        self.x = self.y = self.h = self.c = 0
        try:
            for name, width in (
                ("x", spec.input_size),
                ("y", spec.directions * spec.output_size),
            ):
                made = _make(library, "RNNData")
                setattr(self, name, made)
                library.cudnnSetRNNDataDescriptor(
                    made, dtype, layout, steps, batch, width, lengths.data_ptr(), _ZERO
                )
            self.h = self._state(dtype, spec.chains, batch, spec.output_size)
            # an LSTM's second state is as wide as the first, but for a projection
            self.c = self.h
            if spec.proj_size:
                self.c = self._state(dtype, spec.chains, batch, spec.hidden_size)
        except BaseException:
            self.close()
            raise

    def _state(self, dtype: int, chains: int, batch: int, width: int) -> int:
        made = _make(self._library, "Tensor")
        try:
            self._library.cudnnSetTensorNdDescriptor(
                made, dtype, 3, _INTS(chains, batch, width), _INTS(batch * width, width, 1)
            )
        except BaseException:
            self._library.cudnnDestroyTensorDescriptor(made)
            raise
        return made

    def __enter__(self) -> "Shapes":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Destroys what was made."""
        library = self._library
        for made in (self.x, self.y):
            if made:
                library.cudnnDestroyRNNDataDescriptor(made)
        for made in {self.h, self.c} - {0}:
            library.cudnnDestroyTensorDescriptor(made)
        self.x = self.y = self.h = self.c = 0


class Kind(NamedTuple):
    """By what the descriptor of a network is kept; neither T nor B, but for persist_dynamic.

    Args:
        math: which arithmetic float32 products may use.
        padded: rows may end before T.
        drop: the address of the random states, or 0 where nothing is dropped.
        build: (device, B) for which persist_dynamic compiles its kernels.
    """

    spec: Spec
    dtype: torch.dtype
    math: int
    algorithm: str
    padded: bool
    drop: int = 0
    build: tuple[int, int] | None = None


class Network:
    """The descriptor of a network, with all that it refers to; destroyed with its last user."""

    def __init__(self, handle: Handle, kind: Kind, states: Tensor | None) -> None:
        self.library = library = handle.library
        self.states = states  # the descriptor of the dropout points into them
        self.dropout = 0
        self.pointer = _make(library, "RNN")
        spec = kind.spec
        if states is not None:
            self.dropout = _make(library, "Dropout")
            library.cudnnRestoreDropoutDescriptor(
                self.dropout, handle.pointer, spec.dropout, states.data_ptr(), states.numel(), 0
            )
        precision = DATA[torch.float64 if kind.dtype == torch.float64 else torch.float32]
        library.cudnnSetRNNDescriptor_v8(
            self.pointer, ALGORITHMS[kind.algorithm], CELLS[spec.cell], BIASES[spec.bias_mode],
            int(spec.bidirectional), INPUTS[spec.input_mode], DATA[kind.dtype], precision,
            kind.math, spec.input_size, spec.hidden_size, spec.output_size, spec.num_layers,
            self.dropout or None, PADDED_IO if kind.padded else 0,
        )  # fmt: skip
        if spec.cell_clip is not None:
            library.cudnnRNNSetClip_v9(self.pointer, 1, *spec.cell_clip)
        if kind.build is not None:
            library.cudnnBuildRNNDynamic(handle.pointer, self.pointer, kind.build[1])

    def __del__(self) -> None:
        pointer, self.pointer = getattr(self, "pointer", 0), 0
        if pointer:
            self.library.cudnnDestroyRNNDescriptor(pointer)
        if self.dropout:
            self.library.cudnnDestroyDropoutDescriptor(self.dropout)


_networks: OrderedDict[Kind, Network] = OrderedDict()
_lock = threading.Lock()


def network(handle: Handle, kind: Kind, states: Tensor | None = None) -> Network:
    """The descriptor of a network, kept for the next call."""
    with _lock:
        found = _networks.get(kind)
        if found is not None:
            _networks.move_to_end(kind)
            return found
    # outside the lock, because persist_dynamic compiles; a second maker's copy wins, the first dies
    made = Network(handle, kind, states)
    with _lock:
        _networks[kind] = made
        while len(_networks) > KEPT:
            _networks.popitem(last=False)
    return made


def forget(drop: int) -> None:
    """Lets go of the descriptors whose random states lie at this address."""
    with _lock:
        for kind in [kind for kind in _networks if kind.drop == drop]:
            del _networks[kind]


def kept() -> int:
    """How many descriptors of networks are kept."""
    return len(_networks)


def weight_bytes(handle: Any, made: Network) -> int:
    """The size of the weight space."""
    size = ctypes.c_size_t()
    made.library.cudnnGetRNNWeightSpaceSize(handle, made.pointer, ctypes.byref(size))
    return size.value


def space_bytes(handle: Handle, made: Network, training: bool, x: int) -> tuple[int, int]:
    """The sizes of workspace and reserve for input as the data descriptor x says."""
    work, reserve = ctypes.c_size_t(), ctypes.c_size_t()
    made.library.cudnnGetRNNTempSpaceSizes(
        handle.pointer, made.pointer, int(training), x, ctypes.byref(work), ctypes.byref(reserve)
    )
    return work.value, reserve.value


def begin_dropout(handle: Handle, p: float, states: Tensor, seed: int) -> None:
    """Starts random states anew from a seed."""
    library = handle.library
    made = _make(library, "Dropout")
    try:
        library.cudnnSetDropoutDescriptor(
            made, handle.pointer, p, states.data_ptr(), states.numel(), seed % 2**64
        )
    finally:
        library.cudnnDestroyDropoutDescriptor(made)


def dropout_bytes(handle: Handle) -> int:
    """The size of the random states."""
    size = ctypes.c_size_t()
    handle.library.cudnnDropoutGetStatesSize(handle.pointer, ctypes.byref(size))
    return size.value


# before the handles go, which were registered first
atexit.register(_networks.clear)
