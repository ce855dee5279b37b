"""Where cuDNN is measured faster than our kernels, from which `auto` chooses; never keyed on T."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from openrnn.spec import Problem


class CudnnRegion(NamedTuple):
    """Calls that `auto` gives to cuDNN, by their sizes."""

    cells: tuple[str, ...]
    dtype: torch.dtype
    hidden: tuple[int, int]  # the least and the most
    batch: tuple[int, int]
    grads: tuple[bool, ...]

    def holds(self, problem: Problem, batch: int) -> bool:
        """Whether a problem with so many rows lies in it."""
        spec = problem.spec
        return (
            spec.cell in self.cells
            and problem.dtype == self.dtype
            and self.hidden[0] <= spec.hidden_size <= self.hidden[1]
            and self.batch[0] <= batch <= self.batch[1]
            and problem.grad in self.grads
        )

    def __str__(self) -> str:
        def span(least: int, most: int) -> str:
            return f"{least}" if least == most else f"{least} to {most}"

        dtype = {torch.float32: "tf32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
        grads = " and ".join("with gradients" if grad else "inference" for grad in self.grads)
        return f"H {span(*self.hidden)}, B {span(*self.batch)}, {dtype[self.dtype]}, {grads}"


# Measured on an H200 with cuDNN 9.19, T 256, both from CUDA graphs. Results: fused.json of
# benchmarks/log; for the tanh RNN fused-choice.json, whose one loss, float32 at H 256 B 1, was of
# its former tf32 products; for the ReLU RNN, T 50,
# `git show 7c32eed:benchmarks/results/h200/deepbench.jsonl`. A region is where cuDNN's best correct
# algorithm (in bfloat16 torch.nn's choice) takes at most 0.95 of our time; the share stands behind
# it. Between two measured H the border lies halfway; B is a class that ends at a power of two;
# nothing is said beyond what was measured. The losses of fused.json at H 1024, B 256 were of grids.
# Other loops run there now, so they are left out. Of those only an LSTM in bfloat16 was measured:
# torch.nn's graph takes 1.51 of our time in inference, 1.40 in training (lstm-1x1024-b256 of
# `git show bae6cd4:benchmarks/results/h200/stacks.jsonl`).
CUDNN_FASTER = (
    CudnnRegion(("rnn_relu",), torch.float16, (2304, 2560), (65, 128), (True,)),  # 0.75
    # measured at T 25 only; the runs are in no file, and CHANGELOG.md has these shares. At B 64
    # torch.nn's graph takes 1.12 of our time in float16: benchmarks/results/h200/deepbench.jsonl
    CudnnRegion(("lstm",), torch.float16, (2041, 2048), (65, 128), (True,)),  # 0.82
    CudnnRegion(("lstm",), torch.bfloat16, (2041, 2048), (65, 128), (True,)),  # 0.84
)
# Where cuDNN ran before our kernels could, and they were not compared: calls of any kind. An LSTM
# of H 2048 has a backward loop of ours since tiles-large.jsonl. Each 32 rows are a launch of it, so
# more rows than were measured are no better.
CUDNN_NOT_COMPARED = tuple(
    CudnnRegion(("lstm",), dtype, (2041, 2048), (129, 1 << 20), (True,))
    for dtype in (torch.float16, torch.bfloat16)
)


def not_compared(problem: Problem) -> str | None:
    """The region of a problem, in words, if cuDNN keeps it without a measurement; else None."""
    if problem.batch is None or problem.capability != (9, 0):
        return None
    return _region(CUDNN_NOT_COMPARED, problem, problem.batch)


def slower(problem: Problem) -> str | None:
    """The region of a problem, in words, if cuDNN is faster there; else None.

    Only plain calls of one layer and direction were measured. With lengths or other biases cuDNN
    does not use its fast kernels.
    """
    spec = problem.spec
    plain = (
        problem.capability == (9, 0) and not problem.lengths and not problem.drops
        and spec.chains == 1 and spec.bias_mode == "double" and spec.input_mode == "linear"
        and spec.cell_clip is None and spec.recompute == "none"
    )  # fmt: skip
    if problem.batch is None or not plain:
        return None
    return _region(CUDNN_FASTER, problem, problem.batch)


def _region(regions: Iterable[CudnnRegion], problem: Problem, batch: int) -> str | None:
    return next((str(one) for one in regions if one.holds(problem, batch)), None)
