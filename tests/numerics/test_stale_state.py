"""What changes between two calls must be seen by the second: each case is run eagerly too, and compared call by call."""

from __future__ import annotations

import cmath
import collections
import decimal
import fractions
import json
import math
import struct
import sys
import types
import weakref

import numpy as np
import pytest
import torch
from replay_case import interpreted
from torch import nn

import nova
from nova.capture import environment, store

stale_helper = sys.modules["stale_helper"] = types.ModuleType("stale_helper")  # a module of the user's
stale_helper.__file__ = "stale_helper.py"

X = torch.arange(1.0, 5.0)


def agree(function, calls, transform=interpreted):
    """`calls` yields the arguments of one call after another, made anew for the eager run."""
    results = []
    for wrap in (lambda f: f, transform):
        step = wrap(function)
        results.append([(step(*args), args) for args in calls()])
    torch.testing.assert_close(results[1], results[0])


# ---- memory that tensors share


@pytest.mark.parametrize("view", [torch.Tensor.detach, lambda t: t.view(4), lambda t: t[:], lambda t: t])
def test_windows_that_coincided_once(view):
    """`step(x, x.detach())` says nothing about `step(x, y)`."""

    def calls():
        a = X.clone()
        yield a, view(a)
        yield a, view(a)
        yield a, torch.ones(4)
        yield torch.ones(4), a
        yield a, view(a)

    agree(lambda a, b: a + 2 * b, calls)


def test_an_argument_that_was_a_parameters_memory():
    def run(transform):
        weight = torch.ones(4)

        def step(x):
            weight.mul_(2.0)
            return x * 1.0

        compiled = transform(step)
        return [compiled(weight.detach() if k == 1 else torch.ones(4)).clone() for k in range(4)]

    torch.testing.assert_close(run(interpreted), run(lambda f: f))


def test_windows_side_by_side_in_one_operation():
    def step(a, b):
        a.add_(b)
        b.mul_(2.0)
        return a + b

    def calls():
        yield X.clone(), torch.ones(4)
        for start in (0, 4, 6):
            base = torch.arange(12.0)
            yield base[:4], base[start : start + 4]

    agree(step, calls)


# ---- Python state


class Module(nn.Module):
    scale = 2.0

    def forward(self, x):
        return x * self.scale * (self.gate if hasattr(self, "gate") else 1.0) * getattr(self, "gain", 1.0)


class Plain:
    scale = 2.0

    def __init__(self):
        self.w0, self.w1, self.table = 1.0, 2.0, [float(i) for i in range(3000)]


class Derived(Plain):
    pass


def _set(name, value):
    return lambda s: setattr(s.obj, name, value)


def _imports(s, x):
    import stale_helper

    return x * stale_helper.SCALE


def _imports_from(s, x):
    from stale_helper import SCALE

    return x * SCALE


def _hook(factor):
    def change(s):
        for handle in s.handles:
            handle.remove()
        s.handles = [s.weight.register_hook(lambda g: g * factor)]

    return change


def _gradient(s, x):
    s.weight.grad = None
    (x * s.weight).sum().backward()
    return s.weight.grad.clone()


CASES = {  # step, what changes between calls
    "attribute over a class's": (lambda s, x: x * s.obj.scale, _set("scale", 3.0)),
    "module attribute over a class's": (lambda s, x: s.module(x), lambda s: setattr(s.module, "scale", 3.0)),
    "attribute that hasattr missed": (lambda s, x: s.module(x), lambda s: setattr(s.module, "gate", 3.0)),
    "attribute that getattr missed": (lambda s, x: s.module(x), lambda s: setattr(s.module, "gain", 3.0)),
    "class attribute over a base's": (lambda s, x: x * s.obj.scale, lambda s: setattr(Derived, "scale", 3.0)),
    "computed name": (lambda s, x: x * getattr(s.obj, f"w{len('a')}"), _set("w1", 5.0)),
    "NumPy number": (lambda s, x: x * float(s.number), lambda s: setattr(s, "number", np.float32(3.0))),
    "NumPy array": (lambda s, x: x * float(s.array[1]), lambda s: s.array.__setitem__(1, 7.0)),
    "bytearray": (lambda s, x: x * s.bytes[0], lambda s: s.bytes.__setitem__(0, 7)),
    "fraction": (lambda s, x: x * float(s.fraction), lambda s: setattr(s, "fraction", fractions.Fraction(1, 3))),
    "UserDict": (lambda s, x: x * s.user["a"], lambda s: s.user.__setitem__("a", 7.0)),
    "weak reference": (lambda s, x: x * s.weak().w1, _set("w1", 5.0)),
    "long list": (lambda s, x: x * s.obj.table[7], lambda s: s.obj.table.__setitem__(7, 0.5)),
    "import in the step": (_imports, lambda s: setattr(stale_helper, "SCALE", 3.0)),
    "from import in the step": (_imports_from, lambda s: setattr(stale_helper, "SCALE", 3.0)),
    "attribute of a tensor": (lambda s, x: x * s.weight.gain, lambda s: setattr(s.weight, "gain", 3.0)),
    "attribute a tensor lacked": (
        lambda s, x: x * (0.0 if getattr(s.weight, "frozen", False) else 1.0),
        lambda s: setattr(s.weight, "frozen", True),
    ),
    "attribute of a function": (lambda s, x: x * s.function.gain, lambda s: setattr(s.function, "gain", 3.0)),
    "code of a function": (lambda s, x: s.function(x), lambda s: setattr(s.function, "__code__", (lambda x: x * 9.0).__code__)),
    "another gradient hook": (_gradient, _hook(3.0)),
    "what a gradient hook reads": (_gradient, lambda s: setattr(s, "factor", 3.0)),
    "another global hook": (lambda s, x: s.module(x), lambda s: s.global_hook(3.0)),
}  # fmt: skip


def _world():
    def double(x):
        return x * 2.0

    s = types.SimpleNamespace(obj=Derived(), module=Module(), number=np.float32(2.0), array=np.ones(3), function=double)
    s.bytes, s.fraction, s.user = bytearray(b"ab"), fractions.Fraction(1, 2), collections.UserDict(a=2.0)
    s.weak, s.weight, s.factor, double.gain = weakref.ref(s.obj), nn.Parameter(torch.ones(4)), 2.0, 2.0
    s.weight.gain = 2.0
    s.handles = [s.weight.register_hook(lambda g: g * s.factor)]

    def global_hook(factor):
        s.handles.pop().remove()
        s.handles.append(nn.modules.module.register_module_forward_hook(lambda m, a, out: out * factor))

    s.global_hook = global_hook
    return s


@pytest.mark.parametrize("name", CASES)
def test_python_state(name):
    function, change = CASES[name]
    results = []
    for transform in (lambda f: f, interpreted):
        stale_helper.SCALE = 2.0
        vars(Derived).get("scale") and delattr(Derived, "scale")
        s = _world()
        if name == "another global hook":
            s.global_hook(2.0)
        try:
            step = transform(lambda x, s=s: function(s, x).detach())
            found = [step(X), step(X)]
            change(s)
            results.append(torch.stack([*found, step(X), step(X)]))
        finally:
            for handle in s.handles:
                handle.remove()
    torch.testing.assert_close(results[1], results[0])
    assert not torch.equal(results[0][0], results[0][2])


@pytest.mark.parametrize("make", [Plain, lambda: [1.0], lambda: {"a": 1.0}, lambda: torch.ones(4)])
def test_two_arguments_that_become_one_object(make):
    one, two = make(), make()
    for kept in (one, None):
        results = []
        for transform in (lambda f: f, interpreted):
            step = transform(lambda x, a, b, kept=kept: x * (2.0 if a is b else 3.0) * (5.0 if a is kept else 7.0))
            results.append(
                [step(X, a, b) for a, b in ((make(), two), (make(), two), (two, two), (one, two), (one, one))]
            )
        torch.testing.assert_close(results[1], results[0])


class Slotted:
    """A hook that cannot be referred to weakly."""

    __slots__ = ()

    def __call__(self, grad):
        return grad * 2.0


@pytest.mark.parametrize(
    "make", [Slotted, lambda: lambda g: g * 2.0, lambda: types.MethodType(lambda s, g: g, object())]
)
def test_hooks_that_have_gone_are_forgotten(make):
    weight = nn.Parameter(torch.ones(4))
    before = len(environment._tokens)
    for _ in range(2 * environment._HELD):
        handle = weight.register_hook(make())
        environment.token(next(iter(weight._backward_hooks.values())))
        handle.remove()
    assert len(environment._tokens) <= before + environment._HELD
    assert make is Slotted or len(environment._tokens) <= before


def test_an_enum_that_another_process_defines_otherwise(monkeypatch):
    """A stored guard names a member; what the member means there is part of it."""
    program = """
import enum
class Act(enum.Enum):
    SCALE = {value}
    def __call__(self, x):
        return x * {factor}
"""

    def define(value, factor):
        module = types.ModuleType("stale_enum")
        module.__file__ = "stale_enum.py"
        monkeypatch.setitem(sys.modules, "stale_enum", module)
        exec(compile(program.format(value=value, factor=factor), "stale_enum.py", "exec"), module.__dict__)
        return module.Act.SCALE

    stored = store.encode(define(2, 3))
    assert store.decode(stored) is sys.modules["stale_enum"].Act.SCALE
    for changed in ((4, 3), (2, 5)):
        now = define(*changed)
        assert store.decode(stored) is not now and store.decode(stored) != now


# ---- numbers that C code reads without asking them


@pytest.mark.parametrize(
    "read",
    [
        lambda f: torch.tensor([[f], [1.0]])[0, 0],
        lambda f: math.fsum([f, f]),
        lambda f: (1j * f).imag,
        lambda f: (f * 1j).imag,
        lambda f: float("%f" % f),  # noqa: UP031
        lambda f: float(decimal.Decimal(f)),
        lambda f: struct.unpack("d", struct.pack("d", f))[0],
        lambda f: json.loads(json.dumps(f)),
        lambda f: cmath.exp(f).real,
    ],
)
def test_numbers_that_are_read_unasked(read):
    agree(lambda x, f: x * read(f), lambda: [(X.clone(), f) for f in (0.5, 0.5, 0.7, 0.9, 0.7)])


def test_weights_in_one_flat_buffer_beside_a_residual():
    """The residual walks the output's columns as the operand walks the reduction: equal loops for a window on `flat`."""
    flat = torch.randn(72)
    weight, bias = flat[:64].view(8, 8), flat[64:]

    def calls():
        torch.manual_seed(0)
        for _ in range(3):
            yield (torch.randn(2, 8),)

    agree(lambda x: x + torch.nn.functional.linear(x, weight, bias), calls, nova.jit)


class Holding:
    """A trainer whose step reaches its tensors through a list that somebody filled, by a shorter path than its own."""

    def __init__(self, clear):
        torch.manual_seed(0)
        self.held, self.clear = [], clear
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def step(self, x):
        loss = self.net(x).square().mean()
        loss.backward()
        self.opt.step()
        if self.clear:
            self.opt.zero_grad()
        return loss.detach()


def _replace_grad(t):
    t.net[0].bias.grad = torch.full((4,), 3.0)


def _replace_grad_data(t):
    if t.net[0].bias.grad is not None:
        t.net[0].bias.grad.data = torch.full((4,), 3.0)


def _replace_momentum(t):
    t.opt.state[t.net[0].bias]["momentum_buffer"] = torch.ones(4)


def _replace_state(t):
    t.opt.load_state_dict(t.opt.state_dict())


def _replace_buffer(t):
    t.net[1].running_mean = torch.ones(4)


def _replace_parameter(t):
    t.net[2].bias = t.opt.param_groups[0]["params"][-1] = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("holder", [lambda t: t, torch.Tensor.detach, lambda t: t.view(-1)])
@pytest.mark.parametrize(
    "change",
    [_replace_grad, _replace_grad_data, _replace_momentum, _replace_state, _replace_buffer, _replace_parameter],
)
def test_what_is_replaced_is_not_found_where_it_was_held(change, holder, clear):
    """A capture is made while the list holds what the model has; then the model gets another one."""
    sides = []
    for transform in (lambda f: f, interpreted):
        t = Holding(clear)
        step = transform(t.step)
        losses = [step(X.outer(X)) for _ in range(2)]
        if clear:
            _replace_grad(t)
        own = [*t.net.parameters(), *t.net.buffers(), *(p.grad for p in t.net.parameters())]
        own += [state["momentum_buffer"] for state in t.opt.state.values()]
        with torch.no_grad():
            t.held = [holder(tensor) for tensor in own if tensor is not None]
        for _ in range(3):
            losses.append(step(X.outer(X)))
            change(t)
        grads = [p.grad for p in t.net.parameters() if p.grad is not None]
        moments = [state["momentum_buffer"] for state in t.opt.state.values()]
        sides.append([*losses, *t.held, *grads, *moments, *t.net.parameters(), *t.net.buffers()])
    with torch.no_grad():  # else PyTorch refuses to read a window that was made so, for its parameter has changed
        torch.testing.assert_close(sides[1], sides[0])


class Trained(Holding):
    """A trainer with all the places that a tensor of a step may be found in."""

    def __init__(self, clear):
        super().__init__(clear)
        self.opt.param_groups[0]["lr"] = 0.001
        self.listed, self.table, self.attribute = [X / 4], {"k": X / 4}, X / 4
        self.crowd = [torch.ones(4) for _ in range(100)]

    def step(self, x, a):
        y = self.net[1](self.net[0](x)) * a * self.listed[0] * self.table["k"] * self.attribute * self.crowd[7]
        self.net[2](y.tanh()).square().mean().backward()
        self.opt.step()
        if self.clear:
            self.opt.zero_grad()
        return y.detach()


ARGUMENTS = {
    "buffer": lambda t: t.net[1].running_mean,
    "parameter's window": lambda t: t.net[0].bias.detach(),
    "momentum": lambda t: t.opt.state[t.net[0].bias]["momentum_buffer"],
    "gradient": lambda t: t.net[0].bias.grad,
    "list": lambda t: t.listed[0],
    "long list": lambda t: t.crowd[7],
    "dictionary": lambda t: t.table["k"],
    "attribute": lambda t: t.attribute,
}


@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_was_something_of_the_models(name, clear):
    """A capture made for `step(x, buffer)` says nothing about `step(x, y)`, and must not take y for the buffer."""
    if name == "gradient" and clear:
        pytest.skip("there is none between steps")
    sides = []
    for transform in (lambda f: f, interpreted):
        t = Trained(clear)
        step = transform(t.step)
        outs = []
        for k in range(8):
            a = ARGUMENTS[name](t) if k in (2, 3, 6) else torch.full((4,), 1.0 + k / 8)
            outs.append(step(X.outer(X) / 8, a).clone())
        sides.append([*outs, *t.net.state_dict().values(), *t.listed, *t.table.values(), t.attribute, *t.crowd])
        sides[-1] += [state["momentum_buffer"] for state in t.opt.state.values()]
    torch.testing.assert_close(sides[1], sides[0], rtol=1e-4, atol=1e-4)


class Answering:
    """Answers to every name, `__dict__` included, as libraries' handles do; its state is in slots."""

    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 2.0

    def __getattr__(self, name):
        if name.startswith("__") and name != "__dict__":
            raise AttributeError(name)
        return lambda *args: name


@pytest.mark.parametrize("held", [False, True])
def test_an_object_without_attributes_that_answers_to_all(held):
    answering = Answering()
    table = {"a": [answering]}
    step = interpreted(lambda x: x * (table["a"][0].scale if held else answering.scale))
    for scale in (2.0, 2.0, 3.0, 2.0):
        answering.scale = scale
        torch.testing.assert_close(step(X), X * scale)
