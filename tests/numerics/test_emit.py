"""Level 0 to level 1, elementwise ops, views and reductions: emitted modules agree with eager PyTorch.

Each case is a function, forward and backward, on ragged shapes. `left` names the ops that may stay with PyTorch; none
may otherwise.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.emitted import f64, rand, run, with_grad


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# ---- elementwise ----

UNARY = {
    "neg": torch.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "atan": torch.atan,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "tanh": torch.tanh,
    "asinh": torch.asinh,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "softplus_beta": lambda x: F.softplus(x, 2.0, 3.0),
    "elu": F.elu,
    "elu_alpha": lambda x: F.elu(x, 0.3),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.7),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "hardsigmoid": lambda x: F.hardsigmoid(2 * x),
    "hardswish": lambda x: F.hardswish(2 * x),
    "mish": F.mish,
    "logsigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
    "glu": lambda x: F.glu(x[:, :4], 1),
    "square": torch.square,
    "frac": torch.frac,
    "sign": torch.sign,
    "pow0": lambda x: x**0 * x,
    "pow1": lambda x: x**1,
    "pow2": lambda x: x**2,
    "pow3": lambda x: x**3,
    "powm2": lambda x: x**-2,
    "pow25": lambda x: x.abs() ** 2.5,
    "rpow": lambda x: 2.0**x,
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "clamp_max": lambda x: x.clamp(max=0.5),
    "rsub": lambda x: 1 - x,
    "addalpha": lambda x: torch.add(x, x * x, alpha=3),
    "div": lambda x: x / 3 + 1 / (x + 5),
    "remainder": lambda x: x % 0.7,
    "fmod": lambda x: torch.fmod(x, 0.7),
    "masked_fill": lambda x: x.masked_fill(x > 0, 9.0),
    "where": lambda x: torch.where(x > 0, x, 2.0),
    "nan_to_num": lambda x: torch.nan_to_num(x / (x.detach() > 0)),
    "lerp": lambda x: torch.lerp(x, x * x, 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=2.0),
    "addcdiv": lambda x: torch.addcdiv(x, x, x * x + 1, value=-0.5),
    "detach": lambda x: x * x.detach(),
}
POSITIVE = {
    "log": torch.log,
    "log2": torch.log2,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "acosh": lambda x: torch.acosh(x + 1),
    "pow05": lambda x: x**0.5,
    "powm05": lambda x: x**-0.5,
    "powm1": lambda x: x**-1,
    "xlogy": lambda x: torch.xlogy(x, x),
    "atanh": lambda x: torch.atanh(x / 5),
    "asin": lambda x: torch.asin(x / 5),
    "acos": lambda x: torch.acos(x / 5),
}


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    loose = {"rtol": 1e-6, "atol": 1e-7} if name == "hardsigmoid" else {}  # PyTorch's 1/6 is a float32
    run(with_grad(UNARY[name]), rand(3, 5), **loose)


@pytest.mark.parametrize("name", POSITIVE)
def test_positive(name):
    run(with_grad(POSITIVE[name]), rand(3, 5, low=0.1, high=3.0))


BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "pow": lambda a, b: a.abs() ** b,
    "where": lambda a, b: torch.where(a > b, a, b),
    "lerp": lambda a, b: torch.lerp(a, b, b),
    "copysign": torch.copysign,
    "fmax": torch.fmax,
    "xlogy": lambda a, b: torch.xlogy(a, b.abs()),
    "clamp": lambda a, b: torch.clamp(a, b, b + 1),
    "prelu": lambda a, b: F.prelu(a, b[:, 0]),
}


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
        return (
            a == b,
            a != b,
            a <= b,
            a > b,
            small & large,
            small | large,
            small ^ large,
            ~small,
            torch.logical_not(a),
            torch.logical_and(a, small),
            a.isnan(),
            a.isinf(),
            a.isfinite(),
            small + large,
            small * large,
        )

    a = rand(3, 5)
    a[0, 0], a[1, 1], a[2, 2] = math.nan, math.inf, 0.0
    run(fn, a, rand(5))


def test_integers():
    def fn(a, b):
        return (
            a + b,
            a * 3,
            a // 2,
            a % 3,
            -a,
            a.abs(),
            a & b,
            a | b,
            a ^ b,
            ~a,
            a << 1,
            a >> 1,
            a / 2,
            a * 0.5,
            a.float().exp(),
            torch.maximum(a, b),
            a.sign(),
            a**2,
            a.clamp(0, 3),
            a.relu(),
            a.floor(),
        )

    run(fn, torch.arange(-6, 6).view(3, 4), torch.tensor([1, 2, 3, 4]))
    run(lambda a: (a + 1, a // 2, a.float()), torch.arange(7, dtype=torch.uint8))


def test_dtype_promotion():
    def fn(x, h, i, s, flag):
        return (
            x + i,
            h + x,
            h * s,
            i * s,
            x * flag,
            h * 0.1,
            i + 1.5,
            s + i,
            s * h,
            flag + 1,
            x > i,
            h == s,
            i / i,
            x + s,
        )

    s = torch.tensor(1.25, dtype=f64)
    run(
        fn,
        rand(3, dtype=torch.float32),
        rand(3, dtype=torch.bfloat16),
        torch.tensor([1, 2, 3]),
        s,
        torch.tensor([True, False, True]),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_at_every_op(dtype):
    def fn(x, y):
        z = x * 0.1 + y
        return (
            z,
            F.gelu(z),
            z.sum(),
            z.mean(1),
            F.softmax(z, 1),
            z.var(1),
            F.hardswish(z),
            z + 3.0,
            torch.lerp(x, y, 0.3),
            z.float() @ z.float().t(),
            (x + y) - y,
        )

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
    "view": lambda x: x.view(6, 10) * 2,
    "flatten": lambda x: x.flatten(1),
    "permute": lambda x: x.permute(2, 0, 1).contiguous() * 1,
    "transpose": lambda x: x.transpose(-1, -2) * 2,
    "expand": lambda x: x[:1].expand(4, -1, -1) * 2,
    "unsqueeze": lambda x: x.unsqueeze(1) * 1,
    "squeeze": lambda x: x[:1].squeeze(0) * 1,
    "slice": lambda x: x[1:, ::2, -3:],
    "select": lambda x: x[:, 1] + x[0, 1, 2],
    "slice_step": lambda x: x[:, 1::3, ::2],
    "split": lambda x: x.split(2, 2)[1] * x.split([1, 4], 2)[0],
    "chunk": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "unbind": lambda x: torch.stack(x.unbind(1), 0) * 2,
    "cat": lambda x: torch.cat([x, x * 2, x[:, :1]], 1),
    "stack": lambda x: torch.stack([x, x * x], -1),
    "flip": lambda x: x.flip(0, 2) * x,
    "roll": lambda x: x.roll((1, -2), (0, 1)) * x,
    "rollflat": lambda x: x.roll(7) * x,
    "repeat": lambda x: x.repeat(2, 1, 3),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1)),
    "crop": lambda x: F.pad(x, (-1, 2)),
    "padvalue": lambda x: F.pad(x, (1, 1), value=3.0),
    "diagonal": lambda x: x.diagonal(1, 1, 2) * 2,
    "unfold": lambda x: x.unfold(2, 3, 1) * 2,
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(1),
    "trilneg": lambda x: x.tril(-1),
    "movedim": lambda x: x.movedim(0, 2) * 1,
    "as_strided": lambda x: x.as_strided((3, 4), (2, 3), 1) * 2,
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.reshape(1, 4, 3, 5), 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x.reshape(1, 1, 6, 10), 2),
    "meshgrid": lambda x: torch.meshgrid(x[0, 0], x[0, 1], indexing="ij")[1] * 1,
    "outer": lambda x: torch.outer(x[0, 0], x[0, 1]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(name):
    run(with_grad(VIEWS[name]), rand(3, 4, 5))


def test_scatters_into_views():
    def fn(x, u):
        return (
            torch.slice_scatter(x, u, 1, 1, 4),
            torch.select_scatter(x, u[:, 0], 1, -1),
            torch.diagonal_scatter(x, u[:, 0]),
            torch.slice_scatter(x, u[:, :2], 1, 0, 4, 2),
            torch.as_strided_scatter(x, u, (3, 3), (1, 3), 2),
            torch.slice_scatter(x, x * 2, 1),
        )

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
            torch.zeros(2, 3),
            torch.ones_like(x),
            torch.full((2,), 3.5),
            x.new_zeros(4),
            torch.arange(7),
            torch.arange(2, 9, 3),
            torch.arange(0.5, 3.0, 0.7),
            torch.eye(3, 5),
            torch.zeros(0, 3),
            torch.full_like(x, 2),
            torch.tensor(2.5) * x,
        )

    run(fn, rand(3, 5))


# ---- reductions ----

REDUCTIONS = {
    "sum": lambda x: x.sum(),
    "sum1": lambda x: x.sum(1),
    "sum02": lambda x: x.sum((0, 2), keepdim=True),
    "mean": lambda x: x.mean(),
    "mean1": lambda x: x.mean(-1, keepdim=True),
    "var": lambda x: x.var(),
    "var1": lambda x: x.var(1, correction=0),
    "std": lambda x: x.std(2),
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin((0, 1)),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "maxdim": lambda x: x.max(1)[0],
    "mindim": lambda x: x.min(2, keepdim=True).values,
    "prod": lambda x: x.prod(),
    "prod1": lambda x: x.prod(1),
    "norm": lambda x: x.norm(),
    "norm1": lambda x: x.norm(1, 2),
    "norminf": lambda x: torch.linalg.vector_norm(x, math.inf, 1),
    "norm3": lambda x: torch.linalg.vector_norm(x, 3, 2),
    "normalize": lambda x: F.normalize(x, dim=1),
    "logsumexp": lambda x: x.logsumexp(1),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(0),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(2),
    "var_mean": lambda x: torch.var_mean(x, 1)[0] + torch.var_mean(x, 1)[1],
    "cosine": lambda x: F.cosine_similarity(x, x.flip(0), 1),
    "einsum": lambda x: torch.einsum("ijk,ljk->il", x, x * 2),
    "max_all_of_dims": lambda x: x.amax(),
}
SCANS_WITH_SORTS = {"cumprod": ("cummax",)}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name):
    run(with_grad(REDUCTIONS[name]), rand(3, 4, 5))


def test_index_reductions():
    def fn(x, i):
        flags = x > 0
        return (
            x.argmax(1),
            x.argmin(),
            x.argmax(),
            flags.any(),
            flags.all(1),
            flags.any(0, keepdim=True),
            flags.sum(),
            i.sum(1),
            i.prod(),
            torch.count_nonzero(i, 1),
            i.amax(0),
            i.cumsum(1),
            torch.linalg.vector_norm(x, 0),
            *torch.aminmax(x),
            x.sum(()),
            i.float().mean(),
        )

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
