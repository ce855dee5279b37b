"""What the gallery of tutorials looks like: their order, and a picture for those that draw none."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

ORDER = (
    "states_of_a_layer", "language_model", "policy_with_resets", "forecaster_with_lengths",
    "own_cell", "streaming", "audio_in_c", "from_keras", "to_onnx", "several_gpus",
    "find_what_is_slow",
)  # fmt: skip


class Order:
    """The key by which the gallery sorts scripts; one that `ORDER` lacks comes last."""

    def __init__(self, src_dir: str) -> None:
        self.folder = src_dir

    def __call__(self, filename: str) -> tuple[int, str]:
        name = Path(filename).stem
        return (ORDER.index(name) if name in ORDER else len(ORDER)), name

    def __repr__(self) -> str:
        return "<gallery_order.Order>"


def picture(path: Path) -> str:
    """Draws the recurrence itself, for tutorials without a plot; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"mathtext.fontset": "stix"}):
        figure = Figure(figsize=(4, 2.8), facecolor="white")
        figure.text(0.5, 0.5, "$h_t = f(x_t, h_{t-1})$", ha="center", va="center", fontsize=26,
                    color="#2a6fbb")  # fmt: skip
        figure.savefig(path, dpi=100, metadata={"Software": None})
    return str(path)
