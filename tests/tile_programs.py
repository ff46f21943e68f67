"""Runs tile programs both ways: as level 4 means them, and as threads of the warp simulator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nova import mlir
from nova.gpu import simulate
from nova.gpu.distribute import distribute
from nova.tile import interpret
from nova.tile.builder import Program, module_text

MEMORY = {
    "f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": np.uint16, "i1": np.bool_, "i8": np.int8,
    "i16": np.int16, "i32": np.int32, "i64": np.int64,
}  # fmt: skip


def level5(program: Program | Sequence[Program]) -> str:
    """The per-thread code of a program's module."""
    programs = [program] if isinstance(program, Program) else list(program)
    module = mlir.parse(module_text(programs))
    with mlir.context():
        return distribute(module)


def compare(
    program: Program | Sequence[Program], buffers: Sequence[np.ndarray], tolerance: float = 0.0
) -> simulate.Report:
    """Fails unless the threads leave in the buffers what the tile program leaves there."""
    programs = [program] if isinstance(program, Program) else list(program)
    wanted, found = [[b.copy() for b in buffers] for _ in range(2)]
    interpret.run(module_text(programs), wanted)
    report = simulate.run(level5(programs), found)
    for want, have in zip(wanted, found, strict=True):
        if tolerance:
            np.testing.assert_allclose(have, want, rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(have, want)
    return report


def numbers(element: str, count: int, seed: int = 0) -> np.ndarray:
    """Values as they lie in memory; floats are small multiples of 1/8, so that sums are exact in any order."""
    random = np.random.default_rng(seed)
    if element == "i1":
        return random.integers(0, 2, count).astype(np.bool_)
    if element.startswith("i"):
        return random.integers(-100, 100, count).astype(MEMORY[element])
    values = (random.integers(-64, 64, count) / 8).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16) if element == "bf16" else values.astype(MEMORY[element])
