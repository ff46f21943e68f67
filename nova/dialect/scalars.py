"""Scalar ops that stand inside the regions of level-2 kernels, beside `arith` and `math`.

They are the two things a region needs that no upstream dialect has: counter-based random words, and a report that a
value was out of bounds.
"""

# no `from __future__ import annotations`: the declarations below are read as types
from typing import Any

from nova.dialect.base import Nova
from nova.mlir import ext


class PhiloxOp(Nova.Operation, name="philox"):  # type: ignore[call-arg, name-defined]  # the bindings are untyped
    """word = word `element % 4` of Philox4x32-10, key = seed (low, high word), counter (element // 4, 0, stream, 0).

    seed: i64, element: i64 -> i32; the attribute stream: i64. Pure.
    """

    seed: ext.Operand[Any]
    element: ext.Operand[Any]
    stream: Any
    word: ext.Result[Any]


class CheckOp(Nova.Operation, name="check"):  # type: ignore[call-arg, name-defined]  # the bindings are untyped
    """Reports `value` (i64) to the kernel's error record where `bad` (i1) holds; otherwise nothing.

    The function's attribute `nova.raises` has the exception's class and message, with "{value}" to be filled in. The
    kernel goes on: what it computes from the value must be safe (a clamped index), and the step stops after it.
    """

    bad: ext.Operand[Any]
    value: ext.Operand[Any]
