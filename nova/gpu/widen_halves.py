"""Level 5 to level 5: bfloat16 becomes float32 by moving bits, two lanes from each 32-bit register.

    %y = arith.extf %x : vector<4xbf16> to vector<4xf32>      ->      %w = bitcast to vector<2xi32>
                                                                      low lanes: %w << 16; high lanes: %w & 0xffff0000

A bfloat16 is the upper half of a float32. As a conversion, each lane is first taken out of its register and then
shifted, by two instructions that run at half rate; a high lane needs one at full rate.
"""

from __future__ import annotations

from nova import mlir
from nova.lowering import lanes as ln
from nova.mlir import ir

HIGH = -0x10000  # the upper half of a word
NARROW = ("arith.maximumf", "arith.minimumf", "arith.maxnumf", "arith.minnumf", "arith.negf", "math.absf")
"""What LLVM does in 16 bits by itself, where it recognises the conversions around it."""


def run(module: ir.Module) -> None:
    """Rewrites the conversions of vectors of even length. The module's context and a location must be current."""
    mlir.replace_each(module, "arith.extf", lambda op: _widened(op) if _applies(op) else None)


def _applies(op: ir.Operation) -> bool:
    source, result = op.operands[0].type, op.results[0].type
    lanes = ln.lanes_of(source)
    if not lanes or lanes % 2 or str(ln.element_of(source)) != "bf16" or ln.element_of(result) != ln.f32():
        return False
    return any(use.owner.operation.name not in NARROW for use in op.results[0].uses)


def _widened(op: ir.Operation) -> ir.Value:
    (x,), result = op.operands, op.results[0].type
    pairs = ln.lanes_of(result) // 2
    kind = ln.vector_type(ln.int_type(32), pairs)
    words = ln.create("vector.bitcast", kind, [x])
    low = ln.shli(words, ln.constant(kind, 16))
    high = ln.andi(words, ln.constant(kind, HIGH))
    mask = [lane for pair in range(pairs) for lane in (pair, pairs + pair)]
    return ln.create("vector.bitcast", result, [ln.shuffle(low, high, mask)])
