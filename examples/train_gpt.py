"""Trains a byte-level GPT on the Python standard library, eagerly and compiled by Nova, and compares the two.

Both runs start from the same weights and see the same batches, one after the other. Run it with `make demo`, or
`python examples/train_gpt.py --help` for the options.
"""

from __future__ import annotations

import math
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import nova
from nova.measure import peak_allocated

console = Console()
WARMUP = 3  # steps left out of the timing
LEARNING_RATE = 1e-3
BATCH, CONTEXT, WIDTH, HEADS, LAYERS = 2, 128, 128, 8, 6  # 1.2 M parameters: two cores train it in a minute


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.ln1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.out(F.gelu(self.fc(self.ln2(x))))


class GPT(nn.Module):
    """Bytes in, bytes out: learned positions, pre-norm blocks, head tied to the embedding."""

    def __init__(self, width: int, heads: int, layers: int, context: int, vocab: int = 256):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if "proj" in name or "out." in name else 0.02)
        self.head.weight = self.tok.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln(x)).flatten(0, 1), targets.flatten())


@dataclass
class Run:
    """What one training run measured."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # per step, after warm-up
    first_step: float = 0.0
    validation: float = 0.0
    peak: float = 0.0  # bytes that one step needs beside the parameters and the optimizer's state


def corpus(limit: int = 20_000_000) -> Tensor:
    """The bytes of the standard library's source files, in a fixed order."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    files += sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*/*.py"))
    files = [f for f in dict.fromkeys(files) if "site-packages" not in f.parts]
    data = bytearray()
    for f in files:
        data += f.read_bytes()
        if len(data) > limit:
            break
    return torch.frombuffer(data, dtype=torch.uint8).long()


def batches(data: Tensor, count: int, batch: int, context: int, seed: int, device: torch.device) -> list[tuple]:
    """`count` random windows of the data and their next bytes, the same for the same seed."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        at = torch.randint(len(data) - context - 1, (batch,), generator=g)
        window = data[at[:, None] + torch.arange(context + 1)]
        out.append((window[:, :-1].contiguous().to(device), window[:, 1:].contiguous().to(device)))
    return out


def learning_rate(step: int, steps: int, warmup: int = 60) -> float:
    """Relative learning rate: linear warm-up, then cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def train(name: str, compiled: bool, model: GPT, data: list[tuple], held_out: list[tuple], device, progress) -> Run:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: learning_rate(i, len(data)))
    run = Run(name)

    def step(ids: Tensor, targets: Tensor) -> Tensor:
        loss = model(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def evaluate(ids: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            return model(ids, targets)

    if compiled:
        step, evaluate = nova.jit(step), nova.jit(evaluate)
    bar = progress.add_task(name, total=len(data), loss="")
    for i, (ids, targets) in enumerate(data):
        start = time.perf_counter()
        value = step(ids, targets).item()
        elapsed = time.perf_counter() - start
        schedule.step()
        run.losses.append(value)
        if i == 0:
            run.first_step = elapsed
        elif i >= WARMUP:
            run.seconds.append(elapsed)
        progress.update(bar, advance=1, loss=f"loss {value:.3f}")
    if compiled:
        run.peak = nova.explain(step, *data[0]).memory.step_bytes
    else:
        run.peak = peak_allocated(lambda: step(*data[0]), device)
    run.validation = sum(evaluate(*b).item() for b in held_out) / len(held_out)
    return run


def plot(runs: list[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    for run, style in zip(runs, ("-", "--")):
        axes.plot(run.losses, style, label=f"{run.name} (validation {run.validation:.4f})", linewidth=1.5)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats per byte)")
    axes.set_title("Byte-level GPT on the Python standard library")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def report(runs: list[Run], tokens: int) -> None:
    eager, compiled = runs
    table = Table(title="Eager PyTorch and Nova, same weights, same batches")
    for column in ("", "tokens/s", "ms/step", "first step s", "step memory MB", "train loss", "val. loss"):
        table.add_column(column, justify="left" if not column else "right")
    for run in runs:
        ms = median(run.seconds) * 1e3
        table.add_row(run.name, f"{tokens / ms * 1e3:,.0f}", f"{ms:.1f}", f"{run.first_step:.2f}",
                      f"{run.peak / 1e6:.1f}", f"{run.losses[-1]:.4f}", f"{run.validation:.4f}")  # fmt: skip
    console.print(table)
    worst = max(abs(a - b) for a, b in zip(eager.losses, compiled.losses))
    speed = median(eager.seconds) / median(compiled.seconds)
    console.print(
        f"Nova runs {speed:.2f}x as many tokens a second; the largest loss difference of the run is {worst:.1e}."
    )


def main(
    device: str = typer.Option("cpu", help="cpu or cuda"),
    steps: int = typer.Option(600, help="training steps of each run"),
    batch: int = BATCH,
    context: int = CONTEXT,
    width: int = WIDTH,
    heads: int = HEADS,
    layers: int = LAYERS,
    seed: int = 1234,
    out: Path = typer.Option(Path("demo_out"), help="where the plot is written"),
) -> None:
    """Trains the same GPT eagerly and compiled, and prints both side by side."""
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("PyTorch finds no NVIDIA GPU here", param_hint="--device")
    data = corpus()
    cut = int(len(data) * 0.95)
    training = batches(data[:cut], steps, batch, context, seed, where)
    held_out = batches(data[cut:], 8, batch, context, seed + 1, where)
    runs = []
    columns = (TextColumn("{task.description:>6}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.fields[loss]}"))  # fmt: skip
    for name, compiled in (("eager", False), ("nova", True)):
        torch.manual_seed(seed)
        model = GPT(width, heads, layers, context).to(where)
        if not compiled:
            size = sum(p.numel() for p in model.parameters()) / 1e6
            console.print(f"{size:.1f} M parameters, {len(data) / 1e6:.1f} MB of source text, {steps} steps of "
                          f"{batch} x {context} bytes on {device}")  # fmt: skip
        with Progress(*columns, console=console) as progress:
            runs.append(train(name, compiled, model, training, held_out, where, progress))
    report(runs, batch * context)
    out.mkdir(parents=True, exist_ok=True)
    plot(runs, out / "loss.png")
    console.print(f"Loss curves: {out / 'loss.png'}")


if __name__ == "__main__":
    typer.run(main)
