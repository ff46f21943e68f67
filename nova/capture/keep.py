"""Operations that a capture keeps whole, each with an eager implementation that is its reference meaning.

PyTorch would break attention, cross entropy, random draws and optimizers into pieces that no pass could
put together again (and into other pieces on another device). They are custom operators of the `nova`
namespace instead:

    F.scaled_dot_product_attention(q, k, v)  ->  out, lse = nova.attention(q, k, v, ...)
                                                 dq, dk, dv, _ = nova.attention_backward(dout, q, k, v, out, lse, ...)

Gradients come from `torch.autograd.Function`s that call the backward operators. Under double backward (gradients
enabled while the backward runs) the same formula is built from plain differentiable operations instead.
Optimizer updates are in `optimizer_ops.py`, random numbers in `philox.py`.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from nova.capture import philox

LIBRARY = torch.library.Library("nova", "DEF")


def define(schema: str, implementation) -> None:
    """Registers one `nova` operator; the implementation runs on every device and has no autograd of its own."""
    LIBRARY.define(schema)
    LIBRARY.impl(schema.split("(", maxsplit=1)[0], implementation, "CompositeExplicitAutograd")


def of_several(x: Tensor) -> Tensor:
    """A batch for batch norm in training: eager's error where a channel has a single value."""
    torch.nn.functional._verify_batch_size(x.size())  # type: ignore[attr-defined]
    return x.clone()


define("of_several(Tensor x) -> Tensor", of_several)


def demand(holds: Tensor, message: str) -> None:
    """What PyTorch's Python demands of a tensor's values: `if not torch.all(holds): raise ValueError(message)`."""
    if not bool(holds.all()):
        raise ValueError(message)


define("demand(Tensor holds, str message) -> ()", demand)


def _compute_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- attention -------------------------------------------------------------------------------------------------


def _grouped(k: Tensor, heads: int) -> Tensor:
    """Keys or values repeated so that query head h finds head h // (H / Hkv)."""
    return k if k.shape[1] == heads else k.repeat_interleave(heads // k.shape[1], 1)


def _ungrouped(dk: Tensor, heads: int) -> Tensor:
    """Sums the gradients of the query heads that share one key head."""
    return dk if dk.shape[1] == heads else dk.unflatten(1, (heads, -1)).sum(2)


def attention_scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Masked scores [B, H, T, S] in the compute type; -inf where a key is hidden."""
    compute = _compute_type(q.dtype)
    scores = (q.to(compute) * scale) @ _grouped(k, q.shape[1]).to(compute).transpose(-2, -1)
    if causal:
        rows, columns = scores.shape[-2:]
        hidden = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(compute)
    return scores


def _keep_mask(seed: Tensor, stream: int, shape: torch.Size, dropout_p: float, dtype: torch.dtype) -> Tensor:
    """Dropout multiplier of the probabilities: 0 or 1 / (1 - p)."""
    if dropout_p >= 1.0:
        return torch.zeros(shape, dtype=dtype, device=seed.device)
    draws = philox.uniform(int(seed), stream, list(shape), seed.device)
    return (draws >= dropout_p).to(dtype) / (1.0 - dropout_p)


def _eager_layout(out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float) -> Tensor:
    """The result in the memory order that PyTorch's own kernel gives it: code after it may `view` across heads."""
    flash = (
        dropout_p == 0.0
        and q.shape[-1] == v.shape[-1]
        and all(t.stride(-1) == 1 for t in (q, k, v))
        and (mask is None or not mask.requires_grad)
        and torch.backends.cuda.flash_sdp_enabled()
    )
    return torch.empty_like(q).copy_(out) if flash and out.shape == q.shape else out.contiguous()


def _flash_applies(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float) -> bool:
    return (
        q.device.type == "cpu" and mask is None and dropout_p == 0.0 and k.shape[1] == q.shape[1]
        and v.shape[-1] == q.shape[-1] == k.shape[-1] and 0 not in (q.numel(), k.numel()) and q.dtype != torch.float64
    )  # fmt: skip


def _efficient_applies(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float) -> bool:
    return (
        q.device.type == "cuda" and mask is None and dropout_p == 0.0 and k.shape[1] == q.shape[1]
        and v.shape[-1] == q.shape[-1] == k.shape[-1] and q.dtype != torch.float64 and 0 not in (q.numel(), k.numel())
        and q.shape[-1] in (32, 64, 96, 128)  # with a width between its tiles the kernel reads beyond the tensors
    )  # fmt: skip


def _efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor] | None:
    """The same function on a GPU by PyTorch's own kernel; None where this board or version has none."""
    try:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )
    except (RuntimeError, TypeError):
        return None
    return out, lse[..., : q.shape[2]].float().contiguous()  # (its rows are padded)


def _efficient_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    rows = q.shape[2]
    padded = torch.nn.functional.pad(lse, (0, -rows % 32), value=math.inf)
    draws = torch.zeros((), dtype=torch.int64, device=q.device)
    try:
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, None, out, padded, draws, draws, 0.0, [True, True, True, False], causal, scale=scale
        )
    except (RuntimeError, TypeError):
        return None
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, causal: bool, scale: float,
    dropout_p: float, stream: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(q k^T * scale + mask) v, and the natural log-sum-exp of the scores. A row that sees no key is 0."""
    if _efficient_applies(q, k, v, mask, dropout_p) and (made := _efficient(q, k, v, causal, scale)) is not None:
        return _eager_layout(made[0], q, k, v, mask, dropout_p), made[1]
    if _flash_applies(q, k, v, mask, dropout_p):
        # the same function by PyTorch's own kernel, which needs no T x S memory
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return _eager_layout(out, q, k, v, mask, dropout_p), lse.to(_compute_type(q.dtype)).contiguous()
    with torch.autocast(q.device.type, enabled=False):
        scores = attention_scores(q, k, mask, causal, scale)
        lse = torch.logsumexp(scores, -1)
        p = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse).unsqueeze(-1))
        if dropout_p > 0.0:
            assert seed is not None
            p = p * _keep_mask(seed, stream, p.shape, dropout_p, p.dtype)
        out = p @ _grouped(v, q.shape[1]).to(p.dtype)
        return _eager_layout(out.to(q.dtype), q, k, v, mask, dropout_p), lse.to(_compute_type(q.dtype))


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, seed: Tensor | None,
    causal: bool, scale: float, dropout_p: float, stream: int, mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of `attention`; probabilities are recomputed from the log-sum-exp."""
    if _efficient_applies(q, k, v, mask, dropout_p):
        grads = _efficient_backward(dout, q, k, v, out, lse, causal, scale)
        if grads is not None:
            return *grads, None
    if _flash_applies(q, k, v, mask, dropout_p):
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse.to(_compute_type(q.dtype)), 0.0, causal, scale=scale
        )
        return dq.contiguous(), dk.contiguous(), dv.contiguous(), None
    with torch.autocast(q.device.type, enabled=False):
        heads, compute = q.shape[1], _compute_type(q.dtype)
        scores = attention_scores(q, k, mask, causal, scale)
        exact = lse.to(compute) if compute == torch.float32 else torch.logsumexp(scores, -1)
        p = torch.exp(scores - torch.where(exact == -math.inf, 0.0, exact).unsqueeze(-1))
        do, kk, vv = dout.to(compute), _grouped(k, heads).to(compute), _grouped(v, heads).to(compute)
        dp = do @ vv.transpose(-2, -1)
        dropped = p
        if dropout_p > 0.0:
            assert seed is not None
            keep = _keep_mask(seed, stream, p.shape, dropout_p, compute)
            dropped, dp = p * keep, dp * keep
        dv = _ungrouped(dropped.transpose(-2, -1) @ do, v.shape[1])
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        dq = (ds @ kk) * scale
        dk = _ungrouped(ds.transpose(-2, -1) @ q.to(compute), k.shape[1]) * scale
        dmask = ds.sum_to_size(mask.shape).to(mask.dtype) if mask_grad and mask is not None else None
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dmask


def attention_formula(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, keep: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """`attention` in plain differentiable operations."""
    scores = attention_scores(q, k, mask, causal, scale)
    p = torch.softmax(scores, -1)
    p = torch.where((scores == -math.inf).all(-1, keepdim=True), 0.0, p)  # the softmax of a hidden row is NaN
    return ((p if keep is None else p * keep) @ _grouped(v, q.shape[1]).to(p.dtype)).to(q.dtype)


class Attention(torch.autograd.Function):
    """Autograd around nova.attention."""

    @staticmethod
    def forward(ctx, q, k, v, mask, seed, causal, scale, dropout_p, stream):
        out, lse = torch.ops.nova.attention(q, k, v, mask, seed, causal, scale, dropout_p, stream)
        ctx.save_for_backward(q, k, v, out, lse, mask, seed)
        ctx.options = (causal, scale, dropout_p, stream)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        q, k, v, out, lse, mask, seed = ctx.saved_tensors
        causal, scale, dropout_p, stream = ctx.options
        mask_grad = ctx.needs_input_grad[3]
        if dout is None:
            return (None,) * 9
        if torch.is_grad_enabled():
            keep = None
            if dropout_p > 0.0:
                shape = [*q.shape[:3], k.shape[2]]
                draws = torch.ops.nova.uniform(seed, stream, shape)
                keep = (draws >= dropout_p).to(_compute_type(q.dtype)) * (
                    1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0
                )
            # inputs that are one tensor, or computed from one another, get the gradients of their own place only
            own: list[Any] = [t.view_as(t) if t is not None else None for t in (q, k, v, mask)]
            q, k, v, mask = own
            wanted = [t for t, needed in zip(own, ctx.needs_input_grad, strict=False) if needed]
            again = attention_formula(q, k, v, mask, keep, causal, scale)
            grads = iter(torch.autograd.grad(again, wanted, dout, create_graph=True))
            return (*(next(grads) if needed else None for needed in ctx.needs_input_grad[:4]), *(None,) * 5)
        dq, dk, dv, dmask = torch.ops.nova.attention_backward(
            dout, q, k, v, out, lse, mask, seed, causal, scale, dropout_p, stream, mask_grad
        )
        return dq, dk, dv, dmask, None, None, None, None, None


# ---- cross entropy ---------------------------------------------------------------------------------------------

NONE, MEAN, SUM = 0, 1, 2


def _row_weights(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, compute: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(valid rows, target with ignored rows at class 0, weight of each row's class); raises as eager for bad labels."""
    valid = target != ignore_index
    safe = torch.where(valid, target, 0).long()
    outside = valid & ((target < 0) | (target >= logits.shape[1]))
    if bool(outside.any()):
        raise IndexError(f"Target {int(target[outside][0])} is out of bounds.")
    class_weight = torch.ones((), dtype=compute, device=logits.device) if weight is None else weight.to(compute)[safe]
    return valid, safe, torch.where(valid, class_weight, 0.0)


def cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, reduction: int
) -> tuple[Tensor, Tensor]:
    """F.cross_entropy of 2-d logits and class indices, and each row's log-sum-exp in the type of the computation."""
    compute = _compute_type(logits.dtype)
    valid, safe, row_weight = _row_weights(logits, target, weight, ignore_index, compute)
    z = logits.to(compute)
    lse = torch.logsumexp(z, 1)
    loss = (lse - z.gather(1, safe.unsqueeze(1)).squeeze(1)) * row_weight
    loss = torch.where(valid, loss, 0.0)  # an ignored row may hold infinities
    if reduction != NONE:
        loss = loss.sum()
    if reduction == MEAN:
        loss = loss / row_weight.sum()
    if label_smoothing > 0.0:
        total = z.shape[1] if weight is None else weight.to(compute).sum()
        smooth = lse * total - (z.sum(1) if weight is None else z @ weight.to(compute))
        smooth = torch.where(valid, smooth, 0.0)
        if reduction != NONE:
            smooth = smooth.sum()
        if reduction == MEAN:
            smooth = smooth / (valid.sum() if weight is None else row_weight.sum())
        loss = (1.0 - label_smoothing) * loss + (label_smoothing / logits.shape[1]) * smooth
    return loss.to(logits.dtype), lse


def cross_entropy_backward(
    dloss: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, lse: Tensor, ignore_index: int,
    label_smoothing: float, reduction: int,
) -> Tensor:  # fmt: skip
    """Gradient of `cross_entropy` for the logits; rows that are ignored get zero whatever they hold."""
    compute = _compute_type(logits.dtype)
    valid, safe, row_weight = _row_weights(logits, target, weight, ignore_index, compute)
    z = logits.to(compute)
    p = torch.exp(z - lse.unsqueeze(1))
    upstream = dloss.to(compute)
    hard = upstream * row_weight * (1.0 - label_smoothing)
    soft = upstream * (label_smoothing / logits.shape[1])
    if reduction == MEAN:
        normalizer = row_weight.sum()
        hard = hard / normalizer
        soft = soft / (valid.sum() if weight is None else normalizer)
    one_hot = torch.zeros_like(z).scatter_(1, safe.unsqueeze(1), 1.0)
    dz = hard.expand(z.shape[0]).unsqueeze(1) * (p - one_hot)
    if label_smoothing > 0.0:
        w = torch.ones_like(z[:1]) if weight is None else weight.to(compute).unsqueeze(0)
        dz = dz + soft.expand(z.shape[0]).unsqueeze(1) * (p * w.sum() - w.expand_as(z))
    return torch.where(valid.unsqueeze(1), dz, 0.0).to(logits.dtype)


class CrossEntropy(torch.autograd.Function):
    """Autograd around nova.cross_entropy."""

    @staticmethod
    def forward(ctx, logits, target, weight, ignore_index, label_smoothing, reduction):
        loss, lse = torch.ops.nova.cross_entropy(logits, target, weight, ignore_index, label_smoothing, reduction)
        ctx.save_for_backward(logits, target, weight, lse)
        ctx.options = (ignore_index, label_smoothing, reduction)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return loss, lse

    @staticmethod
    def backward(ctx, dloss, _):
        logits, target, weight, lse = ctx.saved_tensors
        if dloss is None:
            return (None,) * 6
        if torch.is_grad_enabled():
            ignore_index, label_smoothing, reduction = ctx.options
            with torch._C.DisableTorchFunction():  # else the recorder would keep this one whole too
                loss = torch._C._nn.cross_entropy_loss(logits, target, weight, reduction, ignore_index, label_smoothing)
            return (torch.autograd.grad(loss, logits, dloss, create_graph=True)[0], *(None,) * 5)
        dlogits = torch.ops.nova.cross_entropy_backward(dloss, logits, target, weight, lse, *ctx.options)
        return dlogits, None, None, None, None, None


# ---- reductions over many tensors, random numbers --------------------------------------------------------------


def foreach_norm(xs: list[Tensor], ord: float) -> Tensor:
    """The norm of each tensor, as one float32 vector."""
    with torch.autocast(xs[0].device.type, enabled=False):
        norms = [
            torch.linalg.vector_norm(x, ord, dtype=torch.float32) if x.numel() else x.new_zeros((), dtype=torch.float32)
            for x in xs
        ]
    return torch.stack(norms)


def uniform(seed: Tensor, stream: int, shape: list[int]) -> Tensor:
    return philox.uniform(int(seed), stream, shape, seed.device)


def normal(seed: Tensor, stream: int, shape: list[int]) -> Tensor:
    return philox.normal(int(seed), stream, shape, seed.device)


def randint(seed: Tensor, stream: int, low: int, high: int, shape: list[int]) -> Tensor:
    return philox.randint(int(seed), stream, low, high, shape, seed.device)


def _generator(seed: Tensor, stream: int) -> torch.Generator:
    return torch.Generator(seed.device).manual_seed((int(seed) ^ (stream * 0x9E3779B97F4A7C15)) & ((1 << 63) - 1))


def poisson(rate: Tensor, seed: Tensor, stream: int) -> Tensor:
    return torch.ops.aten.poisson(rate, _generator(seed, stream))


def binomial(count: Tensor, prob: Tensor, seed: Tensor, stream: int) -> Tensor:
    return torch.ops.aten.binomial(count, prob, _generator(seed, stream))


def standard_gamma(shape: Tensor, seed: Tensor, stream: int) -> Tensor:
    return torch.ops.aten._standard_gamma(shape, _generator(seed, stream))


def dirichlet(alpha: Tensor, seed: Tensor, stream: int) -> Tensor:
    return torch.ops.aten._sample_dirichlet(alpha, _generator(seed, stream))


define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? seed, bool causal, float scale, float dropout_p, "
    "int stream) -> (Tensor, Tensor)", attention,
)  # fmt: skip
define(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? mask, Tensor? seed, "
    "bool causal, float scale, float dropout_p, int stream, bool mask_grad) -> (Tensor, Tensor, Tensor, Tensor)",
    attention_backward,
)
define(
    "cross_entropy(Tensor logits, Tensor target, Tensor? weight, int ignore_index, float label_smoothing, "
    "int reduction) -> (Tensor, Tensor)", cross_entropy,
)  # fmt: skip
define(
    "cross_entropy_backward(Tensor dloss, Tensor logits, Tensor target, Tensor? weight, Tensor lse, int ignore_index, "
    "float label_smoothing, int reduction) -> Tensor", cross_entropy_backward,
)  # fmt: skip
define("foreach_norm(Tensor[] xs, float ord) -> Tensor", foreach_norm)
define("uniform(Tensor seed, int stream, int[] shape) -> Tensor", uniform)
define("normal(Tensor seed, int stream, int[] shape) -> Tensor", normal)
define("randint(Tensor seed, int stream, int low, int high, int[] shape) -> Tensor", randint)
define("poisson(Tensor rate, Tensor seed, int stream) -> Tensor", poisson)
define("binomial(Tensor count, Tensor prob, Tensor seed, int stream) -> Tensor", binomial)
define("standard_gamma(Tensor shape, Tensor seed, int stream) -> Tensor", standard_gamma)
define("dirichlet(Tensor alpha, Tensor seed, int stream) -> Tensor", dirichlet)


# ---- what the user's calls become ------------------------------------------------------------------------------


def _four_dimensional(t: Tensor, batch: tuple[int, ...]) -> Tensor:
    """[..., T, D] as [B, H, T, D]: leading dimensions are broadcast to `batch` and folded, or added."""
    if t.dim() == 4 and t.shape[0] == batch[0]:
        return t
    t = t.expand(*batch, *t.shape[-3:])
    return t.reshape(-1, *t.shape[-3:])


def attention_supported(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, gqa: bool) -> bool:
    """Whether the call is one that nova.attention means; every other one (errors included) is left to PyTorch."""
    if not (2 <= q.dim() == k.dim() == v.dim() and q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        return False
    if mask is not None and (
        causal or mask.dtype not in (torch.bool, q.dtype) or not 2 <= mask.dim() <= 4 or q.dim() > 4
    ):
        return False
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2] or any(t.is_nested for t in (q, k, v)):
        return False
    if q.dim() >= 3:
        heads, key_heads = q.shape[-3], k.shape[-3]
        if (
            v.shape[-3] != key_heads
            or key_heads == 0
            or heads % key_heads
            or (heads != key_heads and not gqa and key_heads != 1)
        ):
            return False
    if k.shape[:-3] != v.shape[:-3] or (k.shape[:-3] != q.shape[:-3] and (gqa or q.dim() < 4)):
        return False
    return k.shape[-2] > 0 and q.numel() > 0


def _decomposed(device: torch.device) -> Any:
    """On a GPU, PyTorch's attention in pieces: its fused kernels take a random state of their own."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.MATH])


def scaled_dot_product_attention(
    recorder, original, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):  # fmt: skip
    """F.scaled_dot_product_attention as one nova.attention; `recorder` hands out seeds and streams."""
    q, k, v, mask = query, key, value, attn_mask
    if torch.is_autocast_enabled(q.device.type):
        low = torch.get_autocast_dtype(q.device.type)
        q, k, v = (t.to(low) if t.is_floating_point() and t.dtype != torch.float64 else t for t in (q, k, v))
        mask = mask.to(low) if mask is not None and mask.is_floating_point() else mask
    if not attention_supported(q, k, v, mask, is_causal, enable_gqa):
        with _decomposed(q.device):
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    shape = q.shape
    if q.dim() < 4:
        q, k, v = (t.unsqueeze(0) for t in (q, k, v))
        q, k, v = (t if t.dim() == 4 else t.unsqueeze(0) for t in (q, k, v))
    while mask is not None and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    full = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3])
    q, k, v = (_four_dimensional(t, full) for t in (q, k, v))
    seed, stream = (None, 0)
    if dropout_p > 0.0:
        seed, stream = recorder.seed_tensor(q.device), recorder.next_stream()
    out, _ = Attention.apply(q, k, v, mask, seed, is_causal, scale, float(dropout_p), stream)
    if len(shape) == 4 and out.shape[:-1] == shape[:-1]:
        return out
    out = out.contiguous()
    return out.reshape(*full, *out.shape[1:]) if len(shape) >= 4 else out.reshape(*shape[:-1], out.shape[-1])


def cross_entropy_loss(original, logits, target, weight, reduction, ignore_index, label_smoothing):
    """F.cross_entropy with class indices as one nova.cross_entropy; dimensions after the class are folded into rows."""
    classes = logits.dim() > 1
    supported = (
        logits.is_floating_point() and not target.is_floating_point() and target.dtype in (torch.int64, torch.uint8)
        and logits.dim() >= 1 and target.dim() == logits.dim() - 1
        and (not classes or (logits.shape[0] == target.shape[0] and logits.shape[2:] == target.shape[1:]))
        and logits.shape[1 if classes else 0] > 0 and target.device == logits.device
        and (weight is None or (weight.shape == (logits.shape[1 if classes else 0],) and not weight.requires_grad
                                and weight.dtype == logits.dtype))
        and 0.0 <= label_smoothing <= 1.0 and (logits.dim() <= 2 or logits.numel() > 0)
    )  # fmt: skip
    if not supported:
        return original(logits, target, weight, reduction, ignore_index, label_smoothing)
    if torch.is_autocast_enabled(logits.device.type) and logits.dtype != torch.float64:
        logits, weight = logits.float(), None if weight is None else weight.float()
    if logits.dim() == 1:
        rows, labels = logits.unsqueeze(0), target.unsqueeze(0)
    elif logits.dim() == 2:
        rows, labels = logits, target
    else:
        rows, labels = logits.movedim(1, -1).reshape(-1, logits.shape[1]), target.reshape(-1)
    loss, _ = CrossEntropy.apply(rows, labels, weight, ignore_index, float(label_smoothing), reduction)
    return loss.reshape(target.shape) if reduction == NONE else loss


__all__ = ["LIBRARY", "Attention", "CrossEntropy", "cross_entropy_loss", "define", "scaled_dot_product_attention"]
