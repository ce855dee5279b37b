"""What the suites, rows, engines and terms of `openrnn bench` mean: for `--list` and the page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from openrnn.bench.cases import BenchRow
from openrnn.bench.suites import SUITES, USERS_SUITES
from openrnn.bench.tables import Sheet, TableCell

GITHUB = "https://github.com"
NAMED = "T steps, B sequences, I inputs, H units of a layer"

# in names: H units, B sequences, T steps
ABOUT_SUITES = {
    "users": "networks that projects run; a row is named after its project (the default suite)",
    "deepbench": "sizes of Baidu's DeepBench, forward or training: CELL-H-bB-tT",
    "latency": "single steps, T = 1, as of decoders: step-CELL-H-bB; of policies that act: "
    "policy-bB, 512 units",
    "scaling": "one LSTM in which one size is doubled again and again: t-T, b-B, h-H, l-LAYERS",
    "resets-and-lengths": "three networks as they are (plain), with resets in 1, 3 or 10% of the "
    "steps, with lengths, and with lengths in both directions",
    "custom": "cells that torch.nn lacks, compared with a Python loop: CELL-H-bB",
    "fused": "one layer, at the sizes that our CUDA kernels are tuned for: CELL-H-bB",
    "cudnn": "the rows of users without resets, on our backend cudnn and by each of cuDNN's "
    "algorithms",
    "cpu": "one layer, at sizes whose time on a CPU goes to different things: CELL-H-bB-tT",
    "cells": "other cells, resets, lengths, and a layer whose backward recomputes its gates",
    "host": "calls in which the device has next to nothing to do, so that Python and launches "
    "take the time: CELL-tT",
    "precision": "errors of float32 layers against float64; states-S begins with states of size S",
    "loops": "the loop over time and the matrix products beside it; also for --profile",
    "stacks": "several layers, LAYERSxH, and both directions",
    "widths": "hidden sizes in decimal, LAYERSxH, and inputs of odd widths (i)",
    "int8": "inference with int8 weights on a CPU: CELL-H-bB-tT",
    "bf16-weights": "inference with bfloat16 weights on a CPU: CELL-H-bB-tT",
    "cpu-bf16": "one layer in bfloat16 on a CPU: CELL-H-bB-tT",
    "higher": "second derivatives, as of a gradient penalty: CELL-tT",
    "steps": "64 single steps, each from the states of the one before, from a CUDA graph all of "
    "them in one: a transducer's decoder (rnnt), policies that act, CELL-H-bB",
    "train": "openrnn train for a fixed time, with our layers and with those of torch.nn",
    "all": f"what users run: {', '.join(USERS_SUITES)}",
}


@dataclass(frozen=True)
class Origin:
    """Whose networks some rows of suite `users` are.

    Args:
        rows: patterns of their names.
        source: where the sizes come from.
    """

    rows: str
    what: str
    source: str

    def has(self, name: str) -> bool:
        """Whether a row is one of these."""
        return any(fnmatchcase(name, pattern) for pattern in self.rows.split())


ORIGINS = (
    Origin("isaac", "policy of a robot in Isaac Lab: 4096 robots at once, trained by rsl_rl",
           f"{GITHUB}/leggedrobotics/rsl_rl"),
    Origin("sb3", "recurrent PPO of Stable-Baselines3 contrib; 3% of the steps begin an episode",
           f"{GITHUB}/Stable-Baselines-Team/stable-baselines3-contrib"),
    Origin("sf", "policy of Sample Factory", f"{GITHUB}/alex-petrenko/sample-factory"),
    Origin("rllib", "policy of Ray RLlib with its default LSTM", f"{GITHUB}/ray-project/ray"),
    Origin("torchrl", "TorchRL's own benchmark of its LSTM; 3% of the steps begin an episode",
           f"{GITHUB}/pytorch/rl/pull/3816"),
    Origin("dreamer", "GRU of the size in DreamerV3's world model, without its layer norm",
           f"{GITHUB}/danijar/dreamerv3"),
    Origin("deepar-10", "forecasts by DeepAR, default sizes of pytorch-forecasting",
           f"{GITHUB}/sktime/pytorch-forecasting"),
    Origin("deepar-128", "forecasts by an LSTM of NeuralForecast's sizes",
           f"{GITHUB}/Nixtla/neuralforecast"),
    Origin("hydro-*", "a year of daily weather to river flow, by NeuralHydrology",
           f"{GITHUB}/neuralhydrology/neuralhydrology"),
    Origin("rnnt", "prediction network of a speech transducer (RNN-T) in NVIDIA NeMo, in training",
           f"{GITHUB}/NVIDIA/NeMo"),
    Origin("rnnt-step-*", "one step of the same network, as in decoding",
           f"{GITHUB}/NVIDIA/NeMo"),
    Origin("crdnn", "recurrent part of SpeechBrain's CRDNN speech encoder",
           f"{GITHUB}/speechbrain/speechbrain"),
    Origin("tacotron-step", "one step of the decoder of Tacotron 2 (speech synthesis)",
           f"{GITHUB}/NVIDIA/tacotron2"),
    Origin("nam nam-*", "neural-amp-modeler: a model of a guitar amplifier, sample by sample",
           f"{GITHUB}/sdatkinson/neural-amp-modeler"),
    Origin("sepa", "separation of sound sources by a dual-path RNN: many short sequences at once",
           "https://arxiv.org/abs/1910.06379"),
    Origin("lm-650 lm-1500", "medium and large language model of Zaremba and others",
           "https://arxiv.org/abs/1409.2329"),
    Origin("lm-1150", "AWD-LSTM language model", f"{GITHUB}/salesforce/awd-lstm-lm"),
    Origin("fastrnns", "PyTorch's own benchmark of recurrent layers",
           f"{GITHUB}/pytorch/pytorch/tree/main/benchmarks/fastrnns"),
    Origin("haste-*", "sizes of Haste's own benchmark, named haste-B-H",
           f"{GITHUB}/lmnt-com/haste"),
)  # fmt: skip

ABOUT_ENGINES = {
    "torch": "torch.nn's layer, called as its users call it",
    "graph": "torch.nn's layer, replayed from a CUDA graph",
    "cudnn": "cuDNN, called directly by each of its algorithms; the fastest right one counts",
    "cudnn-graph": "the same, replayed from a CUDA graph, without the one algorithm that none "
    "captures (persist_dynamic)",
    "packed": "torch.nn's layer on a PackedSequence, for rows with lengths",
    "loop": "torch.nn's layer called once a step, for rows with resets",
    "eager": "a cell in a Python loop over time, for cells that torch.nn lacks",
    "compiled": "the same loop, its step compiled by torch.compile",
    "flashrnn": "the package FlashRNN, where it is installed",
    "torchrl": "the Triton kernels of the package TorchRL, where it is installed",
    "onnxruntime": "ONNX Runtime on a CPU, with the layer exported by torch.onnx.export",
    "float32": "our layer in float32, for rows with int8 or bfloat16 weights",
    "recompute": "our layer with recompute='gates': less memory, more work",
    "reference": "our layer in plain torch, step by step",
    "cudnn-standard": "cuDNN's algorithm standard",
    "cudnn-persist-static": "cuDNN's algorithm persist_static",
    "cudnn-persist-dynamic": "cuDNN's algorithm persist_dynamic",
    "cudnn-persist-static-small-h": "cuDNN's algorithm persist_static_small_h",
    "no-overlap": "our layer, with matrix products after its loops and never beside them",
    "two-chunks": "our layer, with matrix products beside its loops in two parts at most",
}

TERMS = {
    "as called": "timed from the user's call to the end of its work, Python and launches included",
    "from a CUDA graph": "both sides are recorded in a CUDA graph once and replayed, so that no "
    "Python and no single launches are timed; its host takes 4 to 7 microseconds for a replay, "
    "which hides how much less a single step of a small layer takes",
    "cuDNN's best algorithm": "cuDNN has several algorithms and torch.nn lets it choose; here each "
    "is called directly, and the fastest one with right results counts",
    "forward": "a call without gradients",
    "steps": "T calls of one step each, without gradients",
    "training": "a call, and the gradients of x and of every parameter",
    "ratio": "the other's time divided by ours: above 1 we are faster",
}


def origin_of(row: BenchRow) -> Origin | None:
    """Whose network a row of suite `users` is; None for rows of other suites."""
    mine = row.suite == "users"
    return next((origin for origin in ORIGINS if mine and origin.has(row.name)), None)


def suites_sheet() -> Sheet:
    """A line for each suite."""
    counts = {name: str(len(rows)) for name, rows in SUITES.items()}
    rows = [(name, counts.get(name, "-"), about) for name, about in ABOUT_SUITES.items()]
    return _sheet("suites, for --suite", ("suite", "rows", "what it times"), rows)


def rows_sheet(rows: Sequence[BenchRow]) -> Sheet:
    """A line for each row: what it computes, and whose network it is where that is known."""
    heads = ("row", "cell", "T x B x I x H", "whose network")
    return _sheet(f"rows, for --rows; {NAMED}", heads, [*_rows(rows)])


def origins_sheet() -> Sheet:
    """The rows of suite `users` by their patterns, with links of Markdown."""
    found = [
        (", ".join(origin.rows.split()), f"{origin.what} ([source]({origin.source}))")
        for origin in ORIGINS
    ]  # fmt: skip
    return _sheet("", ("row", "whose network"), found)


def engines_sheet() -> Sheet:
    """A line for each engine that ours is compared with."""
    return _sheet("engines, for --against", ("engine", "what it is"), [*ABOUT_ENGINES.items()])


def terms_sheet() -> Sheet:
    """What the terms of the tables mean."""
    return _sheet("terms", ("term", "meaning"), [*TERMS.items()])


def _rows(rows: Sequence[BenchRow]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        origin = origin_of(row)
        whose = f"{origin.what}; {origin.source}" if origin else "-"
        yield row.name, row.cell, row.shape, whose


def _sheet(title: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Sheet:
    numbers = tuple(head == "rows" and "suite" in heads for head in heads)
    return Sheet(title, heads, numbers, tuple(tuple(map(TableCell, row)) for row in rows))
