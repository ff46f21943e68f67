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

from nova.cpu import ints
from nova.cpu.ints import Int
from nova.cpu.microkernel import to_accumulator
from nova.fusion import access as ac
from nova.fusion.access import Access
from nova.lowering import lanes as ln
from nova.lowering.lanes import Value
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
        return ints.offset_along(self.access, self.across, self.sizes, place)

    def depth_offset(self, place: Int) -> Int:
        return ints.offset_along(self.access, self.depth, self.sizes, place)


@dataclass(frozen=True)
class Block:
    """What of it, and where to: rows [start, end), k in [k_start, k_start + k_count), panels of `width` rows.

    `limit` is the extent of the dimension: rows past it are not read.
    """

    start: Int
    end: Int
    limit: int
    k_start: Int
    k_count: Int
    width: int
    destination: Value
    panel_stride: int  # elements from one panel to the next
    accumulator: ir.Type
    lanes: int

    def at(self, place: Int) -> _Panel:
        offset = ints.mul(ints.div(ints.sub(place, self.start), self.width), self.panel_stride)
        return _Panel(self, place, ints.offset_pointer(self.destination, offset, self.accumulator))


@dataclass(frozen=True)
class _Panel:
    """One panel: its block, its first row and where it goes."""

    block: Block
    place: Int
    to: Value

    def put(self, value: Value, k: Int, row: int) -> None:
        offset = ints.add(ints.mul(k, self.block.width), row)
        accumulator = self.block.accumulator
        ln.store(to_accumulator(value, accumulator), ints.offset_pointer(self.to, offset, accumulator))


def panels(source: Source, block: Block) -> None:
    """Packs a block of `source` into consecutive panels."""
    stride, run = source.across_run()
    aligned = run >= block.limit or run % block.width == 0
    fast = None
    if stride == 1 and aligned:
        fast = _copy_contiguous
    elif source.depth_stride() == 1 and block.lanes > 1:
        fast = _transpose
    with ints.loop(block.start, block.end, block.width) as place:
        panel = block.at(place)
        if fast is None:
            _general(source, panel)
        elif block.limit % block.width == 0:  # blocks start and end at multiples of width: every panel is full
            fast(source, panel)
        else:
            full = ln.cmpi("sle", ints.value(ints.add(place, block.width)), ints.value(block.limit))
            branch = scf.IfOp(full, has_else=True)
            with ir.InsertionPoint(branch.then_block):
                fast(source, panel)
                scf.YieldOp([])
            with ir.InsertionPoint(branch.else_block):
                _general(source, panel)
                scf.YieldOp([])


def _pieces(width: int, lanes: int) -> list[tuple[int, int]]:
    """(start, lanes) of the vectors that cover `width` exactly: powers of two, largest first."""
    pieces, start = [], 0
    while start < width:
        size = min(lanes, 1 << ((width - start).bit_length() - 1))
        pieces.append((start, size))
        start += size
    return pieces


def _copy_contiguous(source: Source, panel: _Panel) -> None:
    """Rows are neighbours in memory: for each k, `width` elements move as vectors."""
    element, block = source.access.element, panel.block
    base = ints.offset_pointer(source.pointer, source.across_offset(panel.place), element)
    with ints.loop(0, block.k_count) as k:
        row = source.depth_offset(ints.add(block.k_start, k))
        for start, size in _pieces(block.width, block.lanes):
            panel.put(ln.load(ints.offset_pointer(base, ints.add(row, start), element), element, size), k, start)


def _general(source: Source, panel: _Panel) -> None:
    """Scalars through one offset a row; rows past the limit repeat the last one."""
    element, block = source.access.element, panel.block
    places = [ints.minimum(ints.add(panel.place, r), block.limit - 1) for r in range(block.width)]
    rows = [ints.value(source.across_offset(place)) for place in places]
    with ints.loop(0, block.k_count) as k:
        base = ints.offset_pointer(source.pointer, source.depth_offset(ints.add(block.k_start, k)), element)
        for r, row in enumerate(rows):
            panel.put(ln.load(ln.address(base, row, element), element), k, r)


def _transpose(source: Source, panel: _Panel) -> None:
    """k is contiguous: blocks of `lanes` rows by `chunk` k's are read along k and turned in registers.

    Rows i, i + chunk, i + 2 * chunk, ... share a register, one 128-bit lane each, so that a transpose inside each lane
    finishes the block: no shuffle crosses lanes.
    """
    element, block = source.access.element, panel.block
    chunk = min(block.lanes, CHUNK_BITS // ln.width_of(block.accumulator))
    begin = ints.offset_pointer(source.pointer, source.depth_offset(block.k_start), element)
    rows = [ints.value(source.across_offset(ints.add(panel.place, r))) for r in range(block.width)]
    pointers = [ln.address(begin, row, element) for row in rows]
    main = ints.mul(ints.div(block.k_count, chunk), chunk)
    with ints.loop(0, main, chunk) as k:
        for group in range(0, block.width, block.lanes):
            count = min(block.lanes, block.width - group)
            for t, vector in enumerate(_turned(pointers[group : group + count], k, element, block, chunk)):
                for start, size in _pieces(count, block.lanes):
                    panel.put(_part(vector, start, size), ints.add(k, t), group + start)
    if main is not block.k_count:
        with ints.loop(main, block.k_count) as k:
            for r, pointer in enumerate(pointers):
                panel.put(ln.load(ints.offset_pointer(pointer, k, element), element), k, r)


def _turned(pointers: Sequence[Value], k: Int, element: ir.Type, block: Block, chunk: int) -> list[Value]:
    """`chunk` vectors: the t-th holds element k + t of every row."""

    def load(row: int) -> Value:
        pointer = pointers[min(row, len(pointers) - 1)]
        return to_accumulator(ln.load(ints.offset_pointer(pointer, k, element), element, chunk), block.accumulator)

    vectors = []
    for i in range(chunk):
        parts = [load(i + chunk * j) for j in range(block.lanes // chunk)]
        while len(parts) > 1:
            both = range(2 * ln.lanes_of(parts[0].type))
            parts = [ln.shuffle(a, b, both) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        vectors.append(parts[0])
    return _turn_chunks(vectors, block.lanes, chunk)


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


def _part(vector: Value, start: int, size: int) -> Value:
    """Lanes [start, start + size) of a vector."""
    if size == ln.lanes_of(vector.type):
        return vector
    return ln.shuffle(vector, vector, range(start, start + size))
