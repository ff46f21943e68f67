"""Scalar ops that stand inside the regions of level-2 kernels, beside `arith` and `math`.

They are the two things a region needs that no upstream dialect has: counter-based random words, and a report that a
value was out of bounds.
"""

from __future__ import annotations

from nova.dialect.base import Nova
from nova.mlir import ext, ir


class PhiloxOp(Nova.Operation, name="philox"):
    """word = word `element % 4` of Philox4x32-10 with key = seed (low, high word), counter (element // 4, 0, stream, 0).

    seed: i64, element: i64 -> i32; the attribute stream: i64. Pure.
    """

    seed: ext.Operand[ir.IntegerType]
    element: ext.Operand[ir.IntegerType]
    stream: ir.IntegerAttr
    word: ext.Result[ir.IntegerType]


class CheckOp(Nova.Operation, name="check"):
    """Reports `value` (i64) to the kernel's error record where `bad` (i1) holds; otherwise nothing.

    The function's attribute `nova.raises` has the exception's class and message, with "{value}" to be filled in. The
    kernel goes on: what it computes from the value must be safe (a clamped index), and the step stops after it.
    """

    bad: ext.Operand[ir.IntegerType]
    value: ext.Operand[ir.IntegerType]
