"""Dropout masks as a pure function of seed and position: Philox 4x32-10 (Salmon et al., SC 2011).

The key is the seed. The counter is (unit // 4, b, t, layer + 256 * offset); word unit % 4 of the
result decides: kept where it is at least p * 2**32. So a mask needs no memory, is the same on every
backend and device, and can be recomputed in backward.
"""

import torch
from torch import Tensor

from openrnn.rounds import MULTIPLIERS, ROUNDS, WEYL, WORD

__all__ = ["MULTIPLIERS", "ROUNDS", "WEYL", "WORD"]


def threshold(p: float) -> int:
    """The smallest 32-bit word that is kept."""
    return min(round(p * 2**32), 2**32)


def scale(p: float) -> float:
    """What kept values are multiplied by."""
    return 1 / (1 - p) if p < 1 else 0.0


def draw(generator: torch.Generator | None = None) -> Tensor:
    """(seed, offset) for one call, from torch's default generator or the given one: (2,) int64."""
    device = generator.device if generator is not None else "cpu"
    seed = torch.randint(-(2**63), 2**63 - 1, (1,), generator=generator, device=device)
    return torch.cat((seed.cpu(), torch.zeros(1, dtype=torch.int64)))


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a 32x32-bit product, in int64 without overflow."""
    low = a * (b & 0xFFFF)  # < 2**48
    high = a * (b >> 16) + (low >> 16)  # < 2**49
    return (high >> 16) & WORD, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def words(key: tuple[int, int], counter: tuple[Tensor | int, ...]) -> tuple[Tensor, ...]:
    """The four 32-bit words, as int64 tensors, of counters that broadcast together."""
    device = next(part.device for part in counter if isinstance(part, Tensor))
    c0, c1, c2, c3 = torch.broadcast_tensors(
        *(torch.as_tensor(part, dtype=torch.int64, device=device) for part in counter)
    )
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def split(seed: Tensor) -> tuple[int, int, int]:
    """(key low, key high, offset) of a (2,) seed tensor."""
    value, offset = (int(part) for part in seed.tolist())
    return value & WORD, (value >> 32) & WORD, offset


def mask(seed: Tensor, layer: int, p: float, shape: tuple[int, int, int], like: Tensor) -> Tensor:
    """The factors, 0 or 1 / (1 - p), on the output (T, B, W) of `layer`, in the type of `like`."""
    steps, batch, width = shape
    low, high, offset = split(seed)
    device = like.device
    group = torch.arange((width + 3) // 4, device=device)
    b = torch.arange(batch, device=device)[:, None]
    t = torch.arange(steps, device=device)[:, None, None]
    drawn = words((low, high), (group, b, t, (layer + 256 * offset) & WORD))
    bits = torch.stack(drawn, dim=-1).flatten(-2)[..., :width]  # (T, B, W)
    return (bits >= threshold(p)).to(like.dtype) * scale(p)
