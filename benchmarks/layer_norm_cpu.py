"""Layer norm forward, 8192 rows of 768 float32, on one thread: Nova's kernel against `torch.native_layer_norm`.

`python benchmarks/layer_norm_cpu.py` prints medians of interleaved runs and their ratio; a plain copy of the input
shows what the memory allows. Refuses to report when PyTorch's own times spread by more than 10 %.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch
import typer

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(REPOSITORY)]
from common import interleave_quietly, save

from nova import pipeline
from nova.mlir import context, ir, parse
from nova.schedule import target as targets
from tests.kernels import load_kernel

ROWS, COLUMNS = 8192, 768
KERNEL = REPOSITORY / "tests/ir/fusion/examples/layer_norm.mlir"


def scheduled() -> str:
    """The kernel with its schedule, as a compiled step has it."""
    module = parse(KERNEL.read_text())
    with context(), ir.Location.unknown():
        return str(pipeline.run_pass("configure", module, targets.host()))


def main(rounds: int = 25, threads: int = 1) -> None:
    """Prints the comparison and saves it under benchmarks/results/."""
    torch.set_num_threads(threads)
    x, weight, bias = torch.randn(ROWS, COLUMNS), torch.randn(COLUMNS), torch.randn(COLUMNS)
    y, mean, rstd = torch.empty_like(x), torch.empty(ROWS), torch.empty(ROWS)
    kernel = load_kernel(scheduled())
    pointers = kernel.pointers([x, weight, bias, y, mean, rstd])
    wanted = torch.native_layer_norm(x, [COLUMNS], weight, bias, 1e-5)[0]
    kernel.function(ctypes.addressof(pointers))
    torch.testing.assert_close(y, wanted)
    timings = interleave_quietly(
        {
            "torch": lambda: torch.native_layer_norm(x, [COLUMNS], weight, bias, 1e-5),
            "nova": lambda: kernel.function(ctypes.addressof(pointers)),
            "copy": lambda: y.copy_(x),
        },
        reference=lambda timings: timings["torch"],
        rounds=rounds,
    )
    if timings is None:
        raise typer.Exit(1)
    moved = 2 * x.numel() * 4
    for name, timing in timings.items():
        print(f"{name:6s} {timing.median * 1e3:7.3f} ms  {moved / timing.median / 1e9:6.2f} GB/s")
    print(f"nova is {timings['torch'].median / timings['nova'].median:.2f}x torch.native_layer_norm")
    save("layer_norm_cpu", timings)


if __name__ == "__main__":
    typer.run(main)
