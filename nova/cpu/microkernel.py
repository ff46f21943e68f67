"""The register tile: `rows x (vectors * lanes)` accumulators, one broadcast and `vectors` multiply-adds a row and k.

    for k, step 2:                               packed panels are [k][rows] and [k][columns];
      b0, b1 = B[k, 0:8], B[k, 8:16]             operands in place are read with their own strides
      for r in 0..5:  a = broadcast(A[r, k])
                      c[r][0] = fma(a, b0, c[r][0]);  c[r][1] = fma(a, b1, c[r][1])

Twelve accumulators, two vectors of B and one broadcast fill the sixteen AVX2 registers; one more row and they spill.
With AVX-512 the broadcast is an operand of the multiply-add, and one vector of B feeds sixteen rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nova.cpu import build, ints
from nova.cpu.ints import Int
from nova.lowering import lanes as ln
from nova.lowering.lanes import Value
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


@dataclass(frozen=True)
class Interlude:
    """What happens between k steps: `emit` is called with 0, 1, 2, ... before each period of `every` steps."""

    every: int  # a power of two
    emit: Callable[[Int], None]


def to_accumulator(value: Value, accumulator: ir.Type) -> Value:
    """Widens an operand to the accumulator's type."""
    element = ln.element_of(value.type)
    if element == accumulator:
        return value
    if ln.is_narrow_float(element):
        value = ln.extend(value)
    return value if ln.element_of(value.type) == accumulator else ln.cast("extf", value, accumulator)


def prefetch(pointer: Value, write: bool, near: bool = True) -> None:
    """Asks for the line at `pointer`, into the first cache if `near`, else the second; any address is allowed."""
    hints = {"rw": int(write), "hint": 3 if near else 2, "cache": 1}
    attributes = {name: ir.IntegerAttr.get(ln.int_type(32), number) for name, number in hints.items()}
    ln.create_void("llvm.intr.prefetch", [pointer], attributes)


def _multiply_add(a: Value, b: Value, c: Value) -> Value:
    return ln.create("vector.fma", c.type, [a, b, c])


@dataclass(frozen=True)
class _Walk:
    """How an operand's addresses move along k.

    A pointer a stride further every k; rows at run-time places (an edge tile read in place) have a pointer each, and
    what moves is an offset to all of them. Either is carried through the loop and everything else fits in addressing
    modes: computed from k, one operand's place would be made in the register that holds the other's, and LLVM, which
    then loads all of the first before it, spills what it loaded.
    """

    panel: Panel
    rows: tuple[tuple[Value | None, Int], ...]  # (base, constant place): a base of None is what moves
    ahead: tuple[Int, ...]  # offset of the u-th step of a trip

    @staticmethod
    def of(panel: Panel, unroll: int) -> _Walk:
        fixed = all(isinstance(place, int) for place in panel.places)
        rows: list[tuple[Value | None, Int]] = [(None, place) for place in panel.places or (0,)]
        if not fixed:
            rows = [(ints.offset_pointer(panel.pointer, place, panel.element), 0) for place in panel.places]
        return _Walk(panel, tuple(rows), tuple(ints.mul(panel.k_stride, u) for u in range(unroll + 1)))

    @property
    def start(self) -> Value:
        return self.panel.pointer if self.rows[0][0] is None else ints.value(0)

    def moved(self, place: Value, steps: int) -> Value:
        if self.rows[0][0] is None:
            return ints.offset_pointer(place, self.ahead[steps], self.panel.element)
        return ints.value(ints.add(place, self.ahead[steps]))

    def pointer(self, place: Value, row: int, step: int, further: Int = 0) -> Value:
        base, offset = self.rows[row]
        if base is None:
            return ints.offset_pointer(place, ints.add(self.ahead[step], offset, further), self.panel.element)
        return ints.offset_pointer(base, ints.add(place, self.ahead[step], further), self.panel.element)


@dataclass(frozen=True)
class _Product:
    """The arithmetic of one tile: `step` takes accumulators and the operands' places to what follows them."""

    tile: Tile
    lhs: _Walk
    rhs: _Walk
    interlude: Interlude | None = None

    def step(self, accumulators: list[Value], left: Value, right: Value, ahead: int) -> list[Value]:
        """The accumulators after the k step that is `ahead` of the places."""
        tile, lhs, rhs = self.tile, self.lhs.panel, self.rhs.panel
        self._prefetch(right, ahead)
        columns = []
        for v in range(tile.vectors):
            vector = ln.load(self.rhs.pointer(right, 0, ahead, v * tile.lanes), rhs.element, tile.lanes)
            columns.append(to_accumulator(vector, tile.accumulator))
        out = list(accumulators)
        for r in range(tile.rows):
            scalar = ln.load(self.lhs.pointer(left, r, ahead), lhs.element)
            a = ln.splat(to_accumulator(scalar, tile.accumulator), tile.lanes)
            for v in range(tile.vectors):
                out[r * tile.vectors + v] = _multiply_add(a, columns[v], out[r * tile.vectors + v])
        return out

    def _prefetch(self, right: Value, ahead: int) -> None:
        rhs = self.rhs.panel
        if not rhs.ahead:
            return
        size = ln.bytes_of(rhs.element)
        for line in range(0, self.tile.columns * size, LINE):
            place = ints.add(ints.mul(rhs.k_stride, rhs.ahead), line // size)
            prefetch(self.rhs.pointer(right, 0, ahead, place), write=False)

    def trip(self, steps: int, carried: list[Value]) -> list[Value]:
        """`steps` k steps, and both places moved past them."""
        *accumulators, left, right = carried
        for u in range(steps):
            accumulators = self.step(accumulators, left, right, u)
        return [*accumulators, self.lhs.moved(left, steps), self.rhs.moved(right, steps)]

    def chain(self, begin: Int, depth: Int, even: bool, carried: list[Value]) -> list[Value]:
        """`depth` k steps, the first of which is the tile's step number `begin`."""
        unroll = self.tile.unroll
        main = depth if even else ints.mul(ints.div(depth, unroll), unroll)
        carried = self._interrupted(begin, main, carried)
        if even or (isinstance(depth, int) and depth == main):
            return carried
        return _loop(main, depth, 1, carried, self.trip)

    def _interrupted(self, begin: Int, depth: Int, carried: list[Value]) -> list[Value]:
        """`depth` k steps, a multiple of the unrolling, with the interlude before each of its periods."""
        unroll, interlude = self.tile.unroll, self.interlude
        if interlude is None:
            return _loop(0, depth, unroll, carried, self.trip)

        def period(at: Value, carried: list[Value]) -> list[Value]:
            interlude.emit(ints.div(ints.add(begin, at), interlude.every))
            whole = isinstance(depth, int) and depth % interlude.every == 0
            steps = interlude.every if whole else ints.minimum(interlude.every, ints.sub(depth, at))
            return _loop(0, steps, unroll, carried, self.trip)

        return build.loop_carrying(ints.value(0), ints.value(depth), ints.value(interlude.every), carried, period)


def multiply(
    tile: Tile,
    lhs: Panel,
    rhs: Panel,
    depth: Int,
    chain: int,
    even: bool = False,
    interlude: Interlude | None = None,
) -> list[Value]:
    """Accumulators [row][vector] of lhs @ rhs over `depth` steps of k, starting from zero.

    Sums of `chain` steps are added up: one chain of all of them would round like a sum of that many numbers. The total
    lies in memory meanwhile, as LLVM spills what the inner loop doesn't touch. `even`: a depth known only at run time
    is a multiple of the unrolling, as `chain` is.
    """
    product = _Product(tile, _Walk.of(lhs, tile.unroll), _Walk.of(rhs, tile.unroll), interlude)
    zeros = [ln.constant(tile.vector, 0.0) for _ in range(tile.rows * tile.vectors)]
    places = [product.lhs.start, product.rhs.start]
    if isinstance(depth, int) and depth <= chain:
        return product.chain(0, depth, even, [*zeros, *places])[:-2]

    def link(at: Value, carried: list[Value]) -> list[Value]:
        *totals, left, right = carried
        whole = isinstance(depth, int) and depth % chain == 0
        steps = chain if whole else ints.minimum(chain, ints.sub(depth, at))
        *sums, left, right = product.chain(at, steps, even, [*zeros, left, right])
        return [*(ln.addf(total, x) for total, x in zip(totals, sums, strict=True)), left, right]

    bounds = (ints.value(0), ints.value(depth), ints.value(chain))
    return build.loop_carrying(*bounds, [*zeros, *places], link)[:-2]


def _loop(
    begin: Int, end: Int, stride: int, carried: list[Value], trip: Callable[[int, list[Value]], list[Value]]
) -> list[Value]:
    if isinstance(begin, int) and isinstance(end, int):
        if end <= begin:
            return carried
        if end - begin <= stride:
            return trip(stride, carried)
    bounds = (ints.value(begin), ints.value(end), ints.value(stride))
    return build.loop_carrying(*bounds, carried, lambda _, values: trip(stride, values))
