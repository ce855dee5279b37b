"""What a checkpoint must hold: fields by type and range, tensors by name, shape and dtype.

Nothing that a file says is believed before: a size becomes memory and a position an index only
after it was held against what the tensors of the file, the corpus and the model are.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openrnn.errors import CheckpointError, shown
from openrnn.lm import vocabulary
from openrnn.lm.build import BYTES, build
from openrnn.lm.config import DTYPES, LARGEST, Config
from openrnn.lm.model import LanguageModel
from openrnn.lm.schedule import MOMENTS, Plateau
from openrnn.spec import dtype_name

GENERATOR = re.compile(r"generator/cuda/(0|[1-9][0-9]*)")


class ExpectedTensor(NamedTuple):
    """A tensor's name, shape and possible dtypes."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class Record:
    """Everything in a checkpoint except its tensors.

    Args:
        step: steps of training that lie behind; elapsed: their seconds.
        epoch, chunk: the position in the corpus; corpus: its fingerprint.
        world: processes of the run.
        plateau: of words, what passes over the corpus have led to.
    """

    config: Config
    step: int
    elapsed: float
    epoch: int
    chunk: int
    world: int
    corpus: str
    plateau: Plateau

    @classmethod
    def parse(cls, fields: object) -> "Record":
        """The record of a checkpoint's JSON.

        Raises:
            CheckpointError: a field is missing, or of another type or range.
        """
        if not isinstance(fields, dict):
            raise CheckpointError(f"its record must be an object, got {shown(fields)}")
        elapsed, corpus = _field(fields, "elapsed"), _field(fields, "corpus")
        if not (isinstance(elapsed, float | int) and type(elapsed) is not bool):
            elapsed = math.nan
        if not 0 <= elapsed < LARGEST:
            raise _wrong("elapsed", "a number of seconds, 0 or greater", fields)
        if not isinstance(corpus, str):
            raise _wrong("corpus", "a fingerprint", fields)
        step, world = (_integer(fields, name, 1) for name in ("step", "world"))
        epoch, chunk = (_integer(fields, name, 0) for name in ("epoch", "chunk"))
        config = Config.parse(_field(fields, "config"))
        plateau = _plateau(fields) if config.task == "words" else Plateau()
        return cls(config, step, float(elapsed), epoch, chunk, world, corpus, plateau)


def _plateau(fields: Mapping[str, Any]) -> Plateau:
    best = _field(fields, "best")
    if best is not None and not (type(best) is float and 0 <= best < math.inf):
        raise _wrong("best", "a loss, 0 or greater, or null", fields)
    return Plateau(best, _integer(fields, "cuts", 0))


def _field(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise CheckpointError(f"its record has no {name}")
    return fields[name]


def _wrong(name: str, wanted: str, fields: Mapping[str, Any]) -> CheckpointError:
    return CheckpointError(f"its {name} must be {wanted}, got {shown(fields[name])}")


def _integer(fields: Mapping[str, Any], name: str, least: int) -> int:
    value = _field(fields, name)
    if type(value) is not int or not least <= value < LARGEST:
        raise _wrong(name, f"an integer from {least} on, less than 2**31", fields)
    return value


def check_model(config: Config, tensors: Mapping[str, Tensor]) -> None:
    """Raises unless the parameters are those of the model that the config names.

    Raises:
        CheckpointError: one is missing, too many, or of another shape or dtype, or no number.
        CellError: there is no such cell.
    """
    _skeleton(config, tensors)


def check(config: Config, tensors: Mapping[str, Tensor], world: int) -> None:
    """Raises unless the tensors are those of a run of this config by so many processes.

    Raises:
        CheckpointError: one is missing, too many, or of another shape or dtype, or no number.
        CellError: there is no such cell.
    """
    model = _skeleton(config, tensors)
    if world > len(tensors):  # each process has a generator; this bounds the names made below
        raise CheckpointError(f"it lacks generators of its {world} processes")
    wanted = [*_moments(config, model), *_states(config, model), *_generators(world)]
    for one in wanted:
        _compare(tensors, one)
    _finite(tensors, "optimizer/")
    names = {one.name for one in wanted}
    if config.task == "words":
        names.add(vocabulary.NAME)
    for name in tensors:
        if not (name in names or name.startswith("model/") or GENERATOR.fullmatch(name)):
            raise CheckpointError(f"it has a tensor {shown(name)} that no run of it has")


def _skeleton(config: Config, tensors: Mapping[str, Tensor]) -> LanguageModel:
    """The model of a config without memory, after its parameters were compared with it."""
    dtype = (torch.float64 if config.dtype == "float64" else torch.float32,)
    words = vocabulary.of_tensors(tensors) if config.task == "words" else ()
    symbols = len(words) or BYTES
    # before anything is built of these sizes
    _compare(tensors, ExpectedTensor("model/embedding.weight", (symbols, config.embed), dtype))
    if not config.tied:
        _compare(tensors, ExpectedTensor("model/output.weight", (symbols, config.hidden), dtype))
    own = [name for name in tensors if name.startswith("model/")]
    if config.layers > len(own):
        raise CheckpointError(f"its {len(own)} parameters are too few for {config.layers} layers")
    with torch.device("meta"):
        model = build(replace(config, dropout=0.0), words)
    names = set()
    for name, parameter in model.named_parameters():
        names.add(f"model/{name}")
        _compare(
            tensors, ExpectedTensor(f"model/{name}", tuple(parameter.shape), (parameter.dtype,))
        )
    for name in own:
        if name not in names:
            raise CheckpointError(f"it has a tensor {shown(name)} that its model has not")
    _finite(tensors, "model/")
    return model


def _moments(config: Config, model: nn.Module) -> Iterator[ExpectedTensor]:
    for name, parameter in model.named_parameters():
        for moment in MOMENTS[config.task]:
            counts = moment == "step"
            shape = () if counts else tuple(parameter.shape)
            dtype = torch.float32 if counts else parameter.dtype
            yield ExpectedTensor(f"optimizer/{name}/{moment}", shape, (dtype,))


def _states(config: Config, model: LanguageModel) -> Iterator[ExpectedTensor]:
    """Under autocast a backend gives them in either type."""
    first = next(model.parameters()).dtype
    index = 0
    for stack in model.stacks:
        if isinstance(stack, nn.RNNBase):
            widths = (stack.hidden_size,) * (2 if config.cell == "lstm" else 1)
        else:
            widths = stack.spec.state_sizes
        for width in widths:
            shape = (stack.num_layers, config.batch, width)
            yield ExpectedTensor(f"state/{index}", shape, tuple({first, DTYPES[config.dtype]}))
            index += 1


def _generators(world: int) -> Iterator[ExpectedTensor]:
    """Every process has one of the CPU; that of a GPU is checked when it is set."""
    shape = tuple(torch.get_rng_state().shape)
    for rank in range(world):
        yield ExpectedTensor(f"generator/cpu/{rank}", shape, (torch.uint8,))


def _compare(tensors: Mapping[str, Tensor], wanted: ExpectedTensor) -> None:
    tensor = tensors.get(wanted.name)
    if tensor is None:
        raise CheckpointError(f"it lacks the tensor {wanted.name}")
    if tuple(tensor.shape) != wanted.shape or tensor.dtype not in wanted.dtypes:
        needs = " or ".join(sorted(map(dtype_name, wanted.dtypes)))
        raise CheckpointError(
            f"its tensor {wanted.name} must have shape {wanted.shape} and dtype {needs}, "
            f"got {tuple(tensor.shape)} and {dtype_name(tensor.dtype)}"
        )


def _finite(tensors: Mapping[str, Tensor], begin: str) -> None:
    for name, tensor in tensors.items():
        if name.startswith(begin) and not tensor.isfinite().all():
            raise CheckpointError(f"its tensor {name} has values that are nan or infinite")
