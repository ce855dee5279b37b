"""What float32 layers miss float64 by, beside torch.nn's: `python benchmarks/precision.py`.

Relative errors of the outputs of 50 steps, whole tensors; then ours with first and fresh states
that are large, where products that read h as float16 have least of its exponent left.
"""

import argparse

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import openrnn

ROWS = (("LSTM", 64, 16), ("LSTM", 1024, 64), ("LSTM", 1500, 20), ("LSTM", 2048, 16),
        ("GRU", 256, 64), ("GRU", 2400, 8))  # fmt: skip
STEPS, INPUTS, SCALES = 50, 64, (1.0, 1e3, 1e6)


def missed(found: Tensor, exact: Tensor) -> str:
    """The error's norm as a share of the exact norm."""
    return f"{float((found - exact).norm() / exact.norm()):.3e}"


def pair(cell: str, hidden: int, device: str) -> tuple[nn.Module, nn.Module]:
    """Our layer, and the reference in float64 with the same weights."""
    ours = getattr(openrnn, cell)(INPUTS, hidden, device=device)
    exact = getattr(openrnn, cell)(INPUTS, hidden, device=device, backend="reference").double()
    exact.load_state_dict(ours.state_dict())
    return ours, exact


@torch.no_grad()
def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device: str = parser.parse_args().device
    torch.manual_seed(0)
    table = Table("layer", "B", "ours", "torch.nn")
    for cell, hidden, batch in ROWS:
        ours, exact = pair(cell, hidden, device)
        theirs = getattr(nn, cell)(INPUTS, hidden, device=device)
        theirs.load_state_dict(ours.state_dict())
        x = torch.randn(STEPS, batch, INPUTS, device=device)
        wanted = exact(x.double())[0]
        errors = missed(ours(x)[0], wanted), missed(theirs(x)[0], wanted)
        table.add_row(f"{cell} {hidden}", str(batch), *errors)
    large = Table("states of", "LSTM 64, resets at 20%")
    ours, exact = pair("LSTM", 64, device)
    x = torch.randn(STEPS, 7, INPUTS, device=device)
    reset = torch.rand(STEPS, 7, device=device) < 0.2
    for scale in SCALES:
        first, fresh = (
            [scale * torch.randn(1, 7, 64, device=device) for _ in "hc"] for _ in range(2)
        )
        wanted = exact(
            x.double(), tuple(s.double() for s in first), reset=reset,
            reset_state=tuple(s.double() for s in fresh),
        )[0]  # fmt: skip
        found = ours(x, tuple(first), reset=reset, reset_state=tuple(fresh))[0]
        large.add_row(f"{scale:g}", missed(found, wanted))
    Console(width=100).print(table, large)


if __name__ == "__main__":
    main()
