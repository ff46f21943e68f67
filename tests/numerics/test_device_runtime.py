"""Steps on a GPU that is faked on the CPU: launchers, scalars, host cells, errors, streams; then whole models."""

from __future__ import annotations

import gc
import time

import pytest
import torch

import nova
from nova import pipeline
from nova.gpu import launcher
from nova.gpu.launcher import Launch
from nova.runtime import binding, cuda, executable, orc, placement
from nova.runtime.step_plan import GraphValue
from nova.schedule import target
from nova.tile.guarded_copy import NAME
from tests import models
from tests.numerics import runtime_kernels as kernels
from tests.numerics.device_fakes import FakeDevice, FakeExecutable, guarded_copy, on_gpu, pretend_gpu
from tests.numerics.test_runtime import Builder


@pytest.fixture
def device(monkeypatch):
    fresh = FakeDevice()
    monkeypatch.setattr(FakeExecutable, "device", fresh)
    monkeypatch.setattr(
        executable, "class_for", lambda plan: FakeExecutable if plan.device != "cpu" else executable.Executable
    )
    return fresh


def device_step(n: int = 8, host: bool = False) -> Builder:
    """p <- p + g * lr; returns p * p. With `host`, lr is a CPU tensor f64 that the step also counts up."""
    b = Builder()
    b.graph.device = "cuda:0"
    p, g = b.input(n, name="p"), b.input(n, name="g")
    lr = b.value((), "f64", "tensor" if host else "scalar", name="lr")
    b.graph.values[lr].host = host
    update = b.call(on_gpu(kernels.scale(n)), [g, lr], (n,))
    new = b.call(on_gpu(kernels.add(n)), [p, update], (n,), inplace=[(0, 0), (1, 0)])
    square = b.call(on_gpu(kernels.mul(n)), [new, new], (n,))
    b.output(new, state_of=p)
    b.output(square)
    return b


def test_a_step_launches_in_order_on_the_current_stream(device):
    step = device_step().link()
    p, g = torch.randn(8), torch.randn(8)
    want = p.clone()
    for lr, stream in ((0.5, 5), (0.25, 9), (-1.0, 9)):
        device.now = stream
        (out,) = step([p, g], [lr])
        want = want + g * lr
        assert torch.allclose(p, want) and torch.allclose(out, want * want)
    launches = device.driver.called("cuLaunchKernel")
    assert len(launches) == 9
    assert [args[8] for args in launches] == [5] * 3 + [9] * 6
    assert all(args[1:8] == (3, 1, 1, 64, 1, 1, 0) for args in launches)
    names = [name for name, _ in device.driver.log]
    assert names.count("cuCtxPushCurrent") >= 3 and names.count("cuEventRecord") == 3
    assert len(device.driver.called("cuStreamWaitEvent")) == 1  # the arena changed hands once


def test_numbers_in_the_cpus_memory_travel_with_the_scalars(device):
    b = device_step(host=True)
    lr = next(i for i, v in enumerate(b.graph.values) if v.host)
    b.graph.values.append(GraphValue((), "f64"))
    step = b.link()
    assert step.plan.cells[0].update == "" and step.plan.staged_bytes == 8
    p, g, rate = torch.randn(8), torch.randn(8), torch.tensor(0.5, dtype=torch.float64)
    want = p + g * 0.5
    step([p, g, rate])
    assert torch.allclose(p, want)
    rate.fill_(2.0)
    step([p, g, rate])
    assert torch.allclose(p, want + g * 2.0)
    assert lr == 2


def test_what_did_not_change_is_not_copied_again(device):
    step = device_step().link()
    p, g = torch.randn(8), torch.randn(8)
    copies = []
    for lr in (0.5, 0.5, 0.25, 0.25, 0.5):
        before = p.clone()
        step([p, g], [lr])
        assert torch.allclose(p, before + g * lr)
        copies.append(len(device.driver.called("cuMemcpyHtoDAsync")))
    assert copies == [1, 1, 2, 2, 3]
    device.driver.failing["cuMemcpyHtoDAsync"] = 1
    with pytest.raises(cuda.CudaError):
        step([p, g], [0.125])
    before = p.clone()
    step([p, g], [0.125])
    assert torch.allclose(p, before + g * 0.125)


@pytest.mark.parametrize("native", [True, False])
def test_inputs_between_sixteen_bytes_are_copied_and_state_comes_back(device, monkeypatch, native, capfd):
    if not native:
        monkeypatch.setattr(binding, "_native", lambda: None)
    step = device_step().link()
    buffer, g = torch.randn(20), torch.randn(8)
    for start in (0, 1, 4, 6, 1):
        p = buffer[start : start + 8]
        rest = buffer.clone()
        before = p.clone()
        (out,) = step([p, g], [0.5])
        assert torch.allclose(p, before + g * 0.5) and torch.allclose(out, p * p)
        rest[start : start + 8] = p
        assert torch.equal(rest, buffer)  # and nothing else
    assert step.copied_inputs == 1 and not step._moved
    for args in device.driver.called("cuLaunchKernel"):
        assert args[0]
    assert capfd.readouterr().err.count("multiple of 16 bytes (p)") == 1


def test_a_failed_launch_is_an_error_that_names_the_kernel_and_the_next_call_works(device):
    step = device_step().link()
    p, g = torch.randn(8), torch.randn(8)
    before = p.clone()
    device.driver.failing["cuLaunchKernel"] = 701
    with pytest.raises(cuda.CudaError, match=r"launching kernel scale.*\(3, 1, 1\) x 64"):
        step([p, g], [0.5])
    assert torch.equal(p, before)
    step([p, g], [0.5])
    assert torch.allclose(p, before + g * 0.5)
    for name in ("cuMemcpyHtoDAsync", "cuCtxPushCurrent", "cuEventRecord"):
        device.driver.failing[name] = 1
        with pytest.raises(cuda.CudaError, match="the compiled step"):
            step([p, g], [0.75])


def test_the_end_of_a_step_comes_after_outputs_that_pytorch_gathers(device):
    b = Builder()
    b.graph.device = "cuda:0"
    x = b.input(2, 4, name="x")
    b.output(b.call(on_gpu(kernels.add(8)), [x, x], (2, 4)), strides=(1, 2))
    step, value = b.link(), torch.randn(2, 4)
    (out,) = step([value])
    assert out.stride() == (1, 2) and torch.equal(out, 2 * value)
    assert [name for name, _ in device.driver.log].count("cuEventRecord") == 2


@pytest.mark.parametrize("failing", ["cuLaunchKernel", "cuMemcpyHtoDAsync", "cuEventRecord"])
def test_another_stream_waits_for_what_ran_of_a_step_that_failed(device, failing):
    """The end of such a step is marked too: its first kernels use the arena, and code that may be unloaded."""
    step = device_step().link()
    p, g = torch.randn(8), torch.randn(8)
    step([p, g], [0.5])
    device.driver.failing[failing] = 701
    with pytest.raises(cuda.CudaError):
        step([p, g], [0.25])
    names = [name for name, _ in device.driver.log]
    last, failed = (len(names) - 1 - names[::-1].index(name) for name in ("cuEventRecord", failing))
    assert last > failed or (failing == "cuEventRecord" and names.count(failing) == 3)
    event = device.driver.log[last][1][0]
    assert device.driver.log[last][1] == (event, 5)
    device.now = 9
    step([p, g], [0.25])
    assert device.driver.called("cuStreamWaitEvent")[-1] == (9, event, 0)


def test_what_a_kernel_found_is_raised_by_a_later_call_or_by_synchronize(device):
    n = 4
    b = Builder()
    b.graph.device = "cuda:0"
    x = b.input(n, name="x", dtype="i64")
    y = b.call(
        on_gpu(kernels.checked_copy(n)), [x], (n,), "i64", raises="IndexError: {value} is out of range", source="line 3"
    )
    b.output(y)
    step = b.link()
    good, bad = torch.ones(n, dtype=torch.int64), torch.tensor([1, -7, 1, 1])
    step([good])
    step([bad])  # nothing is known yet as far as the caller is concerned
    with pytest.raises(IndexError, match="-7 is out of range") as caught:
        step([good])
    assert "line 3" in str(caught.value)
    step([good])
    step([bad])
    with pytest.raises(IndexError, match="-7"):
        nova.synchronize()
    nova.synchronize()


def test_a_dropped_step_waits_for_its_last_run(device):
    step = device_step().link()
    step([torch.randn(8), torch.randn(8)], [0.5])
    assert not device.driver.called("cuEventSynchronize")
    del step
    gc.collect()
    assert device.driver.called("cuEventSynchronize") and device.driver.called("cuEventDestroy")
    untouched = device_step().link()
    count = len(device.driver.called("cuEventSynchronize"))
    del untouched
    gc.collect()
    assert len(device.driver.called("cuEventSynchronize")) == count


def test_host_cost_of_a_launch():
    device = FakeDevice()
    text = launcher.host_ir("k", [Launch("k", (1, 1, 1), 32, 0, 4)])
    library = orc.load(orc.compile_ir(text, 0), ["k", launcher.CONTEXT])
    native = orc.load(
        orc.compile_ir(
            "define i32 @launch(ptr %f, i32, i32, i32, i32, i32, i32, i32, ptr, ptr, ptr) {\n  ret i32 0\n}", 0
        ),
        ["launch"],
    )
    device.driver.address = lambda name: native["launch"]
    launcher.fill(library, device, [1])
    loop = """
declare void @k(ptr)
define void @many(ptr %args) {
entry:
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%next, %loop]
  call void @k(ptr %args)
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, 100000
  br i1 %more, label %loop, label %done
done:
  ret void
}"""
    import ctypes

    many = orc.load(orc.compile_ir(loop), ["many"], {"k": library["k"]})
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(many["many"])
    args = (ctypes.c_int64 * 4)()
    start = time.perf_counter()
    run(ctypes.addressof(args))
    assert (time.perf_counter() - start) / 100000 < 1e-6


# ---- what is refused


def test_assembly_newer_than_the_driver_is_refused():
    driver = FakeDevice().driver
    with pytest.raises(nova.UnsupportedError, match=r"kernel k is PTX 9.2 .*reads PTX up to 7.0.*update the driver"):
        cuda.check_ptx(".version 9.2\n.target sm_90a\n", driver, "k")
    cuda.check_ptx(".version 7.0\n", driver, "k")


class Board:
    """What a driver reports."""

    def __init__(self, name, capability, **reported):
        self.name, self.capability = name, capability
        self.reported = dict(sms=132, smem_block=227 << 10, smem_sm=228 << 10, smem_reserve=1024, registers_sm=65536,
                             threads_sm=2048, blocks_sm=32, l2=50 << 20, clock=1_980_000, memory_clock=2_000_000,
                             memory_bus=5120) | reported  # fmt: skip

    def attribute(self, name):
        return self.reported[name]


def test_a_board_is_its_preset_with_what_the_driver_reports():
    h200 = target.PRESETS["h200"]
    assert target.describe(Board("NVIDIA H200", (9, 0))) == h200
    half = target.describe(Board("NVIDIA H200 MIG 3g.71gb", (9, 0), sms=66))
    assert half.sms == 66 and half.peak["bf16"] == h200.peak["bf16"] / 2 and half.bandwidth == h200.bandwidth / 2
    other = target.describe(Board("NVIDIA RTX 5999", (8, 9), sms=100, clock=2_000_000))
    assert (
        other.name == "rtx5999" and other.peak["f32"] == 2 * 128 * 2e9 * 100 and other.bandwidth == 2 * 2e9 * 5120 / 8
    )
    with pytest.raises(nova.UnsupportedError, match=r"Tesla V100 has compute capability 7.0"):
        target.describe(Board("Tesla V100", (7, 0)))


def test_tensors_on_two_gpus_are_refused():
    assert placement.the_device(["cpu", "cuda:1"]) == "cuda:1" and placement.the_device(["cpu"]) == "cpu"
    with pytest.raises(nova.UnsupportedError, match="train has tensors on cuda:0 and cuda:1.*one GPU"):
        placement.the_device(["cpu", "cuda:0", "cuda:1"], "train")
    with pytest.raises(nova.UnsupportedError, match="xpu:0; Nova compiles for CPUs and NVIDIA GPUs"):
        placement.the_device(["xpu:0"])


def test_a_gpu_without_a_driver_is_an_error_that_says_so(monkeypatch):
    def missing(name):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda.ctypes, "CDLL", missing)
    cuda.driver.cache_clear()
    with pytest.raises(nova.NovaError, match="no CUDA driver: libcuda.so.1"):
        cuda.driver()


# ---- whole steps


@pytest.fixture
def whole(device, monkeypatch):
    """nova.jit as if every tensor were on a GPU, except what `host` names."""

    def build(text, chosen):
        if f'nova.kernel = "{NAME}"' in text:
            return guarded_copy()
        *_, (_, module) = pipeline.lower_kernel(text, target.host(), last=3)
        from nova.cpu.compile import compile_kernel

        kernel = compile_kernel(str(module), target.host())
        return on_gpu(kernel, table='nova.kernel = "multi_tensor"' in text)

    pretend_gpu(monkeypatch, build)
    return device


@pytest.mark.parametrize("name", ["mlp", "gpt2", "gan", "convnet"])
def test_models_train_as_in_eager(whole, name):
    results = []
    for transform in (lambda f: f, nova.jit):
        torch.manual_seed(0)
        case = models.build(name, steps=6)
        step = transform(case.step)
        losses = [step(*batch) for batch in case.batches]
        results.append((losses, case.state(), step))
    (eager, eager_state, _), (compiled, state, step) = results
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    for key, value in eager_state.items():
        torch.testing.assert_close(state[key], value, rtol=1e-3, atol=1e-4, msg=lambda m: f"{key}: {m}")
    (variant,) = step._variants[:1]
    assert isinstance(variant.executable, FakeExecutable)
    cells = variant.executable.plan.cells
    assert cells and all(cell.update == "count" for cell in cells)


def test_a_stored_step_is_loaded_again(whole):
    torch.manual_seed(0)
    case = models.build("mlp", steps=3)
    step = nova.jit(case.step)
    step(*case.batches[0])
    made = step._variants[0].executable
    meta, blobs = made.entry()
    again = FakeExecutable.from_entry(meta, blobs)
    assert again.plan == made.plan
