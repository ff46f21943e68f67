"""Guards as a unit: what is walked, what is guarded, native and Python checks agree, storage round trip."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from torch import nn

import nova
from nova.capture import bytecode, native, store
from nova.capture.fastpath import Binding
from nova.capture.guard_builder import Observed, build_guards
from nova.capture.guards import GRAD_NONE, GRAD_SET, GuardSet
from nova.capture.signature import InputSpec, OutputSpec, Signature, Source, TensorType
from nova.capture.sources import ObjectMap, Roots
from nova.errors import CaptureError


class World:
    """A step with a model and an optimizer, its guards, and a signature that lifts every tensor."""

    def __init__(self, use_native=True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.1), nn.Linear(3, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        table = {"gain": 2.0, "names": ["a", "b"]}

        def step(x):
            loss = model(x).square().mean() * table["gain"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        self.model, self.optimizer, self.table, self.step = model, optimizer, table, step
        self.x = torch.randn(5, 4)
        step(self.x)
        self.roots = Roots(step, (self.x,), {})
        objects = ObjectMap(step, (self.x,), {})
        rates = [objects.source(g) for g in optimizer.param_groups]
        lr = Source(rates[0].root, rates[0].key, (*rates[0].path, ("item", "lr")))
        inputs = [Source("arg", 0), *(objects.source(p) for p in model.parameters())]
        inputs += [objects.source(t) for p in model.parameters() for t in optimizer.state[p].values()]
        seen = Observed(
            codes={step.__code__},
            modules=list(model.modules()),
            optimizers=[optimizer],
            numbers={(id(optimizer.param_groups[0]), ("item", "lr"))},
            inputs=inputs,
            grads={id(p): GRAD_NONE for p in model.parameters()},
            memory=[(s, 0, objects.roots.resolve(s).nbytes, index > 0) for index, s in enumerate(inputs)],
        )
        self.guards = build_guards(objects, seen)
        signature = Signature()
        for source in inputs:
            t = objects.roots.resolve(source)
            signature.inputs.append(InputSpec(str(source), "param", TensorType(tuple(t.shape), "f32"), source))
        signature.inputs.append(InputSpec("lr", "scalar", TensorType((), "f64"), lr))
        signature.outputs = [OutputSpec("state", s.type, k) for k, s in enumerate(signature.inputs[1:-1], 1)]
        self.signature = signature
        objs = self.guards.check(self.roots)
        assert isinstance(objs, list), objs
        self.binding = Binding(self.guards, objs, signature, use_native=use_native)

    def fast(self, x=None):
        return self.binding.enter((self.x if x is None else x,), {})

    def slow(self, x=None):
        return self.guards.check(Roots(self.step, (self.x if x is None else x,), {}))


@pytest.fixture(params=["native", "no tags", "python"])
def world(request, monkeypatch):
    """Native checks; those of a Python that has no dictionary tags; no native code at all."""
    if request.param == "no tags":
        monkeypatch.setattr(native, "dict_tags", lambda: False)
    return World(request.param != "python")


def restoring(owner, name, value):
    old = getattr(owner, name)
    return lambda: setattr(owner, name, value), lambda: setattr(owner, name, old)


# (name, change, undo, words of the mismatch; None: the guards still hold)
def changes(w):
    first, weight = w.model[0], w.model[0].weight
    group, state = w.optimizer.param_groups[0], w.optimizer.state
    hooks = []
    return {
        "nothing": (lambda: None, lambda: None, None),
        "training": (*restoring(w.model[1], "training", False), "training"),
        "plain attribute": (*restoring(w.model[1], "p", 0.5), "p: was 0.1, is now 0.5"),
        "equal attribute": (*restoring(w.model[1], "p", float("0.1")), None),
        "irrelevant attribute": (lambda: setattr(first, "note", 1), lambda: delattr(first, "note"), None),
        "hook": (
            lambda: hooks.append(first.register_forward_hook(lambda *a: None)),
            lambda: hooks.pop().remove(),
            "_forward_hooks",
        ),
        "requires_grad": (
            lambda: weight.requires_grad_(False),
            lambda: weight.requires_grad_(True),
            "requires_grad was True",
        ),
        "grad set": (*restoring(weight, "grad", torch.zeros(3, 4)), ".grad was None"),
        "data moved": (*restoring(weight, "data", torch.zeros(3, 4)), None),
        "data of another shape": (*restoring(weight, "data", torch.zeros(3, 5)), "dimension 1 was 4, is now 5"),
        "data transposed": (*restoring(weight, "data", torch.zeros(4, 3).t()), "stride was"),
        "data of another dtype": (*restoring(first.bias, "data", torch.zeros(3).double()), "dtype was float32"),
        "module replaced": (
            lambda: w.model.__setitem__(0, nn.Linear(4, 3)),
            lambda: w.model.__setitem__(0, first),
            "another object",
        ),
        "module added": (lambda: w.model.append(nn.ReLU()), lambda: w.model.pop(-1), "had modules"),
        "rate": (lambda: group.update(lr=0.5), lambda: group.update(lr=0.1), None),
        "rate of another kind": (lambda: group.update(lr="x"), lambda: group.update(lr=0.1), "lr"),
        "flag": (lambda: group.update(amsgrad=True), lambda: group.update(amsgrad=False), "amsgrad"),
        "beta": (lambda: group.update(betas=(0.5, 0.5)), lambda: group.update(betas=(0.9, 0.999)), "betas"),
        "state replaced": (
            lambda: state[weight].update(exp_avg=torch.ones(3, 4)),
            lambda: state[weight].update(exp_avg=torch.zeros(3, 4)),
            None,
        ),
        "state of another shape": (
            lambda: state[weight].update(exp_avg=torch.ones(3, 5)),
            lambda: state[weight].update(exp_avg=torch.zeros(3, 4)),
            "dimension 1",
        ),
        "list element": (
            lambda: w.table["names"].__setitem__(0, "z"),
            lambda: w.table["names"].__setitem__(0, "a"),
            "was 'a'",
        ),
        "dict value": (lambda: w.table.update(gain=3.0), lambda: w.table.update(gain=2.0), "gain"),
        "dict value of another type": (lambda: w.table.update(gain=2), lambda: w.table.update(gain=2.0), "gain"),
        "grad mode": (
            lambda: torch.set_grad_enabled(False),
            lambda: torch.set_grad_enabled(True),
            "grad mode was True",
        ),
    }


@pytest.mark.parametrize("name", list(changes(World())))
def test_change_is_seen(world, name):
    change, undo, words = changes(world)[name]
    assert world.fast() is not None and isinstance(world.slow(), list)
    change()
    try:
        fast, slow = world.fast(), world.slow()
        if words is None:
            assert fast is not None and isinstance(slow, list), slow
            assert world.fast() is not None
        else:
            assert fast is None
            assert words in str(slow), slow
            assert world.fast() is None, "a failed check must not become the new normal"
    finally:
        undo()
    assert world.fast() is not None and isinstance(world.slow(), list)


def test_inputs_follow_what_was_replaced(world):
    inputs, numbers = world.fast()
    assert inputs[0] is world.x and numbers == [0.1]
    weight = world.model[0].weight
    replaced = torch.full((3, 4), 7.0)
    world.optimizer.state[weight]["exp_avg"] = replaced
    inputs, _ = world.fast()
    assert any(t is replaced for t in inputs)
    world.optimizer.param_groups[0]["lr"] = 0.25
    assert world.fast()[1] == [0.25]


def test_argument_metadata(world):
    assert world.fast(torch.randn(5, 4)) is not None
    for x in (
        torch.randn(6, 4),
        torch.randn(5, 4).double(),
        torch.randn(4, 5).t(),
        torch.randn(5, 4, requires_grad=True),
    ):
        assert world.fast(x) is None
        assert not isinstance(world.slow(x), list)
    assert world.fast([torch.randn(5, 4)]) is None
    assert world.fast("x") is None


def test_argument_that_shares_memory_with_state(world):
    shared = world.optimizer.state[world.model[0].weight]["exp_avg"].flatten()
    memory = torch.zeros(32)
    world.model[0].weight.data = memory[12:24].view(3, 4)
    assert world.fast() is not None
    assert world.fast(memory[:20].view(5, 4)) is None
    assert "memory" in str(world.slow(memory[:20].view(5, 4)))
    assert shared.numel() == 12


def test_grad_that_must_be_set():
    w = torch.zeros(3, requires_grad=True)
    for grad in (GRAD_NONE, GRAD_SET):
        live = native.LiveCheck([w], [grad])
        python = native.LiveCheck([w], [grad], native=False)
        for value in (None, torch.ones(3)):
            w.grad = value
            want = (value is None) == (grad == GRAD_NONE)
            assert (live.check([w]) == 0) == want == (python.check([w]) == 0)


def test_native_watch_matches_python_watch():
    tensors = [
        torch.zeros(3),
        torch.zeros(2, 3, 4, 5, 6, 7),
        nn.Parameter(torch.ones(2)),
        torch.zeros(0, 3),
        torch.tensor(1),
    ]
    table, items = {"a": 1}, [1, 2]
    watches = [make([table], [items], list(tensors), [2] * 5) for make in (native.NativeWatch, native.PythonWatch)]
    steps = [
        (lambda: table.update(b=2), lambda: table.pop("b"), native.DICT),
        (lambda: items.append(3), items.pop, native.LIST),
        (lambda: items.__setitem__(0, 9), lambda: items.__setitem__(0, 1), native.LIST),
        (lambda: tensors[1].transpose_(0, 5), lambda: tensors[1].transpose_(0, 5), native.TENSOR),
        (lambda: tensors[2].requires_grad_(False), lambda: tensors[2].requires_grad_(True), native.TENSOR),
        (lambda: tensors[0].set_(torch.zeros(3)), lambda: None, native.MOVED),
    ]
    for change, undo, kind in steps:
        assert [watch.check() for watch in watches] == [0, 0]
        change()
        assert [watch.check() & 7 for watch in watches] == [kind, kind]
        undo()
        for watch in watches:
            watch.accept_dict(0)
            watch.accept_pointers()


def test_stored_guards_are_the_same_guards(world):
    text = store.encode_capture(world.signature, world.guards, "step", [])
    signature, guards, name, _ = store.decode_capture(text)
    assert (signature, guards, name) == (world.signature, world.guards, "step")
    assert isinstance(guards.check(world.roots), list)
    world.model[1].p = 0.9
    assert isinstance(guards, GuardSet) and "p" in str(guards.check(world.roots))


def test_key_before_capture_ignores_state_that_steps_create():
    worlds = [World(), World()]
    keys = [store.key_before_capture(ObjectMap(w.step, (w.x,), {}), ()) for w in worlds]
    worlds[1].optimizer.state.clear()
    worlds[1].model(worlds[1].x).sum().backward()
    keys.append(store.key_before_capture(ObjectMap(worlds[1].step, (worlds[1].x,), {}), ()))
    assert len(set(keys)) == 1
    worlds[1].model.append(nn.ReLU())
    assert store.key_before_capture(ObjectMap(worlds[1].step, (worlds[1].x,), {}), ()) != keys[0]


def test_values_on_disk():
    values = [
        None, True, 1, 1.0, float("inf"), "s", b"b", (1, (2.0, "x")), [1, [2]], {"a": 1}, {1: "a"}, 1j, slice(1, None),
        range(3), torch.float32, torch.device("cpu"), torch.Size([1, 2]), torch.contiguous_format, ...,
        Source("arg", 0, (("item", 1),)),
    ]  # fmt: skip
    for value in values:
        again = store.decode(store.encode(value))
        assert again == value and type(again) is type(value)
    with pytest.raises(store.Unstorable):
        store.encode(object())


# ---- walking


def test_sources_find_their_objects_again():
    config = types.SimpleNamespace(inner={"t": torch.zeros(1), 3: [torch.ones(1)]})
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.BatchNorm1d(2)})
    optimizer = torch.optim.Adam(model.parameters())
    model["a"](torch.ones(1, 2)).sum().backward()
    optimizer.step()

    def step(x, *, y, z=(torch.zeros(2),)):
        return config, model, optimizer

    objects = ObjectMap(step, (torch.zeros(1),), {"y": {"k": torch.zeros(2)}})
    for tensor, source in objects.tensors:
        assert objects.roots.resolve(source) is tensor, source
    names = {str(source) for _, source in objects.tensors}
    for name in (
        "arg[0]",
        "kwarg['y']['k']",
        "config.inner['t']",
        "config.inner[3][0]",
        "model.a.weight",
        "model.b.running_mean",
    ):
        assert name in names, names
    assert any("exp_avg" in name for name in names)
    assert any(name.endswith(".grad") for name in names)


def test_walk_is_bounded():
    big = [[i] for i in range(5000)]
    objects = ObjectMap(lambda: big, (), {}, limit=1000)
    assert objects.truncated and len(objects.reached) == 1000


SETTINGS = types.SimpleNamespace(deep=types.SimpleNamespace(value=1))


def test_bytecode_names():
    scale = 1

    def step(x):
        def inner(y):
            return y * SETTINGS.deep.value

        global WRITTEN
        WRITTEN = 1
        return inner(x) * scale + torch.nn.functional.relu(x).sum()

    found = bytecode.names(step.__code__)
    assert ("SETTINGS", "deep", "value") in found.globals
    assert ("torch", "nn", "functional", "relu") in found.globals
    assert ("scale",) in found.cells
    assert {"deep", "value", "relu", "sum"} <= found.attributes
    assert found.written == {"WRITTEN"}


def test_fingerprint_sees_constants_and_not_lines():
    make = lambda text: compile(text, "<a>", "exec")
    assert bytecode.fingerprint(make("x = 1")) == bytecode.fingerprint(make("\n\nx = 1"))
    assert bytecode.fingerprint(make("x = 1")) != bytecode.fingerprint(make("x = 1.0"))
    assert bytecode.fingerprint(make("def f(): return 1")) != bytecode.fingerprint(make("def f(): return 2"))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("place", ["argument", "closure", "changed in place", "window of what was changed in place"])
def test_a_tensor_that_comes_to_have_a_history(place, native, monkeypatch):
    """A capture made for plain data must not take what a gradient would flow through: it would end there silently."""
    monkeypatch.setenv("NOVA_NATIVE", str(int(native)))
    outside, weight = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    base = torch.ones(2, 3)
    held = [base[0] if place.startswith("window") else base]

    @functools.partial(nova.jit, backend="interpret")
    def step(x):
        loss = (x * held[0] * weight).sum()
        loss.backward()
        return loss.detach()

    @functools.partial(nova.jit, backend="interpret")
    @torch.no_grad()
    def evaluate(x):
        return (x * held[0]).sum()

    x = torch.ones(3)
    step(x), step(x), evaluate(x)
    before = weight.grad.clone()
    if place == "argument":
        x = outside * 2
    elif place == "closure":
        held[0] = outside * 2
    else:
        base.mul_(outside)
    for _ in range(2):
        with pytest.raises(CaptureError, match="computed outside it and requires grad"):
            step(x)
    assert outside.grad is None
    torch.testing.assert_close(weight.grad, before)
    wanted = (x * held[0]).sum().detach()
    for _ in range(3):
        torch.testing.assert_close(evaluate(x), wanted)
    assert evaluate.captures <= 2
    held[0] = torch.ones(3)
    step(torch.ones(3)), step(torch.ones(3))


@pytest.mark.parametrize("grad", [True, False])
def test_windows_of_parameters_that_the_step_only_holds(grad):
    """They have a history of their own, or none that PyTorch would tell; neither is a reason to capture again."""
    net = nn.Linear(3, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    with torch.set_grad_enabled(grad):
        held = [net.weight.view(-1), net.bias[1:]]

    @functools.partial(nova.jit, backend="interpret")
    def step(x):
        assert len(held) == 2
        loss = net(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    for _ in range(4):
        step(torch.ones(2, 3))
    assert step.captures == 1
