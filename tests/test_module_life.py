"""What users of torch do with modules: ours live through it as torch's do."""

import copy
import io
import multiprocessing
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from cases import First
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import prune
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import openrnn

pytestmark = pytest.mark.usefixtures("one_thread")
T, B, WIDTH, H = 5, 3, 4, 8
X = torch.randn(T, B, WIDTH, generator=torch.Generator().manual_seed(0))


def both(**options):
    torch.manual_seed(0)
    theirs, ours = nn.LSTM(WIDTH, H, 2, **options), openrnn.LSTM(WIDTH, H, 2, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_fx_takes_a_layer_as_a_leaf():
    class Model(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer, self.out = layer, nn.Linear(H, 2)

        def forward(self, x):
            return self.out(self.layer(x)[0])

    model = Model(both()[1])
    traced = torch.fx.symbolic_trace(model)
    assert ("call_module", "layer") in [(node.op, node.target) for node in traced.graph.nodes]
    same(traced(X), model(X))


def test_pruning():
    layers = both()
    for layer in layers:
        torch.manual_seed(1)
        prune.random_unstructured(layer, "weight_hh_l0", 0.5)
    theirs, ours = layers
    same(theirs(X)[0], ours(X)[0])
    assert (ours.weight_hh_l0 == 0).sum() == 2 * H * H
    prune.remove(theirs, "weight_hh_l0"), prune.remove(ours, "weight_hh_l0")
    for _ in range(3):  # calls that repeat read what is there
        same(theirs(X)[0], ours(X)[0])


def half_pruned(layer, name):
    return prune.l1_unstructured(layer, name, amount=0.5)


OLD = pytest.mark.parametrize("how", [half_pruned, nn.utils.weight_norm, nn.utils.spectral_norm])
DEPRECATED = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")


@OLD
@DEPRECATED
def test_what_is_no_forward_computes_the_weights_of_hooks(how):
    """Old-style weight norm, spectral norm and pruning compute theirs before forward alone."""
    torch.manual_seed(0)
    layer, state = openrnn.GRU(3, 4), torch.randn(1, 2, 4)
    x, stepper = torch.randn(5, 2, 3), layer.stepper(2)
    with torch.no_grad():
        for x_t in x:  # calls that repeat, and bound steps
            layer.step(x_t, state), stepper(x_t)
        how(layer, "weight_hh_l0")
        layer.eval()(x)  # in training mode each call would move a spectral norm's vectors

        def changed():
            for parameter in layer.parameters():
                parameter[0] *= 1.7  # all of it would leave a spectral norm as it is
            return layer

        y = changed().step(x[0], state)[0]
        same(y, layer(x, state)[0][0])
        stepper.state = state
        changed()
        y = stepper(x[0]).clone()
        same(y, layer(x, state)[0][0])
        weight = openrnn.to_weights(changed(), "torch")["weight_hh_l0"]
        layer(x)
        same(torch.as_tensor(weight), layer.weight_hh_l0)


@OLD
@DEPRECATED
def test_training_by_steps_alone_with_weights_of_hooks(how):
    theirs, ours = torch.nn.GRU(3, 4), openrnn.GRU(3, 4)
    ours.load_state_dict(theirs.state_dict())
    x, losses = torch.randn(3, 2, 3), []
    for layer in (theirs, ours):
        torch.manual_seed(0)
        how(layer.eval(), "weight_hh_l0")
        by = torch.optim.SGD(layer.parameters(), 0.1)
        for _ in range(3):
            state = torch.zeros(1, 2, 4)
            for x_t in x:
                if layer is ours:
                    y, state = layer.step(x_t, state)
                else:
                    y, state = layer(x_t[None], state)
            by.zero_grad()
            loss = y.square().sum()
            loss.backward()
            by.step()
            losses.append(loss.detach())
    same(torch.stack(losses[:3]), torch.stack(losses[3:]))


def test_hooks_of_a_user_see_no_step():
    layer, seen = openrnn.GRU(3, 4), []
    layer.register_forward_pre_hook(lambda *_: seen.append(1))
    layer.step(torch.randn(2, 3))
    assert not seen


def test_weights_that_are_swapped_are_read():
    """torch.nn's layers cannot be: they hold weak references to their weights."""
    _, ours = both()
    with torch.no_grad():
        for _ in range(3):
            ours(X)
        torch.utils.swap_tensors(ours.weight_hh_l0, nn.Parameter(torch.zeros(4 * H, H)))
        theirs, other = both()
        theirs.weight_hh_l0.zero_()
        same(ours(X)[0], theirs(X)[0])
        assert not torch.equal(ours(X)[0], other(X)[0])


def test_conversion_by_swapping(monkeypatch):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        theirs, ours = (layer.double() for layer in both())
        for _ in range(3):
            same(theirs(X.double())[0], ours(X.double())[0])
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_meta_device_and_to_empty():
    layer = openrnn.LSTM(WIDTH, H, device="meta")
    y, (h_n, _) = layer(X.to("meta"))
    assert y.is_meta
    assert (y.shape, h_n.shape) == ((T, B, H), (1, B, H))
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert layer(X)[0].isfinite().all()
    theirs, _ = both()
    with torch.device("meta"):
        ours = openrnn.LSTM(WIDTH, H, 2)
    ours.load_state_dict(theirs.state_dict(), assign=True)
    same(ours(X)[0], theirs(X)[0])


def test_hooks_see_every_call():
    seen = {}
    for layer in both():
        log = seen[type(layer).__module__] = []
        layer.register_forward_pre_hook(lambda *_, log=log: log.append("before"))
        layer.register_forward_hook(lambda *a, log=log: log.append(type(a[2])))
        layer.register_full_backward_hook(lambda *a, log=log: log.append((len(a[1]), len(a[2]))))
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, log=log: log.append("grad"))
        x = X.clone().requires_grad_()
        for _ in range(4):
            layer(x)[0].sum().backward()
    theirs, ours = seen.values()
    assert len(ours) == 4 * (3 + 8)
    assert sorted(map(str, ours)) == sorted(map(str, theirs))


def _sum(layer, queue):
    torch.set_num_threads(1)
    queue.put(float(layer(X)[0].detach().sum()))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
def test_shared_memory_and_a_fork():
    _, layer = both()
    layer.share_memory()
    wanted = [float(layer(X)[0].detach().sum()) for _ in range(3)][-1]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_sum, args=(layer, queue))
    process.start()
    assert queue.get(timeout=600) == pytest.approx(wanted)
    process.join()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_names_the_backward_that_made_nan():
    _, layer = both()
    with torch.autograd.detect_anomaly():
        for _ in range(3):
            layer(X.clone().requires_grad_())[0].sum().backward()
        bad = X.clone().index_fill(0, torch.tensor(0), float("nan")).requires_grad_()
        with pytest.raises(RuntimeError, match="returned nan values"):
            layer(bad)[0].sum().backward()


@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.9)], ids=["swa", "ema"])
def test_averages_of_weights(average):
    found = []
    for layer in both():
        averaged = AveragedModel(layer, multi_avg_fn=average)
        for _ in range(3):
            layer(X)
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.add_(0.1)
            averaged.update_parameters(layer)
        found.append(averaged(X)[0])
    same(*found)


def test_a_subclass_of_tensor_stays_one():
    class Marked(torch.Tensor):
        pass

    theirs, ours = both()
    for _ in range(3):
        y, _ = ours(X.as_subclass(Marked))
        assert type(y) is Marked
        same(y.as_subclass(torch.Tensor), theirs(X)[0])


def test_ensembles_by_vmap():
    models = [openrnn.LSTM(WIDTH, H) for _ in range(3)]
    params, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")

    def one(params, buffers, x):
        return torch.func.functional_call(base, (params, buffers), (x,))[0]

    found = torch.func.vmap(one, in_dims=(0, 0, None))(params, buffers, X)
    for y, model in zip(found, models):
        same(y, model(X)[0])


def test_gradients_for_each_sequence():
    layer = openrnn.LSTM(WIDTH, H)
    params = dict(layer.named_parameters())

    def loss(params, x):
        return torch.func.functional_call(layer, params, (x[:, None],))[0].square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 1))(params, X)
    for b in range(B):
        wanted = torch.autograd.grad(loss(params, X[:, b]), [*params.values()])
        for grad, want in zip(found.values(), wanted):
            same(grad[b], want)


@pytest.mark.filterwarnings("ignore")  # torch deprecates jit
def test_a_trace_is_saved_and_loaded():
    theirs, ours = both()
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(ours, X), file)
    file.seek(0)
    same(torch.jit.load(file)(X)[0], theirs(X)[0])
    with pytest.raises(NotImplementedError, match=r"use torch.jit.trace or torch.export"):
        torch.jit.script(ours)


ALONE = """
import sys, torch
x, y = torch.load(sys.argv[1])
for graph in (torch.jit.load(sys.argv[2]), torch.export.load(sys.argv[3]).module()):
    torch.testing.assert_close(graph(x), y, rtol=1e-5, atol=1e-5)
assert "openrnn" not in sys.modules
try:
    torch.jit.load(sys.argv[4])
except RuntimeError as error:
    assert "openrnn::forward" in str(error)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch deprecates jit
def test_files_of_plain_operators_load_without_us(tmp_path):
    """Unrolled programs do; a trace has our operator, and torch says which is unknown."""
    theirs, ours = (First(layer).eval() for layer in both(bidirectional=True))
    with torch.no_grad():
        exported = torch.export.export(ours, (X,))
    exported = exported.run_decompositions(openrnn.plain_decompositions())
    files = [str(tmp_path / name) for name in ("x.pt", "plain.pt", "plain.pt2", "trace.pt")]
    torch.save((X, theirs(X).detach()), files[0])
    torch.jit.save(torch.jit.trace(exported.module(), X), files[1])
    torch.export.save(exported, files[2])
    torch.jit.save(torch.jit.trace(ours, X), files[3])
    command = [sys.executable, "-W", "ignore", "-c", ALONE, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_functional_call_reads_what_it_is_given():
    theirs, ours = both()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(0.5)
    given = {name: 0.5 * parameter for name, parameter in ours.named_parameters()}
    for _ in range(3):
        same(torch.func.functional_call(ours, given, (X,))[0], theirs(X)[0])
        assert not torch.equal(ours(X)[0], theirs(X)[0])


def test_expanded_weights_say_what_to_use():
    """torch refuses those of its own layers too, where oneDNN runs them."""
    layer = call_for_per_sample_grads(both(batch_first=True)[1], batch_size=B)
    with pytest.raises(RuntimeError, match=r"an expanded weight .*use torch\.func\.vmap"):
        layer(X.transpose(0, 1).contiguous())


@pytest.mark.gpu
# torch keeps the graph of its last warm-up, of another stream, while it captures
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_graphed_callables():
    """Forward and backward replayed from CUDA graphs."""
    theirs, ours = (layer.cuda() for layer in both())
    x = X.cuda().requires_grad_()
    graphed = torch.cuda.make_graphed_callables(First(ours), (x,))
    for scale in (1.0, 2.0):
        given, other = ((scale * X.cuda()).requires_grad_() for _ in range(2))
        y, wanted = graphed(given), theirs(other)[0]
        torch.testing.assert_close(y, wanted, rtol=1e-2, atol=1e-2)
        y.sum().backward(), wanted.sum().backward()
        torch.testing.assert_close(given.grad, other.grad, rtol=1e-2, atol=1e-2)


def test_deterministic_mode():
    """No warning, no refusal, and the same bits."""
    _, layer = both(dropout=0.5)
    found = []
    torch.use_deterministic_algorithms(True)
    for _ in range(3):
        torch.manual_seed(0)
        x = X.clone().requires_grad_()
        y, _ = layer(x, lengths=torch.tensor([5, 0, 2]))
        found.append((y, *torch.autograd.grad(y.sum(), [x, *layer.parameters()])))
    for again in found[1:]:
        assert all(map(torch.equal, again, found[0]))


class Encoded(torch.utils.data.Dataset):
    """A data set whose samples come out of a recurrent layer."""

    def __init__(self, layer):
        self.layer = layer

    def __len__(self):
        return 4

    def __getitem__(self, place):
        with torch.no_grad():
            return self.layer(X + place)[0]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_loaders_with_a_layer_inside(method):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    theirs, ours = both()
    for _ in range(3):
        ours(X)  # what is remembered of calls goes along
    loader = torch.utils.data.DataLoader(
        Encoded(ours), batch_size=None, num_workers=1, multiprocessing_context=method
    )
    found = list(loader)
    assert len(found) == 4
    for place, y in enumerate(found):
        same(y, theirs(X + place)[0].detach())


@pytest.fixture
def group():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch has no distributed here")
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_wrapped_for_several_processes(group, how):
    """Outputs, gradients and a step of the optimizer are those of the layer alone."""
    alone, layer = both()[1], both()[1]
    if how == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(layer)
    else:
        from torch.distributed.fsdp import fully_shard

        wrapped = fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        assert isinstance(layer.weight_hh_l0, torch.distributed.tensor.DTensor)
        assert wrapped.state_dict().keys() == alone.state_dict().keys()
    pairs = [(model, torch.optim.AdamW(model.parameters(), 0.1)) for model in (wrapped, alone)]
    for _ in range(3):
        found = []
        for model, optimizer in pairs:
            optimizer.zero_grad()
            y = model(X)[0]
            y.square().sum().backward()
            optimizer.step()
            found.append(y)
        same(*found)
    for name, parameter in layer.named_parameters():
        grad = getattr(parameter.grad, "full_tensor", lambda g=parameter.grad: g)()
        same(grad, dict(alone.named_parameters())[name].grad)


# nested tensors


def jagged(*lengths, **options):
    torch.manual_seed(1)
    rows = [torch.randn(length, WIDTH) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, **options), rows


@pytest.mark.parametrize("kind", [openrnn.LSTM, openrnn.GRU])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2}], ids=str)
def test_jagged_sequences(kind, options):
    """Each as it is alone, states and gradients too; of the same raggedness as the input."""
    layer = kind(WIDTH, H, batch_first=True, dtype=torch.float32, **options)
    x, rows = jagged(3, 0, 7, 1, requires_grad=True)
    y, states = layer(x)
    assert y.shape[1] == x.shape[1]  # the same symbol
    width = y.shape[2]
    assert torch.nested.to_padded_tensor(y, 0.0).shape == (4, 7, width)
    states = states if isinstance(states, tuple) else (states,)
    for b, row in enumerate(rows):
        if len(row):
            alone, alone_states = layer(row[None])
            alone_states = alone_states if isinstance(alone_states, tuple) else (alone_states,)
            same(y.unbind()[b], alone[0])
            for state, other in zip(states, alone_states):
                same(state[:, b], other[:, 0])
    y.values().square().sum().backward()
    wanted = torch.autograd.grad(
        sum(layer(row[None])[0].square().sum() for row in rows if len(row)), layer.weight_hh_l0
    )
    same(layer.weight_hh_l0.grad, wanted[0])
    assert x.grad.values().shape == (11, WIDTH)
    assert (x.grad.values() != 0).any(1).all()


def test_jagged_sequences_with_states_and_holes():
    layer = openrnn.GRU(WIDTH, H, batch_first=True)
    wide, h = torch.randn(3, 6, WIDTH), torch.randn(1, 3, H)
    x = torch.nested.narrow(
        wide, 1, torch.tensor([0, 1, 2]), torch.tensor([2, 3, 1]), layout=torch.jagged
    )
    y, h_n = layer(x, h)
    for b, (begin, length) in enumerate([(0, 2), (1, 3), (2, 1)]):
        alone, state = layer(wide[b : b + 1, begin : begin + length], h[:, b : b + 1])
        same(y.unbind()[b], alone[0])
        same(h_n[:, b], state[:, 0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_that_are_not_taken():
    layer, (x, _) = openrnn.LSTM(WIDTH, H, batch_first=True), jagged(2, 3)
    with pytest.raises(ValueError, match="needs batch_first=True"):
        openrnn.LSTM(WIDTH, H)(x)
    with pytest.raises(ValueError, match="must be jagged"):
        layer(torch.nested.nested_tensor([torch.randn(2, WIDTH)], layout=torch.strided))
    with pytest.raises(ValueError, match="must be jagged"):
        layer(torch.nested.nested_tensor([torch.randn(2)], layout=torch.jagged))
    with pytest.raises(ValueError, match="a nested tensor takes no lengths"):
        layer(x, lengths=torch.tensor([1, 1]))
    with pytest.raises((ValueError, RuntimeError), match="input"):
        layer(torch.nested.nested_tensor([torch.randn(2, WIDTH + 1)], layout=torch.jagged))
