"""Optimizer updates as operators: one call a parameter, values in and new values out, nothing changed in place.

Each is the arithmetic of PyTorch's own single-tensor code in the same order, with hyper-parameters as 0-d
tensors so that one graph serves every learning rate. Where `found_inf` is not zero nothing changes, which is
how a gradient scaler skips an update without asking the host.

    p', m', v', vmax', step' = nova.adam(p, g, m, v, vmax, step, lr, beta1, beta2, eps, weight_decay, ...)
"""

from __future__ import annotations

import torch
from torch import Tensor

from nova.capture.keep import define


def _unless(found_inf: Tensor | None, old: list[Tensor | None], new: list[Tensor | None]) -> list[Tensor | None]:
    """`old` where an infinity was found, else `new`; absent tensors stay absent."""
    if found_inf is None or float(found_inf) == 0.0:
        return new
    return [None if value is None else value.clone() for value in old]


def sgd(
    p: Tensor, g: Tensor, buf: Tensor | None, step: Tensor | None, lr: Tensor, momentum: Tensor, dampening: Tensor,
    weight_decay: Tensor, *, nesterov: bool, maximize: bool, found_inf: Tensor | None = None,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """torch.optim.SGD. Where `first` is not zero, the buffer becomes the gradient itself (dampening does not apply)."""
    rate, mu = float(lr), float(momentum)
    grad = -g if maximize else g
    if float(weight_decay) != 0.0:
        grad = grad.add(p, alpha=float(weight_decay))
    new = None
    if buf is not None:
        started = first is not None and float(first) != 0.0
        new = grad.clone() if started else buf.mul(mu).add_(grad, alpha=1.0 - float(dampening))
        grad = grad.add(new, alpha=mu) if nesterov else new
    updated = _unless(found_inf, [p, buf], [p.add(grad, alpha=-rate), new])
    return updated[0], updated[1]  # type: ignore[return-value]


def adam(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, vmax: Tensor | None, step: Tensor, lr: Tensor, beta1: Tensor,
    beta2: Tensor, eps: Tensor, weight_decay: Tensor, *, decoupled: bool, amsgrad: bool, maximize: bool,
    found_inf: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """torch.optim.Adam (`decoupled=False`) and AdamW."""
    rate, b1, b2, decay = float(lr), float(beta1), float(beta2), float(weight_decay)
    grad, param = (-g if maximize else g), p
    count = step + 1
    if decay != 0.0:
        if decoupled:
            param = p.mul(1.0 - rate * decay)
        else:
            grad = grad.add(p, alpha=decay)
    mean = m.lerp(grad, 1.0 - b1)
    square = v.mul(b2).addcmul_(grad, grad, value=1.0 - b2)
    t = float(count)
    correction1, correction2 = 1.0 - b1**t, 1.0 - b2**t
    largest = None
    if amsgrad:
        assert vmax is not None
        largest = torch.maximum(vmax, square)
    denominator = ((square if largest is None else largest).sqrt() / correction2**0.5).add_(float(eps))
    param = param.addcdiv(mean, denominator, value=-(rate / correction1))
    return tuple(_unless(found_inf, [p, m, v, vmax if amsgrad else None, step], [param, mean, square, largest, count]))  # type: ignore[return-value]


def adagrad(
    p: Tensor, g: Tensor, sum: Tensor, step: Tensor, lr: Tensor, lr_decay: Tensor, eps: Tensor, weight_decay: Tensor,
    *, maximize: bool, found_inf: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """torch.optim.Adagrad."""
    grad, count = (-g if maximize else g), step + 1
    if float(weight_decay) != 0.0:
        grad = grad.add(p, alpha=float(weight_decay))
    rate = float(lr) / (1.0 + (float(count) - 1.0) * float(lr_decay))
    total = sum.addcmul(grad, grad, value=1.0)
    param = p.addcdiv(grad, total.sqrt().add_(float(eps)), value=-rate)
    return tuple(_unless(found_inf, [p, sum, step], [param, total, count]))  # type: ignore[return-value]


def rmsprop(
    p: Tensor, g: Tensor, square_avg: Tensor, grad_avg: Tensor | None, buf: Tensor | None, step: Tensor, lr: Tensor,
    alpha: Tensor, eps: Tensor, momentum: Tensor, weight_decay: Tensor, *, centered: bool, maximize: bool,
    found_inf: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """torch.optim.RMSprop; `buf` is absent without momentum, `grad_avg` unless centered."""
    grad, count, a = (-g if maximize else g), step + 1, float(alpha)
    if float(weight_decay) != 0.0:
        grad = grad.add(p, alpha=float(weight_decay))
    square = square_avg.mul(a).addcmul_(grad, grad, value=1.0 - a)
    mean = velocity = None
    if centered:
        assert grad_avg is not None
        mean = grad_avg.lerp(grad, 1.0 - a)
        average = square.addcmul(mean, mean, value=-1.0).sqrt_()
    else:
        average = square.sqrt()
    average = average.add_(float(eps))
    if buf is not None:
        velocity = buf.mul(float(momentum)).addcdiv_(grad, average)
        param = p.add(velocity, alpha=-float(lr))
    else:
        param = p.addcdiv(grad, average, value=-float(lr))
    old = [p, square_avg, grad_avg if centered else None, buf, step]
    return tuple(_unless(found_inf, old, [param, square, mean, velocity, count]))  # type: ignore[return-value]


_COMMON = "Tensor? found_inf=None"
define(
    "sgd(Tensor p, Tensor g, Tensor? buf, Tensor? step, Tensor lr, Tensor momentum, Tensor dampening, "
    f"Tensor weight_decay, *, bool nesterov, bool maximize, {_COMMON}, Tensor? first=None) -> (Tensor, Tensor)", sgd,
)  # fmt: skip
define(
    "adam(Tensor p, Tensor g, Tensor m, Tensor v, Tensor? vmax, Tensor step, Tensor lr, Tensor beta1, Tensor beta2, "
    f"Tensor eps, Tensor weight_decay, *, bool decoupled, bool amsgrad, bool maximize, {_COMMON}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)", adam,
)  # fmt: skip
define(
    "adagrad(Tensor p, Tensor g, Tensor sum, Tensor step, Tensor lr, Tensor lr_decay, Tensor eps, Tensor weight_decay, "
    f"*, bool maximize, {_COMMON}) -> (Tensor, Tensor, Tensor)", adagrad,
)  # fmt: skip
define(
    "rmsprop(Tensor p, Tensor g, Tensor square_avg, Tensor? grad_avg, Tensor? buf, Tensor step, Tensor lr, "
    "Tensor alpha, Tensor eps, Tensor momentum, Tensor weight_decay, *, bool centered, bool maximize, "
    f"{_COMMON}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", rmsprop,
)  # fmt: skip
