"""The rows, as data: who runs what. Sizes are steps, batch, inputs, hidden, layers."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from openrnn.bench.cases import OWN_CELL, BenchRow, doubled
from openrnn.bench.engines import ONE_ALGORITHM, USERS, WAYS
from openrnn.bench.modes import HOST_MODES

EPISODES = 0.03  # share of first steps in a batch of rollouts
BF16, FP16 = "bfloat16", "float16"

_USERS = [
    # reinforcement learning: Isaac Lab, stable-baselines3, sample-factory, RLlib, TorchRL, Dreamer
    BenchRow("isaac", "lstm", 24, 4096, 64, 256),
    BenchRow("sb3", "lstm", 128, 32, 64, 256, resets=EPISODES),
    BenchRow("sf", "gru", 32, 256, 512, 512),
    BenchRow("rllib", "lstm", 20, 200, 256, 256),
    BenchRow("torchrl", "lstm", 128, 128, 256, 256, resets=EPISODES),
    BenchRow("dreamer", "gru", 64, 16, 512, 512, dtype=BF16),
    # forecasting: DeepAR, neuralhydrology
    BenchRow("deepar-10", "lstm", 60, 64, 10, 10, 2),
    BenchRow("deepar-128", "lstm", 168, 1024, 32, 128, 2),
    BenchRow("hydro-128", "lstm", 365, 256, 32, 128),
    BenchRow("hydro-256", "lstm", 365, 256, 32, 256),
    # speech: RNN-T, CRDNN, Tacotron's decoder
    BenchRow("rnnt", "lstm", 100, 64, 640, 640, dtype=BF16),
    BenchRow("rnnt-step-1", "lstm", 1, 1, 640, 640, dtype=BF16),
    BenchRow("rnnt-step-32", "lstm", 1, 32, 640, 640, dtype=BF16),
    BenchRow("crdnn", "lstm", 500, 16, 1024, 1024, 4, bidirectional=True),
    BenchRow("tacotron-step", "lstm", 1, 64, 1024, 1024),
    # audio: neural amp modeler, source separation
    BenchRow("nam", "lstm", 8192, 16, 1, 18, 3),
    BenchRow("nam-long", "lstm", 65536, 4, 1, 24),
    BenchRow("sepa", "lstm", 250, 4000, 128, 128, bidirectional=True),
    # language: AWD-LSTM and before
    BenchRow("lm-650", "lstm", 70, 20, 650, 650),
    BenchRow("lm-1150", "lstm", 70, 80, 1150, 1150),
    BenchRow("lm-1500", "lstm", 70, 20, 1500, 1500),
    # PyTorch's own benchmark, and haste's grid
    BenchRow("fastrnns", "lstm", 100, 64, 512, 512),
    *(
        BenchRow(f"haste-{batch}-{hidden}", "lstm", 100, batch, hidden, hidden)
        for batch in (1, 32, 64, 128)
        for hidden in doubled(64, 512)
    ),
]

# cell, steps, hidden sizes, batches of DeepBench's rnn_problems.h; here with the input product,
# which DeepBench leaves out
_DEEPBENCH_TRAINING = [
    ("rnn_relu", (50,), (1760, 2048, 2560), (16, 32, 64, 128)),
    ("lstm", (25,), (512, 1024, 2048, 4096), (16, 32, 64, 128)),
    ("lstm", (50,), (1536,), (8, 16, 32)),
    ("lstm", (150,), (256,), (16, 32, 64)),
    ("gru", (1500, 750, 375, 187), (2816, 2048, 1536, 2560), (32,)),
    ("gru", (1,), (512,), (32,)),
    ("gru", (1500,), (1024,), (32, 64)),
]
_DEEPBENCH_INFERENCE = [
    ("lstm", (25,), (512, 1024, 2048), (1, 2, 4)),
    ("lstm", (50,), (1536,), (1, 2, 4)),
    ("lstm", (150,), (256,), (1, 2, 4)),
    ("gru", (1500, 750, 375, 187), (2816, 2048, 1536, 2560), (1, 2, 4)),
    ("gru", (1,), (512,), (1, 2, 4)),
    ("gru", (1500,), (1024,), (1, 2, 4)),
]


def _deepbench() -> Iterable[BenchRow]:
    kinds = ((_DEEPBENCH_TRAINING, ("training",)), (_DEEPBENCH_INFERENCE, ("forward",)))
    for table, modes in kinds:
        for cell, every_steps, sizes, batches in table:
            for hidden in sizes:
                for steps in every_steps:
                    for batch in batches:
                        name = f"{cell}-{hidden}-b{batch}-t{steps}"
                        yield BenchRow(name, cell, steps, batch, hidden, hidden, modes=modes)


def _latency() -> Iterable[BenchRow]:
    for cell in ("lstm", "gru"):
        for hidden in (64, 256, 1024):
            for batch in (1, 4, 16, 32):
                yield BenchRow(f"step-{cell}-{hidden}-b{batch}", cell, 1, batch, hidden, hidden)
    for batch in (1, 16, 64, 256):
        yield BenchRow(f"policy-b{batch}", "lstm", 1, batch, 512, 512)


def _scaling() -> Iterable[BenchRow]:
    """One size doubled at a time from those of `base`, which belongs to every series."""
    base = BenchRow("base", "lstm", 128, 16, 256, 256)
    yield base
    every = [replace(base, name=f"t-{steps}", steps=steps) for steps in doubled(1, 4096)]
    every += [replace(base, name=f"b-{batch}", batch=batch) for batch in doubled(1, 1024)]
    every += [replace(base, name=f"h-{h}", hidden=h, inputs=h) for h in doubled(16, 2048)]
    every += [replace(base, name=f"l-{layers}", layers=layers) for layers in doubled(1, 8)]
    yield from (row for row in every if replace(row, name=base.name) != base)


def _resets_and_lengths() -> Iterable[BenchRow]:
    shapes = [("policy", "lstm", 128, 128, 256, 256), ("text", "lstm", 200, 64, 512, 512),
              ("series", "gru", 1024, 32, 128, 128)]  # fmt: skip
    for name, *sizes in shapes:
        base = BenchRow(name, *sizes)  # type: ignore[arg-type]  # a row's own order
        yield replace(base, name=f"{name}-plain")
        for percent in (1, 3, 10):
            yield replace(base, name=f"{name}-resets-{percent}", resets=percent / 100)
        yield replace(base, name=f"{name}-lengths", lengths=True)
        yield replace(base, name=f"{name}-lengths-both", lengths=True, bidirectional=True)


def _custom() -> Iterable[BenchRow]:
    cells = ("peephole_lstm", "coupled_lstm", "slstm", "mgu", "gru_reset_before")
    for cell in cells:
        for steps, batch, hidden in ((128, 64, 256), (512, 16, 128)):
            name = f"{cell.replace('_', '-')}-{hidden}-b{batch}"
            yield BenchRow(name, cell, steps, batch, hidden, hidden)


def _fused() -> Iterable[BenchRow]:
    """One layer of the cells and sizes that our CUDA kernels are tuned for."""
    for cell, hidden, batch in product(
        ("lstm", "gru"), (64, 128, 256, 512, 640, 1024), (1, 16, 64, 128, 256)
    ):
        yield BenchRow(f"{cell}-{hidden}-b{batch}", cell, 256, batch, hidden, hidden)
    for hidden, batch in product((64, 256, 1024, 1760), (1, 16, 64, 128)):
        yield BenchRow(f"rnn-tanh-{hidden}-b{batch}", "rnn_tanh", 256, batch, hidden, hidden)
    yield BenchRow("flashrnn", "lstm", 1024, 16, 768, 768)


def _stacks() -> Iterable[BenchRow]:
    """Layers and directions, and single layers too large for one launch of small blocks."""
    for layers, hidden, batch, steps in (
        (4, 512, 1, 512), (4, 512, 64, 128), (8, 256, 64, 256), (2, 1024, 64, 256),
        (1, 1024, 256, 256),
        # whose gate gradients in training are more than `chunks.LARGEST_WAVEFRONT`
        (4, 512, 16, 4000), (8, 512, 64, 512), (4, 1024, 64, 512),
    ):  # fmt: skip
        name = f"lstm-{layers}x{hidden}-b{batch}"
        yield BenchRow(name, "lstm", steps, batch, hidden, hidden, layers)
    for cell, layers, hidden, batch, steps in (
        ("lstm", 1, 256, 32, 500), ("lstm", 3, 512, 32, 300), ("lstm", 5, 1024, 16, 150),
        ("gru", 2, 128, 16, 1000),
    ):  # fmt: skip
        name = f"{cell}-{layers}x{hidden}-b{batch}-both"
        yield BenchRow(name, cell, steps, batch, hidden, hidden, layers, bidirectional=True)
    yield BenchRow("lstm-1x1280-b48", "lstm", 100, 48, 1000, 1280)


def _widths() -> Iterable[BenchRow]:
    """H that people write in decimal, and inputs of acoustic features, in odd numbers."""
    one = ((500, 64), (600, 64), (750, 32), (900, 64), (1000, 1), (1000, 16), (1000, 64),
           (1200, 64), (1500, 64), (2000, 32))  # fmt: skip
    several = ((50, 2, 500, 64), (50, 4, 1000, 128), (128, 4, 500, 64), (128, 8, 250, 64),
               (128, 3, 300, 32), (128, 2, 1000, 16))  # fmt: skip
    for steps, layers, hidden, batch in (*((50, 1, *sizes) for sizes in one), *several):
        name = f"lstm-{layers}x{hidden}-b{batch}"
        yield BenchRow(name, "lstm", steps, batch, hidden, hidden, layers)
    for cell, inputs, hidden, batch in (("lstm", 39, 256, 16), ("lstm", 123, 250, 32),
                                        ("lstm", 161, 512, 32), ("gru", 161, 800, 32)):  # fmt: skip
        name = f"{cell}-{hidden}-b{batch}-i{inputs}-both"
        yield BenchRow(name, cell, 200, batch, inputs, hidden, bidirectional=True)


def _cudnn() -> Iterable[BenchRow]:
    """The rows of users, but for resets, which cuDNN does not have."""
    return (replace(row, resets=0.0) for row in _USERS)


def _cpu() -> Iterable[BenchRow]:
    """Sizes at which different things bind a CPU: the call, units of a step, the products."""
    sizes = [(8192, 1, 1, 18), (2048, 16, 1, 18), (60, 64, 10, 10), (1, 1, 64, 64),
             (1, 1, 640, 640), (1, 16, 256, 256), (60, 64, 128, 128), (128, 32, 256, 256),
             (100, 1, 256, 256), (100, 1, 650, 650), (35, 20, 650, 650),
             (32, 32, 512, 512)]  # fmt: skip
    for (steps, batch, inputs, hidden), cell in product(sizes, ("lstm", "gru")):
        yield BenchRow(f"{cell}-{hidden}-b{batch}-t{steps}", cell, steps, batch, inputs, hidden)
    for cell in ("lstm", "gru"):  # whose memory is of interest
        yield BenchRow(f"{cell}-memory", cell, 1024, 16, 128, 128, modes=("training",))


def _cpu_bf16() -> Iterable[BenchRow]:
    """Layers in bfloat16 on a CPU: single steps, sequences, and batches, where products bind."""
    sizes = [(1, 1, 64), (1, 1, 640), (100, 1, 256), (100, 1, 650), (60, 64, 128), (128, 32, 256),
             (35, 20, 650), (32, 32, 512)]  # fmt: skip
    for (steps, batch, hidden), cell in product(sizes, ("lstm", "gru")):
        name = f"{cell}-{hidden}-b{batch}-t{steps}"
        yield BenchRow(name, cell, steps, batch, hidden, hidden, dtype=BF16)


def _int8() -> Iterable[BenchRow]:
    """Inference with int8 weights on a CPU: one step, one sequence, batches."""
    sizes = [(1, 1, 64), (1, 16, 256), (1, 1, 640), (100, 1, 256), (100, 1, 650), (60, 64, 128),
             (35, 20, 650), (64, 32, 512)]  # fmt: skip
    for cell, (steps, batch, hidden) in product(("lstm", "gru"), sizes):
        yield _with_weights("int8", cell, steps, batch, hidden)


def _bf16_weights() -> Iterable[BenchRow]:
    """Inference with bfloat16 weights on a CPU: where reading R binds, and where it stops to."""
    for cell, batch, hidden in product(("lstm", "gru"), (1, 4), (256, 512, 640, 1024)):
        yield _with_weights("bf16-weights", cell, 100, batch, hidden)
    for cell in ("lstm", "gru"):  # too few steps: float32 weights
        yield _with_weights("bf16-weights", cell, 1, 1, 640)


def _with_weights(kind: str, cell: str, steps: int, batch: int, hidden: int) -> BenchRow:
    """Inference with weights of fewer bits."""
    name = f"{cell}-{hidden}-b{batch}-t{steps}"
    return BenchRow(
        name, cell, steps, batch, hidden, hidden, dtype=kind, modes=("forward",), full=True
    )


def _cells() -> Iterable[BenchRow]:
    """What few run fast: other cells, resets, lengths, gates recomputed by backward."""
    for cell in ("peephole_lstm", OWN_CELL, "coupled_lstm"):
        yield BenchRow(cell.replace("_", "-"), cell, 256, 64, 256, 256)
    for hidden, batch in ((256, 32), (512, 64)):
        base = BenchRow(f"lstm-{hidden}-b{batch}", "lstm", 256, batch, hidden, hidden)
        yield replace(base, name=f"{base.name}-plain")
        yield replace(base, name=f"{base.name}-resets", resets=EPISODES)
        yield replace(base, name=f"{base.name}-lengths", lengths=True)
    yield BenchRow("lstm-memory", "lstm", 1024, 64, 512, 512, modes=("training",))


def _host() -> Iterable[BenchRow]:
    """Calls in which the device has next to nothing to do."""
    for cell in ("lstm", "gru"):
        yield BenchRow(f"{cell}-t2", cell, 2, 16, 64, 64, modes=HOST_MODES)
    for steps in (1, 25):
        yield BenchRow(f"lstm-t{steps}", "lstm", steps, 8, 64, 64, modes=HOST_MODES)


def _precision() -> Iterable[BenchRow]:
    """Errors of float32 layers: 50 steps; then states where float16's exponent has least left."""
    sizes = [("lstm", 64, 16), ("lstm", 1024, 64), ("lstm", 1500, 20), ("lstm", 2048, 16),
             ("gru", 256, 64), ("gru", 2400, 8)]  # fmt: skip
    for cell, hidden, batch in sizes:
        name = f"{cell}-{hidden}-b{batch}"
        yield BenchRow(name, cell, 50, batch, 64, hidden, modes=("forward",), full=True)
    for scale in (1.0, 1e3, 1e6):
        yield BenchRow(
            f"states-{scale:g}", "lstm", 50, 7, 64, 64, resets=0.2, states=scale, full=True,
            modes=("forward",),
        )  # fmt: skip


def _loops() -> Iterable[BenchRow]:
    """What time loops and the products beside them take, each way of overlap; for --profile too."""
    sizes = [("lstm", FP16, 1024, 16, 768), ("lstm", BF16, 1024, 16, 512),
             ("lstm", BF16, 1024, 48, 512), ("lstm", BF16, 1024, 64, 256),
             ("lstm", BF16, 500, 16, 1024), ("lstm", BF16, 256, 16, 64),
             ("lstm", BF16, 256, 64, 256), ("lstm", BF16, 256, 256, 256),
             ("lstm", BF16, 256, 16, 512), ("lstm", BF16, 256, 64, 512),
             ("lstm", BF16, 256, 64, 640), ("lstm", BF16, 256, 16, 1024),
             ("lstm", BF16, 256, 64, 1024), ("gru", BF16, 1024, 32, 512),
             ("gru", BF16, 256, 32, 128), ("gru", BF16, 256, 64, 512),
             ("gru", BF16, 256, 64, 1024), ("lstm", None, 1024, 16, 512),
             ("lstm", None, 256, 16, 64), ("lstm", None, 256, 64, 256),
             ("lstm", None, 256, 64, 640)]  # fmt: skip
    for cell, dtype, steps, batch, hidden in sizes:
        name = f"{cell}-{hidden}-b{batch}-t{steps}" + ("" if dtype else "-tf32")
        row = BenchRow(name, cell, steps, batch, hidden, hidden, dtype=dtype)
        yield row
        yield replace(row, name=f"{name}-resets", resets=EPISODES)


def _higher() -> Iterable[BenchRow]:
    """Second derivatives: sequences of critics, and the short ones of meta-learning."""
    for cell, steps in (("lstm", 256), ("gru", 256), ("lstm", 32)):
        yield BenchRow(f"{cell}-t{steps}", cell, steps, 32, 256, 256, modes=("gradient-penalty",))


def _steps() -> Iterable[BenchRow]:
    """64 single steps of decoders, policies and models that sample, each from the states before."""
    sizes = [("rnnt", "lstm", 640, 2, (1, 32)), ("policy", "lstm", 512, 1, (1, 16, 64, 256)),
             ("lstm-1024", "lstm", 1024, 1, (1, 4, 16, 32, 64)),
             ("gru-640", "gru", 640, 1, (1, 16, 64)),
             ("gru-1024", "gru", 1024, 1, (1, 16, 64))]  # fmt: skip
    for name, cell, hidden, layers, batches in sizes:
        for batch in batches:
            yield BenchRow(
                f"{name}-b{batch}", cell, 64, batch, hidden, hidden, layers, modes=("steps",)
            )


def _named(suite: str, rows: Iterable[BenchRow]) -> tuple[BenchRow, ...]:
    return tuple(replace(row, suite=suite) for row in rows)


_MADE = {
    "users": _USERS, "deepbench": _deepbench(), "latency": _latency(), "scaling": _scaling(),
    "resets-and-lengths": _resets_and_lengths(), "custom": _custom(), "fused": _fused(),
    "cudnn": _cudnn(), "cpu": _cpu(), "cells": _cells(), "host": _host(),
    "precision": _precision(), "loops": _loops(), "stacks": _stacks(),
    "widths": _widths(), "int8": _int8(), "bf16-weights": _bf16_weights(),
    "cpu-bf16": _cpu_bf16(), "higher": _higher(), "steps": _steps(),
}  # fmt: skip
SUITES = {suite: _named(suite, rows) for suite, rows in _MADE.items()}


@dataclass(frozen=True)
class Defaults:
    """What is run where no option says otherwise.

    Args:
        dtypes: on a GPU; on a CPU it is float32. `auto` follows each row.
        backend: ours, on a GPU.
    """

    against: tuple[str, ...] = USERS
    dtypes: tuple[str, ...] = ("auto",)
    backend: str = "auto"


DEFAULTS = {
    "fused": Defaults(("torch", "graph", "cudnn-graph"), (BF16, FP16, "tf32"), "fused"),
    "cudnn": Defaults(("torch", *ONE_ALGORITHM), (FP16, BF16, "tf32", "float32"), "cudnn"),
    "cpu": Defaults(("torch", "onnxruntime")),
    "cpu-bf16": Defaults(("torch",), (BF16,)),
    "cells": Defaults((*USERS, "recompute"), (BF16,)),
    "host": Defaults(("torch",), (BF16, "tf32")),
    "stacks": Defaults(("torch", "graph", "cudnn", "cudnn-graph"), (BF16,)),
    "widths": Defaults(("torch", "graph", "cudnn", "cudnn-graph"), (BF16, "tf32")),
    "precision": Defaults(("torch",)),
    "higher": Defaults(("torch", "reference")),
    "steps": Defaults(("torch", "graph"), (BF16, FP16, "tf32")),
    "int8": Defaults(("torch", "float32")),
    "bf16-weights": Defaults(("torch", "float32")),
    "loops": Defaults(tuple(WAYS), backend="fused"),
}
OPTIONS = {"against": "against", "dtypes": "dtype", "backend": "backend"}
USERS_SUITES = tuple(name for name in SUITES if name not in DEFAULTS)


def default_of(suite: str, option: str) -> Any:
    """What a suite takes for an option that is not given, or several where that is one value.

    Raises:
        ValueError: the suites have different ones.
    """
    found = {getattr(DEFAULTS.get(name, Defaults()), option) for name in names_of(suite)}
    if len(found) > 1:
        raise ValueError(f"suites {suite} have different defaults: name --{OPTIONS[option]}")
    return found.pop()


def names_of(suite: str) -> tuple[str, ...]:
    """The suites that a name means: itself, those between commas, or all of users' rows.

    Raises:
        ValueError: there is no such suite.
    """
    if suite == "all":
        return USERS_SUITES
    names = tuple(word.strip() for word in suite.split(","))
    for name in names:
        if name not in SUITES:
            raise ValueError(
                f"suite must be one of {', '.join(SUITES)}, several with commas, train or all, "
                f"got {name!r}"
            )
    return names


def rows_of(suite: str) -> tuple[BenchRow, ...]:
    """The rows of a suite, of several between commas, or of all that users run.

    Raises:
        ValueError: there is no such suite.
    """
    return tuple(row for name in names_of(suite) for row in SUITES[name])
