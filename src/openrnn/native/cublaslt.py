"""Matrix products by cuBLASLt, whose heuristic is asked once for each kind of product.

torch asks cuBLAS at every call: on an H200 machine `torch.mm` costs its host 35 us a product, most
of it the choice of a kernel.
"""

import ctypes
import sys
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from openrnn.errors import LibraryError
from openrnn.memo import memo, resource
from openrnn.memory import template
from openrnn.native.device import current_stream
from openrnn.native.library import Library
from openrnn.native.recording import CURRENT

# One letter an argument, as in `native.library.TYPES`.
SIGNATURES = {
    "cublasLtCreate": "p",
    "cublasLtMatmulDescCreate": "pii",
    "cublasLtMatmulDescDestroy": "p",
    "cublasLtMatmulDescSetAttribute": "pipz",
    "cublasLtMatrixLayoutCreate": "pizzl",
    "cublasLtMatrixLayoutDestroy": "p",
    "cublasLtMatrixLayoutSetAttribute": "pipz",
    "cublasLtMatmulPreferenceCreate": "p",
    "cublasLtMatmulPreferenceSetAttribute": "pipz",
    "cublasLtMatmulPreferenceDestroy": "p",
    "cublasLtMatmulAlgoGetHeuristic": "pppppppipp",
    "cublasLtMatmulAlgoConfigGetAttribute": "pipzp",
    # handle, product, alpha, a and b with their layouts, beta, c and d with theirs, algorithm,
    # workspace and its size, stream
    "cublasLtMatmul": "ppppppp" + "ppppp" + "ppzp",
}
# cudaDataType and cublasComputeType_t: sums in float32, of float32 numbers as tf32
KINDS = {torch.float32: (0, 77), torch.float16: (2, 68), torch.bfloat16: (14, 68)}
_TRANSPOSE_A, _TRANSPOSE_B = 3, 4  # of cublasLtMatmulDescAttributes_t
_WORKSPACE, _REDUCTIONS, _ALIGNMENT = 1, 3, 5  # of cublasLtMatmulPreferenceAttributes_t
_BATCH_COUNT, _BATCH_STRIDE = 5, 6  # of cublasLtMatrixLayoutAttribute_t
# split sums are added up in float32 and always in one order; in place (1) it is the type of d
_IN_FLOAT32 = 2
MAX_WORKSPACE_BYTES = 32 << 20
_SPLIT_K = 2  # of cublasLtMatmulAlgoConfigAttributes_t
# Where `smaller_tiles` is asked for and the heuristic's first algorithm has tiles of more values of
# d than LARGE_TILE, and at most MOST_WAVES waves of them, the first of CANDIDATES algorithms runs
# that has tiles of SMALLER_TILES values and splits K alike.
LARGE_TILE, SMALLER_TILES, MOST_WAVES, CANDIDATES = 23_000, (16_000, 23_000), 32.0, 8
SMALLER_TILES_ON = 9, 0  # the compute capability that this was measured on


class CublasLt(Library):
    """The functions of one libcublasLt, as attributes; each raises LibraryError where it fails."""

    title = "cuBLASLt"

    def __init__(self, path: str) -> None:
        try:
            dll = ctypes.CDLL(path)
        except OSError as error:
            raise LibraryError("cuBLASLt", "cannot be loaded", str(error)) from None
        self._words = dll.cublasLtGetStatusString
        self._words.restype = ctypes.c_char_p
        self.declare(dll, SIGNATURES)

    def error(self, call: str, status: int) -> LibraryError:
        return LibraryError(call, self._words(status).decode(errors="replace"), "")


@lru_cache(maxsize=1)
def load() -> CublasLt:
    """The library that torch has loaded.

    Raises:
        LibraryError: it is not here.
    """
    major = str(torch.version.cuda).partition(".")[0]
    windows = sys.platform == "win32"
    return CublasLt(f"cublasLt64_{major}.dll" if windows else f"libcublasLt.so.{major}")


def absent() -> str | None:
    """Why this machine has no cuBLASLt, or None."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    try:
        load()
    except LibraryError as error:
        return str(error)
    return None


@resource
def _handle(device: int) -> int:
    """The handle of a device; it has no stream, so threads may share it."""
    made = ctypes.c_void_p()
    with torch.cuda.device(device):
        load().cublasLtCreate(ctypes.addressof(made))
    return made.value or 0


class Layout(NamedTuple):
    """How a matrix lies in memory.

    Attributes:
        stride: elements from one row to the next; where transposed, from one column to the next.
        batch_stride: elements to the next matrix, where several are multiplied at once.
    """

    stride: int
    transposed: bool = False
    batch_stride: int = 0


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm that cuBLASLt proposes.

    Attributes:
        workspace: bytes that it needs.
        state: 0 where the other fields count.
        waves: tiles of d, or of its part where K is split, over the device's multiprocessors.
    """

    _fields_ = (
        ("words", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int),
        ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


class MatmulPlan:
    """A kind of product, d = a b or d + a b, with the algorithm that runs it.

    Args:
        sizes: rows and columns of d, and the columns of a.
        layouts: of a, b and d.
        aligned: bytes that the addresses of all three are multiples of, at most 16.
        float32_out: d is float32, whatever a and b are.
        count: of products at once.
        smaller_tiles: see `Product`.
    """

    def __init__(
        self, dtype: torch.dtype, device: int, sizes: tuple[int, int, int],
        layouts: tuple[Layout, Layout, Layout], aligned: int, float32_out: bool, count: int,
        smaller_tiles: bool,
    ) -> None:  # fmt: skip
        self._made = list[tuple[str, int]]()
        self._library = load()
        kind, compute = KINDS[dtype]
        rows, columns, inner = sizes
        a, b, d = layouts
        # cuBLAS is column-major, so to it our d = a b is d^T = b^T a^T
        self.product = self._make("MatmulDesc", compute, 0)
        self._set("MatmulDesc", self.product, _TRANSPOSE_A, ctypes.c_int32(b.transposed))
        self._set("MatmulDesc", self.product, _TRANSPOSE_B, ctypes.c_int32(a.transposed))
        b_sizes = (inner, columns) if b.transposed else (columns, inner)
        a_sizes = (rows, inner) if a.transposed else (inner, rows)
        self.b = self._make("MatrixLayout", kind, *b_sizes, b.stride)
        self.a = self._make("MatrixLayout", kind, *a_sizes, a.stride)
        d_kind = KINDS[torch.float32][0] if float32_out else kind
        self.d = self._make("MatrixLayout", d_kind, columns, rows, d.stride)
        if count > 1:
            for made, layout in zip((self.a, self.b, self.d), layouts):
                self._set("MatrixLayout", made, _BATCH_COUNT, ctypes.c_int32(count))
                self._set("MatrixLayout", made, _BATCH_STRIDE, ctypes.c_int64(layout.batch_stride))
        wish = self._make("MatmulPreference")
        self._set("MatmulPreference", wish, _WORKSPACE, ctypes.c_uint64(MAX_WORKSPACE_BYTES))
        self._set("MatmulPreference", wish, _REDUCTIONS, ctypes.c_uint32(_IN_FLOAT32))
        least = ctypes.c_uint32(aligned)
        for matrix in range(4):
            self._set("MatmulPreference", wish, _ALIGNMENT + matrix, least)
        about = torch.cuda.get_device_properties(device)
        chooses = smaller_tiles and (about.major, about.minor) == SMALLER_TILES_ON
        number, found = CANDIDATES if chooses else 1, ctypes.c_int32()
        self._proposed = (Algorithm * number)()
        self._library.cublasLtMatmulAlgoGetHeuristic(
            _handle(device), self.product, self.b, self.a, self.d, self.d, wish, number,
            ctypes.addressof(self._proposed), ctypes.addressof(found),
        )  # fmt: skip
        if found.value == 0:
            raise LibraryError("cublasLtMatmulAlgoGetHeuristic", "no kernel", f"sizes {sizes}")
        chosen = 0
        if chooses:
            values, processors = count * rows * columns, about.multi_processor_count
            chosen = self._with_smaller_tiles(found.value, values, processors)
        self.algorithm = ctypes.addressof(self._proposed[chosen])
        self.workspace = int(self._proposed[chosen].workspace)
        self._handle, self._run = _handle(device), self._library.cublasLtMatmul
        self.space_like = None
        if self.workspace:
            where = torch.device("cuda", device)
            self.space_like = template((self.workspace,), torch.uint8, where)

    def _with_smaller_tiles(self, proposed: int, values: int, processors: int) -> int:
        """The rank of the algorithm that `smaller_tiles` asks for; values: of d."""

        def tile(one: Algorithm, split: int) -> float:
            waves = float(one.waves)
            return values * max(1, split) / max(1e-6, waves * processors)

        every = [(one, self._split(one)) for one in self._proposed[:proposed]]
        first, first_split = every[0]
        least, most = SMALLER_TILES
        if tile(first, first_split) <= LARGE_TILE or first.waves > MOST_WAVES:
            return 0
        ranks = (
            rank
            for rank, (one, split) in enumerate(every)
            if not one.state and split == first_split and least <= tile(one, split) <= most
        )
        return next(ranks, 0)

    def _split(self, one: Algorithm) -> int:
        """In how many parts an algorithm splits K."""
        found, written = ctypes.c_int32(), ctypes.c_size_t()
        self._library.cublasLtMatmulAlgoConfigGetAttribute(
            ctypes.addressof(one), _SPLIT_K, ctypes.addressof(found), ctypes.sizeof(found),
            ctypes.addressof(written),
        )  # fmt: skip
        return found.value

    def multiply(self, a: int, b: int, d: int, add: bool, space: int, stream: int) -> None:
        """Multiplies what lies at these addresses; `space`: that of its workspace."""
        self._run(
            self._handle, self.product, _ONE, b, self.b, a, self.a, _ONE if add else _ZERO,
            d, self.d, d, self.d, self.algorithm, space, self.workspace, stream,
        )  # fmt: skip

    def _make(self, kind: str, *arguments: int) -> int:
        made = ctypes.c_void_p()
        getattr(self._library, f"cublasLt{kind}Create")(ctypes.addressof(made), *arguments)
        self._made.append((kind, made.value or 0))
        return made.value or 0

    def _set(self, kind: str, made: int, name: int, value: Any) -> None:
        setter = getattr(self._library, f"cublasLt{kind}SetAttribute")
        setter(made, name, ctypes.addressof(value), ctypes.sizeof(value))

    def __del__(self) -> None:
        for kind, made in self._made:
            getattr(self._library, f"cublasLt{kind}Destroy")(made)


_FACTORS = (ctypes.c_float * 2)(0.0, 1.0)
_ZERO = ctypes.addressof(_FACTORS)
_ONE = _ZERO + 4


class Product:
    """d = a b, or d + a b, for matrices of known sizes anywhere in memory; float32 as tf32.

    Args:
        sizes: rows and columns of d, and the columns of a; none of them 0.
        a, b, d: how they lie in memory.
        float32_out: d is float32.
        count: of products at once, of matrices that are `batch_stride` elements apart.
        smaller_tiles: of similar algorithms one whose tiles of d are smaller than the first one's.
            In 16 bits x_gates take 0.9 of the time with it on an H200, other products as long as
            without: benchmarks/log/cuda-experiments.md, "Matrices made for products".
    """

    def __init__(
        self, dtype: torch.dtype, device: int, sizes: tuple[int, int, int], a: Layout, b: Layout,
        d: Layout, float32_out: bool = False, count: int = 1, smaller_tiles: bool = False,
    ) -> None:  # fmt: skip
        self.dtype, self.device, self.sizes, self.float32_out, self.count = (
            dtype, device, sizes, float32_out, count
        )  # fmt: skip
        self.a, self.b, self.d, self.smaller_tiles = a, b, d, smaller_tiles
        self._batch_strides = 0  # bits of the distances in bytes
        if count > 1:
            size = 4 if float32_out else dtype.itemsize
            inputs = a.batch_stride | b.batch_stride
            self._batch_strides = inputs * dtype.itemsize | d.batch_stride * size
        self._plans: dict[int, MatmulPlan] = {}  # by alignment

    def _plan(self, aligned: int) -> MatmulPlan:
        layouts = self.a, self.b, self.d
        found = self._plans[aligned] = MatmulPlan(
            self.dtype, self.device, self.sizes, layouts, aligned, self.float32_out, self.count,
            self.smaller_tiles,
        )  # fmt: skip
        return found

    def run(self, a: int, b: int, d: int, add: bool = False) -> None:
        """Multiplies what lies at these addresses on torch's current stream, sums in float32.

        Args:
            add: to d, else d is written.
        """
        addresses = a | b | d | self._batch_strides
        aligned = min(16, addresses & -addresses)
        plan = self._plans.get(aligned) or self._plan(aligned)
        if CURRENT.recording is not None:
            CURRENT.recording.multiply(plan, a, b, d, add)
            return
        space = None if plan.space_like is None else torch.empty_like(plan.space_like)
        workspace = 0 if space is None else space.data_ptr()
        plan.multiply(a, b, d, add, workspace, current_stream(self.device))


product_for = memo(4096)(Product)  # one object each, as it remembers algorithms
