"""What an object file calls and does not have, by its symbol table."""

import struct

_SYMBOLS = 2  # SHT_SYMTAB of the ELF specification


def undefined(code: bytes) -> list[str] | None:
    """The names of undefined symbols; None for any format but 64-bit little-endian ELF."""
    if code[:6] != b"\x7fELF\x02\x01":
        return None
    (table,) = struct.unpack_from("<Q", code, 0x28)
    size, count = struct.unpack_from("<HH", code, 0x3A)
    # name, type, flags, address, offset, size, link
    sections = [struct.unpack_from("<IIQQQQI", code, table + i * size) for i in range(count)]
    found = []
    for _, kind, _, _, start, length, link in sections:
        if kind != _SYMBOLS:
            continue
        strings = sections[link][4]
        for at in range(start, start + length, 24):
            name, _, _, section = struct.unpack_from("<IBBH", code, at)
            if section == 0 and name:
                end = code.index(0, strings + name)
                found.append(code[strings + name : end].decode())
    return [name for name in found if name != "_GLOBAL_OFFSET_TABLE_"]  # the linker's own
