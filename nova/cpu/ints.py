"""Index arithmetic that folds: an `Int` is a Python int known now, or an i64 value known at run time.

Shapes are static, so most of an address folds away while it is emitted, and what is left is what LLVM sees. All
quantities here are non-negative: division and remainder are unsigned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeAlias

from nova.cpu import build
from nova.fusion.access import Access
from nova.lowering import lanes as ln
from nova.lowering.lanes import Value
from nova.mlir import ir

if TYPE_CHECKING:
    from nova.cpu.parallel import Region

Int: TypeAlias = int | Value


_pool: ContextVar[tuple[ir.Block, dict[int, Value]] | None] = ContextVar("constant pool", default=None)


@contextmanager
def constants_at(block: ir.Block) -> Iterator[None]:
    """Within it, equal constants are one operation at the start of `block`, a function's entry: a third fewer ops."""
    token = _pool.set((block, {}))
    try:
        yield
    finally:
        _pool.reset(token)


def pooled(emit: Callable[[Region], None]) -> Callable[[Region], None]:
    """A phase's body with its constants at the start of the function."""

    def emit_pooled(region: Region) -> None:
        with constants_at(region.begin.owner):
            emit(region)

    return emit_pooled


def value(x: Int) -> Value:
    """`x` as an i64 value."""
    if not isinstance(x, int):
        return x
    pool = _pool.get()
    if pool is None:
        return ln.i64(x)
    block, known = pool
    if x not in known:
        with ir.InsertionPoint.at_block_begin(block):
            known[x] = ln.i64(x)
    return known[x]


def add(*terms: Int) -> Int:
    """Sum; the constant part comes last, where an addressing mode can take it."""
    constant = sum(t for t in terms if isinstance(t, int))
    total: Value | None = None
    for term in terms:
        if not isinstance(term, int):
            total = term if total is None else ln.addi(total, term)
    if total is None:
        return constant
    return ln.addi(total, value(constant)) if constant else total


def sub(a: Int, b: Int) -> Int:
    if isinstance(b, int):
        return add(a, -b)
    return ln.subi(value(a), b)


def mul(a: Int, b: Int) -> Int:
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    if isinstance(a, int):
        a, b = b, a
    if isinstance(b, int):
        return 0 if b == 0 else a if b == 1 else ln.muli(a, value(b))
    return ln.muli(a, b)


def div(a: Int, b: int) -> Int:
    if isinstance(a, int):
        return a // b
    return a if b == 1 else ln.divui(a, value(b))


def rem(a: Int, b: int) -> Int:
    if isinstance(a, int):
        return a % b
    return 0 if b == 1 else ln.remui(a, value(b))


def ceil_div(a: Int, b: int) -> Int:
    return div(add(a, b - 1), b)


def minimum(a: Int, b: Int) -> Int:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return ln.minsi(value(a), value(b))


def maximum(a: Int, b: Int) -> Int:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return ln.maxsi(value(a), value(b))


def equal(a: Int, b: Int) -> bool | Value:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return ln.cmpi("eq", value(a), value(b))


def at_most(a: Int, bound: int, always: bool) -> bool | Value:
    """a <= bound; `always` says that it is known to hold."""
    if always:
        return True
    return a <= bound if isinstance(a, int) else ln.cmpi("sle", a, value(bound))


def at_least(a: Int, b: Int) -> bool | Value:
    """a >= b."""
    if isinstance(a, int) and isinstance(b, int):
        return a >= b
    return ln.cmpi("sge", value(a), value(b))


def both(a: bool | Value, b: bool | Value) -> bool | Value:
    """Logical and of conditions that may be known already."""
    if isinstance(a, bool):
        return b if a else False
    if isinstance(b, bool):
        return a if b else False
    return ln.andi(a, b)


@contextmanager
def loop(begin: Int, end: Int, step: int = 1) -> Iterator[Int]:
    """`with loop(0, n, 6) as i:`; a loop of exactly one trip is no loop, and `i` is then an int if `begin` is."""
    if isinstance(begin, int) and isinstance(end, int) and 0 < end - begin <= step:
        yield begin
        return
    with build.loop(value(begin), value(end), value(step)) as i:
        yield i


def digits(flat: Int, sizes: Sequence[int]) -> list[Int]:
    """The mixed-radix digits of `flat`, outermost first."""
    found: list[Int] = []
    for size in reversed(sizes[1:]):
        found.append(rem(flat, size))
        flat = div(flat, size)
    if sizes:
        found.append(flat)
    return found[::-1]


def from_index(x: Value) -> Value:
    return ln.cast("index_cast", x, ln.int_type(64))


def offset_pointer(pointer: Value, offset: Int, element: ir.Type) -> Value:
    """`pointer + offset` elements."""
    return pointer if isinstance(offset, int) and offset == 0 else ln.address(pointer, value(offset), element)


def offset_along(access: Access, dims: Sequence[int], sizes: Sequence[int], flat: Int) -> Int:
    """Contribution to an access's offset of a flat position in the product of `dims` (outermost first)."""
    if not access.touches(dims):
        return 0
    places = digits(flat, [sizes[d] for d in dims])
    return add(*(mul(p, access.coefficients[d]) for p, d in zip(places, dims, strict=True)))
