"""The tensors of a call as the kernels read them, and as the caller wants them back."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import overload

import torch
from torch import Tensor

from openrnn.backends.base import Call, Cotangents, Gradients
from openrnn.backends.cpu.layer import compute_dtype
from openrnn.memo import memo
from openrnn.params import module_slots
from openrnn.spec import Spec
from openrnn.tensors import is_ordered


def readable(call: Call, dtype: torch.dtype, in_place: bool = False) -> Call:
    """The call in the dtype that the kernels compute in, every tensor laid out as they read it.

    Args:
        in_place: gate matrices are read in the dtype of the problem.
    """
    int8 = call.problem.precision == "int8"
    # a hook of saved tensors may have changed the dtype of matrices that are read in their own
    own = dict.fromkeys(gate_matrices(call.problem.spec), call.problem.dtype) if in_place else {}
    # with int8 weights every tensor is as the kernels read it, but for strides
    if not own and _is_ready(call, (dtype, torch.int8) if int8 else (dtype,)):
        return call

    def plain(tensors: list[Tensor], kept: Mapping[int, torch.dtype]) -> list[Tensor]:
        return [
            tensor.to(kept.get(index, dtype)).contiguous() for index, tensor in enumerate(tensors)
        ]

    x = call.x if call.x.dtype is dtype else call.x.to(dtype)
    return replace(
        call, x=contiguous_rows(x), states=plain(call.states, {}),
        params=call.params if int8 else plain(call.params, own),
        lengths=None if call.lengths is None else call.lengths.contiguous(),
        reset=None if call.reset is None else call.reset.contiguous(),
        reset_states=plain(call.reset_states, {}),
    )  # fmt: skip


def _is_ready(call: Call, kinds: Collection[torch.dtype]) -> bool:
    """Whether tensors but x are of these dtypes, and all lie as the kernels read them."""
    for tensor in (*call.states, *call.params, *call.reset_states):
        if tensor.dtype not in kinds or not tensor.is_contiguous():
            return False
    masks = [mask for mask in (call.lengths, call.reset) if mask is not None]
    return call.x.stride(-1) == 1 and all(mask.is_contiguous() for mask in masks)


@memo(256)
def gate_matrices(spec: Spec) -> frozenset[int]:
    """The places of W_ih and W_hh of all layers among the parameters."""
    slots = enumerate(module_slots(spec))
    return frozenset(index for index, slot in slots if slot.is_gate_matrix)


def is_readable(call: Call) -> bool:
    """Whether the kernels read these tensors as they are, and there is something to do."""
    return call.x.dtype is compute_dtype(call.x.dtype) and is_laid_out(call)


def is_laid_out(call: Call) -> bool:
    """Whether tensors lie as the kernels read them; those of 16 bits are yet to be converted."""
    return 0 not in call.x.shape and readable(call, call.x.dtype) is call


def is_convertible(call: Call) -> bool:
    """Whether they could read calls alike once those are converted to that dtype."""
    return is_laid_out(call) and is_ordered(call.x)


def contiguous_rows(tensor: Tensor) -> Tensor:
    """The tensor, copied where its last dimension is not contiguous."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


@overload
def converted(tensor: Tensor, dtype: torch.dtype) -> Tensor: ...
@overload
def converted(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None: ...
def converted(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The tensor, if there is one, in a dtype."""
    return tensor if tensor is None or tensor.dtype is dtype else tensor.to(dtype)


def readable_gradients(grads: Cotangents, dtype: torch.dtype) -> Cotangents:
    """The gradients that reach a call, as the kernels read them; nothing where all are absent."""
    y = None if grads.y is None else contiguous_rows(converted(grads.y, dtype))
    return Cotangents(y, _contiguous(grads.finals, dtype), _contiguous(grads.all_states, dtype))


def _contiguous(tensors: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    for tensor in tensors:
        if tensor is not None:
            break
    else:
        return []
    found = [converted(tensor, dtype) for tensor in tensors]
    return [None if tensor is None else tensor.contiguous() for tensor in found]


def rows_by_length(call: Call) -> Tensor | None:
    """The batch rows by falling length, so that those still running are the first."""
    return None if call.lengths is None else call.lengths.argsort(stable=True, descending=True)


def returned(gradients: Gradients, dtype: torch.dtype) -> Gradients:
    """The gradients in the dtype of the call."""
    if dtype is compute_dtype(dtype):
        return gradients
    groups = (gradients.states, gradients.params, gradients.reset_states)
    converted_groups = ([converted(grad, dtype) for grad in group] for group in groups)
    return Gradients(converted(gradients.x, dtype), *converted_groups)
