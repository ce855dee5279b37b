"""Dropout masks: the published generator, and a pure function of seed and position."""

import math

import pytest
import torch

from openrnn import philox

WORD = 2**32

# the known answers of Random123 for Philox 4x32-10: counter, key, result
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD - 1,) * 4, (WORD - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_known_answers(counter, key, want):
    found = philox.words(key, tuple(torch.tensor(part) for part in counter))
    assert tuple(word.item() for word in found) == want


def plain(counter, key):
    """The same in Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b % WORD, (a >> 32) ^ c[3] ^ k[1], a % WORD]
        k = [(k[0] + 0x9E3779B9) % WORD, (k[1] + 0xBB67AE85) % WORD]
    return c


def seed_of(seed, offset=0):
    return torch.tensor([seed, offset])


def mask(seed, layer, p, shape, dtype=torch.float64):
    return philox.mask(seed, layer, p, shape, torch.empty(0, dtype=dtype))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
@pytest.mark.parametrize(("layer", "offset"), [(0, 0), (3, 0), (0, 1), (2, 7), (1, 2**24 - 1)])
def test_each_element_is_one_word_of_its_counter(seed, layer, offset):
    shape, p = (3, 2, 7), 0.37
    found = mask(seed_of(seed, offset), layer, p, shape)
    for t in range(shape[0]):
        for b in range(shape[1]):
            for unit in range(shape[2]):
                counter = (unit // 4, b, t, (layer + 256 * offset) % WORD)
                word = plain(counter, (seed % WORD, (seed >> 32) % WORD))[unit % 4]
                want = 1 / (1 - p) if word >= p * WORD else 0.0
                assert found[t, b, unit].item() == want


def test_a_mask_is_a_window_on_one_infinite_mask():
    """It knows nothing of T, B and width: chunks of a batch may be masked apart."""
    seed = seed_of(12345, 6)
    whole = mask(seed, 1, 0.5, (9, 6, 21))
    for steps, batch, width in [(1, 1, 1), (9, 6, 20), (4, 2, 3), (9, 1, 5), (2, 6, 17)]:
        assert torch.equal(mask(seed, 1, 0.5, (steps, batch, width)), whole[:steps, :batch, :width])


def test_masks_differ_by_seed_offset_and_layer():
    shape = (4, 5, 16)
    keys = [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (1 + 2**32, 0, 0), (-1, 0, 0)]
    masks = [mask(seed_of(seed, offset), layer, 0.5, shape) for seed, offset, layer in keys]
    for k, one in enumerate(masks):
        for other in masks[:k]:
            differing = (one != other).double().mean().item()
            assert 0.35 < differing < 0.65  # half of 320 elements, within 5 sigma


def test_a_smaller_probability_drops_a_subset():
    few, many = (mask(seed_of(3), 0, p, (20, 10, 30)) for p in (0.2, 0.6))
    assert ((few == 0) <= (many == 0)).all()


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1, 0.5, 0.9, 1 - 1e-9, 1.0])
def test_share_and_scale(p):
    found = mask(seed_of(99), 0, p, (50, 40, 50))
    count = found.numel()
    kept = (found != 0).sum().item()
    assert abs(kept - count * (1 - p)) <= 5 * math.sqrt(count * p * (1 - p)) + 1e-3 * (0 < p < 1)
    assert set(found.unique().tolist()) <= {0.0, philox.scale(p)}
    if p in (0.0, 1.0):
        assert found.unique().tolist() == [1 - p]


def test_units_steps_and_rows_are_uncorrelated():
    bits = (mask(seed_of(7), 0, 0.5, (40, 40, 40)) != 0).double() * 2 - 1
    for a, b in [
        (bits[1:], bits[:-1]),
        (bits[:, 1:], bits[:, :-1]),
        (bits[..., 1:], bits[..., :-1]),
        (bits[..., 4:], bits[..., :-4]),
        (bits[1:, :-1], bits[:-1, 1:]),
    ]:
        assert abs((a * b).mean().item()) < 5 / math.sqrt(a.numel())


def test_the_factor_has_the_type_asked_for():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        found = mask(seed_of(5), 0, 0.3, (2, 3, 4), dtype)
        assert found.dtype == dtype
        assert found.max().item() == torch.tensor(1 / 0.7, dtype=dtype).item()


def test_empty_masks():
    for shape in [(0, 3, 4), (3, 0, 4), (0, 0, 0)]:
        assert mask(seed_of(5), 0, 0.3, shape).shape == shape


def test_threshold_is_exact_at_the_ends():
    assert philox.threshold(0.0) == 0
    assert philox.threshold(0.5) == 2**31
    assert philox.threshold(1.0) == 2**32  # above every word
    assert philox.scale(1.0) == 0.0


def test_the_word_at_the_threshold_is_kept():
    word = plain((0, 0, 0, 0), (21, 0))[2]
    for dropped, p in ((False, word / WORD), (True, (word + 1) / WORD)):  # both exact in float64
        assert (mask(seed_of(21), 0, p, (1, 1, 3))[0, 0, 2] == 0) == dropped


CPU = torch.device("cpu")


def test_draw_takes_from_the_generator_it_is_given():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    mine = torch.Generator().manual_seed(8)
    first, second = philox.draw(CPU, mine), philox.draw(CPU, mine)
    assert torch.equal(torch.get_rng_state(), before)
    assert first.shape == (2,)
    assert first.dtype == torch.int64
    assert first.device.type == "cpu"
    assert first[0] != second[0]
    assert torch.equal(philox.draw(CPU, torch.Generator().manual_seed(8)), first)


def test_draw_takes_from_torch_by_default():
    torch.manual_seed(4)
    first, second = philox.draw(CPU), philox.draw(CPU)
    torch.manual_seed(4)
    assert torch.equal(philox.draw(CPU), first)
    assert not torch.equal(first, second)


def test_an_offset_counts_modulo_what_fits_beside_the_layer():
    shape, large = (3, 2, 7), 5 * 2**24 + 6
    assert torch.equal(mask(seed_of(1, large), 2, 0.5, shape), mask(seed_of(1, 6), 2, 0.5, shape))
    assert philox.split(seed_of(1, large)) == (1, 0, 6)
    assert philox.split(seed_of(1, -1))[2] == philox.OFFSETS - 1


def test_split_takes_the_seed_apart():
    assert philox.split(seed_of(0x0123456789ABCDEF, 9)) == (0x89ABCDEF, 0x01234567, 9)
    assert philox.split(seed_of(-1)) == (WORD - 1, WORD - 1, 0)
