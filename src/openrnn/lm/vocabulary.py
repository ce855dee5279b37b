"""The words of a model as a tensor of its checkpoint."""

from collections.abc import Mapping

import torch
from torch import Tensor

from openrnn.errors import CheckpointError, shown
from openrnn.lm.words import END, UNKNOWN
from openrnn.spec import dtype_name

NAME = "vocabulary"


def as_tensor(words: tuple[str, ...]) -> Tensor:
    """The words in UTF-8, a line each: (N,) uint8."""
    return torch.frombuffer(bytearray("\n".join(words).encode()), dtype=torch.uint8)


def of_tensors(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The words among the tensors of a checkpoint.

    Raises:
        CheckpointError: there are none, or they are not what a run leaves.
    """
    tensor = tensors.get(NAME)
    if tensor is None:
        raise CheckpointError(f"it lacks the tensor {NAME}")
    if tensor.dim() != 1 or tensor.dtype != torch.uint8:
        kind = dtype_name(tensor.dtype)
        raise CheckpointError(
            f"its tensor {NAME} must have one dimension and dtype uint8, "
            f"got {tuple(tensor.shape)} and {kind}"
        )
    try:
        words = tuple(tensor.numpy().tobytes().decode().split("\n"))
    except UnicodeDecodeError:
        raise CheckpointError(f"its tensor {NAME} is not UTF-8 text") from None
    if words[:2] != (UNKNOWN, END) or len(words) < 3:
        raise CheckpointError(
            f"its vocabulary must begin with {UNKNOWN} and {END} and have another word, "
            f"got {shown(words[:3])}"
        )
    if len(set(words)) < len(words) or any(word.split() != [word] for word in words):
        raise CheckpointError("its vocabulary has a word twice, or one with blanks")
    return words
