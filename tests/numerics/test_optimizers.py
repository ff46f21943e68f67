"""Every optimizer that Nova recognises, with its options, against PyTorch's own; schedules, clipping, accumulation."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from steps import check

SGD, Adam, AdamW, Adagrad, RMSprop = (getattr(torch.optim, n) for n in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop"))
OPTIMIZERS = [
    (SGD, {"lr": 0.1}), (SGD, {"lr": 0.1, "momentum": 0.9}), (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}), (SGD, {"lr": 0.1, "maximize": True}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}), (SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    (Adam, {"lr": 1e-2}), (Adam, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}), (Adam, {"lr": 1e-2, "fused": True}),
    (Adam, {"lr": 1e-2, "maximize": True}), (AdamW, {"lr": 1e-2}), (AdamW, {"lr": 1e-2, "foreach": True}),
    (AdamW, {"lr": 1e-2, "amsgrad": True, "betas": (0.8, 0.95), "eps": 1e-6}), (AdamW, {"lr": 1e-2, "fused": True}),
    (AdamW, {"lr": torch.tensor(1e-2)}),
    (Adagrad, {"lr": 0.1}), (Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2}),
    (RMSprop, {"lr": 1e-2}), (RMSprop, {"lr": 1e-2, "centered": True, "momentum": 0.9, "weight_decay": 0.1}),
]  # fmt: skip


def network(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*[m for a, b in zip(sizes, sizes[1:]) for m in (nn.Linear(a, b), nn.Tanh())][:-1])


def optimizer_tensors(*optimizers) -> list[torch.Tensor]:
    return [t for o in optimizers for s in o.state.values() for t in s.values() if isinstance(t, torch.Tensor)]


def updated(kind, options, updates, steps):
    """How to build a step that updates its network so many times, for the same gradient."""

    def build():
        m = network(5, 17, 3)
        opt = kind(m.parameters(), **options)

        def step(x):
            opt.zero_grad()
            loss = m(x).square().mean()
            loss.backward()
            for _ in range(updates):
                opt.step()
            return loss.detach()

        return step, [(torch.randn(4, 5),) for _ in range(steps)], lambda: [*m.parameters(), *optimizer_tensors(opt)]

    return build


@pytest.mark.parametrize("kind,options", OPTIMIZERS, ids=lambda v: v.__name__ if isinstance(v, type) else "-".join(v))
def test_optimizer(kind, options):
    step = check(updated(kind, options, updates=1, steps=5))
    assert step.captures == 1, "one capture serves the first step and all later ones"


@pytest.mark.parametrize("kind,options", OPTIMIZERS, ids=lambda v: v.__name__ if isinstance(v, type) else "-".join(v))
def test_updates_of_what_was_updated(kind, options):
    """The second update of a parameter, by the same numbers and of the same gradient, reads what the first one made."""
    assert check(updated(kind, options, updates=3, steps=3)).captures == 1


@pytest.mark.parametrize("change", ["lr", "weight_decay", "betas"])
def test_hyperparameters_are_runtime_inputs(change):
    def build():
        m = network(5, 9, 3)
        opt = AdamW(m.parameters(), lr=1e-2)
        values = {
            "lr": [1e-3, 5e-2, 1e-1],
            "weight_decay": [0.1, 0.2, 0.3],
            "betas": [(0.8, 0.9), (0.5, 0.99), (0.9, 0.95)],
        }

        def step(x):
            opt.zero_grad()
            loss = m(x).square().mean()
            loss.backward()
            opt.step()
            return loss.detach()

        def change_to(v):
            return lambda: opt.param_groups[0].update({change: v})

        data = [(torch.randn(4, 5),)]
        for v in values[change]:
            data += [change_to(v), (torch.randn(4, 5),)]
        return step, data, lambda: [*m.parameters(), *optimizer_tensors(opt)]

    assert check(build).captures == 1


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("kind", ["OneCycleLR", "CosineAnnealingLR", "StepLR", "LambdaLR"])
def test_schedules(kind, inside):
    def build():
        m = network(5, 9, 3)
        opt = AdamW(m.parameters(), lr=1e-2)
        S = torch.optim.lr_scheduler
        schedule = {"OneCycleLR": lambda: S.OneCycleLR(opt, max_lr=1e-2, total_steps=12),
                    "CosineAnnealingLR": lambda: S.CosineAnnealingLR(opt, 10), "StepLR": lambda: S.StepLR(opt, 2),
                    "LambdaLR": lambda: S.LambdaLR(opt, lambda i: 0.9**i)}[kind]()  # fmt: skip

        def step(x):
            opt.zero_grad()
            loss = m(x).square().mean()
            loss.backward()
            opt.step()
            if inside:
                schedule.step()
            return loss.detach()

        data = []
        for _ in range(8):
            data += [(torch.randn(4, 5),)] + ([] if inside else [schedule.step])
        lr = lambda: torch.tensor(opt.param_groups[0]["lr"])
        return step, data, lambda: [*m.parameters(), lr(), torch.tensor(schedule.last_epoch)]

    assert check(build).captures == 1


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("how", ["norm2", "norm_inf", "norm1", "value"])
def test_clipping(how, foreach):
    def build():
        m = network(5, 16, 1)
        opt = SGD(m.parameters(), lr=1.0)

        def step(x, scale):
            opt.zero_grad()
            (m(x).square().mean() * scale).backward()
            if how == "value":
                nn.utils.clip_grad_value_(m.parameters(), 0.01, foreach=foreach)
                out = m[0].weight.grad.clone()
            else:
                order = {"norm2": 2.0, "norm_inf": float("inf"), "norm1": 1.0}[how]
                out = nn.utils.clip_grad_norm_(m.parameters(), 0.1, norm_type=order, foreach=foreach)
            opt.step()
            return out

        data = [(torch.randn(4, 5), torch.tensor(s)) for s in (1.0, 100.0, 0.0, 1e-3, float("inf"))]
        return step, data, lambda: [*m.parameters()]

    check(build)


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation(calls, set_to_none):
    def build():
        m = network(10, 7, 1)
        opt = Adam(m.parameters(), lr=1e-2)

        def step(x, last):
            loss = m(x).square().sum() / calls
            loss.backward()
            if last:
                opt.step()
                opt.zero_grad(set_to_none=set_to_none)
            return loss.detach()

        data = [(torch.randn(2, 10), i % calls == calls - 1) for i in range(4 * calls + 1)]
        grads = lambda: [p.grad for p in m.parameters() if p.grad is not None]
        return step, data, lambda: [*m.parameters(), *grads()]

    check(build)


def test_two_groups_frozen_and_shared():
    def build():
        m = network(6, 6, 6, 1)
        m[0].bias.requires_grad_(False)
        m[2].weight = m[0].weight
        opt = Adam([{"params": [m[0].weight], "lr": 3e-3}, {"params": m[4].parameters(), "weight_decay": 0.1}], lr=1e-2)

        def step(x):
            opt.zero_grad()
            loss = m(x).square().mean()
            loss.backward()
            opt.step()
            return {"loss": loss.detach(), "twice": (loss.detach() * 2, None, "text", 3)}

        def thaw():
            m[0].bias.requires_grad_(True)

        def add():
            opt.add_param_group({"params": [m[0].bias]})

        data = [
            (torch.randn(4, 6),),
            (torch.randn(4, 6),),
            thaw,
            (torch.randn(4, 6),),
            add,
            (torch.randn(4, 6),),
            (torch.randn(4, 6),),
        ]
        return step, data, lambda: [*m.parameters(), *optimizer_tensors(opt)]

    check(build)


def test_resume_from_state_dict():
    def build():
        m = network(5, 9, 3)
        opt = AdamW(m.parameters(), lr=1e-2)
        saved = {}

        def step(x):
            opt.zero_grad()
            loss = m(x).square().mean()
            loss.backward()
            opt.step()
            return loss.detach()

        def save():
            saved.update(
                m={k: v.clone() for k, v in m.state_dict().items()}, o=__import__("copy").deepcopy(opt.state_dict())
            )

        def load():
            m.load_state_dict(saved["m"])
            opt.load_state_dict(saved["o"])

        x = [(torch.randn(4, 5),) for _ in range(7)]
        return (
            step,
            [x[0], x[1], save, x[2], x[3], load, x[4], x[5], x[6]],
            lambda: [*m.parameters(), *optimizer_tensors(opt)],
        )

    check(build)


@pytest.mark.parametrize("kind", ["NAdam", "RAdam", "Adamax", "Rprop", "Adadelta", "ASGD"])
def test_other_optimizers_still_agree(kind):
    """Optimizers that Nova has no operation for are recorded as the operations they run."""

    def build():
        m = network(5, 9, 3)
        opt = getattr(torch.optim, kind)(m.parameters(), lr=1e-2)

        def step(x):
            opt.zero_grad()
            loss = m(x).square().mean()
            loss.backward()
            opt.step()
            return loss.detach()

        return step, [(torch.randn(4, 5),) for _ in range(4)], lambda: [*m.parameters()]

    check(build)
