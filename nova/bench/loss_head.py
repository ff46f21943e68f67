"""The head of a language model with its loss: x[tokens, width] W[vocabulary, width]^T, the loss, both gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import nova
from nova.bench import timing
from nova.measure import peak_allocated

TOKENS, WIDTH, VOCABULARY = 8192, 768, 50304
HEADER = ("loss head", "forward ms", "both ms", "peak GB of both", "error of dx")


def loss_of(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), labels)


def step(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    loss = loss_of(x, weight, labels)
    return (loss.detach(), *torch.autograd.grad(loss, (x, weight)))


def _liger(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss = liger_fused_linear_cross_entropy(x, weight, labels)
    return (loss.detach(), *torch.autograd.grad(loss, (x, weight)))


def measure(precision: str, rounds: int) -> list[dict[str, Any]]:
    """A row a contestant. Liger computes its gradients in the forward, so it has no forward of its own."""
    torch.backends.cuda.matmul.allow_tf32 = True
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x = torch.randn(TOKENS, WIDTH, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, WIDTH, device="cuda") * 0.05).to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (TOKENS,), device="cuda")
    exact = x[:256].detach().double().requires_grad_()
    loss = F.cross_entropy(F.linear(exact, weight.double()), labels[:256], reduction="sum") / TOKENS
    wanted = torch.autograd.grad(loss, exact)[0]
    compiled = torch.compile(loss_of)

    def compiled_step(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        found = compiled(x, weight, labels)
        return (found.detach(), *torch.autograd.grad(found, (x, weight)))

    steps: dict[str, Any] = {"eager": step, "torch.compile": compiled_step, "nova": nova.jit(step)}
    forwards: dict[str, Any] = {"eager": loss_of, "torch.compile": compiled, "nova": nova.jit(loss_of)}
    if timing.liger() is not None:
        steps["liger"] = _liger

    def ahead(function: Any) -> timing.Run:
        def run(i: int) -> Any:
            with torch.no_grad():
                return function(x, weight, labels)

        return run

    def behind(function: Any) -> timing.Run:
        return lambda i: function(x, weight, labels)

    both = timing.interleave({n: behind(f) for n, f in steps.items()}, 1, rounds)
    forward = timing.interleave({n: ahead(f) for n, f in forwards.items()}, 1, rounds)
    rows = []
    for name, function in steps.items():
        peak = peak_allocated(partial(function, x, weight, labels), torch.device("cuda", 0))
        error = timing.relative_error(function(x, weight, labels)[1][:256], wanted)
        rows.append({
            "who": name, "precision": precision, "seconds": both[name].median, "peak_bytes": peak, "error": error,
            "forward_seconds": forward[name].median if name in forward else None,
        })  # fmt: skip
    return rows


def run(precisions: tuple[str, ...] = ("tf32", "bf16"), rounds: int = 7) -> list[dict[str, Any]]:
    """Both precisions."""
    return [row for precision in precisions for row in measure(precision, rounds)]


def line(row: dict[str, Any]) -> tuple[str, ...]:
    """A row for the table."""
    forward = row["forward_seconds"]
    return (
        f"{row['precision']} {row['who']}", f"{forward * 1e3:.3f}" if forward else "-", f"{row['seconds'] * 1e3:.3f}",
        f"{row['peak_bytes'] / 1e9:.2f}", f"{row['error']:.1e}",
    )  # fmt: skip
