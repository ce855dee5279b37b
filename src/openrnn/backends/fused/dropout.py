"""Dropout between layers on the GPU: one launch, whose seed is read on the device."""

from struct import pack, unpack

import torch
from torch import Tensor

from openrnn import philox
from openrnn.backends.base import Call
from openrnn.backends.fused import kernels
from openrnn.kernels.cuda.args import DropoutArgs
from openrnn.spec import dtype_name


def masked(call: Call, layer: int, y: Tensor, first: int = 0, out: Tensor | None = None) -> Tensor:
    """The output of a layer (T, B, D*H), or its gradient, with the layer's mask on it.

    Args:
        first: number of the first step.
        out: memory for the result, which may be y.
    """
    if call.seed is None:
        raise ValueError("dropout needs a seed")
    p, y = call.problem.spec.dropout, y.contiguous()
    kernel = kernels.plain("dropout", dtype_name(y.dtype), y.device.index or 0)
    out = torch.empty_like(y) if out is None else out
    steps, batch, width = y.shape
    (scale,) = unpack("i", pack("f", philox.scale(p)))
    threads = steps * batch * ((width + 3) // 4)
    args = DropoutArgs(
        x=y.data_ptr(), out=out.data_ptr(), steps=steps, batch=batch, width=width,
        seed=call.seed.data_ptr(), layer=layer, first=first, threshold=philox.threshold(p),
        scale=scale,
    )  # fmt: skip
    kernel.launch(-(-threads // kernel.threads), args.words())
    return out
