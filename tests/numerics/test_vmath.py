"""The vector maths functions against float64: a few ulp on sampled arguments, exact special values, scalar = vector."""

import functools
import math

import numpy as np
import pytest
import torch

from nova import mlir
from nova.cpu import build, parallel
from nova.lowering import lanes as ln
from nova.lowering import vmath
from nova.mlir import ir
from tests.kernels import load_module

N = 1 << 16
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-39, 3.4e38, -3.4e38, 88.8, -103.0]
SPECIAL += [0.5, 2.0, 8.0, 1024.0, 1e-10, -1e-10, 200.0, -200.0, -18.0, 128.0, -126.0, -150.0]

# name -> (function, float64 reference, sampled ranges, largest error in ulp)
CASES = {
    "exp": (np.exp, [(-104, 89), (-1, 1)], 1.1),
    "exp2": (np.exp2, [(-150, 128), (-1, 1)], 1.2),
    "expm1": (np.expm1, [(-20, 89), (-1, 1), (-1e-3, 1e-3)], 2.0),
    "log": (np.log, [(1e-38, 1e38), (1e-3, 10), (0.9, 1.1)], 1.5),
    "log2": (np.log2, [(1e-38, 1e38), (1e-3, 10), (0.9, 1.1)], 2.0),
    "log10": (np.log10, [(1e-3, 10), (0.9, 1.1)], 3.0),
    "log1p": (np.log1p, [(-0.9999, 10), (-1e-2, 1e-2), (0, 1e6)], 2.5),
    "erf": (lambda x: torch.erf(torch.from_numpy(x)).numpy(), [(-5, 5), (-1, 1), (-1e-3, 1e-3)], 1.5),
    "tanh": (np.tanh, [(-12, 12), (-1, 1), (-1e-3, 1e-3)], 2.0),
    "sin": (np.sin, [(-10, 10), (-1e5, 1e5), (-1e9, 1e9), (-1e30, 1e30)], 0.6),
    "cos": (np.cos, [(-10, 10), (-1e5, 1e5), (-1e9, 1e9), (-1e30, 1e30)], 0.6),
    "tan": (np.tan, [(-10, 10), (-1e5, 1e5)], 0.6),
    "rsqrt": (lambda x: 1 / np.sqrt(x), [(1e-30, 1e30), (0.1, 2)], 1.6),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), [(-80, 20), (-1, 1)], 2.5),
}


@functools.cache
def kernel(name: str, dtype: str, lanes: int):
    """`y[i] = name(x[i])` for i < N, `lanes` at a time (0: scalar code)."""
    element = {"f32": ir.F32Type, "f64": ir.F64Type, "bf16": ir.BF16Type, "f16": ir.F16Type}
    with mlir.context(), ir.Location.unknown():
        type_ = ir.MemRefType.get([N], element[dtype].get())

        def emit(region: parallel.Region) -> None:
            x, y = region.pointers
            with build.loop(0, N, lanes or 1) as i:
                offset = build.to_i64(i)
                value = ln.load(ln.address(x, offset, type_.element_type), type_.element_type, lanes)
                value = getattr(vmath, name)(value)
                ln.store(value, ln.address(y, offset, type_.element_type))

        module = parallel.emit_kernel("k", [type_, type_], [parallel.Phase(1, 1, emit)])
    return load_module(module, "k")


def evaluate(name: str, x: torch.Tensor, dtype: str = "f32", lanes: int = 8) -> torch.Tensor:
    padded = torch.ones(N, dtype=x.dtype)
    padded[: len(x)] = x
    result = torch.empty_like(padded)
    kernel(name, dtype, lanes).call([padded], [result])
    return result[: len(x)]


def samples(low: float, high: float) -> np.ndarray:
    if low > 0 and high / low > 1e6:
        return np.geomspace(low, high, N).astype(np.float32)
    return np.linspace(low, high, N).astype(np.float32)


def ulp_error(got: np.ndarray, want: np.ndarray) -> float:
    spacing = np.spacing(np.maximum(np.abs(want).astype(np.float32), np.float32(1.2e-38))).astype(np.float64)
    return float(np.max(np.abs(got.astype(np.float64) - want) / spacing))


@pytest.mark.parametrize("name", CASES)
def test_accuracy(name: str) -> None:
    reference, ranges, limit = CASES[name]
    for low, high in ranges:
        x = samples(low, high)
        got = evaluate(name, torch.from_numpy(x)).numpy()
        with np.errstate(all="ignore"):
            want = reference(x.astype(np.float64))
        finite = np.abs(want) < 3.4e38
        assert ulp_error(got[finite], want[finite]) <= limit, f"{name} on [{low}, {high}]"


@pytest.mark.parametrize("name", CASES)
def test_special_values(name: str) -> None:
    x = torch.tensor(SPECIAL, dtype=torch.float32)
    got = evaluate(name, x).numpy()
    with np.errstate(all="ignore"):
        want = CASES[name][0](x.numpy().astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-44, err_msg=name)
    zeros = want == 0
    if name != "sigmoid":
        assert np.array_equal(np.signbit(got[zeros]), np.signbit(want[zeros])), name


@pytest.mark.parametrize("name", CASES)
def test_scalar_code_equals_vector_code(name: str) -> None:
    x = torch.from_numpy(samples(-20, 20))
    assert torch.equal(evaluate(name, x).nan_to_num(), evaluate(name, x, lanes=0).nan_to_num())


@pytest.mark.parametrize("name", ["exp", "log", "tanh", "erf", "sin"])
@pytest.mark.parametrize("dtype", ["f64", "bf16", "f16"])
def test_other_dtypes(name: str, dtype: str) -> None:
    torch_dtype = {"f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    x = torch.linspace(-10, 10, N, dtype=torch.float64).to(torch_dtype)
    got = evaluate(name, x, dtype)
    want = getattr(torch, name)(x.double())
    if dtype == "f64":
        torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-300, equal_nan=True)
    else:  # rounding f32 once more may differ from rounding f64 once, in one case of thousands
        same = (got == want.to(torch_dtype)) | (got.isnan() & want.isnan())
        assert same.float().mean() > 0.999
