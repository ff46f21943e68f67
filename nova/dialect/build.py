"""Builds `nova` ops: typed values, attributes from plain Python values, inferred result types.

The emitter and the whole-step passes create tens of thousands of ops, so everything here is interned and calls
`ir.Operation.create` directly (a few microseconds an op).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from nova.dialect.base import REGISTRY, attribute_value, defining_op
from nova.dialect.elementwise import COMPARISONS, PREDICATES
from nova.dialect.reductions import reduced_shape
from nova.dialect.types import FLOATS, INTEGERS, Described, Shape, broadcast_shapes, describe, numel, tensor_type
from nova.mlir import ir

Number = int | float | bool

_BOOLEAN = frozenset(COMPARISONS) | frozenset(PREDICATES)
_NUMPY: dict[str, Any] = {
    "i64": np.int64,
    "i32": np.int32,
    "i16": np.int16,
    "i8": np.int8,
    "u8": np.uint8,
    "f64": np.float64,
}


class Value:
    """An SSA value with its shape and dtype at hand."""

    __slots__ = ("dtype", "ir", "shape")

    def __init__(self, value: ir.Value, shape: Shape, dtype: str):
        self.ir, self.shape, self.dtype = value, shape, dtype

    def __repr__(self) -> str:
        return str(Described(self.shape, self.dtype))

    @property
    def rank(self) -> int:
        return len(self.shape)


def wrap(value: ir.Value) -> Value:
    """The Value of an SSA value."""
    return Value(value, *describe(value.type))


_attributes: dict[tuple[str, Any], ir.Attribute] = {}


def attribute(kind: str, value: Any) -> ir.Attribute:
    """The attribute of a kind of `base.ATTRIBUTE_KINDS`, or "segments", that holds a plain Python value."""
    key = (kind, float(value).hex() if kind == "float" else tuple(value) if kind in ("ints", "segments") else value)
    found = _attributes.get(key)
    if found is None:
        if kind == "int":
            found = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), int(value))
        elif kind == "float":
            found = ir.FloatAttr.get(ir.F64Type.get(), float(value))
        elif kind == "bool":
            found = ir.BoolAttr.get(bool(value))
        elif kind == "str":
            found = ir.StringAttr.get(value)
        elif kind == "ints":
            found = ir.DenseI64ArrayAttr.get([int(v) for v in value])
        elif kind == "segments":
            found = ir.DenseI32ArrayAttr.get([int(v) for v in value])
        else:
            raise ValueError(f"no attribute of kind {kind!r}")
        _attributes[key] = found
    return found


def splat(value: Number, shape: Shape, dtype: str) -> ir.Attribute:
    """A dense attribute of one repeated number."""
    type_ = tensor_type(shape, dtype)
    element = type_.element_type
    if dtype in FLOATS:
        number: ir.Attribute = ir.FloatAttr.get(element, float(value))
    elif dtype == "bool":
        number = ir.IntegerAttr.get(element, int(bool(value)))
    elif dtype == "u8":
        return ir.DenseElementsAttr.get(np.full(shape, value, np.uint8), type=type_.element_type, shape=list(shape))
    else:
        number = ir.IntegerAttr.get(element, int(value))
    return ir.DenseElementsAttr.get_splat(type_, number)


class Builder:
    """Creates ops at `point` (the enclosing insertion point if None) with location `loc`."""

    def __init__(self, point: ir.InsertionPoint | None = None):
        self.point = point
        self.loc: ir.Location | None = None
        self.extra: dict[str, ir.Attribute] = {}  # discardable attributes of every op created
        self._constants: dict[tuple[str, str], Value] = {}

    def forget_constants(self) -> None:
        """Stops sharing constants made so far: ops are no longer created in order."""
        self._constants.clear()

    # -- the general form ---------------------------------------------------------------------------------------

    def create(self, name: str, operands: Sequence[Value], results: Sequence[tuple[Shape, str]], **attrs: Any) -> Any:
        """Creates `nova.<name>`; the Value of its result, or a list if there are several or none."""
        spec = REGISTRY[name]
        attributes = {key: attribute(spec.attrs[key], value) for key, value in attrs.items()}
        attributes.update(self.extra)
        if (sizes := spec.operands.segments([(v.shape, v.dtype) for v in operands], attrs)) is not None:
            attributes["operandSegmentSizes"] = attribute("segments", sizes)
        if (sizes := spec.results.segments(results, attrs)) is not None:
            attributes["resultSegmentSizes"] = attribute("segments", sizes)
        op = ir.Operation.create(
            f"nova.{name}",
            results=[tensor_type(shape, dtype) for shape, dtype in results],
            operands=[v.ir for v in operands],
            attributes=attributes,
            loc=self.loc,
            ip=self.point,
        )
        if len(results) == 1:
            return Value(op.result, *results[0])
        return [Value(op.results[i], shape, dtype) for i, (shape, dtype) in enumerate(results)]

    # -- constants ----------------------------------------------------------------------------------------------

    def constant(self, value: Number, dtype: str) -> Value:
        """A 0-d constant; equal ones are shared (ops are emitted in order into one block)."""
        key = (float(value).hex() if dtype in FLOATS else str(int(value)), dtype)
        found = self._constants.get(key)
        if found is None:
            found = self._constants[key] = self._constant_op(splat(value, (), dtype), (), dtype)
        return found

    def dense(self, array: np.ndarray, dtype: str) -> Value:
        """A constant of any shape from a NumPy array (i1 from bool; f32, f64 and integers)."""
        type_ = tensor_type(array.shape, dtype)
        if dtype == "bool":
            data = np.packbits(np.asarray(array, np.bool_).ravel(), bitorder="little")
            attr = ir.DenseElementsAttr.get(data, type=type_.element_type, shape=list(array.shape))
        else:
            array = np.ascontiguousarray(array, _NUMPY.get(dtype, np.float32))
            attr = ir.DenseElementsAttr.get(array, type=type_.element_type, shape=list(array.shape))
        return self._constant_op(attr, array.shape, dtype)

    def _constant_op(self, attr: ir.Attribute, shape: Shape, dtype: str) -> Value:
        op = ir.Operation.create(
            "nova.constant", [tensor_type(shape, dtype)], [], {"value": attr}, loc=self.loc, ip=self.point
        )
        return Value(op.result, shape, dtype)

    def full(self, shape: Shape, value: Number, dtype: str) -> Value:
        """A tensor filled with one number: a broadcast 0-d constant."""
        return self.expand(self.constant(value, dtype), shape)

    def iota(self, shape: Shape, dim: int, dtype: str = "i64") -> Value:
        """Indices along dim; a size-1 shape that broadcasts is enough for elementwise use."""
        return self.create("iota", [], [(shape, dtype)], dim=dim)

    # -- elementwise --------------------------------------------------------------------------------------------

    def op(self, name: str, *operands: Value, **attrs: Any) -> Value:
        """An elementwise op of `elementwise`: result shape by broadcasting, dtype of the first operand or i1."""
        first = operands[0]
        shape = first.shape if len(operands) == 1 else broadcast_shapes(*(v.shape for v in operands))
        return self.create(name, operands, [(shape, "bool" if name in _BOOLEAN else first.dtype)], **attrs)

    def cast(self, x: Value, dtype: str) -> Value:
        """x as `dtype`; x itself if it is that already."""
        return x if x.dtype == dtype else self.create("cast", [x], [(x.shape, dtype)])

    def where(self, cond: Value, a: Value, b: Value) -> Value:
        """Elementwise choice with broadcasting."""
        shape = broadcast_shapes(cond.shape, a.shape, b.shape)
        return self.create("where", [cond, a, b], [(shape, a.dtype)])

    def scale(self, x: Value, factor: Number) -> Value:
        """x * factor in x's dtype."""
        return x if factor == 1 else self.op("mul", x, self.constant(factor, x.dtype))

    # -- reductions ---------------------------------------------------------------------------------------------

    def reduce(self, name: str, x: Value, dims: Sequence[int], keepdim: bool = False) -> Value:
        """nova.reduce_<name> over dims; x itself over no dims."""
        dims = tuple(sorted(dims))
        if not dims:
            return x
        shape = reduced_shape(x.shape, dims, keepdim)
        return self.create(f"reduce_{name}", [x], [(shape, x.dtype)], dims=dims, keepdim=keepdim)

    def sum_to(self, x: Value, shape: Shape) -> Value:
        """Sums the dims along which `shape` broadcasts to x's shape."""
        lead = x.rank - len(shape)
        dims = [d for d in range(x.rank) if d < lead or (shape[d - lead] == 1 and x.shape[d] != 1)]
        return self.reshape(self.reduce("sum", x, dims), shape)

    # -- views and movement -------------------------------------------------------------------------------------

    def reshape(self, x: Value, shape: Shape) -> Value:
        """x in another shape; x itself if it has that already."""
        return x if x.shape == shape else self.create("reshape", [x], [(shape, x.dtype)])

    def transpose(self, x: Value, permutation: Sequence[int]) -> Value:
        """Permutes dims; x itself under the identity. A permutation of a permutation is one."""
        permutation = tuple(permutation)
        owner = defining_op(x.ir)
        if owner is not None and owner.name == "nova.transpose":
            first = attribute_value(owner.attributes["permutation"])
            x, permutation = wrap(owner.operands[0]), tuple(first[d] for d in permutation)
        if permutation == tuple(range(x.rank)):
            return x
        shape = tuple(x.shape[d] for d in permutation)
        return self.create("transpose", [x], [(shape, x.dtype)], permutation=permutation)

    def swap(self, x: Value, a: int = -2, b: int = -1) -> Value:
        """Exchanges two dims."""
        permutation = list(range(x.rank))
        permutation[a], permutation[b] = permutation[b], permutation[a]
        return self.transpose(x, permutation)

    def broadcast(self, x: Value, shape: Shape, dims: Sequence[int]) -> Value:
        """x's dim i as dim dims[i] of `shape`."""
        dims = tuple(dims)
        if x.shape == shape and dims == tuple(range(len(shape))):
            return x
        return self.create("broadcast", [x], [(shape, x.dtype)], dims=dims)

    def expand(self, x: Value, shape: Shape) -> Value:
        """NumPy broadcast of x to `shape`."""
        return self.broadcast(x, shape, range(len(shape) - x.rank, len(shape)))

    def slice(self, x: Value, starts: Shape, limits: Shape, strides: Shape | None = None) -> Value:
        """x[start:limit:stride] in every dim; x itself if that is all of it."""
        strides = strides or (1,) * x.rank
        if limits == x.shape and not any(starts) and all(s == 1 for s in strides):
            return x
        shape = tuple((hi - lo + s - 1) // s for lo, hi, s in zip(starts, limits, strides, strict=True))
        return self.create("slice", [x], [(shape, x.dtype)], starts=starts, limits=limits, strides=strides)

    def slice_dim(self, x: Value, dim: int, start: int, limit: int, stride: int = 1) -> Value:
        """A slice of one dim."""
        starts, limits, strides = [0] * x.rank, list(x.shape), [1] * x.rank
        starts[dim], limits[dim], strides[dim] = start, limit, stride
        return self.slice(x, tuple(starts), tuple(limits), tuple(strides))

    def concat(self, xs: Sequence[Value], dim: int) -> Value:
        """Concatenation along dim, in two levels where the operands have too many shapes for one op."""
        if len(xs) == 1:
            return xs[0]
        runs = [list(run) for _, run in groupby(xs, key=lambda x: (x.shape, x.dtype))]
        limit = REGISTRY["concat"].operands.runs
        if len(runs) > limit:
            parts = [[x for run in runs[i : i + limit] for x in run] for i in range(0, len(runs), limit)]
            return self.concat([self.concat(part, dim) for part in parts], dim)
        shape = list(xs[0].shape)
        shape[dim] = sum(x.shape[dim] for x in xs)
        return self.create("concat", xs, [(tuple(shape), xs[0].dtype)], dim=dim)

    def pad(self, x: Value, low: Sequence[int], high: Sequence[int], value: Number = 0.0) -> Value:
        """Pads, or crops by negative amounts."""
        if not any(low) and not any(high):
            return x
        shape = tuple(n + lo + hi for n, lo, hi in zip(x.shape, low, high, strict=True))
        return self.create("pad", [x], [(shape, x.dtype)], low=low, high=high, value=value)

    # -- contractions -------------------------------------------------------------------------------------------

    def matmul(self, a: Value, b: Value, dtype: str | None = None) -> Value:
        """a[..,M,K] @ b[..,K,N] of equal batch dims."""
        return self.create("matmul", [a, b], [((*a.shape[:-1], b.shape[-1]), dtype or a.dtype)])

    def linear(self, x: Value, weight: Value, bias: Value | None = None, dtype: str | None = None) -> Value:
        """x[..,K] @ weight[N,K]^T + bias[N]."""
        operands = [x, weight] if bias is None else [x, weight, bias]
        return self.create("linear", operands, [((*x.shape[:-1], weight.shape[0]), dtype or x.dtype)])


def is_number(x: Any) -> bool:
    """A Python number (a bool too)."""
    return isinstance(x, (int, float, bool))


def lowest(dtype: str) -> Number:
    """The identity of maximum."""
    if dtype in FLOATS:
        return -math.inf
    return 0 if dtype == "bool" else int(np.iinfo(_NUMPY[dtype]).min)


def scalar_category(x: Number) -> str:
    """The dtype a Python number promotes as."""
    return "bool" if isinstance(x, bool) else "i64" if isinstance(x, int) else "f32"


def mean_divisor(shape: Shape, dims: Sequence[int]) -> int:
    """Number of elements reduced by reducing `shape` over `dims`."""
    return numel(tuple(shape[d] for d in dims))


__all__ = [
    "INTEGERS", "Builder", "Number", "Value", "attribute", "is_number", "lowest", "mean_divisor", "scalar_category",
    "splat", "wrap",
]  # fmt: skip
