"""Two runs of one small training step, eager and captured, and what a refusal must say: shared by the replay tests."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nova
from nova.errors import CaptureError


def interpreted(function):
    return nova.jit(function, backend="interpret")


class Case:
    """A small model with an optimizer, made twice from one seed: one side runs eagerly, the other compiled."""

    def __init__(self, make_step, make_optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), make_model=None):
        self.sides = []
        for wrap in (lambda f: f, interpreted):
            torch.manual_seed(0)
            model = make_model() if make_model else nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
            optimizer = make_optimizer(model.parameters())
            self.sides.append((model, optimizer, wrap(make_step(model, optimizer))))
        self.step = self.sides[1][2]
        self.data = torch.Generator().manual_seed(1)

    def call(self, *extra, rows=5, **named):
        """One step on both sides, with the same batch; outputs and parameters must agree."""
        x = torch.randn(rows, 4, generator=self.data)
        outs = [step(x.clone(), *extra, **named) for _, _, step in self.sides]
        flat = [torch.utils._pytree.tree_leaves(out) for out in outs]
        for a, b in zip(*flat, strict=True):
            if not isinstance(a, (torch.Tensor, float)):
                assert a == b
                continue
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
        self.same_state()
        return outs[1]

    def same_state(self):
        (a, oa, _), (b, ob, _) = self.sides
        for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
            torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
            assert (p.grad is None) == (q.grad is None), f"{name}.grad"
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=1e-6)
            assert p.requires_grad == q.requires_grad
        for p, q in zip(a.buffers(), b.buffers(), strict=True):
            torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6)
        assert [m.training for m in a.modules()] == [m.training for m in b.modules()]
        for g, h in zip(oa.param_groups, ob.param_groups, strict=True):
            for key in g.keys() - {"params"}:
                assert g[key] == h[key], key

    def do(self, change):
        """A change of the user's between two steps, on both sides."""
        for model, optimizer, _ in self.sides:
            change(model, optimizer)

    @property
    def captures(self):
        return self.step.captures


def plain(model, optimizer):
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def refused(step_of, *words, args=()):
    """The first call raises, names the file of the step, a line and `words`, and leaves the model as it was."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = [p.detach().clone() for p in model.parameters()]
    step = interpreted(step_of(model, optimizer))
    for _ in range(2):  # a refused capture is not cached
        with pytest.raises(CaptureError) as caught:
            step(torch.ones(3, 4), *args)
        text = str(caught.value)
        assert "line" in text and "replay_" in text, text
        for word in words:
            assert word in text, text
    for p, was in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), was, rtol=0, atol=0)
        assert p.grad is None
    assert not optimizer.state
    return text


def training(model, optimizer, also, before=True):
    """A whole training step with something extra in it."""

    def step(x, *rest):
        if before:
            also()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if not before:
            also()
        optimizer.zero_grad()
        return loss.detach()

    return step
