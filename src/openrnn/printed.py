"""What a function prints and returns: `print` of it prints nothing twice."""

from typing import TypeVar

Self = TypeVar("Self", bound="Printed")


class Printed:
    """A result for a person to read.

    `text` is all of it. `str` is the same, but where the function that made the result printed it
    already: there `str` is the short form, `repr`.
    """

    _was_printed = False

    @property
    def text(self) -> str:
        """All of it, in lines."""
        raise NotImplementedError

    def __str__(self) -> str:
        return repr(self) if self._was_printed else self.text

    def printed(self: Self, quiet: bool = False) -> Self:
        """Prints the text, unless quiet; returns itself."""
        if not quiet:
            print(self.text)  # what such functions are for
            object.__setattr__(self, "_was_printed", True)  # of dataclasses that are frozen
        return self
