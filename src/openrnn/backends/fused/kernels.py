"""From a configuration to a kernel that is ready to launch: compiled, without spills, loaded."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice, product, zip_longest
from typing import TypeVar

import torch

from openrnn.codegen import cuda
from openrnn.codegen.config import BackwardConfig, ForwardConfig, KernelConfig
from openrnn.codegen.step_config import StepConfig
from openrnn.codegen.trace import Traced
from openrnn.cores import usable_cores
from openrnn.errors import OpenRNNError, warn_user
from openrnn.kernels.cuda.args import LOOPS
from openrnn.memo import memo, resource
from openrnn.memory import allocator_for
from openrnn.native import nvrtc
from openrnn.tuning import measured, plan

Config = TypeVar("Config", bound=KernelConfig)
LoopConfig = ForwardConfig | BackwardConfig
# where the arguments that only grids and stacks have stand among the words of a launch
GRID_WORDS = {
    kind: tuple(table.word_index(name) for name in ("delay", "first_row", "streamed"))
    for kind, table in LOOPS.items()
}


class NoKernelError(OpenRNNError, RuntimeError):
    """The device holds no kernel for several loops at once, or several layers in one launch."""


MAX_COMPILED = 12  # ranked configurations that are compiled at most
# shapes (blocks of a cluster, batch rows) that are skipped at most, where a device holds too few
MOST_SKIPPED = 3
FEWER_FRAGMENTS = (0, 1, 2, 5, 9)  # of R in registers than planned, tried in turn
AT_ONCE = 3  # tries compiled at a time where cores are idle; more are seldom needed


def _source_of(
    cell: Traced, dtype: str, config: KernelConfig, arch: str, spin_limit: int
) -> nvrtc.KernelSource:
    head = f"#define SPIN_LIMIT {spin_limit}\n" if spin_limit else ""
    title = f"cell {cell.name} for {dtype}, {config.kind}, hidden_size {config.units}, CUDA"
    return nvrtc.KernelSource(head + cuda.source(cell, dtype, config), config.kind, arch, title)


@memo(4096)
def binary(
    cell: Traced, dtype: str, config: KernelConfig, arch: str, spin_limit: int = 0
) -> nvrtc.Binary:
    """The compiled kernel."""
    if config != config.as_compiled:
        return binary(cell, dtype, config.as_compiled, arch, spin_limit)
    return nvrtc.binary(_source_of(cell, dtype, config, arch, spin_limit))


def tries_of(
    cell: Traced, dtype: str, config: Config, shared: int, exact: bool = False
) -> list[Config]:
    """Configurations to compile until one spills nothing; only those that shared memory holds.

    The model says how much of R registers hold, but only the compiler knows. A low-register kernel
    is tried before one with fewer fragments in registers.

    Args:
        shared: bytes of shared memory of a block.
        exact: this configuration and no other.
    """
    changes = product((config.stages, 2), FEWER_FRAGMENTS, (config.low_register, True))
    most = config.register_fragments
    tries = [config] if exact else [
        replace(
            config.with_registers(max(0, most - fewer)), stages=stages, low_register=low_register
        )
        for stages, fewer, low_register in changes
    ]  # fmt: skip
    return [one for one in dict.fromkeys(tries) if one.shared(cell, dtype) <= shared]


def unspilled(
    cell: Traced, dtype: str, config: Config, arch: str, shared: int, spin_limit: int = 0,
    exact: bool = False, at_once: int = AT_ONCE,
) -> tuple[nvrtc.Binary, Config] | None:  # fmt: skip
    """The first of `tries_of` that spills at most what its kind may; None if all spill more.

    A try takes a second or two. On idle cores up to `at_once` of them are compiled at a time.
    """
    tries = tries_of(cell, dtype, config, shared, exact)

    def compiled(tried: Config) -> nvrtc.Binary:
        return binary(cell, dtype, tried, arch, spin_limit)

    while tries and _source_of(cell, dtype, tries[0], arch, spin_limit).path.exists():
        tried = tries.pop(0)
        if (made := compiled(tried)).resources.spilled <= tried.most_spilled:
            return made, tried
    with _compiling(compiled, tries, at_once) as found:
        for tried, made in zip(tries, found):
            if made.resources.spilled <= tried.most_spilled:
                return made, tried
    return None


@contextmanager
def _compiling(
    compiled: Callable[[Config], nvrtc.Binary], tries: Sequence[Config], at_once: int
) -> Iterator[Iterable[nvrtc.Binary]]:
    """The tries in their order, some compiled at a time; those left at the end are cancelled."""
    threads = min(len(tries), usable_cores() // 2, at_once)
    if threads < 2:
        yield map(compiled, tries)
        return
    nvrtc.prepare()
    pool = ThreadPoolExecutor(threads)  # not kept: a fork would copy it without its threads
    try:
        yield pool.map(compiled, tries)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def fitting(
    loop: plan.LoopRequest, spin_limit: int = 0, loops: int = 1, layers: int = 1
) -> Iterator[tuple[nvrtc.Binary, LoopConfig]]:
    """Compiled kernels, best first: those that spill at most what their kind may, then others.

    A measured configuration is tried as it is; the model's of the same shape follows it. Near the
    largest H every try may spill. Such kernels follow, the fewest spilled bytes first: they run
    right, but slower. The one of a stepwise loop comes last, unless it is ranked first.

    Args:
        loops: how many such loops the device is to hold at once.
        layers: that one launch runs.
    """
    cell, dtype = loop.cell, loop.dtype
    arch, shared = nvrtc.arch_of(loop.capability), loop.limits.shared
    compilable = plan.compilable_configs(loop, loops, layers)
    configs = list(islice(compilable, MAX_COMPILED))
    # this drains `compilable`: of those past MAX_COMPILED only stepwise ones are kept
    last = [one for one in (*configs[1:], *compilable) if one.stepwise]
    configs = [one for one in configs if one not in last]
    spilling: list[LoopConfig] = []
    for config, after in zip_longest(configs, configs[1:]):
        exact = after is not None and measured.shape_of(config) == measured.shape_of(after)
        found = unspilled(cell, dtype, config, arch, shared, spin_limit, exact)
        if found is not None:
            yield found
        else:
            spilling += tries_of(cell, dtype, config, shared, exact)
    made = [(binary(cell, dtype, one, arch, spin_limit), one) for one in dict.fromkeys(spilling)]
    yield from sorted(made, key=lambda pair: pair[0].resources.spilled)
    yield from ((binary(cell, dtype, one, arch, spin_limit), one) for one in last)


def best(
    loop: plan.LoopRequest, spin_limit: int = 0, loops: int = 1, layers: int = 1
) -> tuple[nvrtc.Binary, LoopConfig] | None:
    """The first of `fitting`; None where no kernel fits."""
    return next(fitting(loop, spin_limit, loops, layers), None)


@resource
def kernel(
    loop: plan.LoopRequest, device: int, spin_limit: int = 0, loops: int = 1, layers: int = 1
) -> tuple[nvrtc.CudaKernel, LoopConfig]:
    """The first of `fitting` that the device holds, loaded, and its configuration.

    Devices of one name may hold different numbers of clusters. If this one holds so few clusters of
    a kernel that its batch needs half as many rounds again as planned, the next shape is tried (the
    blocks and rows of a cluster); after three such shapes the first of them is taken.

    Args:
        loop: with the capability and the multiprocessors of the device.
        device: its index.
        spin_limit: polls after which a waiting kernel traps; 0: it waits as long as it takes.
        loops: of how many such loops at once the device is to hold the kernel.
        layers: that one launch runs.
    """
    cell, dtype = loop.cell, loop.dtype
    name = torch.cuda.get_device_properties(device).name
    slower: list[tuple[nvrtc.CudaKernel, LoopConfig]] = []
    skipped = set[tuple[int, int]]()
    for made, config in fitting(loop, spin_limit, loops, layers):
        shared, cooperative = config.shared(cell, dtype), config.is_cooperative
        kernel = nvrtc.loaded(made, config.cluster, config.threads, shared, device, cooperative)
        if config.stepwise:
            if slower:  # a kernel that needs more rounds is better than a launch for each step
                break
            if not plan.ranked(loop)[0].stepwise:
                warn_user(
                    f"cell {cell.name} in {dtype}, hidden_size {loop.hidden}: {name} holds the "
                    f"blocks of no planned {loop.kind} kernel at once, so each step is a GEMM and "
                    "a launch",
                    RuntimeWarning,
                )
            return kernel, config
        resident = kernel.max_clusters
        if not plan.holds(resident, config, loop.batch, loops):
            if loops == 1:  # not one copy of R, or of a stack, is resident
                continue
        elif plan.needs_more_rounds(resident, config, loop.batch, loop.limits):
            slower.append((kernel, config))
        else:
            return kernel, config
        skipped.add((config.cluster, config.rows))
        if len(skipped) == MOST_SKIPPED:
            break
    if slower:  # each needs more rounds than planned, or no other is left
        return slower[0]
    raise NoKernelError(
        f"cell {cell.name} in {dtype}, hidden_size {loop.hidden}: {name} with {loop.processors} "
        f"multiprocessors holds the blocks of no {loop.kind} kernel for {loops} loops of {layers} "
        "layers at once"
    )


def launch(
    kernel: nvrtc.CudaKernel, config: KernelConfig, words: list[int], batch: int,
    launch_event: int = 0,
) -> None:  # fmt: skip
    """Launches a loop for all rows of the batch; grids and stacks for as many as fit, in turn.

    Args:
        words: of its arguments; `delay`, `first_row` and `streamed` of these are set here.
        launch_event: see `CudaKernel.launch`.
    """
    if not config.is_cooperative:
        kernel.launch(-(-batch // config.rows), words, launch_event)
        return
    delay, first_row, streamed = GRID_WORDS[config.kind]
    words[delay] = config.delay
    copies = kernel.max_clusters // config.clusters  # of R, each with rows of its own
    if config.streamed_fragments:  # the launches use the memory one after the other
        blocks = min(copies, -(-batch // config.rows)) * config.clusters * config.cluster
        memory = allocator_for(torch.uint8, torch.device("cuda", kernel.device))
        held = memory.empty(config.streamed_bytes(blocks))
        words[streamed] = held.data_ptr()
    for first in range(0, batch, config.rows * copies):
        words[first_row] = first
        used = min(copies, -(-(batch - first) // config.rows))
        kernel.launch(used * config.clusters, words, launch_event)


@memo(1024)
def step_binary(cell: Traced, dtype: str, config: StepConfig, arch: str) -> nvrtc.Binary:
    """The compiled kernel of a single step."""
    source, title = (
        cuda.step_source(cell, dtype, config),
        f"cell {cell.name} for {dtype}, {config.kind}, CUDA",
    )
    return nvrtc.binary(nvrtc.KernelSource(source, config.kind, arch, title))


def best_step(
    configs: Iterable[StepConfig], cell: Traced, dtype: str, arch: str
) -> tuple[nvrtc.Binary, StepConfig]:
    """The first of some kernels of a step that spills nothing, or the last of all."""
    for config in configs:
        made = step_binary(cell, dtype, config, arch)
        if not made.resources.spilled:
            break
    return made, config


@memo(256)
def plain_binary(name: str, dtype: str, arch: str, structs: int = 1) -> nvrtc.Binary:
    """A compiled kernel that no cell changes.

    Args:
        name: of the kernel and of its file in `kernels/cuda/`.
        structs: see `cuda.plain_source`.
    """
    source = cuda.plain_source(name, dtype, structs)
    return nvrtc.binary(nvrtc.KernelSource(source, name, arch, f"{name} for {dtype}, CUDA"))


@resource
def plain(name: str, dtype: str, device: int, structs: int = 1) -> nvrtc.CudaKernel:
    """A plain kernel, loaded on a device."""
    arch = nvrtc.arch_of(torch.cuda.get_device_capability(device))
    made = plain_binary(name, dtype, arch, structs)
    return nvrtc.loaded(made, 1, cuda.PLAIN_THREADS, 0, device)


def launch_several(
    name: str, dtype: str, device: int, every: Sequence[list[int]], blocks: int
) -> None:
    """One launch of a plain kernel for several structs of arguments.

    Args:
        every: the words of each struct.
        blocks: for each of them.
    """
    words = [*chain.from_iterable(every)]
    plain(name, dtype, device, len(every)).launch(blocks * len(every), words)
