"""Ops that only exist between level 1 and level 2, where fusion decides what gets a buffer of its own."""

from __future__ import annotations

from nova.dialect.base import Instance, check_like, op


@op("copy", "x")
def _copy(it: Instance) -> None:
    """x, in a row-major buffer of its own: what a view becomes where no kernel can read through it."""
    check_like(it.outs[0], it.ins[0], "result", "operand")
