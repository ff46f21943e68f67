"""Applies a rewrite of kernels to a module: one kernel alone (kernel stages), or a whole outlined step."""

from __future__ import annotations

from collections.abc import Callable

from nova.fusion.kernel import Kernel, forget_expressions
from nova.fusion.kernel_text import kernel_text
from nova.mlir import ir

Rewrite = Callable[[ir.OpView, str], "Kernel | str | None"]


def rewrite_kernels(module: ir.Module, rewrite: Rewrite) -> ir.Module:
    """`module` with every kernel function replaced by what `rewrite(function, kind)` returns (None: kept)."""
    changed = False

    def texts(block: ir.Block) -> list[str]:
        nonlocal changed
        lines = []
        for op in block.operations:
            name = op.operation.name
            if name == "builtin.module":
                symbol = ir.StringAttr(op.attributes["sym_name"]).value if "sym_name" in op.attributes else ""
                inner = "\n".join(texts(op.regions[0].blocks[0]))
                lines.append(f"module {'@' + symbol if symbol else ''} {{\n{inner}\n}}")
                continue
            result = None
            if name == "func.func" and "nova.kernel" in op.attributes and len(op.regions[0].blocks):
                result = rewrite(op, ir.StringAttr(op.attributes["nova.kernel"]).value)
                forget_expressions()
            if result is None:
                lines.append(_plain(op))
            else:
                changed = True
                lines.append(kernel_text(result) if isinstance(result, Kernel) else result)
        return lines

    body = "\n".join(texts(module.body))
    return ir.Module.parse(f"module {{\n{body}\n}}") if changed else module


def _plain(op: ir.OpView) -> str:
    """An op as text that can stand beside others: without the aliases of its own (#map = ..) in front."""
    text = str(op)
    return text if not text.startswith("#") else op.operation.get_asm(print_generic_op_form=True, use_local_scope=True)
