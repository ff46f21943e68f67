"""The expansions of math operations against wider arithmetic: accuracy everywhere, and the special values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from simulated.elementwise import evaluate, expanded, module, ulps

from nova.gpu import math as gpu_math
from nova.gpu import math_f32, math_f64, ptxas, simulate_warp
from nova.gpu.to_ptx import to_ptx


def _torch(name):
    return lambda x: getattr(torch.special, name)(torch.from_numpy(x)).numpy()


TRUTH = {
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2, "log10": np.log10,
    "log1p": np.log1p, "tanh": np.tanh, "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin,
    "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh, "asinh": np.arcsinh, "acosh": np.arccosh,
    "atanh": np.arctanh, "rsqrt": lambda x: 1 / np.sqrt(x), "erf": _torch("erf"), "erfc": _torch("erfc"),
}  # fmt: skip
BINARY_TRUTH = {"powf": np.power, "atan2": np.arctan2}

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5, -0.5, 2.0, 1e-40, -1e-40, 1e-45, 1.17549435e-38, 3.4e38]
SPECIAL += [-3.4e38, 88.72, 88.73, 89.0, -87.3, -87.4, -103.9, -104.0, -150.0, 127.99, 128.0, -126.0, -149.0, -151.0]
SPECIAL += [1e10, -1e10, 105614.0, 105616.0, 1e6, 1e20, 3.1415927, 1.5707964, 0.55, 0.93, 10.0, -10.0, 0.25, 1e-8]


def arguments(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    parts = [rng.uniform(-scale, scale, 2000) for scale in (1, 4, 100)] + [rng.uniform(0.5, 1.5, 2000)]
    bits = rng.integers(0, 1 << 32, 8000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    return np.concatenate([np.float32(SPECIAL), *(p.astype(np.float32) for p in parts), bits])


@pytest.fixture
def rough_unit(monkeypatch):
    """The special-function unit with the errors that the PTX manual allows: 2^-22 relative, either way."""
    exact = simulate_warp.special_function
    rng = np.random.default_rng(1)

    def rough(function, x, flush):
        error = rng.choice([-(2.0**-22.5), 2.0**-22.5], size=x.shape)
        return (exact(function, x, flush) * (1 + error)).astype(np.float32)

    monkeypatch.setattr(simulate_warp, "special_function", rough)


@pytest.mark.parametrize("name", TRUTH)
def test_f32_is_within_two_ulp(name):
    x = arguments()
    with np.errstate(all="ignore"):
        want = TRUTH[name](x.astype(np.float64))
    error = ulps(evaluate(f"math.{name}", x), want)
    worst = np.argmax(error)
    assert error[worst] <= 2, (x[worst], want[worst])


@pytest.mark.parametrize(("name", "limit"), [("exp", 4), ("tanh", 4), ("erf", 2.5), ("log1p", 3), ("rsqrt", 3.5)])
def test_f32_bears_the_errors_of_the_special_function_unit(name, limit, rough_unit):
    x = arguments()
    with np.errstate(all="ignore"):
        want = TRUTH[name](x.astype(np.float64))
    got = evaluate(f"math.{name}", x)
    ordinary = (np.abs(want) > 1.2e-38) & (np.abs(want) < 3.3e38)
    assert ulps(got, want)[ordinary].max() <= limit
    assert (np.isnan(got) == np.isnan(want)).all()


@pytest.mark.parametrize("name", TRUTH)
def test_f64_is_within_a_few_ulp(name):
    rng = np.random.default_rng(2)
    tiny = [5e-324, -1e-310, 2.3e-308, 1.7e308, 709.7, 710.0, -745.0, -746.0, 1023.9, 1024.0, -1074.0, -1080.0]
    x = np.concatenate([np.array(SPECIAL + tiny), *(rng.uniform(-s, s, 1000) for s in (1, 4, 30, 700))])
    if name in ("sin", "cos", "tan"):
        x = x[~(np.abs(x) > 1e9)]
    with np.errstate(all="ignore"):
        want = TRUTH[name](x) if name.startswith("erf") else TRUTH[name](x.astype(np.longdouble))
    got = evaluate(f"math.{name}", x, lanes=2)
    error = ulps(got, want)
    if name == "erfc":  # torch's own values are that far off in the tail
        error = error[(np.abs(x) < 5) | ~np.isfinite(x)]
    assert error.max() <= (6 if name.startswith("erf") else 3)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", BINARY_TRUTH)
def test_functions_of_two(name, dtype):
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 2, -2, 3, -3, 0.5, -0.5, 1e10, 2.5, -2.5], dtype)
    special = np.append(special, [np.finfo(dtype).max, -np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal])
    a, b = (m.ravel().astype(dtype) for m in np.meshgrid(special, special))
    rng = np.random.default_rng(3)
    a = np.concatenate([a, rng.uniform(0, 10, 2000).astype(dtype), rng.uniform(0.9, 1.1, 2000).astype(dtype)])
    b = np.concatenate([b, rng.uniform(-30, 30, 2000).astype(dtype), rng.uniform(-700, 700, 2000).astype(dtype)])
    wide = np.longdouble if dtype == np.float64 else np.float64
    with np.errstate(all="ignore"):
        want = BINARY_TRUTH[name](a.astype(wide), b.astype(wide))
    got = evaluate(f"math.{name}", a, b, lanes=2)
    assert ulps(got, want).max() <= (1 if dtype == np.float32 else 6)
    zero = want == 0
    assert (np.signbit(got[zero]) == np.signbit(want[zero])).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_remainders_are_exact(dtype):
    rng = np.random.default_rng(4)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 2.5, -3, 1e-3, 1e10, np.finfo(dtype).max], dtype)
    a, b = (m.ravel() for m in np.meshgrid(special, special))
    wide = np.exp(rng.uniform(-80, 80, 3000)).astype(dtype)
    a = np.concatenate(
        [a, rng.integers(-50, 50, 1000).astype(dtype), wide, (rng.normal(size=1000) * 100).astype(dtype)]
    )
    b = np.concatenate([b, rng.integers(-9, 9, 1000).astype(dtype), wide[::-1], rng.normal(size=1000).astype(dtype)])
    with np.errstate(all="ignore"):
        want = np.fmod(a, b)
    got = evaluate("arith.remf", a, b, lanes=2)
    np.testing.assert_array_equal(got, want)
    assert (np.signbit(got) == np.signbit(want))[~np.isnan(want)].all()


@pytest.mark.parametrize("lanes", [0, 4])
def test_integer_powers_and_rounded_divisions(lanes):
    rng = np.random.default_rng(6)
    x, n = rng.integers(-5, 6, 1024).astype(np.int32), rng.integers(-3, 12, 1024).astype(np.int32)
    want = np.array([int(a) ** int(b) if b >= 0 else {1: 1, -1: (-1) ** int(-b)}.get(int(a), 0) for a, b in zip(x, n)])
    np.testing.assert_array_equal(evaluate("math.ipowi", x, n, lanes=lanes), want)
    d = np.where(n == 0, 7, n).astype(np.int32)
    np.testing.assert_array_equal(evaluate("arith.floordivsi", x, d, lanes=lanes), x // d)
    np.testing.assert_array_equal(evaluate("arith.ceildivsi", x, d, lanes=lanes), -(-x // d))
    np.testing.assert_array_equal(evaluate("arith.ceildivui", abs(x), abs(d), lanes=lanes), -(-abs(x) // abs(d)))


@pytest.mark.parametrize("lanes", [0, 1, 8])
def test_scalars_and_vectors_agree(lanes):
    x = arguments()[:4096]
    for name in ("exp", "sin", "erf"):
        np.testing.assert_array_equal(evaluate(f"math.{name}", x, lanes=lanes), evaluate(f"math.{name}", x, lanes=4))


def test_a_reciprocal_stands_in_for_a_division_that_allows_it(rough_unit):
    rng = np.random.default_rng(5)
    a, b = (np.exp(rng.uniform(-40, 40, 4000)).astype(np.float32) for _ in range(2))
    got = evaluate("arith.divf", a, b, attributes="fastmath<arcp> ")
    assert ulps(got, a.astype(np.float64) / b).max() <= 1
    assert "arith.divf" in expanded(module("arith.divf", "f32", 4, 2))
    assert "arith.divf" not in expanded(module("arith.divf", "f32", 4, 2, "fastmath<arcp> "))


def test_narrow_types_are_computed_in_f32():
    text = expanded(module("math.exp", "bf16", 8, 1))
    assert "arith.extf" in text and "arith.truncf" in text and "math.exp" not in text


NEEDS_PTXAS = pytest.mark.skipif(ptxas.find_ptxas() is None, reason="needs ptxas, e.g. pip install nvidia-cuda-nvcc")


def test_an_approximate_exp2_is_one_instruction():
    ptx = to_ptx(module("math.exp2", "f32", 4, 1, "fastmath<afn> "), "sm_80")
    assert ptx.count("ex2.approx.ftz.f32") == 4


def test_minima_and_maxima_are_one_instruction():
    assert to_ptx(module("arith.maximumf", "f32", 4, 2), "sm_80").count("max.NaN.f32") == 4
    assert to_ptx(module("arith.minnumf", "f32", 4, 2), "sm_80").count("min.f32") == 4


@NEEDS_PTXAS
@pytest.mark.parametrize(("element", "table"), [("f32", math_f32.FUNCTIONS), ("f64", math_f64.FUNCTIONS)])
def test_every_function_compiles_without_local_memory(element, table):
    for name in [*table, "arith.remf"]:
        operands = 2 if name in ("math.powf", "math.atan2", "arith.remf") else 1
        ptx = to_ptx(module(name, element, 8 if element == "f32" else 2, operands), "sm_80")
        assert ptxas.assemble(ptx, "sm_80").kernels["k"].clean, name
    assert set(table) <= set(gpu_math.NAMES)
