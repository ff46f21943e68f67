"""Values of the simulator and the operations that only compute: `arith`, `math`, `vector`, and their like in `llvm`.

A value of type T is an array [threads], one of type vector<K x T> an array [threads, K]. A value that is the same
in all threads may have one row instead, which NumPy's broadcasting treats alike: uniform arithmetic then costs next
to nothing. Arrays are never changed in place. bf16 is kept as its bits (uint16), integers are signed, i1 is bool,
pointers are int64.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nova.mlir import ir

if TYPE_CHECKING:
    from nova.gpu.simulate import Compiler, Step

Array = np.ndarray[Any, Any]
Function = Callable[..., Array]

DTYPES: dict[str, Any] = {
    "f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": np.uint16,
    "i64": np.int64, "index": np.int64, "i32": np.int32, "i16": np.int16, "i8": np.int8, "i1": np.bool_,
    "ptr": np.int64,
}  # fmt: skip
UNSIGNED: dict[Any, Any] = {np.dtype(np.int64): np.uint64, np.dtype(np.int32): np.uint32, np.dtype(np.int16): np.uint16}
UNSIGNED |= {np.dtype(np.int8): np.uint8, np.dtype(np.bool_): np.bool_}
FLOATS = ("f64", "f32", "f16", "bf16")


@dataclass(frozen=True)
class Kind:
    """A type as the simulator sees it: element name, lanes (0 for a scalar), and a pointer's address space."""

    element: str
    lanes: int = 0
    space: int = 0

    @property
    def dtype(self) -> Any:
        return DTYPES[self.element]

    @property
    def is_float(self) -> bool:
        return self.element in FLOATS

    @property
    def bytes(self) -> int:
        """Bytes of one element."""
        return np.dtype(self.dtype).itemsize


@functools.cache
def kind_of(type_: ir.Type) -> Kind:
    """The kind of an MLIR type; a struct's element is "struct"."""
    text = str(type_)
    if match := re.fullmatch(r"vector<(\d+)x(.*)>", text):
        return Kind(kind_of_text(match[2]).element, int(match[1]))
    return kind_of_text(text)


def kind_of_text(text: str) -> Kind:
    if text.startswith("!llvm.ptr"):
        match = re.search(r"<(\d+)>", text)
        return Kind("ptr", 0, int(match[1]) if match else 0)
    if text in DTYPES:
        return Kind(text)
    if text.startswith("!llvm.struct"):
        return Kind("struct")
    raise NotImplementedError(f"the simulator has no type {text}")


def size_of(text: str) -> int:
    """Bytes of an LLVM type given as text, as getelementptr counts them."""
    if match := re.fullmatch(r"!?(?:llvm\.)?array<(\d+) x (.*)>", text):
        return int(match[1]) * size_of(match[2])
    if match := re.fullmatch(r"vector<(\d+)x(.*)>", text):
        return int(match[1]) * size_of(match[2])
    if text.startswith(("!llvm.ptr", "ptr")):
        return 8
    return np.dtype(DTYPES[text]).itemsize


# --- bf16, tf32 ------------------------------------------------------------------------------------------------------


def bf16_to_f32(bits: Array) -> Array:
    """Exact."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: Array) -> Array:
    """To nearest even, as bits; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)


def truncate_tf32(values: Array) -> Array:
    """What the tensor cores read of an f32: the low 13 bits are ignored."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def round_tf32(values: Array, mode: str = "rna") -> Array:
    """cvt.rna.tf32 (ties away from zero) or cvt.rn.tf32 (ties to even)."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    half = np.uint32(0x1000) if mode == "rna" else np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    rounded = ((bits + half) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(values), rounded, values)


def to_float(values: Array, element: str) -> Array:
    """Values of a float element as something NumPy computes with: f32, or f64 for f64."""
    if element == "bf16":
        return bf16_to_f32(values)
    return values.astype(np.float32) if element == "f16" else values


def from_float(values: Array, element: str) -> Array:
    """Rounds computed values to a float element."""
    if element == "bf16":
        return f32_to_bf16(values.astype(np.float32))
    return values.astype(DTYPES[element])


def in_float(element: str, function: Function) -> Function:
    """`function` on values of `element`, computed in f32 (f64 for f64) and rounded once."""
    if element in ("f32", "f64"):
        return function
    return lambda *xs: from_float(function(*(to_float(x, element) for x in xs)), element)


# --- integers --------------------------------------------------------------------------------------------------------


def unsigned(x: Array) -> Array:
    return x.view(UNSIGNED[x.dtype]) if x.dtype.kind == "i" else x


def _signed_result(function: Function) -> Function:
    """An operation on the unsigned readings of its operands."""
    return lambda a, b: function(unsigned(a), unsigned(b)).view(a.dtype)


def _floor_div(a: Array, b: Array) -> Array:
    return np.floor_divide(a, np.where(b == 0, b.dtype.type(1), b))


def _trunc_div(a: Array, b: Array) -> Array:
    quotient = _floor_div(a, b)
    inexact = quotient * b != a
    return quotient + (inexact & ((a < 0) != (b < 0))).astype(a.dtype)


def _ceil_div(a: Array, b: Array) -> Array:
    quotient = _floor_div(a, b)
    return quotient + (quotient * b != a).astype(a.dtype)


def _shift(function: Function) -> Function:
    """Amounts of the width and more, which LLVM leaves undefined, give 0."""

    def shift(a: Array, b: Array) -> Array:
        width = 8 * a.dtype.itemsize
        amount = unsigned(b)
        inside = amount < width
        return np.where(inside, function(a, np.where(inside, amount, 0).astype(a.dtype)), a.dtype.type(0))

    return shift


INTEGER: dict[str, Function] = {
    "addi": np.add, "subi": np.subtract, "muli": np.multiply, "andi": np.bitwise_and, "ori": np.bitwise_or,
    "xori": np.bitwise_xor, "divsi": _trunc_div, "remsi": lambda a, b: a - _trunc_div(a, b) * b,
    "divui": _signed_result(_floor_div), "remui": _signed_result(lambda a, b: a - _floor_div(a, b) * b),
    "floordivsi": _floor_div, "ceildivsi": _ceil_div, "ceildivui": _signed_result(_ceil_div),
    "minsi": np.minimum, "maxsi": np.maximum, "minui": _signed_result(np.minimum), "maxui": _signed_result(np.maximum),
    "shli": _shift(np.left_shift), "shrsi": _shift(np.right_shift),
    "shrui": lambda a, b: _shift(np.right_shift)(unsigned(a), unsigned(b)).view(a.dtype),
}  # fmt: skip

_SIGNED: dict[str, Function] = {
    "eq": operator.eq, "ne": operator.ne, "slt": operator.lt, "sle": operator.le, "sgt": operator.gt, "sge": operator.ge
}  # fmt: skip
_UNSIGNED: dict[str, Function] = {"ult": operator.lt, "ule": operator.le, "ugt": operator.gt, "uge": operator.ge}
INT_PREDICATES = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")
FLOAT_PREDICATES = (
    "false", "oeq", "ogt", "oge", "olt", "ole", "one", "ord", "ueq", "ugt", "uge", "ult", "ule", "une", "uno", "true"
)  # fmt: skip


def compare_int(predicate: str) -> Function:
    if predicate in _SIGNED:
        return _SIGNED[predicate]
    compare = _UNSIGNED[predicate]
    return lambda a, b: compare(unsigned(a), unsigned(b))


def compare_float(predicate: str) -> Function:
    if predicate in ("true", "false"):
        return lambda a, b: np.full(np.broadcast_shapes(a.shape, b.shape), predicate == "true")
    if predicate in ("ord", "uno"):
        unordered = lambda a, b: np.isnan(a) | np.isnan(b)  # noqa: E731
        return unordered if predicate == "uno" else lambda a, b: ~unordered(a, b)
    compare = {
        "eq": operator.eq, "gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le,
        "ne": operator.ne,
    }[predicate[1:]]  # fmt: skip
    if predicate[0] == "o":
        return lambda a, b: compare(a, b) & ~(np.isnan(a) | np.isnan(b))
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


# --- floats ----------------------------------------------------------------------------------------------------------


def _signed_zero_max(a: Array, b: Array) -> Array:
    """maximum that counts -0 as less than +0."""
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), np.maximum(a, b))


def _signed_zero_min(a: Array, b: Array) -> Array:
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), np.minimum(a, b))


FLOAT: dict[str, Function] = {
    "addf": np.add, "subf": np.subtract, "mulf": np.multiply, "divf": np.divide, "remf": np.fmod, "negf": np.negative,
    "maximumf": _signed_zero_max, "minimumf": _signed_zero_min, "maxnumf": np.fmax, "minnumf": np.fmin,
}  # fmt: skip


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c with one rounding for f32 (through f64); for f64 the error of the product is kept."""
    if a.dtype == np.float32:
        return (a.astype(np.float64) * b + c).astype(np.float32)
    (a, ea), (b, eb) = np.frexp(a), np.frexp(b)
    shift = ea + eb
    scaled = np.ldexp(c, -shift)
    result = _fma_scaled(a, b, scaled)
    result = np.where(np.isfinite(scaled) | ~np.isfinite(c), np.ldexp(result, shift), c)
    return np.where((a == 0) | (b == 0), a * b + c, result)


def _fma_scaled(a: Array, b: Array, c: Array) -> Array:
    """For |a|, |b| < 1: the product's and the sum's rounding errors are added up and put back."""
    product = a * b
    split = 134217729.0
    a_high, b_high = a * split - (a * split - a), b * split - (b * split - b)
    error = ((a_high * b_high - product) + a_high * (b - b_high) + (a - a_high) * b_high) + (a - a_high) * (b - b_high)
    total = product + c
    back = total - product
    lost = (product - (total - back)) + (c - back)
    result = total + (lost + error)
    return np.where(np.isfinite(result), result, total)


def _special(name: str) -> Function:
    """A function of torch.special in f64."""

    def function(x: Array) -> Array:
        import torch

        return getattr(torch.special, name)(torch.from_numpy(np.ascontiguousarray(x))).numpy()

    return function


def _powi(x: Array, n: Array) -> Array:
    return np.power(x, n.astype(x.dtype))


def _ipowi(x: Array, n: Array) -> Array:
    """Integer power; a negative exponent gives 1 / x truncated."""
    result = np.ones(np.broadcast_shapes(x.shape, n.shape), x.dtype)
    base: Array = x + np.zeros_like(result)
    rest: Array = np.maximum(n, 0) + np.zeros_like(result)
    while rest.any():
        result = np.where(rest & 1, result * base, result)
        base, rest = base * base, rest >> 1
    negative = np.where(x == 1, 1, np.where(x == -1, np.where(n & 1, -1, 1), 0)).astype(x.dtype)
    return np.where(n < 0, negative, result)


# Computed in f64 and rounded, so that the simulator says what an exact implementation would.
MATH: dict[str, Function] = {
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2, "log10": np.log10,
    "log1p": np.log1p, "sin": np.sin, "cos": np.cos, "tan": np.tan, "tanh": np.tanh, "sinh": np.sinh, "cosh": np.cosh,
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "asinh": np.arcsinh, "acosh": np.arccosh,
    "atanh": np.arctanh, "atan2": np.arctan2, "powf": np.power, "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x), "cbrt": np.cbrt, "erf": _special("erf"), "erfc": _special("erfc"),
}  # fmt: skip
EXACT: dict[str, Function] = {
    "absf": np.abs, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "roundeven": np.rint,
    "copysign": np.copysign,
    "round": lambda x: np.trunc(x + np.copysign(np.where(np.abs(x) < 2.0**52, 0.5, 0.0), x)), "fma": fma,
}  # fmt: skip


def through_f64(function: Function) -> Function:
    def wide(*xs: Array) -> Array:
        return function(*(x.astype(np.float64) for x in xs))

    return wide


# --- conversions -----------------------------------------------------------------------------------------------------


def _float_to_int(x: Array, dtype: Any, is_signed: bool) -> Array:
    """Towards zero; out of range saturates and NaN is 0, as the hardware's cvt."""
    bits = 8 * np.dtype(dtype).itemsize
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if is_signed else (0, 2**bits - 1)
    wide = np.trunc(np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=2.0**70, neginf=-(2.0**70)))
    kind = np.int64 if is_signed else np.uint64
    inside = (wide > low - 1) & (wide < float(high + 1))
    value = np.where(inside, wide, 0.0).astype(kind)
    value = np.where(inside, value, np.where(wide < 0, kind(low), kind(high)))
    return value.astype(UNSIGNED[np.dtype(dtype)] if not is_signed else dtype).view(dtype)


def convert(name: str, source: Kind, target: Kind) -> Function:
    """One of arith's casts."""
    if name in ("extf", "truncf"):
        return lambda x: from_float(to_float(x, source.element), target.element)
    if name in ("sitofp", "uitofp"):
        read = (lambda x: x) if name == "sitofp" else unsigned
        if source.element == "i1":
            sign = -1.0 if name == "sitofp" else 1.0
            return lambda x: from_float(x.astype(np.float32) * np.float32(sign), target.element)
        through = np.float64 if target.element == "f64" else np.float32
        return lambda x: from_float(read(x).astype(through), target.element)
    if name in ("fptosi", "fptoui"):
        return lambda x: _float_to_int(to_float(x, source.element), target.dtype, name == "fptosi")
    if name in ("extui", "index_castui"):
        return lambda x: (unsigned(x) if x.dtype != np.bool_ else x).astype(target.dtype)
    if name == "extsi":
        if source.element == "i1":
            return lambda x: -(x.astype(target.dtype))
        return lambda x: x.astype(target.dtype)
    if name == "trunci" and target.element == "i1":
        return lambda x: (x & 1).astype(np.bool_)
    if name in ("trunci", "index_cast"):
        return lambda x: x.astype(target.dtype)
    if name == "bitcast":
        return lambda x: bitcast(x, target)
    raise NotImplementedError(name)


def bitcast(x: Array, target: Kind) -> Array:
    """The same bits of each thread as another type, vector or scalar."""
    if x.dtype == target.dtype and (x.ndim > 1) == bool(target.lanes):
        return x
    rows = np.ascontiguousarray(x).reshape(len(x), -1).view(target.dtype)
    return rows if target.lanes else rows[:, 0]


# --- shapes ----------------------------------------------------------------------------------------------------------


def broadcast(x: Array, lanes: int) -> Array:
    """A scalar (or a vector of one) in every lane."""
    column = x[:, None] if x.ndim == 1 else x
    return np.broadcast_to(column, (len(x), lanes)) if lanes else x


def join_rows(*xs: Array) -> list[Array]:
    """The arrays with equally many rows."""
    rows = max(len(x) for x in xs)
    return [x if len(x) == rows else np.broadcast_to(x, (rows, *x.shape[1:])) for x in xs]


def select(condition: Array, a: Array, b: Array) -> Array:
    if a.ndim > condition.ndim:
        condition = condition[:, None]
    return np.where(condition, a, b)


def insert(x: Array, into: Array, position: int) -> Array:
    x, into = join_rows(x, into)
    result = into.copy()
    result[:, position] = x
    return result


def insert_strided(x: Array, into: Array, offset: int) -> Array:
    x, into = join_rows(x, into)
    result = into.copy()
    result[:, offset : offset + x.shape[1]] = x
    return result


REDUCTIONS: dict[str, str] = {
    "add": "add", "mul": "mul", "minimumf": "minimumf", "maximumf": "maximumf", "minnumf": "minnumf",
    "maxnumf": "maxnumf", "minsi": "minsi", "maxsi": "maxsi", "minui": "minui", "maxui": "maxui", "and": "andi",
    "or": "ori", "xor": "xori",
}  # fmt: skip


def reduction(kind: str, element: str) -> Function:
    """Lanes from left to right, then the accumulator first if there is one."""
    suffix = "f" if element in FLOATS else "i"
    name = kind + suffix if kind in ("add", "mul") else REDUCTIONS[kind]
    combine = in_float(element, FLOAT[name]) if suffix == "f" and name in FLOAT else INTEGER[name]

    def reduce(x: Array, start: Array | None = None) -> Array:
        result = x[:, 0] if start is None else combine(start, x[:, 0])
        for lane in range(1, x.shape[1]):
            result = combine(result, x[:, lane])
        return result

    return reduce


# --- constants -------------------------------------------------------------------------------------------------------


def constant(attribute: ir.Attribute, kind: Kind) -> Array:
    """An attribute's value as one row."""
    if hasattr(attribute, "is_splat"):
        if attribute.is_splat:
            return broadcast(constant(attribute.get_splat_value(), Kind(kind.element)), kind.lanes)
        try:
            numbers = np.array(attribute)
        except TypeError:  # bf16
            numbers = np.array([float(x) for x in re.findall(r"-?\d[\d.eE+-]*", str(attribute).split(">")[0])])
        return _numbers(numbers, kind)[None]
    if kind.element == "ptr":
        return np.zeros(1, np.int64)
    value = attribute.value
    return _numbers(np.array([value]), Kind(kind.element))


def _numbers(numbers: Array, kind: Kind) -> Array:
    if kind.element == "bf16":
        return f32_to_bf16(numbers.astype(np.float32))
    if kind.element == "i1":
        return (numbers.astype(np.int64) & 1).astype(np.bool_)
    return numbers.astype(kind.dtype)


# --- builders: an operation to a step --------------------------------------------------------------------------------

Builder = Callable[["Compiler", ir.Operation], "Step"]
TABLE: dict[str, Builder] = {}


def _integer(name: str) -> Builder:
    return lambda c, op: c.pure(op, INTEGER[name])


def _float(function: Function) -> Builder:
    return lambda c, op: c.pure(op, in_float(c.kind(op.results[0]).element, function))


def _math(function: Function) -> Builder:
    def build(c: Compiler, op: ir.Operation) -> Step:
        element = c.kind(op.results[0]).element
        wide = through_f64(function)
        return c.pure(op, lambda *xs: from_float(wide(*(to_float(x, element) for x in xs)), element))

    return build


def _cast(name: str) -> Builder:
    return lambda c, op: c.pure(op, convert(name, c.kind(op.operands[0]), c.kind(op.results[0])))


def _cmpi(c: Compiler, op: ir.Operation) -> Step:
    return c.pure(op, compare_int(INT_PREDICATES[int(op.attributes["predicate"].value)]))


def _cmpf(c: Compiler, op: ir.Operation) -> Step:
    element = c.kind(op.operands[0]).element
    compare = compare_float(FLOAT_PREDICATES[int(op.attributes["predicate"].value)])
    return c.pure(op, lambda a, b: compare(to_float(a, element), to_float(b, element)))


def _constant(c: Compiler, op: ir.Operation) -> Step:
    return c.preset(op, constant(op.attributes["value"], c.kind(op.results[0])))


def _zero(c: Compiler, op: ir.Operation) -> Step:
    """Poison, undef and zero: any value will do; an undefined struct is filled in by insertvalue."""
    kind = c.kind(op.results[0])
    if kind.element == "struct":
        return c.preset(op, ())
    return c.preset(op, np.zeros((1, kind.lanes) if kind.lanes else 1, kind.dtype))


def _mul_extended(is_signed: bool) -> Builder:
    def build(c: Compiler, op: ir.Operation) -> Step:
        kind = c.kind(op.results[0])
        bits = 8 * kind.bytes

        def product(a: Array, b: Array) -> tuple[Array, Array]:
            read = (lambda x: x.astype(object)) if is_signed else (lambda x: unsigned(x).astype(object))
            wide = read(a) * read(b)
            low = (wide & ((1 << bits) - 1)).astype(UNSIGNED[a.dtype]).view(a.dtype)
            high = ((wide >> bits) & ((1 << bits) - 1)).astype(UNSIGNED[a.dtype]).view(a.dtype)
            return low, high

        return c.multiple(op, product)

    return build


def _positions(op: ir.Operation, name: str = "static_position") -> list[int]:
    return [int(x) for x in op.attributes[name]]


def _extract(c: Compiler, op: ir.Operation) -> Step:
    position = _positions(op)
    if len(op.operands) > 1:  # a position only known when run
        return c.pure(op, _extract_at)
    if not position:
        return c.pure(op, lambda x: x)
    index = position[0]
    return c.pure(op, lambda x: x[:, index])


def _extract_at(x: Array, index: Array) -> Array:
    x, index = join_rows(x, index)
    return x[np.arange(len(x)), index]


def _insert(c: Compiler, op: ir.Operation) -> Step:
    position = _positions(op)
    if len(op.operands) > 2:
        return c.pure(op, _insert_at)
    return c.pure(op, lambda x, into: insert(x, into, position[0]))


def _insert_at(x: Array, into: Array, index: Array) -> Array:
    x, into, index = join_rows(x, into, index)
    result = into.copy()
    result[np.arange(len(result)), index] = x
    return result


def _broadcast(c: Compiler, op: ir.Operation) -> Step:
    lanes = c.kind(op.results[0]).lanes
    return c.pure(op, lambda x: broadcast(x, lanes))


def _shuffle(c: Compiler, op: ir.Operation) -> Step:
    mask = np.array([max(i, 0) for i in _positions(op, "mask")])
    return c.pure(op, lambda a, b: np.concatenate(join_rows(a, b), axis=1)[:, mask])


def _from_elements(c: Compiler, op: ir.Operation) -> Step:
    return c.pure(op, lambda *xs: np.stack(join_rows(*xs), axis=1))


def _to_elements(c: Compiler, op: ir.Operation) -> Step:
    return c.multiple(op, lambda x: tuple(x[:, i] for i in range(x.shape[1])))


def _extract_strided(c: Compiler, op: ir.Operation) -> Step:
    (offset,), (size,) = ([int(x.value) for x in op.attributes[name]] for name in ("offsets", "sizes"))
    return c.pure(op, lambda x: x[:, offset : offset + size])


def _insert_strided(c: Compiler, op: ir.Operation) -> Step:
    (offset,) = (int(x.value) for x in op.attributes["offsets"])
    return c.pure(op, lambda x, into: insert_strided(x, into, offset))


def _interleave(c: Compiler, op: ir.Operation) -> Step:
    return c.pure(op, lambda a, b: np.stack(join_rows(a, b), axis=2).reshape(max(len(a), len(b)), -1))


def _deinterleave(c: Compiler, op: ir.Operation) -> Step:
    return c.multiple(op, lambda x: (x[:, 0::2], x[:, 1::2]))


def _reduction(c: Compiler, op: ir.Operation) -> Step:
    match = re.search(r"<(\w+)>", str(op.attributes["kind"]))
    assert match
    return c.pure(op, reduction(match[1], c.kind(op.results[0]).element))


def _extract_value(c: Compiler, op: ir.Operation) -> Step:
    (position,) = _positions(op, "position")
    return c.pure(op, lambda fields: fields[position])


def _insert_value(c: Compiler, op: ir.Operation) -> Step:
    (position,) = _positions(op, "position")

    def put(fields: tuple[Any, ...], value: Array) -> tuple[Any, ...]:
        filled = list(fields) + [None] * (position + 1 - len(fields))
        filled[position] = value
        return tuple(filled)

    return c.pure(op, put)


def _select(c: Compiler, op: ir.Operation) -> Step:
    return c.pure(op, select)


def _same(c: Compiler, op: ir.Operation) -> Step:
    return c.pure(op, lambda x: x)


def _llvm_bitcast(c: Compiler, op: ir.Operation) -> Step:
    target = c.kind(op.results[0])
    return c.pure(op, lambda x: bitcast(x, target))


def _int_cast_to(c: Compiler, op: ir.Operation) -> Step:
    dtype = c.kind(op.results[0]).dtype
    return c.pure(op, lambda x: x.astype(dtype))


_LLVM_INTEGER = {
    "add": "addi", "sub": "subi", "mul": "muli", "sdiv": "divsi", "udiv": "divui", "srem": "remsi", "urem": "remui",
    "and": "andi", "or": "ori", "xor": "xori", "shl": "shli", "lshr": "shrui", "ashr": "shrsi", "intr.smax": "maxsi",
    "intr.smin": "minsi", "intr.umax": "maxui", "intr.umin": "minui",
}  # fmt: skip
_LLVM_FLOAT = {
    "fadd": "addf", "fsub": "subf", "fmul": "mulf", "fdiv": "divf", "frem": "remf", "fneg": "negf",
    "intr.maximum": "maximumf", "intr.minimum": "minimumf", "intr.maxnum": "maxnumf", "intr.minnum": "minnumf",
}  # fmt: skip
_LLVM_CASTS = {
    "sext": "extsi", "zext": "extui", "trunc": "trunci", "fpext": "extf", "fptrunc": "truncf", "sitofp": "sitofp",
    "uitofp": "uitofp", "fptosi": "fptosi", "fptoui": "fptoui",
}  # fmt: skip

TABLE |= {f"arith.{name}": _integer(name) for name in INTEGER}
TABLE |= {f"llvm.{name}": _integer(same) for name, same in _LLVM_INTEGER.items()}
TABLE |= {f"arith.{name}": _float(function) for name, function in FLOAT.items()}
TABLE |= {f"llvm.{name}": _float(FLOAT[same]) for name, same in _LLVM_FLOAT.items()}
TABLE |= {f"math.{name}": _math(function) for name, function in MATH.items()}
TABLE |= {f"llvm.intr.{name}": _math(MATH[name]) for name in ("exp", "exp2", "log", "log2", "sqrt", "sin", "cos")}
TABLE |= {f"math.{name}": _float(function) for name, function in EXACT.items()}
TABLE |= {
    f"llvm.intr.{name}": _float(EXACT[name]) for name in ("fma", "floor", "ceil", "trunc", "roundeven", "copysign")
}
TABLE |= {
    f"arith.{name}": _cast(name)
    for name in (
        "extf", "truncf", "extsi", "extui", "trunci", "sitofp", "uitofp", "fptosi", "fptoui", "index_cast",
        "index_castui", "bitcast",
    )
}  # fmt: skip
TABLE |= {f"llvm.{name}": _cast(same) for name, same in _LLVM_CASTS.items()}
TABLE |= {
    "arith.cmpi": _cmpi, "llvm.icmp": _cmpi, "arith.cmpf": _cmpf, "llvm.fcmp": _cmpf,
    "arith.select": _select, "llvm.select": _select,
    "arith.constant": _constant, "llvm.mlir.constant": _constant,
    "llvm.mlir.undef": _zero, "llvm.mlir.poison": _zero, "llvm.mlir.zero": _zero, "ub.poison": _zero,
    "llvm.freeze": _same, "llvm.addrspacecast": _same, "llvm.bitcast": _llvm_bitcast, "vector.bitcast": _llvm_bitcast,
    "llvm.ptrtoint": _int_cast_to, "llvm.inttoptr": _int_cast_to, "vector.shape_cast": _same,
    "arith.mulsi_extended": _mul_extended(True), "arith.mului_extended": _mul_extended(False),
    "math.absi": lambda c, op: c.pure(op, np.abs), "math.ipowi": lambda c, op: c.pure(op, _ipowi),
    "math.fpowi": _math(_powi), "llvm.intr.fabs": _float(np.abs), "llvm.intr.abs": lambda c, op: c.pure(op, np.abs),
    "vector.extract": _extract, "vector.insert": _insert, "vector.broadcast": _broadcast, "vector.shuffle": _shuffle,
    "vector.from_elements": _from_elements, "vector.to_elements": _to_elements,
    "vector.extract_strided_slice": _extract_strided, "vector.insert_strided_slice": _insert_strided,
    "vector.interleave": _interleave, "vector.deinterleave": _deinterleave, "vector.reduction": _reduction,
    "llvm.extractvalue": _extract_value, "llvm.insertvalue": _insert_value,
}  # fmt: skip
