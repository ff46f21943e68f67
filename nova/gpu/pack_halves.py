"""Level 5 to level 5: float32 is rounded to 16 bits two lanes at a time.

    %y = arith.truncf %x : vector<4xf32> to vector<4xbf16>   ->   two nvvm.convert.f32x2.to.bf16x2, joined

cvt.rn.bf16x2.f32 runs on the arithmetic pipes; the conversion of a single value runs on the special-function unit, at
an eighth of their rate, which an epilogue that rounds every element of a tile would feel.
"""

from __future__ import annotations

from nova import mlir
from nova.lowering import lanes as ln
from nova.mlir import ir

CONVERSIONS = {"bf16": "nvvm.convert.f32x2.to.bf16x2", "f16": "nvvm.convert.f32x2.to.f16x2"}


def run(module: ir.Module) -> None:
    """Rewrites the roundings of vectors of even length. The module's context and a location must be current."""
    mlir.replace_each(module, "arith.truncf", lambda op: _packed(op) if _applies(op) else None)


def _applies(op: ir.Operation) -> bool:
    source, result = op.operands[0].type, op.results[0].type
    lanes = ln.lanes_of(result)
    return (
        lanes > 0 and lanes % 2 == 0 and ln.element_of(source) == ln.f32() and str(ln.element_of(result)) in CONVERSIONS
    )


def _packed(op: ir.Operation) -> ir.Value:
    (x,), result = op.operands, op.results[0].type
    element = ln.element_of(result)
    pair, word = ln.vector_type(element, 2), ln.int_type(32)
    attributes = {
        "rnd": ir.Attribute.parse("#nvvm.fp_rnd_mode<rn>"), "sat": ir.Attribute.parse("#nvvm.sat_mode<none>"),
        "relu": ir.BoolAttr.get(False),
    }  # fmt: skip
    words = []
    for k in range(0, ln.lanes_of(result), 2):
        high, low = ln.lane(x, k + 1), ln.lane(x, k)
        halves = ln.create(CONVERSIONS[str(element)], pair, [high, low], attributes)
        one = ln.create("vector.bitcast", ln.vector_type(word, 1), [halves])
        words.append(ln.lane(one, 0))
    return ln.create("vector.bitcast", result, [ln.from_lanes(words)])
