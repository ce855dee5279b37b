"""Short calls of one thread that compiled code runs from tensors to tensors."""

import gc
import sys
import threading
import weakref

import pytest
import torch

import openrnn
from openrnn.backends.cpu.program import Clear, Program, SlotRef
from openrnn.kernels.cpu import launch
from openrnn.kernels.cpu.tensor_tasks import MAX_SCRATCH, runner
from openrnn.memory import TensorFactory, template

pytestmark = pytest.mark.skipif(
    not launch.has_python_calls(), reason="Python 3.10 lacks a function that it calls"
)
MODULES = {
    "lstm": lambda: openrnn.LSTM(5, 7),
    "gru": lambda: openrnn.GRU(5, 7, bias=False),
    "both directions": lambda: openrnn.LSTM(5, 7, num_layers=2, bidirectional=True),
    "one parameter": lambda: openrnn.RNN(7, 7, bias=False, input_mode="skip"),
    "float64": lambda: openrnn.RNN(5, 7, dtype=torch.float64),
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prepared(module, x, hx=None):
    """What makes the call of a module again, and its tensors."""
    for _ in range(3):
        module(x, hx)
    (cached,) = next(filter(None, module._call_cache._calls.values()))
    states = () if hx is None else hx if isinstance(hx, tuple) else (hx,)
    return cached.run, (x, *module.weights(), *states)


def of(kind):
    torch.manual_seed(0)
    module = MODULES[kind]()
    x = torch.randn(2, 3, module.input_size, dtype=module._any_weight().dtype)
    with torch.no_grad():
        _, hx = module(x)
        return prepared(module, x, hx)


@pytest.mark.parametrize("kind", MODULES)
def test_it_computes_what_a_program_does(kind):
    run, every = of(kind)
    found, listed = run._on_tensors(every), run._on_tensors([*every])
    run._on_tensors = None
    wanted = run(every)
    assert len(found) == len(listed) == len(wanted) > 1
    for one, other, want in zip(found, listed, wanted):
        assert one.shape == want.shape
        assert one.dtype == want.dtype
        assert torch.equal(one, want)
        assert torch.equal(other, want)


def test_calls_that_record_gradients_run_it_too():
    torch.manual_seed(0)
    module, x = openrnn.LSTM(5, 7), torch.randn(2, 3, 5)
    call, every = prepared(module, x)
    found = call.run._on_tensors(every)
    call.run._on_tensors = None
    wanted = call.run.forward(every)
    assert len(found) == len(wanted) > 3  # the reserve, too
    for one, want in zip(found[:3], wanted):
        assert torch.equal(one, want)


def test_of_a_tensor_without_memory_nothing_is_run():
    run, every = of("lstm")
    for place in range(len(every)):
        lost = [one.detach().clone() for one in every]
        lost[place].untyped_storage().resize_(0)
        assert run._on_tensors(lost) == []
        assert run(lost) is None


def test_errors_are_those_of_python():
    run, every = of("lstm")
    with pytest.raises(IndexError):
        run._on_tensors(every[:-1])
    with pytest.raises(TypeError, match="data_ptr"):
        run._on_tensors((None, *every[1:]))
    with pytest.raises(TypeError):
        run._on_tensors(7)
    assert len(run._on_tensors(every)) == 3


def test_an_error_of_what_makes_results_leaves_nothing_behind():
    made = []

    def make():
        made.append(torch.empty(3))
        return made[-1]

    def fail():
        raise MemoryError("no more")

    run, _ = of("lstm")
    (operation,) = run._program.operations
    program = runner([operation.task(4)], (), 1, (make, fail), 0)
    before = sys.getrefcount(fail)
    for _ in range(3):
        with pytest.raises(MemoryError, match="no more"):
            program([torch.empty(3)])
    assert sys.getrefcount(fail) == before
    dead = [weakref.ref(one) for one in made]
    made.clear()
    gc.collect()
    assert [one() for one in dead] == [None] * 3


def test_it_keeps_no_reference():
    run, every = of("lstm")
    before = [sys.getrefcount(one) for one in every]
    for _ in range(5):
        dead = [weakref.ref(one) for one in run._on_tensors(every)]
    assert [one() for one in dead] == [None] * 3
    assert [sys.getrefcount(one) for one in every] == before


def test_it_lives_as_long_as_somebody_may_call_it():
    run, every = of("lstm")
    wanted, compiled = run(every), run._on_tensors
    del run
    gc.collect()
    for one, want in zip(compiled(every), wanted):
        assert torch.equal(one, want)


def test_several_threads_at_a_time():
    run, every = of("both directions")
    wanted, wrong = run(every), []

    def work():
        for _ in range(300):
            found = run._on_tensors(every)
            wrong.extend(one for one, want in zip(found, wanted) if not torch.equal(one, want))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_long_programs_and_other_operations_are_not_run_so():
    run, _ = of("lstm")
    launches, device = run._program.operations, torch.device("cpu")

    def program(operations, scratch):
        sizes = 3, scratch
        made = [
            TensorFactory(torch.empty_like, template((size,), torch.uint8, device))
            for size in sizes
        ]
        return Program(operations, made)

    assert program(launches, MAX_SCRATCH).on_tensors((), 1) is not None
    assert program(launches, MAX_SCRATCH + 1).on_tensors((), 1) is None
    clear = Clear(SlotRef("x"), 8, {"x": 0})
    assert program([*launches, clear], 8).on_tensors((), 1) is None


def test_python_may_lack_a_function_for_it(monkeypatch):
    """As 3.10 does: then Python starts the kernels."""
    run, every = of("lstm")
    wanted = run(every)
    monkeypatch.setattr(launch, "has_python_calls", lambda: False)
    launch.starters.cache_clear()
    try:
        assert launch.starters().run_on_tensors is None
        run, every = of("lstm")
        assert run._on_tensors is None
        for one, want in zip(run(every), wanted):
            assert torch.equal(one, want)
    finally:
        launch.starters.cache_clear()
