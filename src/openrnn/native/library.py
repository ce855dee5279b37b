"""C libraries whose functions return a status: what is called is declared, each status checked."""

import ctypes
from collections.abc import Mapping
from typing import Any

from openrnn.errors import LibraryError

# one letter an argument of a signature
TYPES = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int32,
    "z": ctypes.c_size_t,
    "u": ctypes.c_uint64,
    "l": ctypes.c_int64,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}


class Library:
    """The functions of one library, as attributes; each raises LibraryError where it fails."""

    title: str

    def declare(self, dll: ctypes.CDLL, signatures: Mapping[str, str]) -> None:
        """Makes an attribute of each function, by the letters of its arguments."""
        for name, letters in signatures.items():
            function = getattr(dll, name)
            function.argtypes = [TYPES[letter] for letter in letters]
            function.restype = ctypes.c_int
            function.errcheck = self._check
            setattr(self, name, function)

    def error(self, call: str, status: int) -> LibraryError:
        """What a call raises for a status that is not 0, in the library's own words."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.title}'s {name} has no row in SIGNATURES")

    def _check(self, status: int, function: Any, arguments: Any) -> int:
        if status:
            raise self.error(function.__name__, status)
        return status
