"""Attention's tile programs, run on tensors: by the level-4 interpreter, or as per-thread code by the simulator."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from nova import mlir
from nova.gpu import simulate
from nova.gpu.distribute import distribute
from nova.mlir import ir
from nova.schedule import annotate
from nova.schedule import target as targets
from nova.tile import generate, interpret
from tests.attention_cases import Case, lowered, nova_text


def level3(case: Case, backward: bool, mask_grad: bool, target: targets.GpuTarget, tf32: bool = False) -> str:
    """The kernel as code generation for a GPU gets it."""
    text = nova_text(case, backward, mask_grad)
    if tf32:
        text = text.replace("stream =", "nova.tf32, stream =")
    return lowered(text, target)


def tile_text(text: str, target: targets.GpuTarget) -> str:
    """The tile programs of a level-3 kernel."""
    module = mlir.parse(text)
    with mlir.context(), ir.Location.unknown():
        return generate.generate(next(iter(annotate.kernels(module.operation))), target)


def array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as tile programs see it."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
        return tensor.numpy().view(np.uint16).reshape(-1)
    return tensor.numpy().view(np.uint8).reshape(-1) if tensor.dtype == torch.bool else tensor.numpy().reshape(-1)


class TileKernel:
    """A kernel's tile programs. `call(inputs, outputs)` runs them on tensors in place."""

    def __init__(self, text: str, run: Callable[[str, list[np.ndarray]], Any] = interpret.run):
        self.text, self.run = text, run
        found = re.search(r"nova_tile.workspace = (\d+)", text)
        assert found
        self.workspace = int(found[1])

    def call(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        kind = np.dtype(np.float64 if "xf64>" in self.text else np.float32)  # of the statistics
        workspace = np.full(max(self.workspace // kind.itemsize, 1), np.nan, kind)
        buffers = [array(tensor) for tensor in (*inputs, *outputs)]
        self.run(self.text, [*buffers, workspace, np.zeros(4, np.int64)])


def maker(
    target: targets.GpuTarget, tf32: bool = False, run: Callable[[str, list[np.ndarray]], Any] = interpret.run
) -> Callable[[Case, bool, bool], TileKernel]:
    """What `attention_cases.check` takes to run tile programs for `target`."""
    return lambda case, backward, mask_grad: TileKernel(
        tile_text(level3(case, backward, mask_grad, target, tf32), target), run
    )


def simulated(text: str, buffers: Sequence[np.ndarray]) -> simulate.Report:
    """Runs tile programs as the threads of a simulated GPU."""
    module = mlir.parse(text)
    with mlir.context():
        threads = distribute(module)
    return simulate.run(threads, list(buffers))
