"""The schedules of calls: one chunk a layer and direction, as the loops bound their own memory.

The loops compute their products themselves, and put dropout masks on what they read.
"""

from openrnn import schedule
from openrnn.memo import memo
from openrnn.schedule import Chunking, Schedule
from openrnn.spec import Problem


@memo(4096)
def forward(layers: int, directions: int, steps: int) -> Schedule:
    """The forward pass."""
    return schedule.forward(_whole(layers, directions, steps), products=False)


@memo(4096)
def backward(layers: int, directions: int, steps: int) -> Schedule:
    """The backward pass."""
    return schedule.backward(_whole(layers, directions, steps), products=False)


def listed(problem: Problem) -> list[str]:
    """The operations of a call, then those of its backward if it has one, a line each."""
    sizes = problem.spec.num_layers, problem.spec.directions, problem.steps or 0
    return schedule.show_call(forward(*sizes), backward(*sizes) if problem.grad else None)


def _whole(layers: int, directions: int, steps: int) -> list[list[Chunking]]:
    return [[Chunking((0, steps), way == 1) for way in range(directions)] for _ in range(layers)]
