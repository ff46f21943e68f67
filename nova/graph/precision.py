"""precision="bf16" (paper 4.3): operands of contractions become bf16; accumulators, results and all else stay f32.

    %y = nova.linear %x, %w, %b                 %xb = nova.cast %x : f32 -> bf16
      : f32, f32, f32 -> f32            =>      %wb = nova.cast %w : f32 -> bf16
                                                %y  = nova.linear %xb, %wb, %b : bf16, bf16, f32 -> f32

A value that several contractions read is cast once. Contractions in f64, or whose operands are low precision already
(a `torch.autocast` region), are left alone. Runs where options.precision, or the module's `nova.precision`, is "bf16".
"""

from __future__ import annotations

from typing import Any

from nova.dialect.base import attribute_value
from nova.dialect.build import Builder, wrap
from nova.mlir import context, ir

# contraction -> how many leading operands are contracted
OPERANDS = {
    "nova.matmul": 2,
    "nova.linear": 2,
    "nova.convolution": 2,
    "nova.convolution_backward_data": 2,
    "nova.convolution_backward_weight": 2,
    "nova.attention": 3,
    "nova.attention_backward": 4,
}


def requested(module: ir.Module, options: Any) -> str | None:
    """The precision asked for by the options, or by the module's attribute."""
    if options is not None:
        return getattr(options, "precision", None)
    attributes = module.operation.attributes
    return attribute_value(attributes["nova.precision"]) if "nova.precision" in attributes else None


def run(module: ir.Module, options: Any = None) -> ir.Module:
    """Demotes the contractions of every function in place, if asked to."""
    if requested(module, options) != "bf16":
        return module
    with context(), ir.Location.unknown():
        for function in module.body.operations:
            for region in function.operation.regions:
                for block in region.blocks:
                    _demote(block)
    return module


def _demote(block: ir.Block) -> None:
    builder = Builder()
    casts: dict[ir.Value, ir.Value] = {}
    for op in block.operations:
        operation = op.operation
        count = OPERANDS.get(operation.name, 0)
        for position in range(count):
            value = operation.operands[position]
            operand = wrap(value)
            if operand.dtype != "f32":
                continue
            if value not in casts:
                builder.point, builder.loc = ir.InsertionPoint(operation), operation.location
                casts[value] = builder.cast(operand, "bf16").ir
            operation.operands[position] = casts[value]
