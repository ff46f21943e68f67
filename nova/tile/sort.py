"""A stable sort of i32 keys as launches: what makes scatters deterministic without floating-point atomics.

Radix sort, eight bits a pass from the lowest. A block owns PART keys, one a thread:

    count    every thread counts one digit among the block's keys: the histogram
    sums     a block a digit: the digit's running sums over the blocks (if they are few, `place` adds up itself)
    place    a key's place = keys of lower digits + of its digit in earlier blocks + of its digit earlier in this block

Counts are integers and every place is written by one thread, so the order is a function of the keys only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nova.tile.builder import Program
from nova.tile.layout import NestedLayout, blocked
from nova.tile.text import Operand, Value
from nova.tile.whole_op import Op

PART = 256
BITS = 8
RADIX = 1 << BITS
GROUP = 32  # others that a thread compares its item with at a time
FOLDED = 128  # blocks whose histograms every block adds up itself, rather than a launch between
assert PART == RADIX, "threads stand for items and for digits"


class Sorted(NamedTuple):
    """Arrays of i32 in the workspace, by their offsets: keys in ascending order, and where each was before."""

    keys: int
    order: int


def layout() -> NestedLayout:
    """One item a thread."""
    return blocked([PART], [PART // 32], [32])


def pairs() -> NestedLayout:
    """Each thread's item beside the same GROUP others."""
    return blocked([PART, GROUP], [PART // 32, 1], [32, 1], GROUP)


def padded(count: int) -> int:
    """Keys of whole blocks: there are so many, and the last ones sort to the end."""
    return -(-count // PART) * PART


class _Tables(NamedTuple):
    """What the passes share: histogram[block, digit], or [digit, block] where there are many blocks."""

    blocks: int
    histogram: int
    totals: int  # of digits
    starts: int  # of each block's digits in the order

    @property
    def many(self) -> bool:
        return self.blocks > FOLDED


def sort(op: Op, keys: int, count: int, limit: int) -> Sorted:
    """Sorts the `padded(count)` keys at offset `keys`, all in 0 .. limit. They are left as they are."""
    blocks = padded(count) // PART
    tables = _Tables(blocks, *(op.reserve(n) for n in (RADIX * blocks, RADIX, RADIX * blocks)))
    buffers = [Sorted(op.reserve(padded(count)), op.reserve(padded(count))) for _ in range(2)]
    source = Sorted(keys, -1)
    for number in range(max(1, -(-limit.bit_length() // BITS))):
        target = buffers[number % 2]
        _count(op, source, tables, number * BITS)
        if tables.many:
            _sums(op, tables)
        _place(op, source, target, tables, number * BITS)
        source = target
    return source


def _digit(p: Program, key: Value, shift: int) -> Value:
    high = p.binary("arith.shrui", key, shift) if shift else key
    return p.binary("arith.andi", high, RADIX - 1)


def _load(p: Program, pointer: Value, first: Operand, strides: Sequence[int] = (1,)) -> Value:
    """An item a thread, from element `first` on."""
    return p.load(pointer, p.cast(first, "i64"), [0], "i32", layout(), strides=strides)


def _others(p: Program, keys: Value, first: Operand, shift: int) -> Value:
    """The digits of GROUP neighbours from key `first` on, the same for all items."""
    others = p.load(keys, 0, [0, first], "i32", pairs(), strides=[0, 1], vector=4)
    return _digit(p, others, shift)


def _own(p: Program, item: Value) -> Value:
    return p.expand(item, [1], pairs())


def _sum(p: Program, so_far: Value, which: Value) -> Value:
    return p.binary("arith.addi", so_far, p.reduce(p.convert(which, "i32"), [1], "addi"))


def _zero(p: Program) -> Value:
    return p.splat(p.scalar(0), (PART,), "i32", layout())


def _count(op: Op, source: Sorted, tables: _Tables, shift: int) -> None:
    p = op.launch("count", tables.blocks, PART)
    block, keys, own = p.program_id(0), op.scratch(p, source.keys), p.iota(0, layout())
    first = p.mul(block, PART)
    with p.for_(0, PART, GROUP, [_zero(p)]) as loop:
        digit = _others(p, keys, p.add(first, loop.index), shift)
        loop.yield_([_sum(p, loop.carried[0], p.cmp("eq", digit, _own(p, own)))])
    base, stride = (block, tables.blocks) if tables.many else (p.mul(block, RADIX), 1)
    p.store(loop.results[0], op.scratch(p, tables.histogram), p.cast(base, "i64"), [0], strides=[stride])


def _sums(op: Op, tables: _Tables) -> None:
    """histogram[digit, b] becomes the digit's count in blocks before b."""
    p = op.launch("sums", RADIX, PART)
    digit = p.program_id(0)
    row = p.advance(op.scratch(p, tables.histogram), p.mul(p.cast(digit, "i64"), tables.blocks), "i32")
    window: dict[str, Any] = {"strides": [1], "extents": [tables.blocks]}
    with p.for_(0, -(-tables.blocks // PART), 1, [p.scalar(0)]) as loop:
        counts = p.load(row, 0, [p.mul(loop.index, PART)], "i32", layout(), **window)
        before = p.binary("arith.addi", p.binary("arith.subi", p.scan(counts, 0, "addi"), counts), loop.carried[0])
        p.store(before, row, 0, [p.mul(loop.index, PART)], **window)
        loop.yield_([p.int_op("addi", loop.carried[0], p.reduce(counts, [0], "addi"))])
    p.store_scalar(loop.results[0], op.scratch(p, tables.totals), p.cast(digit, "i64"))


def _counted(op: Op, p: Program, tables: _Tables, block: Value) -> tuple[Value, Value]:
    """(of each digit, how many are in the blocks before this one, how many in all)."""
    histogram = op.scratch(p, tables.histogram)
    if tables.many:
        return _load(p, histogram, block, [tables.blocks]), _load(p, op.scratch(p, tables.totals), 0)
    with p.for_(0, tables.blocks, 1, [_zero(p), _zero(p)]) as loop:
        counts = _load(p, histogram, p.mul(loop.index, RADIX))
        is_before = p.compare("slt", loop.index, block)
        before = p.binary("arith.addi", loop.carried[0], p.select(is_before, counts, 0))
        loop.yield_([before, p.binary("arith.addi", loop.carried[1], counts)])
    return loop.results[0], loop.results[1]


def _place(op: Op, source: Sorted, target: Sorted, tables: _Tables, shift: int) -> None:
    p = op.launch("place", tables.blocks, PART)
    keys, block, own = op.scratch(p, source.keys), p.program_id(0), p.iota(0, layout())
    first = p.mul(block, PART)
    before, total = _counted(op, p, tables, block)
    lower = p.binary("arith.subi", p.scan(total, 0, "addi"), total)
    starts = p.advance(op.scratch(p, tables.starts), p.mul(p.cast(block, "i64"), RADIX), "i32")
    p.store(p.binary("arith.addi", lower, before), starts, 0, [0], strides=[1])

    key = _load(p, keys, first)
    digit = _digit(p, key, shift)
    item = p.binary("arith.addi", own, first)
    order = item if source.order < 0 else _load(p, op.scratch(p, source.order), first)
    number = p.iota(1, pairs())
    with p.for_(0, PART, GROUP, [_zero(p)]) as loop:
        same = p.cmp("eq", _others(p, keys, p.add(first, loop.index), shift), _own(p, digit))
        is_earlier = p.cmp("slt", p.binary("arith.addi", number, loop.index), _own(p, own))
        loop.yield_([_sum(p, loop.carried[0], p.binary("arith.andi", same, is_earlier))])
    p.barrier()  # a digit's start was stored by another thread
    place = p.binary("arith.addi", loop.results[0], p.gather(starts, digit, "i32"))
    p.scatter(key, op.scratch(p, target.keys), place)
    p.scatter(order, op.scratch(p, target.order), place)


def runs(op: Op, found: Sorted, count: int) -> tuple[int, int]:
    """For each sorted position, where the run of its key begins and ends: offsets of two arrays of i32."""
    begins, ends = op.reserve(count), op.reserve(count)
    p = op.launch("runs", -(-count // PART), PART)
    item = p.binary("arith.addi", p.iota(0, layout()), p.mul(p.program_id(0), PART))
    inside = p.cmp("slt", item, count)
    keys = op.scratch(p, found.keys)
    key = p.gather(keys, item, "i32", inside)
    zero = p.splat(p.scalar(0), (PART,), "i32", layout())
    end = p.splat(p.scalar(count), (PART,), "i32", layout())
    with p.for_(0, count.bit_length(), 1, [zero, item, p.binary("arith.addi", item, 1), end]) as loop:
        low, high, after_low, after_high = loop.carried
        low, high = _halve(p, keys, key, inside, low, high, count, "slt")
        after_low, after_high = _halve(p, keys, key, inside, after_low, after_high, count, "sle")
        loop.yield_([low, high, after_low, after_high])
    p.scatter(loop.results[0], op.scratch(p, begins), item, inside)
    p.scatter(loop.results[2], op.scratch(p, ends), item, inside)
    return begins, ends


def _halve(
    p: Program, keys: Value, key: Value, inside: Value, low: Value, high: Value, count: int, before: str
) -> tuple[Value, Value]:
    """A step of a search for the first key that is not `before` key."""
    middle = p.binary("arith.shrui", p.binary("arith.addi", low, high), 1)
    known = p.binary("arith.andi", inside, p.cmp("slt", middle, high))
    is_before = p.binary("arith.andi", known, p.cmp(before, p.gather(keys, middle, "i32", known), key))
    return (
        p.select(is_before, p.binary("arith.addi", middle, 1), low),
        p.select(p.binary("arith.andi", known, p.binary("arith.xori", is_before, True)), middle, high),
    )
