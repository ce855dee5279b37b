"""What surrounds a call of cuDNN: handles, threads, streams, graphs, compilers, memory, choice."""

import ctypes
import gc
import os
import threading
from collections import OrderedDict

import pytest
import torch
from cases import require

import openrnn
from openrnn import cells, ops
from openrnn.backends.cudnn import algorithms, trial, weights
from openrnn.errors import LibraryError
from openrnn.native.cudnn import descriptors, handles, library
from openrnn.spec import ALGORITHMS, Problem

on_gpu = pytest.mark.gpu
CALLS, THREADS = 20_000, 4


@pytest.fixture
def gpu():
    require("cudnn")
    return torch.device("cuda")


def inference(layer, x):
    with torch.no_grad():
        return layer(x)[0]


def training(layer, x):
    y, _ = layer(x)
    return [y, *torch.autograd.grad(y.sum(), list(layer.parameters()))]


# the library, where it is not


def test_a_missing_library_says_so(monkeypatch):
    monkeypatch.setattr(
        library, "_candidates", lambda: iter(["libcudnn.so.0", "/nowhere/libcudnn"])
    )
    library.load.cache_clear()
    try:
        with pytest.raises(LibraryError, match=r"cuDNN: cannot be loaded: .*libcudnn.so.0"):
            library.load()
    finally:
        library.load.cache_clear()


def test_a_library_that_is_not_cudnn():
    with pytest.raises(LibraryError, match="cannot be loaded"):
        library.CudnnLibrary(ctypes.util.find_library("c") or "libc.so.6")


def test_a_forked_child_forgets_the_handles():
    class Fake:
        """What a handle needs to be counted."""

        pointer = 1

    fake = Fake()
    handles._open.add(fake)
    try:
        child = os.fork()
        if child == 0:
            os._exit(0 if handles.count() == 0 and fake.pointer is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert fake.pointer == 1
    finally:
        handles._open.discard(fake)


# handles and descriptors


@on_gpu
def test_errors_have_the_librarys_words(gpu):
    handle = handles.current(0)
    with pytest.raises(LibraryError, match=r"cudnnRNNSetClip_v9: CUDNN_STATUS_BAD_PARAM: .+"):
        descriptors.network(
            handle,
            descriptors.Kind(
                cells.lstm.spec(4, 4, cell_clip=(0.0, 1.0)).with_(cell_clip=None), torch.float32,
                0, "standard", False,
            ),
        ).library.cudnnRNNSetClip_v9(
            descriptors.network(
                handle,
                descriptors.Kind(cells.lstm.spec(4, 4), torch.float32, 0, "standard", False),
            ).pointer, 1, 2.0, 1.0,
        )  # fmt: skip


@on_gpu
def test_one_handle_a_thread_until_it_ends(gpu):
    lstm, x = openrnn.LSTM(3, 4, device=gpu, backend="cudnn"), torch.randn(5, 2, 3, device=gpu)
    want = inference(lstm, x)
    before, during = handles.count(), []

    def work():
        assert torch.equal(inference(lstm, x), want)
        during.append(handles.count())

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    gc.collect()
    assert during == [before + 1] * 3
    assert handles.count() == before


@on_gpu
def test_networks_are_kept_by_spec_not_by_shape(gpu, monkeypatch):
    monkeypatch.setattr(descriptors, "_networks", OrderedDict())
    lstm = openrnn.LSTM(3, 11, device=gpu, backend="cudnn", algorithm="standard")
    for steps, batch in ((1, 1), (5, 2), (9, 30)):
        inference(lstm, torch.randn(steps, batch, 3, device=gpu))
    assert descriptors.kept() == 1


@on_gpu
def test_descriptors_are_closed_when_a_call_raises(gpu, monkeypatch):
    """With lengths, so that the plan is of one call; a planted failure in the call itself."""
    lstm, x = openrnn.LSTM(3, 4, device=gpu, backend="cudnn"), torch.randn(5, 2, 3, device=gpu)
    lengths = torch.tensor([5, 2])
    lstm(x, lengths=lengths)
    real, made = handles.current(0).library, []

    class Watched:
        """The library, counting what it makes and destroys."""

        def __getattr__(self, name):
            if name == "cudnnRNNForward":
                raise LibraryError(name, "PLANTED")
            function = getattr(real, name)
            if name.startswith(("cudnnCreate", "cudnnDestroy")):
                made.append(name)
            return function

    monkeypatch.setattr(handles.current(0), "library", Watched())
    with pytest.raises(LibraryError, match="PLANTED"):
        inference_with(lstm, x, lengths)
    opened = [name for name in made if "Create" in name]
    assert opened
    assert len(opened) * 2 == len(made)


def inference_with(layer, x, lengths):
    with torch.no_grad():
        return layer(x, lengths=lengths)


@on_gpu
def test_two_gpus_in_one_process(gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    found = []
    for place in (0, 1, 0):
        torch.manual_seed(0)
        lstm = openrnn.LSTM(3, 4, backend="cudnn", algorithm="standard").to(f"cuda:{place}")
        torch.manual_seed(1)
        found.append([t.cpu() for t in training(lstm, torch.randn(5, 2, 3).to(f"cuda:{place}"))])
        assert torch.cuda.current_device() == 0
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))
    assert set(handles._own.handles) >= {0, 1}


# weights


@on_gpu
def test_packed_weights_follow_changes(gpu):
    """Of parameters that do not lie side by side."""
    lstm, x = openrnn.LSTM(3, 4, device=gpu, backend="cudnn"), torch.randn(5, 2, 3, device=gpu)
    for parameter in lstm.parameters():
        parameter.data = parameter.data.clone()
    first = inference(lstm, x)
    kept = len(weights._kept)
    assert torch.equal(inference(lstm, x), first)
    assert len(weights._kept) == kept
    with torch.no_grad():
        lstm.weight_hh_l0.mul_(2)
    second = inference(lstm, x)
    assert not torch.equal(first, second)
    other = openrnn.LSTM(3, 4, device=gpu, backend="cudnn")
    other.load_state_dict(lstm.state_dict())
    assert torch.equal(inference(other, x), second)
    del lstm, other
    gc.collect()
    assert len(weights._kept) < kept + 1


@on_gpu
def test_a_flat_buffer_is_not_copied(gpu):
    spec = ops.spec("gru", 3, 4, 2)
    flat = torch.randn(ops.params_size(spec), device=gpu)
    views = openrnn.params.unpack(spec, flat)
    assert weights.flat(spec, views, 0)[0] == flat.data_ptr()
    apart = [view.clone() for view in views]
    assert weights.flat(spec, apart, 0)[0] != flat.data_ptr()


@on_gpu
def test_inference_keeps_no_reserve(gpu):
    lstm = openrnn.LSTM(64, 64, device=gpu, backend="cudnn", algorithm="standard")
    x = torch.randn(200, 64, 64, device=gpu)
    inference(lstm, x)
    before = torch.cuda.memory_allocated()
    y = inference(lstm, x)
    assert torch.cuda.memory_allocated() - before <= y.nbytes + 2**20


# graphs and compilers


@on_gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # the test's own doing
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_cuda_graphs(gpu, algorithm, dropout):
    """Captured and replayed, inference and training, with weights that change between replays."""
    torch.manual_seed(0)
    lstm = openrnn.LSTM(
        64, 64, 2, device=gpu, dtype=torch.float16, backend="cudnn", algorithm=algorithm,
        dropout=dropout,
    )  # fmt: skip
    x = torch.randn(6, 4, 64, device=gpu, dtype=torch.float16)
    for grad in (False, True):
        lstm.train(grad)
        call = training if grad else lambda *args: [inference(*args)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                call(lstm, x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            captured = call(lstm, x)
        for factor in (1.0, 0.5):
            with torch.no_grad():
                lstm.weight_hh_l0.mul_(factor)
                x.normal_()
            graph.replay()
            again = [tensor.clone() for tensor in captured]
            if dropout and grad:
                graph.replay()
                assert not torch.equal(captured[0], again[0]), "each replay draws its own masks"
                continue
            for have, want in zip(again, call(lstm, x)):
                torch.testing.assert_close(have, want)


@on_gpu
def test_lengths_of_a_device_cannot_be_captured(gpu):
    lstm, x = openrnn.LSTM(3, 4, device=gpu, backend="cudnn"), torch.randn(5, 2, 3, device=gpu)
    lengths = torch.tensor([5, 2], device=gpu)
    inference_with(lstm, x, lengths)
    torch.cuda.synchronize()
    with (
        pytest.raises(ValueError, match="lengths on a device cannot be read during"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        inference_with(lstm, x, lengths)


@on_gpu
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"batch_first": True}], ids=str)
def test_one_graph_for_many_sizes(gpu, backend, options):
    torch.compiler.reset()
    torch.manual_seed(0)
    gru = openrnn.GRU(5, 8, 2, device=gpu, backend="cudnn", algorithm="standard", **options)
    compiled = torch.compile(
        lambda x: torch.tanh(gru(torch.relu(x))[0]), fullgraph=True, dynamic=True, backend=backend
    )
    for steps, batch in ((4, 3), (9, 2)):
        x = torch.randn(steps, batch, 5, device=gpu, requires_grad=True)
        want, have = torch.tanh(gru(torch.relu(x))[0]), compiled(x)
        torch.testing.assert_close(have, want)
        inputs = [x, *gru.parameters()]
        for a, b in zip(
            torch.autograd.grad(have.sum(), inputs), torch.autograd.grad(want.sum(), inputs)
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@on_gpu
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "proj_size": 2}], ids=str)
def test_operators_keep_their_word(gpu, options, grad):
    """Schema, autograd, and fakes that have cuDNN's sizes.

    Not opcheck's last comparison, which reads all of the reserve: cuDNN leaves gaps in it.
    """
    lstm = openrnn.LSTM(5, 6, device=gpu, algorithm="standard", **options)
    spec = lstm.spec
    args = (
        torch.randn(4, 3, 5, device=gpu, requires_grad=grad),
        [torch.randn(spec.chains, 3, w, device=gpu, requires_grad=grad) for w in spec.state_sizes],
        [weight.detach().requires_grad_(grad) for weight in lstm.weights()],
        torch.tensor([4, 0, 2], device=gpu), None, [], None, spec.text, "cudnn", grad, False, False,
        "tf32",
    )  # fmt: skip
    torch.library.opcheck(
        torch.ops.openrnn.forward, args,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip


# the choice of an algorithm


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A cache of one's own."""
    monkeypatch.setattr(algorithms, "_file", lambda: tmp_path / "algorithms.json")
    for name in ("_chosen", "_fast"):
        monkeypatch.setattr(algorithms, name, {})
    monkeypatch.setattr(algorithms, "_read", False)
    return tmp_path / "algorithms.json"


@on_gpu
def test_auto_measures_once_for_a_size_class(gpu, memory, monkeypatch):
    asked = []
    real = trial.fastest
    monkeypatch.setattr(trial, "fastest", lambda *args: asked.append(args) or real(*args))
    spec = cells.lstm.spec(64, 64)
    problem = Problem(spec, torch.float16, "cuda")
    names = [
        algorithms.choose(problem, torch.empty(steps, batch, 64, device=gpu), False)
        for steps, batch in ((17, 5), (32, 8), (20, 7))
    ]
    assert len(asked) == len(set(names)) == 1
    algorithms.choose(problem, torch.empty(33, 8, 64, device=gpu), False)
    assert len(asked) == 2
    # and another process finds it in the file
    for name in ("_chosen", "_fast"):
        monkeypatch.setattr(algorithms, name, {})
    monkeypatch.setattr(algorithms, "_read", False)
    assert algorithms.choose(problem, torch.empty(17, 5, 64, device=gpu), False) == names[0]
    assert len(asked) == 2


@on_gpu
def test_a_damaged_file_is_no_matter(gpu, memory):
    memory.write_text("{")
    problem = Problem(cells.gru.spec(64, 64), torch.float16, "cuda")
    assert algorithms.choose(problem, torch.empty(4, 4, 64, device=gpu), False) in ALGORITHMS


@on_gpu
def test_wrong_numbers_are_out_however_fast(gpu):
    """Without cudnnBuildRNNDynamic cuDNN reports success and computes nothing."""
    spec = cells.lstm.spec(64, 64)
    given = trial._draw(spec, torch.empty(8, 4, 64, device=gpu), 8)
    exact = trial.answer(spec, given.to(torch.float64), "standard", True)
    fair = trial.answer(spec, given, "standard", True)
    assert not trial.wrong(fair, exact, fair)
    assert not trial.wrong(trial.answer(spec, given, "persist_dynamic", True), exact, fair)
    try:
        idle = trial.answer(spec, given, "persist_dynamic", True, build=False)
    except LibraryError:
        return
    assert trial.wrong(idle, exact, fair)


# for long


@on_gpu
# torch keeps one AccumulateGrad node for a parameter while any graph refers to it, on the stream
# that made it; here threads on two streams differentiate the same parameters. The node is never
# run: torch.autograd.grad takes the gradient before it.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_soak(gpu, request):
    """20,000 calls over changing shapes, four threads, two streams: memory flat, numbers equal."""
    beside_others = hasattr(request.config, "workerinput")  # whose memory on the device is no leak
    torch.manual_seed(0)
    nets = [
        openrnn.LSTM(8, 16, 2, bidirectional=True, device=gpu, backend="cudnn"),
        openrnn.GRU(8, 24, device=gpu, backend="cudnn", algorithm="standard"),
    ]
    inputs = [
        torch.randn(steps, batch, 8, device=gpu) for steps in (1, 4, 9) for batch in (1, 3, 8)
    ]
    ends = [torch.randint(0, x.shape[0] + 1, (x.shape[1],)) for x in inputs]

    def call(net, place, round_):
        x, lengths = inputs[place], ends[place] if round_ % 3 == 0 else None
        if round_ % 2:
            return [inference_with(net, x, lengths)[0]]
        y, _ = net(x, lengths=lengths)
        return [y.detach(), *torch.autograd.grad(y.sum(), [net.weight_hh_l0, net.weight_ih_l0])]

    want = {
        (n, p, r): call(net, p, r)
        for n, net in enumerate(nets) for p in range(len(inputs)) for r in range(6)
    }  # fmt: skip
    torch.cuda.synchronize()
    streams, faults = [torch.cuda.Stream(), torch.cuda.Stream()], []

    def work(number, calls):
        try:
            for turn in range(calls):
                key = (turn % 2, (turn * 7 + number) % len(inputs), turn % 6)
                with torch.cuda.stream(streams[(turn + number) % 2]):
                    found = call(nets[key[0]], *key[1:])
                    if turn % 20 == 0:
                        torch.cuda.current_stream().synchronize()
                        for have, expect in zip(found, want[key]):
                            torch.testing.assert_close(have, expect, rtol=1e-4, atol=1e-4)
                if turn % 500 == 0:
                    torch.cuda.synchronize()
        except BaseException as error:
            faults.append(error)

    def all_threads(calls):
        threads = [
            threading.Thread(target=work, args=(number, calls // THREADS))
            for number in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        gc.collect()
        assert not faults, faults[0]
        return torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0], resident()

    all_threads(CALLS // 10)
    held, free, host = all_threads(CALLS // 10)
    after, left, grown = all_threads(CALLS)
    assert after <= held
    assert beside_others or left >= free - 32 * 2**20
    assert grown <= host + 64 * 2**20, f"{(grown - host) / 2**20:.0f} MiB of host memory more"


def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
