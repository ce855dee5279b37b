"""The table of docs/convert.md: library x feature, computed by converting; prints it when run."""

from itertools import product
from pathlib import Path

import torch
from test_convert_weights import CASES, load, source_of

import openrnn
from openrnn import cells, from_weights, to_weights
from openrnn.convert.libraries import LIBRARIES

PAGE = Path(__file__).parents[1] / "docs" / "convert.md"
WIDTH = 4  # of x and of states
# of a column: the cell, or None for the first that a library has, and options of the layer
FEATURES = {
    "lstm": ("lstm", {}),
    "gru": ("gru", {}),
    "gru, reset before": ("gru_reset_before", {}),
    "rnn": ("rnn_tanh", {}),
    "peepholes": ("peephole_lstm", {}),
    "slstm": ("slstm", {}),
    "layers": (None, {"num_layers": 2}),
    "two directions": (None, {"bidirectional": True}),
    "reverse alone": (None, {"reverse": True}),
    "projection": ("lstm", {"proj_size": 2}),
    "no biases": (None, {"bias_mode": "none"}),
    "clip": ("lstm", {"cell_clip": 0.5}),
}
NONE = "-"


def answer(name, feature):
    """What the table says of a library: `yes`, `zeros` for absent biases, or `-`: refused."""
    library = LIBRARIES[name]
    cell, options = FEATURES[feature]
    if cell is None:
        has = [layout.cell for layout in library.layouts]
        cell = next(one for one in ("lstm", "slstm", *has) if one in has)
    modes = [options["bias_mode"]] if "bias_mode" in options else ["double", "input", "recurrent"]
    for mode in modes:
        torch.manual_seed(0)
        layer = openrnn.Recurrent(
            getattr(cells, cell),
            WIDTH,
            WIDTH,
            **{**options, "bias_mode": mode},
            backend="reference",
        )
        try:
            arrays = to_weights(layer, name)
        except ValueError:
            continue
        again = from_weights(arrays, name, **_said(library, cell, options))
        _same(layer, again)
        return "zeros" if mode == "none" and again.bias else "yes"
    return NONE


def _said(library, cell, options):
    """What arrays cannot say."""
    said = {"cell": cell, "backend": "reference"}
    said |= {key: options[key] for key in ("reverse", "cell_clip") if key in options}
    if "num_layers" in options or "bidirectional" in options or library.flat:
        said["bidirectional"] = options.get("bidirectional", False)
    if library.flat:
        said |= {"hidden_size": WIDTH, "num_layers": options.get("num_layers", 1)}
        said |= {"proj_size": options["proj_size"]} if "proj_size" in options else {}
    return said


def _same(layer, again):
    """The same function, with the bits of every matrix; a bias may stand on the other side."""
    x = torch.randn(5, 2, WIDTH)
    torch.testing.assert_close(layer(x)[0], again(x)[0])
    ours, theirs = layer.state_dict(), again.state_dict()
    for key in ours:
        if not key.startswith("bias"):
            assert torch.equal(ours[key], theirs[key]), key


def real():
    """(library, feature) of which the library itself made weights and outputs."""
    found = set()
    for library, case in CASES:
        name, spec = source_of(library, case), load(library, case).spec
        held = {
            "layers": spec.num_layers > 1, "two directions": spec.bidirectional,
            "reverse alone": spec.reverse, "projection": bool(spec.proj_size),
            "no biases": spec.bias_mode == "none", "clip": spec.cell_clip is not None,
        }  # fmt: skip
        of_cell = {one for one, (cell, _) in FEATURES.items() if cell == spec.cell}
        found |= {(name, one) for one in of_cell - held.keys()}
        found |= {(name, one) for one, is_so in held.items() if is_so}
    return found


def table():
    """The lines of the table."""
    made = real()
    lines = [f"| library | {' | '.join(FEATURES)} |", f"|{'---|' * (len(FEATURES) + 1)}"]
    texts = {
        (name, one): "real" if (name, one) in made else answer(name, one)
        for name, one in product(LIBRARIES, FEATURES)
    }
    for name in LIBRARIES:
        lines.append(f"| `{name}` | {' | '.join(texts[name, one] for one in FEATURES)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
