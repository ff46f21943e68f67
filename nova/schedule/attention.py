"""Tiles of attention, derived from the shape and the target's limits: a pure function, no search on hardware.

The tiles of attention are coupled - scores, row statistics and the output accumulator live together - so what binds is
a ledger, not the arithmetic intensity of either contraction. On a CPU it is the first-level cache, which must hold one
panel's queries, outputs and scores; on a GPU it is registers a thread and shared memory a block (attention_gpu.py).

`schedule_attention(problem, target)` answers for both with one record; `reasons` says what bound each choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nova.schedule.target import ELEMENT_BYTES, CpuTarget, GpuTarget, Target

Direction = Literal["forward", "backward"]

PACK_SHARE = 64  # queries that share a packed key block, so that packing stays within a few percent of the contractions
SERIAL_SECONDS = 20e-6  # work below this is not worth waking threads that may have gone to sleep
EXP_OPERATIONS = 14  # vector operations of one base-2 exponential and its neighbours
CPU_EFFICIENCY = 0.85  # of the FMA peak, in the register tile


@dataclass(frozen=True)
class AttentionProblem:
    """softmax(Q K^T) V for [B,H,T,D] queries and [B,Hkv,S,D], [B,Hkv,S,Dv] keys and values, or its gradients."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    value_dim: int
    dtype: str = "f32"
    causal: bool = False
    direction: Direction = "forward"
    tf32: bool = False  # f32 operands may be rounded to TF32

    @property
    def pairs(self) -> float:
        """(query, key) pairs that are visible."""
        pairs = self.queries * self.keys
        if self.causal:
            rows = min(self.queries, self.keys)
            pairs = rows * (rows + 1) // 2 + (self.queries - rows) * self.keys
        return float(self.batch * self.heads * pairs)

    def flops(self, halves: bool = False) -> float:
        """2 contractions forward, 5 backward, 7 in two halves (both recompute the scores and dO V^T)."""
        if self.direction == "forward":
            return 2.0 * self.pairs * (self.dim + self.value_dim)
        score, value = (4, 3) if halves else (3, 2)
        return 2.0 * self.pairs * (score * self.dim + value * self.value_dim)

    @property
    def bytes(self) -> float:
        """Least main-memory traffic: every tensor once."""
        query = self.batch * self.heads * self.queries * (self.dim + self.value_dim)
        key = self.batch * self.kv_heads * self.keys * (self.dim + self.value_dim)
        return (query + key) * ELEMENT_BYTES[self.dtype] * (1.0 if self.direction == "forward" else 2.5)


@dataclass(frozen=True)
class AttentionSchedule:
    """One plan. On a CPU `block_queries` share a packed key block and `panel` of them share a register tile."""

    kind: Literal["cpu", "mma_sync"]
    block_queries: int
    block_keys: int
    panel: int
    threads: int  # CPU: threads worth using; GPU: threads of a block
    halves: bool  # backward as a query half and a key half
    stages: int = 1  # key blocks in flight (GPU)
    registers: int = 0  # a thread (GPU)
    shared_bytes: int = 0  # a block (GPU); first-level working set (CPU)
    seconds: float = 0.0
    reasons: tuple[str, ...] = ()
    hold: bool = False  # GPU: the rows' operands stay in registers
    resident: int = 0  # GPU: blocks an SM that registers are limited for; 0: as many as fit without a limit
    key_half: tuple[int, ...] = ()  # GPU backward: rows, columns, threads, stages, hold, resident of dK and dV
    key_launches: int = 1  # dK and dV together or one after the other

    @property
    def panels(self) -> int:
        return self.block_queries // self.panel


def prefers_halves(problem: AttentionProblem, target: Target) -> bool:
    """Whether two halves with more tasks beat one pass with fewer contractions.

    One pass (5 contractions) makes a task of each key head; without atomics nothing may share its dk and dv.
    """
    if isinstance(target, GpuTarget):
        return True
    assert isinstance(target, CpuTarget)
    tasks = problem.batch * problem.kv_heads
    if tasks == 0 or target.cores == 1:
        return False
    if _cpu_serial(problem, target, halves=False) < SERIAL_SECONDS:
        return False
    rounds = -(-tasks // target.cores)
    one_pass = problem.flops() * rounds / tasks
    return problem.flops(halves=True) / target.cores < one_pass


def schedule_attention(problem: AttentionProblem, target: Target) -> AttentionSchedule:
    """The tiles, threads and predicted time of `problem` on `target`."""
    if isinstance(target, CpuTarget):
        return _cpu(problem, target)
    from nova.schedule.attention_gpu import schedule_gpu

    assert isinstance(target, GpuTarget)
    return schedule_gpu(problem, target)


# --- CPU -------------------------------------------------------------------------------------------------------------


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _balanced(total: int, most: int, unit: int) -> int:
    """The block size <= most, a multiple of unit, that cuts `total` into equal blocks."""
    most = max(most // unit, 1) * unit
    blocks = max(-(-total // most), 1)
    return max(round_up(-(-total // blocks), unit), unit)


def register_rows(target: CpuTarget) -> int:
    """Accumulator rows beside two vectors of columns: 6 x 2 fill 16 registers, 12 x 2 fill 32."""
    return 12 if target.registers >= 32 else 6


def _cpu_serial(problem: AttentionProblem, target: CpuTarget, halves: bool) -> float:
    """Seconds on one core: contractions at the FMA rate, then exponentials at two vector operations a clock."""
    compute = "f64" if problem.dtype == "f64" else "f32"
    contractions = problem.flops(halves) / (target.core_peak(compute) * CPU_EFFICIENCY)
    return contractions + problem.pairs / target.lanes(compute) * EXP_OPERATIONS / 2 / target.clock


def _cpu(problem: AttentionProblem, target: CpuTarget) -> AttentionSchedule:
    compute = "f64" if problem.dtype == "f64" else "f32"
    size, lanes = ELEMENT_BYTES[compute], target.lanes(compute)
    panel, unit = 2 * lanes, 2 * register_rows(target)
    tiles = 1 if problem.direction == "forward" else 2  # score tiles: S, or P and dS

    # keys: the panel's score tiles share the first level with its queries and outputs, and with what streams through
    fixed = panel * size * (problem.dim + problem.value_dim)
    room = max(target.l1 * 3 // 4 - fixed, target.l1 // 4)
    block_keys = _balanced(problem.keys, room // (tiles * panel * size), unit)
    working_set = fixed + tiles * panel * size * block_keys

    # queries: enough to pay for packing the key block, no more than lets all cores have a few tasks
    panels = max(-(-problem.queries // panel), 1)
    per_block = max(PACK_SHARE // panel, 1)
    if problem.batch * problem.heads >= 4 * target.cores:
        per_block *= 2
    count = _balanced(panels, per_block, 1)
    block_queries = count * panel

    halves = problem.direction == "backward" and prefers_halves(problem, target)
    serial = _cpu_serial(problem, target, halves)
    tasks = problem.batch * (problem.kv_heads if problem.direction == "backward" and not halves else problem.heads)
    tasks *= 1 if problem.direction == "backward" and not halves else -(-panels // count)
    threads = max(min(target.cores, tasks), 1) if serial > SERIAL_SECONDS else 1
    rounds = -(-tasks // threads) if tasks else 0
    seconds = max(serial * rounds / max(tasks, 1), problem.bytes / target.bandwidth)
    split = "two halves: more tasks" if halves else "one pass: 5 contractions"
    reasons = (
        f"{block_keys} keys: {working_set >> 10} KiB of queries, outputs and scores a panel of {panel} queries, in "
        f"{target.l1 >> 10} KiB L1",
        f"{block_queries} queries share a packed key block",
        f"{tasks} tasks on {threads} threads" + ("" if serial > SERIAL_SECONDS else ": too little work to fork"),
        *([split] if problem.direction == "backward" else []),
    )
    return AttentionSchedule(
        "cpu", block_queries, block_keys, panel, threads, halves, shared_bytes=working_set, seconds=seconds,
        reasons=reasons,
    )  # fmt: skip
