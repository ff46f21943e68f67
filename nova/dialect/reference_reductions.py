"""Meanings of reductions, softmaxes and normalisations."""

from __future__ import annotations

import torch
from torch import Tensor

from nova.dialect.reference import Attributes, meaning


@meaning("reduce_sum")
def _reduce_sum(a: Attributes, x: Tensor) -> Tensor:
    return torch.sum(x, a.dims, keepdim=a.keepdim, dtype=x.dtype) if a.dims else x


@meaning("reduce_prod")
def _reduce_prod(a: Attributes, x: Tensor) -> Tensor:
    for dim in reversed(a.dims):
        x = torch.prod(x, dim, keepdim=a.keepdim, dtype=x.dtype)
    return x


@meaning("reduce_max", "reduce_min")
def _reduce_extreme(a: Attributes, x: Tensor) -> Tensor:
    function = torch.amax if a.name.endswith("max") else torch.amin
    return function(x, a.dims, keepdim=a.keepdim)


@meaning("reduce_any", "reduce_all")
def _reduce_logical(a: Attributes, x: Tensor) -> Tensor:
    function = torch.any if a.name.endswith("any") else torch.all
    for dim in reversed(a.dims):
        x = function(x, dim, keepdim=a.keepdim)
    return x


@meaning("argmax", "argmin")
def _arg(a: Attributes, x: Tensor) -> Tensor:
    function = torch.argmax if a.name.endswith("max") else torch.argmin
    return function(x.byte() if x.dtype == torch.bool else x, a.dim, keepdim=a.keepdim)


@meaning("softmax")
def _softmax(a: Attributes, x: Tensor) -> Tensor:
    return torch.softmax(x, a.dim)


@meaning("log_softmax")
def _log_softmax(a: Attributes, x: Tensor) -> Tensor:
    return torch.log_softmax(x, a.dim)


@meaning("softmax_backward")
def _softmax_backward(a: Attributes, dy: Tensor, y: Tensor) -> Tensor:
    return (dy - (dy * y).sum(a.dim, keepdim=True)) * y


@meaning("log_softmax_backward")
def _log_softmax_backward(a: Attributes, dy: Tensor, y: Tensor) -> Tensor:
    return dy - torch.exp(y) * dy.sum(a.dim, keepdim=True)


@meaning("layer_norm")
def _layer_norm(a: Attributes, x: Tensor, *params: Tensor) -> tuple[Tensor, ...]:
    dims = tuple(range(x.dim() - a.axes, x.dim()))
    mean = x.mean(dims, keepdim=True)
    rstd = torch.rsqrt((x - mean).square().mean(dims, keepdim=True) + a.eps)
    y = (x - mean) * rstd
    if params:
        y = y * params[0]
    if len(params) == 2:
        y = y + params[1]
    return y, mean, rstd


@meaning("layer_norm_backward")
def _layer_norm_backward(
    a: Attributes, dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, *weight: Tensor
) -> tuple[Tensor, ...]:
    dims = tuple(range(x.dim() - a.axes, x.dim()))
    h = (x - mean) * rstd
    g = dy * weight[0] if weight else dy
    dx = rstd * (g - g.mean(dims, keepdim=True) - h * (g * h).mean(dims, keepdim=True))
    if not weight:
        return (dx,)
    lead = tuple(range(x.dim() - a.axes))
    return (dx, (dy * h).sum(lead), dy.sum(lead)) if lead else (dx, dy * h, dy)


def _per_channel(statistic: Tensor, x: Tensor) -> Tensor:
    return statistic.view(-1, *[1] * (x.dim() - 2))


@meaning("batch_norm")
def _batch_norm(a: Attributes, x: Tensor, *params: Tensor) -> tuple[Tensor, ...]:
    dims = [d for d in range(x.dim()) if d != 1]
    mean = x.mean(dims)
    var = (x - _per_channel(mean, x)).square().mean(dims)
    rstd = torch.rsqrt(var + a.eps)
    y = (x - _per_channel(mean, x)) * _per_channel(rstd, x)
    if params:
        y = y * _per_channel(params[0], x)
    if len(params) == 2:
        y = y + _per_channel(params[1], x)
    return y, mean, var, rstd


@meaning("batch_norm_backward")
def _batch_norm_backward(
    a: Attributes, dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, *weight: Tensor
) -> tuple[Tensor, ...]:
    dims = [d for d in range(x.dim()) if d != 1]
    count = x.numel() // max(x.shape[1], 1)
    h = (x - _per_channel(mean, x)) * _per_channel(rstd, x)
    dbias, dweight = dy.sum(dims), (dy * h).sum(dims)
    factor = rstd * weight[0] if weight else rstd
    centred = dy - _per_channel(dbias / count, x) - h * _per_channel(dweight / count, x)
    return _per_channel(factor, x) * centred, dweight, dbias
