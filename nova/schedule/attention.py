"""Tiles of attention, derived from the shape and the target's limits: a pure function, no search on hardware.

The tiles of attention are coupled - scores, row statistics and the output accumulator live together - so what binds is
a ledger, not the arithmetic intensity of either contraction. On a CPU it is the first-level cache, which must hold one
panel's queries, outputs and scores; on a GPU it is registers a thread and shared memory a block.

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
TENSOR_EFFICIENCY = 0.7  # of the tensor-core peak, in the inner loop
EXP_PER_CLOCK = 16  # special-function results a clock, one SM


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
    assert isinstance(target, GpuTarget)
    return _gpu(problem, target)


# --- CPU -------------------------------------------------------------------------------------------------------------


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _balanced(total: int, most: int, unit: int) -> int:
    """The block size <= most, a multiple of unit, that cuts `total` into equal blocks."""
    most = max(most // unit, 1) * unit
    blocks = max(-(-total // most), 1)
    return max(_round_up(-(-total // blocks), unit), unit)


def register_rows(target: CpuTarget) -> int:
    """Accumulator rows beside two vectors of columns: 6 x 2 fill 16 registers, 12 x 2 fill 32."""
    return 12 if target.registers >= 32 else 6


def _cpu_serial(problem: AttentionProblem, target: CpuTarget, halves: bool) -> float:
    """Seconds on one core: contractions at the FMA rate, then exponentials at two vector operations a clock."""
    compute = "f64" if problem.dtype == "f64" else "f32"
    clock = target.core_peak(compute) / (4 * target.lanes(compute))
    contractions = problem.flops(halves) / (target.core_peak(compute) * CPU_EFFICIENCY)
    return contractions + problem.pairs / target.lanes(compute) * EXP_OPERATIONS / 2 / clock


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


# --- GPU -------------------------------------------------------------------------------------------------------------

GPU_BLOCKS = ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (64, 32), (32, 32), (16, 16))
THREAD_OVERHEAD = 48  # registers for addresses, statistics, masks and operand fragments in flight


def _gpu_ledger(
    problem: AttentionProblem, block_queries: int, block_keys: int, warps: int, stages: int
) -> tuple[int, int]:
    """(registers a thread, shared bytes a block). Backward: the larger of its halves, dk and dv with S and dP."""
    size = ELEMENT_BYTES[problem.dtype]
    dim, value_dim = _round_up(problem.dim, 16), _round_up(problem.value_dim, 16)
    threads = 32 * warps
    scores = block_queries * block_keys
    if problem.direction == "forward":
        # O and S accumulate in f32; P is S rounded to the operand type, held until PV has read it
        registers = (block_queries * value_dim + scores + scores * size // 4) // threads
        shared = (block_queries * dim + stages * block_keys * (dim + value_dim)) * size
    else:
        registers = (block_keys * (dim + value_dim) + 2 * scores + scores * size // 4) // threads
        shared = (block_keys * (dim + value_dim) + stages * block_queries * (dim + value_dim)) * size
        shared += scores * size  # dS passes through shared memory to change its layout
    return registers + THREAD_OVERHEAD, shared


def _gpu(problem: AttentionProblem, target: GpuTarget) -> AttentionSchedule:
    best: AttentionSchedule | None = None
    for block_queries, block_keys in GPU_BLOCKS:
        for warps in (4, 8) if block_queries >= 128 else (4,) if block_queries >= 64 else (1,):
            for stages in (2, 1):
                plan = _gpu_plan(problem, target, block_queries, block_keys, warps, stages)
                if plan and (best is None or plan.seconds < best.seconds):
                    best = plan
    if best is None:
        raise ValueError(
            f"attention with head dims {problem.dim} and {problem.value_dim} does not fit {target.name}: "
            f"{target.smem_block} bytes of shared memory a block"
        )
    return best


def _gpu_plan(
    problem: AttentionProblem, target: GpuTarget, block_queries: int, block_keys: int, warps: int, stages: int
) -> AttentionSchedule | None:
    registers, shared = _gpu_ledger(problem, block_queries, block_keys, warps, stages)
    threads = 32 * warps
    if registers > target.registers_thread or shared > target.smem_block:
        return None
    resident = min(
        target.smem_sm // (shared + target.smem_reserve),
        target.registers_sm // (_round_up(registers, 8) * threads),
        target.threads_sm // threads,
        target.blocks_sm,
    )
    if resident < 1:
        return None
    halves = problem.direction == "backward"
    rows = problem.queries if problem.direction == "forward" else problem.keys
    rows_block = block_queries if problem.direction == "forward" else block_keys
    blocks = problem.batch * problem.heads * max(-(-rows // rows_block), 1)
    # whole tiles are computed: ragged edges and half-masked diagonal tiles count in full
    waste = _round_up(max(problem.queries, 1), block_queries) * _round_up(max(problem.keys, 1), block_keys)
    waste_factor = waste / max(problem.queries * problem.keys, 1)
    rate = target.peak.get("tf32" if problem.dtype == "f32" else problem.dtype, target.peak["f32"])
    tensor = problem.flops(halves) * waste_factor / (rate * TENSOR_EFFICIENCY)
    exponentials = problem.pairs * waste_factor * (2 if halves else 1) / (EXP_PER_CLOCK * target.sms * target.clock)
    # one resident block cannot overlap its softmax with another's contractions
    overlap = max(tensor, exponentials) if resident > 1 else tensor + exponentials
    slots = resident * target.sms
    waves = -(-blocks // slots) * slots / max(blocks, 1)
    wait = 1.0 if stages > 1 or resident > 2 else 1.3  # nothing hides the copy of the next key block
    seconds = max(overlap * waves * wait, problem.bytes / target.bandwidth) + target.launch_seconds
    reasons = (
        f"{registers} registers a thread, {shared} bytes of shared memory: {resident} blocks an SM",
        f"{blocks} blocks on {slots} slots: {waves:.2f} of the time an even spread would take",
        f"tensor cores {tensor * 1e6:.1f} us, exponentials {exponentials * 1e6:.1f} us, "
        + ("overlapped" if resident > 1 else "one after the other"),
    )
    return AttentionSchedule(
        "mma_sync", block_queries, block_keys, block_queries // warps, threads, halves, stages, registers, shared,
        seconds, reasons,
    )  # fmt: skip
