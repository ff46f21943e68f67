"""What a replayed step sees and refuses: every rule of "what replay means", each against the eager run.

The captured graph is interpreted in PyTorch here (`backend="interpret"`), so that only capture, guards and replay are
under test.
"""

from __future__ import annotations

import dataclasses
import time
import types

import pytest
import torch
from replay_case import Case, interpreted, plain, refused
from torch import nn

import nova

SCALE = 1.0
SETTINGS = types.SimpleNamespace(scale=2.0, deep=types.SimpleNamespace(shift=0.0))
HISTORY: list[float] = []


def test_second_call_does_not_capture():
    case = Case(plain)
    for _ in range(4):
        case.call()
    assert case.captures == 1


def test_load_state_dict_and_data_copy():
    case = Case(plain, lambda ps: torch.optim.AdamW(ps, lr=0.01))
    case.call()
    case.call()
    saved = {k: torch.full_like(v, 0.1) for k, v in case.sides[0][0].state_dict().items()}
    case.do(lambda m, o: m.load_state_dict(saved))
    case.call()
    case.do(lambda m, o: o.load_state_dict(o.state_dict()))
    case.call()
    case.do(lambda m, o: m[0].weight.data.copy_(torch.eye(3, 4)))
    case.call()
    assert case.captures == 1


def test_parameter_replaced_by_another_object():
    case = Case(lambda m, o: lambda x: m(x).square().mean().detach())
    case.call()
    case.call()
    case.do(lambda m, o: setattr(m[0], "weight", nn.Parameter(torch.ones(3, 4))))
    assert case.call() != 0
    case.do(lambda m, o: setattr(m[0], "weight", nn.Parameter(torch.full((3, 4), 2.0))))
    case.call()
    assert case.captures == 1


def test_parameter_the_optimizer_no_longer_holds():
    case = Case(plain)
    case.call()
    case.call()
    case.do(lambda m, o: setattr(m[0], "weight", nn.Parameter(torch.ones(3, 4))))
    case.call()
    case.call()


def test_data_swapped_between_steps():
    case = Case(plain)
    case.call()
    case.call()
    case.do(lambda m, o: setattr(m[0].weight, "data", torch.full((3, 4), 0.5)))
    case.call()
    case.call()
    assert case.captures == 1


def test_data_of_another_layout():
    case = Case(plain)
    case.call()
    case.call()
    case.do(lambda m, o: setattr(m[0].weight, "data", torch.full((4, 3), 0.5).t()))
    case.call()
    case.call()


def test_two_parameters_come_to_share_memory():
    def step_of(model, optimizer):
        def step(x):
            with torch.no_grad():
                model[0].add_(1.0)
                model[1].mul_(2.0)
            return (model[0] + model[1]).sum()

        return step

    case = Case(step_of, make_model=lambda: nn.ParameterList([torch.ones(4), torch.ones(4)]))
    case.call()
    case.call()
    case.do(lambda m, o: setattr(m[1], "data", m[0].data))
    case.call()
    assert case.captures == 2


def test_module_flag_and_train_mode():
    case = Case(plain, make_model=lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    case.call()
    case.do(lambda m, o: m.eval())
    case.call()
    case.do(lambda m, o: m.train())
    case.call()
    assert case.captures == 2, "going back to training costs nothing"
    case.do(lambda m, o: setattr(m[1], "momentum", 0.5))
    case.call()
    assert case.captures == 3


def test_train_mode_set_inside_the_step_is_replayed():
    def step_of(model, optimizer):
        def step(x, train):
            model.train(train)
            with torch.set_grad_enabled(train):
                loss = model(x).square().mean()
            if train:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        return step

    case = Case(step_of, make_model=lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for train in (True, False, False, True, True, False):
        case.call(train)
    assert case.captures == 2


def test_hook_added_later():
    case = Case(plain)
    case.call()
    case.call()
    hooks = []
    case.do(lambda m, o: hooks.append(m[0].register_forward_hook(lambda mod, args, out: out * 2)))
    case.call()
    for hook in hooks:
        hook.remove()
    case.call()
    assert case.captures == 2


def test_global_hook_added_later():
    case = Case(plain)
    case.call()
    hook = nn.modules.module.register_module_forward_hook(lambda mod, args, out: out + 1)
    try:
        case.call()
    finally:
        hook.remove()
    case.call()
    assert case.captures == 2


def test_forward_replaced_on_the_instance():
    case = Case(plain)
    case.call()
    case.do(lambda m, o: setattr(m[1], "forward", torch.relu))
    case.call()


def test_learning_rate_and_hyperparameters_do_not_capture():
    case = Case(plain, lambda ps: torch.optim.AdamW(ps, lr=0.01))
    case.call()
    for lr in (0.02, 0.5, 0.0):
        case.do(lambda m, o, lr=lr: o.param_groups[0].update(lr=lr, betas=(0.5, 0.9 + lr / 10), weight_decay=lr))
        case.call()
    assert case.captures <= 2  # AdamW looks at whether weight decay is zero


def test_optimizer_flag_changes():
    case = Case(plain, lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9))
    case.call()
    case.do(lambda m, o: o.param_groups[0].update(nesterov=True))
    case.call()
    case.do(lambda m, o: o.param_groups[0].update(maximize=True))
    case.call()
    assert case.captures == 3


def test_parameter_group_added():
    case = Case(plain)
    case.do(lambda m, o: o.param_groups[0]["params"].remove(m[2].bias) if False else o.param_groups[0]["params"].pop())
    case.call()
    case.do(lambda m, o: o.add_param_group({"params": [m[2].bias], "lr": 0.5}))
    case.call()
    assert case.captures == 2


def test_freeze_and_unfreeze():
    case = Case(plain, lambda ps: torch.optim.Adam(ps, lr=0.01))
    case.do(lambda m, o: m[0].requires_grad_(False))
    case.call()
    case.call()
    case.do(lambda m, o: m[0].requires_grad_(True))
    case.call()
    case.call()
    case.do(lambda m, o: m[0].requires_grad_(False))
    case.call()
    assert case.captures <= 3


def test_grad_kept_across_calls():
    def step_of(model, optimizer):
        def step(x, last):
            loss = model(x).square().mean()
            loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        return step

    case = Case(step_of)
    for i in range(9):
        case.call(i % 3 == 2)
    assert case.captures == 3  # first, later, and last micro-batch


def test_grad_set_by_the_user_between_steps():
    def step_of(model, optimizer):
        def step(x):
            model(x).square().mean().backward()
            optimizer.step()

        return step

    case = Case(step_of)
    case.call()
    case.do(lambda m, o: m.zero_grad())
    case.call()
    case.do(lambda m, o: setattr(m[0].weight, "grad", torch.ones(3, 4)))
    case.call()


def test_held_loss_is_not_overwritten():
    case = Case(plain)
    losses = [case.call() for _ in range(3)]
    assert len({float(loss) for loss in losses}) == 3
    assert len({loss.data_ptr() for loss in losses}) == 3


def test_closure_number_changes():
    def step_of(model, optimizer):
        weight = 1.0

        def step(x):
            loss = model(x).square().mean() * weight
            loss.backward()
            return loss.detach()

        def change(value):
            nonlocal weight
            weight = value

        step.change = change
        return step

    case = Case(step_of)
    changes = [cell for side in case.sides for cell in [getattr(side[2], "function", side[2]).change]]
    case.call()
    for value in (3.0, 3, True, 1.0):
        case.do(lambda m, o: m.zero_grad())
        for change in changes:
            change(value)
        case.call()


def test_global_and_attribute_paths():
    global SCALE

    def step_of(model, optimizer):
        return lambda x: model(x).sum().detach() * SCALE * SETTINGS.scale + SETTINGS.deep.shift

    case = Case(step_of)
    try:
        case.call()
        SCALE = 4.0
        case.call()
        SETTINGS.scale = 5.0
        case.call()
        SETTINGS.deep.shift = 1.5
        case.call()
        assert case.captures == 4
        SETTINGS.deep = types.SimpleNamespace(shift=1.5)
        case.call()
    finally:
        SCALE, SETTINGS.scale, SETTINGS.deep.shift = 1.0, 2.0, 0.0


def test_global_shadows_a_builtin():
    def step_of(model, optimizer):
        return lambda x: model(x).sum().detach() * abs(-2.0)

    case = Case(step_of)
    case.call()
    globals()["abs"] = lambda value: 7.0
    try:
        case.call()
    finally:
        del globals()["abs"]
    case.call()


@dataclasses.dataclass
class Config:
    scale: float = 1.0
    tags: list = dataclasses.field(default_factory=list)


def test_config_object_reached_through_self():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.config = nn.Linear(4, 2), Config()

        def forward(self, x):
            c = self.config
            return self.fc(x) * c.scale * (1 + len(c.tags))

    case = Case(plain, make_model=Model)
    case.call()
    case.do(lambda m, o: setattr(m.config, "scale", 3.0))
    case.call()
    case.do(lambda m, o: m.config.tags.append("x"))
    case.call()
    case.do(lambda m, o: setattr(m, "config", Config(3.0, ["x"])))
    case.call()
    assert case.captures == 3, "an equal config is no change"


def test_function_redefined():
    space = {"torch": torch}
    exec("def activation(x): return torch.tanh(x)\ndef loss(x): return activation(x).mean()", space)

    def step_of(model, optimizer):
        return lambda x: space["loss"](model(x)).detach()

    case = Case(step_of)
    case.call()
    exec("def activation(x): return torch.relu(x)", space)
    case.call()


def test_list_of_modules_and_dict_entries():
    table = {"gain": 2.0, "names": ["a", "b"]}

    def step_of(model, optimizer):
        def step(x):
            out = x
            for name in table["names"]:
                out = out * (table["gain"] if name == "a" else 3.0)
            return out.sum()

        return step

    case = Case(step_of)
    case.call()
    table["gain"] = 4.0
    case.call()
    table["names"].append("c")
    case.call()
    table["names"][0] = "z"
    case.call()
    assert case.captures == 4


def test_argument_kinds():
    def step_of(model, optimizer):
        def step(x, mode="a", *, flags=(1, 2), extra=None):
            out = model(x).sum().detach() * flags[0]
            if mode == "b":
                out = out + 1
            if extra is not None:
                out = out + extra["t"].sum() * extra["k"]
            return {"out": out, "mode": mode, "pair": (out, [out])}

        return step

    case = Case(step_of)
    case.call()
    case.call("b")
    case.call(mode="b")
    case.call("b", flags=(5, 2))
    case.call("b", extra={"t": torch.ones(3), "k": 2})
    case.call("b", extra={"t": torch.ones(3), "k": 3})
    case.call("b", extra={"t": torch.full((3,), 2.0), "k": 3})
    case.call("b")
    assert case.captures == 6


def test_float_argument_is_an_input():
    case = Case(lambda m, o: lambda x, beta: (m(x) * beta).sum().detach())
    for beta in (0.5, 0.25, -3.0):
        case.call(beta)
    assert case.captures == 1


def test_float_argument_that_decides_is_guarded():
    case = Case(lambda m, o: lambda x, beta: (m(x) * (1.0 if beta > 0.5 else 2.0)).sum().detach())
    for beta in (0.1, 0.2, 0.9, 0.8, 0.3):
        case.call(beta)
    assert case.captures == 2


def test_grad_mode_autocast_and_default_dtype():
    case = Case(lambda m, o: lambda x: (m(x) @ torch.ones(2, 2)).sum())
    assert case.call().requires_grad is False
    with torch.no_grad():
        case.call()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        case.call()
    case.call()
    assert case.captures == 3


def test_shapes_and_dtypes(capfd):
    case = Case(lambda m, o: lambda x: m(x).sum().detach())
    for rows in (5, 5, 3, 5, 2, 7):
        case.call(rows=rows)
    assert case.captures == 4
    told = capfd.readouterr().err
    assert "dimension 0 was 5, is now 3" in told
    assert "Pad it" in told


def test_arguments_that_come_to_alias():
    def step(a, b):
        a.add_(1.0)
        return a + b

    compiled = interpreted(step)
    for _ in range(2):
        a, b = torch.zeros(3), torch.zeros(3)
        torch.testing.assert_close(compiled(a, b), torch.ones(3))
    a = torch.zeros(3)
    torch.testing.assert_close(compiled(a, a), torch.full((3,), 2.0))
    base = torch.zeros(4)
    torch.testing.assert_close(compiled(base[:3], base[1:]), torch.tensor([2.0, 2.0, 1.0]))
    a, b = torch.zeros(3), torch.zeros(3)
    torch.testing.assert_close(compiled(a, b), torch.ones(3))


def test_argument_that_is_a_parameter():
    model = nn.Linear(3, 3)

    def step(x):
        with torch.no_grad():
            model.weight.mul_(2.0)
        return (x + model.weight).detach()

    compiled = interpreted(step)
    compiled(torch.zeros(3, 3))
    compiled(torch.zeros(3, 3))
    before = model.weight.detach().clone()
    torch.testing.assert_close(compiled(model.weight), before * 4)


# ---- schedulers


@pytest.mark.parametrize("kind", ["one_cycle", "cosine", "sequential"])
def test_scheduler_is_replayed(kind):
    def scheduler(optimizer):
        lrs = torch.optim.lr_scheduler
        if kind == "one_cycle":
            return lrs.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
        if kind == "cosine":
            return lrs.CosineAnnealingLR(optimizer, 10)
        parts = [lrs.LinearLR(optimizer, 0.1, total_iters=2), lrs.ExponentialLR(optimizer, 0.9)]
        return lrs.SequentialLR(optimizer, parts, milestones=[3])

    def step_of(model, optimizer):
        inside = scheduler(optimizer)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            inside.step()
            return loss.detach()

        return step

    case = Case(step_of, lambda ps: torch.optim.AdamW(ps, lr=0.01))
    for _ in range(7):
        case.call()
    assert case.captures == 1


def test_scheduler_outside_the_step():
    case = Case(plain, lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9))
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for _, o, _ in case.sides]
    for _ in range(6):
        case.call()
        for s in schedulers:
            s.step()
    assert case.captures == 1


def test_learning_rate_returned_by_the_step():
    def step_of(model, optimizer):
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rate = optimizer.param_groups[0]["lr"]
            schedule.step()
            return loss.detach(), rate

        return step

    case = Case(step_of)
    assert [case.call()[1] for _ in range(3)] == pytest.approx([0.1, 0.05, 0.025])
    assert case.captures == 1


def test_learning_rate_that_a_scheduler_moved_decides():
    def step_of(model, optimizer):
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            if optimizer.param_groups[0]["lr"] > 0.01:
                loss = loss * 2
            optimizer.zero_grad()
            return loss.detach()

        return step

    refused(step_of, "after a scheduler has moved it")


def test_last_learning_rate():
    def step_of(model, optimizer, before):
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def step(x):
            rate = schedule.get_last_lr()[0] if before else 0.0
            model(x).square().mean().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            return torch.tensor(rate if before else schedule.get_last_lr()[0])

        return step

    case = Case(lambda m, o: step_of(m, o, True))
    for _ in range(3):
        case.call()  # read before it moves: guarded, so each value is a capture
    refused(lambda m, o: step_of(m, o, False), "get_last_lr")


# ---- exceptions of the user's


def test_exception_leaves_what_eager_leaves():
    def step_of(model, optimizer):
        log = []

        def step(x, fail):
            loss = model(x).square().mean()
            loss.backward()
            log.append(1)
            if fail:
                raise KeyError("user")
            log.pop()
            return loss.detach()

        step.log = log
        return step

    case = Case(step_of)
    for _, _, step in case.sides:
        with pytest.raises(KeyError, match="user"):
            step(torch.ones(2, 4), True)
        assert getattr(step, "function", step).log == [1]
        getattr(step, "function", step).log.clear()
    case.same_state()
    case.call(False)
    case.call(False)


def test_number_that_changes_on_every_call_is_announced(capfd):
    case = Case(lambda m, o: lambda x, epoch: m(x).sum().detach() * epoch)
    for epoch in range(4):
        case.call(epoch)
    told = capfd.readouterr().err
    assert "3 values" in told and "float argument" in told


def test_grad_scaler():
    def step_of(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss.detach(), torch.tensor(scaler.get_scale())

        return step

    case = Case(step_of)
    for _ in range(5):
        case.call()
    assert case.captures <= 2


def test_garbage_collection_callbacks_are_not_the_step(monkeypatch):
    """A callback that reads the clock, as profilers and test tools install them, runs whenever memory is collected."""
    import gc

    seen = []

    def callback(phase, info):
        seen.append(time.perf_counter())

    w = torch.nn.Parameter(torch.ones(3))

    def step():
        gc.collect()
        w.grad = None
        (w * 2).sum().backward()
        return w.grad

    gc.callbacks.append(callback)
    try:
        assert torch.equal(nova.jit(step)(), torch.full((3,), 2.0))
    finally:
        gc.callbacks.remove(callback)
    assert seen
