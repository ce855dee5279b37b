"""Results as TensorBoard scalars: times, ratios, memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrnn.bench.ratios import lines_of, peers_of, step_us
from openrnn.bench.record import Machine, Measurement
from openrnn.errors import OpenRNNError


def writer_of(folder: Path) -> Any:
    """A TensorBoard writer.

    Raises:
        OpenRNNError: the package is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise OpenRNNError(
            "--tensorboard needs the package tensorboard: pip install tensorboard"
        ) from None
    return SummaryWriter(str(folder))


def write(results: Sequence[Measurement], machine: Machine, writer: Any) -> None:
    """One scalar for each time, ratio and peak, and a text on the machine."""
    lines = lines_of(results)
    for line in lines:
        where = f"{line.row.name}/{line.precision}/{line.mode}"
        for engine, result in line.results.items():
            if result.us is not None:
                writer.add_scalar(f"us a step/{where}/{engine}", step_us(result), 0)
            if result.memory_mib is not None:
                writer.add_scalar(f"MiB/{where}/{engine}", result.memory_mib, 0)
        for peer in peers_of([line]):
            pair = line.pair(peer)
            if pair is not None:
                writer.add_scalar(f"ratio/{where}/{peer}", pair.ratio, 0)
    writer.add_text("machine", "\n\n".join(f"{name} {text}" for name, text in machine.items()))
    writer.close()
