"""The regions in which cuDNN is faster than our kernels, from measured results.

Our kernels and cuDNN's best correct algorithm, or torch.nn's choice, both from CUDA graphs: the
suite `fused` of `openrnn bench`. They are printed as lines of `tuning/choice.py`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from openrnn.bench.ratios import Line, lines_of
from openrnn.bench.record import Measurement
from openrnn.bench.task import PRECISIONS
from openrnn.tuning.choice import CudnnRegion

MAX_TIME_RATIO = 0.95  # of our time that cuDNN takes at most in a region
STEPS = 256  # of results with several T the one nearest to this counts
PEERS = ("cudnn-graph", "graph")
Point = tuple[str, str, str, int, int]  # cell, precision, mode, H, B


@dataclass(frozen=True)
class MeasuredRegion:
    """A region, and the shares of our time that were measured in it."""

    region: CudnnRegion
    shares: tuple[float, ...]

    def __str__(self) -> str:
        """As `choice.CUDNN_FASTER` has it."""
        region, dtype = self.region, str(self.region.dtype)
        cells, grads = map(repr, (region.cells, region.grads))
        low, high = min(self.shares), max(self.shares)
        shares = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
        return (
            f"CudnnRegion({cells}, {dtype}, {region.hidden}, {region.batch}, {grads}),  # {shares}"
        )


def regions_of(results: Iterable[Measurement]) -> list[MeasuredRegion]:
    """Around each measured H and B where cuDNN wins.

    Between two measured H the border lies halfway; B is a class that ends at the measured one;
    nothing is said beyond what was measured. Cells and modes with the same region share a line.
    """
    shares = _shares([line for line in lines_of(results) if _plain(line)])
    found: dict[tuple[str, tuple[int, int], tuple[int, int]], dict[tuple[str, str], float]] = {}
    for (cell, precision, mode, hidden, batch), share in shares.items():
        if share > MAX_TIME_RATIO:
            continue
        like = [key for key in shares if key[:3] == (cell, precision, mode)]
        span = _halfway(hidden, sorted({key[3] for key in like}))
        below = [key[4] for key in like if key[3] == hidden and key[4] < batch]
        rows = (max(below, default=batch - 1) + 1, batch)
        found.setdefault((precision, span, rows), {})[cell, mode] = share
    regions = []
    for (precision, span, rows), kinds in found.items():
        by_grads: dict[tuple[bool, ...], list[str]] = {}
        for cell in dict.fromkeys(cell for cell, _ in kinds):
            grads = tuple(
                mode == "training" for mode in ("forward", "training") if (cell, mode) in kinds
            )
            by_grads.setdefault(grads, []).append(cell)
        for grads, cells in by_grads.items():
            region = CudnnRegion(tuple(cells), PRECISIONS[precision].dtype, span, rows, grads)
            mine = tuple(share for (cell, _), share in kinds.items() if cell in cells)
            regions.append(MeasuredRegion(region, mine))
    return regions


def _plain(line: Line) -> bool:
    """One layer and direction, in a precision that the fused backend has."""
    row = line.row
    special = row.lengths or row.resets or row.bidirectional or row.layers > 1 or row.states
    precision = PRECISIONS[line.precision]
    known = precision.dtype != torch.float64 and precision.products == "tf32"
    return known and not special and line.mode in ("forward", "training")


def _shares(lines: Sequence[Line]) -> dict[Point, float]:
    """The fastest peer's time over ours."""
    found: dict[Point, tuple[int, float]] = {}
    for line in lines:
        ratios = [pair.ratio for peer in PEERS if (pair := line.pair(peer))]
        if not ratios:
            continue
        row = line.row
        point = row.cell, line.precision, line.mode, row.hidden, row.batch
        far = abs(row.steps - STEPS)
        if point not in found or far < found[point][0]:
            found[point] = far, min(ratios)
    return {point: share for point, (_, share) in found.items()}


def _halfway(size: int, sizes: Sequence[int]) -> tuple[int, int]:
    index = sizes.index(size)
    low = int(fmean(sizes[index - 1 : index + 1])) if index else size
    high = int(fmean(sizes[index : index + 2])) if index + 1 < len(sizes) else size
    return low, high
