"""Reads of values: those that follow from the step's own numbers are the same on every replay, others are refused."""

from __future__ import annotations

import pytest
import torch
from steps import check
from torch import nn

import nova
from nova.errors import CaptureError


def _packed(x, m, lengths):
    rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(m(rows)[0], batch_first=True, total_length=x.shape[1])[0]


# values that are read and follow from Python numbers alone
CONSTANT_READS = {
    "sum": lambda x: x * torch.tensor([1.0, 2.0, 3.0]).sum().item(),
    "decision": lambda x: x * 2 if (torch.arange(3) > 1).any() else x * 3,
    "written in place": lambda x: x * float(torch.tensor([1.0, 2.0]).mul_(3.0).add_(torch.ones(2)).max()),
    "cov": lambda x: torch.cov(x).square() + torch.corrcoef(x),
    "istft": lambda x: torch.istft(
        torch.stft(x.flatten()[:16], 4, 2, window=torch.hann_window(4), return_complex=True), 4, 2,
        window=torch.hann_window(4),
    ),
    "equal": lambda x: x * 2 if torch.equal(torch.arange(3), torch.tensor([0, 1, 2])) else x,
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTANT_READS)
def test_values_of_constants_may_be_read(name):
    def build():
        w = nn.Parameter(torch.randn(5, 5))

        def step(x):
            w.grad = None
            CONSTANT_READS[name](x * w).sum().backward()
            return w.grad.clone()

        return step, [(torch.randn(5, 5),) for _ in range(3)], lambda: [w]

    check(build, backend="interpret")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_of_lengths_that_the_step_writes(kind):
    def build():
        m = kind(3, 4, batch_first=True, bidirectional=True)
        lengths = [4, 2, 3]

        def step(x):
            m.zero_grad()
            loss = _packed(x, m, torch.tensor(lengths)).square().sum()
            loss.backward()
            return loss.detach()

        def shorter():
            lengths[1] = 1

        data = [(torch.randn(3, 4, 3),) for _ in range(4)]
        data.insert(2, shorter)
        return step, data, lambda: [p.grad for p in m.parameters()]

    step = check(build, backend="interpret")
    assert step.captures == 2


@pytest.mark.parametrize(
    "read",
    [
        lambda x, k: x * x.sum().item(),
        lambda x, k: x * torch.rand(3).sum().item(),
        lambda x, k: x * torch.poisson(torch.ones(3)).sum().item(),
        lambda x, k: x * torch.randperm(3)[0].item(),
        lambda x, k: x * (torch.ones(3) * k).sum().item(),
        lambda x, k: x * torch.tensor([1.0, k, 2.0]).sum().item(),
        lambda x, k: x * torch.zeros(3).add_(x[0, 0]).sum().item() if k else x,
    ],
)
def test_other_values_may_not_be_read(read):
    step = nova.jit(read, backend="interpret")
    for _ in range(2):
        with pytest.raises(CaptureError, match="reads a tensor's value"):
            step(torch.ones(5, 5), 2.0)
