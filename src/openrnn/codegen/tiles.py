"""Rows of a batch and units of a layer go by tiles of 8, of which the last may not be full."""


def tiles_of(count: int) -> int:
    """How many tiles hold so many rows or units."""
    return (count + 7) // 8


def whole_tiles(count: int) -> int:
    """A number of rows or units, rounded up to whole tiles."""
    return 8 * tiles_of(count)
