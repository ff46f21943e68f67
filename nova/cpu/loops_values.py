"""What loop emission is made of: folded index arithmetic, combining operations, cursors over memory.

Cursor(pointer, stride=1).read(i, 8)    ->   llvm.load pointer[i] : vector<8xf32>
stride 0: one scalar for all lanes;     other strides: a load a lane
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nova.cpu import body
from nova.cpu.loops_ir import Index, Init
from nova.lowering import lanes as ln
from nova.lowering.lanes import Value
from nova.mlir import ir, scf

Key = tuple[int, int]  # (generic, result number)


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in memory: a base pointer and an affine element offset."""

    pointer: Value
    index: Index
    element: ir.Type


# --- small integer arithmetic on i64, folding what is known ----------------------------------------------------------


def add(a: Value | int, b: Value | int) -> Value | int:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if isinstance(a, int) and a == 0:
        return b
    if isinstance(b, int) and b == 0:
        return a
    return ln.addi(value_of(a), value_of(b))


def mul(a: Value | int, factor: int) -> Value | int:
    if isinstance(a, int):
        return a * factor
    return a if factor == 1 else ln.muli(a, ln.i64(factor))


def value_of(a: Value | int) -> Value:
    return ln.i64(a) if isinstance(a, int) else a


def loop_i64(
    begin: Value | int,
    end: Value | int,
    step: int,
    inits: Sequence[Value],
    emit: Callable[[Value, list[Value]], Sequence[Value]],
) -> list[Value]:
    """An scf.for over i64 carrying values; nothing at all if it is known to be empty."""
    if isinstance(begin, int) and isinstance(end, int):
        if begin >= end:
            return list(inits)
        if begin + step >= end:  # one iteration
            return list(emit(ln.i64(begin), list(inits)))
    op = scf.ForOp(value_of(begin), value_of(end), ln.i64(step), list(inits))
    with ir.InsertionPoint(op.body):
        scf.YieldOp(list(emit(op.induction_variable, list(op.inner_iter_args))))
    return list(op.results)


# --- combining -------------------------------------------------------------------------------------------------------

_IDENTITIES: dict[str, Callable[[ir.Type], float | int]] = {
    "arith.addf": lambda t: 0.0,
    "arith.mulf": lambda t: 1.0,
    "arith.maximumf": lambda t: float("-inf"),
    "arith.maxnumf": lambda t: float("-inf"),
    "arith.minimumf": lambda t: float("inf"),
    "arith.minnumf": lambda t: float("inf"),
    "arith.addi": lambda t: 0,
    "arith.muli": lambda t: 1,
    "arith.maxsi": lambda t: -(1 << (ln.width_of(t) - 1)) if ln.width_of(t) > 1 else 1,
    "arith.minsi": lambda t: (1 << (ln.width_of(t) - 1)) - 1 if ln.width_of(t) > 1 else 0,
    "arith.maxui": lambda t: 0,
    "arith.minui": lambda t: (1 << ln.width_of(t)) - 1,
    "arith.ori": lambda t: 0,
    "arith.xori": lambda t: 0,
    "arith.andi": lambda t: (1 << ln.width_of(t)) - 1,
}


def identity(combiner: str, type_: ir.Type) -> Value:
    return ln.constant(type_, _IDENTITIES[combiner](ln.element_of(type_)))


def shrink(combiner: str, value: Value, lanes: int) -> Value:
    """Combines halves until `lanes` are left: the order depends on the number of lanes only."""
    width = ln.lanes_of(value.type)
    while width > lanes:
        half = width // 2
        low = ln.shuffle(value, value, range(half))
        high = ln.shuffle(value, value, range(half, width))
        value, width = body.combine(combiner, low, high), half
    return value


def horizontal(combiner: str, value: Value) -> Value:
    """All lanes combined."""
    return ln.lane(shrink(combiner, value, 1), 0)


def is_identity(combiner: str, init: Init, element: ir.Type) -> bool:
    """Whether starting from `init` is the same as starting from the combiner's identity."""
    if init.number is None:
        return init.access is None
    number = init.number.value if hasattr(init.number, "value") else None
    return number == _IDENTITIES[combiner](element)


# --- cursors: an access inside a loop over lanes ---------------------------------------------------------------------


@dataclass
class Cursor:
    """An access with everything but the lane loop's own index added up."""

    pointer: Value
    stride: int  # elements, along the lane loop
    element: ir.Type
    uniform: Value | None = None  # the value, if the stride is 0 and it was loaded in front of the loop

    def at(self, i: Value, extra: int = 0) -> Value:
        offset = value_of(add(mul(i, self.stride), extra))
        return ln.address(self.pointer, offset, self.element)

    def read(self, i: Value, lanes: int) -> Value:
        if self.uniform is not None:
            return self.uniform
        if self.stride == 0:
            return ln.load(self.pointer, self.element)
        if self.stride == 1 or not lanes:
            return ln.load(self.at(i), self.element, lanes)
        values = [ln.load_raw(self.at(i, k * self.stride), ln.memory_type(self.element)) for k in range(lanes)]
        value = ln.from_lanes(values)
        if self.element == ln.int_type(1):
            value = ln.cmpi("ne", value, ln.constant(value.type, 0))
        return value

    def write(self, value: Value, i: Value, lanes: int, nontemporal: bool = False) -> None:
        if not lanes or self.stride == 0:
            ln.store(value if not ln.lanes_of(value.type) else ln.lane(value, lanes - 1), self.at(i))
        elif self.stride == 1:
            ln.store(ln.splat(value, lanes), self.at(i), nontemporal)
        else:
            value = ln.splat(value, lanes)
            for k in range(lanes):
                ln.store(ln.lane(value, k), self.at(i, k * self.stride))
