"""How threads share a run: the tiles of the batch, and the teams that take them, by a model.

A run waits for its slowest thread. The model adds up what that does: its products at the rate of a
core, or of the cache that its part of a matrix fits in; barriers; and, in backward, memory for the
sums of gradients of each team. Its constants are rounded figures of an AMD EPYC (Zen 3 and 4) and
an Intel Xeon (Sapphire Rapids); they are the same everywhere, so that one number of threads gives
the same bits on every processor with the same vectors.
"""

from collections.abc import Iterator
from typing import NamedTuple

from openrnn.kernels.cpu.layout import CACHE_BYTES, MOST_ROWS, ONE_STEP_ROWS, Layout
from openrnn.memo import memo

# what a core does in a microsecond: float32 multiply-adds, and bytes that it reads from its own
# cache, which holds CACHE_BYTES, and from a cache that cores share
RATE, NEAR_BYTES, FAR_BYTES = 50_000, 65_000, 12_000
# microseconds that a byte of another team's sums of gradients takes
SUM_US = 6e-5
# microseconds to start a parallel region, and more for each thread of torch's
REGION_US, REGION_THREAD_US = 4.0, 0.2
# microseconds of a barrier, and more for each thread of the team
BARRIER_US, BARRIER_THREAD_US = 0.6, 0.05
# barriers of a step: three in backward, and two for the products of a chunk, as if it had one step
BARRIERS = {False: 1, True: 5}


class Sharing(NamedTuple):
    """How a run is shared.

    Attributes:
        rows: of a tile.
        teams: take the tiles in turn.
        size: threads of a team, which share each of its tiles.
    """

    rows: int
    teams: int
    size: int


@memo(4096)
def sharing(
    layout: Layout, backward: bool, steps: int, batch: int, threads: int, shares: bool
) -> Sharing:
    """The quickest way by the model, of equal ones that with the fewest threads.

    Args:
        threads: that a run may have.
        shares: threads may share a tile.
    """

    def rank(way: Sharing) -> tuple[float, int]:
        return run_time(layout, backward, steps, batch, threads, way), way.teams * way.size

    most = ONE_STEP_ROWS if backward and steps == 1 else MOST_ROWS
    return min(_ways(layout, batch, threads, shares, most), key=rank)


def _ways(layout: Layout, batch: int, threads: int, shares: bool, most: int) -> Iterator[Sharing]:
    """All ways but those with more teams or threads than others of the same rows and panels."""
    sizes = _divisions(layout.padded // layout.panel, threads) if shares else [1]
    for teams in _divisions(batch, threads):
        for size in sizes:
            if teams * size <= threads:
                yield Sharing(_tile_rows(-(-batch // teams), most), teams, size)


def _divisions(count: int, most: int) -> list[int]:
    """The least numbers of parts, up to `most`, that make the largest part of `count` smaller."""
    parts = range(1, min(count, most) + 1)
    return [part for part in parts if part == -(-count // -(-count // part))] or [1]


def _tile_rows(rows: int, most: int) -> int:
    """Rows of a tile, where a team takes so many rows: equal tiles of so many at most."""
    return -(-rows // max(1, -(-rows // most)))


def run_time(
    layout: Layout, backward: bool, steps: int, batch: int, threads: int, way: Sharing
) -> float:
    """Microseconds of a run, but for the cell."""
    rows, tiles = way.rows, -(-batch // (way.rows * way.teams)) if batch else 0
    panels = max(1, layout.padded // layout.panel)
    share = -(-panels // way.size) / panels
    recurrent, inputs = (
        layout.columns * width * share for width in (layout.outputs, layout.inputs)
    )
    rate = RATE * 4 / layout.size
    near = recurrent * layout.size <= CACHE_BYTES
    a_row = recurrent / rate
    from_memory = recurrent * layout.size / (NEAR_BYTES if near else FAR_BYTES)
    of_chunk = (recurrent + 2 * inputs if backward else inputs) / rate
    step = max(rows * a_row, from_memory) + rows * of_chunk
    if way.size > 1:
        step += BARRIERS[backward] * (BARRIER_US + BARRIER_THREAD_US * way.size)
    whole = steps * tiles * step
    if backward:
        whole += (way.teams - 1) * sum(layout.sums) * layout.size * SUM_US
    if way.teams * way.size > 1:
        whole += REGION_US + REGION_THREAD_US * threads
    return whole
