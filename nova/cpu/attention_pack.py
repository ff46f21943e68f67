"""Moves blocks of attention's operands between memory and tiles, through any strides and element type.

This is where layouts end: a head's slice of a packed [B, T, 3*H*D] buffer, a head-transposed view or a 16-bit dtype
becomes a dense tile of the compute type, zero-padded, so the contractions know one layout only.

    lanes     tile[d][q]     one query a lane: rows of memory are transposed, 8 x 8 at a time
    rows      tile[k][d]     rows of memory, a padded pitch apart
    columns   tile[c][q][w]  rows of memory cut into column tiles c of w elements
"""

from __future__ import annotations

from dataclasses import dataclass

from nova.cpu.attention_tiles import Kit, Scope, column_tiles
from nova.lowering import lanes as ln
from nova.lowering.lanes import Type, Value


@dataclass(frozen=True)
class Matrix:
    """The static part of a two-dimensional view: element type, elements between rows and between columns, columns."""

    element: Type
    row: int
    column: int
    columns: int

    @property
    def key(self) -> str:
        """Names the view in a helper's symbol."""
        return f"{self.element}_{self.row}_{self.column}_{self.columns}"


def widen(s: Scope, value: Value) -> Value:
    """A value in register form to the compute type."""
    element, compute = ln.element_of(value.type), s.geometry.element
    if ln.is_narrow_float(element):
        value, element = ln.extend(value), ln.f32()
    if element == compute:
        return value
    return ln.cast("extf" if compute == ln.f64() else "truncf", value, compute)


def narrow(s: Scope, value: Value, element: Type) -> Value:
    """A value of the compute type, rounded to `element`."""
    compute = s.geometry.element
    if element == compute:
        return value
    if ln.is_narrow_float(element):
        return ln.narrow(value, element)
    return ln.cast("truncf" if compute == ln.f64() else "extf", value, element)


def load_vector(s: Scope, matrix: Matrix, pointer: Value, offset: Value | int) -> Value:
    """`lanes` neighbouring columns."""
    return widen(s, ln.load(s.at(pointer, offset, matrix.element), matrix.element, s.geometry.lanes))


def load_element(s: Scope, matrix: Matrix, pointer: Value, offset: Value | int) -> Value:
    return widen(s, ln.load(s.at(pointer, offset, matrix.element), matrix.element))


def transposed(vectors: list[Value]) -> list[Value]:
    """The transpose of a square of vectors, in shuffles that are one x86 instruction each.

    Squares as wide as 128 bits are transposed by interleaving, then 128-bit pieces are exchanged between vectors.
    """
    size, lane = len(vectors), ln.bytes_of(ln.element_of(vectors[0].type))
    width = min(16 // lane, size)  # elements of a 128-bit piece
    pieces = range(0, size, width)

    def interleave(a: Value, b: Value, run: int, half: int) -> Value:
        """Runs of `run` elements, alternately of a and b, from the low or high half of each piece."""
        mask = []
        for piece in pieces:
            for start in range(piece + half * width // 2, piece + (half + 1) * width // 2, run):
                mask += [*range(start, start + run), *range(size + start, size + start + run)]
        return ln.shuffle(a, b, mask)

    rows = list(vectors)
    if width == 4:
        for i in range(0, size, 4):
            a, b, c, d = rows[i : i + 4]
            ab, cd = ([interleave(x, y, 1, half) for half in range(2)] for x, y in ((a, b), (c, d)))
            rows[i : i + 4] = [interleave(ab[n // 2], cd[n // 2], 2, n % 2) for n in range(4)]
    elif width == 2:
        for i in range(0, size, 2):
            rows[i : i + 2] = [interleave(rows[i], rows[i + 1], 1, half) for half in range(2)]
    block = width
    while block < size:
        low = [c if not c & block else size + c - block for c in range(size)]
        high = [c + block if not c & block else size + c for c in range(size)]
        for i in range(size):
            if not i & block:
                a, b = rows[i], rows[i + block]
                rows[i], rows[i + block] = ln.shuffle(a, b, low), ln.shuffle(a, b, high)
        block *= 2
    return rows


def pack_lanes(kit: Kit, matrix: Matrix, source: Value, offset: Value, rows: Value, tile: Value) -> None:
    """tile[c][q] = source[offset + q * row + c * column]; queries beyond `rows` (>= 1) repeat the last one."""
    kit.call(f"pack_lanes_{matrix.key}", [source, offset, rows, tile], lambda s, *args: _pack_lanes(s, matrix, *args))


def _pack_lanes(s: Scope, matrix: Matrix, source: Value, offset: Value, rows: Value, tile: Value) -> None:
    g = s.geometry
    last = s.add(rows, -1)
    main = matrix.columns // g.lanes * g.lanes if matrix.column == 1 else 0
    with s.loop(0, g.queries, g.lanes) as half:
        starts = [s.add(offset, s.mul(s.min(last, s.add(half, i)), matrix.row)) for i in range(g.lanes)]
        target = s.at(tile, half)
        if main:
            with s.loop(0, main, g.lanes) as c:
                block = transposed([load_vector(s, matrix, source, s.add(start, c)) for start in starts])
                place = s.at(target, s.mul(c, g.queries))
                for i, vector in enumerate(block):
                    s.store(vector, place, i * g.queries)
        if main < matrix.columns:
            with s.loop(main, matrix.columns) as c:
                place = s.at(target, s.mul(c, g.queries))
                for i, start in enumerate(starts):
                    element = load_element(s, matrix, source, s.add(start, s.mul(c, matrix.column)))
                    s.store(element, place, i)


def _copy_row(s: Scope, matrix: Matrix, source: Value, offset: Value, target: Value, padded: int) -> None:
    """One row of memory, zeros from `columns` to `padded`."""
    g = s.geometry
    main = matrix.columns // g.lanes * g.lanes if matrix.column == 1 else 0
    for c in range(0, min(main, 8 * g.lanes), g.lanes):
        s.store(load_vector(s, matrix, source, s.add(offset, c)), target, c)
    if main > 8 * g.lanes:
        with s.loop(8 * g.lanes, main, g.lanes) as c:
            s.store(load_vector(s, matrix, source, s.add(offset, c)), target, c)
    if main < matrix.columns:
        with s.loop(main, matrix.columns) as c:
            s.store(load_element(s, matrix, source, s.add(offset, s.mul(c, matrix.column))), target, c)
    for c in range(matrix.columns, padded):
        s.store(s.s(0.0), target, c)


def _clear_row(s: Scope, target: Value, width: int) -> None:
    with s.loop(0, width, s.geometry.lanes) as c:
        s.store(s.v(0.0), target, c)


def pack_rows(
    kit: Kit, matrix: Matrix, source: Value, offset: Value, rows: Value, padded: Value, tile: Value, pitch: int
) -> None:
    """tile[r][c] = source[offset + r * row + c * column]; rows from `rows` to `padded` are zero."""
    kit.call(
        f"pack_rows_{matrix.key}_{pitch}",
        [source, offset, rows, padded, tile],
        lambda s, *args: _pack_rows(s, matrix, pitch, *args),
    )


def _pack_rows(
    s: Scope, matrix: Matrix, pitch: int, source: Value, offset: Value, rows: Value, padded: Value, tile: Value
) -> None:
    width = -(-matrix.columns // s.geometry.lanes) * s.geometry.lanes
    with s.loop(0, rows) as r:
        _copy_row(s, matrix, source, s.add(offset, s.mul(r, matrix.row)), s.at(tile, s.mul(r, pitch)), width)
    with s.loop(rows, padded) as r:
        _clear_row(s, s.at(tile, s.mul(r, pitch)), width)


def pack_columns(
    kit: Kit, matrix: Matrix, source: Value, offset: Value, rows: Value, padded: Value, tile: Value, panel_rows: int
) -> None:
    """Column tiles one after the other, each `panel_rows` x its width; rows from `rows` to `padded` are zero."""
    kit.call(
        f"pack_columns_{matrix.key}_{panel_rows}",
        [source, offset, rows, padded, tile],
        lambda s, *args: _pack_columns(s, matrix, panel_rows, *args),
    )


def _pack_columns(
    s: Scope, matrix: Matrix, panel_rows: int, source: Value, offset: Value, rows: Value, padded: Value, tile: Value
) -> None:
    g = s.geometry
    for first, width, tiles in column_tiles(-(-matrix.columns // g.lanes)):
        size = width * g.lanes
        whole = min(tiles, (matrix.columns - first * g.lanes) // size)  # the last tile may have fewer columns
        for begin, end, columns in ((0, whole, size), (whole, tiles, (matrix.columns - first * g.lanes) % size)):
            if begin == end:
                continue
            part = Matrix(matrix.element, matrix.row, matrix.column, columns)
            with s.loop(begin, end) as t:
                column = s.add(s.mul(t, size), first * g.lanes)
                target = s.at(tile, s.mul(column, panel_rows))
                base = s.add(offset, s.mul(column, matrix.column))
                with s.loop(0, rows) as r:
                    _copy_row(s, part, source, s.add(base, s.mul(r, matrix.row)), s.at(target, s.mul(r, size)), size)
                with s.loop(rows, padded) as r:
                    _clear_row(s, s.at(target, s.mul(r, size)), size)


def write_lanes(kit: Kit, matrix: Matrix, tile: Value, scale: Value, target: Value, offset: Value, rows: Value) -> None:
    """target[offset + q * row + c * column] = tile[c][q] * scale[q] for the first `rows` queries."""
    kit.call(
        f"write_lanes_{matrix.key}",
        [tile, scale, target, offset, rows],
        lambda s, *args: _write_lanes(s, matrix, *args),
    )


def _write_lanes(
    s: Scope, matrix: Matrix, tile: Value, scale: Value, target: Value, offset: Value, rows: Value
) -> None:
    g = s.geometry
    main = matrix.columns // g.lanes * g.lanes if matrix.column == 1 else 0

    def put(value: Value, place: Value | int) -> None:
        ln.store(narrow(s, value, matrix.element), s.at(target, place, matrix.element))

    with s.loop(0, g.queries, g.lanes) as half:
        source = s.at(tile, half)
        scales = s.load(scale, half)
        start = s.add(offset, s.mul(half, matrix.row))
        valid = s.sub(rows, half)
        if main:
            with s.when("sge", valid, g.lanes), s.loop(0, main, g.lanes) as c:
                place = s.at(source, s.mul(c, g.queries))
                columns = [ln.mulf(s.load(place, i * g.queries), scales) for i in range(g.lanes)]
                for i, vector in enumerate(transposed(columns)):
                    put(vector, s.add(s.add(start, i * matrix.row), c))
        # what the block copy leaves: all columns of a partly filled half, the last columns of a full one
        begin = ln.select(ln.cmpi("sge", valid, s.i(g.lanes)), s.i(main), s.i(0))
        with s.loop(0, s.min(valid, g.lanes)) as q:
            factor = s.load_scalar(scale, s.add(q, half))
            with s.loop(begin, matrix.columns) as c:
                value = s.load_scalar(source, s.add(s.mul(c, g.queries), q))
                place = s.add(s.add(start, s.mul(q, matrix.row)), s.mul(c, matrix.column))
                put(ln.mulf(value, factor), place)


def write_rows(
    kit: Kit, matrix: Matrix, tile: Value, factor: Value, target: Value, offset: Value, rows: Value, pitch: int
) -> None:
    """target[offset + r * row + c * column] = tile[r][c] * factor."""
    kit.call(
        f"write_rows_{matrix.key}_{pitch}",
        [tile, factor, target, offset, rows],
        lambda s, *args: _write_rows(s, matrix, pitch, *args),
    )


def _write_rows(
    s: Scope, matrix: Matrix, pitch: int, tile: Value, factor: Value, target: Value, offset: Value, rows: Value
) -> None:
    g = s.geometry
    main = matrix.columns // g.lanes * g.lanes if matrix.column == 1 else 0
    factors = s.splat(factor)
    with s.loop(0, rows) as r:
        source, start = s.at(tile, s.mul(r, pitch)), s.add(offset, s.mul(r, matrix.row))
        if main:
            with s.loop(0, main, g.lanes) as c:
                value = narrow(s, ln.mulf(s.load(source, c), factors), matrix.element)
                ln.store(value, s.at(target, s.add(start, c), matrix.element))
        if main < matrix.columns:
            with s.loop(main, matrix.columns) as c:
                value = narrow(s, ln.mulf(s.load_scalar(source, c), factor), matrix.element)
                ln.store(value, s.at(target, s.add(start, s.mul(c, matrix.column)), matrix.element))


def row_products(
    kit: Kit, left: Matrix, right: Matrix, a: Value, a_offset: Value, b: Value, b_offset: Value, rows: Value, out: Value
) -> None:
    """out[r] = sum over columns of a[r] * b[r] for r < rows, zero for the rest of the panel."""
    kit.call(
        f"row_products_{left.key}_{right.key}",
        [a, a_offset, b, b_offset, rows, out],
        lambda s, *args: _row_products(s, left, right, *args),
    )


def _row_products(
    s: Scope, left: Matrix, right: Matrix, a: Value, a_offset: Value, b: Value, b_offset: Value, rows: Value, out: Value
) -> None:
    g = s.geometry
    main = left.columns // g.lanes * g.lanes if left.column == right.column == 1 else 0
    fast = {"fastmath": ln.ir.Attribute.parse("#arith.fastmath<reassoc>")}
    kind = {"kind": ln.ir.Attribute.parse("#vector.kind<add>"), **fast}
    for half in range(2):
        s.store(s.v(0.0), out, half * g.lanes)
    with s.loop(0, rows) as r:
        a_start, b_start = s.add(a_offset, s.mul(r, left.row)), s.add(b_offset, s.mul(r, right.row))

        def step(c: Value, acc: list[Value], a_start=a_start, b_start=b_start) -> list[Value]:
            x = load_vector(s, left, a, s.add(a_start, c))
            return [ln.fma(x, load_vector(s, right, b, s.add(b_start, c)), acc[0])]

        def element(c: Value, acc: list[Value], a_start=a_start, b_start=b_start) -> list[Value]:
            x = load_element(s, left, a, s.add(a_start, s.mul(c, left.column)))
            y = load_element(s, right, b, s.add(b_start, s.mul(c, right.column)))
            return [ln.fma(x, y, acc[0])]

        total = s.s(0.0)
        if main:
            sums = s.carrying(0, main, g.lanes, [s.v(0.0)], step)
            total = ln.create("vector.reduction", g.element, sums, kind)
        if main < left.columns:
            total = s.carrying(main, left.columns, 1, [total], element)[0]
        s.store(total, out, r)
