"""The launches that combine the updates of a scatter into its result; see nova/tile/scatter.py."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nova.tile import sort
from nova.tile.builder import Program
from nova.tile.combine import identity
from nova.tile.layout import NestedLayout, blocked
from nova.tile.text import BITS, Operand, Value
from nova.tile.updates import Columns, Updates
from nova.tile.whole_op import Op, combination, decode, dot, power_of_two

WARPS = 8
LONG = 16  # updates of a place from which on whole blocks combine them
WIDEST = 8  # vectors of a thread along the columns
ROWS = 8  # of a thread along a long run, where its columns are few
SUMS = 64  # registers of a thread's sums along a long run


def _keys(op: Op, updates: Updates) -> int:
    """The key of each update; the number of places for those that have none. Returns the array's offset."""
    keys = op.reserve(sort.padded(updates.count))
    p = op.launch("keys", sort.padded(updates.count) // sort.PART, sort.PART)
    first = p.mul(p.program_id(0), sort.PART)
    u = p.binary("arith.addi", p.iota(0, sort.layout()), first)
    key, good = updates.key(p, u, p.cmp("slt", u, updates.count))
    p.store(p.select(good, key, updates.places), op.scratch(p, keys), 0, [first], strides=[1])
    return keys


def _tile(op: Op, updates: Updates, most: int, rows: int) -> NestedLayout:
    """Rows over warps and, where columns are few, lanes; `rows` of them in registers."""
    vector = updates.vector(op)
    vectors = -(-updates.columns // vector)
    lanes = min(32, power_of_two(vectors))
    batch = min(most, -(-vectors // lanes))
    shape = [WARPS * (32 // lanes) * rows, lanes * vector * batch]
    return blocked(shape, [WARPS, 1], [32 // lanes, lanes], vector)


def combine_runs(op: Op, updates: Updates) -> None:
    """Sorts the updates by place; then a run is one row of a tile, or has blocks of its own if it is long."""
    found = sort.sort(op, _keys(op, updates), updates.count, updates.places)
    begins, ends = sort.runs(op, found, updates.count)
    _short_runs(op, updates, found, begins, ends)
    if updates.reduce != "none" and updates.count >= LONG:
        _long_runs(op, updates, found, begins, ends)


def _short_runs(op: Op, updates: Updates, found: sort.Sorted, begins: int, ends: int) -> None:
    layout = _tile(op, updates, WIDEST, 1)
    rows, width = layout.shape
    parts = -(-updates.columns // width)
    p = op.launch("short", -(-updates.count // rows) * parts, WARPS * 32)
    block = p.program_id(0)
    columns = Columns(op, p, updates, layout, p.mul(p.rem(block, parts), width))
    of_rows = layout.project([1])

    position = p.binary("arith.addi", p.iota(0, of_rows), p.mul(p.div(block, parts), rows))
    known = p.cmp("slt", position, updates.count)
    key, begin, end = (p.gather(op.scratch(p, array), position, "i32", known) for array in (found.keys, begins, ends))
    is_first = p.binary("arith.andi", p.cmp("eq", begin, position), p.cmp("slt", key, updates.places))
    size = p.select(p.binary("arith.andi", known, is_first), p.binary("arith.subi", end, begin), 0)
    if updates.reduce == "none":  # the last one wins
        begin = p.binary("arith.subi", end, 1)
        size = p.binary("arith.minsi", size, 1)
    else:
        size = p.select(p.cmp("slt", size, LONG), size, 0)
    mask = columns.mask(p.cmp("sgt", size, 0))
    place = columns.destination(key)
    total = _before(columns, updates, place, mask)
    order = op.scratch(p, found.order)
    with p.for_(0, p.reduce(size, [0], "maxsi"), 1, [total]) as loop:
        here = p.cmp("sgt", size, loop.index)
        u = p.gather(order, p.binary("arith.addi", begin, loop.index), "i32", here)
        inside = columns.mask(here)
        value = columns.load(op.operand(p, updates.values), columns.source(u), inside)
        loop.yield_([p.select(inside, columns.combine(loop.carried[0], value), loop.carried[0])])
    columns.store(loop.results[0], op.result(p), place, mask)


def _before(columns: Columns, updates: Updates, place: Value, mask: Value) -> Value:
    """What the places hold before the updates, in the type in which they are combined."""
    p, layout = columns.p, columns.layout
    if updates.fresh or updates.reduce == "none":
        return p.splat(p.scalar(0, columns.running), layout.shape, columns.running, layout)
    return columns.load(columns.op.result(p), place, mask)


def _long_runs(op: Op, updates: Updates, found: sort.Sorted, begins: int, ends: int) -> None:
    """A run of LONG or more has just one first position that is a multiple of LONG: that block's."""
    vector = updates.vector(op)
    words = vector * max(1, BITS[op.element(0)] // 32)
    layout = _tile(op, updates, 1, SUMS // words if updates.columns >= 32 * vector else ROWS)
    width = layout.shape[1]
    parts = -(-updates.columns // width)
    p = op.launch("long", -(-updates.count // LONG) * parts, WARPS * 32)
    block = p.program_id(0)
    position = p.mul(p.div(block, parts), LONG)
    at = p.cast(position, "i64")
    key, begin, end = (p.load_scalar(op.scratch(p, a), at, "i32") for a in (found.keys, begins, ends))
    is_long = p.compare("sge", p.sub(end, begin), LONG)
    is_first = p.compare("sgt", p.add(begin, LONG), position)
    mine = p.binary("arith.andi", p.binary("arith.andi", is_long, is_first), p.compare("slt", key, updates.places))
    with p.if_(mine):
        _long_run(op, p, updates, found, layout, (key, begin, end), p.mul(p.rem(block, parts), width))


def _long_run(
    op: Op, p: Program, updates: Updates, found: sort.Sorted, layout: NestedLayout, run: tuple[Value, Value, Value],
    first_column: Operand,
) -> None:  # fmt: skip
    key, begin, end = run
    columns = Columns(op, p, updates, layout, first_column)
    kind = combination(updates.reduce, columns.running)
    neutral = identity(kind, columns.running)
    number = p.iota(0, layout.project([1]))
    order = op.scratch(p, found.order)
    start = p.splat(p.scalar(neutral, columns.running), layout.shape, columns.running, layout)
    with p.for_(begin, end, layout.shape[0], [start]) as loop:
        at = p.binary("arith.addi", number, loop.index)
        here = p.cmp("slt", at, end)
        u = p.gather(order, at, "i32", here)
        inside = columns.mask(here)
        value = columns.load(op.operand(p, updates.values), columns.source(u), inside)
        loop.yield_([p.select(inside, columns.combine(loop.carried[0], value), loop.carried[0])])
    total = p.reduce(loop.results[0], [0], kind.removeprefix("arith."))
    row = layout.project([0])
    base = dot(p, decode(p, p.cast(key, columns.type), updates.places_shape), updates.place_strides)
    place = p.binary("arith.addi", columns.to, p.scalar(base, columns.type))
    if not updates.fresh:
        before = p.gather(op.result(p), place, columns.element, columns.inside, vector=columns.vector, layout=row)
        total = p.binary(kind, p.convert(before, columns.running), total)
    columns.store(total, op.result(p), place, columns.inside)


def combine_few(op: Op, updates: Updates) -> None:
    """Threads own columns, and walk the updates in order."""
    keys = _keys(op, updates)
    vector = updates.vector(op)
    layout = blocked([1, WARPS * 32 * vector], [1, WARPS], [1, 32], vector)
    p = op.launch("few", -(-updates.columns // layout.shape[1]), WARPS * 32)
    columns = Columns(op, p, updates, layout, p.mul(p.program_id(0), layout.shape[1]))
    one = layout.project([1])
    with p.for_(0, updates.count, 1) as loop:
        key = p.load_scalar(op.scratch(p, keys), p.cast(loop.index, "i64"), "i32")
        with p.if_(p.compare("slt", key, updates.places)):
            key_tile, u = (p.splat(x, one.shape, "i32", one) for x in (key, loop.index))
            mask = columns.columns(columns.inside)
            place = columns.destination(key_tile)
            value = columns.load(op.operand(p, updates.values), columns.source(u), mask)
            if updates.reduce != "none":
                value = columns.combine(columns.load(op.result(p), place, mask), value)
            columns.store(value, op.result(p), place, mask)


def combine_lines(
    op: Op, updates: Updates, lines: Sequence[int], line_strides: Sequence[int], along: int, stride: int
) -> None:
    """Updates with one column each, in lines that share no place: threads own lines, and walk along them in order."""
    count, threads = math.prod(lines), WARPS * 32
    layout = blocked([threads], [WARPS], [32])
    p = op.launch("lines", -(-count // threads), threads)
    line = p.binary("arith.addi", p.iota(0, layout), p.mul(p.program_id(0), threads))
    inside = p.cmp("slt", line, count)
    first = dot(p, decode(p, line, list(lines)), line_strides, p.binary("arith.muli", line, 0))
    element = op.element(0)
    running = {"bf16": "f32", "f16": "f32"}.get(element, element)
    with p.for_(0, along, 1) as loop:
        u = p.binary("arith.addi", first, p.mul(loop.index, stride))
        key, good = updates.key(p, u, inside)
        value = p.gather(op.operand(p, updates.values), u, element, good)
        if updates.reduce != "none":
            before = p.convert(p.gather(op.result(p), key, element, good), running)
            value = p.binary(combination(updates.reduce, running), before, p.convert(value, running))
        p.scatter(p.convert(value, element), op.result(p), key, good)
