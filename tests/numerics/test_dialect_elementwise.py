"""The reference meaning of elementwise ops, against NumPy and autograd, in float64 with broadcasting."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.one_op import f32, f64, i64, rand, run


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# ---- elementwise ----

erf = np.vectorize(math.erf)
UNARY = {
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "log_sigmoid": lambda x: -np.log1p(np.exp(-x)),
    "erf": erf,
    "erfc": lambda x: 1 - erf(x),
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.round,
    "trunc": np.trunc,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    x = torch.cat([rand(3, 5), torch.tensor([[0.0, -0.0, 0.5, -2.5, 1.5]], dtype=f64)])
    if name not in ("erf", "erfc"):
        x = torch.cat([x, torch.tensor([[math.nan, math.inf, -math.inf, 1e-300, 3.5]], dtype=f64)])
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(np.asarray(UNARY[name](x.numpy())))
    if name in ("silu", "log_sigmoid"):
        expected[x == -math.inf] = -0.0 if name == "silu" else -math.inf
        expected = torch.where(torch.isinf(x), F.silu(x) if name == "silu" else F.logsigmoid(x), expected)
    if name == "sign":
        expected = expected.nan_to_num(0.0)
    run(name, [x], expected)


def test_probability():
    run("probability", [torch.tensor([0.0, 0.25, 1.0], dtype=f64)], torch.tensor([0.0, 0.25, 1.0], dtype=f64))


PARAMETRIC = {
    "gelu": (lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))), {"approximate": "none"}),
    "softplus": (lambda x: torch.log1p(torch.exp(2 * x)) / 2, {"beta": 2.0, "threshold": 30.0}),
    "elu": (
        lambda x: 1.5 * torch.where(x > 0, x, 0.3 * (torch.exp(2 * x) - 1)),
        {"alpha": 0.3, "scale": 1.5, "input_scale": 2.0},
    ),
    "leaky_relu": (lambda x: torch.maximum(x, 0.2 * x), {"negative_slope": 0.2}),
    "hardtanh": (
        lambda x: torch.minimum(torch.maximum(x, torch.tensor(-1.0)), torch.tensor(0.5)),
        {"lo": -1.0, "hi": 0.5},
    ),
}


@pytest.mark.parametrize("name", PARAMETRIC)
def test_parametric_and_its_backward(name):
    fn, attrs = PARAMETRIC[name]
    x = rand(3, 5).requires_grad_()
    y = fn(x)
    run(name, [x.detach()], y.detach(), **attrs)
    dy = rand(3, 5)
    extra = {"is_result": False} if name == "elu" else {}
    run(f"{name}_backward", [dy, x.detach()], torch.autograd.grad(y, x, dy)[0], **attrs, **extra)
    if name == "elu":
        run("elu_backward", [dy, y.detach()], torch.autograd.grad(fn(x), x, dy)[0], **attrs, is_result=True)


def test_gelu_tanh():
    x, dy = rand(3, 5).requires_grad_(), rand(3, 5)
    y = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    run("gelu", [x.detach()], y.detach(), approximate="tanh")
    run("gelu_backward", [dy, x.detach()], torch.autograd.grad(y, x, dy)[0], approximate="tanh")


def test_softplus_above_the_threshold_is_linear():
    run(
        "softplus",
        [torch.tensor([25.0, 5.0], dtype=f64)],
        torch.tensor([25.0, math.log1p(math.exp(5.0))], dtype=f64),
        beta=1.0,
        threshold=20.0,
    )


@pytest.mark.parametrize(
    "name,fn,saved",
    [
        ("silu", F.silu, "x"),
        ("tanh", torch.tanh, "y"),
        ("sigmoid", torch.sigmoid, "y"),
        ("log_sigmoid", F.logsigmoid, "x"),
    ],
)
def test_backward_peers(name, fn, saved):
    x, dy = rand(3, 5).requires_grad_(), rand(3, 5)
    y = fn(x)
    run(f"{name}_backward", [dy, (x if saved == "x" else y).detach()], torch.autograd.grad(y, x, dy)[0])


def test_relu_backward():
    x, dy = torch.tensor([-1.0, 0.0, 0.2, 0.3, math.nan], dtype=f64), torch.arange(1.0, 6.0, dtype=f64)
    run("relu_backward", [dy, x], torch.tensor([0.0, 0, 0, 4, 5], dtype=f64), threshold=0.2)


BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "floordiv": np.floor_divide,
    "rem": np.mod,
    "fmod": np.fmod,
    "truncdiv": lambda a, b: np.trunc(a / b),
    "pow": lambda a, b: np.abs(a) ** b,
    "atan2": np.arctan2,
    "hypot": np.hypot,
    "copysign": np.copysign,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@pytest.mark.parametrize("name", BINARY)
def test_binary_broadcasts(name):
    a, b = rand(3, 1, 5), rand(4, 1)
    a[0, 0, 0] = b[1, 0] = 0.75
    if name not in ("floordiv", "rem", "fmod"):
        a[1, 0, 1], a[2, 0, 2] = math.nan, math.inf
    if name == "pow":
        a = a.abs()
    with np.errstate(all="ignore"):
        run(name, [a, b], torch.from_numpy(BINARY[name](a.numpy(), b.numpy())))


@pytest.mark.parametrize(
    "name",
    [
        "add",
        "sub",
        "mul",
        "floordiv",
        "rem",
        "truncdiv",
        "fmod",
        "maximum",
        "minimum",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "shl",
        "shr",
        "pow",
    ],
)
def test_integers(name):
    functions = {
        **BINARY,
        "bitwise_and": np.bitwise_and,
        "bitwise_or": np.bitwise_or,
        "bitwise_xor": np.bitwise_xor,
        "shl": np.left_shift,
        "shr": np.right_shift,
        "truncdiv": lambda a, b: np.trunc(a / b).astype(np.int64),
        "pow": np.power,
    }
    a, b = torch.arange(-7, 8), torch.tensor([3])
    run(name, [a, b], torch.from_numpy(functions[name](a.numpy(), b.numpy())))


def test_bits_and_predicates():
    flags, other = torch.tensor([True, False, True]), torch.tensor([True, True, False])
    for name, fn in {"logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor}.items():
        run(name, [flags, other], torch.from_numpy(fn(flags.numpy(), other.numpy())))
    run("logical_not", [flags], ~flags)
    run("bitwise_not", [torch.arange(-2, 3)], -torch.arange(-2, 3) - 1)
    x = torch.tensor([1.0, math.nan, math.inf, -math.inf], dtype=f64)
    run("isnan", [x], torch.tensor([False, True, False, False]))
    run("isinf", [x], torch.tensor([False, False, True, True]))
    run("isfinite", [x], torch.tensor([True, False, False, False]))


@pytest.mark.parametrize(
    "source,target",
    [
        (f64, f32),
        (f32, torch.bfloat16),
        (f64, i64),
        (i64, f32),
        (f64, torch.bool),
        (torch.bool, f64),
        (torch.uint8, f32),
        (i64, torch.int32),
        (torch.bfloat16, f32),
        (f32, torch.float16),
    ],
)
def test_cast(source, target):
    x = (
        torch.tensor([-1.7, -0.0, 0.3, 2.5, 100.1], dtype=f64).abs_().to(source)
        if source == torch.uint8
        else torch.tensor([-1.7, -0.0, 0.3, 2.5, 100.1], dtype=f64).to(source)
    )
    run("cast", [x], x != 0 if target == torch.bool else x.to(target))


def test_selection():
    a, b, w = rand(3, 5), rand(5), rand(3, 1)
    run("where", [a > 0, a, b], torch.from_numpy(np.where(a > 0, a, b)))
    run("clamp", [a, b - 1, b + 1], torch.from_numpy(np.clip(a.numpy(), b.numpy() - 1, b.numpy() + 1)))
    run("lerp", [a, b, w], a + w * (b - a))


def test_low_precision_rounds_once():
    x = rand(64).to(torch.bfloat16)
    run("gelu", [x], F.gelu(x.float()).to(torch.bfloat16), approximate="none")
    run("reduce_sum", [x], x.float().sum().to(torch.bfloat16), dims=[0], keepdim=False)
