"""The kernels with warps that fall behind: messages and barriers alone may order them.

Alone on a device warps of a block are never far apart, and a fault of the protocol stays unseen for
millions of steps; where processes take turns it was seen. Here warps spin before they multiply, and
after messages came, for much longer than a message travels.
"""

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import count
from multiprocessing import get_context

import pytest
import torch
from loops import loop_of
from test_cluster_protocol import BARRIER
from test_fused_gpu import MULTICAST, family, step  # noqa: F401

import openrnn
from openrnn import cells, memo, store
from openrnn.backends.fused import Fused, kernels
from openrnn.codegen import cuda
from openrnn.codegen.cluster_stack_config import ClusterStackConfig
from openrnn.codegen.multicast_config import CELL_WARPS, MulticastConfig
from openrnn.codegen.trace import trace
from openrnn.dispatch import BACKENDS
from openrnn.native import nvrtc
from openrnn.nn.call_cache import CallCache
from openrnn.tuning import cluster_stack, plan

LAG = """
#define LAG(WHEN) {{ \\
    const unsigned begin_ = unsigned(clock()), turn_ = __shfl_sync(~0u, begin_, 0) >> 5; \\
    if (WHEN) while (unsigned(clock()) - begin_ < 30000) continue; \\
    asm volatile("" ::: "memory"); /* no read may move before the lag */ \\
}}
#define LAG_OF_LANE(WHEN) {{ /* where one lane of a warp waits alone */ \\
    const unsigned begin_ = unsigned(clock()), turn_ = begin_ >> 5; \\
    if (WHEN) while (unsigned(clock()) - begin_ < 30000) continue; \\
    asm volatile("" ::: "memory"); \\
}}
#define BEFORE_PRODUCT {before_product}
#define AFTER_MESSAGES {after_messages}
"""
# Warps of a block come out of a barrier together: whose turn it is differs between them. After
# messages it comes seldom: a block whose warp waits there sends nothing, and all others wait.
NOW_AND_THEN = {
    "before_product": "(turn_ + 5 * (threadIdx.x >> 5)) % 64 == 0",
    "after_messages": "(turn_ + 5 * (threadIdx.x >> 5)) % 512 == 0",
}
WARP, BLOCK = 5, 3
ONE_WARP = {
    "before_product": f"(threadIdx.x >> 5) == {WARP} && blockIdx.x == {BLOCK}",
    "after_messages": "false",
}
# with multicast, where four or eight warps multiply
PRODUCT_WARP, CELL_WARP = 2, 9
ONE_PRODUCT_WARP = ONE_WARP | {
    "before_product": f"(threadIdx.x >> 5) == {PRODUCT_WARP} && blockIdx.x == {BLOCK}",
}
ONE_CELL_WARP = {
    "before_product": "false",
    "after_messages": f"(threadIdx.x >> 5) == {CELL_WARP} && blockIdx.x == {BLOCK}",
}
ONE_BLOCK = dict.fromkeys(ONE_WARP, f"blockIdx.x == {BLOCK}")
LAST_BLOCK = dict.fromkeys(ONE_WARP, "blockIdx.x == gridDim.x - 1")  # of a stack's last layer
PLACES = {  # where, and what comes there
    "const unsigned char* operand) {\n": "const unsigned char* operand) {\nLAG(BEFORE_PRODUCT)\n",
    "        if (over) return;\n": "        if (over) { LAG(AFTER_MESSAGES) return; }\n",
}
# With multicast: before the product, before cells read their sums, before they read their inputs,
# before the operand is copied, before it may be written over, before it is published. In the last
# three one lane of a warp is alone.
PRODUCT = "        if (STACK && has_operand(here, first_half, turn, time.count))\n"
SUMS = "            await_turn(AT_SUMMED_UP, turn);\n"
MULTICAST_PLACES = {
    PRODUCT: f"        LAG(BEFORE_PRODUCT)\n{PRODUCT}",
    SUMS: f"{SUMS}            LAG(AFTER_MESSAGES)\n",
} | {
    place: f"{lag}\n{place}"
    for place, lag in (
        ("    await_copies<SETS_OF_WARP - 1>();\n", "LAG(AFTER_MESSAGES)"),
        ("if (turn >= BUFFERS) await_turn(AT_EMPTY", "LAG_OF_LANE(AFTER_MESSAGES)"),
        ("        arrive_remote(remote(mbarrier_at(AT_EMPTY", "LAG_OF_LANE(AFTER_MESSAGES)"),
        ('asm volatile("red.release', "LAG_OF_LANE(AFTER_MESSAGES)"),
    )
}


# A block says that the operand was read when it is all there: not too early for the next copy to
# begin, but for what it overwrites. Instead of the warp that awaits the sums one that multiplies
# does.
RELEASE = "arrive_remote(remote(mbarrier_at(AT_EMPTY + (turn & 1) * 8), here.peer(here.lane)));\n"
RELEASED = f"        await_turn(AT_SUMMED_UP, turn);\n        {RELEASE}"
CAME = ", ".join(
    f"mbarrier_wait(mbarrier_at(AT_FULL + (buffer * HALVES + {half}) * 8), turn / BUFFERS & 1)"
    for half in (0, 1)
)
EARLY = f"        if (here.warp == 0 && here.lane < PEERS) {RELEASE}"
TOO_EARLY = {RELEASED: "", PRODUCT: f"        if (here.warp == 0) {CAME};\n{EARLY}{PRODUCT}"}
# A layer of a stack does not ask how far the one that reads its values is.
FOLLOWERS = {"            if (half == OWN_LAYER) await_followers(here, exchange, set, i);\n": ""}
# In clusters: an input warp fills a stage that its loop warp has yet to read, or multiplies an
# operand before all of it is there.
STAGES = {"        if (i >= STAGES) mbarrier_wait(empty(i), i / STAGES - 1 & 1);\n": ""}
OPERAND = {"            input_barrier();  // all of the operand is there\n": ""}
# a loop warp and an input warp in a block whose layer follows another
LOOP_WARP, INPUT_WARP, FOLLOWING_BLOCK = 1, 5, 9
ONE_LOOP_WARP = ONE_WARP | {
    "before_product": f"(threadIdx.x >> 5) == {LOOP_WARP} && blockIdx.x == {FOLLOWING_BLOCK}",
}
ONE_INPUT_WARP = ONE_WARP | {
    "before_product": f"(threadIdx.x >> 5) == {INPUT_WARP} && blockIdx.x == {FOLLOWING_BLOCK}",
}
SPIN_LIMITS = count(1 << 22)  # bounded waits; and kernels are remembered by this number


def with_multicast(test):
    """A test of these kernels alone."""
    only = pytest.mark.parametrize("family", MULTICAST, indirect=True)
    return pytest.mark.gpu(pytest.mark.usefixtures("family")(only(test)))


def no_clusters(patch):
    """Stacks run with multicast, as if clusters held no layer."""
    patch.setattr(cluster_stack, "forwards", lambda *_: ())
    patch.setattr(cluster_stack, "backwards", lambda *_: ())
    memo.clear()


@pytest.fixture
def multicast_only():
    with pytest.MonkeyPatch.context() as patch:
        no_clusters(patch)
        yield
    memo.clear()


def late(original, when, changes, kind, cell, dtype, config):
    """The source of a kernel with such lags, and in those of a kind with some words changed."""
    text = original(cell, dtype, config)
    places = MULTICAST_PLACES if isinstance(config, MulticastConfig) else PLACES
    changed = changes if kind in (None, config.kind) else {}
    for place, other in (*changed.items(), *places.items()):
        text = text.replace(place, other)
    return LAG.format(**when) + text


def lagged(patch, folder, case, when, changes=None, kind=None):
    """y and gradients of a layer some of whose warps fall behind."""
    keep_kernels(patch, case)
    patch.setattr(store, "folder", lambda: folder)
    patch.setattr(cuda, "source", partial(late, cuda.source, when, changes or {}, kind))
    patch.setitem(BACKENDS, "fused", Fused(spin_limit=next(SPIN_LIMITS)))
    case[0]._call_cache = CallCache()  # the calls that it remembers run kernels without a lag
    return step(*case)


@pytest.fixture
def lagging(monkeypatch, tmp_path):
    """The same; kernels without a lag are there again after it."""

    def make(*given):
        with monkeypatch.context() as patch:
            return lagged(patch, tmp_path, *given)

    return make


def outcome(folder, kind, sizes, when, fault, multicast=True):
    """How a layer or stack with a fault ends: an error's words, or whether its bits are others."""
    case = given(cells.lstm, *sizes)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if multicast:
                no_clusters(patch)
            wanted = step(*case)
            found = lagged(patch, folder, case, when, fault, kind)
        return "others" if not all(map(torch.equal, found, wanted)) else "the same"
    except RuntimeError as error:
        return str(error)


def keep_kernels(patch, case):
    """Lets kernels with a lag have the tiles of those without, spills or not.

    Other tiles may add up in another order.
    """
    net, _, dy = case
    asked = trace(net.cell), str(dy.dtype).removeprefix("torch."), net.hidden_size
    about, kept = torch.cuda.get_device_properties(0), {}
    device = (about.major, about.minor), about.multi_processor_count
    for kind in ("forward", "backward"):
        loop = loop_of(kind, *asked, dy.shape[1], *device)
        _, kept[kind] = kernels.best(loop, layers=net.num_layers)
        patch.setattr(type(kept[kind]), "most_spilled", 1 << 16)
    patch.setattr(plan, "compilable_configs", lambda loop, *_: iter([kept[loop.kind]]))


def given(cell, hidden, batch, dtype=torch.bfloat16, layers=1):
    """A layer, or a stack in one launch, with x and dy."""
    torch.manual_seed(hidden)
    where = {"device": "cuda", "dtype": dtype}
    stack = {"num_layers": layers, "wavefront": 1} if layers > 1 else {}
    net = openrnn.Recurrent(cell, 16, hidden, backend="fused", **stack, **where)
    x = torch.randn(100, batch, 16, requires_grad=True, **where)
    return net, x, torch.randn(100, batch, hidden, **where)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("cell", "dtype", "hidden", "batch"),
    [(cells.lstm, torch.bfloat16, 64, 9), (cells.lstm, torch.bfloat16, 256, 40),
     (cells.lstm, torch.bfloat16, 512, 16), (cells.lstm, torch.bfloat16, 512, 128),
     (cells.lstm, torch.bfloat16, 1024, 16), (cells.gru, torch.float32, 256, 40),
     (cells.gru, torch.float32, 896, 16)],
    ids=lambda value: getattr(value, "name", str(value)),
)  # fmt: skip
def test_warps_that_fall_behind_change_nothing(lagging, cell, dtype, hidden, batch):
    """Blocks, clusters, two tiles in turn, warps that multiply by fours, and grids."""
    case = given(cell, hidden, batch, dtype)
    wanted = step(*case)
    assert all(map(torch.equal, lagging(case, NOW_AND_THEN), wanted))


@pytest.mark.gpu
def test_a_missing_barrier_is_seen(lagging):
    """Gates are written over while a warp still reads them."""
    case = given(cells.lstm, 512, 16, torch.bfloat16)
    wanted = step(*case)
    assert all(map(torch.equal, lagging(case, ONE_WARP), wanted))
    assert not all(map(torch.equal, lagging(case, ONE_WARP, {BARRIER: ""}), wanted))


@with_multicast
@pytest.mark.parametrize(
    "when",
    [NOW_AND_THEN, ONE_PRODUCT_WARP, ONE_CELL_WARP, ONE_BLOCK],
    ids=["many", "warp", "cells", "block"],
)
@pytest.mark.parametrize(
    ("cell", "dtype", "hidden", "batch"),
    [(cells.lstm, torch.bfloat16, 1024, 256), (cells.lstm, torch.float32, 768, 130),
     (cells.gru, torch.bfloat16, 640, 300), (cells.rnn_tanh, torch.bfloat16, 512, 40)],
    ids=lambda value: getattr(value, "name", str(value)),
)  # fmt: skip
def test_with_multicast(request, lagging, cell, dtype, hidden, batch, when):
    """Warps that multiply, copy and publish: an order that is luck gives other bits, or a trap.

    h copied over h that is still read, or published before it is stored; shares of sums, or inputs
    of cells, written over too early.
    """
    if request.node.callspec.params["family"] != "multicast" and dtype == torch.float32:
        pytest.skip("backward with multicast has operands of 16 bits, as stored")
    case = given(cell, hidden, batch, dtype)
    wanted = step(*case)
    assert all(map(torch.equal, lagging(case, when), wanted))


@pytest.fixture
def stacks():
    """Only where one launch runs a stack."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma needs compute capability 9.0")


@pytest.mark.gpu
@pytest.mark.usefixtures("stacks", "multicast_only")
@pytest.mark.parametrize(
    "when",
    [NOW_AND_THEN, ONE_PRODUCT_WARP, ONE_CELL_WARP, ONE_BLOCK, LAST_BLOCK],
    ids=["many", "warp", "cells", "block", "last block"],
)
@pytest.mark.parametrize(
    ("cell", "hidden", "batch", "layers"),
    [(cells.lstm, 256, 64, 3), (cells.lstm, 512, 100, 2), (cells.gru, 256, 40, 2)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_stack_with_multicast(lagging, cell, hidden, batch, layers, when):
    """The same, and layers that run ahead of the one that reads their values."""
    case = given(cell, hidden, batch, layers=layers)
    wanted = step(*case)
    assert all(map(torch.equal, lagging(case, when), wanted))


@pytest.mark.gpu
@pytest.mark.usefixtures("stacks")
@pytest.mark.parametrize(
    "when",
    [NOW_AND_THEN, ONE_LOOP_WARP, ONE_INPUT_WARP, ONE_BLOCK, LAST_BLOCK],
    ids=["many", "loop warp", "input warp", "block", "last block"],
)
@pytest.mark.parametrize(
    ("cell", "dtype", "hidden", "batch", "layers"),
    [(cells.lstm, torch.bfloat16, 256, 24, 3), (cells.lstm, torch.float32, 128, 20, 2),
     (cells.gru, torch.bfloat16, 64, 100, 4), (cells.rnn_tanh, torch.bfloat16, 40, 9, 3)],
    ids=lambda value: getattr(value, "name", str(value)),
)  # fmt: skip
def test_a_stack_in_clusters(lagging, cell, dtype, hidden, batch, layers, when):
    """An order that is luck gives other bits, or a trap; y and gate gradients say when to go on."""
    case = given(cell, hidden, batch, dtype, layers)
    wanted = step(*case)
    assert all(map(torch.equal, lagging(case, when), wanted))


def apart(*asked):
    """What `outcome` says in a process of its own: a trap that ends a wait takes it with it."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(outcome, *asked).result()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_an_operand_that_counts_as_read_too_early_is_seen(tmp_path, kind):
    """The next copy overwrites what a late warp still multiplies: these lags show such a fault.

    A warp may also wait for ever then.
    """
    found = apart(tmp_path, kind, (1024, 256), ONE_PRODUCT_WARP, TOO_EARLY)
    assert found == "others" or "launch failure" in found


@pytest.mark.gpu
@pytest.mark.usefixtures("stacks")
@pytest.mark.parametrize(("kind", "when"), [("forward", LAST_BLOCK), ("backward", ONE_BLOCK)])
def test_a_layer_that_does_not_await_its_followers_is_seen(tmp_path, kind, when):
    """It writes over what a late block of the layer above, in backward below, is yet to read."""
    sizes = 256, 64, torch.bfloat16, 2
    assert apart(tmp_path, kind, sizes, when, FOLLOWERS) == "others"


@pytest.mark.gpu
@pytest.mark.usefixtures("stacks")
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize(
    ("when", "fault"), [(ONE_LOOP_WARP, STAGES), (NOW_AND_THEN, OPERAND)], ids=["stages", "operand"]
)
def test_input_warps_that_do_not_wait_are_seen(tmp_path, kind, when, fault):
    sizes = 256, 24, torch.bfloat16, 3
    found = apart(tmp_path, kind, sizes, when, fault, False)
    assert found == "others" or "launch failure" in found or "LAUNCH_FAILED" in found


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_the_places_of_stacks_in_clusters_are_there(kind):
    """Each once; the warps that lag are of the kind that they are named for."""
    cell = trace(cells.lstm)
    config = plan.ranked(loop_of(kind, cell, "bfloat16", 256, 24, (9, 0), 132), layers=3)[0]
    assert isinstance(config, ClusterStackConfig)
    assert LOOP_WARP < config.warps <= INPUT_WARP < 2 * config.warps
    layer = FOLLOWING_BLOCK // config.cluster % 3
    assert layer > 0 if kind == "forward" else layer < 2  # it follows another
    text = cuda.source(cell, "bfloat16", config)
    assert all(text.count(place) == 1 for place in (*STAGES, *OPERAND))
    assert all(text.count(place) >= 1 for place in PLACES)


def test_the_places_are_there():
    """In both kinds of kernels, clusters and grids; and the one warp that lags."""
    cell = trace(cells.lstm)
    for batch, hidden in ((16, 512), (16, 1024)):
        for kind in ("forward", "backward"):
            loop = loop_of(kind, cell, "bfloat16", hidden, batch, (9, 0), 132, options=())
            config = plan.ranked(loop)[0]
            text = cuda.source(cell, "bfloat16", config)
            assert all(text.count(place) for place in PLACES)
            assert (BARRIER in text) == (kind == "backward" and hidden == 512)
            if BARRIER in text:
                assert config.warps > WARP
                assert config.cluster > BLOCK


@pytest.mark.usefixtures("multicast_only")
@pytest.mark.parametrize(
    ("hidden", "batch", "layers"), [(1024, 128, 1), (1024, 256, 1), (256, 64, 3), (512, 100, 2)]
)
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_the_places_of_multicast_are_there(tmp_path, monkeypatch, kind, hidden, batch, layers):
    """Each once; the warps that lag have rows of R or cells, in a cluster with another block."""
    cell = trace(cells.lstm)
    # what runs there, which the planted faults take for granted
    loop = loop_of(kind, cell, "bfloat16", hidden, batch, (9, 0), 132)
    config = plan.ranked(loop, layers=layers)[0]
    assert isinstance(config, MulticastConfig)
    text = cuda.source(cell, "bfloat16", config)
    assert all(text.count(place) == 1 for place in (*MULTICAST_PLACES, *TOO_EARLY, *FOLLOWERS))
    assert config.cluster * config.clusters > BLOCK
    product_warps, cell_warps = 4 * config.k_warpgroups, CELL_WARPS * (3 - config.k_warpgroups)
    assert PRODUCT_WARP < product_warps <= CELL_WARP < product_warps + cell_warps
    sums = len(cell.gates) if kind == "forward" else config.k_parts
    assert config.groups // config.cluster * sums == 8  # rows of R of all warps
    changes = FOLLOWERS if layers > 1 else TOO_EARLY
    changed = late(cuda.source, NOW_AND_THEN, changes, None, cell, "bfloat16", config)
    said = {"LAG(BEFORE_PRODUCT)": 1, "LAG(AFTER_MESSAGES)": 2}
    said["LAG_OF_LANE(AFTER_MESSAGES)"] = 3 if layers > 1 else 2  # the fault takes one away
    assert {word: changed.count(f"{word}\n") for word in said} == said
    assert all(place not in changed for place in changes if place != PRODUCT)
    if layers == 1:  # the operand counts as read, then the warp lags, then it multiplies
        order = [changed.index(word) for word in (EARLY, "LAG(BEFORE_PRODUCT)\n", PRODUCT)]
        assert order == sorted(order)
    if nvrtc.absent() is None:
        monkeypatch.setattr(store, "folder", lambda: tmp_path)
        text = f"#define SPIN_LIMIT {next(SPIN_LIMITS)}\n{changed}"
        assert nvrtc.binary(nvrtc.KernelSource(text, kind, "sm_90a", "with lags")).code
