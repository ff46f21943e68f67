"""Contractions beside cuBLAS (paper section 6.1): TFLOP/s of the paper's nine shapes, in every layout of the operands.

NN: A[M,K] B[K,N].  NT: B is stored [N,K].  TN: A is stored [K,M].  Errors: relative norm against float64 on 64 rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import nova
from nova.bench import timing

PAPER = (
    (512, 512, 512), (1024, 1024, 1024), (5120, 5120, 5120), (16384, 3072, 768), (16384, 768, 3072),
    (16384, 50304, 768), (16384, 768, 50304), (4096, 768, 50304), (4096, 768, 3072),
)  # fmt: skip
LAYOUTS = ("NN", "NT", "TN")
DTYPES = {"tf32": torch.float32, "bf16": torch.bfloat16, "f32": torch.float32}
HEADER = ("M x N x K", "layout", "type", "cuBLAS TFLOP/s", "nova TFLOP/s", "nova / cuBLAS", "error", "cuBLAS error")


def product(layout: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The contraction of operands as they are stored."""
    if layout == "NN":
        return lambda a, b: a @ b
    return (lambda a, b: a @ b.t()) if layout == "NT" else (lambda a, b: a.t() @ b)


def measure(m: int, n: int, k: int, layout: str, precision: str, rounds: int) -> dict[str, Any]:
    """One row: both contestants, interleaved, and their errors."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    dtype = DTYPES[precision]
    shapes = (k, m) if layout[0] == "T" else (m, k), (n, k) if layout[1] == "T" else (k, n)
    nbytes = (m * k + k * n + m * n) * dtype.itemsize
    sets = [
        tuple(torch.randn(shape, device="cuda").to(dtype) for shape in shapes)
        for _ in range(timing.sets_for(nbytes, 1, 16))
    ]
    function = product(layout)
    compiled = nova.jit(function)
    contestants = {"cublas": lambda i: function(*sets[i]), "nova": lambda i: compiled(*sets[i])}
    a, b = sets[0]
    rows = torch.randperm(m, device="cuda")[:64]
    exact = function((a[:, rows] if layout[0] == "T" else a[rows]).double(), b.double())
    errors = {name: timing.relative_error(run(0)[rows], exact) for name, run in contestants.items()}
    times = timing.interleave(contestants, len(sets), rounds)
    flops = 2.0 * m * n * k
    return {
        "shape": [m, n, k], "layout": layout, "precision": precision, "error": errors,
        "tflops": {name: flops / t.median * 1e-12 for name, t in times.items()},
        "seconds": {name: t.median for name, t in times.items()},
    }  # fmt: skip


def run(
    shapes: tuple[tuple[int, int, int], ...] = (), layouts: tuple[str, ...] = LAYOUTS,
    precisions: tuple[str, ...] = ("tf32", "bf16"), rounds: int = 7,
) -> list[dict[str, Any]]:  # fmt: skip
    """Every combination; the paper's shapes and 8192 cubed if none is given."""
    return [
        measure(*shape, layout, precision, rounds)
        for shape in shapes or ((8192, 8192, 8192), *PAPER) for layout in layouts for precision in precisions
    ]  # fmt: skip


def line(row: dict[str, Any]) -> tuple[str, ...]:
    """A row for the table."""
    ours, theirs = row["tflops"]["nova"], row["tflops"]["cublas"]
    return (
        "x".join(map(str, row["shape"])), row["layout"], row["precision"], f"{theirs:.0f}", f"{ours:.0f}",
        f"{ours / theirs:.2f}", f"{row['error']['nova']:.1e}", f"{row['error']['cublas']:.1e}",
    )  # fmt: skip
