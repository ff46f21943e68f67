"""Kernels of kind "scan": inclusive running sums and products along one dim.

The tensor is seen as [outer, n, inner]. A block walks along n in tiles, from each to the next with what it has summed
so far; inside of a tile the op `scan` is a prefix over registers, lanes and warps. Sums of f32 are kept in f64, those
of bf16 and f16 in f32, as PyTorch does.

    inner = 1    tiles of [rows, n]: a warp a row where there are many rows, else a block a row
    else         tiles of [n, columns], columns on lanes, so that accesses are as long as the columns allow

Where that makes few blocks, n is cut into parts: a first launch leaves the total of each, and a part begins with the
totals of those before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from nova.mlir import ir
from nova.schedule.target import GpuTarget
from nova.tile.builder import Program
from nova.tile.layout import NestedLayout, blocked
from nova.tile.text import BITS, Operand, Value
from nova.tile.whole_op import Op, combination, power_of_two, running_type, vector_of
from nova.tile.widths import is_wide, number_type

WARPS = 8
ELEMENTS = 8  # of a thread, along n
BLOCKS_PER_SM = 4  # wanted, by cutting n into parts where it is long and little else is there
FEW_STEPS = 4  # tiles of a part, at least


def generate(func_op: ir.OpView, target: GpuTarget) -> tuple[list[Program], int]:
    """The launches of a scan, and its workspace in bytes."""
    op = Op(func_op)
    shape, dim = op.shape(0), op.whole.integer("dim")
    n, outer, inner = shape[dim], math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    scan = _rows(op, outer, n, target) if inner == 1 else _columns(op, outer, n, inner, target)
    scan.emit(op, target)
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
    parts: int = 1  # blocks along n
    partials: int = 0  # offset of [part, block, other dimension] in the workspace

    @property
    def number(self) -> str:
        """The type of an element's number along either dimension."""
        return number_type(*self.extents)

    def emit(self, op: Op, target: GpuTarget) -> None:
        if not self.steps or not self.blocks:
            op.launch("scan", 0, WARPS * 32)
            return
        wanted = -(-BLOCKS_PER_SM * target.sms // self.blocks)
        if self.steps >= 2 * FEW_STEPS and 2 * self.blocks < target.sms * BLOCKS_PER_SM:
            self.parts = min(self.steps // FEW_STEPS, wanted)
        if self.parts > 1:
            size = self.parts * self.blocks * self.layout.shape[1 - self.along]
            self.partials = op.reserve(size, BITS[_Body(self, op, "").running] // 8)
            _Body(self, op, "totals").totals()
        _Body(self, op, "scan").scan()


class _Body:
    """One launch: the totals of all parts, or the scan itself."""

    def __init__(self, of: _Scan, op: Op, launch: str):
        self.of, self.op = of, op
        self.element = op.element(0)
        self.running = running_type(self.element)
        self.kind = combination("add" if op.name == "cumsum" else "mul", self.element)
        self.start = 0 if op.name == "cumsum" else 1
        if launch:
            self.p = op.launch(launch, of.blocks * of.parts, WARPS * 32)
            self._place()

    def _place(self) -> None:
        p, of = self.p, self.of
        number = p.program_id(0)
        self.part, block = p.div(number, of.blocks), p.rem(number, of.blocks)
        if of.parts == 1:
            self.part, block = 0, number
        self.block = block
        outer, rest = (p.div(block, of.cut), p.rem(block, of.cut)) if of.cut else (0, block)
        self.base = p.mul(p.cast(outer, "i64"), of.outer_stride)
        self.other = p.mul(p.cast(rest, of.number), of.layout.shape[1 - of.along])
        share = -(-of.steps // of.parts)
        self.begin = p.mul(self.part, share)
        self.end = of.steps if of.parts == 1 else p.min(p.add(self.begin, share), of.steps)

    def window(self, step: Operand) -> tuple[list[Operand], dict[str, Any]]:
        of = self.of
        offsets: list[Operand] = [self.other]
        offsets.insert(of.along, self.p.mul(self.p.cast(step, of.number), of.layout.shape[of.along]))
        return offsets, {"strides": of.strides, "extents": of.extents, "vector": of.vector, "wide": of.wide}

    def load(self, step: Operand) -> Value:
        offsets, window = self.window(step)
        source = self.op.operand(self.p, 0)
        tile = self.p.load(source, self.base, offsets, self.element, self.of.layout, fill=self.start, **window)
        return self.p.convert(tile, self.running)

    def neutral(self, layout: NestedLayout) -> Value:
        return self.p.splat(self.p.scalar(self.start, self.running), layout.shape, self.running, layout)

    def reduced(self, tile: Value) -> Value:
        return self.p.reduce(tile, [self.of.along], self.kind.removeprefix("arith."))

    def totals(self) -> None:
        """partials[part, block] = all of the part."""
        p, of = self.p, self.of
        with p.for_(self.begin, self.end, 1, [self.neutral(of.layout)]) as loop:
            loop.yield_([p.binary(self.kind, loop.carried[0], self.load(loop.index))])
        row = p.add(p.mul(self.part, of.blocks), self.block)
        base = p.mul(p.cast(row, "i64"), of.layout.shape[1 - of.along])
        p.store(self.reduced(loop.results[0]), self.op.scratch(p, of.partials), base, [0], strides=[1])

    def before(self) -> Value:
        """What the parts before this one add up to."""
        p, of = self.p, self.of
        width, height = of.layout.shape[1 - of.along], of.layout.shape[of.along]
        place = p.iota(of.along, of.layout)
        strides, extents = [1], [-1]
        strides.insert(of.along, of.blocks * width)
        extents.insert(of.along, of.parts)
        base = p.mul(p.cast(self.block, "i64"), width)
        with p.for_(0, self.part, height, [self.neutral(of.layout)]) as loop:
            offsets: list[Operand] = [0]
            offsets.insert(of.along, loop.index)
            window: dict[str, Any] = {"strides": strides, "extents": extents, "fill": self.start}
            tile = p.load(self.op.scratch(p, of.partials), base, offsets, self.running, of.layout, **window)
            earlier = p.cmp("slt", p.binary("arith.addi", place, loop.index), self.part)
            loop.yield_([p.binary(self.kind, loop.carried[0], p.select(earlier, tile, self.start))])
        return self.reduced(loop.results[0])

    def scan(self) -> None:
        p, of = self.p, self.of
        left = of.layout.project([of.along])
        so_far = self.neutral(left) if of.parts == 1 else self.before()
        with p.for_(self.begin, self.end, 1, [so_far]) as loop:
            values = self.load(loop.index)
            before = p.expand(loop.carried[0], [of.along], of.layout)
            totals = p.binary(self.kind, before, p.scan(values, of.along, self.kind.removeprefix("arith.")))
            offsets, window = self.window(loop.index)
            p.store(p.convert(totals, self.element), self.op.result(p), self.base, offsets, **window)
            loop.yield_([p.binary(self.kind, loop.carried[0], self.reduced(values))])


def _rows(op: Op, outer: int, n: int, target: GpuTarget) -> _Scan:
    """Rows of neighbours."""
    vector = vector_of(op.element(0), n)
    across = WARPS if outer >= 4 * WARPS * target.sms or n <= 32 * vector else 1  # warps over rows
    along = WARPS // across
    unit = 32 * vector * along
    batch = min(max(1, ELEMENTS // vector), power_of_two(-(-n // unit)))
    layout = blocked([across, unit * batch], [across, along], [1, 32], vector)
    steps = -(-n // layout.shape[1])
    return _Scan(layout, 1, -(-outer // across), steps, [n, 1], [outer, n], vector, is_wide(outer * n))


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
    return _Scan(layout, 0, outer * cut, steps, [inner, 1], [n, inner], vector, is_wide(n * inner), cut, n * inner)
