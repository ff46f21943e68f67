"""fuse-elementwise: composes the structured ops of a kernel into as few passes over its loops as possible.

    %d = linalg.generic (x - m)  dims = [0, 1]             %s = linalg.generic (s += exp(x - m))  dims = [0, 1]
    %e = linalg.generic (exp d)  dims = [0, 1]       ->
    %s = linalg.generic (s += e) dims = [0, 1]

A producer that one op reads is inlined into it, into the body of a reduction too (never of a contraction); a cheap one
that several read is computed again by each; an expensive one (exp) stays as a row of scratch. Ops over the same loops
that do not wait for one another become one op with several results, so a row is walked once for all of them. The
halves of a concatenation of equal pieces are unrolled. At the end ops that overwrite an operand stand behind its last
reader.
"""

from __future__ import annotations

from typing import Any

from nova.fusion import merging, readback
from nova.fusion.kernel import Kernel
from nova.fusion.kernel_module import rewrite_kernels
from nova.fusion.to_linalg import holds_nova
from nova.fusion.unrolling import unroll_selected
from nova.mlir import ir

KINDS = frozenset({"loops", "contraction", "multi_tensor"})


def run(module: ir.Module, options: Any = None) -> ir.Module:
    """Fuses the ops of every lowered kernel of `module`."""
    return rewrite_kernels(module, _fuse)


def _fuse(function_op: ir.OpView, kind: str) -> Kernel | None:
    if kind not in KINDS or holds_nova(function_op):
        return None
    kernel = readback.read(function_op)
    fuse(kernel)
    return kernel


def fuse(kernel: Kernel) -> None:
    """The same, on the records."""
    merging.remove_unused(kernel)
    merging.inline(kernel)
    if kernel.kind != "contraction":  # the epilogue is put together by fold-epilogue
        merging.write_directly(kernel)
        unroll_selected(kernel)
        merging.merge_alike(kernel)
    merging.remove_unused(kernel)
    merging.order_for_inplace(kernel)
