"""simplify keeps every bit: random programs over special values give identical results before and after it."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nova import mlir
from nova.dialect import build, reference
from nova.dialect.types import tensor_type
from nova.graph import simplify
from nova.mlir import func, ir

SHAPE = (3, 4)
SPECIAL = [0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, 1e-40, 3.3e38, 0.1, 7.0, -2.0]
CONSTANTS = [0.0, -0.0, 1.0, -1.0, 2.0, 4.0, 0.1, math.inf, -math.inf, math.nan]
BINARY = ["add", "sub", "mul", "div", "maximum", "minimum"]
step = st.tuples(st.integers(0, 11), st.integers(0, 50), st.integers(0, 50), st.sampled_from(CONSTANTS))


def grow(b, values, kind, i, j, number):
    """Appends one op on earlier values; every value has SHAPE and f32."""
    x, y = values[i % len(values)], values[j % len(values)]
    match kind:
        case 0 | 1:
            return b.op(BINARY[j % 6], x, b.constant(number, "f32"))
        case 2:
            return b.op(BINARY[j % 6], b.full(SHAPE, number, "f32"), x)
        case 3:
            return b.op(BINARY[i % 6], x, y)
        case 4:
            return b.op("neg", x)
        case 5:
            low = "bf16" if j % 2 else "f64"
            return b.cast(b.cast(x, low), "f32")
        case 6:
            return b.transpose(b.reshape(b.transpose(x, (1, 0)), (4, 3)), (1, 0))
        case 7:
            return b.reshape(b.reshape(x, (2, 6)), SHAPE)
        case 8:
            left, right = b.slice_dim(x, 1, 0, 1 + j % 3), b.slice_dim(x, 1, 1 + j % 3, 4)
            return b.concat([left, right] if i % 3 else [b.slice_dim(y, 1, 0, 1 + j % 3), right], 1)
        case 9:
            row = b.slice_dim(x, 0, 0, 1)
            return b.op("add", y, b.broadcast(b.reshape(row, (4,)), SHAPE, [1]))
        case 10:
            return b.where(b.op("lt", b.constant(number, "f32"), b.constant(1.0, "f32")), x, y)
        case _:
            total = b.reduce("max", b.reshape(x, (3, 1, 4)), (1,), keepdim=False)
            return b.op("add", total, b.op("mul", b.constant(number, "f32"), b.constant(2.0, "f32")))


@settings(max_examples=60, deadline=None)
@given(st.lists(step, min_size=1, max_size=14))
def test_random_programs_keep_every_bit(program):
    with mlir.context(), ir.Location.unknown():
        type_ = tensor_type(SHAPE, "f32")
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            function = func.FuncOp("step", ([type_, type_], [type_] * (len(program) + 1)))
        block = function.add_entry_block()
        with ir.InsertionPoint(block):
            b = build.Builder()
            values = [build.wrap(a) for a in block.arguments]
            for item in program:
                values.append(grow(b, values, *item))
            func.ReturnOp([v.ir for v in values[1:]])
        assert module.operation.verify()
        special = torch.tensor(SPECIAL).view(SHAPE)
        inputs = [special, special.flip(0).contiguous()]
        before = reference.interpret(module, inputs)
        simplify.run(module)
        assert module.operation.verify()
        after = reference.interpret(module, inputs)
    for a, b in zip(before, after, strict=True):
        same = (a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())
        assert same.all(), f"{a} became {b}\n{module}"


def test_a_second_run_changes_nothing():
    text = """
      func.func @step(%x: tensor<3x1x4xf32>) -> tensor<4x3xf32> {
        %0 = "nova.reshape"(%x) : (tensor<3x1x4xf32>) -> tensor<12xf32>
        %1 = "nova.reshape"(%0) : (tensor<12xf32>) -> tensor<3x4xf32>
        %2 = "nova.transpose"(%1) {permutation = array<i64: 1, 0>} : (tensor<3x4xf32>) -> tensor<4x3xf32>
        return %2 : tensor<4x3xf32>
      }"""
    once = str(simplify.run(mlir.parse(text)))
    assert str(simplify.run(mlir.parse(once))) == once
