"""Optimizer state that the user clears or replaces between steps: the next step starts anew where eager does."""

from __future__ import annotations

import collections

import pytest
import torch
from replay_case import interpreted
from torch import nn, optim


class Averaged(optim.Optimizer):
    """A user's optimizer that makes its state where there is none."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = p.grad.clone()
                else:
                    state["mean"].mul_(0.9).add_(p.grad)
                p.add_(state["mean"], alpha=-group["lr"])


OPTIMIZERS = {
    "AdamW": lambda ps: optim.AdamW(ps, lr=0.1),
    "amsgrad": lambda ps: optim.Adam(ps, lr=0.1, amsgrad=True),
    "SGD": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "dampened SGD": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.5),
    "RMSprop": lambda ps: optim.RMSprop(ps, lr=0.1, momentum=0.5, centered=True),
    "NAdam": lambda ps: optim.NAdam(ps, lr=0.1),
    "the user's": Averaged,
}
CHANGES = {
    "clear": lambda opt, p: opt.state.clear(),
    "pop": lambda opt, p: opt.state.pop(p),
    "clear one": lambda opt, p: opt.state[p].clear(),
    "another entry": lambda opt, p: opt.state.update({p: {k: v * 0.5 for k, v in opt.state[p].items()}}),
    "another table": lambda opt, p: setattr(opt, "state", collections.defaultdict(dict)),
}
LOOKS = {
    "none": lambda opt, p: 1.0,
    "length": lambda opt, p: 1.0 if len(opt.state) else 2.0,
    "membership": lambda opt, p: 1.0 if p in opt.state else 2.0,
    "state_dict": lambda opt, p: 1.0 if opt.state_dict()["state"] else 2.0,
}


def losses(transform, make_optimizer, change, look):
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = make_optimizer(model.parameters())

    @transform
    def step(x):
        loss = model(x).square().sum() * look(optimizer, model.weight)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    found = []
    for k in range(8):
        if k in (2, 3, 6):
            change(optimizer, model.weight)
        found.append(step(torch.ones(1, 2)))
    return found, [sorted(optimizer.state[p]) for p in model.parameters()]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_changed_between_steps(name, change):
    eager, compiled = (losses(f, OPTIMIZERS[name], CHANGES[change], LOOKS["none"]) for f in (lambda f: f, interpreted))
    torch.testing.assert_close(compiled[0], eager[0], rtol=1e-4, atol=1e-5)
    assert compiled[1] == eager[1]


@pytest.mark.parametrize("look", LOOKS)
def test_a_step_that_looks_whether_there_is_state(look):
    for change in (CHANGES["clear"], CHANGES["another table"]):
        eager, compiled = (losses(f, OPTIMIZERS["AdamW"], change, LOOKS[look]) for f in (lambda f: f, interpreted))
        torch.testing.assert_close(compiled[0], eager[0], rtol=1e-4, atol=1e-5)


def test_state_of_a_parameter_that_takes_no_part_is_not_made_anew():
    """It was trained once, so that it has state; after `state.clear()` eager gives it none."""

    def run(transform):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x):
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step, found = transform(step), []
        for k in range(6):
            if k == 2:
                model.bias.requires_grad_(False)
            if k == 4:
                optimizer.state.clear()
            found.append(step(torch.ones(2, 3)))
        return found, model.bias in optimizer.state

    torch.testing.assert_close(run(interpreted), run(lambda f: f))
