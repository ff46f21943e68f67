"""A stable sort of i32 keys as launches: what makes scatters deterministic without floating-point atomics.

Radix sort, eight bits a pass from the lowest. A block owns PART keys, one a thread:

    count    histogram[digit, block]      every thread counts one digit among the block's keys
    sums     a block a digit: running sums along its row of the histogram, and the digit's total
    place    a key's place = keys of lower digits + of its digit in earlier blocks + of its digit earlier in this block

Counts are integers and every place is written by one thread, so the order is a function of the keys only.
"""

from __future__ import annotations

from typing import NamedTuple

from nova.tile.builder import Program
from nova.tile.layout import NestedLayout, blocked
from nova.tile.text import Operand, Value
from nova.tile.whole_op import Op

PART = 256
BITS = 8
RADIX = 1 << BITS


class Sorted(NamedTuple):
    """Arrays of i32 in the workspace, by their offsets: keys in ascending order, and where each was before."""

    keys: int
    order: int


def layout() -> NestedLayout:
    """One item a thread."""
    return blocked([PART], [PART // 32], [32])


def sort(op: Op, keys: int, count: int, limit: int) -> Sorted:
    """Sorts the `count` keys at offset `keys`, all in 0 .. limit. They are left as they are."""
    blocks = -(-count // PART)
    histogram, totals = op.reserve(RADIX * blocks), op.reserve(RADIX)
    buffers = [Sorted(op.reserve(count), op.reserve(count)) for _ in range(2)]
    source = Sorted(keys, -1)
    for number in range(max(1, -(-limit.bit_length() // BITS))):
        target = buffers[number % 2]
        _count(op, source, count, number * BITS, histogram)
        _sums(op, blocks, histogram, totals)
        _place(op, source, target, count, number * BITS, histogram, totals)
        source = target
    return source


def _block(p: Program, count: int) -> tuple[Value, Operand, Operand]:
    """(number of the block, its first item, how many it has)."""
    block = p.program_id(0)
    first = p.mul(block, PART)
    return block, first, p.min(p.sub(count, first), PART)


def _digit(p: Program, key: Value, shift: int) -> Value:
    high = p.binary("arith.shrui", key, shift) if shift else key
    return p.binary("arith.andi", high, RADIX - 1)


def _count(op: Op, source: Sorted, count: int, shift: int, histogram: int) -> None:
    blocks = -(-count // PART)
    p = op.launch("count", blocks, PART)
    block, first, items = _block(p, count)
    keys, own = op.scratch(p, source.keys), p.iota(0, layout())
    with p.for_(0, items, 1, [p.splat(p.scalar(0), (RADIX,), "i32", layout())]) as loop:
        digit = _digit(p, p.load_scalar(keys, p.cast(p.add(first, loop.index), "i64"), "i32"), shift)
        loop.yield_([_add_if(p, loop.carried[0], p.cmp("eq", own, digit))])
    p.store(loop.results[0], op.scratch(p, histogram), p.cast(block, "i64"), [0], strides=[blocks])


def _add_if(p: Program, number: Value, condition: Value) -> Value:
    return p.binary("arith.addi", number, p.convert(condition, "i32"))


def _sums(op: Op, blocks: int, histogram: int, totals: int) -> None:
    """histogram[digit, b] becomes the digit's count in blocks before b."""
    p = op.launch("sums", RADIX, PART)
    digit = p.program_id(0)
    row = p.advance(op.scratch(p, histogram), p.mul(p.cast(digit, "i64"), blocks), "i32")
    with p.for_(0, -(-blocks // PART), 1, [p.scalar(0)]) as loop:
        window = {"strides": [1], "extents": [blocks]}
        counts = p.load(row, 0, [p.mul(loop.index, PART)], "i32", layout(), **window)
        before = p.binary("arith.addi", p.binary("arith.subi", p.scan(counts, 0, "addi"), counts), loop.carried[0])
        p.store(before, row, 0, [p.mul(loop.index, PART)], **window)
        loop.yield_([p.int_op("addi", loop.carried[0], p.reduce(counts, [0], "addi"))])
    p.store_scalar(loop.results[0], op.scratch(p, totals), p.cast(digit, "i64"))


def _place(op: Op, source: Sorted, target: Sorted, count: int, shift: int, histogram: int, totals: int) -> None:
    blocks = -(-count // PART)
    p = op.launch("place", blocks, PART)
    block, first, items = _block(p, count)
    keys, sums = op.scratch(p, source.keys), op.scratch(p, totals)
    own = p.iota(0, layout())
    item = p.binary("arith.addi", own, first)
    inside = p.cmp("slt", item, count)
    key = p.gather(keys, item, "i32", inside)
    digit = _digit(p, key, shift)
    nothing = p.splat(p.scalar(0), (PART,), "i32", layout())
    with p.for_(0, items, 1, [nothing]) as loop:
        other = _digit(p, p.load_scalar(keys, p.cast(p.add(first, loop.index), "i64"), "i32"), shift)
        earlier = p.binary("arith.andi", p.cmp("eq", digit, other), p.cmp("sgt", own, loop.index))
        loop.yield_([_add_if(p, loop.carried[0], earlier)])
    with p.for_(0, RADIX, 1, loop.results) as lower:
        total = p.load_scalar(sums, p.cast(lower.index, "i64"), "i32")
        more = p.select(p.cmp("sgt", digit, lower.index), total, 0)
        lower.yield_([p.binary("arith.addi", lower.carried[0], more)])
    row = p.binary("arith.addi", p.binary("arith.muli", digit, blocks), block)
    place = p.binary("arith.addi", lower.results[0], p.gather(op.scratch(p, histogram), row, "i32", inside))
    before = item if source.order < 0 else p.gather(op.scratch(p, source.order), item, "i32", inside)
    p.scatter(key, op.scratch(p, target.keys), place, inside)
    p.scatter(before, op.scratch(p, target.order), place, inside)


def runs(op: Op, found: Sorted, count: int) -> tuple[int, int]:
    """For each sorted position, where the run of its key begins and ends: offsets of two arrays of i32."""
    begins, ends = op.reserve(count), op.reserve(count)
    p = op.launch("runs", -(-count // PART), PART)
    _, first, _ = _block(p, count)
    item = p.binary("arith.addi", p.iota(0, layout()), first)
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
