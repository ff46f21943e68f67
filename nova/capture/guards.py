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
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nova.capture import bytecode
from nova.capture.contents import address, content, is_large, same_content
from nova.capture.environment import ENVIRONMENT_NAMES, environment, token
from nova.capture.native import GRAD_ANY, GRAD_NONE, GRAD_SET
from nova.capture.reads import MISSING as _MISSING
from nova.capture.reads import Reads, attribute_items
from nova.capture.scalars import ScalarGuard
from nova.capture.signature import Source
from nova.capture.sources import (
    MODULE_TABLES,
    ObjectMap,
    Reached,
    Roots,
    Step,
    extend,
    follow,
    imported,
    is_plain,
    is_user_class,
    is_user_file,
    kind_of,
    slot_names,
    tensor_hooks,
)
from nova.capture.views import strides

# Descriptors of a slot: ("lit", value), ("node", index), ("num", type name), ("any",), ("missing",), ("empty",),
# ("content", digest), ("same", object)
Descriptor = tuple[Any, ...]

GONE = "is gone"
LARGE = 2000  # a container with more entries than this has no slot for each

_MODULE_IRRELEVANT = frozenset({
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
    "_non_persistent_buffers_set", *MODULE_TABLES,
})  # fmt: skip
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def type_name(obj: Any) -> str:
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


def gradient_hooks(tensor: torch.Tensor) -> tuple[str, ...]:
    """The identities of what `register_hook` and `register_post_accumulate_grad_hook` put on a leaf."""
    return tuple(map(token, tensor_hooks(tensor)))


@dataclass(frozen=True)
class TensorMeta:
    """What a tensor must look like. `grad`: whether `.grad` must be None, must be set, or does not matter."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    requires_grad: bool
    grad: int = GRAD_ANY
    hooks: tuple[str, ...] = ()  # identities of the hooks on its gradient: another process's never match

    @staticmethod
    def of(tensor: torch.Tensor, grad: int = GRAD_ANY) -> TensorMeta:
        return TensorMeta(
            str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), strides(tensor), str(tensor.device),
            tensor.requires_grad, grad, gradient_hooks(tensor),
        )  # fmt: skip

    def difference(self, tensor: torch.Tensor) -> str | None:
        """What differs, in words; None if nothing does."""
        other = TensorMeta.of(tensor, self.grad)
        if other != self:
            if len(self.shape) == len(other.shape):
                for axis, (a, b) in enumerate(zip(self.shape, other.shape, strict=True)):
                    if a != b:
                        return f"dimension {axis} was {a}, is now {b}"
            for what in ("dtype", "shape", "stride", "device", "requires_grad"):
                a, b = getattr(self, what), getattr(other, what)
                if a != b:
                    return f"{what} was {a}, is now {b}"
            if self.hooks != other.hooks:
                return f"had {len(self.hooks)} gradient hooks, now {len(other.hooks)} or others"
        if self.requires_grad and not tensor.is_leaf:
            return "was a leaf, is now computed outside the step"
        if self.grad != GRAD_ANY and tensor.is_leaf and (tensor.grad is None) != (self.grad == GRAD_NONE):
            return ".grad was None, is now set" if self.grad == GRAD_NONE else ".grad was set, is now None"
        return None


@dataclass
class Node:
    """One object and the facts about it. `parent`/`step` is the path that finds it again."""

    kind: str
    parent: int
    step: Step
    type: str = ""
    slots: dict[Step, Descriptor] = field(default_factory=dict)
    keys: Any = None  # dict: keys in order; list: length; module: keys of each table; call: (arg count, kwarg names)
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


@dataclass
class Observed:
    """What a recording saw; the guards are built from it."""

    codes: set[types.CodeType] = field(default_factory=set)  # user code that ran
    globals: dict[types.CodeType, dict[str, Any]] = field(default_factory=dict)  # of the code that ran
    modules: list[torch.nn.Module] = field(default_factory=list)  # modules that were called
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)  # optimizers that stepped
    numbers: set[tuple[int, Any]] = field(
        default_factory=set
    )  # runtime inputs: (id of what holds it, step), see `place`
    unread: set[tuple[int, Any]] = field(default_factory=set)  # numbers and flags that need no guard
    inputs: list[Source] = field(default_factory=list)  # tensors lifted to inputs
    before: dict[tuple[int, Step], Any] = field(default_factory=dict)  # (id(obj), step) -> value before the step
    grads: dict[int, int] = field(default_factory=dict)  # id(tensor) -> GRAD_*; absent: does not matter
    facts: list[ScalarGuard] = field(default_factory=list)  # what Python learned about runtime numbers
    aliases: list[list[tuple[Source, int]]] = field(default_factory=list)  # windows on one input: (tensor, offset)
    memory: list[tuple[Source, bool]] = field(default_factory=list)  # every input: (tensor, whether sharing matters)
    asked: set[tuple[type, str]] = field(default_factory=set)  # getattr and hasattr: type of the object, name
    held: set[int] = field(default_factory=set)  # addresses of the memory that the capture reads by itself


def place(roots: Roots, source: Source) -> tuple[int, Any]:
    """Where a number is: a source is one of several paths to it, the place is one. Tuple items go with its holder."""
    holder, step = roots.slot(source)
    if isinstance(holder, tuple) and source.path:
        above, at = roots.slot(Source(source.root, source.key, source.path[:-1]))
        return id(above), (at, step)
    return id(holder), step


class Builder:
    """Makes the nodes: from the call, through everything that can matter."""

    def __init__(self, objects: ObjectMap, seen: Observed, before: tuple[Any, ...] | None = None):
        self.objects, self.seen, self.before = objects, seen, before
        self.reads = Reads(seen.codes, seen.asked)
        self.attributes, self.constants = self.reads.attributes, self.reads.constants
        self.called = {id(module) for module in seen.modules}
        self.stepped = {id(optimizer) for optimizer in seen.optimizers}
        self.nodes: list[Node] = []
        self.objs: list[Any] = []
        self.index: dict[int, int] = {}
        self._queue: list[int] = []

    def build(self) -> GuardSet:
        roots = self.objects.roots
        self._node(roots, "call", -1, ("", ""))
        self._drain()
        for code in self.seen.codes:
            for reached in self.objects.functions.get(code, ()):
                self._ensure(reached)
        for module in self.seen.modules:
            if (found := self.objects.get(module)) is not None:
                self._ensure(found)
        for code, table in self.seen.globals.items():
            if code not in self.objects.functions:
                self._globals_of(code, table)
            for name in imported(code, table):
                self._slot(0, ("pymodule", name), sys.modules[name])
        self._drain()
        for source in self.seen.inputs:
            if source.root != "const":
                self._ensure_source(source)
        self._drain()
        before = environment() if self.before is None else self.before
        return GuardSet(self.nodes, before, list(self.seen.facts), self.seen.aliases, self.seen.memory)

    def _globals_of(self, code: types.CodeType, table: dict[str, Any]) -> None:
        """Globals read by a function that was made while the step ran, or that is out of reach."""
        function = self.objects.roots.function
        if getattr(function, "__globals__", None) is table:
            parent, kind = self.index[id(function)], "global"
        else:
            module = sys.modules.get(str(table.get("__name__")))
            if module is None or module.__dict__ is not table:
                return
            self._slot(0, ("pymodule", module.__name__), module)
            parent, kind = self.index[id(module)], "attr"
        for name in {chain[0]: None for chain in bytecode.names(code).globals}:
            if name in table:
                self._slot(parent, (kind, name), table[name])

    def _node(self, obj: Any, kind: str, parent: int, step: Step) -> int:
        index = len(self.nodes)
        self.nodes.append(Node(kind, parent, step, type_name(obj)))
        self.objs.append(obj)
        self.index[id(obj)] = index
        self._queue.append(index)
        return index

    def _drain(self) -> None:
        while self._queue:
            index = self._queue.pop(0)
            fill = getattr(self, f"_fill_{self.nodes[index].kind}", None)
            if fill is not None:
                fill(index, self.nodes[index], self.objs[index])

    def _ensure(self, reached: Reached) -> int:
        """A node for an object, and slots for every step of the path to it."""
        known = self.index.get(id(reached.obj))
        if known is not None:
            return known
        if reached.parent is not None:
            parent, step = self._ensure(reached.parent), reached.step
        else:
            parent, step = self._root(reached.source)
        self._slot(parent, step, reached.obj)
        return self.index[id(reached.obj)]

    def _root(self, source: Source) -> tuple[int, Step]:
        match source.root:
            case "arg" | "kwarg":
                return 0, (source.root, source.key)
            case "closure" | "global":
                return self.index[id(self.objects.roots.function)], (source.root, source.key)
            case "pymodule":
                return 0, ("pymodule", source.key)
        return 0, ("function", "")

    def _ensure_source(self, source: Source) -> None:
        parent, step = self._root(source)
        obj = self.objects.roots.root(source.root, source.key)
        for following in (*source.path, None):
            self._slot(parent, step, obj)
            if following is None or id(obj) not in self.index:
                return
            parent, step = self.index[id(obj)], following
            obj = self._before(obj, following, _MISSING)
            if obj is _MISSING:
                obj = follow(self.objs[parent], following)

    def _slot(self, parent: int, step: Step, value: Any) -> None:
        if step not in self.nodes[parent].slots or self.nodes[parent].slots[step][0] == "any":
            self.nodes[parent].slots[step] = self._describe(value, parent, step)
            self._drain()

    def source(self, index: int, step: Step | None = None) -> Source:
        return node_source(self.nodes, index, step)

    def _describe(self, value: Any, parent: int, step: Step) -> Descriptor:
        """What a slot must hold on a later call: what it held before this step changed it."""
        value = self._before(self.objs[parent], step, value)
        if value is _MISSING:
            return ("missing",)
        known = self.index.get(id(value))
        if known is not None and self.objs[known] is value:
            return ("node", known)
        kind = kind_of(value)
        if kind == "plain":
            if type(value) in (float, int):
                place = self._place(parent, step)
                if place in self.seen.numbers:
                    above = self.nodes[parent]
                    grouped = "group" in (above.kind, self.nodes[above.parent].kind)
                    return ("num", "number" if grouped else type(value).__name__)
                if place in self.seen.unread:
                    return ("any",)
            return ("lit", value)
        if (
            kind == "tuple"
            and type(value) in (tuple, torch.Size)
            and is_plain(value)
            and not self._has_numbers(value, parent, step)
        ):
            return ("lit", value)
        if kind == "content":
            shared = is_large(value) or address(value) in self.seen.held
            return ("same", value) if shared else ("content", content(value))
        if kind == "opaque":
            return ("same", value)
        return ("node", self._node(value, kind, parent, step))

    def _place(self, parent: int, step: Step) -> tuple[int, Any]:
        """Where a number is. A tuple is replaced as a whole, so its items are named through what holds it."""
        node = self.nodes[parent]
        if node.kind == "tuple" and node.parent >= 0:
            return id(self.objs[node.parent]), (node.step, step)
        return id(self.objs[parent]), step

    def _has_numbers(self, value: tuple[Any, ...], parent: int, step: Step) -> bool:
        free = self.seen.numbers | self.seen.unread
        holder = id(self.objs[parent])
        return any((holder, (step, ("item", i))) in free for i, item in enumerate(value) if type(item) in (float, int))

    def _fill_slots(self, index: int, node: Node, items: Iterable[tuple[Step, Any]]) -> None:
        for step, value in items:
            if step not in node.slots:
                node.slots[step] = self._describe(value, index, step)

    def _before(self, obj: Any, step: Step, value: Any) -> Any:
        return self.seen.before.get((id(obj), step), value)

    # ---- one method a kind

    def _fill_call(self, index: int, node: Node, roots: Roots) -> None:
        node.keys = (len(roots.args), tuple(roots.kwargs))
        items: list[tuple[Step, Any]] = [(("arg", i), value) for i, value in enumerate(roots.args)]
        items += [(("kwarg", name), value) for name, value in roots.kwargs.items()]
        self._fill_slots(index, node, [*items, (("function", ""), roots.function)])

    def _fill_function(self, index: int, node: Node, function: types.FunctionType) -> None:
        code = function.__code__
        node.code = bytecode.fingerprint(code)
        self._fill_attributes(index, node, function)
        if code not in self.seen.codes and function is not self.objects.roots.function:
            return
        names = bytecode.names(code)
        items: list[tuple[Step, Any]] = []
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                items.append((("closure", name), cell.cell_contents))
            except ValueError:
                node.slots["closure", name] = ("missing",)
        items += [(("default", i), value) for i, value in enumerate(function.__defaults__ or ())]
        items += [(("kwdefault", name), value) for name, value in (function.__kwdefaults__ or {}).items()]
        for name in {chain[0]: None for chain in names.globals}:
            if name in function.__globals__:
                items.append((("global", name), function.__globals__[name]))
            else:
                node.slots["global", name] = ("missing",)  # a builtin, until someone shadows it
        self._fill_slots(index, node, items)

    def _fill_builtin(self, index: int, node: Node, function: Any) -> None:
        node.type = f"builtin {getattr(function, '__qualname__', function.__name__)}"

    def _fill_method(self, index: int, node: Node, method: types.MethodType) -> None:
        self._fill_slots(
            index, node, [(("attr", "__func__"), method.__func__), (("attr", "__self__"), method.__self__)]
        )

    def _fill_partial(self, index: int, node: Node, partial: Any) -> None:
        names = ("func", "args", "keywords")
        self._fill_slots(index, node, [(("attr", name), getattr(partial, name)) for name in names])

    def _fill_attributes(self, index: int, node: Node, obj: Any) -> None:
        """Attributes of what mostly has none: functions, tensors, subclasses of containers."""
        for name, value in list(getattr(obj, "__dict__", {}).items()):
            if name in self.attributes and name != "__wrapped__":
                node.slots.setdefault(("attr", name), self._describe(value, index, ("attr", name)))

    def _fill_weakref(self, index: int, node: Node, reference: Any) -> None:
        self._fill_slots(index, node, [(("call", "__call__"), reference())])

    def _fill_object(self, index: int, node: Node, obj: Any) -> None:
        for name, value in attribute_items(obj, self.reads.of(obj)):
            node.slots["attr", name] = self._describe(value, index, ("attr", name))
        self._fill_absent(index, node, obj)
        if is_user_class(type(obj)):
            node.slots["class", ""] = self._describe(type(obj), index, ("class", ""))

    def _fill_absent(self, index: int, node: Node, obj: Any) -> None:
        for name in self.reads.absent(obj):
            if self._before(obj, ("attr", name), _MISSING) is _MISSING:
                node.slots.setdefault(("attr", name), ("missing",))

    def _fill_dict(self, index: int, node: Node, table: dict[Any, Any]) -> None:
        self._fill_attributes(index, node, table)
        keys = list(table)
        if len(keys) > LARGE:
            node.keys = len(keys)
            self._fill_large(node, table)
            return
        node.keys = [key if is_plain(key) else _OPAQUE_KEY for key in keys]
        for position, (key, value) in enumerate(table.items()):
            step = ("item", key) if type(key) in (str, int) else ("value", position)
            node.slots[step] = self._describe(value, index, step)

    def _fill_large(self, node: Node, items: Any) -> None:
        """Too many entries for a slot each: plain ones are guarded together."""
        values = (*items, *items.values()) if isinstance(items, dict) else items
        if all(map(is_plain, values)):
            node.slots["items", ""] = ("content", content(items))

    def _fill_list(self, index: int, node: Node, items: Any) -> None:
        self._fill_attributes(index, node, items)
        node.keys = len(items)
        if len(items) <= LARGE:
            self._fill_slots(index, node, [(("item", i), value) for i, value in enumerate(items)])
        else:
            self._fill_large(node, items)

    _fill_tuple = _fill_list

    def _fill_set(self, index: int, node: Node, items: Any) -> None:
        node.keys = sorted(map(repr, items)) if len(items) <= LARGE and all(map(is_plain, items)) else len(items)

    def _fill_class(self, index: int, node: Node, cls: type) -> None:
        node.type = f"{cls.__module__}.{cls.__qualname__}"
        if not is_user_class(cls):
            return
        for position, base in enumerate(cls.__mro__[1:-1], 1):
            if is_user_class(base):
                node.slots["mro", position] = self._describe(base, index, ("mro", position))
        for name, value in list(vars(cls).items()):
            if name in self.attributes and kind_of(value) in (
                "plain",
                "tuple",
                "list",
                "dict",
                "set",
                "tensor",
                "object",
                "content",
            ):
                node.slots["static", name] = self._describe(value, index, ("static", name))
        for name in self.reads.absent_in_class(cls):
            node.slots["static", name] = ("missing",)

    def _fill_pymodule(self, index: int, node: Node, module: types.ModuleType) -> None:
        node.type = module.__name__
        filename = getattr(module, "__file__", None)
        if filename is None or not is_user_file(filename):
            return
        for name in self.attributes & module.__dict__.keys():
            node.slots["attr", name] = self._describe(module.__dict__[name], index, ("attr", name))

    def _fill_module(self, index: int, node: Node, module: torch.nn.Module) -> None:
        node.keys = {kind: list(getattr(module, table)) for table, kind in MODULE_TABLES.items()}
        for table, kind in MODULE_TABLES.items():
            for name, value in getattr(module, table).items():
                node.slots[kind, name] = self._describe(value, index, (kind, name))
        called = id(module) in self.called
        for name, value in list(module.__dict__.items()):
            step = ("attr", name)
            if name in _MODULE_IRRELEVANT or not (called or name in self.attributes or name == "training"):
                continue
            value = self._before(module, step, value)
            if value is _MISSING:
                node.slots[step] = ("missing",)
            elif name.endswith("_hooks") and isinstance(value, dict) and not value:
                node.slots[step] = ("empty",)
            elif (id(module), step) in self.seen.unread:
                node.slots[step] = ("any",)
            else:
                node.slots[step] = self._describe(value, index, step)
        if called and "forward" not in module.__dict__:
            node.slots["attr", "forward"] = ("missing",)
        self._fill_absent(index, node, module)
        if is_user_class(type(module)):
            node.slots["class", ""] = self._describe(type(module), index, ("class", ""))

    def _fill_optimizer(self, index: int, node: Node, optimizer: torch.optim.Optimizer) -> None:
        stepped = id(optimizer) in self.stepped
        groups = self._node(optimizer.param_groups, "list", index, ("attr", "param_groups"))
        self._queue.remove(groups)
        node.slots["attr", "param_groups"] = ("node", groups)
        self.nodes[groups].keys = len(optimizer.param_groups)
        read_by_name = "param_groups" in self.attributes
        for g, group in enumerate(optimizer.param_groups):
            at = self._node(group, "group", groups, ("item", g))
            self._queue.remove(at)
            self.nodes[groups].slots["item", g] = ("node", at)
            self.nodes[at].keys = list(group)
            for key, value in group.items():
                relevant = key == "params" or (stepped and key in optimizer.defaults)
                relevant = relevant or (read_by_name and key in self.constants)
                step = ("item", key)
                self.nodes[at].slots[step] = self._describe(value, at, step) if relevant else ("any",)
        for name in _OPTIMIZER_HOOKS:
            hooks = getattr(optimizer, name, None)
            if hooks is not None:
                step = ("attr", name)
                node.slots[step] = ("empty",) if not hooks else self._describe(hooks, index, step)
        if not is_user_class(type(optimizer)):
            pass
        else:
            node.slots["class", ""] = self._describe(type(optimizer), index, ("class", ""))
            for name, value in attribute_items(optimizer, self.attributes.__contains__):
                if value is not _MISSING and name not in ("state", "param_groups", "defaults"):
                    node.slots.setdefault(("attr", name), self._describe(value, index, ("attr", name)))
        if not stepped:
            return
        for g, group in enumerate(optimizer.param_groups):
            for i, param in enumerate(group["params"]):
                if param in optimizer.state:
                    step = ("state", f"{g}.{i}")
                    node.slots[step] = self._describe(optimizer.state[param], index, step)

    def _fill_tensor(self, index: int, node: Node, tensor: torch.Tensor) -> None:
        requires = self.seen.before.get((id(tensor), ("attr", "requires_grad")))
        meta = TensorMeta.of(tensor, self.seen.grads.get(id(tensor), GRAD_ANY))
        if requires is not None:
            meta = replace(meta, requires_grad=requires)
        node.meta = meta
        self._fill_attributes(index, node, tensor)
        for name in self.reads.asked_of_tensors:
            if not hasattr(tensor, name):
                node.slots["attr", name] = ("missing",)


_OPAQUE_KEY = "<object>"


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
    aliases: list[list[tuple[Source, int]]] = field(default_factory=list)
    memory: list[tuple[Source, bool]] = field(default_factory=list)

    def check(self, roots: Roots) -> Mismatch | list[Any]:
        """The objects of all nodes if every fact holds, else the first that does not."""
        for name, was, now in zip(ENVIRONMENT_NAMES, self.environment, environment(), strict=True):
            if was != now:
                return Mismatch(Source("function", "step"), f"{name} was {was}, is now {now}")
        objs: list[Any] = [roots]
        for index, node in enumerate(self.nodes):
            if index:
                try:
                    objs.append(follow_call(objs[node.parent], node.step))
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
            if first != index and self.nodes[index].kind in ("tensor", "dict", "list", "module", "object", "optimizer"):
                other = node_source(self.nodes, first)
                return Mismatch(node_source(self.nodes, index), f"is now the same object as {other}", index)
        return objs

    def _check_memory(self, roots: Roots) -> Mismatch | None:
        """Whether inputs share memory exactly as they did, where that matters."""
        tensors = {source: roots.resolve(source) for source, _ in self.memory}
        expected: dict[Source, tuple[Source, int]] = {}
        for group in self.aliases:
            first = group[0][0]
            for source, offset in group[1:]:
                expected[source] = first, offset
                same = tensors[source].untyped_storage()._cdata == tensors[first].untyped_storage()._cdata
                if not same or tensors[source].storage_offset() - tensors[first].storage_offset() != offset:
                    return Mismatch(source, f"shared memory with {first}, does not now")
        owners: dict[int, tuple[Source, bool]] = {}
        for source, matters in self.memory:
            if source in expected:
                continue
            other, mattered = owners.setdefault(tensors[source].untyped_storage()._cdata, (source, matters))
            if other != source and (matters or mattered) and tensors[source] is not tensors[other]:
                return Mismatch(source, f"shares memory with {other} now")
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
        if node.kind == "function":
            if bytecode.fingerprint(obj.__code__) != node.code:
                return differs("is another function now")
            if len(obj.__defaults__ or ()) != sum(step[0] == "default" for step in node.slots) and node.slots:
                return differs("has other default arguments now")
        mismatch = self._check_keys(node, obj, differs)
        if mismatch is not None:
            return mismatch
        for step, want in node.slots.items():
            if want[0] == "any":
                continue
            try:
                value = follow_own(obj, step)
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
            now = len(obj) if isinstance(node.keys, int) else sorted(map(repr, obj))
            if now != node.keys:
                return differs("has other elements now")
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


def follow_own(obj: Any, step: Step) -> Any:
    """`follow`, where attributes are the object's own and not its class's (a missing one is missing)."""
    if step[0] == "attr":
        table = getattr(obj, "__dict__", None)
        if table is not None and step[1] in table:
            return table[step[1]]
        slot = table is None or step[1] in slot_names(type(obj))
        if not slot and kind_of(obj) not in ("method", "function", "partial", "tensor"):
            raise AttributeError(step[1])
    return follow_call(obj, step)


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
        case ("same", was):
            return None if value is was else f"is another object now: {_short(value)}"
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


def build_guards(objects: ObjectMap, seen: Observed, before: tuple[Any, ...] | None = None) -> GuardSet:
    """The guards of a recorded step. `before`: the environment it started in."""
    return Builder(objects, seen, before).build()


__all__ = [
    "GRAD_ANY",
    "GRAD_NONE",
    "GRAD_SET",
    "GuardSet",
    "Mismatch",
    "Node",
    "Observed",
    "TensorMeta",
    "build_guards",
]
