"""Contractions on NVIDIA GPUs: every legal tile is priced, the cheapest wins, and the paper's balance check refines it.

Hard ledgers first: accumulators, operand fragments and addresses within a thread's registers; pipeline stages, the
epilogue's staging and the driver's reserve within a block's shared memory. Then clocks of one block on its SM:

    max(tensor cores, shared memory, L2)  x  waves  +  epilogue and fill,   and never less than main memory allows

L2 is counted by the panels that the blocks of one wave share. A schedule on the memory side of the machine's balance
point spreads the same tile over more warps; it doesn't shrink the tile, which would fetch operands more often.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nova.errors import CompileError
from nova.schedule.contraction import ContractionProblem, ContractionSchedule
from nova.schedule.target import GpuTarget

ADDRESSING = 40  # registers a thread needs beside accumulators and fragments
MMA_SYNC_ON_HOPPER = 0.644  # of wgmma's rate: 637 of 989 TFLOP/s measured in bf16, 319 of 495 in TF32
SUSTAINED = 0.9  # of the tensor rate, in a full pipeline
FILL_CLOCKS = 1500  # prologue of a block: first loads from main memory
STEP_CLOCKS = 200  # a k tile's wait and barrier, which its successor's work does not cover
ROUNDING = 1.18  # TF32 operands are rounded in registers, between tensor-core instructions
L2_SHARED = 1.8  # of the L2's bandwidth: neighbours load the same panels (41 bytes a clock and SM on an H200)
EPILOGUE_BYTES_CLOCK = 40  # a block's share of stores and side loads
EPILOGUE_OPERATIONS_CLOCK = 100  # of 128 lanes
HIDDEN = 0.6  # of a block's prologue and epilogue, where another block's main loop runs beside it
SHAPES = {"f64": (8, 8, 4), "f32": (1, 1, 1), "tf32": (16, 8, 8), "bf16": (16, 8, 16), "f16": (16, 8, 16)}
SIMT_STEP_BYTES = 16  # of k, for which a thread holds its rows and columns in registers
TIE = 1.02  # predictions nearer than this are equal
BYTES = {"f64": 8, "f32": 4, "tf32": 4, "bf16": 2, "f16": 2}


@dataclass(frozen=True)
class Candidate:
    kind: str  # "mma_sync" | "wgmma" | "simt"
    bm: int
    bn: int
    bk: int
    warps: tuple[int, int]  # grid of warps (wgmma: of warpgroups)
    stages: int
    chunks: int = 1
    cluster: tuple[int, int] = (1, 1)

    @property
    def units(self) -> int:
        return self.warps[0] * self.warps[1]

    @property
    def threads(self) -> int:
        """Of a block; a wgmma block has a warpgroup of producers besides."""
        return self.units * 128 + 128 if self.kind == "wgmma" else self.units * 32

    @property
    def subgroup(self) -> tuple[int, int]:
        return self.bm // self.warps[0], self.bn // self.warps[1]


def schedule(p: ContractionProblem, target: GpuTarget) -> ContractionSchedule:
    dtype = _compute_type(p)
    priced = [(_price(p, target, dtype, c), c) for c in _candidates(p, target, dtype)]
    if not priced:
        raise CompileError(
            f"no tile of a {dtype} contraction of {p.m} x {p.n} x {p.k} fits {target.name}: {target.smem_block:,} B of "
            f"shared memory a block and {target.registers_thread} registers a thread"
        )
    least = min(cost.seconds for cost, _ in priced)
    cost, best = max((item for item in priced if item[0].seconds <= TIE * least), key=_rank)
    reasons = [f"bound by {cost.bound}: {cost.text()}"]
    others = [item for item in priced if (item[1].bm, item[1].bn) != (best.bm, best.bn)]
    if others:
        other, c = min(others, key=lambda item: item[0].seconds)
        reasons.append(f"runner-up {c.bm}x{c.bn}x{c.bk}: {other.seconds / cost.seconds - 1:+.1%}")
    best, cost = _balance(p, target, dtype, best, cost, reasons)
    instruction = {"mma_sync": "MMA_SYNC", "wgmma": "WGMMA", "simt": "FMA"}[best.kind]
    m, n, k = SHAPES[dtype] if best.kind != "wgmma" else (64, best.subgroup[1], 32 // BYTES[dtype])
    return ContractionSchedule(
        best.kind,
        workgroup=(best.bm, best.bn),
        reduction=best.bk,
        subgroup=best.subgroup,
        threads=best.threads,
        promoted=(True, True),
        unroll=1,
        split="mn",
        groups=_raster(p, target, best),
        k_chunks=best.chunks,
        warps=best.warps,
        stages=best.stages,
        cluster=best.cluster,
        intrinsic=f"{instruction}_{dtype.upper()}_{m}x{n}x{k}",
        smem_bytes=_shared(best, dtype),
        seconds=cost.seconds,
        reasons=tuple(reasons),
    )


def _rank(item: tuple[Cost, Candidate]) -> tuple[int, ...]:
    """Among equals: the larger tile, eight warps, a deeper pipeline, the squarer tile (fewer bytes), the taller one."""
    _, c = item
    return c.bm * c.bn, -abs(c.units - 8), min(c.stages, 3), c.bk, -(c.bm + c.bn), c.bm


def _compute_type(p: ContractionProblem) -> str:
    """What the arithmetic is done in: operands of two types meet in the accumulator's."""
    if p.dtype not in SHAPES or p.lhs.dtype != p.rhs.dtype:
        return "f64" if p.accumulate == "f64" else "f32"
    return p.dtype


def simt_lanes(wm: int, wn: int) -> tuple[int, int]:
    """Lanes along M and N of a warp's tile: as square as a thread's part can be."""
    return min(((lm, 32 // lm) for lm in (4, 8, 16) if wm % lm == 0 and wn % (32 // lm) == 0 and wm >= lm),
               key=lambda lanes: (abs(wm // lanes[0] - wn // lanes[1]), lanes[0] != 8))  # fmt: skip


# --- what is legal ---------------------------------------------------------------------------------------------------


def _candidates(p: ContractionProblem, target: GpuTarget, dtype: str) -> Iterator[Candidate]:
    size = BYTES[dtype]
    kinds = ["simt"] if dtype in ("f32", "f64") else ["mma_sync"]
    k_major = p.lhs.k_stride == 1 and p.rhs.k_stride == 1
    if target.has_wgmma and "wgmma" in target.supports and (dtype in ("bf16", "f16") or (dtype == "tf32" and k_major)):
        kinds.append("wgmma")  # it reads M- or N-major shared memory only for 16-bit types
    for kind in kinds:
        for bm, bn, grids in _tiles(kind):
            if p.n_tile_limit and bn != p.n_tile_limit:
                continue
            if bn % 3 == 0 and p.n % bn and kind == "mma_sync":
                continue
            if (bm > 64 and bm >= 2 * p.m) or (bn > 64 and bn >= 2 * p.n):
                continue
            for warps in grids:
                for row in (64, 128):
                    for chunks in _chunks(p, bm, bn, target):
                        for cluster in ((1, 1), (2, 1)) if kind == "wgmma" and p.m > bm else ((1, 1),):
                            c = Candidate(kind, bm, bn, row // size, warps, 1, chunks, cluster)
                            stages = _stages(c, dtype, target)
                            if stages >= 2 and _registers(c, dtype) <= target.registers_thread:
                                yield replace(c, stages=stages)
                                if kind == "mma_sync" and stages > 3:
                                    yield replace(c, stages=3)  # two blocks may fit then


@functools.cache
def _tiles(kind: str) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """(bm, bn, grids): for each number of warps the grid whose warp tiles are squarest, so read least."""
    if kind == "wgmma":
        tiles = [(64 * g, bn, [(g, 1)]) for g in (1, 2, 3) for bn in (64, 96, 128, 192, 256)]
        return tiles + [(256, bn, [(2, 1)]) for bn in (64, 96, 128, 192)]
    sides = (16, 32, 64, 128, 256)
    thirds = (96, 192) if kind == "mma_sync" else ()  # widths of models are often multiples of these
    found = []
    for bm in sides:
        for bn in sorted((*sides, *thirds)):
            grids = []
            for units in (2, 4, 8):
                legal = [(gm, units // gm) for gm in (1, 2, 4, 8) if units % gm == 0 and _fits(bm, bn, gm, units // gm)]
                if legal and units * 512 <= bm * bn * (4 if bm * bn <= 1024 else 1):
                    grids.append(min(legal, key=lambda grid: (bm // grid[0] + bn // grid[1], -grid[0])))
            if grids:
                found.append((bm, bn, grids))
    return found


def _fits(bm: int, bn: int, gm: int, gn: int) -> bool:
    wm, wn = bm // gm, bn // gn
    return wm >= 16 and wn >= 16 and wm * wn <= 4096 and bm % gm == 0 and bn % gn == 0


def _chunks(p: ContractionProblem, bm: int, bn: int, target: GpuTarget) -> tuple[int, ...]:
    blocks = p.batch * -(-p.m // bm) * -(-p.n // bn)
    if blocks >= target.sms * 0.8 or p.k < 1024 or p.n_tile_limit or p.k_run:
        return (1,)
    whole = {waves * target.sms // blocks for waves in (1, 2, 3)}  # as many as fill the machine once, twice, ..
    return tuple(s for s in sorted({1, 2, 4, 8, 16} | whole) if 1 <= s <= 16 and (s == 1 or p.k // s >= 512))


def _shared(c: Candidate, dtype: str) -> int:
    return c.stages * (c.bm + c.bn) * c.bk * BYTES[dtype] + 1024  # barriers, and alignment of swizzled tiles


def _stages(c: Candidate, dtype: str, target: GpuTarget) -> int:
    most = 6 if c.kind == "wgmma" else 4 if c.kind == "mma_sync" else 2
    for stages in range(most, 1, -1):
        if _shared(replace(c, stages=stages), dtype) <= target.smem_block:
            return stages
    return 0


def _registers(c: Candidate, dtype: str) -> int:
    m, n = c.subgroup
    width = 2 if dtype == "f64" else 1
    if c.kind == "wgmma":
        return m * n // 128 + ADDRESSING  # operands come from shared memory
    accumulators = m * n // 32 * width
    if c.kind == "simt":
        lanes_m, lanes_n = simt_lanes(m, n)
        fragments = (m // lanes_m + n // lanes_n) * SIMT_STEP_BYTES // 4
        accumulators *= 2  # the sums of a k tile, and of all
    else:
        fragments = 2 * (m + n) * (SHAPES[dtype][2] * BYTES[dtype] // 4) // 32  # of this k step and the next
    return accumulators + fragments + ADDRESSING


# --- what it costs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    seconds: float
    bound: str
    tensor: float  # clocks of a block's main loop
    shared: float
    l2: float
    waves: float
    memory: float  # seconds main memory needs
    traffic: float  # bytes

    def text(self) -> str:
        return (
            f"tensor {self.tensor:.0f}, shared memory {self.shared:.0f}, L2 {self.l2:.0f} clocks a block, "
            f"{self.waves:.2f} waves, main memory {self.memory * 1e6:.1f} us"
        )


def _rate(target: GpuTarget, dtype: str, kind: str) -> float:
    """FLOP a clock and SM."""
    peak = target.peak[dtype] / (ROUNDING if dtype == "tf32" and kind == "mma_sync" else 1.0)
    if kind == "mma_sync" and target.has_wgmma:
        peak *= MMA_SYNC_ON_HOPPER
    return peak * SUSTAINED / target.sms / target.clock


def _resident(c: Candidate, dtype: str, target: GpuTarget) -> int:
    registers = -(-_registers(c, dtype) // 8) * 8 * c.threads
    by_shared = target.smem_sm // (_shared(c, dtype) + target.smem_reserve)
    return max(1, min(by_shared, target.registers_sm // registers, target.threads_sm // c.threads, target.blocks_sm))


def _price(p: ContractionProblem, target: GpuTarget, dtype: str, c: Candidate) -> Cost:
    size, k = BYTES[dtype], -(-p.k // c.chunks)
    k_padded = -(-max(k, 1) // c.bk) * c.bk
    if p.k_run:
        k_padded = p.k // p.k_run * -(-p.k_run // c.bk) * c.bk
    blocks_m, blocks_n = -(-max(p.m, 1) // c.bm), -(-max(p.n, 1) // c.bn)
    blocks = max(p.batch, 1) * blocks_m * blocks_n * c.chunks
    tensor = 2 * c.bm * c.bn * k_padded / _rate(target, dtype, c.kind)
    wm, wn = c.subgroup
    if c.kind == "wgmma":
        reads = c.bm + c.bn * max(c.bm // 64, 1)  # each 64-row instruction reads all of B
    elif c.kind == "simt":  # each lane reads its own rows and columns, and only eight lanes at a time share words
        lanes_m, lanes_n = simt_lanes(wm, wn)
        reads = c.units * 32 * (wm // lanes_m + wn // lanes_n)
    else:
        reads = c.units * (wm + wn)
    shared = (c.bm + c.bn + reads) * k_padded * size / target.smem_bytes_clock
    resident = _resident(c, dtype, target)
    slots = target.sms * resident
    fetched = (c.bm / c.cluster[1] + c.bn / c.cluster[0]) * k_padded * size
    l2 = fetched / (target.l2_bandwidth * L2_SHARED / target.clock / target.sms)
    waves = blocks / slots
    rounds = math.ceil(waves) if waves > 1 else 1
    per_sm = min(resident, max(1, math.ceil(blocks / target.sms)))  # blocks that share an SM share its pipes
    ends = FILL_CLOCKS + c.bm * c.bn * (
        (p.output_bytes + p.epilogue_bytes) / EPILOGUE_BYTES_CLOCK + p.epilogue_operations / EPILOGUE_OPERATIONS_CLOCK
    )
    hidden = HIDDEN if per_sm > 1 or c.kind == "wgmma" else 0.0
    steps = STEP_CLOCKS * k_padded / c.bk if c.kind == "mma_sync" else 0.0
    block = (max(tensor, shared, l2) + steps + ends * (1 - hidden)) * per_sm
    traffic = _traffic(p, target, c, size, slots)
    memory = traffic / target.bandwidth
    compute = rounds * block / target.clock
    merge = (c.chunks > 1) * (p.m * p.n * p.batch * 4.0 * (c.chunks + 1) / target.bandwidth + target.launch_seconds)
    terms = {"tensor cores": tensor, "shared memory": shared, "L2": l2}
    bound = "main memory" if memory > compute else max(terms, key=lambda name: terms[name])
    return Cost(max(compute, memory) + merge + target.launch_seconds, bound, tensor, shared, l2, waves, memory, traffic)


def _traffic(p: ContractionProblem, target: GpuTarget, c: Candidate, size: int, slots: int) -> float:
    """Main-memory bytes: a panel that stays in L2 is read once, else once a pass of the blocks over it."""
    a, b = p.m * p.k * size, p.k * p.n * size
    blocks_m, blocks_n = -(-max(p.m, 1) // c.bm), -(-max(p.n, 1) // c.bn)
    rows = max(1, min(blocks_m, round(math.sqrt(slots * c.bn / c.bm))))  # a wave covers rows x columns blocks
    columns = max(1, min(blocks_n, slots // rows))
    budget = target.l2 * 0.6
    if a + b <= budget or min(a, b) <= budget / 2:  # both stay, or one does and the other streams past it
        passes_a = passes_b = 1
    else:
        passes_a, passes_b = -(-blocks_n // columns), -(-blocks_m // rows)
        passes_a, passes_b = (1, passes_b) if b * passes_b <= a * passes_a else (passes_a, 1)
    stored = p.m * p.n * (p.output_bytes + p.epilogue_bytes)
    return float(max(p.batch, 1) * (a * passes_a + b * passes_b + stored))


def _raster(p: ContractionProblem, target: GpuTarget, c: Candidate) -> int:
    """Blocks of M that are walked before N advances: a wave as square as its tiles allow."""
    blocks_m = -(-max(p.m, 1) // c.bm)
    return max(1, min(blocks_m, round(math.sqrt(target.sms * c.bn / c.bm))))


def _balance(
    p: ContractionProblem, target: GpuTarget, dtype: str, c: Candidate, cost: Cost, reasons: list[str]
) -> tuple[Candidate, Cost]:
    """Below the balance point: the same tile over more warps, for more loads in flight."""
    intensity = p.flops / max(cost.traffic, 1.0)
    balance = target.balance(dtype)
    if intensity >= balance or cost.bound != "main memory":
        side = "above" if intensity >= balance else "not held back by main memory at"
        reasons.append(f"{intensity:.0f} FLOP/byte, {side} the balance point of {balance:.0f}")
        return c, cost
    if c.kind != "wgmma":
        more = [
            replace(c, warps=grid)
            for bm, bn, grids in _tiles(c.kind)
            if (bm, bn) == (c.bm, c.bn)
            for grid in grids
            if grid[0] * grid[1] > c.units
        ]
        legal = [w for w in more if _registers(w, dtype) <= target.registers_thread]
        if legal:
            wider = min(legal, key=lambda w: (abs(w.units - 8), _price(p, target, dtype, w).seconds))
            reasons.append(
                f"{intensity:.0f} FLOP/byte, below the balance point of {balance:.0f}: the tile is spread over "
                f"{wider.units} warps instead of {c.units}"
            )
            return wider, _price(p, target, dtype, wider)
    reasons.append(f"{intensity:.0f} FLOP/byte, below the balance point of {balance:.0f}: bound by main memory")
    return c, cost
