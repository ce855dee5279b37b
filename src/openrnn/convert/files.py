"""Weights in files: what is read and written, by the ending of a file's name."""

import io
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from openrnn.convert.arrays import Arrays, as_numpy, flatten, ordered
from openrnn.convert.keras import Said, said

T = TypeVar("T")

WRITES = (".safetensors", ".npz", ".pt", ".pth")
# Keras numbers the variables of a cell
VARIABLES = {
    "cell/vars/0": "cell/kernel",
    "cell/vars/1": "cell/recurrent_kernel",
    "cell/vars/2": "cell/bias",
}


def read(path: Path) -> tuple[Arrays, Said]:
    """The arrays of a file in the order of their names; and what else it says of its layers.

    Names are sorted with numbers by their size, forward before backward. A checkpoint of torch is
    read with `weights_only=True`.

    Raises:
        ValueError: the file is damaged, of an ending that is not known, or says that its layers do
            what ours cannot; or h5py is missing.
        OSError: it cannot be read.
    """
    reader = by_ending(path, READERS)
    path.stat()  # what is not there is not damaged
    try:
        found, more = reader(path)
    except ImportError:
        raise ValueError(
            f"{path} is read by the package h5py, which is not here: pip install h5py"
        ) from None
    return ordered(found), more


def by_ending(path: Path, known: Mapping[str, T]) -> T:
    """What is known for the ending of a file's name; ValueError where it is none of these."""
    for ending, value in known.items():
        if path.name.endswith(ending):
            return value
    raise ValueError(f"{path} must end in one of {', '.join(known)}")


def check_written(path: Path) -> None:
    """Raises ValueError where nothing is written under such a name."""
    if path.suffix not in WRITES:
        raise ValueError(f"{path} must end in one of {', '.join(WRITES)}")


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes arrays under their names.

    Raises:
        ValueError: the ending is not known.
        OSError: it cannot be written.
    """
    check_written(path)
    if path.suffix == ".safetensors":
        from safetensors.torch import save

        path.write_bytes(save(dict(tensors)))
    elif path.suffix == ".npz":
        with path.open("wb") as file:
            np.savez(file, **{name: as_numpy(tensor) for name, tensor in tensors.items()})
    else:
        torch.save(dict(tensors), path)


def _safetensors(path: Path) -> tuple[Arrays, Said]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(path.read_bytes()), Said()
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read as a safetensors file: {error}") from None


def _npz(path: Path) -> tuple[Arrays, Said]:
    try:
        with zipfile.ZipFile(path):  # numpy reads other files under this name, too
            pass
        with np.load(path, allow_pickle=False) as file:
            return flatten({name: file[name] for name in file.files}), Said()
    except (ValueError, TypeError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path} cannot be read as a file of numpy's savez: {error}") from None


def _torch(path: Path) -> tuple[Arrays, Said]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:  # of pickle, zipfile or torch, of many kinds; their texts advise the unsafe
        raise ValueError(
            f"{path} cannot be read by torch.load(weights_only=True): it needs a file of tensors, "
            "as torch.save(model.state_dict(), path) writes one"
        ) from None
    return flatten(_tensors(found)), Said()


def _tensors(found: Any) -> Any:
    """A checkpoint's mappings with nothing but tensors in them."""
    if not isinstance(found, Mapping):
        return {}
    inner = {name: value if isinstance(value, Tensor) else _tensors(value)
             for name, value in found.items()}  # fmt: skip
    return {name: value for name, value in inner.items() if isinstance(value, Tensor) or value}


def _hdf5(path: Path, data: Any = None) -> tuple[Arrays, Said]:
    import h5py

    found: dict[str, Any] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.dtype.kind == "f":
            for numbered, called in VARIABLES.items():
                if name.endswith(numbered):
                    name = name.removesuffix(numbered) + called
            found[name] = item[()]

    try:
        with h5py.File(data or path, "r") as file:
            file.visititems(visit)
            text = file.attrs.get("model_config")
    except OSError as error:
        raise ValueError(f"{path} cannot be read as an HDF5 file: {error}") from None
    return flatten(found), Said() if text is None else said(json.loads(text))


def _keras(path: Path) -> tuple[Arrays, Said]:
    try:
        with zipfile.ZipFile(path) as archive:
            weights = io.BytesIO(archive.read("model.weights.h5"))
            config = json.loads(archive.read("config.json"))
        more = said(config)
    except RecursionError:
        raise ValueError(
            f"{path} cannot be read as a model of Keras 3: it is nested too deeply"
        ) from None
    except (zipfile.BadZipFile, KeyError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a model of Keras 3: {error}") from None
    return _hdf5(path, weights)[0], more


READERS: dict[str, Callable[[Path], tuple[Arrays, Said]]] = {
    ".safetensors": _safetensors,
    ".npz": _npz,
    ".pt": _torch,
    ".pth": _torch,
    ".h5": _hdf5,
    ".hdf5": _hdf5,
    ".keras": _keras,
}
