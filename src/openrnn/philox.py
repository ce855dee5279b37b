"""Dropout masks as a pure function of seed and position: Philox 4x32-10 (Salmon et al., SC 2011).

The key is the seed. The counter is (unit // 4, b, t, layer + 256 * offset); word unit % 4 of the
result decides: kept where it is at least p * 2**32. So a mask needs no memory, is the same on every
backend and device, and can be recomputed in backward.

Seed and offset are a tensor (2,) int64 on the device of the call. On CUDA nothing reads it on the
host: kernels take its address, and each replay of a CUDA graph draws it anew, as torch's own
dropout does.
"""

import torch
from torch import Tensor

from openrnn.rounds import MULTIPLIERS, ROUNDS, WEYL, WORD

__all__ = ["MULTIPLIERS", "ROUNDS", "WEYL", "WORD"]

OFFSETS = 1 << 24  # an offset counts modulo this: it shares a 32-bit word with the layer


def threshold(p: float) -> int:
    """The smallest 32-bit word that is kept."""
    return min(round(p * 2**32), 2**32)


def scale(p: float) -> float:
    """What kept values are multiplied by."""
    return 1 / (1 - p) if p < 1 else 0.0


def draw(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Seed and offset of one call, (2,) int64 on a device.

    From the given generator, or from torch's default generator of that device.

    Raises:
        ValueError: a CUDA graph is being captured, and the generator is on the CPU.
    """
    home = generator.device if generator is not None else device
    if home.type == device.type:
        return torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator, device=device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"generator is on {home}: a call inside a CUDA graph needs one on {device}, registered "
            "with the graph, or none"
        )
    return torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator, device=home).to(device)


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a 32x32-bit product, in int64 without overflow."""
    low = a * (b & 0xFFFF)  # < 2**48
    high = a * (b >> 16) + (low >> 16)  # < 2**49
    return (high >> 16) & WORD, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def words(
    key: tuple[Tensor | int, Tensor | int], counter: tuple[Tensor | int, ...]
) -> tuple[Tensor, ...]:
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
    """(key low, key high, offset) of a seed (2,); waits for its device."""
    value, offset = (int(part) for part in seed.tolist())
    return value & WORD, (value >> 32) & WORD, offset % OFFSETS


def mask(seed: Tensor, layer: int, p: float, shape: tuple[int, int, int], like: Tensor) -> Tensor:
    """The factors, 0 or 1 / (1 - p), on the output (T, B, W) of `layer`, in the type of `like`."""
    steps, batch, width = shape
    device = like.device
    value, offset = seed.to(device).unbind()
    group = torch.arange((width + 3) // 4, device=device)
    b = torch.arange(batch, device=device)[:, None]
    t = torch.arange(steps, device=device)[:, None, None]
    # of tensors, not of their numbers: a compiler, a graph or `torch.vmap` may hold them
    key = value & WORD, (value >> 32) & WORD
    drawn = words(key, (group, b, t, (layer + 256 * offset) & WORD))
    bits = torch.stack(drawn, dim=-1).flatten(-2)[..., :width]  # (T, B, W)
    return (bits >= threshold(p)).to(like.dtype) * scale(p)
