"""A short table of what works on this machine's GPU: python benchmarks/gpu_smoke.py [word ...]

Each line is independent of the others; words choose lines by their names.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import nn

import nova
from tests import models

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def error(a, b) -> float:
    a, b = (torch.as_tensor(t).double().flatten() for t in (a, b))
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item() if a.numel() else 0.0


def against_eager(function, *args, calls: int = 3) -> str:
    """A function of tensors: compiled against eager, and the time of both."""
    step = nova.jit(function)
    want = function(*args)
    for _ in range(calls):
        got = step(*args)
    nova.synchronize()
    pairs = zip(got if isinstance(got, tuple) else [got], want if isinstance(want, tuple) else [want], strict=True)
    worst = max(error(a, b) for a, b in pairs)
    left = step._variants[0].executable.left_to_pytorch
    mine, theirs = gpu_time(lambda: step(*args)), gpu_time(lambda: function(*args))
    rest = f", left {left}" if left else ""
    return f"error {worst:.1e}, {mine:.1f} us, eager {theirs:.1f} us{rest}"


def gpu_time(run, repeats: int = 20) -> float:
    """Median microseconds of the GPU."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(400_000)  # the host runs ahead
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


@case
def driver() -> str:
    from nova.gpu import ptxas
    from nova.runtime import cuda
    from nova.schedule import target

    found = cuda.driver()
    t = target.device(0)
    return (
        f"{cuda.device(0).name}: CUDA {found.version}, PTX {found.ptx_version}, ptxas {ptxas.version() or 'none'}, "
        f"{t.name} {t.arch}, {t.sms} SMs, L2 {t.l2 >> 20} MiB, shared {t.smem_block >> 10} KiB"
    )


@case
def elementwise() -> str:
    return against_eager(
        lambda x, y: F.gelu(x * 2 + y, approximate="tanh"), *(torch.randn(1000, 1025, device="cuda") for _ in range(2))
    )


@case
def layer_norm() -> str:
    w, b = torch.randn(768, device="cuda"), torch.randn(768, device="cuda")
    return against_eager(lambda x: F.layer_norm(x, (768,), w, b), torch.randn(4096, 768, device="cuda"))


@case
def softmax() -> str:
    return against_eager(lambda x: x.softmax(-1), torch.randn(512, 50304, device="cuda"))


@case
def column_sum() -> str:
    return against_eager(lambda x: x.sum(0), torch.randn(8192, 770, device="cuda"))


@case
def linear() -> str:
    w, b = torch.randn(513, 260, device="cuda"), torch.randn(513, device="cuda")
    return against_eager(lambda x: F.gelu(F.linear(x, w, b)), torch.randn(300, 260, device="cuda"))


@case
def linear_bf16() -> str:
    w = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    return against_eager(lambda x: F.linear(x, w), torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16))


@case
def attention() -> str:
    q, k, v = (torch.randn(2, 4, 256, 64, device="cuda") for _ in range(3))
    return against_eager(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)


@case
def embedding() -> str:
    w = torch.randn(1000, 64, device="cuda", requires_grad=True)
    ids = torch.randint(1000, (8, 33), device="cuda")

    def run(ids):
        (grad,) = torch.autograd.grad(F.embedding(ids, w).square().sum(), w)
        return grad

    return against_eager(run, ids)


@case
def dropout() -> str:
    step = nova.jit(lambda x: F.dropout(x, 0.25))
    x = torch.ones(1000, 1000, device="cuda")
    step(x)
    y = step(x)
    return f"kept {(y != 0).float().mean().item():.4f} of 0.75, mean {y.mean().item():.4f}"


def training(name: str, **options) -> str:
    results = []
    for transform in (lambda f: f, nova.jit):
        torch.manual_seed(0)
        with torch.device("cuda"):
            made = models.build(name, **options)
        step = transform(made.step)
        start = time.perf_counter()
        losses = [step(*batch) for batch in made.batches]
        nova.synchronize()
        results.append((losses, made.state(), time.perf_counter() - start, step))
    (eager, eager_state, _, _), (compiled, state, seconds, step) = results
    flat = [
        torch.stack([v for loss in losses for v in (loss.values() if isinstance(loss, dict) else [loss])])
        for losses in (compiled, eager)
    ]
    worst = error(*flat)
    drift = max(error(state[k], v) for k, v in eager_state.items())
    executable = step._variants[0].executable
    launches = sum(len(executable.kernels[i.kernel].launches) for i in executable.plan.items if hasattr(i, "kernel"))
    batch = made.batches[0]
    host = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(*batch)
        host.append(time.perf_counter() - start)
    cost = statistics.median(host)
    return (
        f"losses {worst:.1e}, state {drift:.1e}, {seconds:.1f} s in all, {len(executable.kernels)} kernels, "
        f"{launches} launches, host {cost * 1e3:.2f} ms = {cost / max(launches, 1) * 1e6:.1f} us a launch, "
        f"left to PyTorch {executable.left_to_pytorch or 'nothing'}"
    )


for _name in models.MODELS:
    CASES[f"train_{_name}"] = lambda name=_name: training(name)


@case
def train_fused_adamw_autocast() -> str:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10)).cuda()
    opt = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    @nova.jit
    def step(x, y):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return loss

    x, y = torch.randn(128, 64, device="cuda"), torch.randint(10, (128,), device="cuda")
    losses = [step(x, y).item() for _ in range(30)]
    return f"{losses[0]:.3f} -> {losses[-1]:.3f}"


@case
def launch_cost() -> str:
    """Host time of a chain of launches that do nothing much."""
    step = nova.jit(lambda x: torch.stack([x.sin().sum(i % 2).cos() for i in range(2)]))
    x = torch.randn(64, 64, device="cuda")
    step(x)
    step(x)
    executable = step._variants[0].executable
    inputs, best = [x], 1e9
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        executable(inputs)
        best = min(best, time.perf_counter() - start)
    launches = sum(len(executable.kernels[i.kernel].launches) for i in executable.plan.items if hasattr(i, "kernel"))
    return f"{best * 1e6:.1f} us for a call of {launches} launches"


def main() -> None:
    words = sys.argv[1:]
    failed = 0
    for name, run in CASES.items():
        if words and not any(word in name for word in words):
            continue
        start = time.perf_counter()
        try:
            text = run()
        except BaseException as problem:
            failed += 1
            lines = [line for line in str(problem).splitlines() if line.strip()]
            text = f"FAILED {type(problem).__name__}: {' | '.join(lines[:3])[:500]}"
        print(f"{name:28} {time.perf_counter() - start:6.1f} s  {text}", flush=True)
    print(f"{failed} failed")


if __name__ == "__main__":
    main()
