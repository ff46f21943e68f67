"""Which attributes of an object the user's code may have read, and which it looked for in vain.

    class Block(nn.Module):                block.scale     not the instance's own: setting it later hides the class's
        scale = 2.0
        def forward(self, x):
            if hasattr(self, "gate"): ...  block.gate      does not exist: it may come to

The bytecode of the code that ran names attributes; names that are computed (`getattr(cfg, f"w{i}")`) were noted when
they were asked for. Objects that read by name (`operator.attrgetter("a.b")`, `partial(getattr, cfg, "width")`) name
theirs themselves.
"""

from __future__ import annotations

import enum
import operator
import re
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from nova.capture import bytecode
from nova.capture.sources import (
    ObjectMap,
    children,
    class_attribute,
    declared_state,
    is_user_class,
    is_user_function,
    own_dict,
    slot_names,
)
from nova.capture.wrappers import CACHED, GETTERS, MISSING, inside

# These read every attribute of something, or one by a name that is computed where nobody sees it.
_WHOLE_READS = frozenset({
    "vars", "dir", "asdict", "astuple", "__dict__", "locals", "attrgetter", "methodcaller", "__getattribute__",
    "getattr_static",
})  # fmt: skip
_WHOLE = 1000  # an object with more attributes than this is guarded on those that are named
_PART = re.compile(r"[.\[]([A-Za-z_]\w*)")  # of a format string: "{config.width}"
_METHODS_OF_LIBRARIES = frozenset({"step", "zero_grad"})  # an instance may come to have its own
_NOT_READS = frozenset({
    "__init__", "__new__", "__repr__", "__str__", "__eq__", "__hash__", "__del__", "__reduce__", "__reduce_ex__",
    "__setattr__", "__delattr__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__", "__init_subclass__",
})  # fmt: skip


class Reads:
    """What code that ran may have read by name."""

    def __init__(
        self, codes: Iterable[types.CodeType], asked: Iterable[tuple[type, str]] = (), objects: ObjectMap | None = None
    ):
        self._library: dict[type, frozenset[str]] = {}
        found = [bytecode.names(code) for code in codes]
        self.constants = frozenset(c for code in codes for c in code.co_consts if isinstance(c, str))
        named = names_in_objects(objects, any(names.matches for names in found)) if objects is not None else set()
        self.asked = frozenset(name for _, name in asked) | named
        self.asked_of_tensors = frozenset(name for cls, name in asked if issubclass(cls, torch.Tensor)) | named
        self.attributes = frozenset().union(*(names.attributes for names in found)) | self.asked
        # `setattr(config, "width", ...)` names its attribute in a constant.
        self.attributes |= {name for text in self.constants for name in _names_in(text)}
        self.whole = bool(self.attributes & _WHOLE_READS) or any(
            chain[0] in _WHOLE_READS for names in found for chain in names.globals
        )

    @property
    def optimizer_state(self) -> bool:
        """Whether the code may have looked at which state an optimizer has: `if not opt.state: ...`."""
        return not self.attributes.isdisjoint(("state", "state_dict"))

    def of(self, obj: Any) -> Callable[[str], bool]:
        """Whether an attribute of an object may have been read."""
        table = own_dict(obj) or {}
        own = declared_state(obj)
        if own is not None:
            return frozenset(own).__contains__
        if isinstance(obj, torch.optim.lr_scheduler.LRScheduler):
            read = set(self.attributes) - {"optimizer", "_step_count"}
            return (read | {"_last_lr"} if "get_last_lr" in read else read).__contains__
        if isinstance(obj, torch.amp.GradScaler):  # its tensors are inputs, and its bookkeeping starts anew each step
            return {"_enabled", "_growth_factor", "_backoff_factor", "_growth_interval"}.__contains__
        if (
            (self.whole and len(table) <= _WHOLE)
            or hasattr(type(obj), "__dataclass_fields__")
            or isinstance(obj, enum.Enum)
        ):
            return lambda name: True
        if is_user_class(type(obj)):
            return self.attributes.__contains__
        return (self.attributes | self._of_library(type(obj))).__contains__

    def lists(self, obj: Any) -> bool:
        """Whether the names of an object's attributes may have been read, all of them."""
        table = own_dict(obj)
        return self.whole and isinstance(table, dict) and len(table) <= _WHOLE and declared_state(obj) is None

    def _of_library(self, cls: type) -> frozenset[str]:
        """What the methods that the user calls, by name or by an operator, read of a library's object."""
        if cls not in self._library:
            methods = {
                name: method.__code__
                for base in reversed(cls.__mro__[:-1])
                for name, method in vars(base).items()
                if isinstance(method, types.FunctionType) and name not in _NOT_READS
            }
            pending = [name for name in methods if name in self.attributes or name[:2] == name[-2:] == "__"]
            read: set[str] = set()
            for name in pending:  # a method may call others
                found = bytecode.names(methods[name]).attributes - read
                read |= found
                pending += [called for called in found if called in methods and called not in pending]
            self._library[cls] = frozenset(read)
        return self._library[cls]

    def absent(self, obj: Any) -> Iterator[str]:
        """Names that were read or asked for, and that an object's own attributes do not hold."""
        table = own_dict(obj)
        if (
            table is None
            or declared_state(obj) is not None
            or isinstance(obj, (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler))
        ):
            return
        names = set(self.asked)
        for cls in type(obj).__mro__[:-1]:
            if is_user_class(cls):
                names |= self.attributes & vars(cls).keys()
        names |= _METHODS_OF_LIBRARIES & self.attributes if isinstance(obj, torch.optim.Optimizer) else set()
        taken = {*table, *slot_names(type(obj))}
        for name in sorted(names):
            if name not in taken and not hasattr(class_attribute(type(obj), name), "__set__"):
                yield name

    def absent_in_class(self, cls: type) -> Iterator[str]:
        """Names that a class inherits, or that nobody has: it may come to have them itself."""
        inherited = {name for base in cls.__mro__[1:-1] if is_user_class(base) for name in vars(base)}
        yield from sorted((self.asked | (self.attributes & inherited)) - vars(cls).keys())


def _names_in(text: str) -> list[str]:
    """Names of attributes in a constant: a name, a path of names, or a format string."""
    if text.isidentifier():
        return [text]
    if "{" in text:
        return _PART.findall(text)
    parts = text.split(".")
    return parts if all(map(str.isidentifier, parts)) else []


def names_in_objects(objects: ObjectMap, matches: bool) -> set[str]:
    """Attributes that getters and partial calls name, and, where something is matched, `__match_args__`."""
    found: set[str] = set()
    for reached in objects.reached.values():
        obj = reached.obj
        if isinstance(obj, GETTERS) and not isinstance(obj, operator.itemgetter):
            found.update(name for text in inside(obj) if isinstance(text, str) for name in _names_in(text))
        elif reached.kind == "partial":
            found.update(text for text in (*obj.args, *obj.keywords.values()) if isinstance(text, str))
        elif matches and reached.kind == "class":
            found.update(vars(obj).get("__match_args__", ()))
    return {name for name in found if name.isidentifier()}


def cached_codes(objects: ObjectMap) -> Iterator[types.CodeType]:
    """User code behind `functools.lru_cache`. A result that was there already says nothing about what made it: all
    of the code counts as run."""
    pending = [reached.obj for reached in objects.reached.values() if isinstance(reached.obj, CACHED)]
    seen = set(map(id, pending))
    while pending:
        for _, value in children(pending.pop()):
            if id(value) in seen or not (is_user_function(value) or isinstance(value, (CACHED, tuple))):
                continue
            seen.add(id(value))
            pending.append(value)
            if is_user_function(value):
                yield value.__code__


def attribute_items(obj: Any, wanted: Callable[[str], bool]) -> list[tuple[str, Any]]:
    """(name, value) of an object's own attributes; unset slots as missing."""
    found = [(name, value) for name, value in (own_dict(obj) or {}).items() if wanted(name)]
    found += [(name, getattr(obj, name, MISSING)) for name in slot_names(type(obj)) if wanted(name)]
    return found
