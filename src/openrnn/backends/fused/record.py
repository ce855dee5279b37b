"""A pass of the backend made into a program, by a dry run in which no launch reaches the GPU.

Every address that the dry run would have passed lies in a tensor of the caller or in one that it
took. A program has the slot of that tensor in its place, and an offset.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from openrnn.backends.fused.copies import ALIGNMENT
from openrnn.backends.fused.lifetimes import lifetimes_of, workspace_offsets
from openrnn.backends.fused.program import (
    LaunchOp,
    MatmulOp,
    Operation,
    Program,
    SlotRef,
    WaitForLaunchOp,
    WaitOp,
)
from openrnn.kernels.cuda.args import LOOPS, PLAIN, STEPS
from openrnn.kernels.cuda.table import Args
from openrnn.memory import TensorFactory, template
from openrnn.native.recording import (
    NotRepeatableError,
    RecordedMatmul,
    RecordedOperation,
    RecordedWait,
    RecordedWaitForLaunch,
    Recording,
    recorded,
)
from openrnn.tensors import extent

# A dry run allocates all that its pass allocates, alive at the same time, on top of the memory of
# the call. So passes have programs up to MAX_PROGRAM_BYTES, or a share of the device if that is
# less, but at least up to MIN_PROGRAM_BYTES. Larger ones are launched from Python at each call.
MAX_PROGRAM_BYTES, MAX_DEVICE_SHARE, MIN_PROGRAM_BYTES = 4 << 30, 1 / 32, 64 << 20
PART = 256  # bytes that parts of the workspace begin at multiples of
TABLES: dict[str, type[Args]] = {**LOOPS, **STEPS, **PLAIN}
_EMPTY, _ZEROS = torch.ops.aten.empty_like.default, torch.ops.aten.zeros_like.default

DryRun = Callable[[Sequence[Tensor]], Sequence[Tensor | None]]


class _AllocationMode(TorchDispatchMode):
    """Lets a pass take memory and view it; ends it where torch would compute something.

    Nobody reads the values of a dry run, so what is to be zero is made empty, too.

    Args:
        most: bytes that the pass may take.

    Attributes:
        taken: all tensors that the pass took, kept so that no two have the same memory.
        zeros: the addresses of those that it wants to be zero.
    """

    def __init__(self, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.most = most
        self.taken: list[Tensor] = []
        self.zeros: set[int] = set()
        self._bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function not in (_EMPTY, _ZEROS):
            if not function.is_view:
                raise NotRepeatableError(f"torch computes {function}")
            # of inference tensors `contiguous` comes as a whole, called a view though it may copy
            if function._can_decompose():
                with self:
                    return function.decompose(*args, **kwargs or {})
            return function(*args, **kwargs or {})
        self._bytes += args[0].nbytes
        if self._bytes > self.most:
            raise NotRepeatableError(f"it takes more than {self.most} bytes")
        made = _EMPTY(*args, **kwargs or {})
        self.taken.append(made)
        if function is _ZEROS:
            self.zeros.add(made.data_ptr())
        return made


class _AddressMap:
    """Which slot an address belongs to."""

    def __init__(self) -> None:
        self._found: list[tuple[int, int, SlotRef]] = []  # first address, end, where it lies

    def add(self, tensor: Tensor, at: SlotRef) -> None:
        """The memory of a tensor, which overlaps no other."""
        begin = tensor.data_ptr()
        insort(self._found, (begin, begin + extent(tensor), at))

    def of(self, address: int) -> SlotRef:
        """Where an address lies."""
        index = bisect_right(self._found, address, key=lambda one: one[0]) - 1
        if index >= 0:
            begin, end, (slot, offset) = self._found[index]
            if address < end:
                return SlotRef(slot, offset + address - begin)
        raise NotRepeatableError(f"the address {address:#x} belongs to no tensor")


def record(run: DryRun, given: Sequence[Tensor]) -> Program:
    """A program that does what `run` does, and makes those of its results that are not None.

    Args:
        run: a pass, of tensors as `given`; the results are dense, in memory that it took.
        given: tensors of a call, whose addresses are the first values of a run.

    Raises:
        NotRepeatableError: the pass is more than launches and products, or takes too much memory.
    """
    given = _without_overlap(given)
    allocations = _AllocationMode(_limit(given[0].device))
    with torch.no_grad(), allocations, recorded() as recording:
        results = [tensor for tensor in run(given) if tensor is not None]
    taken = {tensor.data_ptr(): tensor for tensor in allocations.taken}
    addresses, made = _AddressMap(), list[TensorFactory]()
    for slot, tensor in enumerate(given):
        addresses.add(tensor, SlotRef(slot, 0))
    for tensor in results:
        whole = taken.pop(tensor.data_ptr(), None)
        if whole is None or whole.nbytes != tensor.nbytes or not tensor.is_contiguous():
            raise NotRepeatableError("a result is not memory that the pass took")
        like = torch.zeros_like if tensor.data_ptr() in allocations.zeros else torch.empty_like
        addresses.add(tensor, SlotRef(len(given) + len(made), 0))
        made.append(TensorFactory(like, template(tuple(tensor.shape), tensor.dtype, tensor.device)))
    if not allocations.zeros.isdisjoint(taken):
        raise NotRepeatableError("memory that is no result is to be zero")
    workspace = len(given) + len(made)
    # until the operations are known each temporary has a slot of its own, from the workspace's on
    sizes = dict[int, int]()
    for slot, tensor in enumerate(taken.values(), workspace):
        addresses.add(tensor, SlotRef(slot, 0))
        sizes[slot] = _rounded_up(tensor.nbytes)
    # and each stream has one of what its products need, which come one after the other
    using = sorted({one.stream for one in recording.operations if isinstance(one, RecordedMatmul)})
    spaces = {stream: SlotRef(slot, 0) for slot, stream in enumerate(using, workspace + len(taken))}
    sizes |= {space.slot: _space(recording) for space in spaces.values()}
    operations = [_operation(one, addresses, spaces) for one in recording.operations]
    offsets, size = workspace_offsets(sizes, lifetimes_of(operations))

    def relocated(value: SlotRef) -> SlotRef:
        offset = offsets.get(value.slot)
        return value if offset is None else SlotRef(workspace, offset + value.offset)

    operations = [
        one.relocated(relocated) if isinstance(one, LaunchOp | MatmulOp) else one
        for one in operations
    ]
    made.append(
        TensorFactory(torch.empty_like, template((max(1, size),), torch.uint8, given[0].device))
    )
    return Program(operations, made, given[0].device.index or 0)


def _limit(device: torch.device) -> int:
    """Bytes that a dry run on a device may take."""
    if device.type != "cuda":
        return MAX_PROGRAM_BYTES
    total = torch.cuda.get_device_properties(device).total_memory
    return max(MIN_PROGRAM_BYTES, min(MAX_PROGRAM_BYTES, int(MAX_DEVICE_SHARE * total)))


def _without_overlap(given: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, others in place of those whose memory overlaps that of one before.

    Raises:
        NotRepeatableError: such a one is misaligned, and kernels would be chosen for another.
    """
    found = list[Tensor]()
    for one in given:
        begin, end = one.data_ptr(), one.data_ptr() + extent(one)
        clear = all(
            end <= other.data_ptr() or other.data_ptr() + extent(other) <= begin for other in found
        )
        if not clear and begin % ALIGNMENT:
            raise NotRepeatableError("tensors share memory that is not aligned")
        found.append(
            one if clear
            else torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)
        )  # fmt: skip
    return found


def _space(recording: Recording) -> int:
    """Bytes of the largest workspace that a product needs."""
    products = (one for one in recording.operations if isinstance(one, RecordedMatmul))
    most = max((product.plan.workspace for product in products), default=0)
    return _rounded_up(most)


def _rounded_up(size: int) -> int:
    return -(-size // PART) * PART


def _operation(
    one: RecordedOperation, addresses: _AddressMap, spaces: Mapping[int, SlotRef]
) -> Operation:
    """What was recorded, with slots for its addresses.

    Args:
        spaces: the workspace of products on each stream that has some.
    """
    if isinstance(one, RecordedWait):
        return WaitOp(*one)
    if isinstance(one, RecordedWaitForLaunch):
        return WaitForLaunchOp(one.stream)
    if isinstance(one, RecordedMatmul):
        a, b, d = addresses.of(one.a), addresses.of(one.b), addresses.of(one.d)
        return MatmulOp(one.plan, a, b, d, one.add, one.stream, spaces[one.stream])
    pointers = TABLES[one.kernel.made.name].pointers(one.words)
    given = [(index, addresses.of(one.words[index])) for index in pointers if one.words[index]]
    return LaunchOp(one.kernel, one.clusters, one.words, one.stream, tuple(given), one.signals)
