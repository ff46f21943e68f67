"""Which threads have touched some bytes of shared memory since the last barrier, as a number of 16 bits.

    t                           thread t
    SEVERAL | level << 8 | g    some threads of group g of 2**level warps
    SYNCED  | level << 8 | g    the same, before the threads of that group synchronised
    MANY                        any threads

Groups are those of `bar.warp.sync` (level 0) and of numbered barriers: neighbouring warps, powers of two of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

SEVERAL, SYNCED, MANY = 0x4000, 0x8000, 0xFFFF
LEVELS = 6  # up to 32 warps
WARP_BITS = 5


def _level(codes: Array) -> Array:
    return np.where(codes == MANY, LEVELS, np.where(codes >= SEVERAL, codes >> 8 & 7, 0))


def _group(codes: Array) -> Array:
    return np.where(codes == MANY, 0, np.where(codes >= SEVERAL, codes & 0xFF, codes >> WARP_BITS))


def join(a: Array, b: Array) -> Array:
    """The smallest group that holds both, which have not synchronised; a where they are equal."""
    level = np.maximum(_level(a), _level(b))
    group, other = _group(a) >> level - _level(a), _group(b) >> level - _level(b)
    for _ in range(LEVELS):
        apart = group != other
        level = level + apart
        group, other = np.where(apart, group >> 1, group), np.where(apart, other >> 1, other)
    found = np.where(level >= LEVELS, MANY, SEVERAL | level << 8 | group)
    return np.where(a == b, a, found)


def synchronised(codes: Array, level: int) -> Array:
    """After a barrier of every group of 2**level warps by itself."""
    inside = _level(codes) <= level
    group = _group(codes) >> np.maximum(level - _level(codes), 0)
    return np.where(inside, SYNCED | level << 8 | group, codes)


def ordered(codes: Array, threads: Array) -> Array:
    """Whether these threads have synchronised with whoever it was."""
    own = threads >> WARP_BITS + np.minimum(_level(codes), LEVELS)
    return (codes >= SYNCED) & (codes != MANY) & (own == _group(codes))


def text(code: int) -> str:
    """For messages."""
    if code == MANY:
        return "several threads"
    if code < SEVERAL:
        return f"thread {code}"
    first = (code & 0xFF) << (code >> 8 & 7)
    last = first + (1 << (code >> 8 & 7)) - 1
    return f"warp {first}" if first == last else f"one of warps {first} to {last}"
