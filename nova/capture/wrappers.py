"""Objects of C that stand in front of others: what is inside, and how to look at it.

    get = table.get                      a bound method of C    inside: table
    operator.attrgetter("model.width")   a getter               inside: "model.width"
    MappingProxyType(table)              a view                 inside: table
    RATE = ContextVar("rate")            a variable             inside: its value in this context
    WeakMethod(model.loss)               a weak method          inside: its object, its function
    np.array([cfg], dtype=object)        an array of objects    inside: cfg
    @lru_cache                           a cached function      inside: the function, the mutable results that it holds

None of them has attributes that a guard could read; what the step learns from them is what is inside.
"""

from __future__ import annotations

import collections
import contextvars
import functools
import gc
import operator
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

MISSING = object()
MOST_RESULTS = 64  # of a cached function that are looked at

BOUND = (types.BuiltinFunctionType, types.MethodWrapperType)
GETTERS = (operator.attrgetter, operator.itemgetter, operator.methodcaller)
_TABLES: tuple[dict[str, Any], ...] = ({}, collections.OrderedDict())
VIEWS = (types.MappingProxyType, *(type(view) for t in _TABLES for view in (t.keys(), t.values(), t.items())))
CACHED: type = functools._lru_cache_wrapper
_PLAIN = (type(None), int, float, complex, str, bytes)


def is_bound(function: Any) -> bool:
    """Whether a function of C belongs to an object that a step may read through it."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, (type(None), type, types.ModuleType)):
        return False
    return type(owner).__name__ != "PyCapsule" and not type(owner).__module__.startswith("pybind11")


def label(wrapper: Any) -> str:
    """What tells a wrapper from others of its type that hold the same."""
    if isinstance(wrapper, BOUND):
        return wrapper.__name__
    if holds_objects(wrapper):
        return str(wrapper.shape)
    return ",".join(_reduced(wrapper)[1]) if isinstance(wrapper, GETTERS) else ""


def inside(wrapper: Any) -> tuple[Any, ...]:
    """What a wrapper stands for now."""
    return _INSIDE.get(type(wrapper), _elements)(wrapper)


def holds_objects(value: Any) -> bool:
    """Whether a value is an array of Python objects: what it holds is not in its memory."""
    return isinstance(value, np.ndarray) and value.dtype == object


def _elements(array: Any) -> tuple[Any, ...]:
    return tuple(array.ravel().tolist())


def _reduced(getter: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a getter was made from."""
    maker, args = getter.__reduce__()
    if isinstance(maker, functools.partial):  # there are keywords
        return (*maker.args, *args), maker.keywords
    return args, {}


def _value(variable: contextvars.ContextVar[Any]) -> tuple[Any, ...]:
    try:
        return (variable.get(),)
    except LookupError:
        return (MISSING,)


def _cell(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return (MISSING,)


def _method(method: weakref.WeakMethod[Any]) -> tuple[Any, ...]:
    found = method()
    return (MISSING, MISSING) if found is None else (found.__self__, found.__func__)


def _cached(function: Any) -> tuple[Any, ...]:
    """A cached function's results that can change, in an order that calls of it do not disturb."""
    own, wrapped = function.__dict__, function.__wrapped__
    held = [o for o in gc.get_referents(function) if o is not own and o is not wrapped and not isinstance(o, type)]
    if function.cache_parameters()["maxsize"] is None:
        held = [result for table in held if isinstance(table, dict) for result in table.values()]
    found = {id(o): o for o in held if not isinstance(o, _PLAIN) and not _is_store(o)}
    return (wrapped, *(found[key] for key in sorted(found)[:MOST_RESULTS]))


def _is_store(obj: Any) -> bool:
    """The table in which a cache of limited size finds its entries, or what only serves it."""
    if isinstance(obj, dict):
        return all(type(entry).__name__ == "_lru_list_elem" for entry in obj.values())
    return type(obj) is object or type(obj).__name__ == "_lru_list_elem"


_INSIDE: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    **dict.fromkeys(BOUND, lambda function: (function.__self__,)),
    **dict.fromkeys(GETTERS, lambda getter: (*_reduced(getter)[0], *_reduced(getter)[1].values())),
    **dict.fromkeys(VIEWS, lambda view: (gc.get_referents(view)[0],)),
    contextvars.ContextVar: _value,
    contextvars.Context: lambda context: tuple(context.values()),
    types.CellType: _cell,
    weakref.WeakMethod: _method,
    CACHED: _cached,
}
WRAPPERS = frozenset(_INSIDE)
