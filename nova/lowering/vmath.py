"""Vector mathematics: exp, log, erf, tanh, sin, ... on float lanes, as arith and fma operations.

    y = vmath.exp(x)        x: f32, f64 or vector of them;   y: the same type

MLIR's own route calls scalar libm once a lane (4 to 30 ns an element); these polynomials take 0.5 to 1 ns and are
within 2 ulp. Every function is right at NaN, infinities, zeros, denormals and huge arguments. f64, and the functions
not written out here, go through the `math` dialect to libm: f64 is for checking, not for speed.

Two rules decide the special cases. Clamps are written as comparisons that are false for NaN, so that NaN passes. And
2^n is applied as two factors, so that the result overflows to infinity and underflows through denormals to zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from nova.lowering import lanes as ln
from nova.lowering.constants import ERF_FAR, ERF_NEAR, LN2_F32, LOG2_E, PI_2_F64, TANH_NEAR, TWO_OVER_PI
from nova.lowering.lanes import Value

LN2_HIGH, LN2_LOW = LN2_F32
ROUND_MAGIC = 12582912.0  # 1.5 * 2^23: adding it rounds an f32 to an integer, which then sits in the low bits


def c(x: Value, number: float) -> Value:
    """A constant of the type of `x`."""
    return ln.constant(x.type, number)


def polynomial(x: Value, coefficients: list[float]) -> Value:
    """Horner's rule, highest power first."""
    result = c(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result = ln.fma(result, x, c(x, coefficient))
    return result


def _libm(name: str, *operands: Value) -> Value:
    """The `math` operation, one library call a lane."""
    return ln.create(f"math.{name}", operands[0].type, list(operands))


def _in_f32(function: Callable[..., Value]) -> Callable[..., Value]:
    """f64 goes to libm under the same name; bf16 and f16 are computed in f32 and rounded once."""

    @functools.wraps(function)
    def wrapper(*operands: Value) -> Value:
        element = ln.element_of(operands[0].type)
        if element == ln.f32():
            return function(*operands)
        if ln.is_narrow_float(element):
            return ln.narrow(function(*(ln.extend(x) for x in operands)), element)
        return _libm(function.__name__, *operands)

    return wrapper


# --- exponentials ----------------------------------------------------------------------------------------------------

_EXP = [1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1]


def _round_to_integer(x: Value) -> tuple[Value, Value]:
    """(n as float, n as i32) for an f32 that is small and already scaled."""
    shifted = ln.addf(x, c(x, ROUND_MAGIC))
    return ln.subf(shifted, c(x, ROUND_MAGIC)), ln.cast("bitcast", shifted, ln.int_type(32))


def _power_of_two(bits: Value) -> Value:
    """2^n as f32 for the low bits of an i32 n, -126 <= n <= 127."""
    exponent = ln.shli(ln.addi(bits, ln.constant(bits.type, 127)), ln.constant(bits.type, 23))
    return ln.cast("bitcast", exponent, ln.f32())


def _scale(value: Value, bits: Value) -> Value:
    """value * 2^n in two factors. `bits` holds the magic sum, whose upper bits the shifts drop."""
    n = ln.subi(bits, ln.constant(bits.type, 0x4B400000))
    half = ln.shrsi(n, ln.constant(n.type, 1))
    rest = ln.subi(n, half)
    return ln.mulf(ln.mulf(value, _power_of_two(half)), _power_of_two(rest))


def _expm1_reduced(r: Value) -> Value:
    """exp(r) - 1 for |r| <= ln(2)/2."""
    return ln.fma(polynomial(r, _EXP), ln.mulf(r, r), r)


def _reduce_by_ln2(x: Value) -> tuple[Value, Value, Value]:
    """x = n ln2 + r: (r, n as float, n in magic bits)."""
    n, bits = _round_to_integer(ln.mulf(x, c(x, LOG2_E)))
    r = ln.fma(n, c(x, -LN2_HIGH), x)
    return ln.fma(n, c(x, -LN2_LOW), r), n, bits


@_in_f32
def exp(x: Value) -> Value:
    r, _, bits = _reduce_by_ln2(ln.clamp_keeping_nan(x, -104.0, 89.0))
    return _scale(ln.addf(_expm1_reduced(r), c(x, 1.0)), bits)


@_in_f32
def exp2(x: Value) -> Value:
    x = ln.clamp_keeping_nan(x, -151.0, 129.0)
    n, bits = _round_to_integer(x)
    r = ln.mulf(ln.subf(x, n), c(x, math.log(2.0)))
    return _scale(ln.addf(_expm1_reduced(r), c(x, 1.0)), bits)


@_in_f32
def expm1(x: Value) -> Value:
    """2 * (2^(n-1) * (exp(r) - 1) + (2^(n-1) - 1/2)): no cancellation near zero, no early overflow at n = 128."""
    r, _, bits = _reduce_by_ln2(ln.clamp_keeping_nan(x, -20.0, 89.0))
    n = ln.subi(bits, ln.constant(bits.type, 0x4B400001))
    half_power = _power_of_two(n)
    sum_ = ln.fma(half_power, _expm1_reduced(r), ln.subf(half_power, c(x, 0.5)))
    result = ln.addf(sum_, sum_)
    return ln.select(ln.cmpf("oeq", x, c(x, 0.0)), x, result)  # keeps -0


@_in_f32
def sigmoid(x: Value) -> Value:
    return ln.divf(c(x, 1.0), ln.addf(c(x, 1.0), exp(ln.negf(x))))


# --- logarithms ------------------------------------------------------------------------------------------------------

_LOG = [7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1]
_LOG += [-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1]
SQRT_HALF_BITS = 0x3F3504F3


def _log_parts(x: Value) -> tuple[Value, Value, Value]:
    """x = 2^e (1 + f), |f| <= 0.42: (e, f, log(1 + f) - f), denormals included."""
    denormal = ln.cmpf("olt", x, c(x, 1.17549435e-38))
    scaled = ln.select(denormal, ln.mulf(x, c(x, 8388608.0)), x)
    bits = ln.cast("bitcast", scaled, ln.int_type(32))
    bits = ln.subi(bits, ln.constant(bits.type, SQRT_HALF_BITS))
    e = ln.cast("sitofp", ln.shrsi(bits, ln.constant(bits.type, 23)), ln.f32())
    e = ln.select(denormal, ln.subf(e, c(x, 23.0)), e)
    mantissa = ln.addi(ln.andi(bits, ln.constant(bits.type, 0x7FFFFF)), ln.constant(bits.type, SQRT_HALF_BITS))
    f = ln.subf(ln.cast("bitcast", mantissa, ln.f32()), c(x, 1.0))
    square = ln.mulf(f, f)
    tail = ln.mulf(ln.mulf(polynomial(f, _LOG), f), square)
    return e, f, ln.fma(square, c(x, -0.5), tail)


def log_special(x: Value, result: Value) -> Value:
    """log's values at 0 (-inf), +inf (+inf), negative numbers and NaN (NaN)."""
    result = ln.select(ln.cmpf("oeq", x, c(x, math.inf)), x, result)
    result = ln.select(ln.cmpf("oeq", x, c(x, 0.0)), c(x, -math.inf), result)
    return ln.select(ln.cmpf("ult", x, c(x, 0.0)), c(x, math.nan), result)


@_in_f32
def log(x: Value) -> Value:
    e, f, tail = _log_parts(x)
    tail = ln.fma(e, c(x, LN2_LOW), tail)
    return log_special(x, ln.fma(e, c(x, LN2_HIGH), ln.addf(f, tail)))


@_in_f32
def log2(x: Value) -> Value:
    e, f, tail = _log_parts(x)
    # log2(e) = 1 + 0.4427: the large part of f enters unrounded
    small = ln.mulf(ln.addf(f, tail), c(x, LOG2_E - 1.0))
    return log_special(x, ln.addf(ln.addf(ln.addf(small, tail), f), e))


@_in_f32
def log10(x: Value) -> Value:
    return ln.mulf(log(x), c(x, 1.0 / math.log(10.0)))


@_in_f32
def log1p(x: Value) -> Value:
    """log(u) with u = 1 + x, plus what the rounding of u lost."""
    one = c(x, 1.0)
    u = ln.addf(x, one)
    lost = ln.divf(ln.subf(x, ln.subf(u, one)), u)
    lost = ln.select(ln.cmpf("ord", lost, lost), lost, c(x, 0.0))  # u = 0 or inf
    result = ln.addf(log(u), lost)
    return ln.select(ln.cmpf("oeq", x, c(x, 0.0)), x, result)


# --- error function, hyperbolic tangent ------------------------------------------------------------------------------


@_in_f32
def erf(x: Value) -> Value:
    """x P(x^2) below 0.93, 1 - exp(Q(|x|)) above."""
    t, s = ln.absf(x), ln.mulf(x, x)
    small = ln.fma(polynomial(s, ERF_NEAR), x, x)
    capped = ln.select(ln.cmpf("ogt", t, c(x, 4.0)), c(x, 4.0), t)  # erf(4) rounds to 1
    exponent = ln.fma(polynomial(capped, ERF_FAR), capped, ln.negf(capped))
    r, _, bits = _reduce_by_ln2(exponent)
    n = ln.subi(bits, ln.constant(bits.type, 0x4B400000))
    decay = ln.mulf(ln.addf(_expm1_reduced(r), c(x, 1.0)), _power_of_two(n))  # n >= -24: one factor will do
    large = ln.copysign(ln.subf(c(x, 1.0), decay), x)
    return ln.select(ln.cmpf("ogt", t, c(x, 0.927734375)), large, small)


@_in_f32
def tanh(x: Value) -> Value:
    """x P(x^2) below 0.55, 1 - 2 / (exp(2|x|) + 1) above."""
    t, s = ln.absf(x), ln.mulf(x, x)
    small = ln.fma(ln.mulf(polynomial(s, TANH_NEAR), s), t, t)
    capped = ln.select(ln.cmpf("ogt", t, c(x, 10.0)), c(x, 10.0), t)
    r, _, bits = _reduce_by_ln2(ln.addf(capped, capped))
    n = ln.subi(bits, ln.constant(bits.type, 0x4B400000))
    power = ln.mulf(ln.addf(_expm1_reduced(r), c(x, 1.0)), _power_of_two(n))
    quotient = ln.divf(c(x, 2.0), ln.addf(power, c(x, 1.0)))
    large = ln.subf(c(x, 1.0), quotient)
    return ln.copysign(ln.select(ln.cmpf("ogt", t, c(x, 0.55)), large, small), x)


# --- trigonometry, in f64 inside -------------------------------------------------------------------------------------

_SIN = [-2.5052108385441720e-8, 2.7557319223985893e-6, -1.9841269841269841e-4, 8.3333333333333333e-3]
_SIN += [-1.6666666666666667e-1]
_COS = [2.0876756987868099e-9, -2.7557319223985888e-7, 2.4801587301587302e-5, -1.3888888888888889e-3]
_COS += [4.1666666666666664e-2, -0.5]
_HUGE = 1.0e9  # beyond this the quotient no longer fits the 32-bit quadrant; libm reduces properly


def _quadrant(x: Value) -> tuple[Value, Value, Value]:
    """(quadrant as i32, sin(r), cos(r)) of an f32 as f64, |r| <= pi/4. f64 holds the reduction to full f32 accuracy."""
    wide = ln.cast("extf", x, ln.f64())
    n = ln.roundeven(ln.mulf(wide, ln.constant(wide.type, TWO_OVER_PI)))
    r = wide
    for part in PI_2_F64[:2]:
        r = ln.fma(n, ln.constant(wide.type, -part), r)
    s = ln.mulf(r, r)
    sine = ln.fma(ln.mulf(polynomial(s, _SIN), s), r, r)
    cosine = ln.fma(polynomial(s, _COS), s, ln.constant(s.type, 1.0))
    return ln.cast("fptosi", n, ln.int_type(32)), sine, cosine


def has_bit(bits: Value, mask: int) -> Value:
    """Whether any bit of `mask` is set."""
    masked = ln.andi(bits, ln.constant(bits.type, mask))
    return ln.cmpi("ne", masked, ln.constant(bits.type, 0))


def _with_huge_fallback(x: Value, name: str, function: Callable[[Value], Value]) -> Value:
    """`function` unless some lane is huge or not finite (then libm for all lanes: rare)."""
    from nova.mlir import ir, scf

    fits = ln.cmpf("olt", ln.absf(x), c(x, _HUGE))
    if ln.lanes_of(x.type):
        bits = ln.cast("bitcast", fits, ln.int_type(1))
        kind = ir.Attribute.parse("#vector.kind<and>")
        fits = ln.create("vector.reduction", ln.int_type(1), [bits], {"kind": kind})
    op = scf.IfOp(fits, [x.type], has_else=True)
    with ir.InsertionPoint(op.then_block):
        scf.YieldOp([function(x)])
    with ir.InsertionPoint(op.else_block):
        scf.YieldOp([_libm(name, x)])
    return op.results[0]


@_in_f32
def sin(x: Value) -> Value:
    def near(x: Value) -> Value:
        quadrant, sine, cosine = _quadrant(x)
        value = ln.select(has_bit(quadrant, 1), cosine, sine)
        return ln.cast("truncf", ln.select(has_bit(quadrant, 2), ln.negf(value), value), ln.f32())

    return _with_huge_fallback(x, "sin", near)


@_in_f32
def cos(x: Value) -> Value:
    def near(x: Value) -> Value:
        quadrant, sine, cosine = _quadrant(x)
        value = ln.select(has_bit(quadrant, 1), sine, cosine)
        next_ = ln.addi(quadrant, ln.constant(quadrant.type, 1))
        return ln.cast("truncf", ln.select(has_bit(next_, 2), ln.negf(value), value), ln.f32())

    return _with_huge_fallback(x, "cos", near)


@_in_f32
def tan(x: Value) -> Value:
    def near(x: Value) -> Value:
        quadrant, sine, cosine = _quadrant(x)
        odd = has_bit(quadrant, 1)
        value = ln.divf(ln.select(odd, ln.negf(cosine), sine), ln.select(odd, sine, cosine))
        return ln.cast("truncf", value, ln.f32())

    return _with_huge_fallback(x, "tan", near)


# --- powers ----------------------------------------------------------------------------------------------------------


@_in_f32
def rsqrt(x: Value) -> Value:
    return ln.divf(c(x, 1.0), ln.sqrt(x))


def pow_constant(x: Value, exponent: float) -> Value | None:
    """The powers that PyTorch itself computes without pow; None for any other."""
    one = ln.constant(x.type, 1.0)
    square = lambda: ln.mulf(x, x)  # noqa: E731
    table: dict[float, Callable[[], Value]] = {
        0.0: lambda: one,
        1.0: lambda: x,
        2.0: square,
        3.0: lambda: ln.mulf(square(), x),
        0.5: lambda: ln.sqrt(x),
        -0.5: lambda: ln.divf(one, ln.sqrt(x)),
        -1.0: lambda: ln.divf(one, x),
        -2.0: lambda: ln.divf(one, square()),
    }
    return table[exponent]() if exponent in table else None


@_in_f32
def powf(x: Value, y: Value) -> Value:
    return _libm("powf", x, y)


FUNCTIONS: dict[str, Callable[..., Value]] = {
    f"math.{name}": globals()[name]
    for name in (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "erf", "tanh", "sin", "cos", "tan", "rsqrt", "powf",
    )
}  # fmt: skip
