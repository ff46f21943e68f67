"""Nova's random numbers: Philox4x32-10 counters, the reference that every generated kernel must match bit for bit.

A step draws one 64-bit seed from PyTorch's generator; every random operation of the step owns a static `stream`
number. Element i of a tensor reads word `i % 4` of the block whose counter is (i // 4, 0, stream, 0):

    words(seed, stream, n)      n 32-bit words (as int64)
    uniform                     (word >> 8) * 2**-24, in [0, 1)
    normal                      Box-Muller of words (0, 1) -> elements 0, 1 of the block and (2, 3) -> elements 2, 3
    randint                     low + (word * (high - low) >> 32)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low words of a 32 x 32 bit product; int64 wraps, and the mask drops what the sign smeared."""
    product = a * b
    return (product >> 32) & MASK, product & MASK


def blocks(seed: int, stream: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """`count` blocks of four 32-bit words, int64 [count, 4]."""
    index = torch.arange(count, dtype=torch.int64, device=device)
    c0, c1 = index & MASK, index >> 32
    c2, c3 = torch.full_like(index, stream & MASK), torch.zeros_like(index)
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return torch.stack([c0, c1, c2, c3], 1)


def words(seed: int, stream: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """`count` 32-bit words, one an element."""
    return blocks(seed, stream, (count + 3) // 4, device).flatten()[:count]


def uniform(seed: int, stream: int, shape: list[int], device: torch.device | str = "cpu") -> Tensor:
    """float32 in [0, 1), 24 random bits each."""
    bits = words(seed, stream, math.prod(shape), device)
    return ((bits >> 8).float() * 2.0**-24).view(shape)


def normal(seed: int, stream: int, shape: list[int], device: torch.device | str = "cpu") -> Tensor:
    """float32 standard normal by Box-Muller: radius from the first word of a pair, angle from the second."""
    count = math.prod(shape)
    pairs = blocks(seed, stream, (count + 3) // 4, device).view(-1, 2)
    radius = torch.sqrt(-2.0 * torch.log(((pairs[:, 0] >> 8) + 1).float() * 2.0**-24))
    angle = (2.0 * math.pi) * ((pairs[:, 1] >> 8).float() * 2.0**-24)
    return torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], 1).flatten()[:count].view(shape)


def randint(
    seed: int, stream: int, low: int, high: int, shape: list[int], device: torch.device | str = "cpu"
) -> Tensor:
    """int64 in [low, high). Ranges over 2**32 take two words an element."""
    count, span = math.prod(shape), high - low
    if span <= 1 << 32:
        return (((words(seed, stream, count, device) * span) >> 32) & MASK).add_(low).view(shape)
    pairs = words(seed, stream, 2 * count, device).view(-1, 2)
    wide = ((pairs[:, 0] << 32) | pairs[:, 1]) & ((1 << 63) - 1)
    return (wide % span).add_(low).view(shape) if span < 1 << 63 else wide.add_(low).view(shape)
