"""What is trained, on what and how long: one record, from the command line to the checkpoint."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath

import torch

from openrnn import dispatch
from openrnn.errors import CheckpointError, OpenRNNError, shown
from openrnn.lm.tasks import TASKS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
DEVICES = ("auto", "cpu", "cuda")
MODELS = ("openrnn", "torch")
TORCH_CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")

LARGEST = 2**31  # no size or count of a run reaches it
INTEGERS = ("layers", "hidden", "embed", "bptt", "batch", "seed", "steps", "vocabulary")
DROPOUTS = (
    "dropout", "dropout_input", "dropout_output", "dropout_embedding", "dropout_weight"
)  # fmt: skip
PENALTIES = ("activation", "temporal")
NUMBERS = ("lr", *DROPOUTS, *PENALTIES, "minutes")
FLAGS = ("tied",)
TEXTS = ("task", "corpus", "cell", "dtype", "device", "backend", "model")
OPTIONAL = ("corpus", "steps", "minutes", "vocabulary")
# what only words have, and what each task has where nothing is given
OF_WORDS = ("tied", "vocabulary", *DROPOUTS[1:], *PENALTIES)
WORDS = {
    "hidden": 200, "embed": 200, "bptt": 35, "batch": 20, "lr": 20.0, "dropout": 0.2,
    "dropout_input": 0.2, "dropout_output": 0.2, "tied": True,
}  # fmt: skip

# what may differ when a run is resumed; anything else would make it another run
FREE = ("corpus", "steps", "minutes", "device", "backend")


@dataclass(frozen=True)
class Config:
    """A training run. The defaults are a demonstration of bytes for two CPU cores.

    Args:
        task: "bytes" or "words".
        corpus: a file or folder; by default the sources of the running Python's standard library,
            and for words their documentation strings.
        model: whose layers: "openrnn", or "torch" for torch.nn's, to compare with.
        cell: the key of a cell in `openrnn.cells`, or "path.py:name" for one of the user's own.
        batch: B, parallel streams over all processes.
        bptt: T, the symbols of one step; the state is carried on to the next, gradients are not.
        dropout: between layers; of words one mask for all steps of time.
        dropout_input, dropout_output: below the first layer and above the last, likewise.
        dropout_embedding: of whole words of the vocabulary.
        dropout_weight: of single recurrent weights, drawn once a step of training.
        activation, temporal: weights of the penalties on outputs and on their changes in time.
        tied: the last layer is as wide as the embedding, whose matrix also gives the scores.
        vocabulary: the most words, `<unk>` and `<eos>` among them.
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
    task: str = "bytes"
    dropout_input: float = 0.0
    dropout_output: float = 0.0
    dropout_embedding: float = 0.0
    dropout_weight: float = 0.0
    activation: float = 0.0
    temporal: float = 0.0
    tied: bool = False
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        self._check_counts()
        self._check_shares()
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr must be a positive number, got {self.lr}")
        for name, valid in (
            ("task", tuple(TASKS)),
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
        if self.model == "torch" and self.dropout_weight:
            raise ValueError(f"model torch has no weight dropout, got {self.dropout_weight}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be in [0, 2**63), got {self.seed}")
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("a run ends after either steps or minutes: give one of them")
        if self.minutes is not None and not (math.isfinite(self.minutes) and self.minutes > 0):
            raise ValueError(f"minutes must be a positive number, got {self.minutes}")

    def _check_types(self) -> None:
        """Checks every field: those of a checkpoint's JSON may be anything."""
        kinds = (
            (INTEGERS, int, "an integer"), (NUMBERS, float, "a number"), (TEXTS, str, "text"),
            (FLAGS, bool, "true or false"),
        )  # fmt: skip
        for names, kind, wanted in kinds:
            for name in names:
                value = getattr(self, name)
                if value is None and name in OPTIONAL:
                    continue
                fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
                if not fits or isinstance(value, bool) != (kind is bool):
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
        if self.vocabulary is not None and not 3 <= self.vocabulary < LARGEST:
            raise ValueError(f"vocabulary must be from 3 to 2**31, got {self.vocabulary}")

    def _check_shares(self) -> None:
        """Checks what regularises, and that bytes have nothing of it that is for words."""
        for name in DROPOUTS:
            share = getattr(self, name)
            if not 0 <= share <= 1:
                raise ValueError(f"{name} must be a probability in [0, 1], got {share}")
        for name in PENALTIES:
            weight = getattr(self, name)
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"{name} must be a number, 0 or greater, got {weight}")
        for name in OF_WORDS if self.task == "bytes" else ():
            if getattr(self, name) != Config.__dataclass_fields__[name].default:
                raise ValueError(f"{name} is an option of task words, got task bytes")

    @classmethod
    def make(cls, given: Mapping[str, object]) -> "Config":
        """The defaults of the task with what was given; `MINUTES` where no budget was."""
        if given.get("task") == "words":
            given = {**WORDS, **given}
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
                flag = name.replace("_", "-")
                raise CheckpointError(
                    f"the run to resume has --{flag} {mine[name]}, got --{flag} {value}: "
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
