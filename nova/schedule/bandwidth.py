"""Schedules of memory-bound kernels: elementwise chains, row and column reductions, copies, optimizer updates.

What binds them is bytes, so a schedule is a vector width, a grain of rows a task, a thread count and how outputs are
stored. Outputs that together outgrow the last cache are streamed past it: reading a line only to overwrite it is a
third of an elementwise kernel's traffic, and its reader finds nothing in the cache either way.
"""

from __future__ import annotations

from dataclasses import dataclass

from nova.schedule import model
from nova.schedule.target import ELEMENT_BYTES, CpuTarget, GpuTarget, Target

FORK_WORTH = 20e-6  # seconds of serial work below which waking the pool doesn't pay


@dataclass(frozen=True)
class LoopProblem:
    """A kernel of kind "loops" and the like, in totals over the whole kernel."""

    rows: int  # independent rows
    columns: int  # elements of the longest row
    bytes_read: int
    bytes_written: int
    operations: float  # scalar operations, weighted by model.OPERATION_COST
    dtype: str = "f32"
    row_reductions: int = 0
    cross_row: bool = False  # sums over rows: two-stage

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True)
class LoopSchedule:
    kind: str
    vector: int  # elements a lane group or thread moves at once
    threads: int  # of the pool, or of a block
    rows_per_block: int  # rows of a task (CPU) or of a block (GPU)
    nontemporal: bool = False
    prefetch: bool = False
    seconds: float = 0.0
    reasons: tuple[str, ...] = ()


def schedule_loops(p: LoopProblem, target: Target) -> LoopSchedule:
    """The plan of one memory-bound kernel."""
    if isinstance(target, CpuTarget):
        return _cpu(p, target)
    assert isinstance(target, GpuTarget)
    return _gpu(p, target)


def schedule_list(target: Target) -> LoopSchedule:
    """A kernel over a list of tensors (an optimizer): how many and how large is known when it is called."""
    threads = target.cores if isinstance(target, CpuTarget) else 256
    vector = target.lanes("f32") if isinstance(target, CpuTarget) else 4
    reason = "any number of tensors of any size: cut into equal chunks"
    return LoopSchedule("list", vector, threads, 1, reasons=(reason,))


def _cpu(p: LoopProblem, target: CpuTarget) -> LoopSchedule:
    lanes = target.lanes(p.dtype) if ELEMENT_BYTES.get(p.dtype, 4) >= 4 else target.lanes("f32")
    serial = model.cpu_seconds(target, p.bytes, p.operations / lanes, threads=1)
    tasks = p.rows if p.rows > 1 else max(1, p.columns // 4096)
    threads = min(target.cores, max(tasks, 1)) if serial > FORK_WORTH else 1
    nontemporal = p.bytes_written >= target.l3
    seconds = model.cpu_seconds(target, p.bytes, p.operations / lanes, threads)
    reasons = [
        f"{p.bytes / 1e6:.2f} MB, {p.operations:.3g} operations: {serial * 1e6:.1f} us on one thread",
        f"{threads} threads" if threads > 1 else "one thread: less work than a fork is worth",
    ]
    if nontemporal:
        reasons.append(f"streaming stores: {p.bytes_written >> 20} MiB written, {target.l3 >> 20} MiB of last cache")
    return LoopSchedule(
        "loops", lanes, threads, max(1, tasks // max(threads * 4, 1)), nontemporal,
        prefetch=nontemporal and p.row_reductions > 0, seconds=seconds, reasons=tuple(reasons),
    )  # fmt: skip


def _gpu(p: LoopProblem, target: GpuTarget) -> LoopSchedule:
    size = ELEMENT_BYTES.get(p.dtype, 4)
    vector = 16 // size
    while vector > 1 and p.columns % vector:
        vector //= 2
    groups = max(1, -(-p.columns // vector))  # vectors of a row
    if p.row_reductions and groups > 32:
        threads, rows = min(1024, max(128, 32 * -(-groups // (32 * 4)))), 1
        reason = f"one block a row: {groups} vectors of {vector} over {threads} threads"
    elif p.row_reductions:
        threads, rows = 256, 8
        reason = "one warp a row, eight rows a block"
    else:
        threads, rows = 256, max(1, 256 * 4 // groups)
        reason = f"flat: {threads} threads, four vectors of {vector} each"
    blocks = -(-max(p.rows, 1) // rows)
    tail = min(1.0, blocks / (target.sms * 2))  # too few blocks leave memory channels idle
    seconds = p.bytes / (target.bandwidth * 0.92 * max(tail, 0.05)) + target.launch_seconds
    return LoopSchedule("loops", vector, threads, rows, seconds=seconds, reasons=(reason,))
