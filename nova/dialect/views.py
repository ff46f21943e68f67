"""Constants, views and data movement. Views have value semantics like everything else: the memory plan decides
whether one costs a copy.

Index tensors are i64 or i32; an index out of range is an error at run time, as in PyTorch.
"""

from __future__ import annotations

from itertools import pairwise

from nova.dialect.base import Instance, check, check_axis, check_broadcast, check_like, op
from nova.dialect.types import FLOATS, INTEGERS, Described, Shape, broadcast_shapes, describe, numel

INDEX_DTYPES = ("i64", "i32")


@op("constant", "", "y", "value:dense")
def _constant(it: Instance) -> None:
    """The tensor `value` (dense; a splat where all elements are equal)."""
    value = describe(it["value"].type)
    check(value == it.outs[0], "value {} does not fit result {}", value, it.outs[0])


@op("iota", "", "y", "dim:int")
def _iota(it: Instance) -> None:
    """y[i0,i1,..] = i_dim: 0, 1, 2, .. along dim. Numeric result."""
    y = it.outs[0]
    check_axis(it["dim"], len(y.shape))
    check(y.dtype in FLOATS | INTEGERS, "result {} must be numeric", y)


@op("reshape", "x")
def _reshape(it: Instance) -> None:
    """The elements of x in row-major order, in the result's shape."""
    x, y = it.ins[0], it.outs[0]
    check(numel(x.shape) == numel(y.shape), "cannot reshape {} to {}: {} elements", x, y, numel(x.shape))
    check(x.dtype == y.dtype, "reshape changes dtype: {} to {}", x, y)


@op("transpose", "x", "y", "permutation:ints")
def _transpose(it: Instance) -> None:
    """y's dim i is x's dim permutation[i]."""
    x, y = it.ins[0], it.outs[0]
    permutation = it["permutation"]
    check(sorted(permutation) == list(range(len(x.shape))), "{} does not permute {}", list(permutation), x)
    expected = Described(tuple(x.shape[axis] for axis in permutation), x.dtype)
    check_like(y, expected, "result", "expected")


@op("broadcast", "x", "y", "dims:ints")
def _broadcast(it: Instance) -> None:
    """x's dim i becomes y's dim dims[i] (increasing), where x has that size or 1; other dims of y repeat x."""
    x, y = it.ins[0], it.outs[0]
    dims = it["dims"]
    check(len(dims) == len(x.shape), "{} dims for {}", len(dims), x)
    check(all(a < b for a, b in pairwise(dims)), "dims {} must increase", list(dims))
    for axis, dim in enumerate(dims):
        check_axis(dim, len(y.shape))
        check(x.shape[axis] in (1, y.shape[dim]), "dim {} of {} does not broadcast to dim {} of {}", axis, x, dim, y)
    check(x.dtype == y.dtype, "broadcast changes dtype: {} to {}", x, y)


def sliced_shape(shape: Shape, starts: Shape, limits: Shape, strides: Shape) -> Shape:
    """Shape of the slice [start:limit:stride] of each dim; raises VerifyError if it is out of bounds."""
    rank = len(shape)
    same = len(starts) == len(limits) == len(strides) == rank
    check(same, "starts, limits and strides must have {} entries", rank)
    for axis in range(rank):
        start, limit = starts[axis], limits[axis]
        ok = 0 <= start <= limit <= shape[axis] and strides[axis] >= 1
        check(ok, "slice {}:{}:{} of dim {} is out of bounds for {}", start, limit, strides[axis], axis, list(shape))
    return tuple((limits[a] - starts[a] + strides[a] - 1) // strides[a] for a in range(rank))


@op("slice", "x", "y", "starts:ints limits:ints strides:ints")
def _slice(it: Instance) -> None:
    """x[start:limit:stride] in every dim: 0 <= start <= limit <= size, stride >= 1."""
    x, y = it.ins[0], it.outs[0]
    expected = sliced_shape(x.shape, it["starts"], it["limits"], it["strides"])
    check(y == Described(expected, x.dtype), "result {} of slicing {} must have shape {}", y, x, list(expected))


@op("slice_scatter", "base update", "y", "starts:ints limits:ints strides:ints")
def _slice_scatter(it: Instance) -> None:
    """base with the slice [start:limit:stride] of each dim replaced by update."""
    base, update = it.ins
    expected = sliced_shape(base.shape, it["starts"], it["limits"], it["strides"])
    check(update == Described(expected, base.dtype), "update {} of {} must have shape {}", update, base, list(expected))
    check_like(it.outs[0], base, "result", "base")


@op("as_strided", "x", "y", "size:ints stride:ints offset:int")
def _as_strided(it: Instance) -> None:
    """y[i0,i1,..] = flat(x)[offset + sum of i_d * stride[d]], flat being row-major."""
    x, y = it.ins[0], it.outs[0]
    size, stride, offset = it["size"], it["stride"], it["offset"]
    check(y == Described(size, x.dtype), "result {} must have shape {} and the dtype of {}", y, list(size), x)
    check(len(stride) == len(size), "{} strides for {} sizes", len(stride), len(size))
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True) if n > 0)
    inside = numel(size) == 0 or (offset >= 0 and all(s >= 0 for s in stride) and last < numel(x.shape))
    check(inside, "reads element {} of {}, which has {}", last, x, numel(x.shape))


@op("as_strided_scatter", "base update", "y", "size:ints stride:ints offset:int")
def _as_strided_scatter(it: Instance) -> None:
    """base with flat(base)[offset + sum of i_d * stride[d]] = update[i0,i1,..]; the elements written are distinct."""
    base, update = it.ins
    check(update == Described(it["size"], base.dtype), "update {} must have shape {}", update, list(it["size"]))
    check_like(it.outs[0], base, "result", "base")
    last = it["offset"] + sum((n - 1) * s for n, s in zip(it["size"], it["stride"], strict=True))
    check(numel(it["size"]) == 0 or last < numel(base.shape), "writes element {} of {}", last, base)


@op("reverse", "x", "y", "dims:ints")
def _reverse(it: Instance) -> None:
    """x with the order of elements along dims reversed (torch.flip)."""
    for axis in it["dims"]:
        check_axis(axis, len(it.ins[0].shape))
    check_like(it.outs[0], it.ins[0], "result")


@op("concat", "*xs/8", "y", "dim:int")
def _concat(it: Instance) -> None:
    """The operands one after the other along dim; their other dims are equal."""
    check(len(it.ins) > 0, "concat of nothing")
    first, y, dim = it.ins[0], it.outs[0], it["dim"]
    check_axis(dim, len(first.shape))
    for x in it.ins:
        same = len(x.shape) == len(first.shape) and all(
            a == b for axis, (a, b) in enumerate(zip(x.shape, first.shape, strict=True)) if axis != dim
        )
        check(same and x.dtype == first.dtype, "{} and {} do not concatenate along dim {}", first, x, dim)
    total = sum(x.shape[dim] for x in it.ins)
    expected = Described((*first.shape[:dim], total, *first.shape[dim + 1 :]), first.dtype)
    check_like(y, expected, "result", "expected")


@op("pad", "x", "y", "low:ints high:ints value:float")
def _pad(it: Instance) -> None:
    """x with low[d] elements `value` before and high[d] after it along each dim; negative amounts crop."""
    x, y = it.ins[0], it.outs[0]
    low, high = it["low"], it["high"]
    check(len(low) == len(high) == len(x.shape), "low and high must have {} entries", len(x.shape))
    expected = tuple(n + lo + hi for n, lo, hi in zip(x.shape, low, high, strict=True))
    check(min(expected, default=0) >= 0, "padding {} by {} and {} leaves a negative size", x, list(low), list(high))
    check(y == Described(expected, x.dtype), "result {} of padding {} must have shape {}", y, x, list(expected))


def _check_index(index: Described) -> None:
    check(index.dtype in INDEX_DTYPES, "index {} must be i64 or i32", index)


@op("gather", "x index", "y", "dim:int labels:bool")
def _gather(it: Instance) -> None:
    """torch.gather: y[..i..] = x[..index[..i..]..] with the index standing in dim. y has index's shape. `labels`: the
    index is a loss's target, and an error about a bad one says so.
    """
    (x, index), (y,) = it.ins, it.outs
    _check_index(index)
    check(len(x.shape) == len(index.shape), "x {} and index {} differ in rank", x, index)
    check_axis(it["dim"], len(x.shape))
    fits = all(i <= n for d, (i, n) in enumerate(zip(index.shape, x.shape, strict=True)) if d != it["dim"])
    check(fits, "index {} is larger than {} outside dim {}", index, x, it["dim"])
    check(y == Described(index.shape, x.dtype), "result {} must have index's shape {} and x's dtype", y, index)


@op("scatter", "base index src", "y", "dim:int reduce:str")
def _scatter(it: Instance) -> None:
    """torch.scatter: base with y[..index[..i..]..] = src[..i..] along dim, combined by `reduce`: none, add, mul, amax,
    amin (base takes part). Duplicates: "add" sums in index order (deterministic); "none" keeps the last.
    src has index's shape.
    """
    (base, index, src), (y,) = it.ins, it.outs
    _check_index(index)
    check(len(base.shape) == len(index.shape), "base {} and index {} differ in rank", base, index)
    check_axis(it["dim"], len(base.shape))
    check(src == Described(index.shape, base.dtype), "src {} must have index's shape {} and base's dtype", src, index)
    check(it["reduce"] in ("none", "add", "mul", "amax", "amin"), "unknown reduce {!r}", it["reduce"])
    check_like(y, base, "result", "base")


@op("take", "table ids", "y")
def _take(it: Instance) -> None:
    """y[*i, ..] = table[ids[*i], ..]: embedding look-up, or index_select on dim 0. ids: any shape."""
    (table, ids), (y,) = it.ins, it.outs
    _check_index(ids)
    check(len(table.shape) >= 1, "table {} must have at least one dim", table)
    expected = Described(ids.shape + table.shape[1:], table.dtype)
    check_like(y, expected, "result", "expected")


@op("take_backward", "dy ids", "dtable", "rows:int padding_idx:int")
def _take_backward(it: Instance) -> None:
    """dtable[v, ..] = sum of dy[*i, ..] over all i with ids[*i] = v, in order of i (deterministic); rows many rows.

    Row padding_idx (-1: none) stays zero. Low precision accumulates in f32.
    """
    (dy, ids), (dtable,) = it.ins, it.outs
    _check_index(ids)
    check(dy.shape[: len(ids.shape)] == ids.shape, "dy {} does not start with the shape of ids {}", dy, ids)
    expected = Described((it["rows"], *dy.shape[len(ids.shape) :]), dy.dtype)
    check_like(dtable, expected, "result", "expected")
    check(-1 <= it["padding_idx"] < max(it["rows"], 1), "padding_idx {} of {} rows", it["padding_idx"], it["rows"])


def _indexed_shape(it: Instance, x: Described, indices: list[Described]) -> Shape:
    dims = it["dims"]
    check(len(dims) == len(indices) > 0, "{} dims for {} index tensors", len(dims), len(indices))
    check(all(a < b for a, b in pairwise(dims)), "dims {} must increase", list(dims))
    for index in indices:
        _check_index(index)
    for dim in dims:
        check_axis(dim, len(x.shape))
    try:
        picked = broadcast_shapes(*(index.shape for index in indices))
    except ValueError as error:
        check(False, "index tensors: {}", error)
    rest = tuple(n for axis, n in enumerate(x.shape) if axis not in dims)
    # NumPy's rule: the picked dims stand where the indexed ones were if those are adjacent, else in front.
    front = dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0
    return rest[:front] + picked + rest[front:]


@op("index", "x *indices/8", "y", "dims:ints")
def _index(it: Instance) -> None:
    """Advanced indexing x[.., indices, ..]: indices[k] indexes dim dims[k]; the index tensors broadcast together.

    Their common shape replaces the indexed dims where these are adjacent, else it comes first. Negative indices count
    from the end.
    """
    x, y = it.ins[0], it.outs[0]
    expected = Described(_indexed_shape(it, x, it.optional()), x.dtype)
    check_like(y, expected, "result", "expected")


@op("index_put", "x values *indices/8", "y", "dims:ints accumulate:bool wrap:bool")
def _index_put(it: Instance) -> None:
    """x with the elements that `index` with the same dims and indices would read replaced by values (broadcast to that
    shape), or with accumulate increased by them, in index order (deterministic). Without `wrap`, negative indices are
    bad."""
    x, values = it.ins[:2]
    shape = _indexed_shape(it, x, it.optional())
    check_broadcast(it, [values, Described(shape, values.dtype)], Described(shape, values.dtype))
    check(values.dtype == x.dtype, "values {} and x {} differ in dtype", values, x)
    check_like(it.outs[0], x, "result", "x")


def _scan(name: str, meaning: str) -> None:
    def verify(it: Instance) -> None:
        check_axis(it["dim"], len(it.ins[0].shape))
        check(it.ins[0].dtype in FLOATS | INTEGERS, "operand {} must be numeric", it.ins[0])
        check_like(it.outs[0], it.ins[0], "result")

    verify.__doc__ = f"Inclusive running {meaning} along dim. Low precision accumulates in f32."
    op(name, "x", "y", "dim:int")(verify)


_scan("cumsum", "sum")
_scan("cumprod", "product")


_WINDOWS = "kernel:ints stride:ints padding:ints dilation:ints"
_POOL = f"{_WINDOWS} ceil_mode:bool"


@op("max_pool2d", "x", "y indices", _POOL)
def _max_pool2d(it: Instance) -> None:
    """Maximum over sliding windows of x [N,C,H,W] (padding counts as -inf), and the i64 index of it in the H*W plane.

    NaN counts as largest; of equal elements the first counts. y, indices: [N,C,OH,OW].
    """
    x, (y, indices) = it.ins[0], it.outs
    check(len(x.shape) == 4 and y.shape[:2] == x.shape[:2], "input {} and result {} must be [N,C,H,W]", x, y)
    for name in ("kernel", "stride", "padding", "dilation"):
        check(len(it[name]) == 2, "{} {} must have 2 entries", name, list(it[name]))
    check(y.dtype == x.dtype, "result {} and input {} differ in dtype", y, x)
    check(indices == Described(y.shape, "i64"), "indices {} must be i64 in the shape of {}", indices, y)


@op("max_pool2d_backward", "dy indices", "dx", _WINDOWS)
def _max_pool2d_backward(it: Instance) -> None:
    """dx [N,C,H,W] (the result's shape): each dy added at its index in the H*W plane, which lies in its window; windows
    may overlap."""
    (dy, indices), (dx,) = it.ins, it.outs
    for name in ("kernel", "stride", "padding", "dilation"):
        check(len(it[name]) == 2, "{} {} must have 2 entries", name, list(it[name]))
    check(indices == Described(dy.shape, "i64"), "indices {} must be i64 in the shape of {}", indices, dy)
    check(len(dx.shape) == 4 and dx.shape[:2] == dy.shape[:2], "dx {} does not fit dy {}", dx, dy)
    check(dx.dtype == dy.dtype, "dx {} and dy {} differ in dtype", dx, dy)
