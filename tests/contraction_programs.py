"""Contraction kernels of tests/contraction_text.py as GPU programs: level 4, level 5, and run by the simulator."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nova import mlir
from nova.gpu import simulate
from nova.gpu.distribute import distribute
from nova.mlir import ir
from nova.schedule import annotate, config
from nova.schedule import target as targets
from nova.schedule.contraction import ContractionSchedule
from nova.tile import generate

MEMORY = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": np.uint16}


def level4(text: str, target: str, tf32: bool = False, **changes: Any) -> tuple[str, ContractionSchedule]:
    """The tile programs of a level-2 contraction, and the schedule: the configurator's with `changes`."""
    if tf32:
        text = text.replace("nova.kernel =", "nova.tf32, nova.kernel =")
    board = targets.by_name(target)
    module = mlir.parse(text)
    with mlir.context(), ir.Location.unknown():
        (kernel,) = list(annotate.kernels(module.operation))
        schedule = dataclasses.replace(annotate.schedule_kernel(kernel, board), **changes)
        config.write(kernel.operation, schedule)
        return generate.generate(kernel, board), schedule


def level5(tile_program: str) -> str:
    module = mlir.parse(tile_program)
    with mlir.context(), ir.Location.unknown():
        return distribute(module)


def flat(tensor: torch.Tensor) -> np.ndarray:
    """As the tensor lies in memory; bf16 as its bits."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
        return tensor.contiguous().numpy().view(np.uint16).reshape(-1).copy()
    return tensor.contiguous().numpy().reshape(-1).copy()


def tensor_of(memory: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Float64 of the shape of `like`."""
    found = (
        torch.from_numpy(memory.view(np.int16)).view(torch.bfloat16)
        if memory.dtype == np.uint16
        else torch.from_numpy(memory)
    )
    return found.double().reshape(like.shape)


def simulated(
    tile_program: str, inputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], out: str
) -> tuple[list[torch.Tensor], simulate.Report]:
    """Results of the kernel on `inputs`; results and workspace start as NaN."""
    workspace = int(re.findall(r"nova_tile.workspace = (\d+)", tile_program)[0])
    poison: Any = 0x7FC0 if out == "bf16" else np.nan
    results = [np.full(x.numel(), poison, MEMORY[out]) for x in expected]
    scratch = np.full(workspace, 0xFF, np.uint8)
    memory = [*(flat(x) for x in inputs), *results, scratch.view(np.float32), np.zeros(4, np.int64)]
    if "f64" in tile_program and out == "f64":
        memory[-2] = scratch.view(np.float64)
    report = simulate.run(level5(tile_program), memory)
    return [tensor_of(r, x) for r, x in zip(results, expected, strict=True)], report


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative norm of the difference."""
    if not exact.numel():
        return 0.0
    return float((found - exact).norm() / exact.norm().clamp_min(1e-30))
