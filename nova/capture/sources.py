"""Where everything the step can reach lives: from an object to the path that finds it again.

Before a step is recorded, the objects reachable from it are walked: arguments, the function's closure, defaults
and the globals its bytecode names, modules, optimizers, containers, objects. Each object keeps the shortest path
to it (a `Source`), so that a tensor the recording meets can be found again on the next call, when another
object may stand in its place.

    def step(x):                     x                     arg[0]
        loss = model(x)              model.fc.weight       global model ("module", "fc") ("param", "weight")
        opt.step()                   its first moment      global opt ("state", "0.0") ("item", "exp_avg")

Steps of a path (kind, key):
    attr a        obj.a                          param n     obj._parameters[n]
    item k        obj[k]                         buffer n    obj._buffers[n]
    value n       list(obj.values())[n]          module n    obj._modules[n]
    closure a     the closure variable a of f    state g.i   opt.state[opt.param_groups[g]["params"][i]]
    global a      f.__globals__[a]               static a    cls.__dict__[a]
    default i     f.__defaults__[i]              kwdefault a f.__kwdefaults__[a]
    class         type(obj)                      call a      obj.a()
    forward       type(obj).forward              plain       what an object of a class of numbers is worth
    hook n        the n-th hook on obj's gradient    items    obj itself, all of its entries
    inside n      what a wrapper stands for      element n   list(obj)[n], of a set
"""

from __future__ import annotations

import enum
import functools
import itertools
import sys
import sysconfig
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from nova.capture.bytecode import OWN_MODULE, names
from nova.capture.contents import CONTENTS
from nova.capture.signature import Source
from nova.capture.views import is_leaf
from nova.capture.wrappers import MISSING, WRAPPERS, holds_objects, inside, is_bound

T = TypeVar("T")
NODE_LIMIT = 100_000
Step = tuple[str, Any]

PLAIN = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis), type(NotImplemented), slice, range)
TORCH_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)

# dictionaries of an nn.Module that are followed through steps of their own
MODULE_TABLES = {"_parameters": "param", "_buffers": "buffer", "_modules": "module"}

CONTAINERS = frozenset({"dict", "list", "tuple", "set"})
LIBRARY_FIELDS: dict[type, tuple[str, ...]] = {
    defaultdict: ("default_factory",),
    deque: ("maxlen",),
}  # attributes that `__dict__` does not show

_TORCH_DIR = torch.__path__[0] + "/"
_NOVA_DIR = __file__.rsplit("/", 2)[0] + "/"
# what PyTorch itself is built on
_LIBRARIES = frozenset({
    "numpy", "typing_extensions", "sympy", "mpmath", "networkx", "filelock", "fsspec", "jinja2", "markupsafe", "optree",
    "_distutils_hack", "setuptools", "pkg_resources", "triton", "functorch", "torchgen", "llvmlite", "numba_cuda_mlir",
    "rich", "typer",
})  # fmt: skip
_STDLIB_DIRS = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})


@functools.cache
def is_user_file(filename: str) -> bool:
    """Whether code of this file is the user's: not PyTorch's, Nova's or the standard library's."""
    if filename.startswith((_TORCH_DIR, _NOVA_DIR)) or filename.startswith("<frozen "):
        return False
    if "/site-packages/" in filename:
        package = filename.partition("/site-packages/")[2].partition("/")[0].removesuffix(".py")
        return package not in _LIBRARIES
    return not filename.startswith(_STDLIB_DIRS)


def is_of_torch(filename: str) -> bool:
    return filename.startswith(_TORCH_DIR)


def is_user_code(code: types.CodeType, table: dict[str, Any]) -> bool:
    """Whether code is the user's; code without a file (`exec`, dataclass methods) belongs to its globals' module."""
    filename = code.co_filename
    if filename == "<string>" and "__file__" in table:
        filename = str(table["__file__"])
    return is_user_file(filename)


def imported(code: types.CodeType, table: dict[str, Any]) -> list[str]:
    """The user's modules that code with these globals imports when it runs."""
    found: dict[str, None] = dict.fromkeys(sys.modules) if "modules" in names(code).open else {}
    for level, name in names(code).imports:
        full = str(table.get("__name__")) if name == OWN_MODULE else name
        if level:
            parts = str(table.get("__package__") or "").split(".")
            full = ".".join([*parts[: len(parts) - level + 1], *([name] if name else [])])
        pieces = full.split(".")
        found.update(dict.fromkeys(".".join(pieces[: n + 1]) for n in range(len(pieces))))
    files = ((n, getattr(sys.modules.get(n), "__file__", None)) for n in found)
    return [n for n, file in files if file is not None and is_user_file(file)]


def globals_read(code: types.CodeType, table: dict[str, Any]) -> list[str]:
    """Names that code reads of its globals; all of them where it computes one (`globals()[name]`)."""
    found = names(code)
    chosen = {chain[0]: None for chain in found.globals}
    if "globals" in found.open:
        chosen.update((name, None) for name in table if not name.startswith("__"))
    return list(chosen)


def is_user_function(obj: Any) -> bool:
    return isinstance(obj, types.FunctionType) and is_user_code(obj.__code__, obj.__globals__)


def once_a_class(function: Callable[[Any], T]) -> Callable[[Any], T]:
    return functools.cache(function)


@once_a_class
def is_user_class(cls: Any) -> bool:
    """Whether a class is defined in the user's code (its methods run when a step is captured)."""
    module = sys.modules.get(cls.__module__)
    filename = getattr(module, "__file__", None)
    if filename is not None:
        return is_user_file(filename)
    if cls.__module__ in ("builtins", "torch") or cls.__module__ in sys.builtin_module_names:
        return False
    return (
        any(is_user_function(value) for value in vars(cls).values()) or module is None or module.__name__ == "__main__"
    )


def kind_of(obj: Any) -> str:
    """The kind of a reachable object; everything else in this package dispatches on it."""
    cls = type(obj)
    known = _KINDS.get(cls)
    if known is not None:
        return "builtin" if known == "wrapper" and cls is types.BuiltinFunctionType and not is_bound(obj) else known
    if isinstance(obj, torch.Tensor):
        return "tensor"
    if isinstance(obj, (*PLAIN, *TORCH_VALUES, enum.Enum)):
        return "object" if is_user_class(cls) else "plain"
    if isinstance(obj, torch.nn.Module):
        return "module"
    if isinstance(obj, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(obj, type):
        return "class"
    if isinstance(obj, CONTENTS):
        return "wrapper" if holds_objects(obj) else "content"
    for base, kind in _BASES:
        if isinstance(obj, base):
            return kind
    if own_dict(obj) is not None or slot_names(cls):
        return "object"
    return "opaque"


_KINDS: dict[type, str] = {
    **dict.fromkeys(PLAIN, "plain"),
    **dict.fromkeys(TORCH_VALUES, "plain"),
    torch.Tensor: "tensor",
    torch.nn.Parameter: "tensor",
    dict: "dict",
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "set",
    types.FunctionType: "function",
    types.MethodType: "method",
    **dict.fromkeys(WRAPPERS, "wrapper"),
    types.MethodDescriptorType: "builtin",
    types.WrapperDescriptorType: "builtin",
    types.CodeType: "opaque",
    torch._ops.OpOverload: "opaque",  # PyTorch's operators fill in attributes as they are used
    torch._ops.OpOverloadPacket: "opaque",
    types.ModuleType: "pymodule",
    functools.partial: "partial",
    type: "class",
    weakref.ref: "weakref",
}
_BASES: tuple[tuple[Any, str], ...] = (
    (dict, "dict"),
    (list, "list"),
    (tuple, "tuple"),
    (deque, "list"),
    ((set, frozenset), "set"),
    (types.FunctionType, "function"),
    (types.MethodType, "method"),
    (functools.partial, "partial"),
    (types.ModuleType, "pymodule"),
    (weakref.ref, "weakref"),
)


_PLAIN_VALUE: dict[type, Callable[[Any], Any]] = {
    int: int.__int__, float: float.__float__, complex: complex.__pos__, str: str.__str__, bytes: bytes.__bytes__,
}  # fmt: skip


def plain_value(obj: Any) -> Any:
    """What an object is worth whose class derives from a number or from text; the object itself, if none does."""
    return next((value(obj) for base, value in _PLAIN_VALUE.items() if isinstance(obj, base)), obj)


def is_plain(obj: Any) -> bool:
    """A value compared by value: numbers, strings, None, enums, PyTorch's small types, tuples of these."""
    kind = kind_of(obj)
    return kind == "plain" or (kind == "tuple" and all(map(is_plain, obj)))


def own_dict(obj: Any) -> dict[str, Any] | None:
    """An object's `__dict__`; None where it has none, or where a `__getattr__` makes something else up."""
    table = getattr(obj, "__dict__", None)
    return table if isinstance(table, dict) else None


@once_a_class
def slot_names(cls: Any) -> tuple[str, ...]:
    """Names of `__slots__` of user classes."""
    found: list[str] = []
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        mine = [slots] if isinstance(slots, str) else list(slots)
        private = f"_{base.__name__.lstrip('_')}"
        found += [private + name if name.startswith("__") and not name.endswith("__") else name for name in mine]
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def closure_items(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """(name, value) of the function's closure variables that are set."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name == "dispatch_cache" and function.__globals__.get("__name__") == "functools":
            continue  # what `singledispatch` found before: it follows from its registry
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # not assigned yet


def _tensor_children(obj: torch.Tensor) -> Iterator[tuple[Step, Any]]:
    if (is_leaf(obj) or obj.retains_grad) and obj.grad is not None:
        yield ("attr", "grad"), obj.grad
    for name, value in (own_dict(obj) or {}).items():
        yield ("attr", name), value
    if is_leaf(obj):
        for position, hook in enumerate(tensor_hooks(obj)):
            yield ("hook", position), hook
    if is_user_class(type(obj)):
        yield ("class", ""), type(obj)


def tensor_hooks(tensor: torch.Tensor) -> list[Any]:
    """What runs on the gradient of a leaf."""
    tables = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    return [hook for table in tables for hook in (table or {}).values()]


def _dict_children(obj: dict[Any, Any]) -> Iterator[tuple[Step, Any]]:
    for position, (key, value) in enumerate(obj.items()):
        yield (("item", key) if type(key) in (str, int) else ("value", position)), value
        if not is_plain(key) and not isinstance(key, torch.Tensor):
            yield ("key", position), key


def _sequence_children(obj: Sequence[Any]) -> Iterator[tuple[Step, Any]]:
    for position, value in enumerate(obj):
        yield ("item", position), value


def _set_children(obj: Any) -> Iterator[tuple[Step, Any]]:
    for position, value in enumerate(obj):
        if not is_plain(value):
            yield ("element", position), value


def _wrapper_children(obj: Any) -> Iterator[tuple[Step, Any]]:
    for position, value in enumerate(inside(obj)):
        if value is not MISSING:
            yield ("inside", position), value


def _own_children(obj: Any) -> Iterator[tuple[Step, Any]]:
    """Attributes and class of a container whose class is the user's, or that has attributes besides its entries."""
    for name in LIBRARY_FIELDS.get(type(obj), ()):
        yield ("attr", name), getattr(obj, name)
    if not is_user_class(type(obj)):
        return
    for name, value in list((own_dict(obj) or {}).items()):
        yield ("attr", name), value
    yield ("class", ""), type(obj)


def declared_state(obj: Any) -> tuple[str, ...] | None:
    """The attributes on which a step that reaches this object may depend, where its class says: those of a compiled
    step, whose captures come and go. None: any."""
    return vars(type(obj)).get("_nova_state")


def _attribute_children(obj: Any) -> Iterator[tuple[Step, Any]]:
    own = declared_state(obj)
    if own is not None:
        for name in own:
            yield ("attr", name), getattr(obj, name)
        return
    for name, value in list((own_dict(obj) or {}).items()):
        yield ("attr", name), value
    for name in slot_names(type(obj)):
        try:
            yield ("attr", name), getattr(obj, name)
        except AttributeError:
            continue
    if is_user_class(type(obj)):
        yield ("class", ""), type(obj)


def _module_children(obj: torch.nn.Module) -> Iterator[tuple[Step, Any]]:
    for table, kind in MODULE_TABLES.items():
        for name, value in getattr(obj, table).items():
            yield (kind, name), value
    for name, value in list(obj.__dict__.items()):
        if name not in MODULE_TABLES:
            yield ("attr", name), value
    if is_user_class(type(obj)):
        yield ("class", ""), type(obj)


def _optimizer_children(obj: torch.optim.Optimizer) -> Iterator[tuple[Step, Any]]:
    yield ("attr", "param_groups"), obj.param_groups
    for g, group in enumerate(obj.param_groups):
        for i, param in enumerate(group["params"]):
            if param in obj.state:
                yield ("state", f"{g}.{i}"), obj.state[param]
    yield ("attr", "state"), obj.state
    for name, value in list(obj.__dict__.items()):
        if name not in ("state", "param_groups"):
            yield ("attr", name), value
    if is_user_class(type(obj)):
        yield ("class", ""), type(obj)


def _function_children(obj: types.FunctionType) -> Iterator[tuple[Step, Any]]:
    for name, value in closure_items(obj):
        yield ("closure", name), value
    for position, value in enumerate(obj.__defaults__ or ()):
        yield ("default", position), value
    for name, value in (obj.__kwdefaults__ or {}).items():
        yield ("kwdefault", name), value
    if not is_user_function(obj):
        return
    for name in globals_read(obj.__code__, obj.__globals__):
        if name in obj.__globals__:
            yield ("global", name), obj.__globals__[name]
    for name, value in obj.__dict__.items():
        yield ("attr", name), value


_ENUM_CACHES = ("_value2member_map_",)  # `A | B` of a flag makes a member when it is first asked for


def _class_children(cls: type) -> Iterator[tuple[Step, Any]]:
    if not is_user_class(cls):
        return
    caches = _ENUM_CACHES if issubclass(cls, enum.Enum) else ()
    for name, value in list(vars(cls).items()):
        if name in caches:
            continue
        if isinstance(value, (staticmethod, classmethod)):
            yield ("staticfunc", name), value.__func__
        elif isinstance(value, property):
            if value.fget is not None:
                yield ("fget", name), value.fget
        elif not name.startswith("__") or is_user_function(value):
            yield ("static", name), value
    for position, base in enumerate(cls.__mro__[1:-1], 1):
        if is_user_class(base):
            yield ("mro", position), base
    if is_user_class(type(cls)):
        yield ("class", ""), type(cls)


def class_shape(cls: type) -> list[Any]:
    """The bases of a class and how many attributes it has: a special method that is added changes operators."""
    return [*(f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__), len(vars(cls))]


def class_attribute(cls: type, name: str) -> Any:
    """An attribute of a class as it stands there: no descriptor is asked."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def _fields(*fields: str) -> Callable[[Any], Iterator[tuple[Step, Any]]]:
    return lambda obj: ((("attr", name), getattr(obj, name)) for name in fields)


CHILDREN: dict[str, Callable[[Any], Iterator[tuple[Step, Any]]]] = {
    "tensor": _tensor_children,
    "dict": _dict_children,
    "list": _sequence_children,
    "tuple": _sequence_children,
    "module": _module_children,
    "optimizer": _optimizer_children,
    "object": _attribute_children,
    "function": _function_children,
    "class": _class_children,
    "method": _fields("__func__", "__self__"),
    "partial": _fields("func", "args", "keywords"),
    "set": _set_children,
    "wrapper": _wrapper_children,
    "weakref": lambda obj: iter([(("call", "__call__"), obj())]),
}

# objects that no step can depend on and that lead far away
_SKIPPED_MODULES = (
    "logging",
    "threading",
    "multiprocessing",
    "_thread",
    "importlib",
    "matplotlib",
    "rich",
    "tqdm",
)


def children(obj: Any) -> Iterator[tuple[Step, Any]]:
    """(step, value) of everything directly reachable from `obj`."""
    kind = kind_of(obj)
    if kind == "object" and type(obj).__module__.split(".")[0] in _SKIPPED_MODULES:
        return iter(())
    expand = CHILDREN.get(kind)
    if expand is None:
        return iter(())
    return itertools.chain(expand(obj), _own_children(obj)) if kind in CONTAINERS else expand(obj)


def follow(obj: Any, step: Step) -> Any:
    """One step of a path. Raises what Python raises when the path no longer exists."""
    kind, key = step
    match kind:
        case "attr":
            if key == "grad" and isinstance(obj, torch.Tensor) and not (obj.is_leaf or obj.retains_grad):
                return None  # which PyTorch says too, with a warning
            return getattr(obj, key)
        case "item":
            return obj[key]
        case "param":
            return obj._parameters[key]
        case "buffer":
            return obj._buffers[key]
        case "module":
            return obj._modules[key]
        case "state":
            group, index = key.split(".")
            param = obj.param_groups[int(group)]["params"][int(index)]
            if param not in obj.state:
                raise KeyError(key)  # a look into PyTorch's defaultdict would make an entry
            return obj.state[param]
        case "closure":
            return obj.__closure__[obj.__code__.co_freevars.index(key)].cell_contents
        case "global":
            return obj.__globals__[key]
        case "default":
            return obj.__defaults__[key]
        case "kwdefault":
            return obj.__kwdefaults__[key]
        case "value":
            return list(obj.values())[key]
        case "key":
            return list(obj)[key]
        case "class":
            return type(obj)
        case "static":
            return vars(obj)[key]
        case "staticfunc":
            return vars(obj)[key].__func__
        case "fget":
            return vars(obj)[key].fget
        case "mro":
            return obj.__mro__[key]
        case "call":
            return getattr(obj, key)()
        case "hook":
            return tensor_hooks(obj)[key]
        case "items":
            return obj
        case "inside":
            return inside(obj)[key]
        case "element":
            return list(obj)[key]
        case "plain":
            return plain_value(obj)
        case "forward":
            return type(obj).forward
    raise ValueError(f"unknown step {kind!r} of a source")


class Roots:
    """What a call gives a path to start from."""

    __slots__ = ("args", "consts", "function", "kwargs")

    def __init__(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], consts: Sequence[Any] = ()):
        self.function, self.args, self.kwargs, self.consts = function, args, kwargs, consts

    def root(self, root: str, key: str | int) -> Any:
        match root:
            case "arg":
                return self.args[key]  # type: ignore[index]
            case "kwarg":
                return self.kwargs[key]  # type: ignore[index]
            case "function":
                return self.function
            case "closure" | "global":
                return follow(self.function, (root, key))
            case "pymodule":
                return sys.modules[str(key)]
            case "const":
                return self.consts[int(key)]
        raise ValueError(f"unknown root {root!r} of a source")

    def slot(self, source: Source) -> tuple[Any, Step]:
        """The object that holds what a source names, and the last step to it."""
        if source.path:
            return self.resolve(Source(source.root, source.key, source.path[:-1])), source.path[-1]
        return (self.function if source.root in ("closure", "global") else self), (source.root, source.key)

    def resolve(self, source: Source) -> Any:
        """The object a source names now."""
        obj = self.root(source.root, source.key)
        for step in source.path:
            obj = follow(obj, step)
        return obj


def extend(source: Source, step: Step) -> Source:
    """The source one step further; closure variables and globals of the step function are roots of their own."""
    if source.root == "function" and not source.path and step[0] in ("closure", "global"):
        return Source(step[0], step[1])
    return Source(source.root, source.key, (*source.path, step))


class Reached:
    """An object that was reached, and how: `parent` is another Reached, or None for a root."""

    __slots__ = ("_source", "kind", "obj", "parent", "step")

    def __init__(self, obj: Any, kind: str, parent: Reached | None, step: Step, source: Source | None = None):
        self.obj, self.kind, self.parent, self.step, self._source = obj, kind, parent, step, source

    @property
    def source(self) -> Source:
        if self._source is None:
            assert self.parent is not None
            self._source = extend(self.parent.source, self.step)
        return self._source


class ObjectMap:
    """Objects reachable from a step, by identity, each with the shortest path to it.

    Holds strong references while it lives, so an id cannot be reused; drop it after the capture.
    """

    def __init__(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], limit: int = NODE_LIMIT):
        self.roots = Roots(function, args, kwargs)
        self.limit = limit
        self.truncated = False
        self.reached: dict[int, Reached] = {}
        self.functions: dict[types.CodeType, list[Reached]] = {}
        self._queue: deque[Reached] = deque()
        for index, value in enumerate(args):
            self._add(value, None, ("root", ""), Source("arg", index))
        for name, value in kwargs.items():
            self._add(value, None, ("root", ""), Source("kwarg", name))
        self._add(function, None, ("root", ""), Source("function", getattr(function, "__name__", "step")))
        self._run()

    def _add(self, obj: Any, parent: Reached | None, step: Step, source: Source | None = None) -> None:
        if id(obj) in self.reached:
            return
        kind = kind_of(obj)
        if kind == "plain" or (kind == "opaque" and parent is None):
            return
        if len(self.reached) >= self.limit:
            self.truncated = True
            return
        found = Reached(obj, kind, parent, step, source)
        self.reached[id(obj)] = found
        if kind == "function":
            self.functions.setdefault(obj.__code__, []).append(found)
        if kind not in ("opaque", "builtin"):
            self._queue.append(found)

    def _run(self) -> None:
        while self._queue:
            found = self._queue.popleft()
            if found.kind == "pymodule":
                continue
            for step, value in children(found.obj):
                self._add(value, found, step)
            if found.kind == "function":
                self._follow_chains(found)
                self._follow_imports(found)

    def _follow_imports(self, found: Reached) -> None:
        """Modules that the function imports when it runs, and what it may read of them."""
        if not is_user_function(found.obj):
            return
        for name in imported(found.obj.__code__, found.obj.__globals__):
            module = sys.modules[name]
            self._add(module, None, ("root", ""), Source("pymodule", name))
            for attribute in sorted(names(found.obj.__code__).attributes & module.__dict__.keys()):
                self._add(module.__dict__[attribute], self.reached.get(id(module)), ("attr", attribute))

    def _follow_chains(self, found: Reached) -> None:
        """Attributes that the function reads from Python modules: `import config; config.model.width`."""
        if not is_user_function(found.obj):
            return
        chains = names(found.obj.__code__)
        cells = dict(closure_items(found.obj))
        for scope, base in ((chains.globals, found.obj.__globals__), (chains.cells, cells)):
            for chain in scope:
                value = base.get(chain[0])
                for name in chain[1:]:
                    if not isinstance(value, types.ModuleType) or id(value) not in self.reached:
                        break
                    parent = self.reached[id(value)]
                    if not is_user_file(getattr(value, "__file__", None) or "<user>"):
                        break
                    value = value.__dict__.get(name)
                    self._add(value, parent, ("attr", name))

    def add(self, obj: Any, source: Source) -> None:
        """Adds a root found while recording (and everything reachable from it)."""
        self._add(obj, None, ("root", ""), source)
        self._run()

    def release(self) -> None:
        """Lets go of everything: what only weak references are left to must not wait for a collection."""
        self.reached.clear()
        self.functions.clear()

    def get(self, obj: Any) -> Reached | None:
        found = self.reached.get(id(obj))
        return found if found is not None and found.obj is obj else None

    def source(self, obj: Any) -> Source | None:
        """The path to an object, or None if it is not reachable from the step."""
        found = self.get(obj)
        return found.source if found else None

    def of_kind(self, kind: str) -> Iterator[Reached]:
        return (found for found in self.reached.values() if found.kind == kind)

    @property
    def tensors(self) -> list[tuple[torch.Tensor, Source]]:
        return [(found.obj, found.source) for found in self.of_kind("tensor")]
