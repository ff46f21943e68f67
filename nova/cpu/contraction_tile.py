"""What becomes of a finished register tile: earlier k blocks are added, the epilogue runs, outputs are stored.

whole tile, short epilogue    ->   in registers, twelve segments at known places
edge tile, or long epilogue   ->   spilled to L1, then a loop over valid rows: vectors, then single columns
more k to come                ->   sums go to where `Partials` keeps them: an output, or the workspace
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nova.cpu import build, ints
from nova.cpu import contraction_epilogue as ep
from nova.cpu.contraction_epilogue import Anchor, Frame, Segment
from nova.cpu.ints import Int
from nova.cpu.microkernel import Tile
from nova.fusion.access import Access
from nova.lowering import lanes as ln
from nova.lowering.lanes import Value
from nova.mlir import ir, scf


@dataclass(frozen=True)
class Partials:
    """Where the sums of earlier k blocks lie: an output of the accumulator's type, or a plane of the workspace."""

    output: Access | None
    plane: Value | None  # start of this batch element's (and k chunk's) M x N plane

    def pointer(self, anchor: Anchor, dm: int = 0, dn: int = 0) -> Value:
        if self.output is not None:
            return anchor.address(self.output, dm, dn)
        assert self.plane is not None
        c = anchor.frame.c
        place = ints.add(ints.mul(anchor.m, c.n), anchor.n, dm * c.n + dn)
        return ints.offset_pointer(self.plane, place, c.accumulator)


@dataclass(frozen=True)
class TileSink:
    """Takes tiles of one M x N plane. `first` and `last` say where a k block stands among the blocks of its sum."""

    frame: Frame
    tile: Tile
    buffer: Value  # tile-sized scratch
    light: bool  # the epilogue is short enough to be emitted once a register
    partials: Partials | None
    outputs_follow: bool = True  # False: sums are only kept, another phase makes outputs of them

    def finish(self, values: list[Value], m: Int, n: Int, first: bool | Value, last: bool | Value) -> None:
        if not self.outputs_follow:
            last = False
        if self.light or not self.outputs_follow:
            branch(
                self._whole(m, n),
                lambda: self._in_registers(values, m, n, first, last),
                lambda: self._by_rows(values, m, n, first, last),
            )
        else:
            self._by_rows(values, m, n, first, last)

    def _whole(self, m: Int, n: Int) -> bool | Value:
        """Whether the tile lies wholly inside the plane."""
        c, rows, columns = self.frame.c, self.tile.rows, self.tile.columns
        return ints.both(
            ints.at_most(ints.add(m, rows), c.m, c.m % rows == 0),
            ints.at_most(ints.add(n, columns), c.n, c.n % columns == 0),
        )

    def _in_registers(self, values: list[Value], m: Int, n: Int, first: bool | Value, last: bool | Value) -> None:
        tile = self.tile
        anchor = Anchor(self.frame, m, n)
        places = [(i // tile.vectors, i % tile.vectors * tile.lanes) for i in range(len(values))]
        pointers = []
        if self.partials and not (first is True and last is True):
            pointers = [self.partials.pointer(anchor, *place) for place in places]
        sums = self._add_partials(values, pointers, first)

        def outputs() -> None:
            here = Anchor(self.frame, m, n)  # of its own: this may be a branch
            for value, (row, column) in zip(sums, places, strict=True):
                Segment(here, row, column, tile.lanes, value).store_outputs()

        def keep() -> None:
            for value, pointer in zip(sums, pointers, strict=True):
                ln.store(value, pointer)

        branch(last, outputs, keep)

    def _add_partials(self, values: list[Value], pointers: list[Value], first: bool | Value) -> list[Value]:
        if first is True:
            return values

        def added() -> list[Value]:
            before = [ln.load(pointer, self.tile.accumulator, self.tile.lanes) for pointer in pointers]
            return [ln.addf(x, y) for x, y in zip(before, values, strict=True)]

        if first is False:
            return added()
        op = scf.IfOp(first, [self.tile.vector] * len(values), has_else=True)
        with ir.InsertionPoint(op.then_block):
            scf.YieldOp(values)
        with ir.InsertionPoint(op.else_block):
            scf.YieldOp(added())
        return list(op.results)

    def _by_rows(self, values: list[Value], m: Int, n: Int, first: bool | Value, last: bool | Value) -> None:
        c, tile, element = self.frame.c, self.tile, self.tile.accumulator
        for i, value in enumerate(values):
            ln.store(value, ints.offset_pointer(self.buffer, i * tile.lanes, element))
        rows = ints.minimum(tile.rows, ints.sub(c.m, m)) if c.m % tile.rows else tile.rows
        columns = ints.minimum(tile.columns, ints.sub(c.n, n)) if c.n % tile.columns else tile.columns
        with build.loop(ints.value(0), ints.value(rows), ints.value(1)) as row:
            at = ints.add(m, row)
            spilled = ints.offset_pointer(self.buffer, ints.mul(row, tile.columns), element)

            def outputs() -> None:
                def load(j: Int, lanes: int) -> Value:
                    return ln.load(ints.offset_pointer(spilled, j, element), element, lanes)

                # Whole tiles go through the epilogue in one piece: two vectors side by side hide each other's latency.
                wide = c.n % tile.columns == 0 and ep.all_vector_friendly(c, tile.columns)
                ep.emit_row(self.frame, at, n, columns, load, tile.columns if wide else tile.lanes)

            if self.partials is None or (first is True and last is True):
                outputs()
            else:
                kept = self.partials.pointer(Anchor(self.frame, at, n))
                branch(first, lambda: None, lambda: self._columns(columns, ln.addf, (kept, spilled), spilled))
                branch(last, outputs, lambda: self._columns(columns, lambda x: x, (spilled,), kept))

    def _columns(self, count: Int, function: Callable[..., Value], sources: tuple[Value, ...], to: Value) -> None:
        """`to[j] = function(sources[j]...)` for j < count."""
        element, lanes = self.tile.accumulator, self.tile.lanes
        whole = ints.mul(ints.div(count, lanes), lanes)
        for begin, end, width in ((0, whole, lanes), (whole, count, 0)):
            if begin is end:
                continue
            with ints.loop(begin, end, max(width, 1)) as j:
                loaded = [ln.load(ints.offset_pointer(p, j, element), element, width) for p in sources]
                ln.store(function(*loaded), ints.offset_pointer(to, j, element))


def branch(condition: bool | Value, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """if/else; a condition known now emits one side only."""
    if isinstance(condition, bool):
        (then if condition else otherwise)()
        return
    op = scf.IfOp(condition, has_else=True)
    for block, emit in ((op.then_block, then), (op.else_block, otherwise)):
        with ir.InsertionPoint(block):
            emit()
            scf.YieldOp([])
