"""The `nova` dialect, whole: importing this module declares every op, `load()` puts them into a context.

Ops are grouped by file: elementwise, reductions (with softmax and normalisations), contraction (with attention),
views (with data movement and indexing), training (loss, random, optimizers, sync, fallback) and attention (the level-2
halves of fused attention). `base.REGISTRY` maps each op's name to its declaration.
"""

from __future__ import annotations

from nova.dialect import (  # noqa: F401  (declare their ops)
    attention,
    contraction,
    dispatch,
    elementwise,
    reductions,
    scalars,
    training,
    views,
)
from nova.dialect.base import REGISTRY, OpSpec, load

__all__ = ["REGISTRY", "OpSpec", "load", "markdown"]


def markdown() -> str:
    """The reference manual of the dialect: one section an op, from the declarations."""
    lines = ["# The nova dialect", ""]
    for name, spec in sorted(REGISTRY.items()):
        attributes = ", ".join(f"{key}: {kind}" for key, kind in spec.attrs.items())
        lines += [f"## nova.{name}", ""]
        lines += [f"`({spec.operands.describe()}) {{{attributes}}} -> ({spec.results.describe()})`", ""]
        lines += [spec.doc.strip(), ""]
    return "\n".join(lines)
