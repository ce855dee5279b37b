"""Single steps without a GPU: when they run, what is compiled, what launches are given.

The kernels are pretended: they do with torch what the CUDA source says, on the memory that a launch
names, so that results can be compared with the reference.
"""

import ctypes
import dataclasses
import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import numpy
import pytest
import torch
from cases import CELLS, thinned
from loops import on_an_h200
from test_fused_launches import clear_caches
from test_fused_products import at, copy_rows, multiply, permute_weights

from openrnn import schedule
from openrnn.backends.base import Call, Cotangents, Needs
from openrnn.backends.fused import backend, describe, kernels, program, schedules
from openrnn.backends.fused import single_step as steps
from openrnn.cells import lookup
from openrnn.codegen import cuda
from openrnn.codegen.config import saved_names
from openrnn.codegen.step_config import StepConfig
from openrnn.codegen.trace import trace
from openrnn.dispatch import BACKENDS
from openrnn.kernels.cuda.args import PLAIN, STEPS
from openrnn.native import cublaslt, nvrtc
from openrnn.native.recording import CURRENT
from openrnn.params import module_slots
from openrnn.schedule import Chunking
from openrnn.spec import Problem
from openrnn.tuning import single_step
from openrnn.tuning.limits import Limits
from openrnn.tuning.single_step import StepSizes

ABSENT = nvrtc.absent()
TRACED = {name: cell for name, cell in CELLS.items() if not cell.dependent_product}
HIDDEN, BATCH, WIDTH = 16, 5, 24


def problem(name="lstm", dtype=torch.bfloat16, device="cuda", hidden=64, inputs=24, **given):
    asked = ("grad", "lengths", "reset", "training")
    options = {key: given.pop(key) for key in asked if key in given}
    spec = CELLS[name].spec(inputs, hidden, **given)
    return Problem(spec, dtype, device, **options)


@pytest.mark.parametrize(
    ("given", "steps", "batch", "runs"),
    [({}, 1, 64, True), ({}, 1, 65536, True), ({}, 2, 1, False), ({"hidden": 60}, 1, 1, False),
     ({"inputs": 20}, 1, 1, False), ({"lengths": True}, 1, 1, False),
     ({"reset": True}, 1, 1, True), ({"reset": True, "bidirectional": True}, 1, 1, False),
     ({"bidirectional": True, "num_layers": 2}, 1, 1, True),
     ({"recompute": "gates", "grad": True}, 1, 1, False), ({"recompute": "gates"}, 1, 1, True)],
    ids=str,
)  # fmt: skip
def test_which_calls_are_single_steps(given, steps, batch, runs):
    assert single_step.takes(problem(**given), steps, batch) is runs


@pytest.mark.parametrize(
    ("dtype", "hidden", "batch", "kind"),
    [(torch.bfloat16, 512, 256, "step_forward"), (torch.bfloat16, 1024, 64, "step_forward"),
     (torch.bfloat16, 640, 64, "step_forward"), (torch.bfloat16, 640, 128, "step_cell"),
     (torch.bfloat16, 1024, 128, "step_cell"), (torch.bfloat16, 2048, 1, "step_forward"),
     (torch.bfloat16, 2048, 64, "step_cell"), (torch.float32, 512, 256, "step_forward"),
     (torch.float32, 640, 64, "step_forward"), (torch.float32, 640, 128, "step_cell"),
     (torch.float32, 1024, 64, "step_forward"), (torch.float32, 1024, 128, "step_cell")],
)  # fmt: skip
def test_gemms_multiply_where_they_were_faster(dtype, hidden, batch, kind):
    """LSTMs on an H200: benchmarks/log/cuda-results.md."""
    assert single_step.forward_kind(StepSizes(4, hidden, hidden, batch, dtype.itemsize)) == kind


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("has_h", [True, False])
def test_blocks_multiply_up_to_8_rows(itemsize, has_h):
    """They read each weight once, as GEMMs do, in one launch."""
    for hidden, batch in itertools.product((64, 1024, 4096), range(1, 9)):
        sizes = StepSizes(4, hidden, hidden, batch, itemsize, has_h)
        assert single_step.forward_kind(sizes) == "step_forward"


def test_without_initial_states_r_is_not_counted():
    """Two GEMMs would be slower than one launch, and one is quicker."""
    sizes = StepSizes(4, 640, 640, 128, 2)
    assert single_step.forward_kind(sizes._replace(hidden=512, inputs=512)) == "step_forward"
    assert single_step.forward_kind(sizes._replace(has_h=False)) == "step_cell"
    assert sizes._replace(has_h=False).columns == 640
    no_products = StepSizes(4, 0, 640, 128, 2, has_h=False)  # x is for the gates
    assert single_step.forward_kind(no_products) == "step_forward"


@pytest.mark.skipif(ABSENT is not None, reason=f"cannot compile: {ABSENT}")
@pytest.mark.parametrize(
    ("hidden", "batch", "options", "forward"),
    [(64, 1, {}, [(": 8 blocks", "")]), (640, 128, {}, [(": GEMMs of x and h", ": a GEMM of x,")]),
     (512, 256, {}, [(": 128 blocks", ": a GEMM of x, then 256 blocks")]),
     (1024, 128, {"input_mode": "gates"}, [(": a GEMM of h", ": 1024 blocks")]),
     (64, 1, {"inputs": 128, "num_layers": 2}, [(": 8 blocks", ""), (": 8 blocks", "")])],
    ids=str,
)  # fmt: skip
def test_explain_names_the_kernels_with_initial_states_and_without(hidden, batch, options, forward):
    """One line for both where they are the same."""
    wide = 4 * hidden if "input_mode" in options else hidden
    given = {"hidden": hidden, "inputs": wide, "grad": True, **options}
    asked = dataclasses.replace(problem(**given), capability=(9, 0), batch=batch, steps=1)
    lines = [line for line in describe.describe(asked) if "of a single step" in line]
    assert lines[-1].startswith("backward of a single step: ")
    found = iter(lines[:-1])
    for usual, from_zeros in forward:
        line = next(found)
        assert line.startswith("forward of a single step")
        assert usual in line
        assert "without initial states" not in line
        if from_zeros:
            line = next(found)
            assert " without initial states" + from_zeros in line
    assert next(found, None) is None


@pytest.mark.parametrize(
    ("sizes", "tiles", "unit_groups"),
    [((4, 512, 512, 1, 2), 1, 1), ((3, 512, 512, 16, 2), 1, 1), ((4, 512, 512, 64, 2), 4, 1),
     ((4, 1024, 1024, 16, 2), 2, 1), ((4, 640, 640, 64, 2), 4, 2), ((4, 512, 512, 256, 4), 8, 2),
     ((3, 1024, 1024, 64, 4), 4, 2), ((4, 256, 256, 16, 4), 1, 1)],
)  # fmt: skip
def test_the_model_takes_a_configuration_that_was_measured_best(sizes, tiles, unit_groups):
    """Or one within 1% of the best, of all that were timed on an H200."""
    best = single_step.forward(StepSizes(*sizes))[0]
    assert (best.tiles, best.unit_groups) == (tiles, unit_groups)


def test_resets_to_given_states_are_for_steps_without_gemms():
    """Forward and backward alike. Else a loop runs, so GEMMs need not be the slower ones."""
    asked = problem(hidden=1024, inputs=1024, reset=True, grad=True)
    assert single_step.takes(asked, 1, 4096)
    for batch, runs in ((64, True), (128, True), (1024, False)):
        assert single_step.takes(asked, 1, batch, reset_state=True) is runs
    assert single_step.differentiates(asked, 1, 128, False, reset_state=True)
    (sizes,) = single_step.step_sizes(asked, 128)
    assert single_step.forward_kind(sizes) == "step_cell"
    assert single_step.forward_kind(sizes, reset_state=True) == "step_forward"


def test_no_matrix_is_read_where_x_is_for_the_gates():
    asked = problem(hidden=512, inputs=2048, input_mode="gates", num_layers=2)
    assert [sizes.inputs for sizes in single_step.step_sizes(asked, 1)] == [0, 512]
    sizes = single_step.step_sizes(problem(num_layers=3), 5)
    assert sizes == [StepSizes(4, 24, 64, 5, 2), StepSizes(4, 64, 64, 5, 2)]


def test_a_backward_pass_with_resets_and_gradients_of_states_is_a_loop():
    asked = problem(reset=True, grad=True)
    assert single_step.differentiates(asked, 1, 1, False)
    assert not single_step.differentiates(asked, 1, 1, True)
    assert single_step.differentiates(problem(grad=True), 1, 256, True)
    assert not single_step.differentiates(problem(grad=True), 1, 257, True)


@pytest.mark.parametrize("gates", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("batch", [1, 8, 9, 256])
@pytest.mark.parametrize("hidden", [64, 72, 1024])
def test_configurations_cover_the_batch_with_as_many_sums_as_registers_hold(gates, batch, hidden):
    found = single_step.forward(StepSizes(gates, hidden, hidden, batch, 2))
    assert (found[-1].tiles, found[-1].unit_groups) == (1, 1)
    assert len(found) - len({*found}) == (found[-1] in found[:-1])
    for one in found:
        assert hidden % (8 * one.unit_groups) == 0
        assert one.unit_groups * one.tiles * -(-gates // 2) <= single_step.MOST_SUMS
        across = hidden // (8 * one.unit_groups)
        rows = single_step.blocks(one, hidden, batch) // across * 8 * one.tiles
        assert batch <= rows < batch + 8 * one.tiles


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)])
@pytest.mark.parametrize("gates", range(1, 17))
def test_shared_memory_fits_the_device(gates, capability):
    for hidden, batch in itertools.product((64, 2048), (1, 64, 4096)):
        sizes = StepSizes(gates, hidden, hidden, batch, 2)
        found = single_step.configs("step_forward", sizes, capability)
        assert found
        for one in found:
            asked = single_step.shared_of_launch(one, sizes, capability, 132)
            assert one.shared(gates) <= asked <= Limits.of(capability).shared
    assert single_step.configs("step_cell", sizes, capability) == [single_step.CELL]


def test_no_two_blocks_of_a_launch_share_a_multiprocessor_while_others_are_free():
    """Such a launch begins early, when some multiprocessors are free and others are not yet."""

    def asked(batch, processors=132, capability=(9, 0)):
        sizes = StepSizes(4, 512, 512, batch, 2)
        one = single_step.configs("step_forward", sizes, capability)[0]
        return single_step.shared_of_launch(one, sizes, capability, processors)

    half = Limits.of((9, 0)).shared // 2
    assert asked(1) > half  # 64 blocks
    assert asked(1, processors=60) < half
    assert asked(1, capability=(8, 0)) < half
    sizes = StepSizes(4, 640, 640, 64, 2)
    many = single_step.with_stages(StepConfig("step_forward", 4), sizes, 2 * half)
    assert single_step.blocks(many, 640, 64) == 160
    # two are resident on each
    assert half > single_step.shared_of_launch(many, sizes, (9, 0), 132) == many.shared(4)
    assert single_step.shared_of_launch(single_step.CELL, sizes, (9, 0), 132) == 0


@pytest.mark.skipif(ABSENT is not None, reason=f"cannot compile: {ABSENT}")
@pytest.mark.parametrize(
    ("name", "dtype"), thinned(itertools.product(TRACED, ("bfloat16", "float32")), 9)
)
def test_what_runs_spills_nothing(name, dtype):
    cell = trace(TRACED[name])
    for batch in (1, 32, 256):
        for capability in ((8, 0), (9, 0)):
            sizes = StepSizes(len(cell.gates), 1024, 1024, batch, getattr(torch, dtype).itemsize)
            configs = single_step.configs("step_forward", sizes, capability)
            made, _ = kernels.best_step(configs, cell, dtype, nvrtc.arch_of(capability))
            assert made.resources.spilled == 0
    for config in (single_step.CELL, single_step.BACKWARD):
        assert kernels.step_binary(cell, dtype, config, "sm_90a").resources.spilled == 0


def test_its_schedule_has_neither_loop_nor_input_product():
    chunkings = ((Chunking((0, 1), mode="single_step"),) * 2,) * 2
    forward = schedule.show(schedule.forward(chunkings, dropout=True))
    assert [line.split()[1] for line in forward] == [
        *["begin_layer", "step"] * 2, "dropout", *["begin_layer", "step"] * 2
    ]  # fmt: skip
    backward = schedule.show(schedule.backward(chunkings))
    each = ["begin_layer", "step", "gradient_products", "finish_weights"]
    assert [line.split()[1] for line in backward] == each * 4


def named(table, words, states):
    """The arguments of a launch by name."""
    rest = iter(words)
    taken = {
        field.name: [next(rest) for _ in range(states)] if field.array else next(rest)
        for field in table.fields
    }
    assert next(rest, None) is None
    return SimpleNamespace(**taken)


def rows(address, width, stride=None):
    """The rows of the batch that lie there; zeros where the address is null."""
    return at(address, (BATCH, width), stride) if address else torch.zeros(BATCH, width)


class Kernel:
    """A kernel whose launches are done here."""

    threads, device = 256, 0

    def __init__(self, kind, cell):
        self.kind, self.cell, self.traced = kind, cell, trace(cell)
        self.made = SimpleNamespace(name=kind)
        self.table = {**STEPS, **PLAIN}[kind]

    def launch(self, blocks, words, event=0):
        if CURRENT.recording is None:
            self.run(blocks, words)
        else:
            CURRENT.recording.launch(self, blocks, words, event)

    def enter(self):
        pass

    def launch_at(self, parameter, blocks, stream, event=0):
        arrays = sum(field.array for field in self.table.fields)
        count = len(self.table.fields) + arrays * (len(self.cell.states) - 1)
        start = ctypes.c_void_p.from_address(parameter).value
        self.run(blocks, [*(ctypes.c_int64 * count).from_address(start)])

    def run(self, blocks, words):
        args = named(self.table, words, len(self.cell.states))
        if self.kind in ("step_forward", "step_cell"):
            assert blocks == HIDDEN // 8  # all five rows are in one tile
        run = {"permute_weights": permute_weights, "copy_rows": copy_rows}
        run.get(self.kind, getattr(self, self.kind, None))(args)

    def reset_rows(self, args):
        if not args.reset:
            return torch.zeros(BATCH, dtype=torch.bool)
        raw = (ctypes.c_uint8 * BATCH).from_address(args.reset)
        return torch.from_numpy(numpy.ctypeslib.as_array(raw)) != 0

    def vectors(self, args):
        count = len(self.cell.unit_params)
        return tuple(at(args.vectors, (count, HIDDEN))) if count else ()

    def saved(self, args):
        """Memory for saved activations, a row of H values for each and each of 8 rows."""
        return at(args.saved, (len(saved_names(self.traced)), 8 * HIDDEN))

    def step_forward(self, args):
        gates, reset = len(self.cell.gates), self.reset_rows(args)[:, None]
        before = [
            torch.where(reset, rows(other, HIDDEN), rows(first, HIDDEN))
            for first, other in zip(args.initial, args.reset_state)
        ]
        if args.w_ih:
            x = rows(args.x, args.inputs, args.x_row)
            x = x @ at(args.w_ih, (gates * HIDDEN, args.inputs)).T
        else:
            starts = [args.x + 4 * gate * args.x_gate for gate in range(gates)]
            x = torch.cat([rows(start, HIDDEN, args.x_row) for start in starts], 1)
        r = before[0] @ at(args.weight, (gates * HIDDEN, HIDDEN)).T
        self.apply(args, x, r, before)

    def step_cell(self, args):
        gates, reset = len(self.cell.gates), self.reset_rows(args)[:, None]
        before = [torch.where(reset, 0.0, rows(first, HIDDEN)) for first in args.initial]
        r = torch.where(reset, 0.0, rows(args.h_products, gates * HIDDEN))
        if args.w_ih:
            x = rows(args.x_products, gates * HIDDEN)
        else:
            starts = [args.x + 4 * gate * args.x_gate for gate in range(gates)]
            x = torch.cat([rows(start, HIDDEN, args.x_row) for start in starts], 1)
        self.apply(args, x, r, before)

    def apply(self, args, x, r, before):
        """The cell, from products."""
        gates = len(self.cell.gates)
        x = x + (at(args.bias_x, (1, gates * HIDDEN)) if args.bias_x else 0)
        r = r + (at(args.bias_r, (1, gates * HIDDEN)) if args.bias_r else 0)
        x, r = x.split(HIDDEN, 1), r.split(HIDDEN, 1)
        after = self.cell.step(x, r, tuple(before), self.vectors(args), torch.clone)
        rows(args.y, HIDDEN, args.y_row).copy_(after[0])
        for place, state in zip([*args.final, *args.all_states], [*after, *after]):
            if place:
                rows(place, HIDDEN).copy_(state)
        if args.saved:
            values = {f"s_{name}": one for name, one in zip(self.cell.states, before)}
            for gate, left, right in zip(self.cell.gates, x, r):
                values |= {f"a_{gate}": left + right, f"x_{gate}": left, f"r_{gate}": right}
            for line, name in zip(self.saved(args), saved_names(self.traced)):
                line[: BATCH * HIDDEN].copy_(values[name].flatten())

    @torch.enable_grad()
    def step_backward(self, args):
        values = {
            name: line[: BATCH * HIDDEN].view(BATCH, HIDDEN).clone().requires_grad_()
            for name, line in zip(saved_names(self.traced), self.saved(args))
        }
        zero = torch.zeros(BATCH, HIDDEN)

        def value(name):  # what is not saved has no part in the derivative, but in its size
            return values.setdefault(name, zero.clone().requires_grad_())

        apart = self.traced.split_gates
        x = tuple(value(f"x_{g}" if g in apart else f"a_{g}") for g in self.cell.gates)
        r = tuple(value(f"r_{g}") if g in apart else zero for g in self.cell.gates)
        states = tuple(value(f"s_{name}") for name in self.cell.states)
        vectors = tuple(one.clone().requires_grad_() for one in self.vectors(args))
        after = self.cell.step(x, r, states, vectors, torch.clone)
        grads = [
            rows(first, HIDDEN) + rows(second, HIDDEN)
            for first, second in zip(args.d_final, args.d_all_states)
        ]
        grads[0] = grads[0] + rows(args.dy, HIDDEN, args.dy_row)
        planes = [values[name[1:]] for name in cuda.planes(self.traced)]
        found = torch.autograd.grad(
            after, [*planes, *states, *vectors], grads, allow_unused=True, materialize_grads=True
        )
        d_gates, d_before = found[: len(planes)], found[len(planes) :]
        rows(args.d_gates, len(planes) * HIDDEN).copy_(torch.cat(d_gates, 1).detach())
        gates = len(self.cell.gates)
        sides = (args.input_bias, args.left, 0), (args.recurrent_bias, args.right, 1)
        for place, order, recurrent in sides:
            if place:
                first = (len(planes) - gates) * recurrent
                taken = [first + (order >> 4 * gate & 15) for gate in range(gates)]
                sums = torch.stack([d_gates[plane].sum(0) for plane in taken])
                at(place, (gates, HIDDEN)).copy_(sums.detach())
        if vectors:
            sums = torch.stack(d_before[len(states) :])
            at(args.d_vectors, (len(vectors), HIDDEN)).copy_(sums.detach())
        for place, grad in zip(args.d_initial, d_before):
            if place:
                rows(place, HIDDEN).copy_(grad.detach())


@pytest.fixture
def pretended(monkeypatch):
    """A call of some cell and options, whose kernels and products run here."""
    monkeypatch.setattr(backend, "On", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cublaslt.Product, "run", multiply)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    on_an_h200(monkeypatch)
    monkeypatch.setattr(steps, "has_launch_events", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(program, "current_stream", lambda device: 0)

    def call(name, states=True, **given):
        cell = lookup(name)
        made = SimpleNamespace()

        def best(configs, cell, dtype, arch):
            return made, next(iter(configs))

        def loaded(binary, cluster, threads, shared, device, overlaps):
            assert binary is made
            assert overlaps
            return Kernel(made.kind, cell)

        class Prepared(steps.PreparedStep):
            def __init__(self, layer, kind, sizes):
                made.kind = kind
                super().__init__(layer, kind, sizes)

        monkeypatch.setattr(kernels, "best_step", best)
        monkeypatch.setattr(steps.nvrtc, "loaded", loaded)
        monkeypatch.setattr(steps, "step_for", Prepared)
        monkeypatch.setattr(kernels, "plain", lambda name, *_: Kernel(name, cell))
        clear_caches()
        masks = {key: given.pop(key) for key in ("reset", "reset_states") if key in given}
        wide = HIDDEN * len(cell.gates) if given.get("input_mode") == "gates" else WIDTH
        asked = problem(
            name, torch.float32, "cpu", HIDDEN, given.pop("inputs", wide),
            grad=given.pop("grad", True), reset="reset" in masks, **given,
        )  # fmt: skip
        spec = asked.spec
        before = [torch.randn(spec.chains, BATCH, HIDDEN) for _ in spec.states] if states else []
        params = [torch.randn(slot.shape) / 4 for slot in module_slots(spec)]
        return Call(asked, torch.randn(1, BATCH, spec.input_size), before, params, **masks)

    yield call
    clear_caches()


CASES = [
    {}, {"states": False}, {"num_layers": 2}, {"bidirectional": True, "num_layers": 2},
    {"input_mode": "skip", "inputs": HIDDEN}, {"input_mode": "gates"}, {"bias_mode": "none"},
    {"bias_mode": "input"}, {"bias_mode": "recurrent"},
]  # fmt: skip


@pytest.fixture
def gemms(monkeypatch):
    """Products of steps are GEMMs at any size."""
    monkeypatch.setattr(single_step, "forward_kind", lambda *_: "step_cell")


@pytest.mark.parametrize("states", [True, False])
def test_the_kernel_is_chosen_by_whether_there_is_an_h(pretended, monkeypatch, states):
    """Initial states, or those after a reset."""
    asked = []
    monkeypatch.setattr(single_step, "forward_kind", lambda *of: asked.append(of) or "step_forward")
    BACKENDS["fused"].forward(pretended("lstm", states=states, grad=False))
    ((sizes, reset_state),) = set(asked)
    assert (sizes.has_h, reset_state) == (states, False)
    asked.clear()
    reset = torch.zeros(1, BATCH, dtype=torch.bool)
    after = [torch.randn(1, BATCH, HIDDEN) for _ in range(2)]
    call = pretended("lstm", states=states, grad=False, reset=reset, reset_states=after)
    BACKENDS["fused"].forward(call)
    assert {(sizes.has_h, reset_state) for sizes, reset_state in asked} == {(True, True)}


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("name", ["lstm", "gru", "peephole_lstm"])
def test_results_and_gradients_where_gemms_multiply(pretended, gemms, name, options):
    call = pretended(name, **options)
    count, params = len(call.states), len(call.params)
    check(call, Needs(True, (True,) * count, (True,) * params, ()))


@pytest.mark.parametrize("states", [False, True], ids=["from zeros", "from states"])
def test_resets_to_zeros_where_gemms_multiply(pretended, gemms, states):
    reset = torch.tensor([[True, False, False, True, False]])
    call = pretended("gru", states, reset=reset)
    nothing = (False,) * len(call.states)
    check(call, Needs(True, nothing, (True,) * len(call.params), ()))


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("name", TRACED)
def test_results_and_gradients_are_those_of_the_reference(pretended, name, options):
    call = pretended(name, **options)
    count, params = len(call.states), len(call.params)
    needs = Needs(True, (True,) * count, (True,) * params, ())
    check(call, needs)


@pytest.mark.parametrize("given", [False, True], ids=["to zeros", "to given states"])
@pytest.mark.parametrize("states", [False, True], ids=["from zeros", "from states"])
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_resets(pretended, name, states, given):
    """Without gradients of states: with these, backward is a loop."""
    reset = torch.tensor([[True, False, False, True, False]])
    others = [torch.randn(1, BATCH, HIDDEN) for _ in lookup(name).states] if given else []
    call = pretended(name, states, reset=reset, reset_states=others)
    nothing = (False,) * len(call.states)
    check(call, Needs(True, nothing, (True,) * len(call.params), (False,) * len(others)))


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("name", ["lstm", "gru", "peephole_lstm"])
@torch.no_grad()
def test_a_step_that_repeats_has_new_addresses_alone(pretended, name, resets, num_layers):
    """As a policy acts: other x, states and resets, which may lie at any address."""
    given = {"reset": torch.zeros(1, BATCH, dtype=torch.bool)} if resets else {}
    call = pretended(name, grad=False, num_layers=num_layers, **given)
    fused = BACKENDS["fused"]
    out = fused.forward(call)
    run = fused.prepare(call, [tuple(one.shape) for one in (out.y, *out.finals)])
    copies = len(call.problem.spec.unit_params)  # that put these vectors side by side
    assert len(run.program.operations) == num_layers * (1 + copies)
    for place in range(3):
        masks = (torch.rand(3, BATCH) < 0.5)[place, None]
        call.x, call.states = torch.randn_like(call.x), [*map(torch.randn_like, call.states)]
        call.reset = masks if resets else None
        every = [call.x, *call.params, *call.states, *([masks] if resets else [])]
        want = BACKENDS["reference"].forward(call)
        for one, other in zip(run(every), [want.y, *want.finals], strict=True):
            torch.testing.assert_close(one, other)


@torch.no_grad()
def check(call, needs):
    """Compares both passes with the reference."""
    fused, reference = BACKENDS["fused"], BACKENDS["reference"]
    out, want = fused.forward(call), reference.forward(call)
    key = schedules.ScheduleKey.of(call, False, 0)
    assert {one.verb for one in schedules.forward(key)} == {"begin_layer", "step"}
    for one, other in zip([out.y, *out.finals], [want.y, *want.finals], strict=True):
        torch.testing.assert_close(one, other)
    grads = Cotangents(torch.randn_like(out.y), [torch.randn_like(one) for one in out.finals], [])
    found = fused.backward(call, out.y, out.reserve, grads, needs)
    wanted = reference.backward(call, out.y, [], grads, needs)
    pairs = zip(
        [found.x, *found.states, *found.params], [wanted.x, *wanted.states, *wanted.params],
        strict=True,
    )  # fmt: skip
    for one, other in pairs:
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
