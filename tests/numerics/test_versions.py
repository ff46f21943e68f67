"""What a replay writes counts as written where eager's writes do: autograd then finds what was changed behind it."""

from __future__ import annotations

import pytest
import torch
from replay_case import interpreted
from torch import nn

import nova
from nova.capture import versions

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "sgd foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, momentum=0.9),
    "nadam": torch.optim.NAdam,
}


def _tensors(model, optimizer):
    found = dict(model.named_buffers())
    for name, parameter in model.named_parameters():
        state = {key: value for key, value in optimizer.state.get(parameter, {}).items() if torch.is_tensor(value)}
        found |= {name: parameter, f"{name}.grad": parameter.grad}
        found |= {f"{name}.{key}": value for key, value in state.items()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _moved(make_optimizer, transform):
    """Which of the tensors that stay had their versions moved, for each of the last two of four steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = make_optimizer(model.parameters())
    held = {"counted": torch.zeros(3), "behind": torch.zeros(3)}

    def function(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        held["behind"].data.add_(1)
        held["counted"].add_(1)
        x.mul_(2)
        return loss.detach()

    step, found = transform(function), []
    for _ in range(4):
        held["x"] = torch.randn(5, 4)
        before = {name: (t, t._version) for name, t in (_tensors(model, optimizer) | held).items()}
        step(held["x"])
        now = _tensors(model, optimizer) | held
        found.append({name: t._version != was for name, (t, was) in before.items() if now.get(name) is t})
    return found[2:]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("transform", [nova.jit, interpreted])
def test_versions_move_as_eager_moves_them(name, transform):
    assert _moved(OPTIMIZERS[name], transform) == _moved(OPTIMIZERS[name], lambda f: f)


def test_a_backward_through_what_a_replay_wrote_is_refused():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    @nova.jit
    def step(x):
        (weight * x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    x = torch.ones(3)
    step(x)
    loss = weight.square().sum()
    step(x)
    assert step.captures + step.loads == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("native", [True, False])
def test_views_count_with_what_they_view_and_inference_tensors_do_not(native):
    base, other = torch.zeros(4), torch.zeros(4)
    with torch.inference_mode():
        inference = torch.zeros(2)
    versions.bumper([0, 2], native)([base[1:], other, inference])
    assert (base._version, other._version) == (1, 0)


def test_native_code_finds_the_counters():
    assert versions._native() is not None
