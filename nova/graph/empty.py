"""Tensors with no elements: ops on them are replaced by what they must give, so no kernel has a loop of length zero.

    %0 = nova.gelu %x : 0x8                        %0 = nova.constant dense<> : 0x8   // unused: removed
    %1 = nova.reduce_sum %0 {dims = [0]} : 8  =>   %1 = nova.broadcast 0.0 : 8        // the sum of nothing
    %2 = nova.concat %x, %y {dim = 0}              %2 = nova.concat %y {dim = 0}

A result without elements needs no computation. A result with elements is replaced only where the op is known to give a
fixed value, or one of its operands, for nothing; every other op stays.
"""

from __future__ import annotations

import math

import numpy as np

from nova.dialect.build import Builder, Value, wrap
from nova.dialect.types import FLOATS
from nova.mlir import ir

# what a result with elements is when an operand has none
_OF_NOTHING = {
    "reduce_sum": 0,
    "reduce_any": 0,
    "reduce_prod": 1,
    "reduce_all": 1,
    "matmul": 0,
    "convolution_backward_weight": 0,
    "layer_norm_backward": 0,
    "take_backward": 0,
    "max_pool2d_backward": 0,
}
_WRITES = ("slice_scatter", "scatter", "index_put", "as_strided_scatter")  # writing nothing gives operand 0
_KEPT = ("constant", "iota", "aten_call", "bucket_ready", "sgd", "adam", "adagrad", "rmsprop")


def replace_empty(block: ir.Block) -> int:
    """Replaces the results of one block's ops; the number replaced (the ops are left unused)."""
    changed = 0
    builder = Builder()
    for op in block.operations:
        operation = op.operation
        name = operation.name[5:]
        if not operation.name.startswith("nova.") or name in _KEPT:
            continue
        results = [wrap(r) for r in operation.results]
        operands = [wrap(v) for v in operation.operands]
        if not any(0 in v.shape for v in results) and not any(0 in v.shape for v in operands):
            continue
        builder.point = ir.InsertionPoint(operation)
        builder.loc = operation.location
        builder.forget_constants()
        for result in results:
            value = _value(builder, operation, name, operands, result)
            if value is not None:
                result.ir.replace_all_uses_with(value.ir)
                changed += 1
    return changed


def _value(b: Builder, op: ir.Operation, name: str, operands: list[Value], result: Value) -> Value | None:
    if 0 in result.shape:
        return None if result.dtype in ("c64", "c128") else b.dense(np.zeros(result.shape), result.dtype)
    if name in _OF_NOTHING:
        return b.full(result.shape, _OF_NOTHING[name], result.dtype)
    if name in ("reduce_max", "reduce_min") and result.dtype in FLOATS:  # inside logsumexp; PyTorch refuses amax
        return b.full(result.shape, -math.inf if name == "reduce_max" else math.inf, result.dtype)
    if name == "pad":  # also the gradient of a slice without elements
        return b.full(result.shape, ir.FloatAttr(op.attributes["value"]).value, result.dtype)
    if name == "linear":  # a product of nothing: the bias alone
        bias = operands[2] if len(operands) > 2 else None
        return b.full(result.shape, 0, result.dtype) if bias is None else b.expand(bias, result.shape)
    if name in _WRITES and operands[0].shape == result.shape:
        return operands[0]
    if name == "concat":
        rest = [v for v in operands if 0 not in v.shape]
        return rest[0] if len(rest) == 1 else b.concat(rest, ir.IntegerAttr(op.attributes["dim"]).value)
    return None
