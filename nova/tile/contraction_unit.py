"""The arithmetic of a contraction on a block: layouts of accumulators and fragments, and one step along k.

mma_sync   m16n8k16 (bf16, f16) or m16n8k8 (TF32) fragments of a warp's tile
simt       each thread's own rows and columns, multiplied and added in full precision
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nova.schedule.contraction import ContractionSchedule
from nova.schedule.contraction_gpu import SIMT_STEP_BYTES, simt_lanes
from nova.tile.builder import Program
from nova.tile.contraction_operand import Side
from nova.tile.layout import NestedLayout, mma_accumulator, mma_lhs, mma_rhs
from nova.tile.text import BITS, Value


@dataclass(frozen=True)
class Unit:
    """What multiplies: `step` is the k of one product."""

    accumulator: NestedLayout
    lhs: NestedLayout
    rhs: NestedLayout
    step: int
    element: str  # of the sums
    intrinsic: str
    rounds: bool = False  # operands to TF32
    converts: str = ""  # operands to this element first
    restarts: bool = False  # a k tile has sums of its own, which are added up: shorter chains round less

    def operand(self, program: Program, value: Value) -> Value:
        """A fragment as the arithmetic wants it."""
        if self.converts:
            value = program.convert(value, self.converts)
        return program.round_tf32(value) if self.rounds else value

    def product(self, program: Program, a: Value, b: Value, total: Value) -> Value:
        """`total` and the product of two operands."""
        return program.mma(a, b, total, self.intrinsic)


def unit_of(schedule: ContractionSchedule, lhs: Side, rhs: Side, accumulate: str) -> Unit:
    (bm, bn), warps = schedule.workgroup, schedule.warps
    if schedule.kind == "mma_sync":
        bits = BITS[lhs.element]
        step = 256 // bits
        tf32 = "TF32" in schedule.intrinsic
        accumulator, left = mma_accumulator(bm, bn, warps), mma_lhs(bm, step, warps, bits)
        if bits == 32 and not lhs.k_major:
            accumulator, left = _neighbouring_rows(accumulator), _neighbouring_rows(left)
        right = mma_rhs(step, bn, warps, bits)
        return Unit(accumulator, left, right, step, accumulate, schedule.intrinsic, rounds=tf32)
    return _simt(schedule, lhs, rhs, accumulate)


def _neighbouring_rows(layout: NestedLayout) -> NestedLayout:
    """The same fragments with a lane's rows r, r + 8 called 2r, 2r + 1: one load of 8 bytes where M is contiguous."""
    return replace(layout, outer=(1, layout.outer[1]), element=(2, layout.element[1]))


def _simt(schedule: ContractionSchedule, lhs: Side, rhs: Side, accumulate: str) -> Unit:
    (bm, bn), (wm, wn) = schedule.workgroup, schedule.warps
    lanes_m, lanes_n = simt_lanes(bm // wm, bn // wn)
    own_m, own_n = bm // wm // lanes_m, bn // wn // lanes_n  # rows and columns of a thread
    step = SIMT_STEP_BYTES * 8 // BITS[accumulate]
    run = 16 * 8 // BITS[accumulate]
    run_m, run_n = 1 if lhs.k_major else min(run, own_m), 1 if rhs.k_major else min(run, own_n)
    run_k = [step if side.k_major else 1 for side in (lhs, rhs)]
    batch_m, batch_n = own_m // run_m, own_n // run_n
    accumulator = NestedLayout(
        (wm, wn), (batch_m, batch_n), (1, 1), (lanes_m, lanes_n), (run_m, run_n), (wn, 1), (lanes_n, 1)
    )
    left = NestedLayout(
        (wm, 1), (batch_m, step // run_k[0]), (1, 1), (lanes_m, 1), (run_m, run_k[0]), (wn, 0), (lanes_n, 0)
    )
    right = NestedLayout((1, wn), (step // run_k[1], batch_n), (1, 1), (1, lanes_n), (run_k[1], run_n), (0, 1), (0, 1))
    converts = accumulate if (lhs.element, rhs.element) != (accumulate, accumulate) else ""
    intrinsic = f"FMA_{accumulate.upper()}_1x1x1"
    return Unit(accumulator, left, right, step, accumulate, intrinsic, converts=converts, restarts=True)
