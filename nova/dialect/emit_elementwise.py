"""Emitters of elementwise ATen ops, their backward peers included."""

from __future__ import annotations

import math
from typing import Any

import torch

from nova.dialect.build import Value, is_number
from nova.dialect.emit import TORCH_DTYPES, Emitter, NoLowering, emits
from nova.dialect.types import FLOATS, INTEGERS, LOW_PRECISION

# -- one to one -------------------------------------------------------------------------------------------------

_UNARY = (
    "neg abs sign exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh tanh "
    "asinh acosh atanh sigmoid erf erfc relu silu"
)
_ROUNDING = ["floor", "ceil", "trunc"]
_BINARY = {
    "mul.Tensor": "mul", "mul.Scalar": "mul", "maximum.default": "maximum", "minimum.default": "minimum",
    "atan2.default": "atan2", "hypot.default": "hypot", "copysign.Tensor": "copysign", "copysign.Scalar": "copysign",
    "remainder.Tensor": "rem", "remainder.Scalar": "rem", "remainder.Scalar_Tensor": "rem",
    "fmod.Tensor": "fmod", "fmod.Scalar": "fmod", "floor_divide.default": "floordiv", "floor_divide.Scalar": "floordiv",
    "bitwise_and.Tensor": "bitwise_and", "bitwise_and.Scalar": "bitwise_and", "bitwise_or.Tensor": "bitwise_or",
    "bitwise_or.Scalar": "bitwise_or", "bitwise_xor.Tensor": "bitwise_xor", "bitwise_xor.Scalar": "bitwise_xor",
    "__and__.Tensor": "bitwise_and", "__and__.Scalar": "bitwise_and", "__or__.Tensor": "bitwise_or",
    "__or__.Scalar": "bitwise_or", "__xor__.Tensor": "bitwise_xor", "__xor__.Scalar": "bitwise_xor",
    "bitwise_left_shift.Tensor": "shl", "bitwise_left_shift.Tensor_Scalar": "shl",
    "bitwise_right_shift.Tensor": "shr", "bitwise_right_shift.Tensor_Scalar": "shr",
    "__lshift__.Scalar": "shl", "__rshift__.Scalar": "shr",
}  # fmt: skip
_ON_BOOL = {"mul": "bitwise_and", "add": "bitwise_or", "maximum": "bitwise_or", "minimum": "bitwise_and"}


def _register_tables() -> None:
    for name in _UNARY.split():
        emits(f"{name}.default")(lambda e, x, name=name: e.arith(name, x))
    for name in _ROUNDING:
        emits(f"{name}.default")(lambda e, x, name=name: x if x.dtype in INTEGERS else e.arith(name, x))
    for overload, name in _BINARY.items():
        emits(overload)(lambda e, a, b, name=name: _binary(e, name, a, b))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        emits(f"{name}.Tensor", f"{name}.Scalar")(lambda e, a, b, name=name: e.compare(name, a, b))
    for name in ("logical_and", "logical_or", "logical_xor"):
        emits(f"{name}.default")(lambda e, a, b, name=name: e.b.op(name, e.value(a, "bool"), e.value(b, "bool")))
    for name in ("isnan", "isinf", "isfinite"):
        emits(f"{name}.default")(lambda e, x, name=name: _predicate(e, name, x))


def _binary(e: Emitter, name: str, a: Any, b: Any) -> Value:
    if e.dtype == "bool":
        if name in ("rem", "fmod", "floordiv", "shl", "shr"):
            raise NoLowering
        name = _ON_BOOL.get(name, name)
    return e.arith(name, a, b)


def _predicate(e: Emitter, name: str, x: Value) -> Value:
    return e.b.op(name, x) if x.dtype in FLOATS else e.b.full(x.shape, name == "isfinite", "bool")


_register_tables()

# -- arithmetic -------------------------------------------------------------------------------------------------


@emits("add.Tensor", "add.Scalar")
def add(e: Emitter, a: Any, b: Any, alpha: Any = 1) -> Value:
    """a + alpha * b."""
    if e.dtype == "bool":
        return e.arith("bitwise_or", a, b)
    return _scaled(e, "add", a, b, alpha)


@emits("sub.Tensor", "sub.Scalar")
def sub(e: Emitter, a: Any, b: Any, alpha: Any = 1) -> Value:
    """a - alpha * b."""
    return _scaled(e, "sub", a, b, alpha)


@emits("rsub.Tensor", "rsub.Scalar")
def rsub(e: Emitter, a: Any, b: Any, alpha: Any = 1) -> Value:
    """b - alpha * a."""
    return _scaled(e, "sub", b, a, alpha)


def _scaled(e: Emitter, name: str, a: Any, b: Any, alpha: Any) -> Value:
    if is_number(alpha) and alpha == 1:
        return e.arith(name, a, b)
    dtype = "f32" if e.dtype in LOW_PRECISION else e.dtype
    scaled = e.b.op("mul", e.value(b, dtype), e.value(alpha, dtype))
    return e.b.cast(e.b.op(name, e.value(a, dtype), scaled), e.dtype)


@emits("div.Tensor", "div.Scalar", "true_divide.Tensor")
def div(e: Emitter, a: Any, b: Any) -> Value:
    """a / b; integers divide as floats."""
    return e.arith("div", a, b)


@emits("div.Tensor_mode", "div.Scalar_mode")
def div_mode(e: Emitter, a: Any, b: Any, rounding_mode: str | None = None) -> Value:
    """a / b, rounded down or towards zero."""
    return e.arith({None: "div", "floor": "floordiv", "trunc": "truncdiv"}[rounding_mode], a, b)


@emits("pow.Tensor_Scalar")
def pow_scalar(e: Emitter, x: Value, exponent: Any) -> Value:
    """x ** exponent; the exponents that PyTorch computes by other means are computed so here."""
    if not is_number(exponent) or e.dtype not in FLOATS:
        return e.arith("pow", x, exponent)
    if exponent == 0:
        return e.b.full(x.shape, 1, e.dtype)
    if exponent == 1:
        return e.b.cast(x, e.dtype)
    named = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}.get(float(exponent))
    if named:
        return e.arith(named, x)
    if exponent in (2, 3, -2):
        wide = e.wide(x)
        square = e.b.op("mul", wide, wide)
        result = {
            2: lambda: square,
            3: lambda: e.b.op("mul", square, wide),
            -2: lambda: e.b.op("reciprocal", square),
        }[int(exponent)]()
        return e.b.cast(result, e.dtype)
    return e.arith("pow", x, exponent)


@emits("pow.Tensor_Tensor", "pow.Scalar")
def pow_tensor(e: Emitter, base: Any, exponent: Any) -> Value:
    """base ** exponent, elementwise."""
    return e.arith("pow", base, exponent)


@emits("square.default")
def square(e: Emitter, x: Value) -> Value:
    """x * x."""
    return e.arith("mul", x, x)


@emits("sgn.default")
def sgn(e: Emitter, x: Value) -> Value:
    """The sign of a real tensor."""
    return e.arith("sign", x)


@emits("frac.default")
def frac(e: Emitter, x: Value) -> Value:
    """x - trunc(x)."""
    return e.arith("sub", x, e.b.op("trunc", x))


@emits("round.default")
def round_(e: Emitter, x: Value) -> Value:
    """Nearest integer, halves to even."""
    return x if x.dtype in INTEGERS else e.arith("round", x)


@emits("logical_not.default")
def logical_not(e: Emitter, x: Value) -> Value:
    """x == 0."""
    return e.b.op("logical_not", e.value(x, "bool"))


@emits("bitwise_not.default")
def bitwise_not(e: Emitter, x: Value) -> Value:
    """Complement; of i1 its negation."""
    return e.b.op("logical_not" if x.dtype == "bool" else "bitwise_not", x)


@emits("addcmul.default")
def addcmul(e: Emitter, x: Value, a: Value, b: Value, value: Any = 1) -> Value:
    """x + value * a * b."""
    return _add_scaled(e, "mul", x, a, b, value)


@emits("addcdiv.default")
def addcdiv(e: Emitter, x: Value, a: Value, b: Value, value: Any = 1) -> Value:
    """x + value * a / b."""
    return _add_scaled(e, "div", x, a, b, value)


def _add_scaled(e: Emitter, name: str, x: Value, a: Value, b: Value, value: Any) -> Value:
    scaled = e.wide(a)
    if not (is_number(value) and value == 1):
        scaled = e.b.op("mul", e.wide(value), scaled)
    return e.b.cast(e.b.op("add", e.wide(x), e.b.op(name, scaled, e.wide(b))), e.dtype)


@emits("lerp.Scalar", "lerp.Tensor")
def lerp(e: Emitter, a: Value, b: Value, weight: Any) -> Value:
    """a + weight * (b - a)."""
    dtype = e.compute_dtype(a, b, weight)
    operands = [e.value(x, dtype) for x in (a, b, weight)]
    shape = e.shape
    return e.b.cast(e.b.create("lerp", operands, [(shape, dtype)]), e.dtype)


@emits("xlogy.Tensor", "xlogy.Scalar_Other", "xlogy.Scalar_Self")
def xlogy(e: Emitter, x: Any, y: Any) -> Value:
    """x * log(y), 0 where x is 0, NaN where y is."""
    x, y = e.wide(x), e.wide(y)
    product = e.b.op("mul", x, e.b.op("log", y))
    zero = e.b.constant(0, x.dtype)
    result = e.b.where(e.b.op("eq", x, zero), zero, product)
    return e.b.cast(e.b.where(e.b.op("isnan", y), e.b.constant(math.nan, x.dtype), result), e.dtype)


@emits("nan_to_num.default")
def nan_to_num(e: Emitter, x: Value, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Value:
    """Replaces NaN and infinities, by default with 0 and the dtype's extremes."""
    if x.dtype not in FLOATS:
        return x
    limit = torch.finfo(TORCH_DTYPES[x.dtype]).max
    nan, posinf, neginf = (d if v is None else v for v, d in ((nan, 0.0), (posinf, limit), (neginf, -limit)))
    b, inf = e.b, math.inf
    result = b.where(b.op("isnan", x), e.value(nan, x.dtype), x)
    result = b.where(b.op("eq", x, b.constant(inf, x.dtype)), e.value(posinf, x.dtype), result)
    return b.where(b.op("eq", x, b.constant(-inf, x.dtype)), e.value(neginf, x.dtype), result)


# -- selection --------------------------------------------------------------------------------------------------


@emits("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def where(e: Emitter, cond: Value, a: Any, b: Any) -> Value:
    """Elementwise choice."""
    return e.b.where(e.value(cond, "bool"), e.value(a, e.dtype), e.value(b, e.dtype))


@emits("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(e: Emitter, x: Value, mask: Value, value: Any) -> Value:
    """value where the mask is true."""
    return e.b.where(mask, e.value(value, x.dtype), x)


@emits("clamp.default", "clamp.Tensor", "clip.default")
def clamp(e: Emitter, x: Value, lo: Any = None, hi: Any = None) -> Value:
    """min(max(x, lo), hi); either bound may be absent. NaN stays NaN."""
    dtype = e.dtype
    result = e.value(x, dtype)
    if lo is not None:
        result = e.b.op("maximum", result, e.value(lo, dtype))
    if hi is not None:
        result = e.b.op("minimum", result, e.value(hi, dtype))
    return result


@emits("clamp_min.default", "clamp_min.Tensor")
def clamp_min(e: Emitter, x: Value, lo: Any) -> Value:
    """max(x, lo)."""
    return clamp(e, x, lo, None)


@emits("clamp_max.default", "clamp_max.Tensor")
def clamp_max(e: Emitter, x: Value, hi: Any) -> Value:
    """min(x, hi)."""
    return clamp(e, x, None, hi)


@emits("fmax.default", "fmin.default")
def fmax(e: Emitter, a: Value, b: Value) -> Value:
    """Maximum or minimum that ignores a NaN on one side."""
    name = "maximum" if "fmax" in str(e.node.target) else "minimum"
    a, b = e.value(a, e.dtype), e.value(b, e.dtype)
    result = e.b.op(name, a, b)
    if e.dtype in FLOATS:
        result = e.b.where(e.b.op("isnan", a), b, e.b.where(e.b.op("isnan", b), a, result))
    return result


@emits("threshold.default")
def threshold(e: Emitter, x: Value, limit: Any, value: Any) -> Value:
    """x where x > limit, else value."""
    return e.b.where(e.b.op("le", x, e.value(limit, x.dtype)), e.value(value, x.dtype), x)


# -- activations ------------------------------------------------------------------------------------------------


@emits("gelu.default")
def gelu(e: Emitter, x: Value, approximate: str = "none") -> Value:
    """x * Phi(x)."""
    return e.b.op("gelu", x, approximate=approximate)


@emits("gelu_backward.default")
def gelu_backward(e: Emitter, dy: Value, x: Value, approximate: str = "none") -> Value:
    """dy * gelu'(x)."""
    return e.arith("gelu_backward", dy, x, approximate=approximate)


def _static(*numbers: Any) -> None:
    if not all(is_number(n) for n in numbers):
        raise NoLowering


@emits("softplus.default")
def softplus(e: Emitter, x: Value, beta: Any = 1, threshold: Any = 20) -> Value:
    """log(1 + e**(beta x)) / beta."""
    _static(beta, threshold)
    return e.b.op("softplus", x, beta=beta, threshold=threshold)


@emits("softplus_backward.default")
def softplus_backward(e: Emitter, dy: Value, x: Value, beta: Any, threshold: Any) -> Value:
    """dy * sigmoid(beta x)."""
    _static(beta, threshold)
    return e.arith("softplus_backward", dy, x, beta=beta, threshold=threshold)


@emits("elu.default")
def elu(e: Emitter, x: Value, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Value:
    """scale * (x or alpha * expm1(input_scale x))."""
    _static(alpha, scale, input_scale)
    return e.b.op("elu", x, alpha=alpha, scale=scale, input_scale=input_scale)


@emits("celu.default")
def celu(e: Emitter, x: Value, alpha: Any = 1.0) -> Value:
    """elu(x, alpha, 1, 1 / alpha)."""
    _static(alpha)
    return elu(e, x, alpha, 1.0, 1.0 / alpha)


@emits("elu_backward.default")
def elu_backward(e: Emitter, dy: Value, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Value) -> Value:
    """Gradient of elu from its input or result."""
    _static(alpha, scale, input_scale)
    return e.arith("elu_backward", dy, x, alpha=alpha, scale=scale, input_scale=input_scale, is_result=is_result)


@emits("leaky_relu.default")
def leaky_relu(e: Emitter, x: Value, negative_slope: Any = 0.01) -> Value:
    """x or negative_slope * x."""
    _static(negative_slope)
    return e.b.op("leaky_relu", x, negative_slope=negative_slope)


@emits("leaky_relu_backward.default")
def leaky_relu_backward(e: Emitter, dy: Value, x: Value, negative_slope: Any, is_result: bool) -> Value:
    """dy or negative_slope * dy; the sign of the result is that of the input."""
    _static(negative_slope)
    return e.arith("leaky_relu_backward", dy, x, negative_slope=negative_slope)


@emits("hardtanh.default")
def hardtanh(e: Emitter, x: Value, lo: Any = -1, hi: Any = 1) -> Value:
    """x clamped to [lo, hi]."""
    _static(lo, hi)
    return e.b.op("hardtanh", x, lo=lo, hi=hi)


@emits("hardtanh_backward.default")
def hardtanh_backward(e: Emitter, dy: Value, x: Value, lo: Any, hi: Any) -> Value:
    """dy inside (lo, hi)."""
    _static(lo, hi)
    return e.arith("hardtanh_backward", dy, x, lo=lo, hi=hi)


@emits("threshold_backward.default")
def threshold_backward(e: Emitter, dy: Value, x: Value, limit: Any) -> Value:
    """dy where x > limit."""
    _static(limit)
    return e.arith("relu_backward", dy, x, threshold=limit)


@emits("silu_backward.default")
def silu_backward(e: Emitter, dy: Value, x: Value) -> Value:
    """dy * silu'(x)."""
    return e.arith("silu_backward", dy, x)


@emits("tanh_backward.default")
def tanh_backward(e: Emitter, dy: Value, y: Value) -> Value:
    """dy * (1 - y*y)."""
    return e.arith("tanh_backward", dy, y)


@emits("sigmoid_backward.default")
def sigmoid_backward(e: Emitter, dy: Value, y: Value) -> Value:
    """dy * (1 - y) * y."""
    return e.arith("sigmoid_backward", dy, y)


@emits("log_sigmoid_forward.default")
def log_sigmoid_forward(e: Emitter, x: Value) -> list[Value]:
    """log(sigmoid(x)) and a buffer that our backward does not need."""
    shape, dtype = tuple(e.outs[1].shape), e.outs[1].dtype
    return [e.b.op("log_sigmoid", x), e.b.full(shape, 0, dtype)]


@emits("log_sigmoid_backward.default")
def log_sigmoid_backward(e: Emitter, dy: Value, x: Value, buffer: Value) -> Value:
    """dy * sigmoid(-x)."""
    return e.arith("log_sigmoid_backward", dy, x)


@emits("hardsigmoid.default")
def hardsigmoid(e: Emitter, x: Value) -> Value:
    """min(max(x + 3, 0), 6) / 6."""
    return e.b.cast(e.b.op("div", _relu6_of_shifted(e, e.wide(x)), e.wide(6.0)), e.dtype)


def _relu6_of_shifted(e: Emitter, x: Value) -> Value:
    return e.b.op("hardtanh", e.b.op("add", x, e.wide(3.0)), lo=0.0, hi=6.0)


@emits("hardsigmoid_backward.default")
def hardsigmoid_backward(e: Emitter, dy: Value, x: Value) -> Value:
    """dy / 6 inside (-3, 3)."""
    x = e.wide(x)
    return e.b.cast(e.b.op("hardtanh_backward", e.b.op("div", e.wide(dy), e.wide(6.0)), x, lo=-3.0, hi=3.0), e.dtype)


@emits("hardswish.default")
def hardswish(e: Emitter, x: Value) -> Value:
    """x * min(max(x + 3, 0), 6) / 6."""
    x = e.wide(x)
    return e.b.cast(e.b.op("div", e.b.op("mul", x, _relu6_of_shifted(e, x)), e.wide(6.0)), e.dtype)


@emits("hardswish_backward.default")
def hardswish_backward(e: Emitter, dy: Value, x: Value) -> Value:
    """0 below -3, dy above 3, dy * (x / 3 + 0.5) between."""
    b, x, dy = e.b, e.wide(x), e.wide(dy)
    between = b.op("mul", dy, b.op("add", b.op("div", x, e.wide(3.0)), e.wide(0.5)))
    inner = b.where(b.op("ge", x, e.wide(3.0)), dy, between)  # NaN for NaN
    return b.cast(b.where(b.op("le", x, e.wide(-3.0)), e.wide(0.0), inner), e.dtype)


@emits("mish.default")
def mish(e: Emitter, x: Value) -> Value:
    """x * tanh(softplus(x))."""
    x = e.wide(x)
    soft = e.b.op("softplus", x, beta=1.0, threshold=20.0)
    return e.b.cast(e.b.op("mul", x, e.b.op("tanh", soft)), e.dtype)


@emits("mish_backward.default")
def mish_backward(e: Emitter, dy: Value, x: Value) -> Value:
    """dy * (t + x * sigmoid(x) * (1 - t*t)), t = tanh(softplus(x))."""
    b, x = e.b, e.wide(x)
    t = b.op("tanh", b.op("softplus", x, beta=1.0, threshold=20.0))
    slope = b.op("mul", b.op("mul", x, b.op("sigmoid", x)), b.op("sub", e.wide(1.0), b.op("mul", t, t)))
    return b.cast(b.op("mul", e.wide(dy), b.op("add", t, slope)), e.dtype)


@emits("_prelu_kernel.default")
def prelu(e: Emitter, x: Value, weight: Value) -> Value:
    """x where x > 0, else weight * x."""
    return e.b.where(e.b.op("gt", x, e.b.constant(0, x.dtype)), x, e.b.op("mul", weight, x))


@emits("_prelu_kernel_backward.default")
def prelu_backward(e: Emitter, dy: Value, x: Value, weight: Value) -> list[Value]:
    """Gradients in x and, unsummed, in weight."""
    b, zero = e.b, e.b.constant(0, x.dtype)
    positive = b.op("gt", x, zero)
    return [b.where(positive, dy, b.op("mul", weight, dy)), b.where(positive, zero, b.op("mul", x, dy))]


@emits("glu.default")
def glu(e: Emitter, x: Value, dim: int = -1) -> Value:
    """The first half times the sigmoid of the second."""
    a, gate = _halves(e, x, dim % x.rank)
    return e.b.cast(e.b.op("mul", e.wide(a), e.b.op("sigmoid", e.wide(gate))), e.dtype)


@emits("glu_backward.default")
def glu_backward(e: Emitter, dy: Value, x: Value, dim: int) -> Value:
    """Gradients of both halves, concatenated."""
    b, dim = e.b, dim % x.rank
    a, gate = (e.wide(half) for half in _halves(e, x, dim))
    s, dy = b.op("sigmoid", gate), e.wide(dy)
    da = b.op("mul", dy, s)
    dgate = b.op("mul", b.op("mul", da, b.op("sub", e.wide(1.0), s)), a)
    return b.concat([b.cast(da, e.dtype), b.cast(dgate, e.dtype)], dim)


def _halves(e: Emitter, x: Value, dim: int) -> tuple[Value, Value]:
    half = x.shape[dim] // 2
    return e.b.slice_dim(x, dim, 0, half), e.b.slice_dim(x, dim, half, 2 * half)


@emits("hardshrink.default")
def hardshrink(e: Emitter, x: Value, lambd: Any = 0.5) -> Value:
    """0 for |x| <= lambd, else x."""
    return _shrink(e, x, x, lambd)


@emits("hardshrink_backward.default", "softshrink_backward.default")
def shrink_backward(e: Emitter, dy: Value, x: Value, lambd: Any) -> Value:
    """0 for |x| <= lambd, else dy."""
    return _shrink(e, dy, x, lambd)


def _shrink(e: Emitter, value: Value, x: Value, lambd: Any) -> Value:
    inside = e.b.op("le", e.b.op("abs", x), e.value(lambd, x.dtype))
    return e.b.where(inside, e.b.constant(0, x.dtype), value)


@emits("softshrink.default")
def softshrink(e: Emitter, x: Value, lambd: Any = 0.5) -> Value:
    """x moved towards 0 by lambd, 0 within it."""
    b, x = e.b, e.wide(x)
    limit = e.wide(lambd)
    moved = b.where(b.op("gt", x, limit), b.op("sub", x, limit), b.op("add", x, limit))
    inside = b.op("le", b.op("abs", x), limit)
    return b.cast(b.where(inside, e.wide(0.0), moved), e.dtype)
