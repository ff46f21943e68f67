"""Levels 1 and 2 mean the same: a step interpreted before fusion and after it, op by op, agrees in float64.

No code is generated: `nova.fusion.interpret` runs the structured ops of each kernel. Shapes are ragged. Exact dtypes
(integers, booleans) must be equal; bf16 is compared at its own precision in `test_low_precision`.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nova import mlir
from nova.dialect import reference
from nova.dialect.emit import emit_step
from nova.fusion import decisions, dispatch, interpret, loss_head, outline
from nova.graph import simplify
from tests import level0

TOLERANCE = 1e-7  # constants of f32 ops are rounded to f32, also where the rest is computed in f64


def rand(*shape, dtype=torch.float32, low=-2.0, high=2.0):
    return (torch.rand(*shape, dtype=torch.float64) * (high - low) + low).to(dtype)


def module_of(function, *tensors):
    return simplify.run(emit_step(level0.trace(function, *tensors)))


def outlined(module):
    with mlir.context(), mlir.ir.Location.unknown():
        result = outline.run(dispatch.run(module))
        assert result.operation.verify()
        return result


def check(function, *tensors, kernels=None, wide=True):
    """Runs `function` at levels 1 and 2. `kernels`: how many distinct ones there may be at most."""
    torch.manual_seed(0)
    module = module_of(function, *tensors)
    check_module(module, tensors, kernels, wide)


def check_module(module, tensors, kernels=None, wide=True):
    with mlir.context(), mlir.ir.Location.unknown():
        expected = reference.interpret(module, tensors, "f64" if wide else "declared")
        step = outlined(module)
        if kernels is not None:
            assert len(outline.kernels(step)) <= kernels, [k.name for k in outline.kernels(step)]
        inputs = [t.double() if wide and t.is_floating_point() else t for t in tensors]
        actual = interpret.run_step(step, inputs, wide)
    for position, (a, b) in enumerate(zip(actual, expected, strict=True)):
        a = a.reshape(b.shape)
        if b.is_floating_point():
            torch.testing.assert_close(
                a, b, rtol=TOLERANCE if wide else 2e-2, atol=TOLERANCE if wide else 2e-2, equal_nan=True
            )
        else:
            assert torch.equal(a.to(b.dtype), b), f"output {position}: {a} {b}"
    return step


def with_grad(function):
    def both(*tensors):
        leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in tensors]
        out = function(*leaves)
        weight = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).add(1).mul(0.1).sin()
        grads = torch.autograd.grad(out, [t for t in leaves if t.requires_grad], weight, allow_unused=True)
        return (out.detach(), *(g for g in grads if g is not None))

    return both


SPECIAL = torch.tensor(
    [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.5, 1e-30, 20.0, -20.0, 90.0, -90.0, math.inf, -math.inf, math.nan]
)
UNARY = [
    torch.neg, torch.abs, torch.sign, torch.exp, torch.exp2, torch.expm1, torch.log, torch.log2, torch.log10, torch.log1p,
    torch.sqrt, torch.rsqrt, torch.reciprocal, torch.sin, torch.cos, torch.tan, torch.asin, torch.acos, torch.atan, torch.sinh,
    torch.cosh, torch.tanh, torch.asinh, torch.acosh, torch.atanh, torch.sigmoid, F.logsigmoid, torch.erf, torch.erfc,
    torch.floor, torch.ceil, torch.round, torch.trunc, torch.relu, F.silu, F.gelu, F.softplus, F.elu, F.leaky_relu, F.hardtanh,
    torch.isnan, torch.isinf, torch.isfinite, lambda x: F.gelu(x, approximate="tanh"), F.selu, lambda x: x**3, lambda x: x**0.5,
    lambda x: x.to(torch.bfloat16), lambda x: x > 0.5, lambda x: torch.where(x > 0, x, 2 * x), lambda x: x.clamp(-1, 2),
]  # fmt: skip


@pytest.mark.parametrize("function", UNARY, ids=lambda f: getattr(f, "__name__", "f"))
def test_unary(function):
    check(lambda x: function(x), SPECIAL)  # noqa: PLW0108 - some of them cannot be traced as they are


@pytest.mark.parametrize("function", [
    F.elu, F.celu, F.hardswish, F.hardsigmoid, F.hardtanh, F.relu6, F.leaky_relu, F.softplus, F.mish, F.silu,
    lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), reduction="none"),
    lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none"),
], ids=lambda f: getattr(f, "__name__", "loss"))  # fmt: skip
def test_gradient_at_nan(function):
    """A NaN that eager hands back, Nova does too. (Where a loop's tail differs from it, the vectorised loop's answer.)"""
    check(with_grad(function), torch.full((64,), math.nan))


BINARY = [
    torch.add, torch.sub, torch.mul, torch.div, torch.pow, torch.atan2, torch.maximum, torch.minimum, torch.eq, torch.ne,
    torch.lt, torch.le, torch.gt, torch.ge, torch.hypot, torch.copysign, torch.fmod, torch.remainder, torch.floor_divide,
    lambda a, b: torch.div(a, b, rounding_mode="trunc"), lambda a, b: torch.lerp(a, b, 0.3),
]  # fmt: skip


@pytest.mark.parametrize("function", BINARY, ids=lambda f: getattr(f, "__name__", "f"))
def test_binary(function):
    values = SPECIAL[torch.isfinite(SPECIAL)]
    check(function, values[:, None], values[None, :])


INTEGER = [
    torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, torch.eq, torch.lt, torch.bitwise_and, torch.bitwise_or,
    torch.bitwise_xor, torch.fmod, torch.remainder, torch.floor_divide, lambda a, b: torch.div(a, b, rounding_mode="trunc"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("function", INTEGER, ids=lambda f: getattr(f, "__name__", "f"))
def test_integer(function, dtype):
    a = torch.tensor([7, -7, 100, -128, 0, 5, 3], dtype=torch.int64).to(dtype)
    b = torch.tensor([2, 3, -7, 5, 1, 127, 100], dtype=torch.int64).to(dtype)
    b = torch.where(b == 0, torch.ones_like(b), b)
    check(function, a[:, None], b[None, :])


def test_shifts_past_the_width():
    a = torch.tensor([1, -5, 1 << 30], dtype=torch.int32)
    b = torch.tensor([0, 3, 31], dtype=torch.int32)
    check(lambda a, b: (a << b, a >> b), a[:, None], b[None, :])


@pytest.mark.parametrize(
    "source", [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool], ids=str
)
@pytest.mark.parametrize(
    "target", [torch.float32, torch.float64, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool], ids=str
)
def test_casts(source, target):
    check(lambda x: x.to(target), torch.tensor([0.0, 1.0, 2.7, 100.4, 3.2]).to(source))


def test_integer_division_by_zero_raises():
    module = module_of(torch.floor_divide, torch.tensor([1, 2]), torch.tensor([1, 1]))
    with mlir.context(), mlir.ir.Location.unknown(), pytest.raises(interpret.Raised, match="ZeroDivisionError"):
        interpret.run_step(outlined(module), [torch.tensor([1, 2]), torch.tensor([1, 0])])


ROWS = [
    lambda x: x.softmax(-1), lambda x: x.log_softmax(-1), lambda x: x.softmax(1), lambda x: x.softmax(0),
    lambda x: F.layer_norm(x, x.shape[-1:]), lambda x: F.layer_norm(x, x.shape[-2:]), lambda x: x.sum(-1), lambda x: x.mean((0, 1)),
    lambda x: x.sum(), lambda x: x.amax(1), lambda x: x.amin((0, 2), keepdim=True), lambda x: x.prod(-1), lambda x: x.var(-1),
    lambda x: x.std(0), lambda x: x.norm(), lambda x: (x * x).sum((1, 2)), lambda x: x.logsumexp(-1), lambda x: x - x.mean(1, keepdim=True),
    lambda x: F.gelu(x).softmax(-1) * 2, lambda x: x.cumsum(1), lambda x: x.sum((0, 1)) / x.sum(), lambda x: F.normalize(x, dim=-1),
]  # fmt: skip


@pytest.mark.parametrize("function", ROWS, ids=range(len(ROWS)))
@pytest.mark.parametrize("shape", [(3, 17, 24), (1, 5, 1), (12, 2, 9)], ids=str)
def test_rows(function, shape):
    check(with_grad(function), rand(*shape))


def test_reductions_of_nothing():
    check(lambda x: (x.sum(0), x.sum(1), x.prod(0)), torch.empty(0, 3))


def test_arg_extremes():
    x = rand(5, 7)
    x[2, 3] = math.nan
    x[1] = 0.25
    check(lambda x: (x.argmax(1), x.argmin(0), x.argmax(), (x > 0).any(1), (x > 0).all(), x.isnan().sum()), x)


def norm(x, w, b):
    return F.layer_norm(x, (24,), w, b)


def rms(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def test_layer_norm_is_one_kernel_each_way():
    check(norm, rand(3, 17, 24), rand(24), rand(24), kernels=1)
    check(with_grad(norm), rand(3, 17, 24), rand(24), rand(24), kernels=2)


def test_rms_norm_is_one_kernel_forward():
    check(rms, rand(3, 17, 24), rand(24), kernels=1)
    check(with_grad(rms), rand(3, 17, 24), rand(24))


@pytest.mark.parametrize("shape", [(4, 3, 6, 5), (9, 3), (2, 8, 4)], ids=str)
def test_batch_norm(shape):
    check(
        with_grad(lambda x, w, b: F.batch_norm(x, None, None, w, b, True)), rand(*shape), rand(shape[1]), rand(shape[1])
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"ignore_index": 2}], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy(reduction, options, weighted):
    target = torch.tensor([0, 2, 6, 3, 2, 1, 1, 5, 4])
    weight = rand(7, low=0.5, high=1.5)

    def loss(x):
        return F.cross_entropy(x, target, weight if weighted else None, reduction=reduction, **options)

    def both(x, target, weight):
        x = x.detach().requires_grad_()
        out = F.cross_entropy(x, target, weight if weighted else None, reduction=reduction, **options)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        return out.detach(), gradient

    check(both, rand(9, 7), target, weight)


HEAD = """
func.func @step(%x: tensor<33x16xf32>, %w: tensor<150x16xf32>, %b: tensor<150xf32>, %t: tensor<33xi64>)
    -> (tensor<f32>, tensor<33xf32>, tensor<33x150xf32>, tensor<f32>) {
  %l = "nova.linear"(%x, %w, %b) : (tensor<33x16xf32>, tensor<150x16xf32>, tensor<150xf32>) -> tensor<33x150xf32>
  %loss, %lse = "nova.sce"(%l, %t) {has_weight = false, ignore_index = -100 : i64, label_smoothing = 0.0 : f64,
    reduction = 1 : i64} : (tensor<33x150xf32>, tensor<33xi64>) -> (tensor<f32>, tensor<33xf32>)
  %g = "nova.sce_backward"(%loss, %l, %t, %lse) {has_weight = false, ignore_index = -100 : i64, label_smoothing = 0.0 : f64,
    reduction = 1 : i64} : (tensor<f32>, tensor<33x150xf32>, tensor<33xi64>, tensor<33xf32>) -> tensor<33x150xf32>
  %l2 = "nova.linear"(%x, %w) : (tensor<33x16xf32>, tensor<150x16xf32>) -> tensor<33x150xf32>
  %loss2, %lse2 = "nova.sce"(%l2, %t) {has_weight = false, ignore_index = 2 : i64, label_smoothing = 0.0 : f64,
    reduction = 2 : i64} : (tensor<33x150xf32>, tensor<33xi64>) -> (tensor<f32>, tensor<33xf32>)
  return %loss, %lse, %g, %loss2 : tensor<f32>, tensor<33xf32>, tensor<33x150xf32>, tensor<f32>
}
"""


@pytest.mark.parametrize("infinite", [False, True])
def test_loss_head_split_into_partials(monkeypatch, infinite):
    monkeypatch.setattr(loss_head, "_refusal", lambda op, root, target, tf32: None)
    monkeypatch.setattr(loss_head, "_tile", lambda root, op, target, tf32: 64)
    bias = rand(150)
    if infinite:  # a whole tile that is masked out
        bias[:64] = -math.inf
    inputs = [rand(33, 16), rand(150, 16), bias, torch.randint(64, 150, (33,))]
    module = mlir.parse(HEAD)
    with mlir.context(), mlir.ir.Location.unknown():
        expected = reference.interpret(module, inputs, "f64")
        step = outlined(loss_head.run(mlir.parse(HEAD)))
        assert sum("sce_merge" in k.name for k in outline.kernels(step)) >= 1
        actual = interpret.run_step(step, [t.double() if t.is_floating_point() else t for t in inputs], wide=True)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.reshape(b.shape), b, rtol=1e-9, atol=1e-9, equal_nan=True)


def heads(x):
    b, t, c = x.shape
    q, k, v = x.split(c // 3, dim=2)
    q, k, v = (z.view(b, t, 2, -1).transpose(1, 2) for z in (q, k, v))
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


MOVEMENT = [
    lambda x: x.transpose(1, 2).reshape(x.shape[0], -1), lambda x: torch.cat((x, x * 2), 1), lambda x: torch.cat((x[:, :3], -x), 1),
    lambda x: F.pad(x, (1, 2, 0, 3)), lambda x: F.pad(x, (-1, 2)), lambda x: x[:, 1:4, ::2] + 1, lambda x: x.flip(1),
    lambda x: torch.stack((x, x + 1), 1), lambda x: x.roll(2, 1), lambda x: x + x.transpose(1, 2) if x.shape[1] == x.shape[2] else x,
    lambda x: x.expand(2, *x.shape).contiguous(), lambda x: x.tril(), lambda x: x.unfold(1, 3, 2).sum(-1), lambda x: x.diagonal(0, 1, 2) * 2,
    lambda x: x[:, :3].softmax(-1), lambda x: torch.cat((x.sum(1, keepdim=True), x), 1), lambda x: x.view(-1)[::3] * 2,
    lambda x: x.repeat(1, 2, 1), lambda x: x.unbind(1)[1] * x.unbind(1)[0], lambda x: torch.cat((x, x, x), 0).sum(0),
]  # fmt: skip


@pytest.mark.parametrize("function", MOVEMENT, ids=range(len(MOVEMENT)))
def test_movement(function):
    check(with_grad(function), rand(4, 6, 6))
    check(with_grad(function), rand(3, 5, 8))


def test_rotary_is_one_kernel():
    check(rotate, rand(2, 3, 5, 8), rand(5, 8), rand(5, 8), kernels=1)
    check(with_grad(rotate), rand(2, 3, 5, 8), rand(5, 8), rand(5, 8))


def test_heads_fold_into_access():
    module = module_of(heads, rand(2, 5, 24))
    step = check_module(module, [rand(2, 5, 24)], kernels=3)
    assert not any(k.name.startswith("copy") for k in outline.kernels(step))


INDEXING = [
    lambda x, i: x[i], lambda x, i: x[:, i], lambda x, i: x[i, :, i], lambda x, i: F.embedding(i, x.reshape(x.shape[0], -1)),
    lambda x, i: x.index_select(1, i), lambda x, i: x.gather(1, i[None, :, None].expand(2, 3, 4)), lambda x, i: x[i[:, None], i],
    lambda x, i: x.index_add(0, i, x[:3]), lambda x, i: x.scatter(1, i[None, :, None].expand(2, 3, 4), 1.5),
]  # fmt: skip


@pytest.mark.parametrize("function", INDEXING, ids=range(len(INDEXING)))
def test_indexing(function):
    check(with_grad(function), rand(5, 6, 7), torch.tensor([3, 0, 4]))


def test_index_out_of_range_raises():
    module = module_of(lambda x, i: F.embedding(i, x) * 2, rand(5, 3), torch.tensor([0, 1]))
    with mlir.context(), mlir.ir.Location.unknown(), pytest.raises(interpret.Raised, match="IndexError"):
        interpret.run_step(outlined(module), [rand(5, 3), torch.tensor([0, 5])])


CONVOLUTIONS = [
    dict(stride=1, padding=0), dict(stride=2, padding=1), dict(stride=(2, 3), padding=(0, 2), dilation=(2, 1)), dict(padding=1, groups=2),
]  # fmt: skip


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_convolution(options):
    groups = options.get("groups", 1)
    check(with_grad(lambda x, w: F.conv2d(x, w, **options)), rand(2, 4, 9, 10), rand(6, 4 // groups, 3, 3))


def test_convolutions_of_other_ranks():
    check(with_grad(lambda x, w: F.conv1d(x, w, stride=2, padding=1)), rand(2, 3, 11), rand(5, 3, 4))
    check(with_grad(lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1)), rand(2, 3, 5, 4), rand(3, 4, 3, 3))


@pytest.mark.parametrize(
    "options", [dict(kernel_size=2), dict(kernel_size=3, stride=2, padding=1), dict(kernel_size=3, stride=1)], ids=str
)
def test_max_pool(options):
    check(with_grad(lambda x: F.max_pool2d(x, **options)), rand(2, 3, 8, 9))


def mlp(x, w1, b1, w2, b2, r):
    return r + F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)


def test_bias_activation_and_residual_fold_into_contractions():
    check(mlp, rand(3, 7, 8), rand(20, 8), rand(20), rand(8, 20), rand(8), rand(3, 7, 8), kernels=2)
    check(with_grad(mlp), rand(3, 7, 8), rand(20, 8), rand(20), rand(8, 20), rand(8), rand(3, 7, 8))


def test_matmul_with_itself():
    check(with_grad(lambda x: x @ x.transpose(-1, -2)), rand(3, 5, 4))
    check(with_grad(lambda x: x @ x), rand(5, 5))


def test_low_precision():
    x, w = rand(9, 16, dtype=torch.bfloat16), rand(12, 16, dtype=torch.bfloat16)
    check(with_grad(lambda x, w: F.silu(F.linear(x, w)).softmax(-1)), x, w, wide=False)
    check(with_grad(lambda x: F.layer_norm(x, (16,))), x, wide=False)


@pytest.mark.parametrize("shape", [(0, 8), (1, 8), (1, 1)], ids=str)
def test_degenerate_batches(shape):
    w, b = rand(6, shape[1]), rand(6)
    check(with_grad(lambda x: F.gelu(F.linear(x, w, b)).softmax(-1).sum(0)), rand(*shape))


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)),
    "adamw": (torch.optim.AdamW, dict(lr=0.1)),
    "rmsprop": (torch.optim.RMSprop, dict(lr=0.1, momentum=0.5, centered=True)),
    "adagrad": (torch.optim.Adagrad, dict(lr=0.1, lr_decay=0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_is_one_kernel(name):
    from nova.capture.record import record

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    kind, options = OPTIMIZERS[name]
    optimizer = kind(model.parameters(), **options)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step(torch.randn(4, 5))
    captured = record(step, (torch.randn(4, 5),), {}).step
    module = simplify.run(emit_step(captured))
    inputs = []
    for spec in captured.signature.inputs:
        value = torch.rand(spec.type.shape, dtype=torch.float64).add(0.1)
        if spec.role == "scalar":
            value = value.mul(0.5)
        inputs.append(
            value.to(
                {"f32": torch.float32, "f64": torch.float64, "i64": torch.int64, "bool": torch.bool}[spec.type.dtype]
            )
        )
    step_module = check_module(module, inputs)
    updates = [k for k in outline.kernels(step_module) if k.kind == "multi_tensor" and "norm" not in k.name]
    assert [(k.calls) for k in updates] == [1]


def test_report_names_ops_and_reasons():
    with mlir.context(), mlir.ir.Location.unknown(), decisions.collecting() as report:
        outline.run(dispatch.run(module_of(with_grad(norm), rand(3, 17, 24), rand(24), rand(24))))
    kinds = {d.kind for d in report}
    assert kinds <= {"fused", "refused", "recomputed", "materialised", "batched"} and report.decisions()


def test_equal_layers_share_kernels():
    def deep(x, w, b, count):
        for _ in range(count):
            x = F.gelu(F.linear(F.layer_norm(x, (8,)), w, b)) + x
        return x

    w, b = rand(8, 8), rand(8)
    few = outlined(module_of(lambda x, w, b: deep(x, w, b, 3), rand(5, 8), w, b))
    many = outlined(module_of(lambda x, w, b: deep(x, w, b, 12), rand(5, 8), w, b))
    assert [k.text for k in outline.kernels(few)] == [k.text for k in outline.kernels(many)]
    assert sum(k.calls for k in outline.kernels(many)) == 24
