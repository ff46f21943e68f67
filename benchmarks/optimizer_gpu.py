"""Optimizer, norm, scatter and scan kernels by themselves on a GPU, beside PyTorch's, against the copy bandwidth.

    python benchmarks/optimizer_gpu.py build --target h200 --out kernels     needs no GPU: cubins and a list of them
    python benchmarks/optimizer_gpu.py run kernels --out result.json         needs PyTorch and the driver, and no MLIR
    python benchmarks/optimizer_gpu.py --out result.json                     both, for the GPU that is there

Cases: adamw (124M parameters in GPT-2's shapes; adamw:BLOCKS:BYTES sets the blocks an SM and the bytes a thread has in
flight), norm (the gradients' norms), embedding:TOKENS:TYPE[:zipf], cumsum:ROWSxCOLUMNS:DIM, scatter_add:COUNT:PLACES.
Each is first compared with float64; then the contestants take turns, timed by events behind a spinning kernel. A copy
of as many bytes as the kernel must move takes its turns too: `of copy` is its time over the kernel's.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path

import gpu_kernels
import torch
from gpu_kernels import Kernel, timing

VOCABULARY, WIDTH, LAYERS, CONTEXT = 50304, 768, 12, 1024
CASES = (
    "adamw", "adamw:8:128", "adamw:32:128", "adamw:64:128", "adamw:16:64", "adamw:32:64", "norm",
    "embedding:8192:f32", "embedding:8192:bf16", "embedding:16384:f32", "embedding:65536:f32:zipf",
    "cumsum:4096x4096:1", "cumsum:4096x4096:0", "cumsum:1x16777216:1", "scatter_add:1000000:1000",
    "scatter_add:1000000:10000000",
)  # fmt: skip
ADAMW = """module {
func.func private @adamw(%p: tensor<2xf32> {nova.list}, %g: tensor<2xf32> {nova.list}, %m: tensor<2xf32> {nova.list},
    %v: tensor<2xf32> {nova.list}, %s: tensor<f32> {nova.list}, %lr: tensor<f64>, %b1: tensor<f64>, %b2: tensor<f64>,
    %eps: tensor<f64>, %wd: tensor<f64>) -> (tensor<2xf32> {nova.list}, tensor<2xf32> {nova.list},
    tensor<2xf32> {nova.list}, tensor<f32> {nova.list}) attributes {nova.inplace = [array<i64: 0, 0>, array<i64: 2, 1>,
    array<i64: 3, 2>, array<i64: 4, 3>], nova.kernel = "multi_tensor"} {
  %r:4 = "nova.adam"(%p, %g, %m, %v, %s, %lr, %b1, %b2, %eps, %wd) {amsgrad = false, decoupled = true,
    has_found_inf = false, maximize = false, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0>} :
    (tensor<2xf32>, tensor<2xf32>, tensor<2xf32>, tensor<2xf32>, tensor<f32>, tensor<f64>, tensor<f64>, tensor<f64>,
    tensor<f64>, tensor<f64>) -> (tensor<2xf32>, tensor<2xf32>, tensor<2xf32>, tensor<f32>)
  return %r#0, %r#1, %r#2, %r#3 : tensor<2xf32>, tensor<2xf32>, tensor<2xf32>, tensor<f32>
}
}"""
NORM = """module {
func.func private @norm(%g: tensor<2xf32> {nova.list}) -> (tensor<1xf32> {nova.element}) attributes {nova.inplace = [],
    nova.kernel = "multi_tensor"} {
  %r = "nova.foreach_norm"(%g) {ord = 2.000000e+00 : f64, SEGMENTS} : (tensor<2xf32>) -> tensor<1xf32>
  return %r : tensor<1xf32>
}
}"""


# --- build: on any machine --------------------------------------------------------------------------------------------


def whole(op: str, attrs: str, operands: list[str], result: str, kind: str) -> str:
    """A kernel of one op, at level 1."""
    args = ", ".join(f"%a{i}: {t}" for i, t in enumerate(operands))
    names = ", ".join(f"%a{i}" for i in range(len(operands)))
    return (
        f"module {{\nfunc.func private @k({args}) -> {result} attributes {{nova.inplace = [], nova.kernel = "
        f'"{kind}", nova.raises = "IndexError: {{value}}"}} {{\n'
        f'%r = "nova.{op}"({names}) {{{attrs}}} : ({", ".join(operands)}) -> {result}\nreturn %r : {result}\n}}\n}}'
    )


def segments(op: str, operands: list[str]) -> str:
    """The sizes of the operand groups of an op with lists of operands, as an attribute."""
    from nova import mlir
    from nova.dialect.base import segment_texts

    with mlir.context():
        return ", ".join(segment_texts(op, [mlir.ir.Type.parse(t) for t in operands], [], {}))


def kernel_text(case: str) -> str:
    name, *rest = case.split(":")
    if name == "adamw":
        return ADAMW
    if name == "norm":
        return NORM.replace("SEGMENTS", segments("foreach_norm", ["tensor<2xf32>"]))
    if name == "embedding":
        tokens, element = rest[:2]
        types = [f"tensor<{tokens}x{WIDTH}x{element}>", f"tensor<{tokens}xi64>"]
        attrs = f"rows = {VOCABULARY} : i64, padding_idx = -1 : i64"
        return whole("take_backward", attrs, types, f"tensor<{VOCABULARY}x{WIDTH}x{element}>", "scatter")
    if name == "cumsum":
        return whole("cumsum", f"dim = {rest[1]} : i64", [f"tensor<{rest[0]}xf32>"], f"tensor<{rest[0]}xf32>", "scan")
    count, places = rest
    types = [f"tensor<{places}xf32>", f"tensor<{count}xi64>", f"tensor<{count}xf32>"]
    return whole("scatter", 'dim = 0 : i64, reduce = "add"', types, types[0], "scatter")


def build_case(case: str, target, folder: Path) -> dict:
    """Compiles a case; its cubin goes into `folder`. Returns what `run` needs to know."""
    from nova.gpu import compile as gpu
    from nova.tile import multi_tensor_plan as multi_tensor

    saved = multi_tensor.BLOCKS_PER_SM, multi_tensor.IN_FLIGHT
    name, *rest = case.split(":")
    if name == "adamw" and rest:
        multi_tensor.BLOCKS_PER_SM, multi_tensor.IN_FLIGHT = map(int, rest)
    try:
        compiled = gpu.build(kernel_text(case), target)
    finally:
        multi_tensor.BLOCKS_PER_SM, multi_tensor.IN_FLIGHT = saved
    return {"case": case, **gpu_kernels.write(compiled, folder, case)}


def build(cases: list[str], target_name: str, folder: Path) -> None:
    from nova.schedule import target as targets

    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for case in cases:
        found.append(build_case(case, targets.by_name(target_name), folder))
        print(case, len(found[-1]["launches"]), "launches", found[-1]["registers"], found[-1]["spills"], flush=True)
    gpu_kernels.write_list(found, folder)


# --- run: on the GPU --------------------------------------------------------------------------------------------------


distance = timing.relative_error


def gpt2_shapes() -> list[tuple[int, ...]]:
    """Of 124M parameters: embeddings, twelve blocks, the last norm."""
    n = WIDTH
    block = [(n,), (n,), (3 * n, n), (3 * n,), (n, n), (n,), (n,), (n,), (4 * n, n), (4 * n,), (n, 4 * n), (n,)]
    return [(VOCABULARY, n), (CONTEXT, n), *block * LAYERS, (n,), (n,)]


def adamw(kernel: Kernel) -> tuple[dict, dict, float]:
    hyper = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    shapes = gpt2_shapes()
    params = [torch.randn(s, device="cuda") for s in shapes]
    theirs = [p.clone().requires_grad_() for p in params]
    for p in theirs:
        p.grad = torch.randn_like(p)
    exact = [p.detach().double().requires_grad_() for p in theirs[:4]]
    for p, q in zip(exact, theirs, strict=False):
        p.grad = q.grad.double()
    fused, wide = torch.optim.AdamW(theirs, fused=True, **hyper), torch.optim.AdamW(exact, **hyper)
    grads = [p.grad for p in theirs]
    m, v = ([torch.zeros_like(p) for p in params] for _ in range(2))
    steps = [torch.zeros((), device="cuda") for _ in params]
    values = (hyper["lr"], *hyper["betas"], hyper["eps"], hyper["weight_decay"])
    shared = [torch.tensor(x, dtype=torch.float64, device="cuda") for x in values]
    sizes = [p.numel() for p in params]
    nova = kernel.on_lists(sizes, [*params, *grads, *m, *v, *steps, *shared, *params, *m, *v, *steps])
    before = [p.clone() for p in params[:4]]
    for run in (nova, fused.step, wide.step) * 3:
        run()
    errors = {
        name: max(distance(p - b, e - b.double()) for p, b, e in zip(found, before, exact, strict=False))
        for name, found in (("nova", params), ("torch", [p.detach() for p in theirs]))
    }
    assert all(s.item() == 3 for s in steps)
    return {"nova": nova, "torch": fused.step}, errors, 28.0 * sum(sizes)


def norm(kernel: Kernel) -> tuple[dict, dict, float]:
    grads = [torch.randn(s, device="cuda") for s in gpt2_shapes()]
    out = torch.zeros(len(grads), device="cuda")
    sizes = [g.numel() for g in grads]
    nova = kernel.on_lists(sizes, [*grads, out])
    nova()
    want = torch.stack([g.double().norm() for g in grads])
    errors = {"nova": distance(out, want), "torch": distance(torch.stack(torch._foreach_norm(grads)), want)}
    return {"nova": nova, "torch": lambda: torch._foreach_norm(grads)}, errors, 4.0 * sum(sizes)


def embedding(kernel: Kernel, tokens: str, element: str, which: str = "") -> tuple[dict, dict, float]:
    count, dtype = int(tokens), {"f32": torch.float32, "bf16": torch.bfloat16}[element]
    ids = torch.randint(0, VOCABULARY, (count,), device="cuda")
    if which == "zipf":
        ids = torch.multinomial(1.0 / torch.arange(1, VOCABULARY + 1, device="cuda"), count, replacement=True)
    dy = torch.randn(count, WIDTH, device="cuda").to(dtype)
    out = torch.empty(VOCABULARY, WIDTH, device="cuda", dtype=dtype)
    want = torch.zeros(VOCABULARY, WIDTH, device="cuda", dtype=torch.float64).index_add_(0, ids, dy.double())

    def theirs():
        return torch.ops.aten.embedding_dense_backward(dy, ids, VOCABULARY, -1, False)

    kernel(dy, ids, out)
    first = out.clone()
    kernel(dy, ids, out)
    assert torch.equal(first, out), "not the same bits again"
    errors = {"nova": distance(out, want), "torch": distance(theirs(), want)}
    nbytes = (VOCABULARY + count) * WIDTH * dtype.itemsize
    return {"nova": lambda: kernel(dy, ids, out), "torch": theirs}, errors, float(nbytes)


def cumsum(kernel: Kernel, shape: str, dim: str) -> tuple[dict, dict, float]:
    x = torch.randn(*map(int, shape.split("x")), device="cuda")
    out = torch.empty_like(x)
    kernel(x, out)
    want = x.double().cumsum(int(dim))
    errors = {"nova": distance(out, want), "torch": distance(x.cumsum(int(dim)), want)}
    return {"nova": lambda: kernel(x, out), "torch": lambda: x.cumsum(int(dim))}, errors, 8.0 * x.numel()


def scatter_add(kernel: Kernel, count: str, places: str) -> tuple[dict, dict, float]:
    base, src = (torch.randn(int(n), device="cuda") for n in (places, count))
    index = torch.randint(0, int(places), (int(count),), device="cuda")
    out = torch.empty_like(base)
    kernel(base, index, src, out)
    want = base.double().scatter_add(0, index, src.double())
    errors = {"nova": distance(out, want), "torch": distance(base.scatter_add(0, index, src), want)}
    contestants = {"nova": lambda: kernel(base, index, src, out), "torch": lambda: base.scatter_add(0, index, src)}
    return contestants, errors, 8.0 * base.numel() + 12.0 * src.numel()


RUNS = {"adamw": adamw, "norm": norm, "embedding": embedding, "cumsum": cumsum, "scatter_add": scatter_add}


def run_case(record: dict, folder: Path, rounds: int) -> dict:
    """Correctness, then speed."""
    torch.manual_seed(0)
    name, *rest = record["case"].split(":")
    kernel = gpu_kernels.load(record, folder)
    contestants, errors, nbytes = RUNS[name](kernel, *(rest if name != "adamw" else ()))
    calls = {**contestants, "copy": gpu_kernels.copy_of(nbytes)}
    seconds = gpu_kernels.medians({name: lambda _, call=call: call() for name, call in calls.items()}, 1, rounds)
    kernel.check()
    return record | {
        "errors": errors, "seconds": seconds, "bytes": nbytes, "of_copy": seconds["copy"] / seconds["nova"],
        "bandwidth": nbytes / seconds["nova"], "ratio": seconds["torch"] / seconds["nova"],
    }  # fmt: skip


def run(folder: Path, out: Path | None, rounds: int, only: str) -> int:
    results, bad = [], 0
    for record in gpu_kernels.read_list(folder, only):
        try:
            results.append(run_case(record, folder, rounds))
        except (RuntimeError, AssertionError) as error:
            results.append(record | {"failed": str(error)})
        torch.cuda.empty_cache()
        if out:
            out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "results": results}, indent=1))
    heads = ("nova us", "torch us", "copy us", "of copy", "x torch", "error", "torch")
    print(f"{'case':30} " + " ".join(f"{head:>9}" for head in heads))
    for r in results:
        if "failed" in r:
            bad += 1
            print(f"{r['case']:30} {r['failed']}")
            continue
        s, error, theirs = r["seconds"], r["errors"]["nova"], r["errors"]["torch"]
        wrong = not (error <= 2 * theirs + 1e-7 and math.isfinite(error))
        bad += wrong
        times = " ".join(f"{s[name] * 1e6:9.1f}" for name in ("nova", "torch", "copy"))
        shares = f"{r['of_copy']:9.3f} {r['ratio']:9.3f} {error:9.1e} {theirs:9.1e}"
        print(f"{r['case']:30} {times} {shares}{'  WRONG' if wrong else ''}")
    return int(bad > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    builder = commands.add_parser("build")
    builder.add_argument("cases", nargs="*", help="see above; default: all")
    builder.add_argument("--target", default="h200")
    builder.add_argument("--out", type=Path, required=True)
    runner = commands.add_parser("run")
    runner.add_argument("folder", type=Path)
    for both in (parser, runner):
        both.add_argument("--out", type=Path)
        both.add_argument("--rounds", type=int, default=9)
        both.add_argument("--only", default="", help="cases that contain this text")
    args = parser.parse_args()
    if args.command == "run":
        return run(args.folder, args.out, args.rounds, args.only)
    if args.command == "build":
        build(args.cases or list(CASES), args.target, args.out)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        build([case for case in CASES if args.only in case], "cuda", Path(folder))
        return run(Path(folder), args.out, args.rounds, args.only)


if __name__ == "__main__":
    sys.exit(main())
