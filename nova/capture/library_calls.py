"""PyTorch's own Python on the path of a step: functions that someone may replace.

    nn.Linear.forward ran        torch.nn.functional: linear         names that its code reads of its globals
                                 torch.nn.modules.linear.Linear: forward
    loss.backward() ran          torch._tensor.Tensor: backward      where the code that ran is found
                                 torch.nn.Linear: __call__ missing   where it would be hidden

Each is a `Fact` about one entry of a module's or a class's dictionary. On a call the dictionaries are watched as
wholes (`fastpath.py`); the facts are looked at when one of them changed. In another process a fact says what kind of
thing was there: PyTorch is of the same version, so a function of the same code is the same function.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nova.capture import bytecode
from nova.capture.patching import original_of, replaced_so_far
from nova.capture.sources import closure_items, is_of_torch, is_plain
from nova.capture.wrappers import MISSING

# of the recording itself, of compilers and of profilers: what a step computes does not depend on them
_UNSEEN = (
    "torch._dynamo", "torch._inductor", "torch.fx", "torch.compiler", "torch._library", "torch.utils._py",
    "torch.profiler", "torch._C._profiler", "torch.autograd.profiler", "torch._ops", "torch.library", "torch.overrides",
    "torch.jit", "torch._jit_internal", "torch.multiprocessing",
)  # fmt: skip
_DEPTH = 4  # of decorators that a label looks through


@dataclass(frozen=True)
class Fact:
    """An entry of a library's dictionary. `holder`: a class of the module, "" for the module itself."""

    module: str
    holder: str
    name: str
    label: str  # what was there; "" nothing

    def __str__(self) -> str:
        return ".".join(part for part in (self.module, self.holder, self.name) if part)

    def table(self) -> Any:
        """The dictionary as it is now; None where it is gone."""
        found: Any = sys.modules.get(self.module)
        for part in self.holder.split(".") if self.holder else ():
            found = getattr(found, part, None)
        return None if found is None else dictionary(found)


@dataclass
class Library:
    """Facts, and what stands there while this process runs (known from the start, or once the labels agreed)."""

    facts: list[Fact] = field(default_factory=list)
    values: list[Any] | None = field(default=None, compare=False, repr=False)
    _entries: list[tuple[Any, str, Any]] | None = field(default=None, compare=False, repr=False)

    def difference(self) -> Fact | None:
        """The first fact that does not hold; where all do, what is there now is known from now on."""
        now = [_entry(fact.table(), fact.name) for fact in self.facts]
        for position, (fact, value) in enumerate(zip(self.facts, now, strict=True)):
            same = label(value) == fact.label if self.values is None else value is self.values[position]
            if not same:
                return fact
        self.values = now
        return None

    def holds(self) -> bool:
        """`difference`, quickly, once the values are known."""
        if self._entries is None:
            assert self.values is not None
            gets = [fact.table().get for fact in self.facts]
            self._entries = list(zip(gets, [fact.name for fact in self.facts], self.values, strict=True))
        for get, name, value in self._entries:
            if (now := get(name, MISSING)) is not value and original_of(now) is not value:
                return False
        return True

    def tables(self) -> list[dict[str, Any]]:
        """The dictionaries, each once."""
        found = {id(table): table for fact in self.facts if (table := fact.table()) is not None}
        return list(found.values())


def dictionary(holder: Any) -> Any:
    """The dictionary of a module or a class itself, whose changes Python counts."""
    table = vars(holder)
    if isinstance(table, types.MappingProxyType):
        referred = gc.get_referents(table)
        return referred[0] if len(referred) == 1 and type(referred[0]) is dict else table
    return table


def _entry(table: Any, name: str) -> Any:
    value = MISSING if table is None else table.get(name, MISSING)
    return original_of(value)


def label(value: Any, depth: int = 0) -> str:
    """What a value is, in words that another process finds too."""
    if value is MISSING:
        return ""
    if isinstance(value, (staticmethod, classmethod)):
        return f"{type(value).__name__} {label(value.__func__, depth)}"
    if isinstance(value, property):
        return f"property {label(value.fget, depth)} {label(value.fset, depth)}"
    if isinstance(value, types.FunctionType):
        text = f"function {bytecode.fingerprint(value.__code__)[:20]}"
        held = [held for _, held in closure_items(value)] if depth < _DEPTH else []
        return " ".join([text, *(label(held, depth + 1) for held in (*held, *(value.__defaults__ or ())))])
    if isinstance(value, (type, types.BuiltinFunctionType, types.MethodDescriptorType)):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    return repr(value) if is_plain(value) else f"{type(value).__module__}.{type(value).__qualname__}"


# ---- finding the facts


def library_facts(
    codes: dict[types.CodeType, dict[str, Any]], classes: Iterable[type], attributes: Iterable[str]
) -> Library:
    """Facts about PyTorch's code that ran (with its globals), the classes of what was used, and attributes that code
    names, which may be methods of tensors."""
    finder = _Finder(codes)
    for code, table in codes.items():
        finder.names_of(code, table)
        finder.home_of(code, table)
    for cls in dict.fromkeys([*classes, torch.nn.Parameter]):
        finder.methods_of(cls)
    named = {name for code in codes for name in _names(code)}.union(attributes)
    finder.named_of_tensors(named)
    for owner, name in replaced_so_far():
        finder.add(owner, name)
        for function in _functions(original_of(vars(owner).get(name))):  # which may have been kept from running
            finder.names_of(function.__code__, function.__globals__)
    return Library(list(finder.facts), list(finder.facts.values()))


class _Finder:
    def __init__(self, codes: dict[types.CodeType, dict[str, Any]]):
        originals = [vars(owner).get(name) for owner, name in replaced_so_far()]
        self.codes = {*codes, *(code for original in originals for code in _codes(original))}  # that ran, or may have
        self.facts: dict[Fact, Any] = {}
        self._ran: dict[type, list[str]] = {}

    def add(self, holder: Any, name: str) -> None:
        """The entry of a module or class of PyTorch's, if it can be named."""
        if isinstance(holder, types.ModuleType):
            module, inner = holder.__name__, ""
        else:
            module, inner = holder.__module__, holder.__qualname__
        if not _is_torchs(module) or module not in sys.modules:
            return
        fact = Fact(module, inner, name, "")
        table, value = fact.table(), original_of(vars(holder).get(name, MISSING))
        if table is None or table.get(name, MISSING) is not vars(holder).get(name, MISSING):
            return  # another class goes by that name
        self.facts.setdefault(Fact(module, inner, name, label(value)), value)

    def names_of(self, code: types.CodeType, table: dict[str, Any]) -> None:
        """What code may read of its globals, and of modules that these name."""
        module = sys.modules.get(str(table.get("__name__")))
        if module is None or vars(module) is not table:
            return
        names, pending, seen = _names(code), [module], {id(module)}
        while pending:
            holder = pending.pop()
            for name in names & vars(holder).keys():
                value = vars(holder)[name]
                if isinstance(value, types.ModuleType):
                    if id(value) not in seen and _is_torchs(value.__name__):
                        pending.append(value)
                    seen.add(id(value))
                if callable(value) or isinstance(value, types.ModuleType):
                    self.add(holder, name)

    def home_of(self, code: types.CodeType, table: dict[str, Any]) -> None:
        """Where code that ran is found."""
        *outer, name = code.co_qualname.split(".")
        holder: Any = sys.modules.get(str(table.get("__name__")))
        for part in outer:
            holder = getattr(holder, part, None)
        if isinstance(holder, type):
            self.methods_of(holder)
        elif isinstance(holder, types.ModuleType) and name in vars(holder):
            self.add(holder, name)

    def methods_of(self, cls: type) -> None:
        """Methods of a class that ran, where they are defined and where another would hide them."""
        if cls not in self._ran:
            bases = [base for base in cls.__mro__ if _is_torchs(base.__module__)]
            self._ran[cls] = [name for base in bases for name in vars(base) if self._runs(vars(base)[name])]
            for name in dict.fromkeys(self._ran[cls]):
                self._inherited(bases, name)

    def _inherited(self, bases: Iterable[type], name: str) -> None:
        for base in bases:
            self.add(base, name)
            if name in vars(base):
                return

    def _runs(self, value: Any) -> bool:
        codes = [*_codes(value)]
        return any(code in self.codes for code in codes) or _is_foreign(value, codes)

    def named_of_tensors(self, names: set[str]) -> None:
        """Methods and attributes of tensors by their names, operators by all of theirs: most are written in C."""
        bases = torch.Tensor.__mro__[:-1]
        for name in sorted({name for base in bases for name in vars(base)}):
            operator = (
                name[:2] == name[-2:] == "__" and name not in _NO_OPERATORS and callable(getattr(torch.Tensor, name))
            )
            if name in names or operator:
                self._inherited(bases, name)


_NO_OPERATORS = frozenset({"__init__", "__new__", "__repr__", "__reduce_ex__", "__setstate__", "__del__", "__class__"})


def _is_foreign(value: Any, codes: Sequence[types.CodeType]) -> bool:
    """Whether someone has put a callable of their own among PyTorch's methods."""
    own = isinstance(value, (type, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType))
    return callable(value) and not own and not any(is_of_torch(code.co_filename) for code in codes)


def _is_torchs(module: str | None) -> bool:
    return module is not None and f"{module}.".startswith("torch.") and not module.startswith(_UNSEEN)


def _names(code: types.CodeType) -> set[str]:
    """Names that code, and code within it, reads of globals or as attributes."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found


def _codes(value: Any) -> Iterator[types.CodeType]:
    """The code of a method, through decorators."""
    return (function.__code__ for function in _functions(value))


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """The functions that a method is, through decorators."""
    functions = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
    for function in functions:
        for _ in range(_DEPTH):
            if isinstance(function, types.FunctionType):
                yield function
            function = getattr(function, "__wrapped__", None)


def is_library_code(code: types.CodeType) -> bool:
    """Whether code is PyTorch's own, of the parts that a step may depend on."""
    name = code.co_filename
    return is_of_torch(name) and not any(f"/{module.replace('.', '/')}" in name for module in _UNSEEN)
