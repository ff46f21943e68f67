"""Copies a block of an operand into panels that the register tile reads straight through.

    A[m, k], any strides, any type     ->    panel p: [k][width] floats, p-th group of `width` rows, rows innermost

One panel at a time, by what is contiguous in memory: along the panel (vector copies), along k (transposes of
lanes x lanes blocks in registers), or neither (a convolution window, say: scalars through per-row offsets). The last
panel repeats its last valid row: what is computed from it is never stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nova.cpu import access as ac
from nova.cpu import ints
from nova.cpu import lanes as ln
from nova.cpu.access import Access
from nova.cpu.ints import Int
from nova.cpu.lanes import Value
from nova.cpu.microkernel import to_accumulator
from nova.mlir import ir, scf

CHUNK_BITS = 128  # shuffles that stay inside a 128-bit lane are cheap on every x86


@dataclass(frozen=True)
class Source:
    """What is packed: an access, the dimensions along the panel and along k, and all dimension sizes."""

    access: Access
    pointer: Value  # at the batch's first element
    across: tuple[int, ...]
    depth: tuple[int, ...]
    sizes: Sequence[int]

    def across_run(self) -> tuple[int, int]:
        return ac.contiguous_run(self.access, self.across, self.sizes)

    def depth_stride(self) -> int | None:
        """The one stride along k, or None if k is made of several."""
        stride, length = ac.contiguous_run(self.access, self.depth, self.sizes)
        return stride if length == math.prod(self.sizes[d] for d in self.depth) else None

    def across_offset(self, place: Int) -> Int:
        return ac.offset_along(self.access, self.across, self.sizes, place)

    def depth_offset(self, place: Int) -> Int:
        return ac.offset_along(self.access, self.depth, self.sizes, place)


def panels(
    source: Source,
    start: Int,
    end: Int,
    limit: int,
    k_start: Int,
    k_count: Int,
    width: int,
    destination: Value,
    panel_stride: int,
    accumulator: ir.Type,
    lanes: int,
) -> None:
    """Packs rows [start, end) of `source`, k in [k_start, k_start + k_count), into consecutive panels of `width`.

    `limit` is the extent of the dimension: rows past it are not read.
    """
    whole = limit % width == 0  # then every panel is full: blocks start and end at multiples of width
    stride, run = source.across_run()
    k_stride = source.depth_stride()
    aligned = run >= limit or run % width == 0
    if stride == 1 and aligned:
        fast = _copy_contiguous
    elif k_stride == 1 and lanes > 1:
        fast = _transpose
    else:
        fast = None
    with ints.loop(start, end, width) as place:
        panel = ints.mul(ints.div(ints.sub(place, start), width), panel_stride)
        to = ints.offset_pointer(destination, panel, accumulator)
        shape = _Shape(place, limit, k_start, k_count, width, to, accumulator, lanes)
        if fast is None:
            _general(source, shape)
        elif whole:
            fast(source, shape)
        else:
            full = ln.cmpi("sle", ints.value(ints.add(place, width)), ln.i64(limit))
            branch = scf.IfOp(full, has_else=True)
            with ir.InsertionPoint(branch.then_block):
                fast(source, shape)
                scf.YieldOp([])
            with ir.InsertionPoint(branch.else_block):
                _general(source, shape)
                scf.YieldOp([])


@dataclass(frozen=True)
class _Shape:
    place: Int  # first row of the panel
    limit: int
    k_start: Int
    k_count: Int
    width: int
    to: Value
    accumulator: ir.Type
    lanes: int

    def put(self, value: Value, offset: Int) -> None:
        ln.store(to_accumulator(value, self.accumulator), ints.offset_pointer(self.to, offset, self.accumulator))


def _pieces(width: int, lanes: int) -> list[tuple[int, int]]:
    """(start, lanes) of the vectors that cover `width` exactly: powers of two, largest first."""
    pieces, start = [], 0
    while start < width:
        size = min(lanes, 1 << ((width - start).bit_length() - 1))
        pieces.append((start, size))
        start += size
    return pieces


def _copy_contiguous(source: Source, s: _Shape) -> None:
    """Rows are neighbours in memory: for each k, `width` elements move as vectors."""
    element = source.access.element
    base = ints.offset_pointer(source.pointer, source.across_offset(s.place), element)
    with ints.loop(0, s.k_count) as k:
        row = source.depth_offset(ints.add(s.k_start, k))
        for start, size in _pieces(s.width, s.lanes):
            vector = ln.load(ints.offset_pointer(base, ints.add(row, start), element), element, size)
            s.put(vector, ints.add(ints.mul(k, s.width), start))


def _general(source: Source, s: _Shape) -> None:
    """Scalars through one offset a row; rows past the limit repeat the last one."""
    element = source.access.element
    rows = [
        ints.value(source.across_offset(ints.minimum(ints.add(s.place, r), s.limit - 1))) for r in range(s.width)
    ]
    with ints.loop(0, s.k_count) as k:
        base = ints.offset_pointer(source.pointer, source.depth_offset(ints.add(s.k_start, k)), element)
        for r, row in enumerate(rows):
            s.put(ln.load(ln.address(base, row, element), element), ints.add(ints.mul(k, s.width), r))


def _transpose(source: Source, s: _Shape) -> None:
    """k is contiguous: blocks of `lanes` rows by `chunk` k's are read along k and turned in registers.

    Row i and row i + chunk, i + 2 * chunk, ... share a register, one 128-bit lane each, so that a transpose inside
    each lane finishes the block: no shuffle crosses lanes.
    """
    element, lanes = source.access.element, s.lanes
    chunk = min(lanes, CHUNK_BITS // ln.width_of(s.accumulator))
    rows = [ints.value(source.across_offset(ints.add(s.place, r))) for r in range(s.width)]
    begin = ints.offset_pointer(source.pointer, source.depth_offset(s.k_start), element)
    pointers = [ln.address(begin, row, element) for row in rows]
    main = ints.mul(ints.div(s.k_count, chunk), chunk)
    with ints.loop(0, main, chunk) as k:
        for group in range(0, s.width, lanes):
            count = min(lanes, s.width - group)
            for t, vector in enumerate(_turned(pointers[group : group + count], k, element, s, chunk)):
                _put_first(vector, count, s, ints.add(ints.mul(ints.add(k, t), s.width), group))
    if isinstance(main, int) and isinstance(s.k_count, int) and main == s.k_count:
        return
    with ints.loop(main, s.k_count) as k:
        for r, pointer in enumerate(pointers):
            s.put(ln.load(ints.offset_pointer(pointer, k, element), element), ints.add(ints.mul(k, s.width), r))


def _turned(pointers: Sequence[Value], k: Int, element: ir.Type, s: _Shape, chunk: int) -> list[Value]:
    """`chunk` vectors: the t-th holds element k + t of every row."""

    def load(row: int) -> Value:
        pointer = pointers[min(row, len(pointers) - 1)]
        return to_accumulator(ln.load(ints.offset_pointer(pointer, k, element), element, chunk), s.accumulator)

    vectors = []
    for i in range(chunk):
        parts = [load(i + chunk * j) for j in range(s.lanes // chunk)]
        while len(parts) > 1:
            width = ln.lanes_of(parts[0].type)
            parts = [ln.shuffle(a, b, range(2 * width)) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        vectors.append(parts[0])
    return _turn_chunks(vectors, s.lanes, chunk)


def _turn_chunks(rows: list[Value], lanes: int, chunk: int) -> list[Value]:
    """Transposes the chunk x chunk block in every 128-bit lane by interleaving: single-element, then pairs."""
    if chunk == 1:
        return rows

    def interleaved(a: Value, b: Value, span: int) -> list[Value]:
        halves = []
        for half in (0, chunk // 2):
            mask: list[int] = []
            for base in range(half, lanes, chunk):
                for place in range(base, base + chunk // 2, span):
                    mask += [*range(place, place + span), *range(lanes + place, lanes + place + span)]
            halves.append(ln.shuffle(a, b, mask))
        return halves

    if chunk == 2:
        return interleaved(rows[0], rows[1], 1)
    low01, high01 = interleaved(rows[0], rows[1], 1)
    low23, high23 = interleaved(rows[2], rows[3], 1)
    return [*interleaved(low01, low23, 2), *interleaved(high01, high23, 2)]


def _put_first(vector: Value, count: int, s: _Shape, offset: Int) -> None:
    """Stores the first `count` lanes."""
    lanes = ln.lanes_of(vector.type)
    if count == lanes:
        s.put(vector, offset)
        return
    for start, size in _pieces(count, lanes):
        part = ln.shuffle(vector, vector, range(start, start + size)) if size > 1 else ln.lane(vector, start)
        s.put(part, ints.add(offset, start))
