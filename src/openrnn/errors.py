"""What OpenRNN raises on purpose beyond ValueError, how it warns, and how messages show a value."""

import sys
import warnings
from reprlib import Repr

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 60


def shown(value: object) -> str:
    """Any value in a message: short, in one line and in printable characters."""
    return _SHORT.repr(value)


def kind_of(value: object) -> str:
    """The class of a value in a message; torch's are told from ours of the same name."""
    kind = type(value)
    return f"torch's {kind.__name__}" if kind.__module__.split(".")[0] == "torch" else kind.__name__


def counted(number: int, word: str) -> str:
    """How many of a thing in a message: 1 state, 2 states."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns about the line outside of this package, and of torch, from which it was called."""
    frame, level = sys._getframe(1), 2
    while frame.f_globals.get("__name__", "").split(".")[0] in ("openrnn", "torch"):
        if frame.f_back is None:
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


class OpenRNNError(Exception):
    """The root of this package's own errors."""


class NoBackendError(OpenRNNError, RuntimeError):
    """A right call that no backend takes.

    `reasons` maps each backend's name to the reasons for which it refused; the message lists them,
    and ends with `advice`, where there is any.
    """

    def __init__(self, problem: str, reasons: dict[str, list[str]], advice: str = "") -> None:
        self.problem, self.reasons, self.advice = problem, reasons, advice
        lines = [f"  {name}: {'; '.join(why)}" for name, why in reasons.items()]
        lines += [advice] if advice else []
        super().__init__("\n".join([f"no backend takes {problem}", *lines]))

    def __reduce__(self) -> tuple[type, tuple[str, dict[str, list[str]], str]]:
        return type(self), (self.problem, self.reasons, self.advice)


class LibraryError(OpenRNNError, RuntimeError):
    """A native library that is missing or refused a call; the message has its own words.

    `call` names the function, `status` is the library's name for the failure, `detail` its text.
    """

    def __init__(self, call: str, status: str, detail: str = "") -> None:
        self.call, self.status, self.detail = call, status, detail
        super().__init__(f"{call}: {status}" + (f": {detail}" if detail else ""))

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.call, self.status, self.detail)


class CellError(OpenRNNError, ValueError):
    """A cell that cannot be used: not elementwise, a wrong signature, an unknown name."""


class ExportError(OpenRNNError, RuntimeError):
    """A layer that `export_native` cannot write; the message says what failed, and how."""


class CheckpointError(OpenRNNError, ValueError):
    """A checkpoint that is damaged, foreign, or does not fit the run that wants it."""


class CorpusError(OpenRNNError, ValueError):
    """A corpus that is missing, empty or too small for the run that wants it."""
