"""Meanings of elementwise ops."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nova.dialect.reference import MEANING, Attributes, meaning

_PLAIN: dict[str, Callable[..., Tensor]] = {
    "neg": torch.neg, "abs": torch.abs, "sign": torch.sign, "exp": torch.exp, "exp2": torch.exp2,
    "expm1": torch.expm1, "log": torch.log, "log2": torch.log2, "log10": torch.log10, "log1p": torch.log1p,
    "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal, "sin": torch.sin, "cos": torch.cos,
    "tan": torch.tan, "asin": torch.asin, "acos": torch.acos, "atan": torch.atan, "sinh": torch.sinh,
    "cosh": torch.cosh, "tanh": torch.tanh, "asinh": torch.asinh, "acosh": torch.acosh, "atanh": torch.atanh,
    "sigmoid": torch.sigmoid, "log_sigmoid": F.logsigmoid, "erf": torch.erf, "erfc": torch.erfc,
    "floor": torch.floor, "ceil": torch.ceil, "round": torch.round, "trunc": torch.trunc, "relu": torch.relu,
    "silu": F.silu, "bitwise_not": torch.bitwise_not, "logical_not": torch.logical_not, "isnan": torch.isnan,
    "isinf": torch.isinf, "isfinite": torch.isfinite,
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "floordiv": torch.floor_divide,
    "truncdiv": lambda x, y: torch.div(x, y, rounding_mode="trunc"), "rem": torch.remainder, "fmod": torch.fmod,
    "pow": torch.pow, "atan2": torch.atan2, "hypot": torch.hypot, "copysign": torch.copysign,
    "maximum": torch.maximum, "minimum": torch.minimum, "bitwise_and": torch.bitwise_and,
    "bitwise_or": torch.bitwise_or, "bitwise_xor": torch.bitwise_xor, "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift, "logical_and": torch.logical_and, "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor, "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le,
    "gt": torch.gt, "ge": torch.ge, "where": torch.where,
    "clamp": lambda x, lo, hi: torch.minimum(torch.maximum(x, lo), hi),
    "lerp": torch.lerp,
    "tanh_backward": lambda dy, y: dy * (1 - y * y),
    "sigmoid_backward": lambda dy, y: dy * (1 - y) * y,
    "log_sigmoid_backward": lambda dy, x: dy * torch.sigmoid(-x),
}  # fmt: skip

for _name, _function in _PLAIN.items():
    MEANING[_name] = lambda a, *operands, function=_function: function(*operands)


@meaning("cast")
def _cast(a: Attributes, x: Tensor) -> Tensor:
    return x != 0 if a.results[0].dtype == "bool" else x.to(a.dtype())


@meaning("gelu")
def _gelu(a: Attributes, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=a.approximate)


@meaning("softplus")
def _softplus(a: Attributes, x: Tensor) -> Tensor:
    return F.softplus(x, a.beta, a.threshold)


@meaning("elu")
def _elu(a: Attributes, x: Tensor) -> Tensor:
    return a.scale * torch.where(x > 0, x, a.alpha * torch.expm1(x * a.input_scale))


@meaning("leaky_relu")
def _leaky_relu(a: Attributes, x: Tensor) -> Tensor:
    return torch.where(x > 0, x, a.negative_slope * x)


@meaning("hardtanh")
def _hardtanh(a: Attributes, x: Tensor) -> Tensor:
    return torch.clamp(x, a.lo, a.hi)


@meaning("probability")
def _probability(a: Attributes, x: Tensor) -> Tensor:
    if not ((x >= 0) & (x <= 1)).all():
        raise RuntimeError("all elements of input and target should be between 0 and 1")
    return x


@meaning("gelu_backward")
def _gelu_backward(a: Attributes, dy: Tensor, x: Tensor) -> Tensor:
    dy, x = torch.broadcast_tensors(dy, x)
    return torch.ops.aten.gelu_backward(dy, x, approximate=a.approximate)


@meaning("silu_backward")
def _silu_backward(a: Attributes, dy: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return dy * (s * (1 + x * (1 - s)))


@meaning("relu_backward")
def _relu_backward(a: Attributes, dy: Tensor, x: Tensor) -> Tensor:
    return torch.where(x <= a.threshold, torch.zeros_like(dy), dy)


@meaning("softplus_backward")
def _softplus_backward(a: Attributes, dy: Tensor, x: Tensor) -> Tensor:
    return torch.where(x * a.beta > a.threshold, dy, dy * torch.sigmoid(x * a.beta))


@meaning("leaky_relu_backward")
def _leaky_relu_backward(a: Attributes, dy: Tensor, x: Tensor) -> Tensor:
    return torch.where(x > 0, dy, dy * a.negative_slope)


@meaning("hardtanh_backward")
def _hardtanh_backward(a: Attributes, dy: Tensor, x: Tensor) -> Tensor:
    return torch.where((x > a.lo) & (x < a.hi), dy, torch.zeros_like(dy))


@meaning("elu_backward")
def _elu_backward(a: Attributes, dy: Tensor, x: Tensor) -> Tensor:
    if a.is_result:
        below = dy * a.input_scale * (x + a.scale * a.alpha)
    else:
        below = dy * a.input_scale * a.scale * a.alpha * torch.exp(x * a.input_scale)
    return torch.where(x > 0, dy * a.scale, below)
