"""Tensors without elements in the middle of a step: forward, backward and optimizer, compiled against eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import steps

NONE = torch.zeros(0, dtype=torch.long)

# each takes (x, w), both 4x6, and gives a scalar; a slice without elements has a gradient of zeros
CASES = {
    "slice": lambda x, w: (w[:, 6:] * 2).sum() + w[:0].sum() + x.sum(),
    "slices that are joined": lambda x, w: torch.cat([w[:, 4:6], w[:, 6:], w[:, :0]], 1).sum(),
    "pad": lambda x, w: F.pad(w[:, :0] * 2, (2, 3), value=2.0).square().sum(),
    "pad of rows": lambda x, w: (w * F.pad(x[:0], (0, 0, 2, 2), value=1.0)).sum(),
    "pad of a middle dim": lambda x, w: F.pad((x * w).view(4, 2, 3)[:, :, :0], (1, 1, 0, 1), value=0.5).square().sum(),
    "matmul": lambda x, w: (w[:, :0] @ x.t()[:0]).sum() + w.sum(),
    "bmm": lambda x, w: torch.bmm(w.view(2, 2, 6)[:, :, :0], x.view(2, 6, 2)[:, :0]).sum() + w.sum(),
    "linear": lambda x, w: F.linear(x[:0], w).sum() + F.linear(x[:, :0], w[:, :0], w[:, 0]).sum(),
    "reductions": lambda x, w: w[:, :0].sum(1).sum() + w[:0].prod(0).sum() + w[:0].norm(dim=0).sum() + w[:0].norm(),
    "mean": lambda x, w: torch.nan_to_num(w[:0].mean()) + w.sum(),
    "logsumexp": lambda x, w: torch.logsumexp(w[:, :0], 1).exp().sum() + w.sum(),
    "logsumexp itself": lambda x, w: torch.logsumexp(w[:, :0], 1).sum() + w.sum(),
    "softmax": lambda x, w: w[:0].softmax(-1).sum() + w[:, :0].log_softmax(-1).sum() + w.sum(),
    "losses": lambda x, w: F.cross_entropy(w[:0], NONE, reduction="sum") + F.mse_loss(w[:0], x[:0]) + w.sum(),
    "layer norm": lambda x, w: F.layer_norm(x[:0], (6,), w[0], w[1]).sum() + w.sum(),
    "batch norm": lambda x, w: F.batch_norm(x[:0], torch.zeros(6), torch.ones(6), w[0], w[1]).sum() + w.sum(),
    "convolution": lambda x, w: F.conv1d(x.view(4, 1, 6)[:0], w[:, :3].unsqueeze(1), w[:, 0]).sum() + w.sum(),
    "pools": lambda x, w: sum(p((x * w).view(4, 1, 2, 3)[:0], 2).sum() for p in (F.max_pool2d, F.avg_pool2d)) + w.sum(),
    "attention without queries": lambda x, w: F.scaled_dot_product_attention(
        *(3 * [w.view(1, 2, 2, 6)[:, :, :0]])
    ).sum(),
    "lookups": lambda x, w: F.embedding(NONE, w).sum() + w.index_add(0, NONE, x[:0]).sum() + w[NONE].sum(),
    "writes": lambda x, w: w.index_put((NONE,), x[:0]).sum() + w.scatter_add(1, NONE.view(1, 0), x[:, :0]).sum(),
    "scans": lambda x, w: w[:, :0].cumsum(1).sum() + w[:0].sort(0).values.sum() + w[:0].flip(0).sum(),
    "a mask that is false": lambda x, w: (w[x > 100] * 2).sum() + w.sum(),
    "rotary parts": lambda x, w: torch.cat([w[..., :3] * x[..., 3:], w[..., 3:6], w[..., 6:]], -1).square().sum(),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step(name):
    """The second step runs compiled. A parameter without elements is trained beside the others."""
    loss_of = CASES[name]

    def build():
        w, empty = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.zeros(0, 3))
        opt = torch.optim.Adam([w, empty], lr=0.1)

        def step(x):
            opt.zero_grad()
            loss = loss_of(x, w) + empty.sum()
            loss.backward()
            nn.utils.clip_grad_norm_([w, empty], 1.0)
            opt.step()
            return loss.detach()

        x = torch.randn(4, 6)
        return step, [(x,), (x,)], lambda: [w, w.grad, empty.grad]

    steps.check(build)


@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}], ids=str
)
@pytest.mark.parametrize("kind,shape", [(nn.BatchNorm1d, (3,)), (nn.BatchNorm1d, (3, 4)), (nn.BatchNorm2d, (3, 2, 2))])
def test_running_statistics_of_an_empty_batch(kind, shape, options):
    """They stay, and the batch is counted."""

    def build():
        norm, scale = kind(3, **options), nn.Parameter(torch.ones(()))

        def step(x):
            scale.grad = None
            norm(x * scale).square().sum().backward()
            return scale.grad.clone()

        data = [(torch.randn(rows, *shape),) for rows in (4, 0, 0, 4, 0, 4)]
        return step, data, lambda: list(norm.buffers())

    steps.check(build, atol=1e-4)
