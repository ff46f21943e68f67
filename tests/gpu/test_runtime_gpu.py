"""The runtime on a GPU: what a call costs the host, errors, memory, the cache."""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nova
from nova.runtime import cuda
from nova.schedule import target
from tests import models


def test_the_target_is_what_the_driver_says():
    found = target.device(0)
    properties = torch.cuda.get_device_properties(0)
    assert found.sms == properties.multi_processor_count
    assert found.capability == (properties.major, properties.minor)
    assert found.smem_block >= 99 << 10 and 1e11 < found.bandwidth < 2e13 and found.peak["bf16"] > 1e12
    assert cuda.device(0).name == properties.name


def test_assembly_that_the_driver_refuses_is_an_error_with_its_log():
    with pytest.raises(cuda.CudaError, match="loading kernel broken"):
        cuda.device(0).load(".version 8.0\n.target sm_80\n.address_size 64\nnonsense;\n", b"", "broken")
    with pytest.raises(nova.UnsupportedError, match=r"PTX 99.9.*update"):
        cuda.device(0).load(".version 99.9\n.target sm_80\n", b"", "future")


def gpt(layers: int = 12, width: int = 64):
    torch.manual_seed(0)
    with torch.device("cuda"):
        case = models.build("gpt2", steps=4, batch=2, length=32, vocab=512, width=width, heads=2, layers=layers)
    return case


def host_seconds(step, batch, repeats: int = 30) -> float:
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(*batch)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def test_a_call_does_not_wait_for_the_gpu():
    case = gpt(2)
    step = nova.jit(case.step)
    for batch in case.batches:
        step(*batch)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # half a second
    start = time.perf_counter()
    step(*case.batches[0])
    step(*case.batches[1])
    assert time.perf_counter() - start < 0.1
    torch.cuda.synchronize()


def test_host_cost_of_a_step():
    case = gpt()
    step = nova.jit(case.step)
    for batch in case.batches:
        step(*batch)
    cost = host_seconds(step, case.batches[0])
    plan = step._variants[0].executable.plan
    launches = sum(
        len(step._variants[0].executable.kernels[i.kernel].launches) for i in plan.items if hasattr(i, "kernel")
    )
    print(f"host {cost * 1e3:.3f} ms, {launches} launches, {cost / launches * 1e6:.2f} us each")
    assert cost < 2.5e-3


def test_labels_out_of_range_are_raised_later():
    torch.manual_seed(0)
    model = nn.Linear(8, 5).cuda()

    @nova.jit
    def step(x, y):
        return F.cross_entropy(model(x), y)

    x, y = torch.randn(4, 8, device="cuda"), torch.tensor([0, 1, 2, 3], device="cuda")
    good = step(x, y)
    bad = y.clone()
    bad[2] = 77
    step(x, bad)
    with pytest.raises(IndexError, match="77"):
        nova.synchronize()
    torch.testing.assert_close(step(x, y), good)
    nova.synchronize()


def test_out_of_memory_says_what_the_step_needs():
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()

    @nova.jit
    def step(x):
        y = (x[:, None] * x[None, :]).softmax(1)
        return (y @ y).softmax(0).sum()

    x = torch.randn(4096, device="cuda")
    want = step(x)
    torch.cuda.empty_cache()
    hog = torch.empty(torch.cuda.mem_get_info()[0] - (48 << 20), dtype=torch.uint8, device="cuda")
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            step(x)
        assert isinstance(caught.value, nova.NovaError) and "f32[4096, 4096]" in str(caught.value)
    finally:
        del hog
        torch.cuda.empty_cache()
    torch.testing.assert_close(step(x), want, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_tensors_on_two_gpus_are_refused():
    with pytest.raises(nova.UnsupportedError, match="cuda:0 and cuda:1"):
        nova.jit(lambda x, y: x + y.to("cuda:0"))(torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1"))


def test_operations_left_to_pytorch_run_on_the_gpu():
    @nova.jit
    def step(x):
        return torch.linalg.svdvals(x * 2) + 1

    x = torch.randn(6, 4, device="cuda")
    step(x)
    torch.testing.assert_close(step(x), torch.linalg.svdvals(x * 2) + 1, rtol=1e-4, atol=1e-5)
    assert step._variants[0].executable.left_to_pytorch


def test_a_dropped_step_gives_its_memory_back():
    before = torch.cuda.memory_allocated()

    def once():
        step = nova.jit(lambda x: (x.exp() @ x).relu().sum())
        x = torch.randn(512, 512, device="cuda")
        for _ in range(3):
            step(x)

    once()
    torch.cuda.synchronize()
    import gc

    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 4096


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_a_step_with_bad_labels_leaves_model_and_optimizer_as_they_were(optimizer):
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10)]
    model = nn.Sequential(*layers).cuda()
    made = {"adamw": lambda p: torch.optim.AdamW(p, lr=0.01), "momentum": lambda p: torch.optim.SGD(p, 0.1, 0.9)}
    opt = made[optimizer](model.parameters())

    @nova.jit
    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    def state():
        kept = [v for entry in opt.state.values() for v in entry.values() if isinstance(v, torch.Tensor)]
        return [t.detach().clone() for t in (*model.state_dict().values(), *kept)]

    x, y = torch.randn(256, 64, device="cuda"), torch.randint(0, 10, (256,), device="cuda")
    for _ in range(3):
        step(x, y)
    nova.synchronize()
    before, want = state(), step(x, y)
    nova.synchronize()
    after = state()
    with torch.no_grad():
        kept = [v for entry in opt.state.values() for v in entry.values() if isinstance(v, torch.Tensor)]
        for tensor, old in zip((*model.state_dict().values(), *kept), before, strict=True):
            tensor.copy_(old)
    bad = y.clone()
    bad[100] = 10
    torch.cuda._sleep(200_000_000)  # the host is ahead: it launches more steps before it can know
    step(x, bad)
    with pytest.raises(IndexError, match="Target 10 is out of bounds"):
        for _ in range(3):
            step(x, y)
        nova.synchronize()
    assert all(map(torch.equal, state(), before))
    assert torch.equal(step(x, y), want)
    nova.synchronize()
    assert all(map(torch.equal, state(), after))


def test_a_lost_context_is_an_error_that_says_so():
    program = """
import torch, nova
x = torch.randn(64, 64, device="cuda")
step = nova.jit(lambda x: (x @ x).relu().sum())
step(x), step(x)
torch.cuda.synchronize()
torch.ones(3, device="cuda")[torch.tensor([7], device="cuda")]  # an assertion of a kernel outside Nova
import time; time.sleep(1)
try:
    for _ in range(3): step(x)
except nova.NovaError as error:
    print("CAUGHT", error)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=300)
    assert "CAUGHT" in done.stdout and "context is lost" in done.stdout, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("kilobytes", [48, 16])
def test_kernels_for_little_shared_memory_are_right(monkeypatch, kilobytes):
    from tests import gpu_case_list, gpu_cases

    small = dataclasses.replace(target.device(0), smem_block=kilobytes << 10)
    monkeypatch.setattr(target, "by_name", lambda name: small)
    monkeypatch.setenv("NOVA_CACHE", "0")
    for name in ("contractions/257x100x1030-bf16", "attention/causal-24-bf16", "rows/layer-norm-64x768-f64",
                 "rows/rms-norm-3x1025-f32", "cross_entropy/gpt-head", "indexed/cumsum-4x50x37-1"):  # fmt: skip
        step = gpu_cases.check(gpu_case_list.cases()[name], "cuda")
        kernels = step._variants[0].executable.kernels
        assert all(launch.shared <= small.smem_block for kernel in kernels for launch in kernel.launches)


def test_launches_that_begin_early_keep_their_order():
    """Kernels, copies and PyTorch's operations that each need all of the one before them, call after call: one that
    began too early would use an old number. All numbers are small integers, so the results are exact."""
    assert follow_in_order("cuda", 200)


def follow_in_order(device: str, calls: int) -> bool:
    size = 1 << 18
    state = [torch.arange(size, device=device, dtype=torch.float32) % 251 for _ in range(2)]
    index = torch.randperm(size, generator=torch.Generator().manual_seed(0)).to(device)

    def mix(x, scale, index):
        for _ in range(6):
            x = torch.remainder(x.flip(0) + scale * x[index], 251)  # every block needs what others have written
            x = torch.remainder(x + x.view(512, -1).sum(0).repeat(512), 251)
        return x

    def step(x, scale, index):
        y = mix(x, scale, index)
        x.copy_(y)  # in place, beside the next call's reads
        return y[:: 1 << 10] + 1

    compiled = nova.jit(step)
    good = True
    for call in range(calls):
        scale = float(call % 7)  # travels with a copy just before the first kernel, or with none
        state[0].add_(1)  # a kernel of PyTorch's before the step
        state[1].add_(1)
        got, want = compiled(state[0], scale, index), step(state[1], scale, index)
        good &= torch.equal(got, want)  # and one after it
    return good and torch.equal(*state)
