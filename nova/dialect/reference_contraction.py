"""Meanings of contractions, attention included."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nova.dialect.reference import Attributes, meaning
from nova.dialect.reference_training import uniform_values


@meaning("matmul")
def _matmul(a: Attributes, x: Tensor, y: Tensor) -> Tensor:
    return torch.matmul(x, y)


@meaning("linear")
def _linear(a: Attributes, x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight, *(b.to(x.dtype) for b in bias))


def _convolution_options(a: Attributes) -> tuple:
    return a.stride, a.padding, a.dilation, a.transposed, a.output_padding, a.groups


@meaning("convolution")
def _convolution(a: Attributes, x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.aten.convolution(x, weight, None, *_convolution_options(a))


def _convolution_backward(a: Attributes, dy: Tensor, x: Tensor, weight: Tensor, which: int) -> Tensor:
    mask = [which == 0, which == 1, False]
    return torch.ops.aten.convolution_backward(dy, x, weight, None, *_convolution_options(a), mask)[which]


@meaning("convolution_backward_data")
def _convolution_backward_data(a: Attributes, dy: Tensor, weight: Tensor) -> Tensor:
    return _convolution_backward(a, dy, dy.new_zeros(a.shape()), weight, 0)


@meaning("convolution_backward_weight")
def _convolution_backward_weight(a: Attributes, dy: Tensor, x: Tensor) -> Tensor:
    return _convolution_backward(a, dy, x, x.new_zeros(a.shape()), 1)


# -- attention ----------------------------------------------------------------------------------------------------


def _expanded(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)


def _scores(a: Attributes, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled, masked scores [B,H,T,S]; -inf where a key is hidden."""
    scores = torch.matmul(q, _expanded(k, q.shape[1]).transpose(-1, -2)) * a.scale
    if a.causal:
        rows, keys = scores.shape[-2:]
        hidden = torch.arange(keys) > torch.arange(rows)[:, None]
        scores = scores.masked_fill(hidden, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """e**(scores - lse); rows that see no key (lse = -inf) are 0."""
    shift = torch.where(torch.isinf(lse) & (lse < 0), torch.zeros_like(lse), lse)
    return torch.exp(scores - shift.unsqueeze(-1))


def _dropout(a: Attributes, seed: Tensor | None, like: Tensor) -> Tensor | float:
    if seed is None or a.dropout_p == 0:
        return 1.0
    if a.dropout_p >= 1:
        return torch.zeros_like(like)
    keep = uniform_values(int(seed), a.stream, tuple(like.shape)) >= a.dropout_p
    return keep.to(like.dtype) / (1 - a.dropout_p)


def _optional(a: Attributes, rest: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
    return (rest[0] if a.has_mask else None, rest[-1] if a.has_seed else None)


@meaning("attention")
def _attention(a: Attributes, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    mask, seed = _optional(a, rest)
    scores = _scores(a, q, k, mask)
    lse = torch.logsumexp(scores, -1)
    p = _probabilities(scores, lse)
    return torch.matmul(p * _dropout(a, seed, p), _expanded(v, q.shape[1])), lse


@meaning("attention_backward")
def _attention_backward(
    a: Attributes, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Tensor
) -> tuple[Tensor, ...]:
    mask, seed = _optional(a, rest)
    heads = q.shape[1]
    p = _probabilities(_scores(a, q, k, mask), lse)
    keep = _dropout(a, seed, p)
    dv = torch.matmul((p * keep).transpose(-1, -2), dout)
    dp = torch.matmul(dout, _expanded(v, heads).transpose(-1, -2)) * keep
    ds = p * (dp - (dout * out).sum(-1, keepdim=True))
    dq = torch.matmul(ds, _expanded(k, heads)) * a.scale
    dk = torch.matmul(ds.transpose(-1, -2), q) * a.scale
    grads = (dq, _summed(dk, k), _summed(dv, v))
    if not a.mask_grad:
        return grads
    assert mask is not None
    return (*grads, ds.sum_to_size(mask.shape))


def _summed(grad: Tensor, like: Tensor) -> Tensor:
    """Gradients of the query heads that share a key head, added up."""
    batch, key_heads = like.shape[:2]
    return grad.view(batch, key_heads, -1, *grad.shape[2:]).sum(2)
