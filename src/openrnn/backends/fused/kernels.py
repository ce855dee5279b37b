"""From tiles to a kernel that is ready to launch: source, binary, best without spills, loaded."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import islice, product, zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor

from openrnn.codegen import cuda
from openrnn.codegen.tiles import Backward, Forward, Tiles
from openrnn.codegen.trace import Traced
from openrnn.cores import usable_cores
from openrnn.errors import OpenRNNError
from openrnn.kernels.cuda.args import BackwardArgs, ForwardArgs
from openrnn.native import nvrtc
from openrnn.tuning import measured, plan
from openrnn.tuning.limits import Limits

How = TypeVar("How", bound=Tiles)


class NoKernelError(OpenRNNError, RuntimeError):
    """No kernel of a cell can be compiled that an architecture holds."""


TRIES = 12  # kinds of tiles that are compiled before the plan counts as wrong
LESS = (0, 1, 2, 5, 9)  # pieces of R in registers than planned
AT_ONCE = 3  # tries compiled at a time where cores are idle: seldom are more of one kind wanted


def _wanted(cell: Traced, dtype: str, how: Tiles, arch: str, spin_limit: int) -> nvrtc.Wanted:
    """A kernel as `nvrtc` is asked for it."""
    head = f"#define SPIN_LIMIT {spin_limit}\n" if spin_limit else ""
    title = f"{cell.name}-{dtype}-{how.kind}-{how.units}"
    source = head + cuda.source(cell, dtype, how)
    return nvrtc.Wanted(source, how.kind, arch, title)


@lru_cache(maxsize=4096)
def binary(cell: Traced, dtype: str, how: Tiles, arch: str, spin_limit: int = 0) -> nvrtc.Binary:
    """A compiled kernel."""
    if how != how.built:
        return binary(cell, dtype, how.built, arch, spin_limit)
    return nvrtc.binary(_wanted(cell, dtype, how, arch, spin_limit))


def tries_of(cell: Traced, dtype: str, how: How, shared: int, exact: bool = False) -> list[How]:
    """Tiles in the order in which they are compiled until one spills nothing, of those that fit.

    The model of `plan` says how much of R fits into registers, the compiler knows. A frugal kernel
    is tried before one with less of R. `exact`: as it is or not at all.
    """
    changes = product((how.stages, 2), LESS, (how.frugal, True))
    tried_in_turn = [how] if exact else [
        replace(how, resident=max(0, how.resident - less), stages=stages, frugal=frugal)
        for stages, less, frugal in changes
    ]  # fmt: skip
    return [one for one in dict.fromkeys(tried_in_turn) if one.shared(cell, dtype) <= shared]


def unspilled(
    cell: Traced, dtype: str, how: How, arch: str, shared: int, spin_limit: int = 0,
    exact: bool = False, at_once: int = AT_ONCE,
) -> tuple[nvrtc.Binary, How] | None:  # fmt: skip
    """The kernel with as much of R in registers as needs no spill; None where that is not near.

    What is not in the cache is compiled on idle cores together with what would be tried next: a
    try takes a second or two; `at_once` says how many.
    """
    tries = tries_of(cell, dtype, how, shared, exact)

    def made_of(tried: How) -> nvrtc.Binary:
        return binary(cell, dtype, tried, arch, spin_limit)

    while tries and _wanted(cell, dtype, tries[0], arch, spin_limit).path.exists():
        tried = tries.pop(0)
        if not (made := made_of(tried)).resources.spilled:
            return made, tried
    with _compiling(made_of, tries, at_once) as found:
        for tried, made in zip(tries, found):
            if not made.resources.spilled:
                return made, tried
    return None


@contextmanager
def _compiling(
    make: Callable[[How], nvrtc.Binary], tries: Sequence[How], at_once: int
) -> Iterator[Iterable[nvrtc.Binary]]:
    """The tries made, in their order, some at a time; at the end none is waited for."""
    threads = min(len(tries), usable_cores() // 2, at_once)
    if threads < 2:
        yield map(make, tries)
        return
    nvrtc.prepare()
    pool = ThreadPoolExecutor(threads)  # not kept: a fork would copy it without its threads
    try:
        yield pool.map(make, tries)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def fitting(
    kind: str, cell: Traced, dtype: str, hidden: int, tiles: int, flags: plan.Flags,
    capability: tuple[int, int], spin_limit: int = 0, processors: int | None = None,
) -> Iterator[tuple[nvrtc.Binary, Forward | Backward]]:  # fmt: skip
    """Kernels without spills in the order of the plan, for so many tiles of 8 rows; then the rest.

    `kind` is "forward" or "backward"; TRIES tiles are compiled at most. What was measured stands
    before what the plan makes of its shape, and is tried as it is. Where every try of some tiles
    spills, as happens near the largest H, they come last, the fewest spilled bytes first: they run
    right, but slower.
    """
    arch, shared = nvrtc.arch_of(capability), Limits.of(capability).shared
    asked = (hidden, tiles, flags, capability, processors)
    hows = list(islice(plan.holding(kind, cell, dtype, *asked), TRIES))
    spilling: list[Forward | Backward] = []
    for how, after in zip_longest(hows, hows[1:]):
        exact = after is not None and measured.shape_of(how) == measured.shape_of(after)
        found = unspilled(cell, dtype, how, arch, shared, spin_limit, exact)
        if found is not None:
            yield found
        else:
            spilling += tries_of(cell, dtype, how, shared, exact)
    made = [(binary(cell, dtype, how, arch, spin_limit), how) for how in dict.fromkeys(spilling)]
    yield from sorted(made, key=lambda pair: pair[0].resources.spilled)


def best(*asked: Any, **more: Any) -> tuple[nvrtc.Binary, Forward | Backward] | None:
    """The first of `fitting`, which takes the same; None where the plan has nothing."""
    return next(fitting(*asked, **more), None)


@lru_cache(maxsize=4096)
def kernel(
    kind: str, cell: Traced, dtype: str, hidden: int, tiles: int, flags: plan.Flags, device: int,
    spin_limit: int = 0,
) -> tuple[nvrtc.Kernel, Forward | Backward]:  # fmt: skip
    """The first of `fitting` that the device holds, loaded, and its tiles.

    spin_limit: polls after which a waiting kernel traps; 0: it waits as long as it takes.
    """
    about = torch.cuda.get_device_properties(device)
    capability = about.major, about.minor
    for made, how in fitting(
        kind, cell, dtype, hidden, tiles, flags, capability, spin_limit, about.multi_processor_count
    ):
        taken, together = how.shared(cell, dtype), how.clusters > 1
        kernel = nvrtc.loaded(made, how.cluster, how.threads, taken, device, together)
        if kernel.resident >= how.clusters:
            return kernel, how
    raise NoKernelError(
        f"cell {cell.name} in {dtype}, hidden_size {hidden}: no {kind} kernel whose blocks "
        f"{about.name} with {about.multi_processor_count} multiprocessors holds at once; name "
        'backend="cudnn", or "reference" where cuDNN has no such cell'
    )


def address(tensor: Tensor | None) -> int:
    """Where a tensor begins, 0 where none is: an argument of a launch."""
    return 0 if tensor is None else tensor.data_ptr()


def launch(
    kernel: nvrtc.Kernel, how: Tiles, args: ForwardArgs | BackwardArgs, begun: int = 0
) -> None:
    """Starts a kernel for all rows of a batch, where clusters share R for as many as fit at once.

    What only a grid has of the arguments is set here; begun: see `Kernel.launch`.
    """
    batch = args.batch
    if how.clusters == 1:
        kernel.launch(-(-batch // how.rows), args, begun=begun)
        return
    args.delay = how.delay
    most = kernel.resident // how.clusters
    for first in range(0, batch, how.rows * most):
        args.first_row = first
        groups = min(most, -(-(batch - first) // how.rows))
        kernel.launch(groups * how.clusters, args, begun=begun)


@lru_cache(maxsize=256)
def plain_binary(name: str, dtype: str, arch: str) -> nvrtc.Binary:
    """A compiled kernel that no cell changes: a name is that of its file in `kernels/cuda/`."""
    source = cuda.plain_source(name, dtype)
    return nvrtc.binary(nvrtc.Wanted(source, name, arch, f"{name}-{dtype}"))


@lru_cache(maxsize=256)
def plain(name: str, dtype: str, device: int) -> nvrtc.Kernel:
    """The same, loaded; blocks of 256 threads."""
    arch = nvrtc.arch_of(torch.cuda.get_device_capability(device))
    return nvrtc.loaded(plain_binary(name, dtype, arch), 1, 256, 0, device)
