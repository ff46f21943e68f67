"""Buffers that are both walked by loops and indexed by computed positions have one shape for both."""

import pytest
import torch

from nova import mlir
from nova.dialect import reference
from nova.dialect.emit import emit_step
from nova.fusion import dispatch, interpret, outline
from nova.graph import simplify
from tests import level0


def overwrite_and_keep(x):
    kept = x[:, :6].clone()
    return torch.slice_scatter(x, torch.zeros(4, 6, 5), 1, 0, 6), kept


def strided_overwrite(x):
    return torch.slice_scatter(x, x[:, :6] * 2, 1, 0, 12, 2), x[:, 1:7].reshape(4, 30) + 1


def gather_and_slices(x):
    ids = torch.tensor([2, 0])
    return x[ids], x[1:3, 2:8].reshape(2, 30) * 3


@pytest.mark.parametrize("function", [overwrite_and_keep, strided_overwrite, gather_and_slices])
def test_captured_buffers(function):
    x = torch.randn(4, 13, 5)
    module = simplify.run(emit_step(level0.trace(function, x)))
    with mlir.context(), mlir.ir.Location.unknown():
        expected = reference.interpret(module, [x], "f64")
        actual = interpret.run_step(outline.run(dispatch.run(module)), [x.double()], True)
    for a, b, eager in zip(actual, expected, function(x), strict=True):
        assert torch.equal(a.reshape(b.shape), b)
        torch.testing.assert_close(b.float(), eager)
