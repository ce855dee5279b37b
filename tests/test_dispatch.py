"""The table of who takes what, tested by values alone: no GPU, no backend runs."""

import pickle
import sys
import warnings
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from cases import CELLS, REFUSALS, takes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numba.core.dispatcher import Dispatcher

import openrnn
from openrnn import cells, dispatch
from openrnn.backends.base import Backend, Capabilities, PreferredBackend
from openrnn.backends.fused import kernels
from openrnn.backends.fused.stepwise import first_configs, stepwise_kinds
from openrnn.errors import NoBackendError, warn_user
from openrnn.native import nvrtc
from openrnn.spec import ALGORITHMS, BIAS_MODES, INPUT_MODES, Problem, Spec

PLAIN = Problem(cells.lstm.spec(4, 4), torch.float32, "cuda", capability=(9, 0))
EVERYTHING = Capabilities(
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.float32}),
    capability=(8, 0),
    bias_modes=frozenset(BIAS_MODES),
    input_modes=frozenset(INPUT_MODES),
    algorithms=frozenset(ALGORITHMS),
    **{field.name: True for field in fields(Capabilities) if field.type in (bool, "bool")},
)
# each capability taken away alone, what then is refused, and in which words
MISSING = {
    "devices": (frozenset({"cpu"}), PLAIN, "device cuda, needs cpu"),
    "dtypes": (
        frozenset({torch.float16, torch.bfloat16}),
        PLAIN,
        "dtype float32, needs bfloat16 or float16",
    ),
    "capability": ((9, 1), PLAIN, "compute capability 9.0, needs 9.1"),
    "bias_modes": (
        frozenset({"double"}),
        replace(PLAIN, spec=PLAIN.spec.with_(bias_mode="none")),
        "bias_mode none, needs double",
    ),
    "input_modes": (
        frozenset({"linear"}),
        replace(PLAIN, spec=PLAIN.spec.with_(input_mode="skip")),
        "input_mode skip, needs linear",
    ),
    "algorithms": (
        frozenset({"auto"}),
        replace(PLAIN, spec=PLAIN.spec.with_(algorithm="persist_static")),
        "algorithm persist_static is cuDNN's, needs auto",
    ),
    "grad": (False, replace(PLAIN, grad=True), "does not do gradients"),
    "layers": (
        False,
        replace(PLAIN, spec=PLAIN.spec.with_(num_layers=3)),
        "does not do 3 layers",
    ),
    "bidirectional": (
        False,
        replace(PLAIN, spec=PLAIN.spec.with_(bidirectional=True)),
        "does not do two directions",
    ),
    "projection": (
        False,
        replace(PLAIN, spec=PLAIN.spec.with_(proj_size=2)),
        "does not do projection",
    ),
    "clip": (
        False,
        replace(PLAIN, spec=PLAIN.spec.with_(cell_clip=(-1.0, 1.0))),
        "does not do cell clip",
    ),
    "dropout": (
        False,
        replace(PLAIN, training=True, spec=PLAIN.spec.with_(num_layers=2, dropout=0.5)),
        "does not do dropout",
    ),
    "lengths": (False, replace(PLAIN, lengths=True), "does not do lengths"),
    "reset": (False, replace(PLAIN, reset=True), "does not do resets inside the sequence"),
    "return_states": (
        False,
        replace(PLAIN, return_states=True),
        "does not do the states of all steps",
    ),
    "opaque": (False, replace(PLAIN, opaque="x is a DTensor, which has"), "x is a DTensor"),
    "empty": (
        False,
        replace(PLAIN, spec=PLAIN.spec.with_(hidden_size=0)),
        "does not do networks without inputs or units",
    ),
    "transform": (False, replace(PLAIN, transform=True), "does not do a torch.func transform"),
    "int8": (False, replace(PLAIN, precision="int8"), "does not do int8 weights"),
    "dependent_product": (
        False,
        replace(PLAIN, spec=cells.gru_reset_before.spec(4, 4)),
        "two dependent products a step",
    ),
}


class Fake(Backend):
    """A backend of given capabilities that runs nothing."""

    def __init__(self, can, name="fake", gone=None, over=None):
        self.can, self.name, self.gone, self.over = can, name, gone, over

    def absent(self):
        return self.gone

    def preferred_backend(self, problem):
        return self.over


@pytest.fixture
def install(monkeypatch):
    """Puts other backends in the place of ours."""

    def install(*backends):
        monkeypatch.setattr(dispatch, "BACKENDS", {b.name: b for b in backends})
        dispatch._absent.cache_clear()
        dispatch.select.cache_clear()

    yield install
    monkeypatch.undo()
    dispatch._absent.cache_clear()
    dispatch.select.cache_clear()


def test_every_capability_is_tested_here():
    assert MISSING.keys() == {field.name for field in fields(Capabilities)}


def test_capabilities_default_to_nothing():
    """A forgotten field refuses, and never answers wrong."""
    plain = Fake(Capabilities()).refusals(PLAIN)
    assert plain == [
        "device cuda, needs nothing",
        "dtype float32, needs nothing",
        "bias_mode double, needs nothing",
        "input_mode linear, needs nothing",
    ]
    for name, (_, problem, words) in MISSING.items():
        if name != "capability":
            reasons = Fake(Capabilities()).refusals(problem)
            assert any(words.split(", ")[0] in reason for reason in reasons), name


@pytest.mark.parametrize("name", MISSING)
def test_one_missing_capability_is_one_reason(name):
    value, problem, words = MISSING[name]
    assert Fake(EVERYTHING).refusals(problem) == []
    reasons = Fake(replace(EVERYTHING, **{name: value})).refusals(problem)
    assert len(reasons) == 1
    assert words in reasons[0]
    if problem is not PLAIN:
        assert Fake(replace(EVERYTHING, **{name: value})).refusals(PLAIN) == []


@pytest.mark.parametrize("spec", [PLAIN.spec, PLAIN.spec.with_(num_layers=2)], ids=["one", "two"])
def test_dropout_counts_only_where_it_is_drawn(spec):
    """Not in inference, not with p = 0, not with one layer."""
    can = Fake(replace(EVERYTHING, dropout=False))
    for training in False, True:
        for p in 0.0, 0.5:
            problem = replace(PLAIN, training=training, spec=spec.with_(dropout=p))
            assert bool(can.refusals(problem)) == (training and p > 0 and spec.num_layers > 1)


def test_an_unknown_device_capability_is_no_reason():
    """The device type alone decides where no capability is known."""
    assert Fake(EVERYTHING).refusals(replace(PLAIN, capability=None)) == []
    assert Fake(EVERYTHING).refusals(replace(PLAIN, capability=(7, 5))) == [
        "compute capability 7.5, needs 8.0"
    ]


def test_all_reasons_are_given_at_once():
    problem = replace(PLAIN, device="cpu", dtype=torch.float64, lengths=True, grad=True)
    can = replace(EVERYTHING, lengths=False, grad=False)
    assert len(Fake(can).refusals(problem)) == 4


SPECS = st.builds(
    lambda cell, layers, two, bias, p: CELLS[cell].spec(
        3, 4, num_layers=layers, bidirectional=two, bias_mode=bias, dropout=p
    ),
    st.sampled_from(sorted(CELLS)),
    st.integers(1, 2),
    st.booleans(),
    st.sampled_from(BIAS_MODES),
    st.sampled_from((0.0, 0.5)),
)
FLAGS = ("grad", "training", "lengths", "reset", "return_states", "transform")
PROBLEMS = st.builds(
    Problem,
    SPECS,
    st.sampled_from((torch.float16, torch.bfloat16, torch.float32, torch.float64)),
    st.sampled_from(("cpu", "cuda")),
    st.sampled_from((None, (7, 0), (9, 0))),
    **{flag: st.booleans() for flag in FLAGS},
)


@given(PROBLEMS)
def test_our_backends_refuse_what_the_tests_expect(problem):
    """`takes` compares each backend's reasons with cases.REFUSALS, both ways."""
    for name in dispatch.BACKENDS:
        takes(name, problem)
    assert dispatch.BACKENDS["reference"].refusals(problem) == []


def test_every_backend_has_a_row_in_the_tests():
    assert dispatch.BACKENDS.keys() <= REFUSALS.keys()


@given(PROBLEMS)
def test_reasons_look_at_values_only(problem):
    """The same answer for T and B of any size: they inform a report and never decide."""
    for backend in dispatch.BACKENDS.values():
        sized = replace(problem, steps=10**9, batch=10**9)
        assert backend.refusals(sized) == backend.refusals(problem)


@pytest.fixture(params=["there", "gone"])
def no_compiler(request, monkeypatch):
    """A machine whose compilers fail the test, or are not there either."""

    def compiled(*_, **__):
        pytest.fail("compiled")

    if request.param == "gone":
        monkeypatch.setitem(sys.modules, "cuda", None)  # NVRTC comes through its modules
    else:
        monkeypatch.setattr(nvrtc, "absent", lambda: None)
    monkeypatch.setattr(nvrtc, "binary", compiled)
    monkeypatch.setattr(nvrtc, "_compile", compiled)
    # traces of cells are in the store, too, and may come from it
    monkeypatch.setattr(nvrtc, "store", SimpleNamespace(path_of=nvrtc.store.path_of, kept=compiled))
    monkeypatch.setattr(Dispatcher, "compile", compiled)
    for cached in (kernels.binary, kernels.plain_binary):
        cached.cache_clear()


# compute capability, cell, dtype, with gradients: the largest H of which fused kernels hold R
LARGEST = {
    ((8, 0), "lstm", torch.bfloat16, False): 1728,
    ((8, 0), "gru", torch.float32, True): 680,
    ((8, 6), "lstm", torch.float32, True): 88,
    ((9, 0), "lstm", torch.bfloat16, True): 2016,
    ((9, 0), "gru", torch.float32, False): 2624,
    ((9, 0), "rnn_tanh", torch.bfloat16, True): 4320,
    ((12, 0), "lstm", torch.bfloat16, True): 384,
}


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("masks", [{}, {"lengths": True, "reset": True, "return_states": True}])
@pytest.mark.parametrize("asked", LARGEST, ids=str)
def test_the_table_needs_no_compiler_near_the_largest_size(asked, masks):
    """There the kernels of some sizes spill, which only compiling tells: it was done to refuse."""
    capability, cell, dtype, grad = asked
    for hidden in (LARGEST[asked] - 9, LARGEST[asked], LARGEST[asked] + 1):
        spec = CELLS[cell].spec(8, hidden)
        problem = Problem(spec, dtype, "cuda", capability, grad=grad, **masks)
        table = {row.backend: row.reasons for row in dispatch.explain(problem).rows}
        assert list(table) == list(dispatch.BACKENDS)
        assert not [reason for reason in table["fused"] if reason != dispatch._absent("fused")]
        kinds = ("forward", "backward")[: 1 + grad]
        assert set(stepwise_kinds(problem)) <= set(kinds)
        rest = [one for one in first_configs(problem) if one.reads_r]
        assert bool(rest) == (hidden > LARGEST[asked])
        # an H200 reads a part of a larger R in each step
        assert all(one.stepwise == (capability != (9, 0)) for one in rest)


@pytest.mark.usefixtures("no_compiler")
@given(problem=PROBLEMS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_table_needs_a_compiler(problem):
    for backend in dispatch.BACKENDS.values():
        assert isinstance(backend.refusals(problem), list)
        backend.preferred_backend(problem)


def test_auto_takes_the_first_without_reasons(install):
    none = replace(EVERYTHING, devices=frozenset())
    install(Fake(none, "first"), Fake(EVERYTHING, "second"), Fake(EVERYTHING, "third"))
    table = dispatch.explain(PLAIN)
    assert dispatch.select(PLAIN) == table.chosen == "second"
    assert [row.chosen for row in table.rows] == [False, True, False]
    assert table.refused == {"first": ["device cuda, needs nothing"]}
    assert str(table).splitlines() == [
        str(PLAIN),
        "  first   device cuda, needs nothing",
        "> second  runs",
        "  third   could run, comes later in the order of preference",
    ]


def test_what_is_absent_is_not_taken(install):
    install(Fake(EVERYTHING, "first", gone="package fast is not installed"), Fake(EVERYTHING, "b"))
    assert dispatch.select(PLAIN) == "b"
    assert dispatch.explain(PLAIN).refused == {"first": ["package fast is not installed"]}
    with pytest.raises(NoBackendError, match="package fast is not installed"):
        dispatch.select(PLAIN, "first")


def test_one_that_yields_still_runs_when_named(install):
    install(
        Fake(EVERYTHING, "slow", over=PreferredBackend("second", "H 4")), Fake(EVERYTHING, "second")
    )
    assert dispatch.select(PLAIN) == "second"
    assert dispatch.select(PLAIN, "slow") == "slow"
    first, _ = dispatch.explain(PLAIN).rows
    assert first.verdict == "second is measured faster here: H 4"
    assert not first.reasons
    assert dispatch.explain(PLAIN, "slow").rows[0].verdict == "runs"


def test_a_named_backend_never_becomes_another(install):
    install(Fake(replace(EVERYTHING, lengths=False), "picky"), Fake(EVERYTHING, "willing"))
    problem = replace(PLAIN, lengths=True)
    assert dispatch.select(problem) == "willing"
    with pytest.raises(NoBackendError) as caught:
        dispatch.select(problem, "picky")
    assert caught.value.reasons == {"picky": ["does not do lengths"]}


def test_the_error_of_a_named_backend_says_what_would_run(install):
    install(Fake(Capabilities(), "a"), Fake(EVERYTHING, "b"))
    with pytest.raises(NoBackendError) as caught:
        dispatch.select(PLAIN, "a")
    assert str(caught.value).endswith('\nwith backend "auto" it would run on backend b')
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.advice) == (str(caught.value), caught.value.advice)


def test_the_error_lists_every_reason(install):
    none = Capabilities()
    install(Fake(none, "a"), Fake(replace(EVERYTHING, dtypes=frozenset()), "b"))
    with pytest.raises(NoBackendError) as caught:
        dispatch.select(PLAIN)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"no backend takes {PLAIN}"
    assert lines[1].startswith("  a: device cuda, needs nothing; dtype float32, needs nothing; ")
    assert lines[2] == "  b: dtype float32, needs nothing"
    assert isinstance(caught.value, RuntimeError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.reasons) == (str(caught.value), caught.value.reasons)


def test_an_unknown_name():
    for ask in dispatch.select, dispatch.explain:
        with pytest.raises(ValueError, match="backend must be auto or one of"):
            ask(PLAIN, "fast")


def test_the_order_of_preference():
    """The reference is the last resort."""
    assert [*dispatch.BACKENDS][-1] == "reference"
    assert all(name == backend.name for name, backend in dispatch.BACKENDS.items())
    assert dispatch.select(replace(PLAIN, device="cpu")) == "cpu"
    assert dispatch.select(replace(PLAIN, device="cpu", transform=True)) == "reference"


def test_a_fall_to_the_reference_is_said_once(install, monkeypatch):
    monkeypatch.setattr(dispatch, "_warned", set())
    fast = Fake(replace(EVERYTHING, lengths=False, reset=False), "fast")
    install(fast, Fake(EVERYTHING, "reference"))

    def caught(problem, steps=1000, batch=1000):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            dispatch.warn_if_large(problem, steps, batch)
        return [str(one.message) for one in found]

    problem = replace(PLAIN, lengths=True)
    assert caught(problem, 10, 10) == []
    assert caught(problem) == [
        "OpenRNN runs this on the slow reference, because fast: does not do lengths (said once)"
    ]
    assert caught(problem) == []
    assert len(caught(replace(PLAIN, reset=True))) == 1, "another reason is another warning"


def test_the_table_of_a_spec_that_names_no_cell():
    spec = Spec("gone", ("a",), ("h",), 1, 1)
    with pytest.raises(ValueError, match="no cell 'gone'"):
        dispatch.explain(Problem(spec, torch.float32, "cpu"))


def test_warnings_name_the_users_line(monkeypatch, recwarn):
    """However many frames of ours and of torch's stand between."""
    openrnn.LSTM(4, 4, dropout=0.5)
    assert recwarn.pop(UserWarning).filename == __file__
    monkeypatch.setattr(openrnn.nn.base.checks, "same_dtype", lambda *_: warn_user("deep inside"))
    torch.nn.Sequential(openrnn.LSTM(4, 4))(torch.randn(2, 3, 4))
    assert {one.filename for one in recwarn} == {__file__}
