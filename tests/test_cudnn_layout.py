"""Our flat buffer is cuDNN's weight space, asked of the library itself; this needs no GPU.

Runs where a libcudnn is: with torch's CUDA build, or `pip install --no-deps nvidia-cudnn-cu13`.
"""

import ctypes
from itertools import product

import pytest
import torch

from openrnn import params
from openrnn.errors import LibraryError
from openrnn.native.cudnn import descriptors as made
from openrnn.native.cudnn.library import load
from openrnn.spec import BIAS_MODES

from cases import CELLS, CUDNN  # isort: skip

SIZES = [(5, 7), (1, 1), (16, 8), (3, 130)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


class NoHandle:
    """Zeros in place of a handle: layout questions look into no device."""

    def __init__(self, library):
        self.library = library
        self.block = ctypes.create_string_buffer(1 << 16)
        self.pointer = ctypes.addressof(self.block)


@pytest.fixture(scope="module")
def handle():
    try:
        library = load()
    except LibraryError as error:
        pytest.skip(f"no cuDNN here: {error}")
    return NoHandle(library)


def asked(handle, network, spec, dtype, base=1 << 20):
    """(chain, linear layer, "matrix" or "bias") -> (offset, size) in elements, as cuDNN says."""
    library, width, found = handle.library, torch.finfo(dtype).bits // 8, {}
    space = made.weight_bytes(handle.pointer, network)
    shapes = [made._make(library, "Tensor") for _ in range(2)]
    ints, places = ctypes.c_int * 8, [ctypes.c_void_p() for _ in range(2)]
    for chain in range(spec.chains):
        for linear in range(2 * len(spec.gates) + (1 if spec.proj_size else 0)):
            library.cudnnGetRNNWeightParams(
                handle.pointer, network.pointer, chain, space, base, linear,
                shapes[0], ctypes.byref(places[0]), shapes[1], ctypes.byref(places[1]),
            )  # fmt: skip
            for kind, shape, place in zip(("matrix", "bias"), shapes, places):
                if not place.value:
                    continue
                dims, strides, rank, data = ints(), ints(), ctypes.c_int(), ctypes.c_int()
                library.cudnnGetTensorNdDescriptor(
                    shape, 8, ctypes.byref(data), ctypes.byref(rank), dims, strides
                )
                count = 1
                for length in dims[: rank.value]:
                    count *= length
                found[chain, linear, kind] = ((place.value - base) // width, count)
    for shape in shapes:
        library.cudnnDestroyTensorDescriptor(shape)
    return found, space // width


def ours(spec):
    """The same by `params.slots`, each tensor cut into its gates."""
    gates, found = len(spec.gates), {}
    kinds = {
        "weight_ih": (0, "matrix"), "weight_hh": (gates, "matrix"), "weight_hr": (2 * gates, None),
        "bias_ih": (0, "bias"), "bias_hh": (gates, "bias"),
    }  # fmt: skip
    for slot in params.slots(spec):
        first, kind = kinds[slot.name.rsplit("_l", 1)[0]]
        if kind is None:
            found[slot.chain, first, "matrix"] = (slot.offset, slot.size)
            continue
        part = slot.size // gates
        for gate in range(gates):
            found[slot.chain, first + gate, kind] = (slot.offset + gate * part, part)
    return found


@pytest.mark.parametrize("cell", sorted(CUDNN))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_matrix_and_bias_lies_where_cudnn_says(handle, cell, dtype):
    count = 0
    for (inputs, hidden), bias, mode, both, layers in product(
        SIZES, BIAS_MODES, ("linear", "skip"), (False, True), (1, 2, 3)
    ):
        for proj in (0, hidden // 2) if cell == "lstm" and hidden > 1 else (0,):
            spec = CELLS[cell].spec(
                hidden if mode == "skip" else inputs, hidden, num_layers=layers, bidirectional=both,
                bias_mode=bias, input_mode=mode, proj_size=proj,
            )  # fmt: skip
            for algorithm in made.ALGORITHMS:
                kind = made.Kind(spec, dtype, made.DEFAULT_MATH, algorithm, False)
                try:
                    network = made.Network(handle, kind, None)
                except LibraryError:
                    assert algorithm != "standard"
                    continue
                found, size = asked(handle, network, spec, dtype)
                assert found == ours(spec)
                assert size == params.size(spec)
                count += 1
    assert count >= 96 * 2


def test_a_wrong_layout_is_seen(handle):
    """The comparison itself, on a spec that is not the network's."""
    spec = CELLS["lstm"].spec(5, 7, num_layers=2)
    kind = made.Kind(spec, torch.float32, made.DEFAULT_MATH, "standard", False)
    found, _ = asked(handle, made.Network(handle, kind, None), spec, torch.float32)
    assert found != ours(spec.with_(bias_mode="input"))
    assert found != ours(spec.with_(input_size=6))
