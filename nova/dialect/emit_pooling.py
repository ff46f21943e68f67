"""Emitters of pooling and resampling: maxima over windows, and whatever is a mean or a copy over equal blocks.

A mean over blocks that do not overlap is a reshape and a sum, its gradient a broadcast; so is nearest-neighbour
upsampling by a whole factor, the other way round. Overlapping or padded mean pooling stays with PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nova.dialect.build import Value
from nova.dialect.emit import Emitter, NoLowering, emits
from nova.dialect.types import Shape


def _pair(values: Sequence[int]) -> tuple[int, int]:
    return (values[0], values[0]) if len(values) == 1 else (values[0], values[1])


@emits("max_pool2d_with_indices.default")
def max_pool2d_with_indices(
    e: Emitter,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> list[Value]:
    """(maxima, their indices in the plane)."""
    shape = tuple(e.outs[0].shape)
    batched, planes = _as_batch(e, x), shape if len(shape) == 4 else (1, *shape)
    pooled = e.b.create(
        "max_pool2d",
        [batched],
        [(planes, x.dtype), (planes, "i64")],
        kernel=_pair(kernel),
        stride=_pair(stride or kernel),
        padding=_pair(padding),
        dilation=_pair(dilation),
        ceil_mode=ceil_mode,
    )
    return [e.b.reshape(v, shape) for v in pooled]


def _as_batch(e: Emitter, x: Value) -> Value:
    return x if x.rank == 4 else e.b.reshape(x, (1, *x.shape))


@emits("max_pool2d_with_indices_backward.default")
def max_pool2d_with_indices_backward(
    e: Emitter,
    dy: Value,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Value,
) -> Value:
    """dy at the indices of the maxima."""
    shape = x.shape if x.rank == 4 else (1, *x.shape)
    made = e.b.create(
        "max_pool2d_backward",
        [_as_batch(e, dy), _as_batch(e, indices)],
        [(shape, dy.dtype)],
        kernel=_pair(kernel),
        stride=_pair(stride or kernel),
        padding=_pair(padding),
        dilation=_pair(dilation),
    )
    return e.b.reshape(made, x.shape)


# -- equal blocks -------------------------------------------------------------------------------------------------


def _sum_blocks(e: Emitter, x: Value, rows: int, columns: int) -> Value:
    """[.., rows*a, columns*b] summed to [.., rows, columns]."""
    (*lead, h, w), n = x.shape, x.rank - 2
    blocks = e.b.reshape(x, (*lead, rows, h // rows, columns, w // columns))
    return e.b.reduce("sum", blocks, [n + 1, n + 3])


def _spread_blocks(e: Emitter, x: Value, height: int, width: int) -> Value:
    """[.., rows, columns] repeated to [.., height, width]."""
    (*lead, rows, columns), n = x.shape, x.rank - 2
    spread = (*lead, rows, height // rows, columns, width // columns)
    return e.b.reshape(e.b.broadcast(x, spread, [*range(n), n, n + 2]), (*lead, height, width))


def _divides(shape: Shape, rows: int, columns: int) -> bool:
    h, w = shape[-2:]
    return rows > 0 and columns > 0 and h % rows == 0 and w % columns == 0


def _over(e: Emitter, x: Value, count: int) -> Value:
    return e.b.op("div", x, e.b.constant(count, x.dtype))


@emits("_adaptive_avg_pool2d.default")
def adaptive_avg_pool2d(e: Emitter, x: Value, size: Sequence[int]) -> Value:
    """Means over equal blocks, where the sizes divide."""
    rows, columns = e.shape[-2:]
    if not _divides(x.shape, rows, columns):
        raise NoLowering
    area = (x.shape[-2] // rows) * (x.shape[-1] // columns)
    return e.b.cast(_over(e, _sum_blocks(e, e.wide(x), rows, columns), area), e.dtype)


@emits("_adaptive_avg_pool2d_backward.default")
def adaptive_avg_pool2d_backward(e: Emitter, dy: Value, x: Value) -> Value:
    """dy shared out over equal blocks."""
    (rows, columns), (h, w) = dy.shape[-2:], x.shape[-2:]
    if not _divides(x.shape, rows, columns):
        raise NoLowering
    share = _over(e, e.wide(dy), (h // rows) * (w // columns))
    return e.finish(_spread_blocks(e, share, h, w))


def _tiles(kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil_mode: bool) -> tuple[int, int]:
    """The kernel, if its windows tile the plane without overlap or padding."""
    kernel = _pair(kernel)
    if _pair(stride or kernel) != kernel or any(padding) or ceil_mode:
        raise NoLowering
    return kernel


@emits("avg_pool2d.default")
def avg_pool2d(
    e: Emitter,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> Value:
    """Means over tiles; a rest at the far edges is left out."""
    kh, kw = _tiles(kernel, stride, padding, ceil_mode)
    rows, columns = e.shape[-2:]
    covered = e.b.slice(x, (0,) * x.rank, (*x.shape[:-2], rows * kh, columns * kw))
    return e.b.cast(_over(e, _sum_blocks(e, e.wide(covered), rows, columns), divisor or kh * kw), e.dtype)


@emits("avg_pool2d_backward.default")
def avg_pool2d_backward(
    e: Emitter,
    dy: Value,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Value:
    """dy shared out over tiles, zeros at the edges that no tile covers."""
    kh, kw = _tiles(kernel, stride, padding, ceil_mode)
    rows, columns = dy.shape[-2:]
    share = _spread_blocks(e, _over(e, e.wide(dy), divisor or kh * kw), rows * kh, columns * kw)
    rest = [0] * (x.rank - 2) + [x.shape[-2] - rows * kh, x.shape[-1] - columns * kw]
    return e.finish(e.b.pad(share, [0] * x.rank, rest))


@emits("upsample_nearest2d.default", "upsample_nearest2d.vec")
def upsample_nearest2d(e: Emitter, x: Value, *_: Any) -> Value:
    """Each element repeated, where the factors are whole."""
    h, w = e.shape[-2:]
    if not _divides(e.shape, *x.shape[-2:]):
        raise NoLowering
    return _spread_blocks(e, x, h, w)


@emits("upsample_nearest2d_backward.default")
def upsample_nearest2d_backward(e: Emitter, dy: Value, *_: Any) -> Value:
    """Sums over what was repeated."""
    rows, columns = e.shape[-2:]
    if not _divides(dy.shape, rows, columns):
        raise NoLowering
    return e.b.cast(_sum_blocks(e, e.wide(dy), rows, columns), e.dtype)
