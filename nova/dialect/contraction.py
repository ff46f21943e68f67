"""Contractions: matmul, linear, convolution, attention. They accumulate in f32 (f64 for f64 operands).

bf16 or f16 operands give a result of their own dtype (rounded once, as eager does) or f32 (operands demoted by
`precision`, the result never rounded).
"""

from __future__ import annotations

from nova.dialect.base import Instance, check, check_like, op
from nova.dialect.types import FLOATS, LOW_PRECISION, Described


def _check_dtypes(a: Described, b: Described, result: Described) -> None:
    check(a.dtype == b.dtype and a.dtype in FLOATS, "operands {} and {} must be floats of one dtype", a, b)
    wide = a.dtype in LOW_PRECISION and result.dtype == "f32"
    check(result.dtype == a.dtype or wide, "result {} of operands {} and {} has the wrong dtype", result, a, b)


@op("matmul", "a b", "c")
def _matmul(it: Instance) -> None:
    """c[..,m,n] = sum over k of a[..,m,k] * b[..,k,n]. Batch dims are equal: no broadcasting, any number of them."""
    (a, b), (c,) = it.ins, it.outs
    check(len(a.shape) >= 2 and len(a.shape) == len(b.shape), "operands {} and {} must have one rank >= 2", a, b)
    check(a.shape[:-2] == b.shape[:-2], "batch dims of {} and {} differ", a, b)
    check(a.shape[-1] == b.shape[-2], "contracted dims of {} and {} differ: {} and {}", a, b, a.shape[-1], b.shape[-2])
    check(c.shape == (*a.shape[:-1], b.shape[-1]), "result {} of {} and {} has the wrong shape", c, a, b)
    _check_dtypes(a, b, c)


@op("linear", "x weight *bias", "y")
def _linear(it: Instance) -> None:
    """y[..,n] = sum over k of x[..,k] * weight[n,k], plus bias[n] if given. y rounds after the bias is added."""
    x, weight = it.ins[:2]
    (y,) = it.outs
    check(len(weight.shape) == 2 and len(x.shape) >= 1, "weight {} must be 2-d and input {} at least 1-d", weight, x)
    check(x.shape[-1] == weight.shape[1], "input {} and weight {} differ in the contracted dim", x, weight)
    check(y.shape == (*x.shape[:-1], weight.shape[0]), "result {} of {} and {} has the wrong shape", y, x, weight)
    check(len(it.optional()) <= 1, "at most one bias, got {}", len(it.optional()))
    for bias in it.optional():
        check(bias.shape == weight.shape[:1], "bias {} must have shape {}", bias, list(weight.shape[:1]))
        check(bias.dtype in (x.dtype, y.dtype), "bias {} must have the dtype of {} or {}", bias, x, y)
    _check_dtypes(x, weight, y)


_CONVOLUTION = "stride:ints padding:ints dilation:ints groups:int transposed:bool output_padding:ints"


def convolution_shape(it: Instance, x: Described, weight: Described) -> tuple[int, ...]:
    """Result shape of a (transposed) convolution with the attributes of `it`."""
    spatial = len(x.shape) - 2
    check(spatial >= 1 and len(weight.shape) == spatial + 2, "input {} and weight {} differ in rank", x, weight)
    lists = {name: it[name] for name in ("stride", "padding", "dilation", "output_padding")}
    for name, values in lists.items():
        check(len(values) == spatial, "{} {} must have {} entries", name, list(values), spatial)
    groups, transposed = it["groups"], it["transposed"]
    channels = weight.shape[0] if transposed else weight.shape[1] * groups
    check(groups >= 1 and weight.shape[0] % groups == 0, "{} groups do not divide weight {}", groups, weight)
    check(x.shape[1] == channels, "input {} and weight {} with {} groups differ in channels", x, weight, groups)
    sizes = []
    for axis in range(spatial):
        size, kernel = x.shape[2 + axis], weight.shape[2 + axis]
        stride, padding, dilation = (lists[name][axis] for name in ("stride", "padding", "dilation"))
        extent = dilation * (kernel - 1) + 1
        if transposed:
            sizes.append((size - 1) * stride - 2 * padding + extent + lists["output_padding"][axis])
        else:
            sizes.append((size + 2 * padding - extent) // stride + 1)
    return (x.shape[0], weight.shape[1] * groups if transposed else weight.shape[0], *sizes)


@op("convolution", "x weight", "y", _CONVOLUTION)
def _convolution(it: Instance) -> None:
    """Cross-correlation of x [N,C,*S] with weight [O,C/groups,*K], zero padded; any number of spatial dims.

    y[n,o,*p] = sum over c,*k of x[n,c,p*stride - padding + k*dilation] * weight[o,c,*k], within o's group.
    transposed: the gradient of that in x, with weight [C,O/groups,*K]; output_padding extends the far side.
    """
    (x, weight), (y,) = it.ins, it.outs
    shape = convolution_shape(it, x, weight)
    check(y.shape == shape, "result {} of {} and {} must have shape {}", y, x, weight, list(shape))
    _check_dtypes(x, weight, y)


@op("convolution_backward_data", "dy weight", "dx", _CONVOLUTION)
def _convolution_backward_data(it: Instance) -> None:
    """Gradient of convolution(x, weight) with respect to x, whose shape is the result's."""
    (dy, weight), (dx,) = it.ins, it.outs
    shape = convolution_shape(it, dx, weight)
    check(dy.shape == shape, "dy {} of input {} and weight {} must have shape {}", dy, dx, weight, list(shape))
    _check_dtypes(dy, weight, dx)


@op("convolution_backward_weight", "dy x", "dweight", _CONVOLUTION)
def _convolution_backward_weight(it: Instance) -> None:
    """Gradient of convolution(x, weight) with respect to weight, whose shape is the result's."""
    (dy, x), (dweight,) = it.ins, it.outs
    shape = convolution_shape(it, x, dweight)
    check(dy.shape == shape, "dy {} of input {} and weight {} must have shape {}", dy, x, dweight, list(shape))
    _check_dtypes(dy, x, dweight)


_ATTENTION = "has_mask:bool has_seed:bool causal:bool scale:float dropout_p:float stream:int"


def _check_attention(it: Instance, first: int, out: Described, lse: Described) -> None:
    q, k, v = it.ins[first : first + 3]
    for name, value in (("q", q), ("k", k), ("v", v), ("out", out)):
        check(len(value.shape) == 4, "{} {} must be [batch, heads, length, dim]", name, value)
        check(value.dtype in FLOATS, "{} {} must be a float", name, value)
    check(q.dtype == k.dtype == v.dtype, "q {}, k {} and v {} differ in dtype", q, k, v)
    batch, heads, rows, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    check(k.shape == (batch, kv_heads, keys, dim), "k {} does not fit q {}", k, q)
    check(v.shape[:3] == (batch, kv_heads, keys), "v {} does not fit k {}", v, k)
    check(kv_heads > 0 and heads % kv_heads == 0, "{} key heads of {} do not divide {} query heads", kv_heads, k, heads)
    check(out.shape == (batch, heads, rows, v.shape[3]), "out {} does not fit q {} and v {}", out, q, v)
    expected = Described((batch, heads, rows), "f64" if q.dtype == "f64" else "f32")
    check_like(lse, expected, "lse", "expected")
    optional = it.optional()
    check(len(optional) == it["has_mask"] + it["has_seed"], "{} optional operands, flags say otherwise", len(optional))
    if it["has_mask"]:
        full = (batch, heads, rows, keys)
        mask = optional[0]
        fits = len(mask.shape) <= 4 and all(s in (1, f) for s, f in zip(mask.shape[::-1], full[::-1], strict=False))
        check(fits, "mask {} does not broadcast to {}", mask, list(full))
        check(mask.dtype == "bool" or mask.dtype in FLOATS, "mask {} must be i1 or a float", mask)
    if it["has_seed"]:
        check(optional[-1] == Described((), "i64"), "seed {} must be a 0-d i64", optional[-1])


@op("attention", "q k v mask?has_mask seed?has_seed", "out lse", _ATTENTION)
def _attention(it: Instance) -> None:
    """out = dropout(softmax(q @ k^T * scale + mask)) @ v and lse = logsumexp of the masked, scaled scores.

    q [B,H,T,D]; k [B,Hkv,S,D], v [B,Hkv,S,Dv] with Hkv dividing H (head h reads h // (H/Hkv)); out [B,H,T,Dv]; lse
    [B,H,T], f32 (f64 for f64), natural log. mask broadcasts to [B,H,T,S]: i1 (true = may attend) or float (added).
    causal: key j is visible to row i iff j <= i. seed (0-d i64) and stream key the dropout mask of probability
    dropout_p over [B,H,T,S]; kept probabilities are scaled by 1 / (1 - dropout_p).
    """
    _check_attention(it, 0, it.outs[0], it.outs[1])
    check(it.outs[0].dtype in (it.ins[0].dtype, "f32"), "out {} does not fit q {}", it.outs[0], it.ins[0])


@op(
    "attention_backward",
    "dout q k v out lse mask?has_mask seed?has_seed",
    "dq dk dv *dmask",
    _ATTENTION + " mask_grad:bool",
)
def _attention_backward(it: Instance) -> None:
    """Gradients of attention. With p = e**(scores - lse), ds = p * (dropped(dout @ v^T) - rowsum(dout * out)):

    dv = dropped(p)^T @ dout, dq = ds @ k * scale, dk = ds^T @ q * scale, each shaped like its tensor (summed over
    the query heads that share a key head); with mask_grad also dmask = ds summed to the mask's shape.
    """
    dout, q, k, v, out, lse = it.ins[:6]
    _check_attention(it, 1, out, lse)
    check(dout.shape == out.shape, "dout {} and out {} differ in shape", dout, out)
    check(len(it.outs) == 3 + it["mask_grad"], "{} results with mask_grad = {}", len(it.outs), it["mask_grad"])
    for name, value, like in zip(("dq", "dk", "dv"), it.outs, (q, k, v), strict=False):
        check(value.shape == like.shape, "{} {} and its tensor {} differ in shape", name, value, like)
    if it["mask_grad"]:
        check(it["has_mask"], "mask_grad without a mask")
        check(it.outs[3].shape == it.optional()[0].shape, "dmask {} differs from {}", it.outs[3], it.optional()[0])
