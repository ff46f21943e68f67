"""Fifty training steps of GPT-2 124M, compiled and eager, from the same parameters on the same data: losses as JSON.

    python benchmarks/gpt2_losses_gpu.py --out benchmarks/results [--steps 50] [--batch 8] [--precision f32 tf32 bf16]

The yardstick is eager in float64: in each precision the compiled losses must be as close to it as eager's own (factor
2, by the norm over all steps), or differ from eager's by no more than rounding does (three times eager's distance).
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import nova
from nova.bench import gpt2, timing

WARMUP = 100  # steps to the full learning rate


def train(precision: str, compiled: bool, steps: int, batch: int, layers: int, length: int) -> dict:
    """Losses of one run."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.set_float32_matmul_precision("high" if precision in ("tf32", "bf16") else "highest")
    model = gpt2.make_model(layers)  # drawn in float32, whatever it trains in
    if precision == "f64":
        model.double()
    who, optimizer = "nova" if compiled else "eager", gpt2.make_optimizer(model)
    step = gpt2.make_step(who, precision, model, optimizer, clip=1.0)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / WARMUP)
    generator = torch.Generator("cuda").manual_seed(1)
    # tokens by Zipf's law, as words are: their frequencies are learnt smoothly; a harder text at a high rate makes the
    # run so sensitive to rounding that no two programs agree
    u = torch.rand((steps, batch, length + 1), device="cuda", generator=generator, dtype=torch.float64)
    data = (torch.exp(u * math.log(gpt2.VOCABULARY)) - 1).long()

    began = time.perf_counter()
    losses = []
    for d in data:
        losses.append(step(d[:, :-1].contiguous(), d[:, 1:].contiguous()))
        warmup.step()
    nova.synchronize()
    found = [loss.item() for loss in losses]
    return {
        "who": who, "precision": precision, "batch": batch, "steps": steps,
        "length": length, "layers": layers, "seconds": time.perf_counter() - began, "losses": found,
        "captures": step.captures if compiled else 0,
    }  # fmt: skip


def distance(a: list[float], b: list[float]) -> float:
    return timing.relative_error(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=gpt2.LAYERS)
    parser.add_argument("--length", type=int, default=gpt2.CONTEXT)
    parser.add_argument("--precision", nargs="+", default=["tf32", "bf16"], choices=["f32", "tf32", "bf16"])
    options = parser.parse_args()
    shape = (options.steps, options.batch, options.layers, options.length)
    exact = train("f64", False, *shape)
    rows, failed = [exact], 0
    print(f"float64 eager: {exact['losses'][0]:.4f} -> {exact['losses'][-1]:.4f}, {exact['seconds']:.0f} s", flush=True)
    for precision in options.precision:
        eager, mine = (train(precision, compiled, *shape) for compiled in (False, True))
        rows += [eager, mine]
        own, theirs, apart = (
            distance(mine["losses"], exact["losses"]), distance(eager["losses"], exact["losses"]),
            distance(mine["losses"], eager["losses"]),
        )  # fmt: skip
        mine |= {"error": own, "eager_error": theirs, "distance_to_eager": apart}
        good = own <= 2 * theirs + 1e-7 and apart <= 3 * theirs + 1e-7 and mine["captures"] == 1
        failed += not good
        largest = max(abs(a - b) for a, b in zip(mine["losses"], eager["losses"], strict=True))
        print(
            f"{precision}: last loss {mine['losses'][-1]:.6f}, eager {eager['losses'][-1]:.6f}; error {own:.2e}, "
            f"eager's {theirs:.2e}, apart {apart:.2e} (at most {largest:.2e} in one step), "
            f"captured {mine['captures']} times, {mine['seconds']:.0f} s: {'good' if good else 'TOO FAR'}", flush=True,
        )  # fmt: skip
    path = options.out / "gpt2_losses_gpu.json"
    timing.save(path, rows)
    print(f"saved {path}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
