"""`nova.verify` accepts a right step without touching its state, and names the line of a wrong one."""

import pytest
import torch
from torch import nn

import nova
from nova.dialect import emit, emit_elementwise  # noqa: F401  (fills the table)


def training_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x, target):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, model, optimizer, (torch.randn(8, 6), torch.randint(4, (8,)))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_right_step_is_verified_and_nothing_changes(compiled):
    step, model, optimizer, batch = training_step()
    if compiled:
        step = nova.jit(step)
        step(*batch)
    before = [p.detach().clone() for p in model.parameters()]
    entries, generator = len(optimizer.state), torch.get_rng_state()
    result = nova.verify(step, *batch)
    assert result and "verified" in str(result) and len(result.checks) > len(before)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert len(optimizer.state) == entries and torch.equal(torch.get_rng_state(), generator)


def test_the_first_wrong_value_is_named(monkeypatch):
    monkeypatch.setitem(emit.EMITTERS, "aten::tanh.default", emit.EMITTERS["aten::sin.default"])
    step, _, _, batch = training_step()
    result = nova.verify(step, *batch)
    assert not result and "first wrong value: WRONG: tanh" in str(result)
    assert "line" in result.first_wrong.where
