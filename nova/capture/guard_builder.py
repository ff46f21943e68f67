"""Makes the guards of a recorded step: a node for each object that the step's Python may have read, from the call on.

    def step(x): return x * cfg.scale           code that ran: step
                                                its bytecode names: global cfg, attribute scale
    node 2  function   global "cfg" -> node 3
    node 3  object     attr "scale" -> literal 2.0      `cfg` has other attributes, which nobody read

What a node holds depends on the kind of its object: one method a kind.
"""

from __future__ import annotations

import builtins
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nova.capture import bytecode
from nova.capture.contents import MEMORY_LIMIT, Entries, Kept, address, content, is_large, nbytes
from nova.capture.environment import environment
from nova.capture.guards import (
    _MISSING,
    _OPAQUE_KEY,
    LARGE,
    Descriptor,
    GuardSet,
    Node,
    element_names,
    node_source,
    type_name,
)
from nova.capture.library import is_steady, library_names
from nova.capture.library_calls import library_facts
from nova.capture.memory import Group, Region
from nova.capture.native import GRAD_ANY
from nova.capture.reads import Reads, attribute_items, cached_codes
from nova.capture.scalars import ScalarGuard
from nova.capture.signature import Source
from nova.capture.sources import (
    CONTAINERS,
    LIBRARY_FIELDS,
    MODULE_TABLES,
    NODE_LIMIT,
    ObjectMap,
    Reached,
    Roots,
    Step,
    children,
    class_shape,
    closure_items,
    follow,
    globals_read,
    imported,
    is_of_torch,
    is_plain,
    is_user_class,
    is_user_file,
    is_user_function,
    kind_of,
    own_dict,
    plain_value,
)
from nova.capture.tensor_meta import TensorMeta
from nova.capture.wrappers import inside, label

_MODULE_IRRELEVANT = frozenset({
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
    "_non_persistent_buffers_set", *MODULE_TABLES,
})  # fmt: skip
_OF_FUNCTIONS = frozenset({"__defaults__", "__kwdefaults__", "__closure__", "__annotations__", "__name__", "__doc__"})
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass
class Observed:
    """What a recording saw; the guards are built from it."""

    codes: set[types.CodeType] = field(default_factory=set)  # user code that ran
    globals: dict[types.CodeType, dict[str, Any]] = field(default_factory=dict)  # of the code that ran
    library: dict[types.CodeType, dict[str, Any]] = field(default_factory=dict)  # PyTorch's code that ran, its globals
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
    aliases: list[Group] = field(default_factory=list)  # windows on one input
    memory: list[Region] = field(default_factory=list)  # of every input
    asked: set[tuple[type, str]] = field(default_factory=set)  # getattr and hasattr: type of the object, name
    listed: set[int] = field(default_factory=set)  # ids of the Python modules given to `vars`
    held: set[int] = field(default_factory=set)  # addresses of the memory that the capture reads by itself
    rewritten: set[int] = field(default_factory=set)  # ids of arrays that tensors of the step wrote to
    unsure: list[Source] = field(default_factory=list)  # those of them that Python may have read, before or after


def place(roots: Roots, source: Source) -> tuple[int, Any]:
    """Where a number is: a source is one of several paths to it, the place is one. Tuple items go with its holder."""
    holder, step = roots.slot(source)
    if isinstance(holder, tuple) and source.path:
        above, at = roots.slot(Source(source.root, source.key, source.path[:-1]))
        return id(above), (at, step)
    return id(holder), step


def _identities(roots: Roots, sources: Iterable[Source]) -> Iterator[int]:
    """Of the objects at these sources; some may be there no more."""
    for source in sources:
        with suppress(KeyError, IndexError, AttributeError, TypeError, ValueError):
            yield id(roots.resolve(source))


class Builder:
    """Makes the nodes: from the call, through everything that can matter."""

    def __init__(self, objects: ObjectMap, seen: Observed, before: tuple[Any, ...] | None = None):
        self.objects, self.seen, self.before = objects, seen, before
        self.codes = seen.codes | set(cached_codes(objects))
        self.reads = Reads(self.codes, seen.asked, objects)
        self.attributes, self.constants = self.reads.attributes, self.reads.constants
        self.library = library_names(self.codes, seen.globals, objects, seen.listed)
        self.forwards: set[type] = set()  # classes of libraries whose `forward` is guarded
        self.called = {id(module) for module in seen.modules}
        self.stepped = {id(optimizer) for optimizer in seen.optimizers}
        self.nodes: list[Node] = []
        self.objs: list[Any] = []
        self.index: dict[int, int] = {}
        self._queue: deque[int] = deque()
        self.inputs = set(_identities(objects.roots, seen.inputs))
        self.copied = 0  # bytes of arrays that the guards keep

    def build(self) -> GuardSet:
        roots = self.objects.roots
        self._node(roots, "call", -1, ("", ""))
        self._drain()
        for code in self.codes:
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
        if id(builtins) in self.library:
            self._slot(0, ("pymodule", "builtins"), builtins)
        self._drain()
        for source in self.seen.inputs:
            if source.root != "const":
                self._ensure_source(source)
        self._drain()
        before = environment() if self.before is None else self.before
        # Of every object within reach: where someone else's method ran, nothing says of which class it was.
        classes = dict.fromkeys(map(type, (*self.seen.modules, *self.seen.optimizers, *self.objs)))
        library = library_facts(self.seen.library, classes, self.attributes)
        return GuardSet(self.nodes, before, list(self.seen.facts), self.seen.aliases, self.seen.memory, library)

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
        for name in globals_read(code, table):
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
            index = self._queue.popleft()
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
            crowded = self.nodes[parent].kind in CONTAINERS and len(self.objs[parent]) > LARGE
            if id(value) in self.seen.rewritten:
                self.seen.unsure.append(self.source(parent, step))
            if address(value) in self.seen.held:  # an input's memory: what it holds is data
                return ("same", value)
            return self._kept(value) if crowded or is_large(value) else ("content", content(value))
        if kind == "opaque":
            return ("same", value)
        return ("node", self._node(value, kind, parent, step))

    def _kept(self, value: Any) -> Descriptor:
        """By a copy as long as copies are few enough; beyond that by identity, of which the caller is told."""
        self.copied += nbytes(value)
        hidden = getattr(getattr(value, "dtype", None), "hasobject", False)
        return ("same", value) if hidden or self.copied > MEMORY_LIMIT else ("kept", Kept(value))

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
        for name in self.attributes & _OF_FUNCTIONS:
            node.slots["attr", name] = self._describe(getattr(function, name), index, ("attr", name))
        if "__globals__" in self.attributes:
            found = self.constants & function.__globals__.keys()
            self._fill_slots(index, node, [(("global", name), function.__globals__[name]) for name in sorted(found)])
        ran = code in self.codes or function is self.objects.roots.function
        user = is_user_function(function)
        if not ran and (user or is_of_torch(code.co_filename)):
            return
        items: list[tuple[Step, Any]] = [(("closure", name), value) for name, value in closure_items(function)]
        if not ran:  # a library's: nobody noted whether it ran
            self._fill_slots(index, node, [item for item in items if kind_of(item[1]) not in ("opaque", "wrapper")])
            return
        node.keys = len(function.__defaults__ or ())
        for name in code.co_freevars:
            node.slots.update({} if any(step[1] == name for step, _ in items) else {("closure", name): ("missing",)})
        items += [(("default", i), value) for i, value in enumerate(function.__defaults__ or ())]
        items += [(("kwdefault", name), value) for name, value in (function.__kwdefaults__ or {}).items()]
        for name in globals_read(code, function.__globals__):
            if name in function.__globals__:
                items.append((("global", name), function.__globals__[name]))
            else:
                node.slots["global", name] = ("missing",)  # a builtin, until someone shadows it
        self._fill_slots(index, node, items)

    def _fill_wrapper(self, index: int, node: Node, obj: Any) -> None:
        held = inside(obj)
        node.code, node.keys = label(obj), len(held)
        self._fill_slots(index, node, [(("inside", position), value) for position, value in enumerate(held)])

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
        items = [*(own_dict(obj) or {}).items()]
        items += [(name, getattr(obj, name)) for name in LIBRARY_FIELDS.get(type(obj), ())]
        for name, value in items:
            read = name in self.attributes or self.reads.whole or name == "default_factory"
            if read and name != "__wrapped__":
                node.slots.setdefault(("attr", name), self._describe(value, index, ("attr", name)))
        if is_user_class(type(obj)):
            node.slots["class", ""] = self._describe(type(obj), index, ("class", ""))
            self._fill_absent(index, node, obj)

    def _fill_weakref(self, index: int, node: Node, reference: Any) -> None:
        self._fill_slots(index, node, [(("call", "__call__"), reference())])

    def _fill_object(self, index: int, node: Node, obj: Any) -> None:
        for name, value in attribute_items(obj, self.reads.of(obj)):
            node.slots["attr", name] = self._describe(value, index, ("attr", name))
        if plain_value(obj) is not obj:
            node.slots["plain", ""] = ("lit", plain_value(obj))
        if self.reads.lists(obj):
            node.keys = [name for name in vars(obj) if self._before(obj, ("attr", name), None) is not _MISSING]
        self._fill_absent(index, node, obj)
        if is_user_class(type(obj)):
            node.slots["class", ""] = self._describe(type(obj), index, ("class", ""))

    def _fill_absent(self, index: int, node: Node, obj: Any) -> None:
        for name in self.reads.absent(obj):
            if self._before(obj, ("attr", name), _MISSING) is _MISSING:
                node.slots.setdefault(("attr", name), ("missing",))

    def _fill_dict(self, index: int, node: Node, table: dict[Any, Any]) -> None:
        self._fill_attributes(index, node, table)
        if self._fill_together(node, table):
            return
        node.keys = [key if is_plain(key) else _OPAQUE_KEY for key in table]
        for position, (key, value) in enumerate(table.items()):
            step = ("item", key) if type(key) in (str, int) else ("value", position)
            node.slots[step] = self._describe(value, index, step)
            if node.keys[position] is _OPAQUE_KEY:
                node.slots["key", position] = self._describe(key, index, ("key", position))

    def _fill_together(self, node: Node, items: Any) -> bool:
        """One slot for all entries: where they are many and plain, or too many."""
        node.keys = len(items)
        if len(items) <= LARGE:
            return False
        values = (*items, *items.values()) if isinstance(items, dict) else items
        if all(map(is_plain, values)):
            node.slots["items", ""] = ("content", content(items))
        elif len(items) > NODE_LIMIT - len(self.nodes):
            node.slots["items", ""] = ("entries", Entries(items))
        else:
            return False
        return True

    def _fill_list(self, index: int, node: Node, items: Any) -> None:
        self._fill_attributes(index, node, items)
        if not self._fill_together(node, items):
            self._fill_slots(index, node, [(("item", i), value) for i, value in enumerate(items)])

    _fill_tuple = _fill_list

    def _fill_set(self, index: int, node: Node, items: Any) -> None:
        self._fill_attributes(index, node, items)
        if all(map(is_plain, items)):
            node.keys = element_names(items)
        elif len(items) > NODE_LIMIT - len(self.nodes):
            node.keys = Entries(items)
        else:
            node.keys = len(items)
            self._fill_slots(index, node, [(("element", i), value) for i, value in enumerate(items)])

    def _fill_class(self, index: int, node: Node, cls: type) -> None:
        node.type = f"{cls.__module__}.{cls.__qualname__}"
        if not is_user_class(cls):
            return
        node.keys = class_shape(cls)
        for step, value in children(cls):
            # also where another path leads to the function: the class may come to have another one
            if step[0] in ("static", "staticfunc", "fget") and getattr(value, "__code__", None) in self.codes:
                node.slots[step] = self._describe(value, index, step)
        if is_user_class(type(cls)):
            node.slots["class", ""] = self._describe(type(cls), index, ("class", ""))
        for position, base in enumerate(cls.__mro__[1:-1], 1):
            if is_user_class(base):
                node.slots["mro", position] = self._describe(base, index, ("mro", position))
        for name, value in list(vars(cls).items()):
            read = name in self.attributes or (self.reads.whole and not name.startswith("__"))
            if read and kind_of(value) not in ("opaque", "function"):
                node.slots["static", name] = self._describe(value, index, ("static", name))
        for name in self.reads.absent_in_class(cls):
            node.slots["static", name] = ("missing",)

    def _fill_pymodule(self, index: int, node: Node, module: types.ModuleType) -> None:
        node.type = module.__name__
        filename = getattr(module, "__file__", None)
        table = module.__dict__
        if filename is None or not is_user_file(filename):
            chosen = [name for name in self.library.get(id(module), ()) if name in table and is_steady(table[name])]
            self._fill_slots(index, node, [(("attr", name), table[name]) for name in chosen])
            return
        read = self.library.get(id(module), set())
        computed = "" in read  # its `__dict__` was read by names that nobody saw
        named = {n for n in table if not n.startswith("__")} if computed else self.attributes | {"__getattr__"}
        self._fill_slots(index, node, [(("attr", name), table[name]) for name in sorted(named & table.keys())])
        for name in sorted((self.reads.asked | read) - table.keys() - {""}):
            node.slots["attr", name] = ("missing",)

    def _fill_module(self, index: int, node: Node, module: torch.nn.Module) -> None:
        node.keys = {kind: list(getattr(module, table)) for table, kind in MODULE_TABLES.items()}
        for table, kind in MODULE_TABLES.items():
            for name, value in getattr(module, table).items():
                node.slots[kind, name] = self._describe(value, index, (kind, name))
        called = id(module) in self.called
        for name, value in list(module.__dict__.items()):
            step = ("attr", name)
            read = called or name in self.attributes or name == "training" or self.reads.whole
            if name in _MODULE_IRRELEVANT or not read:
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
        elif called and type(module) not in self.forwards:
            self.forwards.add(type(module))
            node.slots["forward", ""] = self._describe(type(module).forward, index, ("forward", ""))

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
        if is_user_class(type(optimizer)):
            node.slots["class", ""] = self._describe(type(optimizer), index, ("class", ""))
        for name, value in attribute_items(optimizer, self.attributes.__contains__):
            if value is not _MISSING and name not in ("state", "param_groups"):
                node.slots.setdefault(("attr", name), self._describe(value, index, ("attr", name)))
        self._fill_absent(index, node, optimizer)
        if not stepped and not self.reads.optimizer_state:
            return
        for g, group in enumerate(optimizer.param_groups):
            for i, param in enumerate(group["params"]):
                if param in optimizer.state and self._state_matters(optimizer.state[param]):
                    step = ("state", f"{g}.{i}")
                    node.slots[step] = self._describe(optimizer.state[param], index, step)
        if self.reads.optimizer_state:
            step = ("attr", "state")
            node.slots[step] = self._describe(optimizer.state, index, step)

    def _state_matters(self, state: Any) -> bool:
        """Whether the step looks at a parameter's state: not at that of one which has no gradient."""
        tensors = [v for v in state.values() if isinstance(v, torch.Tensor)] if isinstance(state, dict) else []
        return self.reads.optimizer_state or not tensors or any(id(tensor) in self.inputs for tensor in tensors)

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


def build_guards(objects: ObjectMap, seen: Observed, before: tuple[Any, ...] | None = None) -> GuardSet:
    """The guards of a recorded step. `before`: the environment it started in."""
    return Builder(objects, seen, before).build()
