"""Emitters of random numbers, optimizer updates and gradient scaling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nova.dialect.build import Value, is_number
from nova.dialect.emit import Emitter, NoLowering, emits


def _present(*values: Value | None) -> list[Value]:
    return [v for v in values if v is not None]


def _like(*values: Value | None) -> list[tuple[tuple[int, ...], str]]:
    return [(v.shape, v.dtype) for v in values if v is not None]


def _typed(name: str, operands: Sequence[Value], results: list[tuple[tuple[int, ...], str]], e: Emitter, **attrs: Any):
    """The op's results as a list, also if there is only one."""
    made = e.b.create(name, operands, results, **attrs)
    return made if isinstance(made, list) else [made]


# -- random numbers -----------------------------------------------------------------------------------------------


@emits("nova::uniform.default")
def uniform(e: Emitter, seed: Value, stream: int, shape: Sequence[int]) -> Value:
    """Uniform on [0,1)."""
    return e.b.create("uniform", [seed], [(tuple(shape), e.dtype)], stream=stream)


@emits("nova::normal.default")
def normal(e: Emitter, seed: Value, stream: int, shape: Sequence[int]) -> Value:
    """Standard normal."""
    return e.b.create("normal", [seed], [(tuple(shape), e.dtype)], stream=stream)


@emits("nova::randint.default")
def randint(e: Emitter, seed: Value, stream: int, low: int, high: int, shape: Sequence[int]) -> Value:
    """Integers in [low, high); ranges over 2**32 take two words an element and stay with PyTorch."""
    if high - low > 1 << 32:
        raise NoLowering
    return e.b.create("randint", [seed], [(tuple(shape), e.dtype)], stream=stream, low=low, high=high)


# -- optimizers ---------------------------------------------------------------------------------------------------


def _scalars(e: Emitter, *values: Any) -> list[Value]:
    return [e.b.constant(float(v), "f64") if is_number(v) else v for v in values]


@emits("nova::sgd.default")
def sgd(
    e: Emitter,
    p: Value,
    g: Value,
    buf: Value | None,
    step: Value | None,
    lr: Any,
    momentum: Any,
    dampening: Any,
    weight_decay: Any,
    *,
    nesterov: bool,
    maximize: bool,
    found_inf: Value | None = None,
    first: Value | None = None,
) -> list[Value | None]:
    """(p', buf')."""
    made = _typed(
        "sgd",
        [
            p,
            e.b.cast(g, p.dtype),
            *_scalars(e, lr, momentum, dampening, weight_decay),
            *_present(buf, first, found_inf),
        ],
        _like(p, buf),
        e,
        nesterov=nesterov,
        maximize=maximize,
        has_buf=buf is not None,
        has_first=first is not None,
        has_found_inf=found_inf is not None,
    )
    return [*made, None][:2]


@emits("nova::adam.default")
def adam(
    e: Emitter,
    p: Value,
    g: Value,
    m: Value,
    v: Value,
    vmax: Value | None,
    step: Value,
    lr: Any,
    beta1: Any,
    beta2: Any,
    eps: Any,
    weight_decay: Any,
    *,
    decoupled: bool,
    amsgrad: bool,
    maximize: bool,
    found_inf: Value | None = None,
) -> list[Value | None]:
    """(p', m', v', vmax', step')."""
    largest = vmax if amsgrad else None
    made = _typed(
        "adam",
        [
            *(p, e.b.cast(g, p.dtype), m, v, step),
            *_scalars(e, lr, beta1, beta2, eps, weight_decay),
            *_present(largest, found_inf),
        ],
        _like(p, m, v, step, largest),
        e,
        decoupled=decoupled,
        amsgrad=amsgrad,
        maximize=maximize,
        has_found_inf=found_inf is not None,
    )
    return [*made[:3], made[4] if amsgrad else None, made[3]]


@emits("nova::adagrad.default")
def adagrad(
    e: Emitter,
    p: Value,
    g: Value,
    total: Value,
    step: Value,
    lr: Any,
    lr_decay: Any,
    eps: Any,
    weight_decay: Any,
    *,
    maximize: bool,
    found_inf: Value | None = None,
) -> list[Value]:
    """(p', sum', step')."""
    return _typed(
        "adagrad",
        [p, e.b.cast(g, p.dtype), total, step, *_scalars(e, lr, lr_decay, eps, weight_decay), *_present(found_inf)],
        _like(p, total, step),
        e,
        maximize=maximize,
        has_found_inf=found_inf is not None,
    )


@emits("nova::rmsprop.default")
def rmsprop(
    e: Emitter,
    p: Value,
    g: Value,
    square_avg: Value,
    grad_avg: Value | None,
    buf: Value | None,
    step: Value,
    lr: Any,
    alpha: Any,
    eps: Any,
    momentum: Any,
    weight_decay: Any,
    *,
    centered: bool,
    maximize: bool,
    found_inf: Value | None = None,
) -> list[Value | None]:
    """(p', square_avg', grad_avg', buf', step')."""
    average = grad_avg if centered else None
    made = _typed(
        "rmsprop",
        [
            *(p, e.b.cast(g, p.dtype), square_avg, step),
            *_scalars(e, lr, alpha, eps, weight_decay, momentum),
            *_present(average, buf, found_inf),
        ],
        _like(p, square_avg, step, average, buf),
        e,
        centered=centered,
        has_momentum=buf is not None,
        maximize=maximize,
        has_found_inf=found_inf is not None,
    )
    rest = iter(made[3:])
    return [made[0], made[1], next(rest) if centered else None, next(rest) if buf is not None else None, made[2]]


# -- gradient clipping and scaling --------------------------------------------------------------------------------


@emits("nova::foreach_norm.default")
def foreach_norm(e: Emitter, xs: Sequence[Value], order: float) -> Value:
    """One norm a tensor."""
    if order not in (1.0, 2.0, float("inf")):
        raise NoLowering
    return e.b.create("foreach_norm", xs, [((len(xs),), e.dtype)], ord=order)


@emits("_amp_foreach_non_finite_check_and_unscale.default")
def amp_unscale(e: Emitter, xs: Sequence[Value], found_inf: Value, inverse_scale: Value) -> list[Any]:
    """(gradients * inverse scale, found_inf or 1 if any gradient is not finite)."""
    b = e.b
    found = b.op("ne", found_inf, b.constant(0, found_inf.dtype))
    scaled = []
    for x in xs:
        finite = b.reduce("all", b.op("isfinite", x), range(x.rank))
        found = b.op("logical_or", found, b.op("logical_not", finite))
        wide = "f32" if x.dtype in ("bf16", "f16") else x.dtype
        scaled.append(b.cast(b.op("mul", b.cast(x, wide), b.cast(inverse_scale, wide)), x.dtype))
    return [scaled, b.reshape(b.cast(found, found_inf.dtype), found_inf.shape)]


@emits("_amp_update_scale.default")
def amp_update_scale(
    e: Emitter, scale: Value, growth_tracker: Value, found_inf: Value, growth: Any, backoff: Any, interval: int
) -> list[Value]:
    """(scale', growth tracker'): backed off after an infinity, grown after `interval` steps without."""
    b = e.b
    found = b.op("ne", found_inf, b.constant(0, found_inf.dtype))
    zero, count = b.constant(0, growth_tracker.dtype), b.op("add", growth_tracker, b.constant(1, growth_tracker.dtype))
    due = b.op("eq", count, b.constant(interval, growth_tracker.dtype))
    grown = b.op("mul", scale, e.value(growth, scale.dtype))
    grown = b.where(b.op("logical_and", due, b.op("isfinite", grown)), grown, scale)
    new_scale = b.where(found, b.op("mul", scale, e.value(backoff, scale.dtype)), grown)
    new_tracker = b.where(b.op("logical_or", found, due), zero, count)
    return [new_scale, new_tracker]
