"""Meanings of constants, views, data movement and pooling."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nova.dialect.reference import Attributes, meaning
from nova.mlir import ir


@meaning("constant")
def _constant(a: Attributes) -> Tensor:
    return dense_tensor(a.value, a).to(a.dtype())


def dense_tensor(value: ir.Attribute, a: Attributes) -> Tensor:
    """The tensor of a dense attribute."""
    shape, short = a.results[0].shape, a.results[0].dtype
    if value.is_splat:
        return torch.full(shape, value.get_splat_value().value, dtype=a.dtype())
    if short in ("bf16", "f16"):
        raise NotImplementedError("dense bf16 and f16 constants are splats")
    return torch.from_numpy(np.array(value)).reshape(shape)


@meaning("iota")
def _iota(a: Attributes) -> Tensor:
    shape = a.shape()
    view = [1] * len(shape)
    view[a.dim] = -1
    return torch.arange(shape[a.dim]).view(view).expand(shape)


@meaning("reshape")
def _reshape(a: Attributes, x: Tensor) -> Tensor:
    return x.reshape(a.shape())


@meaning("transpose")
def _transpose(a: Attributes, x: Tensor) -> Tensor:
    return x.permute(a.permutation).contiguous()


@meaning("broadcast")
def _broadcast(a: Attributes, x: Tensor) -> Tensor:
    shape = a.shape()
    sizes = [1] * len(shape)
    for axis, dim in enumerate(a.dims):
        sizes[dim] = x.shape[axis]
    return x.reshape(sizes).expand(shape).contiguous()


def _slices(a: Attributes) -> tuple[slice, ...]:
    return tuple(slice(lo, hi, step) for lo, hi, step in zip(a.starts, a.limits, a.strides, strict=True))


@meaning("slice")
def _slice(a: Attributes, x: Tensor) -> Tensor:
    return x[_slices(a)].contiguous()


@meaning("slice_scatter")
def _slice_scatter(a: Attributes, base: Tensor, update: Tensor) -> Tensor:
    result = base.clone()
    result[_slices(a)] = update
    return result


@meaning("as_strided")
def _as_strided(a: Attributes, x: Tensor) -> Tensor:
    return x.contiguous().as_strided(a.size, a.stride, a.offset).contiguous()


@meaning("as_strided_scatter")
def _as_strided_scatter(a: Attributes, base: Tensor, update: Tensor) -> Tensor:
    result = base.clone(memory_format=torch.contiguous_format)
    result.as_strided(a.size, a.stride, a.offset).copy_(update)
    return result


@meaning("reverse")
def _reverse(a: Attributes, x: Tensor) -> Tensor:
    return torch.flip(x, a.dims)


@meaning("concat")
def _concat(a: Attributes, *xs: Tensor) -> Tensor:
    return torch.cat(xs, a.dim)


@meaning("pad")
def _pad(a: Attributes, x: Tensor) -> Tensor:
    amounts = [n for pair in zip(reversed(a.low), reversed(a.high), strict=True) for n in pair]
    value = a.value if x.is_floating_point() else int(a.value)
    return F.pad(x, amounts, value=value)


@meaning("gather")
def _gather(a: Attributes, x: Tensor, index: Tensor) -> Tensor:
    return torch.gather(x, a.dim, index.long())


@meaning("scatter")
def _scatter(a: Attributes, base: Tensor, index: Tensor, src: Tensor) -> Tensor:
    index = index.long()
    if a.reduce == "none":
        return torch.scatter(base, a.dim, index, src)
    if a.reduce == "add":
        return torch.scatter_add(base, a.dim, index, src)
    return torch.scatter_reduce(base, a.dim, index, src, {"mul": "prod"}.get(a.reduce, a.reduce))


def _checked(ids: Tensor, rows: int) -> Tensor:
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= rows):
        raise IndexError(f"index out of range: {int(ids.min())}..{int(ids.max())} of {rows} rows")
    return ids.long()


@meaning("take")
def _take(a: Attributes, table: Tensor, ids: Tensor) -> Tensor:
    return table[_checked(ids, table.shape[0])]


@meaning("take_backward")
def _take_backward(a: Attributes, dy: Tensor, ids: Tensor) -> Tensor:
    grad = dy.new_zeros(a.shape())
    flat = _checked(ids, a.rows).reshape(-1)
    grad.index_add_(0, flat, dy.reshape(flat.shape[0], *grad.shape[1:]))
    if a.padding_idx >= 0:
        grad[a.padding_idx] = 0
    return grad


def _indices(a: Attributes, x: Tensor, indices: tuple[Tensor, ...]) -> list[Tensor | None]:
    listed: list[Tensor | None] = [None] * x.dim()
    for dim, index in zip(a.dims, indices, strict=True):
        listed[dim] = index.long()
    return listed


@meaning("index")
def _index(a: Attributes, x: Tensor, *indices: Tensor) -> Tensor:
    return torch.ops.aten.index(x, _indices(a, x, indices))


@meaning("index_put")
def _index_put(a: Attributes, x: Tensor, values: Tensor, *indices: Tensor) -> Tensor:
    if not a.wrap and any(int(i.min()) < 0 for i in indices if i.numel()):
        raise IndexError("a negative index")
    return torch.ops.aten.index_put(x, _indices(a, x, indices), values, a.accumulate)


@meaning("cumsum")
def _cumsum(a: Attributes, x: Tensor) -> Tensor:
    return torch.cumsum(x, a.dim, dtype=x.dtype)


@meaning("cumprod")
def _cumprod(a: Attributes, x: Tensor) -> Tensor:
    return torch.cumprod(x, a.dim, dtype=x.dtype)


@meaning("max_pool2d")
def _max_pool2d(a: Attributes, x: Tensor) -> tuple[Tensor, Tensor]:
    return F.max_pool2d(x, a.kernel, a.stride, a.padding, a.dilation, a.ceil_mode, return_indices=True)


@meaning("max_pool2d_backward")
def _max_pool2d_backward(a: Attributes, dy: Tensor, indices: Tensor) -> Tensor:
    n, c, h, w = a.shape()
    dx = dy.new_zeros(n, c, h * w)
    dx.scatter_add_(2, indices.reshape(n, c, -1), dy.reshape(n, c, -1))
    return dx.view(n, c, h, w)
