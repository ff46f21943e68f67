"""The runtime on a GPU: what a call costs the host, errors, memory, the cache."""

from __future__ import annotations

import statistics
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
        assert "largest" in str(caught.value.__notes__)
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
