"""Results of PyTorch's operations that only their derivatives read, of shapes that depend on strides or on data."""

from __future__ import annotations

import pytest
import torch
from steps import check
from torch import nn
from torch.nn import functional as F


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_bag_of_column_major_rows(mode):
    def build():
        bag = nn.EmbeddingBag(10, 4, mode=mode)
        bag.weight = nn.Parameter(torch.randn(4, 10).t())
        optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)

        def step(indices, offsets):
            loss = bag(indices, offsets).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        batches = [(torch.randint(10, (7,)), torch.tensor([0, 3, 5])) for _ in range(3)]
        return step, batches, lambda: [bag.weight]

    check(build)


def test_targets_of_other_lengths():
    """What CTC keeps for its derivative is as long as the longest target."""

    def build():
        model = nn.Linear(4, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, targets = torch.randn(12, 2, 4), torch.randint(1, 6, (2, 5))

        def step(lengths):
            given = torch.tensor([12, 12])
            loss = F.ctc_loss(model(x).log_softmax(-1), targets, given, lengths)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, [(torch.tensor([longest, 2]),) for longest in (5, 5, 3, 1)], lambda: list(model.parameters())

    check(build)
