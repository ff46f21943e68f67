"""Cheaper float32 functions where every use of the result is rounded to 16 bits, so that few bits of it are kept.

    %e = math.erf %x : f32          erf to 2e-7 in absolute terms, lost in 1 + erf: 12 instructions, not 21
    %s = arith.addf %one, %e        exp to 1e-5: two instructions, not nine
    %y = arith.mulf %h, %s
    %r = arith.truncf %y : f32 to bf16

An activation in an epilogue costs as much as its contraction's last steps; half of that is bits that are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nova.gpu.math_f32 import ex2, reciprocal
from nova.lowering import lanes as ln
from nova.lowering.constants import LOG2_E
from nova.lowering.lanes import Value
from nova.lowering.vmath import c, polynomial
from nova.mlir import ir

MAX_OPS = 64  # uses followed from one operation
# what passes errors on without making them larger than a few times relative to its result
_FLOW = frozenset({
    "arith.mulf", "arith.addf", "arith.subf", "arith.negf", "math.fma", "arith.maximumf", "arith.minimumf",
    "arith.maxnumf", "arith.minnumf", "vector.shuffle", "vector.extract_strided_slice", "vector.insert_strided_slice",
    "vector.from_elements", "vector.extract", "vector.insert", "vector.broadcast",
})  # fmt: skip
_HALVES = ("f16", "bf16")
# Abramowitz and Stegun 7.1.26
_ERF_T = 0.3275911
_ERF = [1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592]


def exp(x: Value) -> Value:
    """e^x; the rounding of the product costs |x| 2^-24 in relative terms."""
    return ex2(ln.mulf(x, c(x, LOG2_E)))


def erf(x: Value) -> Value:
    """1 - t P(t) exp(-x^2) with t = 1 / (1 + p |x|): 1.5e-7 from erf, everywhere."""
    size = ln.absf(x)
    t = reciprocal(ln.fma(size, c(x, _ERF_T), c(x, 1.0)))
    decay = ex2(ln.mulf(ln.mulf(x, c(x, -LOG2_E)), x))
    tail = ln.mulf(ln.mulf(polynomial(t, _ERF), t), decay)
    return ln.copysign(ln.subf(c(x, 1.0), tail), x)


def tanh(x: Value) -> Value:
    """1 - 2 / (exp(2|x|) + 1): 2e-7 from tanh, everywhere."""
    power = ex2(ln.mulf(ln.absf(x), c(x, 2.0 * LOG2_E)))
    return ln.copysign(ln.fma(reciprocal(ln.addf(power, c(x, 1.0))), c(x, -2.0), c(x, 1.0)), x)


# of these the absolute error counts, so they must meet a one
_NEAR_ONE: dict[str, Callable[[Value], Value]] = {"math.erf": erf, "math.tanh": tanh}
RELATIVE: dict[str, Callable[[Value], Value]] = {"math.exp": exp}


def choose(op: ir.Operation) -> Callable[..., Value] | None:
    """The cheap function for an f32 operation, if its uses allow it."""
    if op.name in RELATIVE:
        return RELATIVE[op.name] if _is_narrowed(op.results[0]) else None
    if op.name in _NEAR_ONE and _meets_one(op.results[0]) and _is_narrowed(op.results[0]):
        return _NEAR_ONE[op.name]
    return None


def _users(value: ir.Value) -> Iterator[ir.Operation]:
    for use in value.uses:
        yield use.owner.operation if hasattr(use.owner, "operation") else use.owner


def _meets_one(value: ir.Value) -> bool:
    """Whether the value is only ever added to 1, or squared and taken from 1."""
    return all(_adds_one(user, value) for user in _users(value))


def _adds_one(user: ir.Operation, value: ir.Value) -> bool:
    if user.name == "arith.mulf" and all(operand == value for operand in user.operands):
        return all(u.name == "arith.subf" and _is_one(u.operands[0]) for u in _users(user.results[0]))
    return user.name == "arith.addf" and any(_is_one(operand) for operand in user.operands)


def _is_one(value: ir.Value) -> bool:
    """A constant 1, or a vector of them."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return False
    if owner.name == "vector.broadcast":
        return _is_one(owner.operands[0])
    if owner.name != "arith.constant":
        return False
    attribute = owner.attributes["value"]
    if isinstance(attribute, ir.FloatAttr):
        return bool(attribute.value == 1.0)
    return (
        isinstance(attribute, ir.DenseElementsAttr) and attribute.is_splat and attribute.get_splat_value().value == 1.0
    )


def _is_narrowed(value: ir.Value) -> bool:
    """Whether everything that is computed from the value is rounded to 16 bits before it goes anywhere."""
    pending, seen = [value], 0
    while pending:
        for user in _users(pending.pop()):
            seen += 1
            if user.name == "arith.truncf" and str(ln.element_of(user.results[0].type)) in _HALVES:
                continue
            if user.name not in _FLOW or seen > MAX_OPS:
                return False
            pending += list(user.results)
    return seen > 0
