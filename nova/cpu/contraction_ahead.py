"""What the k loop of a register tile asks memory for meanwhile: lines that are needed soon and lie far away.

    before each period of k steps:   a row of the output tile     which is stored when this loop ends
                                     lines of A's next block      which is packed when this block is done
                                     lines of B's next panel      which the next strip of tiles reads, or packs

A line of the last cache or of memory takes hundreds of clocks, and a core waits for a dozen of them at most. Asked for
all at once they hold up the loop's own loads; a few at a time they come for nothing, as multiply-adds hardly use the
memory. Hardware prefetchers don't find them: operands in place are walked across rows, and end at every page.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nova.cpu import contraction_epilogue as ep
from nova.cpu import ints
from nova.cpu.contraction_epilogue import Anchor, Frame
from nova.cpu.ints import Int
from nova.cpu.microkernel import LINE, Interlude, Panel, prefetch
from nova.cpu.pack import Source
from nova.lowering import lanes as ln
from nova.lowering.lanes import Value
from nova.mlir import ir

if TYPE_CHECKING:
    from nova.cpu.contraction import Nest

SHORT = 64  # k steps below which a tile is over before anything comes
PERIOD = 16  # least k steps of a period; it is a power of two of them
MOST = 4  # lines of one stream in one period


@dataclass(frozen=True)
class Stream:
    """`rows` rows of memory, `stride` elements apart, `run` contiguous elements each."""

    pointer: Value
    element: ir.Type
    rows: int
    stride: Int
    run: int

    def ask(self, tile: Int, tiles: int, period: Int, periods: int) -> None:
        """A period's share, if all periods of `tiles` tiles together ask for the whole of it."""
        lines = -(-self.run * ln.bytes_of(self.element) // LINE)
        if self.rows <= tiles or lines >= periods:  # whole rows to a tile, dealt to its periods
            rows, count = -(-self.rows // tiles), -(-lines // periods)
            row, line = ints.mul(tile, rows), ints.mul(period, count)
        else:  # whole rows to a period
            rows, count = -(-self.rows // (tiles * periods)), lines
            row, line = ints.mul(ints.add(ints.mul(tile, periods), period), rows), 0
        row = ints.minimum(row, self.rows - 1)
        for i in range(min(rows, max(MOST // count, 1))):
            for j in range(min(count, MOST)):
                start = ints.mul(ints.add(row, i), self.stride)
                place = ints.add(start, ints.mul(ints.add(line, j), LINE // ln.bytes_of(self.element)))
                prefetch(ints.offset_pointer(self.pointer, place, self.element), write=False, near=False)


@dataclass(frozen=True)
class Place:
    """Where a tile stands in the nest."""

    range_m: tuple[Int, Int]  # of this thread
    block: tuple[Int, Int, Int]  # starts of the blocks along m, n and k
    m: Int
    n: Int
    panel: Panel  # of B


def interlude(nest: Nest, frame: Frame, lhs: Source, rhs: Source, at: Place) -> Interlude | None:
    """The requests of one tile's k loop; None for a loop that is too short, or where all operands stay in L2."""
    depth = min(nest.kc, nest.chunk)
    if depth < SHORT or not nest.s.ahead:
        return None
    every = max(1 << ((depth // nest.rows).bit_length() - 1), PERIOD)
    periods = -(-depth // every)
    tiles = nest.mc // nest.rows  # of a strip
    row = ints.div(ints.sub(at.m, at.block[0]), nest.rows)
    strip = ints.div(ints.sub(at.n, at.block[1]), nest.columns)
    block, panel = _next_lhs(nest, lhs, at), _next_rhs(nest, rhs, at)

    def emit(period: Int) -> None:
        _ask_output(nest, Anchor(frame, at.m, at.n), period, periods)
        if block:
            number = ints.add(ints.mul(strip, tiles), row)
            block.ask(number, tiles * -(-nest.nc // nest.columns), period, periods)
        if panel:
            panel.ask(row, tiles, period, periods)

    return Interlude(every, emit)


def _ask_output(nest: Nest, anchor: Anchor, period: Int, periods: int) -> None:
    """A period's rows of the first output. There may be more of them than the tile has: the next tile's, then."""
    access = nest.c.outputs[0][1]
    if nest.c.tile or ep.lane_stride(nest.c, access, nest.lanes) != 1:
        return
    rows = -(-nest.rows // periods)
    here = Anchor(anchor.frame, ints.add(anchor.m, ints.mul(period, rows)), anchor.n)
    for row in range(rows):
        for column in range(0, nest.columns, LINE // ln.bytes_of(access.element)):
            prefetch(here.address(access, row, column), write=True)


def _next_lhs(nest: Nest, source: Source, at: Place) -> Stream | None:
    """The block of A that is packed after this one: further down, or the first one of the next k block."""
    stride, k_stride = source.across_run()[0], source.depth_stride()
    if not nest.s.lhs_ahead or k_stride is None or 1 not in (stride, k_stride):
        return None
    below = ints.add(at.block[0], nest.mc)
    more = ln.cmpi("slt", ints.value(below), ints.value(at.range_m[1]))
    m = ln.select(more, ints.value(below), ints.value(at.range_m[0]))
    k = ints.add(at.block[2], ln.select(more, ints.value(0), ints.value(nest.kc)))
    return _stream(source, m, k, nest.mc, nest.kc)


def _next_rhs(nest: Nest, source: Source, at: Place) -> Stream | None:
    """The panel of B to the right: where it was packed, unless these are the first rows that read it."""
    stride, k_stride, right = source.across_run()[0], source.depth_stride(), ints.add(at.n, nest.columns)
    if k_stride is None or 1 not in (stride, k_stride):
        return None
    raw = _stream(source, right, at.block[2], nest.columns, nest.kc)
    if not nest.pack_rhs or raw.element != at.panel.element:
        return raw
    first = ln.cmpi("eq", ints.value(at.block[0]), ints.value(at.range_m[0]))
    packed = ints.offset_pointer(at.panel.pointer, nest.kc * nest.columns, raw.element)
    pointer = ln.select(first, raw.pointer, packed)
    return replace(raw, pointer=pointer, stride=ln.select(first, ints.value(raw.stride), ints.value(raw.run)))


def _stream(source: Source, across: Int, k: Int, width: int, depth: int) -> Stream:
    """`width` x `depth` elements of an operand that is contiguous along one of the two."""
    stride, k_stride, element = source.across_run()[0], source.depth_stride(), source.access.element
    start = ints.offset_pointer(source.pointer, ints.add(source.across_offset(across), source.depth_offset(k)), element)
    if k_stride == 1:
        return Stream(start, element, width, stride, depth)
    return Stream(start, element, depth, k_stride or 0, width)
