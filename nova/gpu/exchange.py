"""How a tile changes its layout through shared memory: where each element lies while it does, pure maths.

The tile lies there row by row along its fastest dimension, which one side or the other reads in wide accesses. So that
the lanes of a warp meet in few banks, either rows are padded or, if all sizes are powers of two, swizzled:

    address ^= (address >> source & (1 << bits) - 1) << target        some row bits are XORed into the column bits

A swizzled address is linear in the bits of thread and register number, address = A(thread) ^ B(register), so B is a
constant of the access. Of all candidates the plan with the fewest passes over the banks wins.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nova.tile.layout import WARP, NestedLayout

ACCESS_BYTES = 16
BANK_BYTES = 4
BANKS = 32


@dataclass(frozen=True)
class Swizzle:
    """XORs `bits` address bits from `source` on into those from `target` on, in elements. `bits` 0: nothing."""

    source: int = 0
    target: int = 0
    bits: int = 0

    def __call__(self, address: np.ndarray) -> np.ndarray:
        return address ^ ((address >> self.source & ((1 << self.bits) - 1)) << self.target)


@dataclass(frozen=True)
class Exchange:
    """Strides and size in elements, the swizzle, and the widths of the accesses of both sides."""

    strides: tuple[int, ...]
    size: int
    swizzle: Swizzle
    written: int
    read: int
    by_warp: bool  # each warp reads only what it has written

    def places(self, indices: np.ndarray) -> np.ndarray:
        """Where elements lie, from their coordinates [.., rank]."""
        return self.swizzle(indices @ np.array(self.strides, np.int64))

    def addresses(self, layout: NestedLayout, threads: int) -> np.ndarray:
        """[threads, registers], in elements."""
        return self.places(layout.indices(threads))


@functools.lru_cache(maxsize=1024)
def plan(source: NestedLayout, target: NestedLayout, size: int, threads: int) -> Exchange:
    """The cheapest way for elements of `size` bytes."""
    by_warp = stays_in_warp(source, target, threads)
    best: tuple[tuple[int, int], Exchange] | None = None
    for found in _candidates(source, target, size, by_warp):
        cost = 0
        for layout, width in ((source, found.written), (target, found.read)):
            # one access of the first warp stands for all: the others only move by constants, added or XORed
            addresses = found.places(layout.indices(threads)[:WARP, 0])
            # an access costs its passes, and its instruction about as much as one
            cost += (bank_passes(addresses, width, size) + 1) * (layout.registers // width)
        if best is None or (cost, found.size) < best[0]:
            best = (cost, found.size), found
    assert best is not None
    return best[1]


def _candidates(source: NestedLayout, target: NestedLayout, size: int, by_warp: bool) -> Iterator[Exchange]:
    shape = source.shape
    for fast in reversed(range(source.rank)):
        written, read = run_width(source, fast, size), run_width(target, fast, size)
        strides, total = _strides(shape, fast, 0)
        yield Exchange(strides, total, Swizzle(), written, read, by_warp)
        if source.rank == 1:
            continue
        if all(n & (n - 1) == 0 for n in (*shape, source.registers, target.registers)):
            for swizzle in _swizzles(shape[fast], total, max(written, read), size):
                yield Exchange(strides, total, swizzle, written, read, by_warp)
        for step in (1, 2, 4, 8):
            padding = step * max(written, read)
            if padding * size <= BANKS * BANK_BYTES:
                yield Exchange(*_strides(shape, fast, padding), Swizzle(), written, read, by_warp)


def _swizzles(row: int, total: int, width: int, size: int) -> Iterator[Swizzle]:
    """Row bits that may be XORed into the number of an access within its row."""
    low, columns, rows = width.bit_length() - 1, row.bit_length() - 1, total.bit_length() - 1
    for bits in range(1, 6):
        if low + bits > columns or width * size << bits > BANKS * BANK_BYTES * 2:
            return
        for source in range(columns, rows - bits + 1):
            yield Swizzle(source, low, bits)


def run_width(layout: NestedLayout, dim: int, size: int) -> int:
    """Elements of `size` bytes that one access may move along `dim`."""
    width = 1
    while width * 2 * size <= ACCESS_BYTES and layout.element[dim] % (width * 2) == 0:
        width *= 2
    return width


def _strides(shape: Sequence[int], fast: int, padding: int) -> tuple[tuple[int, ...], int]:
    """Strides with dimension `fast` innermost, its rows padded, and the elements of all."""
    strides, step = [0] * len(shape), shape[fast] + padding
    strides[fast] = 1
    for dim in reversed(range(len(shape))):
        if dim != fast:
            strides[dim] = step
            step *= shape[dim]
    return tuple(strides), step


def bank_passes(addresses: np.ndarray, width: int, size: int) -> int:
    """Passes over the banks for accesses of `width` elements at these addresses, one a thread: the worst warp's.

    Accesses of 8 and 16 bytes go by half and quarter warp.
    """
    words = max(1, width * size // BANK_BYTES)
    worst = 0
    for first in range(0, len(addresses), WARP):
        passes = 0
        for begin in range(first, min(first + WARP, len(addresses)), WARP // words):
            start = addresses[begin : begin + WARP // words, None] * size // BANK_BYTES
            touched = np.unique(start + np.arange(words))
            passes += int(np.bincount(touched % BANKS).max())
        worst = max(worst, passes)
    return worst


def stays_in_warp(source: NestedLayout, target: NestedLayout, threads: int) -> bool:
    """Whether every warp writes whatever it reads; of several copies in `source`, the first is written."""
    writes = np.array([source.is_first_copy(*divmod(n, WARP)) for n in range(threads)])
    warp = np.arange(threads)[:, None] // WARP
    have = np.zeros((int(warp[-1, 0]) + 1, *source.shape), bool)
    have[(warp[writes], *np.moveaxis(source.indices(threads)[writes], -1, 0))] = True
    return bool(have[(warp, *np.moveaxis(target.indices(threads), -1, 0))].all())


@dataclass(frozen=True)
class Linear:
    """Addresses A(thread) ^ B(register): A is the XOR of (thread & mask) << shift; a negative shift goes right."""

    terms: tuple[tuple[int, int], ...]  # (mask of the thread number, shift)
    registers: tuple[int, ...]  # B
    thread_bits: int  # every address bit that A may set


def linear(table: np.ndarray) -> Linear | None:
    """The linear form of [threads, registers] addresses; None if they are not."""
    threads = len(table)
    own = table[:, 0] ^ table[0, 0]
    masks: dict[int, int] = {}
    rebuilt = np.zeros(threads, np.int64)
    for bit in range((threads - 1).bit_length()):
        image = int(own[1 << bit])
        rebuilt ^= (np.arange(threads) >> bit & 1) * image
        for out in range(image.bit_length()):
            if image >> out & 1:
                masks[out - bit] = masks.get(out - bit, 0) | 1 << bit
    registers = table[0]
    if (rebuilt != own).any() or (rebuilt[:, None] ^ registers[None, :] != table).any():
        return None
    bits = int(np.bitwise_or.reduce(rebuilt)) if threads else 0
    return Linear(tuple((mask, shift) for shift, mask in sorted(masks.items())), tuple(map(int, registers)), bits)
