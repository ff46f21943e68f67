"""Scalar and vector operations on MLIR values, created at 4 us each.

Code generation for a loop body works on "lanes": a value of type `T` (one lane) or `vector<N x T>` (N lanes), with
the same functions for both. The generated wrappers of the MLIR bindings take 10-17 us an operation, which would be
most of a kernel's compile time, so everything here goes through `ir.Operation.create`.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import TypeAlias

from nova.mlir import ir

Value: TypeAlias = ir.Value
Type: TypeAlias = ir.Type

_ORDERED = ("false", "oeq", "ogt", "oge", "olt", "ole", "one", "ord")
_FLOAT_PREDICATES = (*_ORDERED, "ueq", "ugt", "uge", "ult", "ule", "une", "uno", "true")
_INT_PREDICATES = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")


# --- types: there is one context a process, so types and attributes may be cached -----------------------------------


@functools.cache
def f32() -> Type:
    return ir.F32Type.get()


@functools.cache
def f64() -> Type:
    return ir.F64Type.get()


@functools.cache
def index_type() -> Type:
    return ir.IndexType.get()


@functools.cache
def pointer_type() -> Type:
    return ir.Type.parse("!llvm.ptr")


@functools.cache
def int_type(width: int) -> Type:
    return ir.IntegerType.get_signless(width)


@functools.cache
def vector_type(element: Type, lanes: int) -> Type:
    """`vector<lanes x element>`; the element itself for 0 lanes (a scalar)."""
    return ir.VectorType.get([lanes], element) if lanes else element


@functools.cache
def element_of(type_: Type) -> Type:
    return type_.element_type if isinstance(type_, ir.VectorType) else type_


@functools.cache
def lanes_of(type_: Type) -> int:
    """Number of lanes; 0 for a scalar."""
    return type_.shape[0] if isinstance(type_, ir.VectorType) else 0


def like(value: Value, element: Type) -> Type:
    """`element`, in as many lanes as `value` has."""
    return vector_type(element, lanes_of(value.type))


@functools.cache
def is_float(type_: Type) -> bool:
    return isinstance(type_, (ir.F32Type, ir.F64Type, ir.BF16Type, ir.F16Type))


@functools.cache
def is_narrow_float(type_: Type) -> bool:
    return isinstance(type_, (ir.BF16Type, ir.F16Type))


@functools.cache
def width_of(type_: Type) -> int:
    """Bits of an element in a register; index counts as 64."""
    return 64 if isinstance(type_, ir.IndexType) else type_.width


@functools.cache
def register_type(element: Type) -> Type:
    """The element type that arithmetic uses: integers carry no sign in `arith`."""
    if isinstance(element, ir.IntegerType) and not element.is_signless:
        return int_type(element.width)
    return element


@functools.cache
def memory_type(element: Type) -> Type:
    """The type of an element in memory: a boolean is a byte holding 0 or 1."""
    element = register_type(element)
    return int_type(8) if element == int_type(1) else element


@functools.cache
def bytes_of(element: Type) -> int:
    """Bytes of an element in memory."""
    if isinstance(element, ir.ComplexType):
        return 2 * bytes_of(element.element_type)
    return (width_of(element) + 7) // 8


# --- operations ------------------------------------------------------------------------------------------------------


Attributes = dict[str, ir.Attribute]


def create(name: str, result: Type, operands: Sequence[Value], attributes: Attributes | None = None) -> Value:
    return ir.Operation.create(name, [result], operands, attributes).result


def create_void(name: str, operands: Sequence[Value], attributes: Attributes | None = None) -> None:
    ir.Operation.create(name, [], operands, attributes)


@functools.cache
def _splat_attribute(type_: Type, number: float | int, negative_zero: bool) -> ir.Attribute:
    element = element_of(type_)
    if is_float(element):
        scalar = ir.FloatAttr.get(element, float(number))
    else:
        width = width_of(element)
        number = int(number) & ((1 << width) - 1)  # IntegerAttr wants a signed value
        if width > 1 and number >> (width - 1):
            number -= 1 << width
        scalar = ir.IntegerAttr.get(element, number)
    return ir.DenseElementsAttr.get_splat(type_, scalar) if lanes_of(type_) else scalar


def constant(type_: Type, number: float | int) -> Value:
    """A constant of a scalar or vector type; integers may be written signed or unsigned."""
    negative_zero = isinstance(number, float) and struct.pack("d", number) == struct.pack("d", -0.0)
    if isinstance(number, float) and math.isnan(number):  # NaN is not equal to itself, so it defeats the cache key
        return create("arith.constant", type_, [], {"value": _splat_attribute.__wrapped__(type_, number, False)})
    return create("arith.constant", type_, [], {"value": _splat_attribute(type_, number, negative_zero)})


def index(number: int) -> Value:
    return constant(index_type(), number)


def i64(number: int) -> Value:
    return constant(int_type(64), number)


def _binary(name: str):
    def build(a: Value, b: Value) -> Value:
        return create(name, a.type, [a, b])

    build.__name__ = name.split(".")[1]
    return build


addf, subf, mulf, divf = (_binary(f"arith.{op}f") for op in ("add", "sub", "mul", "div"))
addi, subi, muli = (_binary(f"arith.{op}i") for op in ("add", "sub", "mul"))
andi, ori, xori = (_binary(f"arith.{op}i") for op in ("and", "or", "xor"))
shli, shrsi, shrui = _binary("arith.shli"), _binary("arith.shrsi"), _binary("arith.shrui")
divsi, remsi, divui, remui = (_binary(f"arith.{op}") for op in ("divsi", "remsi", "divui", "remui"))
minsi, maxsi, minui, maxui = (_binary(f"arith.{op}") for op in ("minsi", "maxsi", "minui", "maxui"))
copysign = _binary("math.copysign")


def _unary(name: str):
    def build(a: Value) -> Value:
        return create(name, a.type, [a])

    build.__name__ = name.split(".")[1]
    return build


negf, absf, sqrt = _unary("arith.negf"), _unary("math.absf"), _unary("math.sqrt")
floor, ceil, trunc, roundeven = (_unary(f"math.{op}") for op in ("floor", "ceil", "trunc", "roundeven"))


def fma(a: Value, b: Value, c: Value) -> Value:
    """a * b + c, rounded once."""
    return create("math.fma", a.type, [a, b, c])


@functools.cache
def _predicate(number: int) -> ir.Attribute:
    return ir.IntegerAttr.get(int_type(64), number)


def cmpf(predicate: str, a: Value, b: Value) -> Value:
    attribute = _predicate(_FLOAT_PREDICATES.index(predicate))
    return create("arith.cmpf", like(a, int_type(1)), [a, b], {"predicate": attribute})


def cmpi(predicate: str, a: Value, b: Value) -> Value:
    attribute = _predicate(_INT_PREDICATES.index(predicate))
    return create("arith.cmpi", like(a, int_type(1)), [a, b], {"predicate": attribute})


def select(condition: Value, a: Value, b: Value) -> Value:
    return create("arith.select", a.type, [condition, a, b])


def cast(name: str, value: Value, element: Type) -> Value:
    """One of arith's casts (extf, truncf, sitofp, fptosi, extsi, extui, trunci, index_cast, bitcast, ...)."""
    return create(f"arith.{name}", like(value, element), [value])


def splat(value: Value, lanes: int) -> Value:
    """A scalar in every lane; values that are vectors already pass."""
    if not lanes or lanes_of(value.type):
        return value
    return create("vector.broadcast", vector_type(value.type, lanes), [value])


def lane(value: Value, position: int) -> Value:
    """One lane of a vector."""
    attribute = ir.DenseI64ArrayAttr.get([position])
    return create("vector.extract", element_of(value.type), [value], {"static_position": attribute})


def from_lanes(values: Sequence[Value]) -> Value:
    return create("vector.from_elements", vector_type(values[0].type, len(values)), list(values))


def shuffle(a: Value, b: Value, mask: Sequence[int]) -> Value:
    result = vector_type(element_of(a.type), len(mask))
    return create("vector.shuffle", result, [a, b], {"mask": ir.DenseI64ArrayAttr.get(list(mask))})


@functools.cache
def _iota_attribute(element: Type, lanes: int) -> ir.Attribute:
    values = [ir.IntegerAttr.get(element, k) for k in range(lanes)]
    return ir.DenseElementsAttr.get(values, type=vector_type(element, lanes))


def iota(element: Type, lanes: int) -> Value:
    """0, 1, 2, ... (an integer or index vector); the number 0 for a scalar."""
    if not lanes:
        return constant(element, 0)
    return create("arith.constant", vector_type(element, lanes), [], {"value": _iota_attribute(element, lanes)})


# --- floating-point minimum and maximum, and rounding to 16 bits -----------------------------------------------------


def maximum(a: Value, b: Value) -> Value:
    """Larger of two floats, NaN if either is. x86's max returns its second operand on NaN: one blend repairs it."""
    return select(cmpf("uno", a, a), a, select(cmpf("ogt", a, b), a, b))


def minimum(a: Value, b: Value) -> Value:
    """Smaller of two floats, NaN if either is."""
    return select(cmpf("uno", a, a), a, select(cmpf("olt", a, b), a, b))


def maximum_number(a: Value, b: Value) -> Value:
    """Larger of two floats; the other one if one is NaN."""
    return select(cmpf("uno", b, b), a, select(cmpf("ogt", a, b), a, b))


def minimum_number(a: Value, b: Value) -> Value:
    return select(cmpf("uno", b, b), a, select(cmpf("olt", a, b), a, b))


def clamp_keeping_nan(value: Value, low: float, high: float) -> Value:
    """Each bound costs one x86 max or min: the comparison is false for NaN, which then passes."""
    low_value, high_value = constant(value.type, low), constant(value.type, high)
    value = select(cmpf("olt", value, low_value), low_value, value)
    return select(cmpf("ogt", value, high_value), high_value, value)


def extend(value: Value) -> Value:
    """bf16 or f16 to f32, exactly."""
    if isinstance(element_of(value.type), ir.BF16Type):
        bits = cast("extui", cast("bitcast", value, int_type(16)), int_type(32))
        return cast("bitcast", shli(bits, constant(bits.type, 16)), f32())
    return cast("extf", value, f32())


def narrow(value: Value, element: Type) -> Value:
    """f32 or f64 to bf16 or f16, to nearest even (f64 through f32, as PyTorch does).

    bf16 in integer arithmetic: LLVM would call a library function for each lane.
    """
    if element_of(value.type) == f64():
        value = cast("truncf", value, f32())
    if not isinstance(element, ir.BF16Type):
        return cast("truncf", value, element)
    bits = cast("bitcast", value, int_type(32))
    odd = andi(shrui(bits, constant(bits.type, 16)), constant(bits.type, 1))
    rounded = shrui(addi(bits, addi(odd, constant(bits.type, 0x7FFF))), constant(bits.type, 16))
    rounded = select(cmpf("uno", value, value), constant(bits.type, 0x7FC0), rounded)
    return cast("bitcast", cast("trunci", rounded, int_type(16)), element)


# --- memory: bare pointers, element offsets --------------------------------------------------------------------------


@functools.cache
def _gep_attributes(element: Type) -> dict[str, ir.Attribute]:
    dynamic = ir.DenseI32ArrayAttr.get([-(1 << 31)])
    return {"elem_type": ir.TypeAttr.get(memory_type(element)), "rawConstantIndices": dynamic}


def address(pointer: Value, offset: Value, element: Type) -> Value:
    """`pointer + offset` elements; `offset` is an i64."""
    return create("llvm.getelementptr", pointer_type(), [pointer, offset], _gep_attributes(element))


def load_raw(pointer: Value, type_: Type) -> Value:
    """Loads a value of exactly `type_`, aligned to its element only."""
    alignment = ir.IntegerAttr.get(int_type(64), bytes_of(element_of(type_)))
    return create("llvm.load", type_, [pointer], {"alignment": alignment})


def load_pointer(pointer: Value) -> Value:
    alignment = ir.IntegerAttr.get(int_type(64), 8)
    return create("llvm.load", pointer_type(), [pointer], {"alignment": alignment})


def load(pointer: Value, element: Type, lanes: int = 0) -> Value:
    """Loads an element or `lanes` consecutive ones in register form (booleans become i1)."""
    value = load_raw(pointer, vector_type(memory_type(element), lanes))
    if element == int_type(1):
        value = cmpi("ne", value, constant(value.type, 0))
    return value


def store(value: Value, pointer: Value, nontemporal: bool = False) -> None:
    """Stores a value in memory form. A nontemporal store needs an address aligned to its vector, at most 32 bytes."""
    element = element_of(value.type)
    if element == int_type(1):
        value = cast("extui", value, int_type(8))
    size = bytes_of(element)
    if nontemporal:
        size = min(size * max(lanes_of(value.type), 1), 32)
    attributes: dict[str, ir.Attribute] = {"alignment": ir.IntegerAttr.get(int_type(64), size)}
    if nontemporal:
        attributes["nontemporal"] = ir.UnitAttr.get()
    create_void("llvm.store", [value, pointer], attributes)
