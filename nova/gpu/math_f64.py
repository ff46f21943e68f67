"""float64 functions as arithmetic: exp, log, erf, sin, pow, ... for scalars and vectors, within a few ulp.

Straightforward rather than fast: float64 is for checking and for a few scalars a step, and the rare float32 functions
go through here. NaN, infinities, zeros and denormals come out as in libm. The argument of sin, cos and tan is reduced
with three parts of pi/2, which keeps full accuracy up to about 2^31 and degrades beyond.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from nova.lowering import lanes as ln
from nova.lowering.constants import LN2_F64, LOG2_E, PI_2_F64
from nova.lowering.lanes import Value
from nova.lowering.vmath import c, has_bit, log_special, polynomial

LN2_HIGH, LN2_LOW = LN2_F64
MAGIC = 6755399441055744.0  # 1.5 * 2^52: adding it rounds an f64 to an integer, which then sits in the low bits
PI_2 = PI_2_F64


# --- exponentials ----------------------------------------------------------------------------------------------------

_EXPM1 = [1.0 / math.factorial(k) for k in range(14, 1, -1)]


def _power(n: Value) -> Value:
    """2^n for an i64 n within the normal range."""
    exponent = ln.shli(ln.addi(n, ln.constant(n.type, 1023)), ln.constant(n.type, 52))
    return ln.cast("bitcast", exponent, ln.f64())


def _scale(value: Value, n: Value) -> Value:
    """value * 2^n in two factors: overflows to infinity, underflows through the denormals."""
    half = ln.shrsi(n, ln.constant(n.type, 1))
    return ln.mulf(ln.mulf(value, _power(half)), _power(ln.subi(n, half)))


def _reduce_by_ln2(x: Value, low: Value | None = None) -> tuple[Value, Value]:
    """x (+ low) = n ln2 + r: (n as i64, r)."""
    shifted = ln.fma(x, c(x, LOG2_E), c(x, MAGIC))
    n = ln.subf(shifted, c(x, MAGIC))
    r = ln.fma(n, c(x, -LN2_HIGH), x)
    if low is not None:
        r = ln.addf(r, low)
    r = ln.fma(n, c(x, -LN2_LOW), r)
    bits = ln.cast("bitcast", shifted, ln.int_type(64))
    return ln.subi(bits, ln.constant(bits.type, 0x4338000000000000)), r


def _expm1_reduced(r: Value) -> Value:
    """exp(r) - 1 for |r| <= ln(2)/2."""
    return ln.fma(polynomial(r, _EXPM1), ln.mulf(r, r), r)


def _exp_sum(x: Value, low: Value | None) -> Value:
    """exp(x + low)."""
    n, r = _reduce_by_ln2(ln.clamp_keeping_nan(x, -746.0, 710.0), low)
    return _scale(ln.addf(_expm1_reduced(r), c(x, 1.0)), n)


def exp(x: Value) -> Value:
    return _exp_sum(x, None)


def exp2(x: Value) -> Value:
    x = ln.clamp_keeping_nan(x, -1100.0, 1025.0)
    shifted = ln.addf(x, c(x, MAGIC))
    r = ln.mulf(ln.subf(x, ln.subf(shifted, c(x, MAGIC))), c(x, math.log(2.0)))
    bits = ln.cast("bitcast", shifted, ln.int_type(64))
    n = ln.subi(bits, ln.constant(bits.type, 0x4338000000000000))
    return _scale(ln.addf(_expm1_reduced(r), c(x, 1.0)), n)


def expm1(x: Value) -> Value:
    """2 * (2^(n-1) * (exp(r) - 1) + (2^(n-1) - 1/2))."""
    n, r = _reduce_by_ln2(ln.clamp_keeping_nan(x, -40.0, 710.0))
    half = _power(ln.subi(n, ln.constant(n.type, 1)))
    total = ln.fma(half, _expm1_reduced(r), ln.subf(half, c(x, 0.5)))
    return ln.select(ln.cmpf("oeq", x, c(x, 0.0)), x, ln.addf(total, total))


# --- logarithms ------------------------------------------------------------------------------------------------------

_LOG = [1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01]
_LOG += [2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01]
_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD


def _log_parts(x: Value) -> tuple[Value, Value, Value]:
    """x = 2^e (1 + f): (e, f, log(1 + f) - f), denormals included."""
    denormal = ln.cmpf("olt", x, c(x, 2.2250738585072014e-308))
    scaled = ln.select(denormal, ln.mulf(x, c(x, 2.0**54)), x)
    bits = ln.cast("bitcast", scaled, ln.int_type(64))
    bits = ln.subi(bits, ln.constant(bits.type, _SQRT_HALF_BITS))
    e = ln.cast("sitofp", ln.shrsi(bits, ln.constant(bits.type, 52)), ln.f64())
    e = ln.select(denormal, ln.subf(e, c(x, 54.0)), e)
    mantissa = ln.addi(ln.andi(bits, ln.constant(bits.type, (1 << 52) - 1)), ln.constant(bits.type, _SQRT_HALF_BITS))
    f = ln.subf(ln.cast("bitcast", mantissa, ln.f64()), c(x, 1.0))
    s = ln.divf(f, ln.addf(f, c(x, 2.0)))
    z = ln.mulf(s, s)
    half_square = ln.mulf(ln.mulf(f, f), c(x, 0.5))
    rest = ln.mulf(s, ln.addf(half_square, ln.mulf(polynomial(z, _LOG), z)))
    return e, f, ln.subf(rest, half_square)


def log(x: Value) -> Value:
    e, f, tail = _log_parts(x)
    tail = ln.fma(e, c(x, LN2_LOW), tail)
    return log_special(x, ln.fma(e, c(x, LN2_HIGH), ln.addf(f, tail)))


def log2(x: Value) -> Value:
    e, f, tail = _log_parts(x)
    small = ln.mulf(ln.addf(f, tail), c(x, LOG2_E - 1.0))
    return log_special(x, ln.addf(ln.addf(ln.addf(small, tail), f), e))


def log10(x: Value) -> Value:
    return ln.mulf(log(x), c(x, 1.0 / math.log(10.0)))


def log1p(x: Value) -> Value:
    one = c(x, 1.0)
    u = ln.addf(x, one)
    lost = ln.divf(ln.subf(x, ln.subf(u, one)), u)
    lost = ln.select(ln.cmpf("ord", lost, lost), lost, c(x, 0.0))  # u = 0 or infinite
    return ln.select(ln.cmpf("oeq", x, c(x, 0.0)), x, ln.addf(log(u), lost))


# --- hyperbolic ------------------------------------------------------------------------------------------------------


def tanh(x: Value) -> Value:
    t = ln.absf(x)
    capped = ln.select(ln.cmpf("ogt", t, c(x, 22.0)), c(x, 22.0), t)
    e = expm1(ln.addf(capped, capped))
    return ln.copysign(ln.divf(e, ln.addf(e, c(x, 2.0))), x)


def sinh(x: Value) -> Value:
    t = ln.absf(x)
    e = expm1(t)
    small = ln.mulf(ln.addf(e, ln.divf(e, ln.addf(e, c(x, 1.0)))), c(x, 0.5))
    return ln.copysign(ln.select(ln.cmpf("ogt", t, c(x, 40.0)), _half_exp(t), small), x)


def cosh(x: Value) -> Value:
    t = ln.absf(x)
    e = exp(t)
    small = ln.mulf(ln.addf(e, ln.divf(c(x, 1.0), e)), c(x, 0.5))
    return ln.select(ln.cmpf("ogt", t, c(x, 40.0)), _half_exp(t), small)


def _half_exp(t: Value) -> Value:
    """exp(t) / 2 without an early overflow: exp(t - ln 2)."""
    return _exp_sum(ln.subf(t, c(t, LN2_HIGH)), c(t, -LN2_LOW))


def asinh(x: Value) -> Value:
    t = ln.absf(x)
    square = ln.mulf(t, t)
    root = ln.sqrt(ln.addf(square, c(x, 1.0)))
    near = log1p(ln.addf(t, ln.divf(square, ln.addf(root, c(x, 1.0)))))
    far = ln.addf(log(t), c(x, math.log(2.0)))
    return ln.copysign(ln.select(ln.cmpf("ogt", t, c(x, 1.0e9)), far, near), x)


def acosh(x: Value) -> Value:
    u = ln.subf(x, c(x, 1.0))
    near = log1p(ln.addf(u, ln.sqrt(ln.fma(u, u, ln.addf(u, u)))))
    far = ln.addf(log(x), c(x, math.log(2.0)))
    result = ln.select(ln.cmpf("ogt", x, c(x, 1.0e9)), far, near)
    return ln.select(ln.cmpf("ult", x, c(x, 1.0)), c(x, math.nan), result)


def atanh(x: Value) -> Value:
    t = ln.absf(x)
    ratio = ln.divf(ln.addf(t, t), ln.subf(c(x, 1.0), t))
    return ln.copysign(ln.mulf(log1p(ratio), c(x, 0.5)), x)


# --- error function --------------------------------------------------------------------------------------------------

_ERF = [  # erf(x) / x - 1 on [0, 1], in x^2
    -4.2320376764874594e-12, 8.709755232851789e-11, -1.2164764337224506e-09, 1.479243542696247e-08,
    -1.6364645854816389e-07, 1.6462045711013026e-06, -1.4925647581008593e-05, 0.00012055332903350668,
    -0.0008548327021945428, 0.005223977625423455, -0.026866170645129854, 0.1128379167095512, -0.37612638903183754,
    0.1283791670955126,
]  # fmt: skip
_ERFC = [  # log(erfc(z) / t) + z^2 with t = 2 / (2 + z), as Chebyshev polynomials of 2 t - 1
    -1.3026537197817094, 0.6419697923564902, 0.019476473204185836, -0.009561514786808632, -0.0009465953444820369,
    0.00036683949785276145, 4.252332480690777e-05, -2.0278578112534242e-05, -1.6242900046470256e-06,
    1.3036558355805232e-06, 1.5626441722066142e-08, -8.523809591492654e-08, 6.5290544390988515e-09,
    5.059343495551469e-09, -9.91364156493033e-10, -2.273651222931836e-10, 9.64679110201553e-11,
    2.3940380830390924e-12, -6.8860275264975314e-12, 8.944879273090508e-13, 3.130921399343172e-13,
    -1.1270822361369361e-13, 3.810905255396653e-16, 7.106097613588855e-15, -1.5230282014370957e-15,
    -9.457494573253365e-17, 1.2102371894164837e-16, -2.816663089627822e-17,
]  # fmt: skip


def _erfc_positive(z: Value) -> Value:
    """erfc(z) for z >= 0, with small relative error into the denormals."""
    t = ln.divf(c(z, 2.0), ln.addf(z, c(z, 2.0)))
    y = ln.subf(ln.mulf(t, c(z, 4.0)), c(z, 2.0))
    b0, b1 = c(z, 0.0), c(z, 0.0)
    for coefficient in reversed(_ERFC[1:]):
        b0, b1 = ln.addf(ln.subf(ln.mulf(y, b0), b1), c(z, coefficient)), b0
    logarithm = ln.subf(ln.mulf(ln.fma(y, b0, c(z, _ERFC[0])), c(z, 0.5)), b1)
    square = ln.mulf(z, z)
    total = ln.subf(logarithm, square)
    part = ln.addf(total, square)  # what of the logarithm is in the sum; the rest, and z^2's own rounding:
    lost = ln.subf(ln.subf(logarithm, part), ln.addf(square, ln.subf(total, part)))
    return ln.mulf(t, _exp_sum(total, ln.subf(lost, ln.fma(z, z, ln.negf(square)))))


def erf(x: Value) -> Value:
    t = ln.absf(x)
    small = ln.fma(polynomial(ln.mulf(x, x), _ERF), x, x)
    capped = ln.select(ln.cmpf("ogt", t, c(x, 6.0)), c(x, 6.0), t)
    large = ln.copysign(ln.subf(c(x, 1.0), _erfc_positive(capped)), x)
    return ln.select(ln.cmpf("ogt", t, c(x, 1.0)), large, small)


def erfc(x: Value) -> Value:
    t = ln.absf(x)
    capped = ln.select(ln.cmpf("ogt", t, c(x, 28.0)), c(x, 28.0), t)
    tail = _erfc_positive(capped)
    far = ln.select(ln.cmpf("olt", x, c(x, 0.0)), ln.subf(c(x, 2.0), tail), tail)
    near = ln.subf(c(x, 1.0), ln.fma(polynomial(ln.mulf(x, x), _ERF), x, x))
    return ln.select(ln.cmpf("olt", t, c(x, 0.25)), near, far)


# --- trigonometry ----------------------------------------------------------------------------------------------------

_SIN = [1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06]
_SIN += [-1.98412698298579493134e-04, 8.33333333332248946124e-03, -1.66666666666666324348e-01]
_COS = [-1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07]
_COS += [2.48015872894767294178e-05, -1.38888888888741095749e-03, 4.16666666666666019037e-02]


def quadrant(x: Value) -> tuple[Value, Value, Value]:
    """(quadrant as i64, sin(r), cos(r))."""
    n = ln.roundeven(ln.mulf(x, c(x, 2.0 / math.pi)))
    r = x
    for part in PI_2:
        r = ln.fma(n, c(x, -part), r)
    s = ln.mulf(r, r)
    sine = ln.fma(ln.mulf(polynomial(s, _SIN), s), r, r)
    half = ln.mulf(s, c(x, 0.5))
    one = c(x, 1.0)
    w = ln.subf(one, half)
    cosine = ln.addf(w, ln.fma(ln.mulf(s, s), polynomial(s, _COS), ln.subf(ln.subf(one, w), half)))
    return ln.cast("fptosi", n, ln.int_type(64)), sine, cosine


def sin(x: Value, offset: int = 0) -> Value:
    n, sine, cosine = quadrant(x)
    n = ln.addi(n, ln.constant(n.type, offset)) if offset else n
    value = ln.select(has_bit(n, 1), cosine, sine)
    return ln.select(has_bit(n, 2), ln.negf(value), value)


def cos(x: Value) -> Value:
    return sin(x, 1)


def tan(x: Value) -> Value:
    n, sine, cosine = quadrant(x)
    odd = has_bit(n, 1)
    return ln.divf(ln.select(odd, ln.negf(cosine), sine), ln.select(odd, sine, cosine))


_ATAN_P = [-8.750608600031904122785e-1, -1.615753718733365076637e1, -7.500855792314704667340e1]
_ATAN_P += [-1.228866684490136173410e2, -6.485021904942025371773e1]
_ATAN_Q = [1.0, 2.485846490142306297962e1, 1.650270098316988542046e2, 4.328810604912902668951e2]
_ATAN_Q += [4.853903996359136964868e2, 1.945506571482613964425e2]


def _atan_positive(t: Value) -> Value:
    """atan(t) for t >= 0: t, (t - 1) / (t + 1) or -1 / t into a rational function."""
    steep, middle = ln.cmpf("ogt", t, c(t, 2.41421356237309504880)), ln.cmpf("ogt", t, c(t, 0.66))
    one, zero = c(t, 1.0), c(t, 0.0)
    top = ln.select(steep, c(t, -1.0), ln.select(middle, ln.subf(t, one), t))
    bottom = ln.select(steep, t, ln.select(middle, ln.addf(t, one), one))
    base = ln.select(steep, c(t, PI_2[0]), ln.select(middle, c(t, PI_2[0] / 2), zero))
    extra = ln.select(steep, c(t, PI_2[1]), ln.select(middle, c(t, PI_2[1] / 2), zero))
    r = ln.divf(top, bottom)
    z = ln.mulf(r, r)
    ratio = ln.divf(ln.mulf(z, polynomial(z, _ATAN_P)), polynomial(z, _ATAN_Q))
    return ln.addf(base, ln.addf(ln.fma(r, ratio, r), extra))


def atan(x: Value) -> Value:
    return ln.copysign(_atan_positive(ln.absf(x)), x)


def atan2(y: Value, x: Value) -> Value:
    a, b = ln.absf(y), ln.absf(x)
    steep = ln.cmpf("ogt", a, b)
    low, high = ln.select(steep, b, a), ln.select(steep, a, b)
    ratio = ln.divf(low, high)
    ratio = ln.select(ln.cmpf("oeq", high, c(x, 0.0)), c(x, 0.0), ratio)
    ratio = ln.select(ln.cmpf("oeq", low, c(x, math.inf)), c(x, 1.0), ratio)
    angle = _atan_positive(ratio)
    angle = ln.select(steep, ln.addf(ln.subf(c(x, PI_2[0]), angle), c(x, PI_2[1])), angle)
    bits = ln.cast("bitcast", x, ln.int_type(64))
    left = ln.cmpi("slt", bits, ln.constant(bits.type, 0))
    angle = ln.select(left, ln.addf(ln.subf(c(x, math.pi), angle), c(x, 2 * PI_2[1])), angle)
    result = ln.copysign(angle, y)
    return ln.select(ln.cmpf("uno", x, y), ln.addf(x, y), result)


def asin(x: Value) -> Value:
    one = c(x, 1.0)
    return atan2(x, ln.sqrt(ln.mulf(ln.subf(one, x), ln.addf(one, x))))


def acos(x: Value) -> Value:
    one = c(x, 1.0)
    half = atan2(ln.sqrt(ln.subf(one, x)), ln.sqrt(ln.addf(one, x)))
    return ln.addf(half, half)


# --- powers ----------------------------------------------------------------------------------------------------------


def rsqrt(x: Value) -> Value:
    return ln.divf(c(x, 1.0), ln.sqrt(x))


def _fast_sum(a: Value, b: Value) -> tuple[Value, Value]:
    """(a + b rounded, what the rounding lost) for |a| >= |b|."""
    total = ln.addf(a, b)
    return total, ln.subf(b, ln.subf(total, a))


def powf(x: Value, y: Value) -> Value:
    """exp(y log|x|), with the logarithm in two parts, and C's special cases."""
    t, one = ln.absf(x), c(x, 1.0)
    e, f, tail = _log_parts(t)
    # log = e ln2 + f + tail as high + low
    big = ln.mulf(e, c(x, LN2_HIGH))  # exact: e has 11 bits, LN2_HIGH ends in zeros
    high = ln.addf(big, f)
    small = ln.fma(e, c(x, LN2_LOW), tail)
    zero_exponent = ln.cmpf("oeq", big, c(x, 0.0))
    lost = ln.select(zero_exponent, c(x, 0.0), ln.subf(f, ln.subf(high, big)))
    high, low = _fast_sum(high, ln.addf(lost, small))
    times = ln.clamp_keeping_nan(y, -1.0e30, 1.0e30)  # beyond, the power is 0, 1 or infinite all the same
    product = ln.mulf(times, high)
    product, rest = _fast_sum(product, ln.fma(times, low, ln.fma(times, high, ln.negf(product))))
    rest = ln.select(ln.cmpf("olt", ln.absf(product), c(x, 1000.0)), rest, c(x, 0.0))
    power = _exp_sum(product, rest)
    bounded = ln.cmpf("olt", ln.absf(y), c(x, math.inf))
    usual = ln.create("arith.andi", bounded.type, [ln.cmpf("olt", t, c(x, math.inf)), ln.cmpf("ogt", t, c(x, 0.0))])
    usual = ln.create("arith.andi", bounded.type, [usual, bounded])
    return _pow_special(x, y, ln.select(usual, power, _pow_limit(t, y)), one)


def _pow_limit(t: Value, y: Value) -> Value:
    """t ** y where t is 0 or infinite, or y is: 0, 1 or infinity."""
    zero, one, infinity = c(t, 0.0), c(t, 1.0), c(t, math.inf)
    above, positive = ln.cmpf("ogt", t, one), ln.cmpf("ogt", y, zero)
    grows = ln.cmpi("eq", above, positive)
    result = ln.select(grows, infinity, zero)
    result = ln.select(ln.cmpf("oeq", t, one), one, result)
    return ln.select(ln.cmpf("uno", t, y), ln.addf(t, y), result)


def _pow_special(x: Value, y: Value, power: Value, one: Value) -> Value:
    """The sign for odd integers, NaN for broken powers of negative numbers, 1 for x = 1 and y = 0."""
    whole = ln.cmpf("oeq", ln.floor(y), y)
    half = ln.mulf(y, c(y, 0.5))
    odd = ln.andi(whole, ln.cmpf("une", ln.floor(half), half))
    bits = ln.cast("bitcast", x, ln.int_type(64))
    negative = ln.cmpi("slt", bits, ln.constant(bits.type, 0))
    power = ln.select(ln.andi(odd, negative), ln.negf(power), power)
    below = ln.andi(ln.cmpf("olt", x, c(x, 0.0)), ln.cmpf("ogt", x, c(x, -math.inf)))
    broken = ln.andi(below, ln.cmpi("eq", whole, ln.constant(whole.type, 0)))
    power = ln.select(ln.andi(broken, ln.cmpf("ord", y, y)), c(x, math.nan), power)
    trivial = ln.create("arith.ori", whole.type, [ln.cmpf("oeq", x, one), ln.cmpf("oeq", y, c(x, 0.0))])
    return ln.select(trivial, one, power)


FUNCTIONS: dict[str, Callable[..., Value]] = {
    f"math.{name}": globals()[name]
    for name in (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "sinh", "cosh", "asinh", "acosh", "atanh",
        "erf", "erfc", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "rsqrt", "powf",
    )
}  # fmt: skip
