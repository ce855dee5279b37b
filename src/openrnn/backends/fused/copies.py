"""Dense copies, one launch each: other strides, wider rows, rows of zeros, fewer bits."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from openrnn.backends.fused import kernels
from openrnn.codegen.cuda import NARROWED
from openrnn.kernels.cuda.args import CopyRowsArgs, NarrowValuesArgs
from openrnn.memory import allocator_for
from openrnn.native.recording import CURRENT
from openrnn.spec import dtype_name

ALIGNMENT = 16  # bytes that kernels copy at a time
# Above this size a copy that our kernel can only make value by value goes to torch, which copies
# several at a time. While a program is recorded our kernel is always used: a program cannot contain
# torch's kernels.
MOST_BY_VALUE = 1 << 22


def aligned(tensor: Tensor) -> bool:
    """Whether all rows of a tensor begin at multiples of 16 bytes."""
    size = tensor.element_size()
    return tensor.data_ptr() % ALIGNMENT == 0 and all(
        stride * size % ALIGNMENT == 0 for stride in tensor.stride()[:-1]
    )


def dense(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and aligned; by our kernel, which programs may have."""
    tensor = tensor.contiguous()
    if tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return copied(tensor.reshape(1, -1, tensor.shape[-1])).view(tensor.shape)


def whole_pieces(columns: int, size: int) -> int:
    """Columns, of `size` bytes a value, up to the next multiple of 16 bytes."""
    return columns + -columns % (ALIGNMENT // size)


def copied(
    x: Tensor, width: int = 0, lengths: Tensor | None = None, mask: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A dense copy of x (T, B, I) as (T, B, width), zero in columns past I.

    Args:
        width: I where it is 0.
        lengths: (B,); rows past them become zero.
        mask: (T, B), dense; rows where it is set become zero.
        out: dense memory for it, else fresh memory.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    lengths = None if lengths is None else lengths.contiguous()
    steps, batch, columns = x.shape
    width = width or columns
    step, row, _ = x.stride()
    size = x.element_size()
    if x.data_ptr() % size:
        raise ValueError(f"a tensor at address {x.data_ptr():#x}, needs a multiple of {size}")
    every = ALIGNMENT | x.data_ptr() | columns * size | width * size | step * size | row * size
    every |= 0 if out is None else out.data_ptr()
    piece = every & -every  # bytes: the largest power of two that divides all of these
    torch_can = lengths is None and mask is None and out is None and CURRENT.recording is None
    if torch_can and piece == size and steps * batch * width > MOST_BY_VALUE:
        if width > columns:
            return pad(x, (0, width - columns))
        # not x itself, which may be dense and misaligned
        return x.clone(memory_format=torch.contiguous_format)
    pieces = width * size // piece
    if out is None:
        out = allocator_for(x.dtype, x.device).empty(steps, batch, width)
    kernel = kernels.plain("copy_rows", dtype_name(x.dtype), x.device.index or 0)
    args = CopyRowsArgs(
        x=x.data_ptr(), x_step=step, x_row=row, out=out.data_ptr(),
        lengths=0 if lengths is None else lengths.data_ptr(),
        mask=0 if mask is None else mask.data_ptr(),
        steps=steps, batch=batch, width=columns, out_width=width, pieces=pieces,
    )  # fmt: skip
    kernel.launch(-(-steps * batch * pieces // kernel.threads), args.words())
    return out


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copies the first tensor of each pair to the second, by one launch.

    All are dense, of one size and dtype; addresses and bytes are multiples of 16.
    """
    first, _ = pairs[0]
    count, pieces = first.numel(), first.nbytes // ALIGNMENT
    words = [
        CopyRowsArgs(
            x=x.data_ptr(), x_step=0, x_row=0, out=out.data_ptr(), steps=1, batch=1, width=count,
            out_width=count, pieces=pieces,
        ).words()
        for x, out in pairs
    ]  # fmt: skip
    name, device = dtype_name(first.dtype), first.device.index or 0
    threads = kernels.plain("copy_rows", name, device, len(pairs)).threads
    kernels.launch_several("copy_rows", name, device, words, -(-pieces // threads))


def stacked(vectors: Sequence[Tensor]) -> Tensor:
    """`torch.stack` of vectors of one size, by launches, which programs may have."""
    first = vectors[0]
    out = allocator_for(first.dtype, first.device).empty(len(vectors), 1, 1, first.shape[0])
    for vector, row in zip(vectors, out):
        copied(vector[None, None], out=row)
    return out.flatten(0, 2)


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A dense float32 tensor in a dtype of 16 bits, or itself in float32."""
    if x.dtype == dtype:
        return x
    out = allocator_for(dtype, x.device).empty(*x.shape)
    kernel = kernels.plain("narrow_values", dtype_name(dtype), x.device.index or 0)
    args = NarrowValuesArgs(x=x.data_ptr(), out=out.data_ptr(), count=x.numel())
    kernel.launch(-(-x.numel() // (NARROWED * kernel.threads)), args.words())
    return out


def padded_gates(x: Tensor, gates: int, units: int) -> Tensor:
    """A dense copy of x (T, B, G*H) as (T, B, G*units), zero past the H units of each gate."""
    steps, batch, columns = x.shape
    rows = x.reshape(steps, batch * gates, columns // gates)
    return copied(rows, units).view(steps, batch, gates * units)


def padded_to_16_bytes(x: Tensor) -> Tensor:
    """(T, B, I) or a dense copy with zeros in columns appended, so that rows are 16 bytes each.

    Else cuBLASLt runs a product over all steps in one block, which took 184 us at H 10, T 256, B 64
    in tf32: benchmarks/log/cuda-experiments.md, "Products outside the loop, and the host".
    """
    width = whole_pieces(x.shape[-1], x.element_size())
    return x if width == x.shape[-1] and x.is_contiguous() else copied(x, width)
