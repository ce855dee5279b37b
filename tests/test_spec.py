"""What a network is: refused when impossible, and the same after crossing an operator as text."""

import math
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from enum import IntEnum

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrnn import cells
from openrnn.spec import BIAS_MODES, INPUT_MODES, PRECISIONS, Problem, Spec

LSTM = cells.lstm.spec(3, 4)
NAMES = st.from_regex(r"[a-z_][a-z_0-9]{0,5}", fullmatch=True)
BOUNDS = st.floats(allow_nan=False)


@st.composite
def specs(draw):
    hidden = draw(st.integers(1, 10**6))
    mode = draw(st.sampled_from(INPUT_MODES))
    gates = tuple(draw(st.lists(NAMES, min_size=1, max_size=4)))
    low, high = sorted((draw(BOUNDS), draw(BOUNDS)))
    return Spec(
        draw(st.sampled_from(("lstm", "my_cell", "lstm@2", "<lambda>", "a=b"))),
        gates,
        tuple(draw(st.lists(NAMES, min_size=1, max_size=4))),
        {"skip": hidden, "gates": hidden * len(gates)}.get(mode) or draw(st.integers(1, 10**6)),
        draw(st.sampled_from((int, np.int64)))(hidden),
        unit_params=tuple(draw(st.lists(NAMES, max_size=3))),
        num_layers=draw(st.integers(1, 99)),
        **draw(st.sampled_from(({"bidirectional": 0}, {"bidirectional": True}, {"reverse": 1}))),
        bias_mode=draw(st.sampled_from(BIAS_MODES)),
        input_mode=mode,
        proj_size=draw(st.integers(0, hidden - 1)),
        dropout=draw(st.one_of(st.floats(0, 1), st.sampled_from((0, 1, np.float32(0.5))))),
        cell_clip=draw(st.sampled_from((None, (low, high), [low, high]))),
        precision=draw(st.sampled_from(PRECISIONS)),
    )


@given(specs())
def test_a_spec_is_its_text(spec):
    again = Spec.parse(str(spec))
    for field in fields(spec):
        ours, theirs = getattr(spec, field.name), getattr(again, field.name)
        assert (type(ours), ours) == (type(theirs), theirs), field.name
    assert again == spec
    assert hash(again) == hash(spec)
    assert str(again) == str(spec)


def test_every_field_is_in_the_text():
    """A field that the text forgot would be lost on the way through the operator."""
    others = {
        "cell": "gru", "gates": ("a",), "states": ("a", "b"), "input_size": 4, "hidden_size": 5,
        "unit_params": ("p",), "num_layers": 2, "bidirectional": True, "bias_mode": "none",
        "input_mode": "skip", "proj_size": 1, "dropout": 0.1, "cell_clip": (-1.0, 1.0),
        "precision": "tf32", "algorithm": "standard", "reset_dropout_state": True,
        "recompute": "gates", "reverse": True, "wavefront": 32,
    }  # fmt: skip
    assert others.keys() == {field.name for field in fields(Spec) if field.init}
    for name, value in others.items():
        changed = replace(LSTM, **{name: value}, **({"input_size": 4} if value == "skip" else {}))
        assert str(changed) != str(LSTM)
        assert getattr(Spec.parse(str(changed)), name) == value


def test_the_text_has_what_differs_from_the_defaults():
    assert str(LSTM) == "cell=lstm gates=i,f,g,o states=h,c input_size=3 hidden_size=4"
    assert str(LSTM.with_(dropout=0.5, num_layers=2)).endswith("num_layers=2 dropout=0.5")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_size": -3}, "input_size must not be negative, got -3"),
        ({"hidden_size": -1}, "hidden_size must not be negative, got -1"),
        ({"num_layers": 0}, "num_layers must be greater than zero, got 0"),
        ({"proj_size": 4}, "smaller than hidden_size 4, got 4"),
        ({"proj_size": -1}, "smaller than hidden_size 4, got -1"),
        ({"dropout": 1.1}, r"a probability in \[0, 1\], got 1.1"),
        ({"dropout": -0.1}, r"a probability in \[0, 1\], got -0.1"),
        ({"dropout": math.nan}, r"a probability in \[0, 1\], got nan"),
        ({"bias_mode": "triple"}, "bias_mode must be one of .*double.*, got 'triple'"),
        ({"input_mode": "auto"}, "input_mode must be one of .*skip.*, got 'auto'"),
        ({"precision": "tf16"}, "precision must be one of .*ieee.*, got 'tf16'"),
        ({"input_mode": "skip"}, "needs input_size == hidden_size, got 3 and 4"),
        ({"bidirectional": True, "reverse": True}, "one direction, needs bidirectional=False"),
        ({"cell_clip": (1.0, -1.0)}, r"low <= high, neither nan, got \(1.0, -1.0\)"),
        ({"cell_clip": (math.nan, 1.0)}, "low <= high, neither nan"),
        ({"cell_clip": (0.0, math.nan)}, "low <= high, neither nan"),
    ],
)
def test_what_is_impossible_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LSTM.with_(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 2.5}, "num_layers must be a whole number, got 2.5"),
        ({"num_layers": 2.0}, "num_layers must be a whole number, got 2.0"),
        ({"hidden_size": True}, "hidden_size must be a whole number, got True"),
        ({"input_size": np.True_}, "input_size must be a whole number, got a bool"),
        ({"input_size": torch.tensor(3)}, "input_size must be a whole number, got a Tensor"),
        ({"proj_size": None}, "proj_size must be a whole number, got None"),
        ({"hidden_size": "4"}, "hidden_size must be a whole number, got '4'"),
        ({"hidden_size": np.ones(2, int)}, "hidden_size must be a whole number, got a ndarray"),
        ({"dropout": True}, "dropout must be a number, got True"),
        ({"dropout": torch.tensor(0.5)}, "dropout must be a number, got a Tensor"),
        ({"dropout": "0.5"}, "dropout must be a number, got '0.5'"),
        ({"cell_clip": (torch.tensor(-1.0), 1.0)}, "cell_clip must be a number, got a Tensor"),
        ({"cell_clip": (-1.0, True)}, "cell_clip must be a number, got True"),
    ],
)
def test_sizes_are_ints_and_rates_are_numbers(changes, message):
    with pytest.raises(TypeError, match=message):
        LSTM.with_(**changes)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8, np.array, IntEnum("Size", "A B")])
def test_other_whole_numbers_become_ints(kind):
    spec = LSTM.with_(hidden_size=kind(2))
    assert type(spec.hidden_size) is int
    assert spec == LSTM.with_(hidden_size=2)
    assert str(spec) == str(LSTM.with_(hidden_size=2))


def test_a_spec_is_frozen():
    with pytest.raises(FrozenInstanceError):
        LSTM.num_layers = 2


def test_derived_sizes():
    spec = cells.lstm.spec(3, 5, num_layers=3, bidirectional=True, proj_size=2)
    assert (spec.directions, spec.output_size, spec.chains) == (2, 2, 6)
    assert spec.state_sizes == (2, 5)
    assert [spec.layer_input(layer) for layer in range(3)] == [3, 4, 4]
    plain = cells.slstm.spec(3, 5)
    assert (plain.directions, plain.output_size, plain.chains) == (1, 5, 1)
    assert plain.state_sizes == (5, 5, 5, 5)
    assert plain.with_(num_layers=2).layer_input(1) == 5


@pytest.mark.parametrize(
    ("mode", "inputs", "recurrent"),
    [("double", True, True), ("input", True, False), ("recurrent", False, True),
     ("none", False, False)],
)  # fmt: skip
def test_bias_modes(mode, inputs, recurrent):
    spec = LSTM.with_(bias_mode=mode)
    assert (spec.input_bias, spec.recurrent_bias) == (inputs, recurrent)


def test_names_of_cells_are_words():
    with pytest.raises(cells.CellError, match="must be one word, got 'my cell'"):
        cells.cell(gates="a", name="my cell")(lambda x, r, s: x.a)


def test_a_problem_says_what_is_asked():
    problem = Problem(LSTM, torch.bfloat16, "cuda", (9, 0), grad=True, lengths=True, steps=7)
    assert str(problem) == f"{LSTM} T=7 bfloat16 cuda grad lengths"
    flags = {
        "grad", "training", "lengths", "reset", "return_states", "reset_state", "transform",
        "generator",
    }  # fmt: skip
    every = Problem(LSTM, torch.float32, "cpu", **dict.fromkeys(flags, True), steps=0, batch=0)
    assert flags < set(str(every).split())
    assert {"T=0", "B=0"} < set(str(every).split())
    # every yes-or-no of a problem is a flag here and in what it prints
    assert flags == {field.name for field in fields(Problem) if field.type in (bool, "bool")}


def test_dropping_needs_training_a_rate_and_a_layer_above():
    deep = LSTM.with_(num_layers=2, dropout=0.5)
    for spec, training, drops in [
        (deep, True, True),
        (deep, False, False),
        (deep.with_(dropout=0.0), True, False),
        (deep.with_(num_layers=1), True, False),
    ]:
        assert Problem(spec, torch.float32, "cpu", training=training).drops is drops


def test_a_problem_takes_its_hash_to_no_other_process():
    """Texts hash otherwise there, and equal problems must have one hash."""
    problem = Problem(cells.lstm.spec(3, 4), torch.float32, "cpu", grad=True)
    assert hash(problem) == hash(replace(problem)) != hash(replace(problem, grad=False))
    assert "_hash" in vars(problem)
    copy = pickle.loads(pickle.dumps(problem))
    assert copy == problem
    assert "_hash" not in vars(copy)
