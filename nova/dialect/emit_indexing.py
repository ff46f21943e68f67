"""Emitters of indexing: embeddings, gathers, scatters, advanced indexing, pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nova.dialect.build import Value, is_number
from nova.dialect.emit import Emitter, NoLowering, emits
from nova.dialect.types import numel

# -- look-ups in dim 0 --------------------------------------------------------------------------------------------


def _take(e: Emitter, table: Value, ids: Value) -> Value:
    return e.b.create("take", [table, ids], [(ids.shape + table.shape[1:], table.dtype)])


@emits("embedding.default")
def embedding(
    e: Emitter, weight: Value, ids: Value, padding_idx: int = -1, by_frequency: bool = False, sparse: bool = False
) -> Value:
    """weight[ids]."""
    return _take(e, weight, ids)


@emits("embedding_dense_backward.default")
def embedding_dense_backward(
    e: Emitter, dy: Value, ids: Value, rows: int, padding_idx: int, by_frequency: bool
) -> Value:
    """Rows of dy summed by id."""
    if by_frequency:
        raise NoLowering
    padding = padding_idx if 0 <= padding_idx < rows else -1
    return e.b.create(
        "take_backward", [dy, ids], [((rows, *dy.shape[ids.rank :]), dy.dtype)], rows=rows, padding_idx=padding
    )


@emits("index_select.default")
def index_select(e: Emitter, x: Value, dim: int, ids: Value) -> Value:
    """x indexed along one dim."""
    if x.rank == 0:
        return x
    dim %= x.rank
    ids = e.b.reshape(ids, (numel(ids.shape),))
    return _take(e, x, ids) if dim == 0 else _index(e, x, [ids], [dim])


# -- advanced indexing --------------------------------------------------------------------------------------------


def _index(e: Emitter, x: Value, indices: Sequence[Value], dims: Sequence[int]) -> Value:
    return e.b.create("index", [x, *indices], [(e.shape, x.dtype)], dims=dims)


def _split_indices(indices: Sequence[Value | None]) -> tuple[list[Value], list[int]]:
    """The index tensors and their dims; masks have results of unknown size and stay with PyTorch."""
    present = [(i, index) for i, index in enumerate(indices) if index is not None]
    if not present or any(index.dtype not in ("i64", "i32") for _, index in present):
        raise NoLowering
    return [index for _, index in present], [i for i, _ in present]


@emits("index.Tensor", "_unsafe_index.Tensor")
def index(e: Emitter, x: Value, indices: Sequence[Value | None]) -> Value:
    """x[indices]."""
    tensors, dims = _split_indices(indices)
    return _index(e, x, tensors, dims)


@emits("index_put.default", "_unsafe_index_put.default")
def index_put(e: Emitter, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False) -> Value:
    """x with x[indices] replaced or increased."""
    values = e.b.cast(values, x.dtype)
    masks = [i for i in indices if i is not None]
    if len(indices) == len(masks) == 1 and masks[0].dtype == "bool" and values.rank == 0 and not accumulate:
        mask = masks[0]
        return e.b.where(e.b.reshape(mask, mask.shape + (1,) * (x.rank - mask.rank)), values, x)
    tensors, dims = _split_indices(indices)
    return _index_put(e, x, tensors, dims, values, accumulate, wrap=True)


def _index_put(
    e: Emitter, x: Value, indices: Sequence[Value], dims: Sequence[int], values: Value, accumulate: bool, wrap: bool
) -> Value:
    operands = [x, values, *indices]
    return e.b.create("index_put", operands, [(x.shape, x.dtype)], dims=dims, accumulate=accumulate, wrap=wrap)


@emits("index_add.default")
def index_add(e: Emitter, x: Value, dim: int, ids: Value, source: Value, *, alpha: Any = 1) -> Value:
    """x with alpha * source added at indices of one dim."""
    if x.rank == 0:
        raise NoLowering
    source = e.b.cast(source, x.dtype)
    if not (is_number(alpha) and alpha == 1):
        source = e.b.op("mul", source, e.value(alpha, x.dtype))
    return _put_rows(e, x, dim % x.rank, ids, source, accumulate=True)


@emits("index_copy.default")
def index_copy(e: Emitter, x: Value, dim: int, ids: Value, source: Value) -> Value:
    """x with indices of one dim replaced by source."""
    if x.rank == 0:
        raise NoLowering
    return _put_rows(e, x, dim % x.rank, ids, source, accumulate=False)


@emits("index_fill.int_Scalar", "index_fill.int_Tensor")
def index_fill(e: Emitter, x: Value, dim: int, ids: Value, value: Any) -> Value:
    """x with indices of one dim filled."""
    if x.rank == 0:
        raise NoLowering
    return _put_rows(e, x, dim % x.rank, ids, e.value(value, x.dtype), accumulate=False, wrap=True)


def _put_rows(
    e: Emitter, x: Value, dim: int, ids: Value, source: Value, *, accumulate: bool, wrap: bool = False
) -> Value:
    ids = e.b.reshape(ids, (numel(ids.shape),))
    return _index_put(e, x, [ids], [dim], source, accumulate, wrap)


# -- gather and scatter -------------------------------------------------------------------------------------------


@emits("gather.default")
def gather(e: Emitter, x: Value, dim: int, ids: Value, *, sparse_grad: bool = False) -> Value:
    """torch.gather."""
    if x.rank == 0 or ids.rank == 0:
        raise NoLowering
    return e.b.create("gather", [x, ids], [(ids.shape, x.dtype)], dim=dim % x.rank, labels=False)


@emits("scatter.src", "scatter.value")
def scatter(e: Emitter, x: Value, dim: int, ids: Value, source: Any) -> Value:
    """torch.scatter: the last of equal indices stays."""
    return _scatter(e, x, dim, ids, source, "none")


@emits("scatter_add.default")
def scatter_add(e: Emitter, x: Value, dim: int, ids: Value, source: Value) -> Value:
    """torch.scatter_add."""
    return _scatter(e, x, dim, ids, source, "add")


@emits("scatter.reduce", "scatter.value_reduce")
def scatter_with(e: Emitter, x: Value, dim: int, ids: Value, source: Any, *, reduce: str) -> Value:
    """torch.scatter with reduce="add" or "multiply"."""
    return _scatter(e, x, dim, ids, source, {"add": "add", "multiply": "mul"}[reduce])


@emits("scatter_reduce.two")
def scatter_reduce(
    e: Emitter, x: Value, dim: int, ids: Value, source: Value, reduce: str, *, include_self: bool = True
) -> Value:
    """torch.scatter_reduce where the base takes part."""
    names = {"sum": "add", "prod": "mul", "amax": "amax", "amin": "amin"}
    if not include_self or reduce not in names:
        raise NoLowering
    return _scatter(e, x, dim, ids, source, names[reduce])


def _scatter(e: Emitter, x: Value, dim: int, ids: Value, source: Any, reduce: str) -> Value:
    if x.rank == 0 or ids.rank == 0:
        raise NoLowering
    if is_number(source) or source.rank == 0:
        source = e.b.expand(e.value(source, x.dtype), ids.shape)
    source = e.b.slice(source, (0,) * ids.rank, ids.shape)
    return e.b.create("scatter", [x, ids, source], [(x.shape, x.dtype)], dim=dim % x.rank, reduce=reduce)


@emits("masked_scatter.default", "masked_select.default", "nonzero.default")
def masked(e: Emitter, *_: Any, **__: Any) -> Value:
    """Sizes or positions depend on values: left to PyTorch."""
    raise NoLowering


@emits("one_hot.default")
def one_hot(e: Emitter, ids: Value, classes: int = -1) -> Value:
    """1 where the class is the id."""
    shape = e.shape
    columns = e.b.iota((1,) * ids.rank + (shape[-1],), ids.rank)
    return e.b.cast(e.b.op("eq", e.b.reshape(ids, (*ids.shape, 1)), columns), e.dtype)
