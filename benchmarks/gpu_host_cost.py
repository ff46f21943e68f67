"""What the driver's calls cost the host, one by one, and where a step's host time goes.

    python benchmarks/gpu_host_cost.py [--out benchmarks/results/host_cost_gpu.json]

Needs a GPU. Times are medians in microseconds. "busy" is with the GPU occupied by a long kernel, as in training. A
step's cost a launch is its native part over its launches: what the host takes from one launch to the next.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import nova
from nova.bench import timing
from nova.gpu import launcher
from nova.gpu.launcher import Launch
from nova.runtime import cuda, orc

PTX = """.version 8.0
.target sm_80
.address_size 64
.visible .entry nothing(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d) { ret; }
"""


def timed(run, repeats: int = 9, count: int = 1, busy: bool = False) -> float:
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        if busy:
            torch.cuda._sleep(20_000_000)
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) / count * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def many(library: orc.Library, count: int):
    text = f"""
declare void @k(ptr)
define void @many(ptr %args) {{
entry:
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%next, %loop]
  call void @k(ptr %args)
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, {count}
  br i1 %more, label %loop, label %done
done:
  ret void
}}"""
    loaded = orc.load(orc.compile_ir(text), ["many"], {"k": library["k"]}, keep=[library])
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(loaded["many"])
    run.library = loaded  # type: ignore[attr-defined]
    return run


def repeated(name: str, *args: int, busy: int) -> float:
    """One driver call among fifty in a row, ctypes (about a microsecond) included."""
    call = cuda.driver().call

    def run() -> None:
        for _ in range(50):
            call(name, *args)

    return timed(run, count=50, busy=bool(busy))


def calls() -> dict[str, float]:
    """The driver's calls: name to microseconds."""
    found: dict[str, float] = {}

    def report(name: str, cost: float) -> None:
        found[name] = round(cost, 2)
        print(f"{name}: {cost:.2f}")

    device = cuda.device(0)
    module = device.load(PTX, b"", "nothing")
    function = module.function("nothing")
    library = orc.load(
        orc.compile_ir(launcher.host_ir("k", [Launch("nothing", (1, 1, 1), 32, 0, 4)]), 0),
        ["k", launcher.CONTEXT],
        keep=[module],
    )
    launcher.fill(library, device, [function])
    args = (ctypes.c_int64 * 4)()
    run = many(library, 300)
    side = torch.cuda.Stream()
    for name, stream in (("default stream", 0), ("a stream of PyTorch's", side.cuda_stream)):
        device.stream.value = stream
        for busy in (False, True):
            on = torch.cuda.stream(side if stream else torch.cuda.default_stream())
            with on, device.context():  # as a step program pushes it
                cost = timed(lambda: run(ctypes.addressof(args)), count=300, busy=busy)
            if device.status.value:
                raise device.driver.error(device.status.value, "cuLaunchKernel")
            report(f"launch on {name}, {'busy' if busy else 'idle'}", cost)
    device.stream.value = 0
    target = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    for nbytes in (64, 1024, 10_000, 60_000, 100_000):
        pageable = ctypes.create_string_buffer(nbytes)
        pinned = device.pinned(nbytes)
        for kind, source in (("pageable", ctypes.addressof(pageable)), ("pinned", pinned)):
            for busy, word in enumerate(("idle", "busy")):
                cost = repeated("cuMemcpyHtoDAsync", target.data_ptr(), source, nbytes, 0, busy=busy)
                report(f"cuMemcpyHtoDAsync of {nbytes} B, {kind}, {word}", cost)
    event = device.new_event()
    report("cuEventRecord", repeated("cuEventRecord", event, 0, busy=1))
    host = device.pinned(64)
    report("cuMemcpyDtoHAsync of 64 B, pinned", repeated("cuMemcpyDtoHAsync", host, target.data_ptr(), 64, 0, busy=1))
    context = timed(lambda: [device.context().__enter__(), device.context().__exit__()])
    report("push and pop of the context, through ctypes", context)
    return found


def step_costs(fused: bool) -> dict:
    """A GPT-2 step of 12 narrow layers: the GPU's work is small, the launches are those of the large one."""
    from nova.bench.gpt2 import GPT2

    torch.manual_seed(0)
    model = GPT2(12, 96, 12, 512).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)

    @nova.jit
    def step(ids, targets):
        loss = model(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    ids, targets = (torch.randint(512, (2, 64), device="cuda") for _ in range(2))
    for _ in range(3):
        step(ids, targets)
    executable = step._variants[0].executable
    inputs, numbers = step._variants[0].bindings[0].enter((ids, targets), {})
    outputs = executable.allocate_outputs()
    calls = [item for item in executable.plan.items if hasattr(item, "kernel")]
    launches = sum(len(executable.kernels[item.kernel].launches) for item in calls)
    kinds = Counter(type(item).__name__ for item in executable.plan.items)
    print(f"GPT-2 with {'fused' if fused else 'default'} AdamW: {launches} launches, items {dict(kinds)}")
    found: dict = {"launches": launches, "items": dict(kinds)}
    for name, run in (
        ("whole step", lambda: step(ids, targets)),
        ("guards", lambda: step._variants[0].bindings[0].enter((ids, targets), {})),
        ("executable", lambda: executable(inputs, numbers)),
        ("native part", lambda: executable.pointer_table.run(inputs, outputs)),
    ):
        idle, busy = timed(run), timed(run, busy=True)
        found[name] = {"idle": round(idle, 1), "busy": round(busy, 1), "busy a launch": round(busy / launches, 3)}
        print(f"  {name}: idle {idle:.0f}, busy {busy:.0f} ({busy / launches:.2f} a launch)")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    path = parser.parse_args().out
    results = {"calls": calls()}
    for fused in (True, False):
        results[f"GPT-2, 12 layers, {'fused' if fused else 'default'} AdamW"] = step_costs(fused)
    if path:
        timing.save(path, results)


if __name__ == "__main__":
    main()
