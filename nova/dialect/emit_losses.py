"""Emitters of losses and their backward ops. `reduction` is ATen's: 0 none, 1 mean, 2 sum."""

from __future__ import annotations

from typing import Any

from nova.dialect.build import Value, is_number
from nova.dialect.emit import Emitter, NoLowering, emits
from nova.dialect.types import broadcast_shapes, numel


def _reduce(e: Emitter, loss: Value, reduction: int) -> Value:
    """A per-element loss in the wide dtype, reduced and rounded."""
    b = e.b
    if reduction:
        count = numel(loss.shape)
        loss = b.reduce("sum", loss, range(loss.rank))
        if reduction == 1:
            loss = b.op("div", loss, b.constant(count, loss.dtype))
    return b.cast(loss, e.dtype)


def _spread(e: Emitter, dy: Value, shape: tuple[int, ...], reduction: int) -> Value:
    """Each element's share of the loss's gradient, in the wide dtype."""
    dy = e.wide(dy)
    return e.b.op("div", dy, e.b.constant(numel(shape), dy.dtype)) if reduction == 1 else dy


def _difference(e: Emitter, x: Value, target: Value) -> Value:
    return e.b.op("sub", e.wide(x), e.wide(target))


@emits("mse_loss.default")
def mse_loss(e: Emitter, x: Value, target: Value, reduction: int = 1) -> Value:
    """(x - target)**2."""
    d = _difference(e, x, target)
    return _reduce(e, e.b.op("mul", d, d), reduction)


@emits("mse_loss_backward.default")
def mse_loss_backward(e: Emitter, dy: Value, x: Value, target: Value, reduction: int) -> Value:
    """2 * (x - target) * dy."""
    d = _difference(e, x, target)
    share = _spread(e, dy, d.shape, reduction)
    return e.finish(e.b.op("mul", e.b.scale(d, 2), share))


def _static(*numbers: Any) -> None:
    if not all(is_number(n) for n in numbers):
        raise NoLowering


@emits("smooth_l1_loss.default")
def smooth_l1_loss(e: Emitter, x: Value, target: Value, reduction: int = 1, beta: Any = 1.0) -> Value:
    """d*d / (2 beta) for |d| < beta, else |d| - beta / 2."""
    _static(beta)
    b, d = e.b, _difference(e, x, target)
    size, limit = b.op("abs", d), b.constant(beta, d.dtype)
    if beta == 0:
        return _reduce(e, size, reduction)
    inner = b.op("div", b.scale(b.op("mul", d, d), 0.5), limit)
    outer = b.op("sub", size, b.constant(0.5 * beta, d.dtype))
    return _reduce(e, b.where(b.op("lt", size, limit), inner, outer), reduction)


@emits("smooth_l1_loss_backward.default")
def smooth_l1_loss_backward(e: Emitter, dy: Value, x: Value, target: Value, reduction: int, beta: Any) -> Value:
    """dy * d / beta for |d| < beta, else dy * sign(d)."""
    _static(beta)
    b, d = e.b, _difference(e, x, target)
    share = _spread(e, dy, d.shape, reduction)
    slope = b.op("sign", d)
    if beta != 0:
        limit = b.constant(beta, d.dtype)
        slope = b.where(b.op("ge", b.op("abs", d), limit), slope, b.op("div", d, limit))  # NaN for NaN
    return e.finish(b.op("mul", share, slope))


@emits("huber_loss.default")
def huber_loss(e: Emitter, x: Value, target: Value, reduction: int = 1, delta: Any = 1.0) -> Value:
    """d*d / 2 for |d| < delta, else delta * (|d| - delta / 2)."""
    _static(delta)
    b, d = e.b, _difference(e, x, target)
    size, limit = b.op("abs", d), b.constant(delta, d.dtype)
    inner = b.scale(b.op("mul", d, d), 0.5)
    outer = b.op("mul", limit, b.op("sub", size, b.constant(0.5 * delta, d.dtype)))
    return _reduce(e, b.where(b.op("lt", size, limit), inner, outer), reduction)


@emits("huber_loss_backward.default")
def huber_loss_backward(e: Emitter, dy: Value, x: Value, target: Value, reduction: int, delta: Any) -> Value:
    """dy * d clamped to [-delta, delta]."""
    _static(delta)
    b, d = e.b, _difference(e, x, target)
    share = _spread(e, dy, d.shape, reduction)
    return e.finish(b.op("mul", share, b.op("hardtanh", d, lo=-delta, hi=delta)))


@emits("binary_cross_entropy.default")
def binary_cross_entropy(e: Emitter, x: Value, target: Value, weight: Value | None = None, reduction: int = 1) -> Value:
    """-(target * log x + (1 - target) * log(1 - x)), logarithms at least -100; both must lie in [0, 1]."""
    b = e.b
    x, target = (b.op("probability", e.wide(value)) for value in (x, target))
    floor = b.constant(-100, x.dtype)
    log_x = b.op("maximum", b.op("log", x), floor)
    log_not_x = b.op("maximum", b.op("log1p", b.op("neg", x)), floor)
    one = b.constant(1, x.dtype)
    loss = b.op("sub", b.op("mul", b.op("sub", target, one), log_not_x), b.op("mul", target, log_x))
    if weight is not None:
        loss = b.op("mul", loss, e.wide(weight))
    return _reduce(e, loss, reduction)


@emits("binary_cross_entropy_backward.default")
def binary_cross_entropy_backward(
    e: Emitter, dy: Value, x: Value, target: Value, weight: Value | None = None, reduction: int = 1
) -> Value:
    """dy * (x - target) / max((1 - x) * x, 1e-12)."""
    b = e.b
    share = _spread(e, dy, x.shape, reduction)
    x, target = (b.op("probability", e.wide(value)) for value in (x, target))  # the loss may be asked for by nobody
    spread = b.op("mul", b.op("sub", b.constant(1, x.dtype), x), x)
    slope = b.op("div", b.op("sub", x, target), b.op("maximum", spread, b.constant(1e-12, x.dtype)))
    result = b.op("mul", share, slope)
    if weight is not None:
        result = b.op("mul", result, e.wide(weight))
    return e.finish(result)


@emits("binary_cross_entropy_with_logits.default")
def binary_cross_entropy_with_logits(
    e: Emitter,
    x: Value,
    target: Value,
    weight: Value | None = None,
    pos_weight: Value | None = None,
    reduction: int = 1,
) -> Value:
    """(1 - target) * x - (1 + (pos_weight - 1) * target) * log(sigmoid(x))."""
    b, x, target = e.b, e.wide(x), e.wide(target)
    one = b.constant(1, x.dtype)
    log_sigmoid = b.op("log_sigmoid", x)
    if pos_weight is not None:
        factor = b.op("add", b.op("mul", b.op("sub", e.wide(pos_weight), one), target), one)
        log_sigmoid = b.op("mul", factor, log_sigmoid)
    loss = b.op("sub", b.op("mul", b.op("sub", one, target), x), log_sigmoid)
    if weight is not None:
        loss = b.op("mul", loss, e.wide(weight))
    return _reduce(e, loss, reduction)


@emits("soft_margin_loss.default")
def soft_margin_loss(e: Emitter, x: Value, target: Value, reduction: int = 1) -> Value:
    """log1p(e**(-target * x))."""
    b = e.b
    margin = b.op("neg", b.op("mul", e.wide(target), e.wide(x)))
    return _reduce(e, b.op("log1p", b.op("exp", margin)), reduction)


@emits("soft_margin_loss_backward.default")
def soft_margin_loss_backward(e: Emitter, dy: Value, x: Value, target: Value, reduction: int) -> Value:
    """-dy * target * sigmoid(-target * x)."""
    b = e.b
    share = _spread(e, dy, broadcast_shapes(x.shape, target.shape), reduction)
    x, target = e.wide(x), e.wide(target)
    p = b.op("sigmoid", b.op("neg", b.op("mul", target, x)))
    return e.finish(b.op("mul", share, b.op("neg", b.op("mul", target, p))))


# -- class indices ------------------------------------------------------------------------------------------------


def _class_dim(x: Value) -> int:
    return 1 if x.rank > 1 else 0


def _is_target(e: Emitter, x: Value, target: Value, ignore_index: int) -> Value:
    """i1 in the shape of x: the class is the target, and the target counts."""
    b, dim = e.b, _class_dim(x)
    column = b.reshape(target, (*x.shape[:dim], 1, *x.shape[dim + 1 :]))
    classes = b.iota(tuple(n if d == dim else 1 for d, n in enumerate(x.shape)), dim)
    counts = b.op("ne", column, b.constant(ignore_index, "i64"))
    return b.op("logical_and", b.op("eq", classes, column), counts)


@emits("nll_loss_forward.default", "nll_loss2d_forward.default")
def nll_loss_forward(
    e: Emitter, x: Value, target: Value, weight: Value | None, reduction: int, ignore_index: int
) -> list[Value]:
    """(loss, total weight): -weight[target] * x[target], gathered so that a bad target is an error."""
    b, dim = e.b, _class_dim(x)
    dtype = "f32" if e.outs[0].dtype in ("bf16", "f16") else e.outs[0].dtype
    counts = b.op("ne", target, b.constant(ignore_index, "i64"))
    safe = b.where(counts, target, b.constant(0, "i64"))
    column = b.reshape(safe, (*x.shape[:dim], 1, *x.shape[dim + 1 :]))
    picked = b.create("gather", [x, column], [(column.shape, x.dtype)], dim=dim, labels=True)
    loss = b.op("neg", b.cast(b.reshape(picked, target.shape), dtype))
    factor = b.constant(1, dtype)
    if weight is not None:
        factor = b.create("take", [b.cast(weight, dtype), safe], [(target.shape, dtype)])
        loss = b.op("mul", loss, factor)
    zero = b.constant(0, dtype)
    loss = b.where(counts, loss, zero)
    total = b.reduce("sum", b.where(counts, factor, zero), range(target.rank))
    if reduction:
        loss = b.reduce("sum", loss, range(loss.rank))
    if reduction == 1:
        loss = b.op("div", loss, total)
    if reduction == 0:
        total = zero
    return [e.finish(loss, 0), e.finish(total, 1)]


@emits("nll_loss_backward.default", "nll_loss2d_backward.default")
def nll_loss_backward(
    e: Emitter,
    dy: Value,
    x: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
    total: Value,
) -> Value:
    """-dy * weight[target] where the class is the target, else 0: a comparison with an index, no scatter. The weight is
    looked up, even where all are 1, so that a bad target is an error here too: nobody may ask for the loss."""
    b, dim = e.b, _class_dim(x)
    column = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
    share = b.op("neg", e.wide(dy))
    if reduction == 1:
        share = b.op("div", share, e.wide(total))
    if reduction == 0:
        share = b.reshape(share, column)
    weights = b.full((x.shape[dim],), 1, share.dtype) if weight is None else e.wide(weight)
    safe = b.where(b.op("ne", target, b.constant(ignore_index, "i64")), target, b.constant(0, "i64"))
    factor = b.create("take", [weights, safe], [(target.shape, share.dtype)])
    share = b.op("mul", share, b.reshape(factor, column))
    return e.finish(b.where(_is_target(e, x, target, ignore_index), share, b.constant(0, share.dtype)))


@emits("nova::cross_entropy.default")
def cross_entropy(
    e: Emitter,
    logits: Value,
    target: Value,
    weight: Value | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: int,
) -> list[Value]:
    """(loss, lse)."""
    _static(label_smoothing)
    statistic = "f64" if logits.dtype == "f64" else "f32"
    results = [(tuple(e.outs[0].shape), logits.dtype), (logits.shape[:1], statistic)]
    loss, lse = e.b.create(
        "sce",
        [logits, target, *([] if weight is None else [weight])],
        results,
        has_weight=weight is not None,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    return [e.finish(loss, 0), e.finish(lse, 1)]


@emits("nova::cross_entropy_backward.default")
def cross_entropy_backward(
    e: Emitter,
    dloss: Value,
    logits: Value,
    target: Value,
    weight: Value | None,
    lse: Value,
    ignore_index: int,
    label_smoothing: float,
    reduction: int,
) -> Value:
    """dlogits."""
    _static(label_smoothing)
    lse = e.b.cast(lse, "f64" if logits.dtype == "f64" else "f32")
    return e.b.create(
        "sce_backward",
        [dloss, logits, target, lse, *([] if weight is None else [weight])],
        [(logits.shape, logits.dtype)],
        has_weight=weight is not None,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
