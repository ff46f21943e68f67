"""Optimizers inside recorded steps: the recognised ones as single operations, the others operation by operation."""

import pytest
import torch
from capture_checks import agree
from torch import nn
from torch.optim import swa_utils

import nova
from nova.errors import CaptureError

O = torch.optim
RECOGNISED = [
    (O.SGD, {"lr": 0.1}),
    (O.SGD, {"lr": 0.1, "momentum": 0.9}),
    (O.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (O.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    (O.SGD, {"lr": 0.1, "maximize": True}),
    (O.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    (O.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    (O.Adam, {"lr": 1e-2}),
    (O.Adam, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}),
    (O.Adam, {"fused": True}),
    (O.Adam, {"lr": 1e-2, "maximize": True}),
    (O.AdamW, {"lr": 1e-2}),
    (O.AdamW, {"lr": 1e-2, "foreach": True}),
    (O.AdamW, {"lr": 1e-2, "amsgrad": True, "betas": (0.8, 0.95), "eps": 1e-6}),
    (O.AdamW, {"fused": True}),
    (O.AdamW, {"lr": torch.tensor(1e-2)}),
    (O.Adagrad, {"lr": 0.1}),
    (O.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2}),
    (O.RMSprop, {"lr": 1e-2}),
    (O.RMSprop, {"lr": 1e-2, "centered": True, "momentum": 0.9, "weight_decay": 0.1}),
]
GENERAL = [
    (O.NAdam, {"lr": 1e-2}),
    (O.NAdam, {"lr": 1e-2, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    (O.RAdam, {"lr": 1e-2}),
    (O.RAdam, {"lr": 1e-2, "decoupled_weight_decay": True, "weight_decay": 0.1, "maximize": True}),
    (O.Adamax, {"lr": 1e-2}),
    (O.Adamax, {"lr": torch.tensor(1e-2), "weight_decay": 0.1}),
    (O.Rprop, {"lr": 1e-2}),
    (O.ASGD, {"lr": 1e-2}),
    (O.ASGD, {"lr": 1e-2, "t0": 2.0, "weight_decay": 0.1}),
    (O.Adadelta, {"lr": 0.5}),
]


def network():
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))


def tensors(optimizer):
    return [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]


def make(kind, options, between=None, steps=5, dtype=torch.float32):
    def build():
        m = network().to(dtype)
        opt = kind(m.parameters(), **{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()})

        def step(x):
            opt.zero_grad()
            loss = m(x).square().mean()
            loss.backward()
            opt.step()
            return loss.detach()

        data = [(torch.randn(4, 5, dtype=dtype),) for _ in range(steps)]
        if between is not None:
            data = [d for i, batch in enumerate(data) for d in ((lambda i=i: between(opt, i)), batch)]
        return step, data, lambda: [*m.parameters(), *tensors(opt)]

    return build


def ids(v):
    return v.__name__ if isinstance(v, type) else "-".join(v)


@pytest.mark.parametrize("kind,options", RECOGNISED, ids=ids)
def test_recognised(kind, options):
    step = agree(make(kind, options))
    targets = {str(n.target) for n in step.recordings[0][1].step.graph.nodes}
    name = {"AdamW": "adam"}.get(kind.__name__, kind.__name__.lower())
    assert f"nova.{name}.default" in targets


@pytest.mark.parametrize("kind,options", GENERAL, ids=ids)
def test_general(kind, options):
    agree(make(kind, options))


@pytest.mark.parametrize("kind,options", [*RECOGNISED, *GENERAL], ids=ids)
def test_in_float64(kind, options):
    """Step counts are float32 tensors; what is computed from them is not."""
    if isinstance(options.get("lr"), torch.Tensor):
        options = {**options, "lr": options["lr"].double()}  # eager divides by it in its own type
    agree(make(kind, options, dtype=torch.float64), rtol=1e-12, atol=1e-14)


def test_hyper_parameters_are_inputs():
    def change(opt, i):
        group = opt.param_groups[0]
        group["lr"], group["betas"], group["weight_decay"] = 1e-2 / (i + 1), (0.9 - 0.1 * i, 0.99), 0.05 * (i + 1)

    agree(make(O.AdamW, {"lr": 1e-2}, change))


def test_momentum_changes_but_not_to_zero():
    def change(opt, i):
        opt.param_groups[0]["momentum"] = (0.9, 0.8, 0.7, 0.0, 0.0)[i]

    agree(make(O.SGD, {"lr": 0.1, "momentum": 0.9}, change), captures=2)


def test_groups_with_their_own_rates():
    def build():
        m = network()
        opt = O.AdamW(
            [{"params": m[0].parameters(), "lr": 0.1}, {"params": m[2].parameters(), "weight_decay": 0.3}], lr=1e-2
        )

        def step(x):
            opt.zero_grad()
            m(x).square().mean().backward()
            opt.step()

        return step, [(torch.randn(4, 5),) for _ in range(3)], lambda: [*m.parameters()]

    agree(build)


def test_some_parameters_have_no_gradient():
    def build():
        m, extra = network(), nn.Linear(3, 3)
        opt = O.Adam([*m.parameters(), *extra.parameters()], lr=1e-2)

        def step(x):
            opt.zero_grad()
            m(x).square().mean().backward()
            opt.step()

        return (
            step,
            [(torch.randn(4, 5),) for _ in range(3)],
            lambda: [*m.parameters(), *extra.parameters(), *tensors(opt)],
        )

    agree(build)


def test_closure():
    def build():
        m = network()
        opt = O.SGD(m.parameters(), lr=0.1)

        def step(x):
            def closure():
                opt.zero_grad()
                loss = m(x).square().mean()
                loss.backward()
                return loss

            return opt.step(closure).detach()

        return step, [(torch.randn(4, 5),) for _ in range(3)], lambda: [*m.parameters()]

    agree(build)


def test_step_hooks_run():
    def build():
        m = network()
        opt = O.SGD(m.parameters(), lr=0.1)
        opt.register_step_pre_hook(lambda o, a, k: [p.grad.mul_(0.5) for p in m.parameters()] and None)

        def step(x):
            opt.zero_grad()
            m(x).square().mean().backward()
            opt.step()

        return step, [(torch.randn(4, 5),) for _ in range(3)], lambda: [*m.parameters()]

    agree(build)


def test_custom_optimizer_with_a_python_rate():
    class Signed(O.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr, "decay": 0.9})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    m = (
                        self.state[p].setdefault("m", torch.zeros_like(p))
                        if "m" not in self.state[p]
                        else self.state[p]["m"]
                    )
                    m.lerp_(p.grad, 1 - group["decay"])
                    p.add_(m.sign(), alpha=-group["lr"])

    def change(opt, i):
        opt.param_groups[0]["lr"] = 0.01 * (i + 1)

    # the first run makes the state itself, so it cannot be replayed
    agree(make(Signed, {"lr": 0.01}, change), captures=2)


@pytest.mark.parametrize(
    "scheduler", ["StepLR", "OneCycleLR", "CosineAnnealingLR", "LambdaLR", "SequentialLR", "ExponentialLR"]
)
def test_scheduler_in_the_step(scheduler):
    S = O.lr_scheduler

    def build():
        m = network()
        opt = O.AdamW(m.parameters(), lr=1e-2)
        sched = {
            "StepLR": lambda: S.StepLR(opt, 2),
            "OneCycleLR": lambda: S.OneCycleLR(opt, 1e-2, total_steps=12),
            "CosineAnnealingLR": lambda: S.CosineAnnealingLR(opt, 8),
            "LambdaLR": lambda: S.LambdaLR(opt, lambda i: 1 / (i + 1)),
            "SequentialLR": lambda: S.SequentialLR(opt, [S.ConstantLR(opt), S.ExponentialLR(opt, 0.7)], [3]),
            "ExponentialLR": lambda: S.ExponentialLR(opt, 0.5),
        }[scheduler]()

        def step(x):
            opt.zero_grad()
            m(x).square().mean().backward()
            opt.step()
            sched.step()
            return opt.param_groups[0]["lr"] * 1.0

        data = [(torch.randn(4, 5),) for _ in range(6)]
        return step, data, lambda: [*m.parameters(), torch.tensor(sched.get_last_lr()), *tensors(opt)]

    agree(build)


def test_rate_set_in_the_step_from_an_argument():
    def build():
        m = network()
        opt = O.SGD(m.parameters(), lr=1.0)

        def step(x, rate):
            for group in opt.param_groups:
                group["lr"] = rate * 0.5
            opt.zero_grad()
            m(x).square().mean().backward()
            opt.step()

        data = [(torch.randn(4, 5), 0.1 / (i + 1)) for i in range(4)]
        return step, data, lambda: [*m.parameters(), torch.tensor(opt.param_groups[0]["lr"])]

    agree(build)


@pytest.mark.parametrize("overflow", [(), (0,), (2,), (1, 2)])
@pytest.mark.parametrize(
    "kind,options",
    [
        (O.SGD, {"lr": 0.1, "momentum": 0.9}),
        (O.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
        (O.AdamW, {"lr": 1e-2}),
        (O.AdamW, {"lr": 1e-2, "fused": True}),
        (O.RAdam, {"lr": 1e-2, "decoupled_weight_decay": True, "weight_decay": 0.1, "maximize": True}),
        (O.Adamax, {"lr": 1e-2}),
        (O.Adamax, {"lr": torch.tensor(1e-2), "weight_decay": 0.1}),
    ],
    ids=ids,
)
def test_grad_scaler(kind, options, overflow):
    def build():
        m = network()
        opt = kind(m.parameters(), **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)

        def step(x):
            opt.zero_grad()
            loss = m(x).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            norm = nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            return loss.detach(), norm, torch.tensor(scaler.get_scale()), scaler.get_scale()

        data = [(torch.randn(4, 5) * (1e30 if i in overflow else 1.0),) for i in range(5)]
        state = lambda: [*m.parameters(), torch.tensor(scaler.get_scale()), torch.tensor(scaler._get_growth_tracker())]
        return step, data, state

    agree(build)


def test_scale_in_a_decision_is_refused():
    m = network()
    scaler = torch.amp.GradScaler("cpu")

    def step(x):
        loss = scaler.scale(m(x).sum())
        return loss if scaler.get_scale() > 2 else loss * 2

    from nova.capture.record import record

    with pytest.raises(CaptureError, match="line"):
        record(step, (torch.randn(4, 5),), {})


def test_sparse_gradients():
    def build():
        e = nn.Embedding(9, 4, sparse=True)
        s = nn.Embedding(9, 4, sparse=True)
        oe, os_ = O.SGD(e.parameters(), lr=0.5), O.Adagrad(s.parameters(), lr=0.5)

        def step(i):
            oe.zero_grad()
            os_.zero_grad()
            loss = (e(i) - s(i)).square().sum()
            loss.backward()
            oe.step()
            os_.step()
            return loss.detach()

        return step, [(torch.randint(9, (2, 3)),) for _ in range(4)], lambda: [e.weight, s.weight]

    agree(build)


@pytest.mark.parametrize("options", [
    {}, {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)}, {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()}, {"use_buffers": True},
], ids=["swa", "ema", "ema of one", "swa at once", "buffers"])  # fmt: skip
def test_averaged_model(options):
    """`update_parameters` in the step: the first call copies the model, the later ones average, one capture does both."""

    def run(decorate):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))
        optimizer, averaged = O.SGD(model.parameters(), lr=0.1), swa_utils.AveragedModel(model, **options)

        @decorate
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            averaged.update_parameters(model)
            return loss.detach()

        states = []
        for x in torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(1)):
            step(x)
            states.append({k: v.clone() for k, v in averaged.state_dict().items()})
            if len(states) == 3:
                averaged.n_averaged.zero_()  # the next call copies again
        return states, step

    (found, step), (wanted, _) = run(nova.jit), run(lambda f: f)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert step.captures == 1


NESTEROV = [
    (O.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, **more})
    for more in ({}, {"weight_decay": 0.1}, {"maximize": True})
]


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind,options", [*NESTEROV, *RECOGNISED, *GENERAL], ids=str)
def test_gradients_after_the_update(kind, options, how):
    """What an optimizer leaves in `.grad`, which the next backward adds to: multi-tensor code may work there in place."""
    options = {k: v for k, v in options.items() if k not in ("foreach", "fused")} | how
    if "fused" in how and kind not in (O.SGD, O.Adam, O.AdamW, O.Adagrad):
        pytest.skip("it has no fused code")
    if how.get("foreach") and isinstance(options.get("lr"), torch.Tensor):
        pytest.skip("PyTorch allows no lr that is a tensor there unless it is capturable")

    def build():
        m = network()
        opt = kind(m.parameters(), **{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()})

        def step(x):
            loss = m(x).square().mean()
            loss.backward()
            opt.step()
            return loss.detach(), [p.grad.norm() for p in m.parameters()]

        data = [(torch.randn(4, 5),) for _ in range(4)]
        data.insert(2, lambda: [g.update(weight_decay=0.0) for g in opt.param_groups if "weight_decay" in g])
        return step, data, lambda: [*m.parameters(), *tensors(opt), *(p.grad for p in m.parameters())]

    agree(build, captures=None)  # the first step finds no gradients


@pytest.mark.parametrize("scale", [1.0, float("inf")])
def test_nesterov_gradients_of_a_skipped_step(scale):
    """A gradient scaler that finds an infinity leaves the gradients as the backward made them."""

    def build():
        m = network()
        opt = O.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

        def step(x, factor):
            loss = m(x).square().mean() * factor
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            return loss.detach()

        data = [(torch.randn(4, 5), torch.tensor(f)) for f in (1.0, 1.0, scale, 1.0)]
        return step, data, lambda: [*m.parameters(), *tensors(opt), *(p.grad for p in m.parameters())]

    agree(build, captures=None)  # the first step finds no gradients
