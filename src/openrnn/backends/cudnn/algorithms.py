"""Which of cuDNN's algorithms runs a call: as named, or the fastest measured whose numbers hold.

`auto` measures once for a spec, dtype and size class (T and B rounded up to powers of two) and
remembers the answer, in the process and in a file beside the generated kernels.
"""

import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrnn.backends.cudnn import trial
from openrnn.native.cudnn.descriptors import ALGORITHMS
from openrnn.native.cudnn.library import load
from openrnn.spec import Problem, Spec
from openrnn.store import folder, write_whole

# beyond these H the small-H kernels are refused by cuDNN: forward, with backward
SMALL = {"lstm": (192, 128), "gru": (192, 128), "rnn_tanh": (384, 256), "rnn_relu": (384, 256)}

_chosen: dict[str, str] = {}
_lock = threading.Lock()
_read = False
TRIAL = 4  # counts how trials are made: what an earlier one found is not believed


def unfit(algorithm: str, problem: Problem) -> str | None:
    """Why cuDNN does not run a problem by this algorithm, as far as values tell; or None."""
    spec = problem.spec
    if algorithm == "standard":
        return None
    if problem.lengths:
        return "does not do lengths, needs standard"
    if spec.proj_size:
        return "does not do projection, needs standard"
    if spec.bias_mode != "double":
        return f"needs bias_mode double, got {spec.bias_mode}"
    if problem.dtype == torch.float64 and algorithm != "persist_dynamic":
        return "does not do float64, needs standard or persist_dynamic"
    if algorithm == "persist_static_small_h":
        limit = SMALL.get(spec.cell, (0, 0))[int(problem.grad)]
        if spec.hidden_size > limit:
            return f"needs hidden_size of at most {limit}, got {spec.hidden_size}"
    return None


def _class(size: int) -> int:
    """The power of two not below a size."""
    return 1 << (size - 1).bit_length()


def _classes(x: Tensor) -> tuple[int, int]:
    """The classes of T and B; from the longest that is timed on, all T are alike."""
    return _class(min(x.shape[0], trial.TIMED)), _class(x.shape[1])


def _key(problem: Problem, x: Tensor) -> str:
    spec = problem.spec
    plain = _plain(spec)
    device = torch.cuda.get_device_properties(x.device)
    where = f"{device.name} cudnn {load().version}"
    what = "training" if problem.grad else "inference"
    sizes = "T<={} B<={}".format(*_classes(x))
    kind = problem.dtype_name
    if problem.dtype == torch.float32:
        kind += f" {problem.precision}"
    return f"{plain} {kind} {what} {sizes} {where} trial {TRIAL}"


def _plain(spec: Spec) -> Spec:
    """The spec without what no algorithm's speed depends on."""
    return spec.with_(dropout=0.0, algorithm="auto", reset_dropout_state=False, recompute="none")


_fast: dict[tuple[Any, ...], str] = {}


def choose(problem: Problem, x: Tensor, short: bool) -> str:
    """The algorithm of a call; forward and backward of one call get the same."""
    spec = problem.spec
    if spec.algorithm != "auto":
        return spec.algorithm
    if short or problem.lengths:
        return "standard"
    quick = (problem, x.device.index, *_classes(x))
    found = _fast.get(quick)
    if found is None:
        found = _fast[quick] = _decide(problem, x)
    return found


def _decide(problem: Problem, x: Tensor) -> str:
    names = [name for name in ALGORITHMS if unfit(name, problem) is None]
    if len(names) == 1:
        return names[0]
    key = _key(problem, x)
    with _lock:
        _remember_file()
        if key not in _chosen:
            if torch.cuda.is_current_stream_capturing():
                # nothing can be timed inside a graph; kept for this process, not written down
                _chosen[key] = "standard"
            else:
                # in the problem's precision, whatever torch's setting is by now
                plain = _plain(problem.spec).with_(precision=problem.precision)
                _chosen[key] = trial.fastest(plain, problem, x, names)
                _write()
        return _chosen[key]


def _file() -> Path:
    return folder() / "cudnn_algorithms.json"


def _load_file() -> dict[str, str]:
    try:
        found = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: name for key, name in found.items() if name in ALGORITHMS}


def _remember_file() -> None:
    global _read  # noqa: PLW0603  # the file is read once
    if not _read:
        for key, name in _load_file().items():
            _chosen.setdefault(key, name)
        _read = True


def _write() -> None:
    """Adds to the file what this process has found; a folder that cannot be written costs time."""
    everything = {**_load_file(), **_chosen}
    with suppress(OSError):
        write_whole(_file(), json.dumps(everything, indent=1, sort_keys=True).encode())
