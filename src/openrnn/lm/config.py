"""What is trained, on what and how long: one record, from the command line to the checkpoint."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath

import torch

from openrnn import dispatch
from openrnn.errors import CheckpointError, OpenRNNError, shown

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
DEVICES = ("auto", "cpu", "cuda")
MODELS = ("openrnn", "torch")
TORCH_CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")

LARGEST = 2**31  # no size or count of a run reaches it
INTEGERS = ("layers", "hidden", "embed", "bptt", "batch", "seed", "steps")
NUMBERS = ("lr", "dropout", "minutes")
TEXTS = ("corpus", "cell", "dtype", "device", "backend", "model")
OPTIONAL = ("corpus", "steps", "minutes")

# what may differ when a run is resumed; anything else would make it another run
FREE = ("corpus", "steps", "minutes", "device", "backend")


@dataclass(frozen=True)
class Config:
    """A training run. The defaults are a demonstration for two CPU cores.

    Args:
        corpus: a file or folder; by default the sources of the running Python's standard library.
        model: whose layers: "openrnn", or "torch" for torch.nn's, to compare with.
        cell: the key of a cell in `openrnn.cells`, or "path.py:name" for one of the user's own.
        batch: B, parallel streams over all processes.
        bptt: T, the bytes of one step; the state is carried on to the next, gradients are not.
        dtype: float32 and float64 as they are; bfloat16 by autocast over float32 parameters.
        steps, minutes: the budget, one of the two.
    """

    corpus: str | None = None
    cell: str = "lstm"
    layers: int = 2
    hidden: int = 256
    embed: int = 128
    bptt: int = 64
    batch: int = 32
    lr: float = 4e-3
    dropout: float = 0.0
    dtype: str = "float32"
    seed: int = 0
    steps: int | None = None
    minutes: float | None = None
    device: str = "auto"
    backend: str = "auto"
    model: str = "openrnn"

    def __post_init__(self) -> None:
        self._check_types()
        self._check_counts()
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr must be a positive number, got {self.lr}")
        if not 0 <= self.dropout <= 1:
            raise ValueError(f"dropout must be a probability in [0, 1], got {self.dropout}")
        for name, valid in (
            ("dtype", tuple(DTYPES)),
            ("device", DEVICES),
            ("model", MODELS),
        ):
            if getattr(self, name) not in valid:
                wanted = ", ".join(valid)
                raise ValueError(f"{name} must be one of {wanted}, got {getattr(self, name)!r}")
        dispatch.check_name(self.backend)
        if self.model == "torch" and self.cell not in TORCH_CELLS:
            raise ValueError(f"model torch has {', '.join(TORCH_CELLS)}, got {self.cell!r}")
        if self.model == "torch" and self.backend != "auto":
            raise ValueError(f"model torch has no backends, got {self.backend!r}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be in [0, 2**63), got {self.seed}")
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("the budget is either steps or minutes: give one of them")
        if self.minutes is not None and not (math.isfinite(self.minutes) and self.minutes > 0):
            raise ValueError(f"minutes must be a positive number, got {self.minutes}")

    def _check_types(self) -> None:
        """Checks every field: those of a checkpoint's JSON may be anything."""
        kinds = (INTEGERS, int, "an integer"), (NUMBERS, float, "a number"), (TEXTS, str, "text")
        for names, kind, wanted in kinds:
            for name in names:
                value = getattr(self, name)
                if value is None and name in OPTIONAL:
                    continue
                fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
                if not fits or isinstance(value, bool):
                    raise TypeError(f"{name} must be {wanted}, got {shown(value)}")
                if kind is float and isinstance(value, int) and abs(value) >= LARGEST:
                    raise ValueError(f"{name} must be less than 2**31, got {shown(value)}")
        if not self.cell.isprintable():
            raise ValueError(f"cell must be a name in printable characters, got {self.cell!r}")

    def _check_counts(self) -> None:
        for name in ("layers", "hidden", "embed", "bptt", "batch", "steps"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
            if count is not None and count >= LARGEST:
                raise ValueError(f"{name} must be less than 2**31, got {count}")

    @classmethod
    def make(cls, given: Mapping[str, object]) -> "Config":
        """The defaults with what was given; `MINUTES` where no budget was."""
        if "steps" not in given and "minutes" not in given:
            given = {**given, "minutes": MINUTES}
        return cls(**given)  # type: ignore[arg-type]  # fields by name, checked by their values

    @classmethod
    def parse(cls, fields: object) -> "Config":
        """The config of a checkpoint's JSON.

        Raises:
            CheckpointError: the fields are not those of this version.
        """
        if not isinstance(fields, dict):
            raise CheckpointError(f"its config must be an object, got {shown(fields)}")
        strange = [name for name in fields if name not in cls.__dataclass_fields__]
        if strange:
            raise CheckpointError(
                f"its config is not one of this version: it has a field {shown(strange[0])}"
            )
        try:
            return cls(**fields)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"its config is not one of this version: {error}") from None

    def resumed(self, given: Mapping[str, object]) -> "Config":
        """This config with what was given anew.

        Raises:
            CheckpointError: something was given that makes it another run.
        """
        mine = asdict(self)
        for name, value in given.items():
            if name == "cell" and own_cell(self.cell) and short(str(value)) == short(self.cell):
                continue
            if name not in FREE and value != mine[name]:
                raise CheckpointError(
                    f"the run to resume has --{name} {mine[name]}, got --{name} {value}: "
                    "leave it out, or start a new run"
                )
        if own_cell(self.cell) and "cell" not in given:
            raise CheckpointError(
                f"the run to resume has a cell of its own, {short(self.cell)}: "
                f"say where it is with --cell path/to/{short(self.cell)}"
            )
        if "steps" in given or "minutes" in given:
            given = {"steps": None, "minutes": None, **given}
        return replace(self, **given)  # type: ignore[arg-type]

    def progress(self, step: float, elapsed: float) -> float:
        """How much of the budget is spent before step number `step`, counted from 0: 1 is all."""
        spent = elapsed / (60 * (self.minutes or MINUTES))
        return min(1.0, spent if self.steps is None else step / self.steps)


# of training; with the evaluation and a sample the demonstration stays under three
MINUTES = 2.5


@contextmanager
def refusing() -> Iterator[None]:
    """Around checks of options: a ValueError there is the user's mistake, elsewhere a bug."""
    try:
        yield
    except OpenRNNError:
        raise
    except ValueError as error:
        raise OpenRNNError(str(error)) from error


def own_cell(cell: str) -> bool:
    """Whether the cell is one of the user's, "path.py:name"."""
    return ":" in cell


def short(cell: str) -> str:
    """The cell without the folder of its file."""
    file, colon, name = cell.rpartition(":")
    return f"{PurePath(file).name}{colon}{name}"
