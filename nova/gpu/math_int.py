"""Integer operations without an instruction: divisions that round down or up, and powers."""

from __future__ import annotations

from collections.abc import Callable

from nova.lowering import lanes as ln
from nova.lowering.lanes import Value
from nova.mlir import ir, scf


def _like(x: Value, number: int) -> Value:
    return ln.constant(x.type, number)


def _rounded_division(up: bool) -> Callable[[Value, Value], Value]:
    """Towards minus or plus infinity: the truncated quotient, and one less or more where a remainder is left over."""

    def divide(a: Value, b: Value) -> Value:
        quotient = ln.divsi(a, b)
        inexact = ln.cmpi("ne", ln.muli(quotient, b), a)
        differ = ln.cmpi("slt", ln.xori(a, b), _like(a, 0))
        if up:
            differ = ln.xori(differ, _like(differ, 1))
        return ln.addi(quotient, ln.select(ln.andi(inexact, differ), _like(a, 1 if up else -1), _like(a, 0)))

    return divide


def ceildivui(a: Value, b: Value) -> Value:
    quotient = ln.divui(a, b)
    inexact = ln.cmpi("ne", ln.muli(quotient, b), a)
    return ln.addi(quotient, ln.select(inexact, _like(a, 1), _like(a, 0)))


def ipowi(x: Value, n: Value) -> Value:
    """Squares and multiplies while any exponent has bits left; a negative one gives 1 / x truncated."""
    one, zero = _like(x, 1), _like(x, 0)
    negative = ln.cmpi("slt", n, zero)
    types = [x.type] * 3
    loop = scf.WhileOp(types, [one, x, ln.select(negative, zero, n)])
    before = loop.before.blocks.append(*types)
    with ir.InsertionPoint(before):
        left = ln.cmpi("ne", before.arguments[2], zero)
        if ln.lanes_of(x.type):
            kind = {"kind": ir.Attribute.parse("#vector.kind<or>")}
            left = ln.create("vector.reduction", ln.int_type(1), [left], kind)
        scf.ConditionOp(left, list(before.arguments))
    after = loop.after.blocks.append(*types)
    with ir.InsertionPoint(after):
        result, base, rest = after.arguments
        odd = ln.cmpi("ne", ln.andi(rest, one), zero)
        result = ln.select(odd, ln.muli(result, base), result)
        scf.YieldOp([result, ln.muli(base, base), ln.shrui(rest, one)])
    sign = ln.select(ln.cmpi("ne", ln.andi(n, one), zero), _like(x, -1), one)
    inverse = ln.select(ln.cmpi("eq", x, _like(x, -1)), sign, zero)
    inverse = ln.select(ln.cmpi("eq", x, one), one, inverse)
    return ln.select(negative, inverse, loop.results[0])


FUNCTIONS: dict[str, Callable[..., Value]] = {
    "arith.floordivsi": _rounded_division(False), "arith.ceildivsi": _rounded_division(True),
    "arith.ceildivui": ceildivui, "math.ipowi": ipowi,
}  # fmt: skip
