"""Kernels of one task: their arguments are completed by compiled code, anew for each run."""

import ctypes
import threading

import pytest
import torch

import openrnn
from openrnn.kernels.cpu import launch, objects

# writes its other arguments, and where they lie, to the address that is the first of them
COPYING = """
from openrnn.kernels.cpu.memory import int64_at
def copy_arguments(at, task, running):
    args = int64_at(at)
    out = int64_at(args[0])
    out[0], out[1] = 10 * task + running, at
    for k in range(2, args[1]):
        out[k] = args[k]
"""
KNOWN = [0, 7, 20, 30, 40, 50, 60]  # the second is their number


@pytest.fixture(scope="module")
def kernel():
    return objects.kernels(COPYING, ["copy_arguments"])[0]


def alone(kernel, lacking):
    return launch.Alone(kernel, bytes((ctypes.c_int64 * len(KNOWN))(*KNOWN)), lacking)


def test_a_run_gives_what_the_arguments_lack(kernel):
    """In any order, one value twice, values from the end, with what is added; others stay."""
    out = torch.zeros(len(KNOWN), dtype=torch.int64)
    run = alone(kernel, [(5, 0, -1), (0, -1, 0), (2, 1, 8), (3, 0, 0)]).run
    for value in (100, -(2**40)):
        run([value, 2**47, out.data_ptr()])
        assert out[2:].tolist() == [2**47 + 8, value, 40, value - 1, 60]
        assert out[0] == 1
    run = alone(kernel, [(0, 0, 16), (6, 0, 0)]).run
    out.zero_()
    run([out.data_ptr() - 16])
    assert out[2:].tolist() == [20, 30, 40, 50, out.data_ptr() - 16]


@pytest.mark.parametrize(
    "lacking", [[], [(2, 0, 8)], [(2, -1, 0)], [(2, 0, 8), (5, 1, -1)]], ids=len
)
def test_any_number_of_values_may_be_lacking(kernel, lacking):
    """No value and one value, too."""
    out = torch.zeros(len(KNOWN), dtype=torch.int64)
    known = [out.data_ptr(), *KNOWN[1:]]
    run = launch.Alone(kernel, bytes((ctypes.c_int64 * len(known))(*known)), lacking).run
    for values in ([100, 200], (-(2**40), 2**47)):
        run(values)
        wanted = [*known]
        for place, chosen, offset in lacking:
            wanted[place] = values[chosen] + offset
        assert out[2:].tolist() == wanted[2:]
        out.zero_()


def test_threads_that_run_it_at_once_share_no_arguments(kernel):
    run = alone(kernel, [(0, 0, 0), (4, 1, 0)]).run
    met, found, wrong = threading.Barrier(4), [], []

    def work(number):
        out = torch.zeros(len(KNOWN), dtype=torch.int64)
        met.wait(600)
        for turn in range(1000):
            run([out.data_ptr(), value := number * 10_000 + turn])
            if out[2:].tolist() != [20, 30, value, 50, 60]:
                wrong.append((number, turn))
        found.append(out[1].item())
        met.wait(600)  # no thread has the stack of one that has ended

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*found}) == 4
    assert not wrong


def test_launches_of_one_task_run_so_and_do_what_bound_ones_do(monkeypatch):
    """One thread's step, and the same step from memory that is bound."""
    counted, run = [], launch.Alone.run

    def counting(self, values):
        counted.append(self)
        run(self, values)

    monkeypatch.setattr(launch.Alone, "run", counting)
    layer, before = openrnn.LSTM(5, 16, 2), torch.get_num_threads()
    stepper, x = layer.stepper(3), torch.randn(6, 3, 5)
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            whole = layer(x)[0]
            assert counted
            assert torch.equal(torch.stack([stepper(x_t).clone() for x_t in x]), whole)
    finally:
        torch.set_num_threads(before)
