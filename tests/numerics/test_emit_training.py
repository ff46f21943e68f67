"""Level 0 to level 1, contractions, normalisation, indexing, losses and what stays with PyTorch."""

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
from tests import level0
from tests.emitted import compare, rand, run, with_grad


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# ---- contractions ----

CONTRACTIONS = {
    "mm": (lambda a, b: a @ b, (3, 5), (5, 7)),
    "mmt": (lambda a, b: a @ b.t(), (3, 5), (7, 5)),
    "bmm": (torch.bmm, (2, 3, 5), (2, 5, 7)),
    "matmul4": (lambda a, b: a @ b.transpose(-1, -2), (2, 3, 4, 5), (2, 3, 6, 5)),
    "matmul_broadcast": (lambda a, b: a @ b, (2, 3, 4, 5), (3, 5, 6)),
    "mv": (lambda a, b: a @ b, (3, 5), (5,)),
    "dot": (lambda a, b: a @ b, (5,), (5,)),
    "vm": (lambda a, b: a @ b, (5,), (5, 3)),
    "linear3": (F.linear, (2, 3, 5), (7, 5)),
    "bias": (lambda a, b: F.linear(a, b[:, :5], b[:, 5]), (3, 5), (7, 6)),
    "bias3": (lambda a, b: F.linear(a, b[:, :5], b[:, 5]), (2, 3, 5), (7, 6)),
    "addmm": (lambda a, b: torch.addmm(b[:3, :3], a, b[:5, :3], beta=0.5, alpha=2), (3, 5), (6, 4)),
    "baddbmm": (lambda a, b: torch.baddbmm(a[:, :, :1], a, b, alpha=0.5), (2, 3, 5), (2, 5, 7)),
    "addmv": (lambda a, b: torch.addmv(a[:, 0], a, b), (3, 5), (5,)),
    "addr": (lambda a, b: torch.addr(a, a[:, 0], b, alpha=2), (3, 5), (5,)),
}


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_contractions(name):
    fn, a, b = CONTRACTIONS[name]
    run(with_grad(fn), rand(*a), rand(*b))


def test_linear_is_raised_in_both_directions():
    module = run(with_grad(F.linear), rand(3, 5), rand(7, 5), rand(7))
    text = str(module)
    assert "nova.linear" in text and text.count("nova.matmul") == 2
    # dw = transpose(dy) @ x: nothing transposes a product
    assert not re.search(r"nova.transpose\"\(%\d+\) .*tensor<5x7xf64>\) -> tensor<7x5xf64>", text)


CONVOLUTIONS = {
    "plain": ({}, (2, 3, 7, 8), (4, 3, 3, 3)),
    "stride": ({"stride": 2, "padding": 1}, (2, 3, 7, 8), (4, 3, 3, 2)),
    "dilation": ({"dilation": 2, "padding": (2, 1)}, (2, 3, 9, 8), (4, 3, 3, 3)),
    "groups": ({"groups": 3, "padding": 1}, (2, 6, 5, 5), (9, 2, 3, 3)),
    "depthwise": ({"groups": 4}, (2, 4, 5, 6), (4, 1, 2, 3)),
    "one": ({}, (2, 3, 5, 4), (7, 3, 1, 1)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name):
    options, x, w = CONVOLUTIONS[name]
    run(with_grad(lambda x, w, b: F.conv2d(x, w, b, **options)), rand(*x), rand(*w), rand(w[0]))


def test_other_convolutions():
    run(with_grad(lambda x, w, b: F.conv1d(x, w, b, padding=1)), rand(2, 3, 9), rand(4, 3, 4), rand(4))
    run(with_grad(F.conv3d), rand(1, 2, 3, 4, 5), rand(3, 2, 2, 2, 2))
    run(
        with_grad(lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, output_padding=1)),
        rand(2, 3, 4, 5),
        rand(3, 4, 3, 2),
        rand(4),
    )
    run(with_grad(lambda x, w: F.conv_transpose1d(x, w, groups=2, padding=1)), rand(2, 4, 6), rand(4, 3, 3))


@pytest.mark.parametrize("mask", [None, "bool", "float", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32])
def test_attention_below_capture(mask, dtype):
    q, k, v = rand(2, 3, 5, 8, dtype=dtype), rand(2, 3, 7, 8, dtype=dtype), rand(2, 3, 7, 8, dtype=dtype)
    masks = {"bool": torch.rand(2, 1, 5, 7) > 0.3, "float": rand(2, 3, 5, 7, dtype=dtype)}
    if mask in masks:
        masks["bool"][..., 0] = True
        run(
            with_grad(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, masks[mask])),
            q,
            k,
            v,
            rtol=2e-4,
            atol=2e-5,
        ) if mask == "none" else _attention_with_mask(q, k, v, masks[mask])
    else:
        run(
            with_grad(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=mask == "causal")),
            q,
            k,
            v,
            rtol=2e-4,
            atol=2e-5,
        )


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
        "none": (lambda x: F.layer_norm(x, (5, 6)), (x,)),
        "weight": (lambda x, w: F.layer_norm(x, (5, 6), w), (x, w)),
        "both": (lambda x, w, b: F.layer_norm(x, (5, 6), w, b, 1e-3), (x, w, b)),
    }
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
    "take": lambda x, i: x[i],
    "pair": lambda x, i: x[i, i.flip(0)],
    "split": lambda x, i: x[i, :, i],
    "mid": lambda x, i: x[:, i],
    "grid": lambda x, i: x[:, i[:, None], i],
    "negative": lambda x, i: x[i - 3],
    "index_select": lambda x, i: x.index_select(1, i),
    "index_select0": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x[0].gather(1, i.view(1, 4).expand(3, 4)),
    "take_along": lambda x, i: torch.take_along_dim(x[0], i.view(1, 4), 1),
    "index_add": lambda x, i: x.index_add(1, i, x[:, :1].expand(-1, 4, -1)),
    "scatter_add": lambda x, i: x[0].scatter_add(1, i.view(1, 4), x[0, :1, :4] * 2),
    "index_put": lambda x, i: torch.index_put(x, (i,), x[0] * 2, accumulate=True),
    "scatter": lambda x, i: x[0].scatter(0, i[:1].view(1, 1), x[1, :1, :1]),
    "scatter_value": lambda x, i: x[0].scatter(1, i.view(1, 4), 2.0),
    "masked_put": lambda x, i: x.masked_fill(x > 1, 0.0),
    "index_copy": lambda x, i: x.index_copy(1, i[1:3], x[:, :2] * 3),
    "index_fill": lambda x, i: x.index_fill(0, i[:2], 3.0),
}


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
    run(with_grad(lambda x: F.avg_pool2d(x, 2)), rand(2, 3, 6, 4))
    run(with_grad(lambda x: F.avg_pool2d(x, (2, 3), divisor_override=5)), rand(2, 3, 7, 7))
    run(with_grad(lambda x: F.avg_pool1d(x, 2)), rand(2, 3, 7))
    run(with_grad(lambda x: F.interpolate(x, scale_factor=2)), rand(2, 3, 3, 4))
    run(with_grad(lambda x: F.avg_pool2d(x, 3, 1, 1)), rand(2, 3, 6, 4), left=("avg_pool2d", "avg_pool2d_backward"))


# ---- losses ----

LOSSES = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "smooth_beta": lambda x, y, reduction: F.smooth_l1_loss(x, y, beta=0.3, reduction=reduction),
    "bce": lambda x, y, reduction: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=reduction),
    "bce_logits": lambda x, y, reduction: F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction=reduction),
    "bce_pos_weight": lambda x, y, reduction: F.binary_cross_entropy_with_logits(
        x, y.sigmoid(), y[0].exp(), pos_weight=y[1].exp(), reduction=reduction
    ),
    "soft_margin": lambda x, y, reduction: F.soft_margin_loss(x, y.sign(), reduction=reduction),
    "kl_div": lambda x, y, reduction: F.kl_div(x.log_softmax(1), y.softmax(1), reduction=reduction),
    "poisson": lambda x, y, reduction: F.poisson_nll_loss(x, y.exp(), reduction=reduction),
    "soft_targets": lambda x, y, reduction: F.cross_entropy(x, y.softmax(1), reduction=reduction, label_smoothing=0.1),
    "cosine_embedding": lambda x, y, reduction: F.cosine_embedding_loss(
        x, y, torch.ones(x.shape[0], dtype=x.dtype), reduction=reduction
    ),
    "margin_ranking": lambda x, y, reduction: F.margin_ranking_loss(x, y, torch.ones_like(x), 0.2, reduction=reduction),
    "gaussian": lambda x, y, reduction: (0.5 * ((x - y) ** 2 / y.exp() + y)).sum(),
}


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


def test_ops_on_dynamic_values_are_pytorchs_too():
    captured = level0.trace(lambda x: (x * 2).sum() + 1, rand(3, 4))
    first = next(n for n in captured.graph.nodes if n.op == "call_function")
    first.meta["dynamic"] = True
    text = str(emit_step(captured))
    assert text.count("nova.dynamic") == 1 and 'op = "aten.sum.default"' in text and "nova.add" in text


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
