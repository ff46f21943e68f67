"""Elementwise nests that read an operand across its rows (a transpose): tiles are turned over in registers first.

    out[i, j] = f(x[j, i])     tile of 8 i by 64 j:     scratch[i][j] = x[j][i]     8 x 8 at a time, by shuffles
                                                        out[i][j] = f(scratch[i][j])   the nest's own loop, unit stride

Without it every lane would be a load of its own from a line of its own, and for row lengths that are powers of two
those lines evict each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nova.cpu import build
from nova.cpu.loops_ir import Access, Index
from nova.cpu.loops_plan import TILE_WIDTH
from nova.cpu.loops_step import StepEmitter
from nova.cpu.loops_values import Place, add, loop_i64, mul, value_of
from nova.lowering import lanes as ln
from nova.lowering.lanes import Value
from nova.mlir import ir, scf

if TYPE_CHECKING:
    from nova.cpu.loops_emit import NestEmitter


def emit_tile(emitter: NestEmitter) -> None:
    """One tile: the emitter's coordinates of the two tiled dims count tiles."""
    nest, sizes, height = emitter.nest, emitter.sizes, emitter.full_lanes
    assert nest.tile is not None
    dim, accesses = nest.tile
    step = nest.steps[0]
    lane_dim = step.inner[0]
    top, rows = _part(emitter.coordinates[dim], height, sizes[dim])
    left, columns = _part(emitter.coordinates[lane_dim], TILE_WIDTH, sizes[lane_dim])
    emitter.coordinates.update({dim: top, lane_dim: left})
    for access in accesses:
        _turn(emitter, access, dim, lane_dim, rows, columns)
    emitter.spans[lane_dim] = (left, columns)

    def row(k: Value, carried: list[Value]) -> list[Value]:
        emitter.coordinates[dim] = value_of(add(top, k))
        for access in accesses:
            scratch = emitter.storage.tiles[access]
            shifted = ln.subi(ln.muli(k, ln.i64(TILE_WIDTH)), value_of(left))
            pointer = ln.address(scratch, shifted, access.element)
            emitter.turned[access] = Place(pointer, Index(0, ((lane_dim, 1),)), access.element)
        StepEmitter(emitter, step).emit()
        return carried

    loop_i64(0, rows, 1, [], row)
    emitter.turned.clear()


def _part(number: Value | int, size: int, extent: int) -> tuple[Value | int, Value | int]:
    """(begin, length) of a tile's side."""
    begin = mul(number, size)
    if extent % size == 0:
        return begin, size
    return begin, ln.minsi(ln.subi(ln.i64(extent), value_of(begin)), ln.i64(size))


def _turn(
    emitter: NestEmitter, access: Access, dim: int, lane_dim: int, rows: Value | int, columns: Value | int
) -> None:
    """scratch[k][j] = the operand at (top + k, left + j)."""
    place, scratch, lanes = emitter.place_of(access), emitter.storage.tiles[access], emitter.full_lanes
    start = ln.address(place.pointer, value_of(emitter.offset(place.index)), access.element)
    stride = dict(place.index.terms)[lane_dim]
    element = ln.memory_type(access.element)

    def whole() -> None:
        def block(j: Value, carried: list[Value]) -> list[Value]:
            lines = []
            for k in range(lanes):
                at = ln.muli(ln.addi(j, ln.i64(k)), ln.i64(stride))
                lines.append(ln.load_raw(ln.address(start, at, element), ln.vector_type(element, lanes)))
            for k, line in enumerate(transpose(lines)):
                ln.store(line, ln.address(scratch, ln.addi(j, ln.i64(k * TILE_WIDTH)), element))
            return carried

        loop_i64(0, TILE_WIDTH, lanes, [], block)

    def piece() -> None:
        with build.loop(0, build.to_index(value_of(rows))) as k, build.loop(0, build.to_index(value_of(columns))) as j:
            row, column = build.to_i64(k), build.to_i64(j)
            source = ln.address(start, ln.addi(row, ln.muli(column, ln.i64(stride))), element)
            target = ln.address(scratch, ln.addi(ln.muli(row, ln.i64(TILE_WIDTH)), column), element)
            ln.store(ln.load_raw(source, element), target)

    if isinstance(rows, int) and isinstance(columns, int):
        whole()
        return
    full = [ln.cmpi("eq", value_of(n), ln.i64(size)) for n, size in ((rows, lanes), (columns, TILE_WIDTH))]
    branch = scf.IfOp(ln.andi(*full), has_else=True)
    with ir.InsertionPoint(branch.then_block):
        whole()
        scf.YieldOp([])
    with ir.InsertionPoint(branch.else_block):
        piece()
        scf.YieldOp([])


def transpose(rows: list[Value]) -> list[Value]:
    """n vectors of n lanes, turned over: blocks off the diagonal change places, at distance 1, 2, 4, ..."""
    size, distance = len(rows), 1
    while distance < size:
        first = [size + j - distance if j & distance else j for j in range(size)]
        second = [size + j if j & distance else j + distance for j in range(size)]
        for i in range(size):
            if not i & distance:
                a, b = rows[i], rows[i + distance]
                rows[i], rows[i + distance] = ln.shuffle(a, b, first), ln.shuffle(a, b, second)
        distance *= 2
    return rows
