"""The reference meaning of every other level-1 op, against PyTorch or NumPy, in float64 on ragged shapes.

A case builds a module of one op, prints it, parses it back (which verifies it), interprets it and compares with an
expectation that is computed another way: backward ops by autograd, optimizers by torch.optim, indexing by NumPy.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nova import mlir
from nova.dialect import base, reference
from nova.mlir import ir
from tests.numerics import test_dialect_elementwise as elementwise_tests
from tests.one_op import TESTED, f64, rand, run


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# ---- reductions ----


@pytest.mark.parametrize("dims,keepdim", [((0,), False), ((1, 2), True), ((0, 1, 2), False), ((2,), True)])
def test_reductions(dims, keepdim):
    x = rand(3, 4, 5)
    for name, fn in {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}.items():
        run(
            f"reduce_{name}",
            [x],
            torch.from_numpy(np.asarray(fn(x.numpy(), axis=dims, keepdims=keepdim))),
            dims=dims,
            keepdim=keepdim,
        )
    for name, fn in {"any": np.any, "all": np.all}.items():
        run(
            f"reduce_{name}",
            [x > 1],
            torch.from_numpy(np.asarray(fn(x.numpy() > 1, axis=dims, keepdims=keepdim))),
            dims=dims,
            keepdim=keepdim,
        )


def test_reductions_of_nothing_and_of_nan():
    run("reduce_sum", [torch.zeros(0, 3, dtype=f64)], torch.zeros(3, dtype=f64), dims=[0], keepdim=False)
    run("reduce_prod", [torch.zeros(0, 3, dtype=f64)], torch.ones(3, dtype=f64), dims=[0], keepdim=False)
    run("reduce_all", [torch.zeros(0, 3, dtype=torch.bool)], torch.ones(3, dtype=torch.bool), dims=[0], keepdim=False)
    x = torch.tensor([1.0, math.nan, 3.0], dtype=f64)
    run("reduce_max", [x], torch.tensor(math.nan, dtype=f64), dims=[0], keepdim=False)
    run("argmax", [x], torch.tensor(1), dim=0, keepdim=False)


def test_arg_reductions():
    x = rand(3, 5)
    x[0] = 1.0  # the first of equal elements
    for name, fn in {"argmax": np.argmax, "argmin": np.argmin}.items():
        run(name, [x], torch.from_numpy(fn(x.numpy(), axis=1, keepdims=True)), dim=1, keepdim=True)


@pytest.mark.parametrize("name,fn", [("softmax", torch.softmax), ("log_softmax", torch.log_softmax)])
def test_softmax(name, fn):
    x, dy = rand(3, 4, 5).requires_grad_(), rand(3, 4, 5)
    z = x.exp() / x.exp().sum(1, keepdim=True)
    y = fn(x, 1)
    run(name, [x.detach()], (z if name == "softmax" else z.log()).detach(), dim=1)
    run(f"{name}_backward", [dy, y.detach()], torch.autograd.grad(y, x, dy)[0], dim=1)


@pytest.mark.parametrize("affine", [0, 1, 2])
def test_layer_norm(affine):
    x, dy = rand(3, 4, 5, 6).requires_grad_(), rand(3, 4, 5, 6)
    params = [rand(5, 6).requires_grad_() for _ in range(affine)]
    weight, bias = [*params, None, None][:2]
    y = F.layer_norm(x, (5, 6), weight, bias, 1e-3)
    mean = x.detach().mean((2, 3), keepdim=True)
    rstd = 1 / torch.sqrt(x.detach().var((2, 3), correction=0, keepdim=True) + 1e-3)
    run("layer_norm", [x.detach(), *(p.detach() for p in params)], [y.detach(), mean, rstd], axes=2, eps=1e-3)
    grads = torch.autograd.grad(y, [x, *params], dy)
    if affine == 2:
        run("layer_norm_backward", [dy, x.detach(), mean, rstd, weight.detach()], grads, axes=2)
    if affine == 0:
        run("layer_norm_backward", [dy, x.detach(), mean, rstd], grads, axes=2)


@pytest.mark.parametrize("shape", [(4, 3, 5, 2), (7, 3)])
def test_batch_norm(shape):
    x, w, b, dy = rand(*shape).requires_grad_(), rand(3).requires_grad_(), rand(3).requires_grad_(), rand(*shape)
    y = F.batch_norm(x, None, None, w, b, True, 0.1, 1e-3)
    dims = [d for d in range(x.dim()) if d != 1]
    mean, var = x.detach().mean(dims), x.detach().var(dims, correction=0)
    rstd = 1 / torch.sqrt(var + 1e-3)
    run("batch_norm", [x.detach(), w.detach(), b.detach()], [y.detach(), mean, var, rstd], eps=1e-3)
    run("batch_norm_backward", [dy, x.detach(), mean, rstd, w.detach()], torch.autograd.grad(y, [x, w, b], dy))


# ---- contractions ----


def test_matmul_and_linear():
    a, b, bias = rand(2, 3, 4, 5), rand(2, 3, 5, 6), rand(7)
    run("matmul", [a, b], torch.from_numpy(a.numpy() @ b.numpy()))
    w = rand(7, 5)
    run("linear", [a, w], torch.from_numpy(np.einsum("...k,nk->...n", a, w)))
    run("linear", [a, w, bias], torch.from_numpy(np.einsum("...k,nk->...n", a, w)) + bias)
    low = a[0, 0].to(torch.bfloat16), b[0, 0].to(torch.bfloat16)
    run("matmul", list(low), low[0].float() @ low[1].float())
    run("matmul", list(low), (low[0].float() @ low[1].float()).to(torch.bfloat16))


@pytest.mark.parametrize(
    "stride,padding,dilation,groups",
    [((1, 1), (0, 0), (1, 1), 1), ((2, 1), (1, 2), (1, 2), 1), ((1, 2), (1, 1), (1, 1), 3)],
)
def test_convolution(stride, padding, dilation, groups):
    x, w = rand(2, 6, 8, 7).requires_grad_(), rand(9, 6 // groups, 3, 2).requires_grad_()
    attrs = {
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "transposed": False,
        "output_padding": (0, 0),
    }
    # as a matrix product over unfolded windows
    columns = F.unfold(x, (3, 2), dilation, padding, stride)
    columns = columns.view(2, groups, -1, columns.shape[-1])
    y = torch.einsum("ngkl,gok->ngol", columns, w.view(groups, 9 // groups, -1)).reshape(2, 9, -1)
    size = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in zip((8, 7), padding, dilation, (3, 2), stride)]
    y = y.view(2, 9, *size)
    run("convolution", [x.detach(), w.detach()], y.detach(), **attrs)
    dy = rand(*y.shape)
    dx, dw = torch.autograd.grad(y, [x, w], dy)
    run("convolution_backward_data", [dy, w.detach()], dx, **attrs)
    run("convolution_backward_weight", [dy, x.detach()], dw, **attrs)


@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(mask, causal):
    q, k, v = rand(2, 4, 5, 6).requires_grad_(), rand(2, 2, 7, 6).requires_grad_(), rand(2, 2, 7, 3).requires_grad_()
    bias = {"bool": torch.rand(2, 1, 5, 7) > 0.4, "float": rand(4, 1, 7).requires_grad_()}.get(mask)
    if mask == "bool":
        bias[..., 0] = True
    hidden = torch.ones(5, 7).triu(1).bool() if causal else torch.zeros(5, 7).bool()
    scores = torch.einsum("bhtd,bhsd->bhts", q, k.repeat_interleave(2, 1)) * 0.3
    scores = scores.masked_fill(hidden, -math.inf)
    if mask != "none":
        scores = scores.masked_fill(~bias, -math.inf) if mask == "bool" else scores + bias
    out = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    lse = scores.logsumexp(-1).detach()
    attrs = {
        "has_mask": mask != "none",
        "has_seed": False,
        "causal": causal,
        "scale": 0.3,
        "dropout_p": 0.0,
        "stream": 0,
    }
    masks = [] if mask == "none" else [bias.detach()]
    tensors = [q.detach(), k.detach(), v.detach()]
    run("attention", [*tensors, *masks], [out.detach(), lse], **attrs)
    dout = rand(*out.shape)
    wanted = [q, k, v] + ([bias] if mask == "float" else [])
    grads = torch.autograd.grad(out, wanted, dout)
    run("attention_backward", [dout, *tensors, out.detach(), lse, *masks], grads, **attrs, mask_grad=mask == "float")


def test_attention_rows_that_see_nothing_are_zero():
    q, k, v, mask = rand(1, 1, 2, 4), rand(1, 1, 3, 4), rand(1, 1, 3, 4), torch.tensor([[False] * 3, [True] * 3])
    attrs = {"has_mask": True, "has_seed": False, "causal": False, "scale": 1.0, "dropout_p": 0.0, "stream": 0}
    out = torch.stack([torch.zeros(4, dtype=f64), (q[0, 0, 1] @ k[0, 0].t()).softmax(-1) @ v[0, 0]]).view(1, 1, 2, 4)
    lse = torch.tensor([[[-math.inf, (q[0, 0, 1] @ k[0, 0].t()).logsumexp(-1)]]], dtype=f64)
    run("attention", [q, k, v, mask], [out, lse], **attrs)


def test_attention_dropout_uses_its_stream():
    q, k, v, seed = rand(1, 2, 3, 4), rand(1, 2, 5, 4), rand(1, 2, 5, 4), torch.tensor(77)
    keep = reference_uniform(77, 3, (1, 2, 3, 5)) >= 0.25
    p = (q @ k.transpose(-1, -2)).softmax(-1) * keep / 0.75
    attrs = {"has_mask": False, "has_seed": True, "causal": False, "scale": 1.0, "dropout_p": 0.25, "stream": 3}
    run("attention", [q, k, v, seed], [p @ v, (q @ k.transpose(-1, -2)).logsumexp(-1)], **attrs)


# ---- views and movement ----


def test_views():
    x = rand(3, 4, 5)
    run("reshape", [x], x.view(6, 10))
    run("transpose", [x], x.permute(2, 0, 1), permutation=(2, 0, 1))
    run("broadcast", [x[:, :1]], x[:, :1, None].expand(3, 4, 2, 5).contiguous(), dims=(0, 1, 3))
    run("slice", [x], x[1:, ::2, 1:4:2], starts=(1, 0, 1), limits=(3, 4, 4), strides=(1, 2, 2))
    run("reverse", [x], x.flip(0, 2), dims=(0, 2))
    run("as_strided", [x], x.as_strided((3, 4), (2, 7), 1), size=(3, 4), stride=(2, 7), offset=1)
    base, update = x.clone(), rand(2, 4, 2)
    base[1:, :, ::3] = update
    run("slice_scatter", [x, update], base, starts=(1, 0, 0), limits=(3, 4, 5), strides=(1, 1, 3))
    base, update = x.clone(), rand(3, 2)
    base.as_strided((3, 2), (20, 6), 2).copy_(update)
    run("as_strided_scatter", [x, update], base, size=(3, 2), stride=(20, 6), offset=2)


def test_constants():
    run("iota", [], torch.arange(4).view(1, 4, 1).expand(3, 4, 2), dim=1)
    run("iota", [], torch.arange(4, dtype=f64), dim=0)
    with mlir.context(), ir.Location.unknown():
        for text, expected in {
            "dense<[1.5, -2.0]> : tensor<2xf64>": torch.tensor([1.5, -2.0], dtype=f64),
            "dense<true> : tensor<3xi1>": torch.ones(3).bool(),
            "dense<[[1, 2], [3, 4]]> : tensor<2x2xi64>": torch.tensor([[1, 2], [3, 4]]),
            "dense<2.5> : tensor<bf16>": torch.tensor(2.5, dtype=torch.bfloat16),
            "dense<0x7FF0000000000000> : tensor<f64>": torch.tensor(math.inf, dtype=f64),
            "dense<> : tensor<0xf32>": torch.zeros(0),
        }.items():
            type_ = text.split(" : ")[1]
            op = f'"nova.constant"() {{value = {text}}} : () -> {type_}'
            module = mlir.parse(f"func.func @f() -> {type_} {{ %0 = {op} return %0 : {type_} }}")
            torch.testing.assert_close(reference.interpret(module, [])[0], expected)
    TESTED.add("constant")


def test_movement():
    x = rand(3, 4)
    run("concat", [x, x[:, :1], x * 2], torch.cat([x, x[:, :1], x * 2], 1), dim=1)
    run("pad", [x], F.pad(x, (1, 2, -1, 1), value=3.0), low=(-1, 1), high=(1, 2), value=3.0)
    index = torch.tensor([[0, 3], [1, 1]])
    run(
        "gather", [x, index], torch.from_numpy(np.take_along_axis(x[:2].numpy(), index.numpy(), 1)), dim=1, labels=False
    )
    for reduce, fn in {"add": np.add, "mul": np.multiply, "amax": np.maximum, "amin": np.minimum}.items():
        expected, src = x.numpy().copy(), rand(2, 2)
        for i in range(2):
            for j in range(2):
                expected[i, index[i, j]] = fn(expected[i, index[i, j]], src[i, j])
        run("scatter", [x, index, src], torch.from_numpy(expected), dim=1, reduce=reduce)
    once = torch.tensor([[0, 3], [1, 2]])
    expected, src = x.clone(), rand(2, 2)
    for i in range(2):
        for j in range(2):
            expected[i, once[i, j]] = src[i, j]
    run("scatter", [x, once, src], expected, dim=1, reduce="none")


def test_take():
    table, ids, dy = rand(7, 5), torch.tensor([[1, 4, 4], [0, 2, 1]]), rand(2, 3, 5)
    run("take", [table, ids], torch.from_numpy(table.numpy()[ids.numpy()]))
    for padding in (-1, 4):
        grad = np.zeros((7, 5))
        np.add.at(grad, ids.numpy(), dy.numpy())
        if padding >= 0:
            grad[padding] = 0
        run("take_backward", [dy, ids], torch.from_numpy(grad), rows=7, padding_idx=padding)
    with pytest.raises(IndexError, match="out of range"):
        run("take", [table, torch.tensor([7])], table[:1])


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1), (0, 2), (1, 2)])
def test_index(dims):
    x = rand(4, 3, 4)
    indices = [torch.tensor([[0, 2], [1, -1]]), torch.tensor([1, 0])][: len(dims)]
    key = tuple(indices[dims.index(d)].numpy() if d in dims else slice(None) for d in range(max(dims) + 1))
    picked = x.numpy()[key]
    run("index", [x, *indices], torch.from_numpy(np.ascontiguousarray(picked)), dims=dims)
    values = rand(*picked.shape)
    expected = x.numpy().copy()
    np.add.at(expected, key, values.numpy())
    run("index_put", [x, values, *indices], torch.from_numpy(expected), dims=dims, accumulate=True, wrap=True)
    expected = x.numpy().copy()
    expected[key] = 2.0
    run(
        "index_put",
        [x, torch.tensor(2.0, dtype=f64), *indices],
        torch.from_numpy(expected),
        dims=dims,
        accumulate=False,
        wrap=True,
    )


def test_scans():
    x = rand(3, 4, 5)
    run("cumsum", [x], torch.from_numpy(np.cumsum(x.numpy(), 1)), dim=1)
    run("cumprod", [x], torch.from_numpy(np.cumprod(x.numpy(), 2)), dim=2)


def test_max_pool():
    x = rand(2, 3, 7, 6).requires_grad_()
    windows = F.pad(x, (1, 1, 1, 1), value=-math.inf).unfold(2, 3, 2).unfold(3, 3, 2).flatten(4)
    y, where = windows.max(-1)
    rows = torch.arange(y.shape[2])[:, None] * 2 - 1 + where // 3
    columns = torch.arange(y.shape[3]) * 2 - 1 + where % 3
    indices = rows * 6 + columns
    attrs = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), "dilation": (1, 1), "ceil_mode": False}
    run("max_pool2d", [x.detach()], [y.detach(), indices], **attrs)
    dy = rand(*y.shape)
    del attrs["ceil_mode"]
    run("max_pool2d_backward", [dy, indices], torch.autograd.grad(y, x, dy)[0], **attrs)


# ---- losses and random numbers ----


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_sce(reduction, smoothing, weighted):
    x, w = rand(5, 7).requires_grad_(), rand(7, low=0.1)
    target = torch.tensor([1, -100, 6, 0, 1])
    loss = F.cross_entropy(
        x, target, w if weighted else None, reduction=("none", "mean", "sum")[reduction], label_smoothing=smoothing
    )
    lse = x.detach().exp().sum(1).log()
    weight = [w] if weighted else []
    attrs = {"has_weight": weighted, "ignore_index": -100, "label_smoothing": smoothing, "reduction": reduction}
    run("sce", [x.detach(), target, *weight], [loss.detach(), lse], **attrs)
    dloss = rand(*loss.shape) if reduction == 0 else rand(1)[0]
    run("sce_backward", [dloss, x.detach(), target, lse, *weight], torch.autograd.grad(loss, x, dloss)[0], **attrs)


def test_sce_mean_over_no_weight_is_nan():
    x, w, target = rand(2, 3).requires_grad_(), torch.tensor([0.0, 1.0, 2.0], dtype=f64), torch.tensor([0, -100])
    attrs = {"has_weight": True, "ignore_index": -100, "label_smoothing": 0.1, "reduction": 1}
    loss = F.cross_entropy(x, target, w, label_smoothing=0.1)
    assert loss.isnan()
    lse = x.detach().logsumexp(1)
    run("sce", [x.detach(), target, w], [loss.detach(), lse], **attrs)
    dx = torch.autograd.grad(loss, x)[0]
    dx[1] = 0.0  # a row that is ignored has no gradient, whatever the others are
    run("sce_backward", [torch.ones((), dtype=f64), x.detach(), target, lse, w], dx, **attrs)


def test_sce_refuses_bad_targets():
    with pytest.raises(IndexError, match="out of range"):
        run(
            "sce",
            [rand(1, 3), torch.tensor([3])],
            [rand(1)[0], rand(1)],
            has_weight=False,
            ignore_index=-100,
            label_smoothing=0.0,
            reduction=1,
        )


def philox(counter, key):
    """One block of Philox4x32-10, in Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_philox_known_answers():
    assert philox((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def words(seed, stream, count):
    return [
        w
        for i in range((count + 3) // 4)
        for w in philox((i, 0, stream, 0), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    ]


def reference_uniform(seed, stream, shape):
    count = math.prod(shape)
    return torch.tensor([(w >> 8) * 2.0**-24 for w in words(seed, stream, count)[:count]]).view(shape)


@pytest.mark.parametrize("seed", [0, 12345678901234567, -5])
def test_random(seed):
    tensor = torch.tensor(seed)
    run("uniform", [tensor], reference_uniform(seed, 3, (3, 7)), stream=3)
    run(
        "randint",
        [tensor],
        torch.tensor([-4 + (w * 11 >> 32) for w in words(seed, 5, 7)[:7]]),
        stream=5,
        low=-4,
        high=7,
    )
    drawn = words(seed, 9, 10)
    normals = []
    for a, b in zip(drawn[::2], drawn[1::2]):
        radius = math.sqrt(-2 * math.log(((a >> 8) + 1) * 2.0**-24))
        angle = 2 * math.pi * (b >> 8) * 2.0**-24
        normals += [radius * math.cos(angle), radius * math.sin(angle)]
    run("normal", [tensor], torch.tensor(normals[:10]), stream=9, rtol=1e-5, atol=1e-6)


# ---- optimizers ----


def scalars(*numbers):
    return [torch.tensor(n, dtype=f64) for n in numbers]


def stepped(optimizer_class, p, grads, **options):
    """Parameter and state before and after the last of several steps of a PyTorch optimizer."""
    leaf = p.clone().requires_grad_()
    optimizer = optimizer_class([leaf], foreach=False, **options)
    before = None
    for g in grads:
        before = (
            leaf.detach().clone(),
            {k: v.clone() for k, v in optimizer.state[leaf].items() if isinstance(v, torch.Tensor)},
        )
        leaf.grad = g.clone()
        optimizer.step()
    after = (leaf.detach().clone(), {k: v for k, v in optimizer.state[leaf].items() if isinstance(v, torch.Tensor)})
    return before, after


@pytest.mark.parametrize("nesterov,dampening", [(False, 0.3), (True, 0.0)])
@pytest.mark.parametrize("maximize", [False, True])
def test_sgd(nesterov, dampening, maximize):
    p, grads = rand(3, 5), [rand(3, 5) for _ in range(3)]
    before, after = stepped(
        torch.optim.SGD,
        p,
        grads,
        lr=0.1,
        momentum=0.9,
        dampening=dampening,
        weight_decay=0.01,
        nesterov=nesterov,
        maximize=maximize,
    )
    flags = {"nesterov": nesterov, "maximize": maximize, "has_buf": True, "has_first": False, "has_found_inf": False}
    hyper = scalars(0.1, 0.9, dampening, 0.01)
    run(
        "sgd",
        [before[0], grads[-1], *hyper, before[1]["momentum_buffer"]],
        [after[0], after[1]["momentum_buffer"]],
        **flags,
    )
    start, first = stepped(
        torch.optim.SGD,
        p,
        grads[:1],
        lr=0.1,
        momentum=0.9,
        dampening=dampening,
        weight_decay=0.01,
        nesterov=nesterov,
        maximize=maximize,
    )
    flags["has_first"] = True
    run(
        "sgd",
        [start[0], grads[0], *hyper, torch.zeros(3, 5, dtype=f64), torch.tensor(True)],
        [first[0], first[1]["momentum_buffer"]],
        **flags,
    )
    plain = {"nesterov": False, "maximize": maximize, "has_buf": False, "has_first": False, "has_found_inf": False}
    _, end = stepped(torch.optim.SGD, p, grads[:1], lr=0.1, weight_decay=0.01, maximize=maximize)
    run("sgd", [p, grads[0], *scalars(0.1, 0.0, 0.0, 0.01)], end[0], **plain)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam(decoupled, amsgrad):
    p, grads = rand(3, 5), [rand(3, 5) * s for s in (2, 0.1, 1)]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    before, after = stepped(kind, p, grads, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, amsgrad=amsgrad)
    names = ["exp_avg", "exp_avg_sq", "step"] + (["max_exp_avg_sq"] if amsgrad else [])
    largest = [before[1]["max_exp_avg_sq"]] if amsgrad else []
    flags = {"decoupled": decoupled, "amsgrad": amsgrad, "maximize": False}
    state = [before[1][n] for n in ("exp_avg", "exp_avg_sq", "step")]
    operands = [before[0], grads[-1], *state, *scalars(0.01, 0.8, 0.95, 1e-6, 0.1), *largest]
    run("adam", operands, [after[0], *(after[1][n] for n in names)], **flags, has_found_inf=False)
    # an infinity leaves everything as it was
    run(
        "adam", [*operands, torch.tensor(1.0)], [before[0], *(before[1][n] for n in names)], **flags, has_found_inf=True
    )
    run("adam", [*operands, torch.tensor(0.0)], [after[0], *(after[1][n] for n in names)], **flags, has_found_inf=True)


def test_adagrad():
    p, grads = rand(3, 5), [rand(3, 5) for _ in range(3)]
    before, after = stepped(torch.optim.Adagrad, p, grads, lr=0.1, lr_decay=0.2, eps=1e-6, weight_decay=0.1)
    operands = [before[0], grads[-1], before[1]["sum"], before[1]["step"], *scalars(0.1, 0.2, 1e-6, 0.1)]
    run("adagrad", operands, [after[0], after[1]["sum"], after[1]["step"]], maximize=False, has_found_inf=False)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rmsprop(centered, momentum):
    p, grads = rand(3, 5), [rand(3, 5) for _ in range(3)]
    before, after = stepped(
        torch.optim.RMSprop,
        p,
        grads,
        lr=0.1,
        alpha=0.9,
        eps=1e-6,
        weight_decay=0.1,
        momentum=momentum,
        centered=centered,
    )
    names = (["grad_avg"] if centered else []) + (["momentum_buffer"] if momentum else [])
    operands = [
        before[0],
        grads[-1],
        before[1]["square_avg"],
        before[1]["step"],
        *scalars(0.1, 0.9, 1e-6, 0.1, momentum),
        *(before[1][n] for n in names),
    ]
    results = [after[0], after[1]["square_avg"], after[1]["step"], *(after[1][n] for n in names)]
    run("rmsprop", operands, results, centered=centered, has_momentum=momentum > 0, maximize=False, has_found_inf=False)


def test_foreach_norm():
    xs = [rand(3, 5), rand(7), rand(3, 5), torch.zeros(0, dtype=f64)]
    for order in (1.0, 2.0, math.inf):
        expected = torch.tensor([np.linalg.norm(x.numpy().ravel(), order) if x.numel() else 0.0 for x in xs], dtype=f64)
        run("foreach_norm", xs, expected, ord=order)


def test_markers_and_fallback():
    x = rand(3, 5)
    run("aten_call", [x], list(torch.topk(x, 2)), op="aten.topk.default", args='{"args": [{"t": 0}, 2], "kwargs": {}}')
    run("bucket_ready", [], [], bucket=0)


# ---- completeness ----


def level_1_ops():
    files = ("elementwise", "reductions", "contraction", "views", "training")
    return {n for n, s in base.REGISTRY.items() if s.verify.__module__.rsplit(".", 1)[1] in files}


def test_every_level_1_op_has_a_meaning():
    reference.load()
    assert level_1_ops() <= reference.MEANING.keys()


def test_every_level_1_op_is_tested_here(request):
    collected = {item.originalname for item in request.session.items}
    if (
        not {name for module in (elementwise_tests.__dict__, globals()) for name in module if name.startswith("test_")}
        <= collected
    ):
        pytest.skip("only a part of the op tests runs")
    assert not level_1_ops() - TESTED


def test_the_manual_lists_every_op():
    from nova.dialect.ops import markdown

    manual = markdown()
    for name, spec in base.REGISTRY.items():
        assert f"## nova.{name}\n" in manual
        assert spec.doc.strip(), f"nova.{name} has no docstring"
