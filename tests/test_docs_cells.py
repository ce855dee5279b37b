"""The pages of the cells: equations as the code has them, for each cell that ships."""

import sys
from pathlib import Path

import pytest
import torch

import openrnn
from openrnn import cells, params

EXTENSIONS = Path(__file__).parents[1] / "docs" / "extensions"


@pytest.fixture(scope="module")
def site():
    """The modules that make the pages."""
    sys.path.insert(0, str(EXTENSIONS))
    try:
        import cell_pages
        import equations
        import papers

        yield cell_pages, equations, papers
    finally:
        sys.path.remove(str(EXTENSIONS))


def test_equations_of_lstm_and_gru_are_those_of_the_books(site):
    _, equations, _ = site
    gate = r"\left(W_{%s} x_t + R_{%s} h_{t-1} + b_{%s}\right)"
    sums = {name: gate.replace("%s", name) for name in "ifgorz"}
    assert sorted(equations.of(cells.lstm)) == sorted(
        [
            *(rf"{name}_{{t}} &= \sigma{sums[name]}" for name in "ifo"),
            rf"g_{{t}} &= \tanh{sums['g']}",
            r"c_{t} &= f_{t} \odot c_{t-1} + i_{t} \odot g_{t}",
            r"h_{t} &= o_{t} \odot \tanh\left(c_{t}\right)",
        ]
    )
    assert equations.of(cells.gru)[2:] == [
        r"n_{t} &= \tanh\left(W_{n} x_t + b^W_{n} + r_{t} \odot "
        r"\left(R_{n} h_{t-1} + b^R_{n}\right)\right)",
        r"h_{t} &= \left(1 - z_{t}\right) \odot n_{t} + z_{t} \odot h_{t-1}",
    ]


def test_a_gate_is_not_named_twice(site):
    """A variable that has a gate's name and is something else keeps the gate's sum in its place."""
    _, equations, _ = site

    @openrnn.cell(gates="f n", states="h", name="test_docs_twice")
    def twice(x, r, s):
        f = 2 * s.h
        return f + torch.sigmoid(x.f + r.f) - (x.n - r.n)

    assert equations.of(twice) == [
        r"f_{t} &= 2\,h_{t-1}",
        r"h_{t} &= f_{t} + \sigma\left(W_{f} x_t + R_{f} h_{t-1} + b_{f}\right) - "
        r"\left(W_{n} x_t + b^W_{n}\right) + R_{n} h_{t-1} + b^R_{n}",
    ]


def test_what_is_no_equation_is_refused(site):
    _, equations, _ = site

    @openrnn.cell(gates="f", states="h", name="test_docs_branch")
    def branch(x, r, s):
        if x is r:
            return s.h
        return x.f + r.f

    with pytest.raises(equations.NotAnEquationError, match="if x is r"):
        equations.of(branch)


def test_every_shipped_cell_has_a_page(site):
    pages, equations, papers = site
    assert "## Backends" in pages.page(cells.lstm, {})
    for name, cell in pages.shipped().items():
        assert len(equations.of(cell)) >= len(cell.states), name
        count = params.size(cell.spec(pages.WIDTH, pages.WIDTH))
        assert f"{count:,} where" in pages._sizes(cell)
        gates, vectors, width = len(cell.gates), len(cell.unit_params), pages.WIDTH
        assert count == gates * width * (2 * width + 2) + vectors * width, "the formula of the page"
        assert name in pages.summary()
    assert set(papers.PAPERS) <= set(pages.shipped())


def test_backends_of_a_page_are_those_of_explain(site):
    pages, _, _ = site
    (table, _) = pages._backends(cells.gru_reset_before)
    lines = {line.split("|")[1].strip(" `"): line for line in table.splitlines()[2:]}
    assert "float32" in lines["reference"]
    for name in ("cpu", "fused", "cudnn"):
        assert "refuses: cell gru" in lines[name], lines[name]
    (table, _) = pages._backends(cells.lstm)
    assert "cuda: float32, bfloat16, float16" in table
    assert "refuses" not in table
