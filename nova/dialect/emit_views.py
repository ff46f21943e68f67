"""Emitters of views, copies and rearrangements. Every value is dense and row-major, so strides never matter here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nova.dialect.build import Value, is_number
from nova.dialect.emit import Emitter, NoLowering, emits
from nova.dialect.types import Shape, numel

# -- the same elements --------------------------------------------------------------------------------------------


@emits(
    "detach.default", "alias.default", "clone.default", "contiguous.default", "lift_fresh.default",
    "lift_fresh_copy.default", "lift.default", "detach_copy.default", "alias_copy.default", "positive.default",
    "conj_physical.default", "_conj.default", "resolve_conj.default", "resolve_neg.default", "real.default",
)  # fmt: skip
def identity(e: Emitter, x: Value, **_: Any) -> Value:
    """The value itself: copies do not exist under value semantics."""
    return x


@emits("_to_copy.default", "to.dtype", "type_as.default")
def to_copy(e: Emitter, x: Value, *_: Any, **__: Any) -> Value:
    """A cast to the recorded dtype."""
    return e.b.cast(x, e.dtype)


@emits("copy.default")
def copy(e: Emitter, destination: Value, source: Value, non_blocking: bool = False) -> Value:
    """The source, broadcast and cast to the destination's type."""
    return e.b.expand(e.b.cast(source, e.dtype), e.shape)


@emits(
    "view.default", "reshape.default", "_unsafe_view.default", "_reshape_alias.default", "view_copy.default",
    "unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims", "flatten.using_ints", "unflatten.int",
    "unsqueeze_copy.default", "squeeze_copy.dim", "_reshape_copy.default",
)  # fmt: skip
def reshape(e: Emitter, x: Value, *_: Any) -> Value:
    """The recorded shape says it all."""
    return e.b.reshape(x, e.shape)


@emits("expand.default", "expand_copy.default", "broadcast_to.default")
def expand(e: Emitter, x: Value, size: Sequence[int], implicit: bool = False) -> Value:
    """NumPy broadcast."""
    return e.b.expand(x, e.shape)


@emits("expand_as.default")
def expand_as(e: Emitter, x: Value, other: Value) -> Value:
    """NumPy broadcast to another value's shape."""
    return e.b.expand(x, e.shape)


@emits("sum_to_size.default")
def sum_to_size(e: Emitter, x: Value, size: Sequence[int]) -> Value:
    """The transpose of expand."""
    return e.b.sum_to(x, e.shape)


# -- permutations -------------------------------------------------------------------------------------------------


@emits("t.default", "t_copy.default", "numpy_T.default")
def t(e: Emitter, x: Value) -> Value:
    """The dims reversed."""
    return e.b.transpose(x, range(x.rank - 1, -1, -1))


@emits("transpose.int", "transpose_copy.int", "swapaxes.default")
def transpose(e: Emitter, x: Value, a: int, b: int) -> Value:
    """Two dims exchanged."""
    return e.b.swap(x, a % x.rank, b % x.rank) if x.rank else x


@emits("permute.default", "permute_copy.default")
def permute(e: Emitter, x: Value, dims: Sequence[int]) -> Value:
    """Dims in a given order."""
    return e.b.transpose(x, [d % x.rank for d in dims])


@emits("movedim.int")
def movedim(e: Emitter, x: Value, source: int, destination: int) -> Value:
    """One dim moved."""
    order = [d for d in range(x.rank) if d != source % x.rank]
    order.insert(destination % x.rank, source % x.rank)
    return e.b.transpose(x, order)


@emits("flip.default")
def flip(e: Emitter, x: Value, dims: Sequence[int]) -> Value:
    """Order along dims reversed."""
    dims = sorted(d % x.rank for d in dims)
    return e.b.create("reverse", [x], [(x.shape, x.dtype)], dims=dims) if dims else x


@emits("roll.default")
def roll(e: Emitter, x: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> Value:
    """Rotation along dims: two slices, swapped."""
    if not dims:
        flat = e.b.reshape(x, (numel(x.shape),))
        return e.b.reshape(_rotate(e, flat, shifts[0], 0), x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        x = _rotate(e, x, shift, dim % x.rank)
    return x


def _rotate(e: Emitter, x: Value, shift: int, dim: int) -> Value:
    size = x.shape[dim]
    cut = (-shift) % size if size else 0
    if cut == 0:
        return x
    return e.b.concat([e.b.slice_dim(x, dim, cut, size), e.b.slice_dim(x, dim, 0, cut)], dim)


# -- slices -------------------------------------------------------------------------------------------------------


def slice_bounds(size: int, start: int | None, end: int | None, step: int) -> tuple[int, int]:
    """Python's slice rules: start and end of x[start:end:step] within [0, size], step > 0."""
    start, end, _ = slice(start, end, step).indices(size)
    return start, max(start, end)


@emits("slice.Tensor", "slice_copy.Tensor")
def slice_(
    e: Emitter, x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    """x[start:end:step] along dim."""
    dim %= x.rank
    lo, hi = slice_bounds(x.shape[dim], start, end, step)
    return e.b.slice_dim(x, dim, lo, hi, step)


@emits("narrow.default")
def narrow(e: Emitter, x: Value, dim: int, start: int, length: int) -> Value:
    """length elements from start."""
    start %= max(x.shape[dim], 1)
    return e.b.slice_dim(x, dim % x.rank, start, start + length)


@emits("slice_scatter.default")
def slice_scatter(
    e: Emitter,
    base: Value,
    update: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    """base with x[start:end:step] along dim replaced."""
    dim %= base.rank
    lo, hi = slice_bounds(base.shape[dim], start, end, step)
    return _scatter_dim(e, base, update, dim, (lo, hi, step))


def _scatter_dim(e: Emitter, base: Value, update: Value, dim: int, bounds: tuple[int, int, int]) -> Value:
    update = e.b.cast(update, base.dtype)
    if bounds == (0, base.shape[dim], 1):
        return e.b.expand(update, base.shape)
    starts, limits, strides = [0] * base.rank, list(base.shape), [1] * base.rank
    starts[dim], limits[dim], strides[dim] = bounds
    picked = tuple((hi - lo + s - 1) // s for lo, hi, s in zip(starts, limits, strides, strict=True))
    operands = [base, e.b.expand(update, picked)]
    return e.b.create(
        "slice_scatter", operands, [(base.shape, base.dtype)], starts=starts, limits=limits, strides=strides
    )


@emits("slice_backward.default")
def slice_backward(e: Emitter, dy: Value, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Value:
    """dy in a tensor of zeros."""
    shape, dim = e.shape, dim % len(e.shape)
    lo, hi = slice_bounds(shape[dim], start, end, step)
    if step != 1:
        return _scatter_dim(e, e.b.full(shape, 0, dy.dtype), dy, dim, (lo, hi, step))
    low, high = [0] * len(shape), [0] * len(shape)
    low[dim], high[dim] = lo, shape[dim] - hi
    return e.b.pad(dy, low, high)


@emits("select.int", "select_copy.int")
def select(e: Emitter, x: Value, dim: int, index: Any) -> Value:
    """One index of a dim, which disappears."""
    if not is_number(index):
        raise NoLowering
    dim %= x.rank
    index %= x.shape[dim]
    return e.b.reshape(e.b.slice_dim(x, dim, index, index + 1), e.shape)


@emits("select_scatter.default")
def select_scatter(e: Emitter, base: Value, update: Value, dim: int, index: int) -> Value:
    """base with one index of a dim replaced."""
    dim %= base.rank
    index %= base.shape[dim]
    update = e.b.reshape(update, (*base.shape[:dim], 1, *base.shape[dim + 1 :]))
    return _scatter_dim(e, base, update, dim, (index, index + 1, 1))


@emits("select_backward.default")
def select_backward(e: Emitter, dy: Value, sizes: Sequence[int], dim: int, index: int) -> Value:
    """dy at one index of a dim of zeros."""
    shape, dim = e.shape, dim % len(e.shape)
    index %= shape[dim]
    low, high = [0] * len(shape), [0] * len(shape)
    low[dim], high[dim] = index, shape[dim] - index - 1
    return e.b.pad(e.b.reshape(dy, (*shape[:dim], 1, *shape[dim + 1 :])), low, high)


@emits("split.Tensor", "unsafe_split.Tensor", "split_copy.Tensor")
def split(e: Emitter, x: Value, size: int, dim: int = 0) -> list[Value]:
    """Pieces of equal size; the last may be shorter."""
    dim %= x.rank
    total = x.shape[dim]
    return [e.b.slice_dim(x, dim, lo, min(lo + size, total)) for lo in range(0, max(total, 1), max(size, 1))]


@emits("split_with_sizes.default", "unsafe_split_with_sizes.default", "split_with_sizes_copy.default")
def split_with_sizes(e: Emitter, x: Value, sizes: Sequence[int], dim: int = 0) -> list[Value]:
    """Pieces of given sizes."""
    dim %= x.rank
    pieces, lo = [], 0
    for size in sizes:
        pieces.append(e.b.slice_dim(x, dim, lo, lo + size))
        lo += size
    return pieces


@emits("chunk.default")
def chunk(e: Emitter, x: Value, chunks: int, dim: int = 0) -> list[Value]:
    """At most `chunks` pieces of equal size."""
    size = x.shape[dim % x.rank]
    return split(e, x, max(-(-size // chunks), 1), dim)


@emits("unbind.int", "unbind_copy.int")
def unbind(e: Emitter, x: Value, dim: int = 0) -> list[Value]:
    """Every index of a dim."""
    dim %= x.rank
    shape = x.shape[:dim] + x.shape[dim + 1 :]
    return [e.b.reshape(e.b.slice_dim(x, dim, i, i + 1), shape) for i in range(x.shape[dim])]


# -- strided windows ----------------------------------------------------------------------------------------------


def row_major_strides(shape: Shape) -> list[int]:
    """Element strides of a dense row-major tensor."""
    strides, step = [0] * len(shape), 1
    for axis in range(len(shape) - 1, -1, -1):
        strides[axis] = step
        step *= shape[axis]
    return strides


@emits("as_strided.default", "as_strided_copy.default")
def as_strided(e: Emitter, x: Value, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Value:
    """Elements of flat x at offset + i * stride."""
    size, stride, offset = tuple(size), tuple(stride), offset or 0
    if list(stride) == row_major_strides(size):
        flat = e.b.reshape(x, (numel(x.shape),))
        return e.b.reshape(e.b.slice_dim(flat, 0, offset, offset + numel(size)), size)
    return e.b.create("as_strided", [x], [(size, x.dtype)], size=size, stride=stride, offset=offset)


@emits("as_strided_scatter.default")
def as_strided_scatter(
    e: Emitter, base: Value, update: Value, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Value:
    """base with the elements that as_strided reads replaced."""
    return _write_strided(e, base, update, tuple(size), tuple(stride), offset or 0)


def _write_strided(e: Emitter, base: Value, update: Value, size: Shape, stride: Sequence[int], offset: int) -> Value:
    update = e.b.expand(e.b.cast(update, base.dtype), size)
    if list(stride) == row_major_strides(size):
        flat, count = e.b.reshape(base, (numel(base.shape),)), numel(size)
        written = _scatter_dim(e, flat, e.b.reshape(update, (count,)), 0, (offset, offset + count, 1))
        return e.b.reshape(written, base.shape)
    operands = [base, update]
    return e.b.create(
        "as_strided_scatter", operands, [(base.shape, base.dtype)], size=size, stride=stride, offset=offset
    )


def _diagonal(shape: Shape, offset: int, dim1: int, dim2: int) -> tuple[Shape, list[int], int]:
    dim1, dim2 = dim1 % len(shape), dim2 % len(shape)
    strides = row_major_strides(shape)
    if offset >= 0:
        length = min(shape[dim1], shape[dim2] - offset)
        start = offset * strides[dim2]
    else:
        length = min(shape[dim1] + offset, shape[dim2])
        start = -offset * strides[dim1]
    rest = [d for d in range(len(shape)) if d not in (dim1, dim2)]
    length = max(length, 0)
    return (*(shape[d] for d in rest), length), [*(strides[d] for d in rest), strides[dim1] + strides[dim2]], start


@emits("diagonal.default", "diagonal_copy.default")
def diagonal(e: Emitter, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """The diagonal of two dims, as the last dim."""
    size, stride, start = _diagonal(x.shape, offset, dim1, dim2)
    return e.b.create("as_strided", [x], [(size, x.dtype)], size=size, stride=stride, offset=start)


@emits("diagonal_scatter.default")
def diagonal_scatter(e: Emitter, x: Value, update: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """x with a diagonal replaced."""
    size, stride, start = _diagonal(x.shape, offset, dim1, dim2)
    return _write_strided(e, x, update, size, stride, start)


@emits("diagonal_backward.default")
def diagonal_backward(e: Emitter, dy: Value, sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Value:
    """dy on the diagonal of zeros."""
    size, stride, start = _diagonal(e.shape, offset, dim1, dim2)
    return _write_strided(e, e.b.full(e.shape, 0, dy.dtype), dy, size, stride, start)


@emits("unfold.default", "unfold_copy.default")
def unfold(e: Emitter, x: Value, dim: int, size: int, step: int) -> Value:
    """Sliding windows of a dim, as a new last dim."""
    if x.rank == 0:
        return e.b.reshape(x, e.shape)
    dim %= x.rank
    strides = row_major_strides(x.shape)
    stride = [*strides[:dim], strides[dim] * step, *strides[dim + 1 :], strides[dim]]
    return e.b.create("as_strided", [x], [(e.shape, x.dtype)], size=e.shape, stride=stride, offset=0)


@emits("unfold_backward.default")
def unfold_backward(e: Emitter, dy: Value, sizes: Sequence[int], dim: int, size: int, step: int) -> Value:
    """Each window's gradient added where it came from: one padded sum a window position."""
    shape, dim = e.shape, dim % len(e.shape)
    windows = dy.shape[dim]
    if size > 16 or windows == 0:
        raise NoLowering
    total = e.b.full(shape, 0, dy.dtype)
    for k in range(size):
        piece = e.b.reshape(e.b.slice_dim(dy, dy.rank - 1, k, k + 1), dy.shape[:-1])
        bounds = (k, k + (windows - 1) * step + 1, step)
        total = e.b.op("add", total, _scatter_dim(e, e.b.full(shape, 0, dy.dtype), piece, dim, bounds))
    return total


# -- joining and repeating ----------------------------------------------------------------------------------------


@emits("cat.default", "concat.default")
def cat(e: Emitter, xs: Sequence[Value], dim: int = 0) -> Value:
    """Concatenation; 1-d empty operands count for nothing (PyTorch's legacy rule)."""
    kept = [x for x in xs if x.shape != (0,) or len(e.shape) == 1]
    return e.b.concat([e.b.cast(x, e.dtype) for x in kept], dim % len(e.shape))


@emits("stack.default")
def stack(e: Emitter, xs: Sequence[Value], dim: int = 0) -> Value:
    """Concatenation along a new dim."""
    dim %= len(e.shape)
    shape = (*e.shape[:dim], 1, *e.shape[dim + 1 :])
    return e.b.concat([e.b.reshape(e.b.cast(x, e.dtype), shape) for x in xs], dim)


@emits("repeat.default")
def repeat(e: Emitter, x: Value, repeats: Sequence[int]) -> Value:
    """The tensor tiled: a broadcast over new dims in front of each dim, folded in."""
    sizes = (1,) * (len(repeats) - x.rank) + x.shape
    spread = tuple(n for pair in zip(repeats, sizes, strict=True) for n in pair)
    x = e.b.reshape(x, sizes)
    return e.b.reshape(e.b.broadcast(x, spread, range(1, 2 * len(sizes), 2)), e.shape)


@emits("repeat_interleave.self_int")
def repeat_interleave(e: Emitter, x: Value, repeats: int, dim: int | None = None, **_: Any) -> Value:
    """Each element of a dim repeated."""
    if dim is None:
        x, dim = e.b.reshape(x, (numel(x.shape),)), 0
    dim %= x.rank
    spread = (*x.shape[: dim + 1], repeats, *x.shape[dim + 1 :])
    dims = [d if d <= dim else d + 1 for d in range(x.rank)]
    return e.b.reshape(e.b.broadcast(x, spread, dims), e.shape)


@emits("constant_pad_nd.default")
def constant_pad_nd(e: Emitter, x: Value, pad: Sequence[int], value: Any = 0) -> Value:
    """Padding, listed from the last dim; negative amounts crop."""
    if not is_number(value):
        raise NoLowering
    low, high = [0] * x.rank, [0] * x.rank
    for i in range(len(pad) // 2):
        low[-1 - i], high[-1 - i] = pad[2 * i], pad[2 * i + 1]
    return e.b.pad(x, low, high, value)


@emits("pixel_shuffle.default")
def pixel_shuffle(e: Emitter, x: Value, r: int) -> Value:
    """[.., C*r*r, H, W] to [.., C, H*r, W*r]."""
    (*lead, channels, h, w), n = x.shape, x.rank - 3
    split_ = e.b.reshape(x, (*lead, channels // (r * r), r, r, h, w))
    order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
    return e.b.reshape(e.b.transpose(split_, order), e.shape)


@emits("pixel_unshuffle.default")
def pixel_unshuffle(e: Emitter, x: Value, r: int) -> Value:
    """[.., C, H*r, W*r] to [.., C*r*r, H, W]."""
    (*lead, channels, h, w), n = x.shape, x.rank - 3
    split_ = e.b.reshape(x, (*lead, channels, h // r, r, w // r, r))
    order = [*range(n), n, n + 2, n + 4, n + 1, n + 3]
    return e.b.reshape(e.b.transpose(split_, order), e.shape)


@emits("meshgrid.indexing")
def meshgrid(e: Emitter, xs: Sequence[Value], indexing: str = "ij") -> list[Value]:
    """Coordinates along each dim, broadcast to the grid."""
    if indexing != "ij":
        raise NoLowering
    shape = tuple(numel(x.shape) for x in xs)
    flat = [e.b.reshape(x, (numel(x.shape),)) for x in xs]
    return [e.b.broadcast(x, shape, [d]) for d, x in enumerate(flat)]
