"""Causal attention, forward and backward, beside PyTorch's own backends (paper section 6.1): milliseconds and errors.

Nova's backward is the time of forward and backward in one step less that of the forward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import nova
from nova.bench import timing

SHAPES = (  # batch, length, heads, width of a head
    (8, 512, 12, 64), (8, 1024, 12, 64), (8, 2048, 12, 64), (8, 1024, 16, 64), (8, 1024, 16, 128), (8, 2048, 16, 128),
)  # fmt: skip
DTYPES = {"tf32": torch.float32, "bf16": torch.bfloat16}
HEADER = ("attention", "best PyTorch ms", "nova ms", "best / nova", "error", "PyTorch's error")


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [batch, heads, length, width]."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def step(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients, through the forward."""
    return torch.autograd.grad(attend(q, k, v), (q, k, v), grad)


def measure(shape: tuple[int, int, int, int], precision: str, rounds: int) -> list[dict[str, Any]]:
    """Two rows, forward and backward."""
    batch, length, heads, width = shape
    torch.backends.cuda.matmul.allow_tf32 = True
    dtype = DTYPES[precision]
    sets = []
    for _ in range(timing.sets_for(4 * batch * length * heads * width * dtype.itemsize, 2, 8)):
        made = [torch.randn(batch, heads, length, width, device="cuda").to(dtype) for _ in range(4)]
        sets.append([*(t.requires_grad_() for t in made[:3]), made[3]])
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION} if precision == "bf16" else {}
    backends["efficient"] = SDPBackend.EFFICIENT_ATTENTION
    forward, both = nova.jit(attend), nova.jit(step)

    def ahead(i: int, backend: SDPBackend | None) -> Tensor:
        with torch.no_grad():
            if backend is None:
                return forward(*sets[i][:3])
            with sdpa_kernel(backend):
                return attend(*sets[i][:3])

    saved: dict[tuple[str, int], Tensor] = {}

    def behind(i: int, name: str, backend: SDPBackend) -> Any:
        if (name, i) not in saved:
            with sdpa_kernel(backend):
                saved[name, i] = attend(*sets[i][:3])
        return torch.autograd.grad(saved[name, i], sets[i][:3], sets[i][3], retain_graph=True)

    forwards = {name: (lambda i, b=b: ahead(i, b)) for name, b in backends.items()}
    backwards = {name: (lambda i, n=name, b=b: behind(i, n, b)) for name, b in backends.items()}
    times = timing.interleave(forwards | {"nova": lambda i: ahead(i, None)}, len(sets), rounds)
    back = timing.interleave(backwards | {"pair": lambda i: both(*sets[i])}, len(sets), rounds)
    seconds = {name: t.median for name, t in times.items()}
    seconds_back = {name: t.median for name, t in back.items() if name != "pair"}
    seconds_back["nova"] = back["pair"].median - seconds["nova"]
    errors = _errors(sets[0], ahead, both)
    about = {"shape": list(shape), "precision": precision}
    return [
        about | {"direction": "forward", "seconds": seconds, "error": errors[0]},
        about | {"direction": "backward", "seconds": seconds_back, "error": errors[1]},
    ]


def _errors(tensors: list[Tensor], ahead: Any, both: Any) -> list[dict[str, float]]:
    """Of the first batch entry, against float64 (the largest of the three gradients' errors)."""
    exact = [t[:1].detach().double().requires_grad_(i < 3) for i, t in enumerate(tensors)]
    out = attend(*exact[:3])
    grads = torch.autograd.grad(out, exact[:3], exact[3])
    forward = {"nova": ahead(0, None), "eager": attend(*tensors[:3])}
    backward = {"nova": both(*tensors), "eager": step(*tensors)}
    return [
        {name: timing.relative_error(value[:1], out) for name, value in forward.items()},
        {
            name: max(timing.relative_error(a[:1], b) for a, b in zip(value, grads, strict=True))
            for name, value in backward.items()
        },
    ]


def run(
    shapes: tuple[tuple[int, int, int, int], ...] = (), precisions: tuple[str, ...] = ("bf16", "tf32"), rounds: int = 7
) -> list[dict[str, Any]]:
    """Every shape in every precision."""
    return [row for shape in shapes or SHAPES for precision in precisions for row in measure(shape, precision, rounds)]


def line(row: dict[str, Any]) -> tuple[str, ...]:
    """A row for the table."""
    ours = row["seconds"]["nova"]
    name, best = min(((n, t) for n, t in row["seconds"].items() if n != "nova"), key=lambda item: item[1])
    return (
        f"{'x'.join(map(str, row['shape']))} {row['direction']} {row['precision']}", f"{best * 1e3:.4f} {name}",
        f"{ours * 1e3:.4f}", f"{best / ours:.2f}", f"{row['error']['nova']:.1e}", f"{row['error']['eager']:.1e}",
    )  # fmt: skip
