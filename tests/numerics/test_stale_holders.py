"""Python state that lies behind objects of C, in containers, contexts and caches."""

from __future__ import annotations

import collections
import contextvars
import ctypes
import enum
import functools
import operator
import queue
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from replay_case import interpreted
from stale_case import Cases, Thing, X, a_change_is_seen, setting
from torch import nn

from nova.errors import CaptureError

RATE = contextvars.ContextVar("RATE", default=2.0)
CASES = Cases()
KEPT = []  # what only weak references reach otherwise
case = CASES.add


# ---- objects of C that stand before others


def _of_table(get):
    """`get` makes what the step calls from a table whose entry "scale" changes."""

    def make():
        table = {"scale": 2.0}
        read = get(table)
        return lambda x: x * read(), lambda: table.update(scale=3.0)

    return make


def _calling(function, *args):
    return lambda: function(*args)


CASES |= {
    "get of a dict": _of_table(lambda table: _calling(table.get, "scale")),
    "__getitem__ of a dict": _of_table(lambda table: _calling(table.__getitem__, "scale")),
    "partial of get": _of_table(lambda table: functools.partial(table.get, "scale")),
    "partial of getitem": _of_table(lambda table: functools.partial(operator.getitem, table, "scale")),
    "values of a dict": _of_table(lambda table: _calling(sum, table.values())),
    "items of a dict": _of_table(lambda table: lambda view=table.items(): dict(view)["scale"]),
    "mapping proxy": _of_table(lambda table: lambda proxy=types.MappingProxyType(table): proxy["scale"]),
    "chain map": _of_table(lambda table: lambda chain=collections.ChainMap({}, table): chain["scale"]),
    "itemgetter": _of_table(lambda table: _calling(operator.itemgetter("scale"), table)),
}


@case
def another_bound_method():
    thing = Thing(get={"scale": 2.0}.get)
    return lambda x: x * thing.get("scale"), lambda: setattr(thing, "get", {"scale": 3.0}.get)


@case
def another_method_of_the_same():
    items = [1.0, 2.0]
    thing = Thing(count=items.__len__)
    return lambda x: x * thing.count(), setting(thing, "count", items.__sizeof__)


@case
def getitem_of_a_list():
    items = [Thing(scale=2.0)]
    get = items.__getitem__
    return lambda x: x * get(0).scale, setting(items[0], "scale", 3.0)


@case
def method_of_a_tensor():
    thing = Thing(scaled=torch.tensor([2.0]).mul)
    return lambda x: thing.scaled(x) * 1.0, lambda: setattr(thing, "scaled", torch.tensor([3.0]).mul)


@case
def attrgetter():
    thing = Thing(model=Thing(scale=2.0))
    get = operator.attrgetter("model.scale")
    return lambda x: x * get(thing), setting(thing.model, "scale", 3.0)


@case
def attrgetter_over_a_class():
    class Config:
        scale = 2.0

    thing, get = Config(), operator.attrgetter("scale")
    return lambda x: x * get(thing), setting(thing, "scale", 3.0)


@case
def methodcaller():
    class Config:
        def scale(self):
            return 2.0

    thing, call = Config(), operator.methodcaller("scale")
    return lambda x: x * call(thing), setting(thing, "scale", lambda: 3.0)


@case
def partial_of_getattr():
    thing = Thing(scale=2.0)
    get = functools.partial(getattr, thing, "scale")
    return lambda x: x * get(), setting(thing, "scale", 3.0)


@case
def cell():
    def make():
        scale = 2.0
        return lambda: scale

    held = make().__closure__[0]
    return lambda x: x * held.cell_contents, setting(held, "cell_contents", 3.0)


@case
def unset_variable():
    def step(x):
        try:
            return x * scale
        except NameError:
            return x * 2.0

    def change():
        nonlocal scale
        scale = 3.0

    if X.dim() != 1:
        scale = 1.0
    return step, change


@case
def c_structure():
    class Config(ctypes.Structure):
        _fields_ = (("scale", ctypes.c_double),)

    thing = Config(2.0)
    return lambda x: x * thing.scale, setting(thing, "scale", 3.0)


# ---- containers


@case
def order_of_a_dict():
    table = {"a": 2.0, "b": 3.0}
    return lambda x: x * [*table.values()][0], lambda: table.update(a=table.pop("a"))


@case
def order_of_an_ordered_dict():
    table = collections.OrderedDict((f"k{i}", i + 2.0) for i in range(200))
    return lambda x: x * [*table.values()][0], lambda: table.move_to_end("k0")


@case
def length_of_a_deque():
    thing = Thing(items=collections.deque([2.0], maxlen=2))
    return lambda x: x * thing.items.maxlen, lambda: setattr(thing, "items", collections.deque([2.0], maxlen=3))


@case
def factory_of_a_default_dict():
    table = collections.defaultdict(lambda: 2.0)
    return lambda x: x * table.default_factory(), setting(table, "default_factory", lambda: 3.0)


def _of_subclass(base, of_class):
    def make():
        class Config(base):
            scale = 2.0

            def get_scale(self):
                return self.scale

        thing = Config()
        return lambda x: x * thing.get_scale(), setting(Config if of_class else thing, "scale", 3.0)

    return make


def _of_method(base):
    def make():
        class Config(base):
            def scale(self):
                return 2.0

        thing = Config()
        return lambda x: x * thing.scale(), setting(Config, "scale", lambda self: 3.0)

    return make


for base in (dict, list, set, collections.OrderedDict, collections.UserDict):
    CASES[f"attribute of the class of a {base.__name__}"] = _of_subclass(base, True)
    CASES[f"attribute of a {base.__name__}"] = _of_subclass(base, False)
    CASES[f"method of a {base.__name__}"] = _of_method(base)


@case
def missing_key():
    class Table(dict):
        scale = 2.0

        def __missing__(self, key):
            return self.scale

    table = Table()
    return lambda x: x * table["a"], setting(table, "scale", 3.0)


@case
def class_of_a_named_tuple():
    class Pair(collections.namedtuple("Pair", "a b")):
        scale = 2.0

    pair = Pair(1.0, 2.0)
    return lambda x: x * pair.scale, setting(Pair, "scale", 3.0)


@case
def objects_in_a_set():
    things = {Thing(scale=2.0)}
    return lambda x: x * sum(thing.scale for thing in things), setting(next(iter(things)), "scale", 3.0)


@case
def objects_in_an_array():
    things = np.array([Thing(scale=2.0), None], dtype=object)
    return lambda x: x * things[0].scale, setting(things[0], "scale", 3.0)


@case
def another_object_in_an_array():
    things = np.array([Thing(scale=2.0), None], dtype=object)
    return lambda x: x * things[0].scale, lambda: things.__setitem__(0, Thing(scale=3.0))


@case
def large_set():
    numbers = set(range(3000))
    return lambda x: x * (2.0 if 5 in numbers else 3.0), lambda: (numbers.discard(5), numbers.add(-1))


@case
def keys_that_are_objects():
    things = {Thing(scale=2.0): 1}
    return lambda x: x * [key.scale for key in things][0], setting([*things][0], "scale", 3.0)


@case
def context_variable_in_a_long_table():
    rate = contextvars.ContextVar("rate", default=2.0)
    table = {f"k{i}": rate for i in range(100)}
    return lambda x: x * table["k7"].get(), lambda: rate.set(3.0)


@case
def objects_in_a_long_list():
    things = [Thing(scale=2.0) for _ in range(3000)]
    return lambda x: x * things[7].scale, lambda: things.__setitem__(7, Thing(scale=3.0))


def _of_many(wrap, get):
    def make():
        things = [Thing(scale=2.0, other=[i]) for i in range(3000)]
        held = wrap(things)
        return lambda x: x * get(held).scale, setting(things[7], "scale", 3.0)

    return make


CASES |= {
    "attribute in a long list": _of_many(list, lambda held: held[7]),
    "attribute in a long tuple": _of_many(tuple, lambda held: held[7]),
    "attribute in a long dict": _of_many(lambda things: {f"k{i}": t for i, t in enumerate(things)}, lambda d: d["k7"]),
    "attribute in a long table of a module": _of_many(
        lambda things: setattr(model := nn.Module(), "things", things) or model, lambda model: model.things[7]
    ),
}


@case
def attribute_of_an_enum_member():
    class Mode(enum.Enum):
        FAST = 1

    Mode.FAST.scale = 2.0
    return lambda x: x * Mode.FAST.scale, setting(Mode.FAST, "scale", 3.0)


@case
def value_of_an_enum_member():
    class Mode(enum.Enum):
        FAST = {"scale": 2.0}

    mode = Mode.FAST
    return lambda x: x * mode.value["scale"], lambda: mode.value.update(scale=3.0)


@case
def method_of_an_enum():
    class Mode(enum.Enum):
        FAST = 1

        def scale(self):
            return 2.0

    mode = Mode.FAST
    return lambda x: x * mode.scale(), setting(Mode, "scale", lambda self: 3.0)


def _of_number(base, of_class):
    def make():
        class Number(base):
            scale = 2.0

        number = Number(1)
        return lambda x: x * number.scale, setting(Number if of_class else number, "scale", 3.0)

    return make


for base in (int, float, str):
    CASES[f"attribute of a kind of {base.__name__}"] = _of_number(base, False)
    CASES[f"attribute of the class of a kind of {base.__name__}"] = _of_number(base, True)


@case
def value_of_a_kind_of_int():
    class Number(int):
        pass

    thing = Thing(number=Number(2))
    return lambda x: x * int(thing.number), setting(thing, "number", Number(3))


@case
def combined_flags():
    class Mode(enum.Flag):
        FAST = enum.auto()
        WIDE = enum.auto()

    thing = Thing(mode=Mode.FAST)
    return lambda x: x * (3.0 if thing.mode & Mode.WIDE else 2.0), setting(thing, "mode", Mode.FAST | Mode.WIDE)


@case
def size_of_a_queue():
    held = queue.Queue()
    return lambda x: x * (held.qsize() + 1), lambda: held.put(1)


@case
def weak_proxy():
    KEPT.append(Thing(scale=2.0))
    proxy = weakref.proxy(KEPT[-1])
    return lambda x: x * proxy.scale, setting(KEPT[-1], "scale", 3.0)


@case
def reference_to_what_is_gone():
    KEPT.append(Thing(scale=2.0))
    reference = weakref.ref(KEPT[-1])
    return lambda x: x * (3.0 if reference() is None else reference().scale), lambda: KEPT.pop() and None


@case
def value_that_is_gone():
    KEPT.append(Thing(scale=2.0))
    table = weakref.WeakValueDictionary(a=KEPT[-1])
    return lambda x: x * (table["a"].scale if "a" in table else 3.0), lambda: KEPT.pop() and None


@case
def weak_values():
    KEPT.append(Thing(scale=2.0))
    table = weakref.WeakValueDictionary(a=KEPT[-1])
    return lambda x: x * table["a"].scale, setting(KEPT[-1], "scale", 3.0)


@case
def other_weak_values():
    KEPT.extend((Thing(scale=2.0), Thing(scale=3.0)))
    table = weakref.WeakValueDictionary(a=KEPT[-2])
    return lambda x: x * table["a"].scale, lambda: table.update(a=KEPT[-1])


@case
def weak_keys():
    KEPT.append(Thing())
    table, key = weakref.WeakKeyDictionary({KEPT[-1]: 2.0}), KEPT[-1]
    return lambda x: x * table[key], lambda: table.update({key: 3.0})


@case
def weak_method():
    KEPT.append(Derived := type("Derived", (Thing,), {"get": lambda self: self.scale})(scale=2.0))
    method = weakref.WeakMethod(Derived.get)
    return lambda x: x * method()(), setting(KEPT[-1], "scale", 3.0)


# ---- contexts and caches


@case
def context_variable():
    RATE.set(2.0)
    return lambda x: x * RATE.get(), lambda: RATE.set(3.0)


@case
def context_variable_that_was_not_set():
    rate = contextvars.ContextVar("rate")
    return lambda x: x * rate.get(2.0), lambda: rate.set(3.0)


@case
def object_in_a_context_variable():
    rate = contextvars.ContextVar("rate")
    rate.set(Thing(scale=2.0))
    return lambda x: x * rate.get().scale, lambda: setattr(rate.get(), "scale", 3.0)


@case
def attribute_of_a_thread():
    local = threading.local()
    local.scale = 2.0
    return lambda x: x * local.scale, setting(local, "scale", 3.0)


def _cached(warm, clear, limit=128):
    def make():
        table = {"scale": 2.0}

        def helper(name):
            return table[name]

        @functools.lru_cache(limit)
        def scale(name):
            return helper(name)

        def change():
            table["scale"] = 3.0
            scale.cache_clear() if clear else None

        scale("scale") if warm else None
        return lambda x: x * scale("scale"), change

    return make


CASES |= {
    "cached function": _cached(False, True),
    "cached function with a result": _cached(True, True),
    "cached function without a limit": _cached(True, True, None),
}


@case
def cached_object():
    @functools.lru_cache
    def config(name):
        return {"scale": 2.0}

    config("a"), config("b")
    return lambda x: x * config("a")["scale"], lambda: config("a").update(scale=3.0)


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen(name):
    a_change_is_seen(CASES[name])


def test_a_cached_result_stays_until_the_cache_is_cleared():
    function, change = _cached(True, False)()
    step = interpreted(function)
    torch.testing.assert_close(step(X), X * 2.0)
    change()
    torch.testing.assert_close(step(X), X * 2.0)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda held: held["append"](1.0), "items"),
        (lambda held: held["rate"].set(3.0), "rate"),
        (lambda held: contextvars.copy_context(), "copy_context"),
    ],
)
def test_changes_through_detours_are_refused(change, word):
    items, rate = [], contextvars.ContextVar("rate", default=2.0)
    append = items.append

    def step(x):
        change({"append": append, "rate": rate})
        return x * 2.0

    with pytest.raises(CaptureError, match=word):
        interpreted(step)(X)
    assert not items and rate.get() == 2.0


# ---- another class of the same object


class _Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class _Reversed(nn.Sequential):
    def forward(self, x):
        for layer in reversed(self):
            x = layer(x)
        return x


class _Backwards(torch.optim.SGD):
    def step(self, closure=None):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad)


class _Own(nn.Module):
    def forward(self, x):
        return 3 * x


class _OwnToo(nn.Module):
    def forward(self, x):
        return 5 * x


def _of_another_class(make, find, cls):
    """A step that calls what `make` makes, in which the class of what `find` finds is set."""

    def build():
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(4)), *model.parameters()], lr=0.1)
        weight = optimizer.param_groups[0]["params"][0]

        def step(x):
            loss = (model(x) * weight).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, lambda: setattr(find(model, optimizer), "__class__", cls)

    return build


OTHER_CLASSES = {
    "a layer by itself": _of_another_class(lambda: nn.Linear(4, 4), lambda m, o: m, _Doubled),
    "a layer of a model": _of_another_class(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), lambda m, o: m[0], _Doubled
    ),
    "a layer for another of PyTorch's": _of_another_class(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), lambda m, o: m[1], nn.Sigmoid
    ),
    "a container of layers": _of_another_class(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), lambda m, o: m, _Reversed
    ),
    "a module of the user's": _of_another_class(lambda: nn.Sequential(_Own()), lambda m, o: m[0], _OwnToo),
    "an optimizer": _of_another_class(lambda: nn.Linear(4, 4), lambda m, o: o, _Backwards),
}


@pytest.mark.parametrize("name", OTHER_CLASSES)
@pytest.mark.parametrize("native", ["1", "0"])
def test_another_class_of_the_same_object_is_seen(name, native, monkeypatch):
    monkeypatch.setenv("NOVA_NATIVE", native)
    a_change_is_seen(OTHER_CLASSES[name])
