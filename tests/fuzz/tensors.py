"""Tensors of every kind, each with the plain one of the same values where it has any."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .verdict import Unfit


class Wrapper(Tensor):
    """Holds a tensor, has no memory of its own, and hands every operator on to what it holds."""

    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> "Wrapper":
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]  # torch's
            cls, elem.size(), strides=elem.stride(), storage_offset=elem.storage_offset(),
            dtype=elem.dtype, layout=elem.layout, device=elem.device, requires_grad=False,
        )  # fmt: skip
        made.elem = elem
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def inner(value: Any) -> Any:
            return value.elem if isinstance(value, Wrapper) else value

        def outer(value: Any) -> Any:
            return Wrapper(value) if isinstance(value, Tensor) else value

        return tree_map(outer, func(*tree_map(inner, args), **tree_map(inner, kwargs or {})))


class Named(Tensor):
    """A subclass that adds nothing."""


class Duck:
    """Not a tensor, but torch's functions take it."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def inner(value: Any) -> Any:
            return value.value if isinstance(value, Duck) else value

        return func(*tree_map(inner, args), **tree_map(inner, kwargs or {}))


Made = tuple[Any, Any]  # what is given, and the plain tensor of its values, or None


def _conj_imag(t: Tensor) -> Tensor:
    if t.dtype not in (torch.float32, torch.float64):
        return torch._neg_view(t.neg())
    return torch.complex(torch.full_like(t, 9.0), t.neg()).conj().imag


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else t


def _middle(t: Tensor) -> Tensor:
    return t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() > 2 else _transposed(t)


def _spread(t: Tensor) -> Tensor:
    wide = t.new_zeros((*t.shape, 3)) + (7 if t.dtype != torch.bool else True)
    wide[..., 1] = t
    return wide[..., 1]


def _offset(t: Tensor) -> Tensor:
    long = torch.cat([t.new_ones(5), t.flatten(), t.new_ones(3)])
    return long[5 : 5 + t.numel()].view(t.shape)


def _gaps(t: Tensor) -> Tensor:
    """A part of a larger one: rows further apart than they are long."""
    if t.dim() == 0:
        return t
    wide = torch.cat([t, torch.ones_like(t)], -1)
    return wide[..., : t.shape[-1]]


def _expanded(t: Tensor) -> Tensor:
    return t[:1].clone().expand(t.shape) if t.dim() and t.shape[0] else t


def _expanded_last(t: Tensor) -> Tensor:
    return t[..., :1].clone().expand(t.shape) if t.dim() and t.shape[-1] else t


def _windows(t: Tensor) -> Tensor:
    """Overlapping windows of one row of numbers."""
    if not t.numel():
        return t
    row = t.flatten()
    return row.as_strided(t.shape, [1] * t.dim()) if row.numel() >= sum(t.shape) else t


def _reinterpreted(t: Tensor) -> Tensor:
    """Laid out as if of one element: strides of a dimension of size 1 are anything."""
    strides = [17 if size == 1 else stride for size, stride in zip(t.shape, t.stride())]
    return t.as_strided(t.shape, strides)


def _inference(t: Tensor) -> Tensor:
    with torch.inference_mode():
        return t.clone()


# of the same values wherever the tensor has them; torch.nn takes all of these
SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": _transposed,
    "middle_first": _middle,
    "spread": _spread,
    "offset": _offset,
    "gaps": _gaps,
    "expanded": _expanded,
    "expanded_last": _expanded_last,
    "windows": _windows,
    "strange_strides": _reinterpreted,
    "negative_bit": lambda t: torch._neg_view(t.neg()),
    "conjugate_imag": _conj_imag,
    "conjugate_imag_spread": lambda t: _conj_imag(_spread(t)),
    "zero_tensor": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device),
    "subclass": lambda t: t.as_subclass(Named),
    "parameter": lambda t: torch.nn.Parameter(t.clone(), requires_grad=False),
    "inference": _inference,
    "wrapper": lambda t: Wrapper(t.clone()),
    "wrapper_spread": lambda t: Wrapper(_spread(t)),
    "functional": lambda t: torch._to_functional_tensor(t.clone()),
}

WRAPPED = {"wrapper", "wrapper_spread", "functional"}  # of those, the ones without memory


def _resized(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def _fake(t: Tensor) -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(t)


def _dtensor(t: Tensor) -> Tensor:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh(t.device.type, (2,))
    return DTensor.from_local(t.clone(), mesh, [Replicate()], run_check=False)


def _masked(t: Tensor) -> Tensor:
    return torch.masked.masked_tensor(t.clone(), t > 0)  # type: ignore[attr-defined]


# tensors without numbers that a dense kernel could read: a sentence, or what torch.nn makes of them
STRANGE: dict[str, Callable[[Tensor], Any]] = {
    "fake": _fake,
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "sparse_csr": lambda t: t.to_sparse_csr(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "nested": lambda t: torch.nested.nested_tensor(list(t)),
    "nested_jagged": lambda t: torch.nested.nested_tensor(list(t), layout=torch.jagged),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "masked": _masked,
    "resized_storage": _resized,
    "dtensor": _dtensor,
    "duck": Duck,
    "numpy": lambda t: t.numpy(),
    "list": lambda t: t.tolist(),
    "tuple": tuple,
    "none": lambda t: None,
    "number": lambda t: 3,
    "text": lambda t: "abc",
}


# those of them whose numbers somebody may read all the same
VALUES_SOMEWHERE = {"sparse", "sparse_csr", "mkldnn", "dtensor", "duck", "numpy", "list", "tuple"}
VALUES_SOMEWHERE |= {"nested_jagged"}

# plain tensors of another shape or dtype
CHANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "narrower": lambda t: t[..., :-1].contiguous(),
    "wider": lambda t: torch.cat([t, t[..., :1]], -1),
    "shorter": lambda t: t[:-1].contiguous(),
    "longer": lambda t: torch.cat([t, t[:1]], 0),
    "other_middle": lambda t: torch.cat([t, t[:, :1]], 1),
    "one_row": lambda t: t[:1].contiguous(),
    "one_column": lambda t: t[..., :1].contiguous(),
    "one_number": lambda t: t.flatten()[:1].clone(),
    "empty": lambda t: t.new_empty(0),
    "no_rows": lambda t: t[:0].contiguous(),
    "scalar": lambda t: t.flatten()[0].clone(),
    "flat": lambda t: t.flatten().contiguous(),
    "more_dims": lambda t: t.unsqueeze(0).contiguous(),
    "fewer_dims": lambda t: t[0].clone(),
    "turned": lambda t: t.transpose(0, -1).contiguous(),
    "turned_view": lambda t: t.transpose(0, -1),
    "float64": lambda t: t.double(),
    "float32": lambda t: t.float(),
    "float16": lambda t: t.half(),
    "bfloat16": lambda t: t.bfloat16(),
    "float8": lambda t: t.to(torch.float8_e4m3fn),
    "int64": lambda t: (t * 3).long(),
    "int8": lambda t: (t * 3).to(torch.int8),
    "uint16": lambda t: (t * 3).abs().to(torch.uint16),
    "bool": lambda t: t > 0,
    "complex64": lambda t: torch.complex(t.float(), t.float()),
}

# of values: as extreme as users' data gets
VALUED: dict[str, Callable[[Tensor], Tensor]] = {
    "saturating": lambda t: t * 30,
    "nan": lambda t: torch.where(_some(t), torch.nan, t).to(t.dtype),
    "infinite": lambda t: torch.where(_some(t), torch.inf, t).to(t.dtype),
    "tiny": lambda t: t * 1e-30,
    "zeros": torch.zeros_like,
    "huge": lambda t: t * 1e3,
}


def _some(t: Tensor) -> Tensor:
    return (torch.arange(t.numel()) % 7 == 3).view(t.shape).to(t.device)


def twisted(kind: str, value: Tensor) -> Made:
    """A tensor of this kind made of a plain one, and the plain one that it stands for.

    Raises:
        Unfit: torch cannot make one of this value.
    """
    try:
        with torch.no_grad():
            if kind in SAME:
                given = SAME[kind](value.clone())
                return given, plain(given)
            if kind in VALUED:
                given = VALUED[kind](value)
                return given, given.clone()
            if kind in CHANGED:
                given = CHANGED[kind](value)
                return given, given.clone(memory_format=torch.contiguous_format)
            return STRANGE[kind](value), value.clone() if kind in VALUES_SOMEWHERE else None
    except Exception as error:
        raise Unfit(f"torch makes no {kind} tensor here: {type(error).__name__}") from error


def plain(value: Any) -> Any:
    """The values of a tensor of any kind in plain memory, or None where it has none."""
    if isinstance(value, Wrapper):
        value = value.elem
    if isinstance(value, Duck):
        value = value.value
    if not isinstance(value, Tensor):
        return None
    if torch._is_functional_tensor(value):
        torch._sync(value)
        value = torch._from_functional_tensor(value)
    with torch.no_grad():
        if type(value).__name__ == "DTensor":
            value = value.to_local()
        if (
            value.is_quantized
            or value.is_sparse
            or value.layout != torch.strided
            or value.is_meta
            or value.is_nested
        ):
            return None
        if type(value).__name__ in ("FakeTensor", "MaskedTensor"):
            return None
        value = value.detach().as_subclass(Tensor).resolve_neg().resolve_conj()
        if value.untyped_storage().nbytes() == 0 and value.numel() and not value._is_zerotensor():
            return None  # its memory is gone
        if value._is_zerotensor():
            return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
        return value.clone(memory_format=torch.contiguous_format)


def lengths_kinds(dice: random.Random, good: Tensor, steps: int) -> tuple[str, Any, Any]:
    """Lengths in some form, and the plain ones, or None where they are no lengths."""
    wide = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
    unsigned = [torch.uint16, torch.uint32, torch.uint64]
    forms: dict[str, Callable[[], Any]] = {
        "int64": good.clone,
        "other_int": lambda: good.to(dice.choice(wide)),
        "unsigned": lambda: good.to(dice.choice(unsigned)),
        "zeros": lambda: torch.zeros_like(good),
        "list": good.tolist,
        "numpy": good.numpy,
        "spread": lambda: _spread(good),
        "expanded": lambda: good[:1].expand(good.shape),
        "negative_bit": lambda: torch._neg_view(good.neg()),
        "wrapper": lambda: Wrapper(good.clone()),
        "functional": lambda: torch._to_functional_tensor(good.clone()),
        "zero_tensor": lambda: torch._efficientzerotensor(
            good.shape, dtype=torch.int64, device=good.device
        ),
        "subclass": lambda: good.as_subclass(Named),
        "fake": lambda: _fake(good),
        "dtensor": lambda: _dtensor(good),
        "meta": lambda: good.to("meta"),
        "sparse": good.to_sparse,
        "resized_storage": lambda: _resized(good),
        "negative": lambda: good - steps - 1,
        "too_long": lambda: good + steps + 1,
        "overflowing": lambda: good + 2**32,
        "overflowing_uint64": lambda: (good + 2**62).to(torch.uint64) * 3,
        "bool": lambda: good > 0,
        "float": good.float,
        "complex": lambda: good.to(torch.complex64),
        "wrong_count": lambda: torch.cat([good, good[:1]]),
        "none_of_them": lambda: good[:0],
        "scalar": lambda: torch.tensor(1),
        "two_dims": lambda: good[:, None],
        "text": lambda: "abc",
        "number": lambda: 1,
    }
    kind = dice.choice([*forms, *["int64"] * 20, *["other_int"] * 5])
    return (kind, *_masks(forms[kind], kind))


def reset_kinds(dice: random.Random, good: Tensor) -> tuple[str, Any, Any]:
    """A reset mask in some form, and the plain one, or None where it is none."""
    forms: dict[str, Callable[[], Any]] = {
        "bool": good.clone,
        "float": good.float,
        "half": good.half,
        "int": good.int,
        "negative_float": lambda: good * -0.5,
        "uint16": lambda: good.to(torch.uint16),
        "list": good.tolist,
        "numpy": good.numpy,
        "spread": lambda: _spread(good),
        "turned": lambda: _transposed(good),
        "expanded": lambda: _expanded(good),
        "negative_bit": lambda: torch._neg_view(good.float().neg()),
        "conjugate_imag": lambda: _conj_imag(good.float()),
        "wrapper": lambda: Wrapper(good.clone()),
        "functional": lambda: torch._to_functional_tensor(good.clone()),
        "zero_tensor": lambda: torch._efficientzerotensor(
            good.shape, dtype=torch.float32, device=good.device
        ),
        "zero_bool": lambda: torch._efficientzerotensor(
            good.shape, dtype=torch.bool, device=good.device
        ),
        "subclass": lambda: good.as_subclass(Named),
        "nan": lambda: torch.where(good, torch.nan, 0.0),
        "complex": lambda: good.to(torch.complex64),
        "fake": lambda: _fake(good),
        "dtensor": lambda: _dtensor(good),
        "meta": lambda: good.to("meta"),
        "sparse": lambda: good.float().to_sparse(),
        "resized_storage": lambda: _resized(good),
        "shorter": lambda: good[:-1],
        "wider": lambda: torch.cat([good, good[:, :1]], 1),
        "flat": good.flatten,
        "row": lambda: good[:1],
        "scalar": lambda: torch.tensor(True),
        "more_dims": lambda: good[..., None],
        "text": lambda: "abc",
        "number": lambda: 1,
    }
    kind = dice.choice([*forms, *["bool"] * 20, *["float"] * 5])
    return (kind, *_masks(forms[kind], kind))


def _masks(make: Callable[[], Any], kind: str) -> Made:
    try:
        given = make()
    except Exception as error:
        raise Unfit(f"torch makes no {kind} mask here: {type(error).__name__}") from error
    if isinstance(given, Tensor):
        return given, plain(given)
    return given, given  # lists and numbers: the reference says what they mean
