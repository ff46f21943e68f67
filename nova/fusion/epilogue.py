"""fold-epilogue: everything elementwise that follows a contraction becomes one op on its tile.

    %acc = linalg.generic {nova.contraction}             %acc = linalg.generic {nova.contraction}
    %pre = linalg.generic (acc + bias)             ->    %pre, %act = linalg.generic (acc + bias, gelu(acc + bias))
    %act = linalg.generic (gelu pre)

Bias, residual, activation, activation-backward, scale and cast read the accumulator while it is in registers; each
result of the kernel is written once. Without any of them the contraction accumulates into the result itself.
"""

from __future__ import annotations

from typing import Any

from nova.errors import CompileError
from nova.fusion import merging, readback
from nova.fusion.kernel import Kernel
from nova.fusion.kernel_module import rewrite_kernels
from nova.mlir import ir


def run(module: ir.Module, options: Any = None) -> ir.Module:
    """Folds the epilogue of every contraction kernel of `module`."""
    return rewrite_kernels(module, _fold)


def _fold(function_op: ir.OpView, kind: str) -> Kernel | None:
    if kind != "contraction":
        return None
    kernel = readback.read(function_op)
    fold(kernel)
    return kernel


def fold(kernel: Kernel) -> None:
    """The same, on the records."""
    merging.inline(kernel)
    merging.write_directly(kernel)
    merging.merge_alike(kernel)
    merging.remove_unused(kernel)
    merging.order_for_inplace(kernel)
    pointwise = [
        op for op in kernel.ops if not op.reduced and not op.contraction
    ]  # others: the contraction, and reductions over its tiles
    if sum(op.contraction for op in kernel.ops) != 1 or len(pointwise) > 1:
        raise CompileError(f"kernel @{kernel.name}: {len(kernel.ops)} ops are left of a contraction and its epilogue")
