"""Traces of the cells that `openrnn.cells` ships, kept on disk as JSON.

The first trace of a process takes most of a second: torch imports its compiler for it.
"""

import json
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch

from openrnn import store
from openrnn.codegen.graph import Graph, Node


@lru_cache(maxsize=1)
def _made_of() -> tuple[str | bytes, ...]:
    """What every trace depends on: our sources and torch."""
    return (*store.sources("openrnn.codegen", "cells.py"), torch.__version__)


def kept(name: str, make: Callable[[], Any], kind: type) -> Any:
    """What `make` makes, a dataclass of this kind that holds graphs and names, from disk if there.

    Args:
        name: tells entries of the same sources apart.
    """
    path = store.path_of("trace", (*_made_of(), name))
    return _read(store.kept(path, lambda: _written(make()), "the trace of a cell"), kind)


def _written(traced: Any) -> bytes:
    found = {field.name: _plain(getattr(traced, field.name)) for field in fields(traced)}
    return json.dumps(found).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Graph):
        nodes = [[node.name, node.op, list(node.args)] for node in value.nodes]
        return {"inputs": list(value.inputs), "nodes": nodes, "outputs": value.outputs}
    return {"set": sorted(value)} if isinstance(value, frozenset) else value


def _read(content: bytes, kind: type) -> Any:
    return kind(**{name: _whole(value) for name, value in json.loads(content).items()})


def _whole(value: Any) -> Any:
    if isinstance(value, dict) and "set" in value:
        return frozenset(value["set"])
    if isinstance(value, dict):
        nodes = tuple(Node(name, op, tuple(args)) for name, op, args in value["nodes"])
        return Graph(tuple(value["inputs"]), nodes, value["outputs"])
    return tuple(value) if isinstance(value, list) else value
