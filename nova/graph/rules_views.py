"""Rules for views and data movement: compose them, and drop those that change nothing."""

from __future__ import annotations

from nova.dialect.build import Value
from nova.dialect.elementwise import ELEMENTWISE_OPS
from nova.dialect.types import Shape, broadcast_shapes
from nova.graph.rewriting import Site, rule


@rule("reshape")
def reshape(it: Site) -> Value | None:
    """reshape(reshape(x)) = reshape(x); to the shape it has = x."""
    x, y = it.operand(0), it.result
    if x.shape == y.shape:
        return x
    inner = it.defined_by(0, "reshape")
    return it.b.reshape(inner.operand(0), y.shape) if inner else None


def _moves_only_ones(shape: Shape, permutation: tuple[int, ...]) -> bool:
    kept = [d for d in permutation if shape[d] != 1]
    return kept == sorted(kept)


@rule("transpose")
def transpose(it: Site) -> Value | None:
    """transpose(transpose(x)) is one transpose; one that only moves dims of size 1 is a reshape."""
    x, permutation = it.operand(0), it.attr("permutation")
    if _moves_only_ones(x.shape, permutation):
        return it.b.reshape(x, it.result.shape)
    return it.b.transpose(x, permutation) if it.defined_by(0, "transpose") else None


@rule("transpose")
def transposed_product(it: Site) -> Value | None:
    """transpose(a @ b) = transpose(b) @ transpose(a), where the product is used for nothing else.

    The weight gradient of a linear layer arrives as transpose(transpose(x) @ dy); this makes it transpose(dy) @ x, and
    the product is stored in the order in which it is used.
    """
    rank = it.operand(0).rank
    if it.attr("permutation") != (*range(rank - 2), rank - 1, rank - 2):
        return None
    product = it.defined_by(0, "matmul")
    if product is None or not product.used_once():
        return None
    a, b = product.operands()
    return it.b.matmul(it.b.swap(b), it.b.swap(a), product.result.dtype)


@rule("matmul")
def raise_linear(it: Site) -> Value | None:
    """x @ transpose(w) of 2-d x and w is linear(x, w)."""
    inner = it.defined_by(1, "transpose")
    if inner is None or it.operand(1).rank != 2:
        return None
    return it.b.linear(it.operand(0), inner.operand(0), None, it.result.dtype)


@rule("linear")
def lower_linear(it: Site) -> Value | None:
    """linear(x, transpose(u)) without bias is x @ u."""
    inner = it.defined_by(1, "transpose")
    if inner is None or it.count > 2 or it.operand(0).rank != 2:
        return None
    return it.b.matmul(it.operand(0), inner.operand(0), it.result.dtype)


@rule("broadcast")
def broadcast(it: Site) -> Value | None:
    """broadcast(broadcast(x)) is one broadcast; one that adds nothing but dims of size 1 is a reshape."""
    x, y, dims = it.operand(0), it.result, it.attr("dims")
    if x.shape == y.shape:
        return x
    if all(n == 1 for d, n in enumerate(y.shape) if d not in dims or x.shape[dims.index(d)] != n):
        return it.b.reshape(x, y.shape)
    inner = it.defined_by(0, "broadcast")
    if inner is None:
        return None
    return it.b.broadcast(inner.operand(0), y.shape, [dims[d] for d in inner.attr("dims")])


@rule("slice")
def slice_(it: Site) -> Value | None:
    """A slice of everything is x; slice(slice(x)) is one slice; slice(concat(..)) of one whole operand is that."""
    x, y = it.operand(0), it.result
    starts, limits, strides = it.attr("starts"), it.attr("limits"), it.attr("strides")
    if x.shape == y.shape and all(s == 1 for s in strides):
        return x
    inner = it.defined_by(0, "slice", "concat")
    if inner is None:
        return None
    if inner.name == "slice":
        first, step = inner.attr("starts"), inner.attr("strides")
        start = tuple(f + s * lo for f, s, lo in zip(first, step, starts, strict=True))
        stride = tuple(s * t for s, t in zip(step, strides, strict=True))
        last = zip(start, stride, y.shape, strict=True)
        limit = tuple(lo + t * (n - 1) + 1 if n else lo for lo, t, n in last)
        return it.b.slice(inner.operand(0), start, limit, stride)
    return _slice_of_concat(it, inner, starts, limits, strides)


def _slice_of_concat(it: Site, joined: Site, starts: Shape, limits: Shape, strides: Shape) -> Value | None:
    """The part of one operand, where the slice lies within it."""
    dim, offset = joined.attr("dim"), 0
    for piece in joined.operands():
        end = offset + piece.shape[dim]
        if offset <= starts[dim] and limits[dim] <= end:
            low, high = list(starts), list(limits)
            low[dim], high[dim] = starts[dim] - offset, limits[dim] - offset
            return it.b.slice(piece, tuple(low), tuple(high), strides)
        offset = end
    return None


@rule("concat")
def concat(it: Site) -> Value | None:
    """concat(x) = x; concat of all slices of x in order = x."""
    pieces = it.operands()
    if len(pieces) == 1:
        return pieces[0]
    dim, offset, whole = it.attr("dim"), 0, None
    for position, piece in enumerate(pieces):
        inner = it.defined_by(position, "slice")
        if inner is None:
            return None
        x, starts = inner.operand(0), inner.attr("starts")
        plain = all(s == 1 for s in inner.attr("strides"))
        around = all(n == m for d, (n, m) in enumerate(zip(piece.shape, x.shape, strict=True)) if d != dim)
        if not (plain and around and starts[dim] == offset) or (whole is not None and whole.ir != x.ir):
            return None
        whole, offset = x, offset + piece.shape[dim]
    assert whole is not None
    return whole if whole.shape == it.result.shape else None


@rule("pad")
def pad(it: Site) -> Value | None:
    """Padding by nothing is x."""
    return it.operand(0) if not any(it.attr("low")) and not any(it.attr("high")) else None


def _unbroadcast(it: Site, inner: Site) -> Value:
    """The broadcast's operand, reshaped so that NumPy's rule aligns it with the broadcast's result."""
    x, dims, shape = inner.operand(0), inner.attr("dims"), inner.result.shape
    sizes = [1] * len(shape)
    for axis, dim in enumerate(dims):
        sizes[dim] = x.shape[axis]
    first = min(dims, default=len(shape))  # leading dims of size 1 say nothing
    return it.b.reshape(x, tuple(sizes[first:]))


@rule(*sorted(ELEMENTWISE_OPS))
def implicit_broadcast(it: Site) -> Value | None:
    """Elementwise ops broadcast by themselves: op(broadcast(x), y) = op(x, y) if y alone gives the result's shape."""
    spread = [(i, inner) for i in range(it.count) if (inner := it.defined_by(i, "broadcast"))]
    if not spread:
        return None
    operands, shape = it.operands(), it.result.shape
    changed = False
    for position, inner in spread:
        candidate = _unbroadcast(it, inner)
        shapes = [candidate.shape if i == position else v.shape for i, v in enumerate(operands)]
        if broadcast_shapes(*shapes) == shape:
            operands[position] = candidate
            changed = True
    return it.b.create(it.name, operands, [(shape, it.result.dtype)], **it.attrs()) if changed else None
