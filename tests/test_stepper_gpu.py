"""Steppers on a GPU, which replay a CUDA graph, and steps that a user captures."""

import threading

import pytest
import torch

import openrnn

pytestmark = pytest.mark.gpu

LAYERS = {
    "lstm-bf16": (lambda **on: openrnn.LSTM(24, 64, **on), torch.bfloat16),
    "stack-fp16": (lambda **on: openrnn.LSTM(24, 64, num_layers=2, **on), torch.float16),
    "gru-tf32": (lambda **on: openrnn.GRU(24, 64, **on), torch.float32),
    "odd-bf16": (lambda **on: openrnn.GRU(5, 13, num_layers=2, **on), torch.bfloat16),
    "projected": (lambda **on: openrnn.LSTM(24, 64, proj_size=16, **on), torch.float32),
    "cudnn": (lambda **on: openrnn.LSTM(24, 64, backend="cudnn", **on), torch.float32),
    "reference": (lambda **on: openrnn.GRU(24, 64, backend="reference", **on), torch.float32),
}


def made(name, batch=5, steps=9):
    make, dtype = LAYERS[name]
    torch.manual_seed(3)
    layer = make(device="cuda", dtype=dtype)
    shape = (steps, layer.input_size) if batch is None else (steps, batch, layer.input_size)
    return layer, torch.randn(shape, device="cuda", dtype=dtype)


def by_step(layer, xs, state=None):
    """y of each step, and the last states."""
    found = []
    with torch.no_grad():
        for x in xs:
            y, state = layer.step(x, state)
            found.append(y.clone())
    return found, state


def flat(state):
    return state if isinstance(state, tuple) else (state,)


def same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("batch", [5, None])
@pytest.mark.parametrize("name", LAYERS)
def test_a_stepper_has_the_bits_of_step(name, batch):
    layer, xs = made(name, batch)
    wanted, last = by_step(layer, xs)
    stepper = layer.stepper(batch)
    same([stepper(x).clone() for x in xs], wanted)
    same(flat(stepper.state), flat(last))
    assert stepper._runs, "no graph was recorded"


def test_its_graph_sees_parameters_states_and_resets_as_they_are():
    layer, xs = made("lstm-bf16")
    stepper = layer.stepper(5)
    for x in xs:
        stepper(x)
    with torch.no_grad():
        layer.weight_hh_l0.mul_(0.5)
    stepper.reset()
    same([stepper(x).clone() for x in xs], by_step(layer, xs)[0])
    layer.weight_ih_l0 = torch.nn.Parameter(torch.randn_like(layer.weight_ih_l0))
    state = tuple(torch.randn(1, 5, 64, device="cuda", dtype=torch.bfloat16) for _ in "hc")
    stepper.state = state
    same([stepper(x).clone() for x in xs], by_step(layer, xs, state)[0])
    mask = torch.tensor([True, False, True, False, False], device="cuda")
    stepper.state = state
    stepper.reset(mask)
    state = tuple(one.masked_fill(mask[:, None], 0) for one in state)
    same([stepper(x).clone() for x in xs], by_step(layer, xs, state)[0])


def test_it_takes_x_of_any_strides_and_of_a_graph_of_autograd():
    layer, xs = made("gru-tf32")
    wanted, _ = by_step(layer, xs)
    stepper = layer.stepper(5)
    turned = [x.t().contiguous().t().requires_grad_() for x in xs]
    found = [stepper(x).clone() for x in turned]
    same(found, wanted)
    assert not any(one.requires_grad for one in found)
    stepper.reset()
    with torch.inference_mode():
        same([stepper(x).clone() for x in xs], wanted)
    stepper.reset()
    same([stepper(x).clone() for x in xs], wanted)


def test_steps_hold_no_more_memory_as_they_go_on():
    layer, xs = made("stack-fp16")
    stepper = layer.stepper(5)
    for x in xs:
        stepper(x)
    before = torch.cuda.memory_allocated()
    for x in [*xs, *xs]:
        stepper(x)
    assert torch.cuda.memory_allocated() == before


def test_threads_may_each_have_one():
    layer, xs = made("lstm-bf16", steps=50)
    wanted, _ = by_step(layer, xs)
    found = {}

    def walk(place):
        with torch.cuda.stream(torch.cuda.Stream()):
            stepper = layer.stepper(5)  # its states are zeroed on the stream of its steps
            found[place] = [stepper(x).clone() for x in xs]
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=walk, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place in range(3):
        same(found[place], wanted)


def test_a_stepper_in_a_capture_says_what_to_capture():
    layer, xs = made("lstm-bf16")
    stepper = layer.stepper(5)
    stepper(xs[0])
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        xs[1].mul_(2)  # torch warns of empty graphs
        with pytest.raises(RuntimeError, match=r"capture layer\.step"):
            stepper(xs[1])


@pytest.mark.parametrize("name", ["lstm-bf16", "stack-fp16", "gru-tf32"])
def test_step_in_a_graph_of_the_caller_with_states_in_place(name):
    """As docs/semantics.md shows it."""
    layer, xs = made(name)
    wanted, last = by_step(layer, xs)
    x, first = xs[0].clone(), flat(layer.step(xs[0])[1])
    state = tuple(torch.zeros_like(one) for one in first)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y, after = layer.step(x, state if len(state) > 1 else state[0])
        for one, new in zip(state, flat(after)):
            one.copy_(new)
    found = []
    for x_t in xs:
        x.copy_(x_t)
        graph.replay()
        found.append(y.clone())
    same(found, wanted)
    same(state, flat(last))
