"""Conversions between 16 bits and float32 in pairs: the same bits as one by one, for every bfloat16 there is."""

from __future__ import annotations

import numpy as np
import pytest

from nova import mlir
from nova.gpu import pack_halves, widen_halves
from nova.gpu.simulate import run
from nova.mlir import ir

THREADS, LANES = 128, 4
ROUND_TRIP = f"""
module {{
  llvm.func @k(%in: !llvm.ptr<1>, %out: !llvm.ptr<1>) attributes {{gpu.kernel, nvvm.kernel, nvvm.reqntid = array<i32: {THREADS}>}} {{
    %t = nvvm.read.ptx.sreg.tid.x : i32
    %b = nvvm.read.ptx.sreg.ctaid.x : i32
    %n = arith.constant {THREADS} : i32
    %m = arith.muli %b, %n : i32
    %i = arith.addi %m, %t : i32
    %p = llvm.getelementptr %in[%i] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<{LANES} x bf16>
    %x = llvm.load %p {{alignment = 8 : i64}} : !llvm.ptr<1> -> vector<{LANES}xbf16>
    %y = arith.extf %x : vector<{LANES}xbf16> to vector<{LANES}xf32>
    %z = FUNCTION %y, %y : vector<{LANES}xf32>
    %q = llvm.getelementptr %out[%i] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<{LANES} x f32>
    llvm.store %z, %q {{alignment = 16 : i64}} : vector<{LANES}xf32>, !llvm.ptr<1>
    llvm.return
  }}
}}"""  # noqa: E501


def every_bfloat16() -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint16)


def converted(text: str, *passes) -> str:
    module = mlir.parse(text)
    with mlir.context(), ir.Location.unknown():
        for one in passes:
            one.run(module)
    return str(module)


def test_widening_moves_bits():
    text = converted(ROUND_TRIP.replace("FUNCTION", "arith.addf"), widen_halves)
    assert "arith.extf" not in text and "arith.shli" in text and "arith.andi" in text
    x, out = every_bfloat16(), np.full(1 << 16, np.nan, np.float32)
    run(text, [x, out], grid=(x.size // (THREADS * LANES), 1, 1))
    exact = (x.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(out, exact + exact)


@pytest.mark.parametrize("function", ["arith.maximumf", "arith.minnumf"])
def test_what_llvm_does_in_16_bits_keeps_its_conversions(function):
    assert "arith.extf" in converted(ROUND_TRIP.replace("FUNCTION", function), widen_halves, pack_halves)
