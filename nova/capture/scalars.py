"""Python numbers that may change between steps, as values of the graph.

    step(x, beta):  loss * beta            aten.mul(%loss, %beta)       %beta: a 0-d float64 input
                    if beta > 0.5: ...     guard: (arg beta) > 0.5 is True
                    int(beta)              guard: (arg beta) == 0.7

A `TracedFloat` is a float (so it may go anywhere) whose arithmetic is also recorded, on 0-d float64 tensors.
Whatever asks for its Python value gets it, and leaves a guard. The scale of a gradient scaler is one too, but it
is a tensor's value: it may flow into arithmetic and outputs, and asking for it is an error.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nova.capture import bytecode
from nova.capture.signature import Source

if TYPE_CHECKING:
    from nova.capture.record import Recorder


@dataclass(frozen=True)
class ScalarGuard:
    """What the step's Python learned about a number: `source op other` is `result` ("value": it equals other)."""

    source: Source
    phase: int
    op: str  # lt le gt ge eq ne value
    other: float
    result: bool = True

    def holds(self, value: float) -> bool:
        if self.op == "value":
            return value == self.other or (math.isnan(value) and math.isnan(self.other))
        return bool(getattr(operator, self.op)(value, self.other)) == self.result


class Root:
    """Where a traced number comes from: a Python number with a source, or (`source` None) a tensor's value."""

    __slots__ = ("phase", "source", "value")

    def __init__(self, source: Source | None, phase: int, value: float):
        self.source, self.phase, self.value = source, phase, value


class TracedFloat(float):
    """A float whose arithmetic is recorded."""

    __slots__ = ("_recorder", "_tensor", "is_root", "roots")

    _recorder: Recorder
    _tensor: Tensor | Callable[[], Tensor]
    roots: tuple[Root, ...]
    is_root: bool

    def __new__(
        cls, value: float, recorder: Recorder, tensor: Tensor | Callable[[], Tensor], roots: tuple[Root, ...],
        is_root: bool = False,
    ):  # fmt: skip
        self = float.__new__(cls, value)
        self._recorder, self._tensor, self.roots, self.is_root = recorder, tensor, roots, is_root
        return self

    @property
    def tensor(self) -> Tensor:
        """A 0-d float64 tensor with this value, known to the recorder."""
        if not isinstance(self._tensor, Tensor):
            self._tensor = self._tensor()
        return self._tensor

    @property
    def plain(self) -> float:
        return float.__float__(self)

    def concrete(self) -> float:
        """The Python value, guarded from now on."""
        if self._recorder.active:
            for root in self.roots:
                self._recorder.concretise(root, "value", root.value, True)
        return float.__float__(self)

    def _compare(self, op: str, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        plain = float.__float__(other) if isinstance(other, TracedFloat) else other
        result = bool(getattr(operator, op)(float.__float__(self), plain))
        if self._recorder.active:
            if self.is_root and not isinstance(other, TracedFloat):
                self._recorder.concretise(self.roots[0], op, float(plain), result)
            else:
                self.concrete()
                if isinstance(other, TracedFloat):
                    other.concrete()
        return result

    def __lt__(self, other):
        return self._compare("lt", other)

    def __le__(self, other):
        return self._compare("le", other)

    def __gt__(self, other):
        return self._compare("gt", other)

    def __ge__(self, other):
        return self._compare("ge", other)

    def __eq__(self, other):
        return self._compare("eq", other)

    def __ne__(self, other):
        return self._compare("ne", other)

    def __bool__(self):
        return self._compare("ne", 0.0)

    def __hash__(self):
        return hash(self.concrete())

    def __float__(self):
        return self.concrete()

    def __reduce__(self):
        return float, (self.concrete(),)

    def __deepcopy__(self, memo):
        return self

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        return getattr(ufunc, method)(*(x.concrete() if isinstance(x, TracedFloat) else x for x in inputs), **kwargs)


def _concretising(name: str) -> Callable[..., Any]:
    def method(self, *args):
        return getattr(float, name)(self.concrete(), *args)

    return method


for _name in (
    "__int__", "__trunc__", "__floor__", "__ceil__", "__round__", "__repr__", "__str__", "__format__", "__divmod__",
    "__rdivmod__", "is_integer", "as_integer_ratio", "hex", "__getnewargs__",
):  # fmt: skip
    if hasattr(float, _name):
        setattr(TracedFloat, _name, _concretising(_name))


def _tensor_of(value: Any) -> Any:
    return value.tensor if isinstance(value, TracedFloat) else value


def traced(recorder: Recorder, value: float, compute: Callable[[], Tensor], *operands: Any) -> float:
    """The traced result of an operation whose value is `value`."""
    roots: dict[int, Root] = {}
    for operand in operands:
        if isinstance(operand, TracedFloat):
            roots |= {id(root): root for root in operand.roots}
    return TracedFloat(value, recorder, compute, tuple(roots.values()))


def _binary(name: str, function: Callable[[Any, Any], Any], reflected: bool) -> Callable[..., Any]:
    def method(self, other, *modulo):
        if not isinstance(other, (int, float)) or modulo:
            return NotImplemented
        plain = float.__float__(other) if isinstance(other, TracedFloat) else other
        value = getattr(float, name)(float.__float__(self), plain)
        if not self._recorder.active or not isinstance(value, float):
            return value if isinstance(value, float) else getattr(float, name)(self.concrete(), plain)
        a, b = (other, self) if reflected else (self, other)
        return traced(
            self._recorder, value, lambda: self._recorder.scalar(function, _tensor_of(a), _tensor_of(b)), self, other
        )

    return method


for _name, _function in {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv, "pow": operator.pow,
    "floordiv": operator.floordiv, "mod": operator.mod,
}.items():  # fmt: skip
    setattr(TracedFloat, f"__{_name}__", _binary(f"__{_name}__", _function, False))
    setattr(TracedFloat, f"__r{_name}__", _binary(f"__r{_name}__", _function, True))


def _unary(name: str, function: Callable[[Any], Any]) -> Callable[..., Any]:
    def method(self):
        value = getattr(float, name)(float.__float__(self))
        if not self._recorder.active:
            return value
        return traced(self._recorder, value, lambda: self._recorder.scalar(function, self.tensor), self)

    return method


TracedFloat.__neg__ = _unary("__neg__", torch.neg)  # type: ignore[method-assign]
TracedFloat.__abs__ = _unary("__abs__", torch.abs)  # type: ignore[method-assign]
TracedFloat.__pos__ = lambda self: self  # type: ignore[method-assign]

_TRACED_MATH = {
    "sqrt": torch.sqrt, "exp": torch.exp, "log": torch.log, "sin": torch.sin, "cos": torch.cos, "tanh": torch.tanh,
    "log2": torch.log2, "log10": torch.log10, "expm1": torch.expm1, "log1p": torch.log1p, "fabs": torch.abs,
}  # fmt: skip


def _concrete(value: Any) -> Any:
    if isinstance(value, TracedFloat):
        return value.concrete()
    return type(value)(map(_concrete, value)) if type(value) in (list, tuple) else value


# What reads a float without asking it: names of C functions, formats; arithmetic with complex numbers is one too.
_READERS = frozenset({"Decimal", "complex", "cmath", "struct", "pack", "pack_into", "dump", "dumps"})
_FORMAT = re.compile(r"%[-+ #0]*\d*(\.\d+)?[efgdisr]", re.IGNORECASE)


def may_read_unasked(code: CodeType) -> bool:
    """Whether code may learn the value of a traced number without the number noticing."""
    found = bytecode.names(code)
    named = found.attributes | {name for chain in (*found.globals, *found.cells) for name in chain}
    return bool(named & _READERS) or any(
        isinstance(c, complex) or (isinstance(c, str) and c != code.co_consts[0] and _FORMAT.search(c) is not None)
        for c in code.co_consts
    )


def math_replacement(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A `math` function that sees traced numbers: C code would read their value without asking."""
    function = _TRACED_MATH.get(name)

    def replacement(*args: Any) -> Any:
        if not any(isinstance(a, (TracedFloat, list, tuple)) for a in args):
            return original(*args)
        if function is not None and isinstance(args[0], TracedFloat) and args[0]._recorder.active:
            (x,) = args
            return traced(x._recorder, original(x.plain), lambda: x._recorder.scalar(function, x.tensor), x)
        return original(*map(_concrete, args))

    return replacement


MATH_FUNCTIONS = {name: value for name, value in vars(math).items() if callable(value) and not name.startswith("_")}
