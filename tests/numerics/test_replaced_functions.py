"""Functions of PyTorch's that someone replaces after a step was captured, and modes that come to surround its calls."""

from __future__ import annotations

import contextlib
import functools
import sys
from unittest import mock

import pytest
import torch
from replay_case import interpreted
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import nova
from nova.capture import warm


def _step(transform):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x):
        loss = model(x.T.T).exp().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return transform(step)


def _losses(transform, change, calls=2):
    """The losses of two calls, of `calls` inside `change()`, and of two more."""
    step, x = _step(transform), torch.linspace(-1, 1, 20).view(5, 4)
    found = [step(x) for _ in range(2)]
    with change():
        found += [step(x) for _ in range(calls)]
    return torch.stack([*found, step(x), step(x)]), step


def _replaced(owner, name, make):
    return mock.patch.object(owner, name, make(getattr(owner, name)))


def _doubled(original):
    return lambda *args, **kwargs: 2 * original(*args, **kwargs)


def _twice(original):
    def run(*args, **kwargs):
        original(*args, **kwargs)
        return original(*args, **kwargs)

    return run


def _not_at_all(original):
    return lambda *args, **kwargs: None


def _doubled_weights(original):
    return lambda module, name: 2 * original(module, name) if name == "weight" else original(module, name)


REPLACED = {
    "a function that a layer calls": lambda: _replaced(F, "linear", _doubled),
    "a layer's forward": lambda: _replaced(nn.LayerNorm, "forward", _doubled),
    "the call of every module": lambda: _replaced(nn.Module, "__call__", _doubled),
    "the call of one class, inherited before": lambda: _replaced(nn.Linear, "__call__", _doubled),
    "an optimizer's step": lambda: _replaced(torch.optim.SGD, "step", _twice),
    "what an optimizer's step calls": lambda: _replaced(sys.modules["torch.optim.sgd"], "sgd", _twice),
    "zero_grad, inherited before": lambda: _replaced(torch.optim.SGD, "zero_grad", _not_at_all),
    "a tensor's backward": lambda: _replaced(torch.Tensor, "backward", _not_at_all),
    "what backward calls": lambda: _replaced(torch.autograd, "backward", _not_at_all),
    "a tensor's method in C": lambda: _replaced(torch.Tensor, "exp", _doubled),
    "a tensor's attribute in C": lambda: _replaced(torch.Tensor, "T", lambda original: property(lambda t: 2 * t)),
    "how a module finds its weights": lambda: _replaced(nn.Module, "__getattr__", _doubled_weights),
}


@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.parametrize("native", ["1", "0"])
def test_a_replaced_function_is_seen(name, native, monkeypatch):
    monkeypatch.setenv("NOVA_NATIVE", native)
    found, step = _losses(interpreted, REPLACED[name])
    expected, _ = _losses(lambda f: f, REPLACED[name])
    torch.testing.assert_close(found, expected)
    assert 2 <= step.captures <= 4  # a gradient that stays makes for more


def _of_signs(original):
    def update(params, grads, *lists, **options):
        for p, g in zip(params, grads):
            p.sub_(0.1 * g.sign())

    return update


def _step_of_signs(original):
    def step(self, closure=None):
        for group in self.param_groups:
            _of_signs(None)(group["params"], [p.grad for p in group["params"]])

    return torch.no_grad()(step)


BENEATH = {  # what an update that is recorded whole would call, as a function and as an object
    "its step": lambda adam: (torch.optim.Adam, "step", _step_of_signs),
    "its function": lambda adam: (adam, "adam", _of_signs),
    "an object that takes its place": lambda adam: (adam, "adam", lambda f: mock.Mock(side_effect=_of_signs(f))),
    "what its function calls": lambda adam: (adam, "_single_tensor_adam", _of_signs),
    "a mock of what it calls": lambda adam: (
        adam, "_single_tensor_adam", lambda f: mock.Mock(side_effect=_of_signs(f))
    ),
    "a partial function": lambda adam: (adam, "_single_tensor_adam", lambda f: functools.partial(_of_signs(f))),
}  # fmt: skip


@pytest.mark.parametrize("name", BENEATH)
@pytest.mark.parametrize("first", [True, False])
def test_a_replaced_part_of_an_optimizer_is_seen(name, first):
    """Whether it is there when the step is captured, and goes, or comes later."""

    def train(transform):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(3))
        optimizer = torch.optim.Adam([weight], lr=0.05, foreach=False)

        def step(x):
            (weight * x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step, found = transform(step), []
        for call in range(6):
            here = (call // 2 % 2 == 0) == first
            replace = _replaced(*BENEATH[name](sys.modules["torch.optim.adam"])) if here else contextlib.nullcontext()
            with replace:
                step(torch.randn(3))
            found.append(weight.detach().clone())
        return found

    torch.testing.assert_close(train(interpreted), train(lambda f: f))


def test_another_function_of_the_same_code_is_seen():
    step, x = _step(interpreted), torch.ones(5, 4)

    def scaled(scale, original):
        return lambda *args, **kwargs: scale * original(*args, **kwargs)

    with _replaced(F, "linear", lambda original: scaled(1.0, original)):
        first = step(x)
    with _replaced(F, "linear", lambda original: scaled(0.0, original)):
        second = step(x)
    assert second == 1.0 != first


def test_what_another_recording_replaces_for_a_while_is_no_change():
    step, x = _step(interpreted), torch.ones(5, 4)
    step(x)
    _step(interpreted)(x)  # replaces Module.__call__, and puts it back
    step(x)
    assert step.captures == 1


def test_a_stored_capture_is_not_taken_where_a_function_is_another(tmp_path, monkeypatch):
    monkeypatch.setenv("NOVA_CACHE", str(tmp_path))
    monkeypatch.setattr(warm, "usable", lambda options: options.backend == "compile")
    x = torch.ones(5, 4)
    _step(nova.jit)(x)
    again = _step(nova.jit)
    with _replaced(F, "linear", _doubled):
        again(x)
    assert (again.captures, again.loads) == (1, 0)
    once_more = _step(nova.jit)
    once_more(x)
    assert (once_more.captures, once_more.loads) == (0, 1)


IN_PYTHON = {  # methods of tensors that PyTorch writes in Python, which ask modes by the name that the user took
    "backward": lambda t: t.square().sum().backward(),
    "norm": lambda t: t.norm().backward(),
    "split": lambda t: t.split(2)[0].square().sum().backward(),
    "unflatten": lambda t: t.unflatten(0, (2, 2)).square().sum().backward(),
    "__rsub__": lambda t: (1 - t).square().sum().backward(),
    "__rpow__": lambda t: (2**t).sum().backward(),
}


@pytest.mark.parametrize("name", IN_PYTHON)
@pytest.mark.parametrize("keywords", [True, False])
def test_a_function_around_a_method_runs_once(name, keywords):
    def of_twice(original):
        with_keywords = lambda t, *args, **options: original(2 * t, *args, **options)
        return with_keywords if keywords else lambda t, *args: original(2 * t, *args)

    def train(transform):
        weight = nn.Parameter(torch.linspace(0.1, 1, 16).view(4, 4))

        def step(x):
            weight.grad = None
            IN_PYTHON[name](weight * x)
            return weight.grad.clone()

        step = transform(step)
        with _replaced(torch.Tensor, name, of_twice):
            return [step(torch.tensor(1.0 + call)) for call in range(3)]

    torch.testing.assert_close(train(interpreted), train(lambda f: f))


# ---- modes


class _Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        return 2 * found if function is torch.Tensor.mean else found


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        return 2 * found if function is torch.ops.aten.mean.default else found


def _hooks():
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: 2 * t)


@pytest.mark.parametrize("mode", [_Functions, _Operations, _hooks])
def test_what_surrounds_a_later_call_sees_it(mode, capsys):
    found, step = _losses(interpreted, mode)
    expected, _ = _losses(lambda f: f, mode)
    torch.testing.assert_close(found, expected)
    assert step.captures == 1
    assert capsys.readouterr().err.count("runs eagerly inside") == 1


def _under_vmap(step, x):
    return torch.vmap(step)(x)


def _under_grad(step, x):
    return torch.func.grad(step)(x)


def _under_jvp(step, x):
    return torch.func.jvp(step, (x,), (torch.ones_like(x),))[1]


def _with_tangents(step, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(step(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


@pytest.mark.parametrize("transform", [_under_vmap, _under_grad, _under_jvp, _with_tangents])
@pytest.mark.parametrize("first", [True, False])
def test_a_step_inside_a_transform_is_eager(transform, first):
    weight, x = torch.linspace(1, 2, 12).view(3, 4), torch.linspace(-1, 1, 12).view(3, 4)

    def step(x):
        return (x * x * weight[0]).sum()

    compiled = interpreted(step)
    for call in range(4):
        if (call % 2 == 0) == first:
            torch.testing.assert_close(transform(compiled, x), transform(step, x))
        else:
            torch.testing.assert_close(compiled(x), step(x))
    assert compiled.captures == 1


def test_anomaly_detection_finds_what_it_finds_in_eager():
    weight = nn.Parameter(torch.tensor(0.0))

    @interpreted
    def step(x):
        (weight * x).sqrt().backward()
        weight.grad = None

    step(torch.tensor(0.0))
    step(torch.tensor(0.0))
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="returned nan"):
        step(torch.tensor(0.0))


def test_the_default_device_is_a_fact():
    @interpreted
    def step(x):
        return x + torch.zeros(3).numel()

    x = torch.ones(3)
    step(x)
    with torch.device("cpu"):
        step(x)
        step(x)
    step(x)
    assert step.captures == 2
