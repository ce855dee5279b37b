"""What surrounds the fused kernels, as it can be judged without a GPU: orders, small kernels."""

import itertools

import pytest
from cases import CELLS

from openrnn.backends.fused.chain import nibbles, spans
from openrnn.codegen import cuda
from openrnn.native import nvrtc

ABSENT = nvrtc.absent()
compiles = pytest.mark.skipif(ABSENT is not None, reason=f"cannot compile: {ABSENT}")


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_spans_name_every_gate_in_its_order(count):
    for order in itertools.permutations(range(count)):
        found = spans(order)
        assert [gate for a, b in found for gate in range(a, b)] == list(order)
        # as few as possible: each product writes one
        assert all(before[1] != after[0] for before, after in itertools.pairwise(found))


def test_nibbles_come_back_from_64_bits():
    for order in ((0,), (2, 0, 1), tuple(range(16)), tuple(reversed(range(16)))):
        word = nibbles(order)
        assert -(2**63) <= word < 2**63
        assert tuple((word >> 4 * place) & 15 for place in range(len(order))) == order


@compiles
@pytest.mark.parametrize("dtype", cuda.SIZES)
@pytest.mark.parametrize("name", ["arrange", "finish", "dropout"])
def test_small_kernels_spill_nothing(name, dtype, tmp_path):
    for arch in ("sm_80", "sm_90", "sm_120"):
        made = nvrtc.binary(cuda.plain_source(name, dtype), name, arch, name, tmp_path)
        assert made.resources.spilled == 0


def test_no_shipped_cell_has_more_gates_than_a_word_names():
    assert max(len(cell.gates) for cell in CELLS.values()) <= 16
