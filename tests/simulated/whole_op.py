"""Runs a kernel whose body is one nova op as tile programs, and their threads in the simulator: the `run` of
tests/numerics/test_scatter_scan for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from nova import mlir
from nova.gpu import distribute, simulate
from nova.mlir import ir
from nova.schedule import target as targets
from nova.schedule.annotate import kernels
from nova.tile import generate, interpret
from tests.kernels import poisoned
from tests.numerics.test_scatter_scan import segments, type_of

TARGET = replace(targets.by_name("h200"), sms=4)


def array(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.reshape(-1)
    kind = {torch.bfloat16: torch.uint16, torch.bool: torch.uint8}.get(tensor.dtype)
    return (flat.view(kind) if kind else flat).numpy()


def text_of(
    op: str, attrs: str, inputs: Sequence[torch.Tensor], shape: Sequence[int], dtype: torch.dtype, kind: str,
    inplace: bool,
) -> str:  # fmt: skip
    args = ", ".join(f"%a{i}: {type_of(x.shape, x.dtype)}" for i, x in enumerate(inputs))
    types = ", ".join(type_of(x.shape, x.dtype) for x in inputs)
    result = type_of(shape, dtype)
    pairs = "array<i64: 0, 0>" if inplace else ""
    attrs = ", ".join([attrs] * bool(attrs) + segments(op, inputs, attrs))
    return (
        f"module {{ func.func private @k({args}, %o: {result} {{nova.out}}) -> {result} attributes "
        f'{{nova.kernel = "{kind}", nova.inplace = [{pairs}], nova.raises = "IndexError: {{value}}"}} {{\n'
        f'%r = "nova.{op}"({", ".join(f"%a{i}" for i in range(len(inputs)))}) {{{attrs}}} : ({types}) -> {result}\n'
        f"return %r : {result} }} }}"
    )


def tile_program(text: str, target: Any = TARGET) -> str:
    module = mlir.parse(text)
    with mlir.context(), ir.Location.unknown():
        (kernel,) = kernels(module.operation)
        return generate.generate(kernel, target)


def workspace_bytes(text: str) -> int:
    with mlir.context():
        return ir.IntegerAttr(ir.Module.parse(text).operation.attributes["nova_tile.workspace"]).value


def run_with(level: int, text: str, buffers: list[np.ndarray]) -> None:
    if level == 4:
        interpret.run(text, buffers)
        return
    with mlir.context(), ir.Location.unknown():
        code = distribute.distribute(ir.Module.parse(text))
    simulate.run(code, buffers)


def runner(level: int, target: Any = TARGET) -> Any:
    """A function like `run` of the CPU's tests."""

    def run(
        op: str, attrs: str, inputs: Sequence[torch.Tensor], shape: Sequence[int], dtype: torch.dtype,
        kind: str = "scatter", inplace: bool = False,
    ) -> tuple[torch.Tensor, list[int]]:  # fmt: skip
        text = tile_program(text_of(op, attrs, inputs, shape, dtype, kind, inplace), target)
        tensors = [x.clone() for x in inputs]
        out = tensors[0] if inplace else poisoned(shape, dtype)
        workspace = np.full(-(-workspace_bytes(text) // 8) * 8 + 8, 0xFF, np.uint8)
        error = torch.zeros(4, dtype=torch.int64)
        operands = [array(t) for t in tensors]
        run_with(level, text, [*operands, operands[0] if inplace else array(out), workspace, array(error)])
        for given, after in zip(inputs[1:], tensors[1:], strict=True):
            assert torch.equal(given, after), "an operand changed"
        return out, error[:2].tolist()

    return run
