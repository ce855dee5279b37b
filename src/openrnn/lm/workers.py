"""The processes of one run: one alone, or those that torchrun started."""

import hashlib
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from openrnn.cores import usable_cores
from openrnn.errors import OpenRNNError


@dataclass(frozen=True)
class Workers:
    """This process among those of the run. They agree through gloo, not on the GPU's streams."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files and prints."""
        return self.rank == 0

    def agree(self, *values: float) -> list[float]:
        """The largest of each value over all processes."""
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return [float(value) for value in tensor]

    def together(self, act: Callable[[], None], failed: str) -> None:
        """Acts in every process; where it fails in one with an error of ours, all fail.

        Raises:
            OpenRNNError: of this process, or that which `failed` says of another.
        """
        failure = None
        try:
            act()
        except OpenRNNError as error:
            failure = error
        if self.agree(failure is not None)[0]:
            raise failure or OpenRNNError(failed)

    def total(self, *values: float) -> list[float]:
        """The sum of each value over all processes."""
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor]

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all processes, of one shape, on the CPU."""
        mine = tensor.detach().cpu().contiguous()
        if self.world == 1:
            return [mine]
        found = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(found, mine)
        return found

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model with its gradients averaged over the processes."""
        if self.world == 1:
            return model
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices)


@contextmanager
def join(device: str) -> Iterator[Workers]:
    """All processes of the run, on the CPU or each on a GPU of its own.

    Raises:
        ValueError: there is no such device, or there are fewer than processes.
    """
    count = gpus(device)
    if not launched():
        yield Workers(torch.device("cuda" if count else "cpu"))
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if count else "gloo")
    try:
        workers = Workers(torch.device("cpu"), dist.get_rank(), dist.get_world_size())
        here = _on_this_machine(workers)
        if count:
            if here > count:
                raise ValueError(
                    f"device cuda needs a GPU for each process, got {here} processes on this "
                    f"machine and {count} GPUs"
                )
            workers = replace(workers, device=torch.device("cuda", dist.get_node_local_rank(0)))
            torch.cuda.set_device(workers.device)
        torch.set_num_threads(max(1, usable_cores() // here))
        yield workers
        # a process whose peer leaves first is at times ended by gloo, with no exception to catch
        dist.barrier()
    finally:
        dist.destroy_process_group()


def gpus(device: str) -> int:
    """How many GPUs the device "auto", "cpu" or "cuda" stands for here; 0 for the CPU.

    Raises:
        ValueError: there must be one and is none.
    """
    count = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if device == "cuda" and not count:
        raise ValueError("device cuda: torch finds no CUDA device here")
    return count


def launched() -> bool:
    """Whether torchrun started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def _on_this_machine(workers: Workers) -> int:
    """How many of the processes share this machine."""
    host = hashlib.sha256(socket.gethostname().encode()).digest()[:7]
    mine = torch.tensor(int.from_bytes(host, "little"))
    return sum(int(other) == int(mine) for other in workers.gather(mine))
