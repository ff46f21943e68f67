"""Emitters of tensors made from nothing: fills, ranges, triangles."""

from __future__ import annotations

from typing import Any

from nova.dialect.build import Value, is_number
from nova.dialect.emit import Emitter, NoLowering, emits
from nova.dialect.types import FLOATS


def _filled(e: Emitter, value: Any) -> Value:
    scalar = e.b.constant(value, e.dtype) if is_number(value) else e.b.cast(value, e.dtype)
    return e.b.expand(scalar, e.shape)


@emits(
    "zeros.default", "zeros_like.default", "new_zeros.default", "empty.memory_format", "empty_like.default",
    "new_empty.default", "empty_strided.default", "new_empty_strided.default", "zero.default",
    "_efficientzerotensor.default",
)  # fmt: skip
def zeros(e: Emitter, *_: Any, **__: Any) -> Value:
    """Zeros; uninitialised memory is zeros too."""
    return _filled(e, 0)


@emits("ones.default", "ones_like.default", "new_ones.default")
def ones(e: Emitter, *_: Any, **__: Any) -> Value:
    """Ones."""
    return _filled(e, 1)


@emits("full.default")
def full(e: Emitter, size: Any, value: Any, **_: Any) -> Value:
    """A repeated number."""
    return _filled(e, value)


@emits("full_like.default", "fill.Scalar", "fill.Tensor")
def full_like(e: Emitter, x: Value, value: Any, **_: Any) -> Value:
    """A repeated number in the shape of x."""
    return _filled(e, value)


@emits("new_full.default")
def new_full(e: Emitter, x: Value, size: Any, value: Any, **_: Any) -> Value:
    """A repeated number in the dtype of x."""
    return _filled(e, value)


@emits("scalar_tensor.default")
def scalar_tensor(e: Emitter, value: Any, **_: Any) -> Value:
    """A 0-d tensor of a number."""
    return _filled(e, value)


@emits("arange.default")
def arange(e: Emitter, end: Any, **_: Any) -> Value:
    """0, 1, .. below end."""
    return arange_step(e, 0, end, 1)


@emits("arange.start")
def arange_start(e: Emitter, start: Any, end: Any, **_: Any) -> Value:
    """start, start + 1, .. below end."""
    return arange_step(e, start, end, 1)


@emits("arange.start_step")
def arange_step(e: Emitter, start: Any, end: Any, step: Any = 1, **_: Any) -> Value:
    """start + i * step, computed in f64 for floats as PyTorch does."""
    if not (is_number(start) and is_number(step)):
        raise NoLowering
    floating = e.dtype in FLOATS
    x = e.b.iota(e.shape, 0, "f64" if floating else "i64")
    if step != 1:
        x = e.b.op("mul", x, e.b.constant(step, x.dtype))
    if start != 0:
        x = e.b.op("add", x, e.b.constant(start, x.dtype))
    return e.b.cast(x, e.dtype)


@emits("eye.default", "eye.m")
def eye(e: Emitter, *_: Any, **__: Any) -> Value:
    """Ones on the main diagonal."""
    rows, columns = e.shape
    same = e.b.op("eq", e.b.iota((rows, 1), 0), e.b.iota((1, columns), 1))
    return e.b.cast(same, e.dtype)


@emits("tril.default")
def tril(e: Emitter, x: Value, diagonal: int = 0) -> Value:
    """The elements on and below a diagonal; zeros elsewhere."""
    return _triangle(e, x, "le", diagonal)


@emits("triu.default")
def triu(e: Emitter, x: Value, diagonal: int = 0) -> Value:
    """The elements on and above a diagonal; zeros elsewhere."""
    return _triangle(e, x, "ge", diagonal)


def _triangle(e: Emitter, x: Value, keep: str, diagonal: int) -> Value:
    rows, columns = x.shape[-2:]
    row = e.b.iota((rows, 1), 0)
    if diagonal:
        row = e.b.op("add", row, e.b.constant(diagonal, "i64"))
    kept = e.b.op(keep, e.b.iota((1, columns), 1), row)
    return e.b.where(kept, x, e.b.constant(0, x.dtype))
