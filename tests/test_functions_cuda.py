"""The functions that CUDA kernels call in a cell: none takes stack, and sin, cos, tan are right."""

import ctypes
import shutil
import subprocess
from importlib.resources import files

import numpy as np
import pytest
from test_operators import BINARY

from openrnn.codegen import cuda
from openrnn.codegen.graph import PRIMITIVES, TRUTHS, Node
from openrnn.native import nvrtc

ABSENT = nvrtc.absent()
TEXT = files("openrnn.kernels.cuda").joinpath("functions.cuh").read_text(encoding="utf-8")
INFIX = {"where", "neg", *TRUTHS}
HOST = """
#include <cmath>
#include <cstring>
typedef unsigned int uint32;
#define INLINE static inline
INLINE uint32 __float_as_uint(float value) { uint32 bits; memcpy(&bits, &value, 4); return bits; }
%s
extern "C" void run(const float* x, float* found, long count) {
    for (long i = 0; i < count; ++i) {
        found[i] = sine(x[i]);
        found[count + i] = cosine(x[i]);
        found[2 * count + i] = tangent(x[i]);
    }
}
"""


@pytest.mark.skipif(ABSENT is not None, reason=f"cannot compile: {ABSENT}")
@pytest.mark.parametrize("narrow", [0, 1])
def test_no_function_takes_stack(narrow):
    """A frame on the stack counts as spilled registers, and no kernel would be found."""
    lines = []
    for number, name in enumerate(sorted(PRIMITIVES - INFIX)):
        args = ("a", "b") if name in BINARY else ("a",)
        lines += [cuda._line(Node(f"v{number}", name, args)), f"sum += v{number};"]
    source = (
        f"#define NARROW {narrow}\n#define INLINE __device__ __forceinline__\n"
        f"typedef unsigned int uint32;\n{TEXT}\n"
        'extern "C" __global__ void every(float* at, int count) {\n'
        "#pragma unroll\nfor (int i = 0; i < 8; ++i) {\n"
        "const float a = at[i * count], b = at[i * count + 1];\nfloat sum = 0.0f;\n"
        + "\n".join(lines)
        + "\nat[i * count + 2] = sum;\n}\n}\n"
    )
    made = nvrtc._compile(nvrtc.KernelSource(source, "every", "sm_90", "every"))
    assert made.resources.spilled == 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_functions_of_an_angle(tmp_path):
    """Within 3 ulp of float64's, from the smallest number to the largest."""
    text = TEXT[TEXT.index("// 32 bits of 2/pi") :]
    (tmp_path / "host.cpp").write_text(HOST % text)
    library = tmp_path / "host.so"
    command = ["g++", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-o"]
    subprocess.run([*command, str(library), str(tmp_path / "host.cpp")], check=True)
    dice = np.random.default_rng(0)
    signs = dice.choice([-1.0, 1.0], 50_000)
    x = np.concatenate([
        dice.uniform(-7e4, 7e4, 50_000), np.exp(dice.uniform(-80.0, 88.7, 50_000)) * signs,
        np.arange(-1000, 1000) * np.pi / 2, [0.0, 65536.0, 65537.0, 3.4028235e38],
    ]).astype("float32")  # fmt: skip
    odd = np.array([np.inf, -np.inf, np.nan], "float32")
    given = np.concatenate([x, odd])
    found = np.empty((3, len(given)), "float32")
    place = ctypes.c_void_p
    run = ctypes.CDLL(str(library)).run
    run(place(given.ctypes.data), place(found.ctypes.data), ctypes.c_long(len(given)))
    for ours, theirs in zip(found, (np.sin, np.cos, np.tan)):
        wanted = theirs(x.astype("float64"))
        ulp = np.spacing(np.abs(wanted).astype("float32"))
        assert (np.abs(ours[: len(x)] - wanted) / ulp).max() < 3.0
        assert np.isnan(ours[len(x) :]).all()
