"""The rows, as data: who runs what. Sizes are steps, batch, inputs, hidden, layers."""

from collections.abc import Iterable
from dataclasses import replace

from openrnn.bench.cases import Row, doubled

EPISODES = 0.03  # share of first steps in a batch of rollouts
BF16 = "bfloat16"

_USERS = [
    # reinforcement learning: Isaac Lab, stable-baselines3, sample-factory, RLlib, TorchRL, Dreamer
    Row("isaac", "lstm", 24, 4096, 64, 256),
    Row("sb3", "lstm", 128, 32, 64, 256, resets=EPISODES),
    Row("sf", "gru", 32, 256, 512, 512),
    Row("rllib", "lstm", 20, 200, 256, 256),
    Row("torchrl", "lstm", 128, 128, 256, 256, resets=EPISODES),
    Row("dreamer", "gru", 64, 16, 512, 512, dtype=BF16),
    # forecasting: DeepAR, neuralhydrology
    Row("deepar-10", "lstm", 60, 64, 10, 10, 2),
    Row("deepar-128", "lstm", 168, 1024, 32, 128, 2),
    Row("hydro-128", "lstm", 365, 256, 32, 128),
    Row("hydro-256", "lstm", 365, 256, 32, 256),
    # speech: RNN-T, CRDNN, Tacotron's decoder
    Row("rnnt", "lstm", 100, 64, 640, 640, dtype=BF16),
    Row("rnnt-step-1", "lstm", 1, 1, 640, 640, dtype=BF16),
    Row("rnnt-step-32", "lstm", 1, 32, 640, 640, dtype=BF16),
    Row("crdnn", "lstm", 500, 16, 1024, 1024, 4, bidirectional=True),
    Row("tacotron-step", "lstm", 1, 64, 1024, 1024),
    # audio: neural amp modeler, source separation
    Row("nam", "lstm", 8192, 16, 1, 18, 3),
    Row("nam-long", "lstm", 65536, 4, 1, 24),
    Row("sepa", "lstm", 250, 4000, 128, 128, bidirectional=True),
    # language: AWD-LSTM and before
    Row("lm-650", "lstm", 70, 20, 650, 650),
    Row("lm-1150", "lstm", 70, 80, 1150, 1150),
    Row("lm-1500", "lstm", 70, 20, 1500, 1500),
    # PyTorch's own benchmark, and haste's grid
    Row("fastrnns", "lstm", 100, 64, 512, 512),
    *(
        Row(f"haste-{batch}-{hidden}", "lstm", 100, batch, hidden, hidden)
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


def _deepbench() -> Iterable[Row]:
    kinds = ((_DEEPBENCH_TRAINING, ("training",)), (_DEEPBENCH_INFERENCE, ("forward",)))
    for table, modes in kinds:
        for cell, every_steps, sizes, batches in table:
            for hidden in sizes:
                for steps in every_steps:
                    for batch in batches:
                        name = f"{cell}-{hidden}-b{batch}-t{steps}"
                        yield Row(name, cell, steps, batch, hidden, hidden, modes=modes)


def _latency() -> Iterable[Row]:
    for cell in ("lstm", "gru"):
        for hidden in (64, 256, 1024):
            for batch in (1, 4, 16, 32):
                yield Row(f"step-{cell}-{hidden}-b{batch}", cell, 1, batch, hidden, hidden)


def _scaling() -> Iterable[Row]:
    """One size doubled at a time from those of `base`, which belongs to every series."""
    base = Row("base", "lstm", 128, 16, 256, 256)
    yield base
    every = [replace(base, name=f"t-{steps}", steps=steps) for steps in doubled(1, 4096)]
    every += [replace(base, name=f"b-{batch}", batch=batch) for batch in doubled(1, 1024)]
    every += [replace(base, name=f"h-{h}", hidden=h, inputs=h) for h in doubled(16, 2048)]
    every += [replace(base, name=f"l-{layers}", layers=layers) for layers in doubled(1, 8)]
    yield from (row for row in every if replace(row, name=base.name) != base)


def _resets_and_lengths() -> Iterable[Row]:
    shapes = [("policy", "lstm", 128, 128, 256, 256), ("text", "lstm", 200, 64, 512, 512),
              ("series", "gru", 1024, 32, 128, 128)]  # fmt: skip
    for name, *sizes in shapes:
        base = Row(name, *sizes)  # type: ignore[arg-type]  # a row's own order
        yield replace(base, name=f"{name}-plain")
        for percent in (1, 3, 10):
            yield replace(base, name=f"{name}-resets-{percent}", resets=percent / 100)
        yield replace(base, name=f"{name}-lengths", lengths=True)
        yield replace(base, name=f"{name}-lengths-both", lengths=True, bidirectional=True)


def _custom() -> Iterable[Row]:
    cells = ("peephole_lstm", "coupled_lstm", "slstm", "mgu", "gru_reset_before")
    for cell in cells:
        for steps, batch, hidden in ((128, 64, 256), (512, 16, 128)):
            name = f"{cell.replace('_', '-')}-{hidden}-b{batch}"
            yield Row(name, cell, steps, batch, hidden, hidden)


def _named(suite: str, rows: Iterable[Row]) -> tuple[Row, ...]:
    return tuple(replace(row, suite=suite) for row in rows)


SUITES = {
    "users": _named("users", _USERS),
    "deepbench": _named("deepbench", _deepbench()),
    "latency": _named("latency", _latency()),
    "scaling": _named("scaling", _scaling()),
    "resets-and-lengths": _named("resets-and-lengths", _resets_and_lengths()),
    "custom": _named("custom", _custom()),
}


def rows_of(suite: str) -> tuple[Row, ...]:
    """The rows of a suite, or of all.

    Raises:
        ValueError: there is no such suite.
    """
    if suite == "all":
        return tuple(row for rows in SUITES.values() for row in rows)
    if suite not in SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}, train or all, got {suite!r}")
    return SUITES[suite]
