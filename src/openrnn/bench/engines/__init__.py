"""The engines that a row is run by, by name."""

from collections.abc import Sequence

from openrnn.bench.engines.base import Engine
from openrnn.bench.engines.foreign import FlashRNN, TorchRL
from openrnn.bench.engines.graph import GraphReplay
from openrnn.bench.engines.nn import Packed, StepLoop, Torch
from openrnn.bench.engines.onnxruntime import OnnxRuntime
from openrnn.bench.engines.ours import (
    ALGORITHMS,
    DirectCudnn,
    Ours,
    Recomputing,
    Reference,
    Unquantized,
)
from openrnn.bench.engines.python import Compiled, Eager
from openrnn.bench.ratios import from_graph

# what users run today, by default; then what only some suites ask for
USERS = (
    "torch", "graph", "cudnn", "cudnn-graph", "packed", "loop", "eager", "compiled", "flashrnn",
    "torchrl",
)  # fmt: skip
STATIC = tuple(name for name in ALGORITHMS if name != "persist_dynamic")  # which none captures
ONE_ALGORITHM = {f"cudnn-{name.replace('_', '-')}": name for name in ALGORITHMS}
# our own layer in a process of its own, where products overlap with loops in other ways: never, or
# in two chunks at most
OVERLAP = "openrnn.tuning.overlap"
WAYS: dict[str, dict[str, float]] = {
    "no-overlap": {f"{OVERLAP}.MOST_CHUNKS": 1},
    "two-chunks": {f"{OVERLAP}.MOST_CHUNKS": 2},
}
PEERS = (
    *USERS,
    "onnxruntime",
    "float32",
    "recompute",
    "reference",
    *ONE_ALGORITHM,
    *WAYS,
)


def engines_of(against: Sequence[str], backend: str) -> list[Engine]:
    """Ours and the named peers, ours first; with peers from CUDA graphs ours from one as well.

    Raises:
        ValueError: there is no such peer.
    """
    ours = Ours(backend)
    graphed = any(map(from_graph, against))
    return [
        ours,
        *([GraphReplay("openrnn-graph", ours)] if graphed else []),
        *peers_of(against, backend),
    ]


def peers_of(against: Sequence[str], backend: str, apart: bool = False) -> list[Engine]:
    """The named peers, but for those of `WAYS`, which are run by `bench.remote`.

    Args:
        apart: each will have a process of its own.

    Raises:
        ValueError: there is no such peer.
    """
    for name in against:
        if name not in PEERS:
            raise ValueError(f"against must be of {', '.join(PEERS)}, got {name!r}")
    made: dict[str, Engine] = {
        engine.name: engine
        for engine in (
            Torch(), DirectCudnn(), Packed(), StepLoop(), Eager(), Compiled(), FlashRNN(),
            TorchRL(), OnnxRuntime(apart), Unquantized(backend), Recomputing(backend),
            Reference(),
            GraphReplay("graph", Torch()),
            GraphReplay("cudnn-graph", DirectCudnn(algorithms=STATIC)),
            *(DirectCudnn(name, (algorithm,)) for name, algorithm in ONE_ALGORITHM.items()),
        )
    }  # fmt: skip
    return [made[name] for name in PEERS if name in against and name not in WAYS]
