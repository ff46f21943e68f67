"""The list of cases by family; see gpu_cases.py. `cases()` gives all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.gpu_cases import DTYPES, Case

FLOATS = ("f32", "bf16", "f16")
FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {}


def family(function: Callable[[], Iterator[Case]]) -> Callable[[], Iterator[Case]]:
    FAMILIES[function.__name__] = function
    return function


@functools.cache
def cases() -> dict[str, Case]:
    found = {}
    for name, make in FAMILIES.items():
        for case in make():
            assert f"{name}/{case.name}" not in found, f"two cases {name}/{case.name}"
            found[f"{name}/{case.name}"] = case
    return found


def floats(name: str, run: Any, make: Any, dtypes: tuple[str, ...] = FLOATS, **options: Any) -> Iterator[Case]:
    for dtype in dtypes:
        yield Case(f"{name}-{dtype}", run, make, dtype, **options)


# ---- elementwise -----------------------------------------------------------------------------------------------


UNARY = [
    torch.exp, torch.expm1, torch.sin, torch.cos, torch.tanh, torch.erf, torch.sigmoid, torch.abs, torch.neg,
    torch.atan, torch.sinh, torch.cosh, torch.exp2, torch.reciprocal, torch.square, F.relu, F.gelu, F.silu, F.softplus,
    F.elu, F.leaky_relu, F.hardtanh, F.mish, F.logsigmoid, torch.tan, torch.asinh, torch.erfc,
]  # fmt: skip
POSITIVE = [torch.log, torch.log2, torch.log10, torch.log1p, torch.sqrt, torch.rsqrt, lambda x: x**2.7, lambda x: x**-3]


def _several(functions):
    return lambda x: tuple(f(x) for f in functions)


def _chain(x, y, z):
    return F.gelu(x * 2 + y, approximate="tanh") * torch.sigmoid(z) - x


def _integers(a, b, c):
    return (
        a + b, a * b, a - c, a // b, a % b, torch.div(a, b, rounding_mode="trunc"), a & c, a | c, a ^ c, ~a, -a, a.abs(),
        torch.maximum(a, c), torch.minimum(a, c), a == c, a < b, a.clamp(-7, 9), torch.where(a > b, a, c),
        torch.sign(a), a.remainder(7), a.long() + 1, a.float() * 3, a.to(torch.int32) - 1,
    )  # fmt: skip


def _special(x, y):
    return (
        torch.maximum(x, y), torch.minimum(x, y), torch.fmax(x, y), torch.fmin(x, y), x.clamp(-1.5, 2.0), x == y, x < y,
        x >= y, torch.isnan(x), torch.isinf(x), x.isfinite(), torch.sign(x), torch.floor(x), torch.ceil(x),
        torch.round(x), torch.trunc(x), torch.where(x > y, x, y), F.relu(x), x.abs(), -x, torch.copysign(x, y),
        torch.nan_to_num(x, 3.0, 7.0, -7.0), (x != 0) & (y != 0), x.clamp_min(0),
    )  # fmt: skip


def _specials(r):
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.5, -2.5, 0.5, 6e4], device=r.device)
    x, y = torch.meshgrid(values, values, indexing="ij")
    return x.flatten().to(r.dtype), y.flatten().to(r.dtype)


def _casts(x, i):
    out = [x.to(t) for t in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)]
    out += [i.to(t) for t in (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.bool)]
    return (*out, x.bool(), x.to(torch.bfloat16).float(), x.to(torch.float16).float(), (i > 0).float(), (x > 0).long())


@family
def elementwise() -> Iterator[Case]:
    every = (*FLOATS, "f64")
    yield from floats("chain", _chain, lambda r: (r(257, 129), r(129), r(257, 1)), every)
    yield Case("chain-quick", _chain, lambda r: (r(1000, 1025), r(1025), r(1000, 1)), quick=True)
    yield from floats("transposed", lambda x, y: x * y + x, lambda r: (r(65, 130), r(130, 65).t()), every)
    yield from floats(
        "permuted", lambda x, y: (x + y).exp(), lambda r: (r(3, 33, 5, 40), r(5, 40, 3, 33).permute(2, 3, 0, 1))
    )
    for shape in ([], [1], [7], [4097], [3, 0, 5], [2, 1, 3, 1, 5], [100003]):
        name = "x".join(map(str, shape)) or "scalar"
        yield Case(f"shape-{name}", lambda x: x.exp() * 2 - x, lambda r, s=tuple(shape): (r(*s),))
    yield from floats("backward", lambda x, y: F.silu(x) * y + F.gelu(y), lambda r: (r(130, 67), r(130, 67)), grad=True)
    yield from floats(
        "broadcast-backward",
        lambda x, y, z: torch.tanh(x * y + z),
        lambda r: (r(30, 1, 67), r(40, 1), r(67)),
        grad=True,
    )
    for dtype in every:
        yield Case(f"unary-{dtype}", _several(UNARY), lambda r: (r(97, 41),), dtype)
        yield Case(f"positive-{dtype}", _several(POSITIVE), lambda r: (r.positive(97, 41),), dtype)
        yield Case(
            f"binary-{dtype}",
            lambda x, y, p: (x / y, torch.atan2(x, y), p**y, torch.hypot(x, y), x * y - p),
            lambda r: (r(53, 31), r(53, 31) + 3, r.positive(53, 31)),
            dtype,
        )
        yield Case(f"special-{dtype}", _special, _specials, dtype, exact=True)
    for kind in (torch.int64, torch.int32, torch.int16, torch.int8):
        name = str(kind).rpartition(".")[2]
        yield Case(
            f"integers-{name}",
            _integers,
            exact=True,
            make=lambda r, k=kind: (
                r.ints(-50, 50, 37, 19, dtype=k),
                r.ints(1, 9, 37, 19, dtype=k),
                r.ints(0, 6, 19, dtype=k),
            ),
        )
    yield Case(
        "left-to-pytorch",
        lambda x, i: (torch.signbit(x), torch.logaddexp(x, x * 2), (i << 2) + 1, i >> 1),
        lambda r: (r(33, 17), r.ints(0, 99, 33, 17)),
        left=True,
    )
    yield Case("casts", _casts, lambda r: (r(61, 33) * 30, r.ints(-100, 100, 61, 33)), exact=True)
    yield Case(
        "large-arguments",
        _several([torch.sin, torch.cos, torch.tanh, torch.erf, F.softplus, torch.sigmoid]),
        lambda r: (r(4001) * 1000,),
    )
    yield Case(
        "tiny-values",
        _several([torch.exp, torch.expm1, torch.log1p, torch.tanh, torch.sin]),
        lambda r: (r(4001) * 1e-6,),
    )
    yield Case("misaligned", _chain, lambda r: (r(257 * 129 + 1)[1:].view(257, 129), r(130)[1:], r(258, 1)[1:]))
    yield Case(
        "misaligned-bf16", _chain, lambda r: (r(256 * 128 + 3)[3:].view(256, 128), r(129)[1:], r(257, 1)[1:]), "bf16"
    )
    yield Case("strided", lambda x, y: (x * 2 + y, (x - y).exp()), lambda r: (r(130, 90)[::2, 1::3], r(65, 60)[:, ::2]))
    yield Case("expanded", lambda x, y: x * y + 1, lambda r: (r(1, 65).expand(33, 65), r(33, 1).expand(33, 65)))


# ---- reductions ------------------------------------------------------------------------------------------------


WIDTHS = [(5, 1), (37, 33), (64, 768), (3, 1025), (9, 4099), (2, 50257), (1, 200_000)]


def _layer_norm(x, w, b):
    return F.layer_norm(x, x.shape[-1:], w, b)


def _rms_norm(x, w):
    return F.rms_norm(x, x.shape[-1:], w)


@family
def rows() -> Iterator[Case]:
    for n, m in WIDTHS:
        shape = f"{n}x{m}"
        dtypes = (*FLOATS, "f64") if m == 768 else ("f32", "bf16")
        wide = lambda r, n=n, m=m: (r(n, m) * 3,)
        if m > 1:
            yield from floats(
                f"layer-norm-{shape}",
                _layer_norm,
                lambda r, n=n, m=m: (r(n, m), r(m), r(m)),
                dtypes,
                grad=True,
                quick=m == 1025,
            )
        yield from floats(f"rms-norm-{shape}", _rms_norm, lambda r, n=n, m=m: (r(n, m), r(m)), dtypes, grad=True)
        yield from floats(f"softmax-{shape}", lambda x: x.softmax(-1), wide, dtypes, grad=True, quick=m == 50257)
        yield from floats(f"log-softmax-{shape}", lambda x: x.log_softmax(-1), wide, dtypes, grad=True)
        yield Case(
            f"several-{shape}",
            lambda x: (x.sum(-1), x.mean(-1), x.amax(-1), x.argmax(-1), x.argmin(-1), x.logsumexp(-1), x.norm(dim=-1)),
            wide,
        )
        yield Case(
            f"cross-entropy-{shape}", F.cross_entropy, lambda r, n=n, m=m: (r(n, m) * 3, r.ints(0, m, n)), grad=True
        )
    yield Case("long-rows-of-few", lambda x: x.softmax(-1), lambda r: (r(3, 200_001),), grad=True)
    yield Case("softmax-middle", lambda x: (x.softmax(1), x.sum(1), x.amax(1)), lambda r: (r(5, 33, 40),))
    yield Case(
        "norm-of-two-dims",
        lambda x, w, b: F.layer_norm(x, (7, 40), w, b),
        lambda r: (r(33, 7, 40), r(7, 40), r(7, 40)),
        grad=True,
    )
    yield Case(
        "masked-softmax",
        lambda x, m: x.masked_fill(~m, float("-inf")).softmax(-1),
        lambda r: (r(33, 65), r.mask(33, 65)),
    )
    yield Case(
        "variance",
        lambda x: (x.var(-1), x.std(-1, correction=0), x.var((0, 1)), x.prod(-1), (x > 0).any(-1), (x > -9).all(-1)),
        lambda r: (r(21, 9, 45),),
    )
    yield Case(
        "double-softmax",
        lambda x, y: (x.softmax(-1) + y).softmax(-1).sum(-1),
        lambda r: (r(65, 130), r(130)),
        grad=True,
    )
    yield Case("empty-rows", lambda x: (x.sum(-1), x.mean(0), x.sum()), lambda r: (r(4, 0),))


IGNORED = [
    ("plain", {}),
    ("smoothing", {"label_smoothing": 0.1}),
    ("sum", {"reduction": "sum"}),
    ("none", {"reduction": "none"}),
]


@family
def cross_entropy() -> Iterator[Case]:
    def labels(r, n, m):
        y = r.ints(0, m, n)
        return torch.where(r.mask(n, keep=0.3), -100, y)

    for name, options in IGNORED:
        for n, m in ((37, 11), (64, 5003)):
            run = lambda x, y, o=options: F.cross_entropy(x, y, **o)
            yield from floats(f"{name}-{n}x{m}", run, lambda r, n=n, m=m: (r(n, m) * 2, labels(r, n, m)), grad=True)
            lambda x, w, y, o=options: F.cross_entropy(x, y, w.detach(), **o)
            run = lambda x, y, w, o=options: F.cross_entropy(x, y, w, **o)
            yield Case(f"weights-{name}-{n}x{m}", run, lambda r, n=n, m=m: (r(n, m), labels(r, n, m), r.positive(m)))
    yield Case("images", F.cross_entropy, lambda r: (r(3, 7, 9, 11), r.ints(0, 7, 3, 9, 11)), grad=True)
    yield Case("probabilities", F.cross_entropy, lambda r: (r(33, 17), r(33, 17).softmax(-1)), grad=True)
    yield Case(
        "gpt-head",
        lambda x, w, y: F.cross_entropy(F.linear(x, w), y, ignore_index=3),
        lambda r: (r(65, 48), r(1009, 48) * 0.2, r.ints(0, 1009, 65)),
        grad=True,
        quick=True,
    )
    yield Case(
        "gpt-head-bf16",
        lambda x, w, y: F.cross_entropy(F.linear(x, w), y),
        lambda r: (r(65, 48), r(1009, 48) * 0.2, r.ints(0, 1009, 65)),
        "bf16",
        grad=True,
    )
    for name, loss in (("mse", F.mse_loss), ("l1", F.l1_loss), ("huber", F.smooth_l1_loss)):
        yield Case(name, loss, lambda r: (r(33, 17), r(33, 17)), grad=True)
    yield Case(
        "bce",
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid().detach()),
        lambda r: (r(33, 17), r(33, 17)),
    )
    yield Case("nll", lambda x, y: F.nll_loss(x.log_softmax(1), y), lambda r: (r(33, 17), r.ints(0, 17, 33)), grad=True)
    yield Case(
        "kl",
        lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
        lambda r: (r(33, 17), r(33, 17)),
        grad=True,
    )


@family
def columns() -> Iterator[Case]:
    for n, m in ((1, 7), (1000, 77), (70_001, 33), (3, 5000), (4096, 768), (300, 1)):
        for dtype in ("f32", "bf16"):
            yield Case(
                f"sums-{n}x{m}-{dtype}",
                lambda x: (x.sum(0), (x * x).mean(0), x.amax(0)),
                lambda r, n=n, m=m: (r(n, m),),
                dtype,
                quick=m == 768,
            )
    yield Case("sums-f16", lambda x: (x.sum(0), x.amin(0)), lambda r: (r(333, 65),), "f16")
    yield Case("sums-f64", lambda x: (x.sum(0), x.amin(0)), lambda r: (r(333, 65),), "f64")
    yield Case(
        "integers",
        lambda x: (x.sum(0), x.sum(1), x.amax(0), x.argmax(0), x.sum()),
        lambda r: (r.ints(-99, 99, 333, 65),),
        exact=True,
    )
    yield Case("arg", lambda x: (x.argmax(0), x.argmin(0), *x.max(0), *x.min(1)), lambda r: (r(333, 65),))
    yield Case(
        "outer-and-inner", lambda x: (x.sum((0, 2)), x.mean((0, 3)), x.amax((1, 2))), lambda r: (r(9, 17, 11, 33),)
    )
    yield Case("bias-gradient", lambda x, b: F.gelu(x + b), lambda r: (r(1029, 130), r(130)), grad=True)


@family
def whole() -> Iterator[Case]:
    functions = lambda x: (
        x.sum(),
        x.mean(),
        x.amax(),
        x.norm(),
        (x * x).sum().sqrt(),
        x.std() if x.numel() > 1 else x.sum(),
    )
    for shape in ((1,), (9,), (5000,), (1 << 20,), (70, 33), (200, 3, 41)):
        for dtype in ("f32", "bf16") if len(shape) == 1 else ("f32", "f64", "f16"):
            yield Case(f"{'x'.join(map(str, shape))}-{dtype}", functions, lambda r, s=shape: (r(*s) + 0.5,), dtype)
    yield Case(
        "arguments",
        lambda x: (x.argmax(), x.argmin(), x.max(), (x > 2).sum(), (x > 9).any(), x.isfinite().all()),
        lambda r: (r(77, 1003),),
    )
    yield Case("products", lambda x: (x.prod(), x.logsumexp((0, 1))), lambda r: (r.positive(5, 7),))
    yield Case("loss", lambda x, y: (x - y).square().mean(), lambda r: (r(129, 65), r(129, 65)), grad=True)
    # positive and small: the error of a sum that cancels is luck, eager's too
    yield Case("repeated", lambda w: w * w.sum().mul(1.3).sin(), lambda r: (r.positive(40, 51) * 4e-4,), grad=True)


# ---- copies, indices, scans ------------------------------------------------------------------------------------


def _copies(x, y):
    return (
        x.transpose(0, 1).contiguous(), x.permute(2, 0, 1).contiguous(), torch.cat([x, y], 1), torch.cat([y, x, y], 2)
        if x.shape[:2] == y.shape[:2] else torch.cat([y, y], 2), torch.stack([x, x * 2], 1), x[1:, ::2, 3:-2].clone(),
        F.pad(x, (1, 2, 0, 3), value=2.0), x.flip(0, 2), x.roll((1, -2), (0, 2)), x.repeat(2, 1, 3), x.tril(1), x.triu(-1),
        x.unfold(2, 5, 3).clone(), x.reshape(-1), x.diagonal(0, 0, 1).clone(), x[:, None].expand(-1, 3, -1, -1).clone(),
        x.narrow(1, 2, 3) * 1.0, torch.zeros_like(x), torch.ones_like(x).tril(), x.movedim(0, 2).flatten(0, 1),
    )  # fmt: skip


@family
def copies() -> Iterator[Case]:
    for dtype in (*FLOATS, "f64"):
        yield Case(
            f"views-{dtype}", _copies, lambda r: (r(6, 9, 21), r(6, 5, 21)), dtype, exact=True, quick=dtype == "f32"
        )
    for shape in ((64, 128), (100, 130), (1030, 9), (3, 5001)):
        for dtype in ("f32", "bf16"):
            yield Case(
                f"transpose-{shape[0]}x{shape[1]}-{dtype}",
                lambda x: (x.t().contiguous(), x.t() + 1.0),
                lambda r, s=shape: (r(*s),),
                dtype,
                exact=True,
            )
    yield Case(
        "transpose-batched",
        lambda x, y: x.transpose(1, 2) * 1.0 + y,
        lambda r: (r(5, 70, 65), r(5, 65, 70)),
        exact=True,
    )
    yield Case("transpose-bytes", lambda x: (x.t().contiguous(), ~x.t()), lambda r: (r.mask(100, 131),), exact=True)
    yield Case(
        "integers",
        lambda x: (x.t().contiguous(), torch.cat([x, x]), F.pad(x, (1, 1))),
        lambda r: (r.ints(-9, 9, 33, 45),),
        exact=True,
    )
    yield Case(
        "heads", lambda x: x.view(3, 17, 4, 16).transpose(1, 2).contiguous(), lambda r: (r(3, 17, 64),), exact=True
    )
    yield Case(
        "arange",
        lambda x: (x + torch.arange(65, device=x.device), torch.arange(3, 50, 4, device=x.device)),
        lambda r: (r(33, 65),),
    )
    yield Case(
        "where",
        lambda x, y, m: (torch.where(m, x, y), x.masked_fill(m, -1.0), torch.where(x > y, x, 0.0)),
        lambda r: (r(33, 65), r(65), r.mask(33, 1)),
        exact=True,
    )
    yield Case(
        "pad-modes",
        lambda x: (F.pad(x, (2, 3), "reflect"), F.pad(x, (2, 3), "replicate"), F.pad(x, (2, 3), "circular")),
        lambda r: (r(3, 4, 11),),
        exact=True,
        left=True,
    )
    yield Case(
        "backward",
        lambda x, y: torch.cat([F.pad(x[:, 1:], (1, 2)), y.flip(1)], 1).transpose(0, 1),
        lambda r: (r(33, 20), r(33, 9)),
        grad=True,
    )
    yield Case("writes", _writes, lambda r: (r(4, 5, 6), r(5, 3)))
    yield Case("rotary", _rotary, lambda r: (r(2, 3, 17, 32), r(17, 32), r(17, 32)), grad=True)


def _writes(buffer, x):
    buffer = buffer.clone()
    buffer[1, :, ::2] = x
    buffer[:, 2].add_(1.0)
    buffer.transpose(0, 2)[3, 1:3].mul_(2.0)
    buffer.diagonal(0, 0, 1).fill_(3.0)
    buffer[2].copy_(buffer[1])
    return buffer


def _rotary(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


@family
def indexed() -> Iterator[Case]:
    embedding = lambda ids, w: F.embedding(ids, w, padding_idx=3)
    for n, rows_, width in ((40, 7, 5), (2000, 300, 257), (4096, 50257, 64), (3000, 4, 33), (1, 9, 768)):
        yield from floats(
            f"embedding-{n}-{rows_}x{width}",
            embedding,
            lambda r, n=n, v=rows_, w=width: (r.ints(0, v, n), r(v, w)),
            ("f32", "bf16") if n != 2000 else FLOATS,
            grad=True,
            quick=n == 2000,
        )
    yield Case("embedding-i32", F.embedding, lambda r: (r.ints(0, 9, 5, 33, dtype=torch.int32), r(9, 20)), grad=True)
    yield Case(
        "embedding-two-places",
        lambda ids, w: F.linear(F.embedding(ids, w).tanh(), w),
        lambda r: (r.ints(0, 50, 3, 11), r(50, 24) * 0.3),
        grad=True,
    )
    yield Case("gather", lambda x, i: torch.gather(x, 1, i), lambda r: (r(33, 50), r.ints(0, 50, 33, 40)), grad=True)
    yield Case("gather-0", lambda x, i: torch.gather(x, 0, i), lambda r: (r(33, 50), r.ints(0, 33, 70, 50)), grad=True)
    yield Case(
        "index-select",
        lambda x, i: (x.index_select(1, i), x[:, i], x[i]),
        lambda r: (r(33, 33, 7), r.ints(0, 33, 20)),
        exact=True,
    )
    yield Case(
        "index",
        lambda x, i, j: x[i, :, j],
        lambda r: (r(9, 5, 11), r.ints(-9, 9, 6, 1), r.ints(-11, 11, 1, 4)),
        grad=True,
    )
    for n in (30, 5000, 200_000):
        yield Case(
            f"scatter-add-{n}",
            lambda x, i, s: x.scatter_add(0, i, s),
            lambda r, n=n: (r(101), r.ints(0, 101, n), r(n)),
            quick=n == 5000,
        )
    yield Case(
        "scatter-add-dim1",
        lambda x, i, s: x.scatter_add(1, i, s),
        lambda r: (r(33, 50), r.ints(0, 50, 33, 400), r(33, 400)),
    )
    yield Case(
        "scatter-add-bf16",
        lambda x, i, s: x.scatter_add(1, i, s),
        lambda r: (r(33, 50), r.ints(0, 50, 33, 60), r(33, 60)),
        "bf16",
        factor=4,
    )
    for name in ("amax", "amin", "prod"):
        yield Case(
            f"scatter-{name}",
            lambda x, i, s, n=name: x.scatter_reduce(1, i, s, n),
            lambda r: (r(33, 50), r.ints(0, 50, 33, 60), r(33, 60)),
        )
    yield Case("scatter", lambda x, i: x.scatter(1, i, 2.0), lambda r: (r(33, 50), r.ints(0, 50, 33, 60)), exact=True)
    yield Case(
        "scatter-distinct",
        lambda x, i, s: x.scatter(1, i.argsort(1), s),
        lambda r: (r(33, 50), r.ints(0, 10**9, 33, 50), r(33, 50)),
        left=True,
    )
    yield Case("index-add", lambda x, i, s: x.index_add(0, i, s), lambda r: (r(33, 50), r.ints(0, 33, 400), r(400, 50)))
    yield Case(
        "index-put",
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        lambda r: (r(33, 50), r.ints(0, 33, 400), r(400, 50)),
    )
    yield Case(
        "one-hot",
        lambda x, i: x @ (i[:, None] == torch.arange(20, device=i.device)).to(x.dtype).t(),
        lambda r: (r(7, 20), r.ints(0, 20, 33)),
    )
    yield Case("masked-rows", lambda x, m: (x * m[:, None]).sum(0) / m.sum(), lambda r: (r(33, 50), r.mask(33)))
    for shape, dim in (
        ((1,), 0),
        ((3000,), 0),
        ((200_001,), 0),
        ((5, 77), 1),
        ((77, 5), 0),
        ((4, 50, 37), 1),
        ((2, 3, 4), 0),
        ((64, 4100), 1),
    ):
        name = f"{'x'.join(map(str, shape))}-{dim}"
        yield Case(f"cumsum-{name}", lambda x, d=dim: x.cumsum(d), lambda r, s=shape: (r(*s),), grad=True, factor=4)
        if len(shape) != 1:
            yield Case(
                f"cumprod-{name}", lambda x, d=dim: x.cumprod(d), lambda r, s=shape: (r.positive(*s) + 0.3,), factor=4
            )
    for dtype in ("bf16", "f16", "f64"):
        yield Case(f"cumsum-{dtype}", lambda x: (x.cumsum(0), x.cumsum(1)), lambda r: (r(40, 131),), dtype)
    yield Case(
        "cumsum-i64", lambda x: (x.cumsum(0), x.cumsum(1), x.cumprod(1)), lambda r: (r.ints(-3, 3, 40, 31),), exact=True
    )
    yield Case("cumsum-i32", lambda x: x.cumsum(0), lambda r: (r.ints(-3, 3, 400, dtype=torch.int32),), exact=True)


# ---- contractions ----------------------------------------------------------------------------------------------


SHAPES = [
    (1, 1, 1),
    (33, 65, 17),
    (128, 128, 64),
    (257, 100, 1030),
    (5, 300, 2048),
    (1031, 24, 96),
    (512, 512, 512),
    (64, 64, 0),
    (0, 8, 8),
]
PRECISIONS = [("f32", False), ("f32", True), ("bf16", False), ("f16", False), ("f64", False)]


def _layouts(a, at, b, bt):
    """NN, NT, TN, TT."""
    return a @ b, a @ bt.t(), at.t() @ b, at.t() @ bt.t()


def named(dtype: str, tf32: bool) -> str:
    return "tf32" if tf32 else dtype


def precisions(name: str, run: Any, make: Any, among: str = "f32 tf32 bf16 f16", **options: Any) -> Iterator[Case]:
    for dtype, tf32 in PRECISIONS:
        if named(dtype, tf32) in among.split():
            yield Case(f"{name}-{named(dtype, tf32)}", run, make, dtype, tf32=tf32, **options)


@family
def contractions() -> Iterator[Case]:
    for m, n, k in SHAPES:
        make = lambda r, m=m, n=n, k=k: (r(m, k), r(k, m), r(k, n), r(n, k))
        yield from precisions(
            f"{m}x{n}x{k}",
            _layouts,
            make,
            "f32 tf32 bf16 f16 f64" if m in (33, 128) else "f32 tf32 bf16 f16",
            together=True,
            quick=m == 257,
        )
    epilogue = lambda x, w, b, y: F.gelu(F.linear(x, w, b)) + y
    for m, n, k in ((33, 65, 40), (256, 384, 128), (300, 513, 260)):
        make = lambda r, m=m, n=n, k=k: (r(m, k), r(n, k) * k**-0.5, r(n), r(m, n))
        yield from precisions(f"linear-{m}x{n}x{k}", epilogue, make, grad=True, quick=m == 300)
    relu = lambda x, w, b: F.relu(x @ w + b) * 2
    yield from precisions("relu", relu, lambda r: (r(65, 130), r(130, 70), r(70)))
    swiglu = lambda x, g, u, d: F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d)
    yield from precisions(
        "swiglu", swiglu, lambda r: (r(2, 33, 48), r(128, 48) * 0.15, r(128, 48) * 0.15, r(48, 128) * 0.1), grad=True
    )
    yield from precisions("batched", lambda a, b: a @ b, lambda r: (r(3, 65, 33), r(3, 33, 70)), grad=True)
    yield from precisions(
        "batched-heads",
        lambda a, b: a.transpose(1, 2) @ b.transpose(1, 2).transpose(2, 3),
        lambda r: (r(2, 65, 3, 24), r(2, 70, 3, 24)),
        grad=True,
    )
    yield from precisions("broadcast", lambda a, b: a @ b, lambda r: (r(2, 3, 33, 20), r(3, 20, 40)), grad=True)
    yield Case(
        "einsum",
        lambda a, b: (
            torch.einsum("bij,bjk->bik", a, b),
            torch.einsum("bij,bkj->ik", a, b.transpose(1, 2)),
            torch.einsum("bij,bij->b", a, a),
        ),
        lambda r: (r(3, 20, 33), r(3, 33, 25)),
    )
    yield Case(
        "vectors",
        lambda a, x, y: (a @ x, y @ a, x @ x, torch.outer(x, y), a.mv(x) + y),
        lambda r: (r(70, 133), r(133), r(70)),
    )
    yield Case(
        "scaled",
        lambda c, a, b: (torch.addmm(c, a, b, beta=0.5, alpha=2.0), torch.baddbmm(c[None], a[None], b[None])),
        lambda r: (r(33, 40), r(33, 20), r(20, 40)),
    )
    yield Case("chain", lambda a, b, c: (a @ b).softmax(-1) @ c, lambda r: (r(65, 40), r(40, 50), r(50, 33)), grad=True)
    yield Case("unaligned-rows", lambda a, b: a @ b, lambda r: (r(65, 131)[:, 1:], r(131, 67)[1:, :66]), "bf16")
    yield Case("strided-operands", lambda a, b: a @ b, lambda r: (r(130, 260)[::2, ::4], r(65, 80)[:, ::2]))
    yield Case("mixed-outputs", lambda a, b: (a @ b).float().sum(0), lambda r: (r(65, 64), r(64, 80)), "f32")
    yield Case("large-k", lambda a, b: a @ b, lambda r: (r(16, 20_000), r(20_000, 24)))
    yield Case("large-k-bf16", lambda a, b: a @ b, lambda r: (r(16, 20_000), r(20_000, 24)), "bf16")
    autocast = _autocast
    yield Case("autocast", autocast, lambda r: (r(65, 48), r(96, 48) * 0.2, r(96)), grad=True, factor=3)


def _autocast(x, w, b):
    if x.dtype == torch.float64:
        return F.gelu(F.linear(x, w, b)).square()
    with torch.autocast(x.device.type, torch.bfloat16):
        return F.gelu(F.linear(x, w, b)).float().square()


# ---- layers ----------------------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    """Convolution, batch norm, pooling."""

    def __init__(self, channels: int = 6):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.c2, self.b2 = nn.Conv2d(channels, 9, 3, stride=2), nn.BatchNorm2d(9)

    def forward(self, x):
        return F.relu(self.b2(self.c2(F.max_pool2d(F.relu(self.b1(self.c1(x))), 2)))).mean((2, 3))


def convolution(name: str, shape: tuple[int, ...], make: Callable[[], nn.Module], **options: Any) -> Case:
    return Case(name, lambda m, x: m(x), lambda r: (r(*shape),), module=make, grad=True, **options)


@family
def layers() -> Iterator[Case]:
    yield convolution("conv2d", (3, 5, 14, 13), lambda: nn.Conv2d(5, 9, 3, padding=1), quick=True)
    yield convolution("conv2d-bf16", (3, 16, 14, 13), lambda: nn.Conv2d(16, 24, 3, padding=1), dtype="bf16")
    yield convolution(
        "conv2d-stride", (3, 5, 17, 16), lambda: nn.Conv2d(5, 9, (3, 5), stride=2, padding=(1, 2), bias=False)
    )
    yield convolution("conv2d-dilated", (2, 4, 17, 16), lambda: nn.Conv2d(4, 6, 3, dilation=2))
    yield convolution("conv2d-groups", (2, 6, 9, 10), lambda: nn.Conv2d(6, 12, 3, groups=3), left=True)
    yield convolution("conv2d-1x1", (2, 33, 9, 10), lambda: nn.Conv2d(33, 20, 1))
    yield convolution("conv2d-patches", (2, 3, 32, 32), lambda: nn.Conv2d(3, 24, 8, stride=8))
    yield convolution("conv1d", (3, 5, 40), lambda: nn.Conv1d(5, 9, 5, padding=2))
    yield convolution(
        "conv-transposed", (2, 5, 9, 8), lambda: nn.ConvTranspose2d(5, 4, 3, stride=2, padding=1), left=True
    )
    yield convolution("batch-norm", (5, 7, 9, 11), lambda: nn.BatchNorm2d(7))
    yield convolution("batch-norm-1d", (33, 20), lambda: nn.BatchNorm1d(20))
    yield convolution("batch-norm-eval", (5, 7, 9, 11), lambda: nn.BatchNorm2d(7).eval())
    yield convolution("group-norm", (5, 8, 9, 11), lambda: nn.GroupNorm(4, 8), quick=True)
    yield convolution("instance-norm", (5, 8, 9, 11), lambda: nn.InstanceNorm2d(8, affine=True))
    yield convolution("max-pool", (3, 5, 14, 13), lambda: nn.MaxPool2d(3, 2, 1))
    yield convolution("avg-pool", (3, 5, 14, 13), lambda: nn.AvgPool2d(2))
    yield convolution("upsample", (3, 5, 7, 6), lambda: nn.Upsample(scale_factor=2))
    yield convolution("network", (4, 3, 20, 18), Convolutions, factor=3)
    yield convolution(
        "empty-batch", (0, 3, 8, 8), lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
    )
    yield convolution(
        "empty-mlp", (0, 3), lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2))
    )
    yield convolution(
        "mlp",
        (33, 40),
        lambda: nn.Sequential(nn.Linear(40, 65), nn.GELU(), nn.LayerNorm(65), nn.Linear(65, 17)),
        quick=True,
    )
    yield convolution(
        "encoder", (3, 17, 24), lambda: nn.TransformerEncoderLayer(24, 3, 48, batch_first=True, dropout=0.0), factor=3
    )
    yield Case("lstm", lambda m, x: m(x)[0], lambda r: (r(9, 3, 20),), module=lambda: nn.LSTM(20, 24, 2), grad=True)
    yield Case("gru", lambda m, x: m(x)[0], lambda r: (r(7, 3, 20),), module=lambda: nn.GRU(20, 24), grad=True)
    yield Case("rnn", lambda m, x: m(x)[0], lambda r: (r(7, 3, 20),), module=lambda: nn.RNN(20, 24), grad=True)


# ---- attention -------------------------------------------------------------------------------------------------


def attend(**options: Any) -> Callable[..., Any]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


def heads(b: int, h: int, t: int, s: int, d: int, g: int = 0, e: int = 0) -> Callable[[Any], tuple]:
    return lambda r: (r(b, h, t, d), r(b, g or h, s, d), r(b, g or h, s, e or d))


def _packed(x):
    b, t, c = x.shape
    q, k, v = (z.view(b, t, 3, -1).transpose(1, 2) for z in x.split(c // 3, 2))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c // 3)


def _window(q, k, v):
    i = torch.arange(q.shape[2], device=q.device)
    keep = (i[:, None] >= i) & (i[:, None] - i < 9)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


@family
def attention() -> Iterator[Case]:
    every = "f32 tf32 bf16 f16"
    for d in (16, 24, 32, 64, 72, 80, 96, 128, 256):
        # (float32 without TF32 takes long to compile for the widest heads)
        among = every if d in (24, 64, 128) else "f32 bf16" if d < 96 else "tf32 bf16"
        yield from precisions(
            f"causal-{d}", attend(is_causal=True), heads(2, 2, 70, 70, d), among, grad=True, quick=d == 64, factor=3
        )
    for t, s in ((1, 37), (17, 1), (128, 128), (65, 300), (300, 65), (513, 513)):
        among = every if t in (128, 65) else "f32 bf16"
        yield from precisions(f"full-{t}x{s}", attend(), heads(2, 2, t, s, 64), among, grad=True, factor=3)
    yield from precisions(
        "causal-lengths", attend(is_causal=True), heads(1, 2, 333, 333, 64), every, grad=True, factor=3
    )
    yield from precisions(
        "grouped", attend(is_causal=True, enable_gqa=True), heads(2, 6, 50, 50, 32, 2), every, grad=True, factor=3
    )
    yield from precisions(
        "values-of-another-width", attend(scale=0.3), heads(2, 2, 33, 65, 40, e=24), "f32", grad=True, factor=3
    )
    yield from precisions("packed", _packed, lambda r: (r(2, 65, 3 * 3 * 32),), every, grad=True, factor=3)
    yield from precisions("window", _window, heads(2, 2, 70, 70, 32), "f32 bf16", grad=True, factor=3)
    masked = lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m)

    def padding(r):
        keep = torch.arange(37, device=r.device) < r.ints(1, 38, 3, 1)
        return (*heads(3, 2, 37, 37, 24)(r), keep[:, None, None, :])

    yield from precisions("padding-mask", masked, padding, every, grad=True, factor=3)
    yield from precisions(
        "full-mask",
        masked,
        lambda r: (*heads(2, 2, 33, 65, 24)(r), r.mask(2, 2, 33, 65) | torch.eye(33, 65, device=r.device).bool()),
        "f32 bf16",
        grad=True,
        factor=3,
    )
    yield from precisions(
        "bias", masked, lambda r: (*heads(2, 2, 33, 65, 24)(r), r(1, 2, 33, 65)), "f32", grad=True, factor=3, left=True
    )
    yield Case("float64", attend(is_causal=True), heads(1, 2, 33, 33, 24), "f64", grad=True, factor=3)
    by_hand = lambda q, k, v: (q @ k.transpose(-2, -1) / 5).softmax(-1) @ v
    yield from precisions("by-hand", by_hand, heads(2, 2, 33, 50, 24), "f32 bf16", grad=True, factor=3)
    yield Case("empty", attend(), heads(0, 2, 17, 17, 32), grad=True, left=True)


assert set(DTYPES) >= {"f32", "bf16", "f16", "f64"}
