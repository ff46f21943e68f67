"""Contractions on a CPU: the register tile from the register file, the blocks from the caches, threads from the time.

- Register tile: accumulators, one row of B vectors and a broadcast must fit the register file. Among those that do, the
  one with the least time wins: multiply-adds and loads of a k step, times the padding of M and N to whole tiles.
- KC: half of L1 holds a B panel; a tile that multiplies slower than L2 delivers streams its panels from there instead,
  and then KC is as deep as hides the adding of blocks. MC: the A block lies in L2 and meets no more rows of the output
  than a first TLB holds pages. NC: the B block lies in half of a core's L3.
- Packing pays when a panel is read many times or its strides defeat the caches; small problems read in place.
- Where the operands don't all stay in L2, the k loop asks for what comes next; for A's next block too if L2 holds both.
- Threads split the dimension whose split copies less: threads that split M each pack B, and the other way round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nova.schedule.contraction import ContractionProblem, ContractionSchedule, Operand
from nova.schedule.target import ELEMENT_BYTES, CpuTarget

LATENCY = 4.5  # clocks of a fused multiply-add: a tile needs that many independent ones in flight
LOAD = 0.65  # clocks a vector load or broadcast takes of the tile's step when loads bind
SKINNY = 8  # rows up to which packing B cannot pay
STREAM = 12.0  # bytes a clock that a tile may take from L2 for nothing: under half of what x86 cores move
DEEP = 1024  # k steps after which adding a tile to its earlier sums is under a percent of its arithmetic
CHAIN = 256  # k steps after which a sum is put with those before: rounds as much as BLAS libraries do
PACKING = 1.3  # clocks of packing an element
ACROSS_LINES, EVICTED, CROWDED = 0.25, 0.05, 0.025  # clocks an element of B in place takes longer, each time
LINE, WAYS, L1_WAY = 64, 8, 4096  # bytes of a cache line, lines of a set, bytes of the first cache's ways
ROWS = 96  # of A's block: each meets a page of its own in the output, and a core's first TLB holds about as many
EFFICIENCY = 0.93  # of the multiply-add rate that a well-fed tile reaches
FORK_WORTH = 20e-6  # seconds of serial work below which a fork-join doesn't pay: an idle pool wakes in 17 us
B_BLOCK = 4 << 20  # bytes of B packed at once: more buys nothing and costs memory, a block a thread
TIE = 1.03  # times nearer than this are equal
SMALL = 50e-6  # seconds of arithmetic below which edge tiles cost more than a narrower tile
K_CHUNK = 1024  # least k worth a task of its own


@dataclass(frozen=True)
class RegisterTile:
    rows: int
    vectors: int

    def registers(self) -> int:
        """Accumulators, a row of B, a broadcast, and one to spare: LLVM loads ahead, and without it spills."""
        return self.rows * self.vectors + self.vectors + 2

    def step(self, fma: float) -> float:
        """Clocks of one k step; `fma` is clocks a vector multiply-add."""
        work = self.rows * self.vectors
        return max(work * fma, (self.rows + self.vectors * max(fma * 2, 1.0)) * LOAD, LATENCY)

    def turns_whole(self, fma: float, lanes: int, size: int) -> int:
        """2 if packing transposes its rows in whole vectors, 1 if in whole 128-bit lanes; 0 if latency shows then."""
        if self.rows * self.vectors * fma < 2 * LATENCY:
            return 0
        return 2 if self.rows % lanes == 0 else int(self.rows % max(16 // size, 1) == 0)


def _up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _clocks(p: ContractionProblem, target: CpuTarget) -> float:
    """Clocks of one vector multiply-add."""
    return 2 * target.lanes(p.accumulate) * target.clock / target.core_peak(p.accumulate)


def schedule(p: ContractionProblem, target: CpuTarget) -> ContractionSchedule:
    lanes = target.lanes(p.accumulate)
    reasons: list[str] = []
    if _wants_dot(p):
        return _dot(p, target, lanes)
    tile = register_tile(p, target, reasons)
    nr = tile.vectors * lanes
    kc, mc, nc = _blocks(p, target, tile, nr, reasons)
    pack_lhs = _pack_lhs(p, target, tile, nr, kc, reasons)
    pack_rhs = _pack_rhs(p, target, tile, kc, reasons)
    if not pack_rhs and not p.n_tile_limit:  # nothing to keep resident: one block
        kc, nc = kc if pack_lhs else max(p.k, 1), max(_up(p.n, nr), nr)
    elif not pack_lhs and not p.n_tile_limit:  # nothing to pack again: a strip is used up while it is near
        nc = nr
    serial = seconds(p, target, tile, pack_lhs, pack_rhs, threads=1)
    threads = _threads(serial, target, reasons)
    chunks = _k_chunks(p, tile, nr, threads, reasons)
    depth = kc if chunks == 1 else min(kc, _up(-(-p.k // chunks), 4))
    split, groups = _split(p, tile, nr, threads)
    extent, grain = (p.m, tile.rows) if split == "m" else (p.n, p.n_tile_limit or nr)
    unit = _unit(extent, grain, threads, p.batch * groups)
    parallel_tasks = p.batch * groups * -(-max(extent, 1) // unit) * chunks
    threads = min(threads, max(parallel_tasks, 1))
    return ContractionSchedule(
        "tiled",
        workgroup=(mc, nc),
        reduction=depth,
        chain=_chain(depth),
        subgroup=(tile.rows, nr),
        threads=threads,
        promoted=(pack_lhs, pack_rhs),
        split=split,
        unit=unit,
        groups=groups,
        prefetch=_prefetch(p, target, tile, pack_rhs),
        ahead=p.bytes > target.l2 // 2,
        lhs_ahead=pack_lhs and 2 * (mc + nr) * depth * ELEMENT_BYTES[p.accumulate] <= target.l2 * 3 // 4,
        k_chunks=chunks,
        intrinsic=f"fma.v{lanes}{p.accumulate}",
        seconds=seconds(p, target, tile, pack_lhs, pack_rhs, threads),
        reasons=tuple(reasons),
    )


def register_tile(p: ContractionProblem, target: CpuTarget, reasons: list[str]) -> RegisterTile:
    lanes = target.lanes(p.accumulate)
    fma, size = _clocks(p, target), ELEMENT_BYTES[p.accumulate]
    candidates = [
        tile
        for rows in range(1, target.registers)
        for vectors in range(1, target.registers)
        if (tile := RegisterTile(rows, vectors)).registers() <= target.registers
        and rows * vectors <= 28
        and (vectors * lanes * size >= LINE or p.n <= lanes)  # else a strip is half a cache line
        and p.n_tile_limit % (vectors * lanes) == 0
    ]

    def time(tile: RegisterTile) -> float:
        m, n = _up(max(p.m, 1), tile.rows), _up(max(p.n, 1), tile.vectors * lanes)
        return m * n / (tile.rows * tile.vectors) * tile.step(fma)

    least = min(time(tile) for tile in candidates)
    small = p.flops / target.core_peak(p.accumulate) < SMALL

    def rank(tile: RegisterTile) -> tuple[bool, int, int, int, int]:
        """As good as equal: no edge code in a small kernel, and cheap packing where latency is hidden anyway: narrow
        then, for panels stream better. Else more accumulators in flight."""
        exact = p.m % tile.rows == 0 and p.n % (tile.vectors * lanes) == 0
        whole = tile.turns_whole(fma, lanes, size)
        return small and exact, whole, whole * -tile.vectors, tile.rows * tile.vectors, -tile.vectors

    best = max((tile for tile in candidates if time(tile) <= TIE * least), key=rank)
    padded = _up(max(p.m, 1), best.rows) * _up(max(p.n, 1), best.vectors * lanes)
    waste = padded / max(p.m * p.n, 1) - 1
    reasons.append(
        f"register tile {best.rows}x{best.vectors * lanes}: {best.registers()} of {target.registers} registers"
        + (f", {waste:.0%} of the tiles is padding" if waste > 0.01 else "")
    )
    return best


def _blocks(
    p: ContractionProblem, target: CpuTarget, tile: RegisterTile, nr: int, reasons: list[str]
) -> tuple[int, int, int]:
    size = ELEMENT_BYTES[p.accumulate]
    streams = _streams(p, target, tile)
    ideal = DEEP if streams else max(target.l1 // 2 // (nr * size), 32)
    slack = 0 if streams else ideal // 2  # half as much again is better than a short last block
    blocks = max(1, -(-p.k // (ideal + slack)))
    if p.n_tile_limit:
        blocks = 1  # reductions over an N tile need whole sums
    kc = min(_up(-(-p.k // blocks), 4), max(p.k, 1)) if blocks > 1 else max(p.k, 1)
    most = target.l2 * 3 // 8 if streams else target.l2 * 2 // 5
    mc = max(tile.rows, min(most // (kc * size), ROWS) // tile.rows * tile.rows)
    nc = max(nr, min(target.l3 // (2 * target.cores), B_BLOCK) // (kc * size) // nr * nr)
    if p.n_tile_limit:  # the tile's sums stay in L2 beside the A block
        nc = p.n_tile_limit
        mc = max(tile.rows, min(mc, target.l2 * 3 // 5 // ((kc + nc) * size)) // tile.rows * tile.rows)
    holder = f"streams from {target.l2 >> 10} KiB L2" if streams else f"of {target.l1 >> 10} KiB L1"
    reasons.append(f"KC {kc}: a B panel of {kc * nr * size >> 10} KiB {holder}")
    reasons.append(f"MC {mc}: an A block is {mc * kc * size >> 10} KiB of {target.l2 >> 10} KiB L2")
    mc = min(mc, _up(max(p.m, 1), tile.rows))
    return kc, mc, nc if p.n_tile_limit else min(nc, _up(max(p.n, 1), nr))


def _streams(p: ContractionProblem, target: CpuTarget, tile: RegisterTile) -> bool:
    """Whether the tile multiplies so slowly that both its panels can come from L2."""
    width = tile.rows + tile.vectors * target.lanes(p.accumulate)
    return width * ELEMENT_BYTES[p.accumulate] <= STREAM * tile.step(_clocks(p, target))


def _pack_lhs(
    p: ContractionProblem, target: CpuTarget, tile: RegisterTile, nr: int, kc: int, reasons: list[str]
) -> bool:
    a = p.lhs
    columns = -(-p.n // nr)
    if a.across_stride is None or a.k_stride is None or (a.dtype != p.accumulate and columns > 1):
        reasons.append("A is packed: it is a window, or of another type")
        return True
    footprint = p.m * kc * a.bytes
    if columns <= 2:
        reasons.append("A is read in place: each element is used by at most two tiles")
        return False
    apart = a.across_stride if a.k_stride == 1 else a.k_stride
    if p.m * p.k * a.bytes <= target.l2 // 4 and not _aliases(apart, a, tile.rows):
        reasons.append(f"A is read in place: {footprint >> 10} KiB stay in L2")
        return False
    return True


def _pack_rhs(p: ContractionProblem, target: CpuTarget, tile: RegisterTile, kc: int, reasons: list[str]) -> bool:
    b = p.rhs
    passes = -(-p.m // tile.rows)
    if b.across_stride != 1 or b.k_stride is None or (b.dtype != p.accumulate and passes > 1):
        reasons.append("B is packed: its rows are not contiguous, or of another type")
        return True
    if passes == 1:
        reasons.append("B is read in place: each element is used by one tile")
        return False
    apart = b.k_stride * b.bytes
    if kc > WAYS * _sets(b.k_stride, b, target.l2 // WAYS):
        penalty, why = EVICTED, f"rows {apart} bytes apart share cache sets"
    elif kc > WAYS and _sets(b.k_stride, b, L1_WAY) == 1 and not _streams(p, target, tile):
        penalty, why = CROWDED, f"rows {apart} bytes apart share one set of L1"
    elif apart % LINE and p.k * p.n * b.bytes > target.l2 // 2:
        penalty, why = ACROSS_LINES, f"rows {apart} bytes apart cut across cache lines"
    else:
        penalty, why = 0.0, "its rows stay in cache"
    packed = passes * penalty > PACKING
    reasons.append(f"B is {'packed' if packed else 'read in place'} for {passes} tiles: {why}")
    return packed


def _sets(stride: int, operand: Operand, way: int) -> int:
    """Cache sets that lines a stride apart fall into, of a cache of `way` bytes a way; pages lie anywhere."""
    apart = stride * operand.bytes
    return max(way // max(math.gcd(apart, 4096), LINE), 1)


def _aliases(stride: int, operand: Operand, rows: int) -> bool:
    """Whether `rows` lines a stride apart fall into so few sets of the first cache that they evict each other."""
    return rows > WAYS * _sets(stride, operand, L1_WAY)


def _prefetch(p: ContractionProblem, target: CpuTarget, tile: RegisterTile, pack_rhs: bool) -> int:
    """k steps by which to ask for B in place: its rows outrun the hardware, but may evict what was asked before."""
    if pack_rhs or p.rhs.k_stride is None or p.k * p.n * p.rhs.bytes <= target.l1:
        return 0
    sets = _sets(p.rhs.k_stride, p.rhs, L1_WAY)
    return 0 if sets == 1 and p.m > 2 * tile.rows else min(2 * sets, 8)


def _threads(serial: float, target: CpuTarget, reasons: list[str]) -> int:
    if serial < FORK_WORTH:
        reasons.append(f"one thread: {serial * 1e6:.1f} us are less than a fork is worth")
        return 1
    return target.cores


def _k_chunks(p: ContractionProblem, tile: RegisterTile, nr: int, threads: int, reasons: list[str]) -> int:
    """Pieces of K when there are too few tiles for the threads."""
    tiles = p.batch * max(-(-p.m // tile.rows), -(-p.n // nr))
    if threads == 1 or tiles >= 2 * threads or p.n_tile_limit:
        return 1
    chunks = min(p.k // K_CHUNK, 2 * threads)
    if chunks > 1:
        reasons.append(f"K in {chunks} pieces: {tiles} tiles are too few for {threads} threads")
    return max(chunks, 1)


def _chain(depth: int) -> int:
    """k steps of one sum: equal parts of the depth, a multiple of four each, CHAIN to half as much again."""
    parts = max(depth // CHAIN, -(-depth // (CHAIN * 3 // 2)), 1)
    return max(_up(-(-depth // parts), 4), 4)


def _split(p: ContractionProblem, tile: RegisterTile, nr: int, threads: int) -> tuple[str, int]:
    """(dimension dealt to threads, ranges of the other one): the grid that packs least, twice over."""
    m_tiles, n_tiles = -(-max(p.m, 1) // tile.rows), -(-max(p.n, 1) // nr)
    if p.batch >= threads or threads == 1:
        return "m", 1

    def cost(grid: tuple[int, int]) -> float:
        across_m, across_n = grid
        copies = across_m * p.k * p.n + across_n * p.m * p.k
        idle = _imbalance(m_tiles, across_m) * _imbalance(n_tiles, across_n)
        return (copies + p.m * p.n * p.k / 32) * idle

    grids = [(threads // tn, tn) for tn in range(1, threads + 1) if threads % tn == 0]
    if p.n_tile_limit:  # whole tiles only, so no groups
        return ("m", 1) if p.m * 4 >= p.n or m_tiles >= 8 * threads else ("n", 1)
    across_m, across_n = min(grids, key=cost)
    return ("n", 1) if across_m == 1 and across_n > 1 else ("m", across_n)


def _imbalance(tiles: int, parts: int) -> float:
    return -(-tiles // parts) * parts / tiles


def _unit(extent: int, grain: int, threads: int, planes: int) -> int:
    """Rows of a task: whole tiles, about sixteen tasks a thread, all of a plane where planes are many."""
    extent = max(extent, 1)
    if threads == 1 or planes >= 4 * threads:
        return _up(extent, grain)
    return _up(-(-extent * max(planes, 1) // (16 * threads)), grain)


# --- the model --------------------------------------------------------------------------------------------------------


def seconds(
    p: ContractionProblem, target: CpuTarget, tile: RegisterTile, pack_lhs: bool, pack_rhs: bool, threads: int
) -> float:
    """Arithmetic and memory overlap; packing and the fork-join add."""
    lanes = target.lanes(p.accumulate)
    fma = _clocks(p, target)
    m, n = _up(max(p.m, 1), tile.rows), _up(max(p.n, 1), tile.vectors * lanes)
    steps = p.batch * (m // tile.rows) * (n // (tile.vectors * lanes)) * p.k
    arithmetic = steps * tile.step(fma) / target.clock / EFFICIENCY
    epilogue = p.batch * m * n / lanes * (1 + p.epilogue_operations) * fma / target.clock
    packed = p.batch * ((p.m * p.k if pack_lhs else 0) + (p.k * p.n if pack_rhs else 0))
    packing = packed * PACKING / target.clock
    bandwidth = min(target.core_bandwidth * threads, target.bandwidth)
    resident = p.bytes <= target.l3 // 2  # operands that another kernel just wrote are still in the last cache
    memory = p.bytes / (bandwidth * (4 if resident else 1))
    fork = target.fork_seconds if threads > 1 else 0.0
    return max((arithmetic + epilogue + packing) / threads, memory) + fork


# --- few rows: dot products ------------------------------------------------------------------------------------------


def _wants_dot(p: ContractionProblem) -> bool:
    """A few rows against B with contiguous k: B streams past once, vectors along k."""
    return 0 < p.m <= SKINNY and p.lhs.k_stride == 1 and p.rhs.k_stride == 1 and p.k >= 16 and not p.n_tile_limit


def _dot(p: ContractionProblem, target: CpuTarget, lanes: int) -> ContractionSchedule:
    columns = max(c for c in (1, 2, 4, 8) if (p.m * c <= 12 and c <= lanes) or c == 1)
    bandwidth = target.core_bandwidth * (4 if p.bytes < target.l3 else 1)
    serial = max(p.bytes / bandwidth, p.flops / target.core_peak(p.accumulate) / 0.6)
    reasons = [f"{p.m} rows against contiguous k: dot products, {p.m}x{columns} accumulators along k, nothing packed"]
    threads = _threads(serial, target, reasons)
    strip = _up(min(64, max(p.n, 1)), columns)
    unit = _unit(p.n, strip, threads, p.batch)
    threads = min(threads, p.batch * -(-max(p.n, 1) // unit))
    return ContractionSchedule(
        "dot", workgroup=(p.m, strip), reduction=p.k, subgroup=(p.m, columns), threads=max(threads, 1),
        promoted=(False, False), split="n", unit=unit, intrinsic=f"fma.v{lanes}{p.accumulate}",
        seconds=serial / max(threads, 1) + (target.fork_seconds if threads > 1 else 0.0), reasons=tuple(reasons),
    )  # fmt: skip
