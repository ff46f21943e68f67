"""Memory-bound kernels by themselves on a GPU, against the copy bandwidth.

    python benchmarks/loops_gpu.py build --target h200 --out kernels     needs no GPU: cubins and a list of them
    python benchmarks/loops_gpu.py run kernels --out result.json         needs PyTorch and the driver, and no MLIR

A case is an operation with an element type, as `layer_norm_backward:bf16`, and settings of the schedules to try with
it: `layer_norm_backward:bf16:LONG_THREADS=128`. Kernel and a copy of as many bytes take turns, over sets of buffers
that together outgrow the caches; `of copy` is the copy's time over the kernel's.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import gpu_kernels
import torch
import torch.nn.functional as F
from gpu_kernels import timing

ROWS, STAND_IN = 16384, 613  # what cases are recorded with: nothing of the size is computed on this machine
OPERATIONS = (
    "layer_norm", "layer_norm_backward", "gelu", "gelu_backward", "cross_entropy", "cross_entropy_backward", "softmax",
    "transpose", "column_sum", "total", "dropout", "bias_gelu", "embedding", "rms_norm", "copy",
)  # fmt: skip
CASES = tuple(f"{op}:{dtype}" for op in OPERATIONS for dtype in ("f32", "bf16"))


def tensors(op: str, dtype, rows: int, device: str) -> list:
    """The operands, N(0, 1)."""

    def new(*shape):
        return torch.randn(*shape, dtype=dtype, device=device)

    if op in ("layer_norm", "layer_norm_backward", "rms_norm"):
        x, w, b, dy = new(rows, 768), new(768), new(768), new(rows, 768)
        return {"layer_norm": [x, w, b], "rms_norm": [x, w]}.get(op, [x, w, b, dy])
    if op in ("cross_entropy", "cross_entropy_backward"):
        return [new(rows, 50304), torch.randint(0, 50304, (rows,), device=device)]
    if op == "embedding":
        return [new(50304, 768), torch.randint(0, 50304, (rows,), device=device)]
    if op == "softmax":
        return [new(rows, 50304)]
    if op == "bias_gelu":
        return [new(rows, 3072), new(3072)]
    if op == "gelu_backward":
        return [new(rows, 3072), new(rows, 3072)]
    return [new(rows, 3072)]


def function(op: str):
    """The operation as PyTorch has it."""

    def gradient(f):
        def both(*args):
            leaves = [a.detach().requires_grad_() for a in args[:-1]]
            return torch.autograd.grad(f(*leaves), leaves, args[-1])

        return both

    def cross_entropy_backward(x, t):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(x, t), (x,))

    return {
        "layer_norm": lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b),
        "layer_norm_backward": gradient(lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b)),
        "rms_norm": lambda x, w: F.rms_norm(x, (x.shape[-1],), w),
        "gelu": F.gelu,
        "gelu_backward": gradient(F.gelu),
        "cross_entropy": F.cross_entropy,
        "cross_entropy_backward": cross_entropy_backward,
        "softmax": lambda x: F.softmax(x, -1),
        "transpose": lambda x: x.t().contiguous(),
        "column_sum": lambda x: x.sum(0),
        "total": lambda x: (x.float() ** 2).sum(),
        "dropout": lambda x: F.dropout(x, 0.1),
        "bias_gelu": lambda x, b: F.gelu(x + b),
        "embedding": lambda e, i: F.embedding(i, e),
        "copy": lambda x: -x,
    }[op]


# --- build: on any machine --------------------------------------------------------------------------------------------


def recorded(op: str, dtype_name: str, target) -> list[str]:
    """Level-1 texts of the operation's loops kernels, with the stand-in number of rows replaced."""
    import nova
    from nova.fusion import outline

    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype_name]
    args = tensors(op, dtype, STAND_IN, "cpu")
    lowered = nova.capture(function(op), *args).lower(target)
    texts = []
    for kernel in outline.kernels(lowered.module):
        text = kernel.text
        for width in (50304, 3072, 1024, 768, 1):
            text = text.replace(str(STAND_IN * width), str(ROWS * width))
        texts.append(text)
    return texts


def build_case(case: str, target, folder: Path) -> list[dict]:
    from nova.gpu import compile as gpu
    from nova.schedule import bandwidth

    op, dtype, *settings = case.split(":")
    saved = {}
    for setting in settings:
        name, value = setting.split("=")
        saved[name] = getattr(bandwidth, name)
        setattr(bandwidth, name, float(value) if "." in value else int(value))
    found = []
    try:
        for number, text in enumerate(recorded(op, dtype, target.name)):
            compiled = gpu.build(text, target)
            written = gpu_kernels.write(compiled, folder, f"{case}_{number}")
            about = {"case": case, "kernel": compiled.name, "arguments": arguments(text), "bytes": moved(text)}
            found.append(about | written)
    finally:
        for name, value in saved.items():
            setattr(bandwidth, name, value)
    return found


def arguments(text: str) -> list[tuple[str, list[int]]]:
    """Element type and shape of operands and results, in order."""
    from nova import mlir
    from nova.fusion.outline import kernel_functions
    from nova.mlir import ir

    module = mlir.parse(text)
    with mlir.context():
        type_ = ir.FunctionType(ir.TypeAttr(kernel_functions(module)[0].attributes["function_type"]).value)
        found = []
        for tensor in (*type_.inputs, *type_.results):
            ranked = ir.RankedTensorType(tensor)
            found.append((str(ranked.element_type), list(ranked.shape)))
        return found


def moved(text: str) -> int:
    sizes = {"f32": 4, "bf16": 2, "i64": 8, "f64": 8, "i1": 1, "i32": 4, "f16": 2}
    return sum(sizes[element] * math.prod(shape) for element, shape in arguments(text))


def build(cases: list[str], target_name: str, folder: Path) -> None:
    from nova.schedule import target as targets

    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for case in cases:
        made = build_case(case, targets.by_name(target_name), folder)
        found += made
        for m in made:
            print(case, m["kernel"], m["launches"], m["registers"], m["spills"], flush=True)
    gpu_kernels.write_list(found, folder)


# --- run: on the GPU --------------------------------------------------------------------------------------------------


def run_kernel(record: dict, folder: Path, rounds: int) -> dict:
    """Speed of one kernel on operands of its types: what matters is bytes. Correctness is tests/gpu's business."""
    dtypes = {"f32": torch.float32, "bf16": torch.bfloat16, "i64": torch.int64, "f64": torch.float64,
              "i1": torch.bool, "i32": torch.int32, "f16": torch.float16}  # fmt: skip
    nbytes = record["bytes"]
    sets = timing.sets_for(nbytes, 1, 6)
    kernel = gpu_kernels.load(record, folder)
    calls = []
    for _ in range(sets):
        values = []
        for element, shape in record["arguments"]:
            if element == "i64":
                values.append(torch.randint(0, 1000, shape, device="cuda"))
            elif element == "i1":
                values.append(torch.randint(0, 2, shape, device="cuda").bool())
            else:
                values.append(torch.randn(shape, device="cuda").to(dtypes[element]))
        calls.append(values)
    copies = [gpu_kernels.copy_of(nbytes) for _ in range(sets)]
    contestants = {"nova": lambda i: kernel(*calls[i]), "copy": lambda i: copies[i]()}
    seconds = gpu_kernels.medians(contestants, sets, rounds)
    kernel.check()
    return record | {
        "seconds": seconds, "of_copy": seconds["copy"] / seconds["nova"], "bandwidth": nbytes / seconds["nova"],
    }  # fmt: skip


def run(folder: Path, out: Path, only: str, rounds: int) -> None:
    results = []
    for record in gpu_kernels.read_list(folder, only):
        if record["bytes"] < 1 << 20:
            continue
        try:
            result = run_kernel(record, folder, rounds)
        except Exception as error:  # the other cases still count
            print(f"{record['case']:44} {record['kernel'][:34]:34} FAILED {error}", flush=True)
            continue
        torch.cuda.empty_cache()
        results.append(result)
        s = result["seconds"]
        print(
            f"{result['case']:44} {result['kernel'][:34]:34} {s['nova'] * 1e6:8.1f} us  copy {s['copy'] * 1e6:8.1f} us",
            f" {result['bandwidth'] / 1e12:5.2f} TB/s  {result['of_copy']:5.2f} of copy  {result['registers']}",
            flush=True,
        )
    out.write_text(json.dumps(results, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["build", "run"])
    parser.add_argument("folder", nargs="?", default="kernels", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if options.what == "build":
        build(options.cases.split(","), options.target, options.out or options.folder)
    else:
        run(options.folder, options.out or Path("loops.json"), options.only, options.rounds)


if __name__ == "__main__":
    main()
