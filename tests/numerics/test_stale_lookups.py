"""Python state that a step finds by detours: through tables of names, the machinery of classes, replaced functions."""

from __future__ import annotations

import builtins
import functools
import importlib
import math
import operator
import sys
import types

import pytest
import torch
from stale_case import Cases, Thing, a_change_is_seen, name_of, setting
from torch import nn
from torch.nn import functional as F

lookup_helper = sys.modules["lookup_helper"] = types.ModuleType("lookup_helper")  # a module of the user's
lookup_helper.__file__ = "lookup_helper.py"

SCALE = 2.0
CASES = Cases()
case = CASES.add


# ---- tables of names


def _of_globals(read):
    def make():
        globals()["SCALE"] = 2.0
        return lambda x: x * read(), lambda: globals().update(SCALE=3.0)

    return make


def _of_module(read):
    def make():
        lookup_helper.SCALE = 2.0
        return lambda x: x * read(), setting(lookup_helper, "SCALE", 3.0)

    return make


def _nothing():
    pass


CASES |= {
    "globals": _of_globals(lambda: globals()["SCALE"]),
    "get of globals": _of_globals(lambda: globals().get("SCALE", 0.0)),
    "computed name of globals": _of_globals(lambda: globals()[name_of("SC", "ALE")]),
    "own module": _of_globals(lambda: sys.modules[__name__].SCALE),
    "globals of a function": _of_globals(lambda: _nothing.__globals__["SCALE"]),
    "eval": _of_globals(lambda: eval("SCALE")),
    "vars of a module": _of_module(lambda: vars(lookup_helper)["SCALE"]),
    "vars of a module by a computed name": _of_module(lambda: vars(lookup_helper)[name_of("SC", "ALE")]),
    "dict of a module": _of_module(lambda: lookup_helper.__dict__["SCALE"]),
    "dict of a module by a computed name": _of_module(lambda: lookup_helper.__dict__[name_of("SC", "ALE")]),
    "sys.modules": _of_module(lambda: sys.modules["lookup_helper"].SCALE),
    "sys.modules by a computed name": _of_module(lambda: sys.modules[name_of("lookup_", "helper")].SCALE),
    "import_module": _of_module(lambda: importlib.import_module("lookup_helper").SCALE),
    "__import__": _of_module(lambda: __import__("lookup_helper").SCALE),
    "getattr of a module": _of_module(lambda: getattr(lookup_helper, name_of("SC", "ALE"))),
    "attrgetter of a module": _of_module(lambda: operator.attrgetter("SCALE")(lookup_helper)),
}


@case
def dict_of_an_object():
    thing = Thing(scale=2.0)
    return lambda x: x * thing.__dict__[name_of("sca", "le")], setting(thing, "scale", 3.0)


def _of_listing(count):
    def make():
        thing = Thing(scale=2.0)
        return lambda x: x * count(thing), setting(thing, "shift", 3.0)

    return make


CASES |= {
    "how many vars": _of_listing(lambda thing: len(vars(thing))),
    "size of a dict": _of_listing(lambda thing: len(thing.__dict__)),
    "dir": _of_listing(lambda thing: len(dir(thing))),
}


@case
def dict_of_a_class():
    class Config:
        scale = 2.0

    return lambda x: x * Config.__dict__[name_of("sca", "le")], setting(Config, "scale", 3.0)


@case
def default_getattribute():
    thing = Thing(scale=2.0)
    return lambda x: x * object.__getattribute__(thing, name_of("sca", "le")), setting(thing, "scale", 3.0)


@case
def locals_of_the_step():
    thing = Thing(scale=2.0)

    def step(x):
        config = thing
        return x * locals()["config"].scale * config.scale

    return step, setting(thing, "scale", 3.0)


@case
def format_string():
    thing = Thing(scale=2.0)
    return lambda x: x * float("{thing.scale}".format(thing=thing)), setting(thing, "scale", 3.0)  # noqa: UP032


# ---- classes


@case
def attribute_of_a_metaclass():
    class Meta(type):
        scale = 2.0

    class Config(metaclass=Meta):
        pass

    return lambda x: x * Config.scale, setting(Meta, "scale", 3.0)


@case
def property_of_a_metaclass():
    class Meta(type):
        held = 2.0

        @property
        def scale(cls):
            return cls.held

    class Config(metaclass=Meta):
        pass

    return lambda x: x * Config.scale, setting(Meta, "held", 3.0)


@case
def getattr_of_a_metaclass():
    table = {"scale": 2.0}

    class Meta(type):
        def __getattr__(cls, name):
            return table[name]

    class Config(metaclass=Meta):
        pass

    return lambda x: x * Config.scale, lambda: table.update(scale=3.0)


@case
def class_attribute_over_a_metaclass_getattr():
    class Meta(type):
        def __getattr__(cls, name):
            return 2.0

    class Config(metaclass=Meta):
        pass

    return lambda x: x * Config.scale, setting(Config, "scale", 3.0)


class Answering:
    def __getattr__(self, name):
        if name == "scale":
            return 2.0
        raise AttributeError(name)


@case
def attribute_over_getattr():
    thing = Answering()
    return lambda x: x * thing.scale, setting(thing, "scale", 3.0)


@case
def class_attribute_over_getattr():
    class Config(Answering):
        pass

    thing = Config()
    return lambda x: x * thing.scale, setting(Config, "scale", 3.0)


@case
def attribute_over_a_module_getattr():
    vars(lookup_helper).pop("dynamic", None)
    lookup_helper.__getattr__ = lambda name: 2.0
    return lambda x: x * lookup_helper.dynamic, setting(lookup_helper, "dynamic", 3.0)


@case
def another_module_getattr():
    vars(lookup_helper).pop("dynamic", None)
    lookup_helper.__getattr__ = lambda name: 2.0
    return lambda x: x * lookup_helper.dynamic, setting(lookup_helper, "__getattr__", lambda name: 3.0)


@case
def descriptor_that_needs_an_object():
    class Scale:
        def __get__(self, obj, cls):
            return obj.held

    class Config:
        scale = Scale()

    thing = Config()
    thing.held = 2.0
    return lambda x: x * thing.scale, setting(thing, "held", 3.0)


def _two(self=None):
    return 2.0


def _three(self=None):
    return 3.0


def _of_alias(kind):
    """The function in the class is reached by another path too."""

    def make():
        class Config:
            scale = kind(_two)

        thing = Config()
        read = (lambda: thing.scale) if kind is property else (lambda: 1.0 * thing.scale())
        return lambda x: x * (read() + 0 * _two()), lambda: setattr(Config, "scale", kind(_three))

    return make


CASES |= {
    "method that is a global": _of_alias(lambda function: function),
    "static method that is a global": _of_alias(staticmethod),
    "class method that is a global": _of_alias(classmethod),
    "property that is a global": _of_alias(property),
}


@case
def forward_of_two_classes():
    def forward(self, x):
        return x * 2.0

    class First(nn.Module):
        pass

    class Second(nn.Module):
        pass

    First.forward = Second.forward = forward
    first, second = First(), Second()
    return lambda x: first(x) + second(x), setting(Second, "forward", lambda self, x: x * 3.0)


def _of_special_method(name, function, read):
    def make():
        class Config:
            scale = 2.0

        thing = Config()
        return lambda x: x * read(thing, Config), setting(Config, name, function)

    return make


def _init(self):
    self.scale = 3.0


CASES |= {
    "added __init__": _of_special_method("__init__", _init, lambda thing, cls: cls().scale),
    "added __bool__": _of_special_method("__bool__", lambda self: False, lambda thing, cls: 2.0 if thing else 3.0),
    "added __eq__": _of_special_method("__eq__", lambda self, b: True, lambda thing, cls: 3.0 if thing == 1 else 2.0),
    "added property": _of_special_method(
        "held", property(lambda self: 3.0), lambda thing, cls: getattr(thing, "held", 2.0)
    ),
}


@case
def descriptor():
    class Scale:
        def __init__(self, value):
            self.value = value

        def __get__(self, obj, cls):
            return self.value

    class Config:
        scale = Scale(2.0)

    return lambda x: x * Config.scale, lambda: setattr(vars(Config)["scale"], "value", 3.0)


@case
def other_bases():
    class First:
        def scale(self):
            return 2.0

    class Second:
        def scale(self):
            return 3.0

    class Config(First):
        pass

    thing = Config()
    return lambda x: x * thing.scale(), setting(Config, "__bases__", (Second,))


@case
def private_slot():
    class Config:
        __slots__ = ("__scale",)

        def __init__(self):
            self.__scale = 2.0

        def get(self):
            return self.__scale

    thing = Config()
    return lambda x: x * thing.get(), setting(thing, "_Config__scale", 3.0)


@case
def method_for_a_type():
    class Config:
        @functools.singledispatchmethod
        def scaled(self, kind, x):
            return x

        @scaled.register
        def _(self, kind: int, x):
            return x * 2.0

    thing = Config()
    change = lambda: vars(Config)["scaled"].register(int, lambda self, kind, x: x * 3.0)  # noqa: E731
    return lambda x: thing.scaled(1, x), change


@case
def function_for_a_type():
    @functools.singledispatch
    def scaled(kind, x):
        return x * 2.0

    return lambda x: scaled(1, x), lambda: scaled.register(int, lambda kind, x: x * 3.0)


@case
def class_pattern():
    class Config:
        __match_args__ = ("scale",)

        def __init__(self):
            self.scale = 2.0

    thing = Config()

    def step(x):
        match thing:
            case Config(found):
                return x * found

    return step, setting(thing, "scale", 3.0)


@case
def class_pattern_by_name():
    thing = Thing(scale=2.0)

    def step(x):
        match thing:
            case Thing(scale=found):
                return x * found

    return step, setting(thing, "scale", 3.0)


# ---- functions that were replaced


@case
def forward_of_a_library_class():
    model, before = nn.ReLU(), nn.ReLU.forward

    def change():
        nn.ReLU.forward = lambda self, x: x * 3.0

    change.undo = lambda: setattr(nn.ReLU, "forward", before)
    return lambda x: model(x) * 1.0, change


@case
def function_of_a_library():
    before, change = F.relu, lambda: setattr(F, "relu", lambda x: x * 3.0)
    change.undo = lambda: setattr(F, "relu", before)
    return lambda x: F.relu(x) * 1.0, change


@case
def builtin():
    builtins.lookup_scale = 2.0
    return lambda x: x * lookup_scale, setting(builtins, "lookup_scale", 3.0)  # noqa: F821


@case
def step_of_an_optimizer():
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x):
        weight.grad = None
        (x * weight).sum().backward()
        optimizer.step()
        return weight.detach().clone()

    return step, setting(optimizer, "step", lambda: None)


@case
def state_of_an_optimizer():
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight]["scale"] = 2.0
    return lambda x: x * optimizer.state[weight]["scale"], lambda: optimizer.state[weight].update(scale=3.0)


@case
def defaults_of_an_optimizer():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(4))], lr=0.1)
    return lambda x: x * optimizer.defaults["lr"], lambda: optimizer.defaults.update(lr=0.5)


@case
def function_of_math():
    before, change = math.comb, lambda: setattr(math, "comb", lambda n, k: 3.0)
    change.undo = lambda: setattr(math, "comb", before)
    return lambda x: x * math.comb(2, 1), change


@case
def attribute_of_an_optimizer():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(4))], lr=0.1)
    optimizer.scale = 2.0
    return lambda x: x * optimizer.scale, setting(optimizer, "scale", 3.0)


@case
def class_of_a_parameter():
    class Weight(nn.Parameter):
        scale = 2.0

    weight = Weight(torch.ones(4))
    return lambda x: x * weight.scale, setting(Weight, "scale", 3.0)


@case
def defaults_that_are_read():
    def helper(scale=2.0):
        pass

    return lambda x: x * helper.__defaults__[0], setting(helper, "__defaults__", (3.0,))


@case
def function_behind_a_proxy():
    def scaled(x):
        return x * 2.0

    table = types.MappingProxyType({"scaled": scaled})
    return lambda x: table["scaled"](x) * 1.0, setting(scaled, "__code__", (lambda x: x * 3.0).__code__)


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen(name):
    a_change_is_seen(CASES[name])
