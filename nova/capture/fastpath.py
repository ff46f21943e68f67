"""The guard check that runs on every call: generated Python for what can move, native code for what stays.

`bind` takes a `GuardSet` and the objects it holds for now, and makes one Python function. For

    def step(x, lr): ...        # closure: model, opt

it is (shortened)

    def enter(args, kwargs):
        if is_grad_enabled() is not True: return None        process-wide state
        if len(args) != 2 or kwargs: return None
        live[0] = args[0]                                    tensors found anew on every call
        s0 = args[1]
        if type(s0) is not float: return None                a number that is a runtime input
        if K3.cell_contents is not K4: return None           the model is the same object ...
        if watch(): return repair()                          ... and 2,000 dicts, lists, objects, tensors beneath it are
        if live_check(live): return None                     shape, dtype, strides, requires_grad of `live`
        s1 = K7["lr"]
        return inputs, (s0, s1)

What hangs below a module, an optimizer or a large container is *watched*: compared as a whole in native code. When
something there changed, `repair` looks at the one object that did: an equal number, a parameter replaced by another
of the same shape, or a moved pointer is accepted and becomes the new normal; anything else fails the guard.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import is_not
from typing import Any

import torch

from nova.capture import native
from nova.capture.contents import Entries, same_content
from nova.capture.environment import fast_checks
from nova.capture.guards import MUTABLE, Descriptor, GuardSet, Node, count_references, follow_own, same_literal
from nova.capture.memory_checks import MemoryChecks
from nova.capture.signature import InputSpec, Signature, Source
from nova.capture.sources import MODULE_TABLES, Roots, Step, own_dict, plain_value, slot_names
from nova.capture.tensor_meta import gradient_hooks, hooks_check
from nova.capture.views import flat_span, is_leaf
from nova.capture.wrappers import MISSING, inside, label

_OPERATORS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "value": "=="}
_ENTRIES = ("item", "value", "key", "items", "element")  # of a container that is watched, or cannot change
INLINE = 64  # a container with more entries is watched, not unrolled into code
_CHANGE_CLASS = ("module", "optimizer", "object")  # kinds of objects whose `__class__` can be set
_LIBRARY = -1  # owns the dictionaries of PyTorch's modules and classes
_MISS = (KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError)


class Binding(MemoryChecks):
    """A guard set bound to live objects: `enter(args, kwargs)` is (tensor inputs, numbers) or None."""

    def __init__(
        self,
        guards: GuardSet,
        objs: list[Any],
        signature: Signature,
        constants: Sequence[Any] = (),
        use_native: bool = True,
    ):
        self.guards, self.objs, self.signature = guards, objs, signature
        self.constants = list(constants)
        self.use_native = use_native
        self.node_of = {id(obj): index for index, obj in enumerate(objs)}
        self.references = count_references(guards.nodes)
        self.dicts: list[dict[Any, Any]] = []
        self.dict_owner: list[int] = []
        self.lists: list[list[Any]] = []
        self.list_owner: list[int] = []
        self.of_class: list[Any] = []  # objects that stay of their class
        self.stable: list[int] = []  # tensor nodes that stay, in the order of `watch.tensors`
        self.live: list[int] = []  # tensor nodes found anew on every call
        self.aliases: list[tuple[str, int]] = []
        self._shared: set[int] = set()  # nodes that a watched object holds too, reached in another way
        self.variables: dict[int, str] = {0: ""}
        self.numbers: dict[tuple[int, Step], str] = {}
        self._resolved: dict[Source, str] = {}  # numbers that no slot holds
        self.lines: list[str] = []
        self.space: dict[str, Any] = {"same": same_literal}
        self._const_name: dict[int, str] = {}
        self._located: dict[Source, int | None] = {}
        self.weak: dict[int, Any] = {}  # nodes that are held by weak references
        self.on_death: Callable[[], None] = lambda: None
        self.effects: Any = None  # replay.Effects, made for this binding
        self._done: set[int] = set()
        self._fixed: set[int] = set()  # nodes whose object is the same on every call
        self._generate()

    # ---- code generation

    def _constant(self, value: Any) -> str:
        name = self._const_name.get(id(value))
        if name is None:
            name = f"K{len(self._const_name)}"
            self._const_name[id(value)] = name
            self.space[name] = value
        return name

    def _emit(self, line: str) -> None:
        self.lines.append(line)

    def _generate(self) -> None:
        nodes = self.guards.nodes
        on_gpu = any(node.meta is not None and node.meta.device.startswith("cuda") for node in nodes)
        self.lines += fast_checks(self.guards.environment, self.space, on_gpu)
        count, names = nodes[0].keys
        self._emit(f"if len(args) != {count} or len(kwargs) != {len(names)}: return None")
        for step, want in nodes[0].slots.items():
            kind, key = step
            if kind == "function":
                self._emit_constant_node(want[1])
            elif kind == "pymodule":
                self.space["modules"] = sys.modules
                self._slot(0, step, want, f"modules[{key!r}]")
            else:
                self._slot(0, step, want, f"{kind}s[{key!r}]")
        for text, index in self.aliases:
            self._emit(f"if {text} is not {self.variables[index]}: return None")
        for index in sorted(self._shared - self._fixed):
            self._emit(f"if {self.variables[index]} is not {self._constant(self.objs[index])}: return None")
        self._identities()
        self._watch()
        self._live_tensors()
        self._scalars()
        body = "\n".join(f"        {line}" for line in self.lines)
        self.text = f"def enter(args, kwargs):\n    try:\n{body}\n    except misses: return None\n"
        self.space["misses"] = _MISS
        exec(compile(self.text, "<nova guards>", "exec"), self.space)
        self.enter: Callable[..., Any] = self.space["enter"]

    def _identities(self) -> None:
        """Objects that come anew on every call are other ones than all others still: `a is b`, or `a in table`."""
        self._held_ids = {id(self.objs[index]) for index in self._fixed}
        anew = [self.variables[index] for index in self._done - self._fixed if self.guards.nodes[index].kind in MUTABLE]
        if anew:
            self.space["others"] = self._are_others
            self._emit(f"if not others({', '.join(anew)}): return None")

    def _are_others(self, *objs: Any) -> bool:
        ids = set(map(id, objs))
        return len(ids) == len(objs) and ids.isdisjoint(self._held_ids)

    def _slot(self, parent: int, step: Step, want: Descriptor, expression: str) -> None:
        """Code that checks one slot whose value is `expression`."""
        match want:
            case ("any",):
                return
            case ("lit", value):
                self._literal(expression, value)
            case ("num", name):
                variable = f"s{len(self.numbers)}"
                self.numbers[parent, step] = variable
                self._emit(f"{variable} = {expression}")
                kind = "not in (int, float)" if name == "number" else f"is not {name}"
                self._emit(f"if type({variable}) {kind}: return None")
            case ("node", index):
                node = self.guards.nodes[index]
                if (node.parent, node.step) == (parent, step):
                    self._node(index, expression)
                else:
                    self.aliases.append((expression, index))
            case ("empty",):
                self._emit(f"if {expression}: return None")
            case ("content", was):
                self.space["content"] = same_content
                self._emit(f"if not content({expression}, {self._constant(was)}): return None")
            case ("entries", was):
                self._emit(f"if not {self._constant(was)}.are({expression}): return None")
            case ("kept", was):
                self._emit(f"if not {self._constant(was)}.holds({expression}): return None")
            case ("same", value):
                self._emit(f"if {expression} is not {self._constant(value)}: return None")

    def _literal(self, expression: str, value: Any) -> None:
        if value is None or value is True or value is False:
            self._emit(f"if {expression} is not {value}: return None")
            return
        constant, variable = self._constant(value), "v"
        self._emit(f"{variable} = {expression}")
        self._emit(f"if {variable} is not {constant} and not same({constant}, {variable}): return None")

    def _node(self, index: int, expression: str) -> None:
        """Code that checks an object reached anew on every call."""
        node, obj = self.guards.nodes[index], self.objs[index]
        if not self._unrolls(index):
            self._emit(f"if {expression} is not {self._weakly(index, obj)}: return None")
            self._emit_constant_node(index)
            return
        if index in self._done:
            return
        self._done.add(index)
        if node.kind == "tensor":
            slot = len(self.live)
            self.live.append(index)
            self.variables[index] = f"live[{slot}]"
            self._emit(f"live[{slot}] = {expression}")
            meta = self.guards.nodes[index].meta
            if meta is not None and meta.requires_grad:
                self.space["gradient_hooks"] = gradient_hooks
                has = f"live[{slot}]._backward_hooks or live[{slot}]._post_accumulate_grad_hooks"
                differ = f"gradient_hooks(live[{slot}]) != {self._constant(meta.hooks)}"
                self._emit(f"if {differ if meta.hooks else has}: return None")
            elif meta is not None:  # a window has the history of its base, but only when somebody asks for it
                self._emit(f"if live[{slot}].requires_grad: return None")
            return self._tensor_children(index, f"live[{slot}]")
        variable = f"o{index}"
        self.variables[index] = variable
        self._emit(f"{variable} = {expression}")
        self._emit(f"if type({variable}) is not {self._constant(type(obj))}: return None")
        if node.kind in ("list", "tuple"):
            self._emit(f"if len({variable}) != {len(obj)}: return None")
        elif node.kind == "dict":  # in the same order
            self._emit(f"if [*{variable}] != {self._constant(node.keys)}: return None")
        elif node.kind == "wrapper":
            self._inside(index, variable)
        self._slots_of(index, variable)

    def _weakly(self, index: int, obj: Any) -> str:
        """A model or an optimizer is not kept alive by the guards on it: when it goes, so does the binding."""
        if self.guards.nodes[index].kind not in ("module", "optimizer"):
            return self._constant(obj)
        if index not in self.weak:
            self.weak[index] = weakref.ref(obj, self._dropped)
        return f"{self._constant(self.weak[index])}()"

    def _dropped(self, reference: Any) -> None:
        """A model is gone and no call can match any more: lets go of everything, without waiting for a collection."""
        if self.enter is _never:
            return
        self.enter = _never
        for held in (self.space, self.objs, self.inputs, self.live_tensors, self.weak, self.dicts, self.lists):
            held.clear()
        del self.watch
        self.on_death()

    @property
    def gone(self) -> bool:
        """Whether a model or an optimizer that its guards are about has been collected."""
        return self.enter is _never

    def _tensor_children(self, index: int, variable: str) -> None:
        meta = self.guards.nodes[index].meta
        if meta is not None and meta.requires_grad and meta.leaf:  # PyTorch warns where another one's `.grad` is read
            self.space["is_leaf"] = is_leaf
            self._emit(f"if not is_leaf({variable}): return None")
        for step, want in self.guards.nodes[index].slots.items():
            if step[0] in ("hook", "class"):  # the same, or `hooked` would have said so
                self._beneath(index, step, want)
            elif want[0] == "missing":
                self._emit(f"if {step[1]!r} in {variable}.__dict__: return None")
            else:
                self._slot(index, step, want, f"{variable}.{step[1]}")

    def _unrolls(self, index: int) -> bool:
        node, obj = self.guards.nodes[index], self.objs[index]
        if node.kind in ("list", "tuple"):
            return isinstance(node.keys, int) and node.keys <= INLINE
        if node.kind == "dict":
            return isinstance(node.keys, list) and len(node.keys) <= INLINE and all(type(k) in (str, int) for k in obj)
        return node.kind in ("tensor", "object", "method", "partial", "wrapper")

    def _slots_of(self, index: int, variable: str) -> None:
        """Reads the slots of an unrolled object."""
        node, obj = self.guards.nodes[index], self.objs[index]
        table = own_dict(obj) if node.kind not in ("method", "partial", "wrapper") else None
        listed = node.kind == "object" and node.keys is not None
        if table is not None and (listed or any(step[0] == "attr" for step in node.slots)):
            self._emit(f"d{index} = {variable}.__dict__")
        if listed:
            self._emit(f"if [*d{index}] != {self._constant(node.keys)}: return None")
        for step, want in node.slots.items():
            kind, key = step
            if kind in ("class", "key"):
                self._beneath(index, step, want)
                continue
            if kind == "attr" and table is not None and (key in table or want[0] == "missing"):
                expression = f"d{index}[{key!r}]"
            elif kind == "items":
                expression = variable
            elif kind == "plain":
                self.space["plain_value"], expression = plain_value, f"plain_value({variable})"
            elif kind == "inside":
                expression = f"i{index}[{key}]"
                if want[0] == "missing":
                    self._emit(f"if {expression} is not {self._constant(MISSING)}: return None")
                    continue
            elif kind == "attr":
                expression = f"{variable}.{key}"
            else:
                expression = f"{variable}[{key!r}]"
            if want[0] == "missing":
                slot = table is None or key in slot_names(type(obj))
                test = f"hasattr({variable}, {key!r})" if slot else f"{key!r} in d{index}"
                self._emit(f"if {test}: return None")
                continue
            self._slot(index, step, want, expression)

    def _emit_constant_node(self, index: int) -> None:
        """Code for an object known to be the same object: what is beneath it is watched or read from a constant."""
        if index in self._done:
            return
        self._done.add(index)
        self._fixed.add(index)
        node, obj = self.guards.nodes[index], self.objs[index]
        self.variables[index] = f"{self._constant(self.weak[index])}()" if index in self.weak else self._constant(obj)
        if node.kind in _CHANGE_CLASS and ("class", "") not in node.slots:
            self._class_of(index, obj)
        getattr(self, f"_constant_{node.kind}", self._constant_other)(index, node, obj)

    def _class_of(self, index: int, obj: Any) -> None:
        if index in self.weak:
            self._emit(f"if type({self.variables[index]}) is not {self._constant(type(obj))}: return None")
        else:
            self.of_class.append(obj)

    def _constant_other(self, index: int, node: Node, obj: Any) -> None:
        for step, want in node.slots.items():
            self._beneath(index, step, want)

    def _beneath(self, parent: int, step: Step, want: Descriptor) -> None:
        """A slot of a watched object: the value is guaranteed, what lies beneath it is not."""
        if step[0] == "class" and want[0] == "node":
            self._emit(f"if type({self.variables[parent]}) is not {self._constant(self.objs[want[1]])}: return None")
        if want[0] == "node":
            node = self.guards.nodes[want[1]]
            if (node.parent, node.step) == (parent, step):
                self._emit_constant_node(want[1])
            else:
                self._shared.add(want[1])
        elif (want[0] in ("content", "kept") and step[0] != "items") or (want[0] == "same" and step[0] not in _ENTRIES):
            self.space["follow_own"] = follow_own
            self._slot(parent, step, want, f"follow_own({self.variables[parent]}, {self._constant(step)})")

    def _constant_tensor(self, index: int, node: Node, obj: torch.Tensor) -> None:
        # Repair may replace a stable tensor, so code reads it from the watch's own list.
        name = self.variables[index] = f"stable[{len(self.stable)}]"
        self.stable.append(index)
        self._tensor_children(index, name)

    def _constant_module(self, index: int, node: Node, module: torch.nn.Module) -> None:
        self._watch_dict(module.__dict__, index)
        for table in MODULE_TABLES:
            self._watch_dict(getattr(module, table), index)
        for step, want in node.slots.items():
            if want[0] == "empty":
                self._watch_dict(module.__dict__[step[1]], index)
            if step[0] == "forward":
                self._slot(index, step, want, f"{self._constant(type(module))}.forward")
            else:
                self._beneath(index, step, want)

    def _constant_dict(self, index: int, node: Node, table: dict[Any, Any]) -> None:
        if isinstance(node.keys, int):
            self._emit(f"if len({self._constant(table)}) != {node.keys}: return None")
        if isinstance(table, OrderedDict) and len(table) > 1:  # its order is not that of the dictionary that it is
            self._emit(f"if [*{self._constant(table)}] != {self._constant([*table])}: return None")
        self._watch_dict(table, index)
        for step, want in node.slots.items():
            if step[0] != "attr":
                self._beneath(index, step, want)
        self._own_slots(index)

    def _own_slots(self, index: int) -> None:
        """Attributes of a container, which no watch compares."""
        variable = self.variables[index]
        for step, want in self.guards.nodes[index].slots.items():
            if step[0] == "attr" and want[0] == "missing":
                self._emit(f"if {step[1]!r} in {variable}.__dict__: return None")
            elif step[0] == "attr":
                self._slot(index, step, want, f"{variable}.{step[1]}")

    def _constant_group(self, index: int, node: Node, table: dict[Any, Any]) -> None:
        """A parameter group of an optimizer: its numbers change, so it is read entry by entry."""
        name = self._constant(table)
        self._emit(f"if len({name}) != {len(table)}: return None")
        for step, want in node.slots.items():
            if want[0] == "node" and self.guards.nodes[want[1]].kind != "tuple":
                self._emit(f"if {name}[{step[1]!r}] is not {self._constant(self.objs[want[1]])}: return None")
                self._beneath(index, step, want)
            else:
                self._slot(index, step, want, f"{name}[{step[1]!r}]")

    def _constant_list(self, index: int, node: Node, items: Any) -> None:
        if type(items) is list and node.slots and not any(want[0] == "num" for want in node.slots.values()):
            self.lists.append(items)
            self.list_owner.append(index)
            self._constant_other(index, node, items)
            return
        name = self._constant(items)
        self._emit(f"if len({name}) != {node.keys}: return None")
        if len(items) <= INLINE or any(want[0] == "num" for want in node.slots.values()):
            return self._slots_of(index, name)
        self._emit(f"if not {self._constant(Entries(items))}.are({name}): return None")
        for step, want in node.slots.items():
            if step[0] != "attr":
                self._beneath(index, step, want)
        self._own_slots(index)

    def _constant_tuple(self, index: int, node: Node, items: Any) -> None:
        for step, want in node.slots.items():
            if want[0] == "num":
                self._slot(index, step, want, f"{self._constant(items)}[{step[1]!r}]")
            if step[0] != "attr":
                self._beneath(index, step, want)
        self._own_slots(index)

    def _constant_set(self, index: int, node: Node, items: Any) -> None:
        name, listed = self._constant(items), [*items]
        if isinstance(node.keys, Entries):
            self._emit(f"if not {self._constant(node.keys)}.are({name}): return None")
        else:  # equal elements may be others
            self.space["is_not"], known = is_not, self._constant(listed)
            self._emit(f"if len({name}) != {len(listed)} or any(map(is_not, {name}, {known})): return None")
        for step, want in node.slots.items():
            if step[0] == "element" and want[0] == "content":
                self._slot(index, step, want, self._constant(listed[step[1]]))
            elif step[0] != "attr":
                self._beneath(index, step, want)
        self._own_slots(index)

    def _constant_object(self, index: int, node: Node, obj: Any) -> None:
        table = own_dict(obj)
        crowded = len(self.guards.nodes[node.parent].slots) > INLINE
        if not crowded or type(table) is not dict or slot_names(type(obj)) or index in self.weak:
            return self._slots_of(index, self.variables[index])
        self._watch_dict(table, index)  # one of many: reading each from Python would take long
        self.of_class.append(obj)
        for step, want in node.slots.items():
            if step[0] != "class":
                self._beneath(index, step, want)
            elif want[0] == "node":
                self._emit_constant_node(want[1])

    def _constant_method(self, index: int, node: Node, obj: Any) -> None:
        self._slots_of(index, self._constant(obj))

    def _constant_weakref(self, index: int, node: Node, reference: Any) -> None:
        """The guards do not keep alive what a weak reference refers to: the step may ask whether it still lives."""
        for step, want in node.slots.items():
            found = self.guards.nodes[want[1]] if want[0] == "node" else None
            if found is not None and found.kind == "object" and (found.parent, found.step) == (index, step):
                self.weak.setdefault(want[1], weakref.ref(self.objs[want[1]], self._dropped))
            self._beneath(index, step, want)

    _constant_partial = _constant_method

    def _inside(self, index: int, variable: str) -> None:
        """What a wrapper stands for: as many objects as before, of the same label."""
        node = self.guards.nodes[index]
        self.space.update(inside=inside, label=label)
        self._emit(f"i{index} = inside({variable})")
        self._emit(f"if len(i{index}) != {node.keys}: return None")
        if node.code:
            self._emit(f"if label({variable}) != {node.code!r}: return None")

    def _constant_wrapper(self, index: int, node: Node, obj: Any) -> None:
        self._inside(index, self._constant(obj))
        self._slots_of(index, self._constant(obj))

    def _constant_optimizer(self, index: int, node: Node, optimizer: torch.optim.Optimizer) -> None:
        self._watch_dict(optimizer.__dict__, index)
        if any(step[0] == "state" for step in node.slots):
            self._watch_dict(optimizer.state, index)
        for step, want in node.slots.items():
            if want[0] == "empty":
                self._watch_dict(getattr(optimizer, step[1]), index)
            self._beneath(index, step, want)

    def _constant_function(self, index: int, node: Node, function: types.FunctionType) -> None:
        name = self._constant(function)
        code, defaults = self._constant(function.__code__), self._constant(function.__defaults__)
        self._emit(f"if {name}.__code__ is not {code} or {name}.__defaults__ is not {defaults}: return None")
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for step, want in node.slots.items():
            kind, key = step
            match kind:
                case "closure":
                    cell = self._constant(cells[key])
                    if want[0] == "missing":
                        self.space["inside"] = inside
                        self._emit(f"if inside({cell})[0] is not {self._constant(MISSING)}: return None")
                    else:
                        self._slot(index, step, want, f"{cell}.cell_contents")
                case "global":
                    table = self._constant(function.__globals__)
                    if want[0] == "missing":
                        self._emit(f"if {key!r} in {table}: return None")
                    else:
                        self._slot(index, step, want, f"{table}[{key!r}]")
                case "default":
                    self._slot(index, step, want, f"{defaults}[{key}]")
                case "kwdefault":
                    self._slot(index, step, want, f"{name}.__kwdefaults__[{key!r}]")
                case "attr" if key.startswith("__"):
                    self._slot(index, step, want, f"{name}.{key}")
                case "attr":
                    self._slot(index, step, want, f"{name}.__dict__[{key!r}]")
                case _:
                    self._beneath(index, step, want)

    def _constant_class(self, index: int, node: Node, cls: type) -> None:
        if node.keys is not None:
            name, bases, size = self._constant(cls), self._constant(cls.__mro__), len(vars(cls))
            self._emit(f"if {name}.__mro__ is not {bases} or len({name}.__dict__) != {size}: return None")
        for step, want in node.slots.items():
            kind, key = step
            if kind in ("static", "staticfunc", "fget"):
                if want == ("missing",):
                    self._emit(f"if {key!r} in {self._constant(cls)}.__dict__: return None")
                    continue
                suffix = {"static": "", "staticfunc": ".__func__", "fget": ".fget"}[kind]
                self._slot(index, step, want, f"{self._constant(cls)}.__dict__[{key!r}]{suffix}")
            else:
                self._beneath(index, step, want)

    def _constant_pymodule(self, index: int, node: Node, module: types.ModuleType) -> None:
        table = self._constant(module.__dict__)
        for step, want in node.slots.items():
            if want[0] == "missing":
                self._emit(f"if {step[1]!r} in {table}: return None")
            else:
                self._slot(index, step, want, f"{table}[{step[1]!r}]")

    def _watch_dict(self, table: Any, owner: int) -> None:
        if isinstance(table, dict):
            self.dicts.append(table)
            self.dict_owner.append(owner)

    # ---- the tail: watch, live tensors, inputs, numbers

    def _watch(self) -> None:
        nodes, library = self.guards.nodes, self.guards.library
        if self.use_native and native.dict_tags():
            self.dicts += library.tables()
            self.dict_owner += [_LIBRARY] * (len(self.dicts) - len(self.dict_owner))
        elif library.facts:  # to compare whole modules entry by entry would take long
            self.space["library"] = library.holds
            self._emit("if not library(): return None")
        tensors = [self.objs[index] for index in self.stable]
        grads = [nodes[index].meta.grad for index in self.stable]  # type: ignore[union-attr]
        self.watch = native.make_watch(self.dicts, self.lists, tensors, grads, self.of_class, self.use_native)
        self.space["stable"] = self.watch.tensors
        if isinstance(self.watch, native.NativeWatch) and self.watch.tables is None:
            self.space["watch"], self.space["state_address"] = self.watch.native, self.watch.address
            check = "watch(state_address)"
        else:
            self.space["watch"], check = self.watch.check, "watch()"
        self.space["repair"] = self.repair
        hooks = [nodes[index].meta.hooks for index in self.stable]  # type: ignore[union-attr]
        trained = [position for position, tensor in enumerate(tensors) if tensor.requires_grad]
        self._windows = [position for position, t in enumerate(tensors) if t._is_view() and not t.requires_grad]
        self.space["hooked"] = hooks_check(self.watch.tensors, [(k, hooks[k]) for k in trained], self._windows)
        self.lines.insert(0, "if hooked(): return None")
        # Must come first: code above reads `stable` only in expressions that follow this line.
        self.lines.insert(0, f"if {check} and not repair(): return None")

    def _live_tensors(self) -> None:
        nodes = self.guards.nodes
        self.live_tensors: list[Any] = [None] * len(self.live)
        self.space["live"] = self.live_tensors
        self.inputs: list[Any] = []
        self.input_nodes: list[int | None] = []
        self._flat: dict[int, InputSpec] = {}
        self._moving: list[tuple[int, str]] = []
        for spec in self.signature.inputs:
            if spec.role in ("scalar", "seed"):
                continue
            position = len(self.inputs)
            if spec.source.root == "const":
                self.inputs.append(self.constants[int(spec.source.key)])
                self.input_nodes.append(None)
                continue
            index = self._node_at(spec.source)
            self.input_nodes.append(index)
            self.inputs.append(self.objs[index])
            if spec.flat:
                self._flat[position] = spec
            if index in self.live:
                self._moving.append((position, self.variables[index]))
        if self.live:
            samples = [self.objs[index] for index in self.live]
            grads = [nodes[index].meta.grad for index in self.live]  # type: ignore[union-attr]
            check = native.LiveCheck(samples, grads, self.use_native)
            self.space["live_check"] = check.check
            self._emit("if live_check(live): return None")
        self._memory()
        self.space["inputs"] = self.inputs
        for position, name in self._moving:
            if position in self._flat:
                self.space["span"] = flat_span
                spec = self._flat[position]
                self._emit(f"inputs[{position}] = span({name}, {spec.type.shape[0]}, {spec.span_offset})")
            else:
                self._emit(f"inputs[{position}] = {name}")
        self._refresh_inputs()

    def _refresh_inputs(self) -> None:
        """Puts the stable tensors, as they are now, into the input list."""
        moving = {position for position, _ in self._moving}
        for position, index in enumerate(self.input_nodes):
            if index is None or position in moving:
                continue
            spec = self._flat.get(position)
            tensor = self.objs[index]
            self.inputs[position] = flat_span(tensor, spec.type.shape[0], spec.span_offset) if spec else tensor

    def _node_at(self, source: Source) -> int:
        found = self.locate(source)
        if found is None:
            raise KeyError(f"no guarded object at {source}")
        return found

    def locate(self, source: Source) -> int | None:
        """The node of the object at a source, or None. A source is one path to it and the node may know another."""
        if source not in self._located:
            try:
                obj = self.objs[0].resolve(source)
            except _MISS:
                obj = None
            index = self.node_of.get(id(obj))
            self._located[source] = index if index is not None and self.objs[index] is obj else None
        return self._located[source]

    def place(self, source: Source) -> int | None:
        """The place of an object in `objs`; None for what is found anew on every call, or is not guarded."""
        index = self.locate(source)
        return None if index is None or index not in self._fixed or index in self.weak else index

    def seal(self) -> None:
        """Lets go of everything that need not be held; `locate` works no more."""
        self.node_of = {id(obj): index for index, obj in enumerate(self.objs) if index in self._fixed}
        for index in range(len(self.objs)):
            if index not in self._fixed or index in self.weak:
                self.objs[index] = None
        self._located.clear()
        self.release()

    def _alive(self) -> list[Any]:
        """The objects of all fixed nodes."""
        objs = list(self.objs)
        for index, reference in self.weak.items():
            objs[index] = reference()
        return objs

    def _scalars(self) -> None:
        names: list[str] = []
        self.late: list[tuple[int, int, Source]] = []  # numbers read after host effects: position, phase, source
        for spec in self.signature.inputs:
            if spec.role != "scalar":
                continue
            variable = self._number(spec.source)
            if spec.phase:
                self.late.append((len(names), spec.phase, spec.source))
            names.append(variable)
        for fact in self.guards.facts:
            test = f"{self._number(fact.source)} {_OPERATORS[fact.op]} {self._constant(fact.other)}"
            if fact.other != fact.other:
                test = f"{self._constant(fact)}.holds({self._number(fact.source)})"
            self._emit(f"if {'not ' if fact.result else ''}({test}): return None")
        self._emit(f"return inputs, [{', '.join(names)}]")

    def _number(self, source: Source) -> str:
        """The variable that holds a runtime number."""
        name = None
        if source.root != "const":
            holder, step = self.objs[0].slot(source)
            name = self.numbers.get((self.node_of.get(id(holder), -1), step))
        if name is None:
            name = self._resolved.get(source)
        if name is None:
            name = self._resolved[source] = f"r{len(self._resolved)}"
            self.space["Roots"] = Roots
            roots = f"Roots({self._constant(self.objs[0].function)}, args, kwargs, {self._constant(self.constants)})"
            self._emit(f"{name} = {roots}.resolve({self._constant(source)})")
        return name

    def release(self) -> None:
        """Lets go of the last call's tensors."""
        for index in range(len(self.live_tensors)):
            self.live_tensors[index] = None
        for position, _ in self._moving:
            self.inputs[position] = None

    # ---- repair: something that is watched changed

    def repair(self) -> bool:
        """Looks at what changed; True if every fact still holds, with the new state taken for normal."""
        watch = self.watch
        for _ in range(len(watch.dicts) + len(watch.lists) + 2 * len(watch.tensors) + 1):
            code = watch.check()
            if code == native.UNCHANGED:
                return True
            index, kind = code >> 3, code & 7
            if kind == native.DICT:
                owner = self.dict_owner[index]
                if not (self.guards.library.holds() if owner == _LIBRARY else self._owner_holds(owner)):
                    return False
                watch.accept_dict(index)
            elif kind == native.LIST:
                if not self._owner_holds(self.list_owner[index]):
                    return False
                watch.accept_list(index)
            elif kind in (native.TENSOR, native.CLASS) or not self._moved():
                return False  # metadata, a class, or memory that is shared in another way
        return False

    def _owner_holds(self, owner: int) -> bool:
        """Whether the facts of one node hold; a tensor in it may be another of the same kind."""
        nodes = self.guards.nodes
        replaced: dict[int, torch.Tensor] = {}
        trial = self._alive()
        for step, want in nodes[owner].slots.items():
            if want[0] != "node" or nodes[want[1]].kind != "tensor":
                continue
            try:
                value = follow_own(trial[owner], step)
            except _MISS:
                return False
            if value is not trial[want[1]]:
                if step[0] == "key":
                    return False  # looking for the old one no longer finds it
                single = self.references[want[1]] == 1 and not nodes[want[1]].slots
                if not single or not isinstance(value, torch.Tensor) or id(value) in self.node_of:
                    return False
                replaced[want[1]] = trial[want[1]] = value
        if self.guards.check_node(owner, trial[owner], trial) is not None:
            return False
        for index, tensor in replaced.items():
            meta = nodes[index].meta
            if type(tensor) is not type(self.objs[index]) or meta is None or meta.difference(tensor):
                return False
        for index, tensor in replaced.items():
            del self.node_of[id(self.objs[index])]
            self._held_ids ^= {id(self.objs[index]), id(tensor)}
            self.objs[index] = tensor
            self.node_of[id(tensor)] = index
            position = self.stable.index(index)
            self.watch.tensors[position] = tensor
            self.watch.accept_tensor(position)
            if tensor._is_view() and not tensor.requires_grad and position not in self._windows:
                self._windows.append(position)
        return not replaced or self._moved()

    def _moved(self) -> bool:
        """Data pointers moved: fine if memory is shared exactly as before."""
        if not self._memory_as_before():
            return False
        self.watch.accept_pointers()
        self._refresh_inputs()
        return True


def _never(args: Any, kwargs: Any) -> None:
    return None
