"""One call of cuDNN each way, for at most LONGEST steps, with our rules for rows of length 0."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openrnn.memo import memo
from openrnn.memory import template
from openrnn.native import graphs
from openrnn.native.cudnn.descriptors import (
    BATCH_MAJOR,
    DEFAULT_MATH,
    FMA_MATH,
    PACKED,
    TENSOR_MATH,
    TIME_MAJOR,
    Kind,
    Shapes,
    network,
    space_bytes,
)
from openrnn.native.cudnn.handles import Handle
from openrnn.native.device import On
from openrnn.native.side_stream import Streams
from openrnn.params import size

LONGEST = 65535  # steps that a data descriptor takes
PLANS = 256  # kept by a thread for each device
ADD = 0  # weight gradients are added; setting them is not supported
# steps from which a call that repeats becomes a CUDA graph, and steps of all layers and directions
# up to which one does: a graph has some nodes for each
LEAST_STEPS, MOST_STEPS = 8, 4096


class Lengths(NamedTuple):
    """Lengths of which at least one ends before T."""

    host: Tensor  # (B,) int32 on the host
    device: Tensor  # (B,) int64
    zeros: bool  # some are 0
    steps: int  # T, as far as the descriptor is concerned


def math_of(dtype: torch.dtype, precision: str) -> int:
    """Which arithmetic products may use; `precision` is a problem's."""
    if dtype in (torch.float16, torch.bfloat16):
        return TENSOR_MATH
    return FMA_MATH if dtype == torch.float32 and precision == "ieee" else DEFAULT_MATH


@memo(1024)
def _full(steps: int, batch: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((batch,), steps, dtype=torch.int32, device="cpu")


def layout_of(x: Tensor, algorithm: str) -> int:
    """How x lies: cuDNN's standard algorithm reads all orders, so that none is copied."""
    if x.dim() == 2:
        return PACKED
    if x.is_contiguous() or algorithm != "standard" or not x.transpose(0, 1).is_contiguous():
        return TIME_MAJOR
    return BATCH_MAJOR


def _laid(tensor: Tensor, layout: int) -> Tensor:
    """The tensor in memory in this order: (B, T, ...) for BATCH_MAJOR."""
    return (tensor.transpose(0, 1) if layout == BATCH_MAJOR else tensor).contiguous()


def _seen(made: Tensor, layout: int) -> Tensor:
    """A sequence as (T, B, ...) that lies in memory in this order."""
    return made.transpose(0, 1) if layout == BATCH_MAJOR else made


def _at(tensors: Sequence[Tensor | None], index: int) -> int | None:
    """The address of one of the tensors, or NULL where it or the sequence is missing."""
    tensor = tensors[index] if index < len(tensors) else None
    return None if tensor is None else tensor.data_ptr()


class CallPlan:
    """One network for one shape of input on one thread's handle: nothing is left to be asked.

    Args:
        layout: of x and y, as `layout_of` says.
        training: cuDNN's forward mode: dropout is drawn, and the reserve written for backward.
        host: (B,) int32, lengths on the host; None where every row has T steps.
        states: the random states of a dropout, whose address is `kind.drop`.
        least: the reserve's size as the operator's fake has it.

    Attributes:
        replays: graphs of calls; None where there are too few steps, too many, or dropout, whose
            random states go on from call to call, and by persist_dynamic.
        width: of y.
        weights, work, reserve: the sizes in bytes of weight space, workspace and reserve.
        states_like, work_like, reserve_like, y_like: what `torch.empty_like`, the quickest way to
            fresh memory, takes for final states, workspace, reserve and y (as it lies in memory,
            not of packed sequences); they hold none themselves.

    Its network runs inside `with plan:`, where the plan's device is the current one.
    """

    __slots__ = (
        "handle", "here", "kept", "kind", "layout", "network", "replays", "reserve", "reserve_like",
        "shapes", "states_like", "weights", "width", "work", "work_like", "y_like",
    )  # fmt: skip

    def __init__(
        self,
        handle: Handle,
        kind: Kind,
        layout: int,
        steps: int,
        batch: int,
        *,
        training: bool,
        host: Tensor | None = None,
        states: Tensor | None = None,
        least: int = 0,
    ) -> None:
        # one network, and one build of it, for all ways to ask for the same
        bare = kind.spec.with_(algorithm="auto", precision="default", reset_dropout_state=False)
        kind = kind._replace(spec=bare)
        self.handle, self.kind, self.layout, self.kept = handle, kind, layout, False
        self.here = On(handle.device)  # made once: at T = 1 another object a call is felt
        spec = kind.spec
        sized = LEAST_STEPS <= steps <= MOST_STEPS // spec.chains
        # nobody has captured persist_dynamic, whose kernels are compiled for one B
        captured = sized and not kind.drop and kind.algorithm != "persist_dynamic"
        self.replays = graphs.Replays() if captured else None
        self.width = spec.directions * spec.output_size
        self.weights = size(spec) * kind.dtype.itemsize
        with self.here:
            self.network = network(handle, kind, states)
            host = _full(steps, batch) if host is None else host
            self.shapes = Shapes(handle.library, kind, layout, steps, batch, host)
            try:
                sizes = space_bytes(handle, self.network, training, self.shapes.x)
            except BaseException:
                self.shapes.close()
                raise
        self.work = sizes[0]
        self.reserve = max(sizes[1], least) if training else 0
        device = torch.device("cuda", handle.device)
        self.states_like = [
            template((spec.chains, batch, width), kind.dtype, device) for width in spec.state_sizes
        ]
        self.work_like = template((self.work,), torch.uint8, device)
        self.reserve_like = template((self.reserve,), torch.uint8, device)
        order = (batch, steps) if layout == BATCH_MAJOR else (steps, batch)
        self.y_like = (
            None if layout == PACKED else template((*order, self.width), kind.dtype, device)
        )

    def __enter__(self) -> "CallPlan":
        self.here.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.here.__exit__(*error)
        if not self.kept:
            self.shapes.close()

    def close(self) -> None:
        """Closes the descriptors; the plan is not to be used again."""
        self.shapes.close()

    def run(self, *calls: "LibraryCall") -> None:
        """Runs calls of cuDNN on torch's current stream.

        cuDNN launches kernels for each step, which costs the host more time than many of them take.
        Where a kept plan is called with the same arguments again, one launch of a CUDA graph does.
        """
        if self.kept and self.replays is not None:
            stream = self.handle.stream
            values = [value or 0 for _, arguments in calls for value in arguments]
            give = partial(self._on, calls)
            if self.replays.launch(self.handle.device, values, give, stream):
                return
            self.handle.move(stream)  # where a capture failed, that may have, too
        for function, arguments in calls:
            function(*arguments)

    def _on(self, calls: "Sequence[LibraryCall]", streams: Streams) -> None:
        """Gives the calls to another main stream than torch's."""
        handle, before = self.handle, self.handle.stream
        handle.move(streams.handle(0))
        try:
            for function, arguments in calls:
                function(*arguments)
        finally:
            handle.move(before)


# a function of cuDNN and its arguments, of which None is NULL
LibraryCall = tuple[Callable[..., Any], tuple[int | None, ...]]


def keep(handle: Handle, key: Hashable, plan: CallPlan) -> None:
    """Keeps a plan with its thread's handle for the next call of the same shape."""
    plan.kept = True
    plans = handle.plans
    plans[key] = plan
    while len(plans) > PLANS:
        plans.popitem(last=False)[1].close()


class Passed(NamedTuple):
    """What a forward call read and wrote, as backward needs it."""

    x: Tensor
    y: Tensor
    states: Sequence[Tensor]
    reserve: Tensor  # backward overwrites it


def forward(
    plan: CallPlan,
    weights: tuple[int, int],
    x: Tensor,
    states: Sequence[Tensor],
    lengths: Lengths | None = None,
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """y (T, B, D*O), final states, and in training the reserve.

    Args:
        weights: size and address of the weight space.
        lengths: those of the plan, where it has some.
    """
    handle, shapes, layout = plan.handle, plan.shapes, plan.layout
    x = _laid(x, layout)
    states = [state.contiguous() for state in states]
    like = plan.y_like
    y = x.new_empty(x.shape[0], plan.width) if like is None else torch.empty_like(like)
    finals = [torch.empty_like(like) for like in plan.states_like]
    workspace = torch.empty_like(plan.work_like)
    reserve = torch.empty_like(plan.reserve_like) if plan.reserve else None
    plan.run((handle.library.cudnnRNNForward, (
        handle.pointer, plan.network.pointer, 0 if reserve is None else 1, None,
        shapes.x, x.data_ptr(), shapes.y, y.data_ptr(),
        shapes.h, _at(states, 0), finals[0].data_ptr(),
        shapes.c, _at(states, 1), _at(finals, 1),
        *weights, plan.work, workspace.data_ptr(),
        plan.reserve, None if reserve is None else reserve.data_ptr(),
    )))  # fmt: skip
    if lengths is not None and lengths.zeros:
        empty = (lengths.device == 0)[:, None]
        finals = [
            torch.where(empty, states[index] if states else 0, final)
            for index, final in enumerate(finals)
        ]
    return _seen(y, layout), finals, reserve


def backward(
    plan: CallPlan,
    weights: tuple[int, int],
    passed: Passed,
    lengths: Lengths | None,
    dy: Tensor | None,
    d_finals: Sequence[Tensor | None],
    wanted: Sequence[bool],
    d_weights: Tensor | None,
) -> tuple[Tensor, list[Tensor | None]]:
    """dx and the gradients of the wanted states; adds to d_weights."""
    handle, shapes, layout = plan.handle, plan.shapes, plan.layout
    x, y, states, reserve = passed
    dy = torch.zeros_like(y) if dy is None else dy
    x, y, dy = _laid(x, layout), _laid(y, layout), _laid(dy, layout)
    # what lies past the lengths cuDNN does not write
    dx = torch.empty_like(x) if lengths is None else torch.zeros_like(x)
    states = [state.contiguous() for state in states]
    d_ends = [None if grad is None else grad.contiguous() for grad in d_finals]
    d_states: list[Tensor | None] = [
        torch.empty_like(state) if want else None for state, want in zip(states, wanted)
    ]
    workspace = torch.empty_like(plan.work_like)
    spaces = (plan.work, workspace.data_ptr(), reserve.numel(), reserve.data_ptr())
    calls: list[LibraryCall] = [(handle.library.cudnnRNNBackwardData_v8, (
        handle.pointer, plan.network.pointer, None,
        shapes.y, y.data_ptr(), dy.data_ptr(), shapes.x, dx.data_ptr(),
        shapes.h, _at(states, 0), _at(d_ends, 0), _at(d_states, 0),
        shapes.c, _at(states, 1), _at(d_ends, 1), _at(d_states, 1),
        *weights, *spaces,
    ))]  # fmt: skip
    if d_weights is not None:
        calls.append((handle.library.cudnnRNNBackwardWeights_v8, (
            handle.pointer, plan.network.pointer, ADD, None,
            shapes.x, x.data_ptr(), shapes.h, _at(states, 0), shapes.y, y.data_ptr(),
            weights[0], d_weights.data_ptr(), *spaces,
        )))  # fmt: skip
    plan.run(*calls)
    if lengths is not None and lengths.zeros:
        empty = (lengths.device == 0)[:, None]
        for index, grad in enumerate(d_states):
            if grad is not None:
                end = d_finals[index]
                d_states[index] = torch.where(empty, 0 if end is None else end, grad)
    return _seen(dx, layout), d_states
