"""Small calls of every kind of CUDA kernel and schedule, for NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck --report-api-errors no python3 -m tests.sanitize
    compute-sanitizer --tool racecheck python3 -m tests.sanitize --every-lane --part 0 --parts 4

Without that option memcheck counts what cuda-bindings asks of the driver in vain. racecheck reports
cuBLAS's kernels, too, whose names begin with nvjet; where they are excluded it crashes.

Each case is named before it runs, so that a report can be told to belong to it. The sanitizer
itself says what is wrong; here a result that is no number ends the run.

In loops with multicast and of stacks one lane arrives at an mbarrier for its warp, after
`__syncwarp`. racecheck does not see that the other lanes' accesses come before, and reports each of
them. With `--every-lane` all lanes arrive, and it has no report of these kernels.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

import openrnn
from openrnn import cells, memo
from openrnn.backends.fused import kernels, schedules
from openrnn.codegen import cuda
from openrnn.codegen.cluster_stack_config import ClusterStackConfig
from openrnn.codegen.config import KernelConfig
from openrnn.codegen.multicast_config import MulticastConfig
from openrnn.codegen.step_config import StepConfig
from openrnn.codegen.trace import Traced
from openrnn.native.nvrtc import CudaKernel
from openrnn.tuning import cluster_stack, plan, single_step
from openrnn.tuning.limits import Limits

BF16, TF32 = torch.bfloat16, torch.float32
Case = dict[str, object]


def cases() -> Iterator[Case]:
    """Blocks, clusters and grids with and without masks; both directions, stacks, single steps."""
    for cell in ("lstm", "gru"):
        for hidden in (24, 37, 256, 1031):
            for dtype in (BF16, TF32):
                yield {"cell": cell, "hidden": hidden, "dtype": dtype}
                yield {"cell": cell, "hidden": hidden, "dtype": dtype, "masks": True}
        yield {"cell": cell, "hidden": 64, "bidirectional": True, "steps": 120}
        yield {"cell": cell, "hidden": 64, "layers": 3, "wavefront": 3, "steps": 11}
        yield {"cell": cell, "hidden": 256, "layers": 3, "wavefront": 3, "masks": True}
        # all layers in one launch, with multicast or in clusters, of which 24 fill a block
        stack = {"cell": cell, "layers": 3, "wavefront": 1, "steps": 11}
        for batch in (33, 70):
            yield {**stack, "hidden": 256, "batch": batch, "multicast": True}
        for hidden, batch in ((24, 9), (64, 33), (256, 20)):
            for dtype in (BF16, TF32):
                yield {**stack, "hidden": hidden, "batch": batch, "dtype": dtype}
        # units that are padded
        ways = {"wavefront": 3}, {"batch": 9}, {"batch": 70, "multicast": True}
        yield from ({**stack, "hidden": 250, **way} for way in ways)
        # backward: 12 polls at once, and for an LSTM of 512 units two rounds
        yield from ({**stack, "hidden": hidden, "batch": 9} for hidden in (384, 512))
        # the last one by GEMMs
        for hidden, batch in ((64, 3), (256, 33), (1024, 16), (512, 300)):
            for dtype in (BF16, TF32):
                yield {
                    "cell": cell, "hidden": hidden, "batch": batch, "dtype": dtype, "steps": 1,
                }  # fmt: skip
        for masks in (False, True):  # h by TMA
            yield {"cell": cell, "hidden": 1024, "batch": 250, "masks": masks, "steps": 3}
            yield {"cell": cell, "hidden": 1280, "batch": 48, "masks": masks, "steps": 3}
        # two grids at once, each on half of the device
        yield {"cell": cell, "hidden": 1024, "bidirectional": True, "steps": 20}
        yield {"cell": cell, "hidden": 1024, "layers": 2, "wavefront": 2, "batch": 64, "steps": 5}
        # chunks of time, whose products run beside loops
        yield {"cell": cell, "hidden": 64, "steps": 11, "cut": True}
        yield {"cell": cell, "hidden": 1024, "batch": 16, "steps": 11, "cut": True, "masks": True}
        yield {"cell": cell, "hidden": 64, "bidirectional": True, "steps": 120, "cut": True}
        # as if no kernel held R; other cases have other sizes, as loaded kernels are kept by size
        for hidden in (40, 45):
            for dtype in (BF16, TF32):
                stepwise = {"cell": cell, "hidden": hidden, "dtype": dtype, "stepwise": True}
                yield {**stepwise, "batch": 70, "bidirectional": True}
                yield {**stepwise, "masks": True}
                yield {**stepwise, "resets": True}
        # as if a grid had no room for a part of R
        for dtype in (BF16, TF32):
            streams = {"cell": cell, "hidden": 104, "dtype": dtype, "streams": True}
            yield {**streams, "batch": 20}
            yield {**streams, "masks": True}
        yield from _uneven(cell)
        one = {"cell": cell, "hidden": 64, "steps": 1}
        yield {**one, "dtype": torch.float16, "resets": True}
        yield {**one, "bidirectional": True, "layers": 2}
        yield {**one, "grad": False, "resets": True}
        sizes = (2, 1), (8, 1), (1, 2), (4, 2), (8, 2)
        yield from ({**one, "hidden": 48, "batch": 70, "block": block} for block in sizes)
    yield {"cell": "peephole_lstm", "hidden": 64, "steps": 1}


def _uneven(cell: str) -> Iterator[Case]:
    """Groups of units do not divide evenly, and backward adds an odd number of shares."""
    for hidden, blocks in ((72, 5), (88, 7)):
        case: Case = {"cell": cell, "hidden": hidden, "batch": 20, "blocks": blocks}
        yield {**case, "dtype": TF32}
        yield {**case, "masks": True}
        yield {**case, "layers": 3, "wavefront": 1, "steps": 11}


def splits_of(blocks: int) -> Callable[[Limits, int], Iterator[tuple[int, int]]]:
    """In the place of `Limits.splits`: clusters of so many blocks alone."""
    every = Limits.splits
    return lambda limits, units: (one for one in every(limits, units) if one[0] == blocks)


def streaming(cell: Traced, dtype: str, config: KernelConfig) -> KernelConfig:
    """A grid with half as much of R in registers, which reads half of the rest from memory."""
    held = config.register_fragments // 2
    rest = config.fragments(cell, dtype) - held
    return replace(config, register_fragments=held, streamed_fragments=-(-rest // 2))


def run(
    cell: str, hidden: int, dtype: torch.dtype = BF16, steps: int = 5, batch: int = 9,
    layers: int = 1, bidirectional: bool = False, wavefront: int | None = None,
    masks: bool = False, resets: bool = False, grad: bool = True, cut: bool = False,
    stepwise: bool = False, multicast: bool = False, streams: bool = False, blocks: int = 0,
    block: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """One call with initial states, and its gradients.

    Args:
        masks: lengths and resets; resets: resets to states that are given.
        cut: in three chunks of time.
        stepwise: as if no kernel held R.
        multicast: as if clusters held no layer of a stack.
        streams: grids that read half of R from memory.
        blocks: only clusters of so many blocks.
        block: tiles of rows, and groups of units, of a block of a single step.
    """
    torch.manual_seed(0)
    edges = [0, 2, 5, steps] if cut else []
    memo.clear()  # schedules of other cases
    layer = openrnn.Recurrent(
        getattr(cells, cell), 16, hidden, layers, bidirectional=bidirectional,
        wavefront=wavefront, backend="fused", device="cuda", dtype=dtype,
    )  # fmt: skip
    x = torch.randn(steps, batch, 16, device="cuda", dtype=dtype, requires_grad=True)
    shape = layer.spec.chains, batch, hidden
    states = tuple(
        torch.rand(shape, device="cuda", dtype=dtype, requires_grad=grad) for _ in layer.spec.states
    )
    single = states if len(states) > 1 else states[0]
    given: dict[str, object] = {}
    if masks:
        given["lengths"] = torch.arange(batch, device="cuda") % (steps + 1)
    if masks or resets:
        given["reset"] = torch.arange(steps * batch, device="cuda").view(steps, batch) % 7 == 0
    if resets:
        given["reset_state"] = single
    wanted = [x, *states, *layer.parameters()] if grad else []

    def none(*_: object, **__: object) -> tuple[()]:
        return ()

    def grids(loop: plan.LoopRequest, loops: int = 1, layers: int = 1) -> tuple[KernelConfig, ...]:
        every = whole(loop, loops, layers)
        some = (one for one in every if one.clusters > 1 and not one.wgmma)
        return tuple(streaming(loop.cell, loop.dtype, one) for one in some)

    def launched(kernel: CudaKernel, config: KernelConfig, *given: Any) -> None:
        found.add((config.cluster, config.layers))
        launch(kernel, config, *given)

    launch, found = kernels.launch, set[tuple[int, int]]()
    whole = plan.holding_r
    with (
        patch.object(schedules, "edges", lambda *_: edges) if cut else nullcontext(),
        patch.object(schedules, "edges_of_both", lambda *_: edges) if cut else nullcontext(),
        patch.object(plan, "holding_r", none) if stepwise else nullcontext(),
        patch.multiple(cluster_stack, forwards=none, backwards=none)
        if multicast
        else nullcontext(),
        patch.object(plan, "holding_r", grids) if streams else nullcontext(),
        patch.object(Limits, "splits", splits_of(blocks)) if blocks else nullcontext(),
        patch.object(kernels, "launch", launched) if blocks else nullcontext(),
        patch.object(
            single_step, "forward", lambda *_: [StepConfig("step_forward", *block or (), 2)]
        )
        if block
        else nullcontext(),
        torch.set_grad_enabled(grad),
    ):
        y, *_ = layer(x, single, **given)
        grads = torch.autograd.grad(y.sum(), wanted) if grad else ()
    if not all(bool(one.isfinite().all()) for one in (y, *grads)):
        raise SystemExit("a result is not finite")
    if blocks and found != {(blocks, layers)}:
        raise SystemExit(f"blocks of a cluster and layers of each launch: {found}")


def _by_one_thread(statement: str, count: str = "COUNT") -> str:
    """CUDA of a loop over mbarriers, in one thread."""
    loop = f"for (int k = 0; k < {count}; ++k)"
    return f"if (threadIdx.x == 0) {{\n#pragma unroll 1\n{loop} {{ {statement}; }}\n}}"


def every_lane_arrives() -> None:
    """Kernels are compiled for racecheck: each lane arrives at the mbarriers that await warps."""
    plain = cuda.source
    arrival = {
        "if (lane == 0) arrive(mbarrier);": "arrive(mbarrier);",
        # racecheck takes what threads that do not set or open an mbarrier have in the register of
        # its address for an address: here the compiler makes a branch around them
        "if (threadIdx.x < COUNT) mbarrier_init(mbarrier, 1);": _by_one_thread(
            "mbarrier_init(mbarriers + k * 8, 1)"
        ),
        "if (threadIdx.x < COUNT && (!ODD_ONLY || threadIdx.x & 1)) "
        "mbarrier_expect(mbarrier, bytes);": _by_one_thread(
            "if (!ODD_ONLY || k & 1) mbarrier_expect(mbarriers + k * 8, bytes)"
        ),
    }
    of_multicast = {
        ": offset < AT_READ ? PRODUCT_WARPS : offset < AT_MESSAGE_BARRIERS ? CELL_WARPS : 1;":
            ": offset < AT_READ ? PRODUCT_WARPS * 32\n"
            "            : offset < AT_MESSAGE_BARRIERS ? CELL_WARPS * 32 : 1;",
    }  # fmt: skip
    of_stack = {
        "if (threadIdx.x < 2 * WARPS * STAGES) mbarrier_init(mbarriers + threadIdx.x * 8, 1);":
            _by_one_thread("mbarrier_init(mbarriers + k * 8, 32)", "2 * WARPS * STAGES"),
    }  # fmt: skip

    def source(cell: Traced, dtype: str, config: KernelConfig) -> str:
        text, changes = plain(cell, dtype, config), {}
        if isinstance(config, MulticastConfig | ClusterStackConfig):
            counts = of_multicast if isinstance(config, MulticastConfig) else of_stack
            changes = arrival | counts
        for before, after in changes.items():
            if text.count(before) != 1:
                raise SystemExit(f"kernels have no longer {before!r} once")
            text = text.replace(before, after)
        return text

    patch.object(cuda, "source", source).start()


def main() -> None:
    """Runs the cases of a part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", type=int, default=0, help="which of the parts to run, from 0")
    parser.add_argument("--parts", type=int, default=1, help="how many there are")
    parser.add_argument("--every-lane", action="store_true", help="for racecheck, see above")
    parser.add_argument("--only", help="cases with this argument alone, such as layers")
    asked = parser.parse_args()
    if asked.every_lane:
        every_lane_arrives()
    some = [case for case in cases() if asked.only is None or asked.only in case]
    chosen = some[asked.part :: asked.parts]
    for number, case in enumerate(chosen):
        print(f"case {number + 1} of {len(chosen)}: {case}", flush=True)
        run(**case)  # type: ignore[arg-type]
        torch.cuda.synchronize()
    print("all cases ended", flush=True)


if __name__ == "__main__":
    main()
