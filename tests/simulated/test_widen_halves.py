"""bfloat16 as float32 by moving bits: every value, at every place of a vector, and what is left to LLVM."""

from __future__ import annotations

import numpy as np
import pytest

from nova.gpu import simulate, widen_halves
from nova.mlir import context, ir
from tests.simulated.elementwise import THREADS, module


def widened(text: str) -> str:
    with context(), ir.Location.unknown():
        parsed = ir.Module.parse(text)
        widen_halves.run(parsed)
        assert parsed.operation.verify()
        return str(parsed)


def conversion(lanes: int, more: str = "") -> str:
    """Loads bf16, stores f32."""
    text = module("arith.extf", "bf16", lanes, 1)
    wide = f"vector<{lanes}xf32>"
    text = text.replace(
        f"arith.extf %x0 : vector<{lanes}xbf16>", f"arith.extf %x0 : vector<{lanes}xbf16> to {wide}{more}"
    )
    head, tail = text.split("%q = ")
    return (
        head
        + "%q = "
        + tail.replace("bf16>", "f32>").replace("x bf16", "x f32").replace("alignment = 2", "alignment = 4")
    )


@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
def test_every_bfloat16_keeps_its_bits(lanes: int) -> None:
    text = widened(conversion(lanes))
    assert "arith.extf" not in text
    for turn in range(2):  # each value in low and in high halves
        x = np.roll(np.arange(1 << 16, dtype=np.uint16), turn)
        y = np.zeros(1 << 16, np.float32)
        blocks = len(x) // (THREADS * lanes)
        simulate.run(text.replace("nvvm.reqntid", f"nova_gpu.grid = array<i64: {blocks}, 1, 1>, nvvm.reqntid"), [x, y])
        np.testing.assert_array_equal(y.view(np.uint32), x.astype(np.uint32) << 16)


def test_what_needs_no_float32_is_left_alone() -> None:
    """The larger of two, rounded again, is one instruction for two bfloat16."""
    narrow, wide = "vector<4xbf16>", "vector<4xf32>"
    for op, rounded, kept in (("maximumf", True, True), ("maximumf", False, False), ("addf", True, False)):
        use = f"\n%m = arith.{op} %y, %y : {wide}"
        use += f"\n%n = arith.truncf %m : {wide} to {narrow}" if rounded else ""
        text = conversion(4, use).replace("llvm.store %y, %q", "llvm.store %n, %q" if rounded else "llvm.store %m, %q")
        if rounded:
            text = text.replace(f"%q {{alignment = 4 : i64}} : {wide}", f"%q {{alignment = 2 : i64}} : {narrow}")
        assert ("arith.extf" in widened(text)) is kept
