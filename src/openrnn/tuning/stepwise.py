"""Loops that hold no R: each step is a GEMM, then a launch of the cell.

They run at any H and on any device. A GEMM also shares R among all rows of a batch, where a loop
that holds R takes some rows after the others.
"""

from openrnn.codegen.config import (
    SIZES,
    BackwardConfig,
    ForwardConfig,
    StepwiseBackwardConfig,
    StepwiseForwardConfig,
    saved_values,
)
from openrnn.codegen.cuda import planes
from openrnn.codegen.tiles import tiles_of
from openrnn.codegen.trace import Traced

WARPS = (1, 2, 4, 8)  # of a block: the fewest with which one has all rows
# of the time of a loop that holds all of R, at most, that one by GEMMs must take to be chosen
MAX_TIME_RATIO = 0.85
# The model's constants were fitted on an H100 in 4c24de6; the times behind them are in no file.
LAUNCHES = 5.0  # us of a step beyond products and memory
STEP_FLOP_PER_US = {2: 5e8, 4: 3e8}  # of products of a step, by bytes of a value
R_PER_US, CELLS_PER_US = 2.87e6, 2.5e6  # bytes of R, and of what cells read and write


def config(kind: str, units: int, batch: int) -> ForwardConfig | BackwardConfig:
    """The kernel of such a loop; `kind`: "forward" or "backward"."""
    made = StepwiseForwardConfig if kind == "forward" else StepwiseBackwardConfig
    tiles = tiles_of(batch)
    warps = next((warps for warps in WARPS if warps >= tiles), WARPS[-1])
    return made(units, 1, warps, 0, 1, 1, 0)


def step_us(kind: str, cell: Traced, dtype: str, units: int, batch: int) -> float:
    """The model's time of one step of the whole batch, in microseconds."""
    size, gates = SIZES[dtype], len(cell.gates)
    values = gates * units * units
    product = max(2.0 * batch * values / STEP_FLOP_PER_US[size], values * size / R_PER_US)
    states, saved = 8 * len(cell.states), saved_values(cell) * size  # read and written
    if kind == "forward":
        bytes_ = gates * (4 + size) + states + 2 * size + saved
    else:
        bytes_ = 4 + states + saved + (1 + len(planes(cell))) * size
    return LAUNCHES + product + batch * units * bytes_ / CELLS_PER_US
