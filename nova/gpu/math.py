"""Math operations without an exact NVPTX instruction, as arithmetic. Filled in by the expansions."""

from __future__ import annotations

from nova.mlir import ir


def needs_expansion(text: str) -> bool:
    """Whether a module's text holds an operation that `expand` rewrites."""
    return False


def expand(module: ir.Module) -> None:
    """Rewrites the operations in place."""
