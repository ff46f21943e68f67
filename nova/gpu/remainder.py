"""The exact remainder of floating-point division, x - trunc(x / y) * y, with the sign of x.

One fused step is exact while the quotient is small. A larger one is taken off in pieces: y is scaled by a power of two
until the quotient is small, and each step leaves a remainder that is exact again.
"""

from __future__ import annotations

import math

from nova.lowering import lanes as ln
from nova.lowering.lanes import Value
from nova.mlir import ir, scf

_LIMIT = {32: 2.0**22, 64: 2.0**51}  # quotients below are exact to the unit


def _c(x: Value, number: float) -> Value:
    return ln.constant(x.type, number)


def _step(a: Value, b: Value) -> Value:
    """a mod b for 0 <= a < limit * b: the quotient may be off by one."""
    quotient = ln.trunc(ln.divf(a, b))
    rest = ln.fma(ln.negf(quotient), b, a)
    rest = ln.select(ln.cmpf("olt", rest, _c(a, 0.0)), ln.addf(rest, b), rest)
    return ln.select(ln.cmpf("oge", rest, b), ln.subf(rest, b), rest)


def remainder(x: Value, y: Value) -> Value:
    """x mod y with the sign of x; NaN for y = 0 or an infinite x; x for an infinite y."""
    width = ln.width_of(ln.element_of(x.type))
    a, b = ln.absf(x), ln.absf(y)
    far = ln.cmpf("ogt", a, ln.mulf(b, _c(x, _LIMIT[width])))
    far = ln.andi(far, ln.cmpf("olt", a, _c(x, math.inf)))
    far = ln.andi(far, ln.cmpf("ogt", b, _c(x, 0.0)))
    near = _step(a, b)
    rest = _unless_far(a, b, far, near)
    rest = ln.select(ln.cmpf("oeq", b, _c(x, math.inf)), a, rest)
    bad = ln.create("arith.ori", far.type, [ln.cmpf("oeq", a, _c(x, math.inf)), ln.cmpf("oeq", b, _c(x, 0.0))])
    rest = ln.select(bad, _c(x, math.nan), rest)
    rest = ln.select(ln.cmpf("uno", x, y), ln.addf(x, y), rest)
    return ln.copysign(rest, x)


def _unless_far(a: Value, b: Value, far: Value, near: Value) -> Value:
    """`near`, but lanes with a large quotient by a loop of their own, if there are any."""
    lanes = ln.lanes_of(a.type)
    if not lanes:
        return _if(far, lambda: _loop(a, b), near)
    kind = {"kind": ir.Attribute.parse("#vector.kind<or>")}
    some = ln.create("vector.reduction", ln.int_type(1), [far], kind)

    def by_lane() -> Value:
        parts = []
        for k in range(lanes):
            numbers = ln.lane(a, k), ln.lane(b, k)
            parts.append(_if(ln.lane(far, k), lambda n=numbers: _loop(*n), ln.lane(near, k)))
        return ln.from_lanes(parts)

    return _if(some, by_lane, near)


def _if(condition: Value, then, otherwise: Value) -> Value:  # type: ignore[no-untyped-def]
    op = scf.IfOp(condition, [otherwise.type], has_else=True)
    with ir.InsertionPoint(op.then_block):
        scf.YieldOp([then()])
    with ir.InsertionPoint(op.else_block):
        scf.YieldOp([otherwise])
    return op.results[0]


def _loop(a: Value, b: Value) -> Value:
    """a mod b of scalars, whatever the quotient."""
    limit = _LIMIT[ln.width_of(a.type)]
    loop = scf.WhileOp([a.type], [a])
    before = loop.before.blocks.append(a.type)
    with ir.InsertionPoint(before):
        (rest,) = before.arguments
        scf.ConditionOp(ln.cmpf("oge", rest, b), [rest])
    after = loop.after.blocks.append(a.type)
    with ir.InsertionPoint(after):
        (rest,) = after.arguments
        scaled = _grown(rest, b, limit)
        scf.YieldOp([_step(rest, scaled)])
    return loop.results[0]


def _grown(a: Value, b: Value, limit: float) -> Value:
    """b times the power limit^k for which a / b is below the limit (and at least 1)."""
    loop = scf.WhileOp([a.type], [b])
    before = loop.before.blocks.append(a.type)
    with ir.InsertionPoint(before):
        (scaled,) = before.arguments
        larger = ln.mulf(scaled, _c(a, limit))
        scf.ConditionOp(ln.cmpf("ole", larger, a), [scaled])
    after = loop.after.blocks.append(a.type)
    with ir.InsertionPoint(after):
        (scaled,) = after.arguments
        scf.YieldOp([ln.mulf(scaled, _c(a, limit))])
    return loop.results[0]
