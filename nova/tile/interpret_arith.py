"""Elementwise ops of `arith` and `math` on NumPy, shared by the interpreters: exact types, bfloat16 by rounding.

bfloat16 values are float32 arrays whose low sixteen bits are zero; arithmetic on them and on float16 is float32,
rounded after each op. Integers wrap. i1 is bool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nova.mlir import ir

DTYPES: dict[str, Any] = {
    "i1": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "index": np.int64,
    "f16": np.float16, "bf16": np.float32, "f32": np.float32, "f64": np.float64,
}  # fmt: skip
HANDLERS: dict[str, Callable[[Any, ir.Operation], Any]] = {}


def dtype(element: str) -> Any:
    """The NumPy type of values of an element type."""
    return DTYPES[element]


def memory_dtype(element: str) -> Any:
    """The NumPy type of an element in memory: bfloat16 as its bits, booleans as bytes."""
    return {"bf16": np.uint16, "i1": np.uint8}.get(element, DTYPES[element])


def round_bf16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16, to nearest even; still float32."""
    return bf16_values(bf16_bits(x))


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """The uint16 bits of float32 values rounded to bfloat16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded).reshape(np.shape(x))


def bf16_values(bits: np.ndarray) -> np.ndarray:
    wide = np.ascontiguousarray(bits, np.uint16).astype(np.uint32) << 16
    return wide.view(np.float32).reshape(np.shape(bits))


def round_tf32(x: np.ndarray) -> np.ndarray:
    """To nearest, ties away from zero (cvt.rna.tf32.f32)."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x1000) & 0xFFFFE000).astype(np.uint32).view(np.float32).reshape(np.shape(x))
    return np.where(np.isfinite(x), rounded, x).astype(np.float32)


def truncate_tf32(x: np.ndarray) -> np.ndarray:
    """What tensor cores read of a float32: the low thirteen bits are ignored."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
    return bits.view(np.float32).reshape(np.shape(x))


def from_memory(stored: np.ndarray, element: str) -> np.ndarray:
    """Values from what a buffer holds: bfloat16 as uint16, booleans as bytes."""
    if element == "bf16":
        return bf16_values(stored.view(np.uint16))
    if element == "i1":
        return stored != 0
    return stored.view(DTYPES[element]) if stored.dtype != DTYPES[element] else stored


def to_memory(values: np.ndarray, element: str) -> np.ndarray:
    if element == "bf16":
        return bf16_bits(values)
    return values.astype(np.uint8) if element == "i1" else values


def constant(attribute: Any, element: str) -> Any:
    """The value of an attribute, scalar or dense."""
    if isinstance(attribute, (ir.DenseElementsAttr,)):
        return rounded(np.array(attribute), element)
    return DTYPES[element](attribute.value)


def rounded(x: Any, element: str) -> Any:
    """`x` as values of the element type."""
    if element == "bf16":
        return round_bf16(np.asarray(x, np.float32))
    return np.asarray(x).astype(DTYPES[element])


def _element(value: ir.Value) -> str:
    return str(value.type.element_type) if isinstance(value.type, ir.ShapedType) else str(value.type)


def _wide(x: Any, element: str) -> Any:
    return np.asarray(x, np.float32) if element in ("f16", "bf16") else x


def _unsigned(x: Any) -> Any:
    x = np.asarray(x)
    return x if x.dtype == np.bool_ else x.view(x.dtype.str.replace("i", "u"))


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "addf": np.add, "subf": np.subtract, "mulf": np.multiply, "divf": np.divide, "remf": np.fmod,
    "maximumf": np.maximum, "minimumf": np.minimum, "maxnumf": np.fmax, "minnumf": np.fmin,
    "addi": np.add, "subi": np.subtract, "muli": np.multiply, "andi": np.bitwise_and, "ori": np.bitwise_or,
    "xori": np.bitwise_xor, "maxsi": np.maximum, "minsi": np.minimum,
    "maxui": lambda a, b: np.where(_unsigned(a) > _unsigned(b), a, b),
    "minui": lambda a, b: np.where(_unsigned(a) < _unsigned(b), a, b),
    "divui": lambda a, b: (_unsigned(a) // _unsigned(b)).view(np.asarray(a).dtype),
    "remui": lambda a, b: (_unsigned(a) % _unsigned(b)).view(np.asarray(a).dtype),
    "divsi": lambda a, b: np.trunc(np.true_divide(a, b)).astype(np.asarray(a).dtype),
    "remsi": np.fmod, "floordivsi": np.floor_divide,
    "ceildivsi": lambda a, b: -(-a // b),
    "shli": np.left_shift, "shrsi": np.right_shift,
    "shrui": lambda a, b: (_unsigned(a) >> _unsigned(b)).view(np.asarray(a).dtype),
}  # fmt: skip


def _erf(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[np.float64])(np.asarray(x, np.float64))


UNARY: dict[str, Callable[[Any], Any]] = {
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2, "log10": np.log10,
    "log1p": np.log1p, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "tanh": np.tanh, "sin": np.sin,
    "cos": np.cos, "tan": np.tan, "atan": np.arctan, "asin": np.arcsin, "acos": np.arccos, "sinh": np.sinh,
    "cosh": np.cosh, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "erf": _erf,
    "erfc": lambda x: 1 - _erf(x), "absf": np.abs, "absi": np.abs, "floor": np.floor, "ceil": np.ceil,
    "trunc": np.trunc,
    "round": lambda x: np.trunc(x + np.copysign(0.5, x)), "roundeven": np.rint, "cbrt": np.cbrt,
    "isnan": np.isnan, "isinf": np.isinf, "isfinite": np.isfinite,
    "ctpop": lambda x: np.bitwise_count(_unsigned(x)),
}  # fmt: skip
_ORDERED = {
    "eq": np.equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "ne": np.not_equal,
}
FLOAT_PREDICATES = (
    "false", "oeq", "ogt", "oge", "olt", "ole", "one", "ord", "ueq", "ugt", "uge", "ult", "ule", "une", "uno", "true",
)  # fmt: skip
INT_PREDICATES = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")


def compare_floats(predicate: str, a: Any, b: Any) -> Any:
    """arith.cmpf."""
    nan = np.isnan(a) | np.isnan(b)
    if predicate in ("ord", "uno"):
        return ~nan if predicate == "ord" else nan
    if predicate in ("true", "false"):
        return np.full(np.broadcast(a, b).shape, predicate == "true")
    found = _ORDERED[predicate[1:]](a, b)
    return found & ~nan if predicate[0] == "o" else found | nan


def compare_ints(predicate: str, a: Any, b: Any) -> Any:
    """arith.cmpi."""
    if predicate[0] == "u":
        return _ORDERED[predicate[1:]](_unsigned(a), _unsigned(b))
    return _ORDERED[predicate.removeprefix("s")](a, b)


def reduce(tile: Any, kind: str, dims: Sequence[int], element: str) -> Any:
    """Combines along dims; float sums are exact to double precision here, and order is the target's affair."""
    axes = tuple(dims)
    if kind in ("addf", "mulf"):
        wide = np.asarray(tile, np.float64)
        return rounded(wide.sum(axes) if kind == "addf" else wide.prod(axes), element)
    function = BINARY[kind]
    moved = np.moveaxis(np.asarray(tile), axes, range(len(axes)))
    moved = moved.reshape(-1, *moved.shape[len(axes) :])
    total = moved[0]
    for row in moved[1:]:
        total = function(total, row)
    return np.asarray(total).astype(DTYPES[element])


def scan(tile: Any, kind: str, dim: int, element: str) -> Any:
    moved = np.moveaxis(np.array(tile, np.float64 if kind in ("addf", "mulf") else None), dim, 0)
    for i in range(1, moved.shape[0]):
        moved[i] = BINARY[kind](moved[i - 1], moved[i])
    return rounded(np.moveaxis(moved, 0, dim), element)


# --- handlers ---------------------------------------------------------------------------------------------------------


def _binary(name: str, function: Callable[[Any, Any], Any]) -> None:
    def handler(b: Any, op: ir.Operation) -> Any:
        element = _element(op.results[0])
        x, y = (_wide(b.values[v], element) for v in op.operands)
        return rounded(function(x, y), element)

    HANDLERS[f"arith.{name}"] = handler


def _unary(name: str, function: Callable[[Any], Any]) -> None:
    def handler(b: Any, op: ir.Operation) -> Any:
        value = b.values[op.operands[0]]
        source, element = _element(op.operands[0]), _element(op.results[0])
        if source in ("f16", "bf16", "f32"):
            value = np.asarray(value, np.float64)  # correctly rounded, as the reference a target is compared with
        return rounded(function(value), element)

    HANDLERS[f"math.{name}"] = handler


for _name, _function in BINARY.items():
    _binary(_name, _function)
for _name, _meaning in UNARY.items():
    _unary(_name, _meaning)


def _handler(*names: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        for name in names:
            HANDLERS[name] = function
        return function

    return register


@_handler("arith.constant")
def _constant(b: Any, op: ir.Operation) -> Any:
    return constant(op.attributes["value"], _element(op.results[0]))


@_handler("arith.cmpf")
def _cmpf(b: Any, op: ir.Operation) -> Any:
    x, y = (b.values[v] for v in op.operands)
    return compare_floats(FLOAT_PREDICATES[op.attributes["predicate"].value], x, y)


@_handler("arith.cmpi")
def _cmpi(b: Any, op: ir.Operation) -> Any:
    x, y = (b.values[v] for v in op.operands)
    return compare_ints(INT_PREDICATES[op.attributes["predicate"].value], x, y)


@_handler("arith.select")
def _select(b: Any, op: ir.Operation) -> Any:
    condition, x, y = (b.values[v] for v in op.operands)
    return np.where(condition, x, y)


@_handler("arith.negf")
def _negf(b: Any, op: ir.Operation) -> Any:
    return -b.values[op.operands[0]]


@_handler("math.fma")
def _fma(b: Any, op: ir.Operation) -> Any:
    element = _element(op.results[0])
    wide: Any = np.longdouble if element == "f64" else np.float64
    x, y, z = (np.asarray(b.values[v], wide) for v in op.operands)
    return rounded(np.add(np.multiply(x, y), z), element)


@_handler("math.powf", "math.copysign", "math.atan2", "math.ipowi", "math.fpowi")
def _pow(b: Any, op: ir.Operation) -> Any:
    functions = {"math.copysign": np.copysign, "math.atan2": np.arctan2}
    element = _element(op.results[0])
    x, y = (b.values[v] for v in op.operands)
    if element in ("f16", "bf16", "f32"):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return rounded(functions.get(op.name, np.power)(x, y), element)


@_handler("arith.extf", "arith.truncf", "arith.sitofp", "arith.extsi", "arith.trunci", "arith.index_cast")
def _convert(b: Any, op: ir.Operation) -> Any:
    value, element = b.values[op.operands[0]], _element(op.results[0])
    if element == "i1":  # truncation keeps the low bit
        return (np.asarray(value) & 1).astype(bool)
    if _element(op.operands[0]) == "i1" and op.name in ("arith.extsi", "arith.sitofp"):
        value = -np.asarray(value).astype(np.int64)
    return rounded(value, element)


@_handler("arith.extui", "arith.uitofp", "arith.index_castui")
def _convert_unsigned(b: Any, op: ir.Operation) -> Any:
    return rounded(_unsigned(b.values[op.operands[0]]), _element(op.results[0]))


@_handler("arith.fptosi", "arith.fptoui")
def _truncate(b: Any, op: ir.Operation) -> Any:
    return np.trunc(b.values[op.operands[0]]).astype(DTYPES[_element(op.results[0])])


@_handler("arith.bitcast")
def _bitcast(b: Any, op: ir.Operation) -> Any:
    value, source, element = np.asarray(b.values[op.operands[0]]), _element(op.operands[0]), _element(op.results[0])
    return from_memory(np.ascontiguousarray(to_memory(value, source)).reshape(value.shape), element)


@_handler("arith.mului_extended", "arith.mulsi_extended")
def _mul_extended(b: Any, op: ir.Operation) -> tuple[Any, Any]:
    x, y = (b.values[v] for v in op.operands)
    kind = np.asarray(x).dtype
    bits = kind.itemsize * 8
    wide = [(_unsigned(v) if "ui" in op.name else np.asarray(v)).astype(object) for v in (x, y)]
    product = wide[0] * wide[1]
    mask = (1 << bits) - 1
    unsigned = np.dtype(kind.str.replace("i", "u"))
    low, high = (np.asarray((product >> shift) & mask).astype(unsigned).view(kind) for shift in (0, bits))
    return low, high
