"""The processor that CPU kernels are made for: its name, and how wide its vectors are."""

import sys

import llvmlite.binding

NAME: str = llvmlite.binding.get_host_cpu_name()
_FEATURES = llvmlite.binding.get_host_cpu_features()
FEATURES: str = _FEATURES.flatten()

_BYTES = 64 if _FEATURES.get("avx512f") else 32 if _FEATURES.get("avx2") else 16

REGISTERS = 32 if _BYTES == 64 else 16  # 16 where unknown: fewer than there are costs little
SIZES = {"float32": 4, "float64": 8}  # bytes
LANES = {dtype: _BYTES // size for dtype, size in SIZES.items()}
PANEL = {dtype: 2 * lanes for dtype, lanes in LANES.items()}

YIELDS = sys.platform != "win32"  # elsewhere there is a sched_yield
LINE = 16  # int64 fields from one counter of a crew to the next, two cache lines
