"""float32 functions from NVPTX instructions: exp, log, tanh, erf, sin, ... of scalars and vectors, within about 2 ulp.

    exp(x):   t = fma(x, log2(e), magic)    n = t - magic    f = fma(x, log2(e), -n), twice    ex2.approx(f) * 2^n

The special-function unit gives 2^x, 1/x and 1/sqrt(x) to 22 bits; these functions feed it arguments small enough
that nothing is lost. NaN passes, infinities and denormals come out as they should. What is not written out here is
computed in f64 and rounded (nova/gpu/math_f64.py): those functions are rare in a training step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from nova.gpu import math_f64
from nova.lowering import lanes as ln
from nova.lowering import vmath
from nova.lowering.constants import ERF_FAR, ERF_NEAR, LOG2_E, PI_2_F32, TANH_NEAR, TWO_OVER_PI
from nova.lowering.lanes import Value
from nova.lowering.vmath import c, has_bit, polynomial
from nova.mlir import ir, scf

LOG2_E_HIGH, LOG2_E_LOW = 1.44269502162933349609375, 1.925963033500011e-8
BIAS_MAGIC = (
    12582912.0 + 127.0
)  # adding it rounds to an integer, which then sits, biased as an exponent, in the low bits
EXPONENT_LIMIT = 87.336  # 126 ln 2


# --- the special-function unit ---------------------------------------------------------------------------------------


def lanewise(x: Value, function: Callable[[Value], Value]) -> Value:
    """A function of scalars on every lane."""
    lanes = ln.lanes_of(x.type)
    if not lanes:
        return function(x)
    return ln.from_lanes([function(ln.lane(x, k)) for k in range(lanes)])


def _flush(flush: bool) -> dict[str, ir.Attribute]:
    return {"ftz": ir.BoolAttr.get(flush)}


def ex2(x: Value, flush: bool = True) -> Value:
    """2^x; denormals are flushed to zero unless asked otherwise, which costs three instructions."""
    return lanewise(x, lambda lane: ln.create("nvvm.ex2", lane.type, [lane], _flush(flush)))


def reciprocal(x: Value) -> Value:
    """1 / x to 1 ulp; denormal operands and results count as zero."""
    return lanewise(x, lambda lane: ln.create("nvvm.rcp.approx.ftz.f", lane.type, [lane]))


def _intrinsic(name: str, x: Value) -> Value:
    segments = {
        "intrin": ir.StringAttr.get(name), "op_bundle_sizes": ir.DenseI32ArrayAttr.get([]),
        "operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 0]),
    }  # fmt: skip
    return ln.create("llvm.call_intrinsic", x.type, [x], segments)


def rsqrt(x: Value) -> Value:
    return lanewise(x, lambda lane: _intrinsic("llvm.nvvm.rsqrt.approx.f", lane))


def divide(a: Value, b: Value) -> Value:
    """a / b by a reciprocal and one correction: 1 ulp, for |b| and |a / b| within 2^-126 ... 2^126 and b finite."""
    inverse = reciprocal(b)
    quotient = ln.mulf(a, inverse)
    rest = ln.fma(ln.negf(b), quotient, a)
    return ln.fma(rest, inverse, quotient)


def _minnum(a: Value, b: Value) -> Value:
    return ln.create("arith.minnumf", a.type, [a, b])


def _maxnum(a: Value, b: Value) -> Value:
    return ln.create("arith.maxnumf", a.type, [a, b])


# --- exponentials ----------------------------------------------------------------------------------------------------


def exp(x: Value) -> Value:
    """Only the exponent is clamped: x itself then drives ex2 to infinity or zero, and NaN through."""
    clamped = _maxnum(_minnum(x, c(x, EXPONENT_LIMIT)), c(x, -EXPONENT_LIMIT))
    shifted = ln.fma(clamped, c(x, LOG2_E), c(x, BIAS_MAGIC))
    n = ln.subf(shifted, c(x, BIAS_MAGIC))
    fraction = ln.fma(x, c(x, LOG2_E_HIGH), ln.negf(n))
    fraction = ln.fma(x, c(x, LOG2_E_LOW), fraction)
    bits = ln.cast("bitcast", shifted, ln.int_type(32))
    power = ln.cast("bitcast", ln.shli(bits, ln.constant(bits.type, 23)), ln.f32())
    return ln.mulf(ex2(fraction), power)


def exp2(x: Value) -> Value:
    return ex2(x, flush=False)


def tanh(x: Value) -> Value:
    """x P(x^2) below 0.55, 1 - 2 / (exp(2|x|) + 1) above."""
    t, s = ln.absf(x), ln.mulf(x, x)
    small = ln.fma(ln.mulf(polynomial(s, TANH_NEAR), s), x, x)
    power = ex2(ln.mulf(t, c(x, 2.0 * LOG2_E)))
    large = ln.fma(reciprocal(ln.addf(power, c(x, 1.0))), c(x, -2.0), c(x, 1.0))
    return ln.select(ln.cmpf("ogt", t, c(x, 0.55)), ln.copysign(large, x), small)


def erf(x: Value) -> Value:
    """x P(x^2) below 0.93, 1 - exp(Q(|x|)) above."""
    t, s = ln.absf(x), ln.mulf(x, x)
    small = ln.fma(polynomial(s, ERF_NEAR), x, x)
    capped = _minnum(t, c(x, 4.0))  # erf(4) rounds to 1
    exponent = ln.fma(polynomial(capped, ERF_FAR), capped, ln.negf(capped))
    decay = ex2(ln.mulf(exponent, c(x, LOG2_E)))
    large = ln.copysign(ln.subf(c(x, 1.0), decay), x)
    return ln.select(ln.cmpf("ogt", t, c(x, 0.927734375)), large, small)


# --- logarithms ------------------------------------------------------------------------------------------------------


def log1p(x: Value) -> Value:
    """log(u) with u = 1 + x, plus what the rounding of u lost (which needs few bits: an approximate quotient)."""
    one = c(x, 1.0)
    u = ln.addf(x, one)
    lost = ln.mulf(ln.subf(x, ln.subf(u, one)), reciprocal(u))
    lost = ln.select(ln.cmpf("ord", lost, lost), lost, c(x, 0.0))  # u = 0 or infinite
    result = ln.addf(vmath.log(u), lost)
    return ln.select(ln.cmpf("oeq", u, one), x, result)


# --- trigonometry ----------------------------------------------------------------------------------------------------

_SIN = [-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1]
_COS = [2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2, -0.5]
_NEAR = 105615.0  # up to here three fused steps reduce the argument exactly enough


def sine_cosine(r: Value) -> tuple[Value, Value]:
    """Of |r| <= pi / 4."""
    s = ln.mulf(r, r)
    sine = ln.fma(ln.mulf(polynomial(s, _SIN), s), r, r)
    return sine, ln.fma(polynomial(s, _COS), s, c(r, 1.0))


def _reduce(x: Value) -> tuple[Value, Value]:
    """x = n pi/2 + r: (n as i32, r) for |x| < 105615."""
    n = ln.roundeven(ln.mulf(x, c(x, TWO_OVER_PI)))
    r = x
    for part in PI_2_F32:
        r = ln.fma(n, c(x, -part), r)
    return ln.cast("fptosi", n, ln.int_type(32)), r


def _reduce_any(x: Value, n: Value, r: Value) -> tuple[Value, Value]:
    """Replaces (n, r) in lanes whose x is large, if there are any: each such lane on its own, in integers."""
    far = ln.cmpf("oge", ln.absf(x), c(x, _NEAR))
    if not ln.lanes_of(x.type):
        return _if(far, [n.type, r.type], lambda: _reduce_far(x), lambda: (n, r))
    kind = {"kind": ir.Attribute.parse("#vector.kind<or>")}
    some = ln.create("vector.reduction", ln.int_type(1), [far], kind)

    def by_lane() -> tuple[Value, Value]:
        pairs = []
        for k in range(ln.lanes_of(x.type)):
            lane, old = ln.lane(x, k), (ln.lane(n, k), ln.lane(r, k))
            pairs.append(
                _if(ln.lane(far, k), [old[0].type, old[1].type], lambda x=lane: _reduce_far(x), lambda o=old: o)
            )
        return ln.from_lanes([p[0] for p in pairs]), ln.from_lanes([p[1] for p in pairs])

    return _if(some, [n.type, r.type], by_lane, lambda: (n, r))


def _if(condition: Value, types: list[ir.Type], then: Callable, otherwise: Callable) -> tuple[Value, Value]:  # type: ignore[type-arg]
    op = scf.IfOp(condition, types, has_else=True)
    for block, function in ((op.then_block, then), (op.else_block, otherwise)):
        with ir.InsertionPoint(block):
            scf.YieldOp(list(function()))
    return op.results[0], op.results[1]


_TWO_OVER_PI_WORDS = (0xA2F9836E, 0x4E441529, 0xFC2757D1, 0xF534DDC0, 0xDB629599, 0x3C439041)  # 2/pi = 0.w0 w1 ...


def _reduce_far(x: Value) -> tuple[Value, Value]:
    """Payne and Hanek's reduction of one f32 >= 2^16: x * 2/pi in fixed point, of which the high bits fall away."""
    i32, i64 = ln.int_type(32), ln.int_type(64)
    word = lambda number: ln.constant(i64, number)  # noqa: E731
    bits = ln.cast("bitcast", x, i32)
    exponent = ln.andi(ln.shrui(bits, ln.constant(i32, 23)), ln.constant(i32, 255))
    exponent = ln.subi(exponent, ln.constant(i32, 128))  # x = mantissa * 2^(exponent - 31), mantissa of 32 bits
    mantissa = ln.ori(ln.shli(bits, ln.constant(i32, 8)), ln.constant(i32, 1 << 31))
    mantissa = ln.cast("extui", mantissa, i64)
    digits, carry = [], word(0)  # of mantissa * 0.w0 w1 ..., 32 bits each, low to high
    for number in reversed(_TWO_OVER_PI_WORDS):
        product = ln.addi(ln.muli(mantissa, word(number)), carry)
        digits.append(ln.andi(product, word(0xFFFFFFFF)))
        carry = ln.shrui(product, word(32))
    digits.append(carry)
    digits.reverse()
    skip = ln.shrui(exponent, ln.constant(i32, 5))  # whole words above the binary point, 0 to 3
    window = [_choose(skip, digits[k : k + 4]) for k in range(3)]
    shift = ln.cast("extui", ln.andi(exponent, ln.constant(i32, 31)), i64)
    high = ln.ori(ln.shli(window[0], word(32)), window[1])
    low = ln.shrui(window[2], ln.subi(word(32), shift))
    fixed = ln.ori(ln.shli(high, shift), low)  # the quotient modulo 4 as 2.62 bits
    n = ln.shrui(ln.addi(ln.shrui(fixed, word(61)), word(1)), word(1))  # rounded to nearest
    fraction = ln.subi(fixed, ln.shli(n, word(62)))  # signed: wraps around
    wide = ln.cast("sitofp", fraction, ln.f64())
    r = ln.cast("truncf", ln.mulf(wide, ln.constant(ln.f64(), math.pi / 2 / 2.0**62)), ln.f32())
    n = ln.cast("trunci", n, i32)
    negative = ln.cmpi("slt", bits, ln.constant(i32, 0))
    n = ln.select(negative, ln.subi(ln.constant(i32, 0), n), n)
    finite = ln.cmpf("olt", ln.absf(x), c(x, math.inf))
    r = ln.select(finite, ln.select(negative, ln.negf(r), r), c(x, math.nan))
    return n, r


def _choose(index: Value, values: list[Value]) -> Value:
    result = values[0]
    for k, value in enumerate(values[1:], 1):
        result = ln.select(ln.cmpi("eq", index, ln.constant(index.type, k)), value, result)
    return result


def _by_quadrant(x: Value, offset: int) -> Value:
    """sin(x + offset pi/2)."""
    n, r = _reduce_any(x, *_reduce(x))
    sine, cosine = sine_cosine(r)
    n = ln.addi(n, ln.constant(n.type, offset)) if offset else n
    value = ln.select(has_bit(n, 1), cosine, sine)
    return ln.select(has_bit(n, 2), ln.negf(value), value)


def sin(x: Value) -> Value:
    return _by_quadrant(x, 0)


def cos(x: Value) -> Value:
    return _by_quadrant(x, 1)


def tan(x: Value) -> Value:
    """sin / cos of the reduced argument, in f64."""
    n, r = _reduce_any(x, *_reduce(x))
    _, sine, cosine = math_f64.quadrant(ln.cast("extf", r, ln.f64()))
    odd = has_bit(n, 1)
    quotient = ln.divf(ln.select(odd, ln.negf(cosine), sine), ln.select(odd, sine, cosine))
    return ln.cast("truncf", quotient, ln.f32())


# --- the table -------------------------------------------------------------------------------------------------------


def _through_f64(name: str) -> Callable[..., Value]:
    """In f64, one lane after another: a vector of them would need too many registers."""

    def one(*operands: Value) -> Value:
        wide = [ln.cast("extf", x, ln.f64()) for x in operands]
        return ln.cast("truncf", math_f64.FUNCTIONS[name](*wide), ln.f32())

    def function(*operands: Value) -> Value:
        lanes = ln.lanes_of(operands[0].type)
        if not lanes:
            return one(*operands)
        return ln.from_lanes([one(*(ln.lane(x, k) for x in operands)) for k in range(lanes)])

    return function


FUNCTIONS: dict[str, Callable[..., Value]] = {
    "math.exp": exp, "math.exp2": exp2, "math.expm1": vmath.expm1, "math.log": vmath.log, "math.log2": vmath.log2,
    "math.log10": vmath.log10, "math.log1p": log1p, "math.tanh": tanh, "math.erf": erf, "math.sin": sin,
    "math.cos": cos, "math.tan": tan, "math.rsqrt": rsqrt,
}  # fmt: skip
FUNCTIONS |= {name: _through_f64(name) for name in math_f64.FUNCTIONS if name not in FUNCTIONS}
