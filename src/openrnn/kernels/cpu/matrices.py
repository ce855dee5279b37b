"""Weight matrices in panels, digests of them, gradients from all teams, other products."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from openrnn.kernels.cpu import objects
from openrnn.kernels.cpu.args import CollectArgs, DigestArgs, PackArgs
from openrnn.kernels.cpu.host import PANEL, SIZES, request_amx
from openrnn.kernels.cpu.layout import Layout, whole_pairs
from openrnn.memo import resource

# elements of a matrix from which on more than one thread is worth it
LEAST_ELEMENTS = 1 << 15
DIGEST_PARTS = 16  # of such a matrix, which threads share


def _whole_panels(columns: int, dtype: str) -> int:
    panel: int = PANEL[dtype]
    return (columns + panel - 1) // panel * panel


@lru_cache(maxsize=1)
def _kernels() -> dict[str, objects.CompiledFunction]:
    names = [f"{name}_{dtype}" for name in ("transpose", "pack", "collect") for dtype in SIZES]
    names.append("digest")
    source = f"from openrnn.kernels.cpu.panels import {', '.join(names)}\n"
    return dict(zip(names, objects.kernels(source, names, "what packs matrices")))


def _tasks(elements: int, threads: int) -> int:
    return threads if elements >= LEAST_ELEMENTS else 1


def kernel(name: str, dtype: str) -> objects.CompiledFunction:
    """One of those that `panel_elements` names, or "collect"."""
    if name == "transpose_bf16":
        return _bf16_kernels()[1]
    if name in ("transpose_pairs", "pack_pairs"):
        made = pairs()
        return made.pack if name == "pack_pairs" else made.transpose
    return _kernels()[f"{name}_{dtype}"]


def digest() -> objects.CompiledFunction:
    """The kernel that makes a digest of a matrix, of any dtype."""
    return _kernels()["digest"]


@lru_cache(maxsize=1)
def int8_product() -> objects.CompiledFunction:
    """The product with int8 weights, which time loops call."""
    source = "from openrnn.kernels.cpu.int8 import int8_product\n"
    return objects.kernels(source, ["int8_product"], "products with int8 weights")[0]


@lru_cache(maxsize=1)
def _bf16_kernels() -> list[objects.CompiledFunction]:
    names = ["bf16_product", "bf16_transpose"]
    source = f"from openrnn.kernels.cpu.bf16 import {', '.join(names)}\n"
    return objects.kernels(source, names, "products with bfloat16 weights")


def bf16_product() -> objects.CompiledFunction:
    """The product with bfloat16 weights, which time loops call."""
    return _bf16_kernels()[0]


@resource
def dots_16bit(dtype: str) -> objects.CompiledFunction:
    """The product with matrices of 16 bits as they are, which time loops call."""
    name = f"{dtype}_dots"
    source = f"from openrnn.kernels.cpu.products_16bit import {name}\n"
    return objects.kernels(source, [name], f"products with {dtype} matrices")[0]


class BackwardKernels16Bit(NamedTuple):
    """The kernels of `products_16bit` for backward, by their names there."""

    product: objects.CompiledFunction
    store: objects.CompiledFunction


@resource
def backward_kernels_16bit(dtype: str) -> BackwardKernels16Bit:
    """What backward calls where matrices, and gradients of them, are of 16 bits."""
    names = [f"{dtype}_{name}" for name in BackwardKernels16Bit._fields]
    source = f"from openrnn.kernels.cpu.products_16bit import {', '.join(names)}\n"
    return BackwardKernels16Bit(*objects.kernels(source, names, f"gradients with {dtype} matrices"))


class Pairs(NamedTuple):
    """The kernels of `pairs` and `pair_panels`, by their names there."""

    product: objects.CompiledFunction
    transpose: objects.CompiledFunction
    pack: objects.CompiledFunction
    panels: objects.CompiledFunction
    outer: objects.CompiledFunction


def pairs() -> Pairs:
    """Products of bfloat16 pairs, which time loops call, and what packs factors of them."""
    return _pairs("amx" if request_amx() else "pairs")


@resource
def _pairs(module: str) -> Pairs:
    names = [f"pairs_{name}" for name in Pairs._fields]
    source = (
        f"from openrnn.kernels.cpu.{module} import pairs_product, pairs_outer\n"
        "from openrnn.kernels.cpu.pair_panels import pairs_transpose, pairs_pack, pairs_panels\n"
    )
    return Pairs(*objects.kernels(source, names, "products of bfloat16 pairs"))


def panel_elements(name: str, dtype: str, gates: int, padded: int, columns: int) -> int:
    """Elements of the panels that a kernel writes of a matrix (gates * rows, columns).

    "transpose": of the product with its transpose, `columns` rows and gates * padded columns.
    "transpose_bf16": the same, two in the room of one element.
    "pack": of the product with itself, gates * padded rows.
    "transpose_pairs", "pack_pairs": the same in bfloat16, two of a column in the room of one.
    """
    if name == "transpose_pairs":
        return _whole_panels(gates * padded, dtype) * whole_pairs(columns)
    if name == "pack_pairs":
        return _whole_panels(columns, dtype) * whole_pairs(gates * padded)
    if name == "transpose_bf16":
        return _whole_panels(gates * padded, dtype) * columns // 2
    if name == "transpose":
        return _whole_panels(gates * padded, dtype) * columns
    return _whole_panels(columns, dtype) * gates * padded


def pack_args(gates: int, rows: int, padded: int, columns: int, threads: int) -> PackArgs:
    """Arguments of the two, but for addresses; `rows` are of a gate."""
    return PackArgs(
        tasks=_tasks(gates * rows * columns, threads), gates=gates, rows=rows, padded=padded,
        columns=columns,
    )  # fmt: skip


def digest_args(elements: int, dtype: str, threads: int) -> DigestArgs:
    """Arguments of `digest`, but for addresses; its result does not depend on `threads`."""
    parts = DIGEST_PARTS if elements >= LEAST_ELEMENTS else 1
    words = elements * SIZES[dtype] // 4
    return DigestArgs(tasks=min(parts, threads), parts=parts, words=words)


class Gradient(NamedTuple):
    """Where the gradient of a parameter lies in the sums of a team."""

    shape: tuple[int, ...]
    offset: int  # elements
    bare: bool  # a view of the sums is the gradient; else `collect` makes it
    args: CollectArgs  # of that, but for addresses


def gradients(
    layout: Layout, teams: int, present: Sequence[bool], threads: int
) -> list[Gradient | None]:
    """Gradients of w_ih, w_hh, b_ih, b_hh, w_hr, unit vectors; None where not `present`."""
    gates, padded, units = layout.gates, layout.padded, layout.units
    w_ih, w_hh, w_hr, bias_x, bias_r, vectors = layout.sum_offsets
    where = [  # offset; gates, padded, rows, width, columns of `CollectArgs`
        (w_ih, gates, padded, units, layout.x_width, layout.inputs),
        (w_hh, gates, padded, units, layout.h_width, layout.outputs),
        (bias_x, gates, padded, units, 1, 1),
        (bias_x if layout.summed else bias_r, gates, padded, units, 1, 1),
        (w_hr, 1, layout.outputs, layout.outputs, padded, units),
    ]
    where += [(vectors + k * padded, 1, padded, units, 1, 1) for k in range(layout.vectors)]
    matrices = (True, True, False, False, True, *(False,) * layout.vectors)
    found: list[Gradient | None] = []
    taken: set[int] = set()
    for there, matrix, (offset, of_gates, of_padded, rows, width, columns) in zip(
        present, matrices, where
    ):
        # two gradients must not share memory, even where they are equal
        bare = layout.plain and teams == 1 and offset not in taken
        if there:
            taken.add(offset)
        size = of_gates * rows * columns
        args = CollectArgs(
            tasks=_tasks(size * teams, threads), parts=teams, part=sum(layout.sums),
            gates=of_gates, padded=of_padded, rows=rows, width=width, columns=columns,
        )  # fmt: skip
        shape = (of_gates * rows, columns) if matrix else (of_gates * rows,)
        found.append(Gradient(shape, offset, bare, args) if there else None)
    return found
