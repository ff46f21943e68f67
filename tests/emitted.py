"""Checks the emitter on a function of tensors: traced to ATen, emitted, verified, printed and parsed back, simplified,
and interpreted at every stage, against the function itself."""

import re

import torch

from nova import mlir
from nova.dialect.emit import emit_step
from nova.dialect.reference import interpret
from nova.graph import simplify
from tests import level0

f64 = torch.float64


def rand(*shape, dtype=f64, low=-2.0, high=2.0):
    return (torch.rand(*shape, dtype=f64) * (high - low) + low).to(dtype)


def with_grad(fn):
    """fn and its gradients in every floating input, for a cotangent that is not constant."""

    def both(*tensors):
        leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in tensors]
        out = fn(*leaves)
        wanted = [t for t in leaves if t.requires_grad]
        weight = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).add(1).mul(0.1).sin()
        grads = torch.autograd.grad(out, wanted, weight, allow_unused=True)
        return (out.detach(), *(g for g in grads if g is not None))

    return both


def run(fn, *tensors, left=(), scalars=(), **tolerance):
    captured = level0.trace(fn, *tensors, scalars=scalars)
    module = emit_step(captured)
    assert module.operation.verify()
    called = set(re.findall(r'nova.aten_call.*?op = "aten\.(\w+)', str(module)))
    assert called == set(left), f"left to PyTorch: {called}"
    expected = fn(*tensors)
    expected = expected if isinstance(expected, (tuple, list)) else (expected,)
    compare(interpret(module, tensors), expected, **tolerance)
    module = mlir.parse(str(module))  # text is the whole module
    module = simplify.run(module)
    assert module.operation.verify()
    compare(interpret(module, tensors), expected, **tolerance)
    return module


def compare(actual, expected, **tolerance):
    for got, want in zip(actual, expected, strict=True):
        options = tolerance or ({"rtol": 1e-10, "atol": 1e-11} if want.dtype == f64 else {})
        torch.testing.assert_close(got, want, equal_nan=True, **options)
