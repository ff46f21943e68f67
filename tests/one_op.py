"""Runs one `nova` op of a module built for it, through text, and compares with an expectation."""

import torch

from nova import mlir
from nova.dialect import build, reference
from nova.dialect.emit import SHORT_NAMES
from nova.dialect.types import tensor_type
from nova.mlir import func, ir

f64, f32, i64 = torch.float64, torch.float32, torch.int64


def rand(*shape, low=-2.0, high=2.0):
    return torch.rand(*shape, dtype=f64) * (high - low) + low


def short(x):
    return tuple(x.shape), SHORT_NAMES[x.dtype]


def run(name, inputs, expected, rtol=1e-10, atol=1e-12, **attrs):
    """Checks `nova.<name>` on `inputs` against a tensor or a list of tensors."""
    expected = list(expected) if isinstance(expected, (list, tuple)) else [expected]
    with mlir.context(), ir.Location.unknown():
        module = ir.Module.create()
        types = [tensor_type(*short(x)) for x in inputs]
        results = [tensor_type(*short(x)) for x in expected]
        with ir.InsertionPoint(module.body):
            function = func.FuncOp("step", (types, results))
        block = function.add_entry_block()
        with ir.InsertionPoint(block):
            values = [build.wrap(a) for a in block.arguments]
            made = build.Builder().create(name, values, [short(x) for x in expected], **attrs)
            made = made if isinstance(made, list) else [made]
            func.ReturnOp([v.ir for v in made])
        module = mlir.parse(str(module))
        outputs = reference.interpret(module, inputs)
    for got, want in zip(outputs, expected, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, rtol=rtol, atol=atol)
    TESTED.add(name)
    return outputs


TESTED: set[str] = set()
