"""How a draw may end, and what counts as a sentence of ours."""

import dis
import re
import traceback
from dataclasses import dataclass
from pathlib import Path

import openrnn
from openrnn.errors import NoBackendError

PACKAGE = str(Path(openrnn.__file__).parent)
RIGHT, REFUSED, FAULT, DISCARDED = "right", "refused", "fault", "discarded"

# of torch's own insides, and of bugs
FOREIGN = re.compile(
    r"internal|aten[.:]|openrnn[.:]+(forward|backward)\b|torch\._C|please (report|file)|INTERNAL"
    r"|object has no attribute|'NoneType'|__torch_dispatch__|functorch|dispatch key|0x[0-9a-f]{6}",
    re.IGNORECASE,
)


class Wrong(Exception):
    """A fault that a check has found, in words."""


class Unfit(Exception):
    """A draw that cannot be judged, as its tensors cannot be made."""


@dataclass(frozen=True)
class Outcome:
    """How a draw ended; `signature` groups faults of one kind, `plan` says what was drawn."""

    kind: str
    index: int
    verdict: str
    words: str = ""
    signature: str = ""
    plan: str = ""
    odd: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.kind}:{self.index} {self.verdict} {self.words}"


def first_line(error: BaseException | None) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def signature(*words: str) -> str:
    """Words without what differs from draw to draw: numbers, sizes, dtypes, names of the drawn."""
    text = ": ".join(word for word in words if word)
    text = re.sub(r"\(line \d+\)", "(line)", text)
    text = re.sub(r"torch\.(?:u?int|b?float|complex|bool|half)\w*", "DTYPE", text)
    text = re.sub(r"\[[-\d, ]*\]|\([-\d, ]*\)|torch\.Size\S*", "SHAPE", text)
    text = re.sub(r"cell '[^']*'", "cell", text)
    return re.sub(r"-?\d+(\.\d+)?(e[-+]?\d+)?|\bnan\b|\binf\b", "N", text)[:240]


def place(error: BaseException) -> str:
    """The last line of ours that an error came through, and the last one of all."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(PACKAGE)]
    if not ours:
        return ""
    last = ours[-1]
    where = f"{last.filename.removeprefix(PACKAGE)[1:]}:{last.name}"
    return where if frames[-1] is last else f"{where} -> {Path(frames[-1].filename).name}"


def _raised_by_us(error: BaseException) -> bool:
    """Whether a `raise` of ours made it, and not an operator of torch that our line calls."""
    trail = error.__traceback__
    while trail is not None and trail.tb_next is not None:
        trail = trail.tb_next
    if trail is None or not trail.tb_frame.f_code.co_filename.startswith(PACKAGE):
        return False
    return trail.tb_frame.f_code.co_code[trail.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def not_a_sentence(error: BaseException) -> str | None:
    """Why an error is not one sentence of ours; None where it is."""
    if not isinstance(error, (ValueError, TypeError, RuntimeError)):
        return f"{type(error).__name__} is not for users"
    if not _raised_by_us(error):
        return "not raised by us"
    lines = str(error).strip().splitlines()
    if not lines or (len(lines) > 1 and not isinstance(error, NoBackendError)):
        return f"{len(lines)} lines"
    said = str(error)
    if error.__cause__ is not None:  # whose words are quoted
        said = said.replace(first_line(error.__cause__), "")
    if FOREIGN.search(said) and not isinstance(error, NoBackendError):
        return "names insides"
    return None
