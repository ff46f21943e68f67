"""Contraction kernels against torch.mm, interleaved in one process: `python benchmarks/matmul_cpu.py`.

Cubes of 512, 1024 and 2048 on one and two threads, and with `--shapes all` those of a GPT-2 block and of a small MLP.
Operands are N(0, 1); results are compared with torch.mm's before anything is timed. Nothing is reported on a machine
so loaded that torch.mm's own spread stays over 10 %, which is tried a few times. Ratios are of medians; the one of the
best rounds stands beside, as it suffers less from what else runs.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from pathlib import Path

import torch
import typer

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]
from common import interleave, interleave_quietly, save

from tests.contraction_text import Case
from tests.kernels import Loaded, load_kernel

CUBES = [(n, n, n, "nn") for n in (512, 1024, 2048)]
OTHERS = [
    (1024, 768, 768, "nt"), (1024, 3072, 768, "nt"), (1024, 768, 3072, "nt"), (1024, 8192, 768, "nt"),
    (768, 3072, 1024, "tn"), (1024, 768, 3072, "nn"), (32, 64, 64, "nt"), (32, 64, 64, "nn"), (64, 64, 32, "tn"),
    (4, 768, 768, "nt"), (1, 768, 768, "nt"), (37, 45, 51, "nn"),
]  # fmt: skip
SPECS = {"nn": "mk,kn->mn", "nt": "mk,nk->mn", "tn": "km,kn->mn"}
SECONDS = 1.2  # of measurement for one line, where rounds are not longer
ROUNDS = 25


def contestants(m: int, n: int, k: int, layout: str):
    """{name: function}; both write into a buffer of their own."""
    case = Case(SPECS[layout], {"m": m, "n": n, "k": k})
    a, b = case.inputs()
    kernel: Loaded = load_kernel(case.text())
    ours, theirs = torch.empty(m, n), torch.empty(m, n)
    left, right = (a.t() if layout[0] == "t" else a), (b.t() if layout[1] == "t" else b)
    pointers = kernel.pointers([a, b, ours])
    address = ctypes.addressof(pointers)

    def run_ours(kept=(kernel, pointers, a, b, ours)) -> None:  # code and memory live as long as this function
        kernel.function(address)

    def run_theirs() -> None:
        torch.mm(left, right, out=theirs)

    run_ours(), run_theirs()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3 * math.sqrt(k))
    return {"torch.mm": run_theirs, "nova": run_ours}


def measure(m: int, n: int, k: int, layout: str, threads: int) -> dict | None:
    """One line of the table, or None if torch.mm was not steady."""
    torch.set_num_threads(threads)
    pair = contestants(m, n, k, layout)
    once = interleave(pair, rounds=3)["torch.mm"].median
    inner = max(1, int(SECONDS / (2 * ROUNDS * once)))
    timings = interleave_quietly(pair, lambda timings: timings["torch.mm"], ROUNDS, inner)
    if timings is None:
        return None
    ours, theirs = timings["nova"].median, timings["torch.mm"].median
    flops = 2.0 * m * n * k
    return {
        "shape": f"{m}x{n}x{k} {layout}", "threads": threads, "torch_us": theirs * 1e6, "nova_us": ours * 1e6,
        "torch_gflops": flops / theirs / 1e9, "nova_gflops": flops / ours / 1e9, "ratio": theirs / ours,
        "ratio_of_best": timings["torch.mm"].best / timings["nova"].best,
    }  # fmt: skip


def _summarise(lines: list[dict], threads: int) -> None:
    names = {f"{n}x{n}x{n} nn" for n, *_ in CUBES}
    ratios = [line["ratio"] for line in lines if line["shape"] in names]
    if len(ratios) == len(CUBES):
        mean = math.prod(ratios) ** (1 / len(ratios))
        print(f"cubes, {threads} threads: geometric mean {mean:.3f}, least {min(ratios):.3f}")


def main(shapes: str = "cubes", threads: str = "1,2", write: bool = False) -> None:
    """Times `--shapes cubes|all` on each of `--threads`; `--write` saves benchmarks/results/matmul_cpu.json."""
    lines, refused = [], 0
    cores = len(os.sched_getaffinity(0))
    for count in (int(t) for t in threads.split(",")):
        if count > cores:
            print(f"{count} threads: this process may use {cores} cores only", file=sys.stderr)
            continue
        for m, n, k, layout in CUBES + (OTHERS if shapes == "all" else []):
            line = measure(m, n, k, layout, count)
            refused += line is None
            if line:
                lines.append(line)
                print(
                    f"{line['shape']:>22}  {count} threads  torch.mm {line['torch_gflops']:6.1f} GFLOP/s  "
                    f"nova {line['nova_gflops']:6.1f}  ratio {line['ratio']:.3f} "
                    f"(best {line['ratio_of_best']:.3f})"
                )
        _summarise([line for line in lines if line["threads"] == count], count)
    if write and lines:
        print(f"wrote {save('matmul_cpu', lines)}")
    raise typer.Exit(1 if refused else 0)


if __name__ == "__main__":
    typer.run(main)
