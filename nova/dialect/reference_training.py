"""Meanings of losses, random numbers, optimizer updates and the fallback."""

from __future__ import annotations

import json
import math

import torch
from torch import Tensor

from nova.dialect.emit import decode, overload
from nova.dialect.reference import Attributes, meaning

# -- softmax cross entropy ----------------------------------------------------------------------------------------


def _class_weights(logits: Tensor, weight: tuple[Tensor, ...]) -> Tensor:
    return weight[0].to(logits.dtype) if weight else logits.new_ones(logits.shape[1])


def _rows(a: Attributes, logits: Tensor, target: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rows that count, their classes with 0 for the others, the weights of those)."""
    counts = target != a.ignore_index
    safe = torch.where(counts, target, torch.zeros_like(target))
    if safe.numel() and (int(safe.min()) < 0 or int(safe.max()) >= logits.shape[1]):
        raise IndexError(f"target out of range of {logits.shape[1]} classes")
    return counts, safe, torch.where(counts, w[safe], torch.zeros((), dtype=w.dtype))


@meaning("sce")
def _sce(a: Attributes, logits: Tensor, target: Tensor, *weight: Tensor) -> tuple[Tensor, Tensor]:
    w = _class_weights(logits, weight)
    counts, safe, row_weight = _rows(a, logits, target, w)
    lse = torch.logsumexp(logits, 1)
    s = a.label_smoothing
    zero = torch.zeros((), dtype=lse.dtype)
    terms = [(1 - s) * torch.where(counts, row_weight * (lse - logits.gather(1, safe[:, None])[:, 0]), zero)]
    if s:
        terms.append(s / logits.shape[1] * torch.where(counts, ((lse[:, None] - logits) * w).sum(1), zero))
    if a.reduction:
        terms = [term.sum() for term in terms]
    if a.reduction == 1:
        terms = [term / row_weight.sum() for term in terms]
    return torch.stack(terms).sum(0), lse


@meaning("sce_backward")
def _sce_backward(a: Attributes, dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, *weight: Tensor) -> Tensor:
    w = _class_weights(logits, weight)
    counts, safe, row_weight = _rows(a, logits, target, w)
    p = torch.exp(logits - lse[:, None])
    hit = torch.zeros_like(logits).scatter(1, safe[:, None], 1.0)
    s = a.label_smoothing
    hard, soft = dloss * (1 - s) * row_weight, dloss * s / logits.shape[1] * torch.ones_like(row_weight)
    if a.reduction == 1:
        hard, soft = hard / row_weight.sum(), soft / row_weight.sum()
    grad = hard[:, None] * (p - hit)
    if s:
        grad = grad + soft[:, None] * (p * w.sum() - w)
    return torch.where(counts[:, None], grad, torch.zeros((), dtype=grad.dtype))


# -- random numbers -----------------------------------------------------------------------------------------------


def philox_words(seed: int, stream: int, count: int) -> Tensor:
    """`count` 32-bit words (as i64) of Philox4x32-10: word i%4 of the block with counter (i//4, 0, stream, 0)."""
    mask = 0xFFFFFFFF
    index = torch.arange((count + 3) // 4)
    c0, c1 = index & mask, index >> 32
    c2, c3 = torch.full_like(index, stream & mask), torch.zeros_like(index)
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in range(10):
        # int64 wraps; the masks drop what the sign of the product smears into the high word
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        high0, high1 = (product0 >> 32) & mask, (product1 >> 32) & mask
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & mask, high0 ^ c3 ^ k1, product0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return torch.stack([c0, c1, c2, c3], 1).flatten()[:count]


def uniform_values(seed: int, stream: int, shape: tuple[int, ...]) -> Tensor:
    """f32 in [0,1) with 24 random bits."""
    return ((philox_words(seed, stream, math.prod(shape)) >> 8).float() * 2.0**-24).view(shape)


@meaning("uniform")
def _uniform(a: Attributes, seed: Tensor) -> Tensor:
    return uniform_values(int(seed), a.stream, a.shape())


@meaning("normal")
def _normal(a: Attributes, seed: Tensor) -> Tensor:
    """Box-Muller: words 0 and 1 of a block make elements 0 and 1, words 2 and 3 the others."""
    count = math.prod(a.shape())
    words = philox_words(int(seed), a.stream, (count + 3) // 4 * 4).view(-1, 2)
    radius = torch.sqrt(-2.0 * torch.log(((words[:, 0] >> 8) + 1).float() * 2.0**-24))
    angle = (2.0 * math.pi) * ((words[:, 1] >> 8).float() * 2.0**-24)
    values = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], 1)
    return values.flatten()[:count].view(a.shape())


@meaning("randint")
def _randint(a: Attributes, seed: Tensor) -> Tensor:
    words = philox_words(int(seed), a.stream, math.prod(a.shape()))
    return (((words * (a.high - a.low)) >> 32) & 0xFFFFFFFF).add(a.low).view(a.shape())


# -- optimizers ---------------------------------------------------------------------------------------------------


def _guarded(found_inf: Tensor | None, old: list[Tensor], new: list[Tensor]) -> list[Tensor]:
    if found_inf is None:
        return new
    skip = found_inf != 0
    return [torch.where(skip, before, after) for before, after in zip(old, new, strict=True)]


def _gradient(a: Attributes, p: Tensor, g: Tensor, weight_decay: Tensor | float) -> Tensor:
    g = -g if a.maximize else g
    return g + float(weight_decay) * p if float(weight_decay) else g


@meaning("sgd")
def _sgd(
    a: Attributes,
    p: Tensor,
    g: Tensor,
    lr: Tensor,
    momentum: Tensor,
    dampening: Tensor,
    weight_decay: Tensor,
    *rest: Tensor,
) -> list[Tensor]:
    optional = list(rest)
    buf = optional.pop(0) if a.has_buf else None
    first = optional.pop(0) if a.has_first else None
    found_inf = optional.pop(0) if a.has_found_inf else None
    g = _gradient(a, p, g, weight_decay)
    if buf is None:
        return _guarded(found_inf, [p], [p - float(lr) * g])
    new_buf = float(momentum) * buf + (1 - float(dampening)) * g
    if first is not None:
        new_buf = torch.where(first != 0, g, new_buf)
    step = g + float(momentum) * new_buf if a.nesterov else new_buf
    return _guarded(found_inf, [p, buf], [p - float(lr) * step, new_buf])


@meaning("adam")
def _adam(
    a: Attributes,
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    step: Tensor,
    lr: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    eps: Tensor,
    weight_decay: Tensor,
    *rest: Tensor,
) -> list[Tensor]:
    vmax = rest[0] if a.amsgrad else None
    found_inf = rest[-1] if a.has_found_inf else None
    rate, b1, b2 = float(lr), float(beta1), float(beta2)
    g = _gradient(a, p, g, 0.0 if a.decoupled else weight_decay)
    decayed = p * (1 - rate * float(weight_decay)) if a.decoupled else p
    count = step + 1
    new_m = torch.lerp(m, g, 1 - b1)
    new_v = b2 * v + (1 - b2) * g * g
    largest = new_v if vmax is None else torch.maximum(vmax, new_v)
    correction1, correction2 = 1 - b1 ** float(count), 1 - b2 ** float(count)
    denominator = largest.sqrt() / math.sqrt(correction2) + float(eps)
    new_p = decayed - rate / correction1 * (new_m / denominator)
    new, old = [new_p, new_m, new_v, count], [p, m, v, step]
    if vmax is not None:
        new, old = [*new, largest], [*old, vmax]
    return _guarded(found_inf, old, new)


@meaning("adagrad")
def _adagrad(
    a: Attributes,
    p: Tensor,
    g: Tensor,
    total: Tensor,
    step: Tensor,
    lr: Tensor,
    lr_decay: Tensor,
    eps: Tensor,
    weight_decay: Tensor,
    *rest: Tensor,
) -> list[Tensor]:
    g = _gradient(a, p, g, weight_decay)
    count = step + 1
    rate = float(lr) / (1 + (float(count) - 1) * float(lr_decay))
    new_total = total + g * g
    new_p = p - rate * g / (new_total.sqrt() + float(eps))
    return _guarded(rest[0] if a.has_found_inf else None, [p, total, step], [new_p, new_total, count])


@meaning("rmsprop")
def _rmsprop(
    a: Attributes,
    p: Tensor,
    g: Tensor,
    square_avg: Tensor,
    step: Tensor,
    lr: Tensor,
    alpha: Tensor,
    eps: Tensor,
    weight_decay: Tensor,
    momentum: Tensor,
    *rest: Tensor,
) -> list[Tensor]:
    optional = list(rest)
    average = optional.pop(0) if a.centered else None
    buf = optional.pop(0) if a.has_momentum else None
    found_inf = optional.pop(0) if a.has_found_inf else None
    g = _gradient(a, p, g, weight_decay)
    decay = float(alpha)
    squares = decay * square_avg + (1 - decay) * g * g
    old, state = [p, square_avg, step], []
    variance = squares
    if average is not None:
        new_average = torch.lerp(average, g, 1 - decay)
        variance = squares - new_average * new_average
        state.append(new_average)
        old.append(average)
    update = g / (variance.sqrt() + float(eps))
    if buf is not None:
        update = float(momentum) * buf + update
        state.append(update)
        old.append(buf)
    return _guarded(found_inf, old, [p - float(lr) * update, squares, step + 1, *state])


# -- the rest -----------------------------------------------------------------------------------------------------


@meaning("foreach_norm")
def _foreach_norm(a: Attributes, *xs: Tensor) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(x, a.ord) if x.numel() else x.new_zeros(()) for x in xs])


@meaning("bucket_ready")
def _bucket_ready(a: Attributes, *gradients: Tensor) -> list[Tensor]:
    return []


@meaning("aten_call")
def _aten_call(a: Attributes, *tensors: Tensor) -> list[Tensor]:
    template = json.loads(a.args)
    args = decode(template["args"], tensors)
    kwargs = {key: decode(value, tensors) for key, value in template["kwargs"].items()}
    made = overload(a.op)(*args, **kwargs)
    return flatten(made)


def flatten(made: object) -> list[Tensor]:
    """The tensors of an ATen result, in order, without the absent ones."""
    if isinstance(made, Tensor):
        return [made]
    if isinstance(made, (list, tuple)):
        return [t for item in made for t in flatten(item)]
    return []
