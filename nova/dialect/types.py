"""Tensor types of the `nova` dialect: short dtype names, cached MLIR types, and plain-data descriptions.

Building an `ir.Type` through the bindings costs microseconds and a step has thousands of values, so types are
interned by (shape, dtype) and descriptions by type.
"""

from __future__ import annotations

from typing import NamedTuple

from nova.mlir import ir

Shape = tuple[int, ...]

# short name (as in nova.capture.signature.TensorType) -> MLIR spelling
MLIR_NAMES = {
    "f32": "f32", "f64": "f64", "bf16": "bf16", "f16": "f16",
    "i64": "i64", "i32": "i32", "i16": "i16", "i8": "i8", "u8": "ui8", "bool": "i1",
    "c64": "complex<f32>", "c128": "complex<f64>",
}  # fmt: skip
DTYPES = {mlir: short for short, mlir in MLIR_NAMES.items()}

FLOATS = frozenset({"f32", "f64", "bf16", "f16"})
LOW_PRECISION = frozenset({"bf16", "f16"})
INTEGERS = frozenset({"i64", "i32", "i16", "i8", "u8"})
COMPLEX = frozenset({"c64", "c128"})
BYTES = {
    "f32": 4, "f64": 8, "bf16": 2, "f16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "bool": 1, "c64": 8,
    "c128": 16,
}  # fmt: skip


class Described(NamedTuple):
    """The plain-data view of a tensor type."""

    shape: Shape
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


_types: dict[tuple[Shape, str], ir.Type] = {}
_described: dict[ir.Type, Described] = {}


def tensor_type(shape: Shape, dtype: str) -> ir.Type:
    """The ranked tensor type of `shape` and the short dtype name `dtype`."""
    key = (shape, dtype)
    found = _types.get(key)
    if found is None:
        text = "x".join([*map(str, shape), MLIR_NAMES[dtype]])
        found = _types[key] = ir.Type.parse(f"tensor<{text}>")
    return found


def describe(type_: ir.Type) -> Described:
    """Shape and dtype of a static ranked tensor type; raises ValueError for any other type."""
    found = _described.get(type_)
    if found is None:
        if not isinstance(type_, ir.RankedTensorType) or not type_.has_static_shape:
            raise ValueError(f"expected a tensor of static shape, got {type_}")
        dtype = DTYPES.get(str(type_.element_type))
        if dtype is None:
            raise ValueError(f"element type {type_.element_type} is not one of {', '.join(MLIR_NAMES.values())}")
        found = _described[type_] = Described(tuple(type_.shape), dtype)
    return found


def numel(shape: Shape) -> int:
    """Number of elements of a tensor of `shape`."""
    count = 1
    for size in shape:
        count *= size
    return count


def broadcast_shapes(*shapes: Shape) -> Shape:
    """The NumPy broadcast of `shapes`; raises ValueError naming them if they do not broadcast."""
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return first
    rank = max(map(len, shapes))
    result = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            if size != 1:
                if result[axis] not in (1, size):
                    raise ValueError(f"shapes do not broadcast: {', '.join(str(list(s)) for s in shapes)}")
                result[axis] = size
    return tuple(result)
