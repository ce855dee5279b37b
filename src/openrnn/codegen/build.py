"""A cell's CPU kernels, ready to be called: its own steps, and the time loop that calls them."""

from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING

from openrnn.codegen import numba
from openrnn.codegen.trace import Traced
from openrnn.memo import resource

if TYPE_CHECKING:
    from collections.abc import Callable

    from openrnn.kernels.cpu.objects import Address, CompiledFunction


@resource
def forward(cell: Traced, dtype: str) -> "tuple[CompiledFunction, Address]":
    """The time loop forward, `loop(args_at, task, running)`, and the step that it calls."""
    return _together("forward", cell, dtype)


@resource
def backward(cell: Traced, dtype: str) -> "tuple[CompiledFunction, Address]":
    """The time loop backward, `loop(args_at, task, running)`, and the derivative that it calls."""
    return _together("backward", cell, dtype)


def _together(kind: str, cell: Traced, dtype: str) -> "tuple[CompiledFunction, Address]":
    from openrnn.kernels.cpu import loops

    loop = _elsewhere(partial(loops.loop, kind, dtype))
    step, derivative = _rows(cell, dtype)
    rows = step if kind == "forward" else derivative
    return loop(), rows.address


def _elsewhere(make: "Callable[[], CompiledFunction]") -> "Callable[[], CompiledFunction]":
    """Begins to make it in another thread, as compilers are processes of their own; what waits.

    Nothing waits for that thread where an interrupt ends this one: a compiler takes ten seconds.
    """
    made: Future[CompiledFunction] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    try:
        Thread(target=run, name="openrnn-compiler", daemon=True).start()
    except RuntimeError:  # this system starts no thread, or the interpreter is at its end
        return make
    return made.result


@resource
def _rows(cell: Traced, dtype: str) -> "list[CompiledFunction]":
    from openrnn.kernels.cpu import objects

    names, what = ["step_rows", "derivative_rows"], f"cell {cell.name} for {dtype}"
    return objects.kernels(numba.source(cell, dtype), names, what)
