"""Sections of object files in the ELF format, 64 bits, little-endian: cubins, and code for linkers.

The layout is that of the System V ABI, https://refspecs.linuxfoundation.org/elf/gabi4+/contents.html.
"""

import struct
from typing import NamedTuple

MAGIC = b"\x7fELF\x02\x01"  # what such a file begins with


class Section(NamedTuple):
    """A section: its bytes begin at `start`; `link` is the number of one that belongs to it."""

    name: str
    kind: int
    start: int
    size: int
    link: int


def sections(code: bytes) -> list[Section]:
    """All sections, by number."""
    (table,) = struct.unpack_from("<Q", code, 0x28)
    entry, count, names = struct.unpack_from("<HHH", code, 0x3A)
    # name, type, flags, address, offset, size, link
    rows = [struct.unpack_from("<IIQQQQI", code, table + i * entry) for i in range(count)]
    strings = rows[names][4]
    return [
        Section(text(code, strings + name), kind, start, size, link)
        for name, kind, _, _, start, size, link in rows
    ]


def text(code: bytes, at: int) -> str:
    """The string that begins there."""
    return code[at : code.index(0, at)].decode()
