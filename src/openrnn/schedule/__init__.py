"""A call as data: which products, loops and waits run, in which order and on which stream."""

from openrnn.schedule.chunks import Chunk as Chunk
from openrnn.schedule.chunks import Chunking as Chunking
from openrnn.schedule.execute import execute as execute
from openrnn.schedule.layer_by_layer import backward as backward
from openrnn.schedule.layer_by_layer import forward as forward
from openrnn.schedule.operations import Schedule as Schedule
from openrnn.schedule.operations import show as show
from openrnn.schedule.operations import show_call as show_call
