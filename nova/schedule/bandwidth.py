"""Schedules of memory-bound kernels: elementwise chains, row and column reductions, copies, optimizer updates.

What binds them is bytes, so a schedule is a vector width, a grain of rows a task, a thread count and how outputs are
stored: outputs of a kernel that outgrows the last cache are streamed past it (`streams`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class TileProblem:
    """One nest of a memory-bound GPU kernel: `rows` x `columns` points, columns in vectors of `vector` elements."""

    rows: int
    columns: int
    vector: int
    row_bytes: float = 4.0  # loaded for a point of the whole nest
    tiles: int = 1  # values of the nest's full width that a thread holds at once
    reduces: bool = False  # along the columns
    total: str = ""  # what is summed over the blocks: "" nothing, "rows" (a value a column), "all" (a scalar)
    row_lanes: bool = False  # neighbours in memory lie along the rows
    turned: bool = False  # some operands have them along the rows, others along the columns
    fixed: int = 1  # independent repetitions of the whole
    merges: bool = False  # the rows are partial sums
    again: bool = False  # a row too long for registers is read by several passes


@dataclass(frozen=True)
class TileShape:
    """A block's tile: threads along rows and columns, and what each repeats in registers. Powers of two but batches."""

    row_threads: int
    column_threads: int
    row_batch: int = 1
    column_batch: int = 1
    long: bool = False  # a row doesn't fit the registers: a loop over its columns in each pass
    row_run: int = 1  # rows of a thread that are neighbours
    parts: int = 1  # blocks along what is summed over the blocks, each with a partial sum
    ahead: int = 0  # tiles of the loop over `parts` that are loaded while one is computed
    reasons: tuple[str, ...] = ()

    @property
    def threads(self) -> int:
        return self.row_threads * self.column_threads

    @property
    def rows(self) -> int:
        return self.row_threads * self.row_batch

    @property
    def groups(self) -> int:
        """Vectors of a row in a tile."""
        return self.column_threads * self.column_batch


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


def streams(moved: int, written: int, target: CpuTarget) -> bool:
    """Whether outputs go past the last cache: what a kernel moves does not fit there, and they are much of it.

    Reading a line to overwrite it is then a third of the traffic, and takes the place of inputs that are still needed.
    """
    return moved >= target.l3 and written >= target.l3 // 2


def _cpu(p: LoopProblem, target: CpuTarget) -> LoopSchedule:
    lanes = target.lanes(p.dtype) if ELEMENT_BYTES.get(p.dtype, 4) >= 4 else target.lanes("f32")
    serial = model.cpu_seconds(target, p.bytes, p.operations / lanes, threads=1)
    tasks = p.rows if p.rows > 1 else max(1, p.columns // 4096)
    threads = min(target.cores, max(tasks, 1)) if serial > FORK_WORTH else 1
    nontemporal = streams(p.bytes, p.bytes_written, target)
    seconds = model.cpu_seconds(target, p.bytes, p.operations / lanes, threads)
    reasons = [
        f"{p.bytes / 1e6:.2f} MB, {p.operations:.3g} operations: {serial * 1e6:.1f} us on one thread",
        f"{threads} threads" if threads > 1 else "one thread: less work than a fork is worth",
    ]
    if nontemporal:
        reasons.append(f"streaming stores: {p.bytes >> 20} MiB moved, {target.l3 >> 20} MiB of last cache")
    return LoopSchedule(
        "loops", lanes, threads, max(1, tasks // max(threads * 4, 1)), nontemporal,
        prefetch=nontemporal and p.row_reductions > 0, seconds=seconds, reasons=tuple(reasons),
    )  # fmt: skip


def _gpu(p: LoopProblem, target: GpuTarget) -> LoopSchedule:
    """The tile of the kernel's main nest, and the time that its bytes take."""
    size = ELEMENT_BYTES.get(p.dtype, 4)
    vector = max(1, 16 // size)
    while vector > 1 and p.columns % vector:
        vector //= 2
    points = max(p.rows * p.columns, 1)
    total = "rows" if p.cross_row else ""
    problem = TileProblem(
        max(p.rows, 1), max(p.columns, 1), vector, max(p.bytes_read / points, 1.0), reduces=p.row_reductions > 0,
        total=total,
    )  # fmt: skip
    shape = schedule_tile(problem, target)
    blocks = -(-problem.rows // shape.rows) * (1 if shape.long else -(-problem.columns // (shape.groups * vector)))
    tail = min(1.0, blocks / (target.sms * 2))  # too few blocks leave memory channels idle
    seconds = p.bytes / (target.bandwidth * 0.89 * max(tail, 0.05)) + target.launch_seconds * (2 if p.cross_row else 1)
    return LoopSchedule("loops", vector, shape.threads, shape.rows, seconds=seconds, reasons=shape.reasons)


# --- tiles of a GPU's nests -------------------------------------------------------------------------------------------

WARP = 32
BLOCK_THREADS = 256
ROW_THREADS = 128  # of blocks that reduce rows a warp or two each: small ones start and end by themselves
LONG_THREADS = 256  # of blocks that walk long rows: several rows an SM hide each other's ends
MOST_THREADS = 1024  # of a block
KEPT_CACHE = 0.6  # of the last cache, for rows that are read again: what is written goes through it too
REGISTERS = 112  # of a thread for tile values, beside addresses and temporaries
CARRIED_REGISTERS = 48  # the same where sums are carried from row to row: shorter pieces of a row, and more warps
THREAD_BYTES = 64  # that a thread should have under way: four 16-byte loads
CARRIED_THREADS = 512  # of a row at most, there
HELD_BESIDE = 56  # registers of a thread that sums over rows, beside its tiles: running sums, addresses, the next loads
MOST_AHEAD = 4  # tiles whose loads are under way while one is computed
BYTES_AHEAD = 48 << 10  # of an SM's loads under way, from which memory is busy
MERGE_GROUPS = 4  # vectors of columns that a block which adds up shares takes
FLAT_UNROLL = 2  # vectors of each operand that a thread of an elementwise kernel takes at most
WASTE = 1.13  # of idle lanes that are not worth avoiding


def schedule_tile(p: TileProblem, target: GpuTarget) -> TileShape:
    """The tile of a block, and how many blocks share a sum."""
    groups = max(1, -(-p.columns // p.vector))
    return _within(p, _shape(p, groups, target), target.smem_block)


def _within(p: TileProblem, shape: TileShape, shared: int) -> TileShape:
    """With fewer rows, until the warps' sums over rows fit a block's shared memory."""
    before = shape
    while _shared(p, shape) > shared and shape.row_threads > 1:
        rows = shape.row_threads // 2
        tiles = -(-p.rows // (rows * shape.row_batch))
        parts = _parts(tiles, shape.parts) if shape.parts > 1 else shape.parts
        shape = replace(shape, row_threads=rows, parts=parts)
    if shape is before:
        return shape
    reason = f"{shape.rows} rows a block instead of {before.rows}: their sums have {shared:,} B of shared memory"
    return replace(shape, reasons=(*shape.reasons, reason))


def _shared(p: TileProblem, shape: TileShape) -> int:
    """Bytes of a block's sums over rows: one of 4-byte values for each warp that has rows of its own."""
    shares = shape.threads // max(shape.column_threads, WARP)
    return 4 * shares * shape.groups * p.vector if (p.total or p.merges) and shares > 1 else 0


def _shape(p: TileProblem, groups: int, target: GpuTarget) -> TileShape:
    if p.merges:
        return _merge(p, groups)
    if p.turned:
        return _turned(p, groups, target)
    if p.row_lanes:
        return _row_lanes(p, groups, target)
    if p.reduces:
        return _row_reduction(p, groups, target)
    if p.total:
        return _total(p, groups, target)
    return _flat(p, groups, target)


def power_below(n: float) -> int:
    return 1 << (max(int(n), 1).bit_length() - 1)


def power_above(n: int) -> int:
    return 1 << (max(n, 1) - 1).bit_length()


def _unroll(p: TileProblem) -> int:
    """Vectors a thread loads at once of each operand."""
    return min(8, max(1, power_below(THREAD_BYTES / max(p.row_bytes * p.vector, 1.0))))


def _across(groups: int, most: int) -> int:
    """Threads along `groups` vectors: the most that leave few of them idle."""
    best, least = 1, float("inf")
    threads = most
    while threads >= 1:
        waste = -(-groups // threads) * threads / groups
        if waste <= WASTE:
            return threads
        if waste < least:
            best, least = threads, waste
        threads //= 2
    return best


def _flat(p: TileProblem, groups: int, target: GpuTarget) -> TileShape:
    unroll, work = min(FLAT_UNROLL, _unroll(p)), p.rows * p.fixed * groups
    unroll = min(unroll, power_above(max(1, work // (BLOCK_THREADS * target.sms * 2))))
    threads = min(BLOCK_THREADS, max(32, power_above(-(-p.rows * groups // unroll))))
    if p.rows == 1:
        batch = min(unroll, -(-groups // threads))
        return TileShape(1, threads, 1, batch, reasons=(f"flat: {threads} threads, {batch} vectors each",))
    across = _across(groups, threads)
    down = threads // across
    if p.rows >= down * unroll:
        shape = TileShape(down, across, unroll)
    else:
        shape = TileShape(down, across, 1, min(unroll, -(-groups // across)))
    reason = f"{shape.rows} rows x {shape.groups} of {groups} vectors a block, {unroll} vectors a thread"
    return TileShape(down, across, shape.row_batch, shape.column_batch, reasons=(reason,))


def _elements(p: TileProblem, registers: int) -> int:
    """Of a row, in so many registers of a thread."""
    return min(40, max(p.vector, registers // max(p.tiles, 1)))


def _row_reduction(p: TileProblem, groups: int, target: GpuTarget) -> TileShape:
    """Threads of a row: one warp as long as its registers hold it, several above, a loop where nothing does."""
    most = _elements(p, REGISTERS)
    if groups <= 32:
        across = power_above(groups)
        threads = min(BLOCK_THREADS, max(32, power_above(p.rows * across)))
        down = threads // across
        batch = min(_unroll(p), power_above(max(1, p.rows // (down * target.sms * 4))), max(1, most // p.vector))
        reason = f"{across} threads a row of {groups} vectors, {down * batch} rows a block"
        shape = TileShape(down, across, batch, 1, reasons=(reason,))
    else:
        across = 32
        steps = [(1024, most)]
        if p.total:
            steps.insert(0, (CARRIED_THREADS, _elements(p, CARRIED_REGISTERS)))
        for threads, elements in steps:
            while across < threads and -(-groups // across) * p.vector > elements:
                across *= 2
        if -(-groups // across) * p.vector > most or (across > 512 and p.tiles > 1):
            return _long_rows(p, groups, target)
        batch = -(-groups // across)
        least = BLOCK_THREADS if p.total else ROW_THREADS  # fewer blocks with sums of their own
        threads = min(max(across, least), max(across, power_above(p.rows) * across))
        reason = f"{across // 32} warps a row, {batch} vectors of {p.vector} a thread, {threads // across} rows a block"
        shape = TileShape(threads // across, across, 1, batch, reasons=(reason,))
    if not p.total:
        return shape
    return _carried(p, shape, target)


def _carried(p: TileProblem, shape: TileShape, target: GpuTarget) -> TileShape:
    """How a block walks its rows: with how many loads ahead, so that memory is kept busy, and how many such blocks."""
    elements = shape.row_batch * shape.column_batch * p.vector
    held, loads = p.tiles * elements + HELD_BESIDE, -(-int(p.row_bytes * elements) // 4)  # registers
    ahead, slots = _ahead(held, loads, shape.threads, target)
    parts = _parts(-(-p.rows // shape.rows), slots)
    reason = f"{parts} blocks, each with its share of the sums; {ahead} tiles loaded ahead"
    return replace(shape, parts=parts, ahead=ahead, reasons=(*shape.reasons, reason))


def _ahead(held: int, loads: int, threads: int, target: GpuTarget) -> tuple[int, int]:
    """(tiles loaded ahead into registers, of which each takes `loads`; blocks that the device then holds at once)."""
    most = min(target.registers_thread, target.registers_sm // threads) - HELD_BESIDE // 4
    ahead = 0
    for depth in range(1, MOST_AHEAD + 1):
        if held + depth * loads > most:
            break
        ahead = depth
        blocks = _slots(held + depth * loads, threads, target) // target.sms
        if blocks * threads * depth * loads * 4 >= BYTES_AHEAD:
            break
    return ahead, _slots(held + ahead * loads, threads, target)


def _long_rows(p: TileProblem, groups: int, target: GpuTarget) -> TileShape:
    threads = LONG_THREADS if groups >= 2 * LONG_THREADS else BLOCK_THREADS
    batch = min(_unroll(p), max(1, 32 // (p.vector * max(p.tiles, 1))))
    held = batch * p.vector * max(p.tiles, 1) + 28
    if p.again:  # fewer rows under way, so that a row is still in the last cache when it is read again
        row = p.row_bytes * p.columns
        while threads < MOST_THREADS and row * _slots(held, threads, target) > KEPT_CACHE * target.l2:
            threads *= 2
    parts = _parts(p.rows, _slots(held, threads, target)) if p.total else 1
    reason = f"long rows: {threads} threads walk {groups} vectors, {batch} at once each"
    return TileShape(1, threads, 1, batch, True, parts=parts, reasons=(reason,))


def _slots(registers: int, threads: int, target: GpuTarget) -> int:
    """Blocks that the device holds at once, from the registers that a thread holds."""
    registers = min(target.registers_thread, max(32, -(-registers // 8) * 8))
    blocks = min(target.registers_sm // (registers * threads), target.threads_sm // threads, target.blocks_sm)
    return target.sms * max(1, blocks)


def _parts(tiles: int, slots: int) -> int:
    """Blocks of which each takes equally many of `tiles`, or one less, no more than there is room for."""
    return -(-tiles // -(-tiles // slots))


def _total(p: TileProblem, groups: int, target: GpuTarget) -> TileShape:
    """Sums over rows (columns kept), or over everything: blocks along both, with partial sums along the rows."""
    unroll = _unroll(p)
    if p.total == "all":
        threads = min(BLOCK_THREADS, max(32, power_above(-(-groups // unroll))))
        batch = min(unroll, -(-groups // threads))
        parts = _parts(-(-groups // (threads * batch)), target.sms * 4)
        return TileShape(1, threads, 1, batch, parts=parts, reasons=(f"{parts} partial sums of everything",))
    across = min(32, power_above(groups))
    threads = min(BLOCK_THREADS, max(32, power_above(p.rows) * across))
    down = threads // across
    batch = min(unroll, power_above(-(-p.rows // down)))
    tiles, blocks = -(-p.rows // (down * batch)), -(-groups // across)
    parts = _parts(tiles, max(1, target.sms * 4 // blocks))
    if tiles <= 2:
        parts = 1
    reason = f"{blocks} blocks across, {parts} partial sums of {-(-p.rows // parts)} rows"
    return TileShape(down, across, batch, 1, parts=parts, reasons=(reason,))


def _merge(p: TileProblem, groups: int) -> TileShape:
    """Few columns a block, so that there are blocks enough; all its shares under way at once."""
    across = min(MERGE_GROUPS, power_above(groups))
    down = min(BLOCK_THREADS // across, power_above(p.rows))
    return TileShape(
        down, across, min(12, -(-p.rows // down)), 1, reasons=(f"{p.rows} partial sums, {down} at a time",)
    )


def _row_lanes(p: TileProblem, groups: int, target: GpuTarget) -> TileShape:
    """Threads along the rows, because memory is: each walks columns of its own."""
    threads = min(BLOCK_THREADS, max(32, power_above(p.rows)))
    if not p.reduces:
        return TileShape(threads, 1, 1, min(groups, _unroll(p)), reasons=("neighbours in memory lie along the rows",))
    most = max(1, min(16, REGISTERS // max(p.tiles, 1)) // p.vector)
    batch = groups if groups <= most else min(8, most)
    parts = min(-(-p.rows // threads), target.sms * 4) if p.total else 1
    reason = "neighbours in memory lie along the rows"
    return TileShape(threads, 1, 1, batch, groups > most, parts=parts, reasons=(reason,))


def _turned(p: TileProblem, groups: int, target: GpuTarget) -> TileShape:
    """A tile of 64 x 64 elements (32 x 32 if there are few, or it would not fit): whole sectors on both sides."""
    side = 64 if p.rows >= 64 and p.columns >= 64 and p.rows * p.columns * p.fixed >= 64 * 64 * target.sms else 32
    side = side if 4 * side * side <= target.smem_block else 32
    across = max(1, side // p.vector)
    run = min(p.vector, side * across // 32)  # blocks of run x run elements change hands without bank conflicts
    return TileShape(
        side // run, across, run, 1, row_run=run, reasons=(f"turned over in tiles of {side} x {side}",)
    )  # fmt: skip
