"""Guards: the Python state a captured step depends on, as data, and the check of every fact in it.

A capture is right for a call exactly when everything the user's Python would have read is as it was. That state is
a graph: the call's arguments, the functions that ran, what their closures and globals name, modules, optimizers,
containers. Each object is a `Node`; what must hold for it are its slots:

    node 0  call       slots  arg 0 -> node 1 (tensor f32[8, 4])    function -> node 2
    node 2  function   slots  closure "model" -> node 3             global "SCALE" -> literal 0.5
    node 3  module     slots  attr "training" -> literal True       param "weight" -> node 4

References between nodes are identities, so that aliases (a tied weight, a parameter that an optimizer holds) are
facts like any other. Nodes are plain data and can be stored on disk (`store.py`). `GuardSet.check` walks them one
by one and says what differs; `fastpath.py` makes the check that runs on every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from nova.capture import bytecode
from nova.capture.contents import Entries, content, same_content
from nova.capture.environment import ENVIRONMENT_NAMES, environment
from nova.capture.library_calls import Library
from nova.capture.memory import Group, Region, covers, distance, overlap, span_of
from nova.capture.native import GRAD_ANY, GRAD_NONE, GRAD_SET
from nova.capture.reads import MISSING as _MISSING
from nova.capture.scalars import ScalarGuard
from nova.capture.signature import Source
from nova.capture.sources import (
    LIBRARY_FIELDS,
    MODULE_TABLES,
    Roots,
    Step,
    class_attribute,
    class_shape,
    extend,
    follow,
    is_plain,
    kind_of,
    own_dict,
    slot_names,
)
from nova.capture.tensor_meta import TensorMeta
from nova.capture.wrappers import inside, label

# Descriptors of a slot: ("lit", value), ("node", index), ("num", type name), ("any",), ("missing",), ("empty",),
# ("content", digest), ("kept", Kept), ("same", object), ("entries", Entries)
Descriptor = tuple[Any, ...]

GONE = "is gone"
MUTABLE = ("tensor", "dict", "list", "module", "object", "optimizer")  # kinds of which no two nodes are one object
LARGE = 2000  # a container of plain values with more entries than this has no slot for each
_OPAQUE_KEY = "<object>"  # stands for a key that has no value to compare; a slot guards it


def type_name(obj: Any) -> str:
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


@dataclass
class Node:
    """One object and the facts about it. `parent`/`step` is the path that finds it again."""

    kind: str
    parent: int
    step: Step
    type: str = ""
    slots: dict[Step, Descriptor] = field(default_factory=dict)
    # dict: keys in order; list, set of objects: length; set of plain values: these; module: keys of each table; call:
    # (arg count, kwarg names); class: its shape; function that ran: how many default arguments; object whose
    # attributes were listed: their names
    keys: Any = None
    meta: TensorMeta | None = None
    code: str | None = None  # function: fingerprint of its code


@dataclass(frozen=True)
class Mismatch:
    """The first fact that does not hold."""

    source: Source
    what: str
    node: int = 0
    step: Step = ("", "")
    value: Any = None

    def __str__(self) -> str:
        return f"{self.source}: {self.what}"


def element_names(items: Any) -> Any:
    """What is in a set of plain values, in one order; of many only a digest."""
    names = sorted(map(repr, items))
    return names if len(names) <= LARGE else content(names)


def same_elements(was: Any, items: Any) -> bool:
    """Whether a set has as many elements as it had, where slots guard them, or the same ones."""
    if isinstance(was, Entries):
        return was.are(items)
    return was == (len(items) if isinstance(was, int) else element_names(items))


def count_references(nodes: list[Node]) -> list[int]:
    """How many slots refer to each node."""
    counts = [0] * len(nodes)
    for node in nodes:
        for want in node.slots.values():
            if want[0] == "node":
                counts[want[1]] += 1
    return counts


def node_source(nodes: list[Node], index: int, step: Step | None = None) -> Source:
    """The source of a node, or of what lies one step beyond it."""
    steps = [step] if step is not None else []
    while index > 0:
        steps.append(nodes[index].step)
        index = nodes[index].parent
    if not steps:
        return Source("function", "call")
    kind, key = steps.pop()
    source = Source("function", "step") if kind == "function" else Source(kind, key)
    for found in reversed(steps):
        source = extend(source, found)
    return source


@dataclass
class GuardSet:
    """Everything a capture depends on."""

    nodes: list[Node]
    environment: tuple[Any, ...]
    facts: list[ScalarGuard] = field(default_factory=list)
    aliases: list[Group] = field(default_factory=list)
    memory: list[Region] = field(default_factory=list)
    library: Library = field(default_factory=Library)

    def check(self, roots: Roots) -> Mismatch | list[Any]:
        """The objects of all nodes if every fact holds, else the first that does not."""
        for name, was, now in zip(ENVIRONMENT_NAMES, self.environment, environment(), strict=True):
            if was != now:
                return Mismatch(Source("function", "step"), f"{name} was {was}, is now {now}")
        replaced = self.library.difference()
        if replaced is not None:
            return Mismatch(Source("function", str(replaced)), "is another function now")
        objs: list[Any] = [roots]
        positions = Positions()
        for index, node in enumerate(self.nodes):
            if index:
                try:
                    objs.append(positions.follow(objs[node.parent], node.step))
                except (KeyError, IndexError, AttributeError, TypeError, ValueError):
                    return Mismatch(node_source(self.nodes, index), GONE, index)
        for index in range(len(self.nodes)):
            mismatch = self.check_node(index, objs[index], objs)
            if mismatch is not None:
                return mismatch
        if len({id(obj) for obj in objs}) != len(objs):
            return self._new_alias(objs)
        mismatch = self._check_memory(roots)
        if mismatch is not None:
            return mismatch
        for fact in self.facts:
            value = roots.resolve(fact.source)
            if not fact.holds(value):
                was = f"was {fact.other}" if fact.op == "value" else f"{fact.op} {fact.other} was {fact.result}"
                return Mismatch(fact.source, f"{was}, is now {value}", value=value)
        return objs

    def _new_alias(self, objs: list[Any]) -> Mismatch | list[Any]:
        seen: dict[int, int] = {}
        for index, obj in enumerate(objs):
            first = seen.setdefault(id(obj), index)
            if first != index and self.nodes[index].kind in MUTABLE:
                other = node_source(self.nodes, first)
                return Mismatch(node_source(self.nodes, index), f"is now the same object as {other}", index)
        return objs

    def _check_memory(self, roots: Roots) -> Mismatch | None:
        """Whether inputs share memory exactly as they did, where that matters."""
        for group in self.aliases:
            first = group[0][0]
            for source, offset in group[1:]:
                if distance(roots.resolve(source), roots.resolve(first)) != offset:
                    return Mismatch(source, f"shared memory with {first}, does not now")
        tensors = [roots.resolve(region[0]) for region in self.memory]
        for tensor, region in zip(tensors, self.memory, strict=True):
            if not covers(tensor, region):
                return Mismatch(region[0], "was a window on a larger storage, is not now")
        shared = overlap(list(map(span_of, tensors, self.memory)))
        if shared is not None:
            first, second = (self.memory[at][0] for at in shared)
            return Mismatch(second, f"shares memory with {first} now")
        return None

    def check_node(self, index: int, obj: Any, objs: list[Any]) -> Mismatch | None:
        """Checks one node against an object; other nodes are given by `objs`."""
        node = self.nodes[index]

        def differs(what: str, step: Step | None = None, value: Any = None) -> Mismatch:
            return Mismatch(node_source(self.nodes, index, step), what, index, step or ("", ""), value)

        if node.kind == "call":
            if (len(obj.args), tuple(obj.kwargs)) != node.keys:
                return differs(
                    f"was called with {_call_text(*node.keys)}, now with {_call_text(len(obj.args), obj.kwargs)}"
                )
        elif node.kind == "class":
            if not isinstance(obj, type) or f"{obj.__module__}.{obj.__qualname__}" != node.type:
                return differs(f"was class {node.type}, is now {obj!r}")
        elif node.kind == "builtin":
            if f"builtin {getattr(obj, '__qualname__', None)}" != node.type:
                return differs(f"was {node.type}, is now {obj!r}")
        elif node.kind == "pymodule":
            if getattr(obj, "__name__", None) != node.type:
                return differs(f"was module {node.type}, is now {obj!r}")
        elif type_name(obj) != node.type:
            return differs(f"was a {node.type.split('.')[-1]}, is now a {type(obj).__name__}")
        if node.kind == "tensor":
            assert node.meta is not None
            difference = node.meta.difference(obj)
            if difference:
                return differs(difference)
        if node.kind == "wrapper" and label(obj) != node.code:
            return differs(f"was the method {node.code}, is now {label(obj)}")
        if node.kind == "function":
            if bytecode.fingerprint(obj.__code__) != node.code:
                return differs("is another function now")
            if node.keys is not None and len(obj.__defaults__ or ()) != node.keys:
                return differs("has other default arguments now")
        mismatch = self._check_keys(node, obj, differs)
        if mismatch is not None:
            return mismatch
        positions = Positions(follow_own)
        for step, want in node.slots.items():
            if want[0] == "any":
                continue
            try:
                value = positions.follow(obj, step)
            except (KeyError, IndexError, AttributeError, TypeError, ValueError):
                value = _MISSING
            text = compare(want, value, objs)
            if text is not None:
                return differs(text, step, value)
        return None

    def _check_keys(self, node: Node, obj: Any, differs: Callable[..., Mismatch]) -> Mismatch | None:
        if node.kind == "dict":
            if isinstance(node.keys, int):
                return differs(f"had {node.keys} entries, now {len(obj)}") if len(obj) != node.keys else None
            keys = [key if is_plain(key) else _OPAQUE_KEY for key in obj]
            if keys != node.keys:
                return differs(f"had keys {_short(node.keys)}, now {_short(keys)}")
        elif node.kind == "group":
            if set(obj) != set(node.keys):
                return differs(f"had keys {_short(node.keys)}, now {_short(list(obj))}")
        elif node.kind in ("list", "tuple"):
            if len(obj) != node.keys:
                return differs(f"had {node.keys} items, now {len(obj)}")
        elif node.kind == "set":
            if not same_elements(node.keys, obj):
                return differs("has other elements now")
        elif node.kind == "object" and node.keys is not None:
            if list(vars(obj)) != node.keys:
                return differs(f"had attributes {_short(node.keys)}, now {_short(list(vars(obj)))}")
        elif node.kind == "wrapper":
            if len(inside(obj)) != node.keys:
                return differs("holds other objects now")
        elif node.kind == "class" and node.keys is not None:
            if class_shape(obj) != node.keys:
                return differs("has other bases or attributes now")
        elif node.kind == "module":
            for table, kind in MODULE_TABLES.items():
                names = list(getattr(obj, table))
                if names != node.keys[kind]:
                    return differs(f"had {table[1:]} {_short(node.keys[kind])}, now {_short(names)}")
        return None


def follow_call(obj: Any, step: Step) -> Any:
    """`follow`, which also starts from a call."""
    if isinstance(obj, Roots):
        return obj.root(*step)
    return follow(obj, step)


class Positions:
    """`follow_call` (or `own`) that lists a container once, not for each entry that is known by its position."""

    def __init__(self, own: Callable[[Any, Step], Any] = follow_call):
        self._own = own
        self._listed: dict[tuple[int, str], list[Any]] = {}

    def follow(self, obj: Any, step: Step) -> Any:
        kind, key = step
        if kind not in ("value", "key", "element"):
            return self._own(obj, step)
        listed = self._listed.get((id(obj), kind))
        if listed is None:
            listed = self._listed[id(obj), kind] = list(obj.values() if kind == "value" else obj)
        return listed[key]


def follow_own(obj: Any, step: Step) -> Any:
    """`follow`, where attributes are the object's own and not its class's (a missing one is missing)."""
    if step[0] == "attr":
        table = own_dict(obj)
        if table is not None and step[1] in table:
            return table[step[1]]
        slot = table is None or step[1] in slot_names(type(obj))
        if not slot and not _is_field(obj, step[1]):
            raise AttributeError(step[1])
    return follow_call(obj, step)


def _is_field(obj: Any, name: str) -> bool:
    """Whether an attribute that no table of the object holds is still its own: one that its class in C computes."""
    if isinstance(obj, torch.Tensor):
        return hasattr(class_attribute(type(obj), name), "__get__")
    return kind_of(obj) in ("method", "function", "partial") or name in LIBRARY_FIELDS.get(type(obj), ())


def same_literal(a: Any, b: Any) -> bool:
    """Equality that tells 1 from True and from 1.0, and calls NaN equal to itself."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same_literal, a, b))
    if isinstance(a, float):
        return (a == b and (a != 0 or str(a) == str(b))) or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def compare(want: Descriptor, value: Any, objs: list[Any]) -> str | None:
    """What is wrong with a slot's value, or None."""
    match want:
        case ("any",):
            return None
        case ("missing",):
            return None if value is _MISSING else f"did not exist, is now {_short(value)}"
        case ("lit", was):
            return None if same_literal(was, value) else f"was {_short(was)}, is now {_short(value)}"
        case ("num", "number"):
            return None if type(value) in (int, float) else f"was a number, is now {_short(value)}"
        case ("num", name):
            return None if type(value).__name__ == name else f"was a {name}, is now {_short(value)}"
        case ("content", was):
            return None if same_content(value, was) else f"holds something else now: {_short(value)}"
        case ("kept", was):
            return None if was.holds(value) else f"holds something else now: {_short(value)}"
        case ("same", was):
            return None if value is was else f"is another object now: {_short(value)}"
        case ("entries", was):
            return None if was.are(value) else "has other entries now"
        case ("empty",):
            return None if isinstance(value, dict) and not value else "was empty, is not any more"
        case ("node", index):
            return None if value is objs[index] else f"is another object now: {_short(value)}"
    raise ValueError(f"unknown descriptor {want!r}")


def _call_text(count: int, names: Iterable[str]) -> str:
    names = ", ".join(names)
    return f"{count} positional argument{'s' * (count != 1)}" + (f" and {names}" if names else "")


def _short(value: Any) -> str:
    if value is _MISSING:
        return "gone"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if not is_plain(value) and not (isinstance(value, list) and all(map(is_plain, value))):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


__all__ = [
    "GRAD_ANY",
    "GRAD_NONE",
    "GRAD_SET",
    "GuardSet",
    "Mismatch",
    "Node",
    "TensorMeta",
]
