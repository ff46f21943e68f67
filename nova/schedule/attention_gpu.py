"""Tiles of attention on a GPU: each candidate's registers, shared memory and clocks, and the fastest of those that fit.

    forward   a block owns queries, walks keys       query half   the same          key half   owns keys, walks queries

A step is a block's work on one block of what it walks. What it takes of each unit of an SM - tensor cores, shared
memory, exponentials, arithmetic, the second-level cache - is arithmetic on the shape; how far those overlap depends on
how many blocks an SM has, which registers and shared memory decide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nova.errors import CompileError
from nova.schedule.attention import AttentionProblem, AttentionSchedule, round_up
from nova.schedule.target import ELEMENT_BYTES, GpuTarget

EXP_PER_CLOCK = 16  # special-function results a clock, one SM
CHUNK = 16  # rows and columns that tensor cores take at once; head dims are padded to whole chunks
STEP_CLOCKS = 60  # of a block's step: its barrier, and reductions of rows
COPY_SHARE = 0.5  # of a copy's time that other units' work does not hide
# A step takes this share of the sum of what it takes of each unit. Blocks of one SM are at different places of their
# steps and so overlap; warps of a block meet at barriers. Set from measurements with 1 to 4 blocks, for 14 tiles.
OVERLAP_FLOOR, OVERLAP_ALONE, ENOUGH_WARPS = 0.5, 0.27, 8
THREAD_OVERHEAD = {"forward": 40, "query": 20, "key": 20}  # registers for addresses, masks and statistics
DOUBLE_OVERHEAD = 120  # f64: all of these, and operands
SPLIT_OVERHEAD = 24  # and for the halves of operands
SPILL_PENALTY = 4.0  # for what does not fit at all, times the excess
MMA_SYNC_SHARE = 0.64  # of the tensor peak, on boards whose peak takes warpgroup instructions
ROUNDINGS_PER_CLOCK = 32  # of float32 to TF32, one SM: two operations at half rate
VECTOR_OPERATIONS = 8  # a score, beside its exponential
LANES_PER_CLOCK = 128  # one SM
Program = Literal["forward", "query", "key"]


def operand_width(dtype: str) -> int:
    """Columns of the right operand that are in registers at a time."""
    return {2: 64, 4: 32, 8: 8}[ELEMENT_BYTES[dtype]]


@dataclass(frozen=True)
class Tile:
    """One candidate for one program: a block owns `rows`, walks `columns`; its warps split the rows."""

    program: Program
    rows: int
    columns: int
    warps: int
    stages: int
    hold: bool  # the rows' operands stay in registers
    launches: int = 1  # key half: dV and dK together or one after the other

    @property
    def warp_rows(self) -> int:
        return self.rows // self.warps


@dataclass(frozen=True)
class Plan:
    """A candidate with what it needs and takes."""

    tile: Tile
    registers: int
    shared: int
    resident: int
    limit: int  # blocks an SM that registers are limited for
    seconds: float
    reasons: tuple[str, ...]


def _dims(problem: AttentionProblem) -> tuple[int, int]:
    return round_up(max(problem.dim, 1), CHUNK), round_up(max(problem.value_dim, 1), CHUNK)


def _splits(problem: AttentionProblem) -> int:
    """Operands a contraction has in place of one: f32 that may not be rounded is the sum of two TF32 numbers."""
    return 2 if problem.dtype == "f32" and not problem.tf32 else 1


def _registers(problem: AttentionProblem, tile: Tile) -> int:
    """32-bit registers a thread: accumulators, operands that stay, operands in flight."""
    dim, value_dim = _dims(problem)
    words = ELEMENT_BYTES[problem.dtype] / 4 * _splits(problem)  # a value as an operand
    accumulators = {"forward": value_dim, "query": dim, "key": dim + value_dim}[tile.program]
    if tile.launches > 1:
        accumulators = max(dim, value_dim)
    # forward: a block's scores and their sum; backward: scores and gradients of a chunk, and of the next one
    scores = tile.columns + CHUNK if tile.program == "forward" else 4 * CHUNK
    own = 0.0
    if tile.hold:
        own = (dim if tile.program == "forward" else dim + value_dim) * words
    if problem.dtype == "f64":  # two registers a value, and all of k of a thread's rows and columns
        return int(tile.warp_rows * (accumulators + scores) / 16) + DOUBLE_OVERHEAD
    per_row = accumulators + scores + own + CHUNK * words
    width = operand_width(problem.dtype) * (2 if tile.program == "key" else 1)  # of dK's and of dV's right operand
    flight = CHUNK * min(width, max(dim, value_dim)) * words / 32
    # chunks of a block of columns are unrolled, and the compiler starts the loads of the next ones early
    split = SPLIT_OVERHEAD if _splits(problem) > 1 else 0
    ahead = tile.columns // 4 if tile.program == "forward" else tile.columns
    addresses = 4 * max(accumulators // 64 - 2, 0)  # of wide rows' parts in shared memory
    fixed = THREAD_OVERHEAD[tile.program] + ahead + split + addresses
    return int(tile.warp_rows * per_row / 32 + flight) + fixed


def _shared(problem: AttentionProblem, tile: Tile) -> int:
    """Bytes a block: its own rows, the columns in flight, and the key half's statistics of queries."""
    dim, value_dim = _dims(problem)
    size = ELEMENT_BYTES[problem.dtype]
    own = dim if tile.program == "forward" else dim + value_dim
    walked = tile.columns * (dim + value_dim) * size
    if tile.program == "key":
        walked += 3 * tile.columns * 4
    return tile.rows * own * size + tile.stages * walked


def _steps(problem: AttentionProblem, tile: Tile) -> int:
    """Blocks of columns that all blocks of one head visit: half-masked ones count in full."""
    rows, columns = (problem.queries, problem.keys)[:: -1 if tile.program == "key" else 1]
    blocks, across = max(-(-rows // tile.rows), 1), max(-(-columns // tile.columns), 1)
    if not problem.causal:
        return blocks * across
    if tile.program == "key":
        return sum(max(across - i * tile.rows // tile.columns, 0) for i in range(blocks))
    return sum(min(-(-(i + 1) * tile.rows // tile.columns), across) for i in range(blocks))


def _clocks(problem: AttentionProblem, target: GpuTarget, tile: Tile) -> dict[str, float]:
    """What one step takes of each unit of an SM."""
    dim, value_dim = _dims(problem)
    size, splits = ELEMENT_BYTES[problem.dtype], _splits(problem)
    pairs = tile.rows * tile.columns
    walked = tile.columns * (dim + value_dim)  # elements; each is a right operand once forward, twice in the key half
    contractions, reads = {
        "forward": (dim + value_dim, walked), "query": (2 * dim + value_dim, walked + tile.columns * dim),
        "key": (2 * (dim + value_dim), 2 * walked),
    }[tile.program]  # fmt: skip
    if tile.launches > 1:
        contractions += dim
    reads *= tile.warps
    if not tile.hold:
        again = 1 if tile.program == "forward" else tile.columns // CHUNK
        reads += tile.rows * (dim if tile.program == "forward" else dim + value_dim) * again
    key = "tf32" if problem.dtype == "f32" else problem.dtype
    peak = target.peak.get(key, target.peak["f32"]) * (MMA_SYNC_SHARE if target.has_wgmma else 1.0)
    tensor = 2.0 * pairs * contractions * (3 if splits == 2 else 1) / (peak / target.sms / target.clock)
    roundings = reads * splits / ROUNDINGS_PER_CLOCK if problem.dtype == "f32" else 0.0
    l2 = target.l2_bandwidth or 3 * target.bandwidth
    arithmetic = pairs * VECTOR_OPERATIONS + (tile.rows * value_dim if tile.program == "forward" else 0)
    return {
        "tensor cores": tensor,
        "shared memory": (reads + walked) * size / target.smem_bytes_clock,
        "exponentials": pairs / EXP_PER_CLOCK,
        "arithmetic": arithmetic / LANES_PER_CLOCK + roundings,
        "second-level cache": COPY_SHARE * walked * size * target.sms * target.clock / l2,
    }


def plan_of(problem: AttentionProblem, target: GpuTarget, tile: Tile) -> Plan | None:
    registers, shared = _registers(problem, tile), _shared(problem, tile)
    threads = 32 * tile.warps
    if shared > target.smem_block:
        return None
    excess = registers / target.registers_thread  # over 1, some values wait in local memory
    registers = min(registers, target.registers_thread)
    # 16-bit key half: what it loads ahead fits a tighter limit, which makes room for one more block
    tight = tile.program == "key" and tile.hold and ELEMENT_BYTES[problem.dtype] == 2 and excess <= 1
    limit = registers - tile.columns if tight else registers
    resident = min(
        target.smem_sm // (shared + target.smem_reserve),
        target.registers_sm // (round_up(limit, 8) * threads),
        target.threads_sm // threads,
        target.blocks_sm,
    )
    if resident < 1:
        return None
    rows, heads = problem.queries, problem.heads
    if tile.program == "key":
        rows, heads = problem.keys, problem.kv_heads
    heads = max(problem.batch * heads, 1)
    group = max(problem.heads // problem.kv_heads, 1) if tile.program == "key" else 1
    blocks = heads * max(-(-rows // tile.rows), 1)
    clocks = _clocks(problem, target, tile)
    together = min(resident, -(-blocks // target.sms))
    overlap = OVERLAP_FLOOR + OVERLAP_ALONE / together + max(1 - together * tile.warps / ENOUGH_WARPS, 0.0)
    step = max(*clocks.values(), (sum(clocks.values()) + STEP_CLOCKS) * min(overlap, 1.0))
    wait = 1.0 if tile.stages > 1 or resident > 2 else 1.3  # nothing hides the copy of the next block
    spread = -(-blocks // target.sms) * target.sms / blocks  # the busiest SM's share, of an even one
    total = heads * group * _steps(problem, tile) * step / target.sms / target.clock
    seconds = max(total * wait * min(spread, 4.0), problem.bytes / target.bandwidth)
    seconds *= SPILL_PENALTY * excess**8 if excess > 1 else 1.0
    unit = max(clocks, key=lambda name: clocks[name])
    reasons = (
        f"{tile.program}: {tile.rows} x {tile.columns}, {tile.warps} warps, {tile.stages} stages: {registers} "
        f"registers a thread, {shared} bytes of shared memory: {resident} blocks an SM",
        f"{tile.program}: {blocks} blocks on {target.sms} SMs, {step:.0f} clocks a step, bound by {unit} "
        f"({clocks[unit]:.0f})" + ("; the rows' operands stay in registers" if tile.hold else ""),
    )
    return Plan(tile, registers, shared, resident, resident if tight else 0, seconds * tile.launches**0.25, reasons)


def candidates(program: Program, problem: AttentionProblem) -> Iterator[Tile]:
    long = _splits(problem) > 1 or problem.dtype == "f64"  # a chunk's contractions are many instructions as it is
    for warps in (4, 8, 2, 1):
        for warp_rows in (16, 32) if program == "forward" else (16,):  # 32 would hold two operands and their products
            for columns in (16,) if long else (64, 32, 16):
                for stages in (2, 1):
                    for hold in (False,) if problem.dtype == "f64" else (True, False):
                        for launches in (1, 2) if program == "key" else (1,):
                            yield Tile(program, warps * warp_rows, columns, warps, stages, hold, launches)


def best_of(problem: AttentionProblem, target: GpuTarget, program: Program) -> Plan:
    plans = (plan_of(problem, target, tile) for tile in candidates(program, problem))
    best = min((plan for plan in plans if plan), key=lambda plan: plan.seconds, default=None)
    if best is None:
        least = min(_shared(problem, tile) for tile in candidates(program, problem))
        raise CompileError(
            f"attention with head dims {problem.dim} and {problem.value_dim} in {problem.dtype} does not fit "
            f"{target.name}: it needs {least:,} B of shared memory a block, and there are {target.smem_block:,} B"
        )
    return best


def schedule_gpu(problem: AttentionProblem, target: GpuTarget) -> AttentionSchedule:
    """The fastest tiles by what a step takes of tensor cores, shared memory and exponentials."""
    backward = problem.direction == "backward"
    rows = best_of(problem, target, "query" if backward else "forward")
    plans = [rows]
    if backward:
        plans.append(best_of(problem, target, "key"))
    key = plans[1] if backward else None
    half = () if key is None else (
        key.tile.rows, key.tile.columns, 32 * key.tile.warps, key.tile.stages, int(key.tile.hold), key.limit,
    )  # fmt: skip
    tile = rows.tile
    return AttentionSchedule(
        "mma_sync", tile.rows, tile.columns, tile.warp_rows, 32 * tile.warps, backward, tile.stages,
        max(plan.registers for plan in plans), max(plan.shared for plan in plans),
        sum(plan.seconds for plan in plans) + len(plans) * target.launch_seconds,
        tuple(reason for plan in plans for reason in plan.reasons), tile.hold, rows.limit, half,
        1 if key is None else key.tile.launches,
    )  # fmt: skip
