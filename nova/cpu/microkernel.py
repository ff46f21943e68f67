"""The register tile: `rows x (vectors * lanes)` accumulators, one broadcast and `vectors` multiply-adds a row and k.

    for k, step 4:                               packed panels are [k][rows] and [k][columns];
      b0, b1 = B[k, 0:8], B[k, 8:16]             operands in place are read with their own strides
      for r in 0..5:  a = broadcast(A[r, k])
                      c[r][0] = fma(a, b0, c[r][0]);  c[r][1] = fma(a, b1, c[r][1])

Twelve accumulators, two vectors of B and one broadcast fill the sixteen AVX2 registers; one more row and they spill.
"""

from __future__ import annotations

from dataclasses import dataclass

from nova.cpu import build, ints
from nova.cpu import lanes as ln
from nova.cpu.ints import Int
from nova.cpu.lanes import Value
from nova.mlir import ir

LINE = 64  # bytes of a cache line


@dataclass(frozen=True)
class Tile:
    """Shape and arithmetic of the register tile."""

    rows: int
    vectors: int
    lanes: int
    accumulator: ir.Type
    unroll: int

    @property
    def columns(self) -> int:
        return self.vectors * self.lanes

    @property
    def vector(self) -> ir.Type:
        return ln.vector_type(self.accumulator, self.lanes)


@dataclass(frozen=True)
class Panel:
    """One operand of the tile: a pointer to it at k = 0, its elements, and how far apart they are.

    `places` are the element offsets of the tile's rows (lhs); the columns of rhs are contiguous.
    """

    pointer: Value
    element: ir.Type
    k_stride: Int
    places: tuple[Int, ...] = ()
    ahead: int = 0  # k steps by which to prefetch; a strided stream outruns the hardware's prefetcher at every page


def to_accumulator(value: Value, accumulator: ir.Type) -> Value:
    """Widens an operand to the accumulator's type."""
    element = ln.element_of(value.type)
    if element == accumulator:
        return value
    if ln.is_narrow_float(element):
        value = ln.extend(value)
    return value if ln.element_of(value.type) == accumulator else ln.cast("extf", value, accumulator)


def prefetch(pointer: Value, write: bool) -> None:
    """Asks for the line at `pointer`; any address is allowed."""
    hints = {"rw": int(write), "hint": 3, "cache": 1}
    attributes = {name: ir.IntegerAttr.get(ln.int_type(32), number) for name, number in hints.items()}
    ln.create_void("llvm.intr.prefetch", [pointer], attributes)


def _multiply_add(a: Value, b: Value, c: Value) -> Value:
    return ln.create("vector.fma", c.type, [a, b, c])


def multiply(tile: Tile, lhs: Panel, rhs: Panel, depth: Int, even: bool = False) -> list[Value]:
    """Accumulators [row][vector] of lhs @ rhs over `depth` steps of k, starting from zero.

    `even`: a depth known only at run time is a multiple of the unrolling.
    """
    zeros = [ln.constant(tile.vector, 0.0) for _ in range(tile.rows * tile.vectors)]
    # Rows at run-time places (an edge tile read in place) get a pointer each; constants stay in the addressing mode.
    rows = [
        (lhs.pointer, place) if isinstance(place, int) else (ln.address(lhs.pointer, place, lhs.element), 0)
        for place in lhs.places
    ]

    def rhs_vector(offset: Int) -> Value:
        vector = ln.load(ints.offset_pointer(rhs.pointer, offset, rhs.element), rhs.element, tile.lanes)
        return to_accumulator(vector, tile.accumulator)

    def step(k: Int, accumulators: list[Value], ahead: int = 0) -> list[Value]:
        """The k step at k + ahead. What varies is computed for k once; the rest fits in the addressing mode."""
        at_lhs, at_rhs = (ints.add(ints.mul(k, p.k_stride), ints.mul(p.k_stride, ahead)) for p in (lhs, rhs))
        if rhs.ahead:
            for line in range(0, tile.columns * ln.bytes_of(rhs.element), LINE):
                place = ints.add(at_rhs, ints.mul(rhs.k_stride, rhs.ahead), line // ln.bytes_of(rhs.element))
                prefetch(ints.offset_pointer(rhs.pointer, place, rhs.element), write=False)
        columns = [rhs_vector(ints.add(at_rhs, v * tile.lanes)) for v in range(tile.vectors)]
        out = list(accumulators)
        for r, (pointer, place) in enumerate(rows):
            scalar = ln.load(ints.offset_pointer(pointer, ints.add(at_lhs, place), lhs.element), lhs.element)
            a = ln.splat(to_accumulator(scalar, tile.accumulator), tile.lanes)
            for v in range(tile.vectors):
                out[r * tile.vectors + v] = _multiply_add(a, columns[v], out[r * tile.vectors + v])
        return out

    def unrolled(k: Int, accumulators: list[Value]) -> list[Value]:
        for u in range(tile.unroll):
            accumulators = step(k, accumulators, u)
        return accumulators

    main = depth if even else ints.mul(ints.div(depth, tile.unroll), tile.unroll)
    accumulators = _loop(0, main, tile.unroll, zeros, unrolled)
    if even or (isinstance(depth, int) and depth == main):
        return accumulators
    return _loop(main, depth, 1, accumulators, step)


def _loop(begin: Int, end: Int, stride: int, carried: list[Value], body) -> list[Value]:
    if isinstance(begin, int) and isinstance(end, int):
        if end <= begin:
            return carried
        if end - begin <= stride:
            return body(begin, carried)
    return build.loop_carrying(ints.value(begin), ints.value(end), ints.value(stride), carried, body)
