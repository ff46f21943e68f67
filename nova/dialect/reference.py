"""The meaning of every `nova` op, once, in PyTorch, and an interpreter of level-1 modules built on it.

    outputs = interpret(module, inputs)                      # the dtypes of the module
    outputs = interpret(module, inputs, precision="f64")     # every float computed in float64, no rounding in between

Clarity before speed: these functions define what each lowering must compute. A function takes the op's attributes as
`a` and its operands, and returns a tensor or a tuple of them. Low-precision operands arrive as f32 ("computes in f32,
rounds once"); the interpreter rounds results to their declared dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nova.dialect.base import attribute_value
from nova.dialect.emit import TORCH_DTYPES
from nova.dialect.types import FLOATS, LOW_PRECISION, Described, describe
from nova.mlir import ir

MEANING: dict[str, Callable[..., Any]] = {}


class Attributes:
    """An op's attributes as Python values, its result types as `results`."""

    def __init__(self, operation: ir.Operation, wide: bool = False):
        self._attributes = operation.attributes
        self.results = [describe(r.type) for r in operation.results]
        self.wide = wide  # floats are computed in float64
        self.count = len(operation.operands)
        self.name = operation.name

    def __getattr__(self, name: str) -> Any:
        return attribute_value(self._attributes[name])

    def dtype(self, position: int = 0) -> torch.dtype:
        """The dtype of a result, float64 for every float in a float64 interpretation."""
        short = self.results[position].dtype
        return torch.float64 if self.wide and short in FLOATS else TORCH_DTYPES[short]

    def shape(self, position: int = 0) -> tuple[int, ...]:
        """The shape of a result."""
        return self.results[position].shape


def meaning(*names: str) -> Callable[[Callable], Callable]:
    """Registers the meaning of ops."""

    def register(function: Callable) -> Callable:
        for name in names:
            MEANING[name] = function
        return function

    return register


def _compute(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


@functools.cache
def load() -> None:
    """Fills MEANING."""
    from nova.dialect import (  # noqa: F401
        reference_contraction,
        reference_elementwise,
        reference_reductions,
        reference_training,
        reference_views,
    )


def apply(operation: ir.Operation, operands: Sequence[Tensor], wide: bool = False) -> list[Tensor]:
    """The results of one op on concrete operands."""
    name = operation.name.removeprefix("nova.")
    attributes = Attributes(operation, wide)
    compute = operands if name == "aten_call" else [_compute(x) for x in operands]
    if name not in MEANING:
        raise ValueError(f"{operation.name} is not an op of level 1: it has no reference meaning")
    made = MEANING[name](attributes, *compute)
    results = list(made) if isinstance(made, (tuple, list)) else [made]
    assert len(results) == len(attributes.results), f"{name}: {len(results)} results"
    return [_declared(attributes, i, r) for i, r in enumerate(results)]


def _declared(attributes: Attributes, position: int, result: Tensor) -> Tensor:
    result = result.to(attributes.dtype(position))
    expected = attributes.shape(position)
    dynamic = "nova.dynamic" in attributes._attributes
    assert dynamic or tuple(result.shape) == expected, (
        f"{attributes.name}: result {position} has shape {tuple(result.shape)}, declared {expected}"
    )
    return result


def evaluate(operation: ir.Operation, operands: Sequence[Tensor]) -> Tensor:
    """The only result of an op on operands of other shapes than its own (constant folding uses 0-d ones)."""
    result = MEANING[operation.name.removeprefix("nova.")](Attributes(operation), *map(_compute, operands))
    return result


def interpret(module: ir.Module, inputs: Sequence[Tensor], precision: str = "declared") -> list[Tensor]:
    """Runs the first function of a level-1 module. precision "f64" computes every float in float64."""
    load()
    wide = precision == "f64"
    function = module.body.operations[0]
    block = function.regions[0].blocks[0]
    values: dict[ir.Value, Tensor] = {}
    for argument, tensor in zip(block.arguments, inputs, strict=True):
        expected = describe(argument.type)
        given = Described(tuple(tensor.shape), next(s for s, t in TORCH_DTYPES.items() if t == tensor.dtype))
        if given != expected:
            raise ValueError(f"input {argument.arg_number} is {given}, the module expects {expected}")
        values[argument] = tensor.double() if wide and tensor.is_floating_point() else tensor
    for op in block.operations:
        operation = op.operation
        operands = [values[v] for v in operation.operands]
        if operation.name == "func.return":
            return operands
        for value, result in zip(operation.results, apply(operation, operands, wide), strict=True):
            values[value] = result
    raise ValueError("the function does not return")


__all__ = ["LOW_PRECISION", "MEANING", "Attributes", "apply", "interpret", "meaning"]
