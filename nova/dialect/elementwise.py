"""Elementwise ops: one table row each. Operands broadcast as in NumPy; the result is their broadcast.

Dtypes: all value operands of one op have the same dtype (the emitter inserts `nova.cast`, so promotion is visible).
bf16 and f16 compute in f32 and round once, at the op's result; that rounding is observable and passes keep it.
NaN and infinity propagate as in PyTorch. Each row: name, attributes, allowed dtypes, meaning.
"""

from __future__ import annotations

from nova.dialect.base import Instance, check, check_broadcast, op
from nova.dialect.types import COMPLEX, FLOATS, INTEGERS

ALLOWED = {
    "float": FLOATS,
    "int": INTEGERS | {"bool"},
    "number": FLOATS | INTEGERS,
    "bool": frozenset({"bool"}),
    "any": FLOATS | INTEGERS | {"bool"},
}

# one operand, result of the same dtype
UNARY: dict[str, tuple[str, str, str]] = {
    "neg": ("", "number", "-x"),
    "abs": ("", "number", "|x|"),
    "sign": ("", "number", "-1, 0 or 1; 0 for NaN"),
    "exp": ("", "float", "e**x"),
    "exp2": ("", "float", "2**x"),
    "expm1": ("", "float", "e**x - 1 without cancellation"),
    "log": ("", "float", "natural logarithm"),
    "log2": ("", "float", "base-2 logarithm"),
    "log10": ("", "float", "base-10 logarithm"),
    "log1p": ("", "float", "log(1 + x) without cancellation"),
    "sqrt": ("", "float", "square root"),
    "rsqrt": ("", "float", "1 / sqrt(x)"),
    "reciprocal": ("", "float", "1 / x"),
    "sin": ("", "float", "sine"),
    "cos": ("", "float", "cosine"),
    "tan": ("", "float", "tangent"),
    "asin": ("", "float", "inverse sine"),
    "acos": ("", "float", "inverse cosine"),
    "atan": ("", "float", "inverse tangent"),
    "sinh": ("", "float", "hyperbolic sine"),
    "cosh": ("", "float", "hyperbolic cosine"),
    "tanh": ("", "float", "hyperbolic tangent"),
    "asinh": ("", "float", "inverse hyperbolic sine"),
    "acosh": ("", "float", "inverse hyperbolic cosine"),
    "atanh": ("", "float", "inverse hyperbolic tangent"),
    "sigmoid": ("", "float", "1 / (1 + e**-x)"),
    "log_sigmoid": ("", "float", "log(sigmoid(x)), stable at both ends"),
    "erf": ("", "float", "error function"),
    "erfc": ("", "float", "1 - erf(x) without cancellation"),
    "floor": ("", "float", "largest integer <= x"),
    "ceil": ("", "float", "smallest integer >= x"),
    "round": ("", "float", "nearest integer, halves to even"),
    "trunc": ("", "float", "integer part, towards zero"),
    "relu": ("", "number", "max(x, 0); NaN stays NaN"),
    "silu": ("", "float", "x * sigmoid(x)"),
    "gelu": ("approximate:str", "float", 'x * Phi(x) with approximate="none" (erf) or "tanh"'),
    "softplus": ("beta:float threshold:float", "float", "x if x*beta > threshold else log1p(e**(x*beta)) / beta"),
    "elu": (
        "alpha:float scale:float input_scale:float",
        "float",
        "scale * (x if x > 0 else alpha * expm1(x * input_scale)); also selu and celu",
    ),
    "leaky_relu": ("negative_slope:float", "float", "x if x > 0 else negative_slope * x"),
    "hardtanh": ("lo:float hi:float", "number", "min(max(x, lo), hi); NaN stays NaN"),
    "probability": ("", "float", "x; an x outside [0, 1] is an error, and so is NaN"),
    "bitwise_not": ("", "int", "complement of all bits"),
}

# one operand, result i1
PREDICATES: dict[str, tuple[str, str]] = {
    "logical_not": ("bool", "not x"),
    "isnan": ("float", "x is NaN"),
    "isinf": ("float", "x is +inf or -inf"),
    "isfinite": ("float", "x is neither NaN nor infinite"),
}

# two operands of one dtype, result of the same dtype
BINARY: dict[str, tuple[str, str]] = {
    "add": ("number", "a + b; integers wrap"),
    "sub": ("number", "a - b; integers wrap"),
    "mul": ("number", "a * b; integers wrap"),
    "div": ("float", "a / b, correctly rounded"),
    "floordiv": ("number", "floor(a / b), as torch.div(rounding_mode='floor'); integer division by 0 is an error"),
    "truncdiv": ("number", "trunc(a / b), as torch.div(rounding_mode='trunc')"),
    "rem": ("number", "a - floordiv(a, b) * b: the sign of b (Python's %)"),
    "fmod": ("number", "a - truncdiv(a, b) * b: the sign of a (C's fmod)"),
    "pow": ("number", "a ** b; integers: b >= 0"),
    "atan2": ("float", "angle of the point (b, a)"),
    "hypot": ("float", "sqrt(a*a + b*b) without overflow"),
    "copysign": ("float", "|a| with the sign of b"),
    "maximum": ("any", "larger of a and b; NaN if either is NaN"),
    "minimum": ("any", "smaller of a and b; NaN if either is NaN"),
    "bitwise_and": ("int", "a & b"),
    "bitwise_or": ("int", "a | b"),
    "bitwise_xor": ("int", "a ^ b"),
    "shl": ("int", "a << b"),
    "shr": ("int", "a >> b, arithmetic for signed types"),
    "logical_and": ("bool", "a and b"),
    "logical_or": ("bool", "a or b"),
    "logical_xor": ("bool", "a != b"),
}

# two operands of one dtype, result i1; comparisons with NaN are false, except ne
COMPARISONS: dict[str, str] = {
    "eq": "a == b",
    "ne": "a != b",
    "lt": "a < b",
    "le": "a <= b",
    "gt": "a > b",
    "ge": "a >= b",
}

# dy and one saved tensor (input x or output y of the forward op), result of the same dtype
BACKWARD: dict[str, tuple[str, str, str]] = {
    "gelu_backward": ("x", "approximate:str", "dy * d gelu(x) / dx"),
    "silu_backward": ("x", "", "dy * s * (1 + x * (1 - s)), s = sigmoid(x)"),
    "tanh_backward": ("y", "", "dy * (1 - y*y)"),
    "sigmoid_backward": ("y", "", "dy * (1 - y) * y"),
    "log_sigmoid_backward": ("x", "", "dy * sigmoid(-x)"),
    "relu_backward": ("x", "threshold:float", "0 if x <= threshold else dy; x may also be the output"),
    "softplus_backward": ("x", "beta:float threshold:float", "dy if x*beta > threshold else dy * sigmoid(x*beta)"),
    "leaky_relu_backward": ("x", "negative_slope:float", "dy if x > 0 else dy * negative_slope"),
    "hardtanh_backward": ("x", "lo:float hi:float", "dy if lo < x < hi else 0"),
    "elu_backward": (
        "x",
        "alpha:float scale:float input_scale:float is_result:bool",
        "dy * scale if x > 0, else dy * input_scale * scale * alpha * e**(x * input_scale), or with is_result, where x "
        "is the output, dy * input_scale * (x + scale * alpha)",
    ),
}


def _declare(name: str, operands: str, attrs: str, allowed: str, meaning: str, *, boolean: bool) -> None:
    dtypes = ALLOWED[allowed]

    def verify(it: Instance) -> None:
        first, result = it.ins[0], it.outs[0]
        check(first.dtype in dtypes, "operand {} must have a dtype of kind '{}'", first, allowed)
        for other in it.ins[1:]:
            check(other.dtype == first.dtype, "operands {} differ in dtype", ", ".join(map(str, it.ins)))
        check_broadcast(it, it.ins, result)
        dtype = "bool" if boolean else first.dtype
        check(result.dtype == dtype, "result {} must be {}", result, dtype)
        if "approximate" in it.spec.attrs:
            check(it["approximate"] in ("none", "tanh"), "approximate is 'none' or 'tanh', not {!r}", it["approximate"])

    verify.__doc__ = f"{meaning}.\n\n({', '.join(operands.split())}): {allowed} -> {'i1' if boolean else 'same dtype'}."
    op(name, operands, "y" if operands != "dy y" else "dx", attrs)(verify)


for _name, (_attrs, _allowed, _meaning) in UNARY.items():
    _declare(_name, "x", _attrs, _allowed, _meaning, boolean=False)
for _name, (_allowed, _meaning) in PREDICATES.items():
    _declare(_name, "x", "", _allowed, _meaning, boolean=True)
for _name, (_allowed, _meaning) in BINARY.items():
    _declare(_name, "a b", "", _allowed, _meaning, boolean=False)
for _name, _meaning in COMPARISONS.items():
    _declare(_name, "a b", "", "any", _meaning, boolean=True)
for _name, (_saved, _attrs, _meaning) in BACKWARD.items():
    _declare(_name, f"dy {_saved}", _attrs, "float" if _name != "relu_backward" else "number", _meaning, boolean=False)

# families by shape of their rule, for passes that treat them alike
UNARY_OPS = frozenset(UNARY) | frozenset(PREDICATES)
BINARY_OPS = frozenset(BINARY) | frozenset(COMPARISONS) | frozenset(BACKWARD)
ELEMENTWISE_OPS = UNARY_OPS | BINARY_OPS | {"cast", "where", "clamp", "lerp"}


@op("cast", "x")
def _cast(it: Instance) -> None:
    """x converted to the result's dtype: floats round to nearest even, float to integer truncates, to i1 is x != 0.

    A cast to a narrower float is a rounding point the user wrote; no pass removes it.
    """
    (x,), (y,) = it.ins, it.outs
    check(x.shape == y.shape, "cast changes shape: {} to {}", x, y)
    check((x.dtype in COMPLEX) <= (y.dtype in COMPLEX), "cast from complex {} to real {}", x, y)


@op("where", "cond a b")
def _where(it: Instance) -> None:
    """a where cond, else b, elementwise with broadcasting. cond: i1; a, b: one dtype, which is the result's."""
    cond, a, b = it.ins
    check(cond.dtype == "bool", "condition {} must be i1", cond)
    check(a.dtype == b.dtype == it.outs[0].dtype, "branches {} and {} and result {} differ in dtype", a, b, it.outs[0])
    check_broadcast(it, it.ins, it.outs[0])


@op("clamp", "x lo hi")
def _clamp(it: Instance) -> None:
    """min(max(x, lo), hi), with broadcasting; NaN in any operand gives NaN."""
    x, y = it.ins[0], it.outs[0]
    check(all(o.dtype == x.dtype for o in it.ins) and y.dtype == x.dtype, "operands {} differ in dtype", it.ins)
    check_broadcast(it, it.ins, y)


@op("lerp", "a b weight")
def _lerp(it: Instance) -> None:
    """a + weight * (b - a) if |weight| < 0.5 else b - (b - a) * (1 - weight), with broadcasting. Floats."""
    a, y = it.ins[0], it.outs[0]
    check(all(o.dtype == a.dtype for o in it.ins) and y.dtype == a.dtype, "operands {} differ in dtype", it.ins)
    check(a.dtype in FLOATS, "lerp needs floats, got {}", a)
    check_broadcast(it, it.ins, y)
