"""Layers and shapes that few steps have, compiled against eager."""

from __future__ import annotations

import pytest
import torch
from steps import check
from torch import nn

import nova

EMPTY = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2)), (0, 3)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2)), (0, 3, 8, 8)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), (0, 5, 8)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_batch_of_nothing(name):
    make, shape = EMPTY[name]

    def build():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def step(x):
            y = model(x)
            loss = y.sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), y.detach()

        return step, [(torch.randn(shape),) for _ in range(2)], lambda: list(model.state_dict().values())

    check(build)


def test_a_gradient_that_repeats_a_function_of_a_sum():
    """The kernel both returns the sum and spreads its cosine over the parameter."""

    def build():
        w = nn.Parameter(torch.randn(4, 5))
        optimizer = torch.optim.SGD([w], lr=0.1)

        def step():
            total = w.sum()
            total.mul(1.3).sin().backward()
            gradient = w.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
            return gradient, total.detach()

        return step, [(), (), ()], lambda: [w]

    check(build)


def test_products_of_windows_and_squares():
    """Both factors read with steps, and factors that are the same elements of one tensor."""

    def build():
        def step(a, b, x):
            return a[:, 1:] @ b[::2, 1:4], x @ x, torch.einsum("bij,bij->b", a[None], a[None])

        def one():
            return torch.randn(9, 22)[::3, ::2], torch.randn(20, 5), torch.randn(133)

        return step, [one() for _ in range(3)], lambda: []

    check(build)


def test_products_over_nothing():
    def build():
        def step(x, w, b):
            return nn.functional.linear(x, w, b), x @ w.t(), x.t() @ x

        return step, [(torch.randn(2, 0), torch.randn(3, 0), torch.randn(3)) for _ in range(2)], lambda: []

    check(build)


@pytest.mark.parametrize("scale", [1e-13, 1e-3, 1e15])
def test_the_gradient_of_a_normalisation_of_large_and_small_numbers(scale):
    """As far as eager's: a power of the deviation must not leave float32 where the gradient itself does not."""
    torch.manual_seed(0)
    x, weight, upstream = torch.randn(6, 40) * scale, torch.randn(40), torch.randn(6, 40)

    def step(x, weight):
        y = nn.functional.layer_norm(x, (40,), weight, eps=0.0)
        return torch.autograd.grad(y, (x, weight), upstream.to(y.dtype))

    leaves = [t.requires_grad_() for t in (x, weight)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    compiled = nova.jit(step)
    compiled(*leaves)
    for found, near, want in zip(compiled(*leaves), step(*leaves), step(*wide), strict=True):
        size = want.abs().max()
        assert (found - want).abs().max() / size <= 2 * (near - want).abs().max() / size + 1e-6


CAUSAL, OTHER = nn.Transformer.generate_square_subsequent_mask(4), torch.zeros(4, 4).masked_fill(torch.eye(4) > 0, -9.0)
LAYER = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
MASKED = {
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**LAYER), 2),
        lambda m, x, mask, padding, **hint: m(x, mask=mask, src_key_padding_mask=padding, **hint),
    ),
    "decoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**LAYER, norm_first=True), 2),
        lambda m, x, mask, padding, **hint: m(
            x, x.flip(1), mask, tgt_key_padding_mask=padding, **{f"tgt_{k}": v for k, v in hint.items()}
        ),
    ),
    "both": (
        lambda: nn.Transformer(num_encoder_layers=1, num_decoder_layers=1, **LAYER),
        lambda m, x, mask, padding, **hint: m(
            x, x.flip(1), mask, mask, src_key_padding_mask=padding, **{f"src_{k}": v for k, v in hint.items()}
        ),
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of masks of different types, and of nested tensors
@pytest.mark.parametrize("hint", [{}, {"is_causal": False}, {"is_causal": None}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MASKED)
def test_transformers_with_masks(name, padded, hint):
    """PyTorch looks into a mask for whether it is causal; a step may be given any other one later."""
    make, apply = MASKED[name]
    padding = torch.arange(4).expand(3, 4) >= torch.tensor([[4], [3], [2]]) if padded else None

    def build():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(x, mask):
            optimizer.zero_grad()
            loss = apply(model, x, mask, padding, **hint).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        data = [(torch.randn(3, 4, 8), mask) for mask in (CAUSAL, CAUSAL, OTHER, CAUSAL, CAUSAL > -1)]
        data.insert(3, model.eval)
        return step, data, lambda: list(model.state_dict().values())

    check(build)
