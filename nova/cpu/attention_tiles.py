"""Register-blocked contractions for attention: one query a lane.

All tiles of attention are kept with queries (`q`) or head dims (`d`) along vector lanes, and the other operand is
read one element at a time and broadcast, so no tile is ever transposed between two contractions:

    scores     S[k][q]  = sum_d K[k][d] Q[d][q]        rows k (6 a time), two vectors of q, depth d
    weighted   O[d][q] += sum_k V[k][d] P[k][q]        rows d,            two vectors of q, depth k
    outer      G[k][d] += sum_q P[k][q] dO[q][d]       rows k,            two vectors of d, depth q

A panel is `queries` = two vectors of queries wide. With 16 vector registers, 6 rows x 2 vectors of accumulators, 2 of
the vector operand and 1 broadcast fill them; a panel of one operand (4 KiB for head dim 64) stays in the first-level
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from nova.lowering import lanes as ln
from nova.lowering.lanes import Type, Value
from nova.mlir import func, ir, scf

UNROLL = 4
MIN_INDEX = -(1 << 31)


@dataclass(frozen=True)
class Geometry:
    """How tiles map to registers: compute type, lanes of a vector, rows of a register tile."""

    element: Type
    lanes: int
    rows: int  # accumulator rows beside two vectors of accumulator columns

    @property
    def queries(self) -> int:
        """Queries of a panel."""
        return 2 * self.lanes

    @property
    def row_unit(self) -> int:
        """Key rows are padded to a multiple of this: of every register tile's rows and of the depth unroll."""
        return 2 * self.rows

    @property
    def bytes(self) -> int:
        return ln.bytes_of(self.element)

    def row_pitch(self, dim: int) -> int:
        """Elements from row to row of a packed block: whole vectors, an odd number of cache lines apart."""
        pitch = round_up(dim, self.lanes)
        while pitch * self.bytes % 128 == 0:
            pitch += 64 // self.bytes
        return pitch


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class Scope:
    """Emits into one function. Constants are made once, at its top."""

    def __init__(self, geometry: Geometry, block: ir.Block):
        self.geometry = geometry
        self.vector = ln.vector_type(geometry.element, geometry.lanes)
        self._block = block
        self._constants: dict[tuple[Type, float], Value] = {}

    def constant(self, type_: Type, number: float) -> Value:
        key = (type_, number)
        if key not in self._constants:
            with ir.InsertionPoint.at_block_begin(self._block):
                self._constants[key] = ln.constant(type_, number)
        return self._constants[key]

    def i(self, number: int) -> Value:
        """An i64 constant; offsets and trip counts are i64."""
        return self.constant(ln.int_type(64), number)

    def v(self, number: float) -> Value:
        """A vector of the compute type, all lanes equal."""
        return self.constant(self.vector, number)

    def s(self, number: float) -> Value:
        """A scalar of the compute type."""
        return self.constant(self.geometry.element, number)

    def i64(self, value: Value | int) -> Value:
        return self.i(value) if isinstance(value, int) else value

    # --- integer arithmetic that folds Python ints -------------------------------------------------------------------

    def add(self, a: Value | int, b: Value | int) -> Value | int:
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        if isinstance(a, int) and a == 0:
            return b
        if isinstance(b, int) and b == 0:
            return a
        return ln.addi(self.i64(a), self.i64(b))

    def mul(self, a: Value | int, b: int) -> Value | int:
        if isinstance(a, int):
            return a * b
        return 0 if b == 0 else a if b == 1 else ln.muli(a, self.i(b))

    def min(self, a: Value | int, b: Value | int) -> Value | int:
        if isinstance(a, int) and isinstance(b, int):
            return min(a, b)
        return ln.minsi(self.i64(a), self.i64(b))

    def max(self, a: Value | int, b: Value | int) -> Value | int:
        if isinstance(a, int) and isinstance(b, int):
            return max(a, b)
        return ln.maxsi(self.i64(a), self.i64(b))

    def sub(self, a: Value | int, b: Value | int) -> Value | int:
        if isinstance(b, int):
            return self.add(a, -b)
        return ln.subi(self.i64(a), b)

    def round_up(self, value: Value | int, unit: int) -> Value | int:
        """The next multiple of `unit` of a value >= 0."""
        if isinstance(value, int):
            return round_up(value, unit)
        return self.mul(ln.divui(self.add(value, unit - 1), self.i(unit)), unit)

    # --- control -----------------------------------------------------------------------------------------------------

    @contextmanager
    def loop(self, begin: Value | int, end: Value | int, step: int = 1) -> Iterator[Value]:
        op = scf.ForOp(self.i64(begin), self.i64(end), self.i(step))
        with ir.InsertionPoint(op.body):
            yield op.induction_variable
            scf.YieldOp([])

    def carrying(
        self,
        begin: Value | int,
        end: Value | int,
        step: int,
        inits: Sequence[Value],
        body: Callable[[Value, list[Value]], Sequence[Value]],
    ) -> list[Value]:
        op = scf.ForOp(self.i64(begin), self.i64(end), self.i(step), list(inits))
        with ir.InsertionPoint(op.body):
            scf.YieldOp(list(body(op.induction_variable, list(op.inner_iter_args))))
        return list(op.results)

    @contextmanager
    def when(self, predicate: str, a: Value | int, b: Value | int) -> Iterator[None]:
        op = scf.IfOp(ln.cmpi(predicate, self.i64(a), self.i64(b)))
        with ir.InsertionPoint(op.then_block):
            yield
            scf.YieldOp([])

    # --- memory of the compute type ----------------------------------------------------------------------------------

    def at(self, pointer: Value, offset: Value | int, element: Type | None = None) -> Value:
        """`pointer + offset` elements."""
        element = element or self.geometry.element
        if not isinstance(offset, int):
            return ln.address(pointer, offset, element)
        if offset == 0:
            return pointer
        attributes = {
            "elem_type": ir.TypeAttr.get(ln.memory_type(element)),
            "rawConstantIndices": ir.DenseI32ArrayAttr.get([offset]),
        }
        if offset > 1 << 30:
            return ln.address(pointer, self.i(offset), element)
        return ln.create("llvm.getelementptr", ln.pointer_type(), [pointer], attributes)

    def load(self, pointer: Value, offset: Value | int = 0) -> Value:
        """A vector."""
        return ln.load_raw(self.at(pointer, offset), self.vector)

    def load_scalar(self, pointer: Value, offset: Value | int = 0) -> Value:
        return ln.load_raw(self.at(pointer, offset), self.geometry.element)

    def splat(self, scalar: Value) -> Value:
        return ln.splat(scalar, self.geometry.lanes)

    def store(self, value: Value, pointer: Value, offset: Value | int = 0) -> None:
        ln.store(value, self.at(pointer, offset))


@dataclass
class Kit:
    """The helper functions of one kernel: `call` emits a call at the insertion point, `finish` all bodies."""

    geometry: Geometry
    prefix: str
    _bodies: dict[str, tuple[list[Type], Callable[..., None]]] = field(default_factory=dict)

    def call(self, name: str, args: Sequence[Value], body: Callable[..., None]) -> None:
        """Calls helper `name`, whose body is `body(scope, *args)`. One name has one meaning in a kernel."""
        symbol = f"{self.prefix}_{name}"
        self._bodies.setdefault(symbol, ([a.type for a in args], body))
        func.CallOp([], symbol, list(args))

    def finish(self, module: ir.Module) -> None:
        """Emits the bodies of the helpers called so far (helpers may call others)."""
        done: set[str] = set()
        with ir.InsertionPoint(module.body):
            while pending := [name for name in self._bodies if name not in done]:
                for name in pending:
                    done.add(name)
                    types, body = self._bodies[name]
                    op = func.FuncOp(name, ir.FunctionType.get(types, []), visibility="private")
                    op.attributes["llvm.linkage"] = ir.Attribute.parse("#llvm.linkage<internal>")
                    block = op.add_entry_block()
                    with ir.InsertionPoint(block):
                        body(Scope(self.geometry, block), *op.arguments)
                        func.ReturnOp([])


# --- the register tile -----------------------------------------------------------------------------------------------


def register_tile(
    s: Scope,
    shape: tuple[int, int],
    a: tuple[Value, int, int],
    b: tuple[Value, int],
    depth: Value | int,
    init: Sequence[Value],
) -> list[Value]:
    """acc[r][v] += sum over `depth` of a[r * row + i * step] * b[i * pitch + v * lanes].

    `a` is (pointer, row, step), `b` is (pointer, pitch). A dynamic depth must be a multiple of UNROLL.
    """
    rows, vectors = shape
    a_pointer, a_row, a_step = a
    b_pointer, b_pitch = b

    def steps(at: Value | int, count: int, acc: list[Value]) -> list[Value]:
        pa, pb = s.at(a_pointer, s.mul(at, a_step)), s.at(b_pointer, s.mul(at, b_pitch))
        acc = list(acc)
        for u in range(count):
            columns = [s.load(pb, u * b_pitch + v * s.geometry.lanes) for v in range(vectors)]
            for r in range(rows):
                scalar = s.splat(s.load_scalar(pa, r * a_row + u * a_step))
                for v in range(vectors):
                    acc[r * vectors + v] = ln.fma(scalar, columns[v], acc[r * vectors + v])
        return acc

    if not isinstance(depth, int):
        return s.carrying(0, depth, UNROLL, init, lambda i, acc: steps(i, UNROLL, acc))
    main = depth // UNROLL * UNROLL
    acc = list(init)
    if main > UNROLL:
        acc = s.carrying(0, main, UNROLL, acc, lambda i, acc: steps(i, UNROLL, acc))
    else:
        main = 0
    while main < depth:
        count = min(UNROLL, depth - main)
        acc = steps(main, count, acc)
        main += count
    return acc


def row_tiles(total: int, most: int) -> list[tuple[int, int, int]]:
    """Cuts `total` rows into register tiles: [(begin, end, rows)] with rows <= most. The last tile may stick out.

    One tile size where that wastes at most a twentieth of the rows (less code), else two sizes that differ by one.
    """
    count = -(-total // most)
    size = -(-total // count)
    if count * size - total <= total // 20:
        return [(0, count * size, size)]
    large = total - (size - 1) * count  # tiles of `size`; the rest are one smaller
    cut = large * size
    return [(0, cut, size), (cut, total, size - 1)]


def padded_rows(total: int, most: int) -> int:
    """Rows that the tiles of `row_tiles` touch."""
    return max(end for _, end, _ in row_tiles(total, most))


def column_tiles(vectors: int) -> list[tuple[int, int, int]]:
    """Cuts `vectors` columns into register tiles two wide, with one three wide for an odd number (one for a single):
    [(first vector, width, tiles)], a run of equal tiles an entry."""
    if vectors == 1:
        return [(0, 1, 1)]
    runs = [(0, 3, 1)] if vectors % 2 else []
    first = 3 * len(runs)
    return [*runs, *([(first, 2, (vectors - first) // 2)] if vectors > first else [])]


def emit_scores(
    s: Scope, keys: Value, panel: Value, out: Value, rows: Value, factor: Value, *, dim: int, pitch: int
) -> None:
    """out[k][q] = factor * sum_d keys[k][d] panel[d][q], for `rows` keys rounded up to the tile."""
    g = s.geometry
    factor = s.splat(factor)
    with s.loop(0, rows, g.rows) as r0:
        a = (s.at(keys, s.mul(r0, pitch)), pitch, 1)
        acc = register_tile(s, (g.rows, 2), a, (panel, g.queries), dim, [s.v(0.0)] * (2 * g.rows))
        target = s.at(out, s.mul(r0, g.queries))
        for n, value in enumerate(acc):
            s.store(ln.mulf(value, factor), target, n * g.lanes)


def emit_weighted(
    s: Scope,
    block: Value,
    weights: Value,
    out: Value,
    depth: Value,
    alpha: Value | None = None,
    *,
    dim: int,
    pitch: int,
) -> None:
    """out[d][q] = alpha[q] * out[d][q] + sum_k block[k][d] weights[k][q]; `depth` keys, a multiple of UNROLL."""
    g = s.geometry
    scale = [s.load(alpha, v * g.lanes) for v in range(2)] if alpha is not None else None
    for begin, end, rows in row_tiles(dim, g.rows):
        with s.loop(begin, end, rows) as d0:
            target = s.at(out, s.mul(d0, g.queries))
            init = [s.load(target, n * g.lanes) for n in range(2 * rows)]
            if scale:
                init = [ln.mulf(value, scale[n % 2]) for n, value in enumerate(init)]
            acc = register_tile(s, (rows, 2), (s.at(block, d0), 1, pitch), (weights, g.queries), depth, init)
            for n, value in enumerate(acc):
                s.store(value, target, n * g.lanes)


def emit_outer(
    s: Scope, weights: Value, panels: Value, out: Value, rows: Value, count: Value, shift: Value | None = None,
    *, dim: int, pitch: int, tile_rows: int, panel_rows: int,
) -> None:  # fmt: skip
    """out[k][d] += sum over `count` panels p and their queries q of weights[p][k][q] * panels[p, q][d].

    weights[p] is `tile_rows` x queries; `panels` holds all columns of a column tile for all `panel_rows` queries
    before the next tile's (see pack_columns). With `shift` (first key minus first query, causal) a row tile starts at
    the first panel that sees any of its keys; later rows of the tile are zero there.
    """
    g = s.geometry
    bits = g.queries.bit_length() - 1
    for first, width, tiles in column_tiles(-(-dim // g.lanes)):
        rows_here = {1: 2 * g.rows, 2: g.rows, 3: 2 * g.rows // 3}[width]
        pitch_b = width * g.lanes
        with s.loop(0, tiles) as tile, s.loop(0, rows, rows_here) as r0:
            column = s.add(s.mul(tile, pitch_b), first * g.lanes)
            columns = s.at(panels, s.mul(column, panel_rows))
            target = s.at(out, s.add(s.mul(r0, pitch), column))
            places = [r * pitch + v * g.lanes for r in range(rows_here) for v in range(width)]
            init = [s.load(target, place) for place in places]
            start: Value | int = 0
            if shift is not None:
                seen = ln.shrsi(s.add(shift, r0), s.i(bits))
                start = s.max(seen, 0)

            def steps(i: Value, acc: list[Value], r0=r0, columns=columns, pitch_b=pitch_b, shape=(rows_here, width)):
                # i counts queries through all panels: one loop, whose body splits it into panel and lane
                panel, lane = ln.shrui(i, s.i(bits)), ln.andi(i, s.i(g.queries - 1))
                a = s.at(weights, s.add(s.mul(s.add(s.mul(panel, tile_rows), r0), g.queries), lane))
                b = s.at(columns, s.mul(i, pitch_b))
                return register_tile(s, shape, (a, g.queries, 1), (b, pitch_b), UNROLL, acc)

            bounds = s.mul(start, g.queries), s.mul(count, g.queries)
            for value, place in zip(s.carrying(*bounds, UNROLL, init, steps), places, strict=True):
                s.store(value, target, place)
