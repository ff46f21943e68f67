"""Tiles of the memory-bound kernels of the paper's shapes on an H200, pinned: a change shows here as a diff to judge.

Each line is (threads along rows, along columns, rows a thread, vectors a thread, long rows, parts of a sum).
"""

from __future__ import annotations

import pytest

from nova.schedule import target as targets
from nova.schedule.bandwidth import TileProblem, schedule_tile

PROBLEMS = {
    "layer_norm f32": TileProblem(16384, 768, 4, 4.0, 1, True),
    "layer_norm bf16": TileProblem(16384, 768, 8, 2.0, 1, True),
    "layer_norm 4096": TileProblem(16384, 4096, 4, 4.0, 1, True),
    "layer_norm_backward f32": TileProblem(16384, 768, 4, 8.0, 4, True, "rows"),
    "layer_norm_backward bf16": TileProblem(16384, 768, 4, 4.0, 4, True, "rows"),
    "gelu f32": TileProblem(1, 16384 * 3072, 4, 4.0),
    "gelu_backward bf16": TileProblem(1, 16384 * 3072, 8, 4.0),
    "cross_entropy f32": TileProblem(16384, 50304, 4, 4.0, 1, True, "rows"),
    "cross_entropy_backward bf16": TileProblem(16384, 50304, 8, 2.0),
    "softmax 100 x 17": TileProblem(100, 17, 1, 4.0, 1, True),
    "bias gradient": TileProblem(8192, 3072, 4, 4.0, 1, False, "rows"),
    "its merge": TileProblem(22, 3072, 4, 4.0, 1, False, "rows", merges=True),
    "loss": TileProblem(1, 16384, 4, 4.0, 1, False, "all"),
    "transpose": TileProblem(16384, 1024, 4, 4.0, turned=True),
    "transpose bf16": TileProblem(16384, 1024, 8, 2.0, turned=True),
}
SHAPES = {
    "layer_norm f32": (4, 32, 1, 6, False, 1),
    "layer_norm bf16": (4, 32, 1, 3, False, 1),
    "layer_norm 4096": (1, 128, 1, 8, False, 1),
    "layer_norm_backward f32": (4, 64, 1, 3, False, 256),
    "layer_norm_backward bf16": (4, 64, 1, 3, False, 256),
    "gelu f32": (1, 256, 1, 2, False, 1),
    "gelu_backward bf16": (1, 256, 1, 2, False, 1),
    "cross_entropy f32": (1, 256, 1, 4, True, 656),
    "cross_entropy_backward bf16": (1, 256, 2, 1, False, 1),
    "softmax 100 x 17": (8, 32, 1, 1, False, 1),
    "bias gradient": (8, 32, 4, 1, False, 22),
    "its merge": (32, 4, 1, 1, False, 1),
    "loss": (1, 256, 1, 4, False, 4),
    "transpose": (16, 16, 4, 1, False, 1),
    "transpose bf16": (8, 8, 8, 1, False, 1),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_tile(name: str) -> None:
    s = schedule_tile(PROBLEMS[name], targets.by_name("h200"))
    found = (s.row_threads, s.column_threads, s.row_batch, s.column_batch, s.long, s.parts)
    assert found == SHAPES[name]
