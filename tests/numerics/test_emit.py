"""Level 0 to level 1: emitted modules, read by the reference interpreter, agree with eager PyTorch.

Each case is a function of tensors, forward and backward, on ragged shapes; it is traced to ATen, emitted, verified,
printed, parsed back, simplified, and run. `left` names the ops that may stay with PyTorch; none may otherwise.
"""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nova import mlir
from nova.capture.signature import TensorType
from nova.dialect.emit import emit_step
from nova.dialect.reference import interpret
from nova.graph import simplify
from tests import level0

SEED = 0
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


# ---- elementwise ----

UNARY = {
    "neg": torch.neg, "abs": torch.abs, "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "sin": torch.sin,
    "cos": torch.cos, "tan": torch.tan, "atan": torch.atan, "sinh": torch.sinh, "cosh": torch.cosh, "tanh": torch.tanh,
    "asinh": torch.asinh, "sigmoid": torch.sigmoid, "erf": torch.erf, "erfc": torch.erfc, "relu": torch.relu,
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "softplus": F.softplus,
    "softplus_beta": lambda x: F.softplus(x, 2.0, 3.0), "elu": F.elu, "elu_alpha": lambda x: F.elu(x, 0.3),
    "selu": F.selu, "celu": lambda x: F.celu(x, 0.7), "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "hardtanh": F.hardtanh, "relu6": F.relu6, "hardsigmoid": lambda x: F.hardsigmoid(2 * x),
    "hardswish": lambda x: F.hardswish(2 * x), "mish": F.mish, "logsigmoid": F.logsigmoid, "softsign": F.softsign,
    "tanhshrink": F.tanhshrink, "hardshrink": F.hardshrink, "softshrink": F.softshrink,
    "threshold": lambda x: F.threshold(x, 0.1, 20.0), "glu": lambda x: F.glu(x[:, :4], 1), "square": torch.square,
    "frac": torch.frac, "sign": torch.sign, "pow0": lambda x: x**0 * x, "pow1": lambda x: x**1, "pow2": lambda x: x**2,
    "pow3": lambda x: x**3, "powm2": lambda x: x**-2, "pow25": lambda x: x.abs() ** 2.5, "rpow": lambda x: 2.0**x,
    "clamp": lambda x: x.clamp(-1, 1), "clamp_min": lambda x: x.clamp_min(0.1), "clamp_max": lambda x: x.clamp(max=0.5),
    "rsub": lambda x: 1 - x, "addalpha": lambda x: torch.add(x, x * x, alpha=3), "div": lambda x: x / 3 + 1 / (x + 5),
    "remainder": lambda x: x % 0.7, "fmod": lambda x: torch.fmod(x, 0.7), "masked_fill": lambda x: x.masked_fill(x > 0, 9.0),
    "where": lambda x: torch.where(x > 0, x, 2.0), "nan_to_num": lambda x: torch.nan_to_num(x / (x.detach() > 0)),
    "lerp": lambda x: torch.lerp(x, x * x, 0.3), "addcmul": lambda x: torch.addcmul(x, x, x, value=2.0),
    "addcdiv": lambda x: torch.addcdiv(x, x, x * x + 1, value=-0.5), "detach": lambda x: x * x.detach(),
}  # fmt: skip
POSITIVE = {
    "log": torch.log, "log2": torch.log2, "log10": torch.log10, "log1p": torch.log1p, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal, "acosh": lambda x: torch.acosh(x + 1),
    "pow05": lambda x: x**0.5, "powm05": lambda x: x**-0.5, "powm1": lambda x: x**-1, "xlogy": lambda x: torch.xlogy(x, x),
    "atanh": lambda x: torch.atanh(x / 5), "asin": lambda x: torch.asin(x / 5), "acos": lambda x: torch.acos(x / 5),
}  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    loose = {"rtol": 1e-6, "atol": 1e-7} if name == "hardsigmoid" else {}  # PyTorch's 1/6 is a float32
    run(with_grad(UNARY[name]), rand(3, 5), **loose)


@pytest.mark.parametrize("name", POSITIVE)
def test_positive(name):
    run(with_grad(POSITIVE[name]), rand(3, 5, low=0.1, high=3.0))


BINARY = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b,
    "maximum": torch.maximum, "minimum": torch.minimum, "atan2": torch.atan2, "hypot": torch.hypot,
    "pow": lambda a, b: a.abs() ** b, "where": lambda a, b: torch.where(a > b, a, b), "lerp": lambda a, b: torch.lerp(a, b, b),
    "copysign": lambda a, b: torch.copysign(a, b), "fmax": torch.fmax, "xlogy": lambda a, b: torch.xlogy(a, b.abs()),
    "clamp": lambda a, b: torch.clamp(a, b, b + 1), "prelu": lambda a, b: F.prelu(a, b[:, 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", BINARY)
def test_binary_broadcasts(name):
    run(with_grad(BINARY[name]), rand(3, 4, 5), rand(4, 1))


@pytest.mark.parametrize("mode", [None, "floor", "trunc"])
def test_division_modes(mode):
    run(lambda a, b: torch.div(a, b, rounding_mode=mode), rand(3, 5), rand(5))
    run(lambda a, b: torch.div(a, b, rounding_mode=mode), torch.arange(-7, 8), torch.tensor([3]))


def test_comparisons_and_logic():
    def fn(a, b):
        small, large = a < b, a >= 0.5
        return a == b, a != b, a <= b, a > b, small & large, small | large, small ^ large, ~small, torch.logical_not(a), \
            torch.logical_and(a, small), a.isnan(), a.isinf(), a.isfinite(), small + large, small * large  # fmt: skip

    a = rand(3, 5)
    a[0, 0], a[1, 1], a[2, 2] = math.nan, math.inf, 0.0
    run(fn, a, rand(5))


def test_integers():
    def fn(a, b):
        return a + b, a * 3, a // 2, a % 3, -a, a.abs(), a & b, a | b, a ^ b, ~a, a << 1, a >> 1, a / 2, a * 0.5, \
            a.float().exp(), torch.maximum(a, b), a.sign(), a**2, a.clamp(0, 3), a.relu(), a.floor()  # fmt: skip

    run(fn, torch.arange(-6, 6).view(3, 4), torch.tensor([1, 2, 3, 4]))
    run(lambda a: (a + 1, a // 2, a.float()), torch.arange(7, dtype=torch.uint8))


def test_dtype_promotion():
    def fn(x, h, i, s, flag):
        return x + i, h + x, h * s, i * s, x * flag, h * 0.1, i + 1.5, s + i, s * h, flag + 1, x > i, h == s, i / i, x + s

    s = torch.tensor(1.25, dtype=f64)
    run(fn, rand(3, dtype=torch.float32), rand(3, dtype=torch.bfloat16), torch.tensor([1, 2, 3]), s,
        torch.tensor([True, False, True]))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_at_every_op(dtype):
    def fn(x, y):
        z = x * 0.1 + y
        return z, F.gelu(z), z.sum(), z.mean(1), F.softmax(z, 1), z.var(1), F.hardswish(z), z + 3.0, \
            torch.lerp(x, y, 0.3), z.float() @ z.float().t(), (x + y) - y  # fmt: skip

    run(fn, rand(7, 9, dtype=dtype), rand(7, 9, dtype=dtype))


def test_a_rounding_cast_stays():
    module = run(lambda x: (x.bfloat16().float() - x, x.half().float()), rand(5, 7, dtype=torch.float32))
    assert str(module).count("nova.cast") == 4


def test_traced_scalars_take_part_in_arithmetic():
    def fn(x, s):
        return x * s, x + s, x / s, torch.where(x > 0, x, s), torch.lerp(x, x + 1, s.to(x.dtype)), x.pow(s)

    run(fn, rand(3, 5, dtype=torch.float32, low=0.5), torch.tensor(0.3, dtype=f64), scalars=(1,))


# ---- views and movement ----

VIEWS = {
    "view": lambda x: x.view(6, 10) * 2, "flatten": lambda x: x.flatten(1), "permute": lambda x: x.permute(2, 0, 1).contiguous() * 1,
    "transpose": lambda x: x.transpose(-1, -2) * 2, "expand": lambda x: x[:1].expand(4, -1, -1) * 2, "unsqueeze": lambda x: x.unsqueeze(1) * 1,
    "squeeze": lambda x: x[:1].squeeze(0) * 1, "slice": lambda x: x[1:, ::2, -3:], "select": lambda x: x[:, 1] + x[0, 1, 2],
    "slice_step": lambda x: x[:, 1::3, ::2], "split": lambda x: x.split(2, 2)[1] * x.split([1, 4], 2)[0],
    "chunk": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1), "unbind": lambda x: torch.stack(x.unbind(1), 0) * 2,
    "cat": lambda x: torch.cat([x, x * 2, x[:, :1]], 1), "stack": lambda x: torch.stack([x, x * x], -1),
    "flip": lambda x: x.flip(0, 2) * x, "roll": lambda x: x.roll((1, -2), (0, 1)) * x, "rollflat": lambda x: x.roll(7) * x,
    "repeat": lambda x: x.repeat(2, 1, 3), "repeat_interleave": lambda x: x.repeat_interleave(2, 1), "pad": lambda x: F.pad(x, (1, 2, 0, 1)),
    "crop": lambda x: F.pad(x, (-1, 2)), "padvalue": lambda x: F.pad(x, (1, 1), value=3.0), "diagonal": lambda x: x.diagonal(1, 1, 2) * 2,
    "unfold": lambda x: x.unfold(2, 3, 1) * 2, "tril": lambda x: x.tril(), "triu": lambda x: x.triu(1), "trilneg": lambda x: x.tril(-1),
    "movedim": lambda x: x.movedim(0, 2) * 1, "as_strided": lambda x: x.as_strided((3, 4), (2, 3), 1) * 2,
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.reshape(1, 4, 3, 5), 2), "pixel_unshuffle": lambda x: F.pixel_unshuffle(x.reshape(1, 1, 6, 10), 2),
    "meshgrid": lambda x: torch.meshgrid(x[0, 0], x[0, 1], indexing="ij")[1] * 1, "outer": lambda x: torch.outer(x[0, 0], x[0, 1]),
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_views(name):
    run(with_grad(VIEWS[name]), rand(3, 4, 5))


def test_scatters_into_views():
    def fn(x, u):
        return (
            torch.slice_scatter(x, u, 1, 1, 4), torch.select_scatter(x, u[:, 0], 1, -1), torch.diagonal_scatter(x, u[:, 0]),
            torch.slice_scatter(x, u[:, :2], 1, 0, 4, 2), torch.as_strided_scatter(x, u, (3, 3), (1, 3), 2),
            torch.slice_scatter(x, x * 2, 1),
        )  # fmt: skip

    run(fn, rand(3, 5), rand(3, 3))


def test_in_place_on_views():
    def fn(x):
        y = x.clone()
        y[1:, ::2].mul_(3).add_(1)
        y[0].fill_(7)
        y.diagonal().zero_()
        y.t()[1] += 1
        return y, y.sum()

    run(fn, rand(4, 5))


def test_creation():
    def fn(x):
        return (
            torch.zeros(2, 3), torch.ones_like(x), torch.full((2,), 3.5), x.new_zeros(4), torch.arange(7), torch.arange(2, 9, 3),
            torch.arange(0.5, 3.0, 0.7), torch.eye(3, 5), torch.zeros(0, 3), torch.full_like(x, 2), torch.tensor(2.5) * x,
        )  # fmt: skip

    run(fn, rand(3, 5))


# ---- reductions ----

REDUCTIONS = {
    "sum": lambda x: x.sum(), "sum1": lambda x: x.sum(1), "sum02": lambda x: x.sum((0, 2), keepdim=True), "mean": lambda x: x.mean(),
    "mean1": lambda x: x.mean(-1, keepdim=True), "var": lambda x: x.var(), "var1": lambda x: x.var(1, correction=0), "std": lambda x: x.std(2),
    "amax": lambda x: x.amax(1), "amin": lambda x: x.amin((0, 1)), "max": lambda x: x.max(), "min": lambda x: x.min(),
    "maxdim": lambda x: x.max(1)[0], "mindim": lambda x: x.min(2, keepdim=True).values, "prod": lambda x: x.prod(), "prod1": lambda x: x.prod(1),
    "norm": lambda x: x.norm(), "norm1": lambda x: x.norm(1, 2), "norminf": lambda x: torch.linalg.vector_norm(x, math.inf, 1),
    "norm3": lambda x: torch.linalg.vector_norm(x, 3, 2), "normalize": lambda x: F.normalize(x, dim=1), "logsumexp": lambda x: x.logsumexp(1),
    "softmax": lambda x: x.softmax(1), "log_softmax": lambda x: x.log_softmax(0), "cumsum": lambda x: x.cumsum(1), "cumprod": lambda x: x.cumprod(2),
    "var_mean": lambda x: torch.var_mean(x, 1)[0] + torch.var_mean(x, 1)[1], "cosine": lambda x: F.cosine_similarity(x, x.flip(0), 1),
    "einsum": lambda x: torch.einsum("ijk,ljk->il", x, x * 2), "max_all_of_dims": lambda x: x.amax(),
}  # fmt: skip
SCANS_WITH_SORTS = {"cumprod": ("cummax",)}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name):
    run(with_grad(REDUCTIONS[name]), rand(3, 4, 5))


def test_index_reductions():
    def fn(x, i):
        flags = x > 0
        return (
            x.argmax(1), x.argmin(), x.argmax(), flags.any(), flags.all(1), flags.any(0, keepdim=True), flags.sum(), i.sum(1), i.prod(),
            torch.count_nonzero(i, 1), i.amax(0), i.cumsum(1), torch.linalg.vector_norm(x, 0), *torch.aminmax(x), x.sum(()), i.float().mean(),
        )  # fmt: skip

    run(fn, rand(3, 5), torch.arange(-7, 8).view(3, 5))


def test_reductions_of_infinities_and_nan():
    x = rand(3, 5)
    x[0, 1], x[1], x[2, 0] = math.nan, -math.inf, math.inf
    run(lambda x: (x.amax(1), x.logsumexp(1), x.max(1)[1], x.softmax(1), x.norm(), x.sum(0)), x)


def test_zero_size():
    def fn(x, w):
        return F.linear(x, w).relu().sum(), x @ w.t(), x.sum(0), x.mean(1), torch.cat([x, x * 2]), x.softmax(1)

    run(fn, rand(0, 5), rand(7, 5))
    run(with_grad(lambda x, w: F.linear(x, w).relu()), rand(0, 5), rand(7, 5))


# ---- contractions ----

CONTRACTIONS = {
    "mm": (lambda a, b: a @ b, (3, 5), (5, 7)), "mmt": (lambda a, b: a @ b.t(), (3, 5), (7, 5)), "bmm": (torch.bmm, (2, 3, 5), (2, 5, 7)),
    "matmul4": (lambda a, b: a @ b.transpose(-1, -2), (2, 3, 4, 5), (2, 3, 6, 5)), "matmul_broadcast": (lambda a, b: a @ b, (2, 3, 4, 5), (3, 5, 6)),
    "mv": (lambda a, b: a @ b, (3, 5), (5,)), "dot": (lambda a, b: a @ b, (5,), (5,)), "vm": (lambda a, b: a @ b, (5,), (5, 3)),
    "linear3": (lambda a, b: F.linear(a, b), (2, 3, 5), (7, 5)), "bias": (lambda a, b: F.linear(a, b[:, :5], b[:, 5]), (3, 5), (7, 6)),
    "bias3": (lambda a, b: F.linear(a, b[:, :5], b[:, 5]), (2, 3, 5), (7, 6)), "addmm": (lambda a, b: torch.addmm(b[:3, :3], a, b[:5, :3], beta=0.5, alpha=2), (3, 5), (6, 4)),
    "baddbmm": (lambda a, b: torch.baddbmm(a[:, :, :1], a, b, alpha=0.5), (2, 3, 5), (2, 5, 7)), "addmv": (lambda a, b: torch.addmv(a[:, 0], a, b), (3, 5), (5,)),
    "addr": (lambda a, b: torch.addr(a, a[:, 0], b, alpha=2), (3, 5), (5,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_contractions(name):
    fn, a, b = CONTRACTIONS[name]
    run(with_grad(fn), rand(*a), rand(*b))


def test_linear_is_raised_in_both_directions():
    module = run(with_grad(lambda x, w, b: F.linear(x, w, b)), rand(3, 5), rand(7, 5), rand(7))
    text = str(module)
    assert "nova.linear" in text and text.count("nova.matmul") == 2
    # dw = transpose(dy) @ x: nothing transposes a product
    assert not re.search(r"nova.transpose\"\(%\d+\) .*tensor<5x7xf64>\) -> tensor<7x5xf64>", text)


CONVOLUTIONS = {
    "plain": (dict(), (2, 3, 7, 8), (4, 3, 3, 3)), "stride": (dict(stride=2, padding=1), (2, 3, 7, 8), (4, 3, 3, 2)),
    "dilation": (dict(dilation=2, padding=(2, 1)), (2, 3, 9, 8), (4, 3, 3, 3)), "groups": (dict(groups=3, padding=1), (2, 6, 5, 5), (9, 2, 3, 3)),
    "depthwise": (dict(groups=4), (2, 4, 5, 6), (4, 1, 2, 3)), "one": (dict(), (2, 3, 5, 4), (7, 3, 1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name):
    options, x, w = CONVOLUTIONS[name]
    run(with_grad(lambda x, w, b: F.conv2d(x, w, b, **options)), rand(*x), rand(*w), rand(w[0]))


def test_other_convolutions():
    run(with_grad(lambda x, w, b: F.conv1d(x, w, b, padding=1)), rand(2, 3, 9), rand(4, 3, 4), rand(4))
    run(with_grad(lambda x, w: F.conv3d(x, w)), rand(1, 2, 3, 4, 5), rand(3, 2, 2, 2, 2))
    run(with_grad(lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, output_padding=1)), rand(2, 3, 4, 5), rand(3, 4, 3, 2), rand(4))
    run(with_grad(lambda x, w: F.conv_transpose1d(x, w, groups=2, padding=1)), rand(2, 4, 6), rand(4, 3, 3))


@pytest.mark.parametrize("mask", [None, "bool", "float", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32])
def test_attention_below_capture(mask, dtype):
    q, k, v = rand(2, 3, 5, 8, dtype=dtype), rand(2, 3, 7, 8, dtype=dtype), rand(2, 3, 7, 8, dtype=dtype)
    masks = {"bool": torch.rand(2, 1, 5, 7) > 0.3, "float": rand(2, 3, 5, 7, dtype=dtype)}
    if mask in masks:
        masks["bool"][..., 0] = True
        run(with_grad(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, masks[mask])), q, k, v, rtol=2e-4, atol=2e-5) \
            if mask == "none" else _attention_with_mask(q, k, v, masks[mask])  # fmt: skip
    else:
        run(with_grad(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=mask == "causal")), q, k, v, rtol=2e-4, atol=2e-5)


def _attention_with_mask(q, k, v, mask):
    def fn(q, k, v, mask):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = F.scaled_dot_product_attention(*leaves, mask)
        return (out.detach(), *torch.autograd.grad(out, leaves, out.detach().sin()))

    run(fn, q, k, v, mask, rtol=2e-4, atol=2e-5)


# ---- normalisation ----


@pytest.mark.parametrize("affine", ["none", "weight", "both"])
def test_layer_norm(affine):
    x, w, b = rand(3, 4, 5, 6), rand(5, 6), rand(5, 6)
    fns = {
        "none": (lambda x: F.layer_norm(x, (5, 6)), (x,)), "weight": (lambda x, w: F.layer_norm(x, (5, 6), w), (x, w)),
        "both": (lambda x, w, b: F.layer_norm(x, (5, 6), w, b, 1e-3), (x, w, b)),
    }  # fmt: skip
    fn, args = fns[affine]
    run(with_grad(fn), *args)


def test_group_and_instance_norm():
    run(with_grad(lambda x, w, b: F.group_norm(x, 3, w, b)), rand(2, 6, 3, 4), rand(6), rand(6))
    run(with_grad(lambda x: F.group_norm(x, 2)), rand(2, 6, 5))
    run(with_grad(lambda x, w, b: F.instance_norm(x, weight=w, bias=b)), rand(2, 3, 4, 5), rand(3), rand(3))


@pytest.mark.parametrize("shape", [(4, 3, 5, 6), (7, 3), (2, 3, 4)])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(shape, training):
    aten = torch.ops.aten

    def fn(x, w, b, mean, var):
        y, m, r, new_mean, new_var = aten._native_batch_norm_legit_functional(x, w, b, mean, var, training, 0.3, 1e-4)
        grads = aten.native_batch_norm_backward(y.sin(), x, w, mean, var, m, r, training, 1e-4, [True] * 3)
        return (y, new_mean, new_var, *grads)

    run(fn, rand(*shape), rand(3), rand(3), rand(3), rand(3, low=0.5))


def test_batch_norm_in_its_other_forms():
    aten = torch.ops.aten
    x, w, mean, var = rand(4, 3, 5), rand(3), rand(3), rand(3, low=0.5)
    run(lambda *a: aten._native_batch_norm_legit_no_training(*a, 0.1, 1e-5)[0], x, w, w, mean, var)
    run(lambda x, w: aten._native_batch_norm_legit.no_stats(x, w, None, True, 0.1, 1e-5), x, w)
    run(lambda x: aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, 1e-5), x)


def test_rms_norm():
    run(with_grad(lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w), rand(3, 4, 6), rand(6))
    run(with_grad(lambda x, w: F.rms_norm(x, (6,), w, 1e-6)), rand(3, 4, 6), rand(6))


# ---- indexing ----


def test_embedding():
    ids = torch.tensor([[1, 4, 4], [0, 2, 1]])
    run(with_grad(lambda w: F.embedding(ids_of(w, ids), w)), rand(7, 5))
    run(with_grad(lambda w, i: F.embedding(i, w, padding_idx=4)), rand(7, 5), ids)


def ids_of(w, ids):
    return ids.clone()


INDEXING = {
    "take": lambda x, i: x[i], "pair": lambda x, i: x[i, i.flip(0)], "split": lambda x, i: x[i, :, i], "mid": lambda x, i: x[:, i],
    "grid": lambda x, i: x[:, i[:, None], i], "negative": lambda x, i: x[i - 3], "index_select": lambda x, i: x.index_select(1, i),
    "index_select0": lambda x, i: x.index_select(0, i), "gather": lambda x, i: x[0].gather(1, i.view(1, 4).expand(3, 4)),
    "take_along": lambda x, i: torch.take_along_dim(x[0], i.view(1, 4), 1),
    "index_add": lambda x, i: x.index_add(1, i, x[:, :1].expand(-1, 4, -1)), "scatter_add": lambda x, i: x[0].scatter_add(1, i.view(1, 4), x[0, :1, :4] * 2),
    "index_put": lambda x, i: torch.index_put(x, (i,), x[0] * 2, accumulate=True), "scatter": lambda x, i: x[0].scatter(0, i[:1].view(1, 1), x[1, :1, :1]),
    "scatter_value": lambda x, i: x[0].scatter(1, i.view(1, 4), 2.0), "masked_put": lambda x, i: x.masked_fill(x > 1, 0.0),
    "index_copy": lambda x, i: x.index_copy(1, i[1:3], x[:, :2] * 3), "index_fill": lambda x, i: x.index_fill(0, i[:2], 3.0),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXING)
def test_indexing(name):
    run(with_grad(INDEXING[name]), rand(4, 3, 4), torch.tensor([2, 0, 1, 2]))


def test_scatter_reduce():
    def fn(x, i, s):
        return [x.scatter_reduce(0, i, s, r) for r in ("sum", "prod", "amax", "amin")]

    run(fn, rand(3, 5), torch.tensor([[0, 1, 2, 0, 0], [2, 2, 1, 0, 1]]), rand(2, 5))


def test_boolean_mask_assignment():
    def fn(x):
        y = x.clone()
        y[x > 0] = 0.0
        return y

    run(fn, rand(4, 5))


def test_pooling():
    run(with_grad(lambda x: F.max_pool2d(x, 2)), rand(2, 3, 6, 7))
    run(with_grad(lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True)), rand(2, 3, 8, 7))
    run(with_grad(lambda x: F.max_pool1d(x, 2)), rand(2, 3, 8))
    run(with_grad(lambda x: F.adaptive_avg_pool2d(x, 1)), rand(2, 3, 6, 4))
    run(with_grad(lambda x: F.adaptive_avg_pool2d(x, (3, 2))), rand(2, 3, 6, 4))
    run(with_grad(lambda x: F.avg_pool2d(x, 2)), rand(2, 3, 6, 4), left=("avg_pool2d", "avg_pool2d_backward"))


# ---- losses ----

LOSSES = {
    "mse": F.mse_loss, "l1": F.l1_loss, "smooth_l1": F.smooth_l1_loss, "huber": F.huber_loss, "smooth_beta": lambda x, y, reduction: F.smooth_l1_loss(x, y, beta=0.3, reduction=reduction),
    "bce": lambda x, y, reduction: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=reduction),
    "bce_logits": lambda x, y, reduction: F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction=reduction),
    "bce_pos_weight": lambda x, y, reduction: F.binary_cross_entropy_with_logits(x, y.sigmoid(), y[0].exp(), pos_weight=y[1].exp(), reduction=reduction),
    "soft_margin": lambda x, y, reduction: F.soft_margin_loss(x, y.sign(), reduction=reduction),
    "kl_div": lambda x, y, reduction: F.kl_div(x.log_softmax(1), y.softmax(1), reduction=reduction), "poisson": lambda x, y, reduction: F.poisson_nll_loss(x, y.exp(), reduction=reduction),
    "soft_targets": lambda x, y, reduction: F.cross_entropy(x, y.softmax(1), reduction=reduction, label_smoothing=0.1),
    "cosine_embedding": lambda x, y, reduction: F.cosine_embedding_loss(x, y, torch.ones(x.shape[0], dtype=x.dtype), reduction=reduction),
    "margin_ranking": lambda x, y, reduction: F.margin_ranking_loss(x, y, torch.ones_like(x), 0.2, reduction=reduction),
    "gaussian": lambda x, y, reduction: (0.5 * ((x - y) ** 2 / y.exp() + y)).sum(),
}  # fmt: skip


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, reduction):
    run(with_grad(lambda x, y: LOSSES[name](x, y.detach(), reduction=reduction)), rand(4, 5), rand(4, 5))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_nll(reduction, weighted):
    target = torch.tensor([1, 4, -100, 0])

    def fn(x, w, t):
        return F.nll_loss(x.log_softmax(1), t, w.detach() if weighted else None, reduction=reduction)

    run(with_grad(fn), rand(4, 5), rand(5, low=0.5), target)
    image = torch.randint(0, 5, (4, 2, 3))
    image[0, 0, 0] = -100
    run(with_grad(fn), rand(4, 5, 2, 3), rand(5, low=0.5), image)


def test_nll_ignores_infinite_rows():
    x = rand(3, 5)
    x[1] = math.inf
    run(lambda x, t: F.nll_loss(x, t, reduction="mean"), x, torch.tensor([1, -100, 2]))


# ---- training pieces ----


def test_gradient_scaling():
    def fn(a, b, found, inverse, scale, tracker):
        grads = [a.clone(), b.clone()]
        found, scale, tracker = found.clone(), scale.clone(), tracker.clone()
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)
        torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, 3)
        return (*grads, found, scale, tracker)

    one = torch.ones(())
    f = torch.float32
    for bad in (0.0, math.inf, math.nan):
        for tracker in (0, 2):
            a = rand(3, 5, dtype=f)
            a[1, 2] += bad
            args = (a, rand(7, dtype=f), 0 * one, 0.25 * one, 64 * one, torch.tensor(tracker, dtype=torch.int32))
            run(fn, *args)


def test_clipping_by_norm():
    def fn(a, b):
        norms = torch._foreach_norm([a, b])
        total = torch.linalg.vector_norm(torch.stack(norms))
        scale = torch.clamp(1.0 / (total + 1e-6), max=1.0)
        return a * scale, b * scale, total

    module = run(fn, rand(3, 5, dtype=torch.float32), rand(7, dtype=torch.float32))
    assert "nova.foreach_norm" in str(module)


def test_recurrent_cells():
    lstm, gru = nn.LSTMCell(5, 6).double(), nn.GRUCell(5, 6).double()

    def fn(x, h, c, *weights):
        p = [w.detach().requires_grad_() for w in weights]
        h1, c1 = torch.lstm_cell(x, (h, c), *p[:4])
        h2 = torch.gru_cell(h1[:, :5], h1, *p[4:])
        loss = (h2 * c1).sum()
        return (loss.detach(), *torch.autograd.grad(loss, p))

    weights = [p.detach() for p in (*lstm.parameters(), *gru.parameters())]
    run(fn, rand(3, 5), rand(3, 6), rand(3, 6), *weights)


# ---- what stays with PyTorch ----


def test_ops_left_to_pytorch_keep_their_arguments():
    def fn(x):
        values, indices = torch.topk(x, 2, dim=1, largest=False)
        ordered = torch.sort(x, dim=0, descending=True)
        return values, indices, ordered[0], x.median(), torch.cummax(x, 1)[0]

    run(fn, rand(4, 5), left=("topk", "sort", "median", "cummax"))


def test_complex_values_are_left_to_pytorch():
    def fn(x):
        spectrum = torch.fft.fft(x)
        return (spectrum * spectrum.conj()).real, torch.view_as_real(spectrum * 2)

    captured = level0.trace(fn, rand(3, 8))
    module = emit_step(captured)
    assert module.operation.verify()
    x = rand(3, 8)
    compare(interpret(module, [x]), fn(x))


def test_dynamic_results_are_marked():
    captured = level0.trace(lambda x: x * 2, rand(3, 4))
    node = next(n for n in captured.graph.nodes if n.op == "call_function")
    node.meta["dynamic"] = True
    text = str(emit_step(captured))
    assert 'op = "aten.mul.Tensor"' in text and "nova.dynamic" in text


def test_wrong_output_type_is_a_compiler_error():
    from nova.errors import CompileError

    captured = level0.trace(lambda x: x * 2, rand(3, 4))
    spec = captured.signature.outputs[0]
    captured.signature.outputs[0] = type(spec)("user", TensorType((4, 3), "f64"))
    with pytest.raises(CompileError, match=r"output mul is f64\[3,4\], the signature says f64\[4,3\]"):
        emit_step(captured)


def test_locations_name_line_and_module():
    from nova.errors import SourceLine

    captured = level0.trace(lambda x: x * 2, rand(3, 4))
    node = next(n for n in captured.graph.nodes if n.op == "call_function")
    node.meta["src"] = SourceLine("train.py", 17, "step", "h.3.attn")
    module = emit_step(captured)
    with mlir.context():
        text = module.operation.get_asm(enable_debug_info=True, pretty_debug_info=True)
    assert 'nova.mul"(%arg0, %0) : (tensor<3x4xf64>, tensor<f64>) -> tensor<3x4xf64> "h.3.attn"(#loc1)' in text
    assert "#loc1 = train.py:17:0" in text


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(SEED)


