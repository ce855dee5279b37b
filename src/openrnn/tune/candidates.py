"""The kernels of a size that are worth timing: the first of the ranking, and variants of them."""

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch

from openrnn.backends.fused import kernels
from openrnn.cells import lookup
from openrnn.codegen.config import KernelConfig
from openrnn.codegen.trace import trace
from openrnn.native import nvrtc
from openrnn.tuning import measured, plan
from openrnn.tuning.limits import Limits

KINDS = ("inference", "forward", "backward")  # of `measured.SIZE`
MORE_FRAGMENTS = (7, 4, 2, 1, 0, -1, -2)  # of R in registers than the model says


class Size(NamedTuple):
    """What kernels are compared for; kind: one of KINDS; loops: that run at the same time."""

    cell: str
    dtype: str
    hidden: int
    batch: int
    kind: str
    mask: str = measured.PLAIN
    loops: int = 1


class Candidate(NamedTuple):
    """One kernel for a size."""

    size: Size
    capability: tuple[int, int]
    config: KernelConfig

    @property
    def kernel(self) -> "Candidate":
        """Equal for all sizes that share one compiled kernel."""
        return self._replace(size=self.size._replace(hidden=0, batch=0, kind="", loops=1))


def candidates(size: Size, capability: tuple[int, int], most: int) -> list[Candidate]:
    """The first of the ranking, but none expected to take over twice the time of the fastest.

    Each shape stands once, and at most two kernels exchange in the same way.

    Args:
        most: candidates among grids, and among others.
    """
    shapes = set[measured.Shape]()
    seen: Counter[tuple[int, ...]] = Counter()
    found = []
    option_names: plan.OptionNames = () if size.mask == measured.PLAIN else (size.mask,)
    option_names += ("save",) if size.kind == "forward" else ()
    cell = trace(lookup(size.cell))
    loop = plan.LoopRequest(
        kind="backward" if size.kind == "backward" else "forward", option_names=option_names,
        cell=cell, dtype=size.dtype, hidden=size.hidden, batch=size.batch, capability=capability,
    )  # fmt: skip
    ranked = plan.holding_r(loop, size.loops)
    times = {
        config: plan.cycles_of(cell, size.dtype, config, loop.batch, loop.limits)
        for config in ranked
    }
    for config in ranked:
        shape = measured.shape_of(config)
        if times[config] > 2 * min(times.values()) or shape in shapes:
            continue
        key = (config.cluster, config.clusters, config.tiles, config.tiles_in_flight, config.wgmma)
        grid = (config.is_cooperative,)
        if seen[key] < 2 and seen[grid] < most:
            seen[key] += 1
            seen[grid] += 1
            shapes.add(shape)
            first = plan.first_try(size.hidden, config, option_names)
            found.append(Candidate(size, capability, first))
    return found


def variants(of: Candidate) -> list[Candidate]:
    """The same kernel with more and fewer fragments of R in registers, low-register and not."""
    cell, shared = trace(lookup(of.size.cell)), Limits.of(of.capability).shared
    fragments, found = of.config.fragments(cell, of.size.dtype), []
    steps = MORE_FRAGMENTS if of.config.register_fragments < fragments else (0,)
    for more, low_register, stages in product(steps, (False, True), (4, 2)):
        held = min(fragments, max(0, of.config.register_fragments + more))
        config = replace(of.config.with_registers(held), low_register=low_register, stages=stages)
        fits = config.shared(cell, of.size.dtype) <= shared
        if fits and replace(config, stages=4) not in found:
            found.append(config)
    return [of._replace(config=config) for config in dict.fromkeys(found)]


def unspilled(of: Candidate) -> bool:
    """Whether a kernel, as it is, spills nothing; compiles it into the cache."""
    torch.set_num_threads(1)
    cell, arch = trace(lookup(of.size.cell)), nvrtc.arch_of(of.capability)
    made = kernels.binary(cell, of.size.dtype, of.config, arch)
    return made.resources.spilled <= of.config.most_spilled


def compiled(of: Candidate) -> KernelConfig | None:
    """The configuration that spills nothing, near the given one; compiles it into the cache."""
    torch.set_num_threads(1)
    arch, shared = nvrtc.arch_of(of.capability), Limits.of(of.capability).shared
    cell = trace(lookup(of.size.cell))
    # this process is one of a pool that takes all cores
    found = kernels.unspilled(cell, of.size.dtype, of.config, arch, shared, at_once=1)
    return found[1] if found else None
