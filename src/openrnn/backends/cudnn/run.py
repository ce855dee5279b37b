"""One call of cuDNN each way, for at most LONGEST steps, with our rules for rows of length 0."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openrnn.native.cudnn.descriptors import (
    BATCH_MAJOR,
    DEFAULT_MATH,
    FMA_MATH,
    TENSOR_MATH,
    TIME_MAJOR,
    Kind,
    Network,
    Shapes,
    network,
    space_bytes,
)
from openrnn.native.cudnn.handles import Handle, On
from openrnn.spec import Spec

LONGEST = 65535  # steps that a data descriptor takes
ADD = 0  # weight gradients are added; setting them is not supported


class Lengths(NamedTuple):
    """Lengths of which at least one ends before T."""

    host: Tensor  # (B,) int32 on the host
    device: Tensor  # (B,) int64
    zeros: bool  # some are 0


class Net(NamedTuple):
    """A network made ready for calls of one thread on one device."""

    kind: Kind
    handle: Handle
    network: Network
    weights: int  # the address of the weight space
    weight_bytes: int
    alive: object  # what holds them


def math_of(spec: Spec, dtype: torch.dtype) -> int:
    """Which arithmetic products may use; "default" asks torch's setting for recurrent networks."""
    if dtype in (torch.float16, torch.bfloat16):
        return TENSOR_MATH
    precision = spec.precision
    if precision == "default" and dtype == torch.float32:
        setting: Any = torch.backends.cudnn.rnn  # a module whose attributes torch computes
        precision = setting.fp32_precision
    return FMA_MATH if precision == "ieee" and dtype == torch.float32 else DEFAULT_MATH


@lru_cache(maxsize=1024)
def _full(steps: int, batch: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((batch,), steps, dtype=torch.int32)


def layout_of(x: Tensor, algorithm: str) -> int:
    """How x lies: cuDNN's standard algorithm reads both orders, so that neither is copied."""
    if x.is_contiguous() or algorithm != "standard" or not x.transpose(0, 1).is_contiguous():
        return TIME_MAJOR
    return BATCH_MAJOR


def _laid(tensor: Tensor, layout: int) -> Tensor:
    """The same values in this order; (B, T, ...) in memory for BATCH_MAJOR."""
    return (tensor.transpose(0, 1) if layout == BATCH_MAJOR else tensor).contiguous()


def _fresh(like: Tensor, layout: int, width: int, zero: bool = False) -> tuple[Tensor, Tensor]:
    """A new sequence: as cuDNN sees it, and as (T, B, width)."""
    steps, batch = like.shape[0], like.shape[1]
    turned = layout == BATCH_MAJOR
    shape = (batch, steps, width) if turned else (steps, batch, width)
    make = torch.zeros if zero else torch.empty
    made = make(shape, dtype=like.dtype, device=like.device)
    return made, made.transpose(0, 1) if turned else made


def _at(tensors: Sequence[Tensor | None], place: int) -> int | None:
    """The address of one of the tensors, or NULL where it or the sequence is missing."""
    tensor = tensors[place] if place < len(tensors) else None
    return None if tensor is None else tensor.data_ptr()


def make(
    kind: Kind,
    handle: Handle,
    weights: int,
    weight_bytes: int,
    drop: Tensor | None = None,
    alive: object = None,
) -> Net:
    """A network with its descriptor."""
    return Net(kind, handle, network(handle, kind, drop), weights, weight_bytes, alive)


def _bytes(handle: Handle, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", handle.device))


def forward(
    net: Net,
    x: Tensor,
    states: Sequence[Tensor],
    lengths: Lengths | None,
    training: bool,
    reserve_bytes: int = 0,
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """y (T, B, D*O), final states, and in training the reserve, of at least `reserve_bytes`."""
    kind, handle, spec = net.kind, net.handle, net.kind.spec
    library = handle.library
    steps, batch = x.shape[0], x.shape[1]
    layout = layout_of(x, kind.algorithm)
    x = _laid(x, layout)
    states = [state.contiguous() for state in states]
    y_raw, y = _fresh(x if layout == TIME_MAJOR else x.transpose(0, 1), layout,
                      spec.directions * spec.output_size)  # fmt: skip
    finals = [
        torch.empty((spec.chains, batch, width), dtype=x.dtype, device=x.device)
        for width in spec.state_sizes
    ]
    host = lengths.host if lengths is not None else _full(steps, batch)
    reserve: Tensor | None = None
    with On(handle.device), Shapes(library, kind, layout, steps, batch, host) as shapes:
        work, need = space_bytes(handle, net.network, training, shapes.x)
        workspace = _bytes(handle, work)
        if training:
            reserve = _bytes(handle, max(need, reserve_bytes))
        library.cudnnRNNForward(
            handle.pointer, net.network.pointer, int(training), None,
            shapes.x, x.data_ptr(), shapes.y, y_raw.data_ptr(),
            shapes.h, _at(states, 0), finals[0].data_ptr(),
            shapes.c, _at(states, 1), _at(finals, 1),
            net.weight_bytes, net.weights, work, workspace.data_ptr(),
            0 if reserve is None else reserve.numel(),
            None if reserve is None else reserve.data_ptr(),
        )  # fmt: skip
    if lengths is not None and lengths.zeros:
        empty = (lengths.device == 0)[:, None]
        finals = [
            torch.where(empty, states[place] if states else 0, final)
            for place, final in enumerate(finals)
        ]
    return y, finals, reserve


def backward(
    net: Net,
    x: Tensor,
    y: Tensor,
    states: Sequence[Tensor],
    lengths: Lengths | None,
    reserve: Tensor,
    dy: Tensor | None,
    d_finals: Sequence[Tensor | None],
    wanted: Sequence[bool],
    d_weights: Tensor | None,
) -> tuple[Tensor, list[Tensor | None]]:
    """dx and the gradients of the wanted states; adds to d_weights; overwrites the reserve."""
    kind, handle, spec = net.kind, net.handle, net.kind.spec
    library = handle.library
    steps, batch = x.shape[0], x.shape[1]
    layout = layout_of(x, kind.algorithm)
    # what lies past the lengths cuDNN does not write
    dx_raw, dx = _fresh(x, layout, spec.input_size, zero=lengths is not None)
    dy = torch.zeros_like(y) if dy is None else dy
    x, y, dy = (_laid(tensor, layout) for tensor in (x, y, dy))
    states = [state.contiguous() for state in states]
    d_ends = [None if grad is None else grad.contiguous() for grad in d_finals]
    d_states: list[Tensor | None] = [
        torch.empty_like(state) if want else None for state, want in zip(states, wanted)
    ]
    host = lengths.host if lengths is not None else _full(steps, batch)
    with On(handle.device), Shapes(library, kind, layout, steps, batch, host) as shapes:
        work, _ = space_bytes(handle, net.network, True, shapes.x)
        workspace = _bytes(handle, work)
        spaces: tuple[Any, ...] = (
            work, workspace.data_ptr(), reserve.numel(), reserve.data_ptr(),
        )  # fmt: skip
        library.cudnnRNNBackwardData_v8(
            handle.pointer, net.network.pointer, None,
            shapes.y, y.data_ptr(), dy.data_ptr(), shapes.x, dx_raw.data_ptr(),
            shapes.h, _at(states, 0), _at(d_ends, 0), _at(d_states, 0),
            shapes.c, _at(states, 1), _at(d_ends, 1), _at(d_states, 1),
            net.weight_bytes, net.weights, *spaces,
        )  # fmt: skip
        if d_weights is not None:
            library.cudnnRNNBackwardWeights_v8(
                handle.pointer, net.network.pointer, ADD, None,
                shapes.x, x.data_ptr(), shapes.h, _at(states, 0), shapes.y, y.data_ptr(),
                net.weight_bytes, d_weights.data_ptr(), *spaces,
            )  # fmt: skip
    if lengths is not None and lengths.zeros:
        empty = (lengths.device == 0)[:, None]
        for place, grad in enumerate(d_states):
            if grad is not None:
                end = d_finals[place]
                d_states[place] = torch.where(empty, 0 if end is None else end, grad)
    return dx, d_states
