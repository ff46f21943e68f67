"""Functions whose results are rounded to 16 bits: cheap where that is seen, exact where it is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from simulated.elementwise import THREADS, expanded

from nova.gpu.simulate import run
from nova.gpu.to_ptx import to_ptx
from nova.tile.interpret_arith import bf16_values

LANES = 4
GELU = """
    %scale = arith.constant dense<0.707106769> : vector<4xf32>
    %one = arith.constant dense<1.0> : vector<4xf32>
    %half = arith.constant dense<0.5> : vector<4xf32>
    %a = arith.mulf %x, %scale : vector<4xf32>
    %e = math.erf %a : vector<4xf32>
    %s = arith.addf %one, %e : vector<4xf32>
    %h = arith.mulf %x, %half : vector<4xf32>
    %y = arith.mulf %h, %s : vector<4xf32>
"""
SWISH = """
    %y = math.exp %x : vector<4xf32>
"""
NARROW = "    %r = arith.truncf %y : vector<4xf32> to vector<4xbf16>\n"


def kernel(body: str, result: str) -> str:
    return f"""
module {{
  llvm.func @k(%in: !llvm.ptr<1>, %out: !llvm.ptr<1>) attributes {{gpu.kernel, nvvm.kernel, nvvm.reqntid = array<i32: {THREADS}>}} {{
    %i = nvvm.read.ptx.sreg.tid.x : i32
    %p = llvm.getelementptr %in[%i] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<4 x f32>
    %x = llvm.load %p {{alignment = 16 : i64}} : !llvm.ptr<1> -> vector<4xf32>
{body}
    %q = llvm.getelementptr %out[%i] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<4 x {result}>
    llvm.store {"%r" if result == "bf16" else "%y"}, %q {{alignment = 8 : i64}} : vector<4x{result}>, !llvm.ptr<1>
    llvm.return
  }}
}}"""


def gelu(x: np.ndarray) -> np.ndarray:
    return torch.nn.functional.gelu(torch.from_numpy(x)).numpy()


@pytest.mark.parametrize(("body", "truth"), [(GELU, gelu), (SWISH, np.exp)])
def test_what_is_rounded_to_bf16_is_right_to_its_last_bit(body: str, truth: object) -> None:
    """Within one unit of bfloat16, but for values so small that 1 + erf holds few bits of them in float32 anyway."""
    x = np.concatenate([np.linspace(-6, 6, 500), np.linspace(-60, 20, 500), [0.0, -0.0, 1e-20, 3.0]]).astype(np.float32)
    x = np.resize(x, THREADS * LANES).copy()
    out = np.zeros(x.size, np.uint16)
    run(expanded(kernel(body + NARROW, "bf16")), [x, out], grid=(1, 1, 1))
    want = truth(x.astype(np.float64))  # type: ignore[operator]
    unit = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(want), 1e-30))) - 7)
    assert (np.abs(bf16_values(out) - want) <= np.maximum(unit, 5e-7 * np.abs(x))).all()


def test_what_is_stored_in_float32_is_not_touched() -> None:
    wide, narrow = expanded(kernel(GELU, "f32")), expanded(kernel(GELU + NARROW, "bf16"))
    assert wide.count("nvvm.rcp") == 0  # the accurate erf has no reciprocal
    assert narrow.count("nvvm.rcp") == LANES


@pytest.mark.parametrize("half", ["bf16", "f16"])
def test_roundings_are_packed(half: str) -> None:
    text = kernel(f"    %r = arith.truncf %x : vector<4xf32> to vector<4x{half}>", "bf16").replace(
        "4xbf16", f"4x{half}"
    )
    text = text.replace("4 x bf16", f"4 x {half}")
    assert to_ptx(text, "sm_80").count(f"cvt.rn.{half}x2.f32") == LANES // 2


def test_a_function_near_zero_keeps_its_relative_accuracy() -> None:
    """erf alone, without the 1: its small values need all their bits, whatever they are rounded to."""
    text = kernel("    %y = math.erf %x : vector<4xf32>\n" + NARROW, "bf16")
    assert expanded(text).count("nvvm.rcp") == 0
