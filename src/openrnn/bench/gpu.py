"""What nvidia-smi says of the GPU."""

import subprocess
from collections.abc import Sequence

import torch


def ask(query: str) -> list[str]:
    """The fields of a query for torch's current device; none without nvidia-smi."""
    if not torch.cuda.is_available():
        return []
    # by its name, as CUDA_VISIBLE_DEVICES changes torch's numbers and not nvidia-smi's
    which = f"--id=GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    shown = output(["nvidia-smi", which, f"--query-gpu={query}", "--format=csv,noheader"])
    return shown.split(", ") if shown else []


def clock() -> int | None:
    """The clock of the multiprocessors in MHz; None without nvidia-smi."""
    found = ask("clocks.sm")
    try:
        return int(found[0].split()[0])
    except (ValueError, IndexError):
        return None


def output(command: Sequence[str]) -> str:
    """What a program prints; nothing where it fails or is missing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
