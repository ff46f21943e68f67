"""Emitters of layer, batch and group normalisation and their backward ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nova.dialect.build import Value, mean_divisor
from nova.dialect.emit import Emitter, emits
from nova.dialect.reductions import statistics_dtype
from nova.dialect.types import Shape, numel


def _leading_statistic(x: Value, axes: int) -> tuple[Shape, str]:
    return x.shape[: x.rank - axes] + (1,) * axes, statistics_dtype(x.dtype)


def _layer_norm(e: Emitter, x: Value, axes: int, params: Sequence[Value], eps: float) -> list[Value]:
    statistic = _leading_statistic(x, axes)
    results = [(x.shape, x.dtype), statistic, statistic]
    return e.b.create("layer_norm", [x, *params], results, axes=axes, eps=eps)


@emits("native_layer_norm.default")
def native_layer_norm(
    e: Emitter, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, eps: float
) -> list[Value]:
    """(y, mean, rstd)."""
    if bias is not None and weight is None:
        weight = e.b.full(tuple(shape), 1, bias.dtype)
    params = [p for p in (weight, bias) if p is not None]
    y, mean, rstd = _layer_norm(e, x, len(shape), params, eps)
    return [e.finish(y, 0), e.finish(mean, 1), e.finish(rstd, 2)]


@emits("native_layer_norm_backward.default")
def native_layer_norm_backward(
    e: Emitter,
    dy: Value,
    x: Value,
    shape: Sequence[int],
    mean: Value,
    rstd: Value,
    weight: Value | None,
    bias: Value | None,
    mask: Sequence[bool],
) -> list[Value | None]:
    """(dx, dweight, dbias); None where the mask says so."""
    axes = len(shape)
    if bias is not None and weight is None:
        weight = e.b.full(tuple(shape), 1, bias.dtype)
    statistic_shape, statistic_dtype = _leading_statistic(x, axes)
    mean, rstd = (e.b.reshape(e.b.cast(s, statistic_dtype), statistic_shape) for s in (mean, rstd))
    dy = e.b.cast(dy, x.dtype)
    results = [(x.shape, x.dtype)]
    if weight is not None:
        results += [(tuple(shape), weight.dtype)] * 2
    operands = [dy, x, mean, rstd, *([weight] if weight is not None else [])]
    made = e.b.create("layer_norm_backward", operands, results, axes=axes)
    grads = made if isinstance(made, list) else [made, None, None]
    return _masked(e, grads, mask)


def _masked(e: Emitter, grads: Sequence[Value | None], mask: Sequence[bool]) -> list[Value | None]:
    return [
        e.finish(grad, i) if wanted and grad is not None and e.outs[i] is not None else None
        for i, (grad, wanted) in enumerate(zip(grads, mask, strict=True))
    ]


# -- batch norm ---------------------------------------------------------------------------------------------------


def _per_channel(e: Emitter, statistic: Value, x: Value) -> Value:
    """[C] as [C,1,..], which broadcasts over [N,C,..]."""
    return e.b.reshape(statistic, (statistic.shape[0],) + (1,) * (x.rank - 2))


def _others(x: Value) -> tuple[int, ...]:
    return tuple(d for d in range(x.rank) if d != 1)


def _train(e: Emitter, x: Value, weight: Value | None, bias: Value | None, eps: float) -> list[Value]:
    if bias is not None and weight is None:
        weight = e.b.full(x.shape[1:2], 1, bias.dtype)
    params = [p for p in (weight, bias) if p is not None]
    statistic = (x.shape[1:2], statistics_dtype(x.dtype))
    return e.b.create("batch_norm", [x, *params], [(x.shape, x.dtype), *[statistic] * 3], eps=eps)


def _running(e: Emitter, old: Value, new: Value, momentum: Any) -> Value:
    """(1 - momentum) * old + momentum * new, in old's dtype."""
    b = e.b
    momentum = e.value(momentum, new.dtype)
    kept = b.op("mul", b.op("sub", b.constant(1, new.dtype), momentum), b.cast(old, new.dtype))
    return b.cast(b.op("add", kept, b.op("mul", momentum, new)), old.dtype)


def _evaluate(
    e: Emitter, x: Value, params: tuple[Value | None, Value | None], mean: Value, var: Value, eps: float
) -> Value:
    """Batch norm with fixed statistics: x * (w / sqrt(var + eps)) + (b - mean * that)."""
    b, dtype = e.b, statistics_dtype(x.dtype)
    weight, bias = params
    mean = b.cast(mean, dtype)
    alpha = b.op("rsqrt", b.op("add", b.cast(var, dtype), b.constant(eps, dtype)))
    if weight is not None:
        alpha = b.op("mul", alpha, b.cast(weight, dtype))
    beta = b.op("neg", b.op("mul", mean, alpha))
    if bias is not None:
        beta = b.op("add", b.cast(bias, dtype), beta)
    scaled = b.op("mul", b.cast(x, dtype), _per_channel(e, alpha, x))
    return b.cast(b.op("add", scaled, _per_channel(e, beta, x)), x.dtype)


def _training_outputs(
    e: Emitter, x: Value, made: list[Value], running: tuple[Value | None, Value | None], momentum: Any
) -> list[Value | None]:
    """Running mean and variance (unbiased) after this batch."""
    mean, var = made[1], made[2]
    count = mean_divisor(x.shape, _others(x))
    unbiased = (
        e.b.scale(var, count / max(count - 1, 1)) if count > 1 else e.b.op("div", var, e.b.constant(0, var.dtype))
    )
    news = (mean, unbiased)
    return [None if old is None else _running(e, old, new, momentum) for old, new in zip(running, news, strict=True)]


@emits("_native_batch_norm_legit_functional.default")
def batch_norm_functional(
    e: Emitter,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: Any,
    eps: float,
) -> list[Value | None]:
    """(y, mean, rstd, running_mean', running_var')."""
    running = (running_mean, running_var)
    if not training:
        y = _evaluate(e, x, (weight, bias), running_mean, running_var, eps)
        return [y, *_empty_statistics(e), *running]
    made = _train(e, x, weight, bias, eps)
    updated = _training_outputs(e, x, made, running, momentum)
    return [e.finish(made[0], 0), e.finish(made[1], 1), e.finish(made[3], 2), *updated]


def _empty_statistics(e: Emitter) -> list[Value]:
    return [e.b.full(tuple(t.shape), 0, t.dtype) for t in e.outs[1:3]]


@emits("native_batch_norm.default", "_native_batch_norm_legit.default", "cudnn_batch_norm.default")
def native_batch_norm(
    e: Emitter,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    training: bool,
    momentum: Any,
    eps: float,
) -> list[Value | None]:
    """(y, mean, rstd), with running statistics unchanged: capture records updates of them as separate outputs."""
    if not training and running_mean is not None and running_var is not None:
        y = _evaluate(e, x, (weight, bias), running_mean, running_var, eps)
        return [y, *_empty_statistics(e)]
    made = _train(e, x, weight, bias, eps)
    return [e.finish(made[0], 0), e.finish(made[1], 1), e.finish(made[3], 2)]


@emits("_native_batch_norm_legit_no_training.default")
def batch_norm_no_training(
    e: Emitter,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: Any,
    eps: float,
) -> list[Value | None]:
    """(y, two empty tensors) with fixed statistics."""
    return [_evaluate(e, x, (weight, bias), running_mean, running_var, eps), *_empty_statistics(e)]


@emits("_native_batch_norm_legit.no_stats")
def batch_norm_no_stats(
    e: Emitter, x: Value, weight: Value | None, bias: Value | None, training: bool, momentum: Any, eps: float
) -> list[Value | None]:
    """(y, mean, rstd) of a batch norm that keeps no statistics."""
    made = _train(e, x, weight, bias, eps)
    return [e.finish(made[0], 0), e.finish(made[1], 1), e.finish(made[3], 2)]


@emits("native_batch_norm_backward.default")
def native_batch_norm_backward(
    e: Emitter,
    dy: Value,
    x: Value,
    weight: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    mean: Value | None,
    rstd: Value | None,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> list[Value | None]:
    """(dx, dweight, dbias)."""
    b, dtype = e.b, statistics_dtype(x.dtype)
    dy = b.cast(dy, x.dtype)
    if train:
        assert mean is not None and rstd is not None
        mean, rstd = b.cast(mean, dtype), b.cast(rstd, dtype)
        param = (x.shape[1:2], dtype if weight is None else weight.dtype)
        operands = [dy, x, mean, rstd, *([weight] if weight is not None else [])]
        return _masked(e, b.create("batch_norm_backward", operands, [(x.shape, x.dtype), param, param]), mask)
    assert running_mean is not None and running_var is not None
    rstd = b.op("rsqrt", b.op("add", b.cast(running_var, dtype), b.constant(eps, dtype)))
    wide, wide_x = b.cast(dy, dtype), b.cast(x, dtype)
    slope = rstd if weight is None else b.op("mul", rstd, b.cast(weight, dtype))
    dx = b.op("mul", wide, _per_channel(e, slope, x))
    centred = b.op("sub", wide_x, _per_channel(e, b.cast(running_mean, dtype), x))
    dweight = b.op("mul", b.reduce("sum", b.op("mul", wide, centred), _others(x)), rstd)
    return _masked(e, [dx, dweight, b.reduce("sum", wide, _others(x))], mask)


# -- group norm ---------------------------------------------------------------------------------------------------


@emits("native_group_norm.default")
def native_group_norm(
    e: Emitter,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    n: int,
    channels: int,
    area: int,
    groups: int,
    eps: float,
) -> list[Value]:
    """Layer norm of each group without parameters, then a scale and shift a channel."""
    b = e.b
    wide = b.cast(x, statistics_dtype(x.dtype))
    rows = b.reshape(wide, (n, groups, numel(x.shape) // max(n * groups, 1)))
    y, mean, rstd = _layer_norm(e, rows, 1, [], eps)
    y = b.reshape(y, x.shape)
    for name, param in (("mul", weight), ("add", bias)):
        if param is not None:
            y = b.op(name, y, _per_channel(e, b.cast(param, y.dtype), x))
    return [e.finish(y, 0), e.finish(mean, 1), e.finish(rstd, 2)]


@emits("native_group_norm_backward.default")
def native_group_norm_backward(
    e: Emitter,
    dy: Value,
    x: Value,
    mean: Value,
    rstd: Value,
    weight: Value | None,
    n: int,
    channels: int,
    area: int,
    groups: int,
    mask: Sequence[bool],
) -> list[Value | None]:
    """Layer norm's backward of each group for dx; sums over everything but the channel for the parameters."""
    b, dtype = e.b, statistics_dtype(x.dtype)
    wide_dy, wide_x = b.cast(dy, dtype), b.cast(x, dtype)
    rows = (n, groups, numel(x.shape) // max(n * groups, 1))
    mean, rstd = (b.reshape(b.cast(s, dtype), (n, groups, 1)) for s in (mean, rstd))
    scaled = wide_dy if weight is None else b.op("mul", wide_dy, _per_channel(e, b.cast(weight, dtype), x))
    grouped = b.reshape(wide_x, rows)
    dx = b.create("layer_norm_backward", [b.reshape(scaled, rows), grouped, mean, rstd], [(rows, dtype)], axes=1)
    normal = b.reshape(b.op("mul", b.op("sub", grouped, mean), rstd), x.shape)
    dweight = b.reduce("sum", b.op("mul", wide_dy, normal), _others(x))
    return _masked(e, [dx, dweight, b.reduce("sum", wide_dy, _others(x))], mask)
