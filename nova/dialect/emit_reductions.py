"""Emitters of reductions, scans and softmaxes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from nova.dialect.build import Value, is_number, mean_divisor
from nova.dialect.emit import Emitter, NoLowering, emits
from nova.dialect.reductions import reduced_shape
from nova.dialect.types import LOW_PRECISION, numel


def _wide_dtype(dtype: str) -> str:
    return "f32" if dtype in LOW_PRECISION else dtype


@emits("sum.default", "sum.dim_IntList")
def sum_(e: Emitter, x: Value, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    """Sum in the result's dtype."""
    return e.b.reduce("sum", e.b.cast(x, e.dtype), e.dims(dims, x.rank), keepdim)


@emits("prod.default")
def prod(e: Emitter, x: Value, *, dtype: Any = None) -> Value:
    """Product of all elements."""
    return e.b.reduce("prod", e.b.cast(x, e.dtype), range(x.rank))


@emits("prod.dim_int")
def prod_dim(e: Emitter, x: Value, dim: int, keepdim: bool = False, *, dtype: Any = None) -> Value:
    """Product along a dim."""
    return e.b.reduce("prod", e.b.cast(x, e.dtype), e.dims(dim, x.rank), keepdim)


@emits("mean.default", "mean.dim")
def mean(e: Emitter, x: Value, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    """Sum over the count; rounded once."""
    axes = e.dims(dims, x.rank)
    wide = e.value(x, _wide_dtype(e.dtype))
    total = e.b.reduce("sum", wide, axes, keepdim)
    count = e.b.constant(mean_divisor(x.shape, axes), wide.dtype)
    return e.b.cast(e.b.op("div", total, count), e.dtype)


def _variance(e: Emitter, x: Value, dims: Any, correction: Any, keepdim: bool) -> tuple[Value, Value]:
    """(variance, mean) in the wide dtype, by two passes."""
    if correction is not None and not is_number(correction):
        raise NoLowering
    axes = e.dims(dims, x.rank)
    count = mean_divisor(x.shape, axes)
    wide = e.value(x, _wide_dtype(x.dtype))
    b = e.b
    average = b.op("div", b.reduce("sum", wide, axes, keepdim=True), b.constant(count, wide.dtype))
    centred = b.op("sub", wide, average)
    squares = b.reduce("sum", b.op("mul", centred, centred), axes, keepdim)
    divisor = max(0.0, count - (1 if correction is None else correction))
    variance = b.op("div", squares, b.constant(divisor, wide.dtype))
    return variance, b.reshape(average, reduced_shape(x.shape, axes, keepdim))


def _correction(unbiased: bool) -> int:
    return int(unbiased)


@emits("var.correction")
def var(e: Emitter, x: Value, dims: Any = None, *, correction: Any = None, keepdim: bool = False) -> Value:
    """Variance."""
    return e.b.cast(_variance(e, x, dims, correction, keepdim)[0], e.dtype)


@emits("var.dim")
def var_dim(e: Emitter, x: Value, dims: Any, unbiased: bool = True, keepdim: bool = False) -> Value:
    """Variance."""
    return e.b.cast(_variance(e, x, dims, _correction(unbiased), keepdim)[0], e.dtype)


@emits("std.correction")
def std(e: Emitter, x: Value, dims: Any = None, *, correction: Any = None, keepdim: bool = False) -> Value:
    """Standard deviation."""
    return e.b.cast(e.b.op("sqrt", _variance(e, x, dims, correction, keepdim)[0]), e.dtype)


@emits("var_mean.correction")
def var_mean(e: Emitter, x: Value, dims: Any = None, *, correction: Any = None, keepdim: bool = False) -> list[Value]:
    """Variance and mean."""
    return [e.b.cast(v, t.dtype) for v, t in zip(_variance(e, x, dims, correction, keepdim), e.outs, strict=True)]


@emits("std_mean.correction")
def std_mean(e: Emitter, x: Value, dims: Any = None, *, correction: Any = None, keepdim: bool = False) -> list[Value]:
    """Standard deviation and mean."""
    variance, average = _variance(e, x, dims, correction, keepdim)
    return [e.b.cast(v, t.dtype) for v, t in zip((e.b.op("sqrt", variance), average), e.outs, strict=True)]


# -- extremes -----------------------------------------------------------------------------------------------------


@emits("amax.default", "amin.default")
def amax(e: Emitter, x: Value, dims: Any = None, keepdim: bool = False) -> Value:
    """Maximum or minimum over dims."""
    return e.b.reduce(_extreme(e), x, e.dims(dims, x.rank), keepdim)


def _extreme(e: Emitter) -> str:
    return "max" if "max" in e.schema_name else "min"


@emits("max.default", "min.default")
def max_all(e: Emitter, x: Value) -> Value:
    """The extreme of all elements."""
    return e.b.reduce(_extreme(e), x, range(x.rank))


@emits("max.other", "min.other")
def max_other(e: Emitter, a: Value, b: Value) -> Value:
    """Elementwise extreme."""
    return e.arith(f"{_extreme(e)}imum", a, b)


@emits("max.dim", "min.dim")
def max_dim(e: Emitter, x: Value, dim: int, keepdim: bool = False) -> list[Value]:
    """The extreme along a dim and the index of its first occurrence."""
    if x.rank == 0:
        return [x, e.b.constant(0, "i64")]
    dim %= x.rank
    shape = reduced_shape(x.shape, (dim,), keepdim)
    value = e.b.reduce(_extreme(e), x, (dim,), keepdim)
    index = e.b.create(f"arg{_extreme(e)}", [x], [(shape, "i64")], dim=dim, keepdim=keepdim)
    return [value, index]


@emits("aminmax.default")
def aminmax(e: Emitter, x: Value, *, dim: int | None = None, keepdim: bool = False) -> list[Value]:
    """Minimum and maximum."""
    axes = e.dims(dim, x.rank)
    return [e.b.reduce("min", x, axes, keepdim), e.b.reduce("max", x, axes, keepdim)]


@emits("argmax.default", "argmin.default")
def argmax(e: Emitter, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    """Index of the first extreme, in the flat tensor if dim is None."""
    if dim is None or x.rank == 0:
        x, dim, keepdim = e.b.reshape(x, (numel(x.shape),)), 0, False
    dim %= x.rank
    shape = reduced_shape(x.shape, (dim,), keepdim)
    found = e.b.create(f"arg{_extreme(e)}", [x], [(shape, "i64")], dim=dim, keepdim=keepdim)
    return e.b.reshape(found, e.shape)


@emits("any.default", "any.dim", "any.dims", "all.default", "all.dim", "all.dims")
def any_(e: Emitter, x: Value, dims: Any = None, keepdim: bool = False) -> Value:
    """Disjunction or conjunction of x != 0."""
    name = e.schema_name.removeprefix("aten::")
    return e.b.cast(e.b.reduce(name, e.b.cast(x, "bool"), e.dims(dims, x.rank), keepdim), e.dtype)


@emits("count_nonzero.default", "count_nonzero.dim_IntList")
def count_nonzero(e: Emitter, x: Value, dims: Any = None) -> Value:
    """How many elements differ from 0."""
    return e.b.reduce("sum", e.b.cast(e.b.cast(x, "bool"), "i64"), e.dims(dims, x.rank))


@emits("logsumexp.default")
def logsumexp(e: Emitter, x: Value, dims: Any, keepdim: bool = False) -> Value:
    """log(sum(e**x)), shifted by the maximum where that is finite."""
    b, axes = e.b, e.dims(dims, x.rank)
    wide = e.wide(x)
    if not axes:
        return e.b.cast(wide, e.dtype)
    peak = b.reduce("max", wide, axes, keepdim=True)
    zero = b.constant(0, wide.dtype)
    shift = b.where(b.op("isinf", peak), zero, peak)
    total = b.op("log", b.reduce("sum", b.op("exp", b.op("sub", wide, shift)), axes, keepdim))
    return b.cast(b.op("add", total, b.reshape(shift, total.shape)), e.dtype)


# -- norms --------------------------------------------------------------------------------------------------------


@emits("linalg_vector_norm.default")
def vector_norm(
    e: Emitter, x: Value, order: Any = 2, dims: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    """(sum |x|**p)**(1/p); extremes of |x| for p = inf, -inf; a count for p = 0."""
    if not is_number(order):
        raise NoLowering
    b, axes = e.b, e.dims(dims, x.rank)
    wide = e.wide(x)
    if order == 2:
        result = b.op("sqrt", b.reduce("sum", b.op("mul", wide, wide), axes, keepdim))
    elif order == 1:
        result = b.reduce("sum", b.op("abs", wide), axes, keepdim)
    elif math.isinf(order):
        result = b.reduce("max" if order > 0 else "min", b.op("abs", wide), axes, keepdim)
    elif order == 0:
        nonzero = b.op("ne", wide, b.constant(0, wide.dtype))
        result = b.reduce("sum", b.cast(nonzero, wide.dtype), axes, keepdim)
    else:
        powers = b.op("pow", b.op("abs", wide), b.constant(order, wide.dtype))
        result = b.op("pow", b.reduce("sum", powers, axes, keepdim), b.constant(1.0 / order, wide.dtype))
    return b.cast(result, e.dtype)


@emits("norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "norm.ScalarOpt_dtype")
def norm_dim(e: Emitter, x: Value, order: Any, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    """torch.norm over dims."""
    return vector_norm(e, x, 2 if order is None else order, dims, keepdim)


@emits("norm.Scalar")
def norm(e: Emitter, x: Value, order: Any = 2) -> Value:
    """torch.norm of all elements."""
    return vector_norm(e, x, order)


@emits("_foreach_norm.Scalar")
def foreach_norm_list(e: Emitter, xs: Sequence[Value], order: Any = 2, dtype: Any = None) -> list[Value]:
    """One norm a tensor, computed together."""
    if order not in (1, 2, math.inf) or len({x.dtype for x in xs}) != 1:
        raise NoLowering
    norms = e.b.create("foreach_norm", xs, [((len(xs),), e.outs[0].dtype)], ord=float(order))
    return [e.b.reshape(e.b.slice(norms, (i,), (i + 1,)), ()) for i in range(len(xs))]


# -- softmax and scans --------------------------------------------------------------------------------------------


def _rowwise(e: Emitter, name: str, operands: Sequence[Value], dim: int) -> Value:
    dtype = _wide_dtype(e.dtype) if any(x.dtype != e.dtype for x in operands) else e.dtype
    operands = [e.b.cast(x, dtype) for x in operands]
    shape = operands[0].shape
    if not shape:
        operands = [e.b.reshape(x, (1,)) for x in operands]
    result = e.b.create(name, operands, [(operands[0].shape, dtype)], dim=dim % len(operands[0].shape))
    return e.b.cast(e.b.reshape(result, shape), e.dtype)


@emits("_softmax.default", "softmax.int")
def softmax(e: Emitter, x: Value, dim: int, *_: Any) -> Value:
    """Softmax along a dim."""
    return _rowwise(e, "softmax", [x], dim)


@emits("_log_softmax.default", "log_softmax.int")
def log_softmax(e: Emitter, x: Value, dim: int, *_: Any) -> Value:
    """Logarithm of softmax along a dim."""
    return _rowwise(e, "log_softmax", [x], dim)


@emits("_safe_softmax.default")
def safe_softmax(e: Emitter, x: Value, dim: int, dtype: Any = None) -> Value:
    """Softmax along a dim; rows of -inf only become 0."""
    b = e.b
    y = _rowwise(e, "softmax", [x], dim)
    masked = b.reduce("all", b.op("eq", x, b.constant(-math.inf, x.dtype)), (dim % x.rank,), keepdim=True)
    return b.where(masked, b.constant(0, y.dtype), y)


@emits("_softmax_backward_data.default")
def softmax_backward(e: Emitter, dy: Value, y: Value, dim: int, input_dtype: Any) -> Value:
    """Gradient of softmax."""
    return _rowwise(e, "softmax_backward", [dy, y], dim)


@emits("_log_softmax_backward_data.default")
def log_softmax_backward(e: Emitter, dy: Value, y: Value, dim: int, input_dtype: Any) -> Value:
    """Gradient of log-softmax."""
    return _rowwise(e, "log_softmax_backward", [dy, y], dim)


@emits("cumsum.default", "cumprod.default")
def scan(e: Emitter, x: Value, dim: int, *, dtype: Any = None) -> Value:
    """Running sum or product."""
    name = e.schema_name.removeprefix("aten::")
    x = e.b.cast(x, e.dtype)
    if x.rank == 0:
        return x
    return e.b.create(name, [x], [(x.shape, x.dtype)], dim=dim % x.rank)
