"""Multi-tensor kernels as tile programs: any number of tensors of any size through one table of words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

import nova
from nova import mlir, pipeline
from nova.fusion import outline
from nova.gpu import distribute, simulate
from nova.mlir import ir
from nova.schedule import target as targets
from nova.schedule.annotate import kernels
from nova.tile import generate, interpret
from tests import adamw
from tests.adamw import scalar
from tests.kernels import DTYPES, load_kernel
from tests.numerics.test_multi_tensor import ADAMW, EXAMPLE, LARGEST, NORM
from tests.numerics.test_multi_tensor import call as call_cpu

SIZES = [[], [1], [7, 3], [0], [4096], [40000], [1], [33, 1001], [5]]
TARGET = replace(targets.by_name("h200"), sms=2)  # few blocks: the interpreters run them one by one


def tile_program(text: str) -> str:
    module = mlir.parse(text)
    with mlir.context(), ir.Location.unknown():
        (kernel,) = kernels(module.operation)
        return generate.generate(kernel, TARGET)


def run_level4(text: str, table: np.ndarray, memory: Sequence[np.ndarray]) -> None:
    interpret.run(text, [table], memory=memory)


def run_level5(text: str, table: np.ndarray, memory: Sequence[np.ndarray]) -> None:
    with mlir.context(), ir.Location.unknown():
        code = distribute.distribute(ir.Module.parse(text))
    simulate.run(code, [table], memory=memory)


RUNNERS = pytest.mark.parametrize("runner", [run_level4, run_level5], ids=["tiles", "threads"])


def array(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.reshape(-1)
    return (flat.view(torch.uint16) if tensor.dtype == torch.bfloat16 else flat).numpy()


def call(runner, text: str, count: int, numel: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
    """The words: n, numel, pointers in call order, workspace, error record."""
    with mlir.context():
        attributes = ir.Module.parse(text).operation.attributes
        workspace = np.full(ir.IntegerAttr(attributes["nova_tile.workspace"]).value + 8, 0xFF, np.uint8)
    sizes, record = np.array([*numel, 0], np.int64), np.zeros(4, np.int64)
    arrays = [array(t) for t in tensors]
    memory = [sizes, *arrays, workspace, record]
    words = [count, sizes.ctypes.data, *(a.ctypes.data for a in arrays), workspace.ctypes.data, record.ctypes.data]
    runner(text, np.array(words, np.int64), memory)


@RUNNERS
def test_sgd_and_step_count(runner) -> None:
    text = tile_program(EXAMPLE.read_text())
    params, grads = [torch.randn(s) for s in SIZES], [torch.randn(s) for s in SIZES]
    steps = [torch.tensor(float(i)) for i in range(len(SIZES))]
    want = [p - g * torch.tensor(0.1) for p, g in zip(params, grads, strict=True)]
    call(runner, text, len(SIZES), [p.numel() for p in params], [*params, *grads, *steps, scalar(0.1), *params, *steps])
    for got, expected in zip(params, want, strict=True):
        assert torch.equal(got, expected)
    assert [s.item() for s in steps] == [i + 1.0 for i in range(len(SIZES))]


@RUNNERS
def test_adamw_follows_pytorch(runner) -> None:
    torch.manual_seed(1)
    text = tile_program(ADAMW)
    params = [torch.randn(s) for s in SIZES]
    params[4] = torch.randn(4097)[1:]  # not aligned
    adamw.follows_pytorch(lambda numel, tensors: call(runner, text, len(numel), numel, tensors), params, 3)


@RUNNERS
def test_found_inf_changes_nothing(runner) -> None:
    text = tile_program(ADAMW)
    adamw.inf_changes_nothing(lambda numel, tensors: call(runner, text, len(numel), numel, tensors), SIZES[:5])


@RUNNERS
def test_norms(runner) -> None:
    text = tile_program(NORM)
    xs = [torch.randn(s) for s in [*SIZES, [300000]]]
    out = torch.full((len(xs),), math.nan)
    call(runner, text, len(xs), [x.numel() for x in xs], [*xs, out])
    want = torch.stack([x.double().norm() for x in xs])
    torch.testing.assert_close(out.double(), want, rtol=3e-7, atol=0)


@RUNNERS
def test_a_reduction_may_be_the_result(runner) -> None:
    text = tile_program(LARGEST)
    xs = [torch.randn(s) for s in [*SIZES, [300000]]]
    xs[2][3, 1], xs[5][39999] = math.nan, -math.inf
    out = torch.full((len(xs),), -1.0)
    call(runner, text, len(xs), [x.numel() for x in xs], [*xs, out])
    want = torch.stack([x.abs().max() if x.numel() else torch.tensor(0.0) for x in xs])
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("count", [0, 1, 300])
def test_any_number_of_tensors(count: int) -> None:
    text = tile_program(NORM)
    xs = [torch.full((i % 5,), float(i)) for i in range(count)]
    out = torch.full((count,), math.nan)
    call(run_level4, text, count, [x.numel() for x in xs], [*xs, out])
    want = torch.tensor([math.sqrt(i % 5) * i for i in range(count)])
    torch.testing.assert_close(out, want)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1, maximize=True),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True, momentum=0.9),
}


def captured_kernels(name: str, dtype: torch.dtype, clip: float) -> list[str]:
    """Level-1 texts of the multi-tensor kernels of a step with this optimizer."""
    model = torch.nn.Linear(3, 3).to(dtype)
    optimizer = OPTIMIZERS[name](model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=clip)
        optimizer.step()
        return loss

    lowered = nova.capture(step, torch.randn(2, 3, dtype=dtype)).lower("zen3")
    return [kernel.text for kernel in outline.kernels(lowered.module) if kernel.kind == "multi_tensor"]


@pytest.mark.parametrize(("name", "dtype", "clip"), [
    ("adamw", torch.float32, 2.0), ("adamw", torch.bfloat16, 1.0), ("adam_amsgrad", torch.float32, math.inf),
    ("adam_amsgrad", torch.float64, 2.0), ("sgd_nesterov", torch.float32, 3.0), ("sgd_nesterov", torch.bfloat16, 2.0),
    ("adagrad", torch.float32, 2.0), ("rmsprop", torch.float32, 2.0),
])  # fmt: skip
def test_the_same_as_on_the_cpu(name: str, dtype: torch.dtype, clip: float) -> None:
    """Whatever the arguments mean: both back ends compute the same from the same numbers."""
    torch.manual_seed(2)
    texts = captured_kernels(name, dtype, clip)
    assert texts
    for text in texts:
        *_, (_, module) = pipeline.lower_kernel(text, TARGET, last=3)
        types, marks = signature(str(module))
        sizes = [5, 4100, 1]
        tensors = []
        for kind, mark in zip(types, marks, strict=True):
            element = DTYPES[kind.split("x")[-1].strip("tensor<>")]
            count = len(sizes) if "nova.list" in mark or "nova.element" in mark else 1
            shapes = [[n] if "?" in kind else [] for n in sizes] if "nova.list" in mark else [[count]]
            tensors += [torch.rand(shape, dtype=torch.float64).mul(0.9).add(0.05).to(element) for shape in shapes]
        copies = [t.clone() for t in tensors]
        call_cpu(load_kernel(str(module)), len(sizes), sizes, copies, 2)
        call(run_level5, tile_program(str(module)), len(sizes), sizes, tensors)
        for got, want in zip(tensors, copies, strict=True):
            tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-6
            torch.testing.assert_close(got, want, rtol=tolerance, atol=0, equal_nan=True)


def signature(text: str) -> tuple[list[str], list[str]]:
    """Types and marks of a kernel's arguments."""
    module = mlir.parse(text)
    with mlir.context():
        (kernel,) = kernels(module.operation)
        types = [str(a.type) for a in kernel.operation.regions[0].blocks[0].arguments]
        marks = [str(mark) for mark in ir.ArrayAttr(kernel.operation.attributes["arg_attrs"])]
    return types, marks
