"""Loops for whose kernels tests ask, and a device that is not there."""

from types import SimpleNamespace

import torch

from openrnn.backends.fused import kernels
from openrnn.tuning import plan


def loop_of(
    kind, cell, dtype, hidden, batch, capability=(9, 0), processors=None, options=None
):  # fmt: skip
    """A request; options: by default forward saves for backward, and there is no mask."""
    if options is None:
        options = ("save",) if kind == "forward" else ()
    return plan.LoopRequest(
        kind=kind, option_names=tuple(options), cell=cell, dtype=dtype, hidden=hidden, batch=batch,
        capability=capability, processors=processors,
    )  # fmt: skip


def holding_r(*loop, loops=1, **more):
    """The kernels that hold R of a loop, given as `loop_of` takes it; best first."""
    return plan.holding_r(loop_of(*loop, **more), loops)


def on_an_h200(monkeypatch, name="H200"):
    """Every device is an H200, as far as torch is asked what it has."""
    about = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name=name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: about)


def kernels_of_an_h200(monkeypatch, kernel):
    """Puts a function in the place of `kernels.kernel`, on an H200 that is not there."""
    on_an_h200(monkeypatch)
    monkeypatch.setattr(kernels, "kernel", kernel)
