"""What attention's tile programs are made of: contractions by chunks of 16, matrices in shared memory, their pipeline.

    S_j [rows, 16] += A [rows, 16 of the dim] x B [16 of the dim, 16 columns]        a chunk of scores
    O   [rows, n]  += P_j [rows, 16]          x V [16 columns, n]                    used up before the next one

A chunk's accumulator holds, lane for lane, what the next contraction wants of its left operand: 16-bit types pack pairs
of neighbours, and for TF32 the contracted dimension is renamed so that neighbours go together (`paired_k`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from nova.errors import CompileError
from nova.fusion.attention_form import Access, Attention
from nova.schedule.attention_gpu import operand_width
from nova.schedule.target import ELEMENT_BYTES
from nova.tile import widths
from nova.tile.builder import Program
from nova.tile.layout import NestedLayout, mma_accumulator, mma_lhs, mma_rhs
from nova.tile.text import Operand, Value

CHUNK = 16  # rows and columns that one step of a contraction takes: one or two instructions along k
Parts = tuple[Value, ...]  # an operand of a contraction: itself, or its upper and lower half


def padded(size: int) -> int:
    """`size` as whole chunks."""
    return max(-(-size // CHUNK), 1) * CHUNK


@dataclass(frozen=True)
class Tile:
    """The shape of one program: each block owns `rows`, walks `columns` at a time, and its warps split the rows."""

    rows: int
    columns: int
    threads: int
    stages: int
    hold: bool  # the rows' operands stay in registers
    resident: int  # blocks an SM

    @property
    def warps(self) -> tuple[int, int]:
        return self.threads // 32, 1


@dataclass(frozen=True)
class Engine:
    """How operands of one type are contracted.

    f32 that may not be rounded is split in two TF32 numbers. f64 is multiplied outside of tensor cores: the lanes of an
    accumulator have all of k of their rows and columns in registers.
    """

    element: str
    tf32: bool = False

    def __post_init__(self) -> None:
        if self.element not in ("bf16", "f16", "f32", "f64"):
            raise CompileError(f"attention on {self.element} has no GPU code; it takes bf16, f16, f32 and f64")

    @property
    def bits(self) -> int:
        return 8 * ELEMENT_BYTES[self.element]

    @property
    def split(self) -> bool:
        return self.element == "f32" and not self.tf32

    @property
    def sums(self) -> str:
        """The type of accumulators."""
        return "f64" if self.element == "f64" else "f32"

    @property
    def intrinsic(self) -> str:
        if self.element == "f64":
            return "FMA_F64_1x1x1"
        return "MMA_SYNC_TF32_16x8x8" if self.bits == 32 else f"MMA_SYNC_{self.element.upper()}_16x8x16"

    def lhs(self, rows: int, warps: tuple[int, int], paired: bool = False) -> NestedLayout:
        if self.element == "f64":
            return _with_k(mma_accumulator(rows, CHUNK, warps), 1)
        return mma_lhs(rows, CHUNK, warps, self.bits, paired and self.bits == 32)

    def rhs(self, width: int, warps: tuple[int, int], paired: bool = False) -> NestedLayout:
        if self.element == "f64":
            return _with_k(mma_accumulator(16 * warps[0], width, warps), 0)
        return mma_rhs(CHUNK, width, warps, self.bits, paired and self.bits == 32)

    def operand(self, p: Program, tile: Value) -> Parts:
        """What the contraction multiplies, of a tile of the operand type."""
        if self.bits != 32:
            return (tile,)
        upper = p.round_tf32(tile)
        return (upper, p.round_tf32(p.binary("arith.subf", tile, upper))) if self.split else (upper,)

    def left(self, p: Program, tile: Value, rows: int, warps: tuple[int, int]) -> Parts:
        """A chunk of an accumulator as a left operand."""
        return self.operand(p, p.to_layout(p.convert(tile, self.element), self.lhs(rows, warps, paired=True)))

    def dot(self, p: Program, a: Parts, b: Parts, c: Value) -> Value:
        """c + a b. Split operands: the small products first, and float32 additions in the end."""
        if len(a) == 1:
            return p.mma(a[0], b[0], c, self.intrinsic)
        assert c.shape is not None
        total = p.splat(0.0, c.shape, "f32", c.layout)
        for x, y in ((a[1], b[0]), (a[0], b[1]), (a[0], b[0])):
            total = p.mma(x, y, total, self.intrinsic)
        return p.binary("arith.addf", c, total)


def _with_k(accumulator: NestedLayout, dim: int) -> NestedLayout:
    """An accumulator's layout with the contracted dimension, all in registers, in place of `dim`."""
    own = {"batch": CHUNK, "subgroup_strides": 0, "thread_strides": 0}

    def change(name: str) -> tuple[int, ...]:
        sizes = getattr(accumulator, name)
        return tuple(own.get(name, 1) if d == dim else size for d, size in enumerate(sizes))

    return NestedLayout(*(change(field.name) for field in fields(accumulator)))


def access_vector(access: Access, columns: int, most: int = 16) -> int:
    """Elements of the last dimension that one access of up to `most` bytes may move."""
    if access.strides[-1] != 1:
        return 1
    vector = max(most // ELEMENT_BYTES.get(access.dtype, 1), 1)
    while vector > 1 and any(n % vector for n in (access.offset, columns, *access.strides[:-1])):
        vector //= 2
    return vector


def place(p: Program, access: Access, *indices: Operand) -> Operand:
    """Offset of the element at `indices` (leading dimensions; the rest are 0), i64."""
    offset: Operand = access.offset
    for index, stride in zip(indices, access.strides, strict=False):
        offset = p.add(p.mul(p.cast(index, "i64"), stride), offset)
    return p.cast(offset, "i64")


def is_wide(strides: tuple[int, ...], extents: tuple[int, ...]) -> bool:
    """Whether offsets within the last dimensions need 64 bits."""
    return widths.is_wide(sum(max(n - 1, 0) * stride for n, stride in zip(extents, strides, strict=True)))


def bounds_of(extents: Sequence[int], tile: Sequence[int]) -> list[int]:
    """The extents that a tile may reach over: -1 where whole tiles fill the dimension."""
    return [-1 if size % own == 0 else size for size, own in zip(extents, tile, strict=True)]


class Matrix:
    """The last two dimensions of a tensor, read through shared memory: `stages` blocks of `rows` rows."""

    def __init__(
        self, p: Program, engine: Engine, access: Access, extents: tuple[int, int], rows: int, stages: int,
        warps: tuple[int, int],
    ) -> None:  # fmt: skip
        self.p, self.engine, self.access, self.extents, self.rows, self.warps = p, engine, access, extents, rows, warps
        self.columns = padded(extents[1])
        self.shared = p.alloc_shared(stages, rows, self.columns, access.dtype)
        self.base: Operand = 0

    def of(self, *indices: Operand) -> None:
        """Which batch and head the copies read."""
        self.base = place(self.p, self.access, *indices)

    def copy(self, stage: Operand, row: Operand) -> None:
        """Starts the copy of the block of rows from `row` on; rows and columns outside become zeros."""
        strides = self.access.strides[-2:]
        self.p.async_copy(
            self.p.args[self.access.argument], self.shared, stage, self.base, [row, 0], strides=strides,
            extents=bounds_of(self.extents, (self.rows, self.columns)),
            vector=access_vector(self.access, self.extents[1]),
            wide=is_wide(strides, self.extents),
        )  # fmt: skip

    def left(self, chunk: int, stage: Operand = 0) -> Parts:
        """All rows, 16 columns, as a left operand."""
        layout = self.engine.lhs(self.rows, self.warps)
        tile = self.p.load_shared(self.shared, stage, [0, chunk * CHUNK], self.access.dtype, layout)
        return self.engine.operand(self.p, tile)

    def right_of_rows(self, stage: Operand, row: int, chunk: int) -> Parts:
        """16 rows as columns of a right operand that contracts 16 of the matrix's columns."""
        layout = self.engine.rhs(CHUNK, self.warps)
        place = [row, chunk * CHUNK]
        return self.engine.operand(
            self.p, self.p.load_shared(self.shared, stage, place, self.access.dtype, layout, transposed=True)
        )

    def right(self, stage: Operand, row: int, column: int, width: int) -> Parts:
        """[16 rows, `width` columns] as a right operand that contracts the rows."""
        layout = self.engine.rhs(width, self.warps, paired=True)
        return self.engine.operand(
            self.p, self.p.load_shared(self.shared, stage, [row, column], self.access.dtype, layout)
        )

    @property
    def chunks(self) -> range:
        return range(self.columns // CHUNK)


class Held:
    """The block's own rows of a matrix as left operands, from registers or from shared memory at each use."""

    def __init__(self, matrix: Matrix, hold: bool):
        self.matrix = matrix
        self.tiles = [matrix.left(chunk) for chunk in matrix.chunks] if hold else None

    def __getitem__(self, chunk: int) -> Parts:
        return self.tiles[chunk] if self.tiles is not None else self.matrix.left(chunk)


def products(
    p: Program, engine: Engine, rows: Held, others: Matrix, stage: Operand, tile: Tile, wanted: Sequence[int]
) -> list[Value]:
    """rows x others^T: the `wanted` chunks [rows, 16] of the block of `others` in a stage."""
    layout = mma_accumulator(tile.rows, CHUNK, tile.warps)
    chunks = [p.splat(0.0, layout.shape, engine.sums, layout) for _ in wanted]
    for k in others.chunks:
        own = rows[k]
        for place, j in enumerate(wanted):
            chunks[place] = engine.dot(p, own, others.right_of_rows(stage, j * CHUNK, k), chunks[place])
    return chunks


class Accumulator:
    """[rows, columns] in f32, as tiles that a loop carries: their right operands come into registers one at a time."""

    def __init__(self, engine: Engine, columns: int, tile: Tile):
        self.engine, self.tile, self.columns = engine, tile, padded(columns)
        self.width = operand_width(engine.element)
        self.starts = list(range(0, self.columns, self.width))

    def layout(self, start: int) -> NestedLayout:
        return mma_accumulator(self.tile.rows, min(self.width, self.columns - start), self.tile.warps)

    def zeros(self, p: Program) -> list[Value]:
        layouts = [self.layout(start) for start in self.starts]
        return [p.splat(0.0, layout.shape, self.engine.sums, layout) for layout in layouts]

    def add(self, p: Program, tiles: list[Value], left: Parts, matrix: Matrix, stage: Operand, row: int) -> list[Value]:
        """+ left [rows, 16] x 16 rows of the matrix."""
        result = []
        for start, tile in zip(self.starts, tiles, strict=True):
            assert tile.shape is not None
            result.append(self.engine.dot(p, left, matrix.right(stage, row, start, tile.shape[1]), tile))
        return result

    def scaled(self, p: Program, tiles: list[Value], factors: Value) -> list[Value]:
        """Each row times its factor."""
        return [p.binary("arith.mulf", tile, p.expand(factors, [1], tile.layout)) for tile in tiles]

    def store(
        self, p: Program, tiles: list[Value], access: Access, base: Operand, row: Operand, extents: tuple[int, int]
    ) -> None:
        strides = access.strides[-2:]
        vector = access_vector(access, extents[1], 2 * ELEMENT_BYTES[access.dtype])
        reach = bounds_of(extents, (self.tile.rows, self.columns))
        for start, tile in zip(self.starts, tiles, strict=True):
            p.store(
                p.convert(tile, access.dtype), p.args[access.argument], base, [row, start], strides=strides,
                extents=reach, vector=vector, wide=is_wide(strides, extents),
            )  # fmt: skip


def pipeline(
    p: Program, stages: int, bounds: list[tuple[Operand, Operand, bool]], copy: Callable[[Operand, Operand], None],
    step: Callable[[Operand, Operand, list[Value], bool], list[Value]], carried: list[Value],
    ready: Callable[[], None] | None = None,
) -> list[Value]:  # fmt: skip
    """Walks blocks through consecutive loops (begin, end, edge) whose copies run ahead of their use.

    `copy(stage, block)` starts a block's copy; `step(stage, block, carried, edge)` uses it. One barrier an iteration:
    after it the block has arrived for all threads, and all are done with the one before, whose place is then filled.
    `ready()` is called when copies that were committed earlier have arrived.
    """
    first, last = bounds[0][0], bounds[-1][1]
    ahead = stages - 1

    def start(block: Operand) -> None:
        with p.if_(p.compare("slt", block, last)):
            copy(p.rem(block, stages), block)
        p.async_commit()

    for i in range(ahead):
        start(p.add(first, i))
    if ready is not None:
        p.async_wait(ahead)
        p.barrier()
        ready()
    for begin, end, edge in bounds:
        if isinstance(begin, int) and isinstance(end, int) and begin >= end:
            continue
        with p.for_(begin, end, 1, carried) as loop:
            if ahead:
                p.async_wait(ahead - 1)
                p.barrier()
                start(p.add(loop.index, ahead))
            else:
                p.barrier()
                start(loop.index)
                p.async_wait(0)
                p.barrier()
            loop.yield_(step(p.rem(loop.index, stages), loop.index, loop.carried, edge))
        carried = loop.results
    return carried


def head_of(p: Program, op: Attention, number: Operand, heads: int) -> tuple[Operand, Operand]:
    """(batch, head) of a number that counts heads."""
    return p.div(number, heads), p.rem(number, heads)


def key_bounds(p: Program, op: Attention, tile: Tile, query: Operand) -> list[tuple[Operand, Operand, bool]]:
    """The loops over blocks of keys for a block of queries: those that every query sees whole, and the rest."""
    end: Operand = op.keys
    full: Operand = 0 if op.has("mask") else op.keys // tile.columns
    if op.causal:
        end = p.min(p.add(query, tile.rows), op.keys)
        full = p.min(p.div(p.add(query, 1), tile.columns), full) if full else 0
    last = p.cdiv(end, tile.columns)
    return [(0, full, False), (full, last, True)] if full != last else [(0, last, False)]
