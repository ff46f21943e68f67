"""A GPT-2 training step beside eager and `torch.compile`: tokens a second, peak memory, compile time, kernels.

124M parameters as published: 12 layers, 12 heads, width 768, 1,024 tokens, vocabulary padded to 50,304, tied head.
PyTorch's contestants use `fused=True` AdamW, which is their fastest.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nova
from nova import inspect

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 50304, 1024, 768, 12, 12


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT2(nn.Module):
    """Returns the loss of next-token prediction."""

    def __init__(self, layers: int = LAYERS, width: int = WIDTH, heads: int = HEADS, vocabulary: int = VOCABULARY):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, p in self.named_parameters():
            if p.dim() == 2:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if last else 0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def make_model(layers: int) -> GPT2:
    """From the same seed for every contestant."""
    torch.manual_seed(0)
    return GPT2(layers).cuda()


def make_optimizer(model: GPT2) -> torch.optim.Optimizer:
    """With the settings that GPT-2 is usually trained with."""
    return torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def make_step(
    who: str, precision: str, model: GPT2, optimizer: torch.optim.Optimizer, clip: float | None = None
) -> Any:
    """The training step of one contestant: (ids, targets) -> loss. `clip` bounds the norm of the gradients."""
    run: Any = torch.compile(model) if who == "torch.compile" else model

    def step(ids: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            loss = run(ids, targets)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return nova.jit(step) if who == "nova" else step


def measure(who: str, precision: str, batch: int, steps: int, layers: int = LAYERS) -> dict[str, Any]:
    """One contestant: first step, steady steps by events, peak memory, losses."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (batch, CONTEXT + 1)
    data = [torch.randint(VOCABULARY, shape, device="cuda", generator=generator) for _ in range(4)]
    model = make_model(layers)
    step = make_step(who, precision, model, make_optimizer(model))
    start = time.perf_counter()
    losses = [step(data[0][:, :-1].contiguous(), data[0][:, 1:].contiguous())]
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    batches = [(d[:, :-1].contiguous(), d[:, 1:].contiguous()) for d in data]
    for i in range(1, 5):
        losses.append(step(*batches[i % 4]))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    events, host = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)], []
    events[0].record()
    for i in range(steps):  # as a training loop runs: the host may be ahead of the device
        begin = time.perf_counter()
        losses.append(step(*batches[(i + 5) % 4]))
        events[i + 1].record()
        host.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    seconds = [a.elapsed_time(b) * 1e-3 for a, b in pairwise(events)]
    peak = torch.cuda.max_memory_allocated()
    middle = sorted(seconds)[len(seconds) // 2]
    row = {
        "who": who, "precision": precision, "batch": batch, "seconds": middle, "least": min(seconds),
        "tokens_per_second": batch * CONTEXT / middle, "peak_bytes": peak, "first_step_seconds": first,
        "host_seconds": min(host), "losses": [float(loss) for loss in losses],
    }  # fmt: skip
    if who == "nova":
        return row | {"kernels": inspect.breakdown(step, *batches[0])}
    return row | {"kernels": kernels_of(lambda: step(*batches[0]))}


def kernels_of(run: Callable[[], Any]) -> list[dict[str, Any]]:
    """Device time of one call by kernel, largest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        run()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.device_time > 0:
            found.setdefault(event.name, []).append(event.device_time * 1e-6)
    whole = sum(sum(t) for t in found.values())
    rows = [
        {"kernel": name[:120], "calls": len(t), "seconds": sum(t), "share": sum(t) / whole} for name, t in found.items()
    ]
    return sorted(rows, key=lambda row: -row["seconds"])


def run(
    batches: tuple[int, ...] = (8, 16), precisions: tuple[str, ...] = ("tf32", "bf16"), steps: int = 20,
    contestants: tuple[str, ...] = ("eager", "torch.compile", "nova"), layers: int = LAYERS,
) -> list[dict[str, Any]]:  # fmt: skip
    """All contestants in turn."""
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    return [
        measure(who, precision, batch, steps, layers)
        for precision in precisions for batch in batches for who in contestants
    ]  # fmt: skip


def line(row: dict[str, Any]) -> tuple[str, ...]:
    """A row for the table."""
    return (
        f"{row['precision']} batch {row['batch']} {row['who']}", f"{row['seconds'] * 1e3:.2f}",
        f"{row['tokens_per_second']:,.0f}", f"{row['peak_bytes'] / 1e9:.2f}", f"{row['first_step_seconds']:.1f}",
        f"{row['host_seconds'] * 1e3:.2f}", f"{row['losses'][-1]:.4f}",
    )  # fmt: skip


HEADER = ("step", "ms", "tokens/s", "peak GB", "first step s", "host ms", "last loss")
