"""The gradient of a pooling of maxima, without conflicts: an element looks at the windows that it lies in.

dx[h, w] = sum of dy[oh, ow] over the windows (oh, ow) around (h, w) whose maximum is (h, w), in their order
"""

from __future__ import annotations

import math

from nova.tile.builder import Program
from nova.tile.layout import blocked
from nova.tile.text import Value
from nova.tile.whole_op import Op, combination
from nova.tile.widths import position_type

THREADS, ELEMENTS = 256, 4


def backward(op: Op) -> None:
    """The one launch."""
    planes_shape, pooled = op.result_shape(), op.shape(0)
    size = math.prod(planes_shape)
    kind = position_type(max(size, math.prod(pooled)))
    layout = blocked([THREADS * ELEMENTS], [THREADS // 32], [32])
    p = op.launch("windows", -(-size // layout.shape[0]), THREADS)
    first = p.mul(p.cast(p.program_id(0), kind), layout.shape[0])
    place = p.binary("arith.addi", p.convert(p.iota(0, layout), kind), first)
    inside = p.cmp("slt", place, size)
    height, width = planes_shape[2:]
    own = p.binary("arith.remui", place, max(height * width, 1))
    plane = p.binary("arith.divui", place, max(height * width, 1))
    row, column = p.binary("arith.divui", own, max(width, 1)), p.binary("arith.remui", own, max(width, 1))

    element = op.element(0)
    running = {"bf16": "f32", "f16": "f32"}.get(element, element)
    total = p.splat(p.scalar(0, running), layout.shape, running, layout)
    rows, columns = (_window(op, p, axis, at, pooled[2 + axis]) for axis, at in enumerate((row, column)))
    for in_row, window_row in rows:
        for in_column, window_column in columns:
            known = p.binary("arith.andi", inside, p.binary("arith.andi", in_row, in_column))
            at = p.binary("arith.muli", plane, pooled[2] * pooled[3])
            at = p.binary("arith.addi", at, p.binary("arith.muli", window_row, pooled[3]))
            at = p.binary("arith.addi", at, window_column)
            index = p.gather(op.operand(p, 1), at, "i64", known, fill=-1)
            known = p.binary("arith.andi", known, p.cmp("eq", index, p.convert(own, "i64")))
            value = p.convert(p.gather(op.operand(p, 0), at, element, known), running)
            total = p.select(known, p.binary(combination("add", running), total, value), total)
    p.scatter(p.convert(total, element), op.result(p), place, inside)


def _window(op: Op, p: Program, axis: int, at: Value, count: int) -> list[tuple[Value, Value]]:
    """For each place in a window, last first: (whether there is a window that has `at` there, its number)."""
    size, stride, padding, dilation = (
        op.whole.integers(name)[axis] for name in ("kernel", "stride", "padding", "dilation")
    )
    found = []
    for tap in reversed(range(size)):
        begin = p.binary("arith.addi", at, padding - tap * dilation)
        number = p.binary("arith.divui", begin, stride)  # huge where `begin` is negative
        exact = p.cmp("eq", p.binary("arith.remui", begin, stride), 0)
        found.append((p.binary("arith.andi", exact, p.cmp("ult", number, count)), number))
    return found
