"""The tables of docs/convert.md are what the code does, and what tests cover."""

import importlib

import convert_table
import pytest
from convert_table import NONE, PAGE

pytestmark = pytest.mark.usefixtures("one_thread")

# of models as a whole: feature -> what becomes of it, and the key of the case that a test runs
NODE, SCAN = ("test_onnx", "NODES"), ("test_onnx", "SCANS")
CELL = ("test_onnx", "CELLS")
MODULES, UNROLLED = ("test_convert", "LAYERS"), ("test_export", "PLAIN")
TAKEN, BACK = ("test_onnx_in", "OPTIONS"), ("test_onnx_in", "OURS")
FEATURES = (
    "lstm", "gru", "gru, reset before", "rnn", "peepholes", "coupled", "slstm", "layers",
    "two directions", "reverse alone", "projection", "no biases", "clip", "lengths", "states",
    "resets",
)  # fmt: skip
SWAPPED = {
    "lstm": "lstm", "gru": "gru", "rnn": "rnn_tanh", "layers": "lstm_everything",
    "two directions": "lstm_everything", "projection": "lstm_everything",
    "no biases": "lstm_no_bias",
}  # fmt: skip
ROWS = {
    "modules of torch.nn, in (`convert`)": {
        one: ("yes", *MODULES, key) for one, key in SWAPPED.items()
    },
    'modules of torch.nn, out (`convert(to="torch")`)': {
        one: ("yes", *MODULES, key) for one, key in SWAPPED.items()
    },
    "ONNX, in (`from_onnx`)": {
        "lstm": ("yes", *TAKEN, "LSTM"), "gru": ("yes", *TAKEN, "GRU-after"),
        "gru, reset before": ("yes", *TAKEN, "GRU"), "rnn": ("yes", *TAKEN, "RNN"),
        "peepholes": ("yes", *TAKEN, "LSTM-P"), "coupled": ("yes", "test_onnx_in", "COUPLED", 1),
        "two directions": ("yes", *BACK, "LSTM"), "reverse alone": ("yes", *BACK, "reverse"),
        "no biases": ("yes", *BACK, "relu"), "lengths": ("yes", *TAKEN, "LSTM"),
        "states": ("yes", *TAKEN, "LSTM"),
    },
    "ONNX, out (`torch.onnx.export`)": {
        "lstm": ("node", *CELL, "lstm"), "gru": ("node", *CELL, "gru"),
        "gru, reset before": ("node", *CELL, "gru_reset_before"),
        "rnn": ("node", *CELL, "rnn_tanh"), "peepholes": ("node", *CELL, "peephole_lstm"),
        "coupled": ("node", *CELL, "coupled_lstm"), "slstm": ("Scan", *CELL, "slstm"),
        "layers": ("node", *NODE, "deep"), "two directions": ("node", *NODE, "deep"),
        "reverse alone": ("node", *NODE, "reverse"), "projection": ("Scan", *SCAN, "everything"),
        "no biases": ("node", *NODE, "LSTM-none"), "clip": ("Scan", *SCAN, "everything"),
        "lengths": ("node", *NODE, "deep"), "states": ("node", *NODE, "deep"),
        "resets": ("Scan", *SCAN, "everything"),
    },
    "ExecuTorch, out (`plain_decompositions`)": {
        "lstm": ("yes", *UNROLLED, "lstm"), "gru": ("yes", *UNROLLED, "gru"),
        "gru, reset before": ("yes", *UNROLLED, "gru_reset_before"),
        "rnn": ("yes", *UNROLLED, "reverse"), "peepholes": ("yes", *UNROLLED, "peephole_lstm"),
        "coupled": ("yes", *UNROLLED, "coupled_lstm"), "slstm": ("yes", *UNROLLED, "slstm"),
        "layers": ("yes", *UNROLLED, "lstm"), "two directions": ("yes", *UNROLLED, "lstm"),
        "reverse alone": ("yes", *UNROLLED, "reverse"),
        "projection": ("yes", *UNROLLED, "projection"),
        "no biases": ("yes", *UNROLLED, "slstm"), "clip": ("yes", *UNROLLED, "projection"),
        "lengths": ("yes", *UNROLLED, "lstm"), "states": ("yes", *UNROLLED, "states"),
        "resets": ("yes", *UNROLLED, "resets"),
    },
}  # fmt: skip


OF_CALLS = ("lengths", "states", "resets")  # no part of a module


def models():
    """The lines of the table of whole models."""
    lines = [f"| model | {' | '.join(FEATURES)} |", f"|{'---|' * (len(FEATURES) + 1)}"]
    for name, row in ROWS.items():
        rest = dict.fromkeys(OF_CALLS, "call") if "torch.nn" in name else {}
        texts = (row[one][0] if one in row else rest.get(one, NONE) for one in FEATURES)
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return lines


@pytest.mark.parametrize("made", [convert_table.table, models])
def test_the_page_has_the_table(made):
    """`python tests/convert_table.py` and `python tests/test_convert_table.py` print them."""
    assert "\n".join(made()) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("row", ROWS)
def test_each_cell_is_a_case_of_a_test(row):
    assert ROWS[row].keys() <= set(FEATURES)
    for feature, (_, module, cases, key) in ROWS[row].items():
        try:
            found = importlib.import_module(module)
        except pytest.skip.Exception:  # of a package that is not installed
            continue
        assert key in getattr(found, cases), feature


if __name__ == "__main__":
    print("\n".join(models()))
