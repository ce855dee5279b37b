"""cuDNN called directly: against float64, against torch.nn on the same GPU, and its refusals."""

from dataclasses import replace

import pytest
import torch
from cases import CELLS, CORNERS, CUDNN, Case, cases, check, examples, require, with_cell
from hypothesis import HealthCheck, given, settings

FOUR = sorted(CUDNN)


@pytest.fixture
def gpu():
    """Float32 products in float32, because the oracle's allowance knows no tf32."""
    require("cudnn")
    before = torch.backends.cudnn.rnn.fp32_precision
    torch.backends.cudnn.rnn.fp32_precision = "ieee"
    yield torch.device("cuda")
    torch.backends.cudnn.rnn.fp32_precision = before


def tame(case: Case, algorithm: str = "standard") -> Case:
    """The case without what cuDNN refuses; its dropout can be judged where all or nothing falls."""
    return replace(
        case, reset=None, reset_states=False, return_states=False,
        training=case.training and case.spec.dropout == 1,
        cotangents="all" if case.cotangents == "states" else case.cotangents,
        spec=case.spec.with_(algorithm=algorithm, precision="ieee"),
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("cell", FOUR)
@pytest.mark.parametrize("corner", CORNERS)
def test_corners(gpu, corner, cell):
    check(tame(with_cell(CORNERS[corner], CELLS[cell])), "cudnn")


@pytest.mark.gpu
@pytest.mark.parametrize("cell", FOUR)
def test_no_worse_than_the_reference(gpu, cell):
    """Shapes, layouts, lengths, bias modes, projections, dtypes: asked as any other backend."""

    @settings(examples(3.0), suppress_health_check=list(HealthCheck))
    @given(cases(CELLS[cell]))
    def holds(case):
        check(tame(case), "cudnn")

    holds()
