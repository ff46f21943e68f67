"""Attention kernels against PyTorch's CPU flash attention, interleaved: `python benchmarks/attention_cpu.py`.

Forward and backward of `F.scaled_dot_product_attention`'s kernel (called directly, so without autograd's overhead) at
the shapes of small GPTs, on one thread or more. Operands are N(0, 1); results are compared before anything is timed.
Nothing is reported for a shape where PyTorch's own spread is over 10 %.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import typer

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]
from common import interleave, interleave_quietly, save

from nova.schedule import target as targets
from nova.schedule.attention import AttentionProblem, schedule_attention
from tests.attention_cases import Case, inputs, kernel, run_forward

# batch, heads, length, head dim, causal
SHAPES = [
    (8, 4, 128, 32, True), (8, 8, 256, 24, True), (8, 8, 256, 64, True), (8, 8, 256, 64, False), (2, 8, 1024, 64, True),
    (4, 12, 512, 128, True), (8, 4, 65, 72, False),
]  # fmt: skip
SECONDS = 1.0  # of measurement for one line
ROUNDS = 15
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def bound(loaded, tensors: list[torch.Tensor]) -> Callable[[], None]:
    """A call of the kernel on fixed tensors."""
    pointers = loaded.pointers(tensors)
    address = ctypes.addressof(pointers)

    def run(kept=(loaded, tensors, pointers)) -> None:  # code and memory live as long as this function
        loaded.function(address)

    return run


def contestants(case: Case) -> dict[str, dict[str, Callable[[], object]]]:
    """{direction: {name: function}}, results compared."""
    tensors = inputs(case)
    tensors |= run_forward(case, tensors)
    q, k, v, dout, out, lse = (tensors[name].contiguous() for name in ("q", "k", "v", "dout", "out", "lse"))
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    ours = {
        "forward": bound(kernel(case, False), [q, k, v, torch.empty_like(out), torch.empty_like(lse)]),
        "backward": bound(kernel(case, True), [dout, q, k, v, out, lse, *gradients]),
    }
    expected, statistic = FLASH(q, k, v, 0.0, case.causal)
    theirs = {
        "forward": lambda: FLASH(q, k, v, 0.0, case.causal),
        "backward": lambda: FLASH_BACKWARD(dout, q, k, v, expected, statistic, 0.0, case.causal),
    }
    ours["backward"]()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for mine, reference in zip(gradients, theirs["backward"](), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-3, atol=1e-4)
    return {direction: {"torch": theirs[direction], "nova": ours[direction]} for direction in ours}


def measure(shape: tuple[int, int, int, int, bool], threads: int) -> list[dict]:
    """The lines of one shape; none for a direction in which PyTorch was not steady."""
    batch, heads, length, dim, causal = shape
    torch.set_num_threads(threads)
    case = Case(batch, heads, heads, length, length, dim, dim, causal=causal)
    lines = []
    for direction, pair in contestants(case).items():
        once = interleave(pair, rounds=3)["torch"].median
        inner = max(1, int(SECONDS / (2 * ROUNDS * once)))
        timings = interleave_quietly(pair, lambda timings: timings["torch"], ROUNDS, inner)
        if timings is None:
            continue
        problem = AttentionProblem(batch, heads, heads, length, length, dim, dim, "f32", causal, direction)
        ours, theirs = timings["nova"].median, timings["torch"].median
        lines.append({
            "shape": f"{batch}x{heads}x{length}x{dim}{' causal' if causal else ''}", "direction": direction,
            "threads": threads, "torch_us": theirs * 1e6, "nova_us": ours * 1e6, "ratio": theirs / ours,
            "nova_gflops": problem.flops() / ours / 1e9,
            "predicted_us": schedule_attention(problem, targets.host()).seconds * 1e6,
        })  # fmt: skip
    return lines


def main(threads: str = "1,2", write: bool = False) -> None:
    """Times every shape on each of `--threads`; `--write` saves benchmarks/results/attention_cpu.json."""
    lines, refused = [], 0
    cores = len(os.sched_getaffinity(0))
    for count in (int(t) for t in threads.split(",")):
        if count > cores:
            print(f"{count} threads: this process may use {cores} cores only", file=sys.stderr)
            continue
        for shape in SHAPES:
            measured = measure(shape, count)
            refused += 2 - len(measured)
            lines += measured
            for line in measured:
                times = f"torch {line['torch_us']:8.0f} us  nova {line['nova_us']:8.0f} us  ratio {line['ratio']:.3f}"
                where = f"{line['shape']:>20} {line['direction']:8}  {count} threads"
                print(f"{where}  {times}  {line['nova_gflops']:5.1f} GFLOP/s")
    if write and lines:
        print(f"wrote {save('attention_cpu', lines)}")
    raise typer.Exit(1 if refused else 0)


if __name__ == "__main__":
    typer.run(main)
