"""Operations without a lowering: run through PyTorch and reported, or refused with the user's line."""

import pytest
import torch

import nova
from nova.errors import UnsupportedError


def test_refused_with_the_line_and_state_unchanged():
    m = torch.nn.Linear(6, 4)
    opt = torch.optim.SGD(m.parameters(), lr=0.1)

    @nova.jit(on_unsupported="error")
    def step(x):
        opt.zero_grad()
        loss = m(x).topk(2).values.sum()
        loss.backward()
        opt.step()
        return loss.detach()

    before = [p.detach().clone() for p in m.parameters()]
    with pytest.raises(UnsupportedError, match=r"(?s)topk.*line \d+.*m\(x\)\.topk"):
        step(torch.randn(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(before, m.parameters()))


def test_counted_otherwise():
    m = torch.nn.Linear(6, 4)

    def step(x):
        return m(x).topk(2).values.sum().detach()

    report = nova.explain(step, torch.randn(3, 6))
    assert len(report.fallbacks) == 1 and "topk" in report.fallbacks[0] and "test_unsupported.py" in report.fallbacks[0]


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(3, 6))])
@pytest.mark.parametrize("inside", [True, False])
def test_torchscript_modules_are_refused_by_name(make, inside):
    scripted = make(torch.nn.Linear(6, 4))
    model = torch.nn.Sequential(scripted, torch.nn.Tanh()) if inside else scripted
    step = nova.jit(lambda x: model(x).sum().backward())
    with pytest.raises(UnsupportedError, match="model.*is a module of TorchScript.*use the module that it was made of"):
        step(torch.randn(3, 6))
    assert all(p.grad is None for p in model.parameters())


def test_functions_of_torchscript_run():
    gate = torch.jit.script(_gate)
    step = nova.jit(lambda x: gate(2 * x))
    for _ in range(2):
        x = torch.randn(3)
        torch.testing.assert_close(step(x), _gate(2 * x))


def _gate(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)
