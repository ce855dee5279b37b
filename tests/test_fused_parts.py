"""Long calls in parts: the steps fall into them once, and results stay what one launch gives."""

import pytest
import torch

import openrnn
from openrnn import cells
from openrnn.backends.fused import chain, parts

FAIR = {torch.bfloat16: 1e-2, torch.float32: 1e-3}
CELLS = (cells.lstm, cells.gru, cells.peephole_lstm)


def test_parts_cover_every_step_once():
    rows = parts.Rows(torch.tensor([100, 0, 37, 64]), torch.tensor([0, 3, 2, 1]))
    reset = torch.arange(400).view(100, 4) % 3 == 0
    for number in (1, 2, 3, 7, 100):
        found = parts.split(number, 100, rows, reset)
        assert [part.begin for part in found] == [0, *(part.end for part in found[:-1])]
        assert found[-1].end == 100
        assert max(part.steps for part in found) - min(part.steps for part in found) <= 1
        assert torch.equal(sum(part.rows.lengths for part in found), rows.lengths)
        assert torch.equal(torch.cat([part.reset for part in found]), reset)


@pytest.mark.parametrize("size", [parts.FAST, parts.SMALL])
def test_small_calls_stay_whole_and_parts_are_neither_large_nor_short(size):
    row = 4 * 512 * 2
    assert parts.count(size, size.large // (64 * row) - 1, 64, row) == 1
    for steps, batch in ((1024, 128), (20_000, 4096), (33, 2**20)):
        number = parts.count(size, steps, batch, row)
        assert number == -(-steps // max(size.least, size.enough // (batch * row)))


@pytest.fixture
def tiny(monkeypatch):
    """Parts of five steps."""
    for name in ("FAST", "SMALL"):
        monkeypatch.setattr(parts, name, parts.Size(0, 1, 5))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", [24, 37, 256, 1024])
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
@pytest.mark.parametrize("recompute", ["none", "gates"])
def test_parts_give_what_one_launch_gives(tiny, monkeypatch, cell, hidden, dtype, recompute):
    """But for rounding: products of other sizes may add up in another order."""
    torch.manual_seed(0)
    steps, batch = 23, 19
    where = {"device": "cuda", "dtype": dtype, "backend": "fused"}
    net = openrnn.Recurrent(cell, 12, hidden, 2, bidirectional=True, recompute=recompute, **where)
    x = torch.randn(steps, batch, 12, device="cuda", dtype=dtype)
    starts = [torch.randn(4, batch, hidden, device="cuda", dtype=dtype) for _ in cell.states]
    options = {
        "lengths": torch.randint(0, steps + 1, (batch,), device="cuda"),
        "reset": torch.rand(steps, batch, device="cuda") < 0.1,
    }
    for given in ({}, {"return_states": True}, options, {"lengths": options["lengths"]}):

        def call(given=given):
            leaves = [t.clone().requires_grad_() for t in (x, *starts)]
            out = net(leaves[0], tuple(leaves[1:]) if len(starts) > 1 else leaves[1], **given)
            flat = [t for group in out for t in (group if isinstance(group, tuple) else (group,))]
            total = sum((t.float() * torch.linspace(-1, 1, t.numel(), device="cuda").view(t.shape))
                        .sum() for t in flat)  # fmt: skip
            found = torch.autograd.grad(total, [*leaves, *net.parameters()])
            return [t.detach() for t in flat] + list(found)

        found = call()
        with monkeypatch.context() as whole:
            for name in ("FAST", "SMALL"):
                whole.setattr(parts, name, parts.Size(1 << 60, 1, 1))
            wanted = call()
        for have, want in zip(found, wanted):
            assert (have - want).norm() <= FAIR[dtype] * want.norm()


@pytest.mark.gpu
def test_recompute_keeps_little():
    """Much less memory than a training step that keeps all."""

    def peak(recompute):
        net = openrnn.LSTM(256, 256, device="cuda", backend="fused", recompute=recompute)
        x = torch.randn(4096, 32, 256, device="cuda", requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        net(x)[0].sum().backward()
        return torch.cuda.max_memory_allocated() - before

    assert peak("gates") < 0.6 * peak("none")


def test_a_spec_names_its_recompute_and_refuses_other_words():
    spec = cells.lstm.spec(8, 8, recompute="gates")
    assert openrnn.spec.Spec.parse(str(spec)) == spec
    with pytest.raises(ValueError, match="recompute must be one of"):
        openrnn.LSTM(8, 8, recompute="all")


def test_the_reserve_shrinks_with_recompute():
    """At T 1024, B 64, H 512: the states between eight parts in place of all records."""
    from openrnn.dispatch import BACKENDS
    from openrnn.spec import Problem

    chain.chain.cache_clear()
    sizes = []
    for recompute in ("none", "gates"):
        spec = cells.lstm.spec(512, 512, recompute=recompute)
        problem = Problem(spec, torch.bfloat16, "cuda", (9, 0), grad=True)
        kept = BACKENDS["fused"].reserve(problem, 1024, 64)
        sizes.append(sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in kept))
    assert sizes == [1024 * 64 * 512 * 5 * 2, 7 * 2 * 64 * 512 * 4]


def test_backends_without_it_say_so():
    table = openrnn.explain(openrnn.LSTM(8, 8, recompute="gates"), quiet=True)
    assert "recompute without effect" in str(table)
    assert "recompute" not in str(openrnn.explain(openrnn.LSTM(8, 8), quiet=True))


def test_recompute_needs_one_kernel_more():
    from openrnn.backends.fused import kernels

    plain, again = (cells.lstm.spec(8, 8, recompute=word) for word in ("none", "gates"))
    assert kernels.kinds(plain, True, True, False, True) == [
        ("forward", ("lengths", "every", "keep")), ("backward", ("lengths", "every")),
    ]  # fmt: skip
    assert kernels.kinds(again, True, True, False, True) == [
        ("forward", ("lengths", "every")), ("forward", ("lengths", "keep")),
        ("backward", ("lengths", "every")),
    ]  # fmt: skip
    assert kernels.kinds(again, False, False, False, False) == [("forward", ())]
