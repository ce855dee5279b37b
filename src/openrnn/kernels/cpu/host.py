"""The processor that CPU kernels are compiled for: its name, and how wide its vectors are."""

import ctypes
import platform
import sys
from contextlib import suppress
from functools import cache

import llvmlite.binding

WIDTHS = (64, 32, 16)  # bytes of a vector: AVX-512, AVX2, and anything else
SIZES = {"float32": 4, "float64": 8}  # bytes of an element


def width_of(features: str) -> int:
    """The bytes of a vector, from LLVM's names of features, such as "+avx2,-avx512f"."""
    have = set(features.split(","))
    return 64 if "+avx512f" in have else 32 if "+avx2" in have else 16


def lanes_of(dtype: str, width: int) -> int:
    """Elements of a vector."""
    return width // SIZES[dtype]


def panel_of(dtype: str, width: int) -> int:
    """Columns of a panel: two vectors."""
    return 2 * lanes_of(dtype, width)


def in_whole_vectors(features: str) -> str:
    """The features, and with AVX-512 that loops over arrays use all of a vector.

    For Intel's processors LLVM vectorises loops by 32 bytes, so as not to lower the clock. Products
    have vectors of 64 bytes anyway, and cells in half of them take up to twice the time.
    """
    no = "-prefer-256-bit"
    whole = width_of(features) != WIDTHS[0] or no in features.split(",")
    return features if whole else f"{features},{no}"


NAME: str = llvmlite.binding.get_host_cpu_name()
FEATURES = in_whole_vectors(llvmlite.binding.get_host_cpu_features().flatten())
WIDTH = width_of(FEATURES)
REGISTERS = 32 if WIDTH == 64 else 16  # 16 where unknown: to assume too few costs little
LANES = {dtype: lanes_of(dtype, WIDTH) for dtype in SIZES}
PANEL = {dtype: panel_of(dtype, WIDTH) for dtype in SIZES}
# the processor multiplies pairs of bfloat16 by one instruction on vectors of 64 bytes
MULTIPLIES_BF16 = WIDTH == 64 and "+avx512bf16" in FEATURES.split(",")
# it makes float32 of float16 by one instruction; elsewhere LLVM would call a function for each
WIDENS_FLOAT16 = "+f16c" in FEATURES.split(",") or platform.machine() in ("aarch64", "arm64")
HAS_SCHED_YIELD = sys.platform != "win32"


@cache
def request_amx() -> bool:
    """Asks that this process may use the registers of AMX; whether it has AMX and may.

    Linux is asked, by arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), for all threads and as
    long as the process runs: see its Documentation/arch/x86/xstate.rst. Other systems are not.
    """
    has = MULTIPLIES_BF16 and {"+amx-tile", "+amx-bf16"} <= {*FEATURES.split(",")}
    if has and sys.platform == "linux" and sys.maxsize > 2**32:  # the number is that of x86-64
        with suppress(OSError, AttributeError):
            return bool(ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0)
    return False
