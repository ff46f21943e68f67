"""Kernels on boards with little shared memory: they are scheduled again, smaller, and stay right; see nova/gpu/fit.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import nova
from nova import pipeline
from nova.errors import CompileError
from nova.fusion import outline
from nova.gpu import compile, ptxas, to_ptx
from nova.runtime import kernels as stored
from nova.schedule import attention_gpu, bandwidth, contraction_gpu, target
from tests import gpu_case_list, gpu_cases
from tests.simulated.test_whole_steps import simulated  # noqa: F401  (a fixture)

CASES = [
    "contractions/33x65x17-bf16", "contractions/128x128x64-tf32", "cross_entropy/gpt-head", "attention/causal-24-bf16",
    "attention/causal-32-f32", "rows/rms-norm-3x1025-f32", "rows/softmax-37x33-f32", "columns/sums-1000x77-f32",
    "copies/transpose-100x130-f32", "indexed/cumsum-4x50x37-1", "indexed/cumsum-5x77-1", "indexed/scatter-add-5000",
    "indexed/embedding-40-7x5-f32",
]  # fmt: skip
QUICK = {
    "contractions/33x65x17-bf16", "rows/rms-norm-3x1025-f32", "indexed/cumsum-5x77-1", "indexed/embedding-40-7x5-f32"
}  # fmt: skip


def board(monkeypatch, kilobytes: int) -> target.GpuTarget:
    """An H200 whose blocks have little shared memory, under the name "h200"."""
    small = dataclasses.replace(target.PRESETS["h200"], smem_block=kilobytes << 10)
    monkeypatch.setitem(target.PRESETS, "h200", small)
    return small


@pytest.mark.parametrize("kilobytes", [48, 16])
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.lengthy) for n in CASES])
def test_every_kind_of_kernel_fits_and_is_right(simulated, monkeypatch, name, kilobytes):  # noqa: F811
    small = board(monkeypatch, kilobytes)
    step = gpu_cases.check(gpu_case_list.cases()[name], "cpu")
    launches = [launch for kernel in step._variants[0].executable.kernels for launch in kernel.launches]
    assert launches and all(launch.shared <= small.smem_block for launch in launches)


def kernel_of(function, *tensors) -> str:
    """The largest kernel of a step, as outlined."""
    lowered = nova.capture(function, *tensors).lower("h200")
    return max((k.text for k in outline.kernels(lowered.module)), key=len)


def norm(x):
    return F.rms_norm(x, (1025,))


def gradient_of_norm(x, w, dy):
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    return torch.autograd.grad(F.rms_norm(x, x.shape[-1:], w), (x, w), dy)


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


HEADS = [torch.randn(4, 8, 512, 64, dtype=torch.bfloat16) for _ in range(3)]
MATRICES = [torch.randn(1024, 1024), torch.randn(1024, 1024)]
NORMS = [torch.randn(300, 512), torch.randn(512), torch.randn(300, 512)]


@pytest.mark.parametrize(
    ("ledger", "kilobytes", "function", "tensors"),
    [
        (contraction_gpu, 16, torch.mm, MATRICES), (attention_gpu, 16, attention, HEADS),
        (bandwidth, 6, gradient_of_norm, NORMS),
    ],
)  # fmt: skip
def test_what_the_ledger_left_out_makes_a_smaller_schedule_that_says_so(
    monkeypatch, ledger, kilobytes, function, tensors
):
    """A ledger that counts a quarter of what is needed: the real need is seen later, and it is scheduled again."""
    small = board(monkeypatch, kilobytes)
    real = ledger._shared
    monkeypatch.setattr(ledger, "_shared", lambda *args: real(*args) // 4)
    text = kernel_of(function, *tensors)
    stages = [(stage, str(module)) for stage, module in pipeline.lower_kernel(text, small)]
    tries = [found for stage, found in stages if stage == "configure"]
    assert len(tries) > 1 and tries[0] != tries[-1]
    assert "a smaller schedule, for" not in tries[0] and "a smaller schedule, for" in tries[-1]
    made = compile.build(text, small)
    assert 0 < made.smem_limit < small.smem_block and f"h200 has {small.smem_block:,} B" in made.smem_reason
    assert all(launch.shared <= small.smem_block for launch in made.launches)
    again = stored.decode(*stored.encode(made))
    assert (again.smem_limit, again.smem_reason) == (made.smem_limit, made.smem_reason)


def test_explain_and_the_debug_line_show_it(monkeypatch, capfd):
    board(monkeypatch, 16)
    monkeypatch.setenv("NOVA_WORKERS", "0")
    monkeypatch.setenv("NOVA_CACHE", "0")
    monkeypatch.setattr(contraction_gpu, "_shared", lambda *args, real=contraction_gpu._shared: real(*args) // 4)
    compiled = nova.capture(torch.mm, *MATRICES).lower("h200").compile()
    assert "1 kernels would need more shared memory than h200 has" in capfd.readouterr().err
    (kernel,) = compiled.compilation.kernels
    shown = nova.inspect.scheduled(kernel, compiled.lowered.target, kernel.code)
    assert shown.smaller and shown.schedule["reasons"][-1] == shown.smaller
    plain = nova.inspect.scheduled(kernel, compiled.lowered.target)
    assert (
        plain.schedule["workgroup"] != shown.schedule["workgroup"]
        or plain.schedule["stages"] != shown.schedule["stages"]
    )
    nova.inspect.print_kernels([kernel], compiled.lowered.target)
    assert "a smaller schedule, for" in capfd.readouterr().err


def test_what_fits_in_no_way_is_an_error_that_names_the_kernel_and_its_need(monkeypatch):
    text = kernel_of(attention, *[torch.randn(1, 1, 8, 256) for _ in range(3)])
    small = board(monkeypatch, 16)
    with pytest.raises(
        CompileError, match=r"kernel @\w+: attention with head dims 256 and 256 in f32 does not fit h200"
    ):
        compile.build(text, small)
    monkeypatch.setattr(attention_gpu, "_shared", lambda *args, real=attention_gpu._shared: real(*args) // 4)
    with pytest.raises(
        CompileError, match=r"kernel @\w+: needs 4\d,\d{3} B of shared memory .* smallest .*; h200 has 16,384 B"
    ):
        compile.build(text, small)


def test_spilled_registers_are_no_error(monkeypatch):
    """ptxas reports them; the kernel runs, slower."""

    def assemble(ptx, arch):
        used = ptxas.Resources(255, spill_stores=64, spill_loads=64)
        return ptxas.Assembled(b"cubin", dict.fromkeys(to_ptx.entry_names(ptx), used), ())

    text = kernel_of(norm, torch.randn(3, 1025))
    monkeypatch.setattr(ptxas, "find_ptxas", lambda: "ptxas")
    monkeypatch.setattr(ptxas, "assemble", assemble)
    made = compile.build(text, target.PRESETS["h200"])
    assert made.cubin == b"cubin" and all(used["spill_stores"] == 64 for used in made.resources)
