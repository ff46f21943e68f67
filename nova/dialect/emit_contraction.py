"""Emitters of contractions: matrix products, convolutions, attention.

`mm(x, t(w))` is raised to `nova.linear`, bias included, so that the forward op of a layer is one op whatever path
PyTorch took to it. A transposed convolution is the data gradient of an ordinary one, and is emitted as that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from nova.dialect.base import defining_op
from nova.dialect.build import Value, is_number, wrap
from nova.dialect.emit import Emitter, NoLowering, emits
from nova.dialect.types import FLOATS, LOW_PRECISION, broadcast_shapes


def _transposed_operand(value: Value) -> Value | None:
    """w if the 2-d value is transpose(w)."""
    owner = defining_op(value.ir) if value.rank == 2 else None
    if owner is None or owner.name != "nova.transpose":
        return None
    return wrap(owner.operands[0])


def _mm(e: Emitter, a: Value, b: Value, dtype: str | None = None) -> Value:
    if a.dtype not in FLOATS:
        raise NoLowering
    weight = _transposed_operand(b)
    return e.b.matmul(a, b, dtype) if weight is None else e.b.linear(a, weight, None, dtype)


@emits("mm.default")
def mm(e: Emitter, a: Value, b: Value) -> Value:
    """2-d product."""
    return _mm(e, a, b)


@emits("bmm.default")
def bmm(e: Emitter, a: Value, b: Value) -> Value:
    """Batched product."""
    if a.dtype not in FLOATS:
        raise NoLowering
    return e.b.matmul(a, b)


def _is(x: Any, number: float) -> bool:
    return is_number(x) and x == number


@emits("addmm.default")
def addmm(e: Emitter, bias: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    """beta * bias + alpha * a @ b."""
    weight = _transposed_operand(b)
    plain = _is(beta, 1) and _is(alpha, 1)
    if weight is not None and plain and bias.shape == weight.shape[:1] and a.dtype in FLOATS:
        return e.b.linear(a, weight, bias)
    return _accumulate(e, bias, a, b, beta, alpha)


@emits("baddbmm.default")
def baddbmm(e: Emitter, bias: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    """beta * bias + alpha * a @ b, batched."""
    return _accumulate(e, bias, a, b, beta, alpha)


def _accumulate(e: Emitter, bias: Value, a: Value, b: Value, beta: Any, alpha: Any) -> Value:
    if a.dtype not in FLOATS:
        raise NoLowering
    wide = "f32" if a.dtype in LOW_PRECISION else a.dtype
    product = _mm(e, a, b, wide) if a.rank == 2 else e.b.matmul(a, b, wide)
    if not _is(alpha, 1):
        product = e.b.op("mul", product, e.value(alpha, wide))
    if _is(beta, 0):
        return e.b.cast(product, e.dtype)
    bias = e.value(bias, wide)
    if not _is(beta, 1):
        bias = e.b.op("mul", bias, e.value(beta, wide))
    return e.b.cast(e.b.op("add", bias, product), e.dtype)


@emits("addmv.default")
def addmv(e: Emitter, bias: Value, a: Value, x: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    """beta * bias + alpha * a @ x."""
    column = e.b.reshape(x, (*x.shape, 1))
    if bias.rank:
        bias = e.b.reshape(bias, (*bias.shape, 1))
    return e.b.reshape(_accumulate(e, bias, a, column, beta, alpha), e.shape)


@emits("addr.default")
def addr(e: Emitter, bias: Value, x: Value, y: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    """beta * bias + alpha * outer(x, y)."""
    b = e.b
    outer = b.op("mul", b.reshape(e.wide(x), (*x.shape, 1)), e.wide(y))
    if not _is(alpha, 1):
        outer = b.op("mul", outer, e.wide(alpha))
    scaled = e.wide(bias) if _is(beta, 1) else b.op("mul", e.wide(bias), e.wide(beta))
    return b.cast(b.op("add", scaled, outer), e.dtype)


@emits("mv.default", "dot.default", "vdot.default", "matmul.default", "linalg_vecdot.default")
def matmul(e: Emitter, a: Value, b: Value) -> Value:
    """Any product with torch.matmul's rules: 1-d operands gain a dim, batch dims broadcast."""
    if a.dtype not in FLOATS:
        raise NoLowering
    build = e.b
    if a.rank == 1:
        a = build.reshape(a, (1, *a.shape))
    if b.rank == 1:
        b = build.reshape(b, (*b.shape, 1))
    if a.rank == b.rank == 2:
        return build.reshape(_mm(e, a, b), e.shape)
    batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = build.expand(a, batch + a.shape[-2:]), build.expand(b, batch + b.shape[-2:])
    return build.reshape(build.matmul(a, b), e.shape)


@emits("linear.default")
def linear(e: Emitter, x: Value, weight: Value, bias: Value | None = None) -> Value:
    """x @ weight^T + bias."""
    return e.b.linear(x, weight, bias)


# -- convolution --------------------------------------------------------------------------------------------------


def _attributes(
    rank: int, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> dict[str, Any]:
    def full(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values) * rank if len(values) == 1 else tuple(values)

    return {
        "stride": full(stride),
        "padding": full(padding),
        "dilation": full(dilation),
        "groups": groups,
        "transposed": False,
        "output_padding": (0,) * rank,
    }


@emits("convolution.default", "_convolution.default")
def convolution(
    e: Emitter,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *_: Any,
) -> Value:
    """Convolution and bias; a transposed one as the data gradient of an ordinary one."""
    if x.dtype not in FLOATS or x.rank != weight.rank:
        raise NoLowering
    attributes = _attributes(x.rank - 2, stride, padding, dilation, groups)
    wide = "f32" if x.dtype in LOW_PRECISION and bias is not None else x.dtype
    name = "convolution_backward_data" if transposed else "convolution"
    y = e.b.create(name, [x, weight], [(e.shape, wide)], **attributes)
    if bias is not None:
        y = e.b.op("add", y, e.b.reshape(e.b.cast(bias, wide), (*bias.shape, *(1,) * (x.rank - 2))))
    return e.b.cast(y, e.dtype)


@emits("convolution_backward.default")
def convolution_backward(
    e: Emitter,
    dy: Value,
    x: Value,
    weight: Value,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> list[Value | None]:
    """(dx, dweight, dbias)."""
    if x.dtype not in FLOATS:
        raise NoLowering
    attributes = _attributes(x.rank - 2, stride, padding, dilation, groups)
    grads: list[Value | None] = [None, None, None]
    if mask[0]:
        name = "convolution" if transposed else "convolution_backward_data"
        grads[0] = e.b.create(name, [dy, weight], [(x.shape, x.dtype)], **attributes)
    if mask[1]:
        operands = [x, dy] if transposed else [dy, x]
        grads[1] = e.b.create("convolution_backward_weight", operands, [(weight.shape, weight.dtype)], **attributes)
    if mask[2]:
        grads[2] = e.b.reduce("sum", dy, [d for d in range(dy.rank) if d != 1])
    return grads


# -- attention ----------------------------------------------------------------------------------------------------


def _attention(e: Emitter, tensors: Sequence[Value], optional: tuple[Value | None, Value | None], **attrs: Any) -> Any:
    q, v = tensors[0], tensors[2]
    statistic = "f64" if q.dtype == "f64" else "f32"
    results = [((*q.shape[:3], v.shape[3]), q.dtype), (q.shape[:3], statistic)]
    operands = [*tensors, *(o for o in optional if o is not None)]
    flags = {"has_mask": optional[0] is not None, "has_seed": optional[1] is not None}
    return e.b.create("attention", operands, results, **flags, **attrs)


@emits("nova::attention.default")
def attention(
    e: Emitter,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None,
    seed: Value | None,
    causal: bool,
    scale: float,
    dropout_p: float,
    stream: int,
) -> list[Value]:
    """(out, lse)."""
    if not (is_number(scale) and is_number(dropout_p)):
        raise NoLowering
    out, lse = _attention(e, [q, k, v], (mask, seed), causal=causal, scale=scale, dropout_p=dropout_p, stream=stream)
    return [e.finish(out, 0), e.finish(lse, 1)]


@emits("nova::attention_backward.default")
def attention_backward(
    e: Emitter,
    dout: Value,
    q: Value,
    k: Value,
    v: Value,
    out: Value,
    lse: Value,
    mask: Value | None,
    seed: Value | None,
    causal: bool,
    scale: float,
    dropout_p: float,
    stream: int,
    mask_grad: bool,
) -> list[Value | None]:
    """(dq, dk, dv, dmask or None)."""
    if not (is_number(scale) and is_number(dropout_p)):
        raise NoLowering
    lse = e.b.cast(lse, "f64" if q.dtype == "f64" else "f32")
    results = [(x.shape, x.dtype) for x in (q, k, v)]
    if mask_grad:
        assert mask is not None
        results.append((mask.shape, mask.dtype))
    grads = e.b.create(
        "attention_backward",
        [e.b.cast(dout, q.dtype), q, k, v, out, lse, *(o for o in (mask, seed) if o is not None)],
        results,
        has_mask=mask is not None,
        has_seed=seed is not None,
        causal=causal,
        scale=scale,
        dropout_p=dropout_p,
        stream=stream,
        mask_grad=mask_grad,
    )
    return [*grads, None][:4]


@emits("_scaled_dot_product_flash_attention_for_cpu.default")
def flash_attention_for_cpu(
    e: Emitter,
    q: Value,
    k: Value,
    v: Value,
    dropout_p: float = 0.0,
    causal: bool = False,
    *,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> list[Value]:
    """PyTorch's own CPU kernel, where capture met it below its own attention op."""
    if dropout_p:
        raise NoLowering
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    out, lse = _attention(e, [q, k, v], (attn_mask, None), causal=causal, scale=scale, dropout_p=0.0, stream=0)
    return [e.finish(out, 0), e.finish(lse, 1)]


@emits("_scaled_dot_product_flash_attention_for_cpu_backward.default")
def flash_attention_for_cpu_backward(
    e: Emitter,
    dout: Value,
    q: Value,
    k: Value,
    v: Value,
    out: Value,
    lse: Value,
    dropout_p: float,
    causal: bool,
    *,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> list[Value | None]:
    """Its backward."""
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    grads = attention_backward(e, dout, q, k, v, out, lse, attn_mask, None, causal, scale, dropout_p, 0, False)
    return grads[:3]
