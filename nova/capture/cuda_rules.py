"""Operators that PyTorch has on a GPU only, recorded as the operations that the CPU's path is made of.

    aten._fused_rms_norm(x, [768], w, eps)    ->   rstd = rsqrt(mean(x^2) + eps);  y = x * rstd * w
    aten._thnn_fused_lstm_cell(gi, gh, c)     ->   i, f, g, o = chunk(gi + gh);  c' = f c + i g;  h' = o tanh(c')

So one graph serves both devices. What the backward of a cell needs lies in its workspace, whose contents are ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nova.capture.rules import decomposed
from nova.capture.views import aten

if TYPE_CHECKING:
    from nova.capture.record import Recorder


def _wide(*tensors: Tensor | None) -> list[Any]:
    """Tensors in the type that PyTorch's kernels compute in."""
    return [t.float() if t is not None and t.dtype in (torch.bfloat16, torch.float16) else t for t in tensors]


# ---- RMS norm --------------------------------------------------------------------------------------------------


def rms_norm(
    rec: Recorder, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """(y, rstd)."""
    wide, w = _wide(x, weight)
    dims = list(range(x.dim() - len(shape), x.dim()))
    rstd = torch.rsqrt((wide * wide).mean(dims, keepdim=True) + (torch.finfo(wide.dtype).eps if eps is None else eps))
    y = wide * rstd
    return (y if w is None else y * w).to(x.dtype), rstd


def rms_norm_backward(
    rec: Recorder, dy: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """(dx, dweight)."""
    wide, w, d, rstd = _wide(x, weight, dy, rstd)
    leading = x.dim() - len(shape)
    normal = wide * rstd
    dx = dweight = None
    if mask[0]:
        scaled = d if w is None else d * w
        inner = (scaled * normal).mean(list(range(leading, x.dim())), keepdim=True)
        dx = ((scaled - normal * inner) * rstd).to(x.dtype)
    if mask[1] and weight is not None:
        product = d * normal
        dweight = (product.sum(list(range(leading))) if leading else product).to(weight.dtype)
    return dx, dweight


# ---- recurrent cells -------------------------------------------------------------------------------------------


def _sum(*tensors: Tensor | None) -> Tensor:
    present = [t for t in tensors if t is not None]
    total = present[0]
    for t in present[1:]:
        total = total + t
    return total


def lstm_cell(
    rec: Recorder, input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(h', c', workspace): the four gates after their activations."""
    total = _sum(*_wide(input_gates, hidden_gates, input_bias, hidden_bias))
    gates = total.chunk(4, 1)
    i, f, g, o = gates[0].sigmoid(), gates[1].sigmoid(), gates[2].tanh(), gates[3].sigmoid()
    cy = f * _wide(cx)[0] + i * g
    hy = o * cy.tanh()
    return hy.to(cx.dtype), cy.to(cx.dtype), torch.cat([i, f, g, o], 1).to(cx.dtype)


def lstm_cell_backward(
    rec: Recorder, grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor,
    has_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(gradient of the gates, of cx, of the bias)."""
    dh, dc, old, new, gates = _wide(grad_hy, grad_cy, cx, cy, workspace)
    if dh is None and dc is None:
        return None, None, None
    i, f, g, o = gates.chunk(4, 1)
    t = new.tanh()
    parts = [] if dc is None else [dc]
    parts += [] if dh is None else [dh * o * (1 - t * t)]
    total = _sum(*parts)
    out = torch.zeros_like(o) if dh is None else dh * t * o * (1 - o)
    grad = torch.cat([total * g * i * (1 - i), total * old * f * (1 - f), total * i * (1 - g * g), out], 1)
    grad = grad.to(workspace.dtype)
    return grad, (total * f).to(cx.dtype), grad.sum(0) if has_bias else None


def gru_cell(
    rec: Recorder, input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(h', workspace): reset gate, update gate, new gate, the hidden part of the new gate, hx."""
    gi, gh, old = _wide(input_gates, hidden_gates, hx)
    ir, iz, inew = (gi if input_bias is None else gi + _wide(input_bias)[0]).chunk(3, 1)
    hr, hz, hnew = (gh if hidden_bias is None else gh + _wide(hidden_bias)[0]).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (inew + r * hnew).tanh()
    hy = n + z * (old - n)
    return hy.to(hx.dtype), torch.cat([r, z, n, hnew, old], 1).to(hx.dtype)


def gru_cell_backward(
    rec: Recorder, grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """(gradients of the input gates, of the hidden gates, of hx, of both biases)."""
    dh, saved = _wide(grad_hy, workspace)
    r, z, n, hnew, old = saved.chunk(5, 1)
    dn = dh * (1 - z) * (1 - n * n)
    dz = dh * (old - n) * z * (1 - z)
    dr = dn * hnew * r * (1 - r)
    gi, gh = (torch.cat(parts, 1).to(workspace.dtype) for parts in ([dr, dz, dn], [dr, dz, dn * r]))
    dhx = (dh * z).to(workspace.dtype)
    return gi, gh, dhx, gi.sum(0) if has_bias else None, gh.sum(0) if has_bias else None


# Names differ between versions of PyTorch: what a version lacks needs no rule.
_RULES: dict[str, Any] = {
    "_fused_rms_norm": rms_norm, "_fused_rms_norm_backward": rms_norm_backward, "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward, "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
}  # fmt: skip
for _name, _rule in _RULES.items():
    if hasattr(aten, _name):
        decomposed(getattr(aten, _name).default)(_rule)
