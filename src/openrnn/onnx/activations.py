"""The activation functions that a recurrent node of ONNX may ask for."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]


def affine(x: Tensor, alpha: float, beta: float) -> Tensor:
    """alpha x + beta"""
    return alpha * x + beta


def elu(x: Tensor, alpha: float) -> Tensor:
    """x, below zero alpha (e^x - 1)"""
    # the exponent is bounded as well: that of a large x, though not taken, makes the gradient nan
    return torch.where(x < 0, alpha * torch.expm1(torch.clamp(x, max=0.0)), x)


def hard_sigmoid(x: Tensor, alpha: float, beta: float) -> Tensor:
    """alpha x + beta within 0 and 1"""
    return torch.clamp(alpha * x + beta, 0.0, 1.0)


def leaky_relu(x: Tensor, alpha: float) -> Tensor:
    """x, below zero alpha x"""
    return torch.where(x < 0, alpha * x, x)


def scaled_tanh(x: Tensor, alpha: float, beta: float) -> Tensor:
    """alpha tanh(beta x)"""
    return alpha * torch.tanh(beta * x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x)"""
    return torch.relu(x) + torch.log1p(torch.exp(-torch.abs(x)))


def softsign(x: Tensor) -> Tensor:
    """x / (1 + |x|)"""
    return x / (1 + torch.abs(x))


def thresholded_relu(x: Tensor, alpha: float) -> Tensor:
    """x beyond alpha, else 0"""
    return torch.where(x > alpha, x, 0.0)


class Kind(NamedTuple):
    """A function, and the defaults of those of alpha and beta that it has.

    A default is None where ONNX's text and ONNX Runtime do not have the same.
    """

    function: Callable[..., Tensor]
    defaults: Mapping[str, float | None] = MappingProxyType({})


# by ONNX's names; capitals do not count in them
KINDS = {
    "Affine": Kind(affine, {"alpha": None, "beta": None}),
    "Elu": Kind(elu, {"alpha": 1.0}),
    "HardSigmoid": Kind(hard_sigmoid, {"alpha": 0.2, "beta": 0.5}),
    "LeakyRelu": Kind(leaky_relu, {"alpha": 0.01}),
    "Relu": Kind(torch.relu),
    "ScaledTanh": Kind(scaled_tanh, {"alpha": None, "beta": None}),
    "Sigmoid": Kind(torch.sigmoid),
    "Softplus": Kind(softplus),
    "Softsign": Kind(softsign),
    "Tanh": Kind(torch.tanh),
    "ThresholdedRelu": Kind(thresholded_relu, {"alpha": None}),
}
NAMES = {name.lower(): name for name in KINDS}


class Activation(NamedTuple):
    """A function of `KINDS` with its numbers, in the order of its arguments."""

    name: str
    numbers: tuple[float, ...] = ()

    @property
    def function(self) -> Function:
        function, defaults = KINDS[self.name]
        return partial(function, **dict(zip(defaults, self.numbers))) if defaults else function


def activations(
    names: Sequence[str], alphas: Sequence[float] = (), betas: Sequence[float] = ()
) -> tuple[Activation, ...]:
    """A node's functions; each takes what it has of alpha and beta off the front of these.

    Raises:
        ValueError: a name is not known, or a number is missing.
    """
    left = {"alpha": iter(alphas), "beta": iter(betas)}
    found = []
    for given in names:
        name = NAMES.get(given.lower())
        if name is None:
            raise ValueError(f"activations must be of {', '.join(KINDS)}, got {given}")
        numbers = []
        for key, default in KINDS[name].defaults.items():
            number = next(left[key], default)
            if number is None:
                raise ValueError(f"activation {name} needs a number in activation_{key}, got none")
            numbers.append(float(number))
        found.append(Activation(name, tuple(numbers)))
    return tuple(found)
