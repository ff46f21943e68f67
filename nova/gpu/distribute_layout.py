"""Ops that only rename registers, or move a tile to another layout.

What a register holds is a table [threads, registers] of element numbers, so each of these is the question which
register of the source holds the same element: `np.take` in the compiler, one `vector.shuffle` in the code. Where
another thread has it, the tile goes through shared memory, with rows padded so that banks collide least.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nova.gpu.distribute import Distributor, Op, lowers
from nova.gpu.distribute_memory import ACCESS_BYTES, Place, Window, load_places, store_places, window_places
from nova.gpu.registers import element_bytes
from nova.tile.layout import NestedLayout, register_permutation
from nova.tile.text import Value


@lowers("nova_tile.iota")
def iota(it: Distributor, op: Op) -> None:
    layout, dim = op["layout"], op["dim"]
    steps = layout.register_part(dim)
    own = it.coordinate(layout, dim)
    numbers = it.table([int(s) for s in steps], "i32")
    if isinstance(own, int):
        it.set(op.results[0], Value(numbers.name, "i32", numbers.shape, layout))
        return
    start = it.broadcast(own, layout.registers)
    it.set(op.results[0], it.binary("arith.addi", start, numbers, layout))


@lowers("nova_tile.expand")
def expand(it: Distributor, op: Op) -> None:
    """Register r of the result is the one of the source with the same coordinates along the dims that were there."""
    layout, dims = op["layout"], op["dims"]
    if it.of(op.operands[0]).shape is None:
        it.set(op.results[0], it.of(op.operands[0]))
        return
    source = layout.project(dims)
    tile = it.tile(op.operands[0], source)
    sizes = list(layout.register_shape)
    kept = [d if axis % layout.rank not in dims else 1 for axis, d in enumerate(sizes)]
    registers = np.broadcast_to(np.arange(source.registers).reshape(kept), sizes).reshape(-1)
    if source.registers == 1 and layout.registers > 1:
        it.set(op.results[0], it.broadcast(it.extract(tile, 0), layout.registers, layout))
    else:
        it.set(op.results[0], it.take(tile, registers, layout))


@lowers("nova_tile.transpose")
def transpose(it: Distributor, op: Op) -> None:
    tile = it.of(op.operands[0])
    if tile.shape is None:
        it.set(op.results[0], tile)
        return
    source, permutation = tile.layout, op["permutation"]
    axes = [level * source.rank + p for level in range(3) for p in permutation]
    registers = np.arange(source.registers).reshape(source.register_shape).transpose(axes).reshape(-1)
    it.set(op.results[0], it.take(tile, registers, source.permute(permutation)))


@lowers("nova_tile.to_layout")
def to_layout(it: Distributor, op: Op) -> None:
    tile = it.of(op.operands[0])
    if tile.shape is None:
        it.set(op.results[0], tile)
        return
    source, target = op["source"], op["layout"]
    tile = it.tile(op.operands[0], source)
    registers = register_permutation(source, target, it.threads)
    if registers is not None:
        it.set(op.results[0], it.take(tile, [int(r) for r in registers], target))
        return
    through_shared(it, op, tile)


def through_shared(it: Distributor, op: Op, tile: Value) -> None:
    """Every thread writes what it has and reads what it needs."""
    source, target = op["source"], op["layout"]
    element = tile.element
    plan = shared_plan(source, target, element_bytes(element), it.threads)
    with it.scratch(plan.size * element_bytes(element)) as scratch:
        places, registers = whole_tile(it, scratch, plan.strides, plan.written, source, element, it.first_copy(source))
        store_places(it, places, registers, tile)
        it.barrier()
        places, registers = whole_tile(it, scratch, plan.strides, plan.read, target, element, None)
        it.set(op.results[0], load_places(it, places, registers, element, 0, target))


def whole_tile(
    it: Distributor,
    pointer: Value,
    strides: tuple[int, ...],
    width: int,
    layout: NestedLayout,
    element: str,
    own: Value | None,
) -> tuple[list[Place], np.ndarray]:
    """The accesses of a whole tile that lies at `pointer`."""
    rank = layout.rank
    window = Window(pointer, 0, (0,) * rank, strides, (-1,) * rank, width, False)
    return window_places(it, window, layout, element, own)


@dataclass(frozen=True)
class SharedPlan:
    """How a tile lies in scratch while its layout changes: strides and size in elements, widths of the accesses."""

    strides: tuple[int, ...]
    size: int
    written: int
    read: int


@functools.lru_cache(maxsize=1024)
def shared_plan(source: NestedLayout, target: NestedLayout, size: int, threads: int) -> SharedPlan:
    """The order of dimensions and the padding that take the fewest passes over the banks, both sides together."""
    best: tuple[tuple[int, int], SharedPlan] | None = None
    for fast in reversed(range(source.rank)):
        widths = [_width(layout, fast, size) for layout in (source, target)]
        for padding in (0, *(n // size for n in (4, 8, 16) if n % (size * max(widths)) == 0)):
            strides, total = _strides(source.shape, fast, padding)
            passes = sum(
                bank_passes(layout, strides, width, size, threads) * (layout.registers // width)
                for layout, width in zip((source, target), widths, strict=True)
            )
            if best is None or (passes, total) < best[0]:
                best = (passes, total), SharedPlan(strides, total, *widths)
    assert best is not None
    return best[1]


def _width(layout: NestedLayout, dim: int, size: int) -> int:
    """Elements of `size` bytes that one access may move along `dim`."""
    width = 1
    while width * 2 * size <= ACCESS_BYTES and layout.element[dim] % (width * 2) == 0:
        width *= 2
    return width


def _strides(shape: tuple[int, ...], fast: int, padding: int) -> tuple[tuple[int, ...], int]:
    """Strides with dimension `fast` innermost, its rows padded, and the elements of all."""
    strides, step = [0] * len(shape), shape[fast] + padding
    strides[fast] = 1
    for dim in reversed(range(len(shape))):
        if dim != fast:
            strides[dim] = step
            step *= shape[dim]
    return tuple(strides), step


def bank_passes(layout: NestedLayout, strides: Sequence[int], width: int, size: int, threads: int) -> int:
    """Passes over the 32 banks that the first warp's first access takes; wide ones go by half or quarter warp."""
    lanes = min(32, threads)
    address = layout.indices(threads)[:lanes, 0] @ np.array(strides, np.int64) * size
    words = max(1, width * size // 4)
    group = min(lanes, 32 // words)
    total = 0
    for begin in range(0, lanes, group):
        touched = np.unique(address[begin : begin + group, None] // 4 + np.arange(words))
        total += int(np.bincount(touched % 32).max())
    return total
