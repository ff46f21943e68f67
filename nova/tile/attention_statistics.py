"""What backward needs to know of every query: delta = rowsum(dO O), and its log-sum-exp in base 2.

With float masks there is a third number, `lift` (attention_mask.py says why). The query half computes them for its own
rows and leaves them in the kernel's workspace for the ops after it; where there is no query half, a launch does.
"""

from __future__ import annotations

from nova.fusion.attention_form import Access, Attention
from nova.schedule.target import ELEMENT_BYTES
from nova.tile.attention_mask import bases, has_floor
from nova.tile.attention_tiles import Tile, access_vector, bounds_of, head_of, is_wide, padded, place
from nova.tile.builder import Program
from nova.tile.layout import NestedLayout, blocked, mma_accumulator
from nova.tile.text import Operand, Value

ROWS, WARPS = 32, 4  # of a block of the launch


def statistics_bytes(op: Attention) -> int:
    """Workspace for the rows' statistics."""
    if op.name == "online_attention":
        return 0
    return ELEMENT_BYTES[op.sums] * planes(op) * op.batch * op.heads * op.queries


def planes(op: Attention) -> int:
    """Statistics a row: base, delta and perhaps lift."""
    return 3 if has_floor(op) else 2


class Workspace:
    """The statistics [planes, B, H, T] in the kernel's workspace."""

    def __init__(self, p: Program, op: Attention):
        self.p, self.op, self.pointer = p, op, p.args[-2]
        self.plane = op.batch * op.heads * op.queries

    def base(self, batch: Operand, head: Operand) -> Operand:
        p, op = self.p, self.op
        row = p.add(p.mul(p.cast(batch, "i64"), op.heads), p.cast(head, "i64"))
        return p.mul(row, op.queries)

    def store(self, tiles: list[Value], batch: Operand, head: Operand, query: Operand) -> None:
        at = self.base(batch, head)
        for number, tile in enumerate(tiles):
            assert tile.shape is not None
            extents = bounds_of([self.op.queries], tile.shape)
            base = self.p.add(at, number * self.plane)
            self.p.store(tile, self.pointer, base, [query], strides=[1], extents=extents)

    def load(self, batch: Operand, head: Operand, query: Operand, layout: NestedLayout) -> list[Value]:
        at, extents = self.base(batch, head), bounds_of([self.op.queries], layout.shape)
        bases = [self.p.add(at, number * self.plane) for number in range(planes(self.op))]
        return [
            self.p.load(self.pointer, base, [query], self.op.sums, layout, strides=[1], extents=extents)
            for base in bases
        ]


def statistics(
    p: Program, op: Attention, batch: Operand, head: Operand, query: Operand, layout: NestedLayout, vector: int
) -> list[Value]:
    """The statistics of a tile of queries; `layout` is that of their rows of dO and O."""
    dout, out = (_rows(p, op, op[name], batch, head, query, layout, vector) for name in ("dout", "out"))
    delta = p.reduce(p.binary("arith.mulf", dout, out), [1], "addf")
    lse, sizes = op["lse"], (op.queries,)
    saved = p.load(
        p.args[lse.argument], place(p, lse, batch, head), [query], lse.dtype, layout.project([1]),
        strides=lse.strides[-1:], extents=bounds_of(sizes, layout.shape[:1]), wide=is_wide(lse.strides[-1:], sizes),
    )  # fmt: skip
    base, lift = bases(p, op, p.convert(saved, op.sums))
    return [base, delta] if lift is None else [base, delta, lift]


def _rows(
    p: Program, op: Attention, access: Access, batch: Operand, head: Operand, query: Operand, layout: NestedLayout,
    vector: int,
) -> Value:  # fmt: skip
    sizes, strides = (op.queries, op.value_dim), access.strides[-2:]
    tile = p.load(
        p.args[access.argument], place(p, access, batch, head), [query, 0], access.dtype, layout, strides=strides,
        extents=bounds_of(sizes, layout.shape), vector=vector, wide=is_wide(strides, sizes),
    )  # fmt: skip
    return p.convert(tile, op.sums)


def _vector(op: Attention) -> int:
    return min(access_vector(op[name], op.value_dim) for name in ("dout", "out"))


def accumulator_rows(op: Attention, tile: Tile) -> tuple[NestedLayout, int]:
    """(layout, vector): whole rows of values, held by the lanes that hold them in an accumulator."""
    rows, columns, vector = mma_accumulator(tile.rows, 16, tile.warps), padded(op.value_dim), _vector(op)
    lanes = rows.thread[1]
    while columns % (lanes * vector):
        vector //= 2
    return NestedLayout(
        rows.subgroup, (rows.batch[0], columns // (lanes * vector)), rows.outer, rows.thread, (1, vector),
        rows.subgroup_strides, rows.thread_strides,
    ), vector  # fmt: skip


class Statistics:
    """The launch, for kernels without a query half."""

    def __init__(self, name: str, op: Attention, arguments: int):
        self.op, self.columns = op, padded(op.value_dim)
        grid = (op.batch * op.heads, -(-op.queries // ROWS), 1)
        self.p = Program(name, arguments, grid, 32 * WARPS)

    def program(self) -> Program:
        p, op, vector = self.p, self.op, _vector(self.op)
        batch, head = head_of(p, op, p.program_id(0), op.heads)
        query = p.mul(p.program_id(1), ROWS)
        lanes = 1
        while 2 * lanes <= 32 and self.columns % (2 * lanes * vector) == 0:
            lanes *= 2
        down = 32 // lanes  # rows of lanes
        while ROWS % (WARPS * down):
            down //= 2
        layout = blocked((ROWS, self.columns), (WARPS, 1), (down, lanes), vector)
        Workspace(p, op).store(statistics(p, op, batch, head, query, layout, vector), batch, head, query)
        return p
