"""Level 6, the hot path: memory plan, step program, argument binding, caches. No MLIR at call time."""
