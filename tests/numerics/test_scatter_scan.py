"""Scatter and scan kernels against PyTorch: duplicates, bad indices, every dim, the same bits for any thread count."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
import torch

from nova import mlir
from nova.dialect.base import segment_texts
from nova.mlir import ir
from tests.kernels import DTYPES, load_kernel, poisoned

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def type_of(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"tensor<{'x'.join([*map(str, shape), NAMES[dtype]])}>"


def segments(op: str, inputs: Sequence[torch.Tensor], attrs: str) -> list[str]:
    """The operandSegmentSizes of an op with several lists of operands."""
    with mlir.context():
        types = [ir.Type.parse(type_of(x.shape, x.dtype)) for x in inputs]
        return segment_texts(op, types, [], {})


def run(
    op: str, attrs: str, inputs: Sequence[torch.Tensor], shape: Sequence[int], dtype: torch.dtype,
    kind: str = "scatter", inplace: bool = False,
) -> tuple[torch.Tensor, list[int]]:  # fmt: skip
    """(result, error record) of one op, run with 1 and 2 threads; in place on the first operand if asked."""
    args = ", ".join(f"%a{i}: {type_of(x.shape, x.dtype)}" for i, x in enumerate(inputs))
    types = ", ".join(type_of(x.shape, x.dtype) for x in inputs)
    result = type_of(shape, dtype)
    pairs = "array<i64: 0, 0>" if inplace else ""
    attrs = ", ".join([attrs] * bool(attrs) + segments(op, inputs, attrs))
    text = (
        f"module {{ func.func private @k({args}, %o: {result} {{nova.out}}) -> {result} attributes "
        f'{{nova.kernel = "{kind}", nova.inplace = [{pairs}], nova.raises = "IndexError: {{value}}"}} {{\n'
        f'%r = "nova.{op}"({", ".join(f"%a{i}" for i in range(len(inputs)))}) {{{attrs}}} : ({types}) -> {result}\n'
        f"return %r : {result} }} }}"
    )
    kernel, before, results = load_kernel(text), torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        error = torch.zeros(2, dtype=torch.int64)
        tensors = [x.clone() for x in inputs]
        out = tensors[0] if inplace else poisoned(shape, dtype)
        kernel.workspace.fill_(0xFF)
        pointers = [*kernel.pointers([*tensors, out]), error.data_ptr()]
        array = (ctypes.c_void_p * len(pointers))(*pointers)  # named: the call must not outlive it
        kernel.function(ctypes.addressof(array))
        results.append((out, error.tolist()))
        for given, after in zip(inputs[1:], tensors[1:], strict=True):
            assert torch.equal(given, after), "an operand changed"
    torch.set_num_threads(before)
    assert torch.equal(results[0][0], results[1][0])
    return results[0]


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-6) -> None:
    assert got.shape == want.shape
    assert (got.double() - want.double()).norm() <= tolerance * want.double().norm().clamp(min=1e-30)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    "ids_shape,columns,rows", [([40], [5], 7), ([3, 50], [160], 11), ([2000], [257], 300), ([9], [], 4)]
)
@pytest.mark.parametrize("padding", [-1, 2])
def test_take_backward(ids_shape: list[int], columns: list[int], rows: int, padding: int) -> None:
    ids = torch.randint(0, rows, ids_shape)
    dy = torch.randn(*ids_shape, *columns)
    got, error = run(
        "take_backward", f"rows = {rows} : i64, padding_idx = {padding} : i64", [dy, ids], [rows, *columns], dy.dtype
    )
    want = torch.zeros(rows, *columns, dtype=torch.float64)
    want.index_add_(0, ids.flatten(), dy.double().view(-1, *columns))
    if padding >= 0:
        want[padding] = 0
    close(got, want)
    assert error == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64])
def test_take_backward_dtypes_and_int32_ids(dtype: torch.dtype) -> None:
    ids = torch.randint(0, 5, [300], dtype=torch.int32)
    dy = torch.randn(300, 33).to(dtype) if dtype.is_floating_point else torch.randint(-9, 9, [300, 33])
    got, _ = run("take_backward", "rows = 5 : i64, padding_idx = -1 : i64", [dy, ids], [5, 33], dtype)
    want = torch.zeros(5, 33, dtype=torch.float64).index_add_(0, ids.long(), dy.double())
    close(got, want, {torch.bfloat16: 4e-3, torch.float16: 5e-4}.get(dtype, 1e-12))


@pytest.mark.parametrize("bad", [-1, 7, 10**14])
def test_take_backward_reports_and_skips_bad_ids(bad: int) -> None:
    ids = torch.randint(0, 7, [30])
    ids[11] = bad
    dy = torch.randn(30, 8)
    got, error = run("take_backward", "rows = 7 : i64, padding_idx = -1 : i64", [dy, ids], [7, 8], dy.dtype)
    good = torch.arange(30) != 11
    close(got, torch.zeros(7, 8, dtype=torch.float64).index_add_(0, ids[good], dy[good].double()))
    assert error == [1, bad]


@pytest.mark.parametrize("shape,index_shape,dim", [
    ([10], [30], 0), ([6, 9], [6, 20], 1), ([6, 9], [25, 9], 0), ([4, 5, 200], [3, 11, 150], 1),
    ([4, 5, 3], [2, 5, 8], 2), ([3, 0], [3, 0], 1),
])  # fmt: skip
@pytest.mark.parametrize("reduce", ["none", "add", "mul", "amax", "amin"])
def test_scatter(shape: list[int], index_shape: list[int], dim: int, reduce: str) -> None:
    base = torch.randn(shape)
    if reduce == "none":  # duplicates: the last one wins, so torch's own order is no reference
        index = torch.argsort(torch.rand([*index_shape[:dim], shape[dim], *index_shape[dim + 1 :]]), dim)
        index = index.narrow(dim, 0, min(shape[dim], index_shape[dim])).contiguous()
    else:
        index = torch.randint(0, max(shape[dim], 1), index_shape)
    src = torch.randn(index.shape)
    attrs = f'dim = {dim} : i64, reduce = "{reduce}"'
    name = {"add": "sum", "mul": "prod"}.get(reduce, reduce)
    if reduce == "none":
        want = base.double().scatter(dim, index, src.double())
    else:
        want = base.double().scatter_reduce(dim, index, src.double(), name)
    for inplace in (False, True):
        got, error = run("scatter", attrs, [base, index, src], shape, base.dtype, inplace=inplace)
        close(got, want, 2e-6)
        assert error == [0, 0]


def test_scatter_last_duplicate_wins_and_bad_index_is_skipped() -> None:
    base, index = torch.zeros(4), torch.tensor([1, 1, 9, -1, 1])
    src = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    got, error = run("scatter", 'dim = 0 : i64, reduce = "none"', [base, index, src], [4], base.dtype)
    assert got.tolist() == [0, 5, 0, 0]
    assert error[0] == 1


INDEX_PUT = [
    # shape of x, dims, shapes of the indices, shape of the values
    ([7], [0], [[20]], [20]),
    ([7, 5], [0], [[4, 3]], [4, 3, 5]),
    ([7, 5, 100], [1], [[6]], [7, 6, 100]),
    ([7, 5, 3], [0, 1], [[6, 1], [1, 4]], [6, 4, 3]),
    ([7, 5, 3], [0, 2], [[6], [1]], [6, 5]),
    ([7, 5], [0, 1], [[9], [9]], []),
]


@pytest.mark.parametrize("shape,dims,index_shapes,values_shape", INDEX_PUT)
def test_index_put_accumulates(shape, dims, index_shapes, values_shape) -> None:
    x, values = torch.randn(shape), torch.randn(values_shape)
    indices = [torch.randint(-shape[d], shape[d], s) for d, s in zip(dims, index_shapes, strict=True)]
    where: list = [slice(None)] * len(shape)
    for dim, index in zip(dims, indices, strict=True):
        where[dim] = index
    want = x.double()
    tensors = [None if isinstance(w, slice) else w for w in where]
    want = torch.ops.aten.index_put(want, tensors, values.double(), True)
    attrs = f"dims = array<i64: {', '.join(map(str, dims))}>, accumulate = true, wrap = true"
    for inplace in (False, True):
        got, error = run("index_put", attrs, [x, values, *indices], shape, x.dtype, inplace=inplace)
        close(got, want)
        assert error == [0, 0]


def test_index_put_overwrites_and_reports() -> None:
    x, values, index = torch.zeros(5, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([1, -1, 5])
    attrs = "dims = array<i64: 0>, accumulate = false, wrap = true"
    got, error = run("index_put", attrs, [x, values, index], [5, 2], x.dtype)
    assert got.tolist() == [[0, 0], [1, 2], [0, 0], [0, 0], [3, 4]]
    assert error == [1, 5]
    index[2] = 2
    got, error = run("index_put", attrs.replace("wrap = true", "wrap = false"), [x, values, index], [5, 2], x.dtype)
    assert got.tolist() == [[0, 0], [1, 2], [5, 6], [0, 0], [0, 0]]
    assert error == [1, -1]


def test_as_strided_scatter() -> None:
    base, update = torch.randn(40), torch.randn(3, 4)
    attrs = "size = array<i64: 3, 4>, stride = array<i64: 11, 2>, offset = 5 : i64"
    got, _ = run("as_strided_scatter", attrs, [base, update], [40], base.dtype)
    assert torch.equal(got, torch.as_strided_scatter(base, update, (3, 4), (11, 2), 5))


WINDOWS = (
    "kernel = array<i64: 3, 3>, stride = array<i64: 2, 2>, padding = array<i64: 1, 1>, dilation = array<i64: 1, 1>"
)


def test_max_pool2d_backward() -> None:
    x = torch.randn(2, 3, 9, 11)
    y, indices = torch.nn.functional.max_pool2d(x, 3, 2, 1, return_indices=True)
    dy = torch.randn(y.shape)
    got, _ = run("max_pool2d_backward", WINDOWS, [dy, indices], x.shape, x.dtype)
    want = torch.zeros(6, 99, dtype=torch.float64).scatter_add_(1, indices.view(6, -1), dy.double().view(6, -1))
    close(got, want.view(x.shape))


@pytest.mark.parametrize("op", ["cumsum", "cumprod"])
@pytest.mark.parametrize("shape,dim", [
    ([1], 0), ([3000], 0), ([5, 77], 1), ([77, 5], 0), ([4, 50, 37], 1), ([2, 3, 4], 0), ([3, 0], 1), ([0, 3], 0),
    ([100, 64], 0),
])  # fmt: skip
def test_scan(op: str, shape: list[int], dim: int) -> None:
    x = torch.randn(shape) if op == "cumsum" else torch.rand(shape) * 0.2 + 0.9
    for inplace in (False, True):
        got, _ = run(op, f"dim = {dim} : i64", [x], shape, x.dtype, "scan", inplace)
        close(got, getattr(torch, op)(x.double(), dim), 2e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.int32])
def test_scan_dtypes(dtype: torch.dtype) -> None:
    x = torch.randn(40, 30).to(dtype) if dtype.is_floating_point else torch.randint(-9, 9, [40, 30]).to(dtype)
    got, _ = run("cumsum", "dim = 0 : i64", [x], x.shape, dtype, "scan")
    close(got, torch.cumsum(x.double(), 0), 4e-3 if dtype == torch.bfloat16 else 1e-12)
