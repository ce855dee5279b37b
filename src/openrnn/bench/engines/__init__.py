"""The engines that a row is run by, by name."""

from collections.abc import Sequence

from openrnn.bench.engines.base import Engine
from openrnn.bench.engines.foreign import FlashRNN, TorchRL
from openrnn.bench.engines.graph import Graph
from openrnn.bench.engines.nn import Loop, Packed, Torch
from openrnn.bench.engines.ours import Cudnn, Ours
from openrnn.bench.engines.python import Compiled, Eager

PEERS = (
    "torch", "graph", "cudnn", "packed", "loop", "eager", "compiled", "flashrnn", "torchrl",
)  # fmt: skip


def engines_of(against: Sequence[str], backend: str) -> list[Engine]:
    """Ours and the named peers, ours first; with `graph` ours from a CUDA graph as well.

    Raises:
        ValueError: there is no such peer.
    """
    for name in against:
        if name not in PEERS:
            raise ValueError(f"against must be of {', '.join(PEERS)}, got {name!r}")
    ours = Ours(backend)
    made: dict[str, Engine] = {
        engine.name: engine
        for engine in (
            Torch(), Cudnn(), Packed(), Loop(), Eager(), Compiled(), FlashRNN(), TorchRL(),
            Graph("graph", Torch()),
        )
    }  # fmt: skip
    graphed = [Graph("openrnn-graph", ours)] if "graph" in against else []
    return [ours, *graphed, *(made[name] for name in PEERS if name in against)]
