# ruff: noqa: E501  (IR text)
"""Multi-tensor kernels: any number of tensors of any size through one compiled body, the same bits for any threads."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests import adamw
from tests.adamw import scalar
from tests.kernels import Loaded, load_kernel

EXAMPLE = Path(__file__).parents[1] / "ir/fusion/examples/adamw_multi_tensor.mlir"
SIZES = [[], [1], [7, 3], [0], [16384], [40000], [1], [33, 1001], [5]]
DYNAMIC = -(1 << 63)

MAPS = """#i = affine_map<(d0) -> (d0)>
#i0 = affine_map<(d0) -> ()>
#z = affine_map<() -> ()>
"""

# AdamW in PyTorch's order of operations; hyper-parameters are f64, the moments f32
ADAMW = (
    MAPS
    + """
module {
  func.func private @adamw(%p: tensor<?xf32> {nova.list}, %g: tensor<?xf32> {nova.list}, %m: tensor<?xf32> {nova.list},
      %v: tensor<?xf32> {nova.list}, %step: tensor<f32> {nova.list}, %lr: tensor<f64>, %b1: tensor<f64>, %b2: tensor<f64>,
      %eps: tensor<f64>, %wd: tensor<f64>, %inf: tensor<f32>,
      %po: tensor<?xf32> {nova.out, nova.list}, %mo: tensor<?xf32> {nova.out, nova.list},
      %vo: tensor<?xf32> {nova.out, nova.list}, %so: tensor<f32> {nova.out, nova.list})
      -> (tensor<?xf32>, tensor<?xf32>, tensor<?xf32>, tensor<f32>)
      attributes {nova.kernel = "multi_tensor", nova.dims = array<i64: -9223372036854775808>,
                  nova.inplace = [array<i64: 0, 0>, array<i64: 2, 1>, array<i64: 3, 2>, array<i64: 4, 3>]} {
    %e = tensor.empty() : tensor<f64>
    %s:4 = linalg.generic {indexing_maps = [#z, #z, #z, #z, #z, #z, #z, #z, #z, #z], iterator_types = []}
        ins(%step, %lr, %b1, %b2, %wd, %inf : tensor<f32>, tensor<f64>, tensor<f64>, tensor<f64>, tensor<f64>, tensor<f32>)
        outs(%so, %e, %e, %e : tensor<f32>, tensor<f64>, tensor<f64>, tensor<f64>) attrs = {dims = array<i64>} {
    ^bb0(%t: f32, %l: f64, %x1: f64, %x2: f64, %w: f64, %found: f32, %o0: f32, %o1: f64, %o2: f64, %o3: f64):
      %zero = arith.constant 0.0 : f32
      %onef = arith.constant 1.0 : f32
      %one = arith.constant 1.0 : f64
      %half = arith.constant 0.5 : f64
      %ok = arith.cmpf oeq, %found, %zero : f32
      %t1 = arith.addf %t, %onef : f32
      %t2 = arith.select %ok, %t1, %t : f32
      %td = arith.extf %t1 : f32 to f64
      %p1 = math.powf %x1, %td : f64
      %p2 = math.powf %x2, %td : f64
      %c1 = arith.subf %one, %p1 : f64
      %c2 = arith.subf %one, %p2 : f64
      %c2s = math.powf %c2, %half : f64
      %sz = arith.divf %l, %c1 : f64
      %nsz = arith.negf %sz : f64
      %lw = arith.mulf %l, %w : f64
      %keep = arith.subf %one, %lw : f64
      linalg.yield %t2, %nsz, %c2s, %keep : f32, f64, f64, f64
    } -> (tensor<f32>, tensor<f64>, tensor<f64>, tensor<f64>)
    %r:3 = linalg.generic {indexing_maps = [#i, #i, #i, #i, #i0, #i0, #i0, #i0, #i0, #i0, #i0, #i, #i, #i], iterator_types = ["parallel"]}
        ins(%p, %g, %m, %v, %s#1, %s#2, %s#3, %b1, %b2, %eps, %inf : tensor<?xf32>, tensor<?xf32>, tensor<?xf32>, tensor<?xf32>,
            tensor<f64>, tensor<f64>, tensor<f64>, tensor<f64>, tensor<f64>, tensor<f64>, tensor<f32>)
        outs(%po, %mo, %vo : tensor<?xf32>, tensor<?xf32>, tensor<?xf32>) attrs = {dims = array<i64: 0>} {
    ^bb0(%a: f32, %b: f32, %c: f32, %d: f32, %nsz: f64, %c2s: f64, %keep: f64, %x1: f64, %x2: f64, %ep: f64, %found: f32,
         %o0: f32, %o1: f32, %o2: f32):
      %zero = arith.constant 0.0 : f32
      %one = arith.constant 1.0 : f64
      %ok = arith.cmpf oeq, %found, %zero : f32
      %kf = arith.truncf %keep : f64 to f32
      %q = arith.mulf %a, %kf : f32
      %w1 = arith.subf %one, %x1 : f64
      %w1f = arith.truncf %w1 : f64 to f32
      %dm = arith.subf %b, %c : f32
      %dw = arith.mulf %dm, %w1f : f32
      %m1 = arith.addf %c, %dw : f32
      %x2f = arith.truncf %x2 : f64 to f32
      %w2 = arith.subf %one, %x2 : f64
      %w2f = arith.truncf %w2 : f64 to f32
      %v0 = arith.mulf %d, %x2f : f32
      %gg = arith.mulf %b, %b : f32
      %gw = arith.mulf %gg, %w2f : f32
      %v1 = arith.addf %v0, %gw : f32
      %root = math.sqrt %v1 : f32
      %c2f = arith.truncf %c2s : f64 to f32
      %rc = arith.divf %root, %c2f : f32
      %epf = arith.truncf %ep : f64 to f32
      %den = arith.addf %rc, %epf : f32
      %szf = arith.truncf %nsz : f64 to f32
      %num = arith.mulf %szf, %m1 : f32
      %u = arith.divf %num, %den : f32
      %p1 = arith.addf %q, %u : f32
      %pr = arith.select %ok, %p1, %a : f32
      %mr = arith.select %ok, %m1, %c : f32
      %vr = arith.select %ok, %v1, %d : f32
      linalg.yield %pr, %mr, %vr : f32, f32, f32
    } -> (tensor<?xf32>, tensor<?xf32>, tensor<?xf32>)
    return %r#0, %r#1, %r#2, %s#0 : tensor<?xf32>, tensor<?xf32>, tensor<?xf32>, tensor<f32>
  }
}
"""
)

NORM = (
    MAPS
    + """
module {
  func.func private @norm(%x: tensor<?xf32> {nova.list}, %o: tensor<f32> {nova.out, nova.element}) -> tensor<f32>
      attributes {nova.kernel = "multi_tensor", nova.dims = array<i64: -9223372036854775808>, nova.inplace = []} {
    %zero = arith.constant 0.0 : f32
    %e = tensor.empty() : tensor<f32>
    %f = linalg.fill ins(%zero : f32) outs(%e : tensor<f32>) -> tensor<f32>
    %s = linalg.generic {indexing_maps = [#i, #i0], iterator_types = ["reduction"]}
        ins(%x : tensor<?xf32>) outs(%f : tensor<f32>) attrs = {dims = array<i64: 0>} {
    ^bb0(%a: f32, %acc: f32):
      %q = arith.mulf %a, %a : f32
      %t = arith.addf %acc, %q : f32
      linalg.yield %t : f32
    } -> tensor<f32>
    %r = linalg.generic {indexing_maps = [#z, #z], iterator_types = []} ins(%s : tensor<f32>) outs(%o : tensor<f32>)
        attrs = {dims = array<i64>} {
    ^bb0(%a: f32, %out: f32):
      %q = math.sqrt %a : f32
      linalg.yield %q : f32
    } -> tensor<f32>
    return %r : tensor<f32>
  }
}
"""
)

# the reduction itself is the result; its start is not the identity of the combination
LARGEST = (
    MAPS
    + """
module {
  func.func private @largest(%x: tensor<?xf32> {nova.list}, %o: tensor<f32> {nova.out, nova.element}) -> tensor<f32>
      attributes {nova.kernel = "multi_tensor", nova.dims = array<i64: -9223372036854775808>, nova.inplace = []} {
    %zero = arith.constant 0.0 : f32
    %f = linalg.fill ins(%zero : f32) outs(%o : tensor<f32>) -> tensor<f32>
    %s = linalg.generic {indexing_maps = [#i, #i0], iterator_types = ["reduction"]}
        ins(%x : tensor<?xf32>) outs(%f : tensor<f32>) attrs = {dims = array<i64: 0>} {
    ^bb0(%a: f32, %acc: f32):
      %q = math.absf %a : f32
      %t = arith.maximumf %acc, %q : f32
      linalg.yield %t : f32
    } -> tensor<f32>
    return %s : tensor<f32>
  }
}
"""
)


def call(kernel: Loaded, count: int, numel: Sequence[int], tensors: Sequence[torch.Tensor], threads: int) -> None:
    """args: n, numel, pointers in call order, workspace."""
    sizes = (ctypes.c_int64 * len(numel))(*numel)
    pointers = kernel.pointers(tensors)
    args = (ctypes.c_void_p * (len(pointers) + 2))(count, ctypes.addressof(sizes), *pointers)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        kernel.workspace.fill_(0xFF)
        kernel.function(ctypes.addressof(args))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_sgd_and_step_count(threads: int) -> None:
    kernel = load_kernel(EXAMPLE.read_text())
    params, grads = [torch.randn(s) for s in SIZES], [torch.randn(s) for s in SIZES]
    steps = [torch.tensor(float(i)) for i in range(len(SIZES))]
    want = [p - g * torch.tensor(0.1) for p, g in zip(params, grads, strict=True)]
    lists = [*params, *grads, *steps, scalar(0.1), *params, *steps]  # in place
    call(kernel, len(SIZES), [p.numel() for p in params], lists, threads)
    for got, expected in zip(params, want, strict=True):
        assert torch.equal(got, expected)
    assert [s.item() for s in steps] == [i + 1.0 for i in range(len(SIZES))]


@pytest.mark.parametrize("threads", [1, 2])
def test_adamw_follows_pytorch_over_steps(threads: int) -> None:
    torch.manual_seed(1)
    kernel = load_kernel(ADAMW)
    params = [torch.randn(s) for s in SIZES]
    adamw.follows_pytorch(lambda numel, tensors: call(kernel, len(numel), numel, tensors, threads), params, 20)


def test_found_inf_changes_nothing() -> None:
    kernel = load_kernel(ADAMW)
    adamw.inf_changes_nothing(lambda numel, tensors: call(kernel, len(numel), numel, tensors, 2), SIZES)


def test_norms_are_exact_enough_and_independent_of_threads() -> None:
    kernel = load_kernel(NORM)
    xs = [torch.randn(s) for s in [*SIZES, [300000]]]
    results = []
    for threads in (1, 2):
        out = torch.full((len(xs),), math.nan)
        call(kernel, len(xs), [x.numel() for x in xs], [*xs, out], threads)
        results.append(out)
    assert torch.equal(results[0], results[1])
    want = torch.stack([x.double().norm() for x in xs])
    torch.testing.assert_close(results[0].double(), want, rtol=2e-7, atol=0)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_reduction_may_be_the_result(threads: int) -> None:
    kernel = load_kernel(LARGEST)
    xs = [torch.randn(s) for s in [*SIZES, [300000]]]
    xs[2][3, 1], xs[5][39999] = math.nan, -math.inf
    out = torch.full((len(xs),), -1.0)
    call(kernel, len(xs), [x.numel() for x in xs], [*xs, out], threads)
    want = torch.stack([x.abs().max() if x.numel() else torch.tensor(0.0) for x in xs])
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("count", [0, 1, 500])
def test_any_number_of_tensors(count: int) -> None:
    kernel = load_kernel(NORM)
    xs = [torch.full((i % 5,), float(i)) for i in range(count)]
    out = torch.full((count,), math.nan)
    call(kernel, count, [x.numel() for x in xs], [*xs, out], 2)
    want = torch.tensor([math.sqrt(i % 5) * i for i in range(count)])
    torch.testing.assert_close(out, want)
