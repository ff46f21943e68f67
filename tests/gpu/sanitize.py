"""Runs a list of kernels, small and ragged, under compute-sanitizer, and sums up what it found.

    python tests/gpu/sanitize.py                     memcheck, then racecheck
    python tests/gpu/sanitize.py memcheck attention  one tool, the cases with a word in their names

Kernels are compiled first, into a cache that the runs under the tool read; several processes share the list. Every tensor
gets an allocation of its own, so an access past its end is seen.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
sys.path.insert(0, ROOT)
PARTS = max(1, min(len(os.sched_getaffinity(0)) - 2, 12))
TOOLS = ("memcheck", "racecheck")
BLOCK = re.compile(
    r"^=+ (?:Invalid|Error: |Warning: |Program hit|Race reported).*(?:\n=+ {5}(?:.* )?at .*)*", re.MULTILINE
)
PLACE = re.compile(r"\bat (?!__)([\w:<>]+)")
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: .*$", re.MULTILINE)
FOREIGN = (
    "cudnn",
    "fmha",
    "cutlass",
    "gemm",
    "at::",
    "flash",
    "void ",
)  # kernels of PyTorch's: eager records the steps
LIST = """
elementwise/chain-f32 elementwise/chain-bf16 elementwise/transposed-bf16 elementwise/permuted-f16 elementwise/unary-f32
elementwise/shape-4097 elementwise/misaligned elementwise/strided elementwise/casts elementwise/broadcast-backward-f32
rows/layer-norm-37x33-f32 rows/layer-norm-3x1025-bf16 rows/rms-norm-5x1-f32 rows/softmax-37x33-bf16 rows/softmax-9x4099-f32
rows/softmax-1x200000-f32 rows/log-softmax-64x768-f32 rows/cross-entropy-9x4099 rows/variance rows/norm-of-two-dims
cross_entropy/smoothing-37x11-f32 cross_entropy/plain-64x5003-bf16 cross_entropy/gpt-head cross_entropy/images
columns/sums-1000x77-f32 columns/sums-300x1-bf16 columns/arg columns/outer-and-inner whole/70x33-f32 whole/5000-bf16
copies/views-f32 copies/transpose-100x130-bf16 copies/transpose-1030x9-f32 copies/transpose-bytes copies/writes
indexed/embedding-40-7x5-f32 indexed/embedding-2000-300x257-bf16 indexed/gather indexed/index indexed/scatter-add-5000
indexed/scatter-add-dim1 indexed/scatter-amax indexed/index-put indexed/cumsum-3000-0 indexed/cumsum-4x50x37-1
indexed/cumprod-77x5-0 indexed/cumsum-64x4100-1
contractions/33x65x17-f32 contractions/33x65x17-tf32 contractions/33x65x17-bf16 contractions/33x65x17-f16
contractions/33x65x17-f64 contractions/257x100x1030-bf16 contractions/257x100x1030-tf32 contractions/5x300x2048-f32
contractions/linear-33x65x40-f32 contractions/linear-33x65x40-tf32 contractions/linear-33x65x40-bf16
contractions/batched-f16 contractions/broadcast-bf16 contractions/chain
layers/conv2d layers/conv2d-bf16 layers/conv1d layers/batch-norm layers/max-pool layers/group-norm layers/gru
attention/causal-64-f32 attention/causal-64-tf32 attention/causal-64-bf16 attention/causal-24-f16 attention/causal-128-bf16
attention/full-17x1-f32 attention/full-65x300-bf16 attention/full-65x300-tf32 attention/grouped-bf16 attention/packed-bf16
attention/padding-mask-f32 attention/padding-mask-bf16 attention/window-f32
""".split()


def training():
    """Dropout, clipping and AdamW."""
    import torch
    from torch import nn

    import nova

    model = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(65), nn.Linear(65, 7)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    @nova.jit
    def step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(3):
        step(torch.randn(19, 33, device="cuda"), torch.randint(7, (19,), device="cuda"))


def run(part: int, words: list[str]) -> None:
    """Every case of one part: recorded, then run compiled once."""
    import torch

    import nova
    from nova.capture import warm
    from tests import gpu_case_list, gpu_cases

    warm.usable = lambda options: False  # record every step, whatever an earlier run stored
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    names = [name for name in LIST if not words or any(word in name for word in words)]
    for name in names[part::PARTS]:
        case = gpu_case_list.cases()[name]
        with gpu_cases.precision(case):
            built = case.built("cuda")
            step = nova.jit(built.step)
            step(*built.inputs(0))
            step(*built.inputs(1))
            nova.synchronize()
        print(f"ran {name}", flush=True)
    if part == 0 and (not words or "training" in words):
        training()
        nova.synchronize()
        print("ran training", flush=True)
    torch.cuda.synchronize()


def start(part: int, words: list[str], cache: str, tool: str) -> subprocess.Popen:
    command = [sys.executable, __file__, "--part", str(part), *words]
    environment = {**os.environ, "NOVA_CACHE": cache, "NOVA_WORKERS": "0", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([ROOT, environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    if tool:
        options = ["--racecheck-report", "all"] if tool == "racecheck" else []
        for name in FOREIGN:
            options += ["--kernel-name-exclude", f"kernel_substring={name}"]
        command = [sanitizer(), "--tool", tool, *options, "--print-limit", "1000", *command]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def sanitizer() -> str:
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(found):
        raise SystemExit("compute-sanitizer is not on the PATH")
    return found


def everything(tool: str, words: list[str], cache: str) -> int:
    """All parts under a tool ("": none); the number of errors, failures included."""
    began = time.perf_counter()
    outputs = [process.communicate()[0] for process in [start(part, words, cache, tool) for part in range(PARTS)]]
    text = "\n".join(outputs)
    ran = len(re.findall(r"^ran ", text, re.MULTILINE))
    wanted = len([n for n in LIST if not words or any(w in n for w in words)]) + (not words or "training" in words)
    found = BLOCK.findall(text) if tool else []
    kernels = Counter(place for block in found for place in dict.fromkeys(PLACE.findall(block)))
    foreign = [block for block in found if any(name in block for name in FOREIGN)]
    errors = len(found) - len(foreign)
    print(
        f"{tool or 'compiled'}: {ran} of {wanted} cases ran, {errors} errors in Nova's kernels, {len(foreign)} in "
        f"PyTorch's, {time.perf_counter() - began:.0f} s", flush=True,
    )  # fmt: skip
    dirty = [line for line in SUMMARY.findall(text) if " 0 errors" not in line and "(0 errors, 0 warnings)" not in line]
    print("\n".join([*dirty[:PARTS], *(f"{count:6} reports at {kernel}" for kernel, count in kernels.most_common(40))]))
    if errors or ran < wanted:
        lines = [line[:200] for line in text.splitlines() if line.startswith("=========") or "Error" in line]
        print("\n".join([line for line in lines if "Host Frame" not in line][:120]))
    return errors + wanted - ran


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["--part"]:
        run(int(words[1]), words[2:])
        return
    tools = [word for word in words if word in TOOLS] or list(TOOLS)
    words = [word for word in words if word not in TOOLS]
    with tempfile.TemporaryDirectory() as cache:
        wrong = everything("", words, cache)
        wrong += sum(everything(tool, words, cache) for tool in tools)
    print("clean" if not wrong else f"{wrong} problems")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
