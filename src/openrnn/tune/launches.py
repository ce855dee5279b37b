"""The time of one kernel alone, with random arguments."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, median

import torch
from torch import Tensor

from openrnn.backends.fused import kernels
from openrnn.bench import timer
from openrnn.cells import lookup
from openrnn.codegen import cuda
from openrnn.codegen.config import KernelConfig, saved_values
from openrnn.codegen.tiles import tiles_of
from openrnn.codegen.trace import Traced, trace
from openrnn.kernels.cuda.args import BackwardArgs, ForwardArgs
from openrnn.native import nvrtc
from openrnn.spec import dtype_name
from openrnn.tune.candidates import Candidate
from openrnn.tuning import plan

STEPS, LAUNCHES, REPLAYS = 256, 4, 6
LATER = (0, 50, 100, 150, 200)  # cycles that are added to the fastest delay
RESET_SHARE = 0.03  # of all steps are resets


def time_of(candidate: Candidate, delays: Sequence[int]) -> tuple[float, KernelConfig] | None:
    """Microseconds a step of all loops, and the configuration, with the best of a grid's delays.

    The time is the least of some replays; for a grid it is their mean, since the delay that it ends
    with differs from launch to launch. Launches are replayed from a CUDA graph: one from Python
    would add a tenth of a microsecond to each of 256 steps. None where the device does not hold the
    kernel.
    """
    (_, dtype, _, batch, *_), capability, config = candidate
    cell, grid, loops = (
        trace(lookup(candidate.size.cell)),
        config.is_cooperative,
        candidate.size.loops,
    )
    binary = kernels.binary(cell, dtype, config, nvrtc.arch_of(capability))
    shared = config.shared(cell, dtype)
    kernel = nvrtc.loaded(binary, config.cluster, config.threads, shared, 0, grid)
    if not plan.holds(kernel.max_clusters, config, batch, loops):
        return None
    own = LAUNCHES if grid else 1  # each launch of a grid needs a flag buffer that is filled anew
    made = [arguments(cell, config, batch, getattr(torch, dtype)) for _ in range(own * loops)]
    flags = [held[1] for held, _ in made if grid]
    calls = [[args.words() for _, args in made[index::own]] for index in range(own)]

    def times(tried: KernelConfig, replays: int = REPLAYS) -> list[float]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for words in calls * (LAUNCHES // own):
                _at_once([partial(kernels.launch, kernel, tried, each, batch) for each in words])
        found = []
        for _ in range(replays):
            for flag in flags:
                flag.fill_(-1)
            found.append(timer.sample(graph.replay, 1, "cuda") / (STEPS * LAUNCHES))
        return found[1:]

    if not grid:
        return min(times(config)), config
    if delays and config.delayed(1) != config:
        coarse = min(delays, key=lambda delay: median(times(config.delayed(delay))))
        delayed = [config.delayed(coarse + later) for later in LATER]
        config = min(delayed, key=lambda tried: fmean(times(tried, 3 * REPLAYS)))
    return fmean(times(config, 2 * REPLAYS)), config


def _at_once(launches: Sequence[Callable[[], None]]) -> None:
    """The launches at the same time, each on a stream of its own."""
    main, sides = torch.cuda.current_stream(), [torch.cuda.Stream() for _ in launches[1:]]
    for side in sides:
        side.wait_stream(main)
    for stream, launch in zip((main, *sides), launches):
        with torch.cuda.stream(stream):
            launch()
    for side in sides:
        main.wait_stream(side)


def arguments(
    cell: Traced, config: KernelConfig, batch: int, dtype: torch.dtype, device: str = "cuda"
) -> tuple[list[Tensor], ForwardArgs | BackwardArgs]:
    """Tensors to keep alive, the second of them the flag buffer; and the kernel's arguments."""

    def some(*shape: int) -> Tensor:
        return (torch.rand(shape, device=device) * 0.2 - 0.1).to(dtype)

    short = config.operand_bytes(dtype_name(dtype)) == 2

    def flags(*shape: int) -> Tensor:
        bits = torch.int16 if short else torch.int32
        return torch.full(shape, -1, dtype=bits, device=device)

    units, gates, states = config.units, len(cell.gates), len(cell.states)
    saved = some(STEPS, tiles_of(batch), units // 8, 64 * saved_values(cell))
    weight, final = some(gates, units, units), [some(batch, units) for _ in range(states)]
    size, none = dtype.itemsize, [0] * states
    vectors = some(len(cell.unit_params), units)
    order = torch.arange(batch, device=device)
    lengths = STEPS * (batch - order) // batch
    masks = [lengths, order, torch.rand((STEPS, batch), device=device) < RESET_SHARE]
    on = config.lengths, config.lengths, config.reset
    masked = [mask.data_ptr() if here else 0 for mask, here in zip(masks, on)]
    shared = {
        "weight": weight.data_ptr(), "saved": saved.data_ptr(), "vectors": vectors.data_ptr(),
        **dict(zip(("lengths", "order", "reset"), masked)),
        "steps": STEPS, "batch": batch, "hidden": units, "reverse": 0,
    }  # fmt: skip
    if config.kind == "forward":
        x = some(STEPS, batch, gates * units)
        buffer = flags(*config.flag_buffer(cell, STEPS, batch).shape)
        # else y is the flag buffer
        own = config.half_operands or config.lengths or config.reset or not config.y_flags
        y = some(STEPS, batch, units) if own else buffer.view(dtype)
        forward = ForwardArgs(
            x=x.data_ptr(), x_step_bytes=size * x.stride(0), x_row=x.stride(1), x_gate=units,
            y=y.data_ptr(), y_step_bytes=size * y.stride(0), y_row=y.stride(1),
            flag_buffer=buffer.data_ptr() if own else 0, saved_step_bytes=size * saved.stride(0),
            reset_step_bytes=batch, initial=none, reset_state=none, all_states=none,
            final=[state.data_ptr() for state in final], **shared,
        )  # fmt: skip
        return [x, buffer, y, saved, weight, vectors, *final, *masks], forward
    planes = len(cuda.planes(cell))
    dy, d_gates = some(STEPS, batch, units), flags(STEPS, batch, planes, units)
    sums = torch.empty(config.sum_parts(batch), planes + len(vectors), units, device=device)
    buffer = d_gates if config.y_flags else flags(*config.flag_buffer(cell, STEPS, batch).shape)
    backward = BackwardArgs(
        flag_buffer=0 if config.y_flags else buffer.data_ptr(),
        dy=dy.data_ptr(), dy_step_bytes=-size * dy.stride(0), dy_row=dy.stride(1),
        d_gates=d_gates.data_ptr(), d_gates_step_bytes=-size * d_gates.stride(0),
        sums=sums.data_ptr(), saved_step_bytes=-size * saved.stride(0), reset_step_bytes=-batch,
        d_final=none, d_all_states=none, d_initial=none, d_reset_state=none, **shared,
    )  # fmt: skip
    return [dy, buffer, d_gates, sums, saved, weight, vectors, *masks], backward
