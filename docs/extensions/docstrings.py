"""Docstrings as they are written, for Sphinx: blocks of equations and of code, before napoleon."""

import re

import equations
from sphinx.application import Sphinx

from openrnn import cells

# whose equations are those of which cells
CELLS = {
    "openrnn.LSTM": [cells.lstm], "openrnn.LSTMCell": [cells.lstm],
    "openrnn.GRU": [cells.gru], "openrnn.GRUCell": [cells.gru],
    "openrnn.RNN": [cells.rnn_tanh, cells.rnn_relu],
    "openrnn.RNNCell": [cells.rnn_tanh, cells.rnn_relu],
}  # fmt: skip
SECTION = re.compile(r"^[A-Z][\w ]*:$")
LEGEND = """Rows of :math:`W` are those of ``weight_ih``, rows of :math:`R` those of ``weight_hh``,
gate by gate; :math:`b` is the sum of ``bias_ih`` and ``bias_hh``, whose own parts are :math:`b^W`
and :math:`b^R`."""


def typeset(name: str) -> list[str]:
    """The equations of a layer as lines of reStructuredText."""
    lines = []
    for cell in CELLS[name]:
        lines += ["", ".. math::", "", *("   " + row for row in equations.block(cell).splitlines())]
    return [*lines, "", *LEGEND.splitlines(), ""]


def literal(lines: list[str], name: str) -> list[str]:
    """The lines with what is indented before the first section as code, or as equations."""
    made: list[str] = []
    place = 0
    while place < len(lines) and not SECTION.match(lines[place]):
        if not lines[place].startswith("    "):
            made.append(lines[place])
            place += 1
            continue
        end = place
        while end < len(lines) and (lines[end].startswith("    ") or not lines[end]):
            end += 1
        block = lines[place:end]
        made += typeset(name) if name in CELLS else ["::", "", *block]
        place = end
    return made + lines[place:]


def _process(
    app: Sphinx, what: str, name: str, item: object, options: object, lines: list[str]
) -> None:
    lines[:] = literal(lines, name)
    if name in ("openrnn.LSTMCell", "openrnn.GRUCell", "openrnn.RNNCell"):
        lines[1:1] = typeset(name)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _process, priority=400)  # napoleon has 500
    return {"parallel_read_safe": True, "parallel_write_safe": True}
