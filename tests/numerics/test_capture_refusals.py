"""What a recorded step may not do, and what is left behind when it does it, or when the user's own code raises."""

import copy
import sys

import pytest
import torch
from capture_replay import Replayed
from torch import nn

from nova.capture.record import record
from nova.errors import CaptureError, NovaError, UnsupportedError


def clip(t):
    p = nn.Parameter(torch.ones(()))
    p.grad = t.detach()
    nn.utils.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)


READS = {
    "item": lambda t: t.item(),
    "float": float,
    "bool": lambda t: bool(t > 0),
    "int": int,
    "branch": lambda t: 1 if t > 0 else 2,
    "list": lambda t: t.tolist(),
    "numpy": lambda t: t.detach().numpy(),
    "print": print,
    "format": lambda t: f"{t}",
    "repr": repr,
    "equal": lambda t: torch.equal(t, t),
    "allclose": lambda t: torch.allclose(t, t),
    "index": lambda t: [1, 2, 3][t.long()],
    "range": lambda t: list(range(t.long())),
    "nonzero": lambda t: t.is_nonzero(),
    "round": lambda t: round(t.item(), 2),
    "in": lambda t: t in [t * 2],
    "clip": clip,
}


def problem(read, when="after"):
    """A step with every kind of state, which reads a value somewhere."""
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3))
    opt = torch.optim.Adam(m.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.StepLR(opt, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    m[0].weight.grad = torch.ones(6, 5)

    def step(x):
        loss = m(x).square().mean()
        if when == "before":
            read(loss)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        sched.step()
        for group in opt.param_groups:
            group["eps"], group["betas"] = 0.5, (0.1, 0.2)
        m[0].weight.grad = None
        m[3].bias.data = m[3].bias.data * 2
        read(loss)
        return loss

    return step, m, opt, sched, scaler


def state(m, opt, sched):
    return (
        {k: v.clone() for k, v in m.state_dict().items()},
        [None if p.grad is None else p.grad.clone() for p in m.parameters()],
        copy.deepcopy(opt.state_dict()),
        copy.deepcopy(sched.state_dict()),
        torch.get_rng_state(),
    )


def same(a, b):
    assert type(a) is type(b), (a, b)
    if isinstance(a, dict):
        assert list(a) == list(b), (list(a), list(b))
        same(list(a.values()), list(b.values()))
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    else:
        assert a == b, (a, b)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("read", READS)
def test_a_read_value_is_refused_and_nothing_has_changed(read, when):
    x = torch.randn(4, 5)
    step, m, opt, sched, scaler = problem(READS[read], when)
    before, pointers = state(m, opt, sched), [p.data_ptr() for p in m.parameters()]
    with pytest.raises(CaptureError, match="line") as caught:
        record(step, (x,), {})
    assert "test_capture_refusals.py" in str(caught.value)
    same(before, state(m, opt, sched))
    assert pointers == [p.data_ptr() for p in m.parameters()]
    assert type(opt.param_groups[0]["lr"]) is float and type(opt.param_groups[0]["betas"][0]) is float
    assert scaler._scale is None and not scaler._per_optimizer_states


def test_a_swallowed_refusal_is_still_one():
    x = torch.randn(4, 5)

    def swallow(t):
        try:
            return t.item()
        except Exception:
            return 0.0

    step, m, opt, sched, _ = problem(swallow)
    before = state(m, opt, sched)
    with pytest.raises(CaptureError):
        record(step, (x,), {})
    same(before, state(m, opt, sched))


@pytest.mark.parametrize("where", ["forward", "middle", "end"])
def test_the_users_exception_leaves_what_eager_leaves(where):
    def build():
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))
        opt = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)

        def step(x):
            h = m(x)
            if where == "forward":
                m[0](h)  # shapes do not fit
            h.square().mean().backward()
            if where == "middle":
                raise ValueError("mine")
            opt.step()
            opt.zero_grad()
            raise KeyError("late")

        return step, m, opt

    x = torch.randn(4, 5)
    step, m, opt = build()
    with pytest.raises((RuntimeError, ValueError, KeyError)) as eager:
        step(x)
    recorded, m2, opt2 = build()
    with pytest.raises(type(eager.value)) as caught:
        record(recorded, (x,), {})
    assert not isinstance(caught.value, NovaError)
    same(list(m.state_dict().values()), list(m2.state_dict().values()))
    same([p.grad for p in m.parameters()], [p.grad for p in m2.parameters()])
    same(opt.state_dict()["state"], opt2.state_dict()["state"])
    assert type(opt2.param_groups[0]["lr"]) is float


def test_pytorch_is_as_before():
    import math

    def names():
        owners = (
            nn.Module,
            nn.functional,
            torch.autograd,
            torch.optim.Optimizer,
            torch.optim.Adam,
            torch.amp.GradScaler,
            math,
            torch.optim.lr_scheduler.StepLR,
            sys.modules["torch.optim.adam"],
            torch.compiler,
            torch.distributions.Distribution,
        )
        return [dict(vars(o)) for o in owners]

    step, *_ = problem(lambda t: t.item())  # PyTorch wraps the step of a class with its first optimizer
    before = names()
    with pytest.raises(CaptureError):
        record(step, (torch.randn(4, 5),), {})
    record(lambda x: x + 1, (torch.ones(2),), {})
    after = names()
    for a, b in zip(before, after, strict=True):
        assert a.keys() == b.keys() and all(a[k] is b[k] for k in a if not k.startswith("__"))
    assert torch._C._get_mkldnn_enabled()


def test_unsupported_types_and_generators():
    with pytest.raises(UnsupportedError, match="float8"):
        record(lambda x: x.float() + 1, (torch.zeros(2).to(torch.float8_e4m3fn),), {})
    with pytest.raises(UnsupportedError, match="Generator"):
        record(lambda: torch.rand(2, generator=torch.Generator()), (), {})


def test_seeding_inside_the_step():
    def step(x):
        torch.manual_seed(0)
        return nn.functional.dropout(x)

    with pytest.raises(CaptureError, match="seed"):
        record(step, (torch.ones(3),), {})


def test_a_scheduler_that_reads_the_loss():
    w = nn.Parameter(torch.ones(3))
    opt = torch.optim.SGD([w], lr=0.1)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)

    def step():
        opt.zero_grad()
        loss = w.square().sum()
        loss.backward()
        opt.step()
        sched.step(loss)

    with pytest.raises(CaptureError, match="scheduler"):
        record(step, (), {})
    assert float(w.detach().sum()) == 3.0


def test_lbfgs_is_refused_with_the_users_line():
    w = nn.Parameter(torch.ones(3))
    opt = torch.optim.LBFGS([w])

    def step():
        def closure():
            opt.zero_grad()
            loss = (w - 2).square().sum()
            loss.backward()
            return loss

        opt.step(closure)

    with pytest.raises(CaptureError, match="opt.step"):
        record(step, (), {})
    same(w.detach(), torch.ones(3))


def test_constants_may_be_read():
    def step(x):
        return x * torch.tensor(3.0).item() + float(torch.zeros(()))

    replayed = Replayed(step)
    for _ in range(2):
        x = torch.randn(3)
        torch.testing.assert_close(replayed(x), x * 3)
    assert replayed.captures == 1


def test_returning_an_unknown_object_is_refused():
    with pytest.raises(CaptureError, match="returns"):
        record(lambda x: iter([x]), (torch.ones(2),), {})


@pytest.mark.parametrize(("read", "name"), [
    (clip, "clip_grads_with_norm_|clip_grad_norm_|_get_total_norm"), (lambda t: t.item(), r"\.item\(\)"),
], ids=["PyTorch's", "one's own"])  # fmt: skip
def test_a_refusal_names_the_function_that_read(read, name):
    with pytest.raises(CaptureError, match=rf"reads a tensor's value \(.*({name}).*\).*\n.*line \d+"):
        record(lambda t: read(t * 2), (torch.ones(()),), {})
