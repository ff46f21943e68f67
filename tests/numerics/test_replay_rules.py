"""What a replayed step sees and refuses: every rule of "what replay means", each against the eager run.

The captured graph is interpreted in PyTorch here (`backend="interpret"`), so that only capture, guards and replay are
under test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import itertools
import os
import random
import time
import types

import numpy as np
import pytest
import torch
from torch import nn

import nova
from nova.errors import CaptureError

SCALE = 1.0
SETTINGS = types.SimpleNamespace(scale=2.0, deep=types.SimpleNamespace(shift=0.0))
HISTORY: list[float] = []


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


# ---- refusals: Python that a replay would not run


def refused(step_of, *words, args=()):
    """The first call raises, names this file, a line and `words`, and leaves the model as it was."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = [p.detach().clone() for p in model.parameters()]
    step = interpreted(step_of(model, optimizer))
    for _ in range(2):  # a refused capture is not cached
        with pytest.raises(CaptureError) as caught:
            step(torch.ones(3, 4), *args)
        text = str(caught.value)
        assert "line" in text and "test_replay_rules" in text, text
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


@pytest.mark.parametrize("before", [True, False])
def test_list_mutated(before):
    log: list[int] = []
    refused(lambda m, o: training(m, o, lambda: log.append(1), before), "log", "move this out of the step")
    assert log == []


def test_dict_set_and_global_list_mutated():
    counts, seen = {"n": 0}, set()
    refused(lambda m, o: training(m, o, lambda: counts.update(n=counts["n"] + 1)), "counts['n']", "was 0, is now 1")
    refused(lambda m, o: training(m, o, lambda: seen.add(3)), "seen")
    refused(lambda m, o: training(m, o, lambda: HISTORY.append(1.0)), "HISTORY")
    assert counts == {"n": 0} and not seen and not HISTORY


def test_attributes_written():
    class Trainer:
        calls = 0

        def __init__(self, model, optimizer):
            self.model, self.optimizer, self.seen = model, optimizer, 0

        def step(self, x):
            self.seen += len(x)
            return training(self.model, self.optimizer, lambda: None)(x)

    trainers = []

    def step_of(model, optimizer):
        trainers.append(Trainer(model, optimizer))
        return trainers[0].step

    refused(step_of, "seen", "was 0, is now 3")
    assert trainers[0].seen == 0
    refused(lambda m, o: training(m, o, lambda: setattr(m, "last", 1)), "last")
    refused(lambda m, o: training(m, o, lambda: setattr(Trainer, "calls", 1)), "calls")
    assert Trainer.calls == 0


def test_nonlocal_and_global_written():
    def step_of(model, optimizer):
        calls = 0

        def count():
            nonlocal calls
            calls += 1

        return training(model, optimizer, count)

    refused(step_of, "calls")

    def count_globally():
        global SCALE
        SCALE = SCALE + 1

    refused(lambda m, o: training(m, o, count_globally), "SCALE")
    assert SCALE == 1.0


@pytest.mark.parametrize(
    ("read", "word"),
    [
        (time.time, "time.time()"),
        (time.perf_counter, "time.perf_counter()"),
        (datetime.datetime.now, "datetime.now()"),
        (random.random, "random.random()"),
        (lambda: random.randint(0, 5), "random.randint()"),
        (lambda: random.shuffle([1, 2, 3]), "random.shuffle()"),
        (lambda: np.random.rand(2), "numpy.random.rand()"),
        (lambda: np.random.default_rng(0), "numpy.random.default_rng()"),
        (lambda: os.environ["PATH"], "os.environ"),
        (lambda: os.environ.get("NOVA_NOTHING"), "os.environ"),
        (lambda: os.getenv("PATH"), "os"),
        (lambda: open(__file__).close(), "open()"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reads_of_the_world(read, word):
    refused(lambda m, o: training(m, o, read), word)
    refused(lambda m, o: training(m, o, read, before=False), word)


def test_refusal_survives_the_users_except():
    def read():
        with contextlib.suppress(Exception):
            time.time()

    refused(lambda m, o: training(m, o, read), "time.time()")


def test_numpy_generator_reached_from_outside():
    rng = np.random.default_rng(0)
    refused(lambda m, o: training(m, o, lambda: rng.normal(size=1)), "rng")
    before = random.getstate()
    draw = random.Random.random.__get__(random._inst)
    refused(lambda m, o: training(m, o, lambda: functools.reduce(lambda a, _: draw(), [0, 1])), "random")
    assert random.getstate() == before


def test_iterators():
    loader = iter([torch.ones(3, 4)] * 8)
    refused(lambda m, o: training(m, o, lambda: next(loader)), "loader")
    assert len(list(loader)) == 8
    numbers = itertools.count()
    refused(lambda m, o: training(m, o, lambda: next(numbers)), "numbers")
    generator = (i for i in range(5))
    refused(lambda m, o: training(m, o, lambda: next(generator)), "generator")
    assert list(generator) == list(range(5))
    refused(lambda m, o: training(m, o, lambda: [i for _, i in zip(range(1), iter_of(loader_list))]), "loader_list")


loader_list = iter(list(range(5)))


def iter_of(it):
    yield from it


def test_iterator_made_in_the_step_is_fine():
    case = Case(lambda m, o: lambda x: m(x).sum().detach() * next(iter(m.parameters())).dtype.itemsize)
    case.call()
    case.call()
    assert case.captures == 1


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.item(),
        float,
        lambda t: t.tolist(),
        lambda t: t.numpy(),
        print,
        lambda t: f"{t}",
        lambda t: 1 if t > 3 else 2,
    ],
)
def test_tensor_values_read(read):
    def step_of(model, optimizer):
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            read(loss.detach())
            return loss.detach()

        return step

    refused(step_of)


def test_grad_mode_left_changed():
    try:
        refused(lambda m, o: training(m, o, lambda: torch.set_grad_enabled(False), before=False), "grad mode")
    finally:
        torch.set_grad_enabled(True)


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
    import time

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
