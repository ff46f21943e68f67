"""Whole training steps on the CPU: eager, `torch.compile` and Nova, interleaved in one process.

`python benchmarks/step_cpu.py gpt` is the model of `make demo`; `mlp` is small enough for dispatch to dominate. Both
optimizer forms are timed for every contestant, default and `fused=True`, and each contestant keeps its faster one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import typer

import nova

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "examples")]
from common import Timing, interleave_quietly, save


def _faster(timings: dict[str, Timing], name: str) -> Timing:
    """Of a contestant's two optimizer forms, the one with the lower median."""
    return min((t for t in timings.values() if t.name.startswith(name)), key=lambda t: t.median)


def gpt_step(fused: bool):
    from train_gpt import BATCH, CONTEXT, GPT, HEADS, LAYERS, WIDTH, batches

    torch.manual_seed(0)
    model = GPT(WIDTH, HEADS, LAYERS, CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95), fused=fused)
    data = batches(torch.randint(256, (100_000,)), 1, BATCH, CONTEXT, 0, torch.device("cpu"))[0]

    def step(ids, targets):
        loss = model(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, data


def mlp_step(fused: bool):
    torch.manual_seed(0)
    layers = [m for _ in range(3) for m in (torch.nn.Linear(64, 64), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)

    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, (torch.randn(32, 64), torch.randn(32, 64))


def main(what: str = "gpt", rounds: int = 15, compile: bool = True, inner: int = 0) -> None:
    """Prints medians and ratios; refuses when eager itself is unsteady."""
    make = {"gpt": gpt_step, "mlp": mlp_step}[what]
    inner = inner or (1 if what == "gpt" else 50)
    contestants = {}
    for fused in (False, True):
        label = "fused" if fused else "default"
        for name, wrap in (("eager", None), ("compile", torch.compile), ("nova", nova.jit)):
            if name == "compile" and not compile:
                continue
            step, data = make(fused)
            if name == "compile":  # the model's forward and backward are compiled; the optimizer has its own kernel
                cell = dict(zip(step.__code__.co_freevars, step.__closure__))["model"]
                cell.cell_contents = torch.compile(cell.cell_contents)
            elif wrap:
                step = wrap(step)
            contestants[f"{name} {label}"] = lambda step=step, data=data: step(*data)
    timings = interleave_quietly(contestants, lambda timings: _faster(timings, "eager"), rounds, inner, warmup=3)
    if timings is None:
        raise typer.Exit(1)
    for t in timings.values():
        print(f"{t.name:16} {t.median * 1e3:9.3f} ms  (spread {t.spread:.0%})")
    best = {n: _faster(timings, n) for n in ("eager", "compile", "nova") if compile or n != "compile"}
    ratios = {f"nova vs {n}": best[n].median / best["nova"].median for n in best if n != "nova"}
    ratios["nova vs eager default"] = timings["eager default"].median / best["nova"].median
    ratios["nova vs eager fused"] = timings["eager fused"].median / best["nova"].median
    for name, value in ratios.items():
        print(f"{name:24} {value:.2f}x")
    print("saved", save(f"step_cpu_{what}", {"timings": list(timings.values()), "ratios": ratios}))


if __name__ == "__main__":
    typer.run(main)
