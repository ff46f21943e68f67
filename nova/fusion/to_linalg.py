"""nova-to-linalg: the body of each kernel becomes structured ops over shared loops.

    %0 = nova.softmax(%x) {dim = 1}       %max = linalg.generic (reduction: maximumf)  dims = [0, 1]
                                    ->    %exp = linalg.generic (exp(x - max))         dims = [0, 1]
                                          %sum = linalg.generic (reduction: addf)      dims = [0, 1]
                                          %y = linalg.generic (exp / sum)              dims = [0, 1]

One op at a time: what belongs together is fused by `fuse-elementwise`. Views are gone afterwards: arguments have the
shapes in which every access is a projected permutation, or linear. Scatters, scans and attention keep their `nova` op.
"""

from __future__ import annotations

from typing import Any

from nova.fusion import (
    records,
    to_linalg_contraction,
    to_linalg_elementwise,
    to_linalg_movement,
    to_linalg_multi_tensor,
    to_linalg_reduction,
    whole,
)
from nova.fusion.kernel import Kernel
from nova.fusion.kernel_module import rewrite_kernels
from nova.fusion.layout import assign_shapes, coalesce, renumber
from nova.fusion.lowering import RULES, Lowering
from nova.fusion.space import VIEWS, is_generator
from nova.mlir import ir

_FAMILIES = (to_linalg_contraction, to_linalg_elementwise, to_linalg_movement, to_linalg_reduction)  # register rules


def run(module: ir.Module, options: Any = None) -> ir.Module:
    """Lowers every kernel function of `module` that still holds `nova` ops."""
    return rewrite_kernels(module, _lower)


def _lower(function_op: ir.OpView, kind: str) -> Kernel | str | None:
    if kind.startswith("attention") or not holds_nova(function_op):
        return None
    function = records.read(function_op)
    if kind in whole.KINDS:
        return whole.lower(function, kind)
    kernel = to_linalg_multi_tensor.lower(function) if kind == "multi_tensor" else lower(function, kind)
    if "nova.guarded" in function.attrs:
        kernel.attrs["nova.guarded"] = "unit"
    return kernel


def holds_nova(function_op: ir.OpView) -> bool:
    """Whether a kernel has not been lowered yet."""
    return any(op.operation.name.startswith("nova.") for op in function_op.regions[0].blocks[0].operations)


def lower(function: records.Function, kind: str) -> Kernel:
    """One kernel of kind loops or contraction."""
    lowering = Lowering(function, kind)
    for op in function.ops:
        if op.name in VIEWS or is_generator(op):
            continue
        RULES[op.name](lowering, op, lowering.space.inside[op])
    kernel = lowering.kernel
    kernel.inplace = whole.inplace_pairs(function)
    kernel.attrs = {k: v for k, v in function.attrs.items() if k in ("nova.raises", "nova.tf32")}
    coalesce(kernel)
    renumber(kernel)
    assign_shapes(kernel)
    return kernel
