"""Whole-step clean-up: equal ops merged, unused ones removed, views composed, exact identities and constants folded.

    %t = nova.transpose %w {permutation = [1, 0]}            // unused once the emitter raised mm to linear
    %0 = nova.reshape %x : 2x3x8 -> 6x8
    %1 = nova.reshape %0 : 6x8 -> 3x2x8              =>      %1 = nova.reshape %x : 2x3x8 -> 3x2x8
    %2 = nova.mul %1, %one                                   return %1
    return %2

Every rule keeps the result's bits (rules_views.py, rules_arithmetic.py); a cast that rounds is never removed. Merging
and removal are MLIR's own passes. Ops that carry `nova.recompute` (a checkpointed region, run again for its backward)
merge only with ops of the same region, or recomputation would be undone.
"""

from __future__ import annotations

from typing import Any

from nova.graph import rules_arithmetic, rules_views  # noqa: F401  (fill the rule table)
from nova.graph.empty import replace_empty
from nova.graph.rewriting import apply_rules
from nova.mlir import context, ir, run_passes

CLEANUP = "trivial-dce,cse,trivial-dce"
MAX_SWEEPS = 4  # a rule may enable another on an earlier op; two sweeps settle every model tried


def run(module: ir.Module, options: Any = None) -> ir.Module:
    """Simplifies every function of the module in place."""
    with context(), ir.Location.unknown():
        run_passes(module, CLEANUP, verify=False)
        blocks = [
            block
            for function in module.body.operations
            for region in function.operation.regions
            for block in region.blocks
        ]
        if sum(replace_empty(block) for block in blocks):
            run_passes(module, CLEANUP, verify=False)
        for _ in range(MAX_SWEEPS):
            if not sum(apply_rules(block) for block in blocks):
                break
            run_passes(module, CLEANUP, verify=False)
    return module
