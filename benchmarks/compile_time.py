"""Compile times: cold and warm, 12 and 48 layers, a tiny step. Each measurement is a process of its own.

`python benchmarks/compile_time.py` prints a table; seconds count from the end of `import torch`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import typer

ROOT = Path(__file__).parents[1]
CHILD = """
import json, sys, time
sys.path[:0] = [{tests!r}, {root!r}]
import torch
start = time.perf_counter()
import nova
import models
torch.manual_seed(0)
if {layers} == 0:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    def step(x):
        loss = model(x).square().mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        return loss.detach()
    batches = [(torch.randn(8, 8),)] * 3
else:
    case = models.build("gpt2", steps=3, batch=2, length=64, width=96, heads=4, layers={layers})
    step, batches = case.step, case.batches
built = time.perf_counter()
step = nova.jit(step)
step(*batches[0])
first = time.perf_counter()
step(*batches[1])
second = time.perf_counter()
compilation = step._variants[0].compilation
print(json.dumps(dict(build=built - start, first=first - built, second=second - first, captures=step.captures,
    loads=step.loads, kernels=len(compilation.kernels) if compilation else 0,
    compiled=compilation.compiled if compilation else 0, stages=compilation.seconds if compilation else {{}},
    capture=step.capture_seconds, mlir="numba_cuda_mlir" in sys.modules)))
"""


def measure(layers: int, cache: str) -> dict:
    code = CHILD.format(tests=str(ROOT / "tests"), root=str(ROOT), layers=layers)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          env={**os.environ, "NOVA_CACHE": cache})  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main(layers: str = "0,12,48") -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from common import save

    results = {}
    for n in (int(x) for x in layers.split(",")):
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("cold", "warm"):
                r = results[f"{n} layers {kind}"] = measure(n, cache)
                stages = ", ".join(f"{k} {v:.2f}" for k, v in r["stages"].items())
                print(f"{n:3} layers {kind}: first step {r['first']:.2f} s (capture {r['capture']:.2f}), second call "
                      f"{r['second'] * 1e3:.1f} ms, {r['kernels']} kernels, {r['compiled']} compiled, captures "
                      f"{r['captures']}, loaded {r['loads']}, MLIR imported: {r['mlir']}; {stages}",
                      flush=True)  # fmt: skip
    print("saved", save("compile_time", results))


if __name__ == "__main__":
    typer.run(main)
