"""What one element of every elementwise `nova` op is, in `arith` and `math` operations.

    gelu {approximate = "none"} on bf16    ->    extf; x * 0.5 * (1 + erf(x * sqrt(1/2))) in f32; truncf

bf16 and f16 compute in f32 and round once, at the op's result. NaN and infinity behave as in PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from nova.fusion.kernel import (
    FLOAT_TYPES,
    WIDTHS,
    Expr,
    binary,
    compare,
    const,
    convert_float,
    select,
    unary,
)
from nova.fusion.records import Op

Emitter = Callable[[Op, list[Expr]], Expr]

ELEMENT = {"bool": "i1", "u8": "i8"}


def element_type(dtype: str) -> str:
    """The arith type of a dtype: booleans are i1, unsigned bytes i8 (their ops are unsigned)."""
    return ELEMENT.get(dtype, dtype)


def compute_type(dtype: str) -> str:
    """The type that an op on `dtype` computes in."""
    return "f32" if dtype in ("bf16", "f16") else element_type(dtype)


# --- short names -----------------------------------------------------------------------------------------------------


def add(a: Expr, b: Expr) -> Expr:
    return binary("arith.addf" if a.type in FLOAT_TYPES else "arith.addi", a, b)


def sub(a: Expr, b: Expr) -> Expr:
    return binary("arith.subf" if a.type in FLOAT_TYPES else "arith.subi", a, b)


def mul(a: Expr, b: Expr) -> Expr:
    return binary("arith.mulf" if a.type in FLOAT_TYPES else "arith.muli", a, b)


def div(a: Expr, b: Expr) -> Expr:
    return binary("arith.divf", a, b)


def like(number: float, a: Expr) -> Expr:
    return const(number, a.type)


def exp(a: Expr) -> Expr:
    return unary("math.exp", a)


def log(a: Expr) -> Expr:
    return unary("math.log", a)


def sqrt(a: Expr) -> Expr:
    return unary("math.sqrt", a)


def neg(a: Expr) -> Expr:
    if a.type in FLOAT_TYPES:
        return unary("arith.negf", a)
    return sub(like(0, a), a)


def logical_not(a: Expr) -> Expr:
    return binary("arith.xori", a, const(1, "i1"))


def isnan(a: Expr) -> Expr:
    return compare("uno", a, a)


def absolute(a: Expr) -> Expr:
    return unary("math.absf", a) if a.type in FLOAT_TYPES else unary("math.absi", a)


def sigmoid(a: Expr) -> Expr:
    one = like(1, a)
    return div(one, add(one, exp(neg(a))))


def maximum(a: Expr, b: Expr, unsigned: bool = False) -> Expr:
    if a.type in FLOAT_TYPES:
        return binary("arith.maximumf", a, b)
    if a.type == "i1":
        return binary("arith.ori", a, b)
    return binary("arith.maxui" if unsigned else "arith.maxsi", a, b)


def minimum(a: Expr, b: Expr, unsigned: bool = False) -> Expr:
    if a.type in FLOAT_TYPES:
        return binary("arith.minimumf", a, b)
    if a.type == "i1":
        return binary("arith.andi", a, b)
    return binary("arith.minui" if unsigned else "arith.minsi", a, b)


# --- ops -------------------------------------------------------------------------------------------------------------


def _math(name: str) -> Emitter:
    return lambda op, args: unary(f"math.{name}", args[0])


def _sign(op: Op, args: list[Expr]) -> Expr:
    (x,) = args
    zero = like(0, x)
    if op.operands[0].dtype == "u8":
        return unary("arith.extui", compare("ne", x, zero), x.type)
    if x.type in FLOAT_TYPES:
        positive = unary("arith.uitofp", compare("ogt", x, zero), x.type)
        return sub(positive, unary("arith.uitofp", compare("olt", x, zero), x.type))
    return sub(
        unary("arith.extui", compare("sgt", x, zero), x.type), unary("arith.extui", compare("slt", x, zero), x.type)
    )


def _expm1(op: Op, args: list[Expr]) -> Expr:
    return unary("math.expm1", args[0])


def _log_sigmoid(op: Op, args: list[Expr]) -> Expr:
    """min(x, 0) - log1p(exp(-|x|))."""
    (x,) = args
    return sub(minimum(x, like(0, x)), unary("math.log1p", exp(neg(absolute(x)))))


def _erfc(op: Op, args: list[Expr]) -> Expr:
    return unary("math.erfc", args[0])


def _relu(op: Op, args: list[Expr]) -> Expr:
    (x,) = args
    return maximum(x, like(0, x), op.operands[0].dtype == "u8")


def _silu(op: Op, args: list[Expr]) -> Expr:
    (x,) = args
    return div(x, add(like(1, x), exp(neg(x))))


_SQRT_HALF = math.sqrt(0.5)
_TANH_SCALE = math.sqrt(2.0 / math.pi)
_TANH_CUBE = 0.044715


def _gelu(op: Op, args: list[Expr]) -> Expr:
    (x,) = args
    half, one = like(0.5, x), like(1, x)
    if op.attrs["approximate"] == "none":
        return mul(mul(x, half), add(one, unary("math.erf", mul(x, like(_SQRT_HALF, x)))))
    return mul(mul(half, x), add(one, unary("math.tanh", _gelu_inner(x))))


def _gelu_inner(x: Expr) -> Expr:
    cube = mul(mul(x, x), x)
    return mul(like(_TANH_SCALE, x), add(x, mul(like(_TANH_CUBE, x), cube)))


def _gelu_backward(op: Op, args: list[Expr]) -> Expr:
    dy, x = args
    half, one = like(0.5, x), like(1, x)
    if op.attrs["approximate"] == "none":
        cdf = mul(half, add(one, unary("math.erf", mul(x, like(_SQRT_HALF, x)))))
        pdf = mul(exp(mul(mul(x, x), like(-0.5, x))), like(1 / math.sqrt(2 * math.pi), x))
        return mul(dy, add(cdf, mul(x, pdf)))
    tanh = unary("math.tanh", _gelu_inner(x))
    left = mul(half, add(one, tanh))
    slope = mul(like(_TANH_SCALE, x), add(one, mul(like(3 * _TANH_CUBE, x), mul(x, x))))
    right = mul(mul(mul(half, x), sub(one, mul(tanh, tanh))), slope)
    return mul(dy, add(left, right))


def _silu_backward(op: Op, args: list[Expr]) -> Expr:
    dy, x = args
    one = like(1, x)
    s = sigmoid(x)
    return mul(mul(dy, s), add(one, mul(x, sub(one, s))))


def _softplus(op: Op, args: list[Expr]) -> Expr:
    (x,) = args
    beta = like(op.attrs["beta"], x)
    scaled = mul(x, beta)
    soft = div(unary("math.log1p", exp(scaled)), beta)
    return select(compare("ogt", scaled, like(op.attrs["threshold"], x)), x, soft)


def _softplus_backward(op: Op, args: list[Expr]) -> Expr:
    """dy * z / (z + 1), z = e**(beta * x)."""
    dy, x = args
    scaled = mul(x, like(op.attrs["beta"], x))
    z = exp(scaled)
    soft = div(mul(dy, z), add(z, like(1, x)))
    return select(compare("ogt", scaled, like(op.attrs["threshold"], x)), dy, soft)


def _elu(op: Op, args: list[Expr]) -> Expr:
    (x,) = args
    alpha, scale, inner = (op.attrs[k] for k in ("alpha", "scale", "input_scale"))
    negative = mul(unary("math.expm1", mul(x, like(inner, x))), like(alpha * scale, x))
    return select(compare("ole", x, like(0, x)), negative, mul(x, like(scale, x)))


def _elu_backward(op: Op, args: list[Expr]) -> Expr:
    dy, x = args
    alpha, scale, inner = (op.attrs[k] for k in ("alpha", "scale", "input_scale"))
    negcoef = alpha * scale
    if op.attrs["is_result"]:
        negative = mul(mul(dy, like(inner, x)), add(x, like(negcoef, x)))
    else:
        negative = mul(mul(dy, like(inner * negcoef, x)), exp(mul(x, like(inner, x))))
    return select(compare("ogt", x, like(0, x)), mul(dy, like(scale, x)), negative)  # NaN for NaN


def _leaky_relu(op: Op, args: list[Expr]) -> Expr:
    (x,) = args
    return select(compare("ogt", x, like(0, x)), x, mul(x, like(op.attrs["negative_slope"], x)))


def _leaky_relu_backward(op: Op, args: list[Expr]) -> Expr:
    dy, x = args
    return select(compare("ogt", x, like(0, x)), dy, mul(dy, like(op.attrs["negative_slope"], x)))


def _hardtanh(op: Op, args: list[Expr]) -> Expr:
    (x,) = args
    unsigned = op.operands[0].dtype == "u8"
    return minimum(maximum(x, like(op.attrs["lo"], x), unsigned), like(op.attrs["hi"], x), unsigned)


def _hardtanh_backward(op: Op, args: list[Expr]) -> Expr:
    dy, x = args
    inside = binary(
        "arith.andi", compare("ogt", x, like(op.attrs["lo"], x)), compare("olt", x, like(op.attrs["hi"], x))
    )
    return select(inside, dy, like(0, dy))


def _relu_backward(op: Op, args: list[Expr]) -> Expr:
    dy, x = args
    threshold = like(op.attrs["threshold"], x)
    if x.type in FLOAT_TYPES:
        return select(compare("ole", x, threshold), like(0, dy), dy)
    predicate = "ule" if op.operands[1].dtype == "u8" else "sle"
    return select(compare(predicate, x, threshold), like(0, dy), dy)


def _floordiv(op: Op, args: list[Expr]) -> Expr:
    a, b = args
    if op.operands[0].dtype == "u8":
        return binary("arith.divui", a, b)
    if a.type not in FLOAT_TYPES:
        return binary("arith.floordivsi", a, b)
    return _float_floor_divide(a, b)


def _float_floor_divide(a: Expr, b: Expr) -> Expr:
    """c10::div_floor_floating: exact where a / b would round across an integer; a / 0 is a / 0."""
    zero = like(0, a)
    mod = binary("arith.remf", a, b)
    quotient = div(sub(a, mod), b)
    adjust = binary("arith.andi", compare("une", mod, zero), _signs_differ(b, mod))
    quotient = select(adjust, sub(quotient, like(1, a)), quotient)
    floored = unary("math.floor", quotient)
    floored = select(compare("ogt", sub(quotient, floored), like(0.5, a)), add(floored, like(1, a)), floored)
    signed_zero = binary("math.copysign", zero, div(a, b))
    result = select(compare("une", quotient, zero), floored, signed_zero)
    return select(compare("oeq", b, zero), div(a, b), result)


def _signs_differ(a: Expr, b: Expr) -> Expr:
    zero = like(0, a)
    return binary("arith.xori", compare("olt", a, zero), compare("olt", b, zero))


def _truncdiv(op: Op, args: list[Expr]) -> Expr:
    a, b = args
    if op.operands[0].dtype == "u8":
        return binary("arith.divui", a, b)
    if a.type in FLOAT_TYPES:
        return unary("math.trunc", div(a, b))
    return binary("arith.divsi", a, b)


def _rem(op: Op, args: list[Expr]) -> Expr:
    """The remainder with the sign of the divisor."""
    a, b = args
    if op.operands[0].dtype == "u8":
        return binary("arith.remui", a, b)
    zero = like(0, a)
    if a.type in FLOAT_TYPES:
        mod = binary("arith.remf", a, b)
        return select(binary("arith.andi", compare("une", mod, zero), _signs_differ(b, mod)), add(mod, b), mod)
    mod = binary("arith.remsi", a, b)
    differ = binary("arith.xori", compare("slt", mod, zero), compare("slt", b, zero))
    return select(binary("arith.andi", compare("ne", mod, zero), differ), add(mod, b), mod)


def _fmod(op: Op, args: list[Expr]) -> Expr:
    a, b = args
    if op.operands[0].dtype == "u8":
        return binary("arith.remui", a, b)
    return binary("arith.remf" if a.type in FLOAT_TYPES else "arith.remsi", a, b)


def _pow(op: Op, args: list[Expr]) -> Expr:
    a, b = args
    if a.type not in FLOAT_TYPES:
        return binary("math.ipowi", a, b)
    exponent = b.attr if b.op == "const" else None
    if exponent == 2.0:
        return mul(a, a)
    if exponent == 3.0:
        return mul(mul(a, a), a)
    if exponent == 0.5:
        return sqrt(a)
    if exponent == -0.5:
        return div(like(1, a), sqrt(a))
    if exponent == -1.0:
        return div(like(1, a), a)
    if exponent == -2.0:
        return div(like(1, a), mul(a, a))
    if exponent == 1.0:
        return a
    return binary("math.powf", a, b)


def _hypot(op: Op, args: list[Expr]) -> Expr:
    """Scaled by the larger magnitude, so that it does not overflow; infinite if either is."""
    a, b = absolute(args[0]), absolute(args[1])
    zero, infinity = like(0, a), like(float("inf"), a)
    high, low = maximum(a, b), minimum(a, b)
    ratio = div(low, high)
    length = mul(high, sqrt(add(like(1, a), mul(ratio, ratio))))
    length = select(compare("oeq", high, zero), high, length)
    infinite = binary("arith.ori", compare("oeq", a, infinity), compare("oeq", b, infinity))
    return select(infinite, infinity, length)


def _shift(left: bool) -> Emitter:
    """Shifting by a negative amount or by the width and more gives 0, or the sign for a right shift."""

    def emit(op: Op, args: list[Expr]) -> Expr:
        a, b = args
        unsigned = op.operands[0].dtype == "u8"
        width = WIDTHS[a.type]
        inside = compare("ult", b, like(width, b))
        if left:
            return select(inside, binary("arith.shli", a, b), like(0, a))
        if unsigned:
            return select(inside, binary("arith.shrui", a, b), like(0, a))
        return binary("arith.shrsi", a, select(inside, b, like(width - 1, b)))

    return emit


def _reciprocal(op: Op, args: list[Expr]) -> Expr:
    return div(like(1, args[0]), args[0])


def _rsqrt(op: Op, args: list[Expr]) -> Expr:
    return div(like(1, args[0]), sqrt(args[0]))


_FLOAT_COMPARE = {"eq": "oeq", "ne": "une", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge"}
_INT_COMPARE = {"eq": "eq", "ne": "ne", "lt": "slt", "le": "sle", "gt": "sgt", "ge": "sge"}
_UINT_COMPARE = {"eq": "eq", "ne": "ne", "lt": "ult", "le": "ule", "gt": "ugt", "ge": "uge"}


def _compare(op: Op, args: list[Expr]) -> Expr:
    dtype = op.operands[0].dtype
    table = (
        _FLOAT_COMPARE if args[0].type in FLOAT_TYPES else _UINT_COMPARE if dtype in ("u8", "bool") else _INT_COMPARE
    )
    return compare(table[op.name], args[0], args[1])


def _where(op: Op, args: list[Expr]) -> Expr:
    return select(*args)


def _clamp(op: Op, args: list[Expr]) -> Expr:
    x, lo, hi = args
    unsigned = op.operands[0].dtype == "u8"
    return minimum(maximum(x, lo, unsigned), hi, unsigned)


def _lerp(op: Op, args: list[Expr]) -> Expr:
    a, b, weight = args
    difference = sub(b, a)
    near = add(a, mul(weight, difference))
    far = sub(b, mul(difference, sub(like(1, weight), weight)))
    return select(compare("olt", absolute(weight), like(0.5, weight)), near, far)


def cast(value: Expr, source: str, target: str) -> Expr:
    """A value of dtype `source` as dtype `target`."""
    a, b = element_type(source), element_type(target)
    if source == target:
        return value
    if target == "bool":
        return compare("une" if a in FLOAT_TYPES else "ne", value, like(0, value))
    if a in FLOAT_TYPES and b in FLOAT_TYPES:
        return convert_float(value, b)
    if a in FLOAT_TYPES:
        wide = convert_float(value, "f32") if WIDTHS[a] == 16 else value
        if target == "u8":  # through a wider type, as C++ does for values out of range
            return unary("arith.trunci", unary("arith.fptosi", wide, "i64"), "i8")
        if WIDTHS[b] < 32:
            return unary("arith.trunci", unary("arith.fptosi", wide, "i32"), b)
        return unary("arith.fptosi", wide, b)
    unsigned = source in ("u8", "bool")
    if b in FLOAT_TYPES:
        register = "f32" if WIDTHS[b] == 16 else b
        return convert_float(unary("arith.uitofp" if unsigned else "arith.sitofp", value, register), b)
    if WIDTHS[a] == WIDTHS[b]:
        return value
    if WIDTHS[a] > WIDTHS[b]:
        return unary("arith.trunci", value, b)
    return unary("arith.extui" if unsigned else "arith.extsi", value, b)


def _binary(float_op: str, int_op: str) -> Emitter:
    return lambda op, args: binary(float_op if args[0].type in FLOAT_TYPES else int_op, *args)


EMITTERS: dict[str, Emitter] = {
    "neg": lambda op, a: neg(a[0]),
    "abs": lambda op, a: a[0] if op.operands[0].dtype == "u8" else absolute(a[0]),
    "sign": _sign,
    "exp": _math("exp"), "exp2": _math("exp2"), "expm1": _expm1, "log": _math("log"), "log2": _math("log2"),
    "log10": _math("log10"), "log1p": _math("log1p"), "sqrt": _math("sqrt"), "rsqrt": _rsqrt, "reciprocal": _reciprocal,
    "sin": _math("sin"), "cos": _math("cos"), "tan": _math("tan"), "asin": _math("asin"), "acos": _math("acos"),
    "atan": _math("atan"), "sinh": _math("sinh"), "cosh": _math("cosh"), "tanh": _math("tanh"), "asinh": _math("asinh"),
    "acosh": _math("acosh"), "atanh": _math("atanh"), "sigmoid": lambda op, a: sigmoid(a[0]),
    "log_sigmoid": _log_sigmoid, "erf": _math("erf"), "erfc": _erfc, "floor": _math("floor"),
    "ceil": _math("ceil"), "round": _math("roundeven"), "trunc": _math("trunc"), "relu": _relu, "silu": _silu,
    "probability": lambda op, a: a[0],  # to_linalg_elementwise checks it
    "gelu": _gelu, "softplus": _softplus, "elu": _elu, "leaky_relu": _leaky_relu, "hardtanh": _hardtanh,
    "bitwise_not": lambda op, a: binary("arith.xori", a[0], const(1 if a[0].type == "i1" else -1, a[0].type)),
    "logical_not": lambda op, a: logical_not(a[0]),
    "isnan": lambda op, a: isnan(a[0]),
    "isinf": lambda op, a: compare("oeq", absolute(a[0]), like(float("inf"), a[0])),
    "isfinite": lambda op, a: compare("olt", absolute(a[0]), like(float("inf"), a[0])),
    "add": lambda op, a: add(*a), "sub": lambda op, a: sub(*a), "mul": lambda op, a: mul(*a),
    "div": lambda op, a: div(*a),
    "floordiv": _floordiv, "truncdiv": _truncdiv, "rem": _rem, "fmod": _fmod, "pow": _pow,
    "atan2": lambda op, a: binary("math.atan2", *a), "copysign": lambda op, a: binary("math.copysign", *a),
    "hypot": _hypot,
    "maximum": lambda op, a: maximum(a[0], a[1], op.operands[0].dtype == "u8"),
    "minimum": lambda op, a: minimum(a[0], a[1], op.operands[0].dtype == "u8"),
    "bitwise_and": _binary("", "arith.andi"), "bitwise_or": _binary("", "arith.ori"),
    "bitwise_xor": _binary("", "arith.xori"), "shl": _shift(True), "shr": _shift(False),
    "logical_and": _binary("", "arith.andi"), "logical_or": _binary("", "arith.ori"),
    "logical_xor": _binary("", "arith.xori"),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _compare),
    "gelu_backward": _gelu_backward, "silu_backward": _silu_backward,
    "tanh_backward": lambda op, a: mul(a[0], sub(like(1, a[1]), mul(a[1], a[1]))),
    "sigmoid_backward": lambda op, a: mul(mul(a[0], sub(like(1, a[1]), a[1])), a[1]),
    "log_sigmoid_backward": lambda op, a: mul(a[0], sigmoid(neg(a[1]))),
    "relu_backward": _relu_backward, "softplus_backward": _softplus_backward,
    "leaky_relu_backward": _leaky_relu_backward, "hardtanh_backward": _hardtanh_backward, "elu_backward": _elu_backward,
    "where": _where, "clamp": _clamp, "lerp": _lerp,
    "copy": lambda op, a: a[0],
}  # fmt: skip


def emit(op: Op, args: list[Expr]) -> Expr:
    """The element of `op`'s result from the elements of its operands, in the result's element type."""
    if op.name == "cast":
        return cast(args[0], op.operands[0].dtype, op.results[0].dtype)
    narrow = any(arg.type in ("bf16", "f16") for arg in args)
    if narrow and op.name not in ("where", "copy"):
        args = [convert_float(arg, "f32") if arg.type in ("bf16", "f16") else arg for arg in args]
    value = EMITTERS[op.name](op, args)
    target = element_type(op.results[0].dtype)
    return convert_float(value, target) if value.type != target else value
