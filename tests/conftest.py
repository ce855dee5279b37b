"""What every test runs under: poisoned memory, repeatable examples, one thread a worker."""

import gc
import logging
import os
import sys
from copy import copy
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace

import forks
import pytest
from hypothesis import settings

collect_ignore = ["ranks.py", "sanitize.py"]  # programs: importing them takes a second

# the same examples in every run; `pytest --hypothesis-profile search` looks for new ones
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50, database=None)
settings.register_profile("landing", settings.get_profile("ci"), max_examples=10)  # make test
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("ci")


def pytest_configure(config):
    if hasattr(config, "workerinput"):  # one of several processes under xdist
        gc.set_threshold(10_000, 20, 50)  # by default a twentieth of the time goes into it
        import torch  # which the process that tells them what to do needs not

        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"  # and those that tests start


def pytest_collection_modifyitems(items):
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device, and torch finds none")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


_frozen = 0  # how many modules there were when the collector was last told to leave them out


def pytest_runtest_setup():
    """Python's collector walks through all that lives, and imported modules live for ever.

    pytest hangs its handlers anew on each logger that does not propagate, six times a test: torch
    has fifty.
    """
    global _frozen  # noqa: PLW0603
    if len(sys.modules) > _frozen + 300:
        _frozen = len(sys.modules)
        gc.collect()
        gc.freeze()
        for name, logger in logging.root.manager.loggerDict.items():
            if name.startswith("torch") and isinstance(logger, logging.Logger):
                logger.propagate = True


@pytest.fixture(scope="module")
def one_thread():
    """Networks this small wait for threads more than they compute."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def compilers():
    """Kernels of the CPU are compiled in forks, which import no numba; test_objects.py in none."""
    if find_spec("numba"):
        from openrnn.kernels.cpu import objects

        objects.subprocess = forks.compilers()


@pytest.fixture(scope="session")
def operators_of_torch():
    """torch asks for each of its operators several times an export, in a tenth of a second."""
    from torch._export import utils

    utils._materialize_cpp_cia_ops = cache(utils._materialize_cpp_cia_ops)


@pytest.fixture(scope="session")
def onnx_functions(operators_of_torch):
    """torch's exporter makes a registry of ONNX's functions in each export, in half a second."""
    from torch.onnx._internal.exporter import _registration

    apis, registry = _registration.onnxscript_apis, _registration.ONNXRegistry
    apis.get_torchlib_ops = cache(apis.get_torchlib_ops)
    make = cache(registry.from_torchlib)

    def copied(**opset):
        kept = make(**opset)
        made = copy(kept)
        made.functions = {name: [*functions] for name, functions in kept.functions.items()}
        return made

    registry.from_torchlib = staticmethod(copied)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fills every `torch.empty` with nan (bytes: 255), so that reading before writing fails."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def fake_device(monkeypatch):
    """A function of a name and of how many clusters of a kernel a device like an H200 holds.

    It returns the configurations of the kernels that are loaded from then on. None is compiled.
    """
    from loops import on_an_h200

    from openrnn.backends.fused import kernels
    from openrnn.native import nvrtc

    def made(name, places):
        tried = []

        def binary(cell, dtype, config, arch, spin_limit=0):
            return SimpleNamespace(resources=nvrtc.Resources(32, 0), config=config)

        def loaded(made, cluster, threads, shared, device, cooperative=False):
            tried.append(made.config)
            return SimpleNamespace(max_clusters=places(made.config))

        monkeypatch.setattr(kernels, "binary", binary)
        monkeypatch.setattr(nvrtc, "loaded", loaded)
        on_an_h200(monkeypatch, name)
        kernels.kernel.cache_clear()
        return tried

    yield made
    kernels.kernel.cache_clear()
