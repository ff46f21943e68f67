"""Contraction kernels by themselves on a GPU, beside cuBLAS: the paper's shapes and layouts, and schedules by hand.

    python benchmarks/matmul_gpu.py build --target h200 --out kernels       needs no GPU: cubins and a list of them
    python benchmarks/matmul_gpu.py run kernels --out result.json           needs PyTorch and the driver, and no MLIR

A case is MxNxK:LAYOUT:TYPE[:BMxBNxBK:WMxWN:STAGES], the last part a schedule instead of the configurator's. Inputs are
N(0, 1). Each kernel is first compared with float64 on 64 rows; then it and torch.matmul take turns, each on input sets
that together exceed the L2 cache, timed by events behind a spinning kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import gpu_kernels
import torch
from gpu_kernels import timing

PAPER = (
    (512, 512, 512), (1024, 1024, 1024), (5120, 5120, 5120), (16384, 3072, 768), (16384, 768, 3072),
    (16384, 50304, 768), (16384, 768, 50304), (4096, 768, 50304), (4096, 768, 3072),
)  # fmt: skip
LAYOUTS = ("nn", "nt", "tn")
SWEEP = {
    "bf16": ("256x128x64:4x2:4", "128x256x64:2x4:4", "128x256x32:2x4:4", "256x128x64:4x2:3", "128x128x64:2x2:3",
             "128x128x32:2x2:4", "128x128x64:2x4:3", "256x128x32:4x2:4"),
    "tf32": ("256x128x32:4x2:4", "128x256x32:2x4:4", "256x128x32:4x2:3", "128x128x32:2x2:3", "128x128x16:2x2:4",
             "128x128x32:2x4:3", "256x128x16:4x2:4"),
    "f32": ("128x128x16:2x2:2", "256x128x16:4x2:2", "128x128x32:2x2:2", "128x128x16:2x2:3", "128x64x32:2x2:2"),
}  # fmt: skip


# --- build: on any machine --------------------------------------------------------------------------------------------


def kernel_text(m: int, n: int, k: int, layout: str, precision: str) -> str:
    """Level 2 of a plain product; operands as BLAS names their layouts."""
    element = "f32" if precision in ("f32", "tf32") else precision
    a, a_map = (f"{m}x{k}", "(m, k)") if layout[0] == "n" else (f"{k}x{m}", "(k, m)")
    b, b_map = (f"{k}x{n}", "(k, n)") if layout[1] == "n" else (f"{n}x{k}", "(n, k)")
    a, b, c, total = (
        f"tensor<{a}x{element}>",
        f"tensor<{b}x{element}>",
        f"tensor<{m}x{n}x{element}>",
        f"tensor<{m}x{n}xf32>",
    )
    wide = element != "f32"
    extend = "".join(f"%{x}w = arith.extf %{x} : {element} to f32\n" for x in "lr") if wide else ""
    left, right = ("%lw", "%rw") if wide else ("%l", "%r")
    start = f"%e = tensor.empty() : {total}" if wide else ""
    into = "%e" if wide else "%o"
    tail = (
        f"""%res = linalg.generic {{indexing_maps = [affine_map<(m, n) -> (m, n)>, affine_map<(m, n) -> (m, n)>],
            iterator_types = ["parallel", "parallel"]}}
            ins(%acc : {total}) outs(%o : {c}) attrs = {{dims = array<i64: 0, 1>}} {{
        ^bb0(%s: f32, %d: {element}):
          %t = arith.truncf %s : f32 to {element}
          linalg.yield %t : {element}
        }} -> {c}"""
        if wide
        else ""
    )
    mark = "nova.tf32, " if precision == "tf32" else ""
    return f"""module {{
      func.func private @k(%a: {a}, %b: {b}, %o: {c} {{nova.out}}) -> {c}
          attributes {{nova.kernel = "contraction", {mark} nova.inplace = [], nova.dims = array<i64: {m}, {n}, {k}>}} {{
        %zero = arith.constant 0.0 : f32
        {start}
        %init = linalg.fill ins(%zero : f32) outs({into} : {total}) -> {total}
        %acc = linalg.generic {{indexing_maps = [affine_map<(m, n, k) -> {a_map}>, affine_map<(m, n, k) -> {b_map}>,
            affine_map<(m, n, k) -> (m, n)>], iterator_types = ["parallel", "parallel", "reduction"]}}
            ins(%a, %b : {a}, {b}) outs(%init : {total}) attrs = {{dims = array<i64: 0, 1, 2>, nova.contraction}} {{
        ^bb0(%l: {element}, %r: {element}, %s: f32):
          {extend}
          %p = arith.mulf {left}, {right} : f32
          %t = arith.addf %s, %p : f32
          linalg.yield %t : f32
        }} -> {total}
        {tail}
        return {"%res" if wide else "%acc"} : {c}
      }}
    }}"""


def build_case(case: str, target, folder: Path) -> dict:
    """Compiles a case; its cubin goes into `folder`. Returns what `run` needs to know."""
    import dataclasses

    from nova import mlir
    from nova.gpu import compile as gpu
    from nova.mlir import ir
    from nova.schedule import annotate, config

    shape, layout, precision, *own = case.split(":")
    m, n, k = map(int, shape.split("x"))
    module = mlir.parse(kernel_text(m, n, k, layout, precision))
    with mlir.context(), ir.Location.unknown():
        (kernel,) = list(annotate.kernels(module.operation))
        schedule = annotate.schedule_kernel(kernel, target)
        if own:
            (bm, bn, bk), (wm, wn) = (tuple(map(int, part.split("x"))) for part in own[:2])
            kind, intrinsic = schedule.kind, schedule.intrinsic
            schedule = dataclasses.replace(
                schedule, workgroup=(bm, bn), reduction=bk, warps=(wm, wn), subgroup=(bm // wm, bn // wn),
                stages=int(own[2]), threads=wm * wn * 32, kind=kind, intrinsic=intrinsic, k_chunks=1,
            )  # fmt: skip
        config.write(kernel.operation, schedule)
    compiled = gpu.compile_kernel(str(module), target)
    tile = [
        *schedule.workgroup,
        schedule.reduction,
        *schedule.warps,
        schedule.stages,
        schedule.k_chunks,
        schedule.groups,
    ]
    return {
        "case": case, "shape": [m, n, k], "layout": layout, "precision": precision, "tile": tile,
        "predicted_seconds": schedule.seconds if not own else None, **gpu_kernels.write(compiled, folder, case),
    }  # fmt: skip


def build(cases: list[str], target_name: str, folder: Path) -> None:
    from nova.schedule import target as targets

    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for case in cases:
        found.append(build_case(case, targets.by_name(target_name), folder))
        print(case, found[-1]["tile"], found[-1]["registers"], found[-1]["spills"], flush=True)
    gpu_kernels.write_list(found, folder)


def default_cases() -> list[str]:
    """8192 cubed and the paper's shapes by the configurator's schedule, and the sweep at 8192 cubed."""
    cases = [f"8192x8192x8192:{layout}:{p}" for p in ("bf16", "tf32") for layout in ("nt", "nn", "tn", "tt")]
    cases += ["8192x8192x8192:nt:f16", "4096x4096x4096:nt:f32", "4096x4096x4096:nn:f32"]
    for precision, schedules in SWEEP.items():
        size = "4096x4096x4096" if precision == "f32" else "8192x8192x8192"
        cases += [f"{size}:nt:{precision}:{schedule}" for schedule in schedules]
    cases += [f"{m}x{n}x{k}:{layout}:{p}" for p in ("tf32", "bf16") for m, n, k in PAPER for layout in LAYOUTS]
    return cases


# --- run: on the GPU --------------------------------------------------------------------------------------------------


def input_sets(record: dict) -> list[tuple]:
    """(a, b, out) as they are stored; several, so that the L2 cache is cold."""
    m, n, k = record["shape"]
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}.get(record["precision"], torch.float32)
    shapes = (m, k) if record["layout"][0] == "n" else (k, m), (k, n) if record["layout"][1] == "n" else (n, k)
    count = timing.sets_for((m * k + k * n + m * n) * dtype.itemsize, 1)
    return [
        (*(torch.randn(s, device="cuda").to(dtype) for s in shapes), torch.empty((m, n), device="cuda", dtype=dtype))
        for _ in range(count)
    ]


def error_of(record: dict, sets: list[tuple], run) -> float:
    """Relative norm of 64 rows against float64."""
    a, b, out = sets[0]
    rows = torch.randperm(record["shape"][0], device="cuda")[:64]
    out.fill_(float("nan"))
    run(0)
    torch.cuda.synchronize()
    left = a[rows] if record["layout"][0] == "n" else a[:, rows].t()
    right = b if record["layout"][1] == "n" else b.t()
    exact = torch.cat([left.double() @ part.double() for part in right.split(8192, 1)], 1)
    if not bool(torch.isfinite(out.float()).all()):
        return float("nan")
    return timing.relative_error(out[rows], exact)


def run_case(record: dict, folder: Path, rounds: int) -> dict:
    """Correctness, then speed."""
    torch.backends.cuda.matmul.allow_tf32 = record["precision"] == "tf32"
    kernel, sets = gpu_kernels.load(record, folder), input_sets(record)

    def nova(i: int) -> None:
        kernel(*sets[i])

    def cublas(i: int) -> None:
        a, b, out = sets[i]
        torch.matmul(a if record["layout"][0] == "n" else a.t(), b if record["layout"][1] == "n" else b.t(), out=out)

    errors = {"nova": error_of(record, sets, nova), "cublas": error_of(record, sets, cublas)}
    seconds = gpu_kernels.medians({"nova": nova, "cublas": cublas}, len(sets), rounds)
    m, n, k = record["shape"]
    tflops = {name: 2e-12 * m * n * k / s for name, s in seconds.items()}
    return record | {"errors": errors, "seconds": seconds, "tflops": tflops, "ratio": tflops["nova"] / tflops["cublas"]}


def run(folder: Path, out: Path | None, rounds: int, only: str) -> int:
    results, bad = [], 0
    for record in gpu_kernels.read_list(folder, only):
        try:
            results.append(run_case(record, folder, rounds))
        except RuntimeError as error:
            results.append(record | {"failed": str(error)})
        if out:
            out.write_text(json.dumps(results, indent=1))
    print(f"{'case':58} {'tile':34} {'nova':>6} {'cublas':>6} {'ratio':>6} {'error':>8} {'cublas':>8}")
    for r in results:
        if "failed" in r:
            bad += 1
            print(f"{r['case']:58} {r['failed']}")
            continue
        error, theirs = r["errors"]["nova"], r["errors"]["cublas"]
        wrong = not error <= 2 * theirs + 1e-7
        bad += wrong
        print(f"{r['case']:58} {r['tile']!s:34} {r['tflops']['nova']:6.1f} {r['tflops']['cublas']:6.1f} "
              f"{r['ratio']:6.3f} {error:8.1e} {theirs:8.1e}{'  WRONG' if wrong else ''}")  # fmt: skip
    return int(bad > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build")
    builder.add_argument("cases", nargs="*", help="MxNxK:LAYOUT:TYPE[:BMxBNxBK:WMxWN:STAGES]; default: all")
    builder.add_argument("--target", default="h200")
    builder.add_argument("--out", type=Path, required=True)
    runner = commands.add_parser("run")
    runner.add_argument("folder", type=Path)
    runner.add_argument("--out", type=Path)
    runner.add_argument("--rounds", type=int, default=9)
    runner.add_argument("--only", default="", help="cases that contain this text")
    args = parser.parse_args()
    if args.command == "build":
        build(args.cases or default_cases(), args.target, args.out)
        return 0
    return run(args.folder, args.out, args.rounds, args.only)


if __name__ == "__main__":
    sys.exit(main())
