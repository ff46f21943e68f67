"""The kernels that fusion makes, compiled and run, against the interpreter of level 2: structure, not single functions.

`test_fusion` shows that levels 1 and 2 agree; this shows that the code generators compute what level 2 says, on the same
cases: rows, columns, slices written in pieces, gathers, windows, epilogues. Equal kernels are compiled once.
"""

import functools

import pytest
import torch

from nova import mlir, pipeline
from nova.cpu.compile import compile_kernel
from nova.dialect.emit import TORCH_DTYPES
from nova.dialect.types import describe
from nova.fusion import interpret, outline, readback
from nova.schedule import target as targets
from tests import kernels
from tests.numerics import test_fusion as cases

TOLERANCE = 2e-5


def arguments(function_op):
    generator = torch.Generator().manual_seed(1)
    for argument in function_op.regions[0].blocks[0].arguments:
        shape, dtype = describe(argument.type)
        if dtype == "bool":
            yield torch.rand(shape, generator=generator) < 0.5
        elif dtype in ("f32", "f64", "bf16", "f16"):
            yield (torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1).to(TORCH_DTYPES[dtype])
        else:
            yield torch.randint(1, 3, shape, generator=generator).to(TORCH_DTYPES[dtype])


@functools.cache
def check_kernel(text):
    with mlir.context(), mlir.ir.Location.unknown():
        module = mlir.ir.Module.parse(text)
        inputs = list(arguments(outline.kernel_functions(module)[0]))
        for _, module in pipeline.lower_kernel(text, targets.host()):  # noqa: B007
            pass
        kernel = readback.read(outline.kernel_functions(module)[0])
        expected = interpret.run_kernel(kernel, [x.clone() for x in inputs])
        loaded = kernels.Loaded(compile_kernel(str(module), targets.host()))
    outputs = [kernels.poisoned(t.shape, kernels.DTYPES[t.dtype]) for t in kernel.outs]
    loaded.call([x.clone() for x in inputs], outputs)
    for a, b in zip(outputs, expected, strict=True):
        if a.is_floating_point():
            torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
        else:
            assert torch.equal(a, b.to(a.dtype))


def check(function, *tensors):
    torch.manual_seed(0)
    step = cases.outlined(cases.module_of(function, *tensors))
    for kernel in outline.kernels(step):
        if kernel.kind in ("loops", "contraction"):
            check_kernel(kernel.text)


@pytest.mark.parametrize("function", cases.ROWS, ids=range(len(cases.ROWS)))
def test_rows(function):
    check(cases.with_grad(function), cases.rand(3, 17, 24))


@pytest.mark.parametrize("function", cases.MOVEMENT, ids=range(len(cases.MOVEMENT)))
def test_movement(function):
    check(cases.with_grad(function), cases.rand(4, 6, 6))


@pytest.mark.parametrize("function", cases.INDEXING, ids=range(len(cases.INDEXING)))
def test_indexing(function):
    check(cases.with_grad(function), cases.rand(5, 6, 7), torch.tensor([3, 0, 4]))


@pytest.mark.parametrize("options", cases.CONVOLUTIONS, ids=str)
def test_convolution(options):
    weight = cases.rand(6, 4 // options.get("groups", 1), 3, 3)
    check(cases.with_grad(lambda x, w: torch.nn.functional.conv2d(x, w, **options)), cases.rand(2, 4, 9, 10), weight)


def test_blocks():
    check(cases.with_grad(cases.norm), cases.rand(3, 17, 24), cases.rand(24), cases.rand(24))
    check(cases.with_grad(cases.rms), cases.rand(3, 17, 24), cases.rand(24))
    check(cases.with_grad(cases.rotate), cases.rand(2, 3, 5, 8), cases.rand(5, 8), cases.rand(5, 8))
    check(cases.with_grad(cases.heads), cases.rand(2, 5, 24))
    shapes = [(3, 7, 8), (20, 8), (20,), (8, 20), (8,), (3, 7, 8)]
    check(cases.with_grad(cases.mlp), *(cases.rand(*shape) for shape in shapes))
    check(cases.with_grad(lambda x: torch.nn.functional.max_pool2d(x, 3, 2, 1)), cases.rand(2, 3, 8, 9))


def _pieces_of_sums(x, y, z):
    both = torch.cat([x.sum((0, 1)), y, z])
    return both, both.clamp(-0.3, 0.3)


def _pieces_side_by_side(x, y, z):
    rows = torch.cat([x.flatten(0, 1) * 2, y.expand(12, 4)], 1)
    return rows, rows.tanh(), torch.cat([rows[:, 4:], rows[:, :4]], 1).exp()


def _pieces_below_each_other(x, y, z):
    rows = torch.cat([x.flatten(0, 1), y[None] * z])
    return rows, rows.flip(0) + 1, rows.t().sigmoid()


def _padded_sums(x, y, z):
    wide = torch.nn.functional.pad(x.sum((0, 1)), (1, 2), value=0.5)
    return wide, wide.exp(), x * y


def _stacked_rows(x, y, z):
    rows = torch.stack([x.sum(-1), x.amax(-1), x.mean(-1)], -1)
    return rows, rows - rows.mean(-1, keepdim=True), rows.sum((0, 1))


@pytest.mark.parametrize(
    "function",
    [_pieces_of_sums, _pieces_side_by_side, _pieces_below_each_other, _padded_sums, _stacked_rows],
    ids=lambda f: f.__name__.strip("_"),
)
def test_what_is_written_in_pieces_is_read_afterwards(function):
    check(function, cases.rand(4, 3, 4), cases.rand(4), cases.rand(4))
