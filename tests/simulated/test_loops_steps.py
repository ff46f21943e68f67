"""Loops kernels of real functions, forward and backward, as tile programs and as simulated threads, against float64.

A board of two multiprocessors makes blocks few, so that loops over tiles run several times at small sizes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import nova
from nova import mlir, pipeline
from nova.fusion import interpret as level2
from nova.fusion import outline, profit, readback
from nova.fusion.kernel import Kernel
from nova.gpu import simulate
from nova.gpu.distribute import distribute
from nova.schedule import target as targets
from nova.tile import generate, interpret
from tests.kernels import DTYPES, poisoned

BOARD = dataclasses.replace(targets.by_name("h200"), sms=2)
EPSILON = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def memory_of(tensor: torch.Tensor) -> np.ndarray:
    """A copy of the bytes as the simulators want them."""
    flat = tensor.detach().contiguous().reshape(-1).clone()
    if tensor.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(np.uint16)
    return flat.view(torch.uint8).numpy().view(np.bool_) if tensor.dtype == torch.bool else flat.numpy()


def tensor_of(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    if like.dtype == torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).reshape(like.shape)
    return torch.from_numpy(array).to(like.dtype).reshape(like.shape)


def operands(kernel: Kernel, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for tensor in kernel.args:
        dtype = DTYPES[tensor.dtype]
        if dtype.is_floating_point:
            found.append(torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(dtype))
        else:
            found.append(torch.randint(0, 5, tensor.shape, generator=generator).to(dtype))
    return found


def run(program: str, kernel: Kernel, inputs: list[torch.Tensor], threads: bool, aliased: bool) -> list[torch.Tensor]:
    """The kernel's results; `aliased`: written over the operands that allow it."""
    ins = [memory_of(x) for x in inputs]
    likes = [poisoned(t.shape, DTYPES[t.dtype]) for t in kernel.outs]
    outs, taken = [memory_of(x) for x in likes], set()
    for operand, result in kernel.inplace if aliased else ():
        if operand not in taken and not any(outs[result] is x for x in ins):
            outs[result] = ins[operand]
            taken.add(operand)
    found = re.search(r"nova_tile.workspace = (\d+)", program)
    assert found is not None
    record = np.zeros(4, np.int64)
    buffers = [*ins, *outs, np.full(int(found[1]) + 64, 0xFF, np.uint8), record]
    if threads:
        simulate.run(distribute(mlir.parse(program)), buffers)
    else:
        interpret.run(program, buffers)
    assert not record.any()
    return [tensor_of(out, like) for out, like in zip(outs, likes, strict=True)]


def close(got: torch.Tensor, want: torch.Tensor, near: torch.Tensor) -> None:
    """Not farther from the float64 result than three times PyTorch's own arithmetic, or a rounding."""
    if not got.dtype.is_floating_point:
        assert torch.equal(got.to(want.dtype), want)
        return
    assert torch.equal(got.isnan(), want.isnan())
    scale = want.nan_to_num().abs().max().clamp_min(1e-30)
    error, own = ((x.double() - want.double()).nan_to_num().abs().max() / scale for x in (got, near))
    assert error <= 3 * own + EPSILON[got.dtype]


def check(function: Callable, *tensors: torch.Tensor) -> None:
    lowered = nova.capture(function, *tensors).lower("h200")
    kernels = [k for k in outline.kernels(lowered.module) if k.kind == "loops"]
    assert kernels
    for number, text in enumerate(kernels):
        *_, (_, module) = pipeline.lower_kernel(text.text, BOARD, last=3)
        with mlir.context():
            (kernel_op,) = outline.kernel_functions(module)
            kernel, program = readback.read(kernel_op), generate.generate(kernel_op, BOARD)
            inputs = operands(kernel, number)
            want, near = (level2.run_kernel(kernel, [x.clone() for x in inputs], wide=wide) for wide in (True, False))
            for threads in (False, True):
                for aliased in (False, True) if kernel.inplace else (False,):
                    for results in zip(run(program, kernel, inputs, threads, aliased), want, near, strict=True):
                        close(*results)


def gradient(function: Callable, *tensors: torch.Tensor) -> Callable[[], tuple]:
    leaves = [t.requires_grad_() for t in tensors if t.is_floating_point()]

    def both() -> tuple:
        result = function(*tensors)
        return torch.autograd.grad(result, leaves, torch.ones_like(result) * 0.5 if result.dim() else None)

    return both


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


SHAPES = [(37, 40), (130, 33), (9, 300), (70, 1536)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm_backward(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, w, b = (torch.randn(s, dtype=dtype) for s in (shape, shape[1:], shape[1:]))
    check(gradient(lambda x, w, b: F.layer_norm(x * 2, shape[1:], w, b), x, w, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(128, 768), (131, 768), (40, 96)], ids=str)
def test_layer_norm_backward_of_saved_statistics(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Tiles that divide into whole turns of the loads ahead, and tiles that do not."""
    x, dy, w, b = (torch.randn(s, dtype=dtype) for s in (shape, shape, shape[1:], shape[1:]))
    mean, rstd = torch.native_layer_norm(x, shape[1:], w, b, 1e-5)[1:]
    backward = torch.ops.aten.native_layer_norm_backward
    check(lambda dy, x, m, r, w, b: backward(dy, x, shape[1:], m, r, w, b, [True] * 3), dy, x, mean, rstd, w, b)


@pytest.mark.parametrize("shape", [(37, 40), (9, 300)], ids=str)
def test_rms_norm_backward(shape: tuple[int, int]) -> None:
    check(gradient(lambda x, w: F.rms_norm(x, shape[1:], w), torch.randn(shape), torch.randn(shape[1])))


@pytest.mark.parametrize("shape", [(5, 17), (3, 6000), (2, 50304)], ids=str)
def test_softmax_and_its_gradient(shape: tuple[int, int]) -> None:
    check(gradient(lambda x: F.softmax(x * 3, -1) * x, torch.randn(shape)))
    check(lambda x: F.log_softmax(x, -1), torch.randn(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(33, 57), (7, 9000), (3, 50304)], ids=str)
def test_cross_entropy(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, t = torch.randn(shape, dtype=dtype), torch.randint(0, shape[1], shape[:1])
    check(gradient(lambda x, t: F.cross_entropy(x, t, ignore_index=3), x, t))


@pytest.mark.parametrize("shape", [(33, 57), (13, 9000)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_and_its_gradient_together(shape: tuple[int, int], reduction: str, monkeypatch) -> None:
    """As for large logits: each row is read, and read again for its gradient."""
    monkeypatch.setattr(profit, "LARGE_READ", 0)
    x, t = torch.randn(shape), torch.randint(0, shape[1], shape[:1])

    def both(x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = F.cross_entropy(x, t, ignore_index=3, label_smoothing=0.1, reduction=reduction)
        return loss, *torch.autograd.grad(loss.sum(), x)

    check(both, x.requires_grad_(), t)


def test_batch_norm_and_pooling() -> None:
    x, w, b = torch.randn(3, 6, 10, 9), torch.randn(6), torch.randn(6)
    check(gradient(lambda x, w, b: F.relu(F.batch_norm(x, None, None, w, b, True)), x, w, b))
    check(lambda x: (F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 2), F.pad(x, (1, 2, 0, 3), value=2.0)), x.detach())


def test_movement() -> None:
    x = torch.randn(5, 34, 70)
    check(lambda x: (x.permute(2, 0, 1).contiguous(), x.transpose(1, 2).contiguous(), x.flip(1), x.roll(3, 2)), x)
    check(lambda x: (torch.cat([x[:, :, :13], x[:, :, 20:] * 2], 2), x[:, 1::3, ::2].contiguous()), x)
    check(lambda x: torch.where(x > 0, x, torch.arange(70.0)).to(torch.float64).cumsum(0), x)


def test_totals_of_many_shapes() -> None:
    x = torch.randn(70, 3, 41)
    check(lambda x: (x.sum(), x.sum(0), x.sum(1), x.sum(2), x.sum((0, 2)), x.amax(0), x.prod(2), x.mean()), x)
    check(lambda x: (x / x.norm(), x - x.mean(0), x / x.sum(), (x - x.amin((0, 2), keepdim=True)).sum(1)), x)


def _scaled(x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * r[:, None]
    return y, y.sum(0), r.exp() * 2


def _shifted(x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = (x + r[:, None]).tanh()
    return y, r.cos(), (y * x).sum(0), (y * r[:, None]).sum(0)


@pytest.mark.parametrize("function", [_scaled, _shifted])
@pytest.mark.parametrize("shape", [(64, 600), (33, 1030)], ids=str)
def test_a_value_of_a_row_over_what_other_blocks_read(function: Callable, shape: tuple[int, int]) -> None:
    """The columns are dealt out over blocks, which all read the row's value that one of them would overwrite."""
    check(function, torch.randn(shape), torch.randn(shape[0]))
