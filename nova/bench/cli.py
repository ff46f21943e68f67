"""The commands of `python -m nova bench`: run, print a table, save JSON."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, rich_markup_mode=None)
OUT = typer.Option(Path("benchmarks/results"), help="folder for the JSON")
NAMES = typer.Argument(None, help="operators; all if none is named")
BATCHES = typer.Option([8, 16], "--batch")
PRECISIONS = typer.Option(["tf32", "bf16"], "--precision")
SHAPES = typer.Option(None, "--shape", help="sizes with commas between; may be given several times")
LAYOUTS = typer.Option(["NN", "NT", "TN"], "--layout")
WHO = typer.Option(["eager", "torch.compile", "nova"], "--who", help="contestants")


def _report(module: Any, rows: list[dict[str, Any]], path: Path) -> None:
    from nova.bench import timing

    timing.save(path, rows)
    table = Table(*module.HEADER)
    for row in rows:
        table.add_row(*module.line(row))
    Console(width=150, markup=False).print(table)
    print(f"saved {path}")


def _needs_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter("this benchmark needs an NVIDIA GPU that PyTorch can use")


@app.command("memory-bound")
def memory_bound(names: list[str] = NAMES, rounds: int = 9, out: Path = OUT) -> None:
    """Layer norm, GELU, softmax cross entropy: forward and backward, float32 and bfloat16."""
    _needs_gpu()
    module = importlib.import_module("nova.bench.memory_bound")
    _report(module, module.run(rounds, tuple(names or ())), out / "memory_bound_gpu.json")


@app.command()
def gpt2(
    batch: list[int] = BATCHES, precision: list[str] = PRECISIONS, steps: int = 20, who: list[str] = WHO,
    layers: int = 12, out: Path = OUT,
) -> None:  # fmt: skip
    """A whole GPT-2 124M training step with AdamW."""
    _needs_gpu()
    module = importlib.import_module("nova.bench.gpt2")
    rows = module.run(tuple(batch), tuple(precision), steps, tuple(who), layers)
    _report(module, rows, out / "gpt2_gpu.json")


@app.command()
def matmul(
    shape: list[str] = SHAPES, layout: list[str] = LAYOUTS, precision: list[str] = PRECISIONS, out: Path = OUT
) -> None:
    """Contractions beside cuBLAS: 8192 cubed and the paper's shapes, or the given M,N,K."""
    _needs_gpu()
    module = importlib.import_module("nova.bench.matmul")
    shapes = tuple(tuple(int(n) for n in text.split(",")) for text in shape or ())
    _report(module, module.run(shapes, tuple(layout), tuple(precision)), out / "matmul_gpu.json")


@app.command()
def attention(shape: list[str] = SHAPES, precision: list[str] = PRECISIONS, out: Path = OUT) -> None:
    """Causal attention beside PyTorch's backends: the paper's shapes, or the given batch,length,heads,width."""
    _needs_gpu()
    module = importlib.import_module("nova.bench.attention")
    shapes = tuple(tuple(int(n) for n in text.split(",")) for text in shape or ())
    _report(module, module.run(shapes, tuple(precision)), out / "attention_gpu.json")


@app.command("loss-head")
def loss_head(precision: list[str] = PRECISIONS, out: Path = OUT) -> None:
    """Language-model head with softmax cross entropy, forward and backward."""
    _needs_gpu()
    module = importlib.import_module("nova.bench.loss_head")
    _report(module, module.run(tuple(precision)), out / "loss_head_gpu.json")
