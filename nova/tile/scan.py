"""Kernels of kind "scan": inclusive running sums and products along one dim.

The tensor is seen as [outer, n, inner]. A block walks along n in tiles, from each to the next with what it has summed
so far; inside of a tile the op `scan` is a prefix over registers, lanes and warps. Sums of f32 are kept in f64, those
of bf16 and f16 in f32, as PyTorch does.

    inner = 1    tiles of [rows, n]: a warp a row where there are many rows, else a block a row
    else         tiles of [n, columns], columns on lanes, so that accesses are as long as the columns allow
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nova.mlir import ir
from nova.schedule.target import GpuTarget
from nova.tile.builder import Program
from nova.tile.layout import NestedLayout, blocked
from nova.tile.text import Operand, Value
from nova.tile.whole_op import WIDE, Op, combination, power_of_two, running_type, vector_of

WARPS = 8
ELEMENTS = 8  # of a thread, along n


def generate(func_op: ir.OpView, target: GpuTarget) -> tuple[list[Program], int]:
    """The one launch of a scan; it needs no workspace."""
    op = Op(func_op)
    shape, dim = op.shape(0), op.whole.integer("dim")
    n, outer, inner = shape[dim], math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    scan = _rows(op, outer, n, target) if inner == 1 else _columns(op, outer, n, inner, target)
    scan.emit(op)
    return op.launches, op.bytes


@dataclass
class _Scan:
    """How a block sees the tensor: dimension `along` of its tiles is scanned."""

    layout: NestedLayout
    along: int
    blocks: int
    steps: int  # tiles along n
    strides: list[int]
    extents: list[int]
    vector: int
    wide: bool
    cut: int = 0  # blocks of one outer index, if a block's base depends on it
    outer_stride: int = 0

    def place(self, p: Program) -> tuple[Operand, list[Operand]]:
        """(base, offset of the block in the dimension that is not scanned)."""
        block = p.program_id(0)
        if not self.cut:
            return 0, [p.mul(block, self.layout.shape[1 - self.along])]
        outer, part = p.div(block, self.cut), p.rem(block, self.cut)
        return p.mul(p.cast(outer, "i64"), self.outer_stride), [p.mul(part, self.layout.shape[1 - self.along])]

    def emit(self, op: Op) -> None:
        p = op.launch("scan", self.blocks if self.steps else 0, WARPS * 32)
        element = op.element(0)
        running, kind = running_type(element), combination("add" if op.name == "cumsum" else "mul", element)
        start = 0 if op.name == "cumsum" else 1
        base, other = self.place(p)
        left = self.layout.project([self.along])
        so_far = p.splat(p.scalar(start, running), left.shape, running, left)
        with p.for_(0, self.steps, 1, [so_far]) as loop:
            offsets: list[Operand] = list(other)
            offsets.insert(self.along, p.mul(loop.index, self.layout.shape[self.along]))
            tile = p.load(
                op.operand(p, 0), base, offsets, element, self.layout, strides=self.strides, extents=self.extents,
                vector=self.vector, fill=start, wide=self.wide,
            )  # fmt: skip
            values = p.convert(tile, running)
            before = p.expand(loop.carried[0], [self.along], self.layout)
            totals = p.binary(kind, before, p.scan(values, self.along, kind.removeprefix("arith.")))
            p.store(
                p.convert(totals, element), op.result(p), base, offsets, strides=self.strides, extents=self.extents,
                vector=self.vector, wide=self.wide,
            )  # fmt: skip
            loop.yield_([self.total(p, loop.carried[0], values, kind)])

    def total(self, p: Program, so_far: Value, values: Value, kind: str) -> Value:
        return p.binary(kind, so_far, p.reduce(values, [self.along], kind.removeprefix("arith.")))


def _rows(op: Op, outer: int, n: int, target: GpuTarget) -> _Scan:
    """Rows of neighbours."""
    vector = vector_of(op.element(0), n)
    across = WARPS if outer >= 4 * WARPS * target.sms or n <= 32 * vector else 1  # warps over rows
    along = WARPS // across
    unit = 32 * vector * along
    batch = min(max(1, ELEMENTS // vector), power_of_two(-(-n // unit)))
    layout = blocked([across, unit * batch], [across, along], [1, 32], vector)
    steps = -(-n // layout.shape[1])
    return _Scan(layout, 1, -(-outer // across), steps, [n, 1], [outer, n], vector, outer * n >= WIDE)


def _columns(op: Op, outer: int, n: int, inner: int, target: GpuTarget) -> _Scan:
    """Neighbours belong to different columns."""
    vector = vector_of(op.element(0), inner)
    lanes = min(32, power_of_two(-(-inner // vector)))
    across = 1  # warps over columns
    while (
        across < WARPS and inner > across * lanes * vector
        and outer * -(-inner // (2 * across * lanes * vector)) >= 2 * target.sms
    ):  # fmt: skip
        across *= 2
    along = WARPS // across
    unit = along * (32 // lanes)
    batch = min(max(1, ELEMENTS // vector), power_of_two(-(-n // unit)))
    layout = blocked([unit * batch, across * lanes * vector], [along, across], [32 // lanes, lanes], vector)
    cut = -(-inner // layout.shape[1])
    steps = -(-n // layout.shape[0])
    return _Scan(layout, 0, outer * cut, steps, [inner, 1], [n, inner], vector, n * inner >= WIDE, cut, n * inner)
