"""What an object file calls and does not have, by its symbol table."""

import struct

from openrnn import elf

_SYMBOLS = 2  # SHT_SYMTAB: the kind of the section that has all symbols
_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size


def undefined(code: bytes) -> list[str] | None:
    """The names of undefined symbols; None for any format but 64-bit little-endian ELF."""
    if not code.startswith(elf.MAGIC):
        return None
    found, sections = [], elf.sections(code)
    for table in sections:
        if table.kind == _SYMBOLS:
            strings = sections[table.link].start
            for at in range(table.start, table.start + table.size, _SYMBOL.size):
                name, _, _, section, _, _ = _SYMBOL.unpack_from(code, at)
                if section == 0 and name:
                    found.append(elf.text(code, strings + name))
    return [name for name in found if name != "_GLOBAL_OFFSET_TABLE_"]  # the linker's own
