"""Temporaries of a run on the CPU are memory of its thread, and stay that."""

import ctypes
import os
import platform
import subprocess
import sys
import threading

import pytest
import torch

import openrnn
from openrnn.backends.cpu import heap, program
from openrnn.backends.cpu.program import Program, Workspace
from openrnn.kernels.cpu.args import LINE
from openrnn.memory import TensorFactory, template


class Failing:
    def run(self, values):
        raise ZeroDivisionError


def test_a_run_inside_another_has_a_workspace_of_its_own():
    """As in a finalizer or a signal handler; the next run has the thread's memory again."""
    found = []

    class Operation:
        def run(self, values):
            found.append(values[-1])
            if len(found) == 1:
                inner.run([])

    device = torch.device("cpu")
    made = [
        TensorFactory(torch.empty_like, template(shape, torch.float32, device))
        for shape in [(3,), (9,)]
    ]
    inner = Program([Operation()], made)
    for number in (2, 3):
        assert [one.shape for one in inner.run([])] == [(3,)]
        assert len(found) == number
    outer, nested, later = found
    assert outer == later != nested
    with pytest.raises(ZeroDivisionError):
        Program([Failing()], made).run([])
    inner.run([])
    assert found[-1] == outer


class Noting:
    """An operation that fills the temporaries of a run and notes where they lie."""

    def __init__(self, *sizes):
        space = Workspace()
        self.parts, self.found = [(space.take(size).offset, size) for size in sizes], []
        self.size = space.size

    def run(self, values):
        self.found.append([values[-1] + offset for offset, _ in self.parts])
        for address, (_, count) in zip(self.found[-1], self.parts):
            ctypes.memset(address, 255, count)


def of(noting):
    """A program that makes one result besides."""
    device = torch.device("cpu")
    sizes = 3, noting.size // 4
    made = [
        TensorFactory(torch.empty_like, template((size,), torch.float32, device)) for size in sizes
    ]
    return Program([noting], made)


def test_large_temporaries_are_memory_of_the_thread(monkeypatch):
    """Of the same pages in each run, whatever runs between; each begins at a cache line."""
    monkeypatch.setattr(program, "_THREADS", program._Threads())
    large, small = Noting(4 * 70_001, 4 * 9), Noting(4 * 50_000)
    runs = [of(large), of(small)]
    for _ in range(3):
        for run in runs:
            assert [one.shape for one in run.run([])] == [(3,)]
    (first, second), *others = large.found
    assert others == [[first, second]] * 2
    assert first % LINE == second % LINE == 0
    assert second >= first + 4 * 70_001
    assert small.found == [[first]] * 3


def test_beyond_what_a_thread_keeps_they_are_fresh(monkeypatch):
    monkeypatch.setattr(program, "_THREADS", program._Threads())
    monkeypatch.setattr(program, "SCRATCH", 4096)
    kept, fresh = Noting(4096), Noting(4096, 64)
    for _ in range(2):
        of(kept).run([])
        made = of(fresh).run([])
        assert [one.shape for one in made] == [(3,)]
    ((one,), (other,)) = kept.found
    assert one == other
    assert one not in {address for found in fresh.found for address in found}


def test_each_thread_has_its_own():
    noting, met = Noting(400_000), threading.Barrier(2)
    run = of(noting)

    def work():
        run.run([])
        met.wait(600)  # neither ends before the other has run

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ((one,), (other,)) = noting.found
    assert abs(one - other) >= 400_000


def test_a_training_step_takes_only_its_results_anew():
    """Gradients of both matrices and little more, of the 9 MiB that its temporaries are."""
    torch.manual_seed(0)
    module, x = openrnn.LSTM(400, 400), torch.randn(20, 6, 400, requires_grad=True)
    taken = []
    scratch = program._THREADS.scratch
    for _ in range(3):
        torch.autograd.grad(module(x)[0].sum(), [x, *module.parameters()])
        taken.append((scratch._address, scratch._size))
    assert len({*taken}) == 1
    assert taken[0][1] > 8 << 20


BLOCKS = """
import ctypes, sys, torch
from openrnn.backends.cpu.heap import keep_freed_memory
libc = ctypes.CDLL(None)
class Info(ctypes.Structure):  # mallinfo2(3)
    _fields_ = [(f"field{k}", ctypes.c_size_t) for k in range(10)]
libc.mallinfo2.restype = Info
if sys.argv[1] == "kept":
    keep_freed_memory()
before = libc.mallinfo2().field3  # blocks that are mapped
block = torch.empty(24 << 20, dtype=torch.uint8)
print(libc.mallinfo2().field3 - before)
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not hasattr(ctypes.CDLL(None), "mallinfo2"),
    reason="another allocator than glibc's, or none that tells of its blocks",
)
def test_large_blocks_are_of_the_heap_then():
    """Which is kept; a block that is mapped goes back to the system when it is freed."""
    told = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    told["LD_PRELOAD"] = ""

    def mapped(words):
        done = subprocess.run(
            [sys.executable, "-c", BLOCKS, words], capture_output=True, text=True, check=True,
            env=told,
        )  # fmt: skip
        return int(done.stdout)

    assert (mapped("kept"), mapped("as it is")) == (0, 1)


def test_passes_with_large_results_ask_for_that(monkeypatch):
    asked = []
    monkeypatch.setattr(heap, "keep_freed_memory", lambda: asked.append(1))
    for hidden, expected in ((19, []), (399, [1])):
        layer, x = openrnn.GRU(hidden, hidden), torch.randn(1, 1, hidden)
        layer(x)[0].sum().backward()
        assert asked == expected
