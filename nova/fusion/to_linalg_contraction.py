"""nova-to-linalg: matmul, linear and convolution become one generic that multiplies and adds, tagged nova.contraction.

    matmul      c[b,m,n]   += a[b,m,k] * b[b,k,n]
    linear      y[..,n]    += x[..,k] * w[n,k], then an elementwise op that adds the bias
    convolution y[n,o,p,q] += x[n,c, p*stride + r*dilation, ..] * w[o,c,r,..]

Operands stay as they are in memory (views are in their indexing maps); products accumulate in f32 (f64 for f64).
"""

from __future__ import annotations

from nova.fusion import scalars
from nova.fusion.kernel import Out, convert_float, load
from nova.fusion.lowering import Lowering, lowers
from nova.fusion.records import Op
from nova.fusion.space import Instance


@lowers("matmul", "linear", "convolution", "convolution_backward_weight")
def _contraction(low: Lowering, op: Op, operands: list[Instance]) -> None:
    reduction = next(r for r in low.space.reductions if r.op is op)
    reduced = low.loop_numbers(low.leaves(reduction.reduced))
    loops = low.loop_numbers(dict.fromkeys(low.leaves(reduction.over)))
    left, right = (low.read(op.operands[i], operands[i]) for i in (0, 1))
    accumulator = "f64" if left.type == "f64" else "f32"
    product = scalars.mul(convert_float(left, accumulator), convert_float(right, accumulator))
    kept = [loop for loop in loops if loop not in reduced]
    tensor, index = low.local(kept, accumulator)
    structured = low.emit(loops, [Out(tensor, index, product, "arith.addf", 0.0)], reduced)
    structured.contraction = True
    value = load(tensor, index)
    if op.name == "linear" and len(op.operands) > 2:
        value = scalars.add(value, convert_float(low.read(op.operands[2], operands[2]), accumulator))
    low.write(op.results[0], convert_float(value, scalars.element_type(op.results[0].dtype)))
